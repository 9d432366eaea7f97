"""Attention of a decoding pass to a KV cache in host memory: to its blocks as they pass, then to the newest ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from offload_runtime_kernels.attention import AttentionState, QueryRows, attend_blocks, finish_attention
from offload_runtime_kernels.kv_blocks import KVBlocks

from offload_runtime.kv_cache.host_blocks import Run


@dataclass(frozen=True)
class WindowPart:
    """The running pass's part of one sequence: its row of the batch, the tokens before, and the blocks it reaches."""

    row: int
    committed_tokens: int
    end_block: int


@dataclass(frozen=True)
class _Views:
    """One sequence's own rows: for its pieces, which are batches of one, and for the ring."""

    pieces: QueryRows
    ring: QueryRows


class StreamedWindow:
    """What a decoding pass puts behind the committed tokens, and its attention, layer by layer.

    Args:
        parts: By sequence.
    """

    def __init__(self, parts: Mapping[int, WindowPart]) -> None:
        self._parts = parts
        self._views: tuple[QueryRows, dict[int, _Views]] | None = None  # the same in every layer of a pass

    def end_block(self, sequence: int) -> int:
        """Behind the last block that the window reaches."""
        return self._parts[sequence].end_block

    def attend(
        self, q: torch.Tensor, rows: QueryRows, pieces: Iterable[tuple[Run, KVBlocks]], ring: KVBlocks,
        first_in_ring: Sequence[int], *, scale: float, sliding_window: int | None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention in one layer.

        Args:
            q: Rotated queries: [B, T, H, D], device.
            rows: What they are.
            pieces: The layer's blocks on the host, as they come over the link; each is read before the next is taken.
            ring: The layer's newest blocks.
            first_in_ring: Of every sequence the first block to read there.
            scale: Of the scores.
            sliding_window: Of the layer; None for full attention.

        Returns:
            [B, T, H, D].
        """
        state = AttentionState.empty(q)
        views = self._views_of(rows)
        for run, kv in pieces:
            part = self._parts.get(run.sequence)
            if part is not None:
                row = slice(part.row, part.row + 1)
                blocks = range(run.first_block, run.first_block + run.num_blocks)
                own = views[run.sequence].pieces
                attend_blocks(q[row], kv, own, blocks, state[row], scale=scale, sliding_window=sliding_window)
        for sequence, part in self._parts.items():
            row = slice(part.row, part.row + 1)
            blocks = range(first_in_ring[sequence], part.end_block)
            own = views[sequence].ring
            attend_blocks(q[row], ring, own, blocks, state[row], scale=scale, sliding_window=sliding_window)
        return finish_attention(q, rows, state)

    def _views_of(self, rows: QueryRows) -> dict[int, _Views]:
        if self._views is None or self._views[0] is not rows:
            views = {}
            for sequence, part in self._parts.items():
                row = slice(part.row, part.row + 1)
                own = replace(
                    rows,
                    positions=rows.positions[row],
                    sequences=rows.sequences[row],
                    committed=None if rows.committed is None else rows.committed[row],
                    ancestors=None if rows.ancestors is None else rows.ancestors[row],
                    min_committed=part.committed_tokens,
                )
                views[sequence] = _Views(replace(own, sequences=torch.zeros_like(own.sequences)), own)
            self._views = (rows, views)
        return self._views[1]
