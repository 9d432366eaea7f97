"""Draws passes of a trace that `--trace FILE` has written: link, target and draft above each other.

    python tools/timeline.py trace.json --passes 4-6 --out timeline.png
    python tools/timeline.py trace.json.gz --passes 4-6,20-22 --out timeline.svg --cut some-passes.json.gz

Several ranges become panels on one scale. `--cut` writes a trace of nothing but these passes, which draws the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import harness
from timelines.picture import draw, picture_path
from timelines.spans import Event, check_apart, choose_passes, read_trace, write_cut


@harness.one_line_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Draw and print the totals; 2 after an error of the user's."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("trace", metavar="TRACE", type=Path, help="what --trace has written, or that by gzip")
    parser.add_argument(
        "--passes", metavar="A-B,C-D", help="which passes, by their numbers in the trace; a panel for each range"
    )
    parser.add_argument("--out", metavar="FILE", help="the picture, .png or .svg; left out, a .png beside the trace")
    parser.add_argument("--title", help="above the picture; left out, the passes and the trace's name")
    parser.add_argument("--cut", metavar="FILE", type=Path, help="write a trace of these passes alone, a .json.gz")
    options = parser.parse_args(arguments)
    path = picture_path(options.trace, options.out)
    check_apart(options.trace, options.cut)
    trace = read_trace(options.trace)
    ranges = choose_passes(trace.events, options.passes)
    if options.cut is not None:
        write_cut(trace, ranges, options.cut)
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
