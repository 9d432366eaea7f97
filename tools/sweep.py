"""One option varied, row by row: the tables of the TriForce paper, and curves over windows and resident layers.

    python tools/sweep.py temperature --source SmolLM2-135M.gguf --delta a.safetensors b.safetensors --text novel.txt \\
        --kv gpu --out sweep-temperature.json
    python tools/sweep.py window --source SmolLM2-135M.gguf --shape llama2-7b --text novel.txt --out sweep-window.json
    python tools/sweep.py draw tools/results/sweep-*.json --out charts

Over a long context, by the models of bench_long_context.py: `temperature`; `budget`, `chunk` and `context` in tokens
(4K is 4096); `gamma` tokens proposed to the target, or d3: by the draft; `batch` like 6x19K. Over streamed weights:
`window` tokens of a pass, `resident` shares of the layers on the device like 3/8. A row is written when it is there,
and rows that the file has already, of the same settings, commit and machine, are not measured again. Ends with one JSON
line; exit code 1 when an answer was not that of plain decoding. `draw` makes pictures of files, older ones too.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any

import harness
from bench_long_context import SEED, WARM_UP_TOKENS, add_long_options, check_long, load, sources, speculation_of
from harness import check_out, emit, leading_agreement, provenance, write_report
from passes import predicted_pass, time_window
from timing import Answer, timed_answer

from offload_runtime.cli.terminal import read_text
from offload_runtime.engine import GenerationResult, Runtime, Scheduler
from offload_runtime.errors import OptionError, StorageError
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.sizes import GB, parse_count
from offload_runtime.stream.device import resolve_device
from offload_runtime.weights.checkpoint import CheckpointSource


def _gamma(text: str) -> dict[str, Any]:
    return {"gamma_draft": parse_count(text[1:])} if text.startswith("d") else {"gamma": parse_count(text)}


def _batch(text: str) -> dict[str, Any]:
    number, _, length = text.partition("x")
    return {"batch": parse_count(number), "context": parse_count(length)}


@dataclass(frozen=True)
class Sweep:
    """What is varied, the values of the paper's table, and the options that a value stands for; `ys` are the figures
    of a row that a picture shows."""

    axis: str
    values: str
    apply: Callable[[str], dict[str, Any]]
    ys: tuple[str, ...] = ("times_plain", "bound_times_plain")


# Rows that differ in none of these can share a runtime.
_LOADED_FOR = ("budget", "chunk_size", "context", "gamma_draft", "batch", "resident")
_ON_WEIGHTS = ("window", "resident")
SWEEPS = {
    "temperature": Sweep("temperature", "0,0.2,0.4,0.6,0.8,1.0,1.2", lambda text: {"temperature": float(text)}),
    "budget": Sweep(
        "retrieved tokens a layer and head", "1K,2K,3K,4K,6K,8K", lambda text: {"budget": parse_count(text)}
    ),
    "chunk": Sweep("tokens in a chunk", "2,4,8,16,32,64", lambda text: {"chunk_size": parse_count(text)}),
    "context": Sweep("tokens of context", "120K,64K,32K,16K,8K,4K", lambda text: {"context": parse_count(text)}),
    "gamma": Sweep("tokens proposed, to the target or (d) by the draft", "4,8,12,16,24,32,48,d1,d2,d4,d8", _gamma),
    "batch": Sweep("sequences x tokens of context", "2x56K,6x19K,10x12K", _batch),
    "window": Sweep(
        "tokens in the window of a pass", "1,2,4,8,16,32,64,128,256,512,1024",
        lambda text: {"window": parse_count(text)}, ("tok_per_s", "bound_tok_per_s"),
    ),
    "resident": Sweep(
        "share of the layers on the GPU", "0,1/8,1/4,3/8,1/2,5/8,3/4,7/8,1",
        lambda text: {"resident": Fraction(text)}, ("tok_per_s", "plain_tok_per_s", "bound_tok_per_s"),
    ),
}  # fmt: skip
# Of these there are results, which can be drawn, and they are not measured any more.
_DRAWN = {"policy": "who chooses the chunks", "needle": "depth of the needle"}


def points_of(options: argparse.Namespace) -> list[tuple[str, argparse.Namespace]]:
    """Label and options of each row, longer contexts first. Raises `OptionError`."""
    sweep, found = SWEEPS[options.sweep], list[tuple[str, argparse.Namespace]]()
    for text in (options.values or sweep.values).split(","):
        try:
            changed = argparse.Namespace(**{**vars(options), **sweep.apply(text)})
        except (ValueError, ZeroDivisionError) as error:
            raise OptionError(f"{text!r} is no value of {options.sweep}: take such as {sweep.values}") from error
        check_long(changed)
        harness.require_all_positive(changed, "gamma", "batch", "starts", "gamma_draft", "window", "passes")
        if not 0 <= changed.resident <= 1:
            raise OptionError(f"{text} is no share of the layers: take such as {sweep.values}")
        if changed.starts > changed.context // 8 and options.sweep not in _ON_WEIGHTS:
            raise OptionError(f"{changed.starts} --starts do not fit {changed.context} tokens of context: lower it")
        SamplingParams(changed.temperature)
        found.append((text, changed))
    return found


def answers_of(
    scheduler: Scheduler, prompts: Sequence[Sequence[int]], params: GenerationParams, *, speculate: bool
) -> list[Answer]:
    """All at once, behind what the slots hold already."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: timed_answer(scheduler, prompt, params, speculate=speculate), prompts))


