"""The draft as a loop on the device: K steps say K tokens of every sequence, and the host only reads them.

A step is one CUDA graph (on the CPU the same code, run eagerly): it feeds the newest tokens of a `DeviceWindow`,
samples the next ones with the target's noise and writes them into the window behind them. Of a `GuessTree`, which a
retrieval verifier checks, a step says a whole level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from heapq import heapify, heappop, heappush
from itertools import pairwise, starmap

import torch
from offload_runtime_kernels.window_steps import (
    WINDOW_HEADER_WORDS,
    StepLayout,
    StepRotation,
    StepRows,
    TreeLinks,
    put_tokens,
    step_rows,
)

from offload_runtime.cache.retrieval import RetrievedDraftCache
from offload_runtime.core import DraftBudget, TokenTree, depths_of
from offload_runtime.models.layers import Rows
from offload_runtime.models.rope import RowFrequencies
from offload_runtime.params import SamplingParams
from offload_runtime.runners.draft_kv import CATCH_UP_TOKENS, REWRITTEN_TOKENS, DraftKVState, excluded_ids
from offload_runtime.runners.graphs import StepGraphs, graph_reach, warm_up_batches, warm_up_lengths
from offload_runtime.runners.model_runner import ModelRunner, window_pass
from offload_runtime.sampling import WARM_UP_SAMPLINGS, SlotSampling, perturbed_logits, sample
from offload_runtime.speculation.step import Budgets, Proposer, Texts, chains_where
from offload_runtime.stream import overwrite
from offload_runtime.trace import TraceRecorder

# A window of the target and what a draft says beyond it.
WINDOW_CAPACITY_TOKENS = 2048


@dataclass(frozen=True)
class WindowInput:
    """Says what the host tells the device about a sequence.

    Attributes:
        tokens: The last known ones, of positions end - len(tokens) to end - 1.
        end: Tokens of the whole sequence.
        stop: Once so many are known the sequence stands still.
        last: Nothing is proposed at this position or behind it; at least `stop`.
    """

    tokens: Sequence[int]
    end: int
    stop: int
    last: int

    def __post_init__(self) -> None:
        assert 0 < len(self.tokens) <= self.end < self.stop <= self.last

    @property
    def base(self) -> int:
        """Position of the first of the tokens."""
        return self.end - len(self.tokens)


@dataclass(frozen=True)
class WindowOutput:
    """Holds what the device has said of a sequence: `end` tokens are known, proposals lie behind."""

    end: int
    base: int
    tokens: Sequence[int]  # from position `base` on
    runners_up: Sequence[int]  # the next best of each that was sampled here; -1 for none, undefined before

    def between(self, start: int, stop: int) -> list[int]:
        """Return the tokens of positions `start` to `stop` - 1."""
        assert self.base <= start and stop <= self.base + len(self.tokens)
        return list(self.tokens[start - self.base : stop - self.base])


class DeviceWindow:
    """Holds tokens of several sequences on the device, in tensors that never move, so that CUDA graphs may hold them.

    Each sequence's are a row of one tensor, as `window_steps` describes them. Only the verifier of proposals moves
    `end`.

    Args:
        device: The compute device.
        batch: Most sequences.

    Attributes:
        rows: [num_rows, header and capacity] int32: what steps read and write.
        runners_up: [batch, capacity] int32: what the verifier would have said instead.
        num_rows: Sequences 0 to num_rows - 1 take part in steps: all up to the last that has joined, at least one.
        end: [num_rows] int32, strided: how many tokens of each sequence are known.
        inputs: As of the last upload.
    """

    def __init__(self, device: torch.device, *, batch: int = 1) -> None:
        self.inputs: Mapping[int, WindowInput] = {}
        words = WINDOW_HEADER_WORDS + WINDOW_CAPACITY_TOKENS
        self._state = torch.zeros(batch, words, dtype=torch.int32, device=device)
        self.runners_up = torch.full((batch, WINDOW_CAPACITY_TOKENS), -1, dtype=torch.int32, device=device)
        self._joined = set[int]()
        self._fit_rows()

    def join(self, slot: int) -> None:
        """Let a sequence take part in steps; the window must be uploaded before the next one."""
        assert 0 <= slot < len(self._state)
        self._joined.add(slot)
        self._fit_rows()

    def leave(self, slot: int) -> None:
        """Let a sequence take part in no more steps; the window must be uploaded before the next one."""
        self._joined.discard(slot)
        self._fit_rows()

    def _fit_rows(self) -> None:
        self.num_rows = 1 + max(self._joined, default=0)
        self.rows = self._state[: self.num_rows]
        self.end = self.rows[:, 0]

    def upload(self, inputs: Mapping[int, WindowInput]) -> None:
        """Begin anew with the last known tokens of some sequences, on the current stream; never waits.

        Args:
            inputs: By sequence; the others stand still.
        """
        assert inputs and all(slot < self.num_rows for slot in inputs)
        assert all(one.last - one.base <= WINDOW_CAPACITY_TOKENS for one in inputs.values())
        width = max(len(one.tokens) for one in inputs.values())
        rows = [[0] * (WINDOW_HEADER_WORDS + width) for _ in range(self.num_rows)]
        for slot, one in inputs.items():
            header = [one.end, one.base, one.stop, one.last, one.end - 1]
            rows[slot][: WINDOW_HEADER_WORDS + len(one.tokens)] = [*header, *one.tokens]
        host = torch.tensor(rows, dtype=torch.int32)
        overwrite(self.rows[:, : host.shape[1]], host)
        self.inputs = dict(inputs)

    def read(self) -> dict[int, WindowOutput]:
        """Return what there is of every uploaded sequence, in one copy. Waits for what the current stream has to do."""
        width = max(one.last - one.base for one in self.inputs.values())
        count = WINDOW_HEADER_WORDS + width
        parts = self.rows[:, :count], self.runners_up[: self.num_rows, :width]
        rows: list[list[int]] = torch.cat(parts, dim=1).tolist()
        return {
            slot: WindowOutput(row[0], row[1], row[WINDOW_HEADER_WORDS:count], row[count:])
            for slot, row in ((slot, rows[slot]) for slot in self.inputs)
        }


# Of what a draft's likelier children leave over, the next one is right about so often.
_NEXT_CHILD = 0.3
# A level has to bring so many tokens a step: a step of a draft takes a seventh of the verifier's.
_LEAST_GAIN = 0.2
MOST_LEVELS = 7
# Of a tree and the tokens that are written anew: `attend_sources` has a bit for each.
_MOST_POSITIONS = 64


class GuessTree:
    """Describes a tree of guesses behind the newest known token, as the steps that grow and verify it need it.

    Nodes lie in the slots behind the known tokens, level by level. What was accepted of the tree before stands in
    slots of nodes, in both caches: its keys are written anew, where they belong, by the rows of the newest tokens.

    Args:
        parents: Of each node, -1 for the newest known token; in order of levels, the likeliest child of a node first.
        device: Of the steps.

    Attributes:
        parents: As given.
        num_levels: The longest path; a step makes at most one token more known.
        levels: The nodes of each.
        drafted: Of each level the rows of the draft's step that says what its nodes are: those with children.
        chosen: Of each level how many children of such a row are looked at, and which of all these the nodes are.
        verified: The rows of the verifier's step; the first, of the newest known token, says which chunks matter.
        links: How the nodes hang together.
    """

    def __init__(self, parents: Sequence[int], device: torch.device) -> None:
        self.parents, depths = tuple(parents), [depth + 1 for depth in depths_of(parents)]
        assert depths == sorted(depths), "level by level"
        self.num_levels, count = max(depths, default=0), len(depths)

        def ints(values: Sequence[object], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        paths: list[list[int]] = []
        for node, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else ()), node])
        bounds = [*map(depths.index, range(1, self.num_levels + 1)), count]
        self.levels = list(starmap(range, pairwise(bounds)))
        # The newest known token is in slot -1, what follows it in the slots from 0 on.
        self.drafted = [StepLayout.chain(-self.num_known, self.num_known, device)][: self.num_levels]
        self.chosen = list[tuple[int, torch.Tensor]]()
        for level, nodes in enumerate(self.levels):
            above = sorted({parents[node] for node in nodes})
            ranks = [[child for child in nodes if parents[child] == parents[node]].index(node) for node in nodes]
            most = 1 + max(ranks)
            places = [above.index(parents[node]) * most + rank for node, rank in zip(nodes, ranks, strict=True)]
            self.chosen.append((most, ints(places, torch.int64)))
            if level:
                positions = ints([level - 1] * len(above))
                asked = ints([paths[node] for node in above])
                self.drafted.append(StepLayout(ints(above), positions, len(above), 0, asked))
        # The trunk ends with the newest known token, whose row is the first; the rest of it is written anew.
        trunk = list(range(-1 - self.num_levels, 0))
        assert len(trunk) + count <= _MOST_POSITIONS, f"{count} nodes in {self.num_levels} levels"
        rows = [(-1, -1, trunk), *((node, depths[node] - 1, trunk + paths[node]) for node in range(count))]
        rows += [
            (cache_position, cache_position, trunk[: index + 1]) for index, cache_position in enumerate(trunk[:-1])
        ]
        ancestors = ints([path_of + path_of[-1:] * (2 * self.num_levels + 1 - len(path_of)) for *_, path_of in rows])
        cache_positions, stands = (
            ints([cache_position for cache_position, *_ in rows]),
            ints([position for _, position, _ in rows]),
        )
        self.verified = StepLayout(cache_positions, stands, 1, trunk[0], ancestors)
        bits = [sum(1 << node for node in path) for path in paths]
        self.links = TreeLinks(ints([parent + 1 for parent in parents]), ints(bits, torch.int64), ints(depths))

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def num_known(self) -> int:
        """Newest known tokens that a draft's first step feeds: all that may have no keys of their own, a path that was
        accepted, the verifier's sample behind it and the target's."""
        return self.num_levels + 2


def likely_parents(num_nodes: int, acceptance: float) -> tuple[int, ...]:
    """Return the tree of so many nodes of which most is accepted, but for levels that are not worth a step of the
    draft.

    Args:
        num_nodes: At least 1.
        acceptance: How often a draft's likeliest token is right.
    """
    best = _likely_parents(num_nodes, 1, acceptance)
    for num_levels in range(2, MOST_LEVELS + 1):
        deeper = _likely_parents(num_nodes, num_levels, acceptance)
        if expected_accepted(deeper, acceptance) - expected_accepted(best, acceptance) < _LEAST_GAIN:
            break
        best = deeper
    return best


def _likely_parents(num_nodes: int, num_levels: int, acceptance: float) -> tuple[int, ...]:
    """Return the same of at most so many levels."""
    # Of each node: how improbable it is, its depth, its parent's place here, what its elder siblings leave over.
    found, heap = list[tuple[float, int, int, float]](), [(-acceptance, 1, -1, 1.0)]
    while heap and len(found) < num_nodes:
        node = heappop(heap)
        found.append(node)
        improbable, depth, parent, left = node
        above = -1.0 if parent < 0 else found[parent][0]
        left -= improbable / above
        heappush(heap, (above * left * _NEXT_CHILD, depth, parent, left))
        if depth < num_levels:
            heappush(heap, (improbable * acceptance, depth + 1, len(found) - 1, 1.0))
    order = sorted(range(len(found)), key=lambda place: found[place][1])  # stable: likelier children come first
    numbers = {-1: -1, **{place: number for number, place in enumerate(order)}}
    return tuple(numbers[found[place][2]] for place in order)


def expected_accepted(parents: Sequence[int], acceptance: float) -> float:
    """Return the nodes of a tree that a step accepts in the mean, by how often a draft's likeliest token is right."""
    rates, left = list[float](), dict[int, float]()
    for parent in parents:
        rest = left.get(parent, 1.0)
        share = rest * _NEXT_CHILD if parent in left else acceptance
        left[parent] = rest - share
        rates.append(share * (1.0 if parent < 0 else rates[parent]))
    return sum(rates)


