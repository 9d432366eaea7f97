"""The token loop: prefill, then rounds of speculation, text as it comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from offload_runtime.config import GenerationParams
from offload_runtime.engine.expectation import Expectation
from offload_runtime.engine.parts import StreamParts
from offload_runtime.engine.playing import RoundPlayer, Text
from offload_runtime.engine.request import Answer
from offload_runtime.engine.stats import AnswerFigures, GenerationResult, GenerationStats, PassMeter, generation_stats
from offload_runtime.engine.windows import ChosenWindows, WindowSize
from offload_runtime.errors import BudgetError, CopyError, DeviceError, OptionError
from offload_runtime.memory import current_device
from offload_runtime.speculation import Acceptance, NoProposer, Proposer, SpeculativeDecoder, Tally

OnPrefill = Callable[[int, int], None]


class TokenStream:
    """One generation, as an iterator over pieces of text. Nothing is computed before the first piece is asked for.

    Args:
        parts: The runtime's machinery.
        expected: What the figures are held against.
        prompt: Token ids; the first `num_kept` of them are in the target's cache already.
        params: What was asked for.
        windows: Most tokens proposed per round, fixed or chosen.
        num_kept: Committed tokens of the cache that belong to the prompt.
        is_current: Whether the cache is still this generation's, given the stream.
        on_prefill: Called with (layers done, layers) while the prompt is worked on.
    """

    def __init__(
        self, parts: StreamParts, expected: Expectation, prompt: Sequence[int], params: GenerationParams,
        *, windows: WindowSize | ChosenWindows, num_kept: int, is_current: Callable[[TokenStream], bool],
        on_prefill: OnPrefill | None = None,
    ) -> None:  # fmt: skip
        assert num_kept < len(prompt)
        self._parts = parts
        self._expected = expected
        self._prompt = list(prompt)
        self._params = params
        self._windows = windows
        self._num_kept = num_kept
        self._is_current = is_current
        self._on_prefill = on_prefill
        self._passes = 0
        self._started_s = self._first_token_s = self._last_token_s = 0.0
        self._meter: PassMeter | None = None  # of the passes, once there are any
        self._proposer: Proposer = NoProposer()  # until the generation begins, the runtime's counts for another
        self._tally = Tally()
        self._result: GenerationResult | None = None
        self._answer = Answer(parts.tokenizer, self._prompt, params, parts.eos_token_ids)
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
        """Prompt and generated tokens so far: a list that grows with them."""
        return self._answer.sequence

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
        proposer = parts.proposing(self._windows)
        proposer.start(params.sampling)
        self._proposer = proposer
        decoder = SpeculativeDecoder(parts.target, proposer, params.sampling)
        player = RoundPlayer(parts, proposer, params.sampling, self._windows)
        new_tokens = self._first_token(decoder)
        self._first_token_s = time.perf_counter()
        self._meter = PassMeter(parts)
        while True:
            self._last_token_s = time.perf_counter()
            self._meter.lap()
            for token in new_tokens:
                piece, reason = self._answer.push(token)
                if piece:
                    yield piece
                if reason is not None:
                    rest = self._finish(reason)
                    if rest:
                        yield rest
                    return
            with self._own_cache():
                (played,) = player.play([Text(0, self.sequence_tokens, self._answer.remaining)])
            self._tally.add(played.proposal.sources, played.accepted_sources, window=player.window)
            new_tokens = played.tokens
            self._passes += 1

    def _first_token(self, decoder: SpeculativeDecoder) -> list[int]:
        with self._own_cache():
            logits = self._parts.target.prefill(0, self._prompt[self._num_kept :], self._on_prefill)
            if self._params.max_new_tokens > 1:
                decoder.prepare(self._prompt, logits)
            return [decoder.first_token(logits)]

    @contextmanager
    def _own_cache(self) -> Iterator[None]:
        """Around work on the target: an error instead of another generation's keys."""
        if not self.is_current:
            raise OptionError(
                "another generation has begun on this runtime since, or it was closed: this one cannot go on"
            )
        with device_errors(self._parts.budget.device):
            yield

    def _finish(self, reason: str) -> str:
        """Settle cache and result; returns text that was held back."""
        rest = self._answer.finish(reason)
        if self.is_current:
            # A round may have committed tokens behind an end in the middle of its window.
            cache = self._parts.target.cache
            with suppress(CopyError):  # whatever is asked for next raises it again
                cache.truncate(0, min(cache.length(0), len(self.sequence_tokens) - 1))
        self._result = GenerationResult(
            tokens=list(self._answer.tokens),
            text=self._answer.text,
            finish_reason="stop" if reason == "stop_string" else reason,
            stats=self._stats(),
        )
        return rest

    def _stats(self) -> GenerationStats:
        parts = self._parts
        answer = AnswerFigures(
            prompt_tokens=len(self._prompt), new_tokens=len(self._answer.tokens), started_s=self._started_s,
            first_token_s=self._first_token_s, last_token_s=self._last_token_s, passes=self._passes,
            acceptance=self._acceptance(), accepted_by_depth=self._tally.accepted_by_depth,
            accepted_by_source=self._tally.accepted_by_source, windows=self._tally.windows,
        )  # fmt: skip
        passes = (self._meter or PassMeter(parts)).read(self._passes, self._last_token_s - self._first_token_s)
        predicted_s = self._expected.seconds_per_pass([answer])
        return generation_stats(parts, answer, passes, self._expected, predicted_s_per_pass=predicted_s)

    def _acceptance(self) -> tuple[Acceptance, ...]:
        if self._proposer.name is None:
            return ()
        inner: Sequence[Acceptance] = ()
        if self.is_current:  # else the proposer counts for another generation by now
            with device_errors(self._parts.budget.device):
                inner = self._proposer.counts()
        return self._tally.levels(self._proposer.name, inner)


@contextmanager
def device_errors(device: torch.device) -> Iterator[None]:
    """Around work on a device: it is the current one, and its failures are typed errors."""
    try:
        with current_device(device):
            yield
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            f"the device memory allowed did not suffice for this pass ({error}): raise --vram, lower --context or "
            "keep fewer layers resident"
        ) from error
    except torch.AcceleratorError as error:
        raise DeviceError(f"the device failed during a pass ({error}): load the runtime again") from error
