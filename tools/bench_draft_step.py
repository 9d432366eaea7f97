"""Time a draft's step as a CUDA graph: SmolLM2-135M's shape and a Llama of 68M, with full and streaming KV cache.

    python tools/bench_draft_step.py [--shapes smollm2-135m llama-68m] [--contexts 512 4096]

The weights are random: only the shape decides the time. A step feeds the newest token, samples the next one with noise
and writes it where the next step reads it; `first_step_ms` is the one that feeds two tokens. The bound is reading the
layers, the head and the keys and values once at the device's own copy bandwidth, measured here. `eager_ms` is the same
step launched kernel by kernel. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import harness
import torch
from harness import check_out, emit, percentiles, provenance
from long_context.internals import draft_of, levels_of, proposer_of
from timing import event_times_ms, measure_copy_gbps
from widening.made import random_llama
from widening.shapes import WideShape, shape_named

from offload_runtime.config import GB, ModelConfig, SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.memory import resolve_device
from offload_runtime.params import SamplingParams
from offload_runtime.runners import StepGraphs, WindowInput
from offload_runtime.weights import layer_layout

STEPS = 32  # timed together, as a window is drafted
SINK_TOKENS, RECENT_TOKENS = 4, 252
# With the rows of the head.
SHAPES = {
    "smollm2-135m": (WideShape(576, 1536, 30, 9, 3, 64), 49152),
    "llama-68m": (shape_named("llama-68m"), 32000),
    "tiny": (shape_named("tiny"), 320),
}


def load(options: argparse.Namespace, shape: str, *, context: int, cache: str) -> Runtime:
    """The draft over a target that hardly costs anything, with keys for `context` tokens and a window."""
    decoder, vocab_size = SHAPES[shape]
    make = partial(
        random_llama, vocab_size=vocab_size, context_tokens=8192, reference="random weights",
        device=resolve_device(options.device),
    )  # fmt: skip
    speculation = SpeculationOptions("chain", cache, sink_tokens=SINK_TOKENS, recent_tokens=RECENT_TOKENS)
    return Runtime.load(
        make(shape_named("tiny")), draft=make(decoder), device=options.device, dtype=options.dtype,
        context=context + 2 * STEPS, kv="gpu", speculation=speculation, tree_nodes=0,
    )  # fmt: skip


def step_bytes(config: ModelConfig, dtype: torch.dtype, keys: int) -> int:
    """Bytes that a step has to read: layers, head, keys and values."""
    head_bytes = config.vocab_size * config.hidden_size * dtype.itemsize
    layers_bytes = config.num_layers * layer_layout(config, dtype).total_bytes
    return layers_bytes + head_bytes + keys * config.kv_bytes_per_token(dtype.itemsize)


def measure(runtime: Runtime, *, context: int, cache: str, repeats: int, copy_gbps: float) -> dict[str, Any]:
    """One case: milliseconds a step (median, 20/80), bound and share of it."""
    draft, model = levels_of(proposer_of(runtime)).draft, draft_of(runtime)
    assert draft is not None and model is not None, "loaded with one"
    config = model.runner.decoder.config
    tokens = torch.randint(0, config.vocab_size, (context,), generator=torch.Generator().manual_seed(0)).tolist()
    draft.join(0, SamplingParams(temperature=0.7, seed=1))
    draft.texts.catch_up(0, tokens)
    draft.window.upload({0: WindowInput(tokens[-2:], context, context + STEPS, context + STEPS)})
    times_ms = partial(event_times_ms, warmups=3 if runtime.device.type == "cuda" else 0)  # three that capture
    window, first = (partial(draft.steps, count, longest={0: context}) for count in (STEPS, 1))
    whole, one = percentiles(times_ms(window, repeats=repeats)), percentiles(times_ms(first, repeats=repeats))
    step = percentiles([(time - one.median) / (STEPS - 1) for time in times_ms(window, repeats=repeats)])
    num_graphs = draft.graphs.num_graphs
    draft.graphs = StepGraphs(torch.device("cpu"))  # runs whatever it is given
    eager = percentiles([time / STEPS for time in times_ms(window, repeats=max(1, repeats // 4))])
    keys = draft.texts.num_kept(context)
    bound_ms = step_bytes(config, runtime.dtype, keys) / (copy_gbps * GB) * 1e3
    return {
        "context": context, "cache": cache, "keys": keys, "step_ms": step.as_dict(), "first_step_ms": one.as_dict(),
        "window_ms": whole.as_dict(), "eager_ms": eager.as_dict(), "bound_ms": bound_ms,
        "share_of_bound": bound_ms / step.median, "graphs": num_graphs,
    }  # fmt: skip


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure every case, print the table and the JSON line."""
    parser = harness.bench_parser(__doc__)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=["smollm2-135m", "llama-68m"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--dtype", default="bf16")
    options = parser.parse_args(argv)
    check_out(options.out)
    harness.require_all_positive(options, "contexts", "repeats")
    device = resolve_device(options.device)
    copy_gbps, cases = measure_copy_gbps(device), []
    print(f"{'shape':>13} {'context':>7} {'cache':>9} {'step':>8} {'first':>8} {'eager':>8} {'bound':>7}")
    for shape in options.shapes:
        for context in options.contexts:
            for cache in ("full", "streaming"):
                with load(options, shape, context=context, cache=cache) as runtime, torch.inference_mode():
                    case = measure(runtime, context=context, cache=cache, repeats=options.repeats, copy_gbps=copy_gbps)
                cases.append({"shape": shape, **case})
                print(
                    f"{shape:>13} {context:7} {cache:>9} {case['step_ms']['median']:8.4f} "
                    f"{case['first_step_ms']['median']:8.4f} {case['eager_ms']['median']:8.4f} {case['bound_ms']:7.4f}",
                    flush=True,
                )
    configuration = {
        "dtype": options.dtype, "steps": STEPS, "temperature": 0.7, "weights": "random", "sink_tokens": SINK_TOKENS,
        "recent_tokens": RECENT_TOKENS,
    }  # fmt: skip
    report = {"benchmark": "draft_step", "configuration": configuration, "copy_gbps": copy_gbps, "cases": cases}
    emit({**report, **provenance(device, commit=options.commit)}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
