"""How often each level of speculation agrees with the one below it: counted while tokens are generated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Acceptance:
    """What one level decided about the proposals of another.

    Attributes:
        proposed_by: `ngram`, `draft` or `retrieval` (the target over retrieved chunks).
        verified_by: `retrieval` or `target`.
        verifications: Windows of at least one proposal that were verified.
        proposed: Proposals in them, all branches of trees included.
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
    """Counts what the target decided in the rounds of one generation.

    Attributes:
        accepted_by_depth: Proposals accepted as the first of their round (0), as the second, and so on, in this order.
        accepted_by_source: Proposals accepted by who made them first.
        windows: Rounds by what was asked for.
    """

    def __init__(self) -> None:
        self.accepted_by_depth: Counter[int] = Counter()
        self.accepted_by_source: Counter[str] = Counter()
        self.windows: Counter[str] = Counter()
        self._verifications = 0
        self._verified: Counter[str] = Counter()  # windows by who has proposed any of it
        self._proposed: Counter[str] = Counter()  # by who proposes

    def add(self, sources: Sequence[str], accepted_sources: Sequence[str], *, window: str) -> None:
        """One round of one sequence: of its proposals, and of those that were accepted, who made them, in order; and
        what was asked for, in words."""
        self.windows[window] += 1
        self._verifications += len(sources) > 0
        self._verified.update(set(sources))
        self._proposed.update(sources)
        self.accepted_by_depth.update(range(len(accepted_sources)))
        self.accepted_by_source.update(accepted_sources)

    def levels(self, proposed_by: str, inner: Sequence[Acceptance]) -> tuple[Acceptance, ...]:
        """All levels, the target's last. A draft's proposals are all of its windows, n-grams among them; of a
        hierarchy they are those that it made.

        Args:
            proposed_by: Who proposed to the target.
            inner: The levels before, as `Proposer.counts` tells them.
        """
        counts = self._verifications, self._proposed.total(), self.accepted_by_source.total()
        if proposed_by == "retrieval":
            counts = self._verified[proposed_by], self._proposed[proposed_by], self.accepted_by_source[proposed_by]
        return (*inner, Acceptance(proposed_by, "target", *counts))
