"""`offload-runtime plan`: what a run would take and how fast it would be, from configuration files alone.

Tables of what is held where, what a pass costs and how fast tokens come; plain values for JSON; and a picture.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Column, Table

from offload_runtime.cli import terminal
from offload_runtime.cli.options import PlanOptions
from offload_runtime.config import GB, format_bytes, regular_file, require, write_atomically
from offload_runtime.errors import OptionError
from offload_runtime.hardware import MachineProfile, list_profiles, load_profile, own_directory

if TYPE_CHECKING:
    from offload_runtime.plan import LayerShare, PassTime, Refusal, RunForecast, RunPlan, Upgrade


def plan(options: PlanOptions) -> None:
    """Say before anything is loaded what a run would hold where, how fast it would be, or what would fit instead."""
    config, picture = options.config, options.plot
    require(config.devices[0] != "cpu", "a plan is one of GPUs: drop --device cpu, or name some such as cuda:0,cuda:1")
    machine = choose_profile(options.profile)
    if picture is not None:
        require_plotting(picture)
    with terminal.only_json(options.as_json):
        from offload_runtime import plan as planning

        request = planning.describe_models(config)
        figures = planning.machine_figures(machine)
        outcome = planning.plan_or_refuse(request, figures)
    if isinstance(outcome, planning.Refusal):
        terminal.print_result(refusal_record(outcome, machine), refusal_lines(outcome), as_json=options.as_json)
        raise outcome.problem
    predicted = planning.forecast(outcome, figures)
    gains = planning.upgrades(outcome, predicted, figures)
    if picture is not None:
        draw_plan(outcome, predicted, picture, title=f"{config.target} on {machine.name}")
    record = plan_record(outcome, predicted, gains) | {"target": config.target, "profile": machine.name}
    terminal.print_result(record, plan_tables(outcome, predicted, gains, machine=machine), as_json=options.as_json)


def choose_profile(name: str | None) -> MachineProfile:
    """The machine that is named; else the one profile that the user has saved, if it has a GPU to plan for; else a
    common card. What was not named is said on stderr."""
    from offload_runtime.plan import COMMON_PROFILE

    if name is not None:
        return load_profile(name)
    own = [path for path in list_profiles().values() if path.parent == own_directory()]
    found = load_profile(own[0]) if len(own) == 1 else None
    if found is None or not found.gpus:
        found = load_profile(COMMON_PROFILE)
    how = "choose with --profile, or measure this machine with `offload-runtime profile --save NAME`"
    terminal.status_line(f"planning for {found.name}: {how}")
    return found


# --- tables and lines


def plan_tables(
    plan: RunPlan, predicted: RunForecast, gains: Sequence[Upgrade], *, machine: MachineProfile
) -> list[Table | str]:
    """Everything that is known of a plan."""
    from offload_runtime.plan import describe_speculation

    tables: list[Table | str] = [f"machine: {machine.name} ({machine.source})", describe_speculation(plan)]
    if machine.gpus > 1:
        used = "all" if plan.num_cards == machine.gpus else f"{plan.num_cards}"
        tables.append(f"this plan uses {used} of its {machine.gpus} cards")
    tables += [*memory_tables(plan), _time_table(plan, predicted)]
    if predicted.steps:
        tables.append(_steps_table(predicted))
    if plan.is_staged:
        time = predicted.plain
        locked = _duration(max(time.link_s, time.busy_s))
        cost = f"{_duration(time.seconds)} instead of {locked} if all could be page-locked"
        staging = f"staging takes {_duration(time.staging_s)} of a pass beside the link's {_duration(time.link_s)}"
        tables.append(f"{staging}: {cost}")
    for gain in gains:
        speeds = f"{gain.before_tok_per_s:.2f} -> {gain.after_tok_per_s:.2f} tokens/s at the usual acceptance"
        tables.append(f"{gain.what}: {speeds}" + (f" ({gain.note})" if gain.note else ""))
    return tables


def memory_tables(plan: RunPlan) -> list[Table | str]:
    """What is held where, part by part, and where each layer is."""
    from offload_runtime.plan import describe_draft_cache, describe_staging, device_type_of, memory_name

    memory = memory_name(device_type_of(plan.request))
    target, placement = plan.target, plan.placement
    device = [(part.name, format_bytes(part.nbytes)) for part in plan.device]
    host = [(part.name, format_bytes(part.nbytes), "page-locked" if part.pinned else "") for part in plan.host]
    host.append(("while weights are read", format_bytes(plan.loading_bytes), "before"))
    locked = f"page-locked {format_bytes(plan.pinned_bytes)}"
    words = [
        describe_draft_cache(plan),
        f"weights: {_layers(placement.resident_layers, placement.num_layers)}; {target.layout.stored_as}",
        describe_staging(placement),
        f"KV cache of {target.batch} x {target.context_tokens} tokens: "
        f"{_layers(plan.resident_kv_layers, placement.num_layers)}",
        f"a pass behind {target.context_tokens - 1} tokens streams {format_bytes(plan.streamed_bytes)}",
    ]
    if plan.num_cards > 1:
        shares = zip(plan.cards, target.shares, strict=True)
        words += [f"card {card.card}: {_share(card, share)}" for card, share in shares]
        devices = [_cards_table(f"{memory} of each card", plan)]
    else:
        devices = [_memory_table(memory, device, ("peak", _peak(plan.device_bytes, plan.limits.device_bytes)))]
    return [
        *filter(None, words),
        *devices,
        _memory_table("host memory", host, ("peak", _peak(plan.host_bytes, plan.limits.ram_bytes), locked)),
    ]


def _share(card: RunPlan, share: LayerShare) -> str:
    """One phrase: what a card has, and what it streams."""
    where = f"{len(share.layers)} layers, {len(card.placement.resident_layers)} of them on the device"
    if card.target.on_host:
        where += f" and the KV cache of {len(card.resident_kv_layers)}"
    return f"{where}; a pass streams {format_bytes(card.streamed_bytes)} to it ({_ranges(share.layers)})"


def _cards_table(title: str, plan: RunPlan) -> Table:
    """Device memory part by part, a column for each card."""
    held = [{part.name: part.nbytes for part in card.device} for card in plan.cards]
    peaks = [_peak(card.device_bytes, card.limits.device_bytes) for card in plan.cards]
    columns = [Column("", footer="peak")]
    columns += [Column(f"card {card}", footer=peak, justify="right") for card, peak in enumerate(peaks)]
    table = Table(*columns, title=title, title_justify="left", show_footer=True)
    for part in plan.device:
        sizes = (parts.get(part.name, 0) for parts in held)
        table.add_row(part.name, *(format_bytes(nbytes) if nbytes else "" for nbytes in sizes))
    return table


def _peak(held_bytes: int, limit_bytes: int | None) -> str:
    return format_bytes(held_bytes) + ("" if limit_bytes is None else f" of {format_bytes(limit_bytes)}")


def _memory_table(title: str, rows: Iterable[Sequence[str]], footer: Sequence[str]) -> Table:
    columns = (Column(footer=text, justify="right" if text == footer[1] else "left") for text in footer)
    table = Table(*columns, title=title, title_justify="left", show_header=False, show_footer=True)
    for row in rows:
        table.add_row(*row)
    return table


def print_explanation(plan: RunPlan) -> None:
    """Print on stderr what a run holds where and, where the machine's figures are known, how long a pass and a prompt
    that fills the context take."""
    from offload_runtime.engine.load import planned_figures
    from offload_runtime.plan import COMMON_PROFILE, forecast

    machine = planned_figures(plan)
    terminal.print_tables(memory_tables(plan), sys.stderr)
    if machine is None:
        unknown = "no profile of this machine is known: nothing is predicted, and what was left to be chosen was chosen"
        terminal.status_line(f"{unknown} by the figures of {COMMON_PROFILE}")
    else:
        predicted = _time_table(plan, forecast(plan, machine))
        terminal.print_tables([f"by the figures of {machine.name}:", predicted], sys.stderr)


def _layers(resident: Sequence[int], num_layers: int) -> str:
    if len(resident) == num_layers:
        return f"all {num_layers} layers on the device"
    if not resident:
        return f"all {num_layers} layers streamed"
    streamed = [layer for layer in range(num_layers) if layer not in resident]
    kept = f"{len(resident)} of {num_layers} layers on the device ({_ranges(resident)})"
    return f"{kept}, {len(streamed)} streamed ({_ranges(streamed)})"


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, consecutive ones as `first-last`."""
    runs = []
    for _, members in groupby(enumerate(numbers), key=lambda place: place[1] - place[0]):
        run = [number for _, number in members]
        runs.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
    return ", ".join(runs)


