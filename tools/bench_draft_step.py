"""Time a draft's step as a CUDA graph: SmolLM2-135M's shape and a Llama of 68M, with full and streaming KV cache.

    python tools/bench_draft_step.py [--shapes smollm2-135m llama-68m] [--contexts 512 4096] [--tile-rows 1 8]

The weights are random: only the shape decides the time. A step feeds the newest token, samples the next one with noise
and writes it where the next step reads it; `first_step_ms` is the one that feeds two tokens. The bound is reading the
layers, the head and the keys and values once at the device's own copy bandwidth, measured here. `eager_ms` is the same
step launched kernel by kernel. Prints a table, then one JSON line.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import harness
import torch
from harness import check_out, emit, percentiles, provenance
from timing import event_times_ms, measure_copy_gbps

from offload_runtime.config import GB, ModelConfig, SamplingParams
from offload_runtime.copy import make_copy_engine
from offload_runtime.copy.schedule import LayerStreamer
from offload_runtime.errors import DeviceError
from offload_runtime.kv import DeviceKVCache
from offload_runtime.kv.streaming import StreamingDraftCache
from offload_runtime.memory import DeviceBudget
from offload_runtime.model import Decoder, RopeTable, RowBuilder
from offload_runtime.runners import DraftModel, Known, ModelRunner, PassShape, StepGraphs
from offload_runtime.weights import ModelLayout, PackedLayout, layer_layout

DTYPE = torch.bfloat16
STEPS = 32  # timed together, as a window is drafted
SINK_TOKENS, RECENT_TOKENS = 4, 252


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, *, tied: bool) -> ModelConfig:
    """A plain Llama with heads of 64 channels."""
    return ModelConfig(
        architecture="LlamaForCausalLM", hidden_size=hidden, intermediate_size=inner, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=64, vocab_size=vocab, max_position_embeddings=8192,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=tied,
    )  # fmt: skip


SHAPES = {
    "smollm2-135m": llama(576, 1536, 30, 9, 3, 49152, tied=True),
    "llama-68m": llama(768, 3072, 2, 12, 12, 32000, tied=False),
}


def random_block(layout: PackedLayout, device: torch.device) -> torch.Tensor:
    """Packed weights: norms of one, matrices that keep the activations' size."""
    block = torch.empty(layout.total_bytes, dtype=torch.uint8, device=device)
    for view in layout.views(block).values():
        if len(view.shape) == 1:
            view.dense.fill_(1)
        else:
            view.dense.normal_(std=view.shape[-1] ** -0.5)
    return block


def make_draft(
    config: ModelConfig, device: torch.device, *, context: int, streaming: bool, tile_rows: int
) -> DraftModel:
    """A draft of random weights, all of them resident, that samples at temperature 0.7."""
    layout = ModelLayout.plain(config, DTYPE)
    layers = {index: random_block(block, device) for index, block in enumerate(layout.layers)}
    streamer = LayerStreamer(
        [block[:0] for block in layers.values()],
        layers,
        [],
        make_views=layout.layer_views,
        engine=make_copy_engine(device),
    )
    budget = DeviceBudget(device, None)
    cache: DeviceKVCache | StreamingDraftCache
    if streaming:
        cache = StreamingDraftCache(
            config, DTYPE, sink_tokens=SINK_TOKENS, recent_tokens=RECENT_TOKENS, window_tokens=2 * STEPS, batch=1,
            budget=budget,
        )  # fmt: skip
        rope = RopeTable(config, device, fixed_length=cache.capacity_tokens)
    else:
        cache = DeviceKVCache(config, DTYPE, capacity_tokens=context + 2 * STEPS, batch=1, budget=budget)
        rope = RopeTable(config, device)
    decoder = Decoder(config, layout.shared.views(random_block(layout.shared, device)))
    shape = PassShape(window_rows=tile_rows, prefill_rows=256, prefill_chunk_tokens=1024)
    runner = ModelRunner(decoder, streamer, cache, RowBuilder(rope, device), shape)
    draft = DraftModel(runner, vocab_size=config.vocab_size, draft_vocab_size=config.vocab_size)
    draft.start([SamplingParams(temperature=0.7, seed=1)])
    return draft


