"""Mixtures of experts that do not fit the card: tokens and prompts by the size of the pool and by what the CPU computes
of the experts that are missing, beside what the link takes.

    python tools/bench_experts.py --shape gpt-oss-120b --emulate rtx4090 --pools 16GB,8GB --out experts.json
    python tools/bench_experts.py --device cpu --dtype fp32 --shape tiny-gpt-oss --pools auto,300KB \\
        --prompts 40 --tokens 16 --warm-up 4 --context 128

Weights are of random numbers, and so are routers, which choose some experts more often than others by a law of their
biases; with `--routing topics` rows of tokens of a topic, at which a text stays for a while, choose alike, too. What is
chosen again and hits by a pool's share are about as published (`widening.made` has the figures), and say nothing of
another model. Tokens are drawn at T = 1. Each row has a runtime of its own, all of which are to say the same tokens
with the same bits. Prints a line a row, then one JSON line; exit code 1 where tokens or bits differ.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import harness
import torch
from emulation import emulated
from harness import DTYPES, Check, check_out, finish, integers, provenance, write_unfinished
from widening.made import text_by_topic
from widening.shapes import SHAPES, MixtureShape, shape_named
from widening.stored import STORED, stored_model

from offload_runtime.engine import GenerationResult, Runtime
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.sizes import GB
from offload_runtime.weights.checkpoint import CheckpointSource


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises `OptionError`."""
    parser = harness.bench_parser(__doc__)
    mixtures = [name for name, shape in SHAPES.items() if isinstance(shape, MixtureShape)]
    parser.add_argument("--shape", choices=mixtures, default="gpt-oss-120b", help="of the model")
    parser.add_argument("--layers", type=int, help="cut the shape to so many (default: all)")
    parser.add_argument("--stored", choices=STORED, default="mxfp4", help="how weights are stored")
    parser.add_argument("--routing", choices=("topics", "biases"), default="topics", help="the law of choices")
    parser.add_argument("--vocab-size", type=int, default=32768)
    parser.add_argument("--pools", default="auto", help="sizes of the pool of experts, comma-separated, or auto")
    parser.add_argument("--cpu-shares", default="0,auto", help="of missing experts, comma-separated, of each pool")
    parser.add_argument("--prompts", type=integers, default=(8192,), help="tokens of prompts that are timed")
    parser.add_argument("--tokens", type=int, default=256, help="of the answer that is timed")
    parser.add_argument("--warm-up", type=int, default=256, help="tokens of one before it, which fills the pool")
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--emulate", help="a machine with a smaller card to play, by a profile's name or file")
    parser.add_argument("--vram", help="of the device's memory (default: all)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--seed", type=int, default=0, help="of weights and texts")
    parser.add_argument("--trace", type=Path, help="trace each row, to files of this name behind the row's number")
    options = parser.parse_args(argv)
    harness.require_all_positive(options, "vocab_size", "tokens", "warm_up", "context")
    harness.check_machine(options.vram, options.emulate)
    check_out(options.out)
    return options


