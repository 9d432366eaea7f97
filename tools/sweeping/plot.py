"""Draws a sweep with matplotlib, which nothing else here needs: the same rows give the same bytes."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sweeping.panels import axis_label, panels_of

from offload_runtime.errors import OptionError, StorageError

FORMATS = ("png", "svg")
# Ids in an SVG come from the salt instead of from chance. Text stays text: as outlines it takes four times the bytes.
_STYLE = {
    "svg.hashsalt": "offload-runtime sweeps", "svg.fonttype": "none", "font.size": 9.0,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
}  # fmt: skip
_PANEL_INCHES, _HEIGHT_INCHES, _HEADING_INCHES = 5.0, 4.7, 0.85
_LEAST_PANELS = 1.4  # in width, so that the heading has room
_TITLES = {
    "temperature": "Speed-up by temperature",
    "budget": "Speed-up by retrieved tokens",
    "chunk": "Speed-up by size of chunk",
    "context": "Speed-up by length of context",
    "gamma": "Speed-up by tokens proposed",
    "batch": "Speed-up of several sequences at once",
    "policy": "Speed-up by policy of the middle level",
    "needle": "A needle in a novel: agreement by policy",
    "window": "A pass by tokens in its window",
    "resident": "Decoding by layers that stay on the GPU",
}


def require_matplotlib() -> None:
    """Refuse before minutes are spent on measuring.

    Raises:
        OptionError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError("pictures need matplotlib: pip install 'offload-runtime[plots]', or drop --plot")


def picture_base(path: Path) -> Path:
    """The pictures' name without an ending.

    Raises:
        OptionError: There is no name, or the ending is that of something else.
    """
    if not path.name:
        raise OptionError(f"--plot {path} is a directory: name pictures in it, without an ending")
    ending = path.suffix[1:]
    if ending in FORMATS:
        return path.with_suffix("")
    if ending.isalpha():
        raise OptionError(f"{path}: pictures are drawn as {' and '.join(FORMATS)}: name --plot without an ending")
    return path


def draw(report: Mapping[str, Any], path: Path, *, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Draw a report's rows, a file beside the other for each format.

    Args:
        report: As a sweep writes it, with a row at least.
        path: Of the pictures; an ending `.png` or `.svg` is left away.
        formats: Of `FORMATS`.

    Returns:
        The files.

    Raises:
        OptionError: There are no rows, matplotlib is not installed, or the ending is another's; StorageError: a file
            cannot be written.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    base, sweep = picture_base(path), report["sweep"]
    if sweep not in _TITLES or not report["rows"]:
        raise OptionError(f"the sweep of {sweep} has no rows that could be drawn: measure some first")
    panels = panels_of(sweep, report["rows"])
    pictures = [base.with_name(f"{base.name}.{ending}") for ending in formats]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_PANEL_INCHES * max(len(panels), _LEAST_PANELS), _HEIGHT_INCHES))
        heading = _HEADING_INCHES / _HEIGHT_INCHES
        figure.set_layout_engine("constrained", rect=(0.005, 0.0, 0.99, 1 - heading), wspace=0.05)
        figure.text(0.01, 0.985, _TITLES[sweep], fontsize=12, va="top")
        figure.text(0.01, 0.925, "\n".join(_about(report)), fontsize=8, color="dimgray", va="top")
        for axes, (draw_panel, rows) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            draw_panel(axes, rows)
            axes.set_xlabel(axis_label(sweep, rows))
            axes.grid(axis="y", alpha=0.3)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False, fontsize="small")
        try:
            base.parent.mkdir(parents=True, exist_ok=True)
            for picture in pictures:
                metadata = {"Date": None, "Creator": None} if picture.suffix == ".svg" else {"Software": None}
                figure.savefig(picture, dpi=150, metadata=metadata)
        except OSError as error:
            raise StorageError(f"{base} cannot be drawn ({error}): name another place") from error
    return pictures


def _about(report: Mapping[str, Any]) -> list[str]:
    """Machine, model and commit, then what every row was measured under."""
    settings = report["settings"]
    return [
        f"{report['measured_on']}, commit {report['commit']}: {_model(settings)}",
        ", ".join(_conditions(report["sweep"], settings)),
    ]


def _given(settings: Mapping[str, str], name: str) -> bool:
    return settings.get(name, "None") not in ("None", "none", "")


def _model(settings: Mapping[str, str]) -> str:
    """The target in a few words."""
    small = Path(settings["source"]).stem if _given(settings, "source") else None
    if _given(settings, "target"):
        return f"{settings['target']}, {settings['dtype']}"
    if not _given(settings, "shape"):
        return f"{small}, {settings['dtype']}"
    layers = f" of {settings['layers']} layers" if _given(settings, "layers") else ""
    language = f" that speaks {small}" if small is not None else ", random weights"
    return f"{settings['shape']} shape{layers}{language}, {settings['dtype']}"


def _conditions(sweep: str, settings: Mapping[str, str]) -> list[str]:
    """What the rows have in common, but for what is varied."""
    found = []
    if sweep not in ("batch", "context", "window", "resident"):
        found.append(f"{int(settings['context']):,} tokens of context")
    if "kv" in settings:
        found.append("KV cache in host memory" if settings["kv"] == "host" else "KV cache on the GPU")
    if sweep == "window":
        layers = int(settings["resident_layers"])
        found.append(f"{layers or 'no'} {'layer stays' if layers == 1 else 'layers stay'} on the GPU")
    if sweep not in ("temperature", "window", "needle"):
        found.append(f"T = {settings['temperature']}")
    if sweep not in ("gamma", "window", "resident", "needle"):
        found.append(f"gamma {settings['gamma']}")
    if "starts" in settings and sweep != "needle":
        found.append(f"{settings['tokens']} tokens from each of {settings['starts']} places")
    if "prompt_tokens" in settings:
        found.append(f"behind {settings['prompt_tokens']} tokens")
    if _given(settings, "vram"):
        found.append(f"VRAM limited to {settings['vram']}")
    if _given(settings, "emulate"):
        found.append(f"playing {settings['emulate']}")
    return found
