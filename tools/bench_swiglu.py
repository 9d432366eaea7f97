"""Time SwiGLU on the fused gate/up projection at 7B-like shapes.

    python tools/bench_swiglu.py [--commit HASH]

The bound is reading gate and up and writing the result once.
"""

from __future__ import annotations

from functools import partial

import script  # noqa: F401 (finds the package, installed or not)
from bench_kernels_common import Case, num_inputs, random_bf16, run_benchmark
from offload_runtime_kernels.swiglu import swiglu_reference, swiglu_triton


def make_case(rows: int, width: int) -> Case:
    """`rows` rows of `width` gates and as many ups."""
    moved_bytes = 3 * rows * width * 2
    count = num_inputs(moved_bytes)
    gate_up = random_bf16(count, rows, 2 * width)
    return Case(
        configuration={"rows": rows, "width": width},
        kernel=lambda i: swiglu_triton(gate_up[i]),
        reference=lambda i: swiglu_reference(gate_up[i]),
        num_inputs=count,
        moved_bytes=moved_bytes,
    )


if __name__ == "__main__":
    run_benchmark("swiglu", [partial(make_case, rows, 11008) for rows in (1, 64, 512, 4096)])
