"""Measure this runtime on the random Llama of the peers: the same weights, the same prompt, the same VRAM.

Besides plain decoding it times single passes over wider windows, the time the host needs to launch a pass, and the
link's own peak through the same ring.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import PeerOptions, llama_config, options_from, peer_parser, prompt_ids, random_weight

from bench_report import emit, measure_link_gbps, percentiles, provenance  # isort: skip (`common` sets the path)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))

from offload_runtime.config import GB, ModelConfig, SamplingParams
from offload_runtime.copy_engine import CopyEngine, make_copy_engine
from offload_runtime.engine.assembly import LoadedModel, connect_model, warm_up
from offload_runtime.engine.placing import plan_placement, reserve_workspace
from offload_runtime.engine.plans import Plans, target_plan
from offload_runtime.errors import OffloadError
from offload_runtime.memory import DeviceBudget, device_memory_used_by_others
from offload_runtime.model import Window
from offload_runtime.speculation import NoProposer, SpeculativeDecoder
from offload_runtime.weights import HostWeights, checkpoint_tensors, model_config_from_transformers

_WARMUP_PASSES = 3


def model_config(options: PeerOptions) -> ModelConfig:
    """The peers' Llama as this runtime describes it."""
    config = llama_config(options)
    config.architectures = ["LlamaForCausalLM"]
    return model_config_from_transformers(config)


def named_weights(config: ModelConfig, options: PeerOptions) -> HostWeights:
    """The peers' weights (seeded by name) in packed arenas."""
    weights = HostWeights.allocate(config, options.dtype)
    for name, destination in checkpoint_tensors(config).items():
        out = destination.of(weights.views(destination.layer))
        out.copy_(random_weight(name, tuple(out.shape), options))
    if options.device.type == "cuda":
        for arena in weights.layers:
            arena.pin()
    return weights


def build(
    options: PeerOptions, *, context: int, window: int, resident_layers: int
) -> tuple[LoadedModel, DeviceBudget, CopyEngine]:
    """The model with `resident_layers` of its layers on the device and the others in the ring."""
    config = model_config(options)
    others = device_memory_used_by_others(options.device.index or 0) if options.device.type == "cuda" else None
    budget = DeviceBudget(options.device, options.vram_bytes, other_bytes=others)
    plan = target_plan(config, options.dtype, options.device, context=context, window=window)
    plans = Plans(plan, None)
    placement = plan_placement(plans, budget, resident_layers)
    reserve_workspace(plans, budget)
    engine = make_copy_engine(options.device)
    model = connect_model(named_weights(config, options), plan, placement, budget, engine, name="target")
    if options.device.type == "cuda":
        warm_up(model)
    return model, budget, engine


def time_windows(model: LoadedModel, prompt: list[int], width: int, passes: int, peak: float | None) -> dict[str, Any]:
    """Passes over windows of `width` tokens, each followed by reading one token back, as decoding does."""
    runner = model.runner
    runner.cache.truncate(0, 0)
    runner.prefill(0, prompt)
    window = Window(tuple((prompt * (width // len(prompt) + 1))[:width]))
    pass_s, launch_s = [], []
    started = 0.0
    for number in range(_WARMUP_PASSES + passes):
        before = started
        launched = time.perf_counter()
        logits = runner.verify([window], [0])
        launch = time.perf_counter() - launched
        logits[0].argmax(-1).tolist()
        runner.cache.commit(0, 1)
        started = time.perf_counter()
        if number >= _WARMUP_PASSES:
            pass_s.append(started - before)
            launch_s.append(launch)
    nbytes = runner.streamer.bytes_per_pass
    median = percentiles(pass_s).median
    return {
        "window_tokens": width,
        "pass_s": percentiles(pass_s).as_dict(),
        "host_launch_s": percentiles(launch_s).as_dict(),
        "host_launch_share": percentiles(launch_s).median / median,
        "link_gbps": nbytes / median / GB,
        "link_peak_gbps": peak,
        "link_share": nbytes / median / GB / peak if peak else None,
    }


def decode(model: LoadedModel, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float], float]:
    """Greedy plain decoding: tokens, seconds of each step after the first, seconds to the first token."""
    model.runner.cache.truncate(0, 0)
    decoder = SpeculativeDecoder(model.runner, NoProposer(), SamplingParams())
    started = time.perf_counter()
    tokens = [*prompt, decoder.first_token(model.runner.prefill(0, prompt))]
    stamps = [time.perf_counter()]
    while len(tokens) < len(prompt) + new_tokens:
        tokens += decoder.round(tokens, 0).tokens
        stamps.append(time.perf_counter())
    steps = [after - before for before, after in itertools.pairwise(stamps)]
    return tokens[len(prompt) :], steps, stamps[0] - started


def measure(options: PeerOptions, windows: list[int], passes: int) -> dict[str, Any]:
    """Everything, as one dictionary."""
    # The peak is a plain pinned memcpy, as for the peers, or our ring's own back-to-back copies if those are faster.
    memcpy_gbps = measure_link_gbps(options.device)
    started = time.perf_counter()
    widest = max([*windows, 1])
    context = options.prompt_tokens + max(options.new_tokens, widest + _WARMUP_PASSES + passes) + 1
    model, budget, engine = build(options, context=context, window=widest, resident_layers=options.resident_layers)
    setup_s = time.perf_counter() - started
    prompt = prompt_ids(options)[0].tolist()
    peak = None
    if memcpy_gbps is not None and model.link_peak_gbps is not None:
        peak = max(memcpy_gbps, model.link_peak_gbps)
    rows = [time_windows(model, prompt, width, passes, peak) for width in windows]
    generations, steps, first = [], [], []
    for number in range(options.warmup + options.repeats):
        tokens, step_s, first_s = decode(model, prompt, options.new_tokens)
        generations.append(tokens)
        if number >= options.warmup:
            steps += step_s
            first.append(first_s)
    step = percentiles(steps)
    nbytes = model.runner.streamer.bytes_per_pass
    result = {
        "system": "offload_runtime",
        "s_per_token": step.as_dict(),
        "tok_per_s": 1 / step.median,
        "time_to_first_token_s": percentiles(first).median,
        "link_gbps": nbytes / step.median / GB,
        "bytes_per_token": nbytes,
        "pinned_bytes": sum(arena.nbytes for arena in model.weights.layers if arena.pinned),
        "bound": {"link_gbps": peak, "share": nbytes / step.median / GB / peak} if peak else None,
        "peak_vram_bytes": {"driver": budget.peak_bytes(), "reserved": budget.reserved_bytes},
        "memcpy_gbps": memcpy_gbps,
        "ring_gbps": model.link_peak_gbps,
        "vram_limit_bytes": budget.limit_bytes,
        "context_bytes": budget.context_bytes,
        "windows": rows,
        "settings": {**options.as_settings(), "ring_slots": model.placement.num_slots},
        "differing_generations": sum(tokens != generations[0] for tokens in generations),
        "tokens": generations[-1],
        "setup_s": setup_s,
        **provenance(options.device, commit=options.commit),
    }
    engine.close()
    return result


def _numbers(text: str) -> Iterator[int]:
    return (int(part) for part in text.split(",") if part)


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = peer_parser("Measure offload_runtime on the peers' random Llama.")
    parser.add_argument("--windows", default="1,17,128,1024", help="window widths to time, comma-separated")
    parser.add_argument("--passes", type=int, default=8, help="timed passes per window")
    arguments: argparse.Namespace = parser.parse_args()
    try:
        result = measure(options_from(arguments), list(_numbers(arguments.windows)), arguments.passes)
        emit(result, arguments.out)
    except OffloadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
