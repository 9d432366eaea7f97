"""What could not be page-locked: layers spread among those that could, keys and values, and the rings they cross."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from offload_runtime.config import format_bytes
from offload_runtime.copy import (
    FEWEST_PIECES,
    CopyEngine,
    RingShape,
    StagingCopyEngine,
    StagingWriteEngine,
    staging_threads,
)
from offload_runtime.errors import BudgetError
from offload_runtime.hardware.host_bench import usable_cores
from offload_runtime.kv import BlockLocking
from offload_runtime.memory import HostArena, PageableMemory, Registrar
from offload_runtime.plan import ModelPlan, Placement, place_staged, with_staging_rings
from offload_runtime.weights import HostWeights


@dataclass(frozen=True)
class Ring:
    """Memory of one way, page-locked as far as the system allows: at least two pieces of `piece_bytes`."""

    arena: HostArena
    piece_bytes: int

    @property
    def shape(self) -> RingShape:
        """What of it is page-locked."""
        return RingShape(self.piece_bytes, self.arena.pinned_bytes // self.piece_bytes)

    @property
    def pieces(self) -> list[torch.Tensor]:
        """Its buffers: uint8 [piece_bytes] each, host, page-locked."""
        return list(self.arena.buffer[: self.shape.nbytes].view(self.shape.num_pieces, -1))


@dataclass(frozen=True)
class StagedMemory:
    """Where everything is as it turned out, and the rings that what could not be page-locked crosses.

    `registrar` page-locks; None where the device's copies need no locked memory. What is staged crosses `h2d` to the
    device and `d2h` from there, both ways by `pageable`; without `h2d` nothing is staged, without `d2h` nothing that is
    written.
    """

    placement: Placement
    registrar: Registrar | None = None
    h2d: Ring | None = None
    d2h: Ring | None = None
    pageable: PageableMemory = field(default_factory=PageableMemory)

    @property
    def rings(self) -> list[Ring]:
        """Those that there are."""
        return [ring for ring in (self.h2d, self.d2h) if ring is not None]

    @property
    def pinned_bytes(self) -> int:
        """Page-locked memory of the rings."""
        return sum(ring.arena.pinned_bytes for ring in self.rings)

    @property
    def locking(self) -> BlockLocking:
        """How a KV cache on the host is page-locked as it grows."""
        if self.h2d is None:
            return BlockLocking(self.registrar)
        return BlockLocking(self.registrar, self.pageable, self.placement.staged_kv_layers)

    def to_device(self, engine: CopyEngine) -> CopyEngine:
        """The queue over `engine` that stages what is not page-locked; closing it closes `engine`."""
        threads = staging_threads(usable_cores())
        return StagingCopyEngine(engine, self.h2d.pieces, self.pageable, num_threads=threads) if self.h2d else engine

    def to_host(self, engine: CopyEngine) -> CopyEngine:
        """The same for keys and values on their way to the host."""
        threads = staging_threads(usable_cores())
        return StagingWriteEngine(engine, self.d2h.pieces, self.pageable, num_threads=threads) if self.d2h else engine

    def close(self) -> None:
        """Give the rings' memory back. Nothing may be copying any more."""
        for ring in self.rings:
            ring.arena.close()


def lock_layers(weights: HostWeights, plan: ModelPlan, registrar: Registrar | None) -> StagedMemory:
    """Settle which of the loaded layers are page-locked, and make the rings for what of them is not, if anything.

    Loading has locked what was planned. Where the system refused some of it, what it allowed is the limit to plan by
    again, and locks are moved so that locked and staged layers alternate.

    Raises:
        BudgetError: The system does not even lock enough for the rings.
    """
    placement = plan.placement
    if registrar is None:
        return StagedMemory(placement)
    if _refused(weights, placement):
        locked_bytes = sum(arena.pinned_bytes for arena in weights.layers)
        # Where not even a layer was locked a ring may be: it is smaller.
        placement = place_staged(plan, max(locked_bytes, with_staging_rings(plan, 0).ring_bytes), "the system")
    elif not placement.staged_layers and not placement.staged_kv_layers:
        return StagedMemory(placement, registrar)
    shape, d2h = placement.h2d_ring, None
    h2d = Ring(HostArena(shape.nbytes, name="the ring to stage layers through"), shape.piece_bytes)
    if placement.d2h_ring.num_pieces:
        shape = placement.d2h_ring
        d2h = Ring(HostArena(shape.nbytes, name="the pieces to write the KV cache through"), shape.piece_bytes)
    memory = StagedMemory(placement, registrar, h2d, d2h)
    try:
        _move_locks(weights, placement, memory.rings, registrar)
    except BaseException:
        memory.close()
        raise
    # A lock that was given up and is refused now leaves a layer staged.
    staged = sorted({*placement.staged_layers, *_refused(weights, placement)})
    for index in staged:
        arena = weights.layers[index]
        memory.pageable.enter(arena.buffer[arena.pinned_bytes :])
    settled = replace(placement, staged_layers=tuple(staged), h2d_ring=h2d.shape)
    return replace(memory, placement=settled if d2h is None else replace(settled, d2h_ring=d2h.shape))


def _refused(weights: HostWeights, placement: Placement) -> list[int]:
    """Layers that were to be locked and are not."""
    wanted = set(placement.streamed_layers) - set(placement.staged_layers)
    return [index for index in sorted(wanted) if not weights.layers[index].pinned]


def _move_locks(weights: HostWeights, placement: Placement, rings: list[Ring], registrar: Registrar) -> None:
    """Lock what is to be locked and nothing else; without rings nothing can be staged, so they come first."""
    for index in placement.staged_layers:
        weights.layers[index].unpin()
    kept = [index for index in placement.streamed_layers if weights.layers[index].pinned]
    ways = "keep all layers resident with more --vram" + (" and take --kv gpu" if len(rings) > 1 else "")
    for ring in rings:
        arena, least_bytes = ring.arena, FEWEST_PIECES * ring.piece_bytes
        while not arena.pin_blocks(registrar, ring.piece_bytes) and arena.pinned_bytes < least_bytes:
            if not kept:
                raise BudgetError(
                    f"the system refuses to page-lock even {format_bytes(least_bytes)} for {arena.name}: "
                    f"raise the locked-memory limit (ulimit -l), or {ways}"
                )
            weights.layers[kept.pop()].unpin()
    for index in set(placement.streamed_layers) - set(placement.staged_layers):
        if not weights.layers[index].pin_blocks(registrar):
            break
