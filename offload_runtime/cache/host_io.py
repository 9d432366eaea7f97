"""Blocks of keys and values in host memory, growing with their sequences, and the copies that bring them there.

One extent holds consecutive blocks of one layer of one sequence, contiguous, so that a run of blocks is one copy. It is
page-locked as a whole or, where it is staged, not at all.

A prefill works on one layer at a time. The layer's whole KV stays in a workspace on the device while all pieces of the
prompt go through it, and its full blocks are written to the host on the way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from offload_runtime.cache.device import kept_from, num_blocks
from offload_runtime.config import MOST_GAMMA_DRAFT
from offload_runtime.errors import BudgetError, CopyError
from offload_runtime.models.config import ModelConfig
from offload_runtime.sizes import format_bytes, size_option_down
from offload_runtime.stream.arena import HostArena, PageableMemory, Registrar, check_host_memory, touch
from offload_runtime.stream.copy_engine import CopyEngine
from offload_runtime.stream.device import DeviceBudget, current_device

# A sequence grows by at least so many blocks.
_STEP_BLOCKS = 4
# Slots of the ring on the link, and bytes of each: large enough for the link's peak, small enough to cost little. Those
# of several cards are four times as large: their links bring pieces so much faster than one host launches them.
KV_RING_BUFFERS = 4
_PIECE_BYTES, _PIECE_BYTES_OF_CARDS = 32 << 20, 128 << 20


@dataclass(frozen=True)
class HostKVCard:
    """Holds what a card brings to a cache in host memory.

    `budget` is the ledger of its memory, and `writeback` a copy queue of its own for blocks on their way to the host. A
    buffer of its ring on the link has `piece_bytes`. `workspace_bytes` are allocated for prefills; 0 where they will
    borrow. `registrar` page-locks host memory; None where the device's copies need none. Memory of `staged_layers`, and
    what the system refuses to lock, is entered in `pageable`, which the queues of both directions go by; None where
    nothing can be staged.
    """

    budget: DeviceBudget
    writeback: CopyEngine
    piece_bytes: int
    workspace_bytes: int = 0
    registrar: Registrar | None = None
    pageable: PageableMemory | None = None
    staged_layers: tuple[int, ...] = ()


class Run(NamedTuple):
    """Consecutive blocks of a sequence, contiguous in host memory in every layer."""

    slot: int
    blocks: range


class _Extent(NamedTuple):
    """Consecutive blocks of a sequence that are made at once, and page-locked layer by layer."""

    blocks: range
    arenas: dict[int, HostArena]  # by layer
    locked: dict[int, Future[None]]  # by layer, when it may be used


def _refusal(nbytes: int, error: BudgetError) -> BudgetError:
    return BudgetError(
        f"the KV cache in host memory could not grow by {format_bytes(nbytes)} ({error}): shorten the prompt or close "
        "other programs"
    )


class HostBlocks:
    """Host memory for blocks of several layers.

    Args:
        layers: The card of each layer that keeps its blocks here.
        block_bytes: By layer, bytes of a block.
        batch: Sequences.
        most_blocks: That a sequence will ever have.
    """

    def __init__(
        self, layers: Mapping[int, HostKVCard], block_bytes: Mapping[int, int], *, batch: int, most_blocks: int
    ) -> None:  # fmt: skip
        self.most_blocks = most_blocks
        self.block_bytes = block_bytes
        self._layers, self._devices = layers, {card.budget.device for card in layers.values()}
        self._pageable = {id(found): found for card in layers.values() if (found := card.pageable) is not None}
        self._extents: list[list[_Extent]] = [[] for _ in range(batch)]

    @property
    def is_staged(self) -> bool:
        """Return whether some of it may not be page-locked."""
        return bool(self._pageable)

    @property
    def pinned_bytes(self) -> int:
        """Return the page-locked memory that is held."""
        extents = chain(*self._extents)
        return sum(arena.pinned_bytes for extent in extents for arena in extent.arenas.values())

    def num_blocks(self, slot: int) -> int:
        """Return how many blocks a sequence has room for."""
        extents = self._extents[slot]
        return extents[-1].blocks.stop if extents else 0

    def grow(self, slot: int, num_blocks: int, *, in_background: bool = False) -> None:
        """Make room for the first `num_blocks` blocks of a sequence, in all layers or, on failure, in none.

        In the background the first layers may be used while others are still page-locked, which takes a long context
        seconds; of one that is refused `memory` tells, and the next call gives back what was made.

        Raises:
            BudgetError: The system refused the memory or does not let us lock it.
        """
        extents = self._extents[slot]
        if extents and self._is_broken(extents[-1], wait_for_it=not in_background):
            self._drop_newest(slot)
        assert num_blocks <= self.most_blocks
        have = self.num_blocks(slot)
        if num_blocks <= have or not self._layers:
            return
        blocks = range(have, min(max(num_blocks, have + _STEP_BLOCKS), self.most_blocks))
        sizes = {layer: len(blocks) * self.block_bytes[layer] for layer in self._layers}
        extent = _Extent(blocks, {}, {})
        extents.append(extent)
        try:
            check_host_memory(sum(sizes.values()), what="the KV cache")
            for layer, nbytes in sizes.items():
                extent.arenas[layer] = HostArena(nbytes, name=f"the KV cache of layer {layer}")
            worker = ThreadPoolExecutor(len(self._devices), thread_name_prefix="kv-growth")
            for layer, arena in extent.arenas.items():
                extent.locked[layer] = worker.submit(self._lock_or_enter, layer, arena)
            worker.shutdown(wait=False)  # it goes on until all is done
            for locked in () if in_background else extent.locked.values():
                locked.result()
        except BudgetError as error:
            self._drop_newest(slot)
            raise _refusal(sum(sizes.values()), error) from error

    def _is_broken(self, extent: _Extent, *, wait_for_it: bool) -> bool:
        """Whether an interruption came before all layers were being locked, or one of them is known to be refused."""
        settled = [locked for locked in extent.locked.values() if wait_for_it or locked.done()]
        return len(extent.locked) < len(self._layers) or any(one.cancelled() or one.exception() for one in settled)

    def _drop_newest(self, slot: int) -> None:
        """Give back the memory of a sequence that was made last."""
        self._give_back(self._extents[slot][-1:])
        self._extents[slot].pop()

    def _lock_or_enter(self, layer: int, arena: HostArena) -> None:
        """Page-lock new memory; what is staged, by the plan or because the system refuses to lock it, is entered."""
        card = self._layers[layer]
        registrar, pageable = card.registrar, card.pageable
        if layer not in card.staged_layers:
            if registrar is None:
                return
            touch([arena])
            with current_device(card.budget.device):
                if not arena.lock(registrar, arena.nbytes):
                    return
        if pageable is None:
            assert registrar is not None
            raise BudgetError(
                f"the system has page-locked {format_bytes(registrar.locked_bytes)} and refuses "
                f"{format_bytes(arena.nbytes)} more for {arena.name}: load again with "
                f"--pinned {size_option_down(registrar.locked_bytes)}, which stages the rest from pageable memory"
            )
        pageable.enter(arena.buffer)

    def _give_back(self, extents: Sequence[_Extent]) -> None:
        locked = [one for extent in extents for one in extent.locked.values()]
        wait([one for one in locked if not one.cancel()])
        for device in self._devices:
            if device.type == "cuda":  # kernels may be reading from there, and copies of what a prompt has left
                torch.cuda.synchronize(device)
        for layer, arena in (pair for extent in extents for pair in extent.arenas.items()):
            if (pageable := self._layers[layer].pageable) is not None:
                pageable.forget(arena.buffer)
            arena.close()

    def settle(self) -> None:
        """Wait until what is staged of it has been read."""
        for pageable in self._pageable.values():
            pageable.settle()

    def memory(self, layer: int, slot: int, blocks: range) -> torch.Tensor:
        """Return where blocks of a sequence are, which must lie in one extent: uint8 [len(blocks) * block_bytes], host.
        Waits until they may be used.

        Raises:
            BudgetError: The system does not let us lock them.
        """
        extent = next(extent for extent in self._extents[slot] if blocks.start in extent.blocks)
        assert blocks.stop <= extent.blocks.stop
        try:
            extent.locked[layer].result()
        except BudgetError as error:
            raise _refusal(sum(arena.nbytes for arena in extent.arenas.values()), error) from error
        each = self.block_bytes[layer]
        first, stop = (each * (block - extent.blocks.start) for block in (blocks.start, blocks.stop))
        return extent.arenas[layer].buffer[first:stop]

    def runs(self, slot: int, start: int, stop: int, most_blocks: int) -> Iterator[Run]:
        """Cut blocks `start` to `stop` into runs of at most `most_blocks` that each lie in one extent."""
        for extent in self._extents[slot]:
            end = min(stop, extent.blocks.stop)
            for first in range(max(start, extent.blocks.start), end, most_blocks):
                yield Run(slot, range(first, min(first + most_blocks, end)))

    def close(self) -> None:
        """Give the memory back."""
        self._give_back([*chain(*self._extents)])
        for extents in self._extents:
            extents.clear()


Written = Sequence[tuple[CopyEngine, Any]]  # events that say together that something is on the host, with their queues


class HostWrites:
    """Keeps account of the writes of blocks that have become full.

    Args:
        engines: Copy queues of the cards, which do nothing else; each copies in order.
        batch: Sequences.
    """

    def __init__(self, engines: Sequence[CopyEngine], batch: int) -> None:
        self.engines = engines
        self.arrived = [0] * batch  # leading blocks of a sequence that are on the host, their writes finished
        self._writes: deque[tuple[int, int, Written]] = deque()  # sequence, end of its blocks
        self._failure: CopyError | None = None

    def send(self, slot: int, block: int, copies: Sequence[Iterable[tuple[int, torch.Tensor, torch.Tensor]]]) -> None:
        """Queue the writes of a block, behind what computes it.

        Args:
            slot: Whose block it is.
            block: Its index.
            copies: Of each card, for each of its layers the target (host) and source (device): uint8 [block_bytes].
        """
        sent = list[tuple[CopyEngine, Any]]()
        for engine, own in zip(self.engines, copies, strict=True):
            read, written = engine.new_event(), engine.new_event()
            engine.compute_record(read)
            try:
                for layer, target, source in own:
                    engine.enqueue([(target, source)], free=read, ready=written, label=("kv", (layer, slot, block)))
            except CopyError as error:
                self._failure = error  # nobody waits for this block, so nobody else would be told
                raise
            sent.append((engine, written))
        self.expect(slot, block + 1, sent)

    def expect(self, slot: int, end: int, written: Written) -> None:
        """Blocks before `end` of a sequence are on their way; they are there when all of these have fired."""
        self._writes.append((slot, end, written))

    def collect(self) -> None:
        """Count what has arrived on the host; never waits. Raises `CopyError` when a write has failed."""
        if self._failure is not None:
            raise CopyError(str(self._failure)) from self._failure
        while self._writes and all(engine.is_done(event) for engine, event in self._writes[0][2]):
            slot, end, _ = self._writes.popleft()
            self.arrived[slot] = max(self.arrived[slot], end)

    def drain(self) -> None:
        """Wait for all of them."""
        for engine in self.engines:
            engine.drain()
        self.collect()

    def settle(self, slot: int, block: int) -> None:
        """Wait if blocks of a sequence from `block` on are on their way."""
        if any(whose == slot and end > block for whose, end, _ in self._writes):
            self.drain()

    def forget(self, slot: int, block: int) -> None:
        """Blocks of a sequence from `block` on will be written anew."""
        self.arrived[slot] = min(self.arrived[slot], block)

    def close(self) -> None:
        """End the queues."""
        for engine in self.engines:
            engine.close()


@dataclass(eq=False)
class HostPrefill:
    """Holds what a prefill in progress has on one card, whose layers it takes one by one.

    Attributes:
        slot: Of the sequence that is prefilled.
        start: Tokens committed before.
        total: Tokens there will be.
        memory: For the running layer's keys and values: uint8, device.
        blocks: Where full blocks go.
        piece_bytes: Most bytes of one copy.
        writeback: The copy queue to there.
        written: Fires when the workspace's blocks have been copied.
        layer: The running layer; -1 before the first.
        workspace: The running layer's keys and values: [1, N, 2, H_kv, 256, D] of the memory.
        finished_layers: Those that all pieces have gone through.
    """

    slot: int
    start: int
    total: int
    memory: torch.Tensor
    blocks: HostBlocks
    piece_bytes: int
    writeback: CopyEngine
    layer: int = -1
    finished_layers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.written = self.writeback.new_event()
        self._read = self.writeback.new_event()  # the workspace's blocks may be copied
        self._blocks_written = 0

    def begin_layer(
        self, layer: int, pieces: Iterable[tuple[Run, KVBlocks]], ring: torch.Tensor, first_in_ring: int
    ) -> None:
        """Bring what the sequence had before into the workspace.

        Args:
            layer: The layer that begins.
            pieces: Its blocks on the host, as they come over the link.
            ring: Its newest blocks: [R, 2, H_kv, 256, D], device.
            first_in_ring: The first block to take from there.
        """
        assert self.layer in (-1, *self.finished_layers[-1:]), (
            "a layer begins before all pieces have gone through another"
        )
        if self.layer >= 0:
            self.writeback.compute_wait(self.written)  # the layer before is still being copied from there
        self.layer, self._blocks_written = layer, self.start // BLOCK_TOKENS
        count = num_blocks(self.total)
        self.workspace = self.memory[: count * ring[0].nbytes].view(ring.dtype).view(1, count, *ring.shape[1:])
        blocks = self.workspace[0]
        for run, kv in pieces:
            blocks[run.blocks.start : run.blocks.stop] = kv.data[0]
        for block in range(first_in_ring, num_blocks(self.start)):
            blocks[block] = ring[block % len(ring)]

    def write(self, end: int, ring: torch.Tensor) -> bool:
        """Send the layer's blocks that are full to the host; after its last piece also fill the ring.

        Args:
            end: Tokens that the workspace holds.
            ring: As in `begin_layer`.

        Returns:
            Whether this was the layer's last piece.
        """
        full = end // BLOCK_TOKENS
        self.writeback.compute_record(self._read)
        most_blocks = self.piece_bytes // ring[0].nbytes
        for run in self.blocks.runs(self.slot, self._blocks_written, full, most_blocks):
            target = self.blocks.memory(self.layer, *run)
            source = self.workspace[0, run.blocks.start : run.blocks.stop].view(-1).view(torch.uint8)
            label = "kv", (self.layer, self.slot, run.blocks.start)
            self.writeback.enqueue([(target, source)], free=self._read, ready=self.written, label=label)
        self._blocks_written = max(full, self._blocks_written)
        if end < self.total:
            return False
        self.finished_layers.append(self.layer)
        # Full blocks from before are in the ring already.
        for block in range(max(kept_from(end), self.start // BLOCK_TOKENS), num_blocks(end)):
            ring[block % len(ring)] = self.workspace[0, block]
        return True


def kv_piece_bytes(config: ModelConfig, dtype: torch.dtype, context_tokens: int, *, overlapped: bool = False) -> int:
    """Return the bytes of a buffer of the ring on the link: whole blocks of any layer, of which a long sequence makes
    pieces of about the same size; `overlapped` where the links of several cards are busy at once."""
    blocks, most = num_blocks(context_tokens), _PIECE_BYTES_OF_CARDS if overlapped else _PIECE_BYTES

    def piece_bytes(block: int) -> int:
        pieces = -(-blocks // max(1, most // block))
        return -(-blocks // pieces) * block

    return max(piece_bytes(elements * BLOCK_TOKENS * dtype.itemsize) for elements in {*config.kv_elements} - {0})


def ring_blocks(window_tokens: int) -> int:
    """Return how many blocks the open ring has: the window, with what a retrieval verifier may write beyond it, the
    block it begins in, and two that may still be on their way out."""
    return num_blocks(window_tokens + MOST_GAMMA_DRAFT + 1) + 3
