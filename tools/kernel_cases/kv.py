"""Kernels of the KV cache: moving an accepted path, and summarising, scoring, choosing and gathering chunks of keys.

Bounds are: of the move reading and writing every row once; of the summaries reading the keys and writing the summaries;
of the scores reading the summaries and writing the scores (the logits between the two kernels are not in it: with many
rows they are the larger part); of the choice reading the scores; of the gather the chunks that move, over the link from
page-locked memory, or read and written within the device's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from kernel_cases.case import DEVICE, HEAD_DIM, Case, Cases, num_inputs, random_bf16
from offload_runtime_kernels.chunk_scores import chunk_scores_reference, chunk_scores_triton
from offload_runtime_kernels.chunk_summaries import (
    FACTOR_BYTES,
    ChunkSummaries,
    chunk_summaries_reference,
    chunk_summaries_triton,
)
from offload_runtime_kernels.compact_rows import compact_rows_reference, compact_rows_triton
from offload_runtime_kernels.gather_chunks import BlockTable, gather_chunks
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks
from offload_runtime_kernels.select_chunks import select_chunks_reference, select_chunks_triton

from offload_runtime.stream.arena import HostArena

_CHUNK_SIZE, _BUDGET_CHUNKS, _NUM_BLOCKS = 8, 512, 480  # of what is gathered
_NUM_SELECTIONS = 16  # taken in turn, so that what moves was not read a moment ago
_CHUNKS_PER_BLOCK = BLOCK_TOKENS // _CHUNK_SIZE


def make_compact_rows(rows: int, num_layers: int, num_kv_heads: int) -> Case:
    """`rows` accepted rows of one sequence, every third of its window, moved in all layers, again and again."""
    moved_bytes = 2 * num_layers * 2 * num_kv_heads * rows * HEAD_DIM * 2
    blocks = -(-3 * rows // BLOCK_TOKENS)
    count = min(num_inputs(moved_bytes), 4)  # whole blocks of all layers lie around what is moved
    kv = [KVBlocks(random_bf16(num_layers, blocks, 2, num_kv_heads, BLOCK_TOKENS, HEAD_DIM)) for _ in range(count)]
    sources = torch.arange(1, 3 * rows, 3, dtype=torch.int32, device=DEVICE)
    return Case(
        configuration={"rows": rows, "num_layers": num_layers, "num_kv_heads": num_kv_heads},
        kernel=lambda i: compact_rows_triton(kv[i], sources, 1),
        reference=lambda i: compact_rows_reference(kv[i], sources, 1), num_inputs=count, moved_bytes=moved_bytes,
    )  # fmt: skip


def make_chunk_summaries(blocks: int, num_kv_heads: int, chunk_size: int) -> Case:
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


def make_selections(num_kv_heads: int, num_new: int) -> torch.Tensor:
    """[_NUM_SELECTIONS, 1, H_kv, K] int32 on the CPU, each with `num_new` chunks that the one before did not have."""
    stay = _BUDGET_CHUNKS - num_new
    rows = []
    for _ in range(num_kv_heads):
        order = torch.randperm(_NUM_BLOCKS * _CHUNKS_PER_BLOCK, dtype=torch.int32)
        changing = order[stay : stay + _NUM_SELECTIONS * num_new].view(_NUM_SELECTIONS, num_new)
        rows.append(torch.cat([order[:stay].expand(_NUM_SELECTIONS, stay), changing], dim=1).sort(dim=1).values)
    return torch.stack(rows, dim=1)[:, None].contiguous()


def make_blocks(num_kv_heads: int, *, pinned: bool) -> tuple[torch.Tensor, HostArena | None]:
    """[_NUM_BLOCKS, 2, H_kv, 256, D] bf16 of one sequence, and what holds it when it is in host memory."""
    shape = (_NUM_BLOCKS, 2, num_kv_heads, BLOCK_TOKENS, HEAD_DIM)
    if not pinned:
        return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE), None
    arena = HostArena(2 * torch.Size(shape).numel(), name="blocks")
    arena.pin()
    blocks = arena.buffer.view(torch.bfloat16).view(shape)
    return blocks.copy_(torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)), arena


def plain_gather(blocks: torch.Tensor, chunks: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Bring `chunks` [H_kv, n] of every head to the device by indexing and one copy."""
    runs = blocks.unflatten(3, (_CHUNKS_PER_BLOCK, _CHUNK_SIZE)).flatten(4)  # [N, 2, H_kv, 32, chunk]
    heads = torch.arange(blocks.shape[2], device=blocks.device)[:, None].expand_as(chunks).flatten()
    flat = chunks.flatten().long().to(blocks.device)
    block, within = flat // _CHUNKS_PER_BLOCK, flat % _CHUNKS_PER_BLOCK
    return lambda: runs[block, :, heads, within].to(DEVICE)