def measure(runtime: Runtime, options: argparse.Namespace) -> tuple[dict[str, Any], torch.Tensor]:
    """Times of prompts and of an answer as users get it, and its logits when it is given again: with these no pass is
    launched before the host has read the last one's tokens."""
    draw = random.Random(options.seed)

    def text(tokens: int) -> list[int]:
        if options.routing == "topics":
            return text_by_topic(tokens, options.vocab_size, draw)
        return [draw.randrange(options.vocab_size) for _ in range(tokens)]

    def asked(tokens: int, noise_id: int) -> GenerationParams:
        return GenerationParams(tokens, ignore_eos=True, sampling=SamplingParams(1.0, noise_id=noise_id))

    def answered(prompt: list[int], params: GenerationParams) -> GenerationResult:
        return runtime.generate(prompt, params=params, speculate=False)

    first, warm_up = text(64), asked(options.warm_up, 1)
    answered(first, warm_up)
    prompts = []
    for tokens in options.prompts:
        seconds = answered(text(tokens), asked(1, 1)).stats.time_to_first_token_s
        prompts.append({"tokens": tokens, "s": seconds, "tok_per_s": tokens / seconds})
    answered(first, warm_up)
    last, timed = text(64), asked(options.tokens, 2)
    answer = answered(last, timed)
    again, logits = runtime.replay(last, timed, drafter=None)
    stats = answer.stats
    peak_gbps = stats.link_peak_gbps
    bound_s = stats.bytes_per_pass / (peak_gbps * GB) if peak_gbps else None
    token_s = 1 / stats.tok_per_s if stats.tok_per_s else 0.0
    row = {
        "prompts": prompts, "tokens": answer.tokens, "tokens_again": again.tokens, "token_s": token_s,
        "tok_per_s": stats.tok_per_s, "predicted_s": stats.predicted_s_per_pass,
        "bytes_per_pass": stats.bytes_per_pass, "bound_s": bound_s,
        "expert_hit_rate": stats.expert_hit_rate, "expert_cpu_share": stats.expert_cpu_share,
        "expert_cpu_gbps": stats.expert_cpu_gbps,
        "link_peak_gbps": peak_gbps, "placement": runtime.placement,
    }  # fmt: skip
    return row, logits


def describe(row: dict[str, Any]) -> str:
    """One line of a pool's figures."""
    hits, bound = row["expert_hit_rate"], row["bound_s"]
    link = "" if bound is None else f", the link alone {1e3 * bound:.2f} ms for {row['bytes_per_pass'] / GB:.3f} GB"
    found = "all experts on the device"
    if hits is not None:
        rate = row["expert_cpu_gbps"]
        found = f"{hits:.1%} hits, {row['expert_cpu_share']:.1%} of the others on the CPU"
        found += "" if rate is None else f" at {rate:.1f} GB/s"
    prompts = ", ".join(f"{one['tokens']} tokens in {one['s']:.2f} s" for one in row["prompts"])
    name = f"pool {row['pool']}, CPU {row['cpu_share']}"
    return f"{name}: {1e3 * row['token_s']:.2f} ms a token{link}, {found}; prompts: {prompts}"


def model_of(options: argparse.Namespace) -> CheckpointSource:
    """Random weights as they are stored."""
    return stored_model(
        shape_named(options.shape, options.layers), options.stored, options.seed, vocab_size=options.vocab_size,
        context_tokens=options.context, reference=f"random {options.shape}", by_topic=options.routing == "topics",
    )  # fmt: skip


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    options = parse(argv)
    report: dict[str, Any] = {"benchmark": "experts", "settings": harness.settings_of(options)}
    machine = emulated(options.emulate, device=options.device, vram=options.vram, dtype=options.dtype)
    rows, first, checks = list[dict[str, Any]](), None, list[Check]()
    for pool, share in product(options.pools.split(","), options.cpu_shares.split(",")):
        started_s = time.perf_counter()
        traced = options.trace and options.trace.with_name(f"{len(rows)}-{options.trace.name}")
        with Runtime.load(
            model_of(options), draft="none", dtype=options.dtype, context=options.context, expert_pool=pool,
            trace=traced, cpu_share=share if share == "auto" else float(share), **machine,
        ) as runtime:  # fmt: skip
            loaded_s = time.perf_counter() - started_s
            row, logits = measure(runtime, options)
            rows.append({"pool": pool, "cpu_share": share, "loaded_s": loaded_s} | row)
            print(describe(rows[-1]), row["placement"], sep="\n  ", flush=True)
            report |= provenance(*runtime.devices, commit=options.commit)
        if first is None:
            first = row["tokens"], logits
        differing = sum(row[name] != first[0] for name in ("tokens", "tokens_again"))
        differing += int((logits != first[1]).any(-1).sum())
        claim = f"tokens that differ from the first row's, pool {pool}, CPU {share}"
        checks.append(Check(claim, differing, 0, at_least=False))
        write_unfinished(report | {"pools": rows}, options.out)
    return finish(report | {"pools": rows}, checks, options.out)


if __name__ == "__main__":
    sys.exit(main())
