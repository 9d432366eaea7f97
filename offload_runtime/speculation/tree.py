"""The candidates behind a text: what a draft and n-grams have said so far, of which the most probable are proposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count as numbers
from itertools import islice

from offload_runtime.core import TokenTree


@dataclass(slots=True)
class Offer:
    """Children, of which those that are no nodes yet become nodes one by one, the likeliest first. `last`, the newest
    node among them, is likelier than all that are left, and not expanded."""

    log_probabilities: dict[int, float]  # by token, given the parent; the likeliest first
    source: str
    last: int


@dataclass(slots=True)
class Node:
    """A candidate. `depth` and `log_probability` count from where the tree once began, so that a new root changes
    neither; `CandidateTree` says what they are from the root on."""

    token: int
    parent: int
    depth: int
    log_probability: float
    source: str  # who thought of it first; of the root nobody
    children: dict[int, int] = field(default_factory=dict)  # by token, the first that was added first
    expanded: bool = False  # whether it has been asked what follows it
    places: tuple[int, ...] = ()  # of the keys of the path to it, from below the root on; of nodes that are expanded
    offer: Offer | None = None  # where there may be something left of it


class CandidateTree:
    """Candidates behind a text.

    Args:
        token: The text's last one, the root.

    Attributes:
        nodes: By their numbers, to be read.
        root: The number of the root.
        places: Those that hold keys of nodes, to be read.
    """

    def __init__(self, token: int) -> None:
        self._made = 0
        self._begin(token)

    def _begin(self, token: int) -> None:
        """A root and nothing else."""
        self.root = self._made
        self._made += 1
        self._keep({self.root: Node(token, -1, 0, 0.0, "")})

    def _keep(self, nodes: dict[int, Node]) -> None:
        """Only these are left, the root among them. Order those that wait to be expanded; what is deeper than anybody
        has looked is set aside."""
        self.nodes = nodes
        self.places = {node.places[-1] for node in nodes.values() if node.places}
        self._first_free = 0
        # What a raised probability or an expansion leaves behind in here is recognised when it comes up.
        self._frontier = [(-node.log_probability, key) for key, node in nodes.items() if not node.expanded]
        heapify(self._frontier)
        self._deeper: list[tuple[float, int]] = []
        self._reach = self.nodes[self.root].depth

    def free_places(self, count: int) -> list[int]:
        """The first so many that hold keys of no living candidate."""
        while self._first_free in self.places:
            self._first_free += 1
        return list(islice((place for place in numbers(self._first_free) if place not in self.places), count))

    def depth(self, node: int) -> int:
        """Its distance from the root."""
        return self.nodes[node].depth - self.nodes[self.root].depth

    def log_probability(self, node: int) -> float:
        """That the text goes on as its path does."""
        return self.nodes[node].log_probability - self.nodes[self.root].log_probability

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
        child = self._child(parent, token)
        if child is None:
            return self._make(parent, token, log_probability, source)
        self._raise(child, parent, log_probability)
        return child

    def offer(self, parent: int, tokens: Sequence[int], log_probabilities: Sequence[float], source: str) -> list[float]:
        """As `add` for each of these tokens, for a node that has had no offer. They are all different, the likeliest
        first.

        Returns:
            Log-probabilities of the paths that end with those that were not there.
        """
        above = self.nodes[parent]
        assert above.offer is None, "a node is expanded once"
        new = dict(zip(tokens, log_probabilities, strict=True))
        for token in [token for token in tokens if token in above.children]:
            self._raise(above.children[token], parent, new.pop(token))
        if new:
            token = next(iter(new))
            above.offer = Offer(new, source, last=self._make(parent, token, new[token], source))
        # To the last bit what `log_probability` will say of the nodes: a candidate is not more probable than itself.
        root = self.nodes[self.root].log_probability
        return [above.log_probability + log_probability - root for log_probability in new.values()]

    def _child(self, parent: int, token: int) -> int | None:
        """The node that says this behind another one, where anybody has thought of it."""
        above = self.nodes[parent]
        offer = above.offer
        if token in above.children or offer is None or token not in offer.log_probabilities:
            return above.children.get(token)
        return self._make(parent, token, offer.log_probabilities[token], offer.source)

    def _make(self, parent: int, token: int, log_probability: float, source: str) -> int:
        assert log_probability <= 0
        above = self.nodes[parent]
        node, self._made = self._made, self._made + 1
        self.nodes[node] = Node(token, parent, above.depth + 1, above.log_probability + log_probability, source)
        above.children[token] = node
        self._wait(node)
        return node

    def _make_sibling(self, node: int) -> int | None:
        """The likeliest of the children that were only offered so far is a node now, if it is the one that is to be
        asked for after this node."""
        parent = self.nodes[node].parent
        above = self.nodes.get(parent)
        if above is None or above.offer is None or above.offer.last != node:
            return None
        offer = above.offer
        for token, log_probability in offer.log_probabilities.items():
            if token not in above.children:
                offer.last = self._make(parent, token, log_probability, offer.source)
                return offer.last
        above.offer = None
        return None

    def _raise(self, top: int, parent: int, log_probability: float) -> None:
        """Make a node and all below it more probable, if this is more than it has, given its parent."""
        by = self.nodes[parent].log_probability + log_probability - self.nodes[top].log_probability
        below = [top] if by > 0 else []
        while below:
            node = self.nodes[below[-1]]
            # Never above its parent by a rounding.
            raised = min(node.log_probability + by, self.nodes[node.parent].log_probability)
            moved, node.log_probability = raised > node.log_probability, raised
            if moved and not node.expanded:  # else it was rounded away, and the node waits already
                self._wait(below[-1])
            below[-1:] = node.children.values()

    def _wait(self, key: int) -> None:
        """Put a node among those that may be expanded next."""
        heappush(self._frontier, (-self.nodes[key].log_probability, key))

    def set_expanded(self, node: int, place: int | None) -> None:
        """What follows a node has been added, and its keys are in a place, or at their own place (None: the root's).

        Parents come before their children.
        """
        expanded = self.nodes[node]
        expanded.expanded = True
        if place is not None:
            assert place not in self.places, "two candidates share a place"
            expanded.places = (*self.nodes[expanded.parent].places, place)
            self.places.add(place)
        self._make_sibling(node)

    def next_to_expand(self, count: int, depth: int) -> list[int]:
        """The most probable nodes that have not been expanded, parents before their children.

        Args:
            count: Most nodes.
            depth: Greatest depth.
        """
        limit = self.nodes[self.root].depth + depth
        if limit > self._reach:
            for entry in self._deeper:
                heappush(self._frontier, entry)
            self._deeper.clear()
        self._reach = limit
        picked: list[tuple[float, int]] = []
        while self._frontier and len(picked) < count:
            entry = heappop(self._frontier)
            node = self.nodes.get(entry[1])
            if node is None or node.expanded or node.log_probability != -entry[0]:
                continue
            if node.depth > limit:
                self._deeper.append(entry)
            else:
                picked.append(entry)
                self._make_sibling(entry[1])
        for entry in picked:
            heappush(self._frontier, entry)
        return [key for _, key in picked]

    def best(self, count: int, depth: int) -> tuple[TokenTree, list[int]]:
        """The most probable candidates, with each the path to it, and their nodes.

        Args:
            count: Most candidates.
            depth: Greatest depth.
        """
        limit = self.nodes[self.root].depth + depth
        chosen: dict[int, int] = {self.root: -1}
        heap: list[tuple[float, int]] = []
        last = self.root
        while len(chosen) <= count:
            if self.nodes[last].depth < limit:
                for child in self.nodes[last].children.values():
                    heappush(heap, (-self.nodes[child].log_probability, child))
            if not heap:
                break
            last = heappop(heap)[1]
            sibling = self._make_sibling(last)
            if sibling is not None:
                heappush(heap, (-self.nodes[sibling].log_probability, sibling))
            chosen[last] = len(chosen) - 1
        nodes = list(chosen)[1:]
        found = [self.nodes[node] for node in nodes]
        tokens, sources = tuple(node.token for node in found), tuple(node.source for node in found)
        return TokenTree(tokens, tuple(chosen[node.parent] for node in found), sources), nodes

    def walk(self, tokens: Sequence[int], start: int | None = None) -> list[int]:
        """The nodes below `start` (None: the root) of a path that begins as these tokens do, as far as there is one."""
        path: list[int] = []
        node = self.root if start is None else start
        for token in tokens:
            if (child := self._child(node, token)) is None:
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
        self.root = path[-1]
        above = len(self.nodes[self.root].places)
        kept: dict[int, Node] = {}
        below = [self.root]
        while below:
            key = below.pop()
            node = kept[key] = self.nodes[key]
            node.places = node.places[above:]  # of a text without end they would become ever more
            below.extend(node.children.values())
        self._keep(kept)
        return True
