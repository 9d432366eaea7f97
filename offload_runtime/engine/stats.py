"""What a generation returns: tokens, text, and the figures beside their bounds. The field names are an interface."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from offload_runtime.engine.request import Request
from offload_runtime.engine.steps import RuntimeParts
from offload_runtime.sampling import TokenLogprobs
from offload_runtime.speculation import Acceptance
from offload_runtime.trace import DRAFT, LINK, PASSES, covered_seconds, union_seconds

_SHOWN_CHARACTERS = 60  # of an answer, where a result is only named


@dataclass(frozen=True, repr=False)
class GenerationStats:
    """Figures of one generation.

    Attributes:
        prompt_tokens: Tokens of the prompt, those that were in the cache already included.
        new_tokens: Tokens generated, the end-of-sequence token included.
        time_to_first_token_s: From the call to the first token: mostly prefill.
        tok_per_s: Tokens after the first over the time after the first; 0 when there was only one.
        passes: Passes of the target after prefill that the answer had a part in. What follows of passes is of these, so
            that answers which begin and end together have the same figures.
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
        measured_s_per_pass: From pass to pass, proposing and sampling included, and others' prompts that they read;
            None without passes after prefill.
        predicted_s_per_pass: The same by the figures of the machine (see `Runtime.load`), for steps of as many
            proposals as these had and no prompts; a retrieval verifier is taken to accept as much as usual. None
            without figures.
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
        kept_tokens: Tokens of the prompt that were not read again, as the cache still held them.
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
    kept_tokens: int = 0

    def __repr__(self) -> str:
        first = f"{self.prompt_tokens} + {self.new_tokens} tokens, first after {self.time_to_first_token_s:.2f} s"
        return f"<GenerationStats: {first}, {self.tok_per_s:.1f} tokens/s, {self.tokens_per_pass:.2f} a pass>"

    def to_dict(self) -> dict[str, Any]:
        """The figures by name, ready for JSON."""
        levels = [
            {**asdict(level), "rate": level.rate, "accepted_per_verification": level.accepted_per_verification}
            for level in self.acceptance
        ]
        return {**asdict(self), "acceptance": levels, "accepted_by_depth": list(self.accepted_by_depth)}


@dataclass(frozen=True, repr=False)
class GenerationResult:
    """A finished generation.

    `finish_reason` is `stop` (end of sequence or a stop string), `length` or `interrupted`. `logprobs` are those of
    the tokens, one after the other, and `prompt_logprobs` those of the prompt's behind the first; None where they were
    not asked for.
    """

    tokens: list[int]
    text: str
    finish_reason: str
    stats: GenerationStats
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN_CHARACTERS else f"{self.text[:_SHOWN_CHARACTERS]}…"
        speed = f"{self.stats.tok_per_s:.1f} tokens/s"
        return f"<GenerationResult: {len(self.tokens)} tokens ({self.finish_reason}), {speed}: {text!r}>"


@dataclass(frozen=True)
class _Passes:
    """Passes after prefill so far, and what they took."""

    count: int = 0
    seconds: float = 0.0
    streamed_bytes: int = 0
    stall_s: float = 0.0
    copy_s: float = 0.0

    def since(self, before: _Passes) -> _Passes:
        """What has come since."""
        return _Passes(
            self.count - before.count, self.seconds - before.seconds, self.streamed_bytes - before.streamed_bytes,
            max(0.0, self.stall_s - before.stall_s), self.copy_s - before.copy_s,
        )  # fmt: skip


class PassMeter:
    """Counts and measures the passes after prefill, and tells each request of those that it shared.

    Args:
        parts: The engine and the target that are watched.
    """

    def __init__(self, parts: RuntimeParts) -> None:
        self._parts, self._passes, self._ended_s = parts, _Passes(), 0.0
        self._counters = self._read()
        # What there was when a request had its first token, and where the trace was.
        self._begun: dict[Request, tuple[_Passes, Any]] = {}

    @property
    def passes(self) -> int:
        """That have ended."""
        return self._passes.count

    def _read(self) -> tuple[int, float, float]:
        """Bytes that were begun to be copied, seconds of stalls and of copies, so far."""
        target = self._parts.target
        return target.runner.streamer.bytes_begun, target.stall_seconds(), target.copy_seconds()

    def begin(self, request: Request) -> None:
        """A request has its first token: passes follow. What came since the last one, its prefill, was none."""
        recorder = self._parts.recorder
        self._counters, self._ended_s = self._read(), request.first_token_s
        self._begun[request] = self._passes, () if recorder is None else recorder.position()

    def lap(self) -> float:
        """A pass has ended, now: what the link carries from here on is not counted unless another one follows."""
        before, before_s = self._counters, self._ended_s
        self._counters, self._ended_s = self._read(), time.perf_counter()
        (nbytes, stall_s, copy_s), passes = self._counters, self._passes
        self._passes = _Passes(
            passes.count + 1, passes.seconds + self._ended_s - before_s, passes.streamed_bytes + nbytes - before[0],
            passes.stall_s + stall_s - before[1], passes.copy_s + copy_s - before[2],
        )  # fmt: skip
        return self._ended_s

    def hidden_draft_share(self, request: Request) -> float | None:
        """As in `GenerationStats`, since the request began."""
        recorder = self._parts.recorder
        spans = [] if recorder is None or request not in self._begun else recorder.since(self._begun[request][1])
        drafts = [(span.start_s, span.end_s) for span in spans if span.row == DRAFT]
        target = [(span.start_s, span.end_s) for span in spans if span.row in (PASSES, LINK)]
        drafting_s = union_seconds(drafts)
        return covered_seconds(drafts, target) / drafting_s if drafting_s else None

    def result(self, request: Request, predicted_s: float | None) -> GenerationResult:
        """The answer of a request that has ended, with its figures beside the bounds of its runtime and what was
        predicted for its passes. The meter forgets it."""
        assert request.finish_reason is not None, "iterate to the end or call close() first"
        parts, hidden_draft_share = self._parts, self.hidden_draft_share(request)
        before, _ = self._begun.pop(request, (self._passes, ()))
        target, streamer, passes = parts.target, parts.target.runner.streamer, self._passes.since(before)
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
            bytes_per_pass=round(passes.streamed_bytes / count) if count else streamer.bytes_per_pass,
            link_gbps=passes.streamed_bytes / seconds / 1e9 if streamed else None,
            link_peak_gbps=target.link_peak_gbps,
            stall_s=passes.stall_s,
            peak_vram_bytes=parts.peak_vram_bytes(),
            pinned_bytes=target.pinned_bytes + target.runner.cache.pinned_bytes,
            acceptance=tuple(request.acceptance),
            measured_s_per_pass=seconds / count if count else None,
            predicted_s_per_pass=predicted_s / count if count and predicted_s is not None else None,
            emulated=parts.emulated,
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
