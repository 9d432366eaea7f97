"""The tree of what a sequence may go on with, as far as anybody has guessed: grows while passes run, and outlives them.

Pure data on the host. A node is known by a number that it keeps for as long as it lives; its probability is that of its
whole path from the root, the last token that is known for certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from offload_runtime.speculation.proposal import Proposal


@dataclass(slots=True)
class _Node:
    """`depth` and `log_probability` count from where the tree once began, so that a new root changes neither."""

    token: int
    parent: int
    depth: int
    log_probability: float
    source: str
    children: dict[int, int] = field(default_factory=dict)  # by token, the first that was added first
    expanded: bool = False
    slot: int | None = None


class CandidateTree:
    """Candidates behind a text.

    Args:
        token: The text's last one, the root.
    """

    def __init__(self, token: int) -> None:
        self._made = 0
        self._begin(token)

    def _begin(self, token: int) -> None:
        """A root and nothing else."""
        self.root = self._made
        self._made += 1
        self._nodes = {self.root: _Node(token, -1, 0, 0.0, "")}
        self._slots: set[int] = set()
        self._rank_frontier()

    def _rank_frontier(self) -> None:
        """Order the nodes that wait to be expanded; what is deeper than anybody has looked is set aside."""
        # What a raised probability or an expansion leaves behind in here is recognised when it comes up.
        self._frontier = [(-node.log_probability, key) for key, node in self._nodes.items() if not node.expanded]
        heapify(self._frontier)
        self._deeper: list[tuple[float, int]] = []
        self._reach = self._nodes[self.root].depth

    def __len__(self) -> int:
        """Candidates; the root is none."""
        return len(self._nodes) - 1

    def __contains__(self, node: int) -> bool:
        return node in self._nodes

    @property
    def slots(self) -> frozenset[int]:
        """Those that hold keys of living candidates."""
        return frozenset(self._slots)

    @property
    def num_slots(self) -> int:
        """How many there are of them."""
        return len(self._slots)

    def token(self, node: int) -> int:
        """What a node says."""
        return self._nodes[node].token

    def depth(self, node: int) -> int:
        """Its distance from the root."""
        return self._nodes[node].depth - self._nodes[self.root].depth

    def log_probability(self, node: int) -> float:
        """That the text goes on as its path does."""
        return self._nodes[node].log_probability - self._nodes[self.root].log_probability

    def source(self, node: int) -> str:
        """Who thought of it first; of the root nobody."""
        return self._nodes[node].source

    def slot(self, node: int) -> int | None:
        """Where the draft keeps its keys; None where it has none but those at their own places."""
        return self._nodes[node].slot

    def is_expanded(self, node: int) -> bool:
        """Whether it has been asked what follows it."""
        return self._nodes[node].expanded

    def children(self, node: int) -> list[int]:
        """What may follow a node, in the order in which it was thought of."""
        return list(self._nodes[node].children.values())

    def path(self, node: int) -> list[int]:
        """The nodes from below the root to this one."""
        path: list[int] = []
        while node != self.root:
            path.append(node)
            node = self._nodes[node].parent
        return path[::-1]

    def add(self, parent: int, token: int, log_probability: float, source: str) -> int:
        """What may follow a node; if that is there already, the larger of the two probabilities counts.

        Args:
            parent: The node.
            token: What follows.
            log_probability: That it does, if the text goes that far; at most 0.
            source: Who says so.

        Returns:
            The child.
        """
        assert log_probability <= 0
        above = self._nodes[parent]
        known = above.children.get(token)
        if known is not None:
            self._raise(known, above.log_probability + log_probability - self._nodes[known].log_probability)
            return known
        node, self._made = self._made, self._made + 1
        self._nodes[node] = _Node(token, parent, above.depth + 1, above.log_probability + log_probability, source)
        above.children[token] = node
        self._wait(node)
        return node

    def _raise(self, top: int, by: float) -> None:
        """Make a node and all below it more probable."""
        below = [top] if by > 0 else []
        while below:
            node = self._nodes[below[-1]]
            # Never above its parent by a rounding.
            node.log_probability = min(node.log_probability + by, self._nodes[node.parent].log_probability)
            if not node.expanded:
                self._wait(below[-1])
            below[-1:] = node.children.values()

    def _wait(self, key: int) -> None:
        """Put a node among those that may be expanded next."""
        heappush(self._frontier, (-self._nodes[key].log_probability, key))

    def set_expanded(self, node: int, slot: int | None) -> None:
        """What follows a node has been added, and its keys are in a slot, or at their own place (None)."""
        self._nodes[node].expanded = True
        self._nodes[node].slot = slot
        if slot is not None:
            assert slot not in self._slots, "two candidates share a slot"
            self._slots.add(slot)

    def next_to_expand(self, count: int, depth: int) -> list[int]:
        """The most probable nodes that have not been expanded, parents before their children.

        Args:
            count: Most nodes.
            depth: Greatest depth.
        """
        limit = self._nodes[self.root].depth + depth
        if limit > self._reach:
            for entry in self._deeper:
                heappush(self._frontier, entry)
            self._deeper.clear()
        self._reach = limit
        picked: list[tuple[float, int]] = []
        while self._frontier and len(picked) < count:
            entry = heappop(self._frontier)
            node = self._nodes.get(entry[1])
            if node is None or node.expanded or node.log_probability != -entry[0]:
                continue
            (self._deeper if node.depth > limit else picked).append(entry)
        for entry in picked:
            heappush(self._frontier, entry)
        return [key for _, key in picked]

    def best(self, count: int, depth: int) -> tuple[Proposal, list[int]]:
        """The most probable candidates, with each the path to it, and their nodes.

        Args:
            count: Most candidates.
            depth: Greatest depth.
        """
        limit = self._nodes[self.root].depth + depth
        chosen: dict[int, int] = {self.root: -1}
        parents: list[int] = []
        heap: list[tuple[float, int]] = []
        last = self.root
        while len(chosen) <= count:
            if self._nodes[last].depth < limit:
                for child in self._nodes[last].children.values():
                    heappush(heap, (-self._nodes[child].log_probability, child))
            if not heap:
                break
            last = heappop(heap)[1]
            parents.append(chosen[self._nodes[last].parent])
            chosen[last] = len(chosen) - 1
        nodes = list(chosen)[1:]
        tokens, sources = ([getattr(self._nodes[node], name) for node in nodes] for name in ("token", "source"))
        return Proposal(tuple(tokens), tuple(parents), tuple(sources)), nodes

    def walk(self, tokens: Sequence[int], start: int | None = None) -> list[int]:
        """The nodes below `start` (None: the root) of a path that begins as these tokens do, as far as there is one."""
        path: list[int] = []
        node = self.root if start is None else start
        for token in tokens:
            child = self._nodes[node].children.get(token)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def follow(self, tokens: Sequence[int]) -> bool:
        """The text has gone on: keep what was guessed behind it and let go of everything else.

        Args:
            tokens: New ones of the text; the last becomes the root, and has its keys at their own place.

        Returns:
            Whether the path was there; else only the new root is.
        """
        path = self.walk(tokens)
        if len(path) < len(tokens):
            self._begin(tokens[-1])
            return False
        if not path:
            return True
        kept: dict[int, _Node] = {}
        below = [path[-1]]
        while below:
            key = below.pop()
            kept[key] = self._nodes[key]
            below.extend(kept[key].children.values())
        self.root = path[-1]
        kept[self.root].slot = None
        self._nodes = kept
        self._slots = {node.slot for node in kept.values() if node.slot is not None}
        self._rank_frontier()
        return True
