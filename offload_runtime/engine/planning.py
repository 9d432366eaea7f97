"""A run planned from configuration files: by the code that loading goes by, so that plan and run cannot disagree."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from offload_runtime.config import (
    SpeculationOptions,
    check_options,
    check_proposals,
    format_bytes,
    require_positive,
    size_option_down,
)
from offload_runtime.engine.candidates import Asked, find_candidates, least_pinned_bytes_of
from offload_runtime.engine.choice import HostMemory, choose
from offload_runtime.engine.host_memory import check_ram, planned_within
from offload_runtime.engine.making_plans import make_plans
from offload_runtime.engine.run_plan import RunPlan, describe_run
from offload_runtime.engine.speed import Speed
from offload_runtime.engine.staging_plan import LockLimit
from offload_runtime.engine.tree_room import with_tree_room
from offload_runtime.errors import BudgetError
from offload_runtime.planner import MachineFigures
from offload_runtime.weights import ModelDescription, describe_model

_DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class PlanRequest:
    """What `Runtime.load` would be asked for.

    `draft_name` is `ngram`, `none` or anything else for the model `draft`. `vram_bytes`, `ram_bytes` and `pinned_bytes`
    None allow all of the machine's. `tree_nodes` as of `Runtime.load`.
    """

    target: ModelDescription
    draft_name: str = "ngram"
    draft: ModelDescription | None = None
    dtype: str = "auto"
    context: int | str = "auto"
    kv: str = "auto"
    batch: int = 1
    resident_layers: int | None = None
    gamma: int | None = None
    max_gamma: int = 63
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    vram_bytes: int | None = None
    ram_bytes: int | None = None
    pinned_bytes: int | None = None
    tree_nodes: int | None = None

    def __post_init__(self) -> None:
        require_positive("batch", self.batch)
        assert (self.draft is not None) == (self.draft_name not in ("ngram", "none"))


@dataclass(frozen=True)
class PlannedDevice:
    """The memory of a GPU that need not be here."""

    limit_bytes: int | None
    reserved_bytes: int


def describe_pair(target: str, draft: str, mode: str) -> tuple[ModelDescription, ModelDescription | None]:
    """Read the configuration files of a target and of what may be a draft model.

    Args:
        target: As of `Runtime.load`.
        draft: The same.
        mode: Of `SpeculationOptions`.

    Raises:
        OptionError: One of the two is left out by the other; errors as of `describe_model`.
    """
    has_draft = draft not in ("ngram", "none")
    check_proposals("the draft" if has_draft else draft, mode)
    return describe_model(target), describe_model(draft) if has_draft else None


def plan_run(request: PlanRequest, machine: MachineFigures) -> RunPlan:
    """Place everything on a machine.

    Raises:
        BudgetError: Device, host or page-locked memory is short; says of what, by how much, and what would help.
        OptionError, ContextLengthError: As `Runtime.load`.
    """
    kind, mode = request.draft_name if request.draft is None else "the draft", request.speculation.mode
    check_options(
        kind, mode, tree_nodes=request.tree_nodes, gamma=request.gamma, max_gamma=request.max_gamma
    )  # fmt: skip
    ram_bytes, speed = ram_limit_bytes(request, machine), planned_speed(request, machine)

    def planned(context: int | str, nodes: int) -> RunPlan:
        return choose(_asked(request, machine, context, nodes), HostMemory(ram_bytes), speed)

    def roomy(context: int | str) -> RunPlan:
        return with_tree_room(request.tree_nodes, lambda nodes: planned(context, nodes), speed, ram_bytes=ram_bytes)

    plan = planned_within(ram_bytes, request.context, roomy)
    asked = ram_bytes == request.ram_bytes
    check_ram(
        plan, ram_bytes, "--ram" if asked else "the host memory",
        "allow more with --ram" if asked else f"add memory: {machine.name} has no more",
    )  # fmt: skip
    return plan


def planned_speed(request: PlanRequest, machine: MachineFigures) -> Speed:
    """What plans of a request are compared by."""
    proposes = request.draft_name != "none" and request.speculation.mode != "none"
    return Speed(machine, _DEVICE.type, proposes, request.gamma, request.max_gamma)


def least_pinned_bytes(request: PlanRequest, machine: MachineFigures) -> int:
    """Page-locked memory without which no plan of a request can be, whatever the machine has.

    Raises:
        BudgetError, OptionError, ContextLengthError: It cannot be in any case.
    """
    unlimited = replace(machine, pinnable_bytes=None)
    asked = _asked(replace(request, pinned_bytes=None), unlimited, request.context, request.tree_nodes or 0)
    return min(map(least_pinned_bytes_of, find_candidates(asked).all))


def least_host_bytes(request: PlanRequest, machine: MachineFigures) -> int:
    """Host memory without which no plan of a request can be on this machine, whatever it has of it.

    Raises:
        BudgetError, OptionError, ContextLengthError: It cannot be in any case.
    """
    asked = _asked(request, machine, request.context, request.tree_nodes or 0)
    return min(describe_run(way, asked.budget, _DEVICE.type).host_bytes for way in find_candidates(asked).all)


def _asked(request: PlanRequest, machine: MachineFigures, context: int | str, nodes: int) -> Asked:
    """What is to be placed on a machine, with room for trees of so many nodes."""
    pinnable_bytes, name = machine.pinnable_bytes, machine.name
    if request.pinned_bytes is not None and (pinnable_bytes is None or request.pinned_bytes < pinnable_bytes):
        pinnable_bytes, name = request.pinned_bytes, "--pinned"
    plans = make_plans(
        request.target, request.draft, request.dtype, _DEVICE, context=context,
        window=max(request.max_gamma, nodes) + 1, kv=request.kv, options=request.speculation, batch=request.batch,
        tree_nodes=nodes or None,
    )  # fmt: skip
    limits, locking = _device_limits(request, machine), LockLimit(pinnable_bytes, name)
    return Asked(plans, limits, locking, request.resident_layers, request.kv, request.speculation)


def _device_limits(request: PlanRequest, machine: MachineFigures) -> PlannedDevice:
    limit_bytes = machine.vram_bytes if request.vram_bytes is None else request.vram_bytes
    if limit_bytes > machine.vram_bytes:
        raise BudgetError(
            f"--vram {format_bytes(limit_bytes)} is more than the {format_bytes(machine.vram_bytes)} of a card of "
            f"{machine.name}: lower it to {size_option_down(machine.vram_bytes)}, or choose another --profile"
        )
    return PlannedDevice(limit_bytes, machine.vram_reserved_bytes)


def ram_limit_bytes(request: PlanRequest, machine: MachineFigures) -> int:
    """Host memory that may be used: what is asked for, of what there is."""
    return machine.ram_bytes if request.ram_bytes is None else min(request.ram_bytes, machine.ram_bytes)
