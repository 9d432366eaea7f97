"""Which experts a row goes through, and with which weights, of a router's logits: one kernel, and a function of a row.

    scores = softmax(logits), sigmoid(logits), or the logits themselves, of which the chosen ones' softmax is taken

k experts are chosen by the largest scores, or by scores and a correction; of equal ones the first. In fp32 of which no
processor has another opinion: exponentials are those of `experts`, the sum of a softmax of all is one of halves, of a
row that is filled up with zeros to a power of two, and sums over the chosen ones go in ascending order of their
numbers.
"""

from __future__ import annotations

from typing import Literal

import torch

from offload_runtime_kernels._jit import (
    gdc_launch_dependents,
    gdc_wait,
    jit,
    overlap_options,
    require_triton,
    tl,
    triton,
)
from offload_runtime_kernels.experts import exp_reference
from offload_runtime_kernels.experts_triton import exponential

Scores = Literal["softmax", "sigmoid", "softmax of the chosen"]
_LEAST = tl.constexpr(-(1 << 31))


def _sum_of_halves(values: torch.Tensor) -> torch.Tensor:
    """[N, 1] of [N, E]."""
    count = values.shape[1]
    values = torch.nn.functional.pad(values, (0, (1 << (count - 1).bit_length()) - count))
    while values.shape[1] > 1:
        first, second = values.chunk(2, dim=1)
        values = first + second
    return values


def _sum_in_order(values: torch.Tensor) -> torch.Tensor:
    """[N, 1] of [N, k]."""
    total = values[:, :1]
    for at in range(1, values.shape[1]):
        total = total + values[:, at : at + 1]
    return total


