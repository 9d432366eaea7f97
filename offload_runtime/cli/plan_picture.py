"""A plan as a picture: stacked bars of what is held where, and of what a pass spends its time on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload_runtime.config import GB
from offload_runtime.errors import OptionError, StorageError
from offload_runtime.plan import MemoryPart, RunForecast, RunPlan


def require_plotting(path: Path) -> None:
    """Refuse a picture that could not be drawn, before anything is planned.

    Raises:
        OptionError: matplotlib is not installed, or the file's ending is none of its formats.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise OptionError("--plot needs matplotlib: pip install 'offload-runtime[plots]'") from error
    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise OptionError(f"--plot {path} must end in one of {', '.join(sorted(formats))}")


def draw_plan(plan: RunPlan, predicted: RunForecast, path: Path, *, title: str) -> None:
    """Draw the plan into a file; the ending chooses the format.

    Raises:
        StorageError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    FigureCanvasAgg(figure)
    memory, time = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_memory(memory, plan)
    _draw_time(time, predicted)
    figure.suptitle(f"{title}, {predicted.context_tokens} tokens of context")
    try:
        figure.savefig(path)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}; choose another place for --plot"
        ) from error


def _draw_memory(axes: Any, plan: RunPlan) -> None:
    _stack(axes, 0, plan.device)
    _stack(axes, 1, plan.host)
    if plan.limits.device_bytes is not None:
        limit_gb = plan.limits.device_bytes / GB
        axes.hlines(limit_gb, -0.4, 0.4, colors="black", linestyles="dashed", label="limit of device memory")
    axes.hlines(plan.host_bytes / GB, 0.6, 1.4, colors="black", linestyles="dotted", label="peak of host memory")
    axes.set_xticks([0, 1], ["device memory", "host memory (hatched: page-locked)"])
    axes.set_ylabel("GB")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7)  # beside the bars: it would hide what is high


def _stack(axes: Any, place: int, parts: Sequence[MemoryPart]) -> None:
    """One bar of parts on top of each other, each with its name where there is room for it."""
    top_bytes, total_bytes = 0, sum(part.nbytes for part in parts)
    for part in parts:
        axes.bar(
            place, part.nbytes / GB, bottom=top_bytes / GB, width=0.8, edgecolor="white",
            hatch="//" if part.pinned else None, label=f"{part.name}: {part.nbytes / GB:.1f} GB",
        )  # fmt: skip
        if part.nbytes > total_bytes / 30:
            middle = (top_bytes + part.nbytes / 2) / GB
            axes.text(place, middle, f"{part.name} {part.nbytes / GB:.1f}", ha="center", va="center", fontsize=8)
        top_bytes += part.nbytes


def _draw_time(axes: Any, predicted: RunForecast) -> None:
    """Copies beside compute: the higher of the two bars is the pass, drafting that nothing hides comes on top."""
    shown = predicted.verify if predicted.gamma else predicted.plain
    bars = [("link", "link", shown.link_s), ("compute", "HBM and arithmetic", shown.compute_s)]
    bars.append(("launches", "launches", shown.launch_s))
    if shown.staging_s:
        bars.append(("staging", "staging from pageable memory", shown.staging_s))
    for place, (_, label, seconds) in enumerate(bars):
        axes.bar(place, seconds, width=0.8, label=label)
    ticks = [tick for tick, _, _ in bars]
    if predicted.steps:
        row, place = predicted.steps[-1], len(ticks)
        axes.bar(place, row.hidden_s, width=0.8, label="drafting, hidden")
        axes.bar(place, row.drafting_s - row.hidden_s, bottom=row.hidden_s, width=0.8, label="drafting, exposed")
        ticks.append("drafting")
    axes.set_xticks(range(len(ticks)), ticks)
    axes.set_ylabel(f"seconds of a round, bound by {shown.bound_by}")
    axes.legend(fontsize=7)
