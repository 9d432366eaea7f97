"""Scores of chunks against the current queries, and the choice of the best (TriForce, arXiv 2404.11912, section 4).

    scores[b, g, c] = mean over rows r and query heads h of KV head g of softmax_c(scale * q[b, r, h] . means[b, g, c])

The means are read once: the logits and, of every tile of chunks, maximum and sum go to a workspace, and a second kernel
turns them into the average. The choice is one program per head, which finds the budget-th largest score bit by bit.
No atomics: the same inputs give the same chunks. Nothing waits for the device, and shapes depend on host numbers only.
"""

from collections.abc import Sequence

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton

# Chunks of a tile of logits, of a program of the average, and tiles whose maxima are merged at once.
_TILE_CHUNKS = 128
_COLUMNS = 512
_TILES = 64
_ROWS = 16  # query rows at a time, the fewest that the matrix units take
# Most workspace for logits; heads whose logits would take more are done in parts.
WORKSPACE_BYTES = 64 << 20
_LOG2E = 1.4426950408889634
_FORCED = tl.constexpr(0x7FFFFFFF)  # above the bits of every number

Counts = int | Sequence[int] | torch.Tensor


def row_counts(counts: Counts, batch: int, device: torch.device) -> torch.Tensor:
    """One count per batch row on the device, [B] int32, without a copy from the host (which would have to wait)."""
    if isinstance(counts, torch.Tensor):
        assert counts.shape == (batch,) and counts.dtype == torch.int32 and counts.is_contiguous()
        return counts
    values = [counts] * batch if isinstance(counts, int) else list(counts)
    assert len(values) == batch, f"{len(values)} counts for {batch} rows"
    out = torch.full((batch,), values[0] if values else 0, dtype=torch.int32, device=device)
    for row, value in enumerate(values):
        if value != values[0]:
            out[row].fill_(value)
    return out