def _time_table(plan: RunPlan, predicted: RunForecast) -> Table:
    table = _figures_table(
        f"predicted at {predicted.context_tokens} tokens of context, in seconds",
        ("", "whole", "streamed", "link", "HBM", "arithmetic", "launch", "bound by"),
    )
    passes = [("pass, 1 token", predicted.plain)]
    passes += [(f"pass, {predicted.proposals + 1} tokens", predicted.verify)] if predicted.gamma else []
    for name, time in passes:
        seconds = (_seconds(part) for part in (time.link_s, time.hbm_s, time.arithmetic_s, time.launch_s))
        table.add_row(name, _seconds(time.seconds), format_bytes(time.bytes_streamed), *seconds, time.bound_by)
    if plan.draft is not None:
        table.add_row("draft step", _seconds(predicted.draft_step_s))
    if predicted.verifier_step_s is not None:
        table.add_row("verifier step", _seconds(predicted.verifier_step_s))
    prefill = predicted.prefill
    whole, link, compute = (_seconds(part) for part in (prefill.seconds, prefill.link_s, prefill.compute_s))
    table.add_row("to first token", whole, format_bytes(prefill.link_bytes), link, "", compute, "", prefill.bound_by)
    return table


def _steps_table(predicted: RunForecast) -> Table:
    accepted = predicted.draft_acceptance
    draft = "" if accepted is None else f", {accepted} of the draft's accepted"
    grown = " in a tree (of a node's first child)" if predicted.tree_nodes else ""
    table = _figures_table(
        f"tokens/s by the target's acceptance of {predicted.proposals} proposals{grown}{draft}",
        ("accepted", "tokens a pass", "drafting", "hidden", "round", "tokens/s", "bound by"),
    )
    plain = predicted.plain
    table.add_row("plain", "1", "", "", _seconds(plain.seconds), f"{predicted.plain_tok_per_s:.2f}", plain.bound_by)
    rows = {row.acceptance: row for row in (*predicted.steps, predicted.usual)}  # the usual one may be among them
    for row in sorted(rows.values(), key=lambda row: row.acceptance):
        name = f"{row.acceptance:.2f}" + (" (usual)" if row is predicted.usual else "")
        seconds = (_seconds(part) for part in (row.drafting_s, row.hidden_s, row.seconds))
        table.add_row(name, f"{row.tokens:.2f}", *seconds, f"{row.tok_per_s:.2f}", row.bound_by)
    return table


