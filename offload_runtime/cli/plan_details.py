"""What `--explain` adds to a plan: what is held where, part by part, what a pass costs, speed by acceptance; a picture.

`generate`, `chat` and `serve` show the same with `--explain` before they load.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Column, Table

from offload_runtime.cli import terminal
from offload_runtime.errors import OptionError
from offload_runtime.files import regular_file, write_atomically
from offload_runtime.hardware import MachineProfile
from offload_runtime.options import require
from offload_runtime.sizes import GB, format_bytes

if TYPE_CHECKING:
    from offload_runtime.plan import RunForecast, RunPlan


def plan_tables(plan: RunPlan, predicted: RunForecast, *, machine: MachineProfile) -> list[Table | str]:
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
    return tables


def memory_tables(plan: RunPlan) -> list[Table | str]:
    """What is held where, part by part, and where each layer is."""
    from offload_runtime.plan import describe_draft_cache, describe_staging, device_type_of, memory_name

    memory = memory_name(device_type_of(plan.request))
    target, placement = plan.target, plan.placement
    words = [
        describe_draft_cache(plan),
        f"weights: {_layers(placement.resident_layers, placement.num_layers)}; {target.layout.stored_as}",
        describe_staging(placement),
        f"KV cache of {target.batch} x {target.context_tokens} tokens: "
        f"{_layers(plan.resident_kv_layers, placement.num_layers)}",
        f"a pass behind {target.context_tokens - 1} tokens streams {format_bytes(plan.streamed_bytes)}",
    ]
    if plan.num_cards > 1:
        words += [f"card {card.target.card}: {_describe_card(card)}" for card in plan.cards]
    tables = [_device_table(memory, plan), _host_table(plan)]
    return [*filter(None, words), *tables]


def _describe_card(card: RunPlan) -> str:
    """One phrase: what a card has, and what it streams."""
    where = f"{len(card.target.layers)} layers, {len(card.placement.resident_layers)} of them on the device"
    if card.target.on_host:
        where += f" and the KV cache of {len(card.resident_kv_layers)}"
    return f"{where}; a pass streams {format_bytes(card.streamed_bytes)} to it ({_ranges(card.target.layers)})"


def _device_table(memory: str, plan: RunPlan) -> Table:
    """Device memory part by part, a column for each card."""
    held = [{part.name: part.nbytes for part in card.device} for card in plan.cards]
    names, several = [part.name for part in plan.device], plan.num_cards > 1
    title = f"{memory} of each card" if several else memory
    columns = [f"card {card}" for card in range(plan.num_cards)] if several else [""]
    rows = [(name, *(parts.get(name, 0) for parts in held)) for name in names]
    rows.append(("peak", *(card.device_bytes for card in plan.cards)))
    rows.append(("limit", *(card.limits.device_bytes or 0 for card in plan.cards)))
    return _bytes_table(title, columns, rows)


def _host_table(plan: RunPlan) -> Table:
    """Host memory part by part, and what of each is page-locked."""
    rows = [(part.name, part.nbytes, part.nbytes if part.pinned else 0) for part in plan.host]
    rows += [("peak", plan.host_bytes, plan.pinned_bytes), ("limit", plan.limits.ram_bytes, 0)]
    rows.append(("before, while weights are read", plan.loading_bytes, 0))
    return _bytes_table("host memory", ["", "page-locked"], rows)


def _bytes_table(title: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> Table:
    """Sizes by name, all in the unit of what is held at the most; what there is nothing of stays empty."""
    peak = max(nbytes for name, *sizes in rows for nbytes in sizes if name == "peak")
    unit, scale = next((unit, scale) for unit, scale in (("GB", GB), ("MB", 10**6), ("kB", 1000)) if peak >= scale)
    table = _figures_table(f"{title}, in {unit}", ["", *columns], headed=any(columns))
    for name, *sizes in rows:
        if name == "peak":
            table.add_section()
        if any(sizes):
            table.add_row(name, *(f"{nbytes / scale:.2f}" if nbytes else "" for nbytes in sizes))
    return table


def print_explanation(plan: RunPlan) -> None:
    """Print on stderr what a run holds where and, where the machine's figures are known, how long a pass and a prompt
    that fills the context take."""
    from offload_runtime.engine.load import planned_figures
    from offload_runtime.plan import forecast

    machine = planned_figures(plan)
    terminal.print_tables(memory_tables(plan), sys.stderr)
    if machine is None:
        terminal.status_line("nothing is predicted: no figures of this machine are known")
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
    title = f"predicted at {predicted.context_tokens} tokens of context, in ms"
    table = _figures_table(title, ("", "whole", "link", "HBM", "arithmetic", "launch", "bound by"))
    passes = [("pass, 1 token", predicted.plain)]
    passes += [(f"pass, {predicted.proposals + 1} tokens", predicted.verify)] if predicted.gamma else []
    for name, time in passes:
        parts = (time.seconds, time.link_s, time.hbm_s, time.arithmetic_s, time.launch_s)
        table.add_row(name, *map(_ms, parts), time.bound_by)
    if plan.draft is not None:
        table.add_row("draft step", _ms(predicted.draft_step_s))
    if predicted.verifier_step_s is not None:
        table.add_row("verifier step", _ms(predicted.verifier_step_s))
    prefill = predicted.prefill
    whole, link, compute = map(_ms, (prefill.seconds, prefill.link_s, prefill.compute_s))
    table.add_row("to first token", whole, link, "", compute, "", prefill.bound_by)
    return table


def _steps_table(predicted: RunForecast) -> Table:
    accepted = predicted.draft_acceptance
    draft = "" if accepted is None else f", {accepted} of the draft's accepted"
    grown = " in a tree (of a node's first child)" if predicted.tree_nodes else ""
    table = _figures_table(
        f"tokens/s by the target's acceptance of {predicted.proposals} proposals{grown}{draft}",
        ("accepted", "tokens a pass", "drafting, ms", "hidden, ms", "round, ms", "tokens/s", "bound by"),
    )
    plain = predicted.plain
    table.add_row("plain", "1.00", "", "", _ms(plain.seconds), f"{predicted.plain_tok_per_s:.2f}", plain.bound_by)
    rows = {row.acceptance: row for row in (*predicted.steps, predicted.usual)}  # the usual one may be among them
    for row in sorted(rows.values(), key=lambda row: row.acceptance):
        name = f"{row.acceptance:.2f}" + (" (usual)" if row is predicted.usual else "")
        times = map(_ms, (row.drafting_s, row.hidden_s, row.seconds))
        table.add_row(name, f"{row.tokens:.2f}", *times, f"{row.tok_per_s:.2f}", row.bound_by)
    return table


def _figures_table(title: str, columns: Sequence[str], *, headed: bool = True) -> Table:
    # As narrow as can be: a terminal of 80 columns must not cut figures off.
    headers = [
        Column(name, justify="left" if number == 0 or name == "bound by" else "right", no_wrap="," not in name)
        for number, name in enumerate(columns)
    ]
    return Table(
        *headers, title=f"\n{title}", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False,
        show_header=headed,
    )  # fmt: skip


def _ms(seconds: float) -> str:
    """Milliseconds for a column; nothing where it takes no time."""
    ms = 1000 * seconds
    return "" if not ms else f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _duration(seconds: float) -> str:
    """The same with its unit, for a sentence."""
    return f"{_ms(seconds)} ms"


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
    regular_file(path, remedy=_PLOT_ELSEWHERE)


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
    write_atomically(path, [picture.getvalue()], remedy=_PLOT_ELSEWHERE)


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
