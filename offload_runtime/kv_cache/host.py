"""The KV cache in host memory: full blocks on the host, the newest ones in a ring on the device.

A pass streams each layer's host blocks piece by piece through the link's ring and attends to them as they pass, then to
the open ring, which holds the newest blocks and all tentative tokens. A block is written to the host once, when it is
full. Rolling back is only a length, unless it goes behind what the ring still holds.

A prefill works on one layer at a time: the layer's whole KV stays in a workspace on the device while all pieces of the
prompt go through it, and its full blocks are written to the host on the way.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from offload_runtime_kernels.attention import AttentionState, QueryRows, attend_blocks, attention, finish_attention
from offload_runtime_kernels.gather_chunks import BlockTable
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from offload_runtime.config import ModelConfig
from offload_runtime.copy_engine import CopyEngine
from offload_runtime.kv_cache.device import block_bytes, block_shape, check_capacity, kept_from, num_blocks
from offload_runtime.kv_cache.host_blocks import HostBlocks, Run
from offload_runtime.kv_cache.protocol import BlockObserver
from offload_runtime.memory import DeviceBudget


class WorkspaceLender(Protocol):
    """Has device memory that nothing else uses during a prefill."""

    def lend(self, nbytes: int) -> torch.Tensor | None:
        """uint8 [nbytes], the lender's again when the prefill ends, its contents lost; None when it has less."""


class PieceFeed(Protocol):
    """Hands out streamed pieces in order."""

    def take(self, key: tuple[int, ...]) -> torch.Tensor:
        """The next piece, which must be `key`: uint8 [slot_bytes] on the device, valid until `release`."""

    def release(self) -> None:
        """Let go of the piece that was taken first."""


@dataclass(frozen=True)
class Snapshot:
    """Which host blocks a pass streams: the first `blocks[s]` of sequence s, of `lengths[s]` committed tokens."""

    epoch: int
    blocks: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class _Write:
    """A write of blocks up to `end` of a sequence to the host; `ready` fires when it is done."""

    sequence: int
    end: int
    ready: Any


@dataclass
class _Prefill:
    """A prefill on its way: one layer's KV at a time."""

    sequence: int
    start: int  # tokens committed before
    total: int
    workspace: torch.Tensor  # [1, N, 2, H_kv, 256, D]
    read: Any  # event: the workspace's blocks may be copied
    written: Any  # event: they have been
    layer: int = -1
    blocks_written: int = 0


@dataclass(frozen=True)
class _Window:
    """The running pass's part of one sequence: its row of the batch, and the blocks it reaches."""

    row: int
    end_block: int


