"""Time shared-noise sampling on the GPU: the fused Triton kernel beside the torch reference, in one call.

    python tools/bench_gumbel_argmax.py [--rows 1 17 64] [--vocab 151936] [--dtype bf16] [--commit HASH]

The bound is reading the logits once at the device's own copy bandwidth, measured here. Greedy shows how near the memory
side comes to it; the difference to a temperature is the price of the noise. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import script  # noqa: F401 (finds the package, installed or not)
import torch
from bench_report import emit, percentiles, provenance
from offload_runtime_kernels.gumbel_argmax import gumbel_argmax_reference, gumbel_argmax_triton, noise_keys
from torch import Tensor

from offload_runtime.config import GB

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def graph_times_ms(run: Callable[[], object], *, calls: int, repeats: int) -> list[float]:
    """Milliseconds of one `run`, `repeats` times: `calls` of them in a CUDA graph, so that launching costs nothing.

    That is also how a draft step runs it. The first call is outside the graph and compiles the kernels.
    """
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    graph.replay()
    times_ms = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times_ms.append(start.elapsed_time(stop) / calls)
    return times_ms


def measure_copy_gbps() -> float:
    """Device-to-device copy of 1 GiB in GB/s, bytes read and written both counted: the memory's practical peak."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    best_ms = min(graph_times_ms(lambda: target.copy_(source), calls=4, repeats=10))
    return 2 * source.numel() / (best_ms / 1e3) / GB


def rotating_logits(num_rows: int, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Random logits [N, R, V] on the GPU, N inputs to take in turn: more than 256 MB, so that no cache holds them."""
    element_bytes = torch.empty(0, dtype=dtype).element_size()
    copies = max(2, -(-256_000_000 // (num_rows * vocab_size * element_bytes)))
    return torch.randn((copies, num_rows, vocab_size), device="cuda").mul_(3).to(dtype)


def measure_case(
    num_rows: int, vocab_size: int, dtype: torch.dtype, *, temperature: float, copy_gbps: float
) -> dict[str, Any]:
    """Kernel and reference at one shape: milliseconds a call (median, 20/80), bound and share of it."""
    logits = rotating_logits(num_rows, vocab_size, dtype)
    positions = torch.arange(num_rows, device="cuda")
    slots, keys = torch.zeros_like(positions), noise_keys([(temperature, 1, 0)]).cuda()
    bound_ms = logits[0].numel() * logits.element_size() / (copy_gbps * GB) * 1e3
    case: dict[str, Any] = {"rows": num_rows, "vocab": vocab_size, "temperature": temperature, "bound_ms": bound_ms}
    ways = (("triton", gumbel_argmax_triton, len(logits)), ("reference", gumbel_argmax_reference, 2))
    for name, sample, calls in ways:
        turn = iter(range(1 << 62))

        def run(sample: Callable[..., Tensor] = sample, turn: Any = turn) -> Tensor:
            return sample(logits[next(turn) % len(logits)], positions, slots, keys)

        times = percentiles(graph_times_ms(run, calls=calls, repeats=20))
        case[f"{name}_ms"] = times.as_dict()
        case[f"{name}_share_of_bound"] = bound_ms / times.median
    return case


def main() -> None:
    """Parse the arguments, measure every shape at temperature 0 and 0.7, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 17, 64, 512])
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 151_936])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--commit", help="commit to report where the tree has no git")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this times CUDA kernels and torch sees no CUDA device: run it on a machine with one")
    copy_gbps = measure_copy_gbps()
    cases = []
    print(f"{'rows':>5} {'vocab':>7} {'T':>4} {'triton ms':>10} {'reference ms':>13} {'bound ms':>9} {'of bound':>9}")
    for vocab_size in arguments.vocab:
        for num_rows in arguments.rows:
            for temperature in (0.0, 0.7):
                case = measure_case(
                    num_rows, vocab_size, DTYPES[arguments.dtype], temperature=temperature, copy_gbps=copy_gbps
                )
                cases.append(case)
                print(
                    f"{num_rows:5} {vocab_size:7} {temperature:4} {case['triton_ms']['median']:10.4f} "
                    f"{case['reference_ms']['median']:13.4f} {case['bound_ms']:9.4f} "
                    f"{case['triton_share_of_bound']:9.0%}"
                )
    configuration = {"dtype": arguments.dtype, "timing": "CUDA graph, inputs taken in turn"}
    emit(
        {
            "benchmark": "gumbel_argmax",
            **provenance(torch.device("cuda"), commit=arguments.commit),
            "configuration": configuration,
            "copy_gbps": copy_gbps,
            "cases": cases,
        }
    )


if __name__ == "__main__":
    main()
