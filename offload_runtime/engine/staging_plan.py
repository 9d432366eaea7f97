"""Which streamed layers are page-locked and which are staged: pure arithmetic, before anything is loaded or after the
system has refused to lock more."""

from __future__ import annotations

from dataclasses import replace

from offload_runtime.config import format_bytes, format_bytes_up
from offload_runtime.engine.plans import ModelPlan
from offload_runtime.errors import BudgetError
from offload_runtime.memory import PAGE_BYTES
from offload_runtime.planner import Placement
from offload_runtime.staging import ring_shape


def arena_bytes(target: ModelPlan) -> int:
    """Host memory of one layer: whole pages."""
    return -(-target.layer_bytes // PAGE_BYTES) * PAGE_BYTES


def host_kv_bytes(target: ModelPlan) -> int:
    """Host memory of the keys and values of the whole context that are not on the device."""
    if not target.kv.on_host:
        return 0
    return (target.config.num_layers - len(target.kv.resident_layers)) * target.host_kv_needs.layer_bytes


def place_staged(target: ModelPlan, placement: Placement, limit_bytes: int | None, name: str) -> Placement:
    """Stage as many of the streamed layers as page-locked memory is short of; a KV cache on the host comes first.

    Args:
        target: Its KV cache placed.
        placement: Of its layers.
        limit_bytes: Most page-locked memory; None for no limit.
        name: Whose limit it is, for the message.

    Raises:
        BudgetError: Not even a KV cache on the host and a ring to stage through can be page-locked.
    """
    layer_bytes, kv_bytes = arena_bytes(target), host_kv_bytes(target)
    if limit_bytes is None or kv_bytes + placement.num_streamed * layer_bytes <= limit_bytes:
        return replace(placement, staged_layers=(), staging_bytes=0)
    ring_bytes = ring_shape(target.layer_bytes, limit_bytes - kv_bytes).nbytes if placement.num_streamed else 0
    if kv_bytes + ring_bytes > limit_bytes:
        raise _too_little(target, limit_bytes, kv_bytes, ring_bytes, name)
    pinned = min((limit_bytes - kv_bytes - ring_bytes) // layer_bytes, placement.num_streamed - 1)
    return replace(placement.with_pinned(pinned), staging_bytes=ring_bytes)


def _too_little(target: ModelPlan, limit_bytes: int, kv_bytes: int, ring_bytes: int, name: str) -> BudgetError:
    parts = [("KV cache", kv_bytes), ("a ring to stage layers through", ring_bytes)]
    listed = ", ".join(f"{part} {format_bytes(nbytes)}" for part, nbytes in parts if nbytes)
    ways = [f"lower --context (now {target.context_tokens})", "take --kv gpu"] if kv_bytes else []
    ways += ["raise --vram or keep all layers resident"] if ring_bytes else []
    return BudgetError(
        f"{name} page-locks {format_bytes(limit_bytes)} at most, too little by "
        f"{format_bytes_up(kv_bytes + ring_bytes - limit_bytes)} ({listed}): "
        f"{', '.join([*ways, 'allow more with --pinned, or choose a smaller model'])}"
    )


def describe_staging(placement: Placement) -> str:
    """One phrase: how many of the streamed layers are not page-locked."""
    return f"{len(placement.staged_layers)} of {placement.num_streamed} streamed layers are staged from pageable memory"
