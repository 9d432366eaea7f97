"""The controller of how much to propose, against the best fixed window: a streamed target, drafts of any quality.

    python tools/bench_controller.py --source SmolLM2-135M.gguf --prompt-file BOOK --prompt-file PROGRAM \\
        --emulate rtx4090 --noises 0.02,0.1,1 --gammas 8,24 --nodes 128,512 --out FILE

For every draft (a copy of the small model with noise) one runtime is loaded. It answers every prompt as its controller
chooses, then with chains of `--gammas` tokens, with trees of `--nodes` tokens, and plainly. All answers have the same
tokens, which is checked. Prints a table with the controller's speed beside that of the best fixed window, then one JSON
line. Windows of other sizes than the controller's own may need a CUDA graph, so each fixed one has played a few steps
before it is timed; the controller's first answer comes after one at another temperature, of whose acceptance it makes
no use, and its later ones (`--repeats`) are about a text that it knows.

It takes nothing from the package but `Runtime.load`, `generate` and the stats. As it was at a85f23b it runs from older
checkouts, too: a copy of that file in their `tools` measures what chose windows then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
from bench_trees import add_model_options, check_models, generate
from harness import emit, percentiles, provenance, write_unfinished
from widening.checkpoint import in_shape, noisy_copy

from offload_runtime.config import SamplingParams
from offload_runtime.engine import GenerationResult, Runtime
from offload_runtime.errors import OptionError
from offload_runtime.memory import resolve_device
from offload_runtime.weights import CheckpointSource, open_checkpoint

CONTROLLER, PLAIN = "controller", "plain"
# Warm-up answers are sampled at another temperature than measured ones: a controller keeps acceptance by it.
_WARM_UP_TEMPERATURE = 1.1
# A fixed window's warm-up answer: a step or two with a good draft, eight of less than half a second with a useless one.
_WARM_UP_TOKENS = 8


# What a generation proposes each pass: tokens in a row and a tree of nodes, or, None of both, what is chosen.
Window = tuple[int | None, int | None]


def window_row(name: str, results: Sequence[GenerationResult]) -> dict[str, Any]:
    """The figures of one window: speeds of all its answers, the rest of the last one."""
    speeds, stats = [result.stats.tok_per_s for result in results], results[-1].stats
    spread = percentiles(speeds)
    return {
        "window": name, "tok_per_s": spread.median, "tok_per_s_p20": spread.p20, "tok_per_s_p80": spread.p80,
        "tok_per_s_of_answers": speeds, "tokens": stats.new_tokens, "passes": stats.passes,
        "tokens_per_pass": stats.tokens_per_pass, "s_per_pass": stats.measured_s_per_pass,
        "bytes_per_pass": stats.bytes_per_pass, "link_idle_share": stats.link_idle_share,
        "accepted_by_source": stats.accepted_by_source, "windows": stats.windows,
    }  # fmt: skip


def windows_of(options: argparse.Namespace) -> dict[str, Window]:
    """By their names the controller, the fixed windows that it is held against, and plain decoding."""
    chains: dict[str, Window] = {f"chain {gamma}": (gamma, 0) for gamma in options.gammas}
    trees: dict[str, Window] = {f"tree {nodes}": (None, nodes) for nodes in options.nodes}
    return {CONTROLLER: (None, None), **chains, **trees, PLAIN: (0, 0)}


def load(options: argparse.Namespace, small: CheckpointSource, noise: float) -> Runtime:
    """The target of `--shape` with the small model and so much noise as its draft; sizes are left to the controller."""
    device = resolve_device(options.device)
    target, draft = in_shape(small, options.shape, device=device), noisy_copy(small, noise, device=device)
    return Runtime.load(
        target, draft=draft, device=options.device, dtype=options.dtype, vram=options.vram,
        resident_layers=options.resident_layers, context=options.context, emulate=options.emulate,
        profile=options.profile,
    )  # fmt: skip


def measure(options: argparse.Namespace, small: CheckpointSource, noise: float) -> Iterator[dict[str, Any]]:
    """Rows of one draft: of each prompt the controller's first."""
    with load(options, small, noise) as runtime:
        print(f"noise {noise}: {runtime.placement}", file=sys.stderr, flush=True)
        prompts = {
            path.stem: runtime.encode(harness.read_text(path, "--prompt-file"))[: options.prompt_tokens]
            for path in options.prompt_file
        }
        windows = warmed_up(runtime, next(iter(prompts.values())), options)
        for name, prompt in prompts.items():
            expected: list[int] = []
            for window, (depth, nodes) in windows.items():
                count = options.plain_tokens if window == PLAIN else options.tokens
                results = [
                    generate(runtime, prompt, count, temperature=options.temperature, depth=depth, nodes=nodes)
                    for _ in range(options.repeats)
                ]
                expected = expected or results[0].tokens
                yield {
                    "noise": noise, "prompt": name, "temperature": options.temperature, "emulated": runtime.emulated,
                    **window_row(window, results),
                    "identical": all(result.tokens == expected[:count] for result in results),
                }  # fmt: skip


