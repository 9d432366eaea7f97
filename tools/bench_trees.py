"""What trees of a draft model bring while a streamed target's passes run, and whether windows are chosen well.

    python tools/bench_trees.py --source SmolLM2-135M.gguf --text BOOK --code FILE --emulate rtx4090 \\
        --gammas 16,48 --nodes 256,1024 --out FILE

A widened target's weights come over the link, for drafts of several qualities (copies of the small model with noise):
decoded plainly, with windows as the controller chooses them (`auto`), with chains of `--gammas` tokens and with trees
of `--nodes`. All answers to a prompt have the same tokens, which is checked. Beside each answer stands the share of the
time that the link was idle, the time from pass to pass against its bytes over the link and, with `--trace`, the share
of drafting that was hidden behind passes; at the end the controller's speed beside that of the best fixed window. Each
window has made a few steps before it is timed, at another temperature, of whose acceptance the controller makes no
use. Prints a table, then one JSON line; exit code 1 when an answer was not that of plain decoding.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import harness
from emulation import emulated
from harness import check_out, emit, provenance, write_unfinished
from widening.checkpoint import in_shape, noisy_copy
from widening.shapes import shape_named

from offload_runtime.engine import GenerationResult, Runtime
from offload_runtime.errors import OptionError
from offload_runtime.params import SamplingParams
from offload_runtime.sizes import GB
from offload_runtime.stream import resolve_device
from offload_runtime.weights import CheckpointSource, open_checkpoint

PLAIN, AUTO = "plain", "auto"
# Of an answer before those that are measured: of the controller's windows, and of a fixed one, which is a step or two
# with a good draft and eight of less than half a second with a useless one.
_WARM_UP_TOKENS, _WARM_UP_FIXED_TOKENS = 24, 8
_WARM_UP_TEMPERATURE = 1.1

# What a generation proposes each pass: tokens in a row and nodes of a tree, or, None of both, what is chosen.
Window = tuple[int | None, int | None]


def answer_row(result: GenerationResult, before: Sequence[GenerationResult] = ()) -> dict[str, Any]:
    """Figures of one answer, beside others to the same: the first is that of plain decoding."""
    stats = result.stats
    row: dict[str, Any] = {
        "tokens": stats.new_tokens, "passes": stats.passes,
        "tokens_per_pass": stats.tokens_per_pass, "tok_per_s": stats.tok_per_s, "s_per_pass": stats.measured_s_per_pass,
        "bytes_per_pass": stats.bytes_per_pass, "hidden_draft_share": stats.hidden_draft_share,
        "link_idle_share": stats.link_idle_share, "accepted_by_source": stats.accepted_by_source,
        "accepted_by_depth": list(stats.accepted_by_depth), "windows": stats.windows,
    }  # fmt: skip
    if stats.link_peak_gbps and stats.measured_s_per_pass:
        row["times_link"] = stats.measured_s_per_pass / (stats.bytes_per_pass / (stats.link_peak_gbps * GB))
    if before:
        compared = [list(zip(result.tokens, other.tokens, strict=False)) for other in before]
        row["identical"] = all(ours == theirs for pairs in compared for ours, theirs in pairs)
        row["identical_tokens"] = max(map(len, compared))
        row["times_plain"] = stats.tok_per_s / before[0].stats.tok_per_s
    return row


def generate(
    runtime: Runtime, prompt: Sequence[int], count: int, *, temperature: float, depth: int | None, nodes: int | None
) -> GenerationResult:
    """One answer; `nodes` 0 proposes chains of `depth`, `depth` 0 nothing at all, and None of both what is chosen.

    Raises:
        OptionError: The runtime has no room for such a window.
    """
    how: dict[str, Any] = {"speculate": False} if depth == 0 else {"gamma": depth, "tree_nodes": nodes}
    return runtime.generate(list(prompt), max_new_tokens=count, temperature=temperature, ignore_eos=True, **how)


def windows_of(options: argparse.Namespace) -> dict[str, Window]:
    """By their names plain decoding, what is chosen, and the fixed windows that this is held against."""
    chains: dict[str, Window] = {f"chain {gamma}": (gamma, 0) for gamma in options.gammas}
    trees: dict[str, Window] = {f"tree {nodes}": (None, nodes) for nodes in options.nodes}
    return {PLAIN: (0, 0), AUTO: (None, None), **chains, **trees}


def warmed_up(runtime: Runtime, prompt: Sequence[int], windows: dict[str, Window]) -> dict[str, Window]:
    """Play each window once, so that kernels are compiled and graphs captured; returns those that have room."""
    kept = dict[str, Window]()
    for name, (depth, nodes) in windows.items():
        count = {PLAIN: 2, AUTO: _WARM_UP_TOKENS}.get(name, _WARM_UP_FIXED_TOKENS)
        try:
            generate(runtime, prompt, count, temperature=_WARM_UP_TEMPERATURE, depth=depth, nodes=nodes)
        except OptionError as error:
            print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
        else:
            kept[name] = depth, nodes
    return kept


def measure_streamed(options: argparse.Namespace, small: CheckpointSource, noise: float) -> Iterator[dict[str, Any]]:
    """Rows of one draft over a streamed target."""
    device = resolve_device(options.device)
    target = options.target or in_shape(small, options.shape, device=device)
    with Runtime.load(
        target, draft=noisy_copy(small, noise, device=device), dtype=options.dtype,
        resident_layers=options.resident_layers, context=options.context, trace=options.trace,
        **emulated(
            options.emulate, device=options.device, vram=options.vram, profile=options.profile, dtype=options.dtype
        ),
    ) as runtime:  # fmt: skip
        print(f"noise {noise}: {runtime.placement}", file=sys.stderr, flush=True)
        texts = {"prose": harness.read_text(options.text, "--text"), "code": harness.read_text(options.code, "--code")}
        prompts = {name: runtime.encode(text)[: options.prompt_tokens] for name, text in texts.items()}
        windows = warmed_up(runtime, prompts["prose"], windows_of(options))
        for temperature, (name, prompt) in product(options.temperatures, prompts.items()):
            before: list[GenerationResult] = []
            for how, (depth, nodes) in windows.items():
                count = options.plain_tokens if how == PLAIN else options.tokens
                result = generate(runtime, prompt, count, temperature=temperature, depth=depth, nodes=nodes)
                yield {
                    "noise": noise, "emulated": options.emulate, "link_peak_gbps": result.stats.link_peak_gbps,
                    "prompt": name, "temperature": temperature, "how": how, **answer_row(result, before),
                }  # fmt: skip
                before.append(result)


def best_fixed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The controller's speed beside the best fixed window's, by draft, temperature and prompt, as far as measured."""
    by_case: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        by_case.setdefault((row["noise"], row["temperature"], row["prompt"]), {})[row["how"]] = row["tok_per_s"]
    found = []
    for (noise, temperature, prompt), speeds in by_case.items():
        fixed = {how: speed for how, speed in speeds.items() if how not in (PLAIN, AUTO)}
        if AUTO in speeds and fixed:
            best = max(fixed, key=lambda how: fixed[how])
            found.append({
                "noise": noise, "temperature": temperature, "prompt": prompt, "auto_tok_per_s": speeds[AUTO],
                "best": best, "best_tok_per_s": fixed[best], "ratio": speeds[AUTO] / fixed[best], "fixed": list(fixed),
            })  # fmt: skip
    return found


