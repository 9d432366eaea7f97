"""Draws a sweep with matplotlib, which nothing else here needs: measured points beside their bound as a line, and what
the speed comes from. The same rows give the same bytes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from long_context.rows import SWEEPS as LONG_CONTEXT
from sweeping.family import tokens
from sweeping.streamed_weights import SWEEPS as STREAMED_WEIGHTS

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
    "policy": "Speed-up by policy of the retrieval verifier",
    "needle": "A needle in a novel: agreement by policy",
    "window": "A pass by tokens in its window",
    "resident": "Decoding by layers that stay on the GPU",
}
Rows = Sequence[Mapping[str, Any]]
# Draws rows on axes; beside it the rows that it is about.
Panel = tuple[Callable[[Any, Rows], None], Rows]

_MEASURED, _BOUND, _PLAIN = "tab:blue", "tab:red", "tab:gray"
_LEVELS = {
    "acceptance_judged": ("by the target, of proposals behind accepted ones", "tab:green"),
    "draft_acceptance": ("by the retrieval verifier, of all that the draft proposes", "tab:purple"),
}  # fmt: skip
_POLICY_COLOURS = {"retrieval": "tab:green", "topk": "tab:orange", "streaming": "tab:purple"}
# Measured figures that are further apart are on a logarithmic scale.
_LOGARITHMIC_FROM = 20.0
_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}


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


def panels_of(sweep: str, rows: Rows) -> list[Panel]:
    """The panels of a sweep's picture, from left to right."""
    if sweep == "needle":
        return [(_draw_needle, sorted(rows, key=lambda row: float(row["value"])))]
    if sweep == "window":
        return [(_draw_pass_times, rows), (_draw_window_speeds, rows)]
    if sweep == "resident":
        rows = sorted(rows, key=lambda row: row["resident_layers"])
        return [(_draw_plain_times, rows), (_draw_resident_speeds, rows)]
    if sweep == "gamma":
        groups = [[row for row in rows if row["value"].startswith("d") is drafts] for drafts in (False, True)]
        if all(groups):
            return [(_draw_speed_up, _ascending("gamma", group)) for group in groups]
    rows = _ascending(sweep, rows)
    return [(_draw_speed_up, rows), (_draw_acceptance, rows)]


def axis_label(sweep: str, rows: Rows) -> str:
    """What the panel's values are, with their unit."""
    if sweep == "gamma" and rows[0]["value"].startswith("d"):
        return "tokens that the draft proposes to a step of the retrieval verifier"
    return (LONG_CONTEXT | STREAMED_WEIGHTS)[sweep].axis


def _number(value: str) -> float | None:
    """A row's value as a number, of tokens or as it is; None where it is a name."""
    text = value.removeprefix("d")
    if text[:1].isdigit() and "x" not in text:
        return float(tokens(text)) if text[-1] in "Kk" else float(text)
    return None


def _ascending(sweep: str, rows: Rows) -> Rows:
    return rows if sweep in ("batch", "policy") else sorted(rows, key=lambda row: _number(row["value"]) or 0.0)


def _places(axes: Any, rows: Rows) -> list[float] | None:
    """Places of rows on a numeric axis, with a tick for each; None where they are names, or one alone."""
    numbers = [_number(row["value"]) for row in rows]
    if len(rows) < 2 or any(number is None for number in numbers):
        return None
    places = [float(number) for number in numbers if number is not None]
    if places[0] >= 1 and places[-1] >= 8 * places[0]:
        axes.set_xscale("log", base=2)
    _set_ticks(axes, places, [row["value"].removeprefix("d") for row in rows])
    return places


def _set_ticks(axes: Any, places: Sequence[float], labels: Sequence[str]) -> None:
    axes.set_xticks(places, labels)
    axes.set_xticks([], minor=True)


def _line(axes: Any, places: Sequence[float], values: Sequence[float | None], label: str, colour: str) -> None:
    """Measured points; where a row has none the line is interrupted."""
    known = [float("nan") if value is None else value for value in values]
    axes.plot(places, known, "-o", color=colour, label=label, markersize=4.5, linewidth=1.4)


