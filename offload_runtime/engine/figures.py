"""From what a generation measured to the figures that it returns: the one place where they are put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload_runtime.engine.expectation import Expectation
from offload_runtime.engine.parts import StreamParts
from offload_runtime.engine.stats import GenerationStats
from offload_runtime.speculation import Acceptance
from offload_runtime.tracing import DRAFT, LINK, PASSES, covered_seconds, union_seconds


@dataclass(frozen=True)
class AnswerFigures:
    """What one answer took: `started_s`, `first_token_s` and `last_token_s` on one clock, 0 for what never came."""

    prompt_tokens: int
    new_tokens: int
    started_s: float
    first_token_s: float
    last_token_s: float
    passes: int
    acceptance: Sequence[Acceptance]
    accepted_by_depth: Sequence[int]
    accepted_by_source: Mapping[str, int]
    windows: Mapping[str, int]


@dataclass(frozen=True)
class PassFigures:
    """Passes after prefill, which the answers of a batch share: their number, duration, bytes and stalls.

    `copy_s` is how long the link carried anything meanwhile, `hidden_draft_share` as in `GenerationStats`.
    """

    passes: int
    seconds: float
    streamed_bytes: int
    stall_s: float
    copy_s: float
    hidden_draft_share: float | None


class PassMeter:
    """Measures passes from its making on.

    Args:
        parts: The engine and the target that are watched.
    """

    def __init__(self, parts: StreamParts) -> None:
        self._parts = parts
        self._stall_before_s = parts.engine.stall_seconds()
        self._bytes_before = parts.target.streamer.bytes_begun
        self._copy_before_s = self._copy_after_s = parts.engine.copy_seconds()
        if parts.traced is not None:
            parts.traced.recorder.settle()
        self._spans_before = 0 if parts.traced is None else len(parts.traced.recorder.spans)

    def lap(self) -> None:
        """A pass has ended: what the link carries from here on is not counted unless another one follows."""
        self._copy_after_s = self._parts.engine.copy_seconds()

    def read(self, passes: int, seconds: float) -> PassFigures:
        """What `passes` passes took, `seconds` in all."""
        parts = self._parts
        streamed_bytes = parts.target.streamer.bytes_begun - self._bytes_before if passes else 0
        stall_s = max(0.0, parts.engine.stall_seconds() - self._stall_before_s)
        copy_s = self._copy_after_s - self._copy_before_s
        return PassFigures(passes, seconds, streamed_bytes, stall_s, copy_s, self._hidden_draft_share())

    def _hidden_draft_share(self) -> float | None:
        traced = self._parts.traced
        if traced is None:
            return None
        times: dict[str, list[tuple[float, float]]] = {DRAFT: [], PASSES: [], LINK: []}
        for span in traced.recorder.spans[self._spans_before :]:
            if span.row in times:
                times[span.row].append((span.start_s, span.end_s))
        drafting_s = union_seconds(times[DRAFT])
        target = times[PASSES] + times[LINK]
        return covered_seconds(times[DRAFT], target) / drafting_s if drafting_s else None


def generation_stats(
    parts: StreamParts, answer: AnswerFigures, passes: PassFigures, expected: Expectation,
    *, predicted_s_per_pass: float | None,
) -> GenerationStats:  # fmt: skip
    """The figures of one answer beside the bounds of its runtime and what was predicted for its passes."""
    decode_s, after_first = answer.last_token_s - answer.first_token_s, max(0, answer.new_tokens - 1)
    streamed = passes.streamed_bytes > 0 and passes.seconds > 0
    per_pass = round(passes.streamed_bytes / passes.passes) if passes.passes else parts.target.streamer.bytes_per_pass
    return GenerationStats(
        prompt_tokens=answer.prompt_tokens,
        new_tokens=answer.new_tokens,
        time_to_first_token_s=max(0.0, answer.first_token_s - answer.started_s),
        tok_per_s=after_first / decode_s if decode_s > 0 else 0.0,
        passes=answer.passes,
        tokens_per_pass=after_first / answer.passes if answer.passes else 0.0,
        bytes_per_pass=per_pass,
        link_gbps=passes.streamed_bytes / passes.seconds / 1e9 if streamed else None,
        link_peak_gbps=parts.link_peak_gbps,
        stall_s=passes.stall_s,
        peak_vram_bytes=parts.budget.peak_bytes(),
        pinned_bytes=parts.pinned_bytes + parts.target.cache.pinned_bytes,
        acceptance=tuple(answer.acceptance),
        accepted_by_depth=tuple(answer.accepted_by_depth),
        accepted_by_source=dict(answer.accepted_by_source),
        windows=dict(answer.windows),
        measured_s_per_pass=passes.seconds / passes.passes if passes.passes else None,
        predicted_s_per_pass=predicted_s_per_pass,
        emulated=expected.emulated,
        pageable_bytes=0 if parts.pageable is None else parts.pageable.nbytes,
        link_idle_share=min(1.0, max(0.0, 1 - passes.copy_s / passes.seconds)) if streamed else None,
        hidden_draft_share=passes.hidden_draft_share,
    )
