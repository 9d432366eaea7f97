"""How often each level of speculation agrees with the one below it: counted while tokens are generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Acceptance:
    """What one level decided about the proposals of another.

    Attributes:
        proposed_by: `ngram`, `draft` or `middle` (the target over retrieved chunks).
        verified_by: `middle` or `target`.
        verifications: Windows of at least one proposal that were verified.
        proposed: Proposals in them.
        accepted: Of these, those that agreed, up to the first of a window that did not.
    """

    proposed_by: str
    verified_by: str
    verifications: int
    proposed: int
    accepted: int

    @property
    def rate(self) -> float:
        """Accepted of the proposed; 0 when nothing was."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def accepted_per_verification(self) -> float:
        """Proposals that a verification brought, its own token not counted."""
        return self.accepted / self.verifications if self.verifications else 0.0


class Tally:
    """Counts what the target decided in the rounds of one generation."""

    def __init__(self) -> None:
        self._verifications = self._proposed = self._accepted = 0

    def add(self, num_proposed: int, num_accepted: int) -> None:
        """One round of one sequence."""
        self._verifications += num_proposed > 0
        self._proposed += num_proposed
        self._accepted += num_accepted

    def levels(self, proposed_by: str, inner: Sequence[Acceptance]) -> tuple[Acceptance, ...]:
        """All levels, the target's last.

        Args:
            proposed_by: Who proposed to the target.
            inner: The levels before, as `Proposer.counts` tells them.
        """
        target = Acceptance(proposed_by, "target", self._verifications, self._proposed, self._accepted)
        return (*inner, target)
