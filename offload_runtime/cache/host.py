"""The KV cache in host memory: full blocks on the host, the newest ones in a ring on the device.

A pass streams each layer's host blocks piece by piece through the link's ring and attends to them as they pass, then to
the open ring, which holds the newest blocks and all tentative tokens. A block is written to the host once, when it is
full. Rolling back is only a length, unless it goes behind what the ring still holds.

A prefill works on one layer at a time, in a workspace of its own (see `HostPrefill`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from offload_runtime_kernels.attention import (
    AttentionParams,
    AttentionState,
    QueryRows,
    attend_blocks,
    finish_attention,
)
from offload_runtime_kernels.gather_chunks import BlockTable
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from offload_runtime.cache.device import (
    KVCache,
    allocate_layers,
    block_bytes,
    block_shapes,
    check_capacity,
    filled_blocks,
    kept_from,
    num_blocks,
)
from offload_runtime.cache.host_io import HostBlocks, HostKVCard, HostPrefill, HostWrites, Run, ring_blocks
from offload_runtime.cache.saved_blocks import SavedBlock
from offload_runtime.models.config import ModelConfig
from offload_runtime.stream.arena import Registrar
from offload_runtime.stream.queue import KV, CopySchedule


@dataclass(frozen=True)
class Snapshot:
    """Says which host blocks a pass streams: the first `blocks[s]` of sequence s. It is about the sequences `chosen`,
    and streams nothing of the others."""

    epoch: int
    chosen: tuple[int, ...]
    blocks: tuple[int, ...]


class _CardPass:
    """What a card has of the running pass.

    Attributes:
        snapshot: What is streamed to it, in the lane of `schedule`.
        prefill: Of its layers, where the pass is a prefill and some of them are streamed.
        views: Its query rows of a window, and those of each sequence: they are the same in all of its layers.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.schedule: CopySchedule | None = None
        self.prefill: HostPrefill | None = None
        self.views: tuple[QueryRows, list[tuple[QueryRows, QueryRows]]] | None = None


