"""A path through a tree becomes part of its sequence: its keys and values move to where their positions belong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from offload_runtime_kernels.compact_rows import compact_rows
from offload_runtime_kernels.kv_blocks import KVBlocks


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
