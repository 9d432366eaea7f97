"""What the decoder, the runners and the engine need of a KV cache, wherever it lives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from offload_runtime_kernels.attention import QueryRows
from offload_runtime_kernels.compact_rows import compact_rows
from offload_runtime_kernels.kv_blocks import KVBlocks


class LayerCache(Protocol):
    """What a decoder layer needs: a place for new keys and values, and attention over all that its queries see."""

    def store(self, layer: int) -> KVBlocks:
        """Where the rows of the running pass write their keys and values."""

    def attend(
        self, layer: int, q: torch.Tensor, rows: QueryRows, *, scale: float, sliding_window: int | None, prefill: bool
    ) -> torch.Tensor:
        """Attention of the rotated queries [B, T, H, D] (their own keys are stored): [B, T, H, D]."""


class BlockObserver(Protocol):
    """Told about blocks that have become full, while they are on the device."""

    def on_blocks(self, layer: int, sequence: int, kv: KVBlocks, row: int, blocks: range) -> None:
        """Blocks `blocks` of a sequence are full; they lie in batch row `row` of `kv`. Enqueues work, keeps nothing."""


class KVCache(LayerCache, Protocol):
    """A cache of whole sequences; a token becomes part of one when it is committed."""

    capacity_tokens: int
    max_tokens_with_draft: int  # of a sequence with what is only tentative: the capacity in whole blocks
    observers: list[BlockObserver]

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory that it holds."""

    def length(self, sequence: int) -> int:
        """Committed tokens of a sequence."""

    def begin_window(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        """The next pass puts `counts[i]` tokens behind the committed ones of `sequences[i]`.

        Raises:
            ContextLengthError: They reach beyond `max_tokens_with_draft`.
            BudgetError: The memory that they need was refused. Committed tokens are kept.
        """

    def begin_prefill(self, sequence: int, count: int) -> None:
        """The next pass is a prefill of `count` tokens behind the committed ones, and its rows call this sequence 0.

        Raises as `begin_window`, and where they are more than `capacity_tokens`.
        """

    def end_prefill(self, sequence: int, count: int) -> None:
        """That pass has been issued: commit its tokens."""

    def commit(self, sequence: int, count: int) -> None:
        """Make the first `count` tentative tokens of a sequence part of it."""

    def commit_path(self, sequence: int, rows: Sequence[int]) -> None:
        """Make a path through a sequence's window part of it: its rows, ascending from the root 0.

        Their keys and values move to where their positions belong, on the current stream and before anybody is told
        about blocks that have become full. Leading rows that are there already, all of a chain, do not move.
        """

    def truncate(self, sequence: int, length: int) -> None:
        """Forget everything behind the first `length` tokens of a sequence."""

    def close(self) -> None:
        """Give host memory back."""


def compact_path(caches: Iterable[torch.Tensor], committed: int, rows: Sequence[int]) -> None:
    """Move the rows of a window that form a path, in place, on the current stream. Leading rows that are where they
    belong, all of a chain, are left alone and cost nothing.

    Args:
        caches: What holds layers of the sequence, each [L, N, 2, H_kv, 256, D], device: one launch each.
        committed: Tokens of the sequence before the window, whose row i lies at `committed` + i.
        rows: Of the window, ascending from its root 0.
    """
    assert list(rows[:1]) in ([], [0]) and all(a < b for a, b in pairwise(rows)), "a path from the root"
    if not rows or rows[-1] == len(rows) - 1:
        return
    kept = next(index for index, row in enumerate(rows) if row != index)
    sources: torch.Tensor | None = None
    for data in caches:
        if data.numel():
            if sources is None:
                sources = upload_slots([committed + row for row in rows[kept:]], data.device)
            compact_rows(KVBlocks(data), sources, committed + kept)


def upload_slots(slots: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 on the device, on the current stream; without page-locked memory the host would wait for the pass."""
    there = torch.tensor(list(slots), dtype=torch.int32)
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there
