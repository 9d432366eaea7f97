"""What a generation returns: tokens, text, and the figures beside their bounds. The field names are an interface."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from offload_runtime.sampling import TokenLogprobs
from offload_runtime.speculation import Acceptance

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
        """Return the figures by name, ready for JSON."""
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
