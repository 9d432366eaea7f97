"""Scores of chunks against the current queries, and the choice of the best (TriForce, arXiv 2404.11912, section 4).

    scores[b, g, c] = mean over rows r and query heads h of KV head g of softmax_c(logit[b, r, h, c])
    logit[b, r, h, c] = scale * q[b, r, h] . mean[b, g, c] + SPREAD_WEIGHT * scale^2 * |q[b, r, h]|^2 * spread[b, g, c]

The second term is for what a mean hides: keys that lie apart have a best one above it. (Of a Gaussian with equal
variance in all channels, the logarithm of the mean of exp(scale * q . k) is the first term and the second with weight
1/2.) It goes with `ChunkSummaries`; plain keys are scored without it.

The summaries are read once: the logits and, of every tile of chunks, maximum and sum go to a workspace, and a second
kernel turns them into the average.

The choice sorts nothing. Scores fall into bins, 16 to an octave; every part of a head's chunks counts its bins, one
program finds the bin that the budget-th score falls into and where each part's chunks go, and the parts write them.
Scores of one bin count as equal: they differ by 6 % at most, far less than what a summary knows about its chunk.

No atomics: the same inputs give the same chunks. Nothing waits for the device, and shapes depend on host numbers only.
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
# Of a score's bits the exponent and the first four of the mantissa are its bin, counted from 2^-31.
_SHIFT = tl.constexpr(19)
_FIRST_BIN = tl.constexpr((127 - 31) << 4)
_BINS = tl.constexpr(512)
# A head's chunks are chosen from in at most so many parts, of at least so many chunks.
_MOST_PARTS = 32
_PART_CHUNKS = 512

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
    HAS_FACTORS: tl.constexpr, FP32_DOT: tl.constexpr,
):  # fmt: skip
    row = start + tl.arange(0, ROWS)
    channel = tl.arange(0, D_BLOCK)
    q_offset = (row // GROUP) * q_stride_row + (row % GROUP) * HEAD_DIM
    q = tl.load(
        q_ptr + q_offset[None, :] + channel[:, None],
        mask=(row[None, :] < num_rows) & (channel[:, None] < HEAD_DIM),
        other=0.0,
    )  # [D, ROWS]: the keys stay in registers, on the side of the product that may
    if FP32_DOT:
        logits = tl.dot(keys, q, input_precision="ieee") * scale_log2e
    else:
        logits = tl.dot(keys, q) * scale_log2e
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
    ROWS: tl.constexpr, TILE: tl.constexpr, HAS_USED: tl.constexpr, HAS_FACTORS: tl.constexpr, FP32_DOT: tl.constexpr,
    ONE_STEP: tl.constexpr,
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
            HAS_FACTORS, FP32_DOT,
        )  # fmt: skip
    else:
        for start in range(0, num_rows, ROWS):
            _rows_of_logits(
                q_ptr, keys, unit, spread, out_ptr, tile_max_ptr + in_tiles, tile_sum_ptr + in_tiles, start, num_rows,
                num_tiles, q_stride_row, scale_log2e, spread_log2e, chunk < count, GROUP, HEAD_DIM, D_BLOCK, ROWS,
                TILE, HAS_FACTORS, FP32_DOT,
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
    fp32 = q.dtype == torch.float32
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
            _chunk_logits_kernel[(tiles, heads)](
                q, keys, factors, num_chunks, used, logits, tile_max, tile_sum, first, num_rows, tiles, q.stride(0),
                q.stride(1), *keys.stride()[:2], *factors.stride()[:2], scale * _LOG2E,
                SPREAD_WEIGHT * scale**2 * _LOG2E,
                NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim,
                D_BLOCK=max(16, triton.next_power_of_2(head_dim)), ROWS=_ROWS, TILE=tile,
                HAS_USED=rows_used is not None, HAS_FACTORS=factors is not keys, FP32_DOT=fp32,
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


def _bins(scores: torch.Tensor) -> torch.Tensor:
    """The bin of each score, int32; what is no number is in the last."""
    bits = scores.clamp_min(0.0).view(torch.int32)  # of numbers that are not negative, in their order
    return ((bits >> 19) - ((127 - 31) << 4)).clamp(0, 511)


def select_chunks_reference(
    scores: torch.Tensor, limits: torch.Tensor, *, budget_chunks: int, held: torch.Tensor | None = None,
    held_margin: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Plain torch version of `select_chunks`; `limits` [B] on the device."""
    chunks = scores.shape[2]
    chunk = torch.arange(chunks, device=scores.device)
    limit = limits[:, None, None]
    if held is not None:
        inside = (held >= 0) & (held < chunks)
        scores.scatter_add_(2, held.clamp(0, chunks - 1).long(), inside * held_margin)
    key = _bins(scores).masked_fill(chunk == 0, 512).masked_fill(chunk >= limit, -1)
    best = key.argsort(dim=-1, descending=True, stable=True)[..., :budget_chunks]  # stable: the lower index first
    best = torch.nn.functional.pad(best, (0, budget_chunks - best.shape[2]), value=chunks)
    kept = limit.clamp(max=chunks).expand(*scores.shape[:2], 1) > torch.arange(budget_chunks, device=scores.device)
    ordered = best.masked_fill(~kept, chunks).sort(dim=-1).values
    return ordered.masked_fill(ordered == chunks, -1).int()


