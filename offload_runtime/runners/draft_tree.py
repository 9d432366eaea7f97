"""The draft over a tree: one step says for up to 32 nodes of all sequences together what may follow each of them.

Where keys lie: those of the known text, its last token included, at their own places; those of a node of the tree in a
spare slot behind all places of the cache, for as long as the node lives. So a tree that grows and a text that grows
never touch, nodes that survive are never written again, and a path that came true is copied to its places in one launch
(`adopt`). What is known of a text but has no keys yet rides along in the first step behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import TypeGuard

import torch
from offload_runtime_kernels.attention import QueryRows
from offload_runtime_kernels.rope_store import RopeRows

from offload_runtime.config import SamplingParams
from offload_runtime.kv import DeviceKVCache
from offload_runtime.kv.device import StreamingDraftCache
from offload_runtime.memory import download, overwrite, pack, packed_words, unpack, upload
from offload_runtime.model import PassRows
from offload_runtime.runners.draft_kv import DraftKVState, DraftRunner
from offload_runtime.runners.graphs import (
    CHILDREN,
    MOST_DEPTH,
    MOST_SPINE,
    NARROW_ROWS,
    STEP_ROWS,
    StepGraphs,
    StepLine,
    StepShape,
    captured_shape,
    captured_shapes,
    input_sizes,
    step_inputs,
)
from offload_runtime.runners.target import window_pass
from offload_runtime.sampling import DIFFERENT_WAYS, SlotSampling, perturbed_logits, sample
from offload_runtime.trace import DRAFT, TraceRecorder

# Known tokens that a step feeds besides the nodes; more go through the draft on their own.
_MOST_FED = 3


@dataclass(frozen=True)
class Branch:
    """A node to be expanded: what it says, and the slots of the nodes from below the root to itself, by their numbers.

    Without slots it is the root, the text's last token.
    """

    token: int
    slots: tuple[int, ...] = ()


@dataclass(frozen=True)
class Asked:
    """What a step is to find out about one sequence: its text, and nodes of its tree, parents before their children.

    `spine` are slots for what follows the last of them: its best child, the best child of that, and so on.
    """

    text: Sequence[int]
    branches: Sequence[Branch]
    spine: Sequence[int] = ()


@dataclass(frozen=True)
class Children:
    """What may follow a node, the best first, and the scores (logits / T + noise) that say so."""

    tokens: list[int]
    scores: list[float]


def grows_trees(cache: object) -> TypeGuard[DeviceKVCache | StreamingDraftCache]:
    """Whether a draft's cache has places for what may become part of a text."""
    return isinstance(cache, (DeviceKVCache, StreamingDraftCache)) and len(cache.spare_slots) > 0


