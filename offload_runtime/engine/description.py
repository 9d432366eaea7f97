"""One line about a loaded runtime: what is resident, what is streamed and how, what is reserved."""

from __future__ import annotations

from offload_runtime.config import format_bytes
from offload_runtime.engine.assembly import LoadedModel
from offload_runtime.engine.levels import describe_draft_cache
from offload_runtime.engine.plans import ModelPlan, Plans
from offload_runtime.engine.staging_plan import describe_staging
from offload_runtime.memory import DeviceBudget


def describe_placement(model: LoadedModel, plans: Plans, budget: DeviceBudget) -> str:
    """One line: what is resident, what is streamed, through how many slots."""
    placement, streamed = model.placement, model.placement.num_streamed
    where = f"{len(placement.resident_layers)} of {placement.num_layers} layers resident"
    if streamed:
        nbytes = model.runner.streamer.bytes_per_pass
        where += f", {streamed} streamed ({format_bytes(nbytes)} a pass) through {placement.num_slots} slots"
    if placement.staged_layers or placement.staged_kv_layers:
        where += f"; {describe_staging(placement)}"
    limit = f" of {format_bytes(budget.limit_bytes)}" if budget.limit_bytes is not None else ""
    cache = describe_draft_cache(plans)
    return (
        f"{where}; {_describe_kv(plans.target)}; "
        f"{format_bytes(budget.reserved_bytes)}{limit} of device memory reserved{f'; {cache}' if cache else ''}"
    )


def _describe_kv(plan: ModelPlan) -> str:
    where = f"KV cache {format_bytes(plan.whole_kv_bytes)} for {plan.context_tokens} tokens"
    if not plan.kv.on_host:
        return where
    resident = f" but for {len(plan.kv.resident_layers)} layers" if plan.kv.resident_layers else ""
    return f"{where}, in host memory{resident} as it grows, {format_bytes(plan.kv_bytes)} of it on the device"
