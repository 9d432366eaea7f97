"""Attention over the cache: decoding windows, trees, prefill, pieces, at the shapes of 7B and 70B Llamas.

The bound is reading the keys and values once, or the operations on the keys that each query sees. The reference is
torch's SDPA under a dense mask. It is given the tree as a chain: the work is the same, and finding the tree's slots
would wait for the device. The reference of pieces is SDPA over everything at once, and that of several sources SDPA
over as many keys in one row.
"""

from __future__ import annotations

from functools import partial

import torch
from kernel_cases.case import DEVICE, HEAD_DIM, Case, Cases, num_inputs, random_bf16
from offload_runtime_kernels.attention import AttentionParams, AttentionState, KeySource, QueryRows, attention_reference
from offload_runtime_kernels.attention_sources import attend_sources_triton
from offload_runtime_kernels.attention_triton import attend_blocks_triton, attention_triton, finish_attention_triton
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

PARAMS = AttentionParams(HEAD_DIM**-0.5)


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
        positions=integers([[context + len(path) - 1 for path in paths]]), slots=integers([0]),
        max_length=context + depth, committed=integers([context]), ancestors=integers([ancestors]),
    )  # fmt: skip


def _kv_bytes(tokens: int, num_kv_heads: int) -> int:
    return 2 * tokens * num_kv_heads * HEAD_DIM * 2


def _random_kv(count: int, tokens: int, num_kv_heads: int) -> torch.Tensor:
    """[count, 1, N, 2, H_kv, 256, D] for at least `tokens` tokens."""
    return random_bf16(count, 1, -(-tokens // BLOCK_TOKENS), 2, num_kv_heads, BLOCK_TOKENS, HEAD_DIM)


def make_case(mode: str, queries: int, context: int, num_heads: int, num_kv_heads: int) -> Case:
    """One sequence; `mode` is window, tree or prefill."""
    kv_bytes = _kv_bytes(context + queries, num_kv_heads)
    count = num_inputs(kv_bytes)
    q = random_bf16(1, queries, num_heads, HEAD_DIM)
    data = _random_kv(count, context + queries, num_kv_heads)
    rows, chain = _rows(queries, context, tree=mode == "tree"), _rows(queries, context, tree=False)
    seen = context + (queries + 1) // 2  # by a query, on average
    return Case(
        configuration={
            "mode": mode, "queries": queries, "context": context, "num_heads": num_heads, "num_kv_heads": num_kv_heads,
        },
        kernel=lambda i: attention_triton(q, KVBlocks(data[i]), rows, PARAMS, prefill=mode == "prefill"),
        reference=lambda i: attention_reference(q, KVBlocks(data[i]), chain, PARAMS), num_inputs=count,
        moved_bytes=kv_bytes + 2 * q.nbytes, operations=4 * queries * seen * num_heads * HEAD_DIM,
    )  # fmt: skip


def make_pieces_case(queries: int, context: int, piece_tokens: int, num_heads: int, num_kv_heads: int) -> Case:
    """A long context in pieces, as it comes over the link, and the newest block behind it."""
    kv_bytes = _kv_bytes(context + queries, num_kv_heads)
    q = random_bf16(1, queries, num_heads, HEAD_DIM)
    data = _random_kv(2, context + queries, num_kv_heads)
    rows = _rows(queries, context, tree=False)
    step, last = piece_tokens // BLOCK_TOKENS, data.shape[2]
    pieces = [range(first, min(first + step, last)) for first in range(0, last, step)]

    def in_pieces(i: int) -> torch.Tensor:
        state = AttentionState.empty(q)
        for blocks in pieces:
            kv = KVBlocks(data[i][:, blocks.start : blocks.stop], blocks.start)
            attend_blocks_triton(q, kv, rows, blocks, state, PARAMS)
        return finish_attention_triton(q, state, PARAMS)

    return Case(
        configuration={
            "mode": "pieces", "queries": queries, "context": context, "piece_tokens": piece_tokens,
            "num_heads": num_heads, "num_kv_heads": num_kv_heads,
        },
        kernel=in_pieces, reference=lambda i: attention_reference(q, KVBlocks(data[i]), rows, PARAMS),
        num_inputs=2, moved_bytes=kv_bytes + 2 * q.nbytes, operations=4 * queries * context * num_heads * HEAD_DIM,
    )  # fmt: skip


def make_sources_case(queries: int, retrieved: int, recent: int, num_heads: int, num_kv_heads: int) -> Case:
    """The retrieval verifier: retrieved keys, all of them seen, and the newest blocks of a sequence of 120K tokens."""
    start = 480 * BLOCK_TOKENS  # first position of the newest blocks
    kv_bytes = _kv_bytes(retrieved + recent, num_kv_heads)
    count = num_inputs(kv_bytes)
    q = random_bf16(1, queries, num_heads, HEAD_DIM)
    far, near = _random_kv(count, retrieved, num_kv_heads), _random_kv(count, recent, num_kv_heads)
    together = torch.cat((far, near), dim=2)
    rows, chain = (_rows(queries, first + recent - queries, tree=False) for first in (start, retrieved))
    newest = range(start // BLOCK_TOKENS, start // BLOCK_TOKENS + near.shape[2])

    def from_two(i: int) -> torch.Tensor:
        chosen = KeySource(KVBlocks(far[i]), range(far.shape[2]), num_keys=retrieved)
        return attend_sources_triton(q, [chosen, KeySource(KVBlocks(near[i]), newest)], rows, PARAMS)

    return Case(
        configuration={
            "mode": "sources", "queries": queries, "retrieved": retrieved, "recent": recent, "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
        },
        kernel=from_two, reference=lambda i: attention_reference(q, KVBlocks(together[i]), chain, PARAMS),
        num_inputs=count, moved_bytes=kv_bytes + 2 * q.nbytes,
        operations=4 * queries * (retrieved + recent) * num_heads * HEAD_DIM,
    )  # fmt: skip


_SHAPES = [
    *((mode, queries, context) for context in (4096, 32768) for mode, queries in (
        ("window", 1), ("window", 17), ("window", 64), ("tree", 64), ("window", 512))),
    ("prefill", 2048, 0), ("prefill", 2048, 14336),
]  # fmt: skip
CASES: Cases = {
    "attention": [
        *(partial(make_case, *shape, *heads) for heads in ((32, 32), (64, 8)) for shape in _SHAPES),
        partial(make_case, "window", 17, 122880, 32, 32),
        partial(make_pieces_case, 17, 122880, 8192, 32, 32),
        *(partial(make_sources_case, queries, 4096, 600, 32, 32) for queries in (1, 5, 17)),
    ]
}