def warmed_up(runtime: Runtime, prompt: Sequence[int], options: argparse.Namespace) -> dict[str, Window]:
    """Play each window once, so that kernels are compiled and graphs captured; returns those that have room.

    Raises:
        OptionError: Not even one fixed window that proposes anything has room.
    """
    kept, refusal = dict[str, Window](), ""
    for name, (depth, nodes) in windows_of(options).items():
        count = {CONTROLLER: options.warm_up_tokens, PLAIN: 2}.get(name, _WARM_UP_TOKENS)
        try:
            generate(runtime, prompt, count, temperature=_WARM_UP_TEMPERATURE, depth=depth, nodes=nodes)
        except OptionError as error:
            refusal = f"{name} is left out: {error}"
            print(refusal, file=sys.stderr, flush=True)
        else:
            kept[name] = depth, nodes
    if kept.keys() == {CONTROLLER, PLAIN}:
        raise OptionError(refusal)
    return kept


def ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The controller's speed beside the best fixed window's, by draft and prompt, of those that are measured."""
    by_case: dict[tuple[float, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_case.setdefault((row["noise"], row["prompt"]), []).append(row)
    found = []
    for (noise, prompt), (chosen, *fixed) in by_case.items():
        if not fixed:
            continue
        best = max(fixed, key=lambda row: row["tok_per_s"])
        found.append({
            "noise": noise, "prompt": prompt, "controller_tok_per_s": chosen["tok_per_s"], "best": best["window"],
            "best_tok_per_s": best["tok_per_s"], "ratio": chosen["tok_per_s"] / best["tok_per_s"],
            "fixed": [row["window"] for row in fixed],
        })  # fmt: skip
    return found


def row_line(row: Mapping[str, Any]) -> str:
    """One row of the table."""
    windows = ", ".join(f"{name} x {count}" for name, count in list(row["windows"].items())[:4])
    return (
        f"noise {row['noise']:<5} {row['prompt'][:12]:12} {row['window']:10} {row['tok_per_s']:7.2f} tok/s "
        f"({row['tok_per_s_p20']:.2f} to {row['tok_per_s_p80']:.2f}) {row['tokens_per_pass']:6.2f} tokens a pass "
        f"{row['s_per_pass'] or 0:.4f} s a pass" + (f": {windows}" if row["window"] == CONTROLLER else "")
        + ("" if row["identical"] else " DIFFERS")
    )  # fmt: skip


def ratio_line(ratio: Mapping[str, Any]) -> str:
    """What counts, for one draft and prompt."""
    return (
        f"noise {ratio['noise']:<5} {ratio['prompt'][:12]:12} controller {ratio['controller_tok_per_s']:.2f} of "
        f"{ratio['best_tok_per_s']:.2f} tok/s of {ratio['best']}, the best of {len(ratio['fixed'])} fixed windows: "
        f"{ratio['ratio']:.3f}"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = harness.bench_parser(__doc__)
    add_model_options(parser)
    parser.add_argument("--prompt-file", type=Path, action="append", required=True, help="a text to begin with; repeat")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--gammas", type=harness.integers, default=(4, 8, 16, 24), help="of fixed chains")
    parser.add_argument("--nodes", type=harness.integers, default=(32, 128, 512, 1024), help="of fixed trees")
    parser.add_argument("--warm-up-tokens", type=int, default=24, help="that the controller plays first")
    parser.add_argument("--repeats", type=int, default=1, help="answers of each window to each prompt")
    parser.add_argument("--profile", help="figures to plan by, by a profile's name or file")
    return parser.parse_args(argv)


def check(options: argparse.Namespace) -> None:
    """Refuse what makes no sense. Raises as `check_models`."""
    if not options.gammas and not options.nodes:
        raise OptionError("--gammas and --nodes are both empty: name a fixed window to hold the controller against")
    harness.require_all_positive(options, "warm_up_tokens", "repeats", "gammas", "nodes")
    if min(options.tokens, options.plain_tokens) < 2:
        raise OptionError("--tokens and --plain-tokens must be at least 2: the first token is prefill's")
    SamplingParams(temperature=options.temperature)
    harness.check_machine(None, options.profile)
    if len({path.stem for path in options.prompt_file}) < len(options.prompt_file):
        raise OptionError("two --prompt-file have the same name: rows are told apart by it")
    check_models(options, [(path, "--prompt-file") for path in options.prompt_file])


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 1 when an answer had other tokens than the controller's."""
    options = parse(argv)
    check(options)
    settings = {key: value for key, value in vars(options).items() if key not in ("out", "commit")}
    settings |= {"source": options.source.name, "prompt_file": [path.name for path in options.prompt_file]}
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {"benchmark": "controller", "settings": settings, "rows": rows, "ratios": []}
    small = open_checkpoint(options.source)
    for noise in options.noises:
        for row in measure(options, small, noise):
            rows.append(row)
            if "machine" not in report:  # asked for once something is measured: that alone would hold some of the GPU
                report |= provenance(resolve_device(options.device), commit=options.commit)
            report["ratios"] = ratios(rows)
            write_unfinished(report, options.out)
            print(row_line(row), file=sys.stderr, flush=True)
    print("\n".join([*map(row_line, rows), *map(ratio_line, report["ratios"])]))
    emit(report, options.out)
    return 0 if all(row["identical"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