def make_gather_chunks(num_kv_heads: int, num_new: int, *, pinned: bool) -> Case:
    """One layer's update in which `num_new` chunks of every head move.

    The reference is the plain way, for the same chunks: torch's indexing where the blocks are, then a copy, with the
    list of what to move given to it for free. Host memory it indexes on the host, which a graph cannot hold.
    """
    blocks, arena = make_blocks(num_kv_heads, pinned=pinned)
    source = BlockTable.empty(1, _NUM_BLOCKS, DEVICE)
    source.put(0, 0, blocks)
    on_host = make_selections(num_kv_heads, num_new)
    selections, plain = on_host.to(DEVICE), plain_gather(blocks, on_host[0, 0, :, :num_new])
    resident = torch.full_like(selections[0], -1)
    shape = (1, _BUDGET_CHUNKS // _CHUNKS_PER_BLOCK, 2, num_kv_heads, BLOCK_TOKENS, HEAD_DIM)
    data = KVBlocks(torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE))

    def update(i: int) -> torch.Tensor:
        return gather_chunks(selections[i], resident, source, data, chunk_size=_CHUNK_SIZE)

    # The first fills every place: the last one, whose chunks the next has but for the new ones, and which comes again.
    update(_NUM_SELECTIONS - 1)
    moved_bytes = num_kv_heads * num_new * 2 * _CHUNK_SIZE * HEAD_DIM * 2
    return Case(
        configuration={
            "memory": "pinned" if pinned else "device", "num_kv_heads": num_kv_heads, "new_chunks": num_new,
        },
        kernel=update, reference=lambda _: plain(), num_inputs=_NUM_SELECTIONS,
        moved_bytes=moved_bytes if pinned else 2 * moved_bytes, reference_in_graph=False, over_link=pinned,
        close=None if arena is None else arena.close,
    )  # fmt: skip


# Of summaries: a new block, a streamed piece, a whole layer; of scores also the choice.
CASES: Cases = {
    "compact_rows": [
        partial(make_compact_rows, rows, *shape) for shape in ((32, 32), (80, 8)) for rows in (1, 8, 64, 256)
    ],
    "chunk_summaries": [
        partial(make_chunk_summaries, *shape)
        for shape in [*((n, heads, 4) for heads in (32, 8) for n in (1, 32, 480)), (480, 32, 2), (480, 32, 64)]
    ],
    "chunk_scores": [
        *(
            partial(make_scores_case, rows, chunks, *heads)
            for heads in ((32, 32), (64, 8)) for chunks in (8192, 30720) for rows in (1, 7, 17, 32)
        ),
        *(partial(make_select_case, chunks, heads, 1024) for heads in (32, 8) for chunks in (8192, 30720)),
    ],
    "gather_chunks": [
        partial(make_gather_chunks, heads, new, pinned=pinned)
        for pinned in (True, False) for heads in (32, 8) for new in (0, 10, 51, 512)
    ],
}  # fmt: skip
