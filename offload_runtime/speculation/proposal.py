"""What is proposed to one sequence in one round: a chain of guesses, or a tree of which at most one path comes true.

Pure data between the proposers, which make it, and the round, which verifies all of it in one pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offload_runtime.model import depths_of


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
        nodes: dict[tuple[int, int], int] = {}  # by parent and token
        sources: list[str] = []
        for tokens, source in paths if count > 0 else ():
            parent = -1
            for token in tokens:
                if (parent, token) not in nodes:
                    if len(nodes) >= count:
                        break
                    nodes[parent, token] = len(nodes)
                    sources.append(source)
                parent = nodes[parent, token]
            if len(nodes) >= count:
                break
        return cls(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes), tuple(sources))

    def joined(self, other: Proposal, count: int) -> Proposal:
        """These nodes, and behind them those of another one that are not among them, up to `count` in all."""
        nodes = {key: node for node, key in enumerate(zip(self.parents, self.tokens, strict=True))}
        sources, places = list(self.sources), {-1: -1}  # of the other's nodes
        for node, (token, parent) in enumerate(zip(other.tokens, other.parents, strict=True)):
            if parent not in places:
                continue
            key = places[parent], token
            if key not in nodes:
                if len(nodes) >= count:
                    continue
                nodes[key] = len(nodes)
                sources.append(other.sources[node])
            places[node] = nodes[key]
        return Proposal(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes), tuple(sources))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every node but the last has one child: a window that needs no tree."""
        return self.parents == tuple(range(-1, len(self.tokens) - 1))

    @property
    def depths(self) -> tuple[int, ...]:
        """Of every node its distance from the committed end, 1 for what follows it directly."""
        return tuple(depth + 1 for depth in depths_of(self.parents))
