"""Time the fused residual addition and RMSNorm at 7B-like shapes.

    python tools/bench_rms_norm.py [--commit HASH]

The bound is reading residual and delta and writing residual and result once.
"""

from __future__ import annotations

from functools import partial

import script  # noqa: F401 (finds the package, installed or not)
from bench_kernels_common import Case, num_inputs, random_bf16, run_benchmark
from offload_runtime_kernels.rms_norm import add_rms_norm_reference, add_rms_norm_triton


def make_case(rows: int, width: int) -> Case:
    """`rows` rows of `width` channels."""
    moved_bytes = 4 * rows * width * 2
    count = num_inputs(moved_bytes)
    residual, delta, weight = random_bf16(count, rows, width), random_bf16(count, rows, width), random_bf16(width)
    return Case(
        configuration={"rows": rows, "width": width},
        kernel=lambda i: add_rms_norm_triton(residual[i], delta[i], weight, 1e-5),
        reference=lambda i: add_rms_norm_reference(residual[i], delta[i], weight, 1e-5),
        num_inputs=count,
        moved_bytes=moved_bytes,
    )


if __name__ == "__main__":
    run_benchmark(
        "rms_norm", [partial(make_case, rows, width) for width in (4096, 8192) for rows in (1, 64, 512, 4096)]
    )
