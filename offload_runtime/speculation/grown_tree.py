"""A sequence's tree of candidates with what a draft said about its nodes, and the way from its nodes to a draft's step.

Pure data on the host: `TreeDraftProposer` grows it, a model of `TreeModel` says what follows its nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from math import inf
from typing import Protocol

from offload_runtime.config import SamplingParams
from offload_runtime.runners import Asked, Branch, Children
from offload_runtime.speculation.candidates import CandidateTree
from offload_runtime.speculation.proposal import Proposal
from offload_runtime.speculation.proposers import Turn


class TreeModel(Protocol):
    """What is needed of a `DraftTree`."""

    def room(self, length: int) -> int:
        """Tokens of a path behind a text of so many that have keys; negative for a text that is too long itself."""

    @property
    def num_slots(self) -> int:
        """Nodes of a sequence that can have keys at a time."""

    def width(self, num_sequences: int) -> int:
        """Most rows of a sequence in a step about so many."""

    def start(self, params: SamplingParams) -> None:
        """Score this way from now on."""

    def holds(self, sequence: int, tokens: Sequence[int]) -> bool:
        """Whether there are keys of exactly these tokens at their own places."""

    def adopt(self, sequence: int, tokens: Sequence[int], slots: Sequence[int]) -> None:
        """The text has gone on with nodes of the tree: move their keys to their places."""

    def get_ready(self, lengths: Sequence[int], further: int) -> bool:
        """Prepare one more of the steps that texts of these lengths, and up to so many more tokens, will need.

        Returns:
            Whether there was one to prepare.
        """

    def expand(self, asked: Mapping[int, Asked]) -> dict[int, list[Children]]:
        """What may follow some nodes of each sequence, or the first of them, in one step."""


@dataclass
class GrownTree:
    """A sequence's tree, and what it stands behind."""

    turn: Turn
    tree: CandidateTree
    children: dict[int, Children] = field(default_factory=dict)  # by node, what the draft said

    def __post_init__(self) -> None:
        self.text = list(self.turn.tokens)  # the turn's own list grows

    @property
    def length(self) -> int:
        """Tokens of the text; its last one is the root."""
        return len(self.text)

    def window(self) -> tuple[Proposal, list[int]]:
        """The most probable candidates that the turn may propose, and their nodes."""
        return self.tree.best(self.turn.most_nodes, self.turn.gamma)

    def placed(self, nodes: Sequence[int]) -> dict[int, int | None]:
        """A free slot for every one of these nodes; None for the root, whose keys have a place."""
        others = [node for node in nodes if node != self.tree.root]
        slots = dict(zip(others, self.tree.free_slots(len(others)), strict=True))
        return {node: slots.get(node) for node in nodes}

    def asked(self, placed: Mapping[int, int | None]) -> Asked:
        """What a step is to find out about nodes that have been given their slots only now, parents first."""
        tree, branches = self.tree, []
        paths: dict[int, tuple[int, ...]] = {}
        for node, slot in placed.items():
            if slot is None:
                path: tuple[int, ...] = ()
            else:
                above = tree.parent(node)
                assert above in paths or tree.is_expanded(above), "what comes before a node has keys"
                path = (*(paths[above] if above in paths else tree.slots(above)), slot)
            paths[node] = path
            branches.append(Branch(tree.token(node), path))
        return Asked(self.text, branches)


class LeastOfBest:
    """The least of the `count` largest numbers so far: what a candidate has to exceed to be among the best."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._best: list[float] = []

    def add(self, number: float) -> None:
        """One more."""
        if len(self._best) < self._count:
            heappush(self._best, number)
        else:
            heappushpop(self._best, number)

    @property
    def value(self) -> float:
        """-inf as long as there are fewer."""
        return self._best[0] if len(self._best) == self._count else -inf
