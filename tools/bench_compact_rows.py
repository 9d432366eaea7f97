"""Time moving the keys and values of an accepted path into place, at the shapes of 7B and 70B Llamas.

    python tools/bench_compact_rows.py [--commit HASH]

The bound is reading and writing every moved row once. A path of every third row of its window is moved; the same moves
are made again and again, which takes as long as the first time.
"""

from __future__ import annotations

from functools import partial

import script  # noqa: F401 (finds the package, installed or not)
import torch
from bench_kernels_common import DEVICE, Case, num_inputs, random_bf16, run_benchmark
from offload_runtime_kernels.compact_rows import compact_rows_reference, compact_rows_triton
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

HEAD_DIM = 128


def make_case(rows: int, num_layers: int, num_kv_heads: int) -> Case:
    """`rows` accepted rows of one sequence, moved in all layers."""
    moved_bytes = 2 * num_layers * 2 * num_kv_heads * rows * HEAD_DIM * 2
    blocks = -(-3 * rows // BLOCK_TOKENS)
    count = min(num_inputs(moved_bytes), 4)  # whole blocks of all layers lie around what is moved
    kv = [KVBlocks(random_bf16(num_layers, blocks, 2, num_kv_heads, BLOCK_TOKENS, HEAD_DIM)) for _ in range(count)]
    sources = torch.arange(1, 3 * rows, 3, dtype=torch.int32, device=DEVICE)
    return Case(
        configuration={"rows": rows, "num_layers": num_layers, "num_kv_heads": num_kv_heads},
        kernel=lambda i: compact_rows_triton(kv[i], sources, 1),
        reference=lambda i: compact_rows_reference(kv[i], sources, 1),
        num_inputs=count,
        moved_bytes=moved_bytes,
    )


if __name__ == "__main__":
    run_benchmark(
        "compact_rows",
        [partial(make_case, rows, *shape) for shape in ((32, 32), (80, 8)) for rows in (1, 8, 64, 256)],
    )
