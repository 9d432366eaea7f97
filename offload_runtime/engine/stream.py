"""The token loop: prefill, then rounds of speculation, text as it comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from offload_runtime.config import GenerationParams
from offload_runtime.copy_engine import CopyEngine
from offload_runtime.engine.stats import GenerationResult, GenerationStats
from offload_runtime.engine.text import IncrementalDecoder, StopStrings, Tokenizer
from offload_runtime.errors import BudgetError, DeviceError, OptionError
from offload_runtime.memory import DeviceBudget, current_device
from offload_runtime.runners import ModelRunner
from offload_runtime.speculation import NoProposer, Proposer, SpeculativeDecoder

OnPrefill = Callable[[int, int], None]


@dataclass(frozen=True)
class StreamParts:
    """What a generation works with; all of it belongs to the runtime."""

    target: ModelRunner
    proposer: Proposer
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    engine: CopyEngine
    budget: DeviceBudget
    link_peak_gbps: float | None
    pinned_bytes: int


class TokenStream:
    """One generation, as an iterator over pieces of text. Nothing is computed before the first piece is asked for.

    Args:
        parts: The runtime's machinery.
        prompt: Token ids; the first `num_kept` of them are in the target's cache already.
        params: What was asked for.
        gamma: Most tokens proposed per round.
        num_kept: Committed tokens of the cache that belong to the prompt.
        is_current: Whether the cache is still this generation's, given the stream.
        on_prefill: Called with (layers done, layers) while the prompt is worked on.
    """

    def __init__(
        self, parts: StreamParts, prompt: Sequence[int], params: GenerationParams, *, gamma: int, num_kept: int,
        is_current: Callable[[TokenStream], bool], on_prefill: OnPrefill | None = None,
    ) -> None:  # fmt: skip
        assert num_kept < len(prompt)
        self._parts = parts
        self._prompt = list(prompt)
        self._params = params
        self._gamma = gamma
        self._num_kept = num_kept
        self._is_current = is_current
        self._on_prefill = on_prefill
        self._tokens: list[int] = []
        self._pieces: list[str] = []
        self._passes = 0
        self._started_s = self._first_token_s = self._last_token_s = 0.0
        self._stall_before_s = 0.0
        self._result: GenerationResult | None = None
        self._decoder = IncrementalDecoder(parts.tokenizer, self._prompt)
        self._stops = StopStrings(params.stop)
        self._iterator = self._run()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._iterator)

    @property
    def result(self) -> GenerationResult:
        """The finished generation; only after the last piece or `close`."""
        assert self._result is not None, "iterate to the end or call close() first"
        return self._result

    @property
    def sequence_tokens(self) -> list[int]:
        """Prompt and generated tokens so far."""
        return self._prompt + self._tokens

    @property
    def is_current(self) -> bool:
        """Whether the target's cache still holds this generation."""
        return self._is_current(self)

    def close(self) -> None:
        """Stop here. What was generated is kept in `result`, and the cache stays usable."""
        self._iterator.close()
        if self._result is None:
            self._finish("interrupted")

    def _run(self) -> Generator[str, None, None]:
        parts, params = self._parts, self._params
        self._started_s = time.perf_counter()
        proposer = parts.proposer if self._gamma else NoProposer()
        proposer.start(params.sampling)
        decoder = SpeculativeDecoder(parts.target, proposer, params.sampling)
        new_tokens = self._first_token(decoder)
        self._first_token_s = time.perf_counter()
        self._stall_before_s = parts.engine.stall_seconds()
        while True:
            self._last_token_s = time.perf_counter()
            for token in new_tokens:
                piece, reason = self._take(token)
                if piece:
                    self._pieces.append(piece)
                    yield piece
                if reason is not None:
                    rest = self._finish(reason)
                    if rest:
                        yield rest
                    return
            # The target's own token always comes on top, so the last round of a generation proposes one less.
            remaining = params.max_new_tokens - len(self._tokens)
            with self._own_cache():
                new_tokens = decoder.round(self.sequence_tokens, min(self._gamma, remaining - 1)).tokens
            self._passes += 1

    def _first_token(self, decoder: SpeculativeDecoder) -> list[int]:
        with self._own_cache():
            logits = self._parts.target.prefill(0, self._prompt[self._num_kept :], self._on_prefill)
            return [decoder.first_token(logits)]

    @contextmanager
    def _own_cache(self) -> Iterator[None]:
        """Around work on the target: typed errors instead of another generation's keys or a bare out-of-memory."""
        if not self.is_current:
            raise OptionError(
                "another generation has begun on this runtime since, or it was closed: this one cannot go on"
            )
        try:
            with current_device(self._parts.budget.device):
                yield
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"the device memory allowed did not suffice for this pass ({error}): raise --vram, lower --context or "
                "keep fewer layers resident"
            ) from error
        except torch.AcceleratorError as error:
            raise DeviceError(f"the device failed during a pass ({error}): load the runtime again") from error

    def _take(self, token: int) -> tuple[str, str | None]:
        """Append a token: the text it completes, and the reason to stop after it."""
        self._tokens.append(token)
        if token in self._parts.eos_token_ids and not self._params.ignore_eos:
            return "", "stop"
        piece, stopped = self._stops.push(self._decoder.push(token))
        if stopped:
            return piece, "stop_string"
        return piece, "length" if len(self._tokens) == self._params.max_new_tokens else None

    def _finish(self, reason: str) -> str:
        """Settle cache and result; returns text that was held back."""
        rest = ""
        if reason != "stop_string":
            rest, stopped = self._stops.push(self._decoder.flush())
            rest += "" if stopped else self._stops.flush()
            self._pieces += [rest] if rest else []
        if self.is_current:
            # A round may have committed tokens behind an end in the middle of its window.
            cache = self._parts.target.cache
            cache.truncate(0, min(cache.length(0), len(self.sequence_tokens) - 1))
        self._result = GenerationResult(
            tokens=list(self._tokens),
            text="".join(self._pieces),
            finish_reason="stop" if reason == "stop_string" else reason,
            stats=self._stats(),
        )
        return rest

    def _stats(self) -> GenerationStats:
        parts = self._parts
        decode_s = self._last_token_s - self._first_token_s
        after_first = max(0, len(self._tokens) - 1)
        bytes_per_pass = parts.target.streamer.bytes_per_pass
        streamed = bytes_per_pass > 0 and self._passes > 0 and decode_s > 0
        return GenerationStats(
            prompt_tokens=len(self._prompt),
            new_tokens=len(self._tokens),
            time_to_first_token_s=max(0.0, self._first_token_s - self._started_s),
            tok_per_s=after_first / decode_s if decode_s > 0 else 0.0,
            passes=self._passes,
            tokens_per_pass=after_first / self._passes if self._passes else 0.0,
            bytes_per_pass=bytes_per_pass,
            link_gbps=self._passes * bytes_per_pass / decode_s / 1e9 if streamed else None,
            link_peak_gbps=parts.link_peak_gbps,
            stall_s=max(0.0, parts.engine.stall_seconds() - self._stall_before_s) if self._first_token_s else 0.0,
            peak_vram_bytes=parts.budget.peak_bytes(),
            pinned_bytes=parts.pinned_bytes,
        )
