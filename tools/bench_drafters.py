"""What drafters bring on one target: tokens a pass, tokens/s and what was accepted, by the kind of text.

    python tools/bench_drafters.py --source smollm2-mtp --shape llama2-13b --text BOOK --out FILE \\
        --drafters none ngram mtp smollm2-eagle3 noise=0.05
    python tools/bench_drafters.py --source smollm2-mtp --shape llama2-13b --text BOOK --out FILE --emulate rtx4090 \\
        --drafters none ngram mtp noise=0.05 --gammas 16 --nodes 256 --plain-tokens 8

A small model in a large shape, or `--target`, answers prompts of six kinds (prose, code, a passage that is copied,
JSON, a chat, and random letters, of which nothing is known) at places that heads are never trained on, once with each
of `--drafters`: what `--draft` of the runtime takes (none, ngram, mtp, self, a model, several with commas), the
directory of an EAGLE-3 head for the small model, which is widened with it, or `noise=X`, the small model with noise on
its weights.
Windows are chosen as it runs (`auto`), or are chains of `--gammas` tokens and trees of `--nodes`. Each has made a few
steps before it is timed. All answers to a prompt have the same tokens, which is checked. Prints a table of the means
over places, and of the least against plain decoding, then one JSON line; exit code 1 when an answer was another one.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import harness
import texts
from emulation import emulated
from harness import check_out, emit, provenance, write_unfinished
from trace_spans import read_trace
from widening.checkpoint import in_shape, noisy_copy, widened_head
from widening.shapes import shape_named

from offload_runtime.engine import GenerationResult, Runtime
from offload_runtime.errors import OptionError
from offload_runtime.options import require
from offload_runtime.params import SamplingParams
from offload_runtime.stream.device import resolve_device
from offload_runtime.trace import DRAFT, PASSES, union_seconds
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.sources import open_checkpoint

PLAIN, AUTO, NOISE = "none", "auto", "noise="
# Of an answer before those that are measured, at a temperature of whose acceptance the controller makes no use.
_WARM_UP_TOKENS, _WARM_UP_TEMPERATURE = 24, 1.1
_SHOWN_DEPTHS = 6

# What a generation proposes each pass: tokens in a row and nodes of a tree, or, None of both, what is chosen.
Window = tuple[int | None, int | None]
# What is asked: temperature, kind of text, number of the place.
Case = tuple[float, str, int]


def draft_of(name: str, options: argparse.Namespace, small: CheckpointSource) -> Any:
    """What the runtime is given as its draft. Errors as of `open_checkpoint` and `widened_head`."""
    if name.startswith(NOISE):
        return noisy_copy(small, noise_of(name), device=resolve_device(options.device))
    if options.shape == "none" or not Path(name).is_dir():
        return name
    return widened_head(open_checkpoint(name, draft=True), shape_named(options.shape))


def _target_of(small: CheckpointSource, options: argparse.Namespace) -> CheckpointSource:
    """The small model in its shape, with noise on its weights if that is asked for."""
    device, noise = resolve_device(options.device), options.target_noise
    if options.shape == "none":
        return noisy_copy(small, noise, device=device) if noise else small
    return in_shape(small, options.shape, noise, device=device)


def noise_of(name: str) -> float:
    """X of `noise=X`. Raises `OptionError`: it is no number."""
    try:
        noise = float(name.removeprefix(NOISE))
    except ValueError:
        noise = -1.0
    if not 0 <= noise < math.inf:
        raise OptionError(f"--drafters {name!r} has no noise of 0 or more: write it like noise=0.05")
    return noise


def windows_of(options: argparse.Namespace, drafter: str) -> dict[str, Window]:
    """By their names what is chosen, and the fixed windows beside it."""
    if drafter == PLAIN:
        return {AUTO: (None, None)}
    chains: dict[str, Window] = {f"chain {gamma}": (gamma, 0) for gamma in options.gammas}
    trees: dict[str, Window] = {f"tree {nodes}": (None, nodes) for nodes in options.nodes}
    return {AUTO: (None, None), **chains, **trees}


def answer(runtime: Runtime, prompt: Sequence[int], count: int, temperature: float, window: Window) -> GenerationResult:
    """One answer. Raises `OptionError`: the runtime has no room for such a window."""
    depth, nodes = window
    return runtime.generate(
        list(prompt), max_new_tokens=count, temperature=temperature, ignore_eos=True, gamma=depth, tree_nodes=nodes
    )


def warmed_up(runtime: Runtime, prompt: Sequence[int], count: int, windows: dict[str, Window]) -> dict[str, Window]:
    """Make the kernels and graphs of each window; returns those that there is room for."""
    kept = dict[str, Window]()
    for name, window in windows.items():
        try:
            answer(runtime, prompt, min(count, _WARM_UP_TOKENS), _WARM_UP_TEMPERATURE, window)
        except OptionError as error:
            harness.say(f"{name} is left out: {error}")
        else:
            kept[name] = window
    return kept


def row_of(result: GenerationResult, before: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Figures of one answer, and whether it begins as those `before` do."""
    stats = result.stats
    compared = [list(zip(result.tokens, other, strict=False)) for other in before]
    return {
        "tokens": stats.new_tokens, "passes": stats.passes, "tokens_per_pass": stats.tokens_per_pass,
        "tok_per_s": stats.tok_per_s, "s_per_pass": stats.measured_s_per_pass, "bytes_per_pass": stats.bytes_per_pass,
        "link_peak_gbps": stats.link_peak_gbps, "link_idle_share": stats.link_idle_share,
        "hidden_draft_share": stats.hidden_draft_share, "accepted_by_source": stats.accepted_by_source,
        "accepted_by_depth": list(stats.accepted_by_depth), "windows": stats.windows,
        "identical": all(ours == theirs for pairs in compared for ours, theirs in pairs),
        "identical_tokens": max(map(len, compared), default=0),
    }  # fmt: skip


