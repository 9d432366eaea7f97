"""Time summarising keys by chunks, at the shapes of 7B and 70B Llamas: a new block, a streamed piece, a whole layer.

    python tools/bench_chunk_summaries.py [--commit HASH]

The bound is reading the keys and writing the summaries once.
"""

from __future__ import annotations

from functools import partial

import script  # noqa: F401 (finds the package, installed or not)
import torch
from bench_kernels_common import DEVICE, Case, num_inputs, random_bf16, run_benchmark
from offload_runtime_kernels.chunk_summaries import (
    FACTOR_BYTES,
    ChunkSummaries,
    chunk_summaries_reference,
    chunk_summaries_triton,
)
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

HEAD_DIM = 128


def make_case(blocks: int, num_kv_heads: int, chunk_size: int) -> Case:
    """`blocks` blocks of one sequence."""
    key_bytes = blocks * num_kv_heads * BLOCK_TOKENS * HEAD_DIM * 2
    count = num_inputs(2 * key_bytes)
    kv = random_bf16(count, 1, blocks, 2, num_kv_heads, BLOCK_TOKENS, HEAD_DIM)
    chunks = blocks * BLOCK_TOKENS // chunk_size
    codes = torch.empty(1, num_kv_heads, chunks, HEAD_DIM, dtype=torch.int8, device=DEVICE)
    out = ChunkSummaries(codes, torch.empty(1, num_kv_heads, chunks, 2, dtype=torch.float16, device=DEVICE))
    everything = range(blocks)
    return Case(
        configuration={"blocks": blocks, "num_kv_heads": num_kv_heads, "chunk_size": chunk_size},
        kernel=lambda i: chunk_summaries_triton(KVBlocks(kv[i]), everything, out, chunk_size=chunk_size),
        reference=lambda i: chunk_summaries_reference(KVBlocks(kv[i]), everything, out, chunk_size=chunk_size),
        num_inputs=count,
        moved_bytes=key_bytes + num_kv_heads * chunks * (HEAD_DIM + FACTOR_BYTES),
    )


if __name__ == "__main__":
    shapes = [(blocks, heads, 4) for heads in (32, 8) for blocks in (1, 32, 480)]
    run_benchmark("chunk_summaries", [partial(make_case, *shape) for shape in [*shapes, (480, 32, 2), (480, 32, 64)]])
