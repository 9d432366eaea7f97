"""What can be chosen for a round: who proposes, and how much. Pure data."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

# Proposals of a window: gamma of a chain, nodes of a tree. Finer steps would tell less than the noise of times.
SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True)
class Choice:
    """How a round is played.

    `family` is a way to propose: `ngram` (what the text has said before behind its ending), `unigram` (the same where
    only its last token occurred before), `chain` (a draft's tokens in a row, or those of TriForce), `tree` (a draft's
    candidates and n-grams, the most probable ones). `size` counts the proposals.
    """

    family: str
    size: int

    @property
    def drafts(self) -> bool:
        """Whether anybody has to compute for it: looking up takes no time."""
        return self.family in ("chain", "tree")

    @property
    def may_branch(self) -> bool:
        """Whether the proposals need not stand in a row."""
        return self.family in ("ngram", "unigram", "tree")

    def __str__(self) -> str:
        return f"{self.family} {self.size}" if self.size else self.family


# No proposals at all.
PLAIN = Choice("plain", 0)


def size_for(count: int) -> int:
    """The smallest of `SIZES` that is no less than `count`, or the largest of all."""
    return SIZES[min(bisect_left(SIZES, count), len(SIZES) - 1)]


def size_within(count: int) -> int:
    """The largest of `SIZES` that is no more than `count`."""
    return SIZES[steps_within(count)]


def steps_within(size: int) -> int:
    """Index of the largest of `SIZES` that is no more than `size`."""
    return bisect_right(SIZES, size) - 1