def step_bytes(config: ModelConfig, keys: int) -> int:
    """Bytes that a step has to read: layers, head, keys and values."""
    weights = config.num_layers * layer_layout(config, DTYPE).total_bytes + config.vocab_size * config.hidden_size * 2
    return weights + keys * config.kv_bytes_per_token(DTYPE.itemsize)


def measure(
    config: ModelConfig, device: torch.device, *, context: int, streaming: bool, tile_rows: int, copy_gbps: float
) -> dict[str, Any]:
    """One case: milliseconds a step (median, 20/80), bound and share of it."""
    draft = make_draft(config, device, context=context, streaming=streaming, tile_rows=tile_rows)
    tokens = torch.randint(0, config.vocab_size, (context,), generator=torch.Generator().manual_seed(0)).tolist()
    draft.catch_up(0, tokens)
    draft.window.upload({0: Known(tokens[-2:], context, context + STEPS, context + STEPS)})

    def window() -> None:
        draft.steps(STEPS, longest={0: context})

    def first() -> None:
        draft.steps(1, longest={0: context})

    times_ms = partial(event_times_ms, warmups=3)  # three that capture
    whole, one = percentiles(times_ms(window, repeats=20)), percentiles(times_ms(first, repeats=20))
    others = [(time - one.median) / (STEPS - 1) for time in times_ms(window, repeats=20)]
    step = percentiles(others)
    num_graphs = draft.graphs.num_graphs
    draft.graphs = StepGraphs(torch.device("cpu"))  # runs whatever it is given
    eager = percentiles([time / STEPS for time in times_ms(window, repeats=5)])
    keys = draft.num_keys(context)
    bound_ms = step_bytes(config, keys) / (copy_gbps * GB) * 1e3
    return {
        "context": context, "cache": "streaming" if streaming else "full", "keys": keys, "tile_rows": tile_rows,
        "step_ms": step.as_dict(), "first_step_ms": one.as_dict(), "window_ms": whole.as_dict(),
        "eager_ms": eager.as_dict(), "bound_ms": bound_ms, "share_of_bound": bound_ms / step.median,
        "graphs": num_graphs,
    }  # fmt: skip


@harness.one_line_errors
def main() -> int:
    """Measure every case, print the table and the JSON line."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--tile-rows", type=int, nargs="+", default=[1, 8], help="heights of the matrix products")
    harness.add_report_options(parser)
    arguments = parser.parse_args()
    check_out(arguments.out)
    if not torch.cuda.is_available():
        raise DeviceError("this times CUDA graphs and torch sees no CUDA device: run it on a machine with one")
    device = torch.device("cuda")
    copy_gbps, cases = measure_copy_gbps(device), []
    print(f"{'shape':>13} {'context':>7} {'cache':>9} {'tile':>4} {'step':>8} {'first':>8} {'eager':>8} {'bound':>7}")
    for name in arguments.shapes:
        for context in arguments.contexts:
            for streaming in (False, True):
                for tile_rows in arguments.tile_rows:
                    case = measure(
                        SHAPES[name], device, context=context, streaming=streaming, tile_rows=tile_rows,
                        copy_gbps=copy_gbps,
                    )  # fmt: skip
                    cases.append({"shape": name, **case})
                    print(
                        f"{name:>13} {context:7} {case['cache']:>9} {tile_rows:4} {case['step_ms']['median']:8.4f} "
                        f"{case['first_step_ms']['median']:8.4f} {case['eager_ms']['median']:8.4f} "
                        f"{case['bound_ms']:7.4f}",
                        flush=True,
                    )
    emit(
        {
            "benchmark": "draft_step",
            **provenance(device, commit=arguments.commit),
            "configuration": {"dtype": "bf16", "steps": STEPS, "temperature": 0.7, "weights": "random",
                              "sink_tokens": SINK_TOKENS, "recent_tokens": RECENT_TOKENS},
            "copy_gbps": copy_gbps,
            "cases": cases,
        },
        arguments.out,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
