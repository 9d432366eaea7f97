"""The sweeps of a long context, one row after the other: speed, acceptance of every level, bound, identity.

    python tools/sweep_long_context.py temperature --source SmolLM2-135M.gguf --delta a.safetensors b.safetensors \\
        --text novel.txt --out sweep-temperature.json
    python tools/sweep_long_context.py temperature budget context needle … --out 'sweep-{sweep}.json'

The models are those of `bench_long_context.py`. All sweeps but `batch` share one loaded runtime and one prefill: the
hierarchy is built anew for each row around the cache that is filled already. Values: `temperature` numbers; `budget`,
`chunk`, `context` tokens (4K is 4096); `gamma` tokens proposed to the target, or d3: by the draft; `batch` like 6x19K;
`policy` retrieval, topk, streaming, or chain: the draft alone; `needle` depths as shares of the context.

Each row is written when it is there, and rows that the file has already, of the same settings, commit and machine, are
not measured again. Ends with one JSON line per sweep, and with exit code 1 if any row's tokens differ from those of
plain decoding.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "kernels")]
sys.path.append(str(ROOT))

from bench_report import provenance  # noqa: E402
from long_context.needle import NeedleTest  # noqa: E402
from long_context.options import add_common_options, settings_of, sources  # noqa: E402
from long_context.plot import draw, require_matplotlib  # noqa: E402
from long_context.results import ResultFile  # noqa: E402
from long_context.rig import Rig  # noqa: E402
from long_context.rows import Lengths, RowMeasurement  # noqa: E402
from long_context.session import Session  # noqa: E402
from long_context.sweeps import SWEEPS, Point, Setting, points_of  # noqa: E402
from long_context.table import print_row  # noqa: E402

from offload_runtime.config import SpeculationOptions  # noqa: E402
from offload_runtime.engine import Runtime  # noqa: E402
from offload_runtime.engine.levels import MiddlePlan  # noqa: E402
from offload_runtime.errors import OffloadError, OptionError  # noqa: E402

# Of a needle's answer, its window of the target at least.
_LEAST_MAX_GAMMA = 63
# What a row does not depend on.
_NOT_CONDITIONS = ("sweeps", "values", "out", "plot", "commit")
Work = tuple[ResultFile, list[Point]]


def base_setting(arguments: argparse.Namespace) -> Setting:
    """What the options say of everything that a sweep may vary."""
    options = SpeculationOptions(
        "triforce", arguments.draft_cache, recent_tokens=arguments.recent, chunk_size=arguments.chunk_size,
        budget_tokens=arguments.budget, gamma_draft=arguments.gamma_draft, refresh_steps=arguments.refresh_steps,
        policy=arguments.policy,
    )  # fmt: skip
    return Setting(options, arguments.temperature, arguments.context, arguments.gamma, arguments.chain_gamma)


def plan(arguments: argparse.Namespace) -> list[Work]:
    """For each sweep its file and the rows that are missing there. Reads no model.

    Raises:
        OptionError: An option or a value makes no sense, or a file holds something else.
    """
    if len(arguments.sweeps) > 1:
        if arguments.values is not None:
            raise OptionError("--values belongs to one sweep: ask for one at a time, or drop it")
        for name, path in (("--out", arguments.out), ("--plot", arguments.plot)):
            if path is not None and "{sweep}" not in path.name:
                raise OptionError(f"{name} {path} would hold {len(arguments.sweeps)} sweeps: put {{sweep}} in its name")
    origin = provenance(torch.device(arguments.device), commit=arguments.commit)
    conditions = {
        "settings": settings_of(arguments, without=_NOT_CONDITIONS), "commit": origin["commit"],
        "measured_on": origin["machine"].get("gpu", origin["machine"]["cpu"]),
    }  # fmt: skip
    work = []
    for sweep in arguments.sweeps:
        points = points_of(sweep, base_setting(arguments), arguments.values)
        for point in points:
            check_point(sweep, point, arguments)
        file = ResultFile(named(arguments.out, sweep), sweep, conditions, origin, order=SWEEPS[sweep].values)
        if file.num_outdated:
            print(f"{sweep}: {file.num_outdated} rows of other settings, another commit or machine are replaced")
        missing = [point for point in points if point.label not in file.rows]
        if len(missing) < len(points):
            print(f"{sweep}: {len(points) - len(missing)} of {len(points)} rows are there already", flush=True)
        work.append((file, missing))
    return work


def named(path: Path | None, sweep: str) -> Path | None:
    """The sweep's own file."""
    return None if path is None else path.with_name(path.name.replace("{sweep}", sweep))


def check_point(sweep: str, point: Point, arguments: argparse.Namespace) -> None:
    """Refuse what would fail only after minutes.

    Raises:
        OptionError: It does not go with the other options.
    """
    setting = point.setting
    if sweep != "batch" and setting.context_tokens > arguments.context:
        raise OptionError(f"{sweep} {point.label} is more than --context {arguments.context}: raise it")
    if arguments.draft == "none" and (setting.options.mode == "chain" or point.label.startswith("d")):
        raise OptionError(f"{sweep} {point.label} varies the draft, and there is none: take --draft model")


