"""TriForce's hierarchy as a drafter: a small draft, checked by the target over a small retrieved cache, proposes.

Sun et al., "TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical Speculative Decoding",
arXiv 2404.11912. Every level samples with the same noise and is checked by equality with the next, so nothing needs a
correction: the full target decides in the end.

A step of either level is one of all sequences. Those that have enough stand still, and once half of them do, a step
would bring less than the target's pass does: the others propose what they have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from offload_runtime_kernels.attention_sources import sources_workspace_bytes
from offload_runtime_kernels.chunk_scores import WORKSPACE_BYTES as SCORES_WORKSPACE_BYTES
from offload_runtime_kernels.window_steps import WINDOW_HEADER_WORDS, StepRotation, accept, step_rows

from offload_runtime.cache.retrieval import RetrievalCache
from offload_runtime.core import TokenTree
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import LayerWeights, Rows
from offload_runtime.models.rope import RopeTable, RowFrequencies
from offload_runtime.params import SamplingParams
from offload_runtime.runners.graphs import StepGraphs, step_activation_bytes
from offload_runtime.runners.model_runner import Decoder, window_residual
from offload_runtime.sampling import SlotSampling, sample
from offload_runtime.speculation.draft import DraftRunner
from offload_runtime.speculation.step import Acceptance, Budgets, Drafter, Texts, chains_where
from offload_runtime.speculation.window import (
    MOST_LEVELS,
    WINDOW_CAPACITY_TOKENS,
    DeviceWindow,
    GuessTree,
    SlotUpdate,
    WindowOutput,
)

# Rows of a verifier's step that take hardly longer than one, and what each sequence has of guesses in any case.
_CHEAP_ROWS, _LEAST_GUESSES = 64, 4


def num_guesses(most: int, batch: int) -> int:
    """Return the nodes of the tree of each of `batch` sequences, at most `most`: in all about as many rows as take
    no longer than one."""
    return min(most, max(_LEAST_GUESSES, _CHEAP_ROWS // batch - _LEAST_GUESSES))


def most_guess_rows(most: int, batch: int, *, others: int) -> int:
    """Return the most rows of a step over up to `batch` sequences, each of a tree of up to `most` nodes and of
    `others`."""
    counts = (*range(1, min(batch, _CHEAP_ROWS)), batch)  # from some count on each has the same guesses
    return max(count * (num_guesses(most, count) + others) for count in counts)


class RetrievalVerifier:
    """Runs the target over retrieved chunks and recent blocks (TriForce, arXiv 2404.11912, section 4).

    Args:
        decoder: The target's maths.
        layers: Its weights, all on the device: (layer index, named weights), in order.
        cache: What it sees.
        rope: Its rotary table.
        window: Where tokens come from and go.
        max_tokens_with_draft: Most tokens of a sequence, tentative ones included.
        batch: Sequences; their numbers are the batch rows in the caches.
    """

    def __init__(
        self, decoder: Decoder, layers: Sequence[tuple[int, LayerWeights]], cache: RetrievalCache,
        rope: RopeTable, window: DeviceWindow, *, max_tokens_with_draft: int, batch: int = 1,
    ) -> None:  # fmt: skip
        device = window.rows.device
        self.cache = cache
        self.window = window
        self._max_tokens_with_draft = max_tokens_with_draft
        self._decoder = decoder
        self._layers = layers
        self._last_token = decoder.config.vocab_size - 1
        self.graphs = StepGraphs(device, decoder.partition.devices[1:])
        self._sampling = SlotSampling(batch, device)
        self._slots = torch.arange(batch, dtype=torch.int32, device=device)
        self._frequencies = RowFrequencies(rope, batch)
        self._rotation = StepRotation(self._frequencies.tensor, rope.scaling)
        self._counts = torch.zeros(batch, 2, dtype=torch.int64, device=device)  # steps, accepted proposals

    @torch.inference_mode()
    def join(self, slot: int, params: SamplingParams) -> None:
        """Let a sequence begin in a slot, whose tokens are chosen so."""
        self._sampling.assign(slot, params)
        self.window.join(slot)
        self.cache.forget(slot)
        self._counts[slot].zero_()

    def leave(self, slot: int) -> None:
        """End a slot's sequence, if there is one: steps go on without it."""
        self._sampling.release(slot)
        self.window.leave(slot)

    @property
    def counts(self) -> list[tuple[int, int]]:
        """Return the steps of every sequence since it joined and the proposals that they accepted. Waits for the
        device."""
        return [(steps, accepted) for steps, accepted in self._counts.tolist()]

    @torch.inference_mode()
    def begin(self, lengths: Mapping[int, int], counts: Mapping[int, int]) -> bool:
        """Prepare for steps that put up to `counts[s]` tokens behind the `lengths[s]` of sequence s, while all
        others stand still; return whether the chunks must be chosen anew."""
        for slot, length in lengths.items():
            self._frequencies.set(slot, length)
        return self.cache.begin_steps(range(self.window.num_rows), counts)

    @torch.inference_mode()
    def step(self, tree: GuessTree, *, refresh: bool) -> None:
        """Enqueue one step that verifies the tree behind every window's end; never waits.

        Args:
            tree: Of the proposals; the same object for the same shape.
            refresh: Choose the chunks by this step's queries first.
        """
        with self.graphs.span("verifier step", proposals=len(tree), refresh=refresh):
            key = tree, self.cache.begin_step(first=refresh), self._sampling.graph_key
            self.graphs.run(key, partial(self._step, tree))

    def _step(self, tree: GuessTree) -> None:
        """Captured: no tensor of the host."""
        window = self.window
        step = step_rows(
            window.rows, window.end, tree.verified, self._rotation, last_token=self._last_token, skip_committed=True
        )
        rows = Rows.of_step(step, self._slots[: window.num_rows], max_length=self._max_tokens_with_draft)
        residual = window_residual(self._decoder, self._layers, self.cache, rows)
        logits = self._decoder.head(residual)  # [B*T, V]
        samples = sample(logits, self._sampling, step.following, step.slots)
        # Where the target says something else it mostly is what comes next here.
        without_samples = logits.scatter_(1, samples.clamp_min(0)[:, None], -torch.inf)
        second_samples = sample(without_samples, self._sampling, step.following, step.slots)
        both = samples.view(window.num_rows, -1), second_samples.view(window.num_rows, -1)
        accept(window.rows, *both, self._counts, tree.links, window.runners_up)