def table(report: dict[str, Any]) -> str:
    """The figures for people."""
    lines = []
    for row in report["streamed"]:
        shares = " ".join(
            f"{name} {row[key]:.3f}" if row.get(key) is not None else f"{name} -"
            for name, key in (("hidden", "hidden_draft_share"), ("idle", "link_idle_share"), ("x link", "times_link"))
        )
        lines.append(
            f"noise {row['noise']:<5} T {row['temperature']} {row['prompt']:5} {row['how']:10} "
            f"{row['tokens_per_pass']:6.2f} tokens a pass {row['tok_per_s']:7.2f} tok/s "
            f"{row['s_per_pass']:.4f} s a pass {shares}"
            + (f" {row['times_plain']:.2f} x plain" if "times_plain" in row else "")
            + ("" if row.get("identical", True) else " DIFFERS")
        )
    for ratio in report["auto"]:
        lines.append(
            f"noise {ratio['noise']:<5} T {ratio['temperature']} {ratio['prompt']:5} auto "
            f"{ratio['auto_tok_per_s']:.2f} of {ratio['best_tok_per_s']:.2f} tok/s of {ratio['best']}, the best of "
            f"{len(ratio['fixed'])} fixed windows: {ratio['ratio']:.3f}"
        )
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = harness.bench_parser(__doc__)
    parser.add_argument("--source", type=Path, required=True, help="the small model")
    parser.add_argument("--shape", default="llama2-13b", help="of the streamed target, or none: the small model's")
    parser.add_argument("--target", type=Path, help="a widened checkpoint of widen_model.py, instead of --shape")
    parser.add_argument("--noises", type=harness.floats, default=(0.02, 0.05, 0.1), help="of the drafts")
    parser.add_argument("--prompt-tokens", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--plain-tokens", type=int, default=8, help="decoded plainly")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--emulate", help="a machine, by a profile's name or file")
    parser.add_argument("--vram")
    parser.add_argument("--resident-layers", default="auto")
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--text", type=Path, required=True, help="prose to begin with")
    parser.add_argument("--code", type=Path, required=True, help="a program to begin with")
    parser.add_argument("--temperatures", type=harness.floats, default=(0.0, 0.6))
    parser.add_argument("--gammas", type=harness.integers, default=(16,), help="of fixed chains")
    parser.add_argument("--nodes", type=harness.integers, default=(), help="of fixed trees")
    parser.add_argument("--trace", type=Path, help="of the streamed target with the last draft")
    parser.add_argument("--profile", help="figures to plan by, by a profile's name or file")
    return parser.parse_args(argv)


