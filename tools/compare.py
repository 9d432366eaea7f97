"""This runtime beside others on one model, with the same memory, prompts, lengths and dtype.

    python tools/compare.py --target wide-13b --draft demo --prompt-file story.txt --out comparison.json
    python tools/compare.py --synthetic llama2-13b --source demo --noise 0.05 --draft demo --prompt-file story.txt
    python tools/compare.py --synthetic llama2-7b --systems ours-plain,deepspeed,accelerate --out comparison.json

Every system runs in its own process. A peer that is not installed is reported as missing, one that lacks what it needs
as skipped, each with the reason. Prints a table, then one JSON line; writes the JSON and the chart (PNG and SVG) beside
it. Exit code 1 when a system that is installed failed. docs/benchmarks.md says how each is set up.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import systems
import torch
from common import PASSED_ON, SHAPES, add_run_options, as_words, check_context, model_name, options_from, peer_parser
from harness import check_out, emit, provenance, write_unfinished
from ours_runtime import NO_MODEL, add_our_options, our_options

from offload_runtime.errors import OptionError
from offload_runtime.options import require_positive
from offload_runtime.plan.sizes import resolve_context
from offload_runtime.stream.device import resolve_device
from offload_runtime.weights.checkpoint import share_vocabulary
from offload_runtime.weights.sources import fetch_demo_model, open_checkpoint

# Options that only some systems take, and that must not be given where none of them is asked for.
_OF_SOME = (
    "draft", "context", "speculation", "gamma", "tree_nodes", "budget_tokens", "draft_cache", "assistant_tokens",
    "prefill_chunk", "weights", "encode", "emulate", "devices",
)  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = harness.make_parser(__doc__)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--target", help="checkpoint: a directory, a .gguf file or a hub id; see widen_model.py")
    model.add_argument("--synthetic", choices=sorted(SHAPES), help="made in memory: random weights of this shape")
    known = ", ".join(systems.SYSTEMS)
    parser.add_argument("--systems", default=",".join(systems.SYSTEMS), help=f"comma-separated, of: {known}")
    parser.add_argument("--prompt-file", type=Path, action="append", default=[], help="text; may be repeated")
    add_run_options(parser)
    parser.set_defaults(new_tokens=64, out=Path("comparison.json"))
    add_our_options(parser)
    parser.add_argument(
        "--assistant-tokens", help="of deepspeed-assistant: numbers of proposals to try, the best counts: auto,4,8,16"
    )
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one system")
    return parser


def chosen_systems(text: str) -> list[str]:
    """The systems asked for. Raises `OptionError` for one that there is not."""
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in systems.SYSTEMS]
    if unknown or not names:
        raise OptionError(f"unknown system {unknown[0] if unknown else text!r}: choose of {', '.join(systems.SYSTEMS)}")
    if len(set(names)) < len(names):
        raise OptionError(f"--systems {text} names a system twice: name each once")
    return names


def read_prompts(arguments: argparse.Namespace) -> list[list[int]]:
    """Every prompt's token ids, by the target's own tokenizer.

    Raises:
        OptionError: A file cannot be read or has too few tokens, or prompt and answer exceed `--context`.
        CheckpointError, HubError, VocabularyMismatchError: A model cannot be opened, or the draft is another's.
    """
    source = open_checkpoint(arguments.target or arguments.source)
    tokenizer = source.tokenizer()
    if arguments.draft not in NO_MODEL:
        share_vocabulary(source, open_checkpoint(arguments.draft))  # raises what would be in its way
    prompts = []
    for path in arguments.prompt_file:
        count = arguments.prompt_tokens
        tokens = harness.read_tokens(path, "--prompt-file", tokenizer, count, lower="--prompt-tokens")[:count]
        check_context(arguments.context, str(path), len(tokens) + arguments.new_tokens)
        prompts.append(tokens)
    return prompts


def check(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """Refuse what makes no sense for these systems. Raises `OptionError`, and `DeviceError` without the device."""
    if not 1 <= arguments.timeout < math.inf:
        raise OptionError(f"--timeout must be at least 1 second and finite, not {arguments.timeout}")
    for option in ("prompt_tokens", "context"):
        if (value := getattr(arguments, option)) is not None:
            require_positive(f"--{option.replace('_', '-')}", value)
    resolve_device(arguments.device)
    taken = {option for name in names for option in systems.SYSTEMS[name].takes}
    for option in _OF_SOME:
        if getattr(arguments, option) is not None and option not in taken:
            raise OptionError(f"--{option.replace('_', '-')} is for none of {', '.join(names)}: leave it out")
    for option in ("layers", "source", "noise", "stored") if arguments.target is not None else ():
        if getattr(arguments, option) is not None:
            raise OptionError(f"--{option} is of a synthetic shape: leave it out with --target")
    speaks = arguments.target is not None or arguments.source is not None
    if speaks and not arguments.prompt_file:
        raise OptionError("a model with a language needs a prompt: name a text with --prompt-file")
    if not speaks and (arguments.prompt_file or arguments.draft):
        raise OptionError(
            "--synthetic has no language: give it that of a small model with --source, or leave out --prompt-file and "
            "--draft"
        )
    if {"ours", "ours-chains"} & set(names):
        our_options(arguments)
    if not speaks:
        check_context(arguments.context, "the prompt", (arguments.prompt_tokens or 512) + arguments.new_tokens)
    check_out(arguments.out)


def run_all(
    arguments: argparse.Namespace, names: Sequence[str], run: Callable[..., dict[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure the systems one after the other by `run`: name and result of each."""
    with tempfile.TemporaryDirectory() as folder:
        prompts = None
        if arguments.prompt_file:
            prompts = Path(folder) / "prompts.json"
            prompts.write_text(json.dumps(read_prompts(arguments)))
        common = ["--target", arguments.target] if arguments.target else ["--shape", arguments.synthetic]
        common += as_words(arguments, ["prompt_tokens"]) if prompts is None else ["--prompts", str(prompts)]
        common += as_words(arguments, PASSED_ON)
        own: dict[str, Sequence[str]] = {name: as_words(arguments, [name]) for name in (*_OF_SOME, "kv")}
        own["kv_cache"] = "--kv-cache", "offloaded" if arguments.kv == "host" else "device"
        # What no system could run with is said once, and before the first of them has loaded anything.
        options = options_from(peer_parser("").parse_args([*common, *own["assistant_tokens"], *own["prefill_chunk"]]))
        if arguments.context is not None:
            resolve_context(arguments.context, options.source.config(), kv=arguments.kv)
        for number, name in enumerate(names):
            print(f"{name} ({number + 1} of {len(names)})", end=": ", file=sys.stderr, flush=True)
            result = run(systems.SYSTEMS[name], common, own, draft=arguments.draft, timeout_s=arguments.timeout)
            print(systems.outcome(result), file=sys.stderr, flush=True)
            yield name, result


