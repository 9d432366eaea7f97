"""Several prompts at once: every pass of the target verifies a window of each, and each accepts its own number."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload_runtime.config import GenerationParams
from offload_runtime.engine.answer import Answer
from offload_runtime.engine.stats import GenerationResult, GenerationStats
from offload_runtime.engine.stream import StreamParts
from offload_runtime.speculation import NoProposer, Proposer, SpeculativeDecoder, Turn, play_round

OnBatchProgress = Callable[[int, int], None]


@dataclass
class _Member:
    """One sequence of the batch."""

    sequence: int
    prompt: list[int]
    answer: Answer
    proposer: Proposer
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    passes: int = 0
    finish_reason: str | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer so far."""
        return self.prompt + self.answer.tokens

    def push(self, tokens: Sequence[int]) -> None:
        """Append tokens until one ends the answer."""
        self.last_token_s = time.perf_counter()
        for token in tokens:
            _, reason = self.answer.push(token)
            if reason is not None:
                self.answer.finish(reason)
                self.finish_reason = "stop" if reason == "stop_string" else reason
                return


class BatchGeneration:
    """Generates for several prompts; sequence i of the batch has the noise of sequence i.

    Args:
        parts: The runtime's machinery.
        proposers: One for each prompt.
        prompts: Token ids of each.
        params: What was asked for, the same for all.
        gamma: Most tokens proposed per round and sequence.
    """

    def __init__(
        self, parts: StreamParts, proposers: Sequence[Proposer], prompts: Sequence[Sequence[int]],
        params: GenerationParams, *, gamma: int,
    ) -> None:  # fmt: skip
        self._parts = parts
        self._params = params
        self._gamma = gamma
        self._members = [
            _Member(
                sequence, list(prompt), Answer(parts.tokenizer, prompt, params, parts.eos_token_ids),
                proposer if gamma else NoProposer(),
            )
            for sequence, (prompt, proposer) in enumerate(zip(prompts, proposers, strict=True))
        ]  # fmt: skip

    def run(self, on_progress: OnBatchProgress | None = None) -> list[GenerationResult]:
        """Generate to the end of every answer.

        Args:
            on_progress: Called with (answers finished, answers) after every pass.
        """
        parts, started_s = self._parts, time.perf_counter()
        for member in self._members:
            member.proposer.start(self._params.sampling)
            decoder = SpeculativeDecoder(parts.target, member.proposer, self._params.sampling, sequence=member.sequence)
            logits = parts.target.prefill(member.sequence, member.prompt)
            member.push([decoder.first_token(logits)])
            member.first_token_s = member.last_token_s
            if member.finish_reason is not None:
                parts.target.cache.truncate(member.sequence, 0)
        first_bytes, first_round_s = parts.target.streamer.bytes_begun, time.perf_counter()
        stall_s = parts.engine.stall_seconds()
        rounds = 0
        while True:
            active = [member for member in self._members if member.finish_reason is None]
            if on_progress is not None:
                on_progress(len(self._members) - len(active), len(self._members))
            if not active:
                break
            self._round(active)
            rounds += 1
        streamed_bytes = parts.target.streamer.bytes_begun - first_bytes
        decode_s = time.perf_counter() - first_round_s
        figures = _Figures(
            started_s, rounds, streamed_bytes, decode_s, max(0.0, parts.engine.stall_seconds() - stall_s)
        )
        return [self._result(member, figures) for member in self._members]

    def _round(self, active: Sequence[_Member]) -> None:
        turns = [
            Turn(member.sequence, member.tokens, member.proposer, min(self._gamma, member.answer.remaining - 1))
            for member in active
        ]
        played = play_round(self._parts.target, self._params.sampling, turns)
        for member, outcome in zip(active, played, strict=True):
            member.passes += 1
            member.push(outcome.tokens)
            if member.finish_reason is not None:  # its cache is of no more use, and would be streamed
                self._parts.target.cache.truncate(member.sequence, 0)

    def _result(self, member: _Member, figures: _Figures) -> GenerationResult:
        parts, count = self._parts, len(member.answer.tokens)
        seconds = member.last_token_s - member.first_token_s
        streamed = figures.streamed_bytes > 0 and figures.decode_s > 0
        stats = GenerationStats(
            prompt_tokens=len(member.prompt),
            new_tokens=count,
            time_to_first_token_s=member.first_token_s - figures.started_s,
            tok_per_s=(count - 1) / seconds if seconds > 0 else 0.0,
            passes=member.passes,
            tokens_per_pass=(count - 1) / member.passes if member.passes else 0.0,
            bytes_per_pass=round(figures.streamed_bytes / figures.rounds) if figures.rounds else 0,
            link_gbps=figures.streamed_bytes / figures.decode_s / 1e9 if streamed else None,
            link_peak_gbps=parts.link_peak_gbps,
            stall_s=figures.stall_s,
            peak_vram_bytes=parts.budget.peak_bytes(),
            pinned_bytes=parts.pinned_bytes + parts.target.cache.pinned_bytes,
        )
        assert member.finish_reason is not None
        return GenerationResult(list(member.answer.tokens), member.answer.text, member.finish_reason, stats)


@dataclass(frozen=True)
class _Figures:
    """What the whole batch shares."""

    started_s: float
    rounds: int
    streamed_bytes: int
    decode_s: float
    stall_s: float