def check(options: argparse.Namespace) -> None:
    """Refuse what would fail only after minutes.

    Raises:
        OptionError: A number, a name or a text makes no sense; StorageError: `--out` cannot be written.
        DeviceError, ProfileError: There is no such device or machine.
    """
    harness.require_all_positive(options, "gammas", "nodes")
    harness.check_machine(None, options.profile)
    for temperature in options.temperatures:
        SamplingParams(temperature=temperature)
    resolve_device(options.device)
    harness.require_all_positive(options, "prompt_tokens", "tokens", "plain_tokens", "context")
    for noise in options.noises:
        if not 0 <= noise < math.inf:
            raise OptionError(f"--noises must be 0 or positive numbers, not {noise}")
    harness.check_machine(options.vram, options.emulate)
    if options.shape != "none":
        shape_named(options.shape)
    for path, option in ((options.text, "--text"), (options.code, "--code")):
        if not harness.read_text(path, option).strip():
            raise OptionError(f"{path} is empty: name a text to begin with by {option}")
    check_out(options.out)


def origin_of(options: argparse.Namespace) -> dict[str, Any]:
    """Settings and machine, asked for once something is measured: it would otherwise hold some of the GPU already."""
    settings = harness.settings_of(options, without=("out", "trace", "commit"))
    return {"settings": settings, **provenance(resolve_device(options.device), commit=options.commit)}


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    options = parse(argv)
    check(options)
    report: dict[str, Any] = {"benchmark": "trees", "streamed": [], "auto": []}
    origin: dict[str, Any] = {}
    small = open_checkpoint(options.source)
    for noise in options.noises:
        for row in measure_streamed(options, small, noise):
            report["streamed"].append(row)
            origin = origin or origin_of(options)
            report["auto"] = best_fixed(report["streamed"])
            write_unfinished({**report, **origin}, options.out)
            print(table({"streamed": [row], "auto": []}), file=sys.stderr, flush=True)
    print(table(report))
    emit(report | (origin or origin_of(options)), options.out)
    return 0 if all(row.get("identical", True) for row in report["streamed"]) else 1


if __name__ == "__main__":
    sys.exit(main())
