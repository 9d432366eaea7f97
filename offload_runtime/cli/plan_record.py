"""A plan as plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from offload_runtime.engine.forecast import RunForecast, Upgrade
from offload_runtime.engine.nearest import Refusal
from offload_runtime.engine.run_plan import MemoryPart, RunPlan
from offload_runtime.engine.speed import draft_level
from offload_runtime.hardware import MachineProfile


def plan_record(
    plan: RunPlan, predicted: RunForecast, gains: Sequence[Upgrade], *, machine: MachineProfile, target: str
) -> dict[str, Any]:
    """What `--json` prints for a run that fits. Bytes, seconds and tokens, as the names say."""
    model = plan.placed.plans.target
    return {
        "fits": True,
        "target": target,
        "profile": machine.name,
        "context_tokens": predicted.context_tokens,
        "batch": model.batch,
        **memory_record(plan),
        "gamma": predicted.gamma,
        "tree_nodes": predicted.tree_nodes,
        "pass": {"plain": asdict(predicted.plain), "verify": asdict(predicted.verify)},
        "prefill": asdict(predicted.prefill),
        "draft_step_s": predicted.draft_step_s,
        "middle_step_s": predicted.middle_step_s,
        "plain_tok_per_s": predicted.plain_tok_per_s,
        "draft_acceptance": predicted.draft_acceptance,
        "usual": asdict(predicted.usual),
        "by_acceptance": [asdict(row) for row in predicted.rounds],
        "upgrades": [asdict(gain) for gain in gains],
    }


def memory_record(plan: RunPlan) -> dict[str, Any]:
    """What a run holds, and where each layer is."""
    placed, layers = plan.placed, range(plan.placed.placement.num_layers)
    return {
        "device_memory": {
            "limit_bytes": plan.device_limit_bytes, "peak_bytes": plan.device_bytes, "parts": _parts(plan.device)
        },
        "host_memory": {
            "peak_bytes": plan.host_bytes, "pinned_bytes": plan.pinned_bytes, "loading_bytes": plan.loading_bytes,
            "parts": _parts(plan.host),
        },
        "layers": {
            "weights_resident": list(plan.resident_weight_layers),
            "weights_staged": list(plan.staged_weight_layers),
            "weights_streamed": [layer for layer in layers if layer not in plan.resident_weight_layers],
            "kv_resident": list(plan.resident_kv_layers),
            "kv_staged": list(plan.staged_kv_layers),
            "kv_streamed": [layer for layer in layers if layer not in plan.resident_kv_layers],
            "ring_slots": placed.placement.num_slots,
        },
        "prefill_attention": plan.prefill_attention,
        "draft_cache": None if placed.plans.draft is None else draft_level(placed.plans.draft),
        "middle_level": placed.middle is not None,
        "why_no_middle_level": None if placed.middle is not None else placed.reason or None,
    }  # fmt: skip


def refusal_record(refusal: Refusal, *, machine: MachineProfile) -> dict[str, Any]:
    """What `--json` prints for a run that does not fit."""
    return {
        "fits": False,
        "profile": machine.name,
        "problem": str(refusal.problem),
        "short_bytes": refusal.short_bytes,
        "nearest": [{"change": proposal.change, **memory_record(proposal.plan)} for proposal in refusal.proposals],
    }


def _parts(parts: Sequence[MemoryPart]) -> list[dict[str, Any]]:
    return [asdict(part) for part in parts]
