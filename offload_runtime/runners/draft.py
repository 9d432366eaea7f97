"""The draft as a loop on the device: K steps say K tokens of every sequence, and the host only reads them.

A step is one CUDA graph (on the CPU the same code, run eagerly): it feeds the newest tokens of a `DeviceWindow`,
samples the next ones with the target's noise and writes them into the window behind them. Of a `GuessTree`, which a
retrieval verifier checks, a step says a whole level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from offload_runtime_kernels.window_steps import StepLayout, StepRotation, StepRows

from offload_runtime.kv.retrieval import RetrievedDraftCache
from offload_runtime.memory import overwrite
from offload_runtime.models.layers import Rows
from offload_runtime.models.rope import RowFrequencies
from offload_runtime.params import SamplingParams
from offload_runtime.runners.draft_kv import CATCH_UP_TOKENS, REWRITTEN_TOKENS, DraftKVState, excluded_ids
from offload_runtime.runners.graphs import StepGraphs, graph_reach, warm_up_batches, warm_up_lengths
from offload_runtime.runners.guess_tree import GuessTree
from offload_runtime.runners.target import ModelRunner, window_pass
from offload_runtime.runners.token_window import DeviceWindow, WindowInput
from offload_runtime.sampling import WARM_UP_SAMPLINGS, SlotSampling, perturbed_logits, sample
from offload_runtime.trace import TraceRecorder


class DraftModel:
    """A small model on the compute device that guesses with the target's own noise, for all sequences in one step.

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
        texts: What the cache holds of every sequence. Whoever takes steps brings it up to all of the tokens but those
            that a first step feeds itself, and tells it afterwards of which tokens the steps have written the keys.
    """

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
        # A graph cannot wait for weights that are on their way.
        self.graphs = StepGraphs(torch.device("cpu") if runner.streamer.num_streamed else device)
        # What steps read besides the window, a row for each sequence; the tensors never move.
        self._cursor = torch.zeros(batch, dtype=torch.int32, device=device)  # the position that is sampled next
        self._slots = torch.arange(batch, dtype=torch.int32, device=device)
        self.frequencies = RowFrequencies(runner.rope, batch)
        self._rotation = StepRotation(self.frequencies.tensor, runner.rope.scaling)
        # The rows of a later step of a chain, and of the first.
        self._chains = [StepLayout.chain(-count, count, device) for count in (1, REWRITTEN_TOKENS)]
        self._place = torch.zeros(batch, 2, dtype=torch.int32, device=device)  # start and RoPE shift
        self._place_host = [(0, 0)] * batch
        self.recorder: TraceRecorder | None = None  # whoever wants a trace of the steps sets it

    def warm_up(self) -> None:
        """Compile the kernels of all steps of chains, which would hold up the first proposals.

        Whoever shares the window plays its own steps. Leaves the cache empty.
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
        self.propose(texts, dict.fromkeys(texts, 2))
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
        """From now on a sequence is another one, and its tokens are chosen so."""
        self._sampling.assign(slot, params)
        self.window.join(slot)
        self.texts.join(slot)

    def leave(self, slot: int) -> None:
        """A sequence has ended, if there was one: steps go on without it."""
        self._sampling.release(slot)
        self.window.leave(slot)

    def room(self, length: int) -> int:
        """Most tokens that can be proposed behind `length` tokens: none behind more than the cache is for."""
        kept = self.texts.num_kept(length)
        if kept > self._capacity_tokens:
            return 0
        in_cache = self._max_tokens_with_draft - kept + 1  # the last guess needs no place in the cache
        return min(in_cache, self.window.capacity - REWRITTEN_TOKENS)

    def propose(self, texts: Mapping[int, Sequence[int]], counts: Mapping[int, int]) -> dict[int, list[int]]:
        """Up to `counts[s]` tokens that may follow `texts[s]`, for each s of `counts`; fewer at the end of the context
        or where logits are NaN. As many steps as the longest answer has tokens."""
        asked = {s: most for s, count in counts.items() if (most := min(count, self.room(len(texts[s])))) > 0}
        proposals: dict[int, list[int]] = {slot: [] for slot in counts}
        if not asked:
            return proposals
        for slot in asked:
            self.texts.catch_up(slot, texts[slot])
        self.window.upload({slot: _inputs(texts[slot], count) for slot, count in asked.items()})
        self.steps(max(asked.values()), longest={slot: len(texts[slot]) for slot in asked})
        outputs = self.window.read()  # the only wait for the device
        for slot, count in asked.items():
            tokens = texts[slot]
            guesses = outputs[slot].between(len(tokens), len(tokens) + count)
            self.texts.learned(slot, [*tokens[-REWRITTEN_TOKENS:], *guesses[:-1]])
            bad = next((index for index, token in enumerate(guesses) if token < 0), count)
            proposals[slot] = guesses[:bad]  # a draft with NaN logits has nothing to say
        return proposals

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        """Put a prompt into the cache before anything is asked for; nothing where there is no room to propose."""
        if self.room(len(tokens)) > 0:
            self.texts.catch_up(slot, tokens)

    @torch.inference_mode()
    def steps(self, count: int, *, longest: Mapping[int, int]) -> None:
        """Enqueue `count` steps behind each sequence's `end` without waiting: token `end` + j comes of step j.

        The cache must have caught up to all but the last two tokens before `end`.

        Args:
            count: Steps.
            longest: Of every sequence that may not stand still: `end` is at most this, and equal to it where the host
                knows.
        """
        self._enqueue([partial(self._step, first=step == 0) for step in range(count)], count - 1, longest)

    @torch.inference_mode()
    def grow(self, tree: GuessTree, *, longest: Mapping[int, int]) -> None:
        """Enqueue the steps that put a tree behind each sequence's `end` without waiting: its nodes in their order.

        The cache must have caught up to all but the last `tree.num_known` tokens before `end`. Arguments as of `steps`.
        """
        self._enqueue(
            [partial(self._level, tree=tree, level=level) for level in range(tree.num_levels)], len(tree), longest
        )

    def _enqueue(self, steps: Sequence[partial[None]], tokens: int, longest: Mapping[int, int]) -> None:
        """Run steps that write the keys of up to `tokens` tokens behind each sequence's `end`."""
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
        window.put(start, token[:, None], cursor=cursor)

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
        window.put(window.end, tokens.view(window.num_rows, -1)[:, chosen], offset=tree.levels[level].start)

    def _pass(self, layout: StepLayout, start: torch.Tensor, reach: int) -> tuple[torch.Tensor, StepRows]:
        """Feed the rows of a step: logits [B, T, V] of what may be proposed, and the rows."""
        step = self.window.rows(
            start, layout, self._rotation, last_token=self.texts.last_token,
            place=None if self.texts.streaming is None else self._place,
        )  # fmt: skip
        rows = Rows.of_step(step, self._slots[: self.window.num_rows], max_length=reach)
        runner = self.runner
        logits = window_pass(runner.decoder, runner.streamer.layers(), runner.cache, rows)
        if self._excluded is not None:
            logits.index_fill_(1, self._excluded, -torch.inf)
        return logits.view(self.window.num_rows, -1, logits.shape[1])[..., : self._vocab_size], step


def _inputs(tokens: Sequence[int], count: int) -> WindowInput:
    """A text behind which `count` tokens are proposed."""
    length = len(tokens)
    return WindowInput(tokens[-REWRITTEN_TOKENS:], length, length + count, length + count)