def _figures_table(title: str, columns: Sequence[str]) -> Table:
    # As narrow as can be: a terminal of 80 columns must not cut figures off.
    headers = (Column(name, justify="left" if name in ("", "bound by") else "right", no_wrap=True) for name in columns)
    return Table(*headers, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)


def refusal_lines(refusal: Refusal) -> list[str]:
    """What is short and the nearest settings that fit."""
    lines = [f"short of {name}: {format_bytes(nbytes)}" for name, nbytes in refusal.short_bytes.items()]
    lines.append("what fits instead:" if refusal.suggestions else "no change of these settings fits")
    for one in refusal.suggestions:
        device, host, pinned = map(format_bytes, (one.plan.device_bytes, one.plan.host_bytes, one.plan.pinned_bytes))
        lines.append(f"  {one.change}  (then {device} of device memory, {host} of host memory, {pinned} page-locked)")
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


# --- plain values for JSON: bytes, seconds and tokens, as the names say


def plan_record(plan: RunPlan, predicted: RunForecast, gains: Sequence[Upgrade]) -> dict[str, Any]:
    """What `--json` prints of a run that fits."""
    record = asdict(predicted)
    del record["plain"], record["verify"]
    record["pass"] = {"plain": _pass_record(predicted.plain), "verify": _pass_record(predicted.verify)}
    record["by_acceptance"] = record.pop("steps")
    upgrades = [asdict(gain) for gain in gains]
    return {"fits": True, **record, **memory_record(plan), "batch": plan.target.batch, "upgrades": upgrades}


def _pass_record(time: PassTime) -> dict[str, Any]:
    names = ("bytes_streamed", "link_s", "hbm_s", "arithmetic_s", "compute_s", "launch_s", "seconds", "bound_by")
    hops = ("hop_s",) if time.hop_s else ()  # of one card there are none
    return {name: getattr(time, name) for name in (*names, "staging_s", *hops)}


def memory_record(plan: RunPlan) -> dict[str, Any]:
    """What a run holds, and where each layer is."""
    placement, resident_kv = plan.placement, plan.resident_kv_layers
    device = {"limit_bytes": plan.limits.all_device_bytes, "peak_bytes": plan.device_bytes}
    host = {"peak_bytes": plan.host_bytes, "pinned_bytes": plan.pinned_bytes, "loading_bytes": plan.loading_bytes}
    layers = {
        "weights_resident": placement.resident_layers, "weights_staged": placement.staged_layers,
        "weights_streamed": placement.streamed_layers, "kv_resident": resident_kv,
        "kv_staged": placement.staged_kv_layers,
        "kv_streamed": [layer for layer in range(placement.num_layers) if layer not in resident_kv],
    }  # fmt: skip
    cards = [] if plan.num_cards == 1 else [_card_record(plan, card) for card in range(plan.num_cards)]
    return {
        "device_memory": {**device, "parts": [asdict(part) for part in plan.device]},
        **({"cards": cards} if cards else {}),
        "host_memory": {**host, "parts": [asdict(part) for part in plan.host]},
        "stored_bytes": plan.target.layout.bytes_by_kind,
        "layers": {**{name: list(which) for name, which in layers.items()}, "ring_slots": placement.num_slots},
        "draft_cache": None if plan.draft is None else plan.draft.cache,
        "retrieval_verifier": plan.has_verifier,
        "why_no_retrieval_verifier": None if plan.has_verifier else plan.reason or None,
    }


