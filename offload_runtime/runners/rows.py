"""The rows of one pass: which tokens, at which positions, seeing which keys. One small upload per pass."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import add
from typing import NamedTuple

import torch
from offload_runtime_kernels.attention import QueryRows
from offload_runtime_kernels.rope_store import RopeRows
from offload_runtime_kernels.window_steps import StepRows

from offload_runtime.memory import Card, TransferBuffers, pack, transfer, unpack, upload
from offload_runtime.models.rope import RopeTable


@dataclass(frozen=True)
class Window:
    """Tokens that one sequence puts through a pass, behind its committed tokens.

    `parents[i]` is the index of the token that token i follows, -1 for the committed end; None means a chain. Parents
    come before their children.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        assert self.tokens, "a window needs at least one token"
        assert self.parents is None or len(self.parents) == len(self.tokens)

    @property
    def all_parents(self) -> Sequence[int]:
        """`parents`, of a chain as well."""
        return range(-1, len(self.tokens) - 1) if self.parents is None else self.parents

    @property
    def depths(self) -> Sequence[int]:
        """Of each token its distance from the committed end, 0 for what follows it directly."""
        return range(len(self.tokens)) if self.parents is None else self._tree_depths

    @cached_property
    def _tree_depths(self) -> list[int]:
        return depths_of(self.parents or ())


