"""Blocks of keys and values in host memory, growing with their sequences.

One extent holds consecutive blocks of one layer of one sequence, contiguous, so that a run of blocks is one copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from offload_runtime.config import format_bytes
from offload_runtime.errors import BudgetError
from offload_runtime.memory import HostArena, check_host_memory


@dataclass(frozen=True)
class Run:
    """Consecutive blocks of a sequence, contiguous in host memory in every layer."""

    sequence: int
    first_block: int
    num_blocks: int


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
        pin: Page-lock it, for full-speed copies on CUDA.
        step_blocks: Grow by at least so many blocks of a sequence.
    """

    def __init__(
        self, num_layers: int, block_bytes: int, *, batch: int, most_blocks: int, pin: bool, step_blocks: int = 4
    ) -> None:
        self.most_blocks = most_blocks
        self.block_bytes = block_bytes
        self._num_layers = num_layers
        self._pin = pin
        self._step_blocks = step_blocks
        self._extents: list[list[_Extent]] = [[] for _ in range(batch)]

    @property
    def nbytes(self) -> int:
        """Host memory that is held."""
        return sum(arena.nbytes for extents in self._extents for extent in extents for arena in extent.arenas)

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
                if self._pin:
                    arenas[-1].pin()
        except BudgetError as error:
            for arena in arenas:
                arena.close()
            raise BudgetError(
                f"the KV cache in host memory holds {format_bytes(self.nbytes)} and could not grow by "
                f"{format_bytes(nbytes * self._num_layers)} ({error}): shorten the prompt or close other programs"
            ) from error
        self._extents[sequence].append(_Extent(have, missing, tuple(arenas)))

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
        for extents in self._extents:
            for extent in extents:
                for arena in extent.arenas:
                    arena.close()
            extents.clear()
