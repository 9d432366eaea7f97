"""A long context: prefill, passes over a KV cache in host memory or on the GPU, plain decoding and TriForce.

    python tools/bench_long_context.py --source SmolLM2-135M.gguf --delta a.safetensors b.safetensors \\
        --shape llama2-7b --text novel.txt --context 122880 --kv host --vram 24GB --out tools/results/triforce-h200.json

The target is the source, its context stretched by the deltas, widened in memory to the shape; the draft is the
stretched source itself. A runtime is loaded for each of `--variants`, which reads the prompt once: all answers go on
from the cache that it has filled. Prints a line a measurement, then one JSON line; exit code 1 when an answer was not
that of plain decoding. Where the time of a step goes is seen with `--trace` and timeline.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import harness
from emulation import emulated
from harness import check_out, emit, leading_agreement, provenance, write_unfinished
from passes import time_window
from timing import Answer, timed_answer
from widening.checkpoint import in_shape
from widening.shapes import shape_named
from widening.stretched import StretchedCheckpoint

from offload_runtime.config import DraftCache, SpeculationOptions
from offload_runtime.engine import Runtime, Scheduler
from offload_runtime.errors import OptionError
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.stream.device import resolve_device
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.sources import open_checkpoint

STRETCH = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 16.0, "original_max_position_embeddings": 8192}
STRETCHED_TOKENS = 131072
SEED = 1
WARM_UP_TOKENS = 12  # of an answer that compiles kernels and captures graphs
ROOM_TOKENS = 1024  # behind the prompt: answers, and windows of proposals


def add_long_options(parser: argparse.ArgumentParser) -> None:
    """Models, text, placement and the hierarchy's options."""
    parser.add_argument(
        "--source", type=Path, required=True, help="the small model: the draft, and what the target says"
    )
    parser.add_argument("--delta", type=Path, nargs="*", default=[], help="of its longer context: see widen_model.py")
    parser.add_argument("--shape", default="llama2-7b", help="of the target, or none: the stretched source itself")
    parser.add_argument("--noise", type=float, default=0.05, help="on what the shape takes from the small model")
    parser.add_argument("--text", type=Path, required=True, help="what is read")
    parser.add_argument("--context", type=int, default=122880, help="tokens of it")
    parser.add_argument("--kv", choices=("auto", "gpu", "host"), default="host")
    parser.add_argument("--vram")
    parser.add_argument("--emulate", help="a machine with a smaller card to play, by a profile's name or file")
    parser.add_argument("--dtype", choices=("auto", *harness.DTYPES), default="bf16")
    parser.add_argument("--draft", default="model", choices=("model", "none"))
    parser.add_argument("--draft-cache", default="streaming", choices=get_args(DraftCache))
    parser.add_argument("--recent", type=int, default=512, help="tokens of a streaming draft cache")
    parser.add_argument("--budget", type=int, default=4096, help="retrieved tokens of each layer and head")
    parser.add_argument("--chunk-size", type=int, default=SpeculationOptions.chunk_size)
    parser.add_argument("--tokens", type=int, default=96, help="decoded with proposals")
    parser.add_argument("--plain-tokens", type=int, default=8, help="decoded plainly")


def sources(options: argparse.Namespace) -> tuple[CheckpointSource, CheckpointSource]:
    """Target and draft: the source, stretched where it is too short or has deltas, widened in memory, and that source.

    Raises:
        CheckpointError, OptionError: The files do not go together, or there is no such shape.
    """
    small = open_checkpoint(options.source)
    if options.delta or options.context + ROOM_TOKENS > small.config().max_position_embeddings:
        small = StretchedCheckpoint(
            small, options.delta, rope=STRETCH, max_position_embeddings=STRETCHED_TOKENS
        ).as_source()
    return in_shape(small, options.shape, options.noise, device=resolve_device(options.device)), small


def speculation_of(options: argparse.Namespace) -> SpeculationOptions:
    """The hierarchy. Raises `OptionError`."""
    return SpeculationOptions(
        "triforce", options.draft_cache, budget_tokens=options.budget, chunk_size=options.chunk_size,
        recent_tokens=options.recent,
    )  # fmt: skip


def load(
    options: argparse.Namespace, models: tuple[CheckpointSource, CheckpointSource], speculation: SpeculationOptions, *,
    max_gamma: int, context: int, max_batch: int = 1, resident_layers: int | str = "auto", trace: Path | None = None,
) -> Runtime:  # fmt: skip
    """A runtime with room for prompts of `context` tokens and what follows."""
    target, draft = models
    started_s = time.perf_counter()
    runtime = Runtime.load(
        target, draft=draft if options.draft == "model" else "none",
        dtype=options.dtype, context=context + ROOM_TOKENS, kv=options.kv, speculation=speculation,
        max_gamma=max_gamma, max_batch=max_batch, resident_layers=resident_layers, trace=trace,
        **emulated(options.emulate, device=options.device, vram=options.vram, dtype=options.dtype),
    )  # fmt: skip
    harness.say(f"loaded in {time.perf_counter() - started_s:.1f} s: {runtime.placement}")
    return runtime


def check_long(options: argparse.Namespace) -> None:
    """Refuse what would fail only after minutes. Raises the typed error."""
    check_out(options.out)
    resolve_device(options.device)
    harness.check_machine(options.vram, options.emulate)
    harness.require_all_positive(options, "context", "tokens", "plain_tokens")
    if options.plain_tokens < 2 or options.tokens < 2 or max(options.tokens, options.plain_tokens) > ROOM_TOKENS // 2:
        raise OptionError(
            f"--tokens and --plain-tokens are from 2 to {ROOM_TOKENS // 2}: of one there is nothing to time"
        )
    if options.shape != "none":
        shape_named(options.shape)
    speculation_of(options)


