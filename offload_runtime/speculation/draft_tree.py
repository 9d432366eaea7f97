"""The draft over a tree: one step says for up to 32 nodes of all sequences together what may follow each of them.

Where keys lie: those of the known text, its last token included, at their own places; those of a node of the tree in a
spare position behind all others of the cache, for as long as the node lives. So a tree that grows and a text that grows
never touch, nodes that survive are never written again, and a path that came true is copied to its places in one launch
(`adopt`). What is known of a text but has no keys yet rides along in the first step behind it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import TypeGuard

import numpy as np
import torch

from offload_runtime.cache import DeviceKVCache
from offload_runtime.cache.device import StreamingDraftCache
from offload_runtime.core import BatchShape
from offload_runtime.models.rope import RowFrequencies
from offload_runtime.params import SamplingParams
from offload_runtime.runners.draft_kv import DraftKVState, excluded_ids
from offload_runtime.runners.graphs import (
    CHILDREN,
    MOST_DEPTH,
    MOST_GREEDY_STEPS,
    NARROW_ROWS,
    STEP_ROWS,
    StepGraphs,
    captured_shape,
    captured_shapes,
    tree_input_sizes,
    tree_input_words,
)
from offload_runtime.runners.model_runner import ModelRunner, device_rows, window_pass
from offload_runtime.sampling import WARM_UP_SAMPLINGS, SlotSampling, perturbed_logits, sample
from offload_runtime.stream import packed_words, unpack
from offload_runtime.trace import TraceRecorder

# Known tokens that a step feeds besides the nodes; more go through the draft on their own.
_MOST_FED = 3
# A draft may be anything from useless to certain, and one window of surprises must not settle it.
_LEAST_SHARPNESS, _MOST_SHARPNESS = 0.02, 50.0
_MOST_STEP = 0.5  # of the sharpness' logarithm, by one observation
_LEAST_MISSED, _MOST_MISSED = 0.005, 0.95
# Observations that a running mean looks back on; a window brings about ten, and texts change their nature.
_MEMORY = 200
# Share of what was measured before that counts on with every round, or step.
_KEPT = 0.8
# A step this much slower than another has compiled or captured something, and is no measure of the next one; a round so
# much longer than those before has waited for the reader of the text.
_OUTLIER = 4.0
# Measurements of a step until its time is known.
_ENOUGH = 3


@dataclass(frozen=True)
class Asked:
    """Says what a step is to find out about one sequence.

    Attributes:
        text: The whole sequence.
        nodes: Nodes of its tree, parents before their children: of each its token, and the places of the nodes from
            below the root to itself, by their numbers. The root, the text's last token, has none.
        greedy_places: For what follows the last of the nodes: its best child, the best child of that, and so on.
    """

    text: Sequence[int]
    nodes: Sequence[tuple[int, tuple[int, ...]]]
    greedy_places: Sequence[int] = ()


@dataclass(frozen=True)
class Children:
    """Holds what may follow a node, the best first, and the scores (logits / T + noise) that say so."""

    tokens: list[int]
    scores: list[float]


@dataclass(frozen=True)
class StepLine:
    """Holds the rows of one sequence in a step: `fed` tokens that are only fed, then the nodes that are asked about.

    Positions, `cache_positions` and `committed` are the cache's: the text's less what a streaming cache has let go of.
    """

    slot: int
    tokens: list[int]
    positions: list[int]
    cache_positions: list[int]
    paths: list[list[int]]
    fed: int
    committed: int


def grows_trees(cache: object) -> TypeGuard[DeviceKVCache | StreamingDraftCache]:
    """Return whether a draft's cache has places for what may become part of a text."""
    return isinstance(cache, (DeviceKVCache, StreamingDraftCache)) and len(cache.spare_positions) > 0


