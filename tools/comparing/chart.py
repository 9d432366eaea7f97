"""The comparison as a picture for a README: tokens per second of every system, and the bound of the link."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from comparing.systems import measured

from offload_runtime.errors import OptionError, StorageError

FORMATS = (".png", ".svg")


def require_matplotlib() -> None:
    """Refuse before minutes are spent on measuring.

    Raises:
        OptionError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise OptionError("the chart needs matplotlib: pip install 'offload-runtime[plots]', or --no-chart")


def draw(report: Mapping[str, Any], base: Path) -> list[Path]:
    """Draw a report twice, as PNG and as SVG beside each other.

    Args:
        report: As `compare.py` writes it.
        base: The files' name; an ending is replaced.

    Returns:
        The two files.

    Raises:
        StorageError: They cannot be written.
    """
    from matplotlib.figure import Figure

    found = measured(dict(report["results"]))
    speeds = {name: result["tok_per_s"] for name, result in found.items()}
    figure = Figure(figsize=(7.2, 1.5 + 0.42 * len(speeds)), layout="constrained")
    axes = figure.add_subplot()
    colours = ["tab:blue" if name.startswith("ours") else "tab:gray" for name in speeds]
    bars = axes.barh(list(speeds), list(speeds.values()), color=colours)
    # The line of the bound crosses some of the labels.
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    axes.bar_label(bars, [f"{speed:.3g}" for speed in speeds.values()], padding=4, bbox=white)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("tokens per second")
    axes.set_title(report["title"], fontsize="medium")
    bound = report["bound"]
    if bound is not None:
        label = f"bytes / link, one token a pass: {bound['tok_per_s']:.3g}"
        axes.axvline(bound["tok_per_s"], color="tab:red", linestyle="--", label=label)
        figure.legend(loc="outside lower center", frameon=False, fontsize="small")
    paths = [base.with_suffix(ending) for ending in FORMATS]
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        for path in paths:
            figure.savefig(path, dpi=150)
    except OSError as error:
        raise StorageError(f"{paths[0].with_suffix('')} cannot be drawn ({error}): name another --out") from error
    return paths
