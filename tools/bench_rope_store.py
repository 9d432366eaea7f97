"""Time rotating queries and keys and storing keys and values, at the shapes of 7B and 70B Llamas.

    python tools/bench_rope_store.py [--commit HASH]

The bound is reading the fused projection and writing queries, keys and values once. The reference selects the real rows
with a boolean index, which waits for the device, so it is timed outside a graph.
"""

from __future__ import annotations

from functools import partial

import script  # noqa: F401 (finds the package, installed or not)
import torch
from bench_kernels_common import DEVICE, Case, num_inputs, random_bf16, run_benchmark
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks
from offload_runtime_kernels.rope_store import RopeRows, rope_store_reference, rope_store_triton

HEAD_DIM = 128


def make_case(rows: int, num_heads: int, num_kv_heads: int) -> Case:
    """`rows` rows of one sequence."""
    channels = (num_heads + 2 * num_kv_heads) * HEAD_DIM
    moved_bytes = 2 * rows * channels * 2 + rows * HEAD_DIM * 4
    count = num_inputs(moved_bytes)
    qkv = random_bf16(count, rows, channels)
    kv = KVBlocks(random_bf16(1, -(-rows // BLOCK_TOKENS), 2, num_kv_heads, BLOCK_TOKENS, HEAD_DIM))
    angle = torch.rand(rows, HEAD_DIM // 2, device=DEVICE)
    places = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    where = RopeRows(angle.cos(), angle.sin(), places, places, torch.zeros_like(places))
    return Case(
        configuration={"rows": rows, "num_heads": num_heads, "num_kv_heads": num_kv_heads},
        kernel=lambda i: rope_store_triton(qkv[i], where, kv, None),
        reference=lambda i: rope_store_reference(qkv[i], where, kv, None),
        num_inputs=count,
        moved_bytes=moved_bytes,
        reference_in_graph=False,
    )


if __name__ == "__main__":
    run_benchmark(
        "rope_store",
        [partial(make_case, rows, *heads) for heads in ((32, 32), (64, 8)) for rows in (1, 64, 512, 4096)],
    )
