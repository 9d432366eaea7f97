"""Scores of chunks against the current queries (TriForce, arXiv 2404.11912, section 4).

    scores[b, g, c] = mean over rows r and query heads h of KV head g of softmax_c(logit[b, r, h, c])
    logit[b, r, h, c] = scale * q[b, r, h] . mean[b, g, c] + SPREAD_WEIGHT * scale^2 * |q[b, r, h]|^2 * spread[b, g, c]

The second term is for what a mean hides: keys that lie apart have a best one above it. (Of a Gaussian with equal
variance in all channels, the logarithm of the mean of exp(scale * q . k) is the first term and the second with weight
1/2.) It goes with `ChunkSummaries`; plain keys are scored without it.

The summaries are read once: the logits and, of every tile of chunks, maximum and sum go to a workspace, and a second
kernel turns them into the average.

No atomics: the same inputs give the same scores. Nothing waits for the device, and shapes depend on host numbers only.
"""

from collections.abc import Sequence

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton
from offload_runtime_kernels.chunk_summaries import ChunkSummaries

# Agreement with the full cache for weights 0, 0.25, 0.5, 0.75 and 1: 0.922, 0.930, 0.937, 0.943, 0.939 (chunks of 4,
# budget 4096 of 120,000 tokens, SmolLM2-135M stretched to 128K, T = 0.6).
SPREAD_WEIGHT = 0.75
# Chunks of a tile of logits, of a program of the average, and tiles whose maxima are merged at once.
_TILE_CHUNKS = 128
_COLUMNS = 2048
_TILES = 256
_ROWS = 16  # query rows at a time, the fewest that the matrix units take
# Most workspace for logits; heads whose logits would take more are done in parts.
WORKSPACE_BYTES = 64 << 20
_LOG2E = 1.4426950408889634

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


def _keys_of(chunks: torch.Tensor | ChunkSummaries) -> torch.Tensor:
    return chunks.codes if isinstance(chunks, ChunkSummaries) else chunks