@lru_cache(maxsize=4096)
def best_tree_tokens(hits: tuple[float, ...], nodes: int, depth: int) -> float:
    """Return the tokens of one verification: the verifier's own and the sum of the `nodes` most probable paths no
    longer than `depth`, where the child of rank r is what it says with probability `hits[r]`, whatever came before
    (Chen et al., Sequoia, arXiv 2402.12374). With one child they are those of a chain, (1 - a^(n + 1)) / (1 - a)
    (Leviathan et al., arXiv 2211.17192, eq. 1)."""
    assert nodes >= 0 and depth >= 0
    tokens, heap = 1.0, [(-hit, 1) for hit in hits] if depth else []
    heapify(heap)
    for _ in range(nodes):
        if not heap:
            break
        negative, length = heappop(heap)
        tokens -= negative
        if length < depth:
            for hit in hits:
                heappush(heap, (negative * hit, length + 1))
    return tokens


class DraftModel(Proposer):
    """Guesses with a small model on the compute device and the target's own noise, for all sequences in one step.

    Everything is enqueued on the current stream, which must be the same, or made to wait, from call to call.

    Args:
        runner: Of the small model. If its cache is a `StreamingDraftCache`, it needs a
            `RopeTable(config, device, fixed_length=cache.capacity_tokens)`.
        vocab_size: What the draft may propose are ids below this,
        excluded: but for these, which mean something else in the target, or nothing.
        batch: Sequences of the draft's cache that it serves; each has the number of the target's.
        window: Where known tokens come from and guesses go; by default one of its own.
        max_tokens_with_draft: Of a sequence with what is only tentative; by default what the cache was reserved for.

    Attributes:
        frequencies: By which every sequence's rows are rotated.
        texts: What the cache holds of every sequence: before steps all of the tokens but those that a first step feeds
            itself, and afterwards also those whose keys the steps have written.
    """

    name = "draft"

    def __init__(
        self, runner: ModelRunner, *, vocab_size: int, excluded: Sequence[int] = (), batch: int = 1,
        window: DeviceWindow | None = None, max_tokens_with_draft: int | None = None,
    ) -> None:  # fmt: skip
        self.runner, self._batch = runner, batch
        cache = runner.cache
        self.choosing = cache if isinstance(cache, RetrievedDraftCache) else None
        self._capacity_tokens: int = cache.capacity_tokens
        self._max_tokens_with_draft = cache.capacity_tokens if max_tokens_with_draft is None else max_tokens_with_draft
        self._vocab_size = vocab_size
        self._device = device = cache.store(0).data.device
        self._excluded = excluded_ids(excluded, device)
        self._sampling = SlotSampling(batch, device)
        self.window, self._own_window = window or DeviceWindow(device, batch=batch), window is None
        self.texts = DraftKVState(runner, batch=batch)
        self.graphs = StepGraphs(device, captures=not runner.streamer.num_streamed)
        # What steps read besides the window, a row for each sequence; the tensors never move.
        self._cursor = torch.zeros(batch, dtype=torch.int32, device=device)  # the position that is sampled next
        self._slots = torch.arange(batch, dtype=torch.int32, device=device)
        self.frequencies = RowFrequencies(runner.rope, batch)
        self._rotation = StepRotation(self.frequencies.tensor, runner.rope.scaling)
        # The rows of a later step of a chain, and of the first.
        self._chains = [StepLayout.chain(-count, count, device) for count in (1, REWRITTEN_TOKENS)]
        self._place = torch.zeros(batch, 2, dtype=torch.int32, device=device)  # start and RoPE shift
        self._place_host = [(0, 0)] * batch
        self.recorder: TraceRecorder | None = None  # of a trace, if there is one

    def warm_up(self) -> None:
        """Compile the kernels of all steps of chains, which would hold up the first proposals.

        The steps of a shared window are left to the retrieval verifier. Leaves the cache empty.
        """
        with self.graphs.eager():
            if self._own_window:
                for params in WARM_UP_SAMPLINGS[1:]:
                    self._take_steps([params], 1)
                for num_sequences in warm_up_batches(self._batch):
                    self._take_steps(WARM_UP_SAMPLINGS[:1] * num_sequences, 1)
                for length in warm_up_lengths(self._capacity_tokens - 1):
                    self._take_steps(WARM_UP_SAMPLINGS[:1], length)
            for length in (0, *warm_up_lengths(self._capacity_tokens - 2 * CATCH_UP_TOKENS - 1)):
                self._catch_up_behind(length)
        if self.choosing is not None:
            self.choosing.warm_up()
        self.forget()

    def _take_steps(self, slots: Sequence[SamplingParams], length: int) -> None:
        """Make a first step and a later one behind texts of so many tokens."""
        for slot, params in enumerate(slots):
            self.join(slot, params)
        texts = {slot: [0] * length for slot in range(len(slots))}
        self.propose(texts, dict.fromkeys(texts, DraftBudget("chain", 2)))
        for slot in texts:
            self.leave(slot)

    def _catch_up_behind(self, length: int) -> None:
        """Feed what rounds bring that others have proposed, behind a text of so many tokens."""
        self.forget()
        inputs = length + REWRITTEN_TOKENS  # which a first step feeds itself
        for more in (0, *(1 << power for power in range(CATCH_UP_TOKENS.bit_length()))):
            inputs += more
            if inputs <= self._capacity_tokens:
                self.texts.catch_up(0, [0] * inputs)

    def forget(self) -> None:
        """Empty the cache."""
        for slot in range(self._batch):
            self.texts.catch_up(slot, [])

    def join(self, slot: int, params: SamplingParams) -> None:
        """Let a sequence begin in a slot, whose tokens are chosen so."""
        self._sampling.assign(slot, params)
        self.window.join(slot)
        self.texts.join(slot)

    def leave(self, slot: int) -> None:
        """End a slot's sequence, if there is one: steps go on without it."""
        self._sampling.release(slot)
        self.window.leave(slot)

    def room(self, length: int) -> int:
        """Return the most tokens that can be proposed behind `length` tokens: none behind more than the cache is
        for."""
        kept = self.texts.num_kept(length)
        if kept > self._capacity_tokens:
            return 0
        in_cache = self._max_tokens_with_draft - kept + 1  # the last guess needs no place in the cache
        return min(in_cache, WINDOW_CAPACITY_TOKENS - REWRITTEN_TOKENS)

    @property
    def draft_state(self) -> DraftKVState | None:
        return self.texts

    def modes(self, texts: Texts) -> Sequence[str]:
        return chains_where(self.room, texts)

    def propose(self, texts: Texts, budgets: Budgets) -> dict[int, TokenTree]:
        """Return chains; they end with the context, and where logits are NaN. There are as many steps as the longest
        has tokens."""
        counts = {slot: min(budget.longest_chain, self.room(len(texts[slot]))) for slot, budget in budgets.items()}
        asked = {slot: count for slot, count in counts.items() if count > 0}
        proposals = dict.fromkeys(budgets, TokenTree())
        if not asked:
            return proposals
        for slot in asked:
            self.texts.catch_up(slot, texts[slot])
        lengths, count = {slot: len(texts[slot]) for slot in asked}, max(asked.values())
        ends = {slot: length + asked[slot] for slot, length in lengths.items()}
        self.window.upload(
            {slot: WindowInput(texts[slot][-REWRITTEN_TOKENS:], lengths[slot], end, end) for slot, end in ends.items()}
        )
        self._enqueue([partial(self._step, first=step == 0) for step in range(count)], count - 1, lengths)
        outputs = self.window.read()  # the only wait for the device
        for slot, end in ends.items():
            guesses = outputs[slot].between(lengths[slot], end)
            self.texts.learned(slot, [*texts[slot][-REWRITTEN_TOKENS:], *guesses[:-1]])
            bad = next((index for index, token in enumerate(guesses) if token < 0), len(guesses))
            proposals[slot] = TokenTree.chain(guesses[:bad], self.name)
        return proposals

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        """Put a prompt into the cache before anything is asked for; nothing where there is no room to propose."""
        if self.room(len(tokens)) > 0:
            self.texts.catch_up(slot, tokens)

    def grow(self, tree: GuessTree, *, longest: Mapping[int, int]) -> None:
        """Enqueue the steps that put a tree behind each sequence's `end` without waiting: its nodes in their order.

        Args:
            tree: Of guesses. The cache must have caught up to all but the last `tree.num_known` tokens before `end`.
            longest: Of every sequence that may not stand still: `end` is at most this, and equal to it where the host
                knows.
        """
        self._enqueue(
            [partial(self._level, tree=tree, level=level) for level in range(tree.num_levels)], len(tree), longest
        )

    @torch.inference_mode()
    def _enqueue(self, steps: Sequence[partial[None]], tokens: int, longest: Mapping[int, int]) -> None:
        """Run steps that write the keys of up to `tokens` tokens behind each sequence's `end`, which is at most the
        `longest`."""
        cache, inputs = self.runner.cache, self.window.inputs
        # Of the keys, when the last step has run.
        lengths = {
            slot: min(end + tokens, inputs[slot].last - 1) - self.texts.starts[slot] for slot, end in longest.items()
        }
        reach = max(lengths.values())
        assert steps and reach <= self._max_tokens_with_draft
        if self._device.type == "cuda":  # attention looks at more keys than there are, so that few graphs are needed
            reach = graph_reach(reach, self._max_tokens_with_draft)
        for slot, length in lengths.items():
            self.frequencies.set(slot, length)
        # Where a streaming cache stands; any other one stays where it has been all the time.
        places = list(zip(self.texts.starts, self.texts.rope_shifts, strict=True))[: self._batch]
        if places != self._place_host:
            overwrite(self._place, torch.tensor(places, dtype=torch.int32))
            self._place_host = places
        new = {slot: length - cache.length(slot) for slot, length in lengths.items()}
        if self.choosing is not None:
            self.choosing.begin_steps(range(self.window.num_rows), new)
        else:
            cache.begin_window(list(new), list(new.values()))
        recorder = self.recorder
        with recorder.span("draft steps", steps=len(steps), slots=len(longest)) if recorder else nullcontext():
            for number, step in enumerate(steps):
                choice = None if self.choosing is None else self.choosing.begin_step(first=number == 0)
                key = step.func.__name__, *step.keywords.values(), self.window.num_rows, reach, choice
                self.graphs.run((*key, self._sampling.graph_key), partial(step, reach=reach))

    def _step(self, *, first: bool, reach: int) -> None:
        """Sample the token at every cursor, of a first step at the window's end, from those before it, and advance.

        Captured: no tensor of the host.
        """
        window = self.window
        cursor = self._cursor[: window.num_rows]
        start = window.end if first else cursor
        logits, step = self._pass(self._chains[first], start, reach)
        token = sample(logits[:, -1], self._sampling, step.ahead, self._slots[: window.num_rows])
        put_tokens(window.rows, start, token[:, None], cursor=cursor)

    def _level(self, *, tree: GuessTree, level: int, reach: int) -> None:
        """Say what the nodes of a tree's level are. Captured: no tensor of the host."""
        window = self.window
        logits, step = self._pass(tree.drafted[level], window.end, reach)
        if not level:  # all but the newest known token are only fed
            logits, following, owners = logits[:, -1], step.ahead, self._slots[: window.num_rows]
        else:
            logits, following, owners = logits.flatten(0, 1), step.following, step.slots
        most, chosen = tree.chosen[level]
        if most == 1:
            tokens = sample(logits, self._sampling, following, owners)
        else:
            tokens = perturbed_logits(logits, self._sampling, following, owners).topk(most, dim=1).indices
        tokens = tokens.view(window.num_rows, -1)[:, chosen]
        put_tokens(window.rows, window.end, tokens, offset=tree.levels[level].start)

    def _pass(self, layout: StepLayout, start: torch.Tensor, reach: int) -> tuple[torch.Tensor, StepRows]:
        """Feed the rows of a step: logits [B, T, V] of what may be proposed, and the rows."""
        step = step_rows(
            self.window.rows, start, layout, self._rotation, last_token=self.texts.last_token,
            place=None if self.texts.streaming is None else self._place,
        )  # fmt: skip
        rows = Rows.of_step(step, self._slots[: self.window.num_rows], max_length=reach)
        runner = self.runner
        logits = window_pass(runner.decoder, runner.streamer.layers(), runner.cache, rows)
        if self._excluded is not None:
            logits.index_fill_(1, self._excluded, -torch.inf)
        return logits.view(self.window.num_rows, -1, logits.shape[1])[..., : self._vocab_size], step