class HostKVCache:
    """A cache whose full blocks live in host memory.

    Args:
        config: The model's shape.
        dtype: Of keys and values.
        capacity_tokens: Most tokens of a sequence, tentative ones included; memory grows only as they come.
        batch: Sequences.
        window_tokens: Most tokens that a decoding pass puts behind the committed ones.
        piece_bytes: Size of the link ring's slots.
        budget: Ledger of the device.
        workspace_bytes: To reserve there for prefills; 0 when `lender` will have enough.
        writeback: Copy queue of its own, for blocks on their way to the host.
        resident_layers: Layers that keep all their blocks on the device.
        name: What to call it in the ledger.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, capacity_tokens: int, batch: int, window_tokens: int,
        piece_bytes: int, budget: DeviceBudget, writeback: CopyEngine, workspace_bytes: int,
        resident_layers: Sequence[int] = (), name: str = "KV cache",
    ) -> None:  # fmt: skip
        self.capacity_tokens = capacity_tokens
        self._config = config
        self._dtype = dtype
        self._device = budget.device
        self._writeback = writeback
        self._stop_writing = weakref.finalize(self, writeback.close)
        self._block_bytes = block_bytes(config, dtype)
        self._piece_blocks = piece_bytes // self._block_bytes
        assert self._piece_blocks > 0, "a slot must hold a block"
        streamed = [layer for layer in range(config.num_layers) if layer not in resident_layers]
        self._place = {layer: index for index, layer in enumerate(streamed)}  # of a streamed layer in ring and host
        self.blocks = HostBlocks(
            len(streamed), self._block_bytes, batch=batch, most_blocks=num_blocks(capacity_tokens),
            pin=self._device.type == "cuda",
        )  # fmt: skip
        shape, self._ring_blocks = block_shape(config), ring_blocks(window_tokens)
        self._ring = self._allocate(budget, f"{name}: open blocks", (len(streamed), batch, self._ring_blocks, *shape))
        whole = (len(resident_layers), batch, num_blocks(capacity_tokens), *shape)
        stays = self._allocate(budget, f"{name}: resident layers", whole)
        self._resident = dict(zip(resident_layers, stays, strict=True))
        if streamed and workspace_bytes:
            budget.reserve(f"{name}: prefill workspace", workspace_bytes)
        self.lender: WorkspaceLender | None = None
        self._lengths = [0] * batch
        self._rows = slice(None)  # of the batch, that the running pass is about
        self._on_host = [0] * batch  # leading blocks of a sequence that are on the host, their writes finished
        self._ring_from = [0] * batch  # first block that the ring holds
        self._writes: deque[_Write] = deque()
        self._epoch = 0  # counts what makes earlier snapshots wrong
        self._prefill: _Prefill | None = None
        self._windows: dict[int, _Window] = {}  # of the running pass, by sequence
        self._row_views: tuple[QueryRows, dict[int, tuple[QueryRows, QueryRows]]] | None = None
        self._feed: PieceFeed | None = None
        self._snapshot = self.snapshot()
        self.observers: list[BlockObserver] = []
        self._tables: dict[int, BlockTable] | None = None

    def _allocate(self, budget: DeviceBudget, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return budget.allocate(name, count * self._dtype.itemsize).view(self._dtype).view(shape).zero_()

    # --- what the streamer asks

    def snapshot(self) -> Snapshot:
        """Which blocks a pass that is planned now streams."""
        self._collect_writes()
        chosen = None if self._prefill is None else self._prefill.sequence
        blocks = (count if chosen in (None, s) else 0 for s, count in enumerate(self._on_host))
        return Snapshot(self._epoch, tuple(blocks), tuple(self._lengths))

    def is_valid(self, snapshot: Snapshot) -> bool:
        """Whether a pass may go by this snapshot: what it does not stream must be in the ring."""
        pairs = zip(snapshot.blocks, self._ring_from, strict=True)
        return snapshot.epoch == self._epoch and all(blocks >= first for blocks, first in pairs)

    def pieces(self, layer: int, snapshot: Snapshot) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        """Key and host memory of each of the layer's pieces, in order."""
        place = self._place.get(layer)
        if place is None:
            return []
        return [
            (
                (layer, run.sequence, run.first_block),
                self.blocks.block(place, run.sequence, run.first_block, run.num_blocks),
            )
            for run in self._runs(layer, snapshot)
        ]

    def begin_pass(self, snapshot: Snapshot, feed: PieceFeed) -> None:
        """A pass begins; its pieces come out of `feed`."""
        self._snapshot, self._feed = snapshot, feed

    def _runs(self, layer: int, snapshot: Snapshot) -> list[Run]:
        """The layer's pieces; blocks that no sliding window reaches any more stay where they are."""
        reach = self._config.layer_windows[layer]
        runs: list[Run] = []
        for sequence, blocks in enumerate(snapshot.blocks):
            first = 0 if reach is None else max(0, snapshot.lengths[sequence] - reach) // BLOCK_TOKENS
            runs += self.blocks.runs(sequence, first, blocks, self._piece_blocks)
        return runs

    # --- what the decoder asks

    def store(self, layer: int) -> KVBlocks:
        if layer in self._resident:
            return KVBlocks(self._resident[layer][self._rows])
        if self._prefill is None:
            return KVBlocks(self._ring[self._place[layer]])
        if self._prefill.layer != layer:
            self._load_history(self._prefill, layer)
        return KVBlocks(self._prefill.workspace)

    def attend(
        self, layer: int, q: torch.Tensor, rows: QueryRows, *, scale: float, sliding_window: int | None, prefill: bool
    ) -> torch.Tensor:
        if layer in self._resident:
            kv = KVBlocks(self._resident[layer][self._rows])
            return attention(q, kv, rows, scale=scale, sliding_window=sliding_window, prefill=prefill)
        if self._prefill is not None:
            kv = KVBlocks(self._prefill.workspace)
            out = attention(q, kv, rows, scale=scale, sliding_window=sliding_window, prefill=prefill)
            self._write_prefilled(self._prefill, layer, rows.max_length)
            return out
        state = AttentionState.empty(q)
        feed, views = self._feed, self._views(rows)
        assert feed is not None, "a pass begins before it attends"
        for run in self._runs(layer, self._snapshot):
            buffer = feed.take((layer, run.sequence, run.first_block))
            window = self._windows.get(run.sequence)
            if window is not None:
                row = slice(window.row, window.row + 1)
                attend_blocks(
                    q[row], self._piece(buffer, run), views[run.sequence][0], _range(run), state[row],
                    scale=scale, sliding_window=sliding_window,
                )  # fmt: skip
            feed.release()
        ring = KVBlocks(self._ring[self._place[layer]])
        for sequence, window in self._windows.items():
            row = slice(window.row, window.row + 1)
            blocks = range(self._snapshot.blocks[sequence], window.end_block)
            attend_blocks(
                q[row], ring, views[sequence][1], blocks, state[row], scale=scale, sliding_window=sliding_window
            )
        return finish_attention(q, rows, state)

    def _piece(self, buffer: torch.Tensor, run: Run) -> KVBlocks:
        data = buffer[: run.num_blocks * self._block_bytes].view(self._dtype)
        return KVBlocks(data.view(1, run.num_blocks, *block_shape(self._config)), run.first_block)

    def _views(self, rows: QueryRows) -> dict[int, tuple[QueryRows, QueryRows]]:
        """Each sequence's own rows: for its pieces, which are batches of one, and for the ring."""
        if self._row_views is None or self._row_views[0] is not rows:
            views = {}
            for sequence, window in self._windows.items():
                row = slice(window.row, window.row + 1)
                own = replace(
                    rows,
                    positions=rows.positions[row],
                    sequences=rows.sequences[row],
                    committed=None if rows.committed is None else rows.committed[row],
                    ancestors=None if rows.ancestors is None else rows.ancestors[row],
                    min_committed=self._lengths[sequence],
                )
                views[sequence] = (replace(own, sequences=torch.zeros_like(own.sequences)), own)
            self._row_views = (rows, views)
        return self._row_views[1]

    # --- prefill

    def begin_prefill(self, sequence: int, count: int) -> None:
        self._forget_prefill()
        start, total = self._lengths[sequence], self._lengths[sequence] + count
        check_capacity(total, self.capacity_tokens)
        self._grow(sequence, total // BLOCK_TOKENS)
        self._rows = slice(sequence, sequence + 1)
        if not self._place:
            return
        self._drain_writes()  # the blocks behind `start` are read back
        shape = (1, num_blocks(total), *block_shape(self._config))
        # Zeros: blocks that no sliding window reaches are not loaded, and a masked key still meets a zero weight.
        nbytes = shape[1] * self._block_bytes
        lent = None if self.lender is None else self.lender.lend(nbytes)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device) if lent is None else lent
        workspace = memory.view(self._dtype).view(shape).zero_()
        events = self._writeback.new_event(), self._writeback.new_event()
        self._prefill = _Prefill(sequence, start, total, workspace, *events)
        self._epoch += 1  # only this sequence's blocks are streamed

    def end_prefill(self, sequence: int, count: int) -> None:
        prefill = self._prefill
        self._lengths[sequence] += count
        self._forget_prefill()
        if prefill is not None:
            full = prefill.total // BLOCK_TOKENS
            self._ring_from[sequence] = kept_from(prefill.total)
            self._writes.append(_Write(sequence, full, prefill.written))
        for layer, data in self._resident.items():
            self._tell(layer, sequence, KVBlocks(data), sequence, self._lengths[sequence] - count)

    def _forget_prefill(self) -> None:
        if self._prefill is not None:
            self._prefill = None
            self._epoch += 1

    def _load_history(self, prefill: _Prefill, layer: int) -> None:
        """Bring what the sequence had before into the workspace."""
        assert self._feed is not None
        if prefill.layer >= 0:
            self._writeback.compute_wait(prefill.written)  # the layer before is still being copied from there
        prefill.layer, prefill.blocks_written = layer, prefill.start // BLOCK_TOKENS
        blocks = prefill.workspace[0]
        for run in self._runs(layer, self._snapshot):
            buffer = self._feed.take((layer, run.sequence, run.first_block))
            blocks[run.first_block : run.first_block + run.num_blocks] = self._piece(buffer, run).data[0]
            self._feed.release()
        ring = self._ring[self._place[layer], prefill.sequence]
        for block in range(self._snapshot.blocks[prefill.sequence], num_blocks(prefill.start)):
            blocks[block] = ring[block % self._ring_blocks]

    def _write_prefilled(self, prefill: _Prefill, layer: int, end: int) -> None:
        """Send blocks that are full to the host; after the layer's last piece also fill the ring."""
        place, sequence, full = self._place[layer], prefill.sequence, end // BLOCK_TOKENS
        self._writeback.compute_record(prefill.read)
        for run in self.blocks.runs(sequence, prefill.blocks_written, full, self._piece_blocks):
            source = prefill.workspace[0, run.first_block : run.first_block + run.num_blocks]
            target = self.blocks.block(place, sequence, run.first_block, run.num_blocks)
            self._writeback.enqueue(target, source.view(-1).view(torch.uint8), free=prefill.read, ready=prefill.written)
        prefill.blocks_written = max(full, prefill.blocks_written)
        if end < prefill.total:
            return
        for block in range(kept_from(end), num_blocks(end)):
            self._ring[place, sequence, block % self._ring_blocks] = prefill.workspace[0, block]
        self._tell(layer, sequence, KVBlocks(prefill.workspace), 0, prefill.start, end)

    # --- lengths

    @property
    def pinned_bytes(self) -> int:
        return self.blocks.nbytes if self._device.type == "cuda" else 0

    def length(self, sequence: int) -> int:
        return self._lengths[sequence]

    def begin_window(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        self._forget_prefill()
        for sequence, count in zip(sequences, counts, strict=True):
            end = self._lengths[sequence] + count
            check_capacity(end, self.capacity_tokens)
            self._grow(sequence, end // BLOCK_TOKENS)
        self._collect_writes()
        self._rows, self._windows = slice(None), {}
        for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            end_block = num_blocks(self._lengths[sequence] + count)
            self._windows[sequence] = _Window(row, end_block)
            first = max(self._ring_from[sequence], end_block - self._ring_blocks)
            if first > self._on_host[sequence]:
                self._drain_writes()
            self._ring_from[sequence] = first
        self._row_views = None

    def recent_blocks(self, sequence: int) -> range:
        """The open block, a full one before it, and what the announced window reaches. All before are on the host."""
        first = max(self._ring_from[sequence], min(self._on_host[sequence], kept_from(self._lengths[sequence])))
        return range(first, self._windows[sequence].end_block)

    def block_table(self, layer: int) -> BlockTable:
        """Where the layer's blocks lie, for kernels that read them from there."""
        if self._tables is None:
            self._tables = {
                index: BlockTable.empty(len(self._lengths), self.blocks.most_blocks, self._device)
                for index in range(self._config.num_layers)
            }
            for index, data in self._resident.items():
                for sequence in range(len(self._lengths)):
                    self._tables[index].put(sequence, 0, data[sequence])
            for sequence in range(len(self._lengths)):
                self._enter_blocks(sequence, 0)
        return self._tables[layer]

    def _grow(self, sequence: int, blocks: int) -> None:
        """Make room on the host for the first `blocks` blocks."""
        before = self.blocks.num_blocks(sequence)
        self.blocks.grow(sequence, blocks)
        if self._tables is not None:
            self._enter_blocks(sequence, before)

    def _enter_blocks(self, sequence: int, first: int) -> None:
        """Enter host blocks from `first` on in the tables."""
        assert self._tables is not None
        for layer, place in self._place.items():
            for run in self.blocks.runs(sequence, first, self.blocks.num_blocks(sequence), 1 << 30):
                memory = self.blocks.block(place, sequence, run.first_block, run.num_blocks).view(self._dtype)
                blocks = memory.view(run.num_blocks, *block_shape(self._config))
                self._tables[layer].put(sequence, run.first_block, blocks)

    def commit(self, sequence: int, count: int) -> None:
        before = self._lengths[sequence]
        self._lengths[sequence] = after = before + count
        for block in range(before // BLOCK_TOKENS, after // BLOCK_TOKENS):
            self._write_open(sequence, block)
        for layer, place in self._place.items():
            self._tell(layer, sequence, KVBlocks(self._ring[place]), sequence, before)
        for layer, data in self._resident.items():
            self._tell(layer, sequence, KVBlocks(data), sequence, before)

    def _write_open(self, sequence: int, block: int) -> None:
        """Send a block of the ring that has become full to the host."""
        read, written = self._writeback.new_event(), self._writeback.new_event()
        self._writeback.compute_record(read)
        for place in self._place.values():
            source = self._ring[place, sequence, block % self._ring_blocks].view(-1).view(torch.uint8)
            target = self.blocks.block(place, sequence, block)
            self._writeback.enqueue(target, source, free=read, ready=written)
        self._writes.append(_Write(sequence, block + 1, written))

    def _tell(self, layer: int, sequence: int, kv: KVBlocks, row: int, before: int, after: int | None = None) -> None:
        """Tell the observers about blocks that have become full since `before` tokens."""
        after = self._lengths[sequence] if after is None else after
        blocks = range(before // BLOCK_TOKENS, after // BLOCK_TOKENS)
        for observer in self.observers if blocks else ():
            observer.on_blocks(layer, sequence, kv, row, blocks)

    def truncate(self, sequence: int, length: int) -> None:
        assert 0 <= length <= self._lengths[sequence]
        self._forget_prefill()
        block = length // BLOCK_TOKENS
        if any(write.sequence == sequence and write.end > block for write in self._writes):
            self._drain_writes()
        lowest = kept_from(length)
        for missing in range(lowest, min(self._ring_from[sequence], num_blocks(length))):
            for place in self._place.values():
                slot = self._ring[place, sequence, missing % self._ring_blocks].view(-1).view(torch.uint8)
                slot.copy_(self.blocks.block(place, sequence, missing), non_blocking=True)
        self._ring_from[sequence] = min(self._ring_from[sequence], lowest)
        self._lengths[sequence] = length
        self._on_host[sequence] = min(self._on_host[sequence], block)
        self._epoch += 1

    def _collect_writes(self) -> None:
        """Count what has arrived on the host; never waits."""
        while self._writes and self._writeback.is_done(self._writes[0].ready):
            write = self._writes.popleft()
            self._on_host[write.sequence] = max(self._on_host[write.sequence], write.end)

    def _drain_writes(self) -> None:
        self._writeback.drain()
        self._collect_writes()

    def close(self) -> None:
        self._stop_writing()
        self.blocks.close()


def _range(run: Run) -> range:
    return range(run.first_block, run.first_block + run.num_blocks)


def ring_blocks(window_tokens: int) -> int:
    """Blocks of the open ring: the window, the block it begins in, and two that may still be on their way out."""
    return num_blocks(window_tokens) + 3


def prefill_workspace_bytes(config: ModelConfig, dtype: torch.dtype, tokens: int) -> int:
    """Device bytes that hold one layer's keys and values of a whole prompt."""
    return num_blocks(tokens) * block_bytes(config, dtype)