def chunk_scores_reference(
    q: torch.Tensor, means: torch.Tensor, num_chunks: torch.Tensor, *, scale: float,
    rows_used: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Plain torch version of `chunk_scores`; `num_chunks` [B] on the device."""
    batch, num_rows, num_heads, _ = q.shape
    num_kv_heads, chunks = means.shape[1:3]
    grouped = q.float().view(batch, num_rows, num_kv_heads, num_heads // num_kv_heads, -1)
    logits = torch.einsum("brhgd,bhcd->bhrgc", grouped, means.float()) * scale
    exists = torch.arange(chunks, device=q.device) < num_chunks[:, None]  # [B, C]
    # A row without any chunk would be NaN: its softmax is taken over everything and thrown away.
    exists_or_none = exists | (num_chunks == 0)[:, None]
    weights = logits.masked_fill(~exists_or_none[:, None, None, None], float("-inf")).softmax(-1)
    used = torch.full_like(num_chunks, num_rows) if rows_used is None else rows_used
    counted = torch.arange(num_rows, device=q.device) < used[:, None]  # [B, R]
    total = weights.mean(3).where(counted[:, None, :, None], 0.0).sum(2)
    return (total / used.clamp_min(1)[:, None, None]).where(exists[:, None], 0.0)


@jit(do_not_specialize=("first_head", "num_queries", "num_tiles"))
def _chunk_logits_kernel(
    q_ptr, means_ptr, counts_ptr, used_ptr, logits_ptr, tile_max_ptr, tile_sum_ptr,
    first_head, num_queries, num_tiles, q_stride_batch, q_stride_row, means_stride_batch, means_stride_head,
    scale_log2e,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, HAS_USED: tl.constexpr, FP32_DOT: tl.constexpr,
):  # fmt: skip
    # A program holds one tile of one head's means and takes the query rows past it.
    part_head = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    batch = (first_head + part_head) // NUM_KV_HEADS
    kv_head = (first_head + part_head) % NUM_KV_HEADS
    count = tl.load(counts_ptr + batch)
    num_rows = num_queries * GROUP
    if HAS_USED:
        num_rows = tl.minimum(tl.load(used_ptr + batch), num_queries) * GROUP
    if tile * TILE >= count:
        num_rows = 0
    chunk = tile * TILE + tl.arange(0, TILE)
    channel = tl.arange(0, D_BLOCK)
    means = tl.load(
        means_ptr + batch * means_stride_batch + kv_head * means_stride_head
        + chunk[:, None].to(tl.int64) * HEAD_DIM + channel[None, :],
        mask=(chunk[:, None] < count) & (channel[None, :] < HEAD_DIM), other=0.0,
    )  # fmt: skip
    for start in range(0, num_rows, ROWS):
        row = start + tl.arange(0, ROWS)
        q_offset = (row // GROUP) * q_stride_row + (kv_head * GROUP + row % GROUP) * HEAD_DIM
        q = tl.load(
            q_ptr + batch * q_stride_batch + q_offset[:, None] + channel[None, :],
            mask=(row[:, None] < num_rows) & (channel[None, :] < HEAD_DIM), other=0.0,
        )  # fmt: skip
        if FP32_DOT:
            logits = tl.dot(q, tl.trans(means), input_precision="ieee") * scale_log2e
        else:
            logits = tl.dot(q, tl.trans(means)) * scale_log2e
        exists = (row[:, None] < num_rows) & (chunk[None, :] < count)
        logits = tl.where(exists, logits, float("-inf"))
        out_row = part_head * (num_queries * GROUP) + row  # [ROWS] int64
        # Rows of whole tiles, so that every store is aligned and needs no mask over chunks.
        out = logits_ptr + out_row[:, None] * (num_tiles * TILE) + chunk[None, :]
        tl.store(out, logits, mask=row[:, None] + tl.zeros([ROWS, TILE], dtype=tl.int32) < num_rows)
        best = tl.max(logits, axis=1)
        # Rows that are padding have no maximum, and -inf - -inf is NaN.
        pivot = tl.where(row < num_rows, best, 0.0)
        total = tl.sum(tl.exp2(logits - pivot[:, None]), axis=1)
        tl.store(tile_max_ptr + out_row * num_tiles + tile, best, mask=row < num_rows)
        tl.store(tile_sum_ptr + out_row * num_tiles + tile, total, mask=row < num_rows)


@jit(do_not_specialize=("first_head", "num_queries", "num_chunks", "num_tiles"))
def _softmax_average_kernel(
    logits_ptr, tile_max_ptr, tile_sum_ptr, counts_ptr, used_ptr, scores_ptr,
    first_head, num_queries, num_chunks, num_tiles,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, HAS_USED: tl.constexpr,
):  # fmt: skip
    part_head = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    batch = (first_head + part_head) // NUM_KV_HEADS
    count = tl.load(counts_ptr + batch)
    num_rows = num_queries * GROUP
    if HAS_USED:
        num_rows = tl.minimum(tl.load(used_ptr + batch), num_queries) * GROUP
    scores = tl.zeros([COLUMNS], dtype=tl.float32)
    rows_here = num_rows
    if tl.program_id(1) * COLUMNS >= count:
        rows_here = 0
    for start in range(0, rows_here, ROWS):
        row = start + tl.arange(0, ROWS)
        in_row = part_head * (num_queries * GROUP) + row
        best = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        for first_tile in range(0, tl.cdiv(count, TILE), TILES):
            tile = first_tile + tl.arange(0, TILES)
            mask = (row[:, None] < num_rows) & (tile[None, :] * TILE < count)
            offset = in_row[:, None] * num_tiles + tile[None, :]
            tile_max = tl.load(tile_max_ptr + offset, mask=mask, other=float("-inf"))
            tile_sum = tl.load(tile_sum_ptr + offset, mask=mask, other=0.0)
            new_best = tl.maximum(best, tl.max(tile_max, axis=1))
            pivot = tl.where(row < num_rows, new_best, 0.0)
            total = total * tl.exp2(best - pivot) + tl.sum(tile_sum * tl.exp2(tile_max - pivot[:, None]), axis=1)
            best = new_best
        # Whole tiles again, whose logits behind the last chunk are -inf.
        mask = (row[:, None] < num_rows) & ((chunk // TILE * TILE)[None, :] < count)
        offset = in_row[:, None] * (num_tiles * TILE) + chunk[None, :]
        logits = tl.load(logits_ptr + offset, mask=mask, other=float("-inf"))
        best = tl.where(row < num_rows, best, 0.0)
        inverse = tl.where(row < num_rows, 1.0 / tl.where(row < num_rows, total, 1.0), 0.0)
        scores += tl.sum(tl.exp2(logits - best[:, None]) * inverse[:, None], axis=0)
    scores = scores / tl.maximum(num_rows, 1)
    tl.store(scores_ptr + (first_head + part_head) * num_chunks + chunk, scores, mask=chunk < num_chunks)


def chunk_scores_triton(
    q: torch.Tensor, means: torch.Tensor, num_chunks: torch.Tensor, *, scale: float,
    rows_used: torch.Tensor | None = None, workspace_bytes: int = WORKSPACE_BYTES,
) -> torch.Tensor:  # fmt: skip
    """Triton version of `chunk_scores`; `num_chunks` [B] on the device."""
    require_triton("chunk_scores")
    batch, num_rows, num_heads, head_dim = q.shape
    num_kv_heads, chunks = means.shape[1:3]
    group = num_heads // num_kv_heads
    fp32 = means.dtype == torch.float32
    tile = _TILE_CHUNKS // 2 if fp32 else _TILE_CHUNKS
    tiles = triton.cdiv(chunks, tile)
    scores = torch.empty(batch, num_kv_heads, chunks, dtype=torch.float32, device=q.device)
    part = min(batch * num_kv_heads, max(1, workspace_bytes // (num_rows * group * tiles * tile * 4)))
    logits = torch.empty(part * num_rows * group * tiles * tile, dtype=torch.float32, device=q.device)
    tile_max, tile_sum = torch.empty(2, part * num_rows * group * tiles, dtype=torch.float32, device=q.device)
    used = num_chunks if rows_used is None else rows_used
    with torch.cuda.device_of(q):
        for first in range(0, batch * num_kv_heads, part):
            heads = min(part, batch * num_kv_heads - first)
            _chunk_logits_kernel[(heads, tiles)](
                q, means, num_chunks, used, logits, tile_max, tile_sum, first, num_rows, tiles, q.stride(0),
                q.stride(1), means.stride(0), means.stride(1), scale * _LOG2E,
                NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim,
                D_BLOCK=max(16, triton.next_power_of_2(head_dim)), ROWS=_ROWS, TILE=tile,
                HAS_USED=rows_used is not None, FP32_DOT=fp32,
            )  # fmt: skip
            _softmax_average_kernel[(heads, triton.cdiv(chunks, _COLUMNS))](
                logits, tile_max, tile_sum, num_chunks, used, scores, first, num_rows, chunks, tiles,
                NUM_KV_HEADS=num_kv_heads, GROUP=group, ROWS=_ROWS, COLUMNS=_COLUMNS, TILE=tile, TILES=_TILES,
                HAS_USED=rows_used is not None,
            )  # fmt: skip
    return scores


def chunk_scores(
    q: torch.Tensor, means: torch.Tensor, num_chunks: Counts, *, scale: float, rows_used: torch.Tensor | None = None
) -> torch.Tensor:
    """Score every chunk by the softmax of its mean key, averaged over rows and over the query heads of its KV head.

    Args:
        q: [B, R, H, D], rotated queries, heads contiguous, R from 1 to 32.
        means: [at least B, H_kv, C_max, D] as `chunk_means` writes them, in the dtype of q.
        num_chunks: Chunks that each batch row has: one number, one for each row, or [B] int32 on the device.
        scale: Of the logits, as in attention.
        rows_used: [B] int32 on the device: only so many of a row's first queries count. None: all, padding included.

    Returns:
        [B, H_kv, C] fp32, zero behind a row's chunks (and everywhere where no query counts); a head's scores sum to 1.
        C is the largest count given on the host, and C_max for counts on the device.
    """
    batch, _, num_heads, head_dim = q.shape
    if not isinstance(num_chunks, torch.Tensor):
        means = means[:, :, : num_chunks if isinstance(num_chunks, int) else max(num_chunks, default=0)]
    means = means[:batch]
    assert means.shape[0] == batch and means.shape[3] == head_dim and num_heads % means.shape[1] == 0
    assert means.dtype == q.dtype and means.stride()[2:] == (head_dim, 1) and q.stride()[2:] == (head_dim, 1)
    assert rows_used is None or (rows_used.shape == (batch,) and rows_used.dtype == torch.int32)
    counts = row_counts(num_chunks, batch, q.device)
    if means.shape[2] == 0:
        return torch.empty(*means.shape[:3], dtype=torch.float32, device=q.device)
    run = chunk_scores_triton if q.is_cuda else chunk_scores_reference
    return run(q, means, counts, scale=scale, rows_used=rows_used)


def select_chunks_reference(scores: torch.Tensor, limits: torch.Tensor, *, budget_chunks: int) -> torch.Tensor:
    """Plain torch version of `select_chunks`; `limits` [B] on the device."""
    chunks = scores.shape[2]
    chunk = torch.arange(chunks, device=scores.device)
    limit = limits[:, None, None]
    key = scores.clamp_min(0.0).nan_to_num(nan=torch.inf)
    key = key.masked_fill(chunk == 0, torch.inf).masked_fill(chunk >= limit, -1.0)
    best = key.argsort(dim=-1, descending=True, stable=True)[..., :budget_chunks]  # stable: the lower index first
    best = torch.nn.functional.pad(best, (0, budget_chunks - best.shape[2]), value=chunks)
    kept = limit.clamp(max=chunks).expand(*scores.shape[:2], 1) > torch.arange(budget_chunks, device=scores.device)
    ordered = best.masked_fill(~kept, chunks).sort(dim=-1).values
    return ordered.masked_fill(ordered == chunks, -1).int()


@jit(do_not_specialize=("num_chunks", "budget_chunks"))
def _select_kernel(
    scores_ptr, limits_ptr, out_ptr, num_chunks, budget_chunks, NUM_KV_HEADS: tl.constexpr, C_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
):  # fmt: skip
    # One program holds all scores of a head. The bits of numbers that are not negative are in the order of the numbers.
    head = tl.program_id(0).to(tl.int64)
    limit = tl.minimum(tl.load(limits_ptr + head // NUM_KV_HEADS), num_chunks)
    chunk = tl.arange(0, C_BLOCK)
    score = tl.load(scores_ptr + head * num_chunks + chunk, mask=chunk < limit, other=0.0)
    key = tl.maximum(score.to(tl.int32, bitcast=True), 0)
    key = tl.where(chunk == 0, _FORCED, key)
    # Chunks from the limit on have key 0, and no more are wanted than lie before them: a tie goes to the lower.
    wanted = tl.minimum(limit, budget_chunks)
    # The largest threshold that `wanted` keys reach, one bit at a time from the highest.
    threshold = 0
    for step in range(31):
        candidate = threshold | (1 << (30 - step))
        reaching = tl.sum((key >= candidate).to(tl.int32), axis=0)
        threshold = tl.where(reaching >= wanted, candidate, threshold)
    above = key > threshold
    equal = key == threshold
    missing = wanted - tl.sum(above.to(tl.int32), axis=0)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= missing))
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    out = out_ptr + head * budget_chunks
    tl.store(out + place, chunk, mask=chosen)
    empty = tl.arange(0, K_BLOCK)
    tl.store(out + empty, tl.full([K_BLOCK], -1, dtype=tl.int32), mask=(empty >= wanted) & (empty < budget_chunks))


def select_chunks_triton(scores: torch.Tensor, limits: torch.Tensor, *, budget_chunks: int) -> torch.Tensor:
    """Triton version of `select_chunks`; `limits` [B] on the device."""
    require_triton("select_chunks")
    batch, num_kv_heads, chunks = scores.shape
    selected = torch.empty(batch, num_kv_heads, budget_chunks, dtype=torch.int32, device=scores.device)
    block = triton.next_power_of_2(chunks)
    with torch.cuda.device_of(scores):
        _select_kernel[(batch * num_kv_heads,)](
            scores, limits, selected, chunks, budget_chunks, NUM_KV_HEADS=num_kv_heads, C_BLOCK=block,
            K_BLOCK=triton.next_power_of_2(budget_chunks), num_warps=min(32, max(1, block // 1024)),
        )  # fmt: skip
    return selected


def select_chunks(scores: torch.Tensor, limits: Counts, *, budget_chunks: int) -> torch.Tensor:
    """Choose the chunks with the highest scores; the first chunk of the sequence is always among them.

    Args:
        scores: [B, H_kv, C] fp32, contiguous, not negative (what is, counts as zero).
        limits: Chunks from here on are never chosen: one number, one for each row, or [B] int32 on the device.
        budget_chunks: K, how many to choose.

    Returns:
        [B, H_kv, K] int32: min(K, limit, C) chunks in ascending order, then -1. Of equal scores the lower chunk wins.
    """
    assert scores.dtype == torch.float32 and scores.is_contiguous() and budget_chunks > 0
    batch, num_kv_heads, chunks = scores.shape
    counts = row_counts(limits, batch, scores.device)
    if chunks == 0:
        return torch.full((batch, num_kv_heads, budget_chunks), -1, dtype=torch.int32, device=scores.device)
    run = select_chunks_triton if scores.is_cuda else select_chunks_reference
    return run(scores, counts, budget_chunks=budget_chunks)
