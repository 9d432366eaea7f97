"""A draft model on the device, for all sequences at once: steps that need no host in between, and steps over trees.

`grow` runs steps that are known in advance: each is one CUDA graph (on the CPU the same code, run eagerly) that feeds
the newest tokens of a `DeviceWindow`, samples the next ones with the target's noise and writes them into the window
behind them. A chain is the tree of width one, whose every level is the same step.

`expand` says for up to 32 nodes of all sequences together, which the host chooses, what may follow each of them. Keys
of the known text, its last token included, lie at their own positions; those of a node in a spare position behind all
others of the cache, for as long as the node lives. So a tree that grows and a text that grows never touch, nodes that
survive are never written again, and a path that came true is copied to its positions in one launch (`adopt`), or read
again where layers have states. What is known of a text but has no keys yet rides along in the first step behind it.

A copy of the target's own layers shares the target's cache and writes to no position that a pass may write: the text's
last token, the root, has its keys in the first of the spare positions, where they are written anew with every new root.

A head is a draft whose rows read hidden states, too: those of the target as far as the text is known, and behind it
what the row before has given, which a store on the device keeps for every node. So a node can only be asked about once
its parent has been, and a path that came true is read again with what the target made of it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from offload_runtime_kernels.window_steps import StepLayout, StepRotation, put_tokens, step_rows

from offload_runtime.cache.retrieval import RetrievedDraftCache
from offload_runtime.core import BatchShape
from offload_runtime.models.layers import Rows
from offload_runtime.models.rope import RowFrequencies
from offload_runtime.params import SamplingParams
from offload_runtime.runners import graphs
from offload_runtime.runners.draft_kv import (
    CATCH_UP_TOKENS,
    REWRITTEN_TOKENS,
    DraftKVState,
    TargetKVState,
)
from offload_runtime.runners.head_decoder import HeadDecoder
from offload_runtime.runners.head_kv import HEAD_CATCH_UP_TOKENS, HeadKVState
from offload_runtime.runners.model_runner import ModelRunner, device_rows, window_residual
from offload_runtime.sampling import WARM_UP_SAMPLINGS, SlotSampling, perturbed_logits, sample
from offload_runtime.speculation.window import MOST_LEVELS, WINDOW_CAPACITY_TOKENS, DeviceWindow, Level, SlotUpdate
from offload_runtime.stream.device import overwrite, pack_words, packed_words, unpack

# Known tokens that a narrow step over a tree feeds besides the nodes.
_MOST_FED = 3
# Steps that feed what a draft has not read while nothing was asked of it; a pass of its own reads more.
_MOST_FEEDING_STEPS = 4
# A draft may be anything from useless to certain, and one window of surprises must not settle it.
_LEAST_SHARPNESS, _MOST_SHARPNESS = 0.02, 50.0
_MOST_STEP = 0.5  # of the sharpness' logarithm, by one observation
_LEAST_MISSED, _MOST_MISSED = 0.005, 0.95
# Observations that a running mean looks back on; a window brings about ten, and texts change their nature.
_MEMORY = 200


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


class Children(NamedTuple):
    """Holds what may follow a node, the best first, and the finite scores (logits / T + noise) that say so."""

    tokens: list[int]
    scores: list[float]


class StepRow(NamedTuple):
    """Is a row of a step. Its position, `cache_position` and `path`, behind the committed tokens and up to itself, are
    the cache's: the text's less what a streaming cache has let go of. A row of a head reads the hidden state `source`,
    and its own is for the `destination`, by their numbers in the store."""

    token: int
    position: int
    cache_position: int
    path: Sequence[int]
    source: int = 0
    destination: int = 0


class StepLine(NamedTuple):
    """Holds the rows of one sequence in a step, behind so many `committed` tokens: `fed` tokens of its text, then
    nodes; it is asked about those from `first` on, which may be the text's last."""

    slot: int
    rows: Sequence[StepRow] = ()
    fed: int = 0
    first: int = 0
    committed: int = 0


