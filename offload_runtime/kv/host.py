"""The KV cache in host memory: full blocks on the host, the newest ones in a ring on the device.

A pass streams each layer's host blocks piece by piece through the link's ring and attends to them as they pass, then to
the open ring, which holds the newest blocks and all tentative tokens. A block is written to the host once, when it is
full. Rolling back is only a length, unless it goes behind what the ring still holds.

A prefill works on one layer at a time, in a workspace of its own (see `HostPrefill`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from offload_runtime_kernels.attention import QueryRows, attention
from offload_runtime_kernels.gather_chunks import BlockTable
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from offload_runtime.config import MOST_GAMMA_DRAFT, ModelConfig
from offload_runtime.copy import CopyEngine
from offload_runtime.copy.schedule import CopySchedule
from offload_runtime.kv.cache import BlockObserver, compact_path
from offload_runtime.kv.device import block_bytes, block_shape, check_capacity, kept_from, num_blocks
from offload_runtime.kv.host_blocks import BlockLocking, HostBlocks, HostWrites
from offload_runtime.kv.host_pass import (
    HostBlockTables,
    Snapshot,
    StreamedPieces,
    StreamedWindow,
    WindowPart,
)
from offload_runtime.kv.prefill import HostPrefill, WorkspaceLender, find_workspace
from offload_runtime.memory import DeviceBudget


class HostKVCache:
    """A cache whose full blocks live in host memory.

    Args:
        config: The model's shape.
        dtype: Of keys and values.
        capacity_tokens: Most tokens of a sequence; tentative ones may use the rest of the last block, too. Memory grows
            only as they come.
        batch: Sequences.
        window_tokens: Most tokens that a decoding pass puts behind the committed ones.
        piece_bytes: Size of the link ring's slots.
        budget: Ledger of the device.
        workspace_bytes: To reserve there for prefills; 0 when `lender` will have enough.
        writeback: Copy queue of its own, for blocks on their way to the host.
        resident_layers: Layers that keep all their blocks on the device.
        locking: How its host memory is page-locked.
        name: What to call it in the ledger.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, capacity_tokens: int, batch: int, window_tokens: int,
        piece_bytes: int, budget: DeviceBudget, writeback: CopyEngine, workspace_bytes: int,
        locking: BlockLocking, resident_layers: Sequence[int] = (), name: str = "KV cache",
    ) -> None:  # fmt: skip
        self.capacity_tokens = capacity_tokens
        self.max_tokens_with_draft = num_blocks(capacity_tokens) * BLOCK_TOKENS
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
            locking=locking, staged=[self._place[layer] for layer in locking.staged_layers],
        )  # fmt: skip
        shape, self._ring_blocks = block_shape(config), ring_blocks(window_tokens)
        self._ring = self._allocate(budget, f"{name}: open blocks", (len(streamed), batch, self._ring_blocks, *shape))
        whole = (len(resident_layers), batch, num_blocks(capacity_tokens), *shape)
        self._stays = self._allocate(budget, f"{name}: resident layers", whole)
        self._resident = dict(zip(resident_layers, self._stays, strict=True))
        if streamed and workspace_bytes:
            budget.reserve(f"{name}: prefill workspace", workspace_bytes)
        self.lender: WorkspaceLender | None = None
        self._lengths = [0] * batch
        self._rows = slice(None)  # of the batch, that the running pass is about
        self._ring_from = [0] * batch  # first block that the ring holds
        self._writes = HostWrites(writeback, batch)
        self._epoch = 0  # counts what makes earlier snapshots wrong
        self._prefill: HostPrefill | None = None
        self._window = StreamedWindow({})  # of the running pass
        self._pieces = StreamedPieces(
            config, dtype, blocks=self.blocks, place=self._place, piece_blocks=self._piece_blocks,
            snapshot=self.snapshot(),
        )  # fmt: skip
        self.observers: list[BlockObserver] = []
        self._tables: HostBlockTables | None = None

    def _allocate(self, budget: DeviceBudget, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return budget.allocate(name, count * self._dtype.itemsize).view(self._dtype).view(shape).zero_()

    # --- what the streamer asks

    def snapshot(self) -> Snapshot:
        """Which blocks a pass that is planned now streams."""
        self._writes.collect()
        chosen = None if self._prefill is None else self._prefill.sequence
        blocks = (count if chosen in (None, s) else 0 for s, count in enumerate(self._writes.arrived))
        return Snapshot(self._epoch, tuple(blocks), tuple(self._lengths))

    def is_valid(self, snapshot: Snapshot) -> bool:
        """Whether a pass may go by this snapshot: what it does not stream must be in the ring."""
        pairs = zip(snapshot.blocks, self._ring_from, strict=True)
        return snapshot.epoch == self._epoch and all(blocks >= first for blocks, first in pairs)

    def pieces(self, layer: int, snapshot: Snapshot) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        """Key and host memory of each of the layer's pieces, in order."""
        return self._pieces.planned(layer, snapshot)

    def begin_pass(self, snapshot: Snapshot, schedule: CopySchedule) -> None:
        """A pass begins; its pieces come out of the schedule."""
        self._pieces.begin_pass(snapshot, schedule)

    # --- what the decoder asks

    def store(self, layer: int) -> KVBlocks:
        if layer in self._resident:
            return KVBlocks(self._resident[layer][self._rows])
        if self._prefill is None:
            return KVBlocks(self._ring[self._place[layer]])
        if self._prefill.layer != layer:
            sequence = self._prefill.sequence
            ring, first = self._ring[self._place[layer], sequence], self._pieces.snapshot.blocks[sequence]
            self._prefill.begin_layer(layer, self._pieces.passing(layer), ring, first)
        return self._prefill.kv

    def attend(
        self, layer: int, q: torch.Tensor, rows: QueryRows, *, scale: float, sliding_window: int | None, prefill: bool
    ) -> torch.Tensor:
        if layer in self._resident:
            kv = KVBlocks(self._resident[layer][self._rows])
            return attention(q, kv, rows, scale=scale, sliding_window=sliding_window, prefill=prefill)
        place, running = self._place[layer], self._prefill
        if running is None:
            pieces, ring, first = self._pieces.passing(layer), KVBlocks(self._ring[place]), self._pieces.snapshot.blocks
            return self._window.attend(q, rows, pieces, ring, first, scale=scale, sliding_window=sliding_window)
        out = attention(q, running.kv, rows, scale=scale, sliding_window=sliding_window, prefill=prefill)
        if running.write(place, rows.max_length, self._ring[place, running.sequence]):
            running.finished_places.append(place)
            self._tell(layer, running.sequence, running.kv, 0, running.start, rows.max_length)
        return out

    # --- prefill

    def begin_prefill(self, sequence: int, count: int) -> None:
        self._abandon_prefill()
        start, total = self._lengths[sequence], self._lengths[sequence] + count
        check_capacity(total, self.capacity_tokens)
        self._grow(sequence, total // BLOCK_TOKENS)
        self._rows = slice(sequence, sequence + 1)
        if not self._place:
            return
        self._writes.drain()  # the blocks behind `start` are read back
        shape = (1, num_blocks(total), *block_shape(self._config))
        # Zeros: blocks that no sliding window reaches are not loaded, and a masked key still meets a zero weight.
        memory = find_workspace(self.lender, shape[1] * self._block_bytes, self._device)
        self._prefill = HostPrefill(
            sequence, start, total, memory.view(self._dtype).view(shape).zero_(), blocks=self.blocks,
            piece_blocks=self._piece_blocks, writeback=self._writeback,
        )  # fmt: skip
        self._epoch += 1  # only this sequence's blocks are streamed

    def end_prefill(self, sequence: int, count: int) -> None:
        prefill = self._prefill
        self._lengths[sequence] += count
        self._leave_prefill()
        if prefill is not None:
            full = prefill.total // BLOCK_TOKENS
            self._ring_from[sequence] = kept_from(prefill.total)
            self._writes.expect(sequence, full, prefill.written)
        for layer, data in self._resident.items():
            self._tell(layer, sequence, KVBlocks(data), sequence, self._lengths[sequence] - count)

    def _leave_prefill(self) -> None:
        if self._prefill is not None:
            if self._prefill.layer >= 0:  # whoever gets the workspace next must not overwrite what is still copied
                self._writeback.compute_wait(self._prefill.written)
            self._prefill = None
            self._epoch += 1

    def _abandon_prefill(self) -> None:
        """Undo a prefill that was left in the middle: layers that were done have put its blocks into the ring."""
        prefill = self._prefill
        self._leave_prefill()
        if prefill is None:
            return
        self._writes.drain()  # what comes to lie there next must not be overtaken
        if not prefill.start:
            return
        first, full = kept_from(prefill.start), prefill.total // BLOCK_TOKENS
        # A block that the prefill filled is on the host, what was there before included; its open block is here.
        blocks = range(first, min(num_blocks(prefill.start), full))
        self._bring_back(prefill.sequence, blocks, prefill.finished_places)
        self._ring_from[prefill.sequence] = first

    # --- lengths

    @property
    def pinned_bytes(self) -> int:
        return self.blocks.pinned_bytes

    def length(self, sequence: int) -> int:
        return self._lengths[sequence]

    def begin_window(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        self._abandon_prefill()
        for sequence, count in zip(sequences, counts, strict=True):
            end = self._lengths[sequence] + count
            check_capacity(end, self.max_tokens_with_draft)
            self._grow(sequence, end // BLOCK_TOKENS)
        self._writes.collect()
        self._rows = slice(None)
        parts: dict[int, WindowPart] = {}
        for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            committed = self._lengths[sequence]
            end_block = num_blocks(committed + count)
            assert end_block - self._ring_blocks <= committed // BLOCK_TOKENS, "a window larger than the ring"
            parts[sequence] = WindowPart(row, committed, end_block)
            first = max(self._ring_from[sequence], end_block - self._ring_blocks)
            if first > self._writes.arrived[sequence]:
                self._writes.drain()
            self._ring_from[sequence] = first
        self._window = StreamedWindow(parts)

    def recent_blocks(self, sequence: int) -> range:
        """The open block, a full one before it, and what the announced window reaches. All before are on the host."""
        arrived = self._writes.arrived[sequence]
        first = max(self._ring_from[sequence], min(arrived, kept_from(self._lengths[sequence])))
        return range(first, self._window.end_block(sequence))

    def block_table(self, layer: int) -> BlockTable:
        """Where the layer's blocks lie, for kernels that read them from there."""
        assert not self.blocks.is_staged, "kernels reach page-locked memory only"
        if self._tables is None:
            self._tables = HostBlockTables(
                self._config, self._dtype, blocks=self.blocks, place=self._place, resident=self._resident,
                batch=len(self._lengths), device=self._device,
            )  # fmt: skip
        return self._tables.layer(layer)

    def _grow(self, sequence: int, blocks: int) -> None:
        """Make room on the host for the first `blocks` blocks."""
        before = self.blocks.num_blocks(sequence)
        self.blocks.grow(sequence, blocks)
        if self._tables is not None:
            self._tables.enter(sequence, before)

    def commit(self, sequence: int, count: int) -> None:
        before = self._lengths[sequence]
        self._lengths[sequence] = after = before + count
        full = range(before // BLOCK_TOKENS, after // BLOCK_TOKENS)
        if not full:
            return
        for block in full:
            self._write_open(sequence, block)
        for layer, place in self._place.items():
            self._tell(layer, sequence, KVBlocks(self._ring[place]), sequence, before)
        for layer, data in self._resident.items():
            self._tell(layer, sequence, KVBlocks(data), sequence, before)

    def commit_path(self, sequence: int, rows: Sequence[int]) -> None:
        # Blocks on their way out lie before the window, so nothing that moves is being copied.
        compact_path((self._ring[:, sequence], self._stays[:, sequence]), self._lengths[sequence], rows)
        self.commit(sequence, len(rows))

    def _write_open(self, sequence: int, block: int) -> None:
        """Send a block of the ring that has become full to the host."""
        copies = (
            (layer, self.blocks.block(place, sequence, block), self._slot(place, sequence, block))
            for layer, place in self._place.items()
        )
        self._writes.send(sequence, block, copies)

    def _slot(self, place: int, sequence: int, block: int) -> torch.Tensor:
        """Where the ring has, or would have, a block: uint8 [block_bytes]."""
        return self._ring[place, sequence, block % self._ring_blocks].view(-1).view(torch.uint8)

    def _bring_back(self, sequence: int, blocks: range, places: Iterable[int]) -> None:
        """Copy blocks of some layers from the host into the ring. The driver takes what is pageable before it returns:
        slow, but these are a few blocks."""
        for place in places:
            for block in blocks:
                host = self.blocks.block(place, sequence, block)
                self._slot(place, sequence, block).copy_(host, non_blocking=True)

    def _tell(self, layer: int, sequence: int, kv: KVBlocks, row: int, before: int, after: int | None = None) -> None:
        """Tell the observers about blocks that have become full since `before` tokens."""
        after = self._lengths[sequence] if after is None else after
        blocks = range(before // BLOCK_TOKENS, after // BLOCK_TOKENS)
        for observer in self.observers if blocks else ():
            observer.on_blocks(layer, sequence, kv, row, blocks)

    def truncate(self, sequence: int, length: int) -> None:
        assert 0 <= length <= self._lengths[sequence]
        self._abandon_prefill()
        block = length // BLOCK_TOKENS
        self._writes.settle(sequence, block)
        if self._writes.arrived[sequence] > block:  # they will be written anew
            self.blocks.settle_reads()
        lowest = kept_from(length)
        missing = range(lowest, min(self._ring_from[sequence], num_blocks(length)))
        self._bring_back(sequence, missing, self._place.values())
        self._ring_from[sequence] = min(self._ring_from[sequence], lowest)
        self._lengths[sequence] = length
        self._writes.forget(sequence, block)
        self._epoch += 1

    def close(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # kernels may be reading blocks straight from host memory
        self._stop_writing()
        self.blocks.close()


# Slots of the ring on the link, and bytes of each: large enough for the link's peak, small enough to cost little.
KV_RING_SLOTS = 4
_PIECE_BYTES = 32 << 20


def kv_piece_bytes(config: ModelConfig, dtype: torch.dtype, context_tokens: int) -> int:
    """Bytes of a slot of the ring on the link: whole blocks of a layer, no more than there are."""
    block = block_bytes(config, dtype)
    return max(1, min(_PIECE_BYTES // block, num_blocks(context_tokens))) * block


def ring_blocks(window_tokens: int) -> int:
    """Blocks of the open ring: the window, with what a middle level may write beyond it, the block it begins in, and
    two that may still be on their way out."""
    return num_blocks(window_tokens + MOST_GAMMA_DRAFT + 1) + 3
