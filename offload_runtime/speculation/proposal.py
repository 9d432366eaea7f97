"""What is proposed to one sequence in one round: a chain of guesses, or a tree of which at most one path comes true.

Pure data between the proposers, which make it, and the round, which verifies all of it in one pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Proposal:
    """Guesses behind the committed end of a sequence, as nodes of a trie. Without any, nothing is proposed.

    `tokens[i]` follows node `parents[i]`, or the committed end where that is -1, and was proposed first by
    `sources[i]`. Parents come before their children, and no two children of a node have the same token.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) == len(self.sources)
        assert all(-1 <= parent < node for node, parent in enumerate(self.parents)), "parents come before children"
        assert len(set(zip(self.parents, self.tokens, strict=True))) == len(self.tokens), "siblings differ"

    @classmethod
    def chain(cls, tokens: Sequence[int], source: str) -> Proposal:
        """Tokens that follow each other."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), (source,) * len(tokens))

    @classmethod
    def of_paths(cls, paths: Iterable[tuple[Sequence[int], str]], count: int) -> Proposal:
        """Paths from the committed end, each with its source, in one trie.

        Args:
            paths: The most promising first; no more of them are asked for than are needed.
            count: Most nodes; a path is cut where they run out.
        """
        trie = _Trie()
        for tokens, source in paths if count > 0 else ():
            parent = -1
            for token in tokens:
                parent = trie.add(token, parent, source, room=count)
                if parent < 0:
                    break
            if len(trie.tokens) >= count:
                break
        return trie.proposal()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every node but the last has one child: a window that needs no tree."""
        return self.parents == tuple(range(-1, len(self.tokens) - 1))

    @property
    def depths(self) -> tuple[int, ...]:
        """Of every node its distance from the committed end, 1 for what follows it directly."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        return tuple(depths)

    def pruned(self, count: int) -> Proposal:
        """The first `count` nodes: with every node the path to it stays."""
        if count >= len(self.tokens):
            return self
        count = max(0, count)
        return Proposal(self.tokens[:count], self.parents[:count], self.sources[:count])

    def merged(self, other: Proposal) -> Proposal:
        """This trie with the paths of another one behind its own nodes; what both have keeps this one's source."""
        trie, places = _Trie(self), [0] * len(other)
        for node, (token, parent, source) in enumerate(zip(other.tokens, other.parents, other.sources, strict=True)):
            places[node] = trie.add(token, places[parent] if parent >= 0 else -1, source)
        return trie.proposal()


class _Trie:
    """A proposal on its way, beginning with the nodes of another."""

    def __init__(self, start: Proposal | None = None) -> None:
        start = Proposal() if start is None else start
        self.tokens, self._parents, self._sources = list(start.tokens), list(start.parents), list(start.sources)
        self._places = {step: node for node, step in enumerate(zip(self._parents, self.tokens, strict=True))}

    def add(self, token: int, parent: int, source: str, *, room: int | None = None) -> int:
        """The child of a node with this token, new if need be; -1 where `room` nodes are there already."""
        node = self._places.get((parent, token))
        if node is None:
            node = len(self.tokens)
            if room is not None and node >= room:
                return -1
            self._places[parent, token] = node
            self.tokens.append(token)
            self._parents.append(parent)
            self._sources.append(source)
        return node

    def proposal(self) -> Proposal:
        """What there is."""
        return Proposal(tuple(self.tokens), tuple(self._parents), tuple(self._sources))
