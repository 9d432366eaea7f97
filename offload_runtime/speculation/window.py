"""Tokens of several sequences on the device, which steps read and write without the host, and the trees of guesses that
such steps grow behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

import torch
from offload_runtime_kernels.window_steps import WINDOW_HEADER_WORDS, StepLayout, TreeLinks

from offload_runtime.core import depths_of
from offload_runtime.stream.device import overwrite

# A window of the target and what a draft says beyond it.
WINDOW_CAPACITY_TOKENS = 2048


@dataclass(frozen=True)
class SlotUpdate:
    """Says what the host tells the device about a sequence.

    Attributes:
        tokens: The last known ones, of positions end - len(tokens) to end - 1.
        end: Tokens of the whole sequence.
        stop: Once so many are known the sequence stands still.
        last: Nothing is proposed at this position or behind it; at least `stop`.
    """

    tokens: Sequence[int]
    end: int
    stop: int
    last: int

    def __post_init__(self) -> None:
        assert 0 < len(self.tokens) <= self.end < self.stop <= self.last

    @property
    def base(self) -> int:
        """Position of the first of the tokens."""
        return self.end - len(self.tokens)


@dataclass(frozen=True)
class WindowOutput:
    """Holds what the device has said of a sequence: `end` tokens are known, proposals lie behind."""

    end: int
    base: int
    tokens: Sequence[int]  # from position `base` on
    runners_up: Sequence[int]  # the next best of each that was sampled here; -1 for none, undefined before

    def between(self, start: int, stop: int) -> list[int]:
        """Return the tokens of positions `start` to `stop` - 1."""
        assert self.base <= start and stop <= self.base + len(self.tokens)
        return list(self.tokens[start - self.base : stop - self.base])


class DeviceWindow:
    """Holds tokens of several sequences on the device, in tensors that never move, so that CUDA graphs may hold them.

    Each sequence's are a row of one tensor, as `window_steps` describes them. Only the verifier of proposals moves
    `end`.

    Args:
        device: The compute device.
        batch: Most sequences.
        counts: The numbers of rows that steps may have, ascending up to `batch`; by default any.

    Attributes:
        rows: [num_rows, header and capacity] int32: what steps read and write.
        runners_up: [batch, capacity] int32: what the verifier would have said instead.
        num_rows: Sequences 0 to num_rows - 1 take part in steps: all up to the last that has joined, at least one, and
            up to the next of the `counts`.
        end: [num_rows] int32, strided: how many tokens of each sequence are known.
        inputs: As of the last upload.
    """

    def __init__(self, device: torch.device, *, batch: int = 1, counts: Sequence[int] = ()) -> None:
        self.inputs: Mapping[int, SlotUpdate] = {}
        words = WINDOW_HEADER_WORDS + WINDOW_CAPACITY_TOKENS
        self._state = torch.zeros(batch, words, dtype=torch.int32, device=device)
        self.runners_up = torch.full((batch, WINDOW_CAPACITY_TOKENS), -1, dtype=torch.int32, device=device)
        self._joined, self._counts = set[int](), counts or range(1, batch + 1)
        self._fit_rows()

    def join(self, slot: int) -> None:
        """Let a sequence take part in steps; the window must be uploaded before the next one."""
        assert 0 <= slot < len(self._state)
        self._joined.add(slot)
        self._fit_rows()

    def leave(self, slot: int) -> None:
        """Let a sequence take part in no more steps; the window must be uploaded before the next one."""
        self._joined.discard(slot)
        self._fit_rows()

    def _fit_rows(self) -> None:
        self.num_rows = next(count for count in self._counts if count > max(self._joined, default=0))
        self.rows = self._state[: self.num_rows]
        self.end = self.rows[:, 0]

    def upload(self, inputs: Mapping[int, SlotUpdate]) -> None:
        """Begin anew with the last known tokens of some sequences, on the current stream; never waits.

        Args:
            inputs: By sequence; the others stand still.
        """
        assert inputs and all(slot < self.num_rows for slot in inputs)
        assert all(one.last - one.base <= WINDOW_CAPACITY_TOKENS for one in inputs.values())
        width = max(len(one.tokens) for one in inputs.values())
        rows = [[0] * (WINDOW_HEADER_WORDS + width) for _ in range(self.num_rows)]
        for slot, one in inputs.items():
            header = [one.end, one.base, one.stop, one.last, one.end - 1]
            rows[slot][: WINDOW_HEADER_WORDS + len(one.tokens)] = [*header, *one.tokens]
        host = torch.tensor(rows, dtype=torch.int32)
        overwrite(self.rows[:, : host.shape[1]], host)
        self.inputs = dict(inputs)

    def read(self) -> dict[int, WindowOutput]:
        """Return what there is of every uploaded sequence, in one copy. Waits for what the current stream has to do."""
        width = max(one.last - one.base for one in self.inputs.values())
        count = WINDOW_HEADER_WORDS + width
        parts = self.rows[:, :count], self.runners_up[: self.num_rows, :width]
        rows: list[list[int]] = torch.cat(parts, dim=1).tolist()
        return {
            slot: WindowOutput(row[0], row[1], row[WINDOW_HEADER_WORDS:count], row[count:])
            for slot, row in ((slot, rows[slot]) for slot in self.inputs)
        }


@dataclass(frozen=True, eq=False)
class Level:
    """Is one step of `DraftRunner.grow`: the rows that it feeds, and the nodes of a tree's level that it names.

    Attributes:
        layout: The rows; without ancestors all but the last are only fed.
        most: How many children of a row are looked at.
        chosen: Which of all these the nodes are; None for all of them.
        offset: Where the first node lies behind the start of the step.
        follows: Whether the step starts behind what the one before has named, and not at the window's end.
    """

    layout: StepLayout
    most: int = 1
    chosen: torch.Tensor | None = None
    offset: int = 0
    follows: bool = False


# Of what a draft's likelier children leave over, the next one is right about so often.
_NEXT_CHILD = 0.3
# A level has to bring so many tokens a step: a step of a draft takes a seventh of the verifier's.
_LEAST_GAIN = 0.2
MOST_LEVELS = 7
# Of a tree and the tokens that are written anew: `attend_sources` has a bit for each.
_MOST_POSITIONS = 64


class GuessTree:
    """Describes a tree of guesses behind the newest known token, as the steps that grow and verify it need it.

    Nodes lie at the cache positions behind the known tokens, level by level. What was accepted of the tree before
    stands at positions of nodes, in both caches: its keys are written anew, where they belong, by the rows of the
    newest tokens.

    Args:
        parents: Of each node, -1 for the newest known token; in order of levels, the likeliest child of a node first.
        device: Of the steps.

    Attributes:
        parents: As given.
        num_levels: The longest path; a step makes at most one token more known.
        levels: The draft's step that says what the nodes of each are, by the rows of those that have children.
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
        # The newest known token is at position -1, what follows it at the positions from 0 on.
        self.levels = list[Level]()
        for level in range(self.num_levels):
            nodes = [node for node in range(count) if depths[node] == level + 1]
            above = sorted({parents[node] for node in nodes})
            ranks = [[child for child in nodes if parents[child] == parents[node]].index(node) for node in nodes]
            most = 1 + max(ranks)
            places = [above.index(parents[node]) * most + rank for node, rank in zip(nodes, ranks, strict=True)]
            layout = StepLayout.chain(-self.num_known, self.num_known, device)
            if level:
                positions, asked = ints([level - 1] * len(above)), ints([paths[node] for node in above])
                layout = StepLayout(ints(above), positions, len(above), 0, asked)
            self.levels.append(Level(layout, most, ints(places, torch.int64), nodes[0]))
        # The trunk ends with the newest known token, whose row is the first; the rest of it is written anew.
        trunk = list(range(-1 - self.num_levels, 0))
        assert len(trunk) + count <= _MOST_POSITIONS, f"{count} nodes in {self.num_levels} levels"
        rows = [(-1, -1, trunk), *((node, depths[node] - 1, trunk + paths[node]) for node in range(count))]
        rows += [(place, place, trunk[: index + 1]) for index, place in enumerate(trunk[:-1])]
        ancestors = ints([path_of + path_of[-1:] * (2 * self.num_levels + 1 - len(path_of)) for *_, path_of in rows])
        cache_positions, positions = ints([row[0] for row in rows]), ints([row[1] for row in rows])
        self.verified = StepLayout(cache_positions, positions, 1, trunk[0], ancestors)
        bits = [sum(1 << node for node in path) for path in paths]
        self.links = TreeLinks(ints([parent + 1 for parent in parents]), ints(bits, torch.int64), ints(depths))

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def num_known(self) -> int:
        """Return how many of the newest known tokens a draft's first step feeds: all that may have no keys of their
        own, a path that was accepted, the verifier's sample behind it and the target's."""
        return self.num_levels + 2


