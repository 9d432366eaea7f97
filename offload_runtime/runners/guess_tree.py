"""The tree that a draft proposes to each step of the retrieval verifier: of one shape, so that steps can be replayed.

Which child of its parent a node is, its draft's likeliest or the next one, is fixed; which token that is, a step finds
out. All nodes of a level are asked about in one step, so a tree takes as many as it has levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise, starmap

import torch
from offload_runtime_kernels.window_steps import StepLayout, TreeLinks

from offload_runtime.core import depths_of

# Of what a draft's likelier children leave over, the next one is right about so often.
_NEXT_CHILD = 0.3
# A level has to bring so many tokens a step: a step of a draft takes a seventh of the verifier's.
_LEAST_GAIN = 0.2
MOST_LEVELS = 7
# Rows of a verifier's step that take hardly longer than one, and what each sequence has of guesses in any case.
_CHEAP_ROWS, _LEAST_GUESSES = 64, 4
# Of a tree and the tokens that are written anew: `attend_sources` has a bit for each.
_MOST_POSITIONS = 64


class GuessTree:
    """A tree of guesses behind the newest known token, as the steps that grow and verify it need it.

    Nodes lie in the slots behind the known tokens, level by level. What was accepted of the tree before stands in
    slots of nodes, in both caches: its keys are written anew, where they belong, by the rows of the newest tokens.

    Args:
        parents: Of each node, -1 for the newest known token; in order of levels, the likeliest child of a node first.
        device: Of the steps.

    Attributes:
        parents: As given.
        num_levels: The longest path; a step makes at most one token more known.
        levels: The nodes of each.
        drafted: Of each level the rows of the draft's step that says what its nodes are: those with children.
        chosen: Of each level how many children of such a row are looked at, and which of all these the nodes are.
        verified: The rows of the verifier's step; the first, of the newest known token, says which chunks matter.
        links: How the nodes hang together.
    """

    def __init__(self, parents: Sequence[int], device: torch.device) -> None:
        self.parents, depths = tuple(parents), [depth + 1 for depth in depths_of(parents)]
        assert depths == sorted(depths), "level by level"
        self.num_levels, count = max(depths, default=0), len(depths)

        def ints(values: Sequence[object], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        paths: list[list[int]] = []
        for node, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else ()), node])
        bounds = [*map(depths.index, range(1, self.num_levels + 1)), count]
        self.levels = list(starmap(range, pairwise(bounds)))
        # The newest known token is in slot -1, what follows it in the slots from 0 on.
        self.drafted = [StepLayout.chain(-self.num_known, self.num_known, device)][: self.num_levels]
        self.chosen = list[tuple[int, torch.Tensor]]()
        for level, nodes in enumerate(self.levels):
            above = sorted({parents[node] for node in nodes})
            ranks = [[child for child in nodes if parents[child] == parents[node]].index(node) for node in nodes]
            most = 1 + max(ranks)
            places = [above.index(parents[node]) * most + rank for node, rank in zip(nodes, ranks, strict=True)]
            self.chosen.append((most, ints(places, torch.int64)))
            if level:
                positions = ints([level - 1] * len(above))
                asked = ints([paths[node] for node in above])
                self.drafted.append(StepLayout(ints(above), positions, len(above), 0, asked))
        # The trunk ends with the newest known token, whose row is the first; the rest of it is written anew.
        trunk = list(range(-1 - self.num_levels, 0))
        assert len(trunk) + count <= _MOST_POSITIONS, f"{count} nodes in {self.num_levels} levels"
        rows = [(-1, -1, trunk), *((node, depths[node] - 1, trunk + paths[node]) for node in range(count))]
        rows += [
            (cache_position, cache_position, trunk[: index + 1]) for index, cache_position in enumerate(trunk[:-1])
        ]
        ancestors = ints([path_of + path_of[-1:] * (2 * self.num_levels + 1 - len(path_of)) for *_, path_of in rows])
        cache_positions, stands = (
            ints([cache_position for cache_position, *_ in rows]),
            ints([position for _, position, _ in rows]),
        )
        self.verified = StepLayout(cache_positions, stands, 1, trunk[0], ancestors)
        bits = [sum(1 << node for node in path) for path in paths]
        self.links = TreeLinks(ints([parent + 1 for parent in parents]), ints(bits, torch.int64), ints(depths))

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def num_known(self) -> int:
        """Newest known tokens that a draft's first step feeds: all that may have no keys of their own, a path that was
        accepted, the verifier's sample behind it and the target's."""
        return self.num_levels + 2


def num_guesses(most: int, batch: int) -> int:
    """Nodes of the tree of each of `batch` sequences, at most `most`: in all about as many rows as take no longer than
    one."""
    return min(most, max(_LEAST_GUESSES, _CHEAP_ROWS // batch - _LEAST_GUESSES))


def most_guess_rows(most: int, batch: int, *, others: int) -> int:
    """Most rows of a step over up to `batch` sequences, each of a tree of up to `most` nodes and of `others`."""
    return max(count * (num_guesses(most, count) + others) for count in range(1, batch + 1))


def likely_parents(num_nodes: int, acceptance: float) -> tuple[int, ...]:
    """The tree of so many nodes of which most is accepted, but for levels that are not worth a step of the draft.

    Args:
        num_nodes: At least 1.
        acceptance: How often a draft's likeliest token is right.
    """
    best = _likely_parents(num_nodes, 1, acceptance)
    for num_levels in range(2, MOST_LEVELS + 1):
        deeper = _likely_parents(num_nodes, num_levels, acceptance)
        if expected_accepted(deeper, acceptance) - expected_accepted(best, acceptance) < _LEAST_GAIN:
            break
        best = deeper
    return best


def _likely_parents(num_nodes: int, num_levels: int, acceptance: float) -> tuple[int, ...]:
    """The same of at most so many levels."""
    # Of each node: how improbable it is, its depth, its parent's place here, what its elder siblings leave over.
    found, heap = list[tuple[float, int, int, float]](), [(-acceptance, 1, -1, 1.0)]
    while heap and len(found) < num_nodes:
        node = heappop(heap)
        found.append(node)
        improbable, depth, parent, left = node
        above = -1.0 if parent < 0 else found[parent][0]
        left -= improbable / above
        heappush(heap, (above * left * _NEXT_CHILD, depth, parent, left))
        if depth < num_levels:
            heappush(heap, (improbable * acceptance, depth + 1, len(found) - 1, 1.0))
    order = sorted(range(len(found)), key=lambda place: found[place][1])  # stable: likelier children come first
    numbers = {-1: -1, **{place: number for number, place in enumerate(order)}}
    return tuple(numbers[found[place][2]] for place in order)


def expected_accepted(parents: Sequence[int], acceptance: float) -> float:
    """Nodes of a tree that a step accepts in the mean, by how often a draft's likeliest token is right."""
    rates, left = list[float](), dict[int, float]()
    for parent in parents:
        rest = left.get(parent, 1.0)
        share = rest * _NEXT_CHILD if parent in left else acceptance
        left[parent] = rest - share
        rates.append(share * (1.0 if parent < 0 else rates[parent]))
    return sum(rates)
