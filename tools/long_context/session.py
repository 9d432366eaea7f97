"""A loaded runtime with texts in its KV cache: decoding, passes and steps, measured from a cache that is cut back, and
what they gave, counted level by level."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from harness import percentiles
from long_context.internals import Levels, join_slots, levels_of, runner_of, slot_sampling, verifier_passes

from offload_runtime.engine import Runtime
from offload_runtime.model import Window
from offload_runtime.params import SamplingParams
from offload_runtime.runners import WindowInput
from offload_runtime.speculation import DraftRequest, Proposer, StepResult, run_step

# The first run of a step compiles, the second captures a graph.
_UNTIMED = 2
_TIMED_STEPS = 20


@dataclass(frozen=True)
class Decoding:
    """Rounds of a few sequences behind one start, or of several starts together.

    Attributes:
        texts: New tokens of each sequence and start.
        rounds: What every pass gave every sequence.
        passes: Of the target, each over a window of every sequence.
        elapsed_s: Of all of it, drafting included.
        verifier_passes: Of the retrieval verifier, each a step of every sequence that does not have enough yet.
        verifier_steps: Steps of the retrieval verifier, of all sequences together.
        draft_proposed, draft_accepted: Proposals of the draft to those steps; 0 without a retrieval verifier.
    """

    texts: tuple[tuple[int, ...], ...]
    rounds: tuple[StepResult, ...]
    passes: int
    elapsed_s: float
    verifier_passes: int = 0
    verifier_steps: int = 0
    draft_proposed: int = 0
    draft_accepted: int = 0

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(len(text) for text in self.texts)

    @property
    def s_per_token(self) -> float:
        """Seconds for a token, whichever sequence's."""
        return self.elapsed_s / self.num_tokens

    @property
    def tokens_per_pass(self) -> float:
        """Of all sequences together."""
        return self.num_tokens / self.passes

    def acceptance(self) -> dict[str, Any]:
        """Shares of accepted proposals, for a report: at the target and, with a retrieval verifier, there.

        `acceptance` counts all proposals of a window, `acceptance_judged` only those whose predecessors were all
        accepted. `accepted_by_depth[d]`: of the windows with more than d proposals, how many had the first d + 1
        accepted. `verifier_steps_per_pass` are steps of all sequences at once, and so are `draft_steps_per_pass`, which
        a draft alone takes for the longest of a pass's windows.
        """
        batch = len(self.rounds) // self.passes
        windows = [self.rounds[first : first + batch] for first in range(0, len(self.rounds), batch)]
        return {
            **target_acceptance(self.rounds),
            "verifier_steps_per_pass": self.verifier_passes / self.passes,
            "draft_steps_per_pass": sum(max(len(one.proposal) for one in window) for window in windows) / self.passes,
            "draft_accepted_per_step": self.draft_accepted / self.verifier_steps if self.verifier_steps else None,
            "draft_acceptance": self.draft_accepted / self.draft_proposed if self.draft_proposed else None,
        }


def target_acceptance(rounds: Sequence[StepResult]) -> dict[str, Any]:
    """The part of `Decoding.acceptance` that the target decides."""
    proposed = sum(len(played.proposal) for played in rounds)
    accepted = sum(len(played.path) for played in rounds)
    # Where something was proposed behind the last one that was accepted, the target said something else.
    ends = [(played.path[-1] if played.path else -1, played.proposal.parents) for played in rounds]
    judged = accepted + sum(end in parents for end, parents in ends)
    by_depth = []
    deepest = [max(played.proposal.depths, default=0) for played in rounds]
    for depth in range(1, max(deepest, default=0) + 1):
        reached = [len(played.path) >= depth for played, most in zip(rounds, deepest, strict=True) if most >= depth]
        by_depth.append(sum(reached) / len(reached))
    return {
        "proposed": proposed,
        "accepted": accepted,
        "acceptance": accepted / proposed if proposed else None,
        "acceptance_judged": accepted / judged if judged else None,
        "accepted_by_depth": by_depth,
    }


def together(decodings: Sequence[Decoding]) -> Decoding:
    """Several starts as one."""
    return Decoding(
        texts=tuple(text for one in decodings for text in one.texts),
        rounds=tuple(played for one in decodings for played in one.rounds),
        passes=sum(one.passes for one in decodings),
        elapsed_s=sum(one.elapsed_s for one in decodings),
        verifier_passes=sum(one.verifier_passes for one in decodings),
        verifier_steps=sum(one.verifier_steps for one in decodings),
        draft_proposed=sum(one.draft_proposed for one in decodings),
        draft_accepted=sum(one.draft_accepted for one in decodings),
    )


@dataclass(frozen=True)
class Comparison:
    """Whether texts begin alike: `first_difference` is (text, token) of the first difference, None where there is none.

    `num_tokens` were compared: of every pair what both have.
    """

    num_tokens: int
    first_difference: tuple[int, int] | None

    @property
    def identical(self) -> bool:
        """No token differs, and some were compared."""
        return self.first_difference is None and self.num_tokens > 0