class DraftRunner:
    """Guesses with a small model on the compute device and the target's own noise, for all sequences in one step.

    Everything is enqueued on the current stream, which must be the same, or made to wait, from call to call.

    Args:
        runner: Of the small model. If its cache is a `StreamingDraftCache`, it needs a
            `RopeTable(config, device, fixed_length=cache.capacity_tokens)`.
        vocab_size: What the draft may propose are ids below this,
        excluded: but for these, which mean something else in the target, or nothing.
        batch: Sequences of the draft's cache that it serves; each has the number of the target's.
        window: Where known tokens come from and guesses of `grow` go; by default one of its own.
        max_tokens_with_draft: Of a sequence with what is only tentative; by default what the cache was reserved for.
        shares_kv: Whether the model is the target with copies of its layers, and the cache the target's.

    Attributes:
        texts: What the cache holds of every sequence: before steps all of the tokens but those that a first step feeds
            itself, and afterwards also those whose keys the steps have written.
        draft_state: The same where the cache is the draft's own; None where it is the target's.
        num_places: Nodes of a sequence's tree that can have keys at a time; 0 where there are only chains.
        graphs: Its steps.
        rereads: Whether a path that came true is read again, as layers have states, or hidden states or committed keys
            are the target's.
        name: What its proposals are counted as.
        hidden: What a head's rows read; None of other drafts, whose nodes may be asked about with their parents.
        most_depth: Deepest node of a tree.
        devices: Of its layers, the first one first.
        on_demand: Whether steps fetch experts into a pool that passes of the target use, too, with which they then take
            turns, on their stream.
    """

    def __init__(
        self, runner: ModelRunner, *, vocab_size: int, excluded: Sequence[int] = (), batch: int = 1,
        window: DeviceWindow | None = None, max_tokens_with_draft: int | None = None, shares_kv: bool = False,
    ) -> None:  # fmt: skip
        self._runner, self._batch, self.shares_kv = runner, batch, shares_kv
        cache = runner.cache
        self._choosing = cache if isinstance(cache, RetrievedDraftCache) else None
        self._capacity_tokens: int = cache.capacity_tokens
        self._max_tokens_with_draft = cache.capacity_tokens if max_tokens_with_draft is None else max_tokens_with_draft
        self._vocab_size = vocab_size
        self.device = device = runner.rope.device
        self._excluded = torch.tensor(excluded, dtype=torch.int64, device=device) if excluded else None
        self._sampling = SlotSampling(batch, device)
        self._own_window = window is None
        self.window = window or DeviceWindow(device, batch=batch, counts=graphs.warm_up_batches(batch))
        self._spare = cache.spare_positions if self._own_window else range(0)
        self._root_positions, self._spare = self._spare[:shares_kv], self._spare[shares_kv:]  # the former at most one
        self.num_places, self._has_states = len(self._spare), cache.step_tokens is not None
        self.name, self.hidden = "self" if shares_kv else runner.decoder.config.name, None
        self.draft_state: DraftKVState | None = None if shares_kv else DraftKVState(runner, batch=batch)
        if isinstance(runner.decoder, HeadDecoder):
            self.draft_state = of_head = HeadKVState(runner, batch=batch)
            self.hidden = of_head.hidden
        self.texts = self.draft_state or TargetKVState(runner, batch=batch)
        self._roots = [0 if self.hidden is None else self.hidden.of_root(slot) for slot in range(batch)]
        # What steps read besides the window, a row for each sequence; the tensors never move.
        self._cursor = torch.zeros(batch, dtype=torch.int32, device=device)  # the position behind what was named last
        self._slots = torch.arange(batch, dtype=torch.int32, device=device)
        self._frequencies = RowFrequencies(runner.rope, batch)
        self._rotation = StepRotation(self._frequencies.tensor, runner.rope.scaling)
        self._first_rows = 1 if shares_kv else REWRITTEN_TOKENS if self.hidden is None else HEAD_CATCH_UP_TOKENS
        self._least = 1 if self.hidden is None else 2  # tokens of a text that there is a row about
        self._first = Level(StepLayout.chain(-self._first_rows, self._first_rows, device))
        self._next = Level(StepLayout.chain(-1, 1, device), follows=True)
        self._place = torch.zeros(batch, 2, dtype=torch.int32, device=device)  # start and RoPE shift
        self._place_host = [(0, 0)] * batch
        # What steps over trees write; a draft that only grows what is known in advance has none of it.
        self.rereads = self._has_states or self.hidden is not None or shares_kv
        self._step_rows = graphs.COPY_STEP_ROWS if shares_kv else graphs.STEP_ROWS
        self._depth = graphs.MOST_DELTA_DEPTH if self._has_states else graphs.MOST_DEPTH  # of paths in a step
        self.most_depth = self._depth - self._most_fed(self.width(1))
        rows = max(self._step_rows, batch) if self.num_places else 0
        self._children = min(graphs.CHILDREN, vocab_size, runner.decoder.config.vocab_size)
        self._greedy = SlotSampling(batch, device)
        self._row_frequencies = RowFrequencies(runner.rope, rows)
        self._last_outputs = torch.zeros(batch, 2 * self._children, dtype=torch.int32, device=device)
        count = rows + graphs.MOST_GREEDY_STEPS * batch if rows else 0
        self._outputs = torch.zeros(count, 2 * self._children, dtype=torch.int32, device=device)
        self.on_demand = not runner.streamer.has_all
        self.devices = runner.decoder.partition.devices
        self.graphs = graphs.StepGraphs(
            device, self.devices[1:], input_words=graphs.tree_input_words(batch) if rows else 0,
            output_words=self._outputs.numel(), most_graphs=graphs.MOST_GRAPHS * (2 if rows else 1),
            end_step=runner.streamer.end_pass,
        )  # fmt: skip

    def warm_up(self) -> None:
        """Compile the kernels of all steps, which would hold up the first proposals, and capture those over trees of
        one sequence or all, and those of chains behind texts of up to 2048 tokens, as far as no filter is asked for.
        Leaves the cache empty.

        The steps of a shared window are left to the retrieval verifier.
        """
        if self._own_window:
            lengths = {1, *graphs.warm_up_lengths(self._capacity_tokens - 1)}
            if self._has_states:  # steps that go beyond a chunk, as behind whole blocks, are others
                lengths |= {max(1, length - 1) for length in lengths}
            self.graphs.warm_up(self._take_steps, batch=self._batch, lengths=sorted(lengths))
        longest = self._capacity_tokens - 2 * CATCH_UP_TOKENS - self._first_rows + 1
        for length in (0, *graphs.warm_up_lengths(longest)):
            self._catch_up_behind(length)
        self.texts.warm_up()
        if self._choosing is not None:
            self._choosing.warm_up()
        self._forget()
        if self.num_places and self.device.type == "cuda":
            self._capture_tree_steps()

    def _take_steps(self, slots: Sequence[SamplingParams], length: int) -> None:
        """Make a first step and a later one about these sequences, of which the first has a text of so many tokens."""
        for slot, params in enumerate(slots):
            self.join(slot, params)
        text = self.texts.text_to_warm_up(0, length + self._least - 1)
        self.chains({0: text}, {0: min(2, self.room(length))})
        for slot in range(len(slots)):
            self.leave(slot)

    def _catch_up_behind(self, length: int) -> None:
        """Feed what rounds bring that others have proposed, behind a text of so many tokens."""
        self._forget()
        inputs = length + self._first_rows  # which a first step feeds itself
        for more in (0, *(1 << power for power in range(CATCH_UP_TOKENS.bit_length()))):
            inputs += more
            if inputs <= self._capacity_tokens:
                self.texts.catch_up(0, self.texts.text_to_warm_up(0, inputs), self._first_rows)

    def _forget(self) -> None:
        """Empty the cache."""
        for slot in range(self._batch):
            self.texts.catch_up(slot, [])

    @torch.inference_mode()
    def _capture_tree_steps(self) -> None:
        """Capture the steps over trees of all shapes, of all sequences and of one."""
        cache = self._runner.cache
        cache.begin_window([], [])  # a step is about all sequences; the last pass may have read a single prompt
        greedy = [self._spare[:1]] * self._batch
        nothing = [StepLine(slot) for slot in range(self._batch)]
        steps = [
            (make, shape)
            for count in sorted({self._batch, 1}, reverse=True)
            for shape in graphs.captured_shapes(count, self.width(count), self._depth, self._capacity_tokens)
            for make in (self._nodes_step, self._greedy_step)
            if make == self._nodes_step or self._may_be_greedy(shape.width)
        ]
        with self.graphs.eager():  # compiles
            for params in WARM_UP_SAMPLINGS:
                for slot in range(self._batch):
                    self.join(slot, params)
                for make, shape in steps:
                    self._lay_out(nothing[: shape.batch], greedy[: shape.batch], shape)
                    self._run_over(make, shape)  # a greedy step goes by what the nodes' before it has fetched
        for slot in range(self._batch):
            self.leave(slot)  # without filters
        for make, shape in steps:
            if self._runner.streamer.can_capture(shape.num_rows):
                if self.on_demand:  # behind a step that brought whole layers
                    self._runner.streamer.begin_pass(shape.num_rows)
                self.graphs.capture(self._key(make, shape), partial(make, shape))
        if not self.rereads:
            cache.adopt(0, self._spare[:1], 0)
        self.graphs.wait()

    def join(self, slot: int, params: SamplingParams) -> None:
        """Let a sequence begin in a slot, whose tokens are chosen so."""
        self._sampling.assign(slot, params)
        self.window.join(slot)
        self.texts.join(slot)

    def leave(self, slot: int) -> None:
        """End a slot's sequence, if there is one: steps go on without it."""
        self._sampling.release(slot)
        self.window.leave(slot)

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        """Put a prompt into the cache before anything is asked for; nothing where there is no room to propose, unless
        what is observed has to be told from what was before."""
        if self.hidden is not None or self.room(len(tokens)) > 0:
            self.texts.prepare(slot, tokens)

    def observe(self, slot: int, position: int, tokens: Sequence[int], hidden: torch.Tensor) -> None:
        """Take the target's hidden states of committed tokens, as a `Drafter` does."""
        assert self.draft_state is not None, "a copy reads no hidden states"
        with self.graphs.span("observe", tokens=len(tokens)):
            self.draft_state.observe(slot, position, tokens, hidden)

    def room(self, length: int) -> int:
        """Return the most tokens that can be proposed in a row behind `length` tokens, of which the last needs no keys:
        none behind more than the cache is for."""
        kept = self.texts.num_kept(length)
        if kept > self._capacity_tokens:
            return 0
        step_tokens, most = self._runner.cache.step_tokens, WINDOW_CAPACITY_TOKENS
        most = most if step_tokens is None else min(most, step_tokens - MOST_LEVELS)
        return min(self._max_tokens_with_draft - kept + 1, most - self._first_rows)

    def width(self, num_sequences: int) -> int:
        """Return the most rows of each sequence in a step over trees that serves so many."""
        return max(1, self._step_rows // num_sequences)

    def chains(self, texts: Mapping[int, Sequence[int]], counts: Mapping[int, int]) -> dict[int, list[int]]:
        """Return so many tokens behind each of some texts, at least one of each and no more than there is `room` for;
        they end where logits are NaN. There are as many steps as the longest has tokens, and one wait for all."""
        known = {slot: self._catch_up(slot, texts[slot], self._first_rows) for slot in counts}
        lengths = {slot: len(texts[slot]) for slot in counts}
        inputs = {
            slot: SlotUpdate(known[slot], lengths[slot], lengths[slot] + count, lengths[slot] + count)
            for slot, count in counts.items()
        }
        self.window.upload(inputs)
        most = max(counts.values())
        self.grow([self._first, *[self._next] * (most - 1)], most - 1, lengths)
        outputs, found = self.window.read(), dict[int, list[int]]()
        for slot, one in inputs.items():
            guesses = outputs[slot].between(one.end, one.stop)
            if not self.shares_kv:  # where the next pass writes the rows of its own
                self.texts.learned(slot, known[slot] if self.hidden is not None else [*known[slot], *guesses[:-1]])
            found[slot] = guesses[: guesses.index(-1)] if -1 in guesses else guesses
        return found

    @torch.inference_mode()
    def grow(self, levels: Sequence[Level], tokens: int, longest: Mapping[int, int]) -> None:
        """Enqueue the steps that put a tree behind each sequence's `end` without waiting: its nodes in their order.

        Args:
            levels: Of the tree. The cache must have caught up to all but the tokens before `end` that the first feeds.
            tokens: How many of the nodes get keys.
            longest: Of every sequence that may not stand still: `end` is at most this, and equal to it where the host
                knows.
        """
        cache, inputs = self._runner.cache, self.window.inputs
        # Of the keys, when the last step has run.
        lengths = {
            slot: min(end + tokens, inputs[slot].last - 1) - self.texts.starts[slot] for slot, end in longest.items()
        }
        reach = max(lengths.values())
        assert levels and reach <= self._max_tokens_with_draft
        if self.device.type == "cuda":  # attention looks at more keys than there are, so that few graphs are needed
            reach = graphs.graph_reach(reach, self._max_tokens_with_draft)
        for slot, length in lengths.items():
            self._frequencies.set(slot, length)
        # Where a streaming cache stands; any other one stays where it has been all the time.
        places = list(zip(self.texts.starts, self.texts.rope_shifts, strict=True))[: self._batch]
        if places != self._place_host:
            overwrite(self._place, torch.tensor(places, dtype=torch.int32))
            self._place_host = places
        new = {slot: length - cache.length(slot) for slot, length in lengths.items()}
        if self._choosing is not None:
            self._choosing.begin_steps(range(self.window.num_rows), new)
        else:
            cache.begin_window(list(new), list(new.values()))
        with self.graphs.span("draft steps", steps=len(levels), slots=len(longest)):
            for number, level in enumerate(levels):
                choice = None if self._choosing is None else self._choosing.begin_step(first=number == 0)
                key = level, self.window.num_rows, reach, choice, cache.step_lag, self._sampling.graph_key
                rows = self.window.num_rows * len(level.layout.cache_positions)
                self._run(key, partial(self._grow_step, level, reach), rows)

    def _grow_step(self, level: Level, reach: int) -> None:
        """Feed the rows of a level and write what they name into the window. Captured: no tensor of the host."""
        window = self.window
        num_rows, slots = window.num_rows, self._slots[: window.num_rows]
        cursor = self._cursor[:num_rows]
        start = cursor if level.follows else window.end
        step = step_rows(
            window.rows, start, level.layout, self._rotation, last_token=self.texts.last_token,
            place=self._place if self.texts.is_shifted else None,
        )  # fmt: skip
        rows, following, owners = Rows.of_step(step, slots, max_length=reach), step.following, step.slots
        sources = None
        if self.hidden is not None:
            newest = self.hidden.chains[:num_rows]
            sources = newest if level.follows else self.hidden.of_text(owners, following - 2)
        logits, given = self._pass(rows, sources)
        if self.hidden is not None:
            self.hidden.rows.index_copy_(0, newest, given.unflatten(0, (num_rows, -1))[:, -1])
        if level.layout.ancestors is None:
            logits, following, owners = logits.unflatten(0, (num_rows, -1))[:, -1], step.ahead, slots
        if level.most == 1:
            tokens = sample(logits, self._sampling, following, owners)
        else:
            tokens = perturbed_logits(logits, self._sampling, following, owners).topk(level.most, dim=1).indices
        tokens = tokens.view(num_rows, -1)
        tokens = tokens if level.chosen is None else tokens[:, level.chosen]
        put_tokens(window.rows, start, tokens, offset=level.offset, cursor=cursor)

    def _pass(self, rows: Rows, hidden: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed rows, which in a head read the hidden states of these numbers: logits [N, V] of what may be proposed
        behind each, and what those of a head give in turn."""
        runner, layers = self._runner, self._runner.streamer.layers(rows.num_rows)
        if self.hidden is not None:
            assert hidden is not None
            rows = replace(rows, hidden=self.hidden.rows.index_select(0, hidden))
        logits, given = runner.decoder.outputs(window_residual(runner.decoder, layers, runner.cache, rows))
        if self._excluded is not None:
            logits.index_fill_(1, self._excluded, -torch.inf)
        return logits[:, : self._vocab_size], given

    def adopt(self, slot: int, tokens: Sequence[int], places: Sequence[int]) -> None:
        """Let the text whose keys the cache holds go on with `tokens`, the first of which are nodes of the tree with
        keys: move these to their places, unless the next step feeds them again."""
        cache = self._runner.cache
        if self.hidden is not None and len(places) == len(tokens):
            self._roots[slot] = self.hidden.of_place(slot, places[-1])  # until then
        if self.rereads or self.draft_state is None:
            return
        cache.adopt(slot, [self._spare[place] for place in places], cache.length(slot))
        self.draft_state.learned(slot, tokens[: len(places)])
        self.draft_state.move_on(slot)

    @torch.inference_mode()
    def expand(self, asked: Mapping[int, Asked]) -> dict[int, list[Children]]:
        """Return what may follow some nodes, in one step, and down the greedy path behind the last of them, a step for
        each of its nodes. Waits.

        Args:
            asked: By sequence. A root that has not been expanded comes first; what was is not asked again. Greedy
                paths are cut to the shortest of them, and only few nodes may come with one.

        Returns:
            For each sequence what follows its nodes, or the first of them that there was room for, then what follows
            those of its greedy path. A node whose logits are NaN has no children.
        """
        width = self.width(len(asked))
        lines = [self._line(slot, one, width) for slot, one in asked.items()]
        # States stand where rows begin, whatever these are, so that there is one graph of each shape.
        self._runner.cache.begin_window(list(asked), [0 if self._has_states else line.fed for line in lines])
        further = min(len(one.greedy_places) for one in asked.values())
        if any(line.first == len(line.rows) for line in lines):
            further = 0  # what was to be fed has left no room for a node
        ends = [line.rows[-1].position + 1 for line in lines]
        frequency_set = self._runner.rope.frequency_set
        if any(frequency_set(end) != frequency_set(end + further) for end in ends):
            further = 0  # a row's frequencies are those of one length
        shape = self._shape(lines, width, further)
        greedy = [[self._spare[place] for place in one.greedy_places[:further]] for one in asked.values()]
        with self.graphs.span("tree step", rows=[len(line.rows) for line in lines], greedy_steps=further):
            self._lay_out(lines, greedy, shape)
            self._run_over(self._nodes_step, shape)
            for _ in range(further):
                self._run_over(self._greedy_step, shape)
        self.graphs.wait()
        outputs = self.graphs.outputs_host.reshape(len(self._outputs), -1)[: shape.num_rows + further * shape.batch]
        tokens = outputs[:, : self._children].tolist()
        scores = outputs[:, self._children :].view(np.float32).tolist()
        answers: dict[int, list[Children]] = {}
        for number, line in enumerate(lines):
            if line.fed:
                self.texts.learned(line.slot, asked[line.slot].text[-line.fed :])
                self._roots[line.slot] = 0 if self.hidden is None else self.hidden.of_root(line.slot)
            first = number * shape.width + line.first
            last = number * shape.width + len(line.rows)
            rows = [*range(first, last), *range(shape.num_rows + number, len(tokens), shape.batch)]
            answers[line.slot] = [_children(tokens[row], scores[row]) for row in rows]
        return answers

    def _most_fed(self, width: int) -> int:
        """Return the most tokens of a text that a step feeds besides nodes: a pass of their own would take as long."""
        if self.shares_kv:
            return 1
        # Where rows choose chunks those that only fill up would count.
        return max(1 + min(_MOST_FED, width - 1), 0 if self._choosing else width - graphs.NARROW_ROWS)

    def _may_be_greedy(self, width: int) -> bool:
        """Return whether steps of so many rows may have greedy paths: narrow ones, and those that feed more of a text
        than these."""
        return width <= graphs.NARROW_ROWS or self._most_fed(width) > 1 + _MOST_FED

    def _catch_up(self, slot: int, text: Sequence[int], most: int) -> Sequence[int]:
        """Do what `DraftKVState.catch_up` does. What a few steps over trees feed they do, without nodes: they are
        graphs, where a pass of its own takes the host as long as several, however few its tokens are."""
        state, fed = self.draft_state, self._most_fed(self.width(1))
        if state is not None and self.num_places and not (self.rereads or state.is_shifted or self._choosing):
            while 0 < (missing := state.num_missing(slot, text)) - most <= _MOST_FEEDING_STEPS * fed:
                end = min(len(text) - missing + fed, len(text) - most)
                self.expand({slot: Asked(text[:end], [(text[end - 1], ())])})
        return self.texts.catch_up(slot, text, most)

    def _line(self, slot: int, asked: Asked, width: int) -> StepLine:
        """Return the rows of one sequence, after the cache has caught up with most of its text."""
        text, nodes, asks_root = asked.text, asked.nodes, not asked.nodes[0][1]
        fed: Sequence[int] = ()
        if asks_root or (self.rereads and not self.texts.holds(slot, text)):
            # The root's own keys are written in any case, so that it always is the last of these rows.
            fed = self._catch_up(slot, text, self._most_fed(width))
        is_narrow = asked.greedy_places and len(fed) <= 1 + _MOST_FED
        nodes = nodes[asks_root:][: (min(width, graphs.NARROW_ROWS) if is_narrow else width) - len(fed)]
        hidden, last_token, end = self.hidden, self.texts.last_token, len(text) - self.texts.starts[slot]
        # Where the keys of the text behind these are: its last token's, wherever they may lie, before the nodes'.
        own = [*self._root_positions] if self.shares_kv else [*range(end - len(fed), end)]
        rows = list[StepRow]()
        for number, token in enumerate(fed):
            behind = len(fed) - number  # so many tokens are left of the text
            row = StepRow(min(token, last_token), end - behind, own[number], own[: number + 1])
            if hidden is not None:
                given = hidden.unused if behind > 1 else hidden.of_root(slot)
                row = row._replace(source=hidden.of_text(slot, len(text) - behind - 1), destination=given)
            rows.append(row)
        for token, places in nodes:
            path = [*own, *(self._spare[place] for place in places)]
            row = StepRow(min(token, last_token), end - 1 + len(places), path[-1], path)
            if hidden is not None:
                above = hidden.of_place(slot, places[-2]) if len(places) > 1 else self._roots[slot]
                row = row._replace(source=above, destination=hidden.of_place(slot, places[-1]))
            rows.append(row)
            assert 0 < len(places) <= self.most_depth
        committed = end - 1 if self.shares_kv else end - len(fed)
        return StepLine(slot, rows, len(fed), len(fed) - asks_root, committed)

    def _shape(self, lines: Sequence[StepLine], width: int, further: int) -> BatchShape:
        depth = max(len(row.path) for line in lines for row in line.rows) + further
        reach = max(row.position for line in lines for row in line.rows) + 1 + further
        shape = BatchShape(len(lines), max(len(line.rows) for line in lines), depth, reach)
        if self.device.type != "cuda":
            return shape
        if self.on_demand:  # rows that only fill up count where so many as may choose most experts bring all of them
            width = min(width, max(graphs.NARROW_ROWS, graphs.captured_width(shape.width)))
        return graphs.captured_shape(
            shape._replace(depth=self._depth), width=width, capacity_tokens=self._capacity_tokens
        )

    def _lay_out(self, lines: Sequence[StepLine], greedy: Sequence[Sequence[int]], shape: BatchShape) -> None:
        """Write what the next step is about to where it will fetch it."""
        self.graphs.begin()
        width, texts = shape.width, self.texts
        padding = StepRow(0, -1, 0, (), destination=0 if self.hidden is None else self.hidden.unused)
        rows = [row for line in lines for row in (*line.rows, *[padding] * (width - len(line.rows)))]
        ancestors = array("i", bytes(4 * len(rows) * shape.depth))
        for first, row in zip(range(0, len(ancestors), shape.depth), rows, strict=True):
            ancestors[first : first + len(row.path)] = array("i", row.path)
        tokens, positions, cache_positions, _, sources, destinations = zip(*rows, strict=True)
        slots = [line.slot for line in lines]
        last = [number * width + max(0, len(line.rows) - 1) for number, line in enumerate(lines)]
        following = [
            path[step] if step < len(path) else 0 for step in range(graphs.MOST_GREEDY_STEPS) for path in greedy
        ]
        words = pack_words([
            tokens, positions, cache_positions, [slot for slot in slots for _ in range(width)], slots,
            [line.committed for line in lines], ancestors, [texts.starts[slot] for slot in slots],
            [texts.rope_shifts[slot] for slot in slots], last, following, (0,), sources, destinations,
        ])  # fmt: skip
        self.graphs.inputs_host[: len(words)] = words
        self._row_frequencies.set_rows(positions)

    def _parts(self, shape: BatchShape) -> list[torch.Tensor]:
        """Return the inputs of a step, in the order of `tree_input_sizes`."""
        return unpack(self.graphs.inputs, graphs.tree_input_sizes(shape))

    def _key(self, make: Callable[[BatchShape], None], shape: BatchShape) -> Hashable:
        return make.__name__, shape, self._runner.cache.step_lag, self._sampling.graph_key

    def _run(self, key: Hashable, step: Callable[[], None], rows: int) -> None:
        """Run a step of so many rows; not as graphs where these may choose more experts than have room."""
        streamer = self._runner.streamer
        if self.on_demand and not streamer.can_capture(rows):
            with self.graphs.eager():
                self.graphs.run(key, step)  # whose pass begins there
            return
        if self.on_demand:
            streamer.begin_pass(rows)  # which no replay does
        self.graphs.run(key, step)

    def _run_over(self, make: Callable[[BatchShape], None], shape: BatchShape) -> None:
        """Run a step over trees."""
        self._run(self._key(make, shape), partial(make, shape), shape.num_rows)

    def _nodes_step(self, shape: BatchShape) -> None:
        """Fetch what the step is about, feed the rows and write their best children into `_outputs`. Captured: no
        tensor of the host but those that never move."""
        self.graphs.fetch(packed_words(graphs.tree_input_sizes(shape)))
        self._choose(self._pass_over(shape), shape, slice(0, shape.num_rows), self._outputs[: shape.num_rows])
        self._last_outputs[: shape.batch] = self._outputs[self._parts(shape)[9].long()]
        self.graphs.show(self._outputs[: shape.num_rows])

    def _greedy_step(self, shape: BatchShape) -> None:
        """Go on from each sequence's last row with its best child, whose keys go to the next of its greedy positions;
        its own children are written into `_outputs`, behind those of the rows and of earlier such steps. Captured."""
        batch, num_rows, answer = shape.batch, shape.num_rows, self._last_outputs[: shape.batch]
        tokens, positions, cache_positions, _, slots, committed, ancestors, *rest = self._parts(shape)
        _, _, last, greedy_positions, steps_done, sources, destinations = rest
        live, step = last.long(), steps_done.long()  # [B], [1]
        position, (cache_position,) = positions[live] + 1, greedy_positions.view(graphs.MOST_GREEDY_STEPS, batch)[step]
        positions.fill_(-1)  # all other rows only fill up
        positions[live], cache_positions[live] = position, cache_position
        tokens[live] = answer[:, 0].clamp(0, self.texts.last_token)
        ancestors.view(num_rows, shape.depth)[live, (position - committed).long()] = cache_position
        if self.hidden is not None:
            sources[live] = destinations[live]
            destinations.fill_(self.hidden.unused)
            destinations[live] = self.hidden.of_place(slots, cache_position - self._spare.start)
        self._choose(self._pass_over(shape), shape, live, answer)
        found = self._outputs[num_rows:][: graphs.MOST_GREEDY_STEPS * batch].view(-1, batch, 2 * self._children)
        found.index_copy_(0, step, answer[None])
        steps_done += 1
        self.graphs.show(found, num_rows * 2 * self._children)

    def _pass_over(self, shape: BatchShape) -> torch.Tensor:
        """Feed the rows of a step over trees: logits as of `_pass`, and note what those of a head give."""
        streams = self.draft_state is not None and self.draft_state.streaming is not None
        shifts = self._parts(shape)[8].repeat_interleave(shape.width) if streams else None
        frequencies = self._row_frequencies.tensor[: shape.num_rows]
        rows = device_rows(shape, self.graphs.inputs, self._runner.rope, frequencies, shifts)
        *_, sources, destinations = self._parts(shape)
        logits, given = self._pass(rows, sources)
        if self.hidden is not None:
            self.hidden.rows.index_copy_(0, destinations.long(), given)
        return logits

    def _choose(self, logits: torch.Tensor, shape: BatchShape, rows: slice | torch.Tensor, out: torch.Tensor) -> None:
        """Write the best children of some of the rows of a step over trees."""
        parts = self._parts(shape)
        ahead, owners = parts[1] + 1, parts[3]
        if self.texts.is_shifted:
            ahead = ahead + parts[7].repeat_interleave(shape.width)
        ahead, owners = ahead[rows], owners[rows]
        scores = perturbed_logits(logits[rows], self._sampling, ahead, owners)  # [R, V]
        # Of equal scores the chain's choice comes first, as top-k alone does not promise; -1 where there are NaN.
        first = sample(scores, self._greedy, ahead, owners)
        chosen = first.clamp_min(0)[:, None]
        first_score = scores.gather(1, chosen)
        others, tokens_of_others = scores.scatter_(1, chosen, -torch.inf).topk(self._children - 1, dim=1)
        out[:, 0] = first
        out[:, 1 : self._children] = tokens_of_others
        out[:, self._children :] = torch.cat((first_score, others), dim=1).view(torch.int32)


@cache
def drafting_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all runtimes: libraries keep a workspace for every stream that they have ever worked on."""
    return torch.cuda.Stream(device)


def _children(tokens: list[int], scores: list[float]) -> Children:
    """Return what is allowed of a row of the output; nothing where its logits were NaN, or the best one overflowed."""
    fine = tokens[0] >= 0 and math.isfinite(scores[0])
    count = sum(map(math.isfinite, scores)) if fine else 0  # the first ones
    return Children(tokens[:count], scores[:count])


class ChildProbabilities:
    """Makes probabilities of a node's children from the draft's scores for them.

        p[i] = (1 - missed) * softmax(sharpness * scores)[i]

    `missed` is the probability that the target says something else than any of them. Both follow what the target says:
    `missed` as a running mean, `sharpness` by steps along the gradient of the log-likelihood,
    d/ds log p[i] = scores[i] - E[scores], in units of its own variance, so that neither the scale of the scores nor
    their number matters. With a sharpness that stays 1 four answers of 24 tokens took 38 passes in place of 35 (SmolLM2
    and a copy with 10 % of noise, trees of 16 nodes, T = 0.7).
    """

    def __init__(self) -> None:
        self.sharpness, self.missed = 1.0, 0.15
        self._curvature = 0.0  # running mean of the variance of sharpness * scores
        self._observed = 0  # observations of a child
        self._asked = 0  # observations

    def log_probabilities(self, scores: Sequence[float]) -> list[float]:
        """Return the log-probabilities of children with these scores, the best first, given their parent."""
        if not scores:
            return []
        scaled = [self.sharpness * (score - scores[0]) for score in scores]
        rest = math.log1p(-self.missed) - math.log(sum(map(math.exp, scaled)))
        return [one + rest for one in scaled]

    def observe(self, children: Children, token: int) -> None:
        """Learn that the target has said a token, of these children or none of them."""
        scores, child = children.scores, children.tokens.index(token) if token in children.tokens else None
        if not scores:
            return
        self._asked += 1
        self.missed += ((child is None) - self.missed) / min(self._asked + 10, _MEMORY)
        self.missed = min(max(self.missed, _LEAST_MISSED), _MOST_MISSED)
        if child is None or len(scores) == 1:
            return
        scaled = self.log_probabilities(scores)  # but for what they have in common; of the order of one at any scale
        weights = [math.exp(one) for one in scaled]
        mean = sum(weight * value for weight, value in zip(weights, scaled, strict=True)) / sum(weights)
        squares = (weight * (value - mean) ** 2 for weight, value in zip(weights, scaled, strict=True))
        variance = sum(squares) / sum(weights)
        self._observed += 1
        memory = min(self._observed, _MEMORY)
        self._curvature += (variance - self._curvature) / memory
        step = (scaled[child] - mean) / (max(self._curvature, 1e-2) * (memory + 10))
        logarithm = math.log(self.sharpness) + min(max(step, -_MOST_STEP), _MOST_STEP)
        self.sharpness = min(max(math.exp(logarithm), _LEAST_SHARPNESS), _MOST_SHARPNESS)
