"""DFlash as a drafter: what the target's hidden states of a text say is kept as keys and values, and a block behind it
guesses several tokens in one step.

The places of a block are guessed at once, so that a place's candidates have the same probabilities whatever was chosen
before them, or with version 2 probabilities by what stands right before them. Of such a product of distributions the
most probable tree is made by the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from offload_runtime_kernels.attention import QueryRows

from offload_runtime.core import DraftBudget, TokenTree
from offload_runtime.models.dflash import DFlashConfig
from offload_runtime.models.layers import Rows
from offload_runtime.params import SamplingParams
from offload_runtime.runners.graphs import CHILDREN, StepGraphs, graph_reach, warm_up_lengths
from offload_runtime.runners.head_decoder import HeadDecoder
from offload_runtime.runners.head_kv import BlockKVState
from offload_runtime.runners.model_runner import ModelRunner, window_residual
from offload_runtime.sampling import SlotSampling, perturbed_logits
from offload_runtime.speculation.draft import ChildProbabilities, Children
from offload_runtime.speculation.ngram import LEAST_CHANCE, NgramDrafter
from offload_runtime.speculation.step import Budgets, Drafter, Texts, chains_where
from offload_runtime.speculation.tree import NEGLIGIBLE

# What the host says of each sequence of a step: its last token, the tokens whose context is kept, how many of these
# wait to be written, its slot, and the text's tokens before all of them.
_WORDS = 5


class _Node(NamedTuple):
    """Is a node of a tree, whose root is the first. `chance` is its log-probability, `guess` which of n-grams' nodes it
    is, if it is one."""

    token: int
    parent: int
    source: str
    depth: int
    chance: float
    guess: int | None


class Block:
    """Holds what may stand in each place behind a text.

    Args:
        tokens: [places, C], the candidates for each place.
        scores: [places, P, C], logits / T + noise of each: of all, or by what stands in the place before, as the
            candidates there are ordered.
    """

    def __init__(self, tokens: np.ndarray, scores: np.ndarray) -> None:
        self._tokens: list[list[int]] = tokens.tolist()
        self._scores = scores
        self._children = dict[tuple[int, int], Children]()

    def __len__(self) -> int:
        return len(self._tokens)

    def children(self, place: int, before: int) -> Children:
        """Return what may stand in a place behind a token, the best first; nothing where logits were NaN."""
        rank = 0
        if place and self._scores.shape[1] > 1 and before in self._tokens[place - 1]:
            rank = self._tokens[place - 1].index(before)
        if (found := self._children.get((place, rank))) is None:
            scores = self._scores[place, rank].tolist()
            pairs = sorted(zip(scores, self._tokens[place], strict=True), key=lambda pair: -pair[0])
            whole = all(score < math.inf for score in scores)  # which NaN is not
            pairs = [(score, token) for score, token in pairs if whole and score > -math.inf]
            found = Children([token for _, token in pairs], [score for score, _ in pairs])
            self._children[place, rank] = found
        return found

    def chain(self, token: int, count: int) -> list[int]:
        """Return the best token of each of so many places behind the text's last one, each by those before it."""
        found = list[int]()
        for place in range(min(count, len(self))):
            if not (best := self.children(place, token).tokens):
                break
            found.append(token := best[0])
        return found


