"""Where the target's layers and its KV cache go beside everything else, decided before anything large is read."""

from __future__ import annotations

from dataclasses import replace

from offload_runtime.engine.plans import ModelPlan, Plans
from offload_runtime.errors import BudgetError
from offload_runtime.memory import DeviceBudget
from offload_runtime.planner import MemoryNeeds, Placement, place_kv_layers, place_layers


def place(plans: Plans, budget: DeviceBudget, resident_layers: int | None, kv: str) -> tuple[Plans, Placement]:
    """Place the target's layers and its KV cache beside everything else, or say what is short.

    `auto` chooses the KV cache's place by the bytes that a pass at the full context brings over the link.

    Returns:
        The plans, their KV cache placed, and the placement of the layers.

    Raises:
        BudgetError: It does not fit; OptionError: more resident layers than there are.
    """
    on_device: tuple[Plans, Placement] | None = None
    if kv != "host":
        try:
            on_device = plans, plan_placement(plans, budget, resident_layers)
        except BudgetError:
            if kv == "gpu":
                raise
    if on_device is not None and (kv == "gpu" or on_device[1].num_streamed == 0):
        return on_device
    try:
        on_host = _place_on_host(plans, budget, resident_layers)
    except BudgetError:
        if on_device is None:
            raise
        return on_device
    if on_device is None or _link_bytes(*on_host) < _link_bytes(*on_device):
        return on_host
    return on_device


def _place_on_host(plans: Plans, budget: DeviceBudget, resident_layers: int | None) -> tuple[Plans, Placement]:
    target = plans.target.with_kv_on_host(plans.lent_bytes)
    placement = plan_placement(replace(plans, target=target), budget, resident_layers)
    spare_bytes = None
    if budget.limit_bytes is not None:
        taken = _needs(target, plans, budget).fixed_bytes
        held = placement.num_layers - placement.num_streamed + placement.num_slots
        spare_bytes = budget.limit_bytes - taken - held * target.layer_bytes
    layers = place_kv_layers(target.host_kv_needs, spare_bytes)
    target = replace(target, kv=replace(target.kv, resident_layers=layers))
    return replace(plans, target=target), placement


def _link_bytes(plans: Plans, placement: Placement) -> int:
    """Bytes of a pass at the full context."""
    target, kv = plans.target, plans.target.kv
    streamed = target.config.num_layers - len(kv.resident_layers) if kv.on_host else 0
    return placement.num_streamed * target.layer_bytes + streamed * target.host_kv_needs.layer_bytes


def plan_placement(plans: Plans, budget: DeviceBudget, resident_layers: int | None) -> Placement:
    """Place the target's layers beside everything else, or say what is short."""
    return place_layers(_needs(plans.target, plans, budget), budget.limit_bytes, resident_layers)


def reserve_workspace(plans: Plans, budget: DeviceBudget) -> None:
    """Enter the workspace in the ledger."""
    budget.reserve("workspace", _needs(plans.target, plans, budget).workspace_bytes)


def _needs(target: ModelPlan, plans: Plans, budget: DeviceBudget) -> MemoryNeeds:
    draft = plans.draft
    return MemoryNeeds(
        layer_bytes=target.layer_bytes,
        num_layers=target.config.num_layers,
        shared_bytes=target.shared_bytes,
        kv_bytes=target.kv_bytes,
        draft_bytes=(draft.all_bytes if draft is not None else 0) + plans.middle_bytes,
        # Draft and target take turns on one stream, so they share the allocator's blocks.
        workspace_bytes=max(target.workspace_bytes, draft.workspace_bytes if draft is not None else 0),
        context_bytes=budget.reserved_bytes,
    )
