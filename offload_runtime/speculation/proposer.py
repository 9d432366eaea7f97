"""Where guesses come from: what a proposer is, nobody at all, and a small draft model.

A proposer is shown the whole sequences each time and finds out by itself what of its earlier guesses was kept. It
serves all sequences of a round at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from offload_runtime.config import SamplingParams
from offload_runtime.speculation.acceptance import Acceptance
from offload_runtime.speculation.tree import Proposal


@dataclass(frozen=True)
class Turn:
    """What one sequence brings to a round.

    `tokens` is the whole sequence so far, whose last token is not in the target's cache yet; up to `gamma` more are
    proposed in a row, and up to `tree_nodes` in all, where None asks for a chain. `sequence` is its batch row in every
    cache, and the noise's sequence. `family` says who is to propose where there are several (see `Choice`); None leaves
    it to the proposer. A `thrifty` turn takes fewer where more of them are not worth the time that it takes to think of
    them. Of a chain, so many more as `beside` says may be added, also further down, by who has them for nothing.
    """

    sequence: int
    tokens: Sequence[int]
    gamma: int
    tree_nodes: int | None = None
    family: str | None = None
    thrifty: bool = False
    beside: int = 0

    @property
    def most_nodes(self) -> int:
        """Most proposals in all, but for those beside a chain."""
        return self.gamma if self.tree_nodes is None else self.tree_nodes

    @property
    def room(self) -> int:
        """Most proposals in all."""
        return self.most_nodes + self.beside

    @property
    def longest_chain(self) -> int:
        """Most proposals of one that makes chains."""
        return min(self.gamma, self.most_nodes)


class Proposer(Protocol):
    """Guesses what the target will say, for several sequences at once."""

    @property
    def name(self) -> str | None:
        """Whose guesses they are, as in `Acceptance.proposed_by`; None where there are none."""

    def families(self, texts: Mapping[int, Sequence[int]]) -> Sequence[str]:
        """The ways to propose (see `Choice`) that have any idea of what follows one of these texts, which are all there
        are of some sequences, and room for it; of no texts all ways that there are."""

    def start(self, params: SamplingParams, num_sequences: int = 1) -> None:
        """Called before a generation with the way its tokens will be chosen: of sequences 0 to `num_sequences` - 1."""

    def prepare(self, sequence: int, tokens: Sequence[int]) -> None:
        """A sequence begins with `tokens`: do now what would hold up the first proposals."""

    def propose(self, turns: Sequence[Turn]) -> list[Proposal]:
        """For each turn tokens that may follow, up to `gamma` (at least 1) in a row and `most_nodes` (at least 1) in
        all; none when there is no idea.

        The turns are of different sequences, in any order; sequences without one have finished or wait.
        """

    def ahead(self, pending: Callable[[], bool]) -> None:
        """What was proposed is being verified, or a prompt read that was prepared for: go on for as long as `pending`
        says yes, asked between short steps."""

    def counts(self, sequence: int = 0) -> Sequence[Acceptance]:
        """What levels of its own have decided about a sequence since `start`, the first level first. May wait for the
        device."""


def makes_trees(proposer: Proposer) -> bool:
    """Whether guesses may branch where a turn has room for more than a chain, whoever else may be asked for."""
    able = proposer.families({})
    return "tree" in able or ("ngram" in able and "chain" not in able)


class NoProposer:
    """Plain decoding."""

    name = None

    def families(self, texts: Mapping[int, Sequence[int]]) -> Sequence[str]:
        return ()

    def start(self, params: SamplingParams, num_sequences: int = 1) -> None:
        pass

    def prepare(self, sequence: int, tokens: Sequence[int]) -> None:
        pass

    def propose(self, turns: Sequence[Turn]) -> list[Proposal]:
        return [Proposal() for _ in turns]

    def ahead(self, pending: Callable[[], bool]) -> None:
        pass

    def counts(self, sequence: int = 0) -> Sequence[Acceptance]:
        return ()


def chains_where(room: Callable[[int], int], texts: Mapping[int, Sequence[int]]) -> Sequence[str]:
    """`families` of who makes chains, up to `room(length)` tokens behind a text of so many."""
    return ("chain",) if not texts or any(room(len(tokens)) > 0 for tokens in texts.values()) else ()
