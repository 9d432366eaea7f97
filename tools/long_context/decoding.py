"""What rounds of decoding gave, counted level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offload_runtime.speculation import StepResult


@dataclass(frozen=True)
class Decoding:
    """Rounds of a few sequences behind one start, or of several starts together.

    Attributes:
        texts: New tokens of each sequence and start.
        rounds: What every pass gave every sequence.
        passes: Of the target, each over a window of every sequence.
        elapsed_s: Of all of it, drafting included.
        middle_passes: Of the middle level, each a step of every sequence that does not have enough yet.
        middle_steps: Steps of the middle level, of all sequences together.
        draft_proposed, draft_accepted: Proposals of the draft to those steps; 0 without a middle level.
    """

    texts: tuple[tuple[int, ...], ...]
    rounds: tuple[StepResult, ...]
    passes: int
    elapsed_s: float
    middle_passes: int = 0
    middle_steps: int = 0
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
        """Shares of accepted proposals, for a report: at the target and, with a middle level, there.

        `acceptance` counts all proposals of a window, `acceptance_judged` only those whose predecessors were all
        accepted. `accepted_by_depth[d]`: of the windows with more than d proposals, how many had the first d + 1
        accepted. `middle_steps_per_pass` are steps of all sequences at once, and so are `draft_steps_per_pass`, which
        a draft alone takes for the longest of a pass's windows.
        """
        batch = len(self.rounds) // self.passes
        windows = [self.rounds[first : first + batch] for first in range(0, len(self.rounds), batch)]
        return {
            **target_acceptance(self.rounds),
            "middle_steps_per_pass": self.middle_passes / self.passes,
            "draft_steps_per_pass": sum(max(one.num_proposed for one in window) for window in windows) / self.passes,
            "draft_accepted_per_step": self.draft_accepted / self.middle_steps if self.middle_steps else None,
            "draft_acceptance": self.draft_accepted / self.draft_proposed if self.draft_proposed else None,
        }


def target_acceptance(rounds: Sequence[StepResult]) -> dict[str, Any]:
    """The part of `Decoding.acceptance` that the target decides."""
    proposed = sum(played.num_proposed for played in rounds)
    accepted = sum(played.num_accepted for played in rounds)
    judged = accepted + sum(played.num_accepted < played.num_proposed for played in rounds)
    by_depth = []
    deepest = [max(played.proposal.depths, default=0) for played in rounds]
    for depth in range(1, max(deepest, default=0) + 1):
        reached = [played.num_accepted >= depth for played, most in zip(rounds, deepest, strict=True) if most >= depth]
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
        middle_passes=sum(one.middle_passes for one in decodings),
        middle_steps=sum(one.middle_steps for one in decodings),
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
