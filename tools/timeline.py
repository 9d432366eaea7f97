"""Draws passes of a trace that `--trace FILE` has written: link, compute, draft and stalls above each other.

python tools/timeline.py trace.json --passes 4-6 --out timeline.png
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_runtime.config import format_bytes
from offload_runtime.errors import OffloadError, OptionError, StorageError, TraceError
from offload_runtime.tracing import (
    COMPUTE,
    DRAFT,
    LINK,
    LINK_BACK,
    PASSES,
    STALLS,
    TRACE_VERSION,
    covered_seconds,
    union_seconds,
)

_SHOWN = (LINK, LINK_BACK, COMPUTE, DRAFT, STALLS)
_COLOURS = {
    "weights": "tab:blue", "kv": "tab:cyan", "measurement": "tab:gray", COMPUTE: "tab:green", DRAFT: "tab:purple",
    STALLS: "tab:red",
}  # fmt: skip
_MOST_BY_ITSELF = 3  # passes that are drawn where none are named


@dataclass(frozen=True)
class Event:
    """One span of a row, in seconds since the recording began."""

    row: str
    name: str
    start_s: float
    end_s: float
    args: dict[str, Any]


@dataclass(frozen=True)
class Totals:
    """What happened between two moments, clipped there."""

    seconds: float
    link_bytes: float
    link_s: float
    compute_s: float  # without the stalls in the middle of layers
    stall_s: float
    draft_s: float
    hidden_draft_s: float
    checked_tokens: int
    accepted_tokens: int

    def caption(self) -> str:
        """Two lines for people."""
        share = 100 / self.seconds
        gbps = self.link_bytes / self.link_s / 1e9 if self.link_s else 0.0
        hidden = f", {100 * self.hidden_draft_s / self.draft_s:.0f} % hidden" if self.draft_s else ""
        return (
            f"{1e3 * self.seconds:.3g} ms: link {format_bytes(self.link_bytes)} at {gbps:.3g} GB/s, "
            f"idle {100 - share * self.link_s:.1f} %; compute {share * self.compute_s:.1f} %; "
            f"stalls {share * self.stall_s:.1f} %\n"
            f"drafting {share * self.draft_s:.1f} %{hidden}; "
            f"{self.checked_tokens} tokens checked, {self.accepted_tokens} proposals accepted"
        )


def read_trace(path: Path) -> list[Event]:
    """The spans of a trace.

    Raises:
        TraceError: The file cannot be read, or is no trace of ours.
    """
    try:
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise TraceError(f"{path} is no trace: not JSON ({error}); write one with --trace FILE") from error
    try:
        version = record["otherData"]["offload_runtime_trace"]
        if version != TRACE_VERSION:
            raise TraceError(f"{path} is a trace of version {version}, and this reads version {TRACE_VERSION} only")
        return [
            Event(span["cat"], span["name"], span["ts"] / 1e6, (span["ts"] + span["dur"]) / 1e6, span["args"])
            for span in record["traceEvents"]
            if span["ph"] == "X"
        ]
    except (KeyError, TypeError) as error:
        raise TraceError(
            f"{path} is no trace of offload-runtime ({type(error).__name__}: {error}); write one with --trace FILE"
        ) from error


def choose_passes(events: Sequence[Event], asked: str | None) -> list[Event]:
    """The passes to draw, in order: those named `A-B` or `A`, or some decoding passes after the first.

    Raises:
        OptionError: `asked` is no range; TraceError: the trace has no such passes.
    """
    passes = [event for event in events if event.row == PASSES]
    if not passes:
        raise TraceError("the trace has no passes: nothing was generated while it was recorded")
    if asked is None:
        decoding = [one for one in passes if one.args["kind"] == "verify"]
        # Where there is a choice, not the first one: its copies were made while the prompt was sampled from.
        return decoding[1 : 1 + _MOST_BY_ITSELF] or decoding or passes[:1]
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", asked)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise OptionError(f"--passes {asked} is no range: write it like 4-6, or 4 for a single pass")
    first, last = int(match[1]), int(match[2] or match[1])
    chosen = [one for one in passes if first <= one.args["pass"] <= last]
    if len(chosen) != last - first + 1:
        numbers = [one.args["pass"] for one in passes]
        raise TraceError(f"--passes {asked}: the trace has the passes {min(numbers)} to {max(numbers)}")
    return chosen


def window_of(events: Iterable[Event], passes: Sequence[Event]) -> tuple[float, float]:
    """From the proposals for the first of these passes to the end of the last: seconds."""
    start_s, number = passes[0].start_s, passes[0].args["pass"]
    before = [event for event in events if event.row == PASSES and event.args["pass"] == number - 1]
    earliest_s = before[0].end_s if before else 0.0
    for event in events:
        if event.row == DRAFT and earliest_s <= event.start_s < passes[0].start_s:
            start_s = min(start_s, event.start_s)
    return start_s, passes[-1].end_s


def clipped(events: Iterable[Event], row: str, window: tuple[float, float]) -> list[tuple[float, float]]:
    """The part of each span of a row that lies in the window."""
    start_s, end_s = window
    inside = [event for event in events if event.row == row and event.end_s > start_s and event.start_s < end_s]
    return [(max(event.start_s, start_s), min(event.end_s, end_s)) for event in inside]


def totals_of(events: Sequence[Event], passes: Sequence[Event], window: tuple[float, float]) -> Totals:
    """What these passes came to. A copy that is cut by the window counts with the share of its bytes inside."""
    compute, stalls, drafting = (clipped(events, row, window) for row in (COMPUTE, STALLS, DRAFT))
    link_bytes = 0.0
    for event in events:
        inside_s = min(event.end_s, window[1]) - max(event.start_s, window[0])
        if event.row == LINK and inside_s > 0:
            link_bytes += event.args["bytes"] * inside_s / (event.end_s - event.start_s)
    return Totals(
        seconds=window[1] - window[0],
        link_bytes=link_bytes,
        link_s=union_seconds(clipped(events, LINK, window)),
        compute_s=union_seconds(compute) - covered_seconds(compute, stalls),
        stall_s=union_seconds(stalls),
        draft_s=union_seconds(drafting),
        hidden_draft_s=covered_seconds(drafting, clipped(events, PASSES, window)),
        checked_tokens=sum(sum(one.args["tokens"]) for one in passes),
        accepted_tokens=sum(sum(one.args.get("accepted", ())) for one in passes),
    )


def draw(events: Sequence[Event], passes: Sequence[Event], path: Path, *, title: str) -> Totals:
    """Draw passes into a file, whose ending chooses the format, and return the totals of the caption.

    Raises:
        StorageError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    window = window_of(events, passes)
    totals = totals_of(events, passes, window)
    rows = [row for row in _SHOWN if row != LINK_BACK or clipped(events, LINK_BACK, window)]
    figure = Figure(figsize=(12, 1.6 + 0.6 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        _draw_row(axes, place, [event for event in events if event.row == row], window)
    for one in passes:
        start_ms = 1e3 * (one.start_s - window[0])
        axes.axvline(start_ms, color="black", linewidth=0.8, linestyle=":")
        axes.text(start_ms, -0.6, f" {one.name}: {_outcome(one)}", fontsize=8, va="bottom")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.9)
    axes.set_xlim(0, 1e3 * totals.seconds)
    axes.set_xlabel(f"ms\n{totals.caption()}")
    handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    axes.legend(handles.values(), handles.keys(), loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror or error}): name another --out") from error
    return totals


