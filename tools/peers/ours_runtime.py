"""Measure this runtime as a user loads it, with a draft or without one, on the model and the prompts of the peers.

python tools/peers/ours_runtime.py --target wide-13b --draft SmolLM2.gguf --gamma 12 --out ours.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import PeerOptions, model_name, options_from, peer_parser
from long_context.decoding import target_acceptance
from long_context.internals import budget_of, link_peak_gbps, pinned_bytes, player_for, runner_of
from measurement import ERROR_CODE, NO_ROOM_CODE
from runs import Run, answers, figures, num_differing

from bench_report import emit, provenance  # isort: skip (`common` sets the path)

from offload_runtime.config import GenerationParams, SamplingParams, SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.engine.playing import Text
from offload_runtime.engine.stream import device_errors
from offload_runtime.errors import BudgetError, OffloadError, OptionError
from offload_runtime.speculation import Round, SpeculativeDecoder

_DEFAULT_MAX_GAMMA = 63  # of `Runtime.load`


@dataclass(frozen=True)
class OurOptions:
    """What only this runtime is asked: see `Runtime.load` and its `generate`."""

    draft: str
    speculation: str
    gamma: int | None
    tree_nodes: int | None
    kv: str


def load(options: PeerOptions, own: OurOptions) -> Runtime:
    """The runtime, within the peers' memory and with as many resident layers as they have."""
    return Runtime.load(
        options.source,
        draft=own.draft,
        device=str(options.device),
        dtype=options.dtype_name,
        vram=options.vram_bytes,
        resident_layers="auto" if options.resident_layers is None else options.resident_layers,
        context=options.context_tokens,
        kv=own.kv,
        speculation=SpeculationOptions(mode=own.speculation),
        max_gamma=max(own.gamma or 0, _DEFAULT_MAX_GAMMA),
        tree_nodes=own.tree_nodes,
    )


def generate(runtime: Runtime, options: PeerOptions, own: OurOptions, prompt: int) -> tuple[Run, list[Round]]:
    """One generation, round by round as `Runtime.generate` does it, but for the text."""
    sampling = SamplingParams(temperature=options.temperature, seed=options.seed)
    params = GenerationParams(options.new_tokens, gamma=own.gamma, sampling=sampling)
    (proposer, player), runner, known = player_for(runtime, params), runner_of(runtime), options.prompts[prompt]
    runner.cache.truncate(0, 0)
    if options.device.type == "cuda":
        torch.cuda.synchronize(options.device)
    started_s = time.perf_counter()
    proposer.start(sampling)
    decoder = SpeculativeDecoder(runner, proposer, sampling)
    logits = runner.prefill(0, known)
    proposer.prepare(0, known)
    tokens = [*known, decoder.first_token(logits)]
    stamps_s, counts, rounds, last = [time.perf_counter()], [1], [], len(known) + options.new_tokens
    while len(tokens) < last:
        (played,) = player.play([Text(0, tokens, last - len(tokens))])
        tokens += played.tokens
        rounds.append(played)
        stamps_s.append(time.perf_counter())
        counts.append(len(played.tokens))
    return Run(prompt, started_s, tuple(stamps_s), tuple(counts), tuple(tokens[len(known) :])), rounds


def generate_all(runtime: Runtime, options: PeerOptions, own: OurOptions) -> tuple[list[Run], list[Round]]:
    """All generations, warm-ups first, and the rounds of the measured ones."""
    order = [run % len(options.prompts) for run in range(options.warmup)]
    order += [prompt for _ in range(options.repeats) for prompt in range(len(options.prompts))]
    runs, rounds = [], []
    with device_errors(runtime.device):
        for number, prompt in enumerate(order):
            run, played = generate(runtime, options, own, prompt)
            runs.append(run)
            rounds += played if number >= options.warmup else []
    return runs, rounds


def measure(options: PeerOptions, own: OurOptions) -> dict[str, Any]:
    """Load, time and report."""
    started_s = time.perf_counter()
    with load(options, own) as runtime:
        setup_s = time.perf_counter() - started_s
        runs, rounds = generate_all(runtime, options, own)
        budget, num_bytes = budget_of(runtime), runner_of(runtime).streamer.bytes_per_pass
        vram = {"driver": budget.peak_bytes(), "reserved": budget.reserved_bytes}
        return {
            "system": "offload_runtime",
            **figures(runs[options.warmup :], bytes_per_pass=num_bytes, peak_gbps=link_peak_gbps(runtime)),
            "speculation": target_acceptance(rounds),
            "peak_vram_bytes": vram if options.device.type == "cuda" else None,
            "pinned_bytes": pinned_bytes(runtime),
            "vram_limit_bytes": budget.limit_bytes,
            "placement": runtime.placement,
            "settings": {**options.as_settings(), **vars(own), "draft": model_name(own.draft)},
            "notes": [],
            "differing_generations": num_differing(runs),
            "tokens": answers(runs),
            "setup_s": setup_s,
            **provenance(options.device, commit=options.commit),
        }


def own_options(arguments: argparse.Namespace) -> OurOptions:
    """Check what peers have and this runtime does not. Raises `OptionError`."""
    if arguments.kv_cache != "device" or arguments.assistant_tokens != "auto":
        raise OptionError("--kv-cache and --assistant-tokens are transformers': take --kv and --gamma")
    return OurOptions(
        draft=arguments.draft or "ngram",
        speculation=arguments.speculation,
        gamma=arguments.gamma,
        tree_nodes=arguments.tree_nodes,
        kv=arguments.kv,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = peer_parser("Measure offload_runtime on the peers' model and prompts.")
    parser.add_argument("--speculation", default="auto", help="auto, none, chain or triforce")
    parser.add_argument("--gamma", type=int, help="most tokens proposed in a row")
    parser.add_argument("--tree-nodes", type=int, help="most tokens proposed in all, as a tree")
    parser.add_argument("--kv", choices=("auto", "gpu", "host"), default="auto", help="where the KV cache lives")
    arguments = parser.parse_args(argv)
    try:
        own = own_options(arguments)
        options = options_from(arguments)
        emit(measure(options, own), options.out)
    except OffloadError as error:
        print(f"error: {error}", file=sys.stderr)
        return NO_ROOM_CODE if isinstance(error, BudgetError) else ERROR_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main())
