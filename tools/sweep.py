"""The sweeps: one command for each table of the TriForce paper and for each scaling curve, measured row by row.

    python tools/sweep.py temperature --source SmolLM2-135M.gguf --delta a.safetensors b.safetensors --text novel.txt \\
        --out sweep-temperature.json --plot sweep-temperature
    python tools/sweep.py temperature budget context needle … --out 'sweep-{sweep}.json'
    python tools/sweep.py window --shape llama2-7b --out sweep-window.json
    python tools/sweep.py resident --shape llama2-7b --source SmolLM2-135M.gguf --text novel.txt --out FILE
    python tools/sweep.py draw tools/results/sweep-*.json --out docs/charts --formats svg

Over a long context, by the models of `bench_long_context.py`: `temperature` numbers; `budget`, `chunk`, `context`
tokens (4K is 4096); `gamma` tokens proposed to the target, or d3: by the draft; `batch` like 6x19K; `policy` retrieval,
topk, streaming, or chain: the draft alone; `needle` depths as shares of the context. All but `batch` share one loaded
runtime and one prefill: the hierarchy is built anew for each row around the cache that is filled already.

Over streamed weights: `window` tokens in the window of a pass; `resident` shares of the layers that stay on the device,
like 3/8.

Which table is which sweep, and what cannot be reproduced here, is in docs/benchmarks.md. Each row is written when it is
there, and rows that the file has already, of the same settings, commit and machine, are not measured again. An option
that none of the sweeps would use is refused. Ends with one JSON line per sweep, and with exit code 1 if any row's
tokens differ from those of plain decoding. `draw` makes pictures of files that are there, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import harness
import torch
from harness import check_out, provenance, settings_of
from long_context.command import LONG_CONTEXT
from sweeping.family import Family, ResultFile, Work, family_of, read_report
from sweeping.pictures import FORMATS, draw, picture_base, require_matplotlib
from sweeping.streamed_weights import STREAMED_WEIGHTS

from offload_runtime.errors import OptionError
from offload_runtime.memory import resolve_device

FAMILIES = (LONG_CONTEXT, STREAMED_WEIGHTS)
# What a row does not depend on.
_NOT_CONDITIONS = ("values", "out", "plot", "commit")
# Options that are newer than some results, which say nothing of them.
_NEWER: dict[str, Any] = {"other_text": [], "draw": None}


def conditions_of(arguments: argparse.Namespace) -> dict[str, str]:
    """What was asked for, as text, as far as rows depend on it."""
    unasked = [name for name, usual in _NEWER.items() if getattr(arguments, name, usual) == usual]
    return settings_of(arguments, without=(*_NOT_CONDITIONS, *unasked))


def plan(family: Family, sweeps: Sequence[str], arguments: argparse.Namespace, origin: Mapping[str, Any]) -> list[Work]:
    """For each sweep its file and the rows that are missing there, of this `origin`. Reads no weights.

    Raises:
        OptionError: An option or a value makes no sense, or a file holds something else.
    """
    if len(sweeps) > 1:
        if arguments.values is not None:
            raise OptionError("--values belongs to one sweep: ask for one at a time, or drop it")
        for name, path in (("--out", arguments.out), ("--plot", arguments.plot)):
            if path is not None and "{sweep}" not in path.name:
                raise OptionError(f"{name} {path} would hold {len(sweeps)} sweeps: put {{sweep}} in its name")
    conditions = {
        "settings": conditions_of(arguments), "commit": origin["commit"],
        "measured_on": origin["machine"].get("gpu", origin["machine"]["cpu"]),
    }  # fmt: skip
    work: list[Work] = []
    for sweep in sweeps:
        points = family.points(sweep, arguments)
        file = ResultFile(
            named(arguments.out, sweep), sweep, conditions, origin, order=family.sweeps[sweep].values,
            ignored=[name for name, sweeps_without in family.unused.items() if sweep in sweeps_without],
        )  # fmt: skip
        if file.num_outdated:
            print(f"{sweep}: {file.num_outdated} rows of other settings, another commit or machine are replaced")
        missing = [point for point in points if point.label not in file.rows]
        if len(missing) < len(points):
            print(f"{sweep}: {len(points) - len(missing)} of {len(points)} rows are there already", flush=True)
        work.append((file, missing))
    return work


def named(path: Path | None, sweep: str) -> Path | None:
    """The sweep's own file."""
    return path if path is None or not path.name else path.with_name(path.name.replace("{sweep}", sweep))


def run(family: Family, sweeps: Sequence[str], arguments: argparse.Namespace) -> bool:
    """All sweeps; whether every row is identical to plain decoding.

    Raises:
        DeviceError, StorageError: There is no such device, or a file could not be written; errors as of `plan`.
    """
    resolve_device(arguments.device)
    for sweep in sweeps:
        check_out(named(arguments.out, sweep))
    if arguments.plot is not None:
        check_out(picture_base(arguments.plot).with_suffix(".png"), "--plot")
        require_matplotlib()
    work = plan(family, sweeps, arguments, provenance(torch.device(arguments.device), commit=arguments.commit))
    family.measure(arguments, work)
    for file, _ in work:
        plot = named(arguments.plot, file.sweep)
        if plot is not None:
            draw(file.as_dict(), plot)
    for file, _ in work:
        print(json.dumps(file.as_dict(), allow_nan=False), flush=True)
    return all(file.identical for file, _ in work)


def draw_files(words: Sequence[str]) -> None:
    """Draw result files that are there.

    Raises:
        OptionError: A file is no sweep's, or there is no matplotlib; StorageError: a picture cannot be written.
    """
    made = harness.Parser(prog="sweep.py draw", description="Draw the rows of result files.")
    made.add_argument("files", nargs="+", type=Path)
    made.add_argument("--out", type=Path, required=True, help="directory of the pictures, named as the files are")
    made.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    arguments = made.parse_args(words)
    require_matplotlib()
    reports = {path: read_report(path) for path in arguments.files}
    for path, report in reports.items():
        try:
            pictures = draw(report, arguments.out / path.stem, formats=arguments.formats)
        except KeyError as error:
            raise OptionError(f"{path} says nothing of {error}, which sweeps write: measure it again") from error
        print(*pictures, sep="\n")


@harness.one_line_errors
def main(words: Sequence[str] | None = None) -> int:
    """Measure, or draw, and print; returns the exit code."""
    words = sys.argv[1:] if words is None else list(words)
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__, *(family.parser().format_help() for family in FAMILIES), sep="\n")
        return 0
    if words[:1] == ["draw"]:
        draw_files(words[1:])
        return 0
    sweeps = list(takewhile(lambda word: not word.startswith("-"), words))
    family = family_of(sweeps, FAMILIES)
    return 0 if run(family, sweeps, family.parse(sweeps, words[len(sweeps) :])) else 1


if __name__ == "__main__":
    sys.exit(main())
