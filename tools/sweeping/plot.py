"""Draws a sweep with matplotlib, which nothing else here needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from long_context.sweeps import SWEEPS

from offload_runtime.errors import OptionError, StorageError


def require_matplotlib() -> None:
    """Refuse before minutes are spent on measuring.

    Raises:
        OptionError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError("--plot needs matplotlib: pip install 'offload-runtime[plots]', or drop --plot")


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draw a report's rows: speed-up against the swept value and the bound as a line; of needles the agreement.

    Raises:
        OptionError: matplotlib is not installed; StorageError: the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    rows = report["rows"]
    if report["sweep"] == "needle":
        _draw_needle(axes, rows)
    else:
        _draw_speed(axes, rows)
    axes.set_xlabel(SWEEPS[report["sweep"]].axis)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # ValueError: an ending that is no picture's
        raise StorageError(f"{path} cannot be drawn ({error}): name another --plot, like figure.png") from error


def _draw_speed(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    places = range(len(rows))
    axes.plot(places, [row["bound_times_plain"] for row in rows], "-", color="tab:gray", label="bound")
    axes.plot(places, [row["times_plain"] for row in rows], "o", color="tab:blue", label="measured")
    axes.set_xticks(places, [row["value"] for row in rows])
    axes.set_ylabel("times the speed of plain decoding")


def _draw_needle(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    policies = list(rows[0]["policies"])
    width = 0.8 / len(policies)
    for number, policy in enumerate(policies):
        places = [place + (number - (len(policies) - 1) / 2) * width for place in range(len(rows))]
        axes.bar(places, [row["policies"][policy]["agreement"] for row in rows], width, label=policy)
    axes.set_xticks(range(len(rows)), [row["value"] for row in rows])
    axes.set_ylabel("agreement with the full cache on the answer")

FORMATS = ("png", "svg")
def picture_base(path): return path
