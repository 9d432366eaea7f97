"""Blocks of keys and values in host memory, growing with their sequences, and the copies that bring them there.

One extent holds consecutive blocks of one layer of one sequence, contiguous, so that a run of blocks is one copy. It is
page-locked as a whole or, where it is staged, not at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from offload_runtime.config import MOST_GAMMA_DRAFT, ModelConfig, format_bytes, size_option_down
from offload_runtime.copy import CopyEngine
from offload_runtime.errors import BudgetError, CopyError
from offload_runtime.kv.device import block_bytes, num_blocks
from offload_runtime.memory import HostArena, PageableMemory, Registrar, check_host_memory

# Slots of the ring on the link, and bytes of each: large enough for the link's peak, small enough to cost little.
KV_RING_SLOTS = 4
_PIECE_BYTES = 32 << 20


@dataclass(frozen=True)
class BlockLocking:
    """How host memory is page-locked for full-speed copies.

    `registrar` locks; None where the device's copies need no locked memory. Memory of `staged_layers`, and what the
    system refuses to lock, is entered in `pageable`, which the queues of both directions go by; None where nothing can
    be staged.
    """

    registrar: Registrar | None = None
    pageable: PageableMemory | None = None
    staged_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.pageable is not None or not self.staged_layers


class Run(NamedTuple):
    """Consecutive blocks of a sequence, contiguous in host memory in every layer."""

    sequence: int
    first_block: int
    num_blocks: int

    @property
    def blocks(self) -> range:
        """Their numbers."""
        return range(self.first_block, self.first_block + self.num_blocks)


@dataclass(frozen=True)
class _Extent:
    first_block: int
    num_blocks: int
    arenas: tuple[HostArena, ...]  # one per layer


class HostBlocks:
    """Host memory for blocks of all layers.

    Args:
        num_layers: Layers that keep their blocks here.
        block_bytes: Of one layer's block.
        batch: Sequences.
        most_blocks: That a sequence will ever have.
        locking: How it is page-locked.
        staged: Indices of the layers whose memory is not to be.
        step_blocks: Grow by at least so many blocks of a sequence.
    """

    def __init__(
        self, num_layers: int, block_bytes: int, *, batch: int, most_blocks: int, locking: BlockLocking,
        staged: Collection[int] = (), step_blocks: int = 4,
    ) -> None:  # fmt: skip
        self.most_blocks = most_blocks
        self.block_bytes = block_bytes
        self._num_layers = num_layers
        self._locking = locking
        self._staged = frozenset(staged)
        self._step_blocks = step_blocks
        self._extents: list[list[_Extent]] = [[] for _ in range(batch)]

    @property
    def nbytes(self) -> int:
        """Host memory that is held."""
        return sum(arena.nbytes for arena in self._arenas())

    @property
    def pinned_bytes(self) -> int:
        """Of these, page-locked."""
        return sum(arena.pinned_bytes for arena in self._arenas())

    def _arenas(self) -> Iterator[HostArena]:
        return (arena for extents in self._extents for extent in extents for arena in extent.arenas)

    @property
    def is_staged(self) -> bool:
        """Whether some of the memory is, or may come to be, out of reach for kernels that read it where it lies."""
        return self._locking.pageable is not None

    def num_blocks(self, sequence: int) -> int:
        """Blocks that a sequence has room for."""
        extents = self._extents[sequence]
        return extents[-1].first_block + extents[-1].num_blocks if extents else 0

    def grow(self, sequence: int, num_blocks: int) -> None:
        """Make room for the first `num_blocks` blocks of a sequence, in all layers or, on failure, in none.

        Raises:
            BudgetError: The system refused the memory or does not let us lock it.
        """
        have = self.num_blocks(sequence)
        if num_blocks <= have or not self._num_layers:
            return
        assert num_blocks <= self.most_blocks
        missing = min(max(num_blocks - have, self._step_blocks), self.most_blocks - have)
        nbytes = missing * self.block_bytes
        arenas: list[HostArena] = []
        try:
            check_host_memory(nbytes * self._num_layers, what="the KV cache")
            for layer in range(self._num_layers):
                arenas.append(HostArena(nbytes, name=f"the KV cache of layer {layer}"))
                self._lock_or_enter(layer, arenas[-1])
        except BudgetError as error:
            self._give_back(arenas)
            raise BudgetError(
                f"the KV cache in host memory holds {format_bytes(self.nbytes)} and could not grow by "
                f"{format_bytes(nbytes * self._num_layers)} ({error}): shorten the prompt or close other programs"
            ) from error
        self._extents[sequence].append(_Extent(have, missing, tuple(arenas)))

    def _lock_or_enter(self, layer: int, arena: HostArena) -> None:
        """Page-lock new memory; what is staged, by the plan or because the system refuses to lock it, is entered."""
        registrar, pageable = self._locking.registrar, self._locking.pageable
        if layer not in self._staged and (registrar is None or arena.pin_blocks(registrar, arena.nbytes)):
            return
        if pageable is None:
            assert registrar is not None
            raise BudgetError(
                f"the system has page-locked {format_bytes(registrar.locked_bytes)} and refuses "
                f"{format_bytes(arena.nbytes)} more for {arena.name}: load again with "
                f"--pinned {size_option_down(registrar.locked_bytes)}, which stages the rest from pageable memory"
            )
        pageable.enter(arena.buffer)

    def _give_back(self, arenas: Sequence[HostArena]) -> None:
        for arena in arenas:
            if self._locking.pageable is not None:
                self._locking.pageable.forget(arena.buffer)
            arena.close()

    def settle_reads(self) -> None:
        """Wait until nothing is read that may be written anew: a staged copy that is not needed any more is made all
        the same."""
        if self._locking.pageable is not None:
            self._locking.pageable.settle()

    def block(self, layer: int, sequence: int, block: int, count: int = 1) -> torch.Tensor:
        """`count` blocks from `block` on, which must lie in one extent: uint8 [count * block_bytes], host."""
        extent = next(e for e in self._extents[sequence] if e.first_block <= block < e.first_block + e.num_blocks)
        offset = block - extent.first_block
        assert offset + count <= extent.num_blocks
        return extent.arenas[layer].buffer[offset * self.block_bytes : (offset + count) * self.block_bytes]

    def runs(self, sequence: int, start: int, stop: int, most_blocks: int) -> Iterator[Run]:
        """Cut blocks `start` to `stop` into runs of at most `most_blocks` that each lie in one extent."""
        for extent in self._extents[sequence]:
            first = max(start, extent.first_block)
            end = min(stop, extent.first_block + extent.num_blocks)
            while first < end:
                count = min(most_blocks, end - first)
                yield Run(sequence, first, count)
                first += count

    def close(self) -> None:
        """Give the memory back."""
        self._give_back(list(self._arenas()))
        for extents in self._extents:
            extents.clear()


class HostWrites:
    """Keeps account of the writes of blocks that have become full.

    Args:
        engine: Copy queue of its own; it copies in order.
        batch: Sequences.
    """

    def __init__(self, engine: CopyEngine, batch: int) -> None:
        self.arrived = [0] * batch  # leading blocks of a sequence that are on the host, their writes finished
        self._engine = engine
        self._writes: deque[tuple[int, int, Any]] = (
            deque()
        )  # sequence, end of its blocks, event that says they are there
        self._failure: CopyError | None = None

    def send(self, sequence: int, block: int, copies: Iterable[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
        """Queue the writes of a block, behind what computes it.

        Args:
            sequence: Whose block it is.
            block: Its index.
            copies: Every layer, its target (host) and source (device): uint8 [block_bytes] each.
        """
        read, written = self._engine.new_event(), self._engine.new_event()
        self._engine.compute_record(read)
        try:
            for layer, target, source in copies:
                label = "kv", (layer, sequence, block)
                self._engine.enqueue(target, source, free=read, ready=written, label=label)
        except CopyError as error:
            self._failure = error  # nobody waits for this block, so nobody else would be told
            raise
        self.expect(sequence, block + 1, written)

    def expect(self, sequence: int, end: int, ready: Any) -> None:
        """Blocks before `end` of a sequence are on their way; they are there when `ready` fires."""
        self._writes.append((sequence, end, ready))

    def collect(self) -> None:
        """Count what has arrived on the host; never waits. Raises `CopyError` when a write has failed."""
        if self._failure is not None:
            raise CopyError(str(self._failure)) from self._failure
        while self._writes and self._engine.is_done(self._writes[0][2]):
            sequence, end, _ = self._writes.popleft()
            self.arrived[sequence] = max(self.arrived[sequence], end)

    def drain(self) -> None:
        """Wait for all of them."""
        self._engine.drain()
        self.collect()

    def settle(self, sequence: int, block: int) -> None:
        """Wait if blocks of a sequence from `block` on are on their way."""
        if any(whose == sequence and end > block for whose, end, _ in self._writes):
            self.drain()

    def forget(self, sequence: int, block: int) -> None:
        """Blocks of a sequence from `block` on will be written anew."""
        self.arrived[sequence] = min(self.arrived[sequence], block)


def kv_piece_bytes(config: ModelConfig, dtype: torch.dtype, context_tokens: int) -> int:
    """Bytes of a slot of the ring on the link: whole blocks of a layer, no more than there are."""
    block = block_bytes(config, dtype)
    return max(1, min(_PIECE_BYTES // block, num_blocks(context_tokens))) * block


def ring_blocks(window_tokens: int) -> int:
    """Blocks of the open ring: the window, with what a retrieval verifier may write beyond it, the block it begins in,
    and two that may still be on their way out."""
    return num_blocks(window_tokens + MOST_GAMMA_DRAFT + 1) + 3
