"""A plan shown: tables of what is held where, what a pass costs and how fast tokens come; and plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from offload_runtime.config import format_bytes
from offload_runtime.hardware import MachineProfile
from offload_runtime.plan import (
    MachineFigures,
    MemoryPart,
    PassTime,
    Refusal,
    RunForecast,
    RunPlan,
    Upgrade,
    describe_draft_cache,
    describe_speculation,
    describe_staging,
    pass_time,
    prefill_time,
)

if TYPE_CHECKING:
    from rich.table import Table


def print_tables(tables: Sequence[Table | str], output: TextIO) -> None:
    """Print tables and lines one after the other."""
    from rich.console import Console

    console = Console(file=output, highlight=False, soft_wrap=True, markup=False, emoji=False)
    for item in tables:
        console.print(item)


def plan_tables(
    plan: RunPlan, predicted: RunForecast, gains: Sequence[Upgrade], *, machine: MachineProfile
) -> list[Table | str]:
    """Everything that is known of a plan."""
    tables: list[Table | str] = [f"machine: {machine.name} ({machine.source})", describe_speculation(plan)]
    if machine.gpus > 1:
        tables.append(f"this plan uses one of its {machine.gpus} cards: tensor parallelism is not built yet")
    tables += [*memory_tables(plan, ram_limit_bytes=plan.limits.ram_bytes), _time_table(plan, predicted)]
    if predicted.steps:
        tables.append(_steps_table(predicted))
    if plan.is_staged:
        tables.append(_staging_line(predicted.plain))
    tables += [_gain_line(gain) for gain in gains]
    return tables


def memory_tables(plan: RunPlan, *, ram_limit_bytes: int | None = None) -> list[Table | str]:
    """What is held where, part by part, and where each layer is."""
    from rich.table import Table

    target, placement = plan.target, plan.placement
    device_limit = plan.limits.device_bytes
    limit = "" if device_limit is None else f" of {format_bytes(device_limit)}"
    device = Table(title="device memory", title_justify="left", show_header=False, show_footer=True)
    device.add_column(footer="peak")
    device.add_column(footer=f"{format_bytes(plan.device_bytes)}{limit}", justify="right")
    for part in plan.device:
        device.add_row(part.name, format_bytes(part.nbytes))
    limit = "" if ram_limit_bytes is None else f" of {format_bytes(ram_limit_bytes)}"
    host = Table(title="host memory", title_justify="left", show_header=False, show_footer=True)
    host.add_column(footer="peak")
    host.add_column(footer=f"{format_bytes(plan.host_bytes)}{limit}", justify="right")
    host.add_column(footer=f"page-locked {format_bytes(plan.pinned_bytes)}")
    for part in plan.host:
        host.add_row(part.name, format_bytes(part.nbytes), "page-locked" if part.pinned else "")
    host.add_row("while weights are read", format_bytes(plan.loading_bytes), "before")
    place = f"KV cache of {target.batch} x {target.context_tokens} tokens"
    staging = [describe_staging(placement)] if plan.is_staged else []
    cache = describe_draft_cache(plan)
    return [
        *([cache] if cache else []),
        f"weights: {_layers(placement.resident_layers, placement.num_layers)}",
        *staging,
        f"{place}: {_layers(plan.resident_kv_layers, placement.num_layers)}",
        f"a pass behind {target.context_tokens - 1} tokens streams {format_bytes(plan.streamed_bytes)}",
        f"attention of prompts: {plan.prefill_attention}",
        device,
        host,
    ]


def speed_line(plan: RunPlan, machine: MachineFigures) -> str:
    """Predicted seconds of a pass over one token behind a full context, and of a prompt that fills it."""
    context = plan.target.context_tokens
    predicted = pass_time(plan, machine, length_tokens=context - 1, rows=1)
    prefill = prefill_time(plan, machine, context)
    return (
        f"predicted by the figures of {machine.name}, at {context} tokens: a pass of "
        f"{_duration(predicted.seconds)}, bound by {predicted.bound_by}, and {_duration(prefill.seconds)} to the "
        f"first token, bound by {prefill.bound_by}"
    )


def _layers(resident: Sequence[int], num_layers: int) -> str:
    if len(resident) == num_layers:
        return f"all {num_layers} layers on the device"
    streamed = [layer for layer in range(num_layers) if layer not in resident]
    if not resident:
        return f"all {num_layers} layers streamed"
    return (
        f"{len(resident)} of {num_layers} layers on the device ({_ranges(resident)}), {len(streamed)} streamed "
        f"({_ranges(streamed)})"
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, consecutive ones as `first-last`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _time_table(plan: RunPlan, predicted: RunForecast) -> Table:
    table = _figures_table(
        f"predicted at {predicted.context_tokens} tokens of context, in seconds",
        ("", "whole", "streamed", "link", "HBM", "arithmetic", "launch", "bound by"),
    )
    table.add_row("pass, 1 token", *_pass_cells(predicted.plain))
    if predicted.gamma:
        table.add_row(f"pass, {predicted.proposals + 1} tokens", *_pass_cells(predicted.verify))
    if plan.draft is not None:
        table.add_row("draft step", _seconds(predicted.draft_step_s))
    if predicted.verifier_step_s is not None:
        table.add_row("middle step", _seconds(predicted.verifier_step_s))
    prefill = predicted.prefill
    table.add_row(
        "to first token", _seconds(prefill.seconds), format_bytes(prefill.link_bytes), _seconds(prefill.link_s),
        "", _seconds(prefill.compute_s), "", prefill.bound_by,
    )  # fmt: skip
    return table


def _pass_cells(predicted: PassTime) -> list[str]:
    return [
        _seconds(predicted.seconds), format_bytes(predicted.bytes_streamed), _seconds(predicted.link_s),
        _seconds(predicted.hbm_s), _seconds(predicted.arithmetic_s), _seconds(predicted.launch_s), predicted.bound_by,
    ]  # fmt: skip


def _steps_table(predicted: RunForecast) -> Table:
    accepted = predicted.draft_acceptance
    draft = "" if accepted is None else f", {accepted} of the draft's accepted"
    grown = " in a tree (of a node's first child)" if predicted.tree_nodes else ""
    table = _figures_table(
        f"tokens/s by the target's acceptance of {predicted.proposals} proposals{grown}{draft}",
        ("accepted", "tokens a pass", "drafting", "hidden", "round", "tokens/s", "bound by"),
    )
    table.add_row("plain", "1", "", "", _seconds(predicted.plain.seconds), f"{predicted.plain_tok_per_s:.2f}",
                  predicted.plain.bound_by)  # fmt: skip
    for row in sorted((*predicted.steps, predicted.usual), key=lambda row: row.acceptance):
        usual = " (usual)" if row is predicted.usual else ""
        table.add_row(
            f"{row.acceptance:.2f}{usual}", f"{row.tokens:.2f}", _seconds(row.drafting_s), _seconds(row.hidden_s),
            _seconds(row.seconds), f"{row.tok_per_s:.2f}", row.bound_by,
        )  # fmt: skip
    return table


def _figures_table(title: str, columns: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    # As narrow as can be: a terminal of 80 columns must not cut figures off.
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in ("", "bound by") else "right", no_wrap=True)
    return table


def _staging_line(predicted: PassTime) -> str:
    return (
        f"staging takes {_duration(predicted.staging_s)} of a pass beside the link's {_duration(predicted.link_s)}: "
        f"{_duration(predicted.seconds)} instead of {_duration(predicted.unstaged_s)} if all could be page-locked"
    )


def _gain_line(gain: Upgrade) -> str:
    note = f" ({gain.note})" if gain.note else ""
    return (
        f"{gain.what}: {gain.before_tok_per_s:.2f} -> {gain.after_tok_per_s:.2f} tokens/s at the usual acceptance{note}"
    )


def refusal_lines(refusal: Refusal) -> list[str]:
    """What is short and the nearest settings that fit."""
    lines = [f"short of {name}: {format_bytes(nbytes)}" for name, nbytes in refusal.short_bytes.items()]
    if not refusal.suggestions:
        return [*lines, "no change of these settings fits"]
    lines.append("what fits instead:")
    for suggestion in refusal.suggestions:
        plan = suggestion.plan
        lines.append(
            f"  {suggestion.change}  (then {format_bytes(plan.device_bytes)} of device memory, "
            f"{format_bytes(plan.host_bytes)} of host memory, {format_bytes(plan.pinned_bytes)} page-locked)"
        )
    return lines


def _seconds(seconds: float) -> str:
    """Three digits; below a millisecond in milliseconds."""
    if seconds == 0:
        return "0"
    return f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.3f}" if seconds >= 0.01 else f"{1000 * seconds:.2f} ms"


def _duration(seconds: float) -> str:
    """The same with its unit, for a sentence."""
    figure = _seconds(seconds)
    return figure if figure.endswith("ms") else f"{figure} s"


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
