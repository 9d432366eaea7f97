"""Layers that could not be page-locked: spread among those that could, and staged through a page-locked ring."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from offload_runtime.config import format_bytes
from offload_runtime.copy_engine import CopyEngine
from offload_runtime.engine.plans import ModelPlan
from offload_runtime.engine.staging_plan import place_staged
from offload_runtime.errors import BudgetError
from offload_runtime.machine_profile.host_info import usable_cores
from offload_runtime.memory import HostArena
from offload_runtime.page_locking import Registrar
from offload_runtime.planner import Placement
from offload_runtime.staging import FEWEST_PIECES, StagingCopyEngine, ring_shape, staging_threads
from offload_runtime.weights import HostWeights


@dataclass(frozen=True)
class StagedLayers:
    """Where layers are as it turned out, and the ring that the staged ones of `placement` pass through."""

    placement: Placement
    ring: HostArena
    piece_bytes: int

    @property
    def pieces(self) -> list[torch.Tensor]:
        """The ring's buffers: uint8 [piece_bytes] each, host, page-locked."""
        count = self.placement.staging_bytes // self.piece_bytes
        return list(self.ring.buffer[: count * self.piece_bytes].view(count, -1))


def lock_layers(
    weights: HostWeights, plan: ModelPlan, placement: Placement, registrar: Registrar
) -> StagedLayers | None:
    """Settle which of the loaded layers are page-locked; None when all are that should be and nothing is staged.

    Loading has locked what was planned. Where the system refused some of it, what it allowed is the limit to plan by
    again, and locks are moved so that locked and staged layers alternate.

    Raises:
        BudgetError: The system does not lock enough for a KV cache on the host, or not even for a ring.
    """
    refused = _refused(weights, placement)
    if not refused and not placement.staged_layers:
        return None
    if refused:
        locked_bytes = sum(arena.pinned_bytes for arena in weights.layers)
        # Where not even a layer was locked a ring may be: it is smaller.
        limit_bytes = max(locked_bytes, ring_shape(plan.layer_bytes, 0).nbytes)
        placement = place_staged(plan, placement, limit_bytes, "the system")
    piece_bytes = ring_shape(plan.layer_bytes).piece_bytes
    ring = HostArena(placement.staging_bytes, name="the ring to stage layers through")
    try:
        _move_locks(weights, placement, ring, piece_bytes, registrar)
    except BaseException:
        ring.close()
        raise
    # A lock that was given up and is refused now leaves a layer staged.
    staged = sorted({*placement.staged_layers, *_refused(weights, placement)})
    placement = replace(placement, staged_layers=tuple(staged), staging_bytes=ring.pinned_bytes)
    return StagedLayers(placement, ring, piece_bytes)


def _refused(weights: HostWeights, placement: Placement) -> list[int]:
    """Layers that were to be locked and are not."""
    wanted = set(placement.streamed_layers) - set(placement.staged_layers)
    return [index for index in sorted(wanted) if not weights.layers[index].pinned]


def _move_locks(
    weights: HostWeights, placement: Placement, ring: HostArena, piece_bytes: int, registrar: Registrar
) -> None:
    """Lock what is to be locked and nothing else; without a ring nothing can be staged, so it comes first."""
    for index in placement.staged_layers:
        weights.layers[index].unpin()
    kept = [index for index in placement.streamed_layers if weights.layers[index].pinned]
    while not ring.pin_blocks(registrar, piece_bytes) and ring.pinned_bytes < FEWEST_PIECES * piece_bytes:
        if not kept:
            raise BudgetError(
                f"the system refuses to page-lock even {format_bytes(FEWEST_PIECES * piece_bytes)} for {ring.name}: "
                "raise the locked-memory limit (ulimit -l), or keep all layers resident with more --vram"
            )
        weights.layers[kept.pop()].unpin()
    for index in set(placement.streamed_layers) - set(placement.staged_layers):
        if not weights.layers[index].pin_blocks(registrar):
            break


def staged_engine(engine: CopyEngine, weights: HostWeights, staged: StagedLayers) -> CopyEngine:
    """The queue over `engine` that stages what is not page-locked; closing it closes `engine`."""
    layers = (weights.layers[index] for index in staged.placement.staged_layers)
    pageable = {arena.buffer.data_ptr(): arena.pinned_bytes for arena in layers}
    return StagingCopyEngine(engine, staged.pieces, pageable, num_threads=staging_threads(usable_cores()))
