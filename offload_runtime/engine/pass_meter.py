"""Measures the passes of a generation, and says of each request what those took that it had a part in."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from offload_runtime.engine.load_model import LoadedModel
from offload_runtime.engine.request import Request
from offload_runtime.engine.stats import GenerationResult, GenerationStats
from offload_runtime.trace import DRAFT, LINK, PASSES, TraceRecorder, covered_seconds, union_seconds


@dataclass(frozen=True)
class _Passes:
    """Counts passes after prefill, and says what they took."""

    count: int = 0
    seconds: float = 0.0
    streamed_bytes: int = 0
    stall_s: float = 0.0
    copy_s: float = 0.0

    def since(self, before: _Passes) -> _Passes:
        """Return what has come since."""
        return _Passes(
            self.count - before.count, self.seconds - before.seconds, self.streamed_bytes - before.streamed_bytes,
            max(0.0, self.stall_s - before.stall_s), self.copy_s - before.copy_s,
        )  # fmt: skip


class PassMeter:
    """Counts and measures the passes after prefill, and tells each request of those that it shared.

    Args:
        target: The model whose passes are measured.
        recorder: Of a trace, if there is one.
    """

    def __init__(self, target: LoadedModel, recorder: TraceRecorder | None) -> None:
        self._target, self._recorder, self._passes, self._ended_s = target, recorder, _Passes(), 0.0
        self._link_peak_gbps, self._pinned_bytes = target.link_peak_gbps, target.pinned_bytes  # they stay as they are
        self._counters = self._read()
        # What there was when a request had its first token, and where the trace was.
        self._begun: dict[Request, tuple[_Passes, Any]] = {}

    @property
    def passes(self) -> int:
        """Count the passes that have ended."""
        return self._passes.count

    def _read(self) -> tuple[int, float, float]:
        """Return the bytes that were begun to be copied, seconds of stalls and of copies, so far."""
        target = self._target
        return target.runner.streamer.bytes_begun, target.stall_seconds(), target.copy_seconds()

    def begin(self, request: Request) -> None:
        """Begin to measure for a request that has its first token. What came since the last pass was its prefill."""
        recorder = self._recorder
        self._counters, self._ended_s = self._read(), request.first_token_s
        self._begun[request] = self._passes, () if recorder is None else recorder.position()

    def lap(self) -> float:
        """End a pass, now: what the link carries from here on is not counted unless another one follows."""
        before, before_s = self._counters, self._ended_s
        self._counters, self._ended_s = self._read(), time.perf_counter()
        (nbytes, stall_s, copy_s), passes = self._counters, self._passes
        self._passes = _Passes(
            passes.count + 1, passes.seconds + self._ended_s - before_s, passes.streamed_bytes + nbytes - before[0],
            passes.stall_s + stall_s - before[1], passes.copy_s + copy_s - before[2],
        )  # fmt: skip
        return self._ended_s

    def hidden_draft_share(self, request: Request) -> float | None:
        """Return what `GenerationStats` says, since the request began."""
        recorder = self._recorder
        if recorder is None or request not in self._begun:
            return None
        spans = recorder.since(self._begun[request][1])
        drafts = [(span.start_s, span.end_s) for span in spans if span.row == DRAFT]
        target = [(span.start_s, span.end_s) for span in spans if span.row in (PASSES, LINK)]
        drafting_s = union_seconds(drafts)
        return covered_seconds(drafts, target) / drafting_s if drafting_s else None

    def result(
        self, request: Request, predicted_s: float | None, *, peak_vram_bytes: int, emulated: str | None
    ) -> GenerationResult:
        """Return the answer of a request that has ended, and its figures beside what was predicted for its passes.
        The meter forgets it."""
        assert request.finish_reason is not None, "iterate to the end or call close() first"
        hidden_draft_share = self.hidden_draft_share(request)
        before, _ = self._begun.pop(request, (self._passes, ()))
        target, passes = self._target, self._passes.since(before)
        count, seconds = passes.count, passes.seconds
        streamed = passes.streamed_bytes > 0 and seconds > 0
        decode_s, after_first = request.last_token_s - request.first_token_s, max(0, request.new_tokens - 1)
        stats = GenerationStats(
            prompt_tokens=request.prompt_tokens,
            new_tokens=request.new_tokens,
            time_to_first_token_s=max(0.0, request.first_token_s - request.started_s),
            tok_per_s=after_first / decode_s if decode_s > 0 else 0.0,
            passes=count,
            tokens_per_pass=after_first / count if count else 0.0,
            bytes_per_pass=round(passes.streamed_bytes / count) if count else target.runner.streamer.bytes_per_pass,
            link_gbps=passes.streamed_bytes / seconds / 1e9 if streamed else None,
            link_peak_gbps=self._link_peak_gbps,
            stall_s=passes.stall_s,
            peak_vram_bytes=peak_vram_bytes,
            pinned_bytes=self._pinned_bytes + target.runner.cache.pinned_bytes,
            acceptance=tuple(request.acceptance),
            measured_s_per_pass=seconds / count if count else None,
            predicted_s_per_pass=predicted_s / count if count and predicted_s is not None else None,
            emulated=emulated,
            pageable_bytes=target.pageable_bytes,
            link_idle_share=min(1.0, max(0.0, 1 - passes.copy_s / seconds)) if streamed else None,
            hidden_draft_share=hidden_draft_share,
            accepted_by_depth=tuple(request.tally.accepted_by_depth.values()),
            accepted_by_source=dict(request.tally.accepted_by_source),
            windows=dict(request.tally.windows.most_common()),
            kept_tokens=request.num_kept,
        )
        logprobs = None if request.params.logprobs is None else tuple(request.logprobs)
        of_prompt = None if request.params.prompt_logprobs is None else tuple(request.prompt_logprobs)
        return GenerationResult(request.tokens, request.text, request.finish_reason, stats, logprobs, of_prompt)
