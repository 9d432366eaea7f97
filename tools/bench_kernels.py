"""Time kernels: each Triton kernel beside its torch reference, and beside its bound; experts that threads of the CPU
compute beside reading memory.

    python tools/bench_kernels.py attention [--only WORDS] [--out FILE] [--commit HASH]
    python tools/bench_kernels.py experts_cpu

The bound of a case is the larger of its bytes over the device's own copy bandwidth (the link's, if it brings them)
and its operations over a matrix product's own speed, all measured in the same call. Kernels run in a CUDA graph, over
inputs that are taken in turn. Prints a line a case, then one JSON line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import harness
import torch
from harness import check_out, emit, percentiles, provenance
from kernel_cases import attention, delta, encodings, experts, experts_cpu, kv, linear, rows
from kernel_cases.case import DEVICE, Case
from timing import BUDGET_S, event_times_ms, graph_times_ms, measure_copy_gbps, measure_link_gbps

from offload_runtime.errors import DeviceError, OptionError
from offload_runtime.hardware.bench import measure_tflops
from offload_runtime.sizes import GB

OPERATIONS = {
    **attention.CASES, **delta.CASES, **encodings.CASES, **experts.CASES, **kv.CASES, **linear.CASES, **rows.CASES,
}  # fmt: skip
EXPERTS_CPU = "experts_cpu"


def measure(case: Case, *, bytes_gbps: float, tflops: float) -> dict[str, Any]:
    """Times of kernel and reference (median, 20/80), the bound and the share of it that the kernel reaches."""
    bound_ms = 1e3 * max(case.moved_bytes / (bytes_gbps * GB), case.operations / (tflops * 1e12))

    def in_turn(run: Callable[[int], object]) -> Callable[[], object]:
        inputs = cycle(range(case.num_inputs))
        return lambda: run(next(inputs))

    kernel_ms = percentiles(graph_times_ms(in_turn(case.kernel), calls=case.num_inputs, repeats=20))
    if case.reference_in_graph:
        reference_ms = graph_times_ms(in_turn(case.reference), calls=2, repeats=10)
    else:
        reference_ms = event_times_ms(in_turn(case.reference), repeats=10)
    row = {
        **case.configuration, "triton_ms": kernel_ms, "reference_ms": percentiles(reference_ms),
        "reference_in_graph": case.reference_in_graph, "moved_bytes": case.moved_bytes, "bound_ms": bound_ms,
        "share_of_bound": bound_ms / kernel_ms["median"],
    }  # fmt: skip
    if case.stored_bytes:
        stored_gbps, moved_gbps = (one / 1e6 / kernel_ms["median"] for one in (case.stored_bytes, case.moved_bytes))
        row |= {"stored_gbps": stored_gbps, "decoded_gbps": moved_gbps - stored_gbps}
    return row


def measure_all(
    operation: str, only: str, *, copy_gbps: float, link_gbps: float, tflops: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """A row a case, each printed when it is there; only one case's inputs are in memory. Cases are those whose
    arguments have `only` in them.

    Raises:
        OptionError: None has.
    """
    chosen = [one for one in OPERATIONS[operation] if only in repr((one.args, one.keywords))]
    if not chosen:
        raise OptionError(f"--only {only!r} is in the arguments of none of {operation}'s cases")
    for make_case in chosen:
        case = make_case()
        bytes_gbps = link_gbps if case.over_link else copy_gbps
        row = measure(case, bytes_gbps=bytes_gbps, tflops=tflops["fp32" if case.fp32 else "bf16"])
        if case.close is not None:
            case.close()
        shown = ", ".join(f"{key} {value}" for key, value in case.configuration.items())
        decoded = (
            f"{row['stored_gbps']:.0f} GB/s stored, {row['decoded_gbps']:.0f} decoded; " if case.stored_bytes else ""
        )
        print(
            f"{shown}: {case.moved_bytes / 1e6:.1f} MB in {row['triton_ms']['median']:.4f} ms, "
            f"{row['share_of_bound']:.0%} of the bound; "
            f"{decoded}reference {row['reference_ms']['median']:.4f} ms",
            flush=True,
        )
        yield row


@harness.one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure one kernel's cases."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("operation", choices=[*OPERATIONS, EXPERTS_CPU])
    parser.add_argument("--only", default="", help="time those cases whose arguments contain these words")
    harness.add_report_options(parser)
    options = parser.parse_args(argv)
    check_out(options.out)
    if options.operation == EXPERTS_CPU:
        report = {"benchmark": EXPERTS_CPU, **provenance(torch.device("cpu"), commit=options.commit)}
        emit(report | {"cases": list(experts_cpu.measure_all(options.only))}, options.out)
        return 0
    if not torch.cuda.is_available():
        raise DeviceError("this times CUDA kernels and torch sees no CUDA device: run it on a machine with one")
    link_gbps = measure_link_gbps(DEVICE)
    assert link_gbps is not None
    rates = {"copy_gbps": measure_copy_gbps(DEVICE), "link_gbps": link_gbps}
    tflops = measure_tflops(DEVICE, budget_s=BUDGET_S)
    emit(
        {
            "benchmark": options.operation,
            **provenance(DEVICE, commit=options.commit),
            "configuration": {"dtype": "bf16", "timing": "CUDA graph, inputs taken in turn"},
            **rates,
            "matmul_tflops": tflops["bf16"],
            "fp32_tflops": tflops["fp32"],
            "cases": list(measure_all(options.operation, options.only, tflops=tflops, **rates)),
        },
        options.out,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
