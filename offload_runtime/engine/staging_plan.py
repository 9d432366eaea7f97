"""What is page-locked and what is staged: pure arithmetic, before anything is loaded or after the system has refused to
lock more.

A KV cache on the host is locked first, since it is written as well as read, then layers of weights. So layers of the
cache are staged only where it does not fit beside the rings that staging takes, and then what is left locks weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.config import format_bytes, format_bytes_up
from offload_runtime.copy import FEWEST_PIECES, RingShape, ring_shape
from offload_runtime.engine.placing import layers_to_keep, streamed_blocks
from offload_runtime.engine.plans import ModelPlan
from offload_runtime.errors import BudgetError
from offload_runtime.kv import block_bytes
from offload_runtime.memory import PAGE_BYTES
from offload_runtime.planner import Placement

# Pieces on their way to the host at once, each moved on by a thread of its own.
_WRITEBACK_PIECE_BYTES = 16 << 20
_MOST_WRITEBACK_PIECES = 8
# Of what may be locked, the most that rings take from keys and values.
_RINGS_SHARE = 4


@dataclass(frozen=True)
class LockLimit:
    """Most page-locked memory (None: no limit), and whose limit it is, for messages."""

    nbytes: int | None
    name: str


@dataclass(frozen=True)
class StagingRings:
    """Page-locked memory that staging takes: what is read crosses `h2d`, keys and values on the way to the host cross
    `d2h` (None: they never go there)."""

    h2d: RingShape
    d2h: RingShape | None

    @property
    def writeback_bytes(self) -> int:
        """Of the way back."""
        return 0 if self.d2h is None else self.d2h.nbytes

    @property
    def nbytes(self) -> int:
        """Of both."""
        return self.h2d.nbytes + self.writeback_bytes


def arena_bytes(target: ModelPlan) -> int:
    """Host memory of one layer: whole pages."""
    return -(-target.layer_bytes // PAGE_BYTES) * PAGE_BYTES


def host_kv_layers(target: ModelPlan) -> tuple[int, ...]:
    """Layers whose keys and values are in host memory."""
    if not target.kv.on_host:
        return ()
    return tuple(layer for layer in range(target.config.num_layers) if layer not in target.kv.resident_layers)


def host_kv_bytes(target: ModelPlan) -> int:
    """Host memory of the keys and values of the whole context that are not on the device."""
    return len(host_kv_layers(target)) * target.host_kv_needs.layer_bytes


def staging_rings(target: ModelPlan, placement: Placement, available_bytes: int | None = None) -> StagingRings:
    """The rings that a placement is staged through, within `available_bytes` of page-locked memory or, at least, two
    pieces each; None for their full size."""
    on_host = bool(host_kv_layers(target))
    largest = max(target.layer_bytes if placement.num_streamed else 0, target.kv.piece_bytes if on_host else 0)
    if not on_host:
        return StagingRings(ring_shape(largest, available_bytes), None)
    # A prompt's blocks are written as they become full, piece by piece of the prompt.
    written_bytes = -(-target.shape.prefill_chunk_tokens // BLOCK_TOKENS) * block_bytes(target.config, target.dtype)
    piece_bytes = min(_WRITEBACK_PIECE_BYTES, -(-written_bytes // PAGE_BYTES) * PAGE_BYTES)
    d2h = RingShape(piece_bytes, _MOST_WRITEBACK_PIECES)
    if available_bytes is not None:
        left = available_bytes - ring_shape(largest, 0).nbytes
        d2h = replace(d2h, num_pieces=max(FEWEST_PIECES, min(_MOST_WRITEBACK_PIECES, left // piece_bytes)))
        available_bytes -= d2h.nbytes
    return StagingRings(ring_shape(largest, available_bytes), d2h)


def place_staged(target: ModelPlan, placement: Placement, limit_bytes: int | None, name: str) -> Placement:
    """Stage as many layers as page-locked memory is short of, those of a KV cache on the host last.

    Args:
        target: Its KV cache placed.
        placement: Of its layers.
        limit_bytes: Most page-locked memory; None for no limit.
        name: Whose limit it is, for the message.

    Raises:
        BudgetError: Not even what is staged through can be page-locked.
    """
    layer_bytes, kv_bytes = arena_bytes(target), host_kv_bytes(target)
    if limit_bytes is None or kv_bytes + placement.num_streamed * layer_bytes <= limit_bytes:
        return replace(placement, staged_layers=(), staging_bytes=0, staged_kv_layers=(), writeback_bytes=0)
    if staging_rings(target, placement, 0).nbytes > limit_bytes:
        raise _too_little(target, placement, limit_bytes, name)
    rings = staging_rings(target, placement, limit_bytes - kv_bytes)
    staged_kv: tuple[int, ...] = ()
    left_bytes = limit_bytes - rings.nbytes - kv_bytes
    if left_bytes < 0 or not placement.num_streamed:
        rings = staging_rings(target, placement, limit_bytes // _RINGS_SHARE)
        staged_kv, left_bytes = _stage_kv(target, limit_bytes - rings.nbytes)
    most = placement.num_streamed if staged_kv else placement.num_streamed - 1
    return replace(
        placement.with_pinned(min(left_bytes // layer_bytes, most)), staging_bytes=rings.h2d.nbytes,
        staged_kv_layers=staged_kv, writeback_bytes=rings.writeback_bytes,
    )  # fmt: skip


def least_pinned_bytes(target: ModelPlan, placement: Placement) -> int:
    """Page-locked memory without which a placement cannot be: all that it streams, or rings to stage that through."""
    all_bytes = host_kv_bytes(target) + placement.num_streamed * arena_bytes(target)
    return min(all_bytes, staging_rings(target, placement, 0).nbytes) if all_bytes else 0


def _stage_kv(target: ModelPlan, available_bytes: int) -> tuple[tuple[int, ...], int]:
    """Layers of the KV cache that are not locked within `available_bytes`, and what of these is left.

    Those that stream the most are locked first: of a sliding window a pass brings little, however long the text is.
    """
    layers, blocks = host_kv_layers(target), streamed_blocks(target)
    each_bytes = target.host_kv_needs.layer_bytes
    count = min(available_bytes // each_bytes, len(layers) - 1)
    kept = {layers[place] for place in layers_to_keep(count, [blocks[layer] for layer in layers])}
    return tuple(layer for layer in layers if layer not in kept), available_bytes - count * each_bytes


def _too_little(target: ModelPlan, placement: Placement, limit_bytes: int, name: str) -> BudgetError:
    rings = staging_rings(target, placement, 0)
    parts = [
        ("a ring to stage layers through", rings.h2d.nbytes),
        ("pieces to write the KV cache through", rings.writeback_bytes),
    ]
    listed = ", ".join(f"{part} {format_bytes(nbytes)}" for part, nbytes in parts if nbytes)
    ways = ["take --kv gpu"] if rings.d2h is not None else []
    ways += ["raise --vram or keep all layers resident"] if placement.num_streamed else []
    return BudgetError(
        f"{name} page-locks {format_bytes(limit_bytes)} at most, too little by "
        f"{format_bytes_up(rings.nbytes - limit_bytes)} ({listed}): "
        f"{', '.join([*ways, 'allow more with --pinned, or choose a smaller model'])}"
    )


def describe_staging(placement: Placement) -> str:
    """One phrase: how many of the streamed layers are not page-locked."""
    weights, kv = len(placement.staged_layers), len(placement.staged_kv_layers)
    whose = [f"{weights} of {placement.num_streamed} streamed layers"] if weights else []
    whose += [f"the KV cache of {kv} layers"] if kv else []
    are = "is" if not weights and kv else "are"
    return f"{' and '.join(whose)} {are} staged from pageable memory"
