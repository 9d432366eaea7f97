"""Time scoring all chunks of a long context and choosing the best, at the shapes of 7B and 70B Llamas.

    python tools/bench_chunk_scores.py [--commit HASH]

The bound of the scores is reading the summaries and writing the scores once; that of the choice, reading the scores.
The logits between the two kernels are not in it: with many rows they are the larger part.
"""

from __future__ import annotations

from functools import partial

import script  # noqa: F401 (finds the package, installed or not)
import torch
from bench_kernels_common import DEVICE, Case, num_inputs, random_bf16, run_benchmark
from offload_runtime_kernels.chunk_scores import chunk_scores_reference, chunk_scores_triton
from offload_runtime_kernels.chunk_summaries import FACTOR_BYTES, ChunkSummaries
from offload_runtime_kernels.select_chunks import select_chunks_reference, select_chunks_triton

HEAD_DIM = 128


def make_scores_case(rows: int, chunks: int, num_heads: int, num_kv_heads: int) -> Case:
    """Softmax scores of `chunks` chunks for `rows` queries of one sequence."""
    summaries_bytes = num_kv_heads * chunks * (HEAD_DIM + FACTOR_BYTES)
    count = num_inputs(summaries_bytes)
    q, shape = random_bf16(1, rows, num_heads, HEAD_DIM), (1, num_kv_heads, chunks)
    summaries = [
        ChunkSummaries(
            torch.randint(-127, 128, (*shape, HEAD_DIM), dtype=torch.int8, device=DEVICE),
            torch.rand(*shape, 2, dtype=torch.float16, device=DEVICE) / 50,
        )
        for _ in range(count)
    ]
    counts = torch.full((1,), chunks, dtype=torch.int32, device=DEVICE)
    scale = HEAD_DIM**-0.5
    return Case(
        configuration={
            "step": "scores", "rows": rows, "chunks": chunks, "num_heads": num_heads, "num_kv_heads": num_kv_heads,
        },
        kernel=lambda i: chunk_scores_triton(q, summaries[i], counts, scale=scale),
        reference=lambda i: chunk_scores_reference(q, summaries[i], counts, scale=scale),
        num_inputs=count,
        moved_bytes=summaries_bytes + q.nbytes + num_kv_heads * chunks * 4,
        operations=2 * rows * num_heads * chunks * HEAD_DIM,
    )  # fmt: skip


def make_select_case(chunks: int, num_kv_heads: int, budget_chunks: int) -> Case:
    """The best `budget_chunks` of `chunks` for every head of one sequence."""
    score_bytes = num_kv_heads * chunks * 4
    count = num_inputs(score_bytes)
    scores = torch.randn(count, 1, num_kv_heads, chunks, device=DEVICE).softmax(-1)
    limits = torch.full((1,), chunks - 8, dtype=torch.int32, device=DEVICE)
    return Case(
        configuration={
            "step": "select", "chunks": chunks, "num_kv_heads": num_kv_heads, "budget_chunks": budget_chunks,
        },
        kernel=lambda i: select_chunks_triton(scores[i], limits, budget_chunks=budget_chunks),
        reference=lambda i: select_chunks_reference(scores[i], limits, budget_chunks=budget_chunks),
        num_inputs=count,
        moved_bytes=score_bytes,
    )  # fmt: skip


if __name__ == "__main__":
    heads = ((32, 32), (64, 8))
    run_benchmark(
        "chunk_scores",
        [
            *(partial(make_scores_case, rows, chunks, *shape)
              for shape in heads for chunks in (8192, 30720) for rows in (1, 7, 17, 32)),
            *(partial(make_select_case, chunks, num_kv_heads, 1024)
              for num_kv_heads in (32, 8) for chunks in (8192, 30720)),
        ],
    )  # fmt: skip