class DFlashRunner:
    """Runs blocks behind texts, for several sequences in one step. Everything is enqueued on the current stream.

    Args:
        runner: Of the drafter.
        batch: Sequences, each by the number of its slot.

    Attributes:
        texts: What the drafter's cache holds of every sequence.
        places: Of a block, each a token.
        graphs: Its steps.
    """

    def __init__(self, runner: ModelRunner, *, batch: int) -> None:
        decoder = runner.decoder
        assert isinstance(decoder, HeadDecoder) and isinstance(decoder.config, DFlashConfig)
        self._runner, self._decoder, self._config, self._batch = runner, decoder, decoder.config, batch
        self.device, self.places = runner.rope.device, self._config.block_size - 1
        selector = self._config.selector
        self._candidates = min(CHILDREN if selector is None else selector.candidates, self._config.vocab_size)
        # How many choices of the place before a candidate is scored behind.
        self._choices = 1 if selector is None else self._candidates
        self.texts = BlockKVState(runner, batch=batch)
        self._sampling = SlotSampling(batch, self.device)
        outputs = batch * self.places * self._candidates * (1 + self._choices)
        self.graphs = StepGraphs(self.device, input_words=_WORDS * batch, output_words=outputs)

    def join(self, slot: int, params: SamplingParams) -> None:
        """Let a sequence begin in a slot, whose tokens are chosen so."""
        self._sampling.assign(slot, params)

    def leave(self, slot: int) -> None:
        """End a slot's sequence, if there is one."""
        self._sampling.release(slot)

    def room(self, length: int) -> int:
        """Return the most tokens that can be proposed in a row behind a text of so many."""
        return self.places if length + self.places <= self._runner.cache.max_tokens_with_draft else 0

    @torch.inference_mode()
    def blocks(self, last: Mapping[int, int]) -> dict[int, Block]:
        """Return what may follow the last token of each of some texts, all of whose other tokens' context is kept, and
        behind which there is room. Waits."""
        cache, texts, slots = self._runner.cache, self.texts, [*last]
        news = [texts.num_waiting[slot] for slot in slots]
        ends = [cache.length(slot) + new for slot, new in zip(slots, news, strict=True)]
        cache.begin_window(slots, [new + self._config.block_size for new in news])
        reach = max(ends) + self._config.block_size
        if self.device.type == "cuda":
            reach = graph_reach(reach, cache.max_tokens_with_draft)
        self.graphs.begin()
        rows = [*last.values()], ends, news, slots, [texts.starts[slot] for slot in slots]
        self.graphs.inputs_host[: _WORDS * len(slots)] = np.array(rows, dtype=np.int32).ravel()
        key = len(slots), reach, self._sampling.graph_key
        with self.graphs.span("draft block", slots=len(slots)):
            self.graphs.run(key, partial(self._step, len(slots), reach))
        for slot, new in zip(slots, news, strict=True):
            texts.learned(slot, range(new))
        self.graphs.wait()
        count = len(slots) * self.places * self._candidates
        tokens = self.graphs.outputs_host[:count].reshape(len(slots), self.places, -1)
        scores = self.graphs.outputs_host[count : count * (1 + self._choices)].view(np.float32)
        scores = scores.reshape(len(slots), self.places, self._choices, -1)
        # The memory is written to by the next step.
        return {slot: Block(tokens[row], scores[row].copy()) for row, slot in enumerate(slots)}

    def _step(self, batch: int, reach: int) -> None:
        """Write the context that waits, run the blocks, and show the candidates. Captured: no tensor of the host."""
        size, graphs, texts = self._config.block_size, self.graphs, self.texts
        graphs.fetch(_WORDS * batch)
        last, ends, news, slots, starts = (part[:, None] for part in graphs.inputs[: _WORDS * batch].view(_WORDS, -1))
        steps = torch.arange(size, dtype=torch.int32, device=self.device)
        owners = slots.repeat(1, size).flatten()
        before = (ends - news + steps).masked_fill(steps >= news, -1).flatten()
        kept = texts.hidden.of_text(slots, starts + ends - news + steps)
        context = self._config.context(texts.hidden.rows.index_select(0, kept.flatten()), self._decoder.shared)
        positions = ends + steps  # [B, T]
        tokens = last.expand(-1, size).masked_fill(steps > 0, self._config.mask_token).flatten()
        rope = texts.rope_rows(torch.cat((positions.flatten(), before)), torch.cat((owners, owners)))
        rows = Rows(tokens, QueryRows(positions, slots.flatten(), reach), rope, hidden=context)
        layers = self._runner.streamer.layers(len(tokens))
        residual = window_residual(self._decoder, layers, self._runner.cache, rows)
        logits, normed = self._decoder.outputs(residual.view(batch, size, -1)[:, 1:].flatten(0, 1))
        # Memory of its own with every number of sequences: kernels compile anew for a view's alignment.
        ahead, owners = (starts + ends + steps[1:]).flatten(), slots.repeat(1, self.places).flatten()
        found, scores = self._choose(logits, normed, last, ahead, owners)
        graphs.show(found)
        graphs.show(scores, found.numel())

    def _choose(
        self, logits: torch.Tensor, normed: torch.Tensor, last: torch.Tensor, ahead: torch.Tensor, owners: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the candidates for N places, [N, C] int32, and their scores [N, P, C] fp32.

        Args:
            logits, normed: [N, V] and [N, H], of the places.
            last: [B, 1], the token before the first place of each sequence.
            ahead, owners: [N], the position of each place in its text, and its slot.
        """
        best, found = perturbed_logits(logits, self._sampling, ahead, owners).topk(self._candidates, dim=1)
        if self._config.selector is None:
            return found.int(), best[:, None].contiguous()
        of_places = found.view(len(last), self.places, -1)
        first = last[..., None].long().expand(-1, 1, self._candidates)
        pairs = self._config.pair_scores(
            normed, torch.cat((first, of_places[:, :-1]), dim=1).flatten(0, 1), found, self._decoder.shared
        )
        inverse = self._sampling.keys[owners.long(), 0].view(torch.float32)  # of the temperature, 0 where that is
        return found.int(), best[:, None] + pairs * inverse.masked_fill(inverse == 0, 1.0)[:, None, None]

    def warm_up(self) -> None:
        """Compile the kernels of all steps, which would hold up the first proposals, and capture those behind texts of
        up to 2048 tokens, as far as no filter is asked for. Leaves the cache empty."""
        self.texts.warm_up()
        longest = self._runner.cache.capacity_tokens - self._config.block_size
        self.graphs.warm_up(self._take_step, batch=self._batch, lengths=(1, *warm_up_lengths(longest)))

    def _take_step(self, slots: Sequence[SamplingParams], length: int) -> None:
        """Make a step about these sequences, behind texts of so many tokens and one more."""
        for slot, params in enumerate(slots):
            self.join(slot, params)
            self.texts.text_to_warm_up(slot, length + 1)
        self.blocks(dict.fromkeys(range(len(slots)), 0))
        for slot in range(len(slots)):
            self.leave(slot)
            self.texts.catch_up(slot, ())


class DFlashDrafter(Drafter):
    """Proposes the most probable tree that a block and n-grams have, or the block's best chain.

    Args:
        runner: Of the drafter.
        ngrams: Whose guesses join the trees; `WithNgrams` tells them who joins.
    """

    name = DFlashConfig.name

    def __init__(self, runner: DFlashRunner, *, ngrams: NgramDrafter) -> None:
        self.runner, self._ngrams, self.draft_state = runner, ngrams, runner.texts
        self._joined = set[int]()
        self._sampling: SamplingParams | None = None  # but for the noise, since a request joined that was alone
        self._probabilities = ChildProbabilities()
        self._blocks = dict[int, tuple[int, Block]]()  # by slot the last one, and the length of its text

    def modes(self, texts: Texts) -> Sequence[str]:
        modes = chains_where(self.runner.room, texts)
        return (*modes, "tree") if modes else ()

    def join(self, slot: int, params: SamplingParams) -> None:
        self._blocks.pop(slot, None)
        if not self._joined and params.without_noise != self._sampling:
            self._probabilities, self._sampling = ChildProbabilities(), params.without_noise
        self._joined.add(slot)
        self.runner.join(slot, params)

    def leave(self, slot: int) -> None:
        self._joined.discard(slot)
        self._blocks.pop(slot, None)
        self.runner.leave(slot)

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        self.runner.texts.prepare(slot, tokens)

    def observe(self, slot: int, position: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        if slot in self._joined:  # else another text is decoded plainly there
            self.runner.texts.observe(slot, position, tokens, hidden)

    def propose(self, texts: Texts, budgets: Budgets) -> dict[int, TokenTree]:
        for slot in budgets:
            self._learn(slot, texts[slot])
        last = {
            slot: texts[slot][-1]
            for slot in budgets
            if self.runner.texts.knows(slot, texts[slot]) and self.runner.room(len(texts[slot]))
        }
        found = dict.fromkeys(budgets, TokenTree())
        for slot, block in (self.runner.blocks(last) if last else {}).items():
            text, budget = texts[slot], budgets[slot]
            self._blocks[slot] = len(text), block
            if budget.tree_nodes is None:
                found[slot] = TokenTree.chain(block.chain(text[-1], budget.longest_chain), self.name)
            else:
                found[slot] = self._tree(slot, text, budget, block)
        return found

    def _learn(self, slot: int, text: Sequence[int]) -> None:
        """Compare what was said last behind a text with how it has gone on."""
        length, block = self._blocks.pop(slot, (len(text), None))
        for place, token in enumerate(text[length:]):
            if block is None or place == len(block):
                return
            self._probabilities.observe(block.children(place, text[length + place - 1]), token)

    def _tree(self, slot: int, text: Sequence[int], budget: DraftBudget, block: Block) -> TokenTree:
        """Return the most probable nodes that the block and n-grams have; where both say the same the surer counts.

        Nodes come one by one, the most probable first: a `CandidateTree`, which keeps what it finds and finds it in
        batches, took 0.9 ms in place of 0.3 for 60 nodes, and 7 in place of 1 for 256.
        """
        guesses, deepest = self._ngrams.guesses(slot, text, budget, LEAST_CHANCE), min(budget.gamma, len(block))
        # N-grams' nodes by token, behind each of them, and behind the text at the end.
        guessed: list[dict[int, int]] = [{} for _ in range(len(guesses.tree) + 1)]
        for number, (token, parent) in enumerate(zip(guesses.tree.tokens, guesses.tree.parents, strict=True)):
            guessed[parent][token] = number
        nodes, made, order = [_Node(text[-1], -1, "", 0, 0.0, -1)], set[tuple[int, int]](), count()
        waiting, chances = list[tuple[float, int, int, int, str]](), dict[int, list[float]]()
        least = NEGLIGIBLE if budget.cost_aware else -math.inf  # below it a thousand bring a tenth of a token
        while len(nodes) <= budget.size:
            node, at = nodes[-1], len(nodes) - 1
            if node.depth < deepest:
                children = block.children(node.depth, node.token)
                if id(children) not in chances:
                    chances[id(children)] = self._probabilities.log_probabilities(children.scores)
                for token, chance in zip(children.tokens, chances[id(children)], strict=True):
                    if node.chance + chance < least:
                        break
                    heappush(waiting, (-node.chance - chance, next(order), at, token, self.name))
            for token, number in guessed[node.guess].items() if node.guess is not None else ():
                chance = guesses.log_probabilities[number]
                heappush(waiting, (-node.chance - chance, next(order), at, token, self._ngrams.name))
            while waiting and waiting[0][2:4] in made:
                heappop(waiting)
            if not waiting or -waiting[0][0] < least:
                break
            improbable, _, parent, token, source = heappop(waiting)
            made.add((parent, token))
            above = nodes[parent]
            guess = None if above.guess is None else guessed[above.guess].get(token)
            nodes.append(_Node(token, parent, source, above.depth + 1, -improbable, guess))
        tokens, parents, sources, *_ = zip(*nodes, strict=True)
        return TokenTree(tokens[1:], tuple(parent - 1 for parent in parents[1:]), sources[1:])
