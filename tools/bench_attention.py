"""Time attention over the cache: decoding windows, trees and prefill, at the shapes of 7B and 70B Llamas.

    python tools/bench_attention.py [--commit HASH]

The bound is reading the keys and values once, or the operations on the keys that each query sees. The reference is
torch's SDPA under a dense mask. It is given the tree as a chain: the work is the same, and finding the tree's slots
would wait for the device.
"""

from __future__ import annotations

from functools import partial

import torch
from bench_kernels_common import DEVICE, Case, num_inputs, random_bf16, run_benchmark
from offload_runtime_kernels.attention import QueryRows, attention_reference, attention_triton

HEAD_DIM = 128


def _rows(queries: int, context: int, *, tree: bool) -> QueryRows:
    """`queries` rows behind `context` tokens; as a tree, pairs of siblings on one spine."""
    if not tree:
        positions = torch.arange(context, context + queries, dtype=torch.int32, device=DEVICE)
        return QueryRows(positions[None], torch.zeros(1, dtype=torch.int32, device=DEVICE), context + queries)
    depth = queries // 2
    paths = [[2 * level + 1 for level in range(node // 2)] + [node] for node in range(queries)]
    ancestors = [[context + n for n in path] + [0] * (depth - len(path)) for path in paths]
    integers = partial(torch.tensor, dtype=torch.int32, device=DEVICE)
    return QueryRows(
        positions=integers([[context + len(path) - 1 for path in paths]]),
        sequences=integers([0]),
        max_length=context + depth,
        committed=integers([context]),
        ancestors=integers([ancestors]),
        min_committed=context,
    )


def make_case(mode: str, queries: int, context: int, num_heads: int, num_kv_heads: int) -> Case:
    """One sequence; `mode` is window, tree or prefill."""
    kv_bytes = 2 * (context + queries) * num_kv_heads * HEAD_DIM * 2
    count = num_inputs(kv_bytes)
    q = random_bf16(1, queries, num_heads, HEAD_DIM)
    kv = random_bf16(count, 2, 1, context + queries, num_kv_heads, HEAD_DIM)
    rows, chain = _rows(queries, context, tree=mode == "tree"), _rows(queries, context, tree=False)
    scale = HEAD_DIM**-0.5
    seen = context + (queries + 1) // 2  # by a query, on average
    return Case(
        configuration={
            "mode": mode, "queries": queries, "context": context, "num_heads": num_heads, "num_kv_heads": num_kv_heads,
        },
        kernel=lambda i: attention_triton(q, kv[i, 0], kv[i, 1], rows, scale=scale, prefill=mode == "prefill"),
        reference=lambda i: attention_reference(q, kv[i, 0], kv[i, 1], chain, scale=scale),
        num_inputs=count,
        moved_bytes=kv_bytes + 2 * q.nbytes,
        operations=4 * queries * seen * num_heads * HEAD_DIM,
    )  # fmt: skip


if __name__ == "__main__":
    shapes = [
        *((mode, queries, context) for context in (4096, 32768) for mode, queries in (
            ("window", 1), ("window", 17), ("window", 64), ("tree", 64), ("window", 512))),
        ("prefill", 2048, 0),
        ("prefill", 2048, 14336),
    ]  # fmt: skip
    run_benchmark(
        "attention", [partial(make_case, *shape, *heads) for heads in ((32, 32), (64, 8)) for shape in shapes]
    )