def _bound_line(axes: Any, places: Sequence[float], values: Sequence[float], label: str, colour: str = _BOUND) -> None:
    axes.plot(places, values, "--", color=colour, label=label, linewidth=1.4)


def _bound_over_bars(axes: Any, values: Sequence[float], label: str) -> None:
    """A piece of line for every bar."""
    for number, value in enumerate(values):
        axes.plot([number - 0.42, number + 0.42], [value] * 2, "--", color=_BOUND, label=None if number else label)


def _name_points(axes: Any, places: Sequence[float], values: Sequence[float]) -> None:
    """Figures below the points: the bound is above them."""
    for place, value in zip(places, values, strict=True):
        axes.annotate(
            f"{value:.2f}", (place, value), (0, -7), textcoords="offset points", ha="center", va="top",
            fontsize="x-small", color=_MEASURED, bbox=_WHITE,
        )  # fmt: skip


def _name_bars(axes: Any, bars: Any, names: Sequence[str]) -> None:
    """Figures inside the bars' upper ends, where no line is."""
    axes.bar_label(bars, names, padding=-12, color="white", fontsize="x-small")


def _draw_speed_up(axes: Any, rows: Rows) -> None:
    """Times plain decoding, beside what times of single passes and steps would allow at this acceptance."""
    measured, bounds = [row["times_plain"] for row in rows], [row["bound_times_plain"] for row in rows]
    places, label = _places(axes, rows), "bound: what pass time and acceptance allow"
    if places is None:
        places = list(range(len(rows)))
        bars = axes.bar(places, measured, 0.62, color=_MEASURED, label="measured")
        _bound_over_bars(axes, bounds, label)
        axes.set_xticks(places, [row["value"] for row in rows])
        _name_bars(axes, bars, [f"{value:.2f} x" for value in measured])
        axes.set_xlim(-0.8, len(rows) - 0.2)
    else:
        _line(axes, places, measured, "measured", _MEASURED)
        _bound_line(axes, places, bounds, label)
        _name_points(axes, places, measured)
    axes.axhline(1.0, color=_PLAIN, linestyle=":", label="plain decoding of the same")
    axes.set_ylim(0, 1.08 * max(*measured, *bounds, 1.0))
    axes.set_ylabel("times the speed of plain decoding")


def _draw_acceptance(axes: Any, rows: Rows) -> None:
    """Shares of accepted proposals at both levels."""
    places = _places(axes, rows)
    width = 0.8 / len(_LEVELS)
    for number, (key, (label, colour)) in enumerate(_LEVELS.items()):
        values = [row[key] for row in rows]
        if places is not None:
            _line(axes, places, values, label, colour)
            continue
        offset = (number - (len(_LEVELS) - 1) / 2) * width
        bars = axes.bar(
            [place + offset for place in range(len(rows))], [value or 0.0 for value in values], 0.92 * width,
            color=colour, label=label,
        )  # fmt: skip
        _name_bars(axes, bars, ["" if value is None else f"{value:.0%}" for value in values])
    if places is None:
        axes.set_xticks(range(len(rows)), [row["value"] for row in rows])
    _share_axis(axes)
    axes.set_ylabel("accepted proposals")


def _share_axis(axes: Any) -> None:
    axes.set_ylim(0, 1.05)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0], ["0", "20 %", "40 %", "60 %", "80 %", "100 %"])