def _card_record(plan: RunPlan, number: int) -> dict[str, Any]:
    """What one of several cards holds, of which layers, and what a pass streams to it."""
    card, share = plan.cards[number], plan.target.shares[number]
    return {
        "layers": list(share.layers), "weights_resident": list(share.of_model(card.placement.resident_layers)),
        "kv_resident": list(share.of_model(card.resident_kv_layers)), "ring_slots": card.placement.num_slots,
        "streamed_bytes": card.streamed_bytes, "limit_bytes": card.limits.device_bytes,
        "peak_bytes": card.device_bytes, "parts": [asdict(part) for part in card.device],
    }  # fmt: skip


def refusal_record(refusal: Refusal, machine: MachineProfile) -> dict[str, Any]:
    """What `--json` prints for a run that does not fit."""
    nearest = [{"change": nearest.change, **memory_record(nearest.plan)} for nearest in refusal.suggestions]
    about = {"fits": False, "profile": machine.name, "problem": str(refusal.problem)}
    return {**about, "short_bytes": refusal.short_bytes, "nearest": nearest}


# --- the picture: stacked bars of what is held where, and of what a pass spends its time on


_PLOT_ELSEWHERE = "choose another place for --plot"


def require_plotting(path: Path) -> None:
    """Refuse a picture that could not be drawn, before anything is planned.

    Raises:
        OptionError: matplotlib is not installed, or the file's ending is none of its formats.
        StorageError: What is there is not a regular file.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise OptionError("--plot needs matplotlib: pip install 'offload-runtime[plots]'") from error
    formats = FigureCanvasAgg.get_supported_filetypes()
    fine = path.suffix.removeprefix(".").lower() in formats
    require(fine, f"--plot {path} must end in one of {', '.join(sorted(formats))}")
    regular_file(path, way_out=_PLOT_ELSEWHERE)


def draw_plan(plan: RunPlan, predicted: RunForecast, path: Path, *, title: str) -> None:
    """Draw the plan into a file; the ending chooses the format.

    Raises:
        StorageError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    memory, time = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_memory(memory, plan)
    _draw_time(time, predicted)
    figure.suptitle(f"{title}, {predicted.context_tokens} tokens of context")
    picture = BytesIO()
    figure.savefig(picture, format=path.suffix.removeprefix(".").lower())
    write_atomically(path, [picture.getvalue()], way_out=_PLOT_ELSEWHERE)


def _draw_memory(axes: Any, plan: RunPlan) -> None:
    """The parts on top of each other; the legend names them."""
    for place, parts in enumerate((plan.device, plan.host)):
        top_gb = 0.0
        for part in parts:
            size_gb, hatch = part.nbytes / GB, "//" if part.pinned else None
            label = f"{part.name}: {size_gb:.3g} GB"
            axes.bar(place, size_gb, bottom=top_gb, edgecolor="white", hatch=hatch, label=label)
            top_gb += size_gb
    cards, limit_bytes = plan.limits.num_cards, plan.limits.all_device_bytes
    if limit_bytes is not None:
        limit_gb = limit_bytes / GB
        axes.hlines(limit_gb, -0.4, 0.4, colors="black", linestyles="dashed", label="limit of device memory")
    axes.hlines(plan.host_bytes / GB, 0.6, 1.4, colors="black", linestyles="dotted", label="peak of host memory")
    device = "device memory" if cards == 1 else f"device memory of {cards} cards"
    axes.set_xticks([0, 1], [device, "host memory (hatched: page-locked)"])
    axes.set_ylabel("GB")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7)  # beside the bars: it would hide what is high


def _draw_time(axes: Any, predicted: RunForecast) -> None:
    """Copies beside compute: the highest of these bars is the pass, drafting that nothing hides comes on top."""
    shown = predicted.verify if predicted.gamma else predicted.plain
    seconds = {"link": shown.link_s, "HBM and\narithmetic": shown.compute_s, "launches": shown.launch_s}
    if shown.staging_s:
        seconds["staging from\npageable memory"] = shown.staging_s
    if predicted.steps:
        row = predicted.steps[-1]
        seconds |= {"drafting,\nhidden": row.hidden_s, "drafting,\nexposed": row.drafting_s - row.hidden_s}
    axes.bar_label(axes.bar(list(seconds), list(seconds.values())), fmt="%.3g s")
    axes.tick_params(axis="x", labelsize=7)
    axes.set_ylabel(f"seconds of a round, bound by {shown.bound_by}")