class Bench:
    """One target, whose answers are kept to compare others with.

    Attributes:
        rows: Of every answer.
        loads: Of every drafter where layers were placed and how long that took.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._small = options, open_checkpoint(options.source)
        self._target = options.target or _target_of(self._small, options)
        self._said: dict[Case, list[list[int]]] = {}
        self.rows: list[dict[str, Any]] = []
        self.loads: list[dict[str, Any]] = []

    def measure(self, drafter: str) -> Iterator[None]:
        """Answer everything with a drafter, row by row."""
        options, started_s = self._options, time.perf_counter()
        traced = options.trace and options.trace.with_name(f"{len(self.loads)}-{options.trace.name}")
        machine = emulated(
            options.emulate, device=options.device, vram=options.vram, profile=options.profile, dtype=options.dtype
        )
        with Runtime.load(
            self._target, draft=draft_of(drafter, options, self._small), dtype=options.dtype, trace=traced,
            resident_layers=options.resident_layers, context=options.context, **machine,
        ) as runtime:  # fmt: skip
            name = Path(drafter).name
            load = {"drafter": name, "placement": str(runtime.placement), "load_s": time.perf_counter() - started_s}
            harness.say(f"{drafter}: {runtime.placement}")
            self.loads.append(load)
            sizes = options.places, options.prompt_tokens, runtime.encode
            prompts = texts.prompts(options, options.kinds, *sizes)
            count = options.tokens if drafter != PLAIN or options.plain_tokens is None else options.plain_tokens
            windows = warmed_up(runtime, prompts[options.kinds[0]][0], count, windows_of(options, drafter))
            asked = product(options.temperatures, prompts, range(options.places), windows)
            for temperature, kind, place, window in asked:
                result = answer(runtime, prompts[kind][place], count, temperature, windows[window])
                said = self._said.setdefault((temperature, kind, place), [])
                how = {"drafter": name, "window": window, "kind": kind, "place": place, "temperature": temperature}
                self.rows.append(how | row_of(result, said))
                said.append(list(result.tokens))
                yield
        if traced:
            load["drafting_s_per_pass"] = drafting_s_per_pass(traced)


def drafting_s_per_pass(trace: Path) -> float:
    """Seconds in which something drafted, hidden or not, over the passes of a trace."""
    events = read_trace(trace).events
    drafting = [(event.start_s, event.end_s) for event in events if event.row == DRAFT]
    return union_seconds(drafting) / max(1, sum(event.row == PASSES for event in events))


def summarised(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over places, and of those the least against plain decoding."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = row["kind"], row["temperature"], row["drafter"], row["window"]
        groups.setdefault(key, []).append(row)
    plain = {
        (row["kind"], row["temperature"], row["place"]): row["tok_per_s"] for row in rows if row["drafter"] == PLAIN
    }
    found = []
    for (kind, temperature, drafter, window), members in groups.items():
        passes, depths = sum(row["passes"] for row in members), [row["accepted_by_depth"] for row in members]
        reached = [passes] + [
            sum(one[depth] for one in depths if depth < len(one)) for depth in range(max(map(len, depths)))
        ]
        pairs = [(row["tok_per_s"], plain.get((kind, temperature, row["place"]))) for row in members]
        ratios = [ours / theirs for ours, theirs in pairs if theirs]
        sources = {name for row in members for name in row["accepted_by_source"]}
        after_first = sum(row["tokens"] - 1 for row in members)
        found.append({
            "kind": kind, "temperature": temperature, "drafter": drafter, "window": window, "answers": len(members),
            "tokens_per_pass": after_first / max(1, passes),
            "tok_per_s": after_first / max(1e-9, sum((row["tokens"] - 1) / row["tok_per_s"] for row in members)),
            "s_per_pass": sum((row["s_per_pass"] or 0) * row["passes"] for row in members) / max(1, passes),
            "acceptance_by_depth": [ours / most for most, ours in pairwise(reached) if most],
            "accepted_by_source": {
                name: sum(row["accepted_by_source"].get(name, 0) for row in members) for name in sorted(sources)
            },
            "times_plain": sum(ratios) / len(ratios) if ratios else None,
            "least_times_plain": min(ratios, default=None),
            "identical": all(row["identical"] for row in members),
        })  # fmt: skip
    for row in found:
        others = (one for one in found if all(one[name] == row[name] for name in ("kind", "temperature", "drafter")))
        row["of_best_window"] = row["tok_per_s"] / max(one["tok_per_s"] for one in others)
    return found


def table(summary: Sequence[dict[str, Any]]) -> str:
    """The figures for people."""
    lines = []
    for row in summary:
        line = f"{row['kind']:8} T {row['temperature']:<4} {row['drafter']:16} {row['window']:9} "
        line += f"{row['tokens_per_pass']:6.2f} tokens a pass {row['tok_per_s']:8.2f} tok/s {row['s_per_pass']:.4f} s"
        if row["times_plain"] is not None:
            line += f" {row['times_plain']:.3f} x plain (least {row['least_times_plain']:.3f})"
        line += "".join(f" {share:.2f}" for share in row["acceptance_by_depth"][:_SHOWN_DEPTHS])
        line += "".join(f" {name} {count}" for name, count in row["accepted_by_source"].items())
        lines.append(line + ("" if row["identical"] else " DIFFERS"))
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = harness.bench_parser(__doc__)
    texts.add_options(parser)
    parser.add_argument("--source", type=Path, required=True, help="the small model, which may carry an MTP layer")
    parser.add_argument("--shape", default="llama2-13b", help="of the target, or none: the small model's")
    parser.add_argument("--target", type=Path, help="a widened checkpoint of widen_model.py, of that --shape")
    parser.add_argument(
        "--target-noise", type=float, default=0.0, metavar="X",
        help="on the target's weights, so that they are on no grid; the draft noise=0 then has none of it",
    )  # fmt: skip
    parser.add_argument("--drafters", nargs="+", default=[PLAIN, "ngram", f"{NOISE}0.05"])
    parser.add_argument("--kinds", nargs="+", choices=texts.KINDS, default=texts.KINDS)
    parser.add_argument("--places", type=int, default=2, help="of each kind")
    parser.add_argument("--prompt-tokens", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--plain-tokens", type=int, help="decoded plainly; as many as others, left out")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--emulate", help="a machine, by a profile's name or file")
    parser.add_argument("--vram")
    parser.add_argument("--resident-layers", default="auto")
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--temperatures", type=harness.floats, default=(0.0, 0.6))
    parser.add_argument("--gammas", type=harness.integers, default=(), help="of fixed chains")
    parser.add_argument("--nodes", type=harness.integers, default=(), help="of fixed trees")
    parser.add_argument("--trace", type=Path, help="trace each drafter, which tells the time of drafting")
    parser.add_argument("--profile", help="figures to plan by, by a profile's name or file")
    return parser.parse_args(argv)


def check(options: argparse.Namespace) -> None:
    """Refuse what would fail only after minutes.

    Raises:
        OptionError: A number, a name or a text makes no sense; StorageError: `--out` cannot be written.
        DeviceError, ProfileError: There is no such device or machine.
    """
    numbers = ("gammas", "nodes", "places", "prompt_tokens", "tokens", "context")
    harness.require_all_positive(options, *numbers, *(("plain_tokens",) if options.plain_tokens is not None else ()))
    harness.check_machine(None, options.profile)
    harness.check_machine(options.vram, options.emulate)
    for temperature in options.temperatures:
        SamplingParams(temperature=temperature)
    resolve_device(options.device)
    noise = options.target_noise
    require(0 <= noise < math.inf, f"--target-noise {noise} is no noise of 0 or more")
    require(not (noise and options.target), "--target-noise does nothing with --target: drop one of them")
    if options.shape != "none":
        shape_named(options.shape)
    for drafter in options.drafters:
        if drafter.startswith(NOISE):
            noise_of(drafter)
    for name, text in texts.texts_of(options).items():
        texts.held_out(text, options.seed, options.places, name)
    check_out(options.out)


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    options = parse(argv)
    check(options)
    bench, origin = Bench(options), dict[str, Any]()
    for drafter in options.drafters:
        for _ in bench.measure(drafter):
            if not origin:  # asked for now: it would otherwise hold some of the GPU before a target is loaded
                settings = harness.settings_of(options, without=("out", "trace", "commit"))
                origin = {"settings": settings, **provenance(resolve_device(options.device), commit=options.commit)}
            report = {"benchmark": "drafters", "loads": bench.loads, "rows": bench.rows, **origin}
            write_unfinished(report, options.out)
            harness.say(table(summarised(bench.rows[-1:])))
    report["summary"] = summarised(bench.rows)
    print(table(report["summary"]))
    emit(report, options.out)
    return 0 if all(row["identical"] for row in bench.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
