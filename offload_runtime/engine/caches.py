"""The KV cache of one model, as it was planned, and the memory that it is streamed through."""

from __future__ import annotations

import torch

from offload_runtime.copy_engine import make_copy_engine
from offload_runtime.engine.plans import ModelPlan
from offload_runtime.engine.staged_layers import StagedMemory, staged_writeback
from offload_runtime.kv_cache import BlockLocking, DeviceKVCache, HostKVCache
from offload_runtime.kv_cache.retrieved_draft import RetrievedDraftCache
from offload_runtime.kv_cache.windowed import StreamingDraftCache
from offload_runtime.memory import DeviceBudget
from offload_runtime.page_locking import CountedRegistrar


def make_cache(
    plan: ModelPlan, budget: DeviceBudget, name: str, *, registrar: CountedRegistrar | None,
    staged: StagedMemory | None,
) -> tuple[DeviceKVCache | HostKVCache | StreamingDraftCache | RetrievedDraftCache, list[torch.Tensor]]:  # fmt: skip
    """The KV cache, and the slots of its ring on the link (none when no layer of it is streamed).

    Args:
        plan: Of the model.
        budget: Ledger of the device.
        name: Of the model there.
        registrar: Who page-locks what of it is in host memory; None where that does nothing.
        staged: What is not to be locked, and the rings for it; None where nothing is staged.
    """
    if plan.streaming is not None:
        return StreamingDraftCache(
            plan.config, plan.dtype, sink_tokens=plan.streaming.sink_tokens,
            recent_tokens=plan.streaming.recent_tokens, window_tokens=plan.streaming.window_tokens, batch=plan.batch,
            budget=budget, name=f"{name}: KV cache", spare_slots=plan.tree_slots,
        ), []  # fmt: skip
    if plan.retrieval is not None:
        return RetrievedDraftCache(
            plan.config, plan.dtype, capacity_tokens=plan.context_tokens,
            budget_tokens=plan.retrieval.budget_tokens, chunk_size=plan.retrieval.chunk_size, batch=plan.batch,
            budget=budget, name=f"{name}: KV cache",
        ), []  # fmt: skip
    if not plan.kv.on_host:
        cache = DeviceKVCache(
            plan.config, plan.dtype, capacity_tokens=plan.context_tokens, batch=plan.batch, budget=budget,
            name=f"{name}: KV cache", spare_slots=plan.tree_slots,
        )  # fmt: skip
        return cache, []
    assert registrar is not None or budget.device.type == "cpu", "what a GPU copies from is page-locked or staged"
    slots: list[torch.Tensor] = []
    if len(plan.kv.resident_layers) < plan.config.num_layers:
        block = budget.allocate(f"{name}: KV ring", plan.kv.num_slots * plan.kv.piece_bytes)
        slots = list(block.view(plan.kv.num_slots, -1))
    locking = BlockLocking(registrar)
    if staged is not None:
        locking = BlockLocking(registrar, staged.pageable, staged.placement.staged_kv_layers)
    return HostKVCache(
        plan.config, plan.dtype, capacity_tokens=plan.context_tokens, batch=plan.batch,
        window_tokens=plan.window_tokens, piece_bytes=plan.kv.piece_bytes, budget=budget,
        writeback=staged_writeback(make_copy_engine(budget.device), staged), locking=locking,
        workspace_bytes=plan.prefill_workspace_bytes, resident_layers=plan.kv.resident_layers,
        name=f"{name}: KV cache",
    ), slots  # fmt: skip
