"""The KV cache in host memory: full blocks on the host, the newest ones in a ring on the device.

A pass streams each layer's host blocks piece by piece through the link's ring and attends to them as they pass, then to
the open ring, which holds the newest blocks and all tentative tokens. A block is written to the host once, when it is
full. Rolling back is only a length, unless it goes behind what the ring still holds.

A prefill works on one layer at a time, in a workspace of its own (see `HostPrefill`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from offload_runtime_kernels.attention import AttentionState, QueryRows, attend_blocks, finish_attention
from offload_runtime_kernels.gather_chunks import BlockTable
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from offload_runtime.copy import CopyEngine
from offload_runtime.copy.schedule import KV, CopySchedule
from offload_runtime.kv.block_store import SavedBlock
from offload_runtime.kv.device import (
    BlockCache,
    allocate_zeros,
    block_bytes,
    block_shape,
    check_capacity,
    compact_path,
    filled_blocks,
    kept_from,
    num_blocks,
)
from offload_runtime.kv.host_io import BlockLocking, HostBlocks, HostPrefill, HostWrites, Run, ring_blocks
from offload_runtime.memory import DeviceBudget
from offload_runtime.models import ModelConfig


@dataclass(frozen=True)
class Snapshot:
    """Which host blocks a pass streams: the first `blocks[s]` of sequence s, of `lengths[s]` committed tokens. It is
    about the sequences `chosen`, and streams nothing of the others."""

    epoch: int
    chosen: tuple[int, ...]
    blocks: tuple[int, ...]
    lengths: tuple[int, ...]


class HostKVCache(BlockCache):
    """A cache whose full blocks live in host memory.

    Args:
        config: The model's shape.
        dtype: Of keys and values.
        capacity_tokens: Most tokens of a sequence; tentative ones may use the rest of the last block, too. Memory grows
            only as they come.
        batch: Sequences.
        window_tokens: Most tokens that a decoding pass puts behind the committed ones.
        piece_bytes: Size of the link ring's buffers.
        budget: Ledger of the device.
        workspace_bytes: To allocate there for prefills; 0 when `borrow_workspace` will be set.
        writeback: Copy queue of its own, for blocks on their way to the host.
        resident_layers: Layers that keep all their blocks on the device.
        locking: How its host memory is page-locked.
        name: What to call it in the ledger.
    """

    mixes = False

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, capacity_tokens: int, batch: int, window_tokens: int,
        piece_bytes: int, budget: DeviceBudget, writeback: CopyEngine, workspace_bytes: int,
        locking: BlockLocking, resident_layers: Sequence[int] = (), name: str = "KV cache",
    ) -> None:  # fmt: skip
        super().__init__(config, capacity_tokens=capacity_tokens, batch=batch, device=budget.device)
        self._dtype = dtype
        self._block_bytes = block_bytes(config, dtype)
        self._piece_blocks = piece_bytes // self._block_bytes
        assert self._piece_blocks > 0, "a buffer must hold a block"
        streamed = [layer for layer in range(config.num_layers) if layer not in resident_layers]
        most_blocks, self._ring_blocks = num_blocks(capacity_tokens), ring_blocks(window_tokens)
        self.blocks = HostBlocks(
            streamed, self._block_bytes, batch=batch, most_blocks=most_blocks, locking=locking, device=budget.device
        )  # fmt: skip
        self._entered = [0] * batch  # blocks that the tables know
        shape = (len(streamed), batch, self._ring_blocks, *block_shape(config))
        self._rings = allocate_zeros(budget, f"{name}: open blocks", dtype, shape)
        shape = (len(resident_layers), batch, most_blocks, *block_shape(config))
        self._stays = allocate_zeros(budget, f"{name}: resident layers", dtype, shape)
        # By layer, the open ring of what is streamed and all blocks of what is not: [B, N, 2, H_kv, 256, D].
        self._ring = dict(zip(streamed, self._rings, strict=True))
        self._resident = dict(zip(resident_layers, self._stays, strict=True))
        self.prefills_by_layer = bool(streamed)  # one workspace serves all of these
        # Once for all: from the second prompt on the allocator would put a larger one where residual streams were.
        workspace = budget.allocate(f"{name}: prefill workspace", workspace_bytes if streamed else 0)
        # Lends device memory that nothing else uses during a prefill, uint8 [nbytes]. It is the lender's again when the
        # prefill ends, its contents lost.
        self.borrow_workspace: Callable[[int], torch.Tensor] = lambda nbytes: workspace[:nbytes]
        self._ring_from = [0] * batch  # first block that the ring holds
        self.writes = HostWrites(writeback, batch)
        self._epoch = 0  # counts what makes earlier snapshots wrong
        # Of the running pass: its window's sequences and their own query rows, what is streamed.
        self._prefill: HostPrefill | None = None
        self._window: Sequence[int] = ()
        self._views: tuple[QueryRows, list[tuple[QueryRows, QueryRows]]] | None = None
        self._schedule: CopySchedule | None = None
        self._snapshot = self.snapshot()

    # --- what the streamer asks

    def snapshot(self) -> Snapshot:
        """Which blocks a pass that is planned now streams."""
        self.writes.collect()
        chosen = self._chosen
        blocks = (count if slot in chosen else 0 for slot, count in enumerate(self.writes.arrived))
        return Snapshot(self._epoch, chosen, tuple(blocks), tuple(self._lengths))

    def is_valid(self, snapshot: Snapshot) -> bool:
        """Whether a pass may go by this snapshot: it is about the same sequences, and what it does not stream of them
        must be in the ring."""
        fits = snapshot.epoch == self._epoch and snapshot.chosen == self._chosen
        return fits and all(snapshot.blocks[slot] >= self._ring_from[slot] for slot in snapshot.chosen)

    @property
    def _chosen(self) -> tuple[int, ...]:
        """The sequences that the running pass is about, and the next one as far as is known."""
        return tuple(sorted(self._window)) if self._prefill is None else (self._prefill.slot,)

    def pieces(self, layer: int, snapshot: Snapshot) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        """Key and host memory (uint8 [n]) of each of the layer's pieces, in order."""
        runs = self._runs(layer, snapshot) if layer in self._ring else ()
        return [((layer, run.slot, run.blocks.start), self.blocks.memory(layer, *run)) for run in runs]

    def begin_pass(self, snapshot: Snapshot, schedule: CopySchedule) -> None:
        """A pass begins; its pieces come out of the schedule."""
        self._snapshot, self._schedule = snapshot, schedule

    def _runs(self, layer: int, snapshot: Snapshot) -> list[Run]:
        """The layer's pieces; blocks that no sliding window reaches any more stay where they are."""
        reach = self._config.layers[layer].attention.window
        runs: list[Run] = []
        for slot, blocks in enumerate(snapshot.blocks):
            first = 0 if reach is None else max(0, snapshot.lengths[slot] - reach) // BLOCK_TOKENS
            runs += self.blocks.runs(slot, first, blocks, self._piece_blocks)
        return runs

    def _passing(self, layer: int) -> Iterator[tuple[Run, KVBlocks]]:
        """The layer's pieces as they come over the link, [1, n, 2, H_kv, 256, D]; each may be read until the next one
        is asked for."""
        schedule = self._schedule
        assert schedule is not None, "a pass begins before it reads"
        for run in self._runs(layer, self._snapshot):
            buffer = schedule.take(KV, (layer, run.slot, run.blocks.start))
            data = buffer[: len(run.blocks) * self._block_bytes].view(self._dtype)
            yield run, KVBlocks(data.view(1, len(run.blocks), *block_shape(self._config)), run.blocks.start)
            # Not in a `finally`: what an interrupted pass holds is let go of when the next one begins.
            schedule.release(KV)

    # --- what the decoder asks

    def store(self, layer: int) -> KVBlocks:
        if layer in self._resident:
            return KVBlocks(self._resident[layer][self._rows])
        ring, running = self._ring[layer], self._prefill
        if running is None:
            return KVBlocks(ring)
        if running.layer != layer:
            first = self._snapshot.blocks[running.slot]
            running.begin_layer(layer, self._passing(layer), ring[running.slot], first)
        return KVBlocks(running.workspace)

    def attend(self, layer: int, q: torch.Tensor, rows: QueryRows) -> torch.Tensor:
        running = None if layer in self._resident else self._prefill
        if layer in self._ring and running is None:
            return self._attend_window(layer, q, rows)
        kv = self.store(layer)
        out = self._attend_to(kv, layer, q, rows)
        if running is not None and running.write(rows.max_length, self._ring[layer][running.slot]):
            self._notify(layer, running.slot, kv, 0, filled_blocks(running.start, rows.max_length))
        return out

    def _attend_window(self, layer: int, q: torch.Tensor, rows: QueryRows) -> torch.Tensor:
        """Attention of a decoding pass: of each sequence to its blocks on the host, as they come over the link, and
        then to those in the ring."""
        if self._views is None or self._views[0] is not rows:  # the same in every layer of a pass
            self._views = rows, [self._own_rows(rows, row) for row in range(len(self._window))]
        views, state = self._views[1], AttentionState.empty(q)
        attention = self._config.layers[layer].attention

        def attend(slot: int, kv: KVBlocks, blocks: range, *, committed: bool) -> None:
            row = self._window.index(slot)
            part, view = slice(row, row + 1), views[row][committed]
            attend_blocks(
                q[part], kv, view, blocks, state[part], scale=attention.scale, sliding_window=attention.window
            )

        for run, piece in self._passing(layer):
            # The same memory whichever batch row is looked up.
            kv = KVBlocks(piece.data.expand(len(self._lengths), *piece.data.shape[1:]), run.blocks.start)
            attend(run.slot, kv, run.blocks, committed=True)
        ring = KVBlocks(self._ring[layer])
        for slot in self._window:
            recent = range(self._snapshot.blocks[slot], num_blocks(self._ends[slot]))
            attend(slot, ring, recent, committed=False)
        return finish_attention(q, rows, state)

    def _own_rows(self, rows: QueryRows, row: int) -> tuple[QueryRows, QueryRows]:
        """Those of one sequence: for blocks where keys of a tree may be, and for committed ones."""
        tensors = {name: getattr(rows, name) for name in ("positions", "slots", "committed", "ancestors")}
        parts = {name: tensor[row : row + 1] for name, tensor in tensors.items() if tensor is not None}
        own = replace(rows, **parts)
        return own, replace(own, ancestors=None)

    # --- prefill

    def growth_bytes(self, slot: int, count: int) -> int:
        """Host memory that a prefill of `count` tokens would make."""
        return self.blocks.missing_bytes(slot, (self._lengths[slot] + count) // BLOCK_TOKENS)

    def begin_prefill(self, slot: int, count: int) -> None:
        self._abandon_prefill()
        start, total = self._lengths[slot], self._lengths[slot] + count
        check_capacity(total, self.capacity_tokens)
        self.blocks.grow(slot, total // BLOCK_TOKENS, in_background=True)
        self._rows = slice(slot, slot + 1)
        if not self._ring:
            return
        self.writes.drain()  # the blocks behind `start` are read back
        shape = (1, num_blocks(total), *block_shape(self._config))
        # Zeros: blocks that no sliding window reaches are not loaded, and a masked key still meets a zero weight.
        memory = self.borrow_workspace(shape[1] * self._block_bytes)
        self._prefill = HostPrefill(
            slot, start, total, memory.view(self._dtype).view(shape).zero_(), blocks=self.blocks,
            piece_blocks=self._piece_blocks, writeback=self.writes.engine,
        )  # fmt: skip
        self._epoch += 1  # only this sequence's blocks are streamed

    def end_prefill(self, slot: int, count: int) -> None:
        before = self._lengths[slot]
        self._lengths[slot] += count
        prefill = self._leave_prefill()
        if prefill is not None:
            full = prefill.total // BLOCK_TOKENS
            self._ring_from[slot] = kept_from(prefill.total)
            self.writes.expect(slot, full, prefill.written)
        self._enter_blocks(slot, self._lengths[slot] // BLOCK_TOKENS)
        for layer, data in self._resident.items():
            self._notify(layer, slot, KVBlocks(data), slot, filled_blocks(before, before + count))

    def _leave_prefill(self) -> HostPrefill | None:
        prefill = self._prefill
        if prefill is not None:
            if prefill.layer >= 0:  # whoever gets the workspace next must not overwrite what is still copied
                self.writes.engine.compute_wait(prefill.written)
            self._prefill = None
            self._epoch += 1
        return prefill

    def _abandon_prefill(self) -> None:
        """Undo a prefill that was left in the middle: layers that were done have put its blocks into the ring."""
        prefill = self._leave_prefill()
        if prefill is None:
            return
        self.writes.drain()  # what comes to lie there next must not be overtaken
        if not prefill.start:
            return
        first, full = kept_from(prefill.start), prefill.total // BLOCK_TOKENS
        # A block that the prefill filled is on the host, what was there before included; its open block is here.
        blocks = range(first, min(num_blocks(prefill.start), full))
        self._bring_back(prefill.slot, blocks, prefill.finished_layers)
        self._ring_from[prefill.slot] = first

    # --- lengths

    @property
    def pinned_bytes(self) -> int:
        return self.blocks.pinned_bytes

    def begin_window(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        self._abandon_prefill()
        super().begin_window(slots, counts)
        for slot in slots:
            self.blocks.grow(slot, self._ends[slot] // BLOCK_TOKENS)
            self._enter_blocks(slot, self.blocks.num_blocks(slot))
        self.writes.collect()
        self._window, self._views = tuple(slots), None
        for slot in slots:
            oldest = num_blocks(self._ends[slot]) - self._ring_blocks
            assert oldest <= self._lengths[slot] // BLOCK_TOKENS, "a window larger than the ring"
            first = max(self._ring_from[slot], oldest)
            if first > self.writes.arrived[slot]:
                self.writes.drain()
            self._ring_from[slot] = first

    def recent_blocks(self, slot: int) -> range:
        """The open block, a full one before it, and what the announced window reaches. All before are on the host."""
        arrived = self.writes.arrived[slot]
        first = max(self._ring_from[slot], min(arrived, kept_from(self._lengths[slot])))
        return range(first, num_blocks(self._ends[slot]))

    def block_table(self, layer: int) -> BlockTable:
        """Where the layer's blocks lie, for kernels that read them from there."""
        assert self.blocks.locking.pageable is None, "kernels reach page-locked memory only"
        batch = len(self._lengths)
        if not self._tables:
            for number in range(self._config.num_layers):
                self._tables[number] = BlockTable.empty(batch, self.blocks.most_blocks, self._device)
            for slot in range(batch):
                for number, data in self._resident.items():
                    self._tables[number].put(slot, 0, data[slot])
                self._enter_blocks(slot, self._lengths[slot] // BLOCK_TOKENS)
        return self._tables[layer]

    def _enter_blocks(self, slot: int, stop: int) -> None:
        """Tell the tables, if there are any, where the host has the sequence's blocks before `stop`, all locked."""
        if not self._tables:
            return
        for run in self.blocks.runs(slot, self._entered[slot], stop, self.blocks.most_blocks):
            for layer in self._ring:
                memory = self.blocks.memory(layer, *run).view(self._dtype)
                memory = memory.view(len(run.blocks), *block_shape(self._config))
                self._tables[layer].put(slot, run.blocks.start, memory)
        self._entered[slot] = max(self._entered[slot], stop)

    def commit(self, slot: int, count: int) -> None:
        before = self._lengths[slot]
        self._lengths[slot] = after = before + count
        full = filled_blocks(before, after)
        if not full:
            return
        for block in full:
            copies = ((layer, *self._places(layer, slot, block)) for layer in self._ring)
            self.writes.send(slot, block, copies)
        for layer, data in (self._ring | self._resident).items():
            self._notify(layer, slot, KVBlocks(data), slot, full)

    def commit_path(self, slot: int, rows: Sequence[int]) -> None:
        # Blocks on their way out lie before the window, so nothing that moves is being copied.
        if len(rows) > 1:
            compact_path((self._rings[:, slot], self._stays[:, slot]), self._lengths[slot], rows)
        self.commit(slot, len(rows))

    def _places(self, layer: int, slot: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a block lies on the host, and where the ring has it, or would have it: uint8 [block_bytes] each."""
        host = self.blocks.memory(layer, slot, range(block, block + 1))
        return host, self._ring[layer][slot, block % self._ring_blocks].view(-1).view(torch.uint8)

    def _bring_back(self, slot: int, blocks: range, layers: Iterable[int]) -> None:
        """Copy blocks of some layers from the host into the ring. The driver takes what is pageable before it returns:
        slow, but these are a few blocks."""
        for layer in layers:
            for block in blocks:
                host, ring = self._places(layer, slot, block)
                ring.copy_(host, non_blocking=True)

    def truncate(self, slot: int, length: int) -> None:
        assert 0 <= length <= self._lengths[slot]
        self._abandon_prefill()
        block = length // BLOCK_TOKENS
        self.writes.settle(slot, block)
        pageable = self.blocks.locking.pageable
        if self.writes.arrived[slot] > block and pageable is not None:
            pageable.settle()  # what is written anew may still be read, by a copy that nobody needs any more
        lowest = kept_from(length)
        missing = range(lowest, min(self._ring_from[slot], num_blocks(length)))
        self._bring_back(slot, missing, self._ring)
        self._ring_from[slot] = min(self._ring_from[slot], lowest)
        self._lengths[slot] = length
        self.writes.forget(slot, block)
        self._epoch += 1

    def begin_restore(self, slot: int, length: int) -> None:
        check_capacity(length, self.capacity_tokens)
        self.truncate(slot, self._lengths[slot])
        self.blocks.grow(slot, length // BLOCK_TOKENS, in_background=True)  # at once: long runs are fast copies

    def save_block(self, slot: int, block: int, to: SavedBlock) -> None:
        self.writes.settle(slot, block)
        super().save_block(slot, block, to)

    def _block(self, layer: int, slot: int, block: int) -> torch.Tensor:
        if layer in self._resident:
            return self._resident[layer][slot, block]
        if block < self._ring_from[slot]:
            memory = self.blocks.memory(layer, slot, range(block, block + 1))
            return memory.view(self._dtype).view(block_shape(self._config))
        return self._ring[layer][slot, block % self._ring_blocks]

    def close(self) -> None:
        self.writes.engine.close()
        self.blocks.close()
