"""What a generation returns: tokens, text, and the figures beside their bounds. The field names are an interface."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from offload_runtime.engine.request import Request
from offload_runtime.engine.steps import RuntimeParts
from offload_runtime.sampling import TokenLogprobs
from offload_runtime.speculation import Acceptance
from offload_runtime.trace import DRAFT, LINK, PASSES, covered_seconds, union_seconds


@dataclass(frozen=True)
class GenerationStats:
    """Figures of one generation.

    Attributes:
        prompt_tokens: Tokens of the prompt, those that were in the cache already included.
        new_tokens: Tokens generated, the end-of-sequence token included.
        time_to_first_token_s: From the call to the first token: mostly prefill.
        tok_per_s: Tokens after the first over the time after the first; 0 when there was only one.
        passes: Passes of the target after prefill.
        tokens_per_pass: Tokens after the first over passes.
        bytes_per_pass: Bytes over the link for one pass; of several cards over all links together.
        link_gbps: Bytes of these passes over their time, waiting and sampling included, in GB/s (1e9); of several cards
            over all links together.
        link_peak_gbps: Bandwidth of back-to-back copies, measured when the runtime was loaded; of several cards the sum
            of those that stream something, whose links were measured one after the other.
        stall_s: Time that the compute side waited for the link in these passes. The cards of a pass compute one after
            the other, and each waits for its own link while it has the rows: the sum is what the passes waited.
        peak_vram_bytes: Most device memory in use so far: by the driver on CUDA, by the ledger on the CPU.
        pinned_bytes: Page-locked host memory.
        acceptance: For every level of speculation what was proposed and accepted, the target's decisions last: with a
            retrieval verifier `draft` to `retrieval`, then `retrieval` to `target`. Empty for plain decoding.
        measured_s_per_pass: From pass to pass, proposing and sampling included; None without passes after prefill.
        predicted_s_per_pass: The same by the figures of the machine (see `Runtime.load`), for steps of as many
            proposals as these had; a retrieval verifier is taken to accept as much as usual. None without figures.
        emulated: Name of the machine that was emulated.
        pageable_bytes: Host memory that is streamed and not page-locked: planned so, or because the system refused.
        link_idle_share: Share of the time of these passes, waiting and sampling included, in which no copy was on its
            way to the device; chunks that a retrieval verifier gathers are no copies. Of several cards the mean of the
            links that bring something. None where nothing is streamed.
        hidden_draft_share: Share of the drafting in which a pass of the target was running or a link, of whichever
            card, brought what passes need; None without drafting, and without a trace (see `Runtime.load`).
        accepted_by_depth: In how many passes the target accepted a first proposal, a second one behind it, and so on.
        accepted_by_source: Proposals that the target accepted by who made them first: `ngram`, `draft` or `retrieval`.
        windows: Passes by what was asked for, the most frequent first: `tree 256`, `chain 8`, `ngram 16`, `plain`. The
            number is that of proposals, n-grams beside a chain not counted.
    """

    prompt_tokens: int
    new_tokens: int
    time_to_first_token_s: float
    tok_per_s: float
    passes: int
    tokens_per_pass: float
    bytes_per_pass: int
    link_gbps: float | None
    link_peak_gbps: float | None
    stall_s: float
    peak_vram_bytes: int
    pinned_bytes: int
    acceptance: tuple[Acceptance, ...]
    measured_s_per_pass: float | None = None
    predicted_s_per_pass: float | None = None
    emulated: str | None = None
    pageable_bytes: int = 0
    link_idle_share: float | None = None
    hidden_draft_share: float | None = None
    accepted_by_depth: tuple[int, ...] = ()
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    windows: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The figures by name, ready for JSON."""
        levels = [
            {**asdict(level), "rate": level.rate, "accepted_per_verification": level.accepted_per_verification}
            for level in self.acceptance
        ]
        return {**asdict(self), "acceptance": levels, "accepted_by_depth": list(self.accepted_by_depth)}


@dataclass(frozen=True)
class GenerationResult:
    """A finished generation.

    `finish_reason` is `stop` (end of sequence or a stop string), `length` or `interrupted`. `logprobs` are those of
    the tokens, one after the other; None where they were not asked for.
    """

    tokens: list[int]
    text: str
    finish_reason: str
    stats: GenerationStats
    logprobs: tuple[TokenLogprobs, ...] | None = None