@jit(do_not_specialize=("num_chunks", "num_held"))
def _add_margin_kernel(scores_ptr, held_ptr, num_chunks, num_held, held_margin, H_BLOCK: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, H_BLOCK)
    held = tl.load(held_ptr + head * num_held + lane, mask=lane < num_held, other=-1)
    inside = (held >= 0) & (held < num_chunks)
    place = scores_ptr + head * num_chunks + held
    tl.store(place, tl.load(place, mask=inside, other=0.0) + held_margin, mask=inside)


@jit
def _load_bins(scores_ptr, first_score, chunk, limit):
    # The first chunk has the last bin, which no score below 2 reaches. -1 for what may not be chosen.
    score = tl.load(scores_ptr + first_score + chunk, mask=chunk < limit, other=0.0)
    bits = tl.maximum(score.to(tl.int32, bitcast=True), 0)
    found = tl.minimum(tl.maximum((bits >> _SHIFT) - _FIRST_BIN, 0), _BINS - 1)
    # NaN with its sign set looks like a negative number.
    found = tl.where((chunk == 0) | (score != score), _BINS - 1, found)
    return tl.where(chunk < limit, found, -1)


@jit(do_not_specialize=("num_chunks", "num_parts"))
def _count_bins_kernel(
    scores_ptr, limits_ptr, counted_ptr, num_chunks, num_parts, NUM_KV_HEADS: tl.constexpr, COLUMNS: tl.constexpr
):
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    limit = tl.minimum(tl.load(limits_ptr + head // NUM_KV_HEADS), num_chunks)
    chunk = part * COLUMNS + tl.arange(0, COLUMNS)
    found = _load_bins(scores_ptr, head * num_chunks, chunk, limit)
    number = tl.arange(0, _BINS)
    counted = tl.histogram(tl.maximum(found, 0), _BINS)
    counted -= tl.where(number == 0, tl.sum((found < 0).to(tl.int32), axis=0), 0)
    tl.store(counted_ptr + (head * num_parts + part) * _BINS + number, counted)


@jit(do_not_specialize=("num_chunks", "budget_chunks", "num_parts"))
def _threshold_kernel(
    counted_ptr, limits_ptr, plan_ptr, out_ptr, num_chunks, budget_chunks, num_parts,
    NUM_KV_HEADS: tl.constexpr, PARTS: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    wanted = tl.minimum(tl.minimum(tl.load(limits_ptr + head // NUM_KV_HEADS), num_chunks), budget_chunks)
    number = tl.arange(0, _BINS)
    part = tl.arange(0, PARTS)
    counted = tl.load(
        counted_ptr + (head * num_parts + part[:, None]) * _BINS + number[None, :],
        mask=part[:, None] + tl.zeros([PARTS, _BINS], dtype=tl.int32) < num_parts, other=0,
    )  # fmt: skip
    total = tl.sum(counted, axis=0)
    reached = tl.sum(total, axis=0) - tl.cumsum(total, axis=0) + total  # scores in this bin and above
    # The highest bin down to which there are enough.
    threshold = tl.max(tl.where(reached >= wanted, number, 0), axis=0)
    above = tl.sum(tl.where(number[None, :] > threshold, counted, 0), axis=1)  # [PARTS]
    equal = tl.sum(tl.where(number[None, :] == threshold, counted, 0), axis=1)
    missing = wanted - tl.sum(above, axis=0)
    equal_before = tl.minimum(tl.cumsum(equal, axis=0) - equal, missing)
    quota = tl.minimum(missing - equal_before, equal)  # of those equal to the threshold, how many a part gives
    first = tl.cumsum(above, axis=0) - above + equal_before
    plan = plan_ptr + (head * num_parts + part) * 3
    tl.store(plan, threshold + tl.zeros_like(first), mask=part < num_parts)
    tl.store(plan + 1, quota, mask=part < num_parts)
    tl.store(plan + 2, first, mask=part < num_parts)
    empty = tl.arange(0, K_BLOCK)
    out = out_ptr + head * budget_chunks + empty
    tl.store(out, tl.full([K_BLOCK], -1, dtype=tl.int32), mask=(empty >= wanted) & (empty < budget_chunks))


@jit(do_not_specialize=("num_chunks", "budget_chunks", "num_parts"))
def _write_chosen_kernel(
    scores_ptr, limits_ptr, plan_ptr, out_ptr, num_chunks, budget_chunks, num_parts,
    NUM_KV_HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    limit = tl.minimum(tl.load(limits_ptr + head // NUM_KV_HEADS), num_chunks)
    chunk = part * COLUMNS + tl.arange(0, COLUMNS)
    found = _load_bins(scores_ptr, head * num_chunks, chunk, limit)
    plan = plan_ptr + (head * num_parts + part) * 3
    threshold, quota, first = tl.load(plan), tl.load(plan + 1), tl.load(plan + 2)
    equal = found == threshold
    chosen = (found > threshold) | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= quota))
    place = first + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(out_ptr + head * budget_chunks + place, chunk, mask=chosen)


def select_chunks_triton(
    scores: torch.Tensor, limits: torch.Tensor, *, budget_chunks: int, held: torch.Tensor | None = None,
    held_margin: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Triton version of `select_chunks`; `limits` [B] on the device."""
    require_triton("select_chunks")
    batch, num_kv_heads, chunks = scores.shape
    heads = batch * num_kv_heads
    columns = max(_PART_CHUNKS, triton.next_power_of_2(triton.cdiv(chunks, _MOST_PARTS)))
    parts = triton.cdiv(chunks, columns)
    selected = torch.empty(batch, num_kv_heads, budget_chunks, dtype=torch.int32, device=scores.device)
    counted = torch.empty(heads, parts, 512, dtype=torch.int32, device=scores.device)
    plan = torch.empty(heads, parts, 3, dtype=torch.int32, device=scores.device)
    with torch.cuda.device_of(scores):
        if held is not None:
            num_held = held.shape[2]
            _add_margin_kernel[(heads,)](
                scores, held, chunks, num_held, held_margin, H_BLOCK=triton.next_power_of_2(num_held)
            )
        _count_bins_kernel[(heads, parts)](
            scores, limits, counted, chunks, parts, NUM_KV_HEADS=num_kv_heads, COLUMNS=columns
        )
        _threshold_kernel[(heads,)](
            counted, limits, plan, selected, chunks, budget_chunks, parts,
            NUM_KV_HEADS=num_kv_heads, PARTS=triton.next_power_of_2(parts),
            K_BLOCK=triton.next_power_of_2(budget_chunks), num_warps=8,
        )  # fmt: skip
        _write_chosen_kernel[(heads, parts)](
            scores, limits, plan, selected, chunks, budget_chunks, parts, NUM_KV_HEADS=num_kv_heads, COLUMNS=columns
        )
    return selected


def select_chunks(
    scores: torch.Tensor, limits: Counts, *, budget_chunks: int, held: torch.Tensor | None = None,
    held_margin: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Choose the chunks with the highest scores; the first chunk of the sequence is always among them.

    Args:
        scores: [B, H_kv, C] fp32, contiguous, not negative (what is, counts as zero). Where chunks are held, changed.
        limits: Chunks from here on are never chosen: one number, one for each row, or [B] int32 on the device.
        budget_chunks: K, how many to choose.
        held: [B, H_kv, any] int32, contiguous: chunks that are at hand, none twice, -1 for none.
        held_margin: Added to their scores: another chunk has to be better by so much to be worth fetching.

    Returns:
        [B, H_kv, K] int32: min(K, limit, C) chunks in ascending order, then -1. Of scores of one bin (a sixteenth of
        an octave) the lower chunk wins; what is less than 2^-31 is in the first, what is no number in the last.
    """
    assert scores.dtype == torch.float32 and scores.is_contiguous() and budget_chunks > 0
    batch, num_kv_heads, chunks = scores.shape
    counts = row_counts(limits, batch, scores.device)
    if chunks == 0:
        return torch.full((batch, num_kv_heads, budget_chunks), -1, dtype=torch.int32, device=scores.device)
    assert held is None or (held.shape[:2] == scores.shape[:2] and held.dtype == torch.int32 and held.is_contiguous())
    run = select_chunks_triton if scores.is_cuda else select_chunks_reference
    return run(scores, counts, budget_chunks=budget_chunks, held=held, held_margin=held_margin)
