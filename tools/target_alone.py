"""A target by itself, its layers where they are asked for: what benchmarks of passes run without a `Runtime`."""

from __future__ import annotations

from dataclasses import replace

import torch

from offload_runtime.copy import CopyEngine, CopyQueues, make_copy_engine
from offload_runtime.engine.load_model import LoadedModel, connect_model, reserve_workspace
from offload_runtime.hardware.host_info import read_host_info
from offload_runtime.memory import DeviceBudget
from offload_runtime.plan import DTYPE_NAMES, PlanRequest, common_figures, find_plan, limits_here
from offload_runtime.weights import CheckpointSource, load_weights


def load_target(
    source: CheckpointSource, dtype: torch.dtype, budget: DeviceBudget, *, context: int, window: int,
    resident_layers: int | None,
) -> tuple[LoadedModel, CopyEngine]:  # fmt: skip
    """The target with `resident_layers` of its layers on the device (None: as many as fit) and the others in the ring,
    its KV cache on the device, and the queue of its copies."""
    on_gpu = budget.device.type == "cuda"
    request = PlanRequest(
        source, "none", dtype=DTYPE_NAMES[dtype], context=context, kv="gpu", resident_layers=resident_layers,
        max_gamma=window - 1, device_type=budget.device.type,
    )  # fmt: skip
    limits = limits_here(None, None, read_host_info(), page_locks=on_gpu)
    limits = replace(limits, device_bytes=budget.limit_bytes, reserved_bytes=budget.reserved_bytes)
    plan = find_plan(request, common_figures(), limits)
    reserve_workspace(plan, budget)
    engine = make_copy_engine(budget.device)
    # As the runtime does: what stays on the device needs no page-locked memory.
    weights = load_weights(source, dtype, pin=plan.placement.streamed_layers if on_gpu else ())
    return connect_model(weights, plan.target, budget, CopyQueues(engine), name="target"), engine