def depths_of(parents: Sequence[int]) -> list[int]:
    """Of each node of a tree, whose parents come before their children, its distance from the roots (parent -1)."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def paths_below_roots(windows: Sequence[Window]) -> array[int]:
    """[R, A] int32, flat, A at least 1: of each row of windows the tokens of its path behind the window's first one, as
    far as itself; -1 behind them."""
    depth = max(1, *(max(window.depths) for window in windows))
    found, first = array("i", [-1]) * (depth * sum(len(window.tokens) for window in windows)), 0
    for window in windows:
        for t, (parent, above) in enumerate(zip(window.all_parents, window.depths, strict=True)):
            if above:
                at, origin = (first + t) * depth, (first + parent) * depth
                found[at : at + above - 1] = found[origin : origin + above - 1]
                found[at + above - 1] = window.tokens[t]
        first += len(window.tokens)
    return found


class PassShape(NamedTuple):
    """All that the launches of a pass over windows depend on besides device memory.

    Attributes:
        batch: Windows.
        width: Rows of each of them.
        depth: Most ancestors of a row, itself included; 0 where every window is a chain.
        reach: Where positions end: of all keys that a row sees.
    """

    batch: int
    width: int
    depth: int
    reach: int

    @classmethod
    def of(cls, windows: Sequence[Window], committed: Sequence[int]) -> PassShape:
        """What windows behind so many committed tokens need."""
        widths = [len(window.tokens) for window in windows]
        tree = any(window.parents is not None for window in windows)
        deepest = [1 + max(window.depths) for window in windows] if tree else widths
        return cls(len(windows), max(widths), max(deepest) if tree else 0, max(map(add, committed, deepest)))

    @property
    def num_rows(self) -> int:
        """Of all windows."""
        return self.batch * self.width

    @property
    def sizes(self) -> list[int]:
        """Integers of each part of what the host lays out: tokens, positions, slots and sequences by row; sequences and
        committed tokens by window; ancestors."""
        return [self.num_rows] * 4 + [self.batch] * 2 + [self.num_rows * self.depth]

    def lay_out(self, windows: Sequence[Window], committed: Sequence[int], slots: Sequence[int]) -> list[Sequence[int]]:
        """The parts of a pass of this shape, or of one that it has room for; absent rows have position -1."""
        tokens, positions, cache_positions = list[int](), list[int](), list[int]()
        for window, start in zip(windows, committed, strict=True):
            count = len(window.tokens)
            padding = self.width - count
            tokens += [*window.tokens, *[0] * padding]
            positions += [start + depth for depth in window.depths] + [-1] * padding
            cache_positions += [*range(start, start + count), *[0] * padding]
        owners = [slot for slot in slots for _ in range(self.width)]
        ancestors = self._ancestors(windows, committed) if self.depth else ()
        return [tokens, positions, cache_positions, owners, slots, committed, ancestors]

    def _ancestors(self, windows: Sequence[Window], committed: Sequence[int]) -> array[int]:
        """[B, T, A] int32, flat: of each token the slots from its window's root to itself, 0 behind them.

        A path is its parent's and one more, copied as a whole: token by token, windows of hundreds in a row would take
        the host longer than a short pass takes the device.
        """
        found = array("i", bytes(4 * self.num_rows * self.depth))
        for b, window in enumerate(windows):
            first = b * self.width * self.depth
            parents = range(-1, len(window.tokens) - 1) if window.parents is None else window.parents
            for t, (parent, depth) in enumerate(zip(parents, window.depths, strict=True)):
                at, above = first + t * self.depth, first + parent * self.depth
                found[at : at + depth] = found[above : above + depth]
                found[at + depth] = committed[b] + t
        return found


@dataclass(frozen=True)
class PassRows:
    """Device tensors that describe the B x T rows of a pass; absent rows have position -1.

    `tokens` [B*T] int32; `query` is of shape (B, T); `rope` says how they are rotated and where keys and values go.
    """

    tokens: torch.Tensor
    query: QueryRows
    rope: RopeRows

    @classmethod
    def of_step(cls, step: StepRows, slots: torch.Tensor, *, max_length: int) -> PassRows:
        """Rows whose tokens and positions only the device knows; fit for a CUDA graph.

        Args:
            step: The rows; negative positions are padding.
            sequences: [B] int32, device, 0 to B - 1: the batch rows in the cache.
            max_length: At least the largest position or slot + 1.
        """
        query = QueryRows(step.positions, slots, max_length, step.committed, step.ancestors, step.used, step.most_used)
        return cls(
            step.tokens, query, RopeRows(step.cos, step.sin, step.positions.view(-1), step.cache_positions, step.slots)
        )

    @property
    def num_rows(self) -> int:
        """B * T."""
        return self.tokens.shape[0]

    def to_card(self, source: Card, target: Card, buffers: TransferBuffers, piece: Hashable) -> PassRows:
        """The same rows, which are on `source`, for another card. Arguments as of `transfer`."""
        if source == target:
            return self
        parts = {part: _tensors(getattr(self, part)) for part in ("query", "rope")}
        tensors = [tensor for part in parts.values() for tensor in part.values()]
        tokens, *rest = transfer([self.tokens, *tensors], source, target, buffers, piece)
        moved = iter(rest)
        query, rope = (
            replace(getattr(self, part), **{name: next(moved) for name in tensors}) for part, tensors in parts.items()
        )
        return PassRows(tokens, query, rope)


def _tensors(part: QueryRows | RopeRows) -> dict[str, torch.Tensor]:
    """The fields that are tensors."""
    return {one.name: value for one in fields(part) if isinstance(value := getattr(part, one.name), torch.Tensor)}


class RowBuilder:
    """Makes `PassRows` for one model.

    Args:
        rope: The model's rotary table, on the compute device. `DraftModel` and `DraftTree`, whose rows are made on the
            device, rotate by it, too.
    """

    def __init__(self, rope: RopeTable) -> None:
        self.rope = rope

    def build(
        self, windows: Sequence[Window], committed: Sequence[int], slots: Sequence[int], *,
        prompt_length: int = 0, rope_shift: int = 0,
    ) -> PassRows:  # fmt: skip
        """Lay out one window per sequence.

        Args:
            windows: One per sequence, of any lengths.
            committed: For each, tokens already in the cache.
            sequences: For each, its batch row in the cache.
            prompt_length: Of the prompt that this is a piece of, by which some models rotate; 0 for a decoding window.
            rope_shift: Rotate as if every position were so much larger.
        """
        shape = PassShape.of(windows, committed)
        parts = shape.lay_out(windows, committed, slots)
        frequencies = self.rope.row_frequencies(parts[1], prompt_length)
        return self.rows(shape, upload(pack(parts), self.rope.device), frequencies, rope_shift=rope_shift or None)

    def rows(
        self, shape: PassShape, words: torch.Tensor, frequencies: torch.Tensor, *,
        rope_shift: int | torch.Tensor | None = None,
    ) -> PassRows:  # fmt: skip
        """The rows that the host has laid out in `words` (int32, device); fit for a CUDA graph.

        Args:
            shape: Of the pass.
            words: Its packed parts, and perhaps others behind them.
            frequencies: [P] or [B*T, P] fp32, device: of all rows, or of each.
            rope_shift: As of `build`, or of each row (int32, device).
        """
        tokens, positions, cache_positions, owners, slots, committed, ancestors = unpack(words, shape.sizes)
        cos, sin = self.rope.angles(positions if rope_shift is None else positions + rope_shift, frequencies)
        query = QueryRows(
            positions.view(shape.batch, -1), slots, shape.reach, committed=committed if shape.depth else None,
            ancestors=ancestors.view(shape.batch, -1, shape.depth) if shape.depth else None,
        )  # fmt: skip
        return PassRows(tokens, query, RopeRows(cos, sin, positions, cache_positions, owners))
