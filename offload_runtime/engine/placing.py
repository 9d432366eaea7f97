"""Where the target's layers and its KV cache go beside everything else, decided before anything large is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from offload_runtime.engine.plans import ModelPlan, Plans
from offload_runtime.errors import BudgetError
from offload_runtime.kv import block_bytes
from offload_runtime.memory import DeviceBudget
from offload_runtime.planner import RING_SLOTS, MemoryNeeds, Placement, place_kv_layers, place_layers, spread


class Limits(Protocol):
    """What a device may give: a `DeviceBudget`, or the figures of a machine that is not here."""

    @property
    def limit_bytes(self) -> int | None:
        """Most that may be taken, everything included; None for no limit."""

    @property
    def reserved_bytes(self) -> int:
        """What is taken already."""


def placements(
    plans: Plans, budget: Limits, resident_layers: int | None, kv: str, *, whole_weights: bool = False
) -> list[tuple[Plans, Placement]]:
    """The ways to place the target's layers and its KV cache beside everything else.

    Whatever fits a budget is among those of a larger one as well, or something with more of it on the device. With
    `whole_weights` layers of weights come before keys and values wherever they are.

    Returns:
        The plans, their KV cache placed, and the placement of the layers; at least one.

    Raises:
        BudgetError: Nothing fits; OptionError: more resident layers than there are.
    """
    found: list[tuple[Plans, Placement]] = []
    for place in ("gpu", "host") if kv == "auto" else (kv,):
        try:
            if place == "gpu":
                found.append((plans, plan_placement(plans, budget, resident_layers)))
            else:
                found += _on_host(plans, budget, resident_layers, whole_weights)
        except BudgetError as error:
            refused = error
    if not found:
        raise refused
    return found


def _on_host(
    plans: Plans, budget: Limits, resident_layers: int | None, whole_weights: bool
) -> list[tuple[Plans, Placement]]:
    plans = replace(plans, target=plans.target.with_kv_on_host(plans.lent_bytes))
    most = plan_placement(plans, budget, resident_layers)
    ways = [most]
    if budget.limit_bytes is not None and resident_layers is None and not whole_weights:
        # A layer of keys and values that stays spares more of the link than it takes (its open blocks are there in any
        # case), so fewer resident layers of weights may be better.
        slots = most.num_slots or min(RING_SLOTS, most.num_layers)
        held = len(most.resident_layers) + most.num_slots
        for count in range(min(len(most.resident_layers), held - slots + 1) - 1, -1, -1):
            ways.append(Placement(spread(count, most.num_layers), slots, most.num_layers))
    spare_bytes = None
    if budget.limit_bytes is not None:
        spare_bytes = budget.limit_bytes - memory_needs(plans, budget).fixed_bytes
    return [(_with_kv_layers(plans, spare_bytes, way), way) for way in ways]


def _with_kv_layers(plans: Plans, spare_bytes: int | None, placement: Placement) -> Plans:
    """As many layers of the KV cache on the device as fit into `spare_bytes` beside a placement of the weights.

    None before the ring is whole: its last slot comes before anything that stays, or the memory that lets it in would
    take layers away from the device.
    """
    target = plans.target
    if placement.num_slots < min(RING_SLOTS, placement.num_streamed):
        return plans
    if spare_bytes is not None:
        spare_bytes -= (len(placement.resident_layers) + placement.num_slots) * target.layer_bytes
    count = len(place_kv_layers(target.host_kv_needs, spare_bytes))
    layers = layers_to_keep(count, streamed_blocks(target))
    return replace(plans, target=replace(target, kv=replace(target.kv, resident_layers=layers)))


def layers_to_keep(count: int, blocks: Sequence[int]) -> tuple[int, ...]:
    """`count` layers, those first that stream the most `blocks`, evenly spread among equals."""
    kept: list[int] = []
    for most in sorted(set(blocks), reverse=True):
        equals = [layer for layer, streamed in enumerate(blocks) if streamed == most]
        kept += [equals[index] for index in spread(min(count - len(kept), len(equals)), len(equals))]
    return tuple(sorted(kept))


def streamed_blocks(target: ModelPlan) -> list[int]:
    """Blocks of one sequence that each layer streams at the full context, when its cache is on the host."""
    length, windows = target.context_tokens - 1, target.config.layer_windows
    of_window = {reach: target.streamed_kv_blocks(reach, length) for reach in set(windows)}
    return [of_window[reach] for reach in windows]


def link_bytes(plans: Plans, placement: Placement) -> int:
    """Bytes that a pass at the full context brings over the link."""
    target, weight_bytes = plans.target, placement.num_streamed * plans.target.layer_bytes
    if not target.kv.on_host:
        return weight_bytes
    blocks = streamed_blocks(target)
    streamed = sum(blocks) - sum(blocks[layer] for layer in target.kv.resident_layers)
    return weight_bytes + target.batch * streamed * block_bytes(target.config, target.dtype)


def plan_placement(plans: Plans, budget: Limits, resident_layers: int | None) -> Placement:
    """Place the target's layers beside everything else, or say what is short."""
    return place_layers(memory_needs(plans, budget), budget.limit_bytes, resident_layers)


def reserve_workspace(plans: Plans, budget: DeviceBudget) -> None:
    """Enter the workspace and the CUDA graphs in the ledger."""
    needs = memory_needs(plans, budget)
    budget.reserve("workspace", needs.workspace_bytes)
    if needs.graph_bytes:
        budget.reserve("CUDA graphs", needs.graph_bytes)


def memory_needs(plans: Plans, budget: Limits) -> MemoryNeeds:
    """Bytes of the parts of everything that lives on the device."""
    target, draft = plans.target, plans.draft
    draft_workspace_bytes = draft.workspace_bytes if draft is not None else 0
    # Draft and target take turns on one stream and share the allocator's blocks, unless the draft runs beside a pass.
    shared = draft is None or not draft.tree_slots
    join = max if shared else int.__add__
    return MemoryNeeds(
        layer_bytes=target.layer_bytes,
        num_layers=target.config.num_layers,
        shared_bytes=target.shared_bytes,
        kv_bytes=target.kv_bytes,
        draft_bytes=draft.all_bytes if draft is not None else 0,
        middle_bytes=plans.middle_bytes,
        workspace_bytes=join(target.workspace_bytes, draft_workspace_bytes),
        context_bytes=budget.reserved_bytes,
        graph_bytes=plans.graph_bytes,
    )
