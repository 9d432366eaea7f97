"""What of the host memory that a run streams from is page-locked, where the system does not lock all of it: the rest is
staged through rings.

A KV cache is page-locked first, since it is written as well as read, then layers of weights. So layers of the cache are
staged only where it does not fit beside the rings that staging takes, and then what is left locks weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.copy import FEWEST_PIECES, RingShape, ring_shape
from offload_runtime.errors import BudgetError
from offload_runtime.memory import PAGE_BYTES
from offload_runtime.plan.memory import NO_RING, MemoryPart, ModelPlan, Placement, RunPlan, listed
from offload_runtime.plan.placement import layers_to_keep, spread
from offload_runtime.sizes import format_bytes, format_bytes_up

# Pieces on their way to the host at once, each moved on by a thread of its own.
_WRITEBACK_PIECE_BYTES = 16 << 20
_MOST_WRITEBACK_PIECES = 8
# Of what may be locked, the most that rings take from keys and values.
_RINGS_SHARE = 4


def stage(plan: RunPlan) -> RunPlan:
    """Page-lock what a placed run streams as far as that is allowed; the rest is staged.

    Raises:
        BudgetError: Not even the rings that staging takes may be locked; says what would help.
    """
    limit_bytes, name = plan.limits.pinned_bytes, plan.limits.pinned_name
    if plan.num_cards == 1:
        return plan.with_placement(place_staged(plan.target, limit_bytes, name))
    # In proportion to what each card streams, beside what it stages through.
    cards = plan.target.cards
    needed = [card.host_kv_bytes + card.host_bytes_of_layers(card.placement.streamed_layers) for card in cards]
    limits: list[int | None] = [None] * len(cards)
    if limit_bytes is not None and sum(needed) > limit_bytes - plan.transfer_bytes:
        rings = [_least_ring_bytes(card) for card in cards]
        left_bytes = limit_bytes - plan.transfer_bytes - sum(rings)
        if left_bytes < 0:
            streaming = [with_staging_rings(card, 0) for card, nbytes in zip(cards, needed, strict=True) if nbytes]
            raise _cannot_stage(streaming, limit_bytes, name, transfer_bytes=plan.transfer_bytes)
        each = zip(rings, needed, strict=True)
        limits = [ring_bytes + left_bytes * nbytes // sum(needed) for ring_bytes, nbytes in each]
    return plan.with_placements(place_staged(card, limit, name) for card, limit in zip(cards, limits, strict=True))


def with_staging_rings(target: ModelPlan, available_bytes: int) -> Placement:
    """The placement of a target with the rings that it is staged through, within `available_bytes` of page-locked
    memory or, at least, two pieces each."""
    streamed, on_host = target.placement.streamed_layers, target.kv_layers_on_host
    largest = max(target.layer_bytes if streamed else 0, target.kv_piece_bytes if on_host else 0)
    d2h = NO_RING
    if on_host:
        # A prompt's blocks are written as they become full, piece by piece of the prompt.
        tokens = -(-target.chunk_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
        written_bytes = target.kv_bytes_of(target.largest_kv_layer, tokens)
        piece_bytes = min(_WRITEBACK_PIECE_BYTES, -(-written_bytes // PAGE_BYTES) * PAGE_BYTES)
        fitting = (available_bytes - ring_shape(largest, 0).nbytes) // piece_bytes
        d2h = RingShape(piece_bytes, max(FEWEST_PIECES, min(_MOST_WRITEBACK_PIECES, fitting)))
        available_bytes -= d2h.nbytes
    return replace(target.placement, h2d_ring=ring_shape(largest, available_bytes), d2h_ring=d2h)


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
        return replace(placement, staged_layers=(), staged_kv_layers=(), h2d_ring=NO_RING, d2h_ring=NO_RING)
    least = with_staging_rings(target, 0)
    if least.ring_bytes > limit_bytes:
        raise _cannot_stage([least], limit_bytes, name)
    ringed = with_staging_rings(target, limit_bytes - kv_bytes)
    staged_kv: tuple[int, ...] = ()
    left_bytes = limit_bytes - ringed.ring_bytes - kv_bytes
    if left_bytes < 0 or not placement.streamed_layers:
        ringed = with_staging_rings(target, limit_bytes // _RINGS_SHARE)
        staged_kv, left_bytes = _stage_kv(target, limit_bytes - ringed.ring_bytes)
    most = min(len(placement.streamed_layers) - (not staged_kv), max(0, left_bytes) // target.least_layer_bytes)
    # Spread, so that they and staged ones alternate.
    choices = ([streamed[index] for index in spread(count, len(streamed))] for count in range(most, -1, -1))
    pinned = next((layers for layers in choices if target.host_bytes_of_layers(layers) <= left_bytes), [])
    staged = tuple(index for index in streamed if index not in pinned)
    return replace(ringed, staged_layers=staged, staged_kv_layers=staged_kv)


def _cannot_stage(least: Sequence[Placement], limit_bytes: int, name: str, *, transfer_bytes: int = 0) -> BudgetError:
    """That not even the least rings of some cards can be page-locked, beside what rows pass through."""
    parts = [
        MemoryPart("a ring to stage layers through", sum(one.h2d_ring.nbytes for one in least)),
        MemoryPart("rows between cards", transfer_bytes),
    ]
    parts = [part for part in parts if part.nbytes]
    if any(one.d2h_ring.num_pieces for one in least):
        parts.append(MemoryPart("pieces to write the KV cache through", sum(one.d2h_ring.nbytes for one in least)))
    missing_bytes = transfer_bytes + sum(one.ring_bytes for one in least) - limit_bytes
    return BudgetError(
        f"{name} page-locks {format_bytes(limit_bytes)} at most, too little by "
        f"{format_bytes_up(missing_bytes)} ({listed(parts)})"
    )


def least_pinned_bytes(plan: RunPlan) -> int:
    """Page-locked memory without which a plan cannot be: all that it streams, or rings to stage that through. A
    retrieval verifier reads keys and values where they lie, so they cannot be staged."""
    target = plan.target
    if plan.has_verifier:
        return target.host_kv_bytes + plan.transfer_bytes
    all_bytes = target.host_kv_bytes + target.host_bytes_of_layers(target.placement.streamed_layers)
    return min(all_bytes, sum(map(_least_ring_bytes, target.cards))) + plan.transfer_bytes


def _least_ring_bytes(target: ModelPlan) -> int:
    """Page-locked memory that staging takes at least; none where nothing is streamed."""
    streams = target.kv_layers_on_host or target.placement.streamed_layers
    return with_staging_rings(target, 0).ring_bytes if streams else 0


def _stage_kv(target: ModelPlan, available_bytes: int) -> tuple[tuple[int, ...], int]:
    """Layers of the KV cache that are not locked within `available_bytes`, and what of these is left."""
    layers = target.kv_layers_on_host
    count = min(available_bytes // target.kv_layer_bytes, len(layers) - 1)
    kept = layers_to_keep(layers, count)
    return tuple(layer for layer in layers if layer not in kept), available_bytes - count * target.kv_layer_bytes