def choose_experts_reference(
    logits: torch.Tensor, chosen: int, *, scores: Scores, correction: torch.Tensor | None, normed: bool, scale: float,
    dtype: torch.dtype | None, positions: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Plain torch version of `choose_experts`, on a CPU."""
    found = logits = logits.float()
    if scores == "softmax":
        each = exp_reference(logits - logits.amax(dim=-1, keepdim=True))
        found = each / _sum_of_halves(each)
    elif scores == "sigmoid":
        found = 1 / (1 + exp_reference(-logits))
    ranked = found if correction is None else found + correction
    best = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :chosen]
    choices = best.sort(dim=-1).values
    weights = found.gather(1, choices)
    if scores == "softmax of the chosen":
        weights = exp_reference(weights - weights.amax(dim=-1, keepdim=True))
        weights = weights / _sum_in_order(weights)
    if normed:
        weights = weights / _sum_in_order(weights)
    weights = weights * scale
    weights = weights if dtype is None else weights.to(dtype).float()
    if positions is not None:
        absent = positions[:, None] < 0
        choices, weights = choices.masked_fill(absent, -1), weights.masked_fill(absent, 0.0)
    return choices, weights


@jit
def _sum_of_halves_of(values, WIDTH: tl.constexpr):
    if WIDTH > 1:
        values = _sum_of_halves_of(tl.sum(tl.reshape(values, [2, WIDTH // 2]), axis=0), WIDTH // 2)
    return values


@jit
def _over_sum(values, place, CHOSEN: tl.constexpr):
    """Values over the sum of those whose place is one of the chosen, in the order of their places. What finds one is a
    sum of integers, for which warps have an instruction."""
    total, bits = 0.0, values.to(tl.int32, bitcast=True)
    for choice in tl.static_range(CHOSEN):
        total += tl.sum(tl.where(place == choice, bits, 0)).to(tl.float32, bitcast=True)
    return tl.div_rn(values, tl.zeros_like(values) + total)


@jit(do_not_specialize=("positions_ptr",))  # of any alignment, so that one binary serves all
def _choose_kernel(
    logits_ptr, correction_ptr, positions_ptr, choices_ptr, weights_ptr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr, SCORES: tl.constexpr, HAS_CORRECTION: tl.constexpr, NORMED: tl.constexpr,
    SCALE: tl.constexpr, DTYPE: tl.constexpr, HAS_POSITIONS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    row, expert = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    real = expert < EXPERTS
    logits = tl.load(logits_ptr + row * EXPERTS + expert, mask=real, other=float("-inf")).to(tl.float32)
    scores = logits
    if SCORES == "softmax":
        each = tl.where(real, exponential(logits - tl.max(logits)), 0.0)
        scores = tl.div_rn(each, tl.zeros_like(each) + _sum_of_halves_of(each, BLOCK))
    elif SCORES == "sigmoid":
        scores = tl.div_rn(tl.full([BLOCK], 1.0, tl.float32), 1.0 + exponential(-logits))
    ranked = scores
    if HAS_CORRECTION:
        ranked += tl.load(correction_ptr + expert, mask=real, other=0.0)
    # Integers of the same order, zeros of either sign being one: of 32 bits warps find the largest by one instruction.
    bits = (ranked + 0.0).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    is_chosen = expert < 0
    for _ in tl.static_range(CHOSEN):
        left = real & (is_chosen == 0)
        best = left & (key == tl.max(tl.where(left, key, _LEAST)))
        is_chosen |= expert == tl.min(tl.where(best, expert, BLOCK))
    counted = is_chosen.to(tl.int32)
    place = tl.where(is_chosen, tl.cumsum(counted) - counted, CHOSEN)
    if SCORES == "softmax of the chosen":
        each = exponential(logits - tl.max(tl.where(is_chosen, logits, float("-inf"))))
        scores = _over_sum(each, place, CHOSEN)
    if NORMED:
        scores = _over_sum(scores, place, CHOSEN)
    scores *= SCALE
    if DTYPE is not None:
        scores = scores.to(DTYPE).to(tl.float32)
    if HAS_POSITIONS:
        is_there = tl.load(positions_ptr + row) >= 0
        expert, scores = tl.where(is_there, expert, -1), tl.where(is_there, scores, 0.0)
    tl.store(choices_ptr + row * CHOSEN + place, expert.to(tl.int64), mask=place < CHOSEN)
    tl.store(weights_ptr + row * CHOSEN + place, scores, mask=place < CHOSEN)
    if OVERLAP:
        gdc_launch_dependents()


def choose_experts_triton(
    logits: torch.Tensor, chosen: int, *, scores: Scores, correction: torch.Tensor | None, normed: bool, scale: float,
    dtype: torch.dtype | None, positions: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Triton version of `choose_experts`."""
    require_triton("a router")
    rows, experts = logits.shape
    block = triton.next_power_of_2(experts)
    choices = logits.new_empty(rows, chosen, dtype=torch.int64)
    weights = logits.new_empty(rows, chosen, dtype=torch.float32)
    with torch.cuda.device_of(logits):
        _choose_kernel[(rows,)](
            logits, logits if correction is None else correction, choices if positions is None else positions, choices,
            weights, EXPERTS=experts, CHOSEN=chosen, BLOCK=block, SCORES=scores, HAS_CORRECTION=correction is not None,
            NORMED=normed, SCALE=scale, DTYPE=None if dtype is None else getattr(tl, str(dtype).split(".")[1]),
            HAS_POSITIONS=positions is not None, num_warps=max(1, block // 128), **overlap_options(logits.device),
        )  # fmt: skip
    return choices, weights


def choose_experts(
    logits: torch.Tensor, chosen: int, *, scores: Scores, correction: torch.Tensor | None = None, normed: bool = False,
    scale: float = 1.0, dtype: torch.dtype | None = None, positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the experts of each row, [N, k] int64 ascending, and their weights, [N, k] fp32; enqueued on the current
    stream.

    Args:
        logits: [N, E] of any float dtype, contiguous.
        chosen: k.
        scores: What becomes of them.
        correction: [E] fp32, what scores are ranked with and weights do not have, or None.
        normed: Whether weights are divided by their sum.
        scale: What they are multiplied with, then.
        dtype: What they are rounded to, at last, or None.
        positions: [N] int32, contiguous: rows whose position is negative only fill up; their experts are -1 and weigh
            0. None: there are no such rows.
    """
    assert logits.is_contiguous() and 0 < chosen <= logits.shape[1]
    assert correction is None or correction.dtype == torch.float32
    run = choose_experts_triton if logits.is_cuda else choose_experts_reference
    return run(
        logits, chosen, scores=scores, correction=correction, normed=normed, scale=scale, dtype=dtype,
        positions=positions,
    )  # fmt: skip