def _draw_needle(axes: Any, rows: Rows) -> None:
    """Of the answer's tokens, those on which a retrieval verifier agrees with the full cache."""
    policies = list(rows[0]["policies"])
    width = 0.8 / len(policies)
    for number, policy in enumerate(policies):
        places = [place + (number - (len(policies) - 1) / 2) * width for place in range(len(rows))]
        shares = [row["policies"][policy]["agreement"] for row in rows]
        bars = axes.bar(places, shares, 0.92 * width, label=policy, color=_POLICY_COLOURS.get(policy))
        _name_bars(axes, bars, [f"{share:.0%}" for share in shares])
    axes.axhline(1.0, color=_BOUND, linestyle="--", label="bound: the full cache itself")
    axes.set_xticks(range(len(rows)), [row["value"] for row in rows])
    _share_axis(axes)
    axes.set_ylim(0, 1.12)
    axes.set_ylabel("agreement with the full cache on the answer")


def _draw_curves(
    axes: Any, places: Sequence[float], rows: Rows, curves: Sequence[tuple[str, Sequence[float], str]], label: str,
    *, linear: bool = False,
) -> None:  # fmt: skip
    """Lines over a numeric axis, each with its name and colour, bounds dashed: from 0, or, unless `linear`, logarithmic
    where the figures are far apart; numbers in full either way."""
    _set_ticks(axes, places, [row["value"] for row in rows])
    for name, values, colour in curves:
        if "bound" in name:
            _bound_line(axes, places, values, name, colour)
        else:
            _line(axes, places, values, name, colour)
    figures = [value for _, values, _ in curves for value in values]
    axes.set_ylabel(label)
    if linear or max(figures) / min(figures) < _LOGARITHMIC_FROM:
        axes.set_ylim(0, 1.12 * max(figures))
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(min(figures) / 1.6, max(figures) * 1.6)


def _causes(rows: Rows) -> str:
    """What binds, in the order of the rows."""
    words = {"link": "bytes / link", "memory": "bytes / memory", "compute": "operations / matrix products"}
    return "bound: " + ", then ".join(words[cause] for cause in dict.fromkeys(row["bound_by"] for row in rows))


def _draw_pass_times(axes: Any, rows: Rows) -> None:
    """Seconds of a pass over windows of different widths."""
    _draw_windows(
        axes, rows, [row["pass_s"]["median"] for row in rows], [row["bound_s"] for row in rows], _causes(rows),
        "seconds a pass",
    )  # fmt: skip


def _draw_window_speeds(axes: Any, rows: Rows) -> None:
    """Tokens per second if the target agreed with the whole window."""
    _draw_windows(
        axes, rows, [row["tok_per_s"] for row in rows], [row["bound_tok_per_s"] for row in rows], "bound",
        "tokens per second if all were accepted",
    )  # fmt: skip


def _draw_windows(
    axes: Any, rows: Rows, measured: Sequence[float], bounds: Sequence[float], bound: str, label: str
) -> None:
    axes.set_xscale("log", base=2)
    places = [float(row["window_tokens"]) for row in rows]
    _draw_curves(axes, places, rows, [("measured", measured, _MEASURED), (bound, bounds, _BOUND)], label)


def _draw_plain_times(axes: Any, rows: Rows) -> None:
    """Seconds a token of plain decoding."""
    curves = [
        ("plain decoding", [row["plain_s_per_token"] for row in rows], _MEASURED),
        (_causes(rows), [row["bound_s"] for row in rows], _BOUND),
    ]
    _draw_curves(axes, [row["resident_share"] for row in rows], rows, curves, "seconds a token", linear=True)


def _draw_resident_speeds(axes: Any, rows: Rows) -> None:
    """Tokens per second, plain and with a draft whose windows are chosen."""
    curves = [
        ("plain decoding", [1 / row["plain_s_per_token"] for row in rows], _MEASURED),
        ("its bound", [1 / row["bound_s"] for row in rows], _BOUND),
    ]
    if all("drafted" in row for row in rows):
        bounds = [row["drafted"]["bound_tok_per_s"] for row in rows]
        curves += [
            ("with the draft, windows chosen", [row["drafted"]["tok_per_s"] for row in rows], "tab:green"),
            ("its bound: as many tokens a pass, no drafting", bounds, "tab:orange"),
        ]
    _draw_curves(axes, [row["resident_share"] for row in rows], rows, curves, "tokens per second")
