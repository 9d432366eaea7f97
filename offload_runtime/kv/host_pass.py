"""What a pass brings over the link from a KV cache in host memory: each layer's blocks, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from offload_runtime_kernels.attention import AttentionState, QueryRows, attend_blocks, finish_attention
from offload_runtime_kernels.gather_chunks import BlockTable
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from offload_runtime.config import ModelConfig
from offload_runtime.copy.schedule import KV, CopySchedule
from offload_runtime.kv.device import block_shape
from offload_runtime.kv.host_blocks import HostBlocks, Run


@dataclass(frozen=True)
class Snapshot:
    """Which host blocks a pass streams: the first `blocks[s]` of sequence s, of `lengths[s]` committed tokens."""

    epoch: int
    blocks: tuple[int, ...]
    lengths: tuple[int, ...]


class StreamedPieces:
    """Cuts what a snapshot names into pieces, and takes them in the same order when the pass runs.

    Args:
        config: The model's shape.
        dtype: Of keys and values.
        blocks: What is in host memory.
        place: Index there of each layer that is.
        piece_blocks: Most blocks of a piece.
        snapshot: Until the first pass begins.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, blocks: HostBlocks, place: Mapping[int, int],
        piece_blocks: int, snapshot: Snapshot,
    ) -> None:  # fmt: skip
        self._config = config
        self._dtype = dtype
        self._blocks = blocks
        self._place = place
        self._piece_blocks = piece_blocks
        self.snapshot = snapshot  # of the running pass
        self._schedule: CopySchedule | None = None

    def planned(self, layer: int, snapshot: Snapshot) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        """Key and host memory (uint8 [n]) of each of the layer's pieces, in order."""
        place = self._place.get(layer)
        if place is None:
            return []
        return [
            (
                (layer, run.sequence, run.first_block),
                self._blocks.block(place, run.sequence, run.first_block, run.num_blocks),
            )
            for run in self._runs(layer, snapshot)
        ]

    def begin_pass(self, snapshot: Snapshot, schedule: CopySchedule) -> None:
        """A pass begins; its pieces come out of the schedule."""
        self.snapshot, self._schedule = snapshot, schedule

    def passing(self, layer: int) -> Iterator[tuple[Run, KVBlocks]]:
        """The layer's pieces as they come over the link; each may be read until the next one is asked for."""
        schedule = self._schedule
        assert schedule is not None, "a pass begins before it reads"
        for run in self._runs(layer, self.snapshot):
            buffer = schedule.take(KV, (layer, run.sequence, run.first_block))
            data = buffer[: run.num_blocks * self._blocks.block_bytes].view(self._dtype)
            yield run, KVBlocks(data.view(1, run.num_blocks, *block_shape(self._config)), run.first_block)
            # Not in a `finally`: what an interrupted pass holds is let go of when the next one begins.
            schedule.release(KV)

    def _runs(self, layer: int, snapshot: Snapshot) -> list[Run]:
        """The layer's pieces; blocks that no sliding window reaches any more stay where they are."""
        reach = self._config.layer_windows[layer]
        runs: list[Run] = []
        for sequence, blocks in enumerate(snapshot.blocks):
            first = 0 if reach is None else max(0, snapshot.lengths[sequence] - reach) // BLOCK_TOKENS
            runs += self._blocks.runs(sequence, first, blocks, self._piece_blocks)
        return runs


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


class HostBlockTables:
    """A table for each layer, all blocks there are entered.

    Args:
        config: The model's shape.
        dtype: Of keys and values.
        blocks: What is in host memory.
        place: Index there of each layer that is.
        resident: The other layers: [B, N, 2, H_kv, 256, D] each, device.
        batch: Sequences.
        device: Where the kernels run.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, blocks: HostBlocks, place: Mapping[int, int],
        resident: Mapping[int, torch.Tensor], batch: int, device: torch.device,
    ) -> None:  # fmt: skip
        self._dtype = dtype
        self._block_shape = block_shape(config)
        self._blocks = blocks
        self._place = place
        self._tables = {
            layer: BlockTable.empty(batch, blocks.most_blocks, device) for layer in range(config.num_layers)
        }
        for layer, data in resident.items():
            for sequence in range(batch):
                self._tables[layer].put(sequence, 0, data[sequence])
        for sequence in range(batch):
            self.enter(sequence, 0)

    def layer(self, layer: int) -> BlockTable:
        """Where the layer's blocks lie."""
        return self._tables[layer]

    def enter(self, sequence: int, first: int) -> None:
        """Enter a sequence's host blocks from `first` on."""
        for layer, place in self._place.items():
            for run in self._blocks.runs(sequence, first, self._blocks.num_blocks(sequence), 1 << 30):
                memory = self._blocks.block(place, sequence, run.first_block, run.num_blocks).view(self._dtype)
                self._tables[layer].put(sequence, run.first_block, memory.view(run.num_blocks, *self._block_shape))