class HostKVCache(KVCache):
    """A cache whose full blocks live in host memory.

    Args:
        config: The model's shape.
        dtype: Of keys and values.
        capacity_tokens: Most tokens of a sequence; tentative ones may use the rest of the last block, too. Memory grows
            only as they come.
        batch: Sequences.
        window_tokens: Most tokens that a decoding pass puts behind the committed ones.
        cards: What each card brings to it.
        owners: The card of each layer by its number; empty: all are on the first.
        resident_layers: Layers that keep all their blocks on the device, as those with sliding windows do.
        pass_rows: As of a `KVCache`.
        name: What to call it in the ledger.
        registrar: As of a `KVCache`.
        state_tokens: As a `KVCache`'s `window_tokens`.

    Attributes:
        borrow_workspace: By card, what lends device memory that nothing else uses during a prefill, uint8 [nbytes]. It
            is the lender's again when the prefill ends, its contents lost. At first that is a workspace of the cache.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, capacity_tokens: int, batch: int, window_tokens: int,
        cards: Sequence[HostKVCard], owners: Sequence[int] = (), resident_layers: Sequence[int] = (),
        pass_rows: int | None = None, name: str = "KV cache", registrar: Registrar | None = None,
        state_tokens: int = 0,
    ) -> None:  # fmt: skip
        budgets = [card.budget for card in cards]
        windows = {layer: one.window for layer, one in config.attentions.items()}
        streamed = [layer for layer, one in windows.items() if one is None and layer not in resident_layers]
        super().__init__(
            config, dtype, capacity_tokens=capacity_tokens, batch=batch, budgets=budgets, owners=owners,
            name=f"{name}: resident layers", pass_rows=pass_rows, elsewhere=streamed, window_tokens=state_tokens,
            registrar=registrar,
        )  # fmt: skip
        self._dtype, self.mixes = dtype, False
        self._piece_bytes = [card.piece_bytes for card in cards]
        most_blocks, self._ring_blocks = num_blocks(capacity_tokens), ring_blocks(window_tokens)
        of_layers = {layer: cards[self._owners[layer]] for layer in streamed}
        sizes = {layer: block_bytes(config, dtype, layer) for layer in streamed}
        assert all(size <= of_layers[layer].piece_bytes for layer, size in sizes.items()), "a buffer must hold a block"
        self.blocks = HostBlocks(of_layers, sizes, batch=batch, most_blocks=most_blocks)
        self._entered = [0] * batch  # blocks that the tables know
        # By layer, the open ring of what is streamed: [B, N, 2, H_kv, 256, D].
        shapes = block_shapes(config, batch, dict.fromkeys(streamed, self._ring_blocks))
        rings, self._ring = allocate_layers(budgets, self._owners, f"{name}: open blocks", dtype, shapes)
        self._stacks += rings.values()
        self.prefills_by_layer = bool(streamed)  # a workspace serves all streamed layers of a card
        # Once for all: from the second prompt on the allocator would put a larger one where residual streams were.
        self._streaming_cards = sorted({self._owners[layer] for layer in streamed})
        self.borrow_workspace: list[Callable[[int], torch.Tensor]] = []
        for number, card in enumerate(cards):
            nbytes = card.workspace_bytes if number in self._streaming_cards else 0
            workspace = card.budget.allocate(f"{name}: prefill workspace", nbytes)
            self.borrow_workspace.append(partial(torch.narrow, workspace, 0, 0))
        self._ring_from = [0] * batch  # first block that the rings hold
        self.writes = HostWrites([card.writeback for card in cards], batch)
        self._epoch = 0  # counts what makes earlier snapshots wrong
        # Of the running pass: its window's sequences, and the sequence of a prefill.
        self._window: Sequence[int] = ()
        self._prefilled: int | None = None
        self._cards = [_CardPass(self.snapshot()) for _ in cards]
        self._passes = [self._cards[owner] for owner in self._owners]  # by layer

    # --- what the streamer asks

    def snapshot(self) -> Snapshot:
        """Return which blocks a pass that is planned now streams."""
        self.writes.collect()
        chosen = self._chosen
        blocks = (count if slot in chosen else 0 for slot, count in enumerate(self.writes.arrived))
        return Snapshot(self._epoch, chosen, tuple(blocks))

    def is_valid(self, snapshot: Snapshot) -> bool:
        """Return whether a pass may go by this snapshot: it is about the same sequences, and what it does not stream of
        them must be in the ring."""
        fits = snapshot.epoch == self._epoch and snapshot.chosen == self._chosen
        return fits and all(snapshot.blocks[slot] >= self._ring_from[slot] for slot in snapshot.chosen)

    @property
    def _chosen(self) -> tuple[int, ...]:
        """The sequences that the running pass is about, and the next one as far as is known."""
        return tuple(sorted(self._window)) if self._prefilled is None else (self._prefilled,)

    def pieces(self, layer: int, snapshot: Snapshot) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        """Return the key and host memory (uint8 [n]) of each of the layer's pieces, in order."""
        runs = self._runs(layer, snapshot) if layer in self._ring else ()
        return [((layer, run.slot, run.blocks.start), self.blocks.memory(layer, *run)) for run in runs]

    def begin_pass(self, card: int, snapshot: Snapshot, schedule: CopySchedule) -> None:
        """A pass begins; the pieces of a card's layers come out of its schedule."""
        self._cards[card].snapshot, self._cards[card].schedule = snapshot, schedule

    def _runs(self, layer: int, snapshot: Snapshot) -> Iterator[Run]:
        """The layer's pieces."""
        most_blocks = self._piece_bytes[self._owners[layer]] // self.blocks.block_bytes[layer]
        for slot, blocks in enumerate(snapshot.blocks):
            yield from self.blocks.runs(slot, 0, blocks, most_blocks)

    def _passing(self, layer: int) -> Iterator[tuple[Run, KVBlocks]]:
        """The layer's pieces as they come over the link, [1, n, 2, H_kv, 256, D]; each may be read until the next one
        is asked for."""
        schedule = self._passes[layer].schedule
        assert schedule is not None, "a pass begins before it reads"
        for run in self._runs(layer, self._passes[layer].snapshot):
            buffer = schedule.take(KV, (layer, run.slot, run.blocks.start))
            data = buffer[: len(run.blocks) * self.blocks.block_bytes[layer]].view(self._dtype)
            yield run, KVBlocks(data.view(1, len(run.blocks), *self._ring[layer].shape[2:]), run.blocks.start)
            # Not in a `finally`: what an interrupted pass holds is let go of when the next one begins.
            schedule.release(KV)

    # --- what the decoder asks

    def store(self, layer: int) -> KVBlocks:
        if layer in self._of_layers:
            return super().store(layer)
        ring, running = self._ring[layer], self._passes[layer].prefill
        if running is None:
            return KVBlocks(ring)
        if running.layer != layer:
            first = self._passes[layer].snapshot.blocks[running.slot]
            running.begin_layer(layer, self._passing(layer), ring[running.slot], first)
        return KVBlocks(running.workspace)

    def attend(self, layer: int, q: torch.Tensor, rows: QueryRows, params: AttentionParams) -> torch.Tensor:
        running = None if layer in self._of_layers else self._passes[layer].prefill
        if layer in self._ring and running is None:
            return self._attend_window(layer, q, rows, params)
        out = super().attend(layer, q, rows, params)
        if running is not None and running.write(rows.max_length, self._ring[layer][running.slot]):
            kv = KVBlocks(running.workspace)
            self._notify(layer, running.slot, kv, 0, filled_blocks(running.start, rows.max_length))
        return out

    def _attend_window(self, layer: int, q: torch.Tensor, rows: QueryRows, params: AttentionParams) -> torch.Tensor:
        """Attention of a decoding pass: of each sequence to its blocks on the host, as they come over the link, and
        then to those in the ring."""
        of_card = self._passes[layer]
        if of_card.views is None or of_card.views[0] is not rows:
            of_card.views = rows, [self._own_rows(rows, row) for row in range(len(self._window))]
        views, state = of_card.views[1], AttentionState.empty(q)

        def attend(slot: int, kv: KVBlocks, blocks: range, *, committed: bool) -> None:
            row = self._window.index(slot)
            part, view = slice(row, row + 1), views[row][committed]
            attend_blocks(q[part], kv, view, blocks, state[part], params)

        for run, piece in self._passing(layer):
            # The same memory whichever batch row is looked up.
            kv = KVBlocks(piece.data.expand(len(self._lengths), *piece.data.shape[1:]), run.blocks.start)
            attend(run.slot, kv, run.blocks, committed=True)
        ring = KVBlocks(self._ring[layer])
        for slot in self._window:
            recent = range(of_card.snapshot.blocks[slot], num_blocks(self._ends[slot]))
            attend(slot, ring, recent, committed=False)
        return finish_attention(q, state, params)

    def _own_rows(self, rows: QueryRows, row: int) -> tuple[QueryRows, QueryRows]:
        """Those of one sequence: for blocks where keys of a tree may be, and for committed ones."""
        tensors = {name: getattr(rows, name) for name in ("positions", "slots", "committed", "ancestors")}
        parts = {name: tensor[row : row + 1] for name, tensor in tensors.items() if tensor is not None}
        own = replace(rows, **parts)
        return own, replace(own, ancestors=None)

    # --- prefill

    def begin_prefill(self, slot: int, count: int) -> None:
        self._abandon_prefill()
        start, total = self._lengths[slot], self._lengths[slot] + count
        super().begin_prefill(slot, count)
        if not self._ring:
            return
        self.writes.drain()  # the blocks behind `start` are read back
        for number in self._streaming_cards:
            largest = max(self.blocks.block_bytes[layer] for layer in self._ring if self._owners[layer] == number)
            memory = self.borrow_workspace[number](num_blocks(total) * largest).zero_()  # as of `allocate_layers`
            self._cards[number].prefill = HostPrefill(
                slot, start, total, memory, blocks=self.blocks, piece_bytes=self._piece_bytes[number],
                writeback=self.writes.engines[number],
            )  # fmt: skip
        self._prefilled = slot
        self._epoch += 1  # only this sequence's blocks are streamed

    def _leave_prefill(self) -> list[HostPrefill]:
        """End a prefill, if there is one, on all cards: what each had of it."""
        prefills = [card.prefill for card in self._cards if card.prefill is not None]
        for card in self._cards:
            card.prefill = None
        for prefill in prefills:
            if prefill.layer >= 0:  # whoever gets the workspace next must not overwrite what is still copied
                prefill.writeback.compute_wait(prefill.written)
        if prefills:
            self._prefilled = None
            self._epoch += 1
        return prefills

    def _abandon_prefill(self) -> None:
        """Undo a prefill that was left in the middle: layers that were done have put its blocks into the ring."""
        prefills = self._leave_prefill()
        if not prefills:
            return
        self.writes.drain()  # what comes to lie there next must not be overtaken
        slot, start, total = prefills[0].slot, prefills[0].start, prefills[0].total
        if not start:
            return
        # A block that the prefill filled is on the host, what was there before included; its open block is here.
        blocks = range(kept_from(start), min(num_blocks(start), total // BLOCK_TOKENS))
        self._bring_back(slot, blocks, chain.from_iterable(prefill.finished_layers for prefill in prefills))
        self._ring_from[slot] = kept_from(start)

    # --- lengths

    @property
    def pinned_bytes(self) -> int:
        return self.blocks.pinned_bytes + super().pinned_bytes

    def begin_window(self, slots: Sequence[int], counts: Sequence[int], prompts: Collection[int] = ()) -> None:
        self._abandon_prefill()
        super().begin_window(slots, counts, prompts)
        for slot in slots:
            self._enter_blocks(slot, self.blocks.num_blocks(slot))
        self.writes.collect()
        self._window = tuple(slots)
        for card in self._cards:
            card.views = None
        for slot in slots:
            oldest = num_blocks(self._ends[slot]) - self._ring_blocks
            assert oldest <= self._lengths[slot] // BLOCK_TOKENS, "a window larger than the ring"
            first = max(self._ring_from[slot], oldest)
            if first > self.writes.arrived[slot]:
                self.writes.drain()
            self._ring_from[slot] = first

    def _make_room(self, slot: int, length: int, *, in_background: bool = False) -> None:
        self.blocks.grow(slot, length // BLOCK_TOKENS, in_background=in_background)

    def recent_blocks(self, slot: int) -> range:
        """Return the open block, a full one before it, and what the announced window reaches. All before are on the
        host."""
        arrived = self.writes.arrived[slot]
        first = max(self._ring_from[slot], min(arrived, kept_from(self._lengths[slot])))
        return range(first, num_blocks(self._ends[slot]))

    def block_table(self, layer: int) -> BlockTable:
        """Return where the layer's blocks lie, for kernels that read them from there."""
        assert not self.blocks.is_staged, "kernels reach page-locked memory only"
        batch = len(self._lengths)
        if not self._tables:
            for number in self._num_blocks:
                device = self._devices[self._owners[number]]
                self._tables[number] = BlockTable.empty(batch, self.blocks.most_blocks, device)
            for slot in range(batch):
                for number, data in self._of_layers.items():
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
                memory = memory.view(len(run.blocks), *self._ring[layer].shape[2:])
                self._tables[layer].put(slot, run.blocks.start, memory)
        self._entered[slot] = max(self._entered[slot], stop)

    def commit(self, slot: int, count: int, path: Sequence[int] = ()) -> None:
        before, prefills = self._lengths[slot], self._leave_prefill()
        super().commit(slot, count, path)
        if prefills:  # which have sent their blocks to the host, and told the observers
            self._ring_from[slot], end = kept_from(self._lengths[slot]), self._lengths[slot] // BLOCK_TOKENS
            self.writes.expect(slot, end, [(prefill.writeback, prefill.written) for prefill in prefills])
            self._enter_blocks(slot, end)
            return
        full = filled_blocks(before, self._lengths[slot])
        for block in full:
            copies = [list[tuple[int, torch.Tensor, torch.Tensor]]() for _ in self._cards]
            for layer in self._ring:
                copies[self._owners[layer]].append((layer, *self._places(layer, slot, block)))
            self.writes.send(slot, block, copies)
        for layer, data in self._ring.items() if full else ():
            self._notify(layer, slot, KVBlocks(data), slot, full)

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

    def truncate(self, slot: int, length: int) -> int:
        self._abandon_prefill()
        length = super().truncate(slot, length)
        block = length // BLOCK_TOKENS
        self.writes.settle(slot, block)
        if self.writes.arrived[slot] > block:
            self.blocks.settle()  # what is written anew may still be read, by a copy that nobody needs any more
        lowest = kept_from(length)
        missing = range(lowest, min(self._ring_from[slot], num_blocks(length)))
        self._bring_back(slot, missing, self._ring)
        self._ring_from[slot] = min(self._ring_from[slot], lowest)
        self.writes.forget(slot, block)
        self._epoch += 1
        return length

    def begin_restore(self, slot: int, length: int) -> None:
        check_capacity(length, self.capacity_tokens)
        self.truncate(slot, self._lengths[slot])
        self.blocks.grow(slot, length // BLOCK_TOKENS, in_background=True)  # at once: long runs are fast copies

    def save_block(self, slot: int, block: int, to: SavedBlock, *, length: int) -> None:
        self.writes.settle(slot, block)
        super().save_block(slot, block, to, length=length)

    def _block(self, layer: int, slot: int, block: int) -> torch.Tensor:
        if layer in self._of_layers:
            return super()._block(layer, slot, block)
        if block < self._ring_from[slot]:
            memory = self.blocks.memory(layer, slot, range(block, block + 1))
            return memory.view(self._dtype).view(self._ring[layer].shape[2:])
        return self._ring[layer][slot, block % self._ring_blocks]

    def close(self) -> None:
        self.writes.close()
        self.blocks.close()
        super().close()
