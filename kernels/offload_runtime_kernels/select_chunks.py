"""The choice of the chunks with the best scores (TriForce, arXiv 2404.11912, section 4).

Nothing is sorted. Scores fall into bins, 16 to an octave; every part of a head's chunks counts its bins, one program
finds the bin that the budget-th score falls into and where each part's chunks go, and the parts write them. Scores of
one bin count as equal: they differ by 6 % at most, far less than what a summary knows about its chunk.

No atomics: the same scores give the same chunks. Nothing waits for the device, and shapes depend on host numbers only.
"""

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton
from offload_runtime_kernels.chunk_scores import Counts, row_counts

# Of a score's bits the exponent and the first four of the mantissa are its bin, counted from 2^-31.
_SCORE_SHIFT = 19
_LOWEST_BIN = (127 - 31) << 4
_NUM_BINS = 512
_SHIFT, _FIRST_BIN, _BINS = tl.constexpr(_SCORE_SHIFT), tl.constexpr(_LOWEST_BIN), tl.constexpr(_NUM_BINS)
# A head's chunks are chosen from in at most so many parts, of at least so many chunks.
_MOST_PARTS = 32
_PART_CHUNKS = 512


def _bins(scores: torch.Tensor) -> torch.Tensor:
    """The bin of each score, int32; what is no number is in the last."""
    bits = scores.clamp_min(0.0).view(torch.int32)  # of numbers that are not negative, in their order
    return ((bits >> _SCORE_SHIFT) - _LOWEST_BIN).clamp(0, _NUM_BINS - 1)


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
    key = _bins(scores).masked_fill(chunk == 0, _NUM_BINS).masked_fill(chunk >= limit, -1)
    best = key.argsort(dim=-1, descending=True, stable=True)[..., :budget_chunks]  # stable: the lower index first
    best = torch.nn.functional.pad(best, (0, budget_chunks - best.shape[2]), value=chunks)
    kept = limit.clamp(max=chunks).expand(*scores.shape[:2], 1) > torch.arange(budget_chunks, device=scores.device)
    ordered = best.masked_fill(~kept, chunks).sort(dim=-1).values
    return ordered.masked_fill(ordered == chunks, -1).int()


@jit(do_not_specialize=("held_ptr", "num_chunks", "num_held"))
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


def parts_of(chunks: int) -> tuple[int, int]:
    """How the chunks of a head are shared: chunks of a part, and parts."""
    columns = max(_PART_CHUNKS, triton.next_power_of_2(triton.cdiv(chunks, _MOST_PARTS)))
    return columns, triton.cdiv(chunks, columns)


def different_counts(most: int) -> list[int]:
    """Numbers of chunks, up to `most`, among which to choose takes kernels of their own."""
    first, last = (_PART_CHUNKS.bit_length() - 1), (most - 1).bit_length()
    return [*(1 << power for power in range(first, last)), most]


def select_chunks_triton(
    scores: torch.Tensor, limits: torch.Tensor, *, budget_chunks: int, held: torch.Tensor | None = None,
    held_margin: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Triton version of `select_chunks`; `limits` [B] on the device."""
    require_triton("select_chunks")
    batch, num_kv_heads, chunks = scores.shape
    heads = batch * num_kv_heads
    columns, parts = parts_of(chunks)
    selected = torch.empty(batch, num_kv_heads, budget_chunks, dtype=torch.int32, device=scores.device)
    counted = torch.empty(heads, parts, _NUM_BINS, dtype=torch.int32, device=scores.device)
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