def _best_tree(hits: Sequence[float], nodes: int, depth: int) -> list[tuple[float, int, int]]:
    """Return the most probable nodes of all trees no deeper than `depth`, the best first: how improbable each is
    (negative), how deep, and the place of its parent among them, -1 for the root.

    Args:
        hits: How often the child of rank r is what comes, whatever came before: the likeliest first.
    """
    found, heap = list[tuple[float, int, int]](), [(-hits[0], 1, -1, 0, -1.0)] if depth and hits else []
    while heap and len(found) < nodes:
        improbable, level, parent, rank, above = heappop(heap)
        found.append((improbable, level, parent))
        if rank + 1 < len(hits):
            heappush(heap, (above * hits[rank + 1], level, parent, rank + 1, above))
        if level < depth:
            heappush(heap, (improbable * hits[0], level + 1, len(found) - 1, 0, improbable))
    return found


def _usual_hits(acceptance: float, count: int) -> list[float]:
    """Return how often each of a draft's best children is right, by how often its likeliest one is."""
    return [acceptance, *((1 - acceptance) * _NEXT_CHILD * (1 - _NEXT_CHILD) ** rank for rank in range(count - 1))]


def likely_parents(num_nodes: int, acceptance: float) -> tuple[int, ...]:
    """Return the tree of so many nodes of which most is accepted, but for levels that are not worth a step of the
    draft.

    Args:
        num_nodes: At least 1.
        acceptance: How often a draft's likeliest token is right.
    """
    hits, best, accepted = _usual_hits(acceptance, num_nodes), list[tuple[float, int, int]](), -1.0
    for num_levels in range(1, MOST_LEVELS + 1):
        deeper = _best_tree(hits, num_nodes, num_levels)
        if best and -sum(node[0] for node in deeper) - accepted < _LEAST_GAIN:
            break
        best, accepted = deeper, -sum(node[0] for node in deeper)
    order = sorted(range(len(best)), key=lambda place: best[place][1])  # stable: likelier children come first
    numbers = {-1: -1, **{place: number for number, place in enumerate(order)}}
    return tuple(numbers[best[place][2]] for place in order)


def expected_accepted(parents: Sequence[int], acceptance: float) -> float:
    """Return the nodes of a tree that a step accepts in the mean, by how often a draft's likeliest token is right."""
    hits, rates = _usual_hits(acceptance, len(parents)), list[float]()
    for node, parent in enumerate(parents):
        rates.append(hits[parents[:node].count(parent)] * (1.0 if parent < 0 else rates[parent]))
    return sum(rates)


@lru_cache(maxsize=4096)
def best_tree_tokens(hits: tuple[float, ...], nodes: int, depth: int) -> float:
    """Return the tokens of one verification: the verifier's own and the sum of the `nodes` most probable paths no
    longer than `depth`, where the child of rank r is what it says with probability `hits[r]`, whatever came before
    (Chen et al., Sequoia, arXiv 2402.12374). With one child they are those of a chain, (1 - a^(n + 1)) / (1 - a)
    (Leviathan et al., arXiv 2211.17192, eq. 1)."""
    return 1.0 - sum(improbable for improbable, *_ in _best_tree(sorted(hits, reverse=True), nodes, depth))