def make_report(arguments: argparse.Namespace, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The measurements and what they say together."""
    settings = {
        **vars(arguments), "target": model_name(arguments.target), "draft": model_name(arguments.draft),
        "source": model_name(arguments.source),
        "prompt_file": [path.name for path in arguments.prompt_file], "out": arguments.out.name,
    }  # fmt: skip
    return {
        "benchmark": "comparison", "results": results, "times_ours_over": systems.times_ours_over(results),
        "bound": systems.link_bound(results),
        "agreement": systems.agreements(results, greedy=arguments.temperature == 0),
        "configuration": settings,
    }  # fmt: skip


def compare(arguments: argparse.Namespace, names: Sequence[str], run: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Run the systems; the report. What is measured so far is in the file after each of them."""
    results: dict[str, dict[str, Any]] = {}
    for name, result in run_all(arguments, names, run):
        results[name] = result
        not_run = [other for other in names if other not in results]
        write_unfinished({**make_report(arguments, results), "not_run": not_run}, arguments.out)
    # Only now: what this process would hold of the GPU, the systems could not have.
    return {**make_report(arguments, results), **provenance(torch.device(arguments.device), commit=arguments.commit)}


@harness.one_line_errors
def main(argv: Sequence[str] | None = None, *, run: Callable[..., dict[str, Any]] = systems.run_system) -> int:
    """Run the chosen systems, each by `run`; returns the exit code."""
    arguments = make_parser().parse_args(argv)
    names = chosen_systems(arguments.systems)
    check(arguments, names)
    for option in ("draft", "source"):
        if getattr(arguments, option) == "demo":
            setattr(arguments, option, str(fetch_demo_model()))
    report = compare(arguments, names, run)
    results = report["results"]
    print(systems.table(report))
    emit(report, arguments.out)
    failed = any("error" in result for result in results.values())
    return 1 if failed or not systems.measured(results) else 0


if __name__ == "__main__":
    sys.exit(main())