def chunk_scores_reference(
    q: torch.Tensor, summaries: torch.Tensor | ChunkSummaries, num_chunks: torch.Tensor, *, scale: float,
    rows_used: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Plain torch version of `chunk_scores`; `num_chunks` [B] on the device."""
    batch, num_rows, num_heads, _ = q.shape
    keys = _keys_of(summaries)
    num_kv_heads, chunks = keys.shape[1:3]
    grouped = q.float().reshape(batch, num_rows, num_kv_heads, num_heads // num_kv_heads, -1)
    logits = torch.einsum("brhgd,bhcd->bhrgc", grouped, keys.float()) * scale
    if isinstance(summaries, ChunkSummaries):
        unit, spread = summaries.factors.float().unbind(-1)  # [B, H_kv, C] each
        squares = grouped.square().sum(-1).transpose(1, 2)  # [B, H_kv, R, G]
        above = SPREAD_WEIGHT * scale**2 * squares[..., None] * spread[:, :, None, None]
        logits = logits * unit[:, :, None, None] + above
    exists = torch.arange(chunks, device=q.device) < num_chunks[:, None]  # [B, C]
    # A row without any chunk would be NaN: its softmax is taken over everything and thrown away.
    exists_or_none = exists | (num_chunks == 0)[:, None]
    weights = logits.masked_fill(~exists_or_none[:, None, None, None], float("-inf")).softmax(-1)
    used = torch.full_like(num_chunks, num_rows) if rows_used is None else rows_used
    counted = torch.arange(num_rows, device=q.device) < used[:, None]  # [B, R]
    total = weights.mean(3).where(counted[:, None, :, None], 0.0).sum(2)
    return (total / used.clamp_min(1)[:, None, None]).where(exists[:, None], 0.0)


@jit
def _rows_of_logits(
    q_ptr, keys, unit, spread, out_ptr, tile_max_ptr, tile_sum_ptr, start, num_rows, num_tiles, q_stride_row,
    scale_log2e, spread_log2e, chunk_exists,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
):  # fmt: skip
    row = start + tl.arange(0, ROWS)
    channel = tl.arange(0, D_BLOCK)
    q_offset = (row // GROUP) * q_stride_row + (row % GROUP) * HEAD_DIM
    q = tl.load(
        q_ptr + q_offset[None, :] + channel[:, None],
        mask=(row[None, :] < num_rows) & (channel[:, None] < HEAD_DIM),
        other=0.0,
    )  # [D, ROWS]: the keys stay in registers, on the side of the product that may
    logits = tl.dot(keys, q, input_precision="ieee") * scale_log2e
    if HAS_FACTORS:
        square = tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=0)  # [ROWS]
        logits = logits * unit[:, None] + (square * spread_log2e)[None, :] * spread[:, None]
    logits = tl.where((row[None, :] < num_rows) & chunk_exists[:, None], logits, float("-inf"))
    # Rows of whole tiles, so that every store is aligned and needs no mask over chunks.
    out = out_ptr + row.to(tl.int64)[None, :] * (num_tiles * TILE)
    tl.store(out, logits, mask=row[None, :] + tl.zeros([TILE, ROWS], dtype=tl.int32) < num_rows)
    best = tl.max(logits, axis=0)
    # Rows that are padding have no maximum, and -inf - -inf is NaN.
    pivot = tl.where(row < num_rows, best, 0.0)
    total = tl.sum(tl.exp2(logits - pivot[None, :]), axis=0)
    tl.store(tile_max_ptr + row * num_tiles, best, mask=row < num_rows)
    tl.store(tile_sum_ptr + row * num_tiles, total, mask=row < num_rows)


@jit(do_not_specialize=("first_head", "num_queries", "num_tiles"))
def _chunk_logits_kernel(
    q_ptr, keys_ptr, factors_ptr, counts_ptr, used_ptr, logits_ptr, tile_max_ptr, tile_sum_ptr,
    first_head, num_queries, num_tiles, q_stride_batch, q_stride_row, keys_stride_batch, keys_stride_head,
    factors_stride_batch, factors_stride_head, scale_log2e, spread_log2e,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, HAS_USED: tl.constexpr, HAS_FACTORS: tl.constexpr, ONE_STEP: tl.constexpr,
):  # fmt: skip
    # A program holds one tile of one head's chunks and takes the query rows past it.
    tile = tl.program_id(0)
    part_head = tl.program_id(1).to(tl.int64)
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
    keys = tl.load(
        keys_ptr + batch * keys_stride_batch + kv_head * keys_stride_head
        + chunk[:, None].to(tl.int64) * HEAD_DIM + channel[None, :],
        mask=(chunk[:, None] < count) & (channel[None, :] < HEAD_DIM), other=0,
    ).to(q_ptr.dtype.element_ty)  # fmt: skip
    if HAS_FACTORS:
        factors = factors_ptr + batch * factors_stride_batch + kv_head * factors_stride_head + chunk * 2
        unit = tl.load(factors, mask=chunk < count, other=0.0).to(tl.float32)
        spread = tl.load(factors + 1, mask=chunk < count, other=0.0).to(tl.float32)
    else:
        unit = tl.full([TILE], 1.0, dtype=tl.float32)
        spread = tl.zeros([TILE], dtype=tl.float32)
    out_ptr = logits_ptr + part_head * (num_queries * GROUP) * (num_tiles * TILE) + chunk[:, None]
    in_tiles = part_head * (num_queries * GROUP) * num_tiles + tile
    q_ptr += batch * q_stride_batch + kv_head * (GROUP * HEAD_DIM)
    if ONE_STEP:
        _rows_of_logits(
            q_ptr, keys, unit, spread, out_ptr, tile_max_ptr + in_tiles, tile_sum_ptr + in_tiles, 0, num_rows,
            num_tiles, q_stride_row, scale_log2e, spread_log2e, chunk < count, GROUP, HEAD_DIM, D_BLOCK, ROWS, TILE,
            HAS_FACTORS,
        )  # fmt: skip
    else:
        for start in range(0, num_rows, ROWS):
            _rows_of_logits(
                q_ptr, keys, unit, spread, out_ptr, tile_max_ptr + in_tiles, tile_sum_ptr + in_tiles, start, num_rows,
                num_tiles, q_stride_row, scale_log2e, spread_log2e, chunk < count, GROUP, HEAD_DIM, D_BLOCK, ROWS,
                TILE, HAS_FACTORS,
            )  # fmt: skip


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
    q: torch.Tensor, summaries: torch.Tensor | ChunkSummaries, num_chunks: torch.Tensor, *, scale: float,
    rows_used: torch.Tensor | None = None, workspace_bytes: int = WORKSPACE_BYTES,
) -> torch.Tensor:  # fmt: skip
    """Triton version of `chunk_scores`; `num_chunks` [B] on the device."""
    require_triton("chunk_scores")
    batch, num_rows, num_heads, head_dim = q.shape
    keys = _keys_of(summaries)
    # Triton wants a pointer for every argument; an unused one may point anywhere.
    factors = summaries.factors if isinstance(summaries, ChunkSummaries) else keys
    num_kv_heads, chunks = keys.shape[1:3]
    group = num_heads // num_kv_heads
    channels = max(16, triton.next_power_of_2(head_dim))
    # What fits 99 KB of shared memory.
    tile = _TILE_CHUNKS // (2 if q.dtype == torch.float32 else 1) // (4 if channels > 256 else 1)
    tiles = triton.cdiv(chunks, tile)
    scores = torch.empty(batch, num_kv_heads, chunks, dtype=torch.float32, device=q.device)
    part = min(batch * num_kv_heads, max(1, workspace_bytes // (num_rows * group * tiles * tile * 4)))
    logits = torch.empty(part * num_rows * group * tiles * tile, dtype=torch.float32, device=q.device)
    tile_max = torch.empty(part * num_rows * group * tiles, dtype=torch.float32, device=q.device)
    tile_sum = torch.empty_like(tile_max)  # apart, as a kernel is made for where its pointers are aligned
    used = num_chunks if rows_used is None else rows_used
    with torch.cuda.device_of(q):
        for first in range(0, batch * num_kv_heads, part):
            heads = min(part, batch * num_kv_heads - first)
            _chunk_logits_kernel[(tiles, heads)](
                q, keys, factors, num_chunks, used, logits, tile_max, tile_sum, first, num_rows, tiles, q.stride(0),
                q.stride(1), *keys.stride()[:2], *factors.stride()[:2], scale * _LOG2E,
                SPREAD_WEIGHT * scale**2 * _LOG2E,
                NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim,
                D_BLOCK=channels, ROWS=_ROWS, TILE=tile,
                HAS_USED=rows_used is not None, HAS_FACTORS=factors is not keys,
                ONE_STEP=num_rows * group <= _ROWS, num_warps=2,
            )  # fmt: skip
            _softmax_average_kernel[(heads, triton.cdiv(chunks, _COLUMNS))](
                logits, tile_max, tile_sum, num_chunks, used, scores, first, num_rows, chunks, tiles,
                NUM_KV_HEADS=num_kv_heads, GROUP=group, ROWS=_ROWS, COLUMNS=_COLUMNS, TILE=tile, TILES=_TILES,
                HAS_USED=rows_used is not None, num_warps=2,
            )  # fmt: skip
    return scores


def chunk_scores(
    q: torch.Tensor, summaries: torch.Tensor | ChunkSummaries, num_chunks: Counts, *, scale: float,
    rows_used: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Score every chunk by its softmax, averaged over rows and over the query heads of its KV head.

    Args:
        q: [B, R, H, D], rotated queries, heads contiguous, R from 1 to 32.
        summaries: Of at least B sequences and C_max chunks; or plain keys [at least B, H_kv, C_max, D], in the dtype
            of q, the last two dimensions contiguous.
        num_chunks: Chunks that each batch row has: one number, one for each row, or [B] int32 on the device.
        scale: Of the logits, as in attention.
        rows_used: [B] int32 on the device: only so many of a row's first queries count. None: all, padding included.

    Returns:
        [B, H_kv, C] fp32, zero behind a row's chunks (and everywhere where no query counts); a head's scores sum to 1.
        C is the largest count given on the host, and C_max for counts on the device.
    """
    batch, _, num_heads, head_dim = q.shape
    most = _keys_of(summaries).shape[2]
    if not isinstance(num_chunks, torch.Tensor):
        most = num_chunks if isinstance(num_chunks, int) else max(num_chunks, default=0)
    if isinstance(summaries, ChunkSummaries):
        summaries = summaries.rows(0, batch).first(most)
    else:
        summaries = summaries[:batch, :, :most]
        assert summaries.dtype == q.dtype and summaries.stride()[2:] == (head_dim, 1)
    keys = _keys_of(summaries)
    assert keys.shape[0] == batch and keys.shape[3] == head_dim and num_heads % keys.shape[1] == 0
    assert q.stride()[2:] == (head_dim, 1)
    assert rows_used is None or (rows_used.shape == (batch,) and rows_used.dtype == torch.int32)
    counts = row_counts(num_chunks, batch, q.device)
    if keys.shape[2] == 0:
        return torch.empty(*keys.shape[:3], dtype=torch.float32, device=q.device)
    run = chunk_scores_triton if q.is_cuda else chunk_scores_reference
    return run(q, summaries, counts, scale=scale, rows_used=rows_used)
