"""The draft as a loop on the device: K steps say K tokens, and the host only reads them.

A step is one CUDA graph (on the CPU the same code, run eagerly): it feeds the newest tokens of a `DeviceWindow`,
samples the next one with the target's noise and writes it into the window behind them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS
from offload_runtime_kernels.window_steps import StepRotation

from offload_runtime.config import SamplingParams
from offload_runtime.kv_cache.windowed import StreamingDraftCache, kept_positions
from offload_runtime.model import Decoder, PassRows, RopeTable, RowBuilder, Window
from offload_runtime.runners.device_window import DeviceWindow
from offload_runtime.runners.passes import window_pass
from offload_runtime.runners.step_graph import StepGraphs
from offload_runtime.sampling import sample

# More new tokens than this go through the draft as a prompt; chunks are chosen by as many queries at the most.
_CATCH_UP_TOKENS = 32
# The draft's first step feeds so many tokens that the host knows already: what a verified window brought may be new to
# its cache, and the rest is written a second time.
_REWRITTEN_TOKENS = 2


class DraftRunner(Protocol):
    """What is needed of the runner of a small model."""

    @property
    def decoder(self) -> Decoder:
        """Its maths."""

    @property
    def streamer(self) -> Any:
        """Its weights: a `LayerStreamer`."""

    @property
    def cache(self) -> Any:
        """Its `KVCache`."""

    def prefill(self, sequence: int, tokens: Sequence[int]) -> torch.Tensor:
        """Put tokens into the cache and commit them."""

    def run_rows(self, rows: PassRows) -> torch.Tensor:
        """Logits [B, T, V] of a pass over prepared rows; never waits."""


@runtime_checkable
class ChoosingCache(Protocol):
    """A cache that has to know which step it serves, as the host decides what a step attends to."""

    def begin_step(self, *, first: bool) -> Hashable:
        """The next pass is the first step behind the window that was announced, or a later one.

        Returns:
            All that the pass depends on besides device memory: steps with equal ones enqueue the same work.
        """


class DraftModel:
    """A small model on the compute device that guesses with the target's own noise.

    Everything is enqueued on the current stream, which must be the same, or made to wait, from call to call.

    Args:
        runner: Of the small model. If its cache is a `StreamingDraftCache`, its `RowBuilder` needs a
            `RopeTable(config, device, fixed_length=cache.capacity_tokens)`.
        vocab_size: Of the target; what the draft's padded vocabulary has beyond it is never proposed.
        draft_vocab_size: Rows of the draft's embedding.
        sequence: The target's sequence, which keys the noise, and the batch row of the draft's cache.
        window: Where known tokens come from and guesses go; by default one of its own.
    """

    def __init__(
        self, runner: DraftRunner, *, vocab_size: int, draft_vocab_size: int, sequence: int = 0,
        window: DeviceWindow | None = None,
    ) -> None:  # fmt: skip
        self._runner = runner
        self._streaming = streaming = runner.cache if isinstance(runner.cache, StreamingDraftCache) else None
        self._choosing = runner.cache if isinstance(runner.cache, ChoosingCache) else None
        self._capacity_tokens: int = runner.cache.capacity_tokens
        self._sequence = sequence
        self._vocab_size = vocab_size
        self._last_token = draft_vocab_size - 1
        self._params = SamplingParams()
        self._cached: list[int] = []  # the leading tokens whose keys the cache holds, or held before it let go of them
        self._device = device = runner.cache.store(0).data.device
        self.window = window or DeviceWindow(device)
        fixed_length = None if streaming is None else streaming.capacity_tokens
        self._rope = RopeTable(runner.decoder.config, device, fixed_length=fixed_length)
        self._rows = RowBuilder(self._rope, device)
        # A graph cannot wait for weights that are on their way.
        self.graphs = StepGraphs(torch.device("cpu") if runner.streamer.num_streamed else device)
        # What steps read besides the window; the tensors never move.
        self._cursor = torch.zeros(1, dtype=torch.int32, device=device)  # the position that is sampled next
        self._owners = torch.full((_REWRITTEN_TOKENS,), sequence, dtype=torch.int32, device=device)
        self._rotation = StepRotation(self._rope.frequencies(1).clone(), self._rope.scaling)
        self._frequency_set = 0
        self._place = torch.zeros(2, dtype=torch.int32, device=device)  # start and RoPE shift of a streaming cache
        self._place_host = (0, 0)

    def start(self, params: SamplingParams) -> None:
        """Choose tokens this way from now on."""
        self._params = params

    def room(self, length: int) -> int:
        """Most tokens that can be proposed behind `length` tokens."""
        # The last guess needs no place in the cache.
        in_cache = self._capacity_tokens - self.num_keys(length) + 1
        return min(in_cache, self.window.capacity - _REWRITTEN_TOKENS)

    def num_keys(self, length: int) -> int:
        """Tokens of a sequence of `length` tokens that its next one is guessed from."""
        return length - self._start_for(length)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow `tokens`; fewer at the end of the context or where logits are NaN."""
        count = min(count, self.room(len(tokens)))
        if count <= 0:
            return []
        self.catch_up(tokens)
        self.window.upload(tokens[-_REWRITTEN_TOKENS:], len(tokens))
        self.steps(count, longest=len(tokens))
        proposals = self.window.read(len(tokens), count)  # the only wait for the device
        self.learned([*tokens[-_REWRITTEN_TOKENS:], *proposals[:-1]])
        bad = next((index for index, token in enumerate(proposals) if token < 0), count)
        return proposals[:bad]  # a draft with NaN logits has nothing to say

    def prepare(self, tokens: Sequence[int]) -> None:
        """Put a prompt into the cache before anything is asked for; nothing where there is no room to propose."""
        if self.room(len(tokens)) > 0:
            self.catch_up(tokens)

    @torch.inference_mode()
    def catch_up(self, tokens: Sequence[int]) -> None:
        """Bring the cache to all of `tokens` but those that a first step feeds itself."""
        target = max(0, len(tokens) - _REWRITTEN_TOKENS)
        known = min(_common_prefix(self._cached, tokens), target)
        # First, so that an interruption never leaves it longer than the cache.
        cached, self._cached = self._cached, []
        del cached[known:]
        if self._must_begin_anew(len(tokens), known):
            self._begin_anew(tokens[:target], self._start_for(len(tokens)))
        else:
            if self._streaming is not None and self._start_for(len(tokens)) > self._streaming.start(self._sequence):
                self._let_go(cached, self._start_for(len(tokens)))
            self._set_length(known)
            self._cached = cached
            self._feed(tokens[known:target])
        cached += tokens[known:target]
        self._cached = cached

    @torch.inference_mode()
    def steps(self, count: int, *, longest: int) -> None:
        """Enqueue `count` steps behind the window's `end` without waiting: token `end` + j comes of step j.

        The cache must have caught up to all but the last two tokens before `end`.

        Args:
            count: At most `room(end)`.
            longest: `end` is at most this; equal to it where the host knows.
        """
        length = longest - self._start() + count - 1  # of the keys, when the last step has run
        assert count > 0 and length <= self._capacity_tokens
        self._set_frequencies(length)
        self._set_place()
        self._begin_pass(length - self._runner.cache.length(self._sequence))
        reach = self._reach(length)
        for step in range(count):
            first = step == 0
            choice = None if self._choosing is None else self._choosing.begin_step(first=first)
            self.graphs.run((first, reach, choice, self._params), partial(self._step, first, reach, self._params))

    def learned(self, newest: Sequence[int]) -> None:
        """Steps have written the keys of `newest`, the tokens behind those that the cache had caught up to."""
        self._set_length(len(self._cached) + len(newest))
        self._cached += newest

    def _step(self, first: bool, reach: int, params: SamplingParams) -> None:
        """Sample the token at the cursor, of a first step at the window's end, from those before it, and advance.

        Captured: no tensor of the host.
        """
        cursor, count = (self.window.end, _REWRITTEN_TOKENS) if first else (self._cursor, 1)
        step = self.window.rows(
            cursor, count, self._rotation, offset=-count, last_token=self._last_token,
            place=None if self._streaming is None else self._place,
        )  # fmt: skip
        rows = PassRows.of_step(step, self._owners[:count], max_length=reach)
        # A guess promises no bits: the quickest products will do.
        runner = self._runner
        logits = window_pass(runner.decoder, runner.streamer, runner.cache, rows, None)[0, -1:]  # [1, V]
        token = sample(logits[:, : self._vocab_size], params, cursor, self._owners[:1])
        self.window.put(cursor, token, self._cursor)

    def _reach(self, length: int) -> int:
        """Keys that attention looks at; on CUDA a power of two of blocks, so that few graphs are needed."""
        if self._device.type != "cuda":
            return length
        blocks = -(-length // BLOCK_TOKENS)
        most = -(-self._capacity_tokens // BLOCK_TOKENS)
        return min(1 << (blocks - 1).bit_length(), most) * BLOCK_TOKENS

    def _set_frequencies(self, length: int) -> None:
        """Rotate by the frequencies of a sequence of `length` tokens."""
        chosen = self._rope.frequency_set(length)
        if chosen != self._frequency_set:
            self._rotation.frequencies.copy_(self._rope.frequencies(length))
            self._frequency_set = chosen

    def _set_place(self) -> None:
        """Tell the device where a streaming cache stands."""
        if self._streaming is None:
            return
        place = self._streaming.start(self._sequence), self._streaming.rope_shift(self._sequence)
        if place != self._place_host:
            host = torch.tensor(place, dtype=torch.int32)
            self._place.copy_(host.pin_memory() if self._place.is_cuda else host, non_blocking=True)
            self._place_host = place

    # --- the cache

    def _begin_pass(self, count: int) -> None:
        """Announce a pass that is no prefill and puts `count` tokens behind the cache's own."""
        self._runner.cache.begin_window([self._sequence], [count])

    def _start(self) -> int:
        return 0 if self._streaming is None else self._streaming.start(self._sequence)

    def _start_for(self, length: int) -> int:
        return 0 if self._streaming is None else self._streaming.start_for(length)

    def _set_length(self, length: int) -> None:
        """Let the cache hold the sequence's first `length` tokens, whose keys have been written."""
        cache, length = self._runner.cache, length - self._start()
        if length < cache.length(self._sequence):
            cache.truncate(self._sequence, length)
        else:
            cache.commit(self._sequence, length - cache.length(self._sequence))

    def _must_begin_anew(self, length: int, known: int) -> bool:
        """Whether a streaming cache has let go of what it should hold, or would be fed too much at a time."""
        cache = self._streaming
        if cache is None:
            return False
        start = cache.start_for(length)
        if start < cache.start(self._sequence) or (start and known < start + cache.sink_tokens):
            return True
        # A prompt is rotated by its indices.
        return start > 0 and length - known > _CATCH_UP_TOKENS

    def _begin_anew(self, tokens: Sequence[int], start: int) -> None:
        """Prefill what a streaming cache keeps of `tokens`, and nothing else."""
        assert self._streaming is not None
        self._streaming.reset(self._sequence, start)
        kept = kept_positions(len(tokens), start, self._streaming.sink_tokens)
        if kept:
            self._runner.prefill(self._sequence, self._clamped([tokens[position] for position in kept]))

    def _let_go(self, tokens: Sequence[int], start: int) -> None:
        """Move a streaming cache on, and compute its sinks where they now belong."""
        cache = self._streaming
        assert cache is not None
        self._set_length(len(tokens))
        cache.move(self._sequence, start)
        sinks = Window(tuple(self._clamped(tokens[: cache.sink_tokens])))
        shift = cache.rope_shift(self._sequence)
        self._begin_pass(0)  # over what is in the cache already
        self._runner.run_rows(self._rows.build([sinks], [0], [self._sequence], rope_shift=shift))

    def _feed(self, tokens: Sequence[int]) -> None:
        """Put tokens behind those in the cache."""
        cache, new = self._runner.cache, self._clamped(tokens)
        if len(new) > _CATCH_UP_TOKENS:
            self._runner.prefill(self._sequence, new)
        elif new:
            shift = 0 if self._streaming is None else self._streaming.rope_shift(self._sequence)
            self._begin_pass(len(new))
            committed = cache.length(self._sequence)
            rows = self._rows.build([Window(tuple(new))], [committed], [self._sequence], rope_shift=shift)
            self._runner.run_rows(rows)
            cache.commit(self._sequence, len(new))

    def _clamped(self, tokens: Sequence[int]) -> list[int]:
        """The target's padded vocabulary may be the longer one; what is guessed behind such a token is no matter."""
        return [min(token, self._last_token) for token in tokens]


def _common_prefix(left: list[int], right: Sequence[int]) -> int:
    """Number of leading tokens that two sequences share; of long ones, which mostly share all, without many copies."""
    length = min(len(left), len(right))
    if (left if len(left) == length else left[:length]) == list(right[:length]):
        return length
    return next(index for index in range(length) if left[index] != right[index])