def agrees(one: GenerationResult, other: GenerationResult) -> bool:
    """Whether two answers begin alike, as far as both go."""
    return leading_agreement(one.tokens, other.tokens) == min(len(one.tokens), len(other.tokens))


def s_per_token(answers: Sequence[Answer]) -> float:
    """Of all sequences together: what a pass takes, over the tokens that it gives."""
    stats = [answer.result.stats for answer in answers]
    return max(one.measured_s_per_pass or 0.0 for one in stats) / sum(one.tokens_per_pass for one in stats)


def decoding_row(runtime: Runtime, options: argparse.Namespace, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Plain decoding and speculation from the same places, drawn from the last eighth of each text, the longest first:
    each finds the rest in the cache. The bound is as many tokens a pass as there were, passes as long as plain
    decoding's, and no drafting."""
    how: dict[str, Any] = {"ignore_eos": True, "sampling": SamplingParams(options.temperature, seed=SEED)}
    plainly = GenerationParams(options.plain_tokens, **how)
    warm_up, drafted = (
        GenerationParams(count, gamma=options.gamma, **how)
        for count in (min(WARM_UP_TOKENS, options.tokens), options.tokens)
    )
    count, length = -(-options.starts // len(texts)), options.context
    ends = random.Random(options.draw).sample(range(length - length // 8, length), count)
    places, same, found = list[dict[str, float]](), True, list[Answer]()
    with Scheduler(runtime) as scheduler:
        for text, end in product(texts, sorted(ends, reverse=True)):
            step = min(length, (len(text) - length) // max(1, options.batch - 1))
            prompts = [text[number * step :][:end] for number in range(options.batch)]
            answers_of(scheduler, prompts, warm_up, speculate=True)
            plain = answers_of(scheduler, prompts, plainly, speculate=False)
            found = answers_of(scheduler, prompts, drafted, speculate=True)
            same &= all(agrees(one.result, other.result) for one, other in zip(plain, found, strict=True))
            passes = sum(one.result.stats.tokens_per_pass for one in found) / len(found)
            times = {"plain_s_per_token": s_per_token(plain), "s_per_token": s_per_token(found)}
            places.append({"tokens": end, **times, "tokens_per_pass": passes})
    mean = {name: sum(place[name] for place in places) / len(places) for name in places[0] if name != "tokens"}
    return {
        **mean, "times_plain": mean["plain_s_per_token"] / mean["s_per_token"], "places": places,
        "bound_times_plain": mean["tokens_per_pass"], "identical_to_plain": same,
        "levels": found[0].result.stats.to_dict()["acceptance"],
    }  # fmt: skip


def weights_row(runtime: Runtime, options: argparse.Namespace, texts: Sequence[list[int]]) -> dict[str, Any]:
    """Passes over a window, or decoding with a share of the layers on the device. The bound is the bytes over the
    link, or nothing where none cross it; `predicted_s` is what the machine's profile says of a pass."""
    prompt = texts[0][: options.context]
    answer = partial(runtime.generate, prompt, ignore_eos=True, temperature=options.temperature, seed=SEED)
    plain = answer(max_new_tokens=options.plain_tokens, speculate=False)
    stats, peak_gbps = plain.stats, plain.stats.link_peak_gbps
    pass_s = stats.bytes_per_pass / (peak_gbps * GB) if peak_gbps and stats.bytes_per_pass else None
    if options.sweep == "window":
        width = options.window
        row = time_window(runtime, prompt, width, options.passes, nbytes=stats.bytes_per_pass, peak_gbps=peak_gbps)
        return {
            **row, **predicted_pass(runtime, len(prompt), width, row["pass_s"]["median"]), "bound_s": pass_s,
            "tok_per_s": width / row["pass_s"]["median"], "bound_tok_per_s": width / pass_s if pass_s else None,
        }  # fmt: skip
    answer(max_new_tokens=min(WARM_UP_TOKENS, options.tokens))
    found = answer(max_new_tokens=options.tokens)
    return {
        "resident_share": float(options.resident), "plain_tok_per_s": stats.tok_per_s,
        "tok_per_s": found.stats.tok_per_s, "tokens_per_pass": found.stats.tokens_per_pass, "bound_s": pass_s,
        "bound_tok_per_s": found.stats.tokens_per_pass / pass_s if pass_s else None,
        "windows": found.stats.windows, "identical_to_plain": agrees(found, plain),
    }  # fmt: skip


def read_texts(options: argparse.Namespace, small: CheckpointSource) -> list[list[int]]:
    """Token ids of each text, from a drawn place on. Raises `OptionError`."""
    needed, chance, found = options.context + options.batch - 1, random.Random(options.draw), list[list[int]]()
    for path in (options.text, *options.other_text):
        text = harness.read_tokens(path, "--text", small.tokenizer(), needed, lower="--context")
        found.append(text[chance.randrange(max(1, len(text) - options.batch * options.context)) :])
    return found


def rows_of(points: Sequence[tuple[str, argparse.Namespace]]) -> Iterator[dict[str, Any]]:
    """Measure rows, those that can share a runtime with one."""
    first = points[0][1]
    models, on_weights = sources(first), first.sweep in _ON_WEIGHTS
    for _, grouped in groupby(points, key=lambda point: [getattr(point[1], name) for name in _LOADED_FOR]):
        group = [*grouped]
        options = group[0][1]
        widest = max(max(one.window, one.gamma) for _, one in group)
        texts = read_texts(options, models[1])
        steps = {"gamma_draft": options.gamma_draft, "refresh_steps": options.refresh_steps}
        hierarchy = replace(speculation_of(options), mode="chain" if on_weights else "triforce", **steps)
        layers = round(options.resident * models[0].config().num_layers) if on_weights else "auto"
        with load(
            options, models, hierarchy, max_gamma=max(63, widest), context=options.context, max_batch=options.batch,
            resident_layers=layers,
        ) as runtime:  # fmt: skip
            for label, one in group:
                made = (weights_row if on_weights else decoding_row)(runtime, one, texts)
                yield {"value": label, **made, "loaded": runtime.placement}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The report, written row by row. Raises `OptionError`."""
    points, out = points_of(options), options.out
    origin = provenance(resolve_device(options.device), commit=options.commit)
    settings = harness.settings_of(options, without=("values", "out", "commit"))
    report: dict[str, Any] = {
        "benchmark": "sweep", "sweep": options.sweep, **origin, "settings": settings,
        "measured_on": origin["machine"].get("gpu", origin["machine"]["cpu"]), "rows": [],
    }  # fmt: skip
    if out is not None and out.exists():
        before = read_report(out)
        if before["sweep"] != options.sweep:
            raise OptionError(f"{out} holds the sweep of {before['sweep']}: name another file")
        if all(before.get(name) == report[name] for name in ("settings", "commit", "measured_on")):
            report["rows"] = before["rows"]
    missing = [point for point in points if point[0] not in {row["value"] for row in report["rows"]}]
    for row in rows_of(missing) if missing else ():
        report["rows"].append(row)
        shown = {name: round(value, 4) for name, value in row.items() if isinstance(value, int | float)}
        print(f"{options.sweep} {row['value']}: {json.dumps(shown)}", flush=True)
        if out is not None:
            write_report(report, out, indent=1)
    return report


def read_report(path: Path) -> dict[str, Any]:
    """What a sweep has written. Raises `OptionError`."""
    text = read_text(path)
    try:
        found: dict[str, Any] = json.loads(text)
        if found["sweep"] in (*SWEEPS, *_DRAWN) and found["rows"][0]["value"]:
            return found
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise OptionError(f"{path} is no result of a sweep ({type(error).__name__}): name another file") from error
    raise OptionError(f"{path} is no result of a sweep that is known: name another file")


def curves_of(report: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """What a picture of a report shows, by name."""
    rows, sweep = report["rows"], report["sweep"]
    if sweep == "needle":
        return {
            f"{policy}: agreement": [row["policies"][policy]["agreement"] for row in rows]
            for policy in rows[0]["policies"]
        }
    flat = [{**row, **row.get("drafted", {})} for row in rows]  # of older files
    names = ("times_plain", "bound_times_plain") if sweep in _DRAWN else SWEEPS[sweep].ys
    return {name: [row.get(name) for row in flat] for name in names if any(name in row for row in flat)}


def draw(path: Path, report: Mapping[str, Any], folder: Path) -> Path:
    """A line or bars for each figure, bounds dashed. Raises `StorageError`."""
    from matplotlib.figure import Figure

    sweep, labels = report["sweep"], [row["value"] for row in report["rows"]]
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for name, values in curves_of(report).items():
        known = [float("nan") if value is None else value for value in values]
        axes.plot(labels, known, "--" if "bound" in name else "-o", label=name.replace("_", " "))
    axes.set_xlabel(_DRAWN.get(sweep) or SWEEPS[sweep].axis)
    axes.set_title(f"{report['measured_on']}, commit {report['commit']}", fontsize="small")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize="small")
    picture = folder / f"{path.stem}.svg"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, metadata={"Date": None})
    except OSError as error:
        raise StorageError(f"{picture} cannot be written ({error}): name another --out") from error
    return picture


def draw_files(words: Sequence[str]) -> int:
    """`draw FILE ... --out FOLDER`."""
    parser = harness.Parser(prog="sweep.py draw", description="Draw the rows of result files.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="directory of the pictures")
    options = parser.parse_args(words)
    reports = {path: read_report(path) for path in options.files}
    print(*(draw(path, report, options.out) for path, report in reports.items()), sep="\n")
    return 0


def make_parser() -> harness.Parser:
    """The options of every sweep."""
    parser = harness.bench_parser(__doc__)
    parser.add_argument("sweep", choices=SWEEPS, help="or draw FILE ... --out FOLDER")
    add_long_options(parser)
    parser.set_defaults(kv="gpu", tokens=64, context=None, batch=1, window=1, resident=Fraction(0))
    parser.add_argument("--values", help="of the sweep, like 1,17: instead of all")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--gamma", type=int, default=24, help="tokens proposed to a pass of the target")
    parser.add_argument("--gamma-draft", type=int, default=24, help="tokens proposed to a verifier step")
    parser.add_argument("--refresh-steps", type=int, help="by itself as of the runtime")
    parser.add_argument("--starts", type=int, default=4, help="places that a row is measured from")
    parser.add_argument("--other-text", type=Path, nargs="+", default=[], help="texts that have their share of them")
    parser.add_argument("--draw", type=int, default=1, metavar="SEED", help="of these places")
    parser.add_argument("--passes", type=int, default=8, help="of window: timed passes of each")
    return parser


@harness.one_line_errors
def main(words: Sequence[str] | None = None) -> int:
    """Measure, or draw, and print; returns the exit code."""
    words = sys.argv[1:] if words is None else list(words)
    if words[:1] == ["draw"]:
        return draw_files(words[1:])
    options = make_parser().parse_args(words)
    check_out(options.out)
    options.context = options.context or (512 if options.sweep in _ON_WEIGHTS else 122880)
    report = measure(options)
    emit(report)
    return 0 if all(row.get("identical_to_plain", True) for row in report["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
