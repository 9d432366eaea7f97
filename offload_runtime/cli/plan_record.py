"""A plan as plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from offload_runtime.hardware import MachineProfile
from offload_runtime.plan import MemoryPart, PassTime, Refusal, RunForecast, RunPlan, Upgrade


def plan_record(
    plan: RunPlan, predicted: RunForecast, gains: Sequence[Upgrade], *, machine: MachineProfile, target: str
) -> dict[str, Any]:
    """What `--json` prints for a run that fits. Bytes, seconds and tokens, as the names say."""
    return {
        "fits": True,
        "target": target,
        "profile": machine.name,
        "context_tokens": predicted.context_tokens,
        "batch": plan.target.batch,
        **memory_record(plan),
        "gamma": predicted.gamma,
        "tree_nodes": predicted.tree_nodes,
        "pass": {"plain": _pass_record(predicted.plain), "verify": _pass_record(predicted.verify)},
        "prefill": asdict(predicted.prefill),
        "draft_step_s": predicted.draft_step_s,
        "middle_step_s": predicted.verifier_step_s,
        "plain_tok_per_s": predicted.plain_tok_per_s,
        "draft_acceptance": predicted.draft_acceptance,
        "usual": asdict(predicted.usual),
        "by_acceptance": [asdict(row) for row in predicted.steps],
        "upgrades": [asdict(gain) for gain in gains],
    }


def memory_record(plan: RunPlan) -> dict[str, Any]:
    """What a run holds, and where each layer is."""
    placement, layers = plan.placement, range(plan.placement.num_layers)
    return {
        "device_memory": {
            "limit_bytes": plan.limits.device_bytes, "peak_bytes": plan.device_bytes, "parts": _parts(plan.device)
        },
        "host_memory": {
            "peak_bytes": plan.host_bytes, "pinned_bytes": plan.pinned_bytes, "loading_bytes": plan.loading_bytes,
            "parts": _parts(plan.host),
        },
        "layers": {
            "weights_resident": list(placement.resident_layers),
            "weights_staged": list(placement.staged_layers),
            "weights_streamed": list(placement.streamed_layers),
            "kv_resident": list(plan.resident_kv_layers),
            "kv_staged": list(placement.staged_kv_layers),
            "kv_streamed": [layer for layer in layers if layer not in plan.resident_kv_layers],
            "ring_slots": placement.num_slots,
        },
        "prefill_attention": plan.prefill_attention,
        "draft_cache": None if plan.draft is None else plan.draft.cache,
        "middle_level": plan.verifier is not None,
        "why_no_middle_level": None if plan.verifier is not None else plan.reason or None,
    }  # fmt: skip


def refusal_record(refusal: Refusal, *, machine: MachineProfile) -> dict[str, Any]:
    """What `--json` prints for a run that does not fit."""
    return {
        "fits": False,
        "profile": machine.name,
        "problem": str(refusal.problem),
        "short_bytes": refusal.short_bytes,
        "nearest": [{"change": nearest.change, **memory_record(nearest.plan)} for nearest in refusal.suggestions],
    }


def _pass_record(time: PassTime) -> dict[str, Any]:
    names = ("bytes_streamed", "link_s", "hbm_s", "arithmetic_s", "compute_s", "launch_s", "seconds", "bound_by")
    return {name: getattr(time, name) for name in (*names, "staging_s")}


def _parts(parts: Sequence[MemoryPart]) -> list[dict[str, Any]]:
    return [asdict(part) for part in parts]
