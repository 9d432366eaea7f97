"""What gated delta layers take of a prompt's time, and what a hybrid's caches take of memory, beside the plan.

    python tools/bench_hybrids.py --out tools/results/hybrids-27b-h200.json
    python tools/bench_hybrids.py --device cpu --dtype fp32 --shape tiny-hybrid --prompt-tokens 300 --context 900

Weights are of random numbers. A prompt is read by some layers of the shape (`--layers`) as it is, and its kernels are
timed by torch's profiler: those of the gated delta rule with its convolution, products with matrices, attention, and
others; products are told apart by their operations. Then all layers of the shape, with narrow MLPs, hold a context that
a conversation fills: what is allocated of keys and values, states and anchors, and at the peak, is held against the
plan. Prints tables, each claim with its verdict, then one JSON line; exit code 1 when a claim is missed.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import harness
import torch
from harness import DTYPES, Check, check_out, finish, percentiles, provenance
from offload_runtime_kernels import gated_delta_triton
from torch.autograd import DeviceType
from widening.made import random_model
from widening.shapes import SHAPES, HybridShape, shape_named

from offload_runtime.engine import Runtime
from offload_runtime.engine.load import planned_figures
from offload_runtime.models.gated_delta import GatedDelta
from offload_runtime.params import GenerationParams
from offload_runtime.plan.cost import prefill_time
from offload_runtime.sizes import GB
from offload_runtime.stream.device import resolve_device

_VOCAB_SIZE, _NARROW = 32768, 256
_MOST_SHARE, _MOST_OFF = 0.35, 0.02
_TURNS, _TURN_TOKENS, _ANSWER_TOKENS = 8, 300, 40
_DELTA_KERNELS = {name for name in vars(gated_delta_triton) if name.endswith("_kernel")}
_PRODUCTS = ("gemm", "nvjet", "cutlass", "linear", "addmm", "::mm")
_SHOWN_KERNELS = 14


def kind_of(kernel: str) -> str:
    """What a kernel, or an operation of a CPU, is for."""
    if kernel in _DELTA_KERNELS:
        return "delta rule"
    if any(part in kernel for part in _PRODUCTS):
        return "products"
    return "attention" if "attention" in kernel or "attend" in kernel else "others"


def load(options: argparse.Namespace, shape: HybridShape, context: int) -> Runtime:
    """A runtime of random weights without a draft, all of whose layers are resident."""
    device = resolve_device(options.device)
    model = random_model(
        shape, options.seed, vocab_size=_VOCAB_SIZE, context_tokens=context, reference=f"random {options.shape}",
        device=device,
    )  # fmt: skip
    sizes: dict[str, Any] = {"context": context, "max_batch": 1, "resident_layers": "auto"}
    return Runtime.load(model, draft="none", device=str(device), dtype=options.dtype, kv="gpu", **sizes)


def prompt_of(options: argparse.Namespace, count: int) -> list[int]:
    """Random tokens."""
    draw = random.Random(options.seed)
    return [draw.randrange(_VOCAB_SIZE) for _ in range(count)]


def measure_prefill(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a prompt, and of its kernels by kind."""
    prompt, params = prompt_of(options, options.prompt_tokens), GenerationParams(1, ignore_eos=True)
    shape = shape_named(options.shape, options.layers)
    assert isinstance(shape, HybridShape)
    with load(options, shape, options.prompt_tokens + 256) as runtime:
        seconds = list[float]()
        for _ in range(1 + options.repeats):
            started_s = time.perf_counter()
            runtime.generate(prompt, params=params)
            seconds.append(time.perf_counter() - started_s)
        on_gpu = runtime.device.type == "cuda"
        activity = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as profile:
            runtime.generate(prompt, params=params)
            if on_gpu:
                torch.cuda.synchronize()
        by_kernel = Counter[str]()
        for event in profile.key_averages():
            if not on_gpu:
                by_kernel[event.key] += event.self_cpu_time_total / 1e6
            elif event.device_type == DeviceType.CUDA:  # and no launch, which has the time of its kernel, too
                by_kernel[event.key] += event.self_device_time_total / 1e6
        config = runtime.config
        figures = planned_figures(runtime.plan)
        predicted_s = None if figures is None else prefill_time(runtime.plan, figures, len(prompt)).seconds
        origin = provenance(*runtime.devices, commit=options.commit)
    by_kind = Counter[str]()
    for kernel, kernel_s in by_kernel.items():
        by_kind[kind_of(kernel)] += kernel_s
    operations = [layer.work(1, 1).product_operations for layer in config.layers]
    deltas = [layer.attention for layer in config.layers if isinstance(layer.attention, GatedDelta)]
    of_deltas = sum(one.work(1, 1).product_operations for one in deltas) / sum(operations)
    whole_s = sum(by_kind.values())
    rule, projections = by_kind["delta rule"] / whole_s, by_kind["products"] * of_deltas / whole_s
    return {
        "tokens": len(prompt), "layers": config.num_layers, "seconds": percentiles(seconds[1:]), "first_s": seconds[0],
        "predicted_s": predicted_s, "kernels_s": whole_s, "by_kind_s": dict(by_kind), "delta_rule_share": rule,
        "delta_projections_share": projections, "kernels": dict(by_kernel.most_common(_SHOWN_KERNELS)), **origin,
    }  # fmt: skip


def allocated_bytes(options: argparse.Namespace, *, peak: bool = False) -> int | None:
    """What torch's allocator has given out; None without a GPU."""
    if resolve_device(options.device).type != "cuda":
        return None
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


