"""What could not be page-locked: layers spread among those that could, keys and values, and the rings they cross."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from offload_runtime.cache import BlockLocking
from offload_runtime.errors import BudgetError
from offload_runtime.hardware.system import usable_cores
from offload_runtime.plan import ModelPlan, Placement, place_staged, with_staging_rings
from offload_runtime.sizes import format_bytes
from offload_runtime.stream import (
    FEWEST_PIECES,
    CopyEngine,
    HostArena,
    PageableMemory,
    Registrar,
    RingShape,
    StagingCopyEngine,
    StagingWriteEngine,
    staging_threads,
)
from offload_runtime.weights import HostWeights


@dataclass(frozen=True)
class StagedMemory:
    """Where everything is as it turned out, and the rings that what could not be page-locked crosses.

    `registrar` page-locks; None where the device's copies need no locked memory. What is staged crosses `h2d` to the
    device and `d2h` from there, both ways by `pageable`; without `h2d` nothing is staged, without `d2h` nothing that is
    written. These are the memory of the rings of the placement, page-locked as far as the system allows: at least two
    pieces of each.
    """

    placement: Placement
    registrar: Registrar | None = None
    h2d: HostArena | None = None
    d2h: HostArena | None = None
    pageable: PageableMemory = field(default_factory=PageableMemory)

    @property
    def rings(self) -> list[tuple[HostArena, RingShape]]:
        """Those that there are: memory and pieces."""
        rings = (self.h2d, self.placement.h2d_ring), (self.d2h, self.placement.d2h_ring)
        return [(arena, shape) for arena, shape in rings if arena is not None]

    @property
    def locking(self) -> BlockLocking:
        """How a KV cache on the host is page-locked as it grows."""
        if self.h2d is None:
            return BlockLocking(self.registrar)
        return BlockLocking(self.registrar, self.pageable, self.placement.staged_kv_layers)

    def to_device(self, engine: CopyEngine) -> CopyEngine:
        """The queue over `engine` that stages what is not page-locked; closing it closes `engine`."""
        return self._staged(StagingCopyEngine, engine, self.h2d, self.placement.h2d_ring)

    def to_host(self, engine: CopyEngine) -> CopyEngine:
        """The same for keys and values on their way to the host."""
        return self._staged(StagingWriteEngine, engine, self.d2h, self.placement.d2h_ring)

    def _staged(
        self, make: Callable[..., CopyEngine], engine: CopyEngine, arena: HostArena | None, shape: RingShape
    ) -> CopyEngine:
        if arena is None:
            return engine
        pieces = list(arena.buffer[: shape.nbytes].view(shape.num_pieces, -1))
        return make(engine, pieces, self.pageable, num_threads=staging_threads(usable_cores()))

    def close(self) -> None:
        """Give the rings' memory back. Nothing may be copying any more."""
        for arena, _ in self.rings:
            arena.close()


def locked_shares(weights: HostWeights, plan: ModelPlan) -> list[int | None]:
    """Return the page-locked memory to plan each card's share of the loaded layers by where the system has refused
    some, so that no card is left without; None where it has locked all that was planned."""
    cards = plan.cards
    if not _refused(weights, plan.placement):
        return [None] * len(cards)
    locked_bytes = sum(arena.pinned_bytes for arena in weights.layers.values())
    wanted = [card.host_bytes_of_layers(card.placement.streamed_layers) for card in cards]
    return [locked_bytes * nbytes // max(1, sum(wanted)) for nbytes in wanted]


def lock_layers(
    weights: HostWeights, plan: ModelPlan, registrar: Registrar | None, undo: ExitStack, *, locked_bytes: int | None
) -> StagedMemory:
    """Settle which of the loaded layers are page-locked, and make the rings for what of them is not, if anything.

    Loading has locked what was planned. Where the system refused some of it, the `locked_bytes` that it allowed are the
    limit to plan by again, and locks are moved so that locked and staged layers alternate. What `undo` does gives the
    rings back.

    Raises:
        BudgetError: The system does not even lock enough for the rings.
    """
    placement = plan.placement
    if registrar is None:
        return StagedMemory(placement)
    if locked_bytes is not None:
        # Where not even a layer was locked a ring may be: it is smaller.
        placement = place_staged(plan, max(locked_bytes, with_staging_rings(plan, 0).ring_bytes), "the system")
    elif not placement.staged_layers and not placement.staged_kv_layers:
        return StagedMemory(placement, registrar)
    h2d, d2h = HostArena(placement.h2d_ring.nbytes, name="the ring to stage layers through"), None
    if placement.d2h_ring.num_pieces:
        d2h = HostArena(placement.d2h_ring.nbytes, name="the pieces to write the KV cache through")
    memory = StagedMemory(placement, registrar, h2d, d2h)
    undo.callback(memory.close)
    _move_locks(weights, memory, registrar)
    # A lock that was given up and is refused now leaves a layer staged.
    staged = sorted({*placement.staged_layers, *_refused(weights, placement)})
    for index in staged:
        arena = weights.layers[index]
        memory.pageable.enter(arena.buffer[arena.pinned_bytes :])
    h2d_ring, d2h_ring = _locked_part(h2d, placement.h2d_ring), _locked_part(d2h, placement.d2h_ring)
    settled = replace(placement, staged_layers=tuple(staged), h2d_ring=h2d_ring, d2h_ring=d2h_ring)
    return replace(memory, placement=settled)


def _locked_part(arena: HostArena | None, shape: RingShape) -> RingShape:
    """What of a ring is page-locked."""
    return shape if arena is None else replace(shape, num_pieces=arena.pinned_bytes // shape.piece_bytes)


def _refused(weights: HostWeights, placement: Placement) -> list[int]:
    """Layers that were to be locked and are not."""
    wanted = set(placement.streamed_layers) - set(placement.staged_layers)
    return [index for index in sorted(wanted) if not weights.layers[index].pinned]


def _move_locks(weights: HostWeights, memory: StagedMemory, registrar: Registrar) -> None:
    """Lock what is to be locked and nothing else; without rings nothing can be staged, so they come first."""
    placement, rings = memory.placement, memory.rings
    for index in placement.staged_layers:
        weights.layers[index].unpin()
    kept = [index for index in placement.streamed_layers if weights.layers[index].pinned]
    remedy = "keep all layers resident with more --vram" + (" and take --kv gpu" if len(rings) > 1 else "")
    for arena, shape in rings:
        least_bytes = FEWEST_PIECES * shape.piece_bytes
        while arena.lock(registrar, shape.piece_bytes) and arena.pinned_bytes < least_bytes:
            if not kept:
                refused = f"the system refuses to page-lock even {format_bytes(least_bytes)} for {arena.name}"
                raise BudgetError(f"{refused}: raise the locked-memory limit (ulimit -l), or {remedy}")
            weights.layers[kept.pop()].unpin()
    for index in set(placement.streamed_layers) - set(placement.staged_layers):
        if weights.layers[index].lock(registrar):
            break
