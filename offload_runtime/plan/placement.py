"""Where the target's layers go: on the device, or in host memory, page-locked or staged.

Fixed parts come first (embedding and head, KV cache, draft, workspace). What is left of the device holds the ring and
as many resident layers as fit. Of what is streamed a KV cache is page-locked first, since it is written as well as
read, then layers of weights. So layers of the cache are staged only where it does not fit beside the rings that staging
takes, and then what is left locks weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.config import format_bytes, format_bytes_up
from offload_runtime.copy import FEWEST_PIECES, RingShape, ring_shape
from offload_runtime.errors import BudgetError, OptionError
from offload_runtime.kv import block_bytes
from offload_runtime.memory import PAGE_BYTES
from offload_runtime.plan.memory import RunPlan
from offload_runtime.plan.models import ModelPlan, Placement, all_resident

# Two slots would stall on every layer boundary; the fourth and later ones only bridge longer pauses between passes.
RING_SLOTS = 3
# Pieces on their way to the host at once, each moved on by a thread of its own.
_WRITEBACK_PIECE_BYTES = 16 << 20
_MOST_WRITEBACK_PIECES = 8
# Of what may be locked, the most that rings take from keys and values.
_RINGS_SHARE = 4


def spread(count: int, num_layers: int) -> tuple[int, ...]:
    """`count` of `num_layers` indices, evenly spread: a resident layer computes while the link fills the ring."""
    return tuple(sorted({(2 * index + 1) * num_layers // (2 * count) for index in range(count)})) if count else ()


# --- on the device


def placements(plan: RunPlan, kv: str, *, whole_weights: bool = False) -> list[RunPlan]:
    """The ways to place the target's layers and its KV cache beside everything else.

    Whatever fits a budget is among those of a larger one as well, or something with more of it on the device. With
    `whole_weights` layers of weights come before keys and values wherever they are.

    Args:
        plan: Not placed yet.
        kv: Where the KV cache goes: `gpu`, `host`, or `auto` for both ways.
        whole_weights: See above.

    Returns:
        At least one.

    Raises:
        BudgetError: Nothing fits; OptionError: more resident layers are asked for than there are.
    """
    found: list[RunPlan] = []
    for place in ("gpu", "host") if kv == "auto" else (kv,):
        try:
            found += [place_layers(plan)] if place == "gpu" else _with_kv_on_host(plan, whole_weights)
        except BudgetError as error:
            refused = error
    if not found:
        raise refused
    return found


def place_layers(plan: RunPlan) -> RunPlan:
    """Choose resident layers and ring: as many layers stay as are asked for, or else as fit.

    Raises:
        BudgetError: Not even a ring of two slots fits, or the asked resident layers do not.
        OptionError: More resident layers were asked for than the model has.
    """
    layers, asked = plan.placement.num_layers, plan.request.resident_layers
    if asked is not None and not 0 <= asked <= layers:
        raise OptionError(f"resident layers must be between 0 and {layers}, the model's layers, not {asked}")
    available_bytes = plan.limits.device_bytes
    if available_bytes is None:
        return plan.with_placement(all_resident(layers) if asked is None else _evenly(asked, layers, RING_SLOTS))
    left_bytes = available_bytes - plan.fixed_bytes
    most = min(layers, max(0, left_bytes) // min(plan.target.layout.layer_bytes))
    counts = range(most, -1, -1) if asked is None else (asked,)
    for slots in (RING_SLOTS, 2):
        for resident in counts:
            placement = _evenly(resident, layers, slots)
            if plan.target.held_bytes(placement) <= left_bytes:
                return plan.with_placement(placement)
    raise _too_small(plan, available_bytes, asked or 0)


def _evenly(resident: int, layers: int, slots: int) -> Placement:
    return Placement(spread(resident, layers), min(slots, layers - resident), layers)


def _with_kv_on_host(plan: RunPlan, whole_weights: bool) -> list[RunPlan]:
    borrowable_bytes = 0 if plan.verifier is None else plan.verifier.borrowable_bytes
    target = replace(plan.target, cache="host", borrowable_bytes=borrowable_bytes)
    plan = place_layers(replace(plan, target=target))
    limit_bytes, placement = plan.limits.device_bytes, plan.placement
    ways = [placement]
    if limit_bytes is not None and plan.request.resident_layers is None and not whole_weights:
        # A layer of keys and values that stays spares more of the link than it takes (its open blocks are there in any
        # case), so fewer resident layers of weights may be better.
        slots = placement.num_slots or min(RING_SLOTS, placement.num_layers)
        resident = len(placement.resident_layers) - max(0, slots - placement.num_slots - 1)
        ways += [_evenly(count, placement.num_layers, slots) for count in range(resident - 1, -1, -1)]
    spare_bytes = None if limit_bytes is None else limit_bytes - plan.fixed_bytes
    return [plan.with_placement(_with_kv_layers(target, way, spare_bytes)) for way in ways]


def _with_kv_layers(target: ModelPlan, placement: Placement, spare_bytes: int | None) -> Placement:
    """As many layers of the KV cache on the device as fit into `spare_bytes` beside layers of weights; None for no
    limit, where all stay on the host, as asked.

    None before the ring is whole: its last slot comes before anything that stays, or the memory that lets it in would
    take layers away from the device.
    """
    if spare_bytes is None or placement.num_slots < min(RING_SLOTS, placement.num_streamed):
        return placement
    layers, each = placement.num_layers, target.kv_layer_bytes - target.open_kv_bytes
    spare_bytes -= target.held_bytes(placement)
    if layers * each - target.kv_ring_bytes - target.prefill_workspace_bytes <= spare_bytes:
        count = layers  # nothing is streamed, and what streaming takes is not needed
    else:
        count = layers if each <= 0 else max(0, min(layers - 1, spare_bytes // each))
    return replace(placement, resident_kv_layers=_layers_to_keep(count, target.kv_blocks_by_layer()))


def _layers_to_keep(count: int, blocks: Sequence[int]) -> tuple[int, ...]:
    """`count` layers, those first that stream the most `blocks`, evenly spread among equals."""
    kept: list[int] = []
    for most in sorted(set(blocks), reverse=True):
        equals = [layer for layer, streamed in enumerate(blocks) if streamed == most]
        kept += [equals[index] for index in spread(min(count - len(kept), len(equals)), len(equals))]
    return tuple(sorted(kept))


def _too_small(plan: RunPlan, available_bytes: int, resident: int) -> BudgetError:
    least = plan.with_placement(_evenly(resident, plan.placement.num_layers, 2))
    listed = ", ".join(f"{part.name} {format_bytes(part.nbytes)}" for part in least.device)
    ways = ["raise --vram", "lower --context"]
    if plan.verifier is not None:
        ways.append(f"lower --budget-tokens or use --speculation {'none' if plan.draft is None else 'chain'}")
    elif plan.draft is not None:
        ways.append("use a smaller draft or --draft ngram")
    if resident:
        ways.append("keep fewer layers resident")
    return BudgetError(
        f"the device budget of {format_bytes(available_bytes)} is too small by "
        f"{format_bytes(least.device_bytes - available_bytes)}: {format_bytes_up(least.device_bytes)} is the least "
        f"({listed}): {', '.join(ways)}"
    )


# --- in host memory


@dataclass(frozen=True)
class StagingRings:
    """Page-locked memory that staging takes: what is read crosses `h2d`, keys and values on the way to the host cross
    `d2h` (None: they never go there)."""

    h2d: RingShape
    d2h: RingShape | None

    @property
    def writeback_bytes(self) -> int:
        """Of the way to the host."""
        return 0 if self.d2h is None else self.d2h.nbytes

    @property
    def nbytes(self) -> int:
        """Of both."""
        return self.h2d.nbytes + self.writeback_bytes


def staging_rings(target: ModelPlan, available_bytes: int | None = None) -> StagingRings:
    """The rings that a target is staged through, within `available_bytes` of page-locked memory or, at least, two
    pieces each; None for their full size."""
    on_host = bool(target.kv_layers_on_host)
    largest = max(target.layer_bytes if target.placement.num_streamed else 0, target.kv_piece_bytes if on_host else 0)
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


def place_staged(target: ModelPlan, limit_bytes: int | None, name: str) -> Placement:
    """Stage as many layers as page-locked memory is short of, those of a KV cache on the host last.

    Args:
        target: Its layers placed on the device or the host.
        limit_bytes: Most page-locked memory; None for no limit.
        name: Whose limit it is, for the message.

    Raises:
        BudgetError: Not even what is staged through can be page-locked.
    """
    placement, kv_bytes = target.placement, target.host_kv_bytes
    streamed = placement.streamed_layers
    if limit_bytes is None or kv_bytes + target.host_bytes_of_layers(streamed) <= limit_bytes:
        return replace(placement, staged_layers=(), staging_bytes=0, staged_kv_layers=(), writeback_bytes=0)
    if staging_rings(target, 0).nbytes > limit_bytes:
        raise _too_little(target, limit_bytes, name)
    rings = staging_rings(target, limit_bytes - kv_bytes)
    staged_kv: tuple[int, ...] = ()
    left_bytes = limit_bytes - rings.nbytes - kv_bytes
    if left_bytes < 0 or not placement.num_streamed:
        rings = staging_rings(target, limit_bytes // _RINGS_SHARE)
        staged_kv, left_bytes = _stage_kv(target, limit_bytes - rings.nbytes)
    most = placement.num_streamed if staged_kv else placement.num_streamed - 1
    # Spread, so that they and staged ones alternate.
    choices = ([streamed[index] for index in spread(count, len(streamed))] for count in range(most, -1, -1))
    pinned = next((layers for layers in choices if target.host_bytes_of_layers(layers) <= left_bytes), [])
    return replace(
        placement, staged_layers=tuple(index for index in streamed if index not in pinned),
        staging_bytes=rings.h2d.nbytes, staged_kv_layers=staged_kv, writeback_bytes=rings.writeback_bytes,
    )  # fmt: skip


def least_pinned_bytes(plan: RunPlan) -> int:
    """Page-locked memory without which a plan cannot be: all that it streams, or rings to stage that through. A
    retrieval verifier reads keys and values where they lie, so they cannot be staged."""
    target = plan.target
    if plan.verifier is not None:
        return target.host_kv_bytes
    all_bytes = target.host_kv_bytes + target.host_bytes_of_layers(target.placement.streamed_layers)
    return min(all_bytes, staging_rings(target, 0).nbytes) if all_bytes else 0


def _stage_kv(target: ModelPlan, available_bytes: int) -> tuple[tuple[int, ...], int]:
    """Layers of the KV cache that are not locked within `available_bytes`, and what of these is left.

    Those that stream the most are locked first: of a sliding window a pass brings little, however long the text is.
    """
    layers, blocks = target.kv_layers_on_host, target.kv_blocks_by_layer()
    count = min(available_bytes // target.kv_layer_bytes, len(layers) - 1)
    kept = {layers[index] for index in _layers_to_keep(count, [blocks[layer] for layer in layers])}
    return tuple(layer for layer in layers if layer not in kept), available_bytes - count * target.kv_layer_bytes


def _too_little(target: ModelPlan, limit_bytes: int, name: str) -> BudgetError:
    rings = staging_rings(target, 0)
    parts = [
        ("a ring to stage layers through", rings.h2d.nbytes),
        ("pieces to write the KV cache through", rings.writeback_bytes),
    ]
    listed = ", ".join(f"{part} {format_bytes(nbytes)}" for part, nbytes in parts if nbytes)
    ways = ["take --kv gpu"] if rings.d2h is not None else []
    ways += ["raise --vram or keep all layers resident"] if target.placement.num_streamed else []
    return BudgetError(
        f"{name} page-locks {format_bytes(limit_bytes)} at most, too little by "
        f"{format_bytes_up(rings.nbytes - limit_bytes)} ({listed}): "
        f"{', '.join([*ways, 'allow more with --pinned, or choose a smaller model'])}"
    )