def load(arguments: argparse.Namespace, points: Sequence[Point], *, reserve_tokens: int) -> Runtime:
    """A runtime that has room for every point, one after the other."""
    target, draft = sources(arguments)
    batch = points[0].setting.batch
    context = max(point.setting.context_tokens for point in points) + reserve_tokens
    hierarchies = [point.setting.options for point in points if point.setting.options.mode == "triforce"]
    # A chain alone still needs options that a runtime can be loaded with.
    largest = max(
        hierarchies or [base_setting(arguments).options],
        key=lambda options: MiddlePlan(target.config(), torch.bfloat16, options, context, batch).nbytes,
    )
    gamma_draft = max(point.setting.options.gamma_draft for point in points)
    options = replace(largest, gamma_draft=gamma_draft)
    started_s = time.perf_counter()
    runtime = Runtime.load(
        target, draft=draft if arguments.draft == "model" else "none", device=arguments.device, vram=arguments.vram,
        dtype=arguments.dtype, context=context, kv=arguments.kv, speculation=options, max_batch=batch,
        max_gamma=max(_LEAST_MAX_GAMMA if batch == 1 else 1, *(point.setting.window for point in points)),
    )  # fmt: skip
    print(f"loaded in {time.perf_counter() - started_s:.1f} s: {runtime.placement}", flush=True)
    return runtime


def read_text(arguments: argparse.Namespace, runtime: Runtime, needed_tokens: int) -> list[int]:
    """Token ids of the text.

    Raises:
        OptionError: It is shorter than what is measured.
    """
    tokens: list[int] = runtime.tokenizer.encode(arguments.text.read_text(encoding="utf-8"))
    if len(tokens) < needed_tokens:
        raise OptionError(
            f"{arguments.text.name} has {len(tokens)} tokens and {needed_tokens} are needed: lower --context or "
            "take a longer text"
        )
    return tokens


def stretches(tokens: Sequence[int], length: int, count: int) -> list[list[int]]:
    """`count` different stretches of the text; they overlap where it is too short for others."""
    step = min(length, (len(tokens) - length) // (count - 1)) if count > 1 else 0
    if count > 1 and step < 1:
        raise OptionError(f"{count} different stretches of {length} tokens need more text than {len(tokens)} tokens")
    return [list(tokens[number * step : number * step + length]) for number in range(count)]


def run_points(arguments: argparse.Namespace, work: Sequence[Work]) -> None:
    """Load one runtime and measure all missing rows of some sweeps with it."""
    points = [point for _, missing in work for point in missing]
    if not points:
        return
    lengths = Lengths(arguments.tokens, arguments.plain_tokens, arguments.starts)
    # All new tokens may be one sequence's.
    reserve = points[0].setting.batch * max(lengths.tokens, lengths.plain_tokens) + 512
    with load(arguments, points, reserve_tokens=reserve) as runtime:
        measure_rows(arguments, runtime, work, lengths)  # on its return nothing holds on to the runtime's memory


def measure_rows(arguments: argparse.Namespace, runtime: Runtime, work: Sequence[Work], lengths: Lengths) -> None:
    """Measure all missing rows of some sweeps, each written when it is there."""
    settings = [point.setting for _, missing in work for point in missing]
    batch, context = settings[0].batch, max(setting.context_tokens for setting in settings)
    text = read_text(arguments, runtime, context)
    session, rig = Session(runtime, batch=batch), Rig(runtime, arguments.draft)
    rows = RowMeasurement(session, rig, stretches(text, context, batch), lengths)
    needle = NeedleTest(session, rig, text)
    for file, missing in work:
        for number, point in enumerate(missing):
            started_s = time.perf_counter()
            row = (needle if file.sweep == "needle" else rows).measure(point.setting)
            row = {"value": point.label, **row, "measured_in_s": time.perf_counter() - started_s}
            row["loaded"] = runtime.placement  # with the most that any row of the command takes
            file.add(row)
            print_row(file.sweep, row, heading=number == 0)


def run(arguments: argparse.Namespace) -> bool:
    """All sweeps; whether every row is identical to plain decoding."""
    if arguments.plot is not None:
        require_matplotlib()
    work = plan(arguments)
    run_points(arguments, [part for part in work if part[0].sweep != "batch"])
    for file, missing in work:
        for point in missing if file.sweep == "batch" else ():
            run_points(arguments, [(file, [point])])
    for file, _ in work:
        plot = named(arguments.plot, file.sweep)
        if plot is not None:
            draw(file.as_dict(), plot)
    for file, _ in work:
        print(json.dumps(file.as_dict(), allow_nan=False), flush=True)
    return all(file.identical for file, _ in work)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("sweeps", nargs="+", choices=list(SWEEPS), metavar="SWEEP", help=", ".join(SWEEPS))
    add_common_options(made)
    made.set_defaults(kv="gpu", tokens=64, plain_tokens=None, chunk_size=SpeculationOptions().chunk_size)
    made.add_argument("--values", type=lambda text: text.split(","), help="of the sweep, instead of all")
    made.add_argument("--temperature", type=float, default=0.6)
    made.add_argument("--gamma", type=int, default=24, help="tokens proposed to a pass of the target")
    made.add_argument("--gamma-draft", type=int, default=4, help="tokens proposed to a step of the middle level")
    made.add_argument("--refresh-steps", type=int, default=1)
    made.add_argument("--chain-gamma", type=int, default=8, help="tokens that the draft alone proposes to a pass")
    made.add_argument("--starts", type=int, default=4, help="places in the text that a row is measured from")
    made.add_argument("--plot", type=Path, help="a picture of the speed-up, which needs matplotlib")
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    arguments = parser().parse_args(words)
    if arguments.plain_tokens is None:  # a token of plain decoding takes a second where the KV cache is on the host
        arguments.plain_tokens = 8 if arguments.kv == "host" and arguments.device != "cpu" else arguments.tokens
    try:
        return 0 if run(arguments) else 1
    except OffloadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