def measure_memory(options: argparse.Namespace) -> dict[str, Any]:
    """What is planned and allocated for a conversation that fills the context."""
    shape = shape_named(options.shape)
    assert isinstance(shape, HybridShape)
    shape = replace(shape, intermediate_size=min(_NARROW, shape.intermediate_size))
    gc.collect()
    before_bytes = allocated_bytes(options)
    with load(options, shape, options.context) as runtime:
        after_bytes = allocated_bytes(options)
        if after_bytes is not None:
            torch.cuda.reset_peak_memory_stats()
        plan, engine, owner = runtime.plan, runtime.engine, object()
        rest = _TURNS * (_TURN_TOKENS + _ANSWER_TOKENS)
        text, started_s = prompt_of(options, options.context - rest), time.perf_counter()
        params, kept = GenerationParams(_ANSWER_TOKENS, ignore_eos=True), list[int]()
        for _ in range(_TURNS):
            stream = runtime.start(text, params, owner=owner)
            "".join(stream)  # to its end
            kept.append(stream.result.stats.kept_tokens)
            text = [*text, *stream.result.tokens, *prompt_of(options, _TURN_TOKENS)]
        budget, cache = engine.budgets[0], engine.target.runner.cache
        peak_bytes = allocated_bytes(options, peak=True)
        return {
            "context": runtime.context_tokens, "filled_s": time.perf_counter() - started_s, "kept_tokens": kept,
            "planned_device": dict(plan.device), "planned_device_bytes": plan.device_bytes,
            "reserved": dict(budget.reservations), "planned_anchor_bytes": plan.host["states to go back to"],
            "anchor_bytes": cache.anchor_bytes, "driver_peak_bytes": budget.peak_bytes(),
            "held_bytes": None if after_bytes is None else after_bytes - (before_bytes or 0),
            "worked_bytes": None if peak_bytes is None else peak_bytes - (after_bytes or 0),
        }  # fmt: skip


def checks_of(prefill: dict[str, Any], memory: dict[str, Any]) -> list[Check]:
    """The claims."""
    found = list[Check]()
    if prefill["by_kind_s"].get("delta rule"):
        claim = f"delta rule's share of a prompt of {prefill['tokens']} tokens"
        found.append(Check(claim, prefill["delta_rule_share"], _MOST_SHARE, at_least=False))
    planned = memory["planned_device"]
    pairs = {
        "anchors": (memory["anchor_bytes"], memory["planned_anchor_bytes"]),
        "states": (memory["reserved"]["target: KV cache: states"], planned["states"]),
        "keys and values": (memory["reserved"]["target: KV cache"], planned["KV cache"]),
    }
    if memory["held_bytes"] is not None:
        names = ("embedding and head", "head", "resident layers", "KV cache", "states")
        lasting = sum(planned.get(name, 0) for name in names)
        pairs["weights and caches, as the allocator has them"] = memory["held_bytes"], lasting
        claim = "of the planned work space what the allocator gave out, beyond weights and caches"
        found.append(Check(claim, memory["worked_bytes"] / planned["workspace"], 1.0, at_least=False))
        claim = "of the planned device memory what the driver saw at the peak"
        found.append(Check(claim, memory["driver_peak_bytes"] / memory["planned_device_bytes"], 1.0, at_least=False))
    for name, (measured, expected) in pairs.items():
        found.append(Check(f"{name}: share off the plan", abs(measured / expected - 1), _MOST_OFF, at_least=False))
    return found


def print_prefill(row: dict[str, Any]) -> None:
    """The figures for people."""
    predicted = "-" if row["predicted_s"] is None else f"{row['predicted_s']:.3f} s"
    print(
        f"{row['tokens']} tokens through {row['layers']} layers: {row['seconds']['median']:.3f} s, predicted "
        f"{predicted}, in kernels {row['kernels_s']:.3f} s"
    )
    for kind, seconds in sorted(row["by_kind_s"].items(), key=lambda one: -one[1]):
        print(f"  {kind:12} {seconds:.4f} s {seconds / row['kernels_s']:.1%}")
    print(f"  delta rule with its projections: {row['delta_rule_share'] + row['delta_projections_share']:.1%}")
    for kernel, seconds in row["kernels"].items():
        print(f"    {seconds:.4f} s {kernel[:90]}")


def print_memory(row: dict[str, Any]) -> None:
    """The figures for people."""
    print(f"a context of {row['context']} filled in {row['filled_s']:.1f} s, tokens kept {row['kept_tokens']}")
    for name, planned in row["planned_device"].items():
        print(f"  planned {planned / GB:8.3f} GB {name}")
    for name, reserved in row["reserved"].items():
        print(f"  reserved {reserved / GB:7.3f} GB {name}")
    print(f"  anchors {row['anchor_bytes'] / GB:.3f} GB, planned {row['planned_anchor_bytes'] / GB:.3f} GB")


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = harness.bench_parser(__doc__)
    hybrids = [name for name, shape in SHAPES.items() if isinstance(shape, HybridShape)]
    parser.add_argument("--shape", choices=hybrids, default="qwen3.6-27b", help="of the model")
    parser.add_argument("--layers", type=int, default=4, help="that read the prompt")
    parser.add_argument("--prompt-tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=3)
    # 128K tokens, behind which an anchor is due, and the last turns.
    parser.add_argument("--context", type=int, default=131072 + 3072, help="that a conversation fills")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    options = parser.parse_args(argv)
    harness.require_all_positive(options, "layers", "prompt_tokens", "repeats", "context")
    check_out(options.out)
    prefill = measure_prefill(options)
    print_prefill(prefill)
    sys.stdout.flush()
    memory = measure_memory(options)
    print_memory(memory)
    settings = harness.settings_of(options)
    report = {"benchmark": "hybrid layers", "settings": settings, "prefill": prefill, "memory": memory}
    return finish(report, checks_of(prefill, memory), options.out)


if __name__ == "__main__":
    sys.exit(main())