class PassMeter:
    """Counts and measures the passes after prefill, which the answers of a batch share, from its making on.

    Args:
        parts: The engine and the target that are watched.
        started_s: When the first token was there.
    """

    def __init__(self, parts: RuntimeParts, started_s: float = 0.0) -> None:
        self._parts = parts
        self._passes, self._started_s, self._ended_s = 0, started_s, started_s
        self._stall_before_s = parts.target.stall_seconds()
        self._bytes_before = parts.target.runner.streamer.bytes_begun
        self._copy_before_s = self._copy_after_s = parts.target.copy_seconds()
        self._spans_before = () if parts.recorder is None else parts.recorder.position()

    def lap(self) -> float:
        """A pass has ended, now: what the link carries from here on is not counted unless another one follows."""
        self._passes, self._ended_s = self._passes + 1, time.perf_counter()
        self._copy_after_s = self._parts.target.copy_seconds()
        return self._ended_s

    def hidden_draft_share(self) -> float | None:
        """As in `GenerationStats`, so far."""
        recorder = self._parts.recorder
        spans = [] if recorder is None else recorder.since(self._spans_before)
        drafts = [(span.start_s, span.end_s) for span in spans if span.row == DRAFT]
        target = [(span.start_s, span.end_s) for span in spans if span.row in (PASSES, LINK)]
        drafting_s = union_seconds(drafts)
        return covered_seconds(drafts, target) / drafting_s if drafting_s else None

    def results(self, requests: Sequence[Request], predicted_s: float | None) -> list[GenerationResult]:
        """All answers of a batch, each with its figures beside the bounds of its runtime and what was predicted for all
        of these passes."""
        parts, passes, seconds = self._parts, self._passes, self._ended_s - self._started_s
        target, streamer = parts.target, parts.target.runner.streamer
        streamed_bytes = streamer.bytes_begun - self._bytes_before if passes else 0
        streamed = streamed_bytes > 0 and seconds > 0
        copy_s = self._copy_after_s - self._copy_before_s
        shared = {
            "bytes_per_pass": round(streamed_bytes / passes) if passes else streamer.bytes_per_pass,
            "link_gbps": streamed_bytes / seconds / 1e9 if streamed else None,
            "link_peak_gbps": target.link_peak_gbps,
            "stall_s": max(0.0, parts.target.stall_seconds() - self._stall_before_s),
            "peak_vram_bytes": parts.peak_vram_bytes(),
            "pinned_bytes": target.pinned_bytes + target.runner.cache.pinned_bytes,
            "measured_s_per_pass": seconds / passes if passes else None,
            "predicted_s_per_pass": predicted_s / passes if passes and predicted_s is not None else None,
            "emulated": parts.emulated,
            "pageable_bytes": target.pageable_bytes,
            "link_idle_share": min(1.0, max(0.0, 1 - copy_s / seconds)) if streamed else None,
            "hidden_draft_share": self.hidden_draft_share(),
        }
        return [_result(request, shared) for request in requests]


def _result(request: Request, shared: dict[str, Any]) -> GenerationResult:
    """One answer with its figures, of which those by name are its batch's."""
    assert request.finish_reason is not None, "iterate to the end or call close() first"
    decode_s, after_first = request.last_token_s - request.first_token_s, max(0, request.new_tokens - 1)
    stats = GenerationStats(
        prompt_tokens=request.prompt_tokens,
        new_tokens=request.new_tokens,
        time_to_first_token_s=max(0.0, request.first_token_s - request.started_s),
        tok_per_s=after_first / decode_s if decode_s > 0 else 0.0,
        passes=request.passes,
        tokens_per_pass=after_first / request.passes if request.passes else 0.0,
        acceptance=tuple(request.acceptance),
        accepted_by_depth=tuple(request.tally.accepted_by_depth.values()),
        accepted_by_source=dict(request.tally.accepted_by_source),
        windows=dict(request.tally.windows.most_common()),
        **shared,
    )
    logprobs = None if request.params.logprobs is None else tuple(request.logprobs)
    return GenerationResult(request.tokens, request.text, request.finish_reason, stats, logprobs)
