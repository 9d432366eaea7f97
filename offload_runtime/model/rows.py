"""The rows of one pass: which tokens, at which positions, seeing which keys. One small upload per pass."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from offload_runtime_kernels.attention import QueryRows
from offload_runtime_kernels.rope_store import RopeRows
from offload_runtime_kernels.window_steps import StepRows

from offload_runtime.memory import pack, unpack, upload
from offload_runtime.model.rope import RopeTable


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

    @cached_property
    def depths(self) -> list[int]:
        """Of each token its distance from the committed end, 0 for what follows it directly."""
        return list(range(len(self.tokens))) if self.parents is None else depths_of(self.parents)


def depths_of(parents: Sequence[int]) -> list[int]:
    """Of each node of a tree, whose parents come before their children, its distance from the roots (parent -1)."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


@dataclass(frozen=True)
class PassRows:
    """Device tensors that describe the B x T rows of a pass; absent rows have position -1.

    `tokens` [B*T] int32; `query` is of shape (B, T); `full` rotates, `plain` is the same without rotation (layers
    without positions). `present` [N] int32 are the numbers of the rows that are not absent; None: all are there, or
    only the device knows.
    """

    tokens: torch.Tensor
    query: QueryRows
    full: RopeRows
    present: torch.Tensor | None = None

    @classmethod
    def of_step(cls, step: StepRows, sequences: torch.Tensor, *, max_length: int) -> PassRows:
        """Rows whose tokens and positions only the device knows; fit for a CUDA graph.

        Args:
            step: The rows; their positions are also the slots of their keys, negative ones are padding.
            sequences: [B] int32, device, 0 to B - 1: the batch rows in the cache.
            max_length: At least the largest position + 1.
        """
        flat = step.positions.view(-1)
        query = QueryRows(step.positions, sequences, max_length, used=step.used)
        return cls(step.tokens, query, RopeRows(step.cos, step.sin, flat, flat, step.sequences))

    @cached_property
    def plain(self) -> RopeRows:
        """The rows without rotation, for layers without positions."""
        return replace(self.full, cos=None, sin=None)

    @property
    def num_rows(self) -> int:
        """B * T."""
        return self.tokens.shape[0]


class RowBuilder:
    """Makes `PassRows` for one model.

    Args:
        rope: The model's rotary table, on the compute device. `DraftModel` and `DraftTree`, whose rows are made on the
            device, rotate by it, too.
    """

    def __init__(self, rope: RopeTable) -> None:
        self.rope = rope

    def build(
        self, windows: Sequence[Window], committed: Sequence[int], sequences: Sequence[int], *,
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
        batch, width = len(windows), max(len(window.tokens) for window in windows)
        tree = any(window.parents is not None for window in windows)
        depths = [window.depths for window in windows]
        tokens, positions, slots, present = [], [], [], list[int]()
        for b, (window, own_depths, start) in enumerate(zip(windows, depths, committed, strict=True)):
            count, padding = len(window.tokens), width - len(window.tokens)
            tokens += [*window.tokens, *[0] * padding]
            positions += [*(start + depth for depth in own_depths), *[-1] * padding]
            slots += [*range(start, start + count), *[0] * padding]
            present += range(b * width, b * width + count)
        parts: list[Sequence[int]] = [
            tokens, positions, slots, [s for s in sequences for _ in range(width)], list(sequences), list(committed),
            _ancestors(windows, depths, committed) if tree else array("i"),
            present if len(present) < batch * width else [],
        ]  # fmt: skip
        uploaded = unpack(upload(pack(parts), self.rope.device), map(len, parts))
        flat_tokens, flat_position, flat_slot, flat_sequence, sequence, committed_gpu, ancestor, own = uploaded
        rotated = flat_position + rope_shift if rope_shift else flat_position
        cos, sin = self.rope.angles(rotated, self.rope.row_frequencies(positions, prompt_length))
        query = QueryRows(
            flat_position.view(batch, width), sequence, max(positions) + 1, committed=committed_gpu if tree else None,
            ancestors=ancestor.view(batch, width, -1) if tree else None,
        )  # fmt: skip
        full = RopeRows(cos, sin, flat_position, flat_slot, flat_sequence)
        return PassRows(flat_tokens, query, full, present=own if len(own) else None)


def _ancestors(windows: Sequence[Window], depths: Sequence[Sequence[int]], committed: Sequence[int]) -> array[int]:
    """[B, T, A] int32, flat: of each token the slots from its window's root to itself, 0 behind them.

    `depths` are those of the windows. A path is its parent's and one more, copied as a whole: token by token, windows
    of hundreds in a row would take the host longer than a short pass takes the device.
    """
    width = max(len(window.tokens) for window in windows)
    most = 1 + max(map(max, depths))
    found = array("i", bytes(4 * len(windows) * width * most))
    for b, window in enumerate(windows):
        first = b * width * most
        parents = range(-1, len(window.tokens) - 1) if window.parents is None else window.parents
        for t, (parent, depth) in enumerate(zip(parents, depths[b], strict=True)):
            at, above = first + t * most, first + parent * most
            found[at : at + depth] = found[above : above + depth]
            found[at + depth] = committed[b] + t
    return found