def _draw_row(axes: Any, place: int, events: Sequence[Event], window: tuple[float, float]) -> None:
    """The bars of one row, in a colour for each kind."""
    bars: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        start_s, end_s = max(event.start_s, window[0]), min(event.end_s, window[1])
        if end_s > start_s:
            kind = event.args.get("kind", event.row)
            bars.setdefault(kind, []).append((1e3 * (start_s - window[0]), 1e3 * (end_s - start_s)))
    for kind, spans in bars.items():
        colour, narrow_ms = _COLOURS[kind], 1e3 * (window[1] - window[0]) / 300
        # A white edge tells neighbours apart and would cover a bar that is hardly wider.
        edges = ["white" if width_ms > narrow_ms else colour for _, width_ms in spans]
        axes.broken_barh(spans, (place - 0.35, 0.7), facecolors=colour, edgecolors=edges, linewidth=0.3, label=kind)


def _outcome(one: Event) -> str:
    tokens = sum(one.args["tokens"])
    return f"{tokens} tokens" + (f", {sum(one.args['accepted'])} accepted" if "accepted" in one.args else "")


def picture_path(trace: Path, out: str | None) -> Path:
    """Where to draw to, before anything is read.

    Raises:
        OptionError: matplotlib is not installed, or the ending is none of its formats.
    """
    path = trace.with_suffix(".png") if out is None else Path(out)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise OptionError("drawing needs matplotlib: pip install 'offload-runtime[plots]'") from error
    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise OptionError(f"--out {path} must end in one of {', '.join(sorted(formats))}")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw and print the totals; 2 after an error of the user's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", metavar="TRACE", type=Path, help="what --trace has written")
    parser.add_argument("--passes", metavar="A-B", help="which passes, by their numbers in the trace")
    parser.add_argument("--out", metavar="FILE", help="the picture, .png or .svg; left out, beside the trace")
    options = parser.parse_args(arguments)
    try:
        path = picture_path(options.trace, options.out)
        events = read_trace(options.trace)
        passes = choose_passes(events, options.passes)
        totals = draw(events, passes, path, title=f"{passes[0].name} to {passes[-1].name} of {options.trace.name}")
    except OffloadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{totals.caption()}\n{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
