"""What the kernel benchmarks share: a case's kernel beside its reference, timed in one call, against its bound.

The bound of a case is the larger of its bytes over the device's own copy bandwidth and its operations over a matrix
product's own speed, both measured in the same call.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench_gumbel_argmax import graph_times_ms, measure_copy_gbps
from bench_report import emit, percentiles, provenance

from offload_runtime.config import GB

DEVICE = torch.device("cuda")
CACHE_BYTES = 256_000_000  # inputs that are taken in turn add up to more than any cache holds


@dataclass(frozen=True)
class Case:
    """One shape. `kernel` and `reference` take the number of the input to work on, below `num_inputs`."""

    configuration: dict[str, Any]
    kernel: Callable[[int], object]
    reference: Callable[[int], object]
    num_inputs: int
    moved_bytes: int
    operations: int = 0
    reference_in_graph: bool = True  # False where the reference waits for the device, which a graph cannot hold


def num_inputs(input_bytes: int) -> int:
    """Inputs of `input_bytes` each that together are larger than the caches, at least two, at most 64."""
    return min(64, max(2, -(-CACHE_BYTES // input_bytes)))


def random_bf16(*shape: int) -> torch.Tensor:
    """Gaussian values of `shape` in bf16 on the GPU."""
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def _in_turn(run: Callable[[int], object], count: int) -> Callable[[], object]:
    turn = iter(range(1 << 62))
    return lambda: run(next(turn) % count)


def event_times_ms(run: Callable[[], object], *, repeats: int, warmups: int = 1) -> list[float]:
    """Milliseconds of one `run`, `repeats` times, launching included."""
    for _ in range(warmups):
        run()
    times_ms = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times_ms.append(start.elapsed_time(stop))
    return times_ms


def _measure_matmul_flops() -> float:
    """Floating-point operations per second of a large bf16 matrix product."""
    a, b = random_bf16(8192, 8192), random_bf16(8192, 8192)
    best_ms = min(graph_times_ms(lambda: a @ b, calls=2, repeats=10))
    return 2 * 8192**3 / (best_ms / 1e3)


def _measure(case: Case, *, copy_gbps: float, matmul_flops: float) -> dict[str, Any]:
    bound_ms = 1e3 * max(case.moved_bytes / (copy_gbps * GB), case.operations / matmul_flops)
    kernel = percentiles(graph_times_ms(_in_turn(case.kernel, case.num_inputs), calls=case.num_inputs, repeats=20))
    run = _in_turn(case.reference, case.num_inputs)
    if case.reference_in_graph:
        reference = percentiles(graph_times_ms(run, calls=2, repeats=10))
    else:
        reference = percentiles(event_times_ms(run, repeats=10))
    return {
        **case.configuration,
        "triton_ms": kernel.as_dict(),
        "reference_ms": reference.as_dict(),
        "reference_in_graph": case.reference_in_graph,
        "moved_bytes": case.moved_bytes,
        "bound_ms": bound_ms,
        "share_of_bound": bound_ms / kernel.median,
    }


def run_benchmark(name: str, make_cases: Sequence[Callable[[], Case]]) -> None:
    """Measure every case, print a table, and one JSON line last.

    Args:
        name: Of the operation.
        make_cases: Each builds its inputs when called, so that only one case's inputs are in memory.
    """
    parser = argparse.ArgumentParser(description=f"Time {name}: the Triton kernel beside its torch reference.")
    parser.add_argument("--commit", help="commit to report where the tree has no git")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this times CUDA kernels and torch sees no CUDA device: run it on a machine with one")
    copy_gbps, matmul_flops = measure_copy_gbps(), _measure_matmul_flops()
    cases = []
    for make_case in make_cases:
        cases.append(_measure(make_case(), copy_gbps=copy_gbps, matmul_flops=matmul_flops))
        shown = ", ".join(f"{key} {value}" for key, value in cases[-1].items() if isinstance(value, int | str))
        print(
            f"{shown}: {cases[-1]['triton_ms']['median']:.4f} ms, {cases[-1]['share_of_bound']:.0%} of the bound; "
            f"reference {cases[-1]['reference_ms']['median']:.4f} ms"
        )
    emit(
        {
            "benchmark": name,
            **provenance(DEVICE, commit=arguments.commit),
            "configuration": {"dtype": "bf16", "timing": "CUDA graph, inputs taken in turn"},
            "copy_gbps": copy_gbps,
            "matmul_tflops": matmul_flops / 1e12,
            "cases": cases,
        }
    )
