"""Measure this runtime's streaming on the model of the peers: the same weights, the same prompt, the same VRAM.

Besides plain decoding it times single passes over wider windows, the time the host needs to launch a pass, and the
link's own peak through the same ring. `ours_runtime.py` measures what a user gets, speculation included.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

from common import PeerOptions, options_from, peer_parser
from generations import Asked, asked_generations, num_differing_of
from harness import one_line_errors
from runs import Run, answers, figures

from harness import emit, percentiles, provenance  # isort: skip (`common` sets the path)
from timing import measure_link_gbps  # isort: skip (`common` sets the path)
from target_alone import load_target  # isort: skip

from offload_runtime.config import GB, SamplingParams
from offload_runtime.copy import CopyEngine
from offload_runtime.engine.load_model import LoadedModel, warm_up
from offload_runtime.errors import OptionError
from offload_runtime.memory import DeviceBudget, device_memory_used_by_others
from offload_runtime.model import Window
from offload_runtime.speculation import NoProposer, SpeculativeDecoder

_WARMUP_PASSES = 3


def build(
    options: PeerOptions, *, context: int, window: int, resident_layers: int
) -> tuple[LoadedModel, DeviceBudget, CopyEngine]:
    """The model with `resident_layers` of its layers on the device and the others in the ring."""
    others = device_memory_used_by_others(options.device.index or 0) if options.device.type == "cuda" else None
    budget = DeviceBudget(options.device, options.vram_bytes, other_bytes=others)
    model, engine = load_target(
        options.source, options.dtype, budget, context=context, window=window, resident_layers=resident_layers
    )
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


def decode(model: LoadedModel, asked: Asked) -> Run:
    """Greedy plain decoding of a prompt."""
    prompt = list(asked.tokens)
    model.runner.cache.truncate(0, 0)
    decoder = SpeculativeDecoder(model.runner, NoProposer(), SamplingParams())
    started = time.perf_counter()
    tokens = [*prompt, decoder.first_token(model.runner.prefill(0, prompt))]
    stamps = [time.perf_counter()]
    while len(tokens) < len(prompt) + asked.new_tokens:
        tokens += decoder.round(tokens, 0).tokens
        stamps.append(time.perf_counter())
    return Run(0, started, tuple(stamps), (1,) * len(stamps), tuple(tokens[len(prompt) :]))


def measure(options: PeerOptions, windows: list[int], passes: int) -> dict[str, Any]:
    """Everything, as one dictionary. Raises `OptionError` for what only `ours_runtime.py` measures."""
    if options.draft is not None or options.temperature or options.resident_layers is None or len(options.prompts) > 1:
        raise OptionError(
            "plain greedy decoding of one prompt: leave out --draft, --temperature and auto; see ours_runtime"
        )
    if options.prefill_chunk_asked is not None:
        raise OptionError("--prefill-chunk is transformers': leave it out")
    # The peak is a plain pinned memcpy, as for the peers, or our ring's own back-to-back copies if those are faster.
    memcpy_gbps = measure_link_gbps(options.device)
    started = time.perf_counter()
    widest = max([*windows, 1])
    context = options.context_tokens - options.new_tokens
    context += max(options.new_tokens, widest + _WARMUP_PASSES + passes) + 1
    model, budget, engine = build(options, context=context, window=widest, resident_layers=options.resident_layers)
    setup_s = time.perf_counter() - started
    peak = None
    if memcpy_gbps is not None and model.link_peak_gbps is not None:
        peak = max(memcpy_gbps, model.link_peak_gbps)
    rows = [time_windows(model, list(options.prompts[0]), width, passes, peak) for width in windows]
    runs = [decode(model, asked) for asked in asked_generations(options)]
    nbytes = model.runner.streamer.bytes_per_pass
    result = {
        "system": "offload_runtime",
        **figures(runs[options.warmup :], weight_bytes=nbytes, peak_gbps=peak),
        "bytes_per_token": nbytes,
        "pinned_bytes": sum(arena.nbytes for arena in model.weights.layers if arena.pinned),
        "peak_vram_bytes": {"driver": budget.peak_bytes(), "reserved": budget.reserved_bytes},
        "memcpy_gbps": memcpy_gbps,
        "ring_gbps": model.link_peak_gbps,
        "vram_limit_bytes": budget.limit_bytes,
        "context_bytes": budget.context_bytes,
        "windows": rows,
        "settings": {**options.as_settings(), "ring_slots": model.placement.num_slots},
        "differing_generations": num_differing_of(options, runs),
        "tokens": answers(runs[options.warmup :]),
        "setup_s": setup_s,
        **provenance(options.device, commit=options.commit),
    }
    engine.close()
    return result


def _numbers(text: str) -> Iterator[int]:
    return (int(part) for part in text.split(",") if part)


@one_line_errors
def main() -> int:
    """Measure and print; returns the exit code."""
    parser = peer_parser("Measure offload_runtime on the peers' random Llama.")
    parser.add_argument("--windows", default="1,17,128,1024", help="window widths to time, comma-separated")
    parser.add_argument("--passes", type=int, default=8, help="timed passes per window")
    arguments: argparse.Namespace = parser.parse_args()
    emit(measure(options_from(arguments), list(_numbers(arguments.windows)), arguments.passes), arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
