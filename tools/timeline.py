"""Draws passes of a trace that `--trace FILE` has written: link, target and draft above each other; of several cards
the link and the target of each.

    python tools/timeline.py trace.json --passes 4-6 --out timeline.png
    python tools/timeline.py trace.json.gz --passes 4-6,20-22 --out timeline.svg

Several ranges become panels on one scale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import harness
from trace_spans import Event, Totals, choose_passes, clipped, num_cards, of_card, read_trace, totals_of, window_of

from offload_runtime.cli.plan import require_plotting
from offload_runtime.errors import StorageError
from offload_runtime.trace import COMPUTE, DRAFT, LINK, LINK_BACK, PASSES, STALLS

Interval = tuple[float, float]
Row = tuple[str, int]  # of a card; passes and drafting are of the first
_TARGET, _IDLE, _BACK = "target", "link idle", "kv to the host"
_COMPUTING, _WAITING = "target computes", "target waits for the link"
_STEPS, _PROPOSING = "steps of the draft", "proposing, host included"
# In the order of the legend; neighbours differ in lightness as well as in hue.
_COLOURS = {
    "weights": "#1f5fa8", "kv": "#0b7f7a", _BACK: "#b8860b", "measurement": "#9a9a9a", _IDLE: "#d62728",
    _COMPUTING: "#1b7a2b", _WAITING: "#f7dcc4", _STEPS: "#6a3d9a", _PROPOSING: "#d5c1ee",
}  # fmt: skip
_LETTER = 1 / 180  # of a panel's width, in the size of the passes' words
_FRAMED = 0.5  # height of a bar that another one, of 0.7, may lie behind
_LABELS = {PASSES: "passes", LINK: "link to the GPU", LINK_BACK: "link back", _TARGET: "target", DRAFT: "draft"}
# Of a picture's width: what is narrower is not told from its neighbours, or is not seen at all.
_EDGED, _SEEN = 1 / 300, 1 / 2000
_WIDTH_INCHES, _ROW_INCHES, _LINE_INCHES, _AROUND_INCHES, _HEAD_INCHES = 12, 0.42, 0.16, 0.95, 1.0
_USUAL_LINES = 2  # of a caption


def picture_path(trace: Path, out: str | None) -> Path:
    """Where to draw to, before anything is read. Raises as `require_plotting`."""
    path = trace.with_name(trace.name.removesuffix(".gz")).with_suffix(".png") if out is None else Path(out)
    require_plotting(path, "--out")
    return path


def draw(
    events: Sequence[Event], ranges: Sequence[Sequence[Event]], path: Path, *, title: str, machine: str
) -> list[Totals]:
    """Draw ranges of passes below each other, on one scale, into a file whose ending chooses the format.

    The same spans give the same file: nothing in it depends on when or how often it is drawn.

    Args:
        events: All spans of the trace.
        ranges: The passes of each panel.
        path: The file.
        title: Above everything.
        machine: What ran where, below the title.

    Returns:
        The totals below each panel.

    Raises:
        StorageError: The file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    windows = [window_of(events, passes) for passes in ranges]
    totals = [totals_of(events, passes, window) for passes, window in zip(ranges, windows, strict=True)]
    shown = [_shown_rows(events, window) for window in windows]
    lines = sum(one.caption().count("\n") + 1 - _USUAL_LINES for one in totals)
    inches = _HEAD_INCHES + sum(_AROUND_INCHES + _ROW_INCHES * len(rows) for rows in shown) + _LINE_INCHES * lines
    figure = Figure(figsize=(_WIDTH_INCHES, inches), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [len(rows) for rows in shown]
    panels = figure.subplots(len(ranges), squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    longest_ms = 1e3 * max(one.seconds for one in totals)
    for axes, rows, window, one in zip(panels, shown, windows, totals, strict=True):
        _draw_panel(axes, rows, events, window, longest_ms)
        axes.set_xlabel(f"ms\n{one.caption()}", fontsize=9)
    figure.suptitle(f"{title}\n{machine}" if machine else title, fontsize=10)
    handles = {name: handle for axes in panels for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    names = [name for name in _COLOURS if name in handles]
    figure.legend(
        [handles[name] for name in names], names, loc="outside lower center", ncols=min(len(names), 5), fontsize=9,
        frameon=False,
    )  # fmt: skip
    vector = {"Date": None, "Creator": None} if path.suffix.lower() == ".svg" else None
    try:
        with rc_context({"svg.hashsalt": "offload_runtime", "svg.fonttype": "none"}):
            figure.savefig(path, dpi=150, metadata=vector)
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror or error}): name another --out") from error
    return totals


def _shown_rows(events: Sequence[Event], window: Interval) -> list[Row]:
    """Passes, link and target of each card always; what else happened."""
    of_cards = [(row, card) for card in range(num_cards(events)) for row in (LINK, LINK_BACK, _TARGET)]
    rows = [(PASSES, 0), *of_cards, (DRAFT, 0)]
    return [
        (row, card)
        for row, card in rows
        if row not in (LINK_BACK, DRAFT) or clipped(of_card(events, card), row, window)
    ]


def _draw_panel(axes: Any, rows: Sequence[Row], events: Sequence[Event], window: Interval, longest_ms: float) -> None:
    """One range of passes: a row for each stream, time from the window's beginning on."""
    several = num_cards(events) > 1
    for place, (row, card) in enumerate(rows):
        if row == PASSES:
            _draw_passes(axes, place, events, window, longest_ms)
            continue
        for kind, spans in bars_of(row, of_card(events, card), window).items():
            _draw_bars(axes, place, kind, spans, window[0], longest_ms)
    labels = [_LABELS[row] + (f", card {card}" if several and row not in (PASSES, DRAFT) else "") for row, card in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, longest_ms)
    axes.grid(axis="x", linewidth=0.4, alpha=0.5)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_passes(axes: Any, place: int, events: Sequence[Event], window: Interval, longest_ms: float) -> None:
    """A box for each pass with its number and what came of it, and a line through all rows where it begins."""
    inside = [one for one in events if one.row == PASSES and one.end_s > window[0] and one.start_s < window[1]]
    boxes = [[1e3 * (max(window[0], moment) - window[0]) for moment in (one.start_s, one.end_s)] for one in inside]
    # Neighbours share the room between them.
    shared = [(before[1] + after[0]) / 2 for before, after in pairwise(boxes)]
    limits = list(pairwise([0.0, *shared, longest_ms]))
    for one, (start_ms, end_ms), limit in zip(inside, boxes, limits, strict=True):
        axes.broken_barh([(start_ms, end_ms - start_ms)], (place - 0.35, 0.7), facecolors="#e4e4e4", edgecolors="black",
                         linewidth=0.5)  # fmt: skip
        axes.axvline(start_ms, color="black", linewidth=0.7, linestyle=":")
        words = _outcome(one)
        half_ms = len(words) * _LETTER * longest_ms / 2
        # A narrow box may borrow the room beside it; without any its number has to do.
        least_ms, most_ms = limit[0] + half_ms, limit[1] - half_ms
        middle_ms = (start_ms + end_ms) / 2
        if least_ms <= most_ms:
            middle_ms = min(max(middle_ms, least_ms), most_ms)
        else:
            words = f"#{one.args['pass']}"
        axes.text(middle_ms, place, words, fontsize=8, ha="center", va="center")


def _outcome(one: Event) -> str:
    """A pass in a few words: its number, its window, what was accepted."""
    tokens = sum(one.args["tokens"])
    words = f"{one.name}: {tokens} token{'s' if tokens != 1 else ''}"
    return words + (f", {sum(one.args['accepted'])} accepted" if tokens > 1 and "accepted" in one.args else "")


def bars_of(row: str, events: Sequence[Event], window: Interval) -> dict[str, list[Interval]]:
    """The bars of a card's row by what they show, in the order in which they are drawn; seconds."""
    if row == _TARGET:
        stalls = clipped(events, STALLS, window)
        working = _gaps(stalls, window)
        # A layer waits for its pieces of the KV cache while it computes.
        computing = [overlap for layer in clipped(events, COMPUTE, window) for overlap in _overlaps(layer, working)]
        return {_WAITING: stalls, _COMPUTING: computing}
    inside = [one for one in events if one.row == row and one.end_s > window[0] and one.start_s < window[1]]
    kinds: dict[str, list[Event]] = {}
    if row == DRAFT:
        kinds = {_PROPOSING: [], _STEPS: []}
    for one in inside:
        if row == DRAFT:
            kind = _PROPOSING if one.name in ("propose", "prepare") else _STEPS
        else:
            kind = one.args["kind"] if row == LINK else _BACK
        kinds.setdefault(kind, []).append(one)
    bars = {kind: clipped(spans, row, window) for kind, spans in kinds.items()}
    if row == LINK and inside:
        bars[_IDLE] = [gap for gap in _gaps(clipped(events, LINK, window), window) if gap[1] - gap[0] > 1e-3]
    return bars


def _gaps(busy: Iterable[Interval], window: Interval) -> list[Interval]:
    """The rest of a window."""
    found, reached = [], window[0]
    for start_s, end_s in [*sorted(busy), (window[1], window[1])]:
        if start_s > reached:
            found.append((reached, start_s))
        reached = max(reached, end_s)
    return found


def _overlaps(one: Interval, others: Iterable[Interval]) -> list[Interval]:
    """What an interval has in common with others."""
    return [(max(one[0], start), min(one[1], end)) for start, end in others if start < one[1] and end > one[0]]


def _draw_bars(
    axes: Any, place: int, kind: str, spans: Sequence[Interval], from_s: float, longest_ms: float
) -> None:  # fmt: skip
    """Bars of one colour; what touches and is too narrow to tell apart becomes one."""
    bars: list[Interval] = []
    for start_s, end_s in sorted(spans):
        start_ms, end_ms = 1e3 * (start_s - from_s), 1e3 * (end_s - from_s)
        if bars and start_ms - bars[-1][1] < _SEEN * longest_ms and end_ms - start_ms < _EDGED * longest_ms:
            bars[-1] = bars[-1][0], max(end_ms, bars[-1][1])
        else:
            bars.append((start_ms, end_ms))
    if not bars:
        return
    colour, height = _COLOURS[kind], _FRAMED if kind == _STEPS else 0.7
    # A white edge tells neighbours apart and would cover a bar that is hardly wider.
    plain = kind in (_WAITING, _IDLE)
    edges = ["white" if end_ms - start_ms > _EDGED * longest_ms and not plain else colour for start_ms, end_ms in bars]
    axes.broken_barh(
        [(start_ms, end_ms - start_ms) for start_ms, end_ms in bars], (place - height / 2, height),
        facecolors=colour, edgecolors=edges, linewidth=0.1 if plain else 0.5, label=kind,
    )  # fmt: skip


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Draw and print the totals; 2 after an error of the user's."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("trace", metavar="TRACE", type=Path, help="what --trace has written, or that by gzip")
    parser.add_argument(
        "--passes", metavar="A-B,C-D", help="which passes, by their numbers in the trace; a panel for each range"
    )
    parser.add_argument("--out", metavar="FILE", help="the picture, .png or .svg; left out, a .png beside the trace")
    parser.add_argument("--title", help="above the picture; left out, the passes and the trace's name")
    options = parser.parse_args(argv)
    path = picture_path(options.trace, options.out)
    trace = read_trace(options.trace)
    ranges = choose_passes(trace.events, options.passes)
    title = options.title or f"{' and '.join(map(_range_name, ranges))} of {options.trace.name}"
    totals = draw(trace.events, ranges, path, title=title, machine=trace.machine())
    for passes, one in zip(ranges, totals, strict=True):
        print(f"{_range_name(passes)}, {one.caption()}")
    print(path)
    return 0


def _range_name(passes: Sequence[Event]) -> str:
    return passes[0].name if len(passes) == 1 else f"{passes[0].name} to {passes[-1].name}"


if __name__ == "__main__":
    sys.exit(main())