class DraftTree:
    """Says with a small model and the target's own noise what may follow many nodes at once.

    The first child of a node is what the draft itself would say there. Everything is enqueued on the current stream,
    which must be the same from call to call; only `expand` waits, for what it asked.

    Args:
        runner: Of the small model, all layers resident; its cache keeps all tokens, or the first and newest ones, and
            has spare positions.
        texts: What the cache holds, shared with the chains of the same draft.
        vocab_size: What the draft may propose are ids below this,
        excluded: but for these, which mean something else in the target, or nothing.
        batch: Sequences.

    Attributes:
        num_places: Nodes of a sequence that can have keys at a time.
    """

    def __init__(
        self, runner: ModelRunner, texts: DraftKVState, *, vocab_size: int, excluded: Sequence[int] = (), batch: int = 1
    ) -> None:
        cache = runner.cache
        assert grows_trees(cache)
        self._runner, self._cache, self.texts = runner, cache, texts
        self.num_places = len(cache.spare_positions)
        self.recorder: TraceRecorder | None = None  # of a trace, if there is one
        draft_vocab_size = runner.decoder.config.vocab_size
        self._vocab_size, self._children = vocab_size, min(CHILDREN, vocab_size, draft_vocab_size)
        self._device = device = cache.store(0).data.device
        self._excluded = excluded_ids(excluded, device)
        self._sampling, self._greedy = SlotSampling(batch, device), SlotSampling(batch, device)
        self._batch, rows = batch, max(STEP_ROWS, batch)
        # What steps write besides; the tensors never move.
        self._logits = torch.empty(rows, draft_vocab_size, dtype=cache.store(0).data.dtype, device=device)
        self._outputs = torch.zeros(
            rows + MOST_GREEDY_STEPS * batch, 2 * self._children, dtype=torch.int32, device=device
        )
        self._last_outputs = torch.zeros(batch, 2 * self._children, dtype=torch.int32, device=device)
        self._frequencies = RowFrequencies(runner.rope, rows)
        self.graphs = StepGraphs(
            device, captures=not runner.streamer.num_streamed, input_words=tree_input_words(batch),
            output_words=self._outputs.numel(),
        )  # fmt: skip

    def room(self, length: int) -> int:
        """Return the tokens of a path behind a text of so many that have keys; negative for a text that is too long
        itself."""
        return self._cache.capacity_tokens - self.texts.num_kept(length)

    def width(self, num_sequences: int) -> int:
        """Return the most rows of each sequence in a step that serves so many."""
        return max(1, STEP_ROWS // num_sequences)

    def join(self, slot: int, params: SamplingParams) -> None:
        """Let a sequence begin in a slot, which is scored so."""
        self._sampling.assign(slot, params)
        self.texts.join(slot)

    def leave(self, slot: int) -> None:
        """End a slot's sequence, if there is one."""
        self._sampling.release(slot)

    def holds(self, slot: int, tokens: Sequence[int]) -> bool:
        """Return whether the cache has the keys of exactly these tokens."""
        return self.texts.holds(slot, tokens)

    def adopt(self, slot: int, tokens: Sequence[int], places: Sequence[int]) -> None:
        """Let the text whose keys the cache holds go on with nodes of the tree: move their keys to their places."""
        spare = self._cache.spare_positions
        self._cache.adopt(slot, [spare[place] for place in places], self._cache.length(slot))
        self.texts.learned(slot, tokens)
        self.texts.move_on(slot)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture the steps of all shapes, which would hold up the first windows, as far as no filter is asked for.

        On the CPU there is nothing to do. Leaves keys in the first spare position alone.
        """
        if self._device.type != "cuda":
            return
        self._cache.begin_window([], [])  # a step is about all sequences; the last pass may have read a single prompt
        count, greedy = self._batch, [self._cache.spare_positions[:1]] * self._batch
        nothing = [StepLine(s, [], [], [], [], fed=0, committed=0) for s in range(count)]
        steps = [
            (make, shape)
            for shape in captured_shapes(count, width=self.width(count), capacity_tokens=self._cache.capacity_tokens)
            for make in ((self._nodes_step, self._greedy_step) if shape.width <= NARROW_ROWS else (self._nodes_step,))
        ]
        with self.graphs.eager():  # compiles
            for params in WARM_UP_SAMPLINGS:
                for slot in range(count):
                    self.join(slot, params)
                for make, shape in steps:
                    self._lay_out(nothing, greedy, shape)
                    self._run(make, shape)  # a greedy step goes by what the nodes' before it has fetched
        for slot in range(count):
            self.leave(slot)  # without filters
        for make, shape in steps:
            self.graphs.capture(self._key(make, shape), partial(make, shape))
        self._cache.adopt(0, self._cache.spare_positions[:1], 0)
        self.graphs.wait()

    @torch.inference_mode()
    def expand(self, asked: Mapping[int, Asked]) -> dict[int, list[Children]]:
        """Return what may follow some nodes, in one step, and down the greedy path behind the last of them, a step for
        each of its nodes. Waits.

        Args:
            asked: By sequence. A root that has not been expanded comes first; what was is not asked again. Spines are
                cut to the shortest of them, and only few nodes may come with one.

        Returns:
            For each sequence what follows its nodes, or the first of them that there was room for, then what follows
            those of its greedy path. A node whose logits are NaN has no children.
        """
        width = self.width(len(asked))
        lines = [self._line(slot, one, width) for slot, one in asked.items()]
        self._cache.begin_window(list(asked), [line.fed for line in lines])
        further = min(len(one.greedy_places) for one in asked.values())
        ends = [line.positions[-1] + 1 for line in lines]
        frequency_set = self._runner.rope.frequency_set
        if any(frequency_set(end) != frequency_set(end + further) for end in ends):
            further = 0  # a row's frequencies are those of one length
        shape = self._shape(lines, width, further)
        spare = self._cache.spare_positions
        greedy = [[spare[place] for place in one.greedy_places[:further]] for one in asked.values()]
        recorder, asked_rows = self.recorder, [len(line.tokens) for line in lines]
        with recorder.span("tree step", rows=asked_rows, greedy_steps=further) if recorder else nullcontext():
            self._lay_out(lines, greedy, shape)
            self._run(self._nodes_step, shape)
            for _ in range(further):
                self._run(self._greedy_step, shape)
        self.graphs.wait()
        outputs = self.graphs.outputs_host.reshape(len(self._outputs), -1)[: shape.num_rows + further * shape.batch]
        tokens = outputs[:, : self._children].tolist()
        scores = outputs[:, self._children :].view(np.float32).tolist()
        answers: dict[int, list[Children]] = {}
        for number, line in enumerate(lines):
            if line.fed:
                self.texts.learned(line.slot, asked[line.slot].text[-line.fed :])
            # The last of the known tokens is the root where that is asked about.
            first = number * shape.width + max(0, line.fed - 1)
            last = number * shape.width + len(line.tokens)
            rows = [*range(first, last), *range(shape.num_rows + number, len(tokens), shape.batch)]
            answers[line.slot] = [_children(tokens[row], scores[row]) for row in rows]
        return answers

    def _line(self, slot: int, asked: Asked, width: int) -> StepLine:
        """Return the rows of one sequence, after the cache has caught up with most of its text."""
        text, nodes = asked.text, asked.nodes
        fed: Sequence[int] = ()
        if not nodes[0][1]:
            # The root's own keys are written in any case, so that it always is the last of these rows.
            fed = self.texts.catch_up_but(slot, text, min(_MOST_FED, width - 1))
            nodes = nodes[1:]
        nodes = nodes[: (min(width, NARROW_ROWS) if asked.greedy_places else width) - len(fed)]
        spare = self._cache.spare_positions
        paths = [[spare[place] for place in places] for _, places in nodes]
        assert all(path and len(path) <= MOST_DEPTH for path in paths)
        end = len(text) - self.texts.starts[slot]
        indices = list(range(end - len(fed), end))
        return StepLine(
            slot,
            tokens=[min(token, self.texts.last_token) for token in (*fed, *(token for token, _ in nodes))],
            positions=[*indices, *(end - 1 + len(path) for path in paths)],
            cache_positions=[*indices, *(path[-1] for path in paths)],
            paths=[*([] for _ in indices), *paths],
            fed=len(fed),
            committed=end,
        )

    def _shape(self, lines: Sequence[StepLine], width: int, further: int) -> BatchShape:
        depth = max(1, *(len(path) for line in lines for path in line.paths)) + further
        reach = max(max(line.positions) for line in lines) + 1 + further
        shape = BatchShape(len(lines), max(len(line.tokens) for line in lines), depth, reach)
        if self._device.type != "cuda":
            return shape
        return captured_shape(shape, width=width, capacity_tokens=self._cache.capacity_tokens)

    def _lay_out(self, lines: Sequence[StepLine], greedy: Sequence[Sequence[int]], shape: BatchShape) -> None:
        """Write what the next step is about to where it will fetch it."""
        self.graphs.begin()
        sizes = tree_input_sizes(shape)
        parts = unpack(self.graphs.inputs_host, sizes)
        tokens, positions, cache_positions, owners, slots, committed, ancestors, *of_lines, greedy_positions, _ = parts
        paths, greedy_positions = (
            ancestors.reshape(-1, shape.depth),
            greedy_positions.reshape(MOST_GREEDY_STEPS, shape.batch),
        )
        self.graphs.inputs_host[: packed_words(sizes)] = 0
        positions.fill(-1)
        for number, (line, following) in enumerate(zip(lines, greedy, strict=True)):
            first = number * shape.width
            last = first + len(line.tokens)
            tokens[first:last], positions[first:last] = line.tokens, line.positions
            cache_positions[first:last] = line.cache_positions
            owners[first : first + shape.width] = line.slot
            for row, path in enumerate(line.paths, first):
                paths[row, : len(path)] = path
            start, rope_shift = self.texts.starts[line.slot], self.texts.rope_shifts[line.slot]
            values = (line.slot, line.committed, start, rope_shift, max(first, last - 1))
            for part, value in zip((slots, committed, *of_lines), values, strict=True):
                part[number] = value
            greedy_positions[: len(following), number] = following
        self._frequencies.set_rows(positions.tolist())

    def _parts(self, shape: BatchShape) -> list[torch.Tensor]:
        """Return the inputs of a step, in the order of `tree_input_sizes`."""
        return unpack(self.graphs.inputs, tree_input_sizes(shape))

    def _key(self, make: Callable[[BatchShape], None], shape: BatchShape) -> Hashable:
        return make.__name__, shape, self._sampling.graph_key

    def _run(self, make: Callable[[BatchShape], None], shape: BatchShape) -> None:
        self.graphs.run(self._key(make, shape), partial(make, shape))

    def _nodes_step(self, shape: BatchShape) -> None:
        """Fetch what the step is about, feed the rows and write their best children into `_outputs`. Captured: no
        tensor of the host but those that never move."""
        self.graphs.fetch(packed_words(tree_input_sizes(shape)))
        self._pass(shape)
        self._choose(shape, slice(0, shape.num_rows), self._outputs[: shape.num_rows])
        self._last_outputs[: shape.batch] = self._outputs[self._parts(shape)[9].long()]
        self.graphs.show(self._outputs[: shape.num_rows])

    def _greedy_step(self, shape: BatchShape) -> None:
        """Go on from each sequence's last row with its best child, whose keys go to the next of its greedy positions;
        its own children are written into `_outputs`, behind those of the rows and of earlier such steps. Captured."""
        batch, num_rows, answer = shape.batch, shape.num_rows, self._last_outputs[: shape.batch]
        tokens, positions, cache_positions, _, _, committed, ancestors, *rest = self._parts(shape)
        _, _, last, greedy_positions, steps_done = rest
        live, step = last.long(), steps_done.long()  # [B], [1]
        position, (cache_position,) = positions[live] + 1, greedy_positions.view(MOST_GREEDY_STEPS, batch)[step]
        positions.fill_(-1)  # all other rows only fill up
        positions[live], cache_positions[live] = position, cache_position
        tokens[live] = answer[:, 0].clamp(0, self.texts.last_token)
        ancestors.view(num_rows, shape.depth)[live, (position - committed).long()] = cache_position
        self._pass(shape)
        self._choose(shape, live, answer)
        found = self._outputs[num_rows : num_rows + MOST_GREEDY_STEPS * batch].view(MOST_GREEDY_STEPS, batch, -1)
        found.index_copy_(0, step, answer[None])
        steps_done += 1
        self.graphs.show(found, num_rows * 2 * self._children)

    def _pass(self, shape: BatchShape) -> None:
        """Feed the rows; their logits are in `_logits` then."""
        runner, frequencies = self._runner, self._frequencies.tensor[: shape.num_rows]
        shifts = self._parts(shape)[8].repeat_interleave(shape.width) if self.texts.streaming else None
        rows = device_rows(shape, self.graphs.inputs, runner.rope, frequencies, shifts)
        logits = window_pass(runner.decoder, runner.streamer.layers(), runner.cache, rows)
        self._logits[: shape.num_rows].copy_(logits)
        if self._excluded is not None:
            self._logits[: shape.num_rows].index_fill_(1, self._excluded, -torch.inf)

    def _choose(self, shape: BatchShape, rows: slice | torch.Tensor, out: torch.Tensor) -> None:
        """Write the best children of some rows."""
        parts = self._parts(shape)
        ahead, owners = parts[1] + 1, parts[3]
        if self.texts.streaming:
            ahead = ahead + parts[7].repeat_interleave(shape.width)
        ahead, owners = ahead[rows], owners[rows]
        scores = perturbed_logits(self._logits[rows, : self._vocab_size], self._sampling, ahead, owners)  # [R, V]
        # Of equal scores the chain's choice comes first, as top-k alone does not promise; -1 where there are NaN.
        first = sample(scores, self._greedy, ahead, owners)
        chosen = first.clamp_min(0)[:, None]
        first_score = scores.gather(1, chosen)
        others, tokens_of_others = scores.scatter_(1, chosen, -torch.inf).topk(self._children - 1, dim=1)
        out[:, 0] = first
        out[:, 1 : self._children] = tokens_of_others
        out[:, self._children :] = torch.cat((first_score, others), dim=1).view(torch.int32)


def _children(tokens: list[int], scores: list[float]) -> Children:
    """Return what is allowed of a row of the output; nothing where its logits were NaN, or the best one overflowed."""
    if tokens[0] < 0 or not isfinite(scores[0]):
        return Children([], [])
    allowed = [(token, score) for token, score in zip(tokens, scores, strict=True) if isfinite(score)]
    return Children([token for token, _ in allowed], [score for _, score in allowed])


class ChildProbabilities:
    """Makes probabilities of a node's children from the draft's scores for them.

        p[i] = (1 - missed) * softmax(sharpness * scores)[i]

    `missed` is the probability that the target says something else than any of them. Both follow what the target says:
    `missed` as a running mean, `sharpness` by steps along the gradient of the log-likelihood,
    d/ds log p[i] = scores[i] - E[scores], in units of its own variance, so that neither the scale of the scores nor
    their number matters.
    """

    def __init__(self) -> None:
        self.sharpness, self.missed = 1.0, 0.15
        self._curvature = 0.0  # running mean of the variance of sharpness * scores
        self._observed = 0  # observations of a child
        self._asked = 0  # observations

    def log_probabilities(self, scores: Sequence[float]) -> list[float]:
        """Return the log-probabilities of children with these finite scores, given their parent."""
        if not scores:
            return []
        best = max(scores)
        weights = [math.exp(self.sharpness * (score - best)) for score in scores]
        rest = math.log1p(-self.missed) - math.log(sum(weights))
        return [self.sharpness * (score - best) + rest for score in scores]

    def observe(self, scores: Sequence[float], child: int | None) -> None:
        """Learn that the target has said the child with this index, or none of them (None)."""
        if not scores:
            return
        self._asked += 1
        self.missed += ((child is None) - self.missed) / min(self._asked + 10, _MEMORY)
        self.missed = min(max(self.missed, _LEAST_MISSED), _MOST_MISSED)
        if child is None or len(scores) == 1:
            return
        best = max(scores)
        weights = [math.exp(self.sharpness * (score - best)) for score in scores]
        total = sum(weights)
        # Relative to the best score, in units of the sharpness: of the order of one whatever the scale.
        scaled = [self.sharpness * (score - best) for score in scores]
        mean = sum(weight * value for weight, value in zip(weights, scaled, strict=True)) / total
        variance = sum(weight * (value - mean) ** 2 for weight, value in zip(weights, scaled, strict=True)) / total
        self._observed += 1
        memory = min(self._observed, _MEMORY)
        self._curvature += (variance - self._curvature) / memory
        step = (scaled[child] - mean) / (max(self._curvature, 1e-2) * (memory + 10))
        logarithm = math.log(self.sharpness) + min(max(step, -_MOST_STEP), _MOST_STEP)
        self.sharpness = min(max(math.exp(logarithm), _LEAST_SHARPNESS), _MOST_SHARPNESS)


class StepWorth:
    """Whether another step of drafting pays while no pass runs: the tokens that it adds to a window against those that
    the time it takes is worth, at the rate at which tokens have come lately.

    Args:
        free_s: Seconds behind a pass in which drafting delays nothing: the link brings what the next one begins with.
    """

    def __init__(self, free_s: float = 0.0) -> None:
        self._free_s = free_s
        # Of a step, and of each of several that follow each other without the host, and how often it was measured.
        self._level_s: dict[bool, tuple[float, int]] = {}
        self._began_s: float | None = None
        self.forget()

    @property
    def tok_per_s(self) -> float | None:
        """Of all sequences together, lately; None as long as nothing is known."""
        return self._new_tokens / self._round_s if self._round_s > 0 else None

    def forget(self) -> None:
        """Forget what was measured: what comes next is nothing like it."""
        self.pause()
        self._new_tokens, self._round_s, self._rounds = 0.0, 0.0, 0.0  # all decayed

    def pause(self) -> None:
        """Note that the next round to begin does not follow the last one."""
        self._began_s = None

    def begin(self, new_tokens: int) -> None:
        """Begin the proposals of another round; the round before gave so many tokens."""
        now_s = time.perf_counter()
        if self._began_s is not None:
            round_s, weight = now_s - self._began_s, 1.0
            if self._rounds and round_s * self._rounds > _OUTLIER * self._round_s:
                weight = _OUTLIER * self._round_s / (self._rounds * round_s)
            self._new_tokens = _KEPT * self._new_tokens + weight * new_tokens
            self._round_s = _KEPT * self._round_s + weight * round_s
            self._rounds = _KEPT * self._rounds + 1
        self._began_s = now_s

    def seconds(self, levels: int) -> float | None:
        """Return how long so many steps that follow each other without the host take; None while that is unknown."""
        level_s, count = self._level_s.get(levels > 1, (0.0, 0))
        return levels * level_s if count >= _ENOUGH else None

    def stepped(self, seconds: float, levels: int = 1, *, hidden: bool = False) -> None:
        """Note how long so many steps of drafting took; `hidden` behind a pass, where they take no less than
        alone."""
        known_s, count = self._level_s.get(levels > 1, (math.inf, 0))
        level_s = seconds / levels
        if count < _ENOUGH or _OUTLIER * level_s < known_s:
            known_s = min(known_s, level_s)  # the first ones load what they need
        elif not hidden:
            known_s += (1 - _KEPT) * (min(level_s, _OUTLIER * known_s) - known_s)
        self._level_s[levels > 1] = known_s, count + 1

    def pays(self, gain: float, levels: int = 1) -> bool:
        """Return whether so many steps should be made that are expected to add `gain` tokens to what the next pass
        gives.

        As long as no rate is known only those that delay nothing are: first windows that were drafted to their end
        took 0.30 and 0.13 s, where 17 tokens came every 0.2 s (135M draft of a 13B target, H200).
        """
        step_s, rate = self.seconds(levels), self.tok_per_s
        if self._began_s is None or step_s is None:
            return True
        late_s = time.perf_counter() + step_s - self._began_s - self._free_s
        return late_s <= 0 if rate is None else gain >= rate * min(step_s, late_s)