class DraftTree:
    """A small model that says what may follow many nodes at once, with the target's own noise.

    The first child of a node is what the draft itself would say there. Everything is enqueued on the current stream,
    which must be the same from call to call; only `expand` waits, for what it asked.

    Args:
        runner: Of the small model, all layers resident; its cache keeps all tokens, or the first and newest ones, and
            has spare slots.
        texts: What the cache holds, shared with whoever else drafts with it.
        vocab_size: Of the target; what the draft's padded vocabulary has beyond it is never proposed.
        draft_vocab_size: Rows of the draft's embedding.
        batch: Sequences.
        graphs: False runs every step launch by launch on CUDA too.
        fixed_shapes: Whether steps are rounded up to a few shapes; None on CUDA only, where each is a graph.
    """

    def __init__(
        self, runner: DraftRunner, texts: DraftKVState, *, vocab_size: int, draft_vocab_size: int, batch: int = 1,
        graphs: bool = True, fixed_shapes: bool | None = None,
    ) -> None:  # fmt: skip
        cache = runner.cache
        assert grows_trees(cache)
        self._runner, self._cache, self.texts = runner, cache, texts
        self._streams = isinstance(cache, StreamingDraftCache)
        self.recorder: TraceRecorder | None = None  # whoever wants a trace of the steps sets it
        self._vocab_size, self._last_token = vocab_size, draft_vocab_size - 1
        self._children = min(CHILDREN, vocab_size, draft_vocab_size)
        self._device = device = cache.store(0).data.device
        self._sampling, self._greedy = SlotSampling(batch, device), SlotSampling(batch, device)
        self._rope = texts.rope
        captured = graphs and not runner.streamer.num_streamed  # a graph cannot wait for weights on their way
        self.graphs = StepGraphs(device if captured else torch.device("cpu"))
        self._fixed_shapes = device.type == "cuda" if fixed_shapes is None else fixed_shapes
        self._batch, rows = batch, max(STEP_ROWS, batch)
        # What steps read and write; the tensors never move.
        self._logits = torch.empty(rows, draft_vocab_size, dtype=cache.store(0).data.dtype, device=device)
        self._inputs = torch.zeros(packed_words(input_sizes(batch, rows, MOST_DEPTH)), dtype=torch.int32, device=device)
        self._outputs = torch.zeros(
            rows + MOST_SPINE * batch, 2 * self._children, dtype=torch.int32, device=device
        )  # fmt: skip
        self._frequencies = self._rope.frequencies(1).repeat(rows, 1)
        self._frequency_sets = [0] * rows

    def room(self, length: int) -> int:
        """Tokens of a path behind a text of so many that have keys; negative for a text that is too long itself."""
        capacity: int = self._cache.capacity_tokens
        return capacity - self.texts.num_kept(length)

    @property
    def num_slots(self) -> int:
        """Nodes of a sequence that can have keys at a time."""
        return len(self._cache.spare_slots)

    def width(self, num_sequences: int) -> int:
        """Most rows of a sequence in a step about so many."""
        return max(1, STEP_ROWS // num_sequences)

    def start(self, slots: Sequence[SamplingParams]) -> None:
        """From now on sequence i is scored as `slots[i]` says."""
        self._sampling.assign(slots)

    def holds(self, sequence: int, tokens: Sequence[int]) -> bool:
        """Whether the cache has the keys of exactly these tokens."""
        return self.texts.holds(sequence, tokens)

    def adopt(self, sequence: int, tokens: Sequence[int], slots: Sequence[int]) -> None:
        """The text whose keys the cache holds has gone on with nodes of the tree: move their keys to their places."""
        self._cache.adopt(sequence, [self._cache.spare_slots[slot] for slot in slots], self._cache.length(sequence))
        self.texts.learned(sequence, tokens)
        self.texts.move_on(sequence)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture the steps about one text and about all of them, which would hold up the first windows.

        On the CPU there is nothing to do. Leaves keys in the first spare slot alone; `start` has to follow.
        """
        if not self._fixed_shapes:
            return
        self._cache.begin_window([], [])  # a step is about all sequences; the last pass may have read a single prompt
        capacity: int = self._cache.capacity_tokens
        for count in sorted({1, self._batch}):
            for shape in captured_shapes(count, width=self.width(count), capacity_tokens=capacity):
                self._upload([_nothing(sequence) for sequence in range(count)], shape)
                step = partial(self._pass, shape)
                self.graphs.run(shape, step)
                self.graphs.capture(shape, step)
                for params in DIFFERENT_WAYS:
                    self.start([params] * count)
                    self._choose(shape, slice(0, count * shape.rows), self._outputs[: count * shape.rows])
                    self._grow_spines([0] * count, [self._cache.spare_slots[:1]] * count, shape)
        self._cache.adopt(0, self._cache.spare_slots[:1], 0)

    @torch.inference_mode()
    def expand(self, asked: Mapping[int, Asked]) -> dict[int, list[Children]]:
        """What may follow some nodes, in one step. Waits for it.

        Args:
            asked: By sequence. A root that has not been expanded comes first; what was is not asked again. With spines,
                as long as the shortest of them, the nodes are few.

        Returns:
            For each sequence what follows its nodes, or the first of them that there was room for, then what follows
            those of its spine. A node whose logits are NaN has no children.
        """
        width = self.width(len(asked))
        lines = [self._line(sequence, one, width) for sequence, one in asked.items()]
        self._cache.begin_window(list(asked), [line.fed for line in lines])
        further = min(len(one.spine) for one in asked.values())
        shape = self._shape(lines, width, further)
        num_rows = shape.batch * shape.rows
        started = None if self.recorder is None else self.recorder.mark()
        self._upload(lines, shape)
        self.graphs.run(shape, partial(self._pass, shape))
        self._choose(shape, slice(0, num_rows), self._outputs[:num_rows])
        if further:
            spines = [[self._cache.spare_slots[slot] for slot in one.spine[:further]] for one in asked.values()]
            self._grow_spines([len(line.tokens) - 1 for line in lines], spines, shape)
        if self.recorder is not None:
            metadata = {"rows": [len(line.tokens) for line in lines], "spine": further}
            self.recorder.add(DRAFT, "tree step", started, self.recorder.mark(), metadata)
        outputs = download(self._outputs[: num_rows + further * shape.batch])
        tokens = outputs[:, : self._children].tolist()
        scores = outputs[:, self._children :].contiguous().view(torch.float32).tolist()
        answers: dict[int, list[Children]] = {}
        for number, line in enumerate(lines):
            if line.fed:
                self.texts.learned(line.sequence, asked[line.sequence].text[-line.fed :])
            # The last of the known tokens is the root where that is asked about.
            first = number * shape.rows + line.fed - (1 if line.fed else 0)
            last = number * shape.rows + len(line.tokens)
            rows = [*range(first, last), *range(num_rows + number, len(tokens), shape.batch)]
            answers[line.sequence] = [_children(tokens[row], scores[row]) for row in rows]
        return answers

    def _grow_spines(self, last_rows: Sequence[int], spines: Sequence[Sequence[int]], shape: StepShape) -> None:
        """Go on from each sequence's last row with its best child, and the best child of that, step after step without
        the host: the keys of step i go to slot `spines[sequence][i]`, its children to rows of the output of its own."""
        batch, num_rows = shape.batch, shape.batch * shape.rows
        tokens, positions, slots, _, _, committed, _, _, ancestors = self._parts(shape)
        paths = ancestors.view(num_rows, shape.depth)
        numbers = [number * shape.rows + row for number, row in enumerate(last_rows)]
        live, *steps = unpack(
            upload(pack([numbers, *zip(*spines, strict=True)]), self._device), [batch] * (1 + len(spines[0]))
        )  # [B] each: rows of the step, slots
        live = live.long()
        answer = self._outputs[live]  # [B, 2 C]
        place = positions[live]
        for step, slot in enumerate(steps):
            place = place + 1
            positions.fill_(-1)  # all other rows only fill up
            positions[live] = place
            tokens[live] = answer[:, 0].clamp(0, self._last_token)
            slots[live] = slot
            paths[live, (place - committed).long()] = slot
            self.graphs.run(shape, partial(self._pass, shape))
            answer = self._outputs[num_rows + step * batch : num_rows + (step + 1) * batch]
            self._choose(shape, live, answer)

    def _line(self, sequence: int, asked: Asked, width: int) -> StepLine:
        """Rows of one sequence, after the cache has caught up with most of its text."""
        text, branches = asked.text, asked.branches
        fed: Sequence[int] = ()
        if not branches[0].slots:
            # The root's own keys are written in any case, so that it always is the last of these rows.
            fed = self.texts.catch_up_but(sequence, text, min(_MOST_FED, width - 1))
            branches = branches[1:]
        branches = branches[: (min(width, NARROW_ROWS) if asked.spine else width) - len(fed)]
        slots = [[self._cache.spare_slots[slot] for slot in branch.slots] for branch in branches]
        assert all(path and len(path) <= MOST_DEPTH for path in slots)
        start = self.texts.start(sequence)
        end = len(text) - start
        places = list(range(end - len(fed), end))
        return StepLine(
            sequence,
            tokens=[min(token, self._last_token) for token in (*fed, *(branch.token for branch in branches))],
            positions=[*places, *(end - 1 + len(path) for path in slots)],
            slots=[*places, *(path[-1] for path in slots)],
            paths=[*([] for _ in places), *slots],
            fed=len(fed),
            committed=end,
            start=start,
            rope_shift=self.texts.rope_shift(sequence),
        )

    def _shape(self, lines: Sequence[StepLine], width: int, further: int) -> StepShape:
        batch, rows = len(lines), max(len(line.tokens) for line in lines)
        reach = max(max(line.positions) for line in lines) + 1 + further
        committed = min(line.committed for line in lines)
        if self._fixed_shapes:
            return captured_shape(
                batch, rows, reach, committed, width=width, capacity_tokens=self._cache.capacity_tokens
            )  # fmt: skip
        depth = max(1, *(len(path) for line in lines for path in line.paths)) + further
        return StepShape(batch, rows, depth, reach, committed)

    def _upload(self, lines: Sequence[StepLine], shape: StepShape) -> None:
        """Tell the device what the step is about: one copy on the current stream."""
        parts = step_inputs(lines, shape)
        self._set_frequencies(parts[1])
        host = pack(parts)
        overwrite(self._inputs[: len(host)], host)

    def _parts(self, shape: StepShape) -> list[torch.Tensor]:
        """The inputs of a step, in the order of `step_inputs`."""
        return unpack(self._inputs, input_sizes(shape.batch, shape.batch * shape.rows, shape.depth))

    def _set_frequencies(self, positions: Sequence[int]) -> None:
        """Rotate every row by the frequencies of a sequence that ends with it."""
        wanted = [self._rope.frequency_set(position + 1) for position in positions]
        if wanted != self._frequency_sets[: len(wanted)]:
            tables = {number: self._rope.frequencies(p + 1) for number, p in zip(wanted, positions, strict=True)}
            self._frequencies[: len(wanted)].copy_(torch.stack([tables[number] for number in wanted]))
            self._frequency_sets[: len(wanted)] = wanted

    def _pass(self, shape: StepShape) -> None:
        """Feed the rows; their logits are in `_logits` then. Captured: no tensor of the host, nothing of sampling."""
        batch, num_rows = shape.batch, shape.batch * shape.rows
        tokens, positions, slots, owners, sequences, committed, _, shifts, ancestors = self._parts(shape)
        turned = positions + shifts.repeat_interleave(shape.rows) if self._streams else positions
        angle = turned.clamp_min(0).float()[:, None] * self._frequencies[:num_rows]
        cos, sin = angle.cos() * self._rope.scaling, angle.sin() * self._rope.scaling
        query = QueryRows(
            positions.view(batch, shape.rows), sequences, shape.reach, committed=committed,
            ancestors=ancestors.view(batch, shape.rows, shape.depth), min_committed=shape.committed,
        )  # fmt: skip
        rows = PassRows(
            tokens, query, RopeRows(cos, sin, positions, slots, owners), RopeRows(None, None, positions, slots, owners),
            prefill=False,
        )  # fmt: skip
        runner = self._runner
        logits = window_pass(runner.decoder, runner.streamer.layers(), runner.cache, rows, None)
        self._logits[:num_rows].copy_(logits)

    def _choose(self, shape: StepShape, rows: slice | torch.Tensor, out: torch.Tensor) -> None:
        """Write the best children of some rows. In no graph, so that the pass' serve all ways of sampling."""
        parts = self._parts(shape)
        ahead, owners = parts[1] + 1, parts[3]
        if self._streams:
            ahead = ahead + parts[6].repeat_interleave(shape.rows)
        ahead, owners = ahead[rows], owners[rows]
        scores = perturbed_logits(self._logits[rows, : self._vocab_size], self._sampling, ahead, owners)  # [R, V]
        # Of equal scores the chain's choice comes first, as top-k alone does not promise; -1 where there are NaN.
        first = sample(scores, self._greedy, ahead, owners)
        place = first.clamp_min(0)[:, None]
        first_score = scores.gather(1, place)
        others, tokens_of_others = scores.scatter_(1, place, -torch.inf).topk(self._children - 1, dim=1)
        out[:, 0] = first
        out[:, 1 : self._children] = tokens_of_others
        out[:, self._children :] = torch.cat((first_score, others), dim=1).view(torch.int32)


def _nothing(sequence: int) -> StepLine:
    """A line of rows that only fill up."""
    return StepLine(sequence, [], [], [], [], fed=0, committed=0, start=0, rope_shift=0)


def _children(tokens: list[int], scores: list[float]) -> Children:
    """What is allowed of a row of the output; nothing where its logits were NaN."""
    if tokens[0] < 0:
        return Children([], [])
    allowed = [(token, score) for token, score in zip(tokens, scores, strict=True) if isfinite(score)]
    return Children([token for token, _ in allowed], [score for _, score in allowed])
