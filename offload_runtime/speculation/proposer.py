"""Where guesses come from: what a proposer is asked and answers, and nobody at all.

A proposer is shown the whole sequences each time and finds out by itself what of its earlier guesses was kept. It
serves all requests of a step at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from offload_runtime.config import SamplingParams
from offload_runtime.speculation.acceptance import Acceptance
from offload_runtime.speculation.tree import Proposal


@dataclass(frozen=True)
class DraftRequest:
    """What is to be proposed to one request in one step.

    Attributes:
        slot: Its batch row in every cache, which says how its tokens are sampled, too.
        tokens: The whole sequence so far; the last token is not in the target's cache yet.
        gamma: Most tokens to propose in a row.
        tree_nodes: Most tokens to propose in all; None for a chain.
        mode: Who is to propose where there are several (see `Choice`); None leaves it to the proposer.
        cost_aware: Fewer where more are not worth the time that it takes to think of them.
        extra_ngrams: So many more may join a chain, also further down, by n-grams, which cost nothing.
    """

    slot: int
    tokens: Sequence[int]
    gamma: int
    tree_nodes: int | None = None
    mode: str | None = None
    cost_aware: bool = False
    extra_ngrams: int = 0

    @property
    def most_nodes(self) -> int:
        """Most proposals in all, but for extra n-grams."""
        return self.gamma if self.tree_nodes is None else self.tree_nodes

    @property
    def room(self) -> int:
        """Most proposals in all."""
        return self.most_nodes + self.extra_ngrams

    @property
    def longest_chain(self) -> int:
        """Most proposals of one that makes chains."""
        return min(self.gamma, self.most_nodes)


class Proposer(Protocol):
    """Guesses what the target will say, for several sequences at once."""

    @property
    def name(self) -> str | None:
        """Whose guesses they are, as in `Acceptance.proposed_by`; None where there are none."""

    def modes(self, texts: Mapping[int, Sequence[int]]) -> Sequence[str]:
        """The ways to propose (see `Choice`) that have any idea of what follows one of these texts, which are all there
        are of some sequences, and room for it; of no texts all ways that there are."""

    def start(self, slots: Sequence[SamplingParams]) -> None:
        """Called before a generation: slot i begins anew, and its tokens will be chosen as `slots[i]` says."""

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        """A slot's sequence begins with `tokens`: do now what would hold up the first proposals."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """For each request tokens that may follow, up to `gamma` (at least 1) in a row and `most_nodes` (at least 1)
        in all; none when there is no idea.

        The requests are of different slots, in any order; slots without one have finished or wait.
        """

    def ahead(self, pending: Callable[[], bool]) -> None:
        """What was proposed is being verified, or a prompt read that was prepared for: go on for as long as `pending`
        says yes, asked between short steps."""

    def counts(self, slot: int) -> Sequence[Acceptance]:
        """What levels of its own have decided about a slot since `start`, the first level first. May wait for the
        device."""


def makes_trees(proposer: Proposer) -> bool:
    """Whether guesses may branch where a request has room for more than a chain, whoever else may be asked for."""
    able = proposer.modes({})
    return "tree" in able or ("ngram" in able and "chain" not in able)


class NoProposer:
    """Plain decoding."""

    name = None

    def modes(self, texts: Mapping[int, Sequence[int]]) -> Sequence[str]:
        return ()

    def start(self, slots: Sequence[SamplingParams]) -> None:
        pass

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        pass

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [Proposal() for _ in requests]

    def ahead(self, pending: Callable[[], bool]) -> None:
        pass

    def counts(self, slot: int) -> Sequence[Acceptance]:
        return ()


def chains_where(room: Callable[[int], int], texts: Mapping[int, Sequence[int]]) -> Sequence[str]:
    """`modes` of who makes chains, up to `room(length)` tokens behind a text of so many."""
    return ("chain",) if not texts or any(room(len(tokens)) > 0 for tokens in texts.values()) else ()