def compare(plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> Comparison:
    """Compare the texts of two decodings of the same starts."""
    count, first = 0, None
    for number, (expected, said) in enumerate(zip(plain, other, strict=True)):
        length = min(len(expected), len(said))
        count += length
        unequal = [index for index in range(length) if expected[index] != said[index]]
        if unequal and first is None:
            first = number, unequal[0]
    return Comparison(count, first)


class Session:
    """One runtime, and which tokens its KV cache holds.

    A *start* is a list of known tokens for each sequence, whose last one is not in the cache yet.

    Args:
        runtime: To work with. Its own generations must not run beside.
    """

    def __init__(self, runtime: Runtime, *, batch: int = 1) -> None:
        self.runtime = runtime
        self._runner = runner_of(runtime)
        self._held: list[list[int]] = [[] for _ in range(batch)]

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.runtime.device.type == "cuda":
            torch.cuda.synchronize(self.runtime.device)

    def fill(self, sequence: int, tokens: Sequence[int]) -> torch.Tensor | None:
        """Let the cache hold these tokens of a sequence: cut back to what it shares with them, prefill the rest.

        Returns:
            Logits [1, V] of the last token; None if nothing was missing.

        Raises:
            ContextLengthError, BudgetError: The cache has no room.
        """
        cache = self._runner.cache
        held = self._held[sequence][: cache.length(sequence)]  # the warm-up of a proposer leaves the cache empty
        length = min(len(held), len(tokens))
        if held[:length] != list(tokens[:length]):
            length = next(index for index in range(length) if held[index] != tokens[index])
        cache.truncate(sequence, length)
        self._held[sequence] = held[:length]  # first, so that an interruption never leaves more than the cache holds
        logits = self._runner.prefill(sequence, tokens[length:]) if length < len(tokens) else None
        self._held[sequence] = list(tokens)
        return logits

    def go_to(self, start: Sequence[Sequence[int]]) -> None:
        """Let the cache hold all known tokens but each sequence's last, and wait for the device."""
        for sequence, known in enumerate(start):
            self.fill(sequence, known[:-1])
        self.synchronize()

    def decode(
        self, start: Sequence[Sequence[int]], proposer: Proposer, params: SamplingParams, *, gamma: int, count: int,
    ) -> Decoding:  # fmt: skip
        """Decode until the sequences have `count` new tokens on average; the cache is cut back before and afterwards.

        An untimed round comes first: it captures graphs and fetches chunks.

        Args:
            start: Where to begin.
            proposer: For all sequences.
            params: How tokens are chosen.
            gamma: Most tokens to propose to a pass.
            count: New tokens.
        """
        self.go_to(start)
        self._start(proposer, params, len(start))
        self._round([list(known) for known in start], proposer, gamma)
        self._cut(start)
        levels = levels_of(proposer)
        before, texts, rounds, passes = _counts(levels), [list(known) for known in start], [], 0
        earlier_passes = verifier_passes(proposer)
        first, started_s = sum(len(text) for text in texts), time.perf_counter()
        while sum(len(text) for text in texts) - first < count * len(texts):
            rounds += self._round(texts, proposer, gamma)
            passes += 1
        elapsed_s = time.perf_counter() - started_s
        steps, accepted = (after - earlier for after, earlier in zip(_counts(levels), before, strict=True))
        self._cut(start)
        return Decoding(
            texts=tuple(tuple(text[len(known) :]) for text, known in zip(texts, start, strict=True)),
            rounds=tuple(rounds), passes=passes, elapsed_s=elapsed_s,
            verifier_passes=verifier_passes(proposer) - earlier_passes, verifier_steps=steps,
            draft_proposed=steps * len(levels.tree or ()), draft_accepted=accepted,
        )  # fmt: skip

    def _start(self, proposer: Proposer, params: SamplingParams, count: int) -> None:
        """Sequence i draws the noise of request i."""
        join_slots(self.runtime, proposer, [replace(params, noise_id=number) for number in range(count)])

    def _round(self, texts: list[list[int]], proposer: Proposer, gamma: int) -> list[StepResult]:
        """One pass over a window of every sequence; appends what it gives."""
        requests = [DraftRequest(index, text, gamma) for index, text in enumerate(texts)]
        played = run_step(self._runner, slot_sampling(self.runtime), proposer, requests)
        for text, one in zip(texts, played, strict=True):
            text += one.tokens
        return played

    def _cut(self, start: Sequence[Sequence[int]]) -> None:
        """Forget what was committed behind a start."""
        for sequence, known in enumerate(start):
            self._runner.cache.truncate(sequence, len(known) - 1)
        self.synchronize()

    def pass_times_s(self, start: Sequence[Sequence[int]], width: int, passes: int) -> tuple[list[float], int]:
        """Times of passes of the full target over windows of `width` tokens, and the bytes that each streams.

        What the windows say is beside the point: it is the text from its beginning, as often as there is room for it.
        """
        self.go_to(start)
        windows = [Window(tuple(islice(cycle(known), width))) for known in start]
        times_s, nbytes, streamer = [], 0, self._runner.streamer
        for number in range(passes + _UNTIMED):
            before, started_s = streamer.bytes_begun, time.perf_counter()
            self._runner.verify(windows, list(range(len(windows)))).argmax(-1).tolist()
            if number >= _UNTIMED:
                times_s.append(time.perf_counter() - started_s)
                nbytes = streamer.bytes_begun - before
        return times_s, nbytes

    def step_times_ms(
        self, start: Sequence[Sequence[int]], proposer: Proposer, params: SamplingParams, *, gamma: int
    ) -> dict[str, float]:
        """Medians of single steps of the inner levels, of all sequences, which go on from step to step as in decoding.

        `verifier_step_ms`, `verifier_step_with_refresh_ms` and, where there is a draft, `draft_step_ms` and the number
        of such `draft_steps` before one of the verifier's.
        """
        self.go_to(start)
        self._start(proposer, params, len(start))
        self._round([list(known) for known in start], proposer, gamma)
        self._cut(start)
        levels = levels_of(proposer)
        if levels.verifier is None:
            return {"draft_step_ms": self._draft_step_ms(start, levels, gamma)}
        found = {}
        for name, refresh in (("verifier_step_ms", False), ("verifier_step_with_refresh_ms", True)):
            times_ms: list[tuple[float, float]] = []
            while len(times_ms) < _TIMED_STEPS + _UNTIMED:
                times_ms += self._inner_steps_ms(start, levels, gamma, refresh)
            found[name] = percentiles([verifier_ms for verifier_ms, _ in times_ms[_UNTIMED:]]).median
            if levels.draft is not None:
                found["draft_step_ms"] = percentiles([draft for _, draft in times_ms[_UNTIMED:]]).median
                found["draft_steps"] = levels.tree.num_levels if levels.tree else 0
        return found

    def _inner_steps_ms(
        self, start: Sequence[Sequence[int]], levels: Levels, gamma: int, refresh: bool
    ) -> list[tuple[float, float]]:
        """A window's worth of verifier steps: the milliseconds of each, and of one of the draft's steps before it."""
        window, verifier, draft, tree = levels.window, levels.verifier, levels.draft, levels.tree
        assert window is not None and verifier is not None and tree is not None, "a hierarchy"
        verifier.begin(_lengths(start), dict.fromkeys(range(len(start)), gamma + len(tree) + 1))
        if draft is not None:
            for sequence, known in enumerate(start):
                draft.texts.catch_up_but(sequence, known, 1)
        window.upload(_known(start, gamma, beyond=len(tree)))
        times_ms, most = [], tree.num_levels + 1
        for number in range(max(1, gamma // most)):
            longest = {sequence: length + number * most for sequence, length in _lengths(start).items()}
            draft_ms = 0.0
            if draft is not None:
                draft_ms = self._timed_ms(partial(draft.grow, tree, longest=longest)) / tree.num_levels
            times_ms.append((self._timed_ms(partial(verifier.step, tree, refresh=refresh)), draft_ms))
        return times_ms

    def _draft_step_ms(self, start: Sequence[Sequence[int]], levels: Levels, gamma: int) -> float:
        """Milliseconds of a step of a draft that proposes windows of `gamma` tokens by itself."""
        window, draft, times_ms = levels.window, levels.draft, []
        assert window is not None and draft is not None and gamma > 0, "a chain"
        for _ in range(_TIMED_STEPS + _UNTIMED):
            for sequence, known in enumerate(start):
                draft.texts.catch_up(sequence, known)
            window.upload(_known(start, gamma))
            times_ms.append(self._timed_ms(partial(draft.steps, gamma, longest=_lengths(start))) / gamma)
        return percentiles(times_ms[_UNTIMED:]).median

    def _timed_ms(self, action: Callable[[], None]) -> float:
        """Milliseconds of an action and of what it enqueues."""
        self.synchronize()
        started_s = time.perf_counter()
        action()
        self.synchronize()
        return 1e3 * (time.perf_counter() - started_s)


def _lengths(start: Sequence[Sequence[int]]) -> dict[int, int]:
    """Known tokens by sequence."""
    return {sequence: len(known) for sequence, known in enumerate(start)}


def _known(start: Sequence[Sequence[int]], count: int, *, beyond: int = 0) -> dict[int, WindowInput]:
    """What a window is told of a start behind which steps put `count` tokens, and propose so many `beyond` them."""
    ends = [(known, len(known)) for known in start]
    return {
        sequence: WindowInput(known[-2:], end, end + count, end + count + beyond)
        for sequence, (known, end) in enumerate(ends)
    }


def _counts(levels: Levels) -> tuple[int, int]:
    """Steps of the retrieval verifier and proposals that they accepted, of all sequences. Waits for the device."""
    counts = levels.verifier.counts if levels.verifier is not None else []
    return sum(steps for steps, _ in counts), sum(accepted for _, accepted in counts)
