"""The nouns that all rooms share: what may be proposed, what is proposed, and the rows of a pass."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class TokenTree:
    """Holds tokens behind the committed end of a sequence, as nodes of a trie: a chain, or a tree of which at most one
    path comes true. It is what is proposed, and what a pass verifies.

    Attributes:
        tokens: One a node.
        parents: The node that each follows, or -1 where that is the committed end. Parents come before their children.
            By default the nodes are a chain.
        sources: Who has proposed each first; empty where that does not matter.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.parents:
            object.__setattr__(self, "parents", tuple(range(-1, len(self.tokens) - 1)))
        assert len(self.tokens) == len(self.parents)
        assert all(-1 <= parent < node for node, parent in enumerate(self.parents)), "parents come before children"

    @classmethod
    def chain(cls, tokens: Sequence[int], source: str) -> TokenTree:
        """Return tokens that follow each other and come from one source."""
        return cls(tuple(tokens), sources=(source,) * len(tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def is_chain(self) -> bool:
        """Return whether every node but the last has one child."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @cached_property
    def depths(self) -> Sequence[int]:
        """Return how many nodes are above each."""
        return range(len(self.tokens)) if self.is_chain else depths_of(self.parents)

    def behind(self, token: int) -> TokenTree:
        """Return the tree with a token as its root, from which all its paths begin."""
        return TokenTree((token, *self.tokens), (-1, *(parent + 1 for parent in self.parents)))

    def joined(self, other: TokenTree, count: int) -> TokenTree:
        """Return these nodes, and behind them those of another tree that are not among them, up to `count` in all."""
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
        return TokenTree(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes), tuple(sources))

    def part(self, nodes: Sequence[int]) -> TokenTree:
        """Return some of the nodes, which are in ascending order and come with their parents."""
        places = {-1: -1} | {node: place for place, node in enumerate(nodes)}
        chosen = [(self.tokens[node], places[self.parents[node]], self.sources[node]) for node in nodes]
        return TokenTree(*zip(*chosen, strict=True)) if chosen else TokenTree()

    def through_gates(self, first: int, every: int) -> list[int]:
        """Return the nodes that are left where one path alone may lead from one `every` positions to the next: at each
        such end the node with the most behind it keeps what follows.

        Args:
            first: The position of nodes without a parent.
            every: Positions from one end to the next.
        """
        sizes = [1] * len(self)
        for node in range(len(self) - 1, 0, -1):
            if self.parents[node] >= 0:
                sizes[self.parents[node]] += sizes[node]
        levels = dict[int, list[int]]()
        for node, depth in enumerate(self.depths):
            levels.setdefault(depth, []).append(node)
        kept, above = list[int](), [-1]
        for depth, nodes in sorted(levels.items()):
            if depth and (first + depth) % every == 0:
                above = [max(above, key=sizes.__getitem__)]
            parents = {*above}
            above = [node for node in nodes if self.parents[node] in parents]
            if not above:
                break
            kept += above
        return sorted(kept)


def depths_of(parents: Sequence[int]) -> list[int]:
    """Return how many nodes of a tree, whose parents come before their children, are above each."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


@dataclass(frozen=True)
class DraftBudget:
    """Says how much may be proposed to a sequence in one step, and by whom.

    Attributes:
        mode: `plain` proposes nothing. `ngram` looks up what the text has said before behind its ending, `unigram` does
            where only its last token occurred before, and `copy` where many tokens did, and gives what followed them in
            a row. `chain` takes a draft's tokens in a row, or those of TriForce, and `tree` the most probable of a
            draft's candidates and of n-grams.
        gamma: The most tokens in a row.
        tree_nodes: The most tokens in all; None for a chain.
        extra_nodes: So many more may join a chain, as branches or further down, as they cost nothing.
        cost_aware: Whether fewer are proposed where more are not worth the time that it takes to think of them.
    """

    mode: str
    gamma: int
    tree_nodes: int | None = None
    extra_nodes: int = 0
    cost_aware: bool = False

    @property
    def size(self) -> int:
        """Return the most proposals in all, but for those that cost nothing."""
        return self.gamma if self.tree_nodes is None else self.tree_nodes

    @property
    def longest_chain(self) -> int:
        """Return the most proposals of a drafter that makes chains."""
        return min(self.gamma, self.size)

    @property
    def drafts(self) -> bool:
        """Return whether a model computes the proposals: looking up takes no time."""
        return self.mode in ("chain", "tree")

    def within(self, room: int) -> DraftBudget:
        """Return the same where an answer has room for so many proposals in a row."""
        if self.gamma + self.extra_nodes <= room:
            return self
        extra_nodes = max(0, min(self.extra_nodes, room - self.gamma))
        return replace(self, gamma=min(self.gamma, room), extra_nodes=extra_nodes)

    def __str__(self) -> str:
        return f"{self.mode} {self.size}" if self.size else self.mode


@dataclass(eq=False)
class Batch:
    """Holds the rows of one pass: trees behind the committed tokens of some slots, and prompts that others are to read.

    Attributes:
        trees: What the pass verifies, by slot. Nothing of it is committed.
        prompts: The tokens, at least one, that are put behind the committed ones of a slot, and committed; only what
            follows the last one is told.
        on_layer: Is called with the layers done and the layers of the model, as the host enqueues them.
        logits: [at least N, V] on the compute device, once the pass is enqueued and until the next one begins.
        firsts: The rows of the trees' first tokens, behind which those of their others follow, and of the prompts' last
            tokens.
        tokens: Waits for the pass, and gives the token behind each row, -1 for NaN; must be called before the next
            `forward`. None where no tokens were asked for.
        hidden: By slot what was kept for a head of each of its rows, [n, width] on the compute device until the next
            pass begins: of a tree at once, of a prompt in several pieces. Nothing where nobody has asked for it.
    """

    trees: Mapping[int, TokenTree] = field(default_factory=dict)
    prompts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    on_layer: Callable[[int, int], None] | None = None
    logits: torch.Tensor = field(init=False)
    firsts: Sequence[int] = field(init=False)
    tokens: Callable[[], list[int]] | None = field(init=False, default=None)
    hidden: Mapping[int, Sequence[torch.Tensor]] = field(init=False, default_factory=dict)

    @property
    def slots(self) -> list[int]:
        """Return those of the trees, then those of the prompts."""
        return [*self.trees, *self.prompts]


class BatchShape(NamedTuple):
    """Says all that the launches of a pass over trees depend on besides device memory.

    Attributes:
        batch: Sequences.
        width: Rows of each of them.
        depth: The most ancestors of a row, itself included; 0 where every tree is a chain.
        reach: Where positions end: more than all keys that a row sees.
    """

    batch: int
    width: int
    depth: int
    reach: int

    @classmethod
    def of(cls, trees: Sequence[TokenTree], committed: Sequence[int]) -> BatchShape:
        """Return what trees behind so many committed tokens need."""
        widths = [len(tree) for tree in trees]
        branches = not all(tree.is_chain for tree in trees)
        deepest = [1 + max(tree.depths) for tree in trees] if branches else widths
        return cls(len(trees), max(widths), max(deepest) if branches else 0, max(map(add, committed, deepest)))

    @property
    def num_rows(self) -> int:
        """Return how many rows all sequences have."""
        return self.batch * self.width

    @property
    def sizes(self) -> list[int]:
        """Return the integers of each part of what the host lays out: tokens, positions, cache positions and slots by
        row; slots and committed tokens by sequence; ancestors."""
        return [self.num_rows] * 4 + [self.batch] * 2 + [self.num_rows * self.depth]

    def lay_out(
        self, trees: Sequence[TokenTree], committed: Sequence[int], slots: Sequence[int]
    ) -> list[Sequence[int]]:
        """Return the parts for trees that this shape has room for; absent rows have position -1."""
        tokens, positions, cache_positions = list[int](), list[int](), list[int]()
        for tree, start in zip(trees, committed, strict=True):
            count = len(tree)
            padding = self.width - count
            tokens += [*tree.tokens, *[0] * padding]
            positions += [start + depth for depth in tree.depths] + [-1] * padding
            cache_positions += [*range(start, start + count), *[0] * padding]
        owners = [slot for slot in slots for _ in range(self.width)]
        ancestors = self._ancestors(trees, committed) if self.depth else ()
        return [tokens, positions, cache_positions, owners, slots, committed, ancestors]

    def _ancestors(self, trees: Sequence[TokenTree], committed: Sequence[int]) -> array[int]:
        """Return [B, T, A] int32, flat: of each token the cache positions from its tree's root to itself, 0 behind
        them.

        A path is its parent's and one more, copied as a whole: token by token, trees of hundreds of levels would take
        the host longer than a short pass takes the device.
        """
        found = array("i", bytes(4 * self.num_rows * self.depth))
        for b, tree in enumerate(trees):
            first = b * self.width * self.depth
            for t, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
                at, above = first + t * self.depth, first + parent * self.depth
                found[at : at + depth] = found[above : above + depth]
                found[at + depth] = committed[b] + t
        return found