def decoding_row(answer: Answer) -> dict[str, Any]:
    """Figures of one answer."""
    stats = answer.result.stats
    return {
        "tokens": stats.new_tokens, "passes": stats.passes, "tokens_per_pass": stats.tokens_per_pass,
        "s_per_token": 1 / stats.tok_per_s, "s_per_pass": stats.measured_s_per_pass,
        "bytes_per_pass": stats.bytes_per_pass, "link_gbps": stats.link_gbps, "link_peak_gbps": stats.link_peak_gbps,
        "kept_tokens": stats.kept_tokens, "accepted_by_depth": list(stats.accepted_by_depth), "windows": stats.windows,
        "levels": stats.to_dict()["acceptance"], "text": list(answer.result.tokens),
    }  # fmt: skip


def compared(plain: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """An answer's figures beside those of plain decoding."""
    common = min(len(plain["text"]), len(row["text"]))
    return {
        **row, "times_plain": plain["s_per_token"] / row["s_per_token"], "plain_s_per_token": plain["s_per_token"],
        "compared_tokens": common, "identical_to_plain": leading_agreement(plain["text"], row["text"]) == common,
    }  # fmt: skip


def measure_variant(
    options: argparse.Namespace, runtime: Runtime, prompt: Sequence[int], gamma: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The prefill, and a row for each temperature."""
    rows = []
    with Scheduler(runtime) as scheduler:
        first = timed_answer(scheduler, prompt, GenerationParams(2, ignore_eos=True), speculate=False)
        for temperature in options.temperatures:
            how: dict[str, Any] = {"ignore_eos": True, "sampling": SamplingParams(temperature, seed=SEED)}
            plainly = GenerationParams(options.plain_tokens, **how)
            plain = decoding_row(timed_answer(scheduler, prompt, plainly, speculate=False))
            timed_answer(scheduler, prompt, GenerationParams(min(WARM_UP_TOKENS, options.tokens), gamma=gamma, **how))
            found = timed_answer(scheduler, prompt, GenerationParams(options.tokens, gamma=gamma, **how))
            rows.append({"temperature": temperature, "gamma": gamma, **compared(plain, decoding_row(found))})
    return {"tokens": len(prompt), "s": first.stamps_s[0] - first.asked_s}, rows


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one dictionary.

    Raises:
        OptionError: The text is shorter than the context.
    """
    models = sources(options)
    tokenizer, length = models[1].tokenizer(), options.context
    prompt = harness.read_tokens(options.text, "--text", tokenizer, length, lower="--context")[:length]
    widest = max(*options.windows, *(1 + gamma for *_, gamma in options.variants))
    report: dict[str, Any] = {"benchmark": "long_context", "windows": [], "decoding": []}
    for gamma_draft, refresh_steps, gamma in options.variants:
        hierarchy = replace(speculation_of(options), gamma_draft=gamma_draft, refresh_steps=refresh_steps)
        with load(
            options, models, hierarchy, max_gamma=widest - 1, context=options.context, trace=options.trace
        ) as runtime:
            report["placement"] = runtime.placement
            report["prefill"], rows = measure_variant(options, runtime, prompt, gamma)
            for row in rows:
                report["decoding"].append({"gamma_draft": gamma_draft, "refresh_steps": refresh_steps, **row})
                _show("decoding", report["decoding"][-1])
            for width in () if report["windows"] else options.windows:
                nbytes, peak_gbps = rows[0]["bytes_per_pass"], rows[0]["link_peak_gbps"]
                report["windows"].append(
                    time_window(runtime, prompt, width, options.passes, nbytes=nbytes, peak_gbps=peak_gbps)
                )
                _show("pass", report["windows"][-1])
            plain = runtime.generate(prompt[:2], max_new_tokens=2, ignore_eos=True, speculate=False).stats
            report |= {"peak_vram_bytes": plain.peak_vram_bytes, "pinned_bytes": plain.pinned_bytes}
            report |= {"settings": harness.settings_of(options), **provenance(runtime.device, commit=options.commit)}
        write_unfinished(report, options.out)
    return report


def _show(name: str, row: dict[str, Any]) -> None:
    shown = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items() if key != "text"}
    print(f"{name}: {json.dumps(shown)}", flush=True)


def triples(text: str) -> list[tuple[int, int, int]]:
    """`16:1:24,16:4:24` of the command line."""
    found = [tuple(int(number) for number in part.split(":")) for part in text.split(",")]
    if any(len(one) != 3 or min(one) < 1 for one in found):
        raise ValueError(text)
    return [(one[0], one[1], one[2]) for one in found]


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = harness.bench_parser(__doc__)
    add_long_options(parser)
    parser.add_argument("--windows", type=harness.integers, default=(1, 17, 64), help="widths of single passes")
    parser.add_argument("--passes", type=int, default=3, help="timed passes of each")
    parser.add_argument(
        "--variants", type=triples, default=[(16, 1, 24), (16, 4, 24)],
        help="of TriForce: tokens of the draft, steps between refreshes and gamma, like 16:1:24,16:4:24",
    )  # fmt: skip
    parser.add_argument("--temperatures", type=harness.floats, default=(0.6,))
    parser.add_argument("--trace", type=Path, help="of the last variant; see timeline.py")
    return parser


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    options = make_parser().parse_args(argv)
    check_long(options)
    harness.require_all_positive(options, "windows", "passes")
    if not options.windows or not options.temperatures:
        raise OptionError("--windows and --temperatures name a number or more")
    for temperature in options.temperatures:
        SamplingParams(temperature)
    report = run(options)
    emit(report, options.out)
    return 0 if all(row["identical_to_plain"] for row in report["decoding"]) else 1


if __name__ == "__main__":
    sys.exit(main())
