"""What could not be page-locked: layers spread among those that could, keys and values, and the rings they cross."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from offload_runtime.config import format_bytes
from offload_runtime.copy import FEWEST_PIECES, CopyEngine, StagingCopyEngine, StagingWriteEngine, staging_threads
from offload_runtime.errors import BudgetError
from offload_runtime.hardware.host_bench import usable_cores
from offload_runtime.memory import HostArena, PageableMemory, Registrar
from offload_runtime.plan import ModelPlan, Placement, place_staged, staging_rings
from offload_runtime.weights import HostWeights


@dataclass(frozen=True)
class Ring:
    """Memory of one way, page-locked as far as the system allows: at least two pieces of `piece_bytes`."""

    arena: HostArena
    piece_bytes: int

    @property
    def pieces(self) -> list[torch.Tensor]:
        """Its buffers: uint8 [piece_bytes] each, host, page-locked."""
        count = self.arena.pinned_bytes // self.piece_bytes
        return list(self.arena.buffer[: count * self.piece_bytes].view(count, -1))


@dataclass(frozen=True)
class StagedMemory:
    """Where everything is as it turned out, and the rings that what is staged crosses.

    `h2d` leads to the device, `d2h` from there (None: nothing is written). Both ways go by `pageable`.
    """

    placement: Placement
    h2d: Ring
    d2h: Ring | None
    pageable: PageableMemory = field(default_factory=PageableMemory)

    @property
    def rings(self) -> list[Ring]:
        """Those that there are."""
        return [self.h2d] if self.d2h is None else [self.h2d, self.d2h]

    @property
    def pinned_bytes(self) -> int:
        """Page-locked memory of the rings."""
        return sum(ring.arena.pinned_bytes for ring in self.rings)

    def close(self) -> None:
        """Give the rings' memory back. Nothing may be copying any more."""
        for ring in self.rings:
            ring.arena.close()


def lock_layers(weights: HostWeights, plan: ModelPlan, registrar: Registrar) -> StagedMemory | None:
    """Settle which of the loaded layers are page-locked; None when all are that should be and nothing is staged.

    Loading has locked what was planned. Where the system refused some of it, what it allowed is the limit to plan by
    again, and locks are moved so that locked and staged layers alternate.

    Raises:
        BudgetError: The system does not even lock enough for the rings.
    """
    placement = plan.placement
    refused = _refused(weights, placement)
    if not refused and not placement.staged_layers and not placement.staged_kv_layers:
        return None
    if refused:
        locked_bytes = sum(arena.pinned_bytes for arena in weights.layers)
        # Where not even a layer was locked a ring may be: it is smaller.
        limit_bytes = max(locked_bytes, staging_rings(plan, 0).nbytes)
        placement = place_staged(plan, limit_bytes, "the system")
    shapes, d2h = staging_rings(plan), None
    h2d = Ring(HostArena(placement.staging_bytes, name="the ring to stage layers through"), shapes.h2d.piece_bytes)
    if shapes.d2h.num_pieces:
        arena = HostArena(placement.writeback_bytes, name="the pieces to write the KV cache through")
        d2h = Ring(arena, shapes.d2h.piece_bytes)
    memory = StagedMemory(placement, h2d, d2h)
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
    settled = replace(
        placement, staged_layers=tuple(staged), staging_bytes=h2d.arena.pinned_bytes,
        writeback_bytes=0 if d2h is None else d2h.arena.pinned_bytes,
    )  # fmt: skip
    return replace(memory, placement=settled)


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


def stage_h2d(engine: CopyEngine, staged: StagedMemory) -> CopyEngine:
    """The queue over `engine` that stages what is not page-locked; closing it closes `engine`."""
    threads = staging_threads(usable_cores())
    return StagingCopyEngine(engine, staged.h2d.pieces, staged.pageable, num_threads=threads)


def stage_d2h(engine: CopyEngine, staged: StagedMemory | None) -> CopyEngine:
    """The queue over `engine` for keys and values on their way to the host; closing it closes `engine`."""
    if staged is None or staged.d2h is None:
        return engine
    threads = staging_threads(usable_cores())
    return StagingWriteEngine(engine, staged.d2h.pieces, staged.pageable, num_threads=threads)
