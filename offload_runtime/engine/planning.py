"""A run planned from configuration files: by the code that loading goes by, so that plan and run cannot disagree."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from offload_runtime.config import SpeculationOptions, format_bytes, require_positive, size_option_down
from offload_runtime.engine.host_memory import check_ram, planned_within
from offload_runtime.engine.loading import check_proposals, check_tree_nodes
from offload_runtime.engine.plans import make_plans
from offload_runtime.engine.run_plan import RunPlan, describe_run
from offload_runtime.engine.staged_levels import LockLimit, place_and_stage
from offload_runtime.engine.tree_room import with_tree_room
from offload_runtime.errors import BudgetError, OptionError
from offload_runtime.machine_profile import MachineProfile
from offload_runtime.memory import LAZY_MODULE_BYTES, TYPICAL_CONTEXT_BYTES
from offload_runtime.planner import DEFAULT_GRAPH_LAUNCH_US, DEFAULT_STAGING_GBPS, MachineFigures
from offload_runtime.staging import MOST_THREADS
from offload_runtime.weights import ModelDescription, describe_model


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


def machine_figures(profile: MachineProfile) -> MachineFigures:
    """What the planner needs of a profile.

    Raises:
        OptionError: The profile has no GPU, or leaves out a figure that cannot be done without.
    """
    if not profile.gpus or profile.vram_bytes is None:
        raise OptionError(f"the profile {profile.name} has no GPU to plan for: choose another with --profile")
    missing = [name for name in ("link_gbps", "hbm_gbps") if getattr(profile, name) is None]
    if missing:
        raise OptionError(f"the profile {profile.name} does not know {', '.join(missing)}: add it, or measure again")
    assert profile.link_gbps is not None and profile.hbm_gbps is not None
    reserved_bytes = profile.vram_reserved_bytes
    launch_us = DEFAULT_GRAPH_LAUNCH_US if profile.graph_launch_us is None else profile.graph_launch_us
    return MachineFigures(
        profile.name, profile.vram_bytes,
        TYPICAL_CONTEXT_BYTES + LAZY_MODULE_BYTES if reserved_bytes is None else reserved_bytes,
        profile.link_gbps, profile.hbm_gbps, profile.ram_bytes, profile.tflops, profile.pinnable_bytes,
        launch_us, profile.gpus, _staging_gbps(profile),
    )  # fmt: skip


def _staging_gbps(profile: MachineProfile) -> float:
    """Copying within host memory while the link is busy: half of what threads read then, since it writes as much."""
    read_gbps = profile.host_gbps_while_link_busy
    if read_gbps is None and profile.host_gbps is not None and profile.link_gbps is not None:
        read_gbps = max(profile.host_gbps - profile.link_gbps, profile.host_gbps / 4)
    if read_gbps is None:
        return DEFAULT_STAGING_GBPS
    of_threads = [gbps for threads, gbps in profile.host_by_threads.items() if threads <= MOST_THREADS]
    return min([read_gbps, max(of_threads, default=read_gbps)]) / 2


def plan_run(request: PlanRequest, machine: MachineFigures) -> RunPlan:
    """Place everything on a machine.

    Raises:
        BudgetError: Device, host or page-locked memory is short; says of what, by how much, and what would help.
        OptionError, ContextLengthError: As `Runtime.load`.
    """
    kind, mode = request.draft_name if request.draft is None else "the draft", request.speculation.mode
    check_proposals(kind, mode)
    check_tree_nodes(request.tree_nodes, kind, mode)
    device, limits = torch.device("cuda"), _device_limits(request, machine)
    pinnable_bytes, name = machine.pinnable_bytes, machine.name
    if request.pinned_bytes is not None and (pinnable_bytes is None or request.pinned_bytes < pinnable_bytes):
        pinnable_bytes, name = request.pinned_bytes, "--pinned"

    def planned(context: int | str, nodes: int) -> RunPlan:
        plans = make_plans(
            request.target, request.draft, request.dtype, device, context=context,
            window=max(request.max_gamma, request.gamma or 0, nodes) + 1, kv=request.kv, options=request.speculation,
            batch=request.batch, tree_nodes=nodes or None,
        )  # fmt: skip
        placed = place_and_stage(
            plans, limits, LockLimit(pinnable_bytes, name), resident_layers=request.resident_layers, kv=request.kv,
            options=request.speculation,
        )  # fmt: skip
        return describe_run(placed, limits, device.type)

    ram_bytes = ram_limit_bytes(request, machine)

    def roomy(context: int | str) -> RunPlan:
        return with_tree_room(
            request.tree_nodes, lambda nodes: planned(context, nodes), draft=kind, mode=mode, ram_bytes=ram_bytes
        )

    plan = planned_within(ram_bytes, request.context, roomy)
    asked = ram_bytes == request.ram_bytes
    check_ram(
        plan, ram_bytes, "--ram" if asked else "the host memory",
        "allow more with --ram" if asked else f"add memory: {machine.name} has no more",
    )  # fmt: skip
    return plan


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
