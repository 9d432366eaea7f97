"""Several prompts at once: every pass of the target verifies a window of each, and each accepts its own number."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from offload_runtime.config import GenerationParams
from offload_runtime.engine.expectation import Expectation
from offload_runtime.engine.parts import StreamParts
from offload_runtime.engine.playing import RoundPlayer, Text
from offload_runtime.engine.request import Answer
from offload_runtime.engine.stats import (
    AnswerFigures,
    GenerationResult,
    GenerationStats,
    PassFigures,
    PassMeter,
    generation_stats,
)
from offload_runtime.engine.stream import device_errors
from offload_runtime.engine.windows import ChosenWindows, WindowSize
from offload_runtime.errors import BudgetError
from offload_runtime.speculation import SpeculativeDecoder, Tally

OnBatchProgress = Callable[[int, int], None]


@dataclass
class _Member:
    """One sequence of the batch."""

    sequence: int
    prompt: list[int]
    answer: Answer
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    passes: int = 0
    finish_reason: str | None = None
    tally: Tally = field(default_factory=Tally)

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer so far: a list that grows with them."""
        return self.answer.sequence

    def push(self, tokens: Sequence[int]) -> None:
        """Append tokens until one ends the answer."""
        self.last_token_s = time.perf_counter()
        for token in tokens:
            _, reason = self.answer.push(token)
            if reason is not None:
                self.finish(reason)
                return

    def finish(self, reason: str) -> None:
        """End the answer for this reason."""
        self.answer.finish(reason)
        self.finish_reason = "stop" if reason == "stop_string" else reason


class BatchGeneration:
    """Generates for several prompts; sequence i of the batch has the noise of sequence i.

    Args:
        parts: The runtime's machinery.
        expected: What the figures are held against.
        prompts: Token ids of each.
        params: What was asked for, the same for all.
        windows: Most tokens proposed per round and sequence, fixed or chosen.
    """

    def __init__(
        self, parts: StreamParts, expected: Expectation, prompts: Sequence[Sequence[int]], params: GenerationParams,
        *, windows: WindowSize | ChosenWindows,
    ) -> None:  # fmt: skip
        self._parts = parts
        self._expected = expected
        self._params = params
        self._proposer = parts.proposing(windows)
        self._player = RoundPlayer(parts, self._proposer, params.sampling, windows)
        self._members = [
            _Member(sequence, list(prompt), Answer(parts.tokenizer, prompt, params, parts.eos_token_ids))
            for sequence, prompt in enumerate(prompts)
        ]

    def run(
        self, *, on_prefill: Callable[[int, int], None] | None = None, on_progress: OnBatchProgress | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> list[GenerationResult]:  # fmt: skip
        """Generate to the end of every answer.

        Args:
            on_prefill: Called with (layers done, layers), of all prompts together, while they are worked on.
            on_progress: Called with (answers finished, answers) after every pass.
            should_stop: Asked before every pass; once it says yes, answers that are not finished end as they are.

        Raises:
            BudgetError: Memory ran out; once all prompts had been worked on, with what there is of every answer.
        """
        started_s = time.perf_counter()
        self._proposer.start(self._params.sampling, len(self._members))
        for member in self._members:
            self._begin(member, on_prefill)
        meter, first_round_s, rounds = PassMeter(self._parts), time.perf_counter(), 0
        failure: BudgetError | None = None
        while True:
            active = [member for member in self._members if member.finish_reason is None]
            if on_progress is not None:
                on_progress(len(self._members) - len(active), len(self._members))
            if not active:
                break
            if should_stop is not None and should_stop():
                self._interrupt(active)
                break
            try:
                with device_errors(self._parts.budget.device):
                    self._round(active)
            except BudgetError as error:
                self._interrupt(active)
                failure = error
                break
            rounds += 1
            meter.lap()
        results = self._results(started_s, meter.read(rounds, time.perf_counter() - first_round_s))
        if failure is not None:
            raise BudgetError(str(failure), results) from failure
        return results

    def _results(self, started_s: float, passes: PassFigures) -> list[GenerationResult]:
        answers = [self._figures(member, started_s) for member in self._members]
        predicted_s = self._expected.seconds_per_pass(answers)
        return [
            _result(
                member,
                generation_stats(self._parts, answer, passes, self._expected, predicted_s_per_pass=predicted_s),
            )
            for member, answer in zip(self._members, answers, strict=True)
        ]

    def _interrupt(self, active: Sequence[_Member]) -> None:
        """End these answers as they are."""
        for member in active:
            member.finish("interrupted")
            self._let_go_of_finished(member)

    def _begin(self, member: _Member, on_prefill: Callable[[int, int], None] | None) -> None:
        """Work on a prompt and say the first token behind it."""
        number, count = member.sequence, len(self._members)

        def on_layer(done: int, layers: int) -> None:
            if on_prefill is not None:
                on_prefill(number * layers + done, count * layers)

        target, sampling = self._parts.target, self._params.sampling
        decoder = SpeculativeDecoder(target, self._proposer, sampling, sequence=member.sequence)
        logits = target.prefill(member.sequence, member.prompt, on_layer)
        if self._params.max_new_tokens > 1:
            decoder.prepare(member.prompt, logits)
        member.push([decoder.first_token(logits)])
        member.first_token_s = member.last_token_s
        self._let_go_of_finished(member)

    def _round(self, active: Sequence[_Member]) -> None:
        texts = [Text(member.sequence, member.tokens, member.answer.remaining) for member in active]
        played = self._player.play(texts)
        for member, outcome in zip(active, played, strict=True):
            member.passes += 1
            member.tally.add(outcome.proposal.sources, outcome.accepted_sources, window=self._player.window)
            member.push(outcome.tokens)
            self._let_go_of_finished(member)

    def _let_go_of_finished(self, member: _Member) -> None:
        """A finished answer's cache is of no more use, and would be streamed."""
        if member.finish_reason is not None:
            self._parts.target.cache.truncate(member.sequence, 0)

    def _figures(self, member: _Member, started_s: float) -> AnswerFigures:
        name = self._proposer.name
        return AnswerFigures(
            prompt_tokens=len(member.prompt), new_tokens=len(member.answer.tokens), started_s=started_s,
            first_token_s=member.first_token_s, last_token_s=member.last_token_s, passes=member.passes,
            acceptance=() if name is None else member.tally.levels(name, self._proposer.counts(member.sequence)),
            accepted_by_depth=member.tally.accepted_by_depth, accepted_by_source=member.tally.accepted_by_source,
            windows=member.tally.windows,
        )  # fmt: skip


def _result(member: _Member, stats: GenerationStats) -> GenerationResult:
    assert member.finish_reason is not None
    return GenerationResult(list(member.answer.tokens), member.answer.text, member.finish_reason, stats)