def verifier_step_bytes(
    config: ModelConfig, element_bytes: int, *, batch: int, rows: int, far_chunks: int, has_head: bool = True
) -> int:
    """Return the device bytes of the window and of what a step of the verifier computes on its way, which its graphs
    keep.

    Args:
        config: The target's shape.
        element_bytes: Of its dtype.
        batch: Sequences.
        rows: Of all of them together.
        far_chunks: Most chunks of a sequence to choose from.
        has_head: Whether logits are made here.
    """
    workspace = 0
    for attention in {*config.attentions.values()}:
        scores = 4 * batch * attention.num_kv_heads * far_chunks
        chunk_logits = min(4 * rows * attention.num_heads * far_chunks, SCORES_WORKSPACE_BYTES)
        workspace = max(workspace, sources_workspace_bytes(attention.head_dim), scores + chunk_logits)
    activations = step_activation_bytes(config, element_bytes, rows=rows, has_head=has_head, depth=2 * MOST_LEVELS + 1)
    window = 4 * batch * (WINDOW_HEADER_WORDS + 2 * WINDOW_CAPACITY_TOKENS)
    return window + activations + workspace


class TriForceDrafter(Drafter):
    """Proposes what draft and retrieval verifier agree on: chains, as only one path of each tree is agreed on, and as
    branches, where they cost nothing, what the retrieval verifier would have said instead.

    Args:
        window: Shared by both levels.
        verifier: The target over retrieved chunks.
        draft: The small model; None lets the retrieval verifier decode by itself, a token a step.
        trees: By the number of sequences, from 1 on, what the draft proposes to each step of the retrieval verifier;
            without nodes where there is no draft.
        refresh_steps: The chunks are chosen anew by the queries of every so many steps, of all sequences at once.
        max_tokens_with_draft: Of a sequence in the target's cache, tentative ones included.
    """

    name = "retrieval"

    def __init__(
        self, window: DeviceWindow, verifier: RetrievalVerifier, draft: DraftRunner | None, *,
        trees: Sequence[GuessTree], refresh_steps: int, max_tokens_with_draft: int,
    ) -> None:  # fmt: skip
        assert refresh_steps > 0 and all((len(tree) > 0) == (draft is not None) for tree in trees)
        self._window = window
        self.verifier = verifier
        self._draft, self.draft_state = draft, None if draft is None else draft.draft_state
        self.trees = trees
        self._refresh_steps = refresh_steps
        self._max_tokens_with_draft = max_tokens_with_draft
        self.num_steps = 0  # of the retrieval verifier since no slot had joined, each of all sequences
        # Of every slot that has joined, the steps of the verifier that were counted, and what was proposed to them.
        self._proposed: dict[int, tuple[int, int]] = {}

    def modes(self, texts: Texts) -> Sequence[str]:
        return chains_where(self._room, texts)

    def join(self, slot: int, params: SamplingParams) -> None:
        self.leave(slot)
        if not self._proposed:
            self.num_steps = 0
        self._proposed[slot] = 0, 0
        self.verifier.join(slot, params)
        if self._draft is not None:
            self._draft.join(slot, params)

    def leave(self, slot: int) -> None:
        self._count()  # of the tree before: with other sequences it may be another one
        self._proposed.pop(slot, None)
        self.verifier.leave(slot)
        if self._draft is not None:
            self._draft.leave(slot)

    @property
    def tree(self) -> GuessTree:
        """Return what the draft proposes to each step: the more sequences a step is about, the smaller it is."""
        return self.trees[self._window.num_rows - 1]

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        if self._draft is not None:
            self._draft.prepare(slot, tokens)

    def propose(self, texts: Texts, budgets: Budgets) -> dict[int, TokenTree]:
        """Run both levels until they agree on enough tokens of most sequences; the host reads the window a few times on
        the way."""
        counts = {slot: min(budget.longest_chain, self._room(len(texts[slot]))) for slot, budget in budgets.items()}
        lengths = {slot: len(texts[slot]) for slot, count in counts.items() if count > 0}
        proposals = dict.fromkeys(budgets, TokenTree())
        if not lengths:
            return proposals
        stops = {slot: length + counts[slot] for slot, length in lengths.items()}  # tokens to agree on, the text's too
        beyond = {slot: stop + len(self.tree) for slot, stop in stops.items()}
        refresh = self.verifier.begin(lengths, {s: beyond[s] + 1 - length for s, length in lengths.items()})
        inputs = {
            slot: SlotUpdate(self._newest(slot, texts[slot]), length, stops[slot], beyond[slot])
            for slot, length in lengths.items()
        }
        self._window.upload(inputs)
        outputs = self._agree(inputs, refresh=refresh)
        for slot, one in inputs.items():
            if self._draft is not None:
                # The keys of what the last step has accepted lie where its tree was.
                written = max(one.end, outputs[slot].end - self.tree.num_levels - 1)
                self._draft.texts.learned(slot, outputs[slot].between(one.base, written))
            proposals[slot] = self._proposal(one, outputs[slot], budgets[slot].extra_nodes)
        return proposals

    def counts(self, slot: int) -> Sequence[Acceptance]:
        """Return what the retrieval verifier decided about the draft's proposals, those behind what was asked for
        included."""
        if self._draft is None or slot not in self._proposed:
            return ()
        _, accepted = self._count()[slot]
        return (Acceptance("draft", "retrieval", *self._proposed[slot], accepted),)

    def _count(self) -> Sequence[tuple[int, int]]:
        """Count what was proposed to the verifier's steps, and return its own counts. Waits for the device."""
        if self._draft is None or not self._proposed:
            return ()
        counts, size = self.verifier.counts, len(self.tree)
        for slot, (steps, proposed) in self._proposed.items():
            self._proposed[slot] = counts[slot][0], proposed + (counts[slot][0] - steps) * size
        return counts

    def _newest(self, slot: int, tokens: Sequence[int]) -> Sequence[int]:
        """Return the newest tokens of a text, which the first steps feed: those before them have keys in the draft's
        cache."""
        if self._draft is None:
            return tokens[-1:]
        return self._draft.texts.catch_up(slot, tokens, self.tree.num_known)

    def _room(self, length: int) -> int:
        """Return the most tokens that can be proposed behind `length` tokens."""
        room = min(self._max_tokens_with_draft - length, WINDOW_CAPACITY_TOKENS - self.tree.num_known)
        if self._draft is not None:
            room = min(room, self._draft.room(length))
        return room - len(self.tree) - 1  # the last step may write the keys of proposals beyond what is asked for

    def _agree(self, inputs: Mapping[int, SlotUpdate], *, refresh: bool) -> Mapping[int, WindowOutput]:
        """Enqueue steps until at most half of the sequences have not reached their stops, at a time as many as that
        takes in any case; return what the window holds then.
        """
        ends, most = {slot: one.end for slot, one in inputs.items()}, self.tree.num_levels + 1
        while True:
            missing = sorted(inputs[slot].stop - end for slot, end in ends.items())
            for _ in range(-(-missing[len(missing) - len(inputs) // 2 - 1] // most)):
                if self._draft is not None:
                    # Who has reached the stop stands still.
                    longest = {slot: min(end, inputs[slot].stop - 1) for slot, end in ends.items()}
                    self._draft.grow(self.tree.levels, len(self.tree), longest)
                self.verifier.step(self.tree, refresh=refresh or self.num_steps % self._refresh_steps == 0)
                self.num_steps += 1
                ends = {slot: end + most for slot, end in ends.items()}
                refresh = False
            outputs = self._window.read()
            ends = {s: outputs[s].end for s in ends if outputs[s].end < inputs[s].stop}
            if len(ends) <= len(inputs) // 2:
                return outputs

    def _proposal(self, inputs: SlotUpdate, outputs: WindowOutput, extra_nodes: int) -> TokenTree:
        """Return what was agreed on for a sequence, and as branches what the retrieval verifier would
        have said instead, `extra_nodes` at most."""
        stop = min(inputs.stop, outputs.end)
        tokens = outputs.between(inputs.end, stop)
        # A level with NaN logits has nothing to say.
        count = next((index for index, token in enumerate(tokens) if token < 0), len(tokens))
        instead = outputs.runners_up[inputs.end - outputs.base :][:count]
        branches = [(token, place - 1) for place, token in enumerate(instead) if token >= 0][:extra_nodes]
        return TokenTree(
            (*tokens[:count], *(token for token, _ in branches)),
            (*range(-1, count - 1), *(parent for _, parent in branches)),
            (self.name,) * (count + len(branches)),
        )
