"""Routed experts, with the same bits wherever one ran: on a GPU, in plain torch, or in C++.

    y_e = down_e h_e + b,   h_e = act(gate_e x + b, up_e x + b),   out = sum over the chosen e, ascending, of w_e y_e

Everything is IEEE arithmetic in fp32 of which no processor has another opinion. One element of a product is **one chain
of fused multiply-adds over ascending K**, from zero, of values that are exact in fp32; then the bias is added and the
sum is rounded to the dtype of x. (Products of two bf16 or fp16 are exact in fp32, so there a multiplication and an
addition do as well; in fp32 they do not.) The activation, its exponential included, is made of multiply-adds, of
divisions rounded to nearest, and of what is exact: `gated_reference` is its definition. The sum over experts is a chain
of multiply-adds from zero too, rounded once. So an output depends on its own row, its choices and their experts alone:
not on how many rows there are, how they are cut into tiles, or where an expert's weights lie.

Nothing here speaks of numbers below fp32's normal ones, 1.2e-38, which processors may lose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload_runtime_kernels.experts_triton import EXP_RANGE, EXP_TERMS, LN2_PARTS, LOG2_E, experts_triton

_COPIED_ELEMENTS = 1 << 24  # weights and sums that the reference has in fp32 at a time, unless one expert is larger


@dataclass(frozen=True)
class ExpertShape:
    """What a layer's experts look like.

    Args:
        num_experts: E.
        hidden: H, the width of rows and results.
        inner: I, the width of an expert.
        limit: None for silu(gate) * up; otherwise gpt-oss' (up + 1) * gate * sigmoid(alpha gate), with gate at most
            `limit`, and up between its negative and itself.
        alpha: Of that.
        interleaved: A gate's row of the weight, and of its bias, is followed by its up's; otherwise all gates come
            first, and then the ups.
    """

    num_experts: int
    hidden: int
    inner: int
    limit: float | None = None
    alpha: float = 1.702
    interleaved: bool = False


def fma_reference(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor | float) -> torch.Tensor:
    """Return a * b + c in fp32, rounded once, on a CPU, which torch has no operation for.

    The product of two fp32 is exact in fp64. Its sum is rounded there, and then to fp32, which goes wrong if the first
    has ended just between two numbers of fp32 and was not there before.
    """
    product = a.double() * b
    total = product + c
    out = total.float()
    # The 29 bits that fp64 has more are a one and zeros.
    between = (total.view(torch.int64) & 0x1FFFFFFF) == 0x10000000
    if between.any():
        part = total - product  # Knuth's exact error of a sum
        error = (product - (total - part)) + (c - part)
        away = (error > 0) == (total > 0)
        odd = (total.view(torch.int64) + torch.where(away, 1, -1)).view(torch.float64)
        out = torch.where(between & (error != 0), odd.float(), out)
    return out


def exp_reference(x: torch.Tensor) -> torch.Tensor:
    """Return e^x of fp32 numbers, within two units of the last place."""
    x = x.clamp(*EXP_RANGE)
    n = fma_reference(x, _fp32(LOG2_E), 0.5).floor()
    r = x
    for part in LN2_PARTS:
        r = fma_reference(n, -_fp32(part), r)
    power = torch.full_like(r, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        power = fma_reference(power, r, _fp32(term))
    return power * ((n.int() + 127) << 23).view(torch.float32)


def _fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def gated_reference(gate_up: torch.Tensor, shape: ExpertShape) -> torch.Tensor:
    """Return what an expert's second matrix multiplies, [R, I], of its gates and ups [R, 2I], in their dtype.

    Without a limit the activation is rounded to that dtype before it is multiplied; with one everything is fp32.
    """
    dtype, parts = gate_up.dtype, gate_up.float()
    if shape.interleaved:
        gate, up = parts[:, ::2], parts[:, 1::2]
    else:
        gate, up = parts.chunk(2, dim=-1)
    if shape.limit is None:
        return ((gate / (1 + exp_reference(-gate))).to(dtype).float() * up).to(dtype)
    gate, up = gate.clamp(max=shape.limit), up.clamp(-shape.limit, shape.limit)
    return ((up + 1) * (gate / (1 + exp_reference(gate * -_fp32(shape.alpha))))).to(dtype)


def product_reference(
    x: torch.Tensor, numbers: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return [R, out]: rows x [R, K], each multiplied with the matrix of its expert, of `numbers` [R].

    Columns are taken one after the other, for all rows of some experts at once.
    """
    (_, height, k), dtype = pool.shape, x.dtype
    out = x.new_empty(x.shape[0], height)
    chosen, of_row, counts = numbers.unique(return_inverse=True, return_counts=True)
    ranks = torch.empty_like(of_row)  # of a row among those of its expert
    ranks[of_row.argsort(stable=True)] = torch.cat([torch.arange(count) for count in counts.tolist()])
    together = max(1, _COPIED_ELEMENTS // (height * max(k, int(counts.max()))))
    for first in range(0, len(chosen), together):
        some = chosen[first : first + together]
        own = ((of_row >= first) & (of_row < first + together)).nonzero()[:, 0]
        place = (of_row[own] - first, ranks[own])
        rows = x.new_zeros(len(some), int(counts[first : first + together].max()), k)
        rows[place] = x[own]
        places = some if slots is None else slots[some].long()
        sums = _chains(rows, pool[places])
        if bias is not None:
            sums += bias[some].float()[:, None]
        out[own] = sums[place].to(dtype)
    return out


def _chains(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Products [A, M, out] fp32 of rows [A, M, K] with a matrix for every A, [A, out, K]."""
    (num, height, k), (_, most, _) = matrices.shape, rows.shape
    # Of two dimensions and one dtype, torch transposes fast.
    x = rows.reshape(num * most, k).t().contiguous().float().view(k, num, most, 1)
    w = matrices.reshape(num * height, k).t().contiguous().float().view(k, num, 1, height)
    sums = torch.zeros(num, most, height)
    for column in range(k):
        if rows.dtype == torch.float32:
            sums = fma_reference(x[column], w[column], sums)
        else:
            sums.addcmul_(x[column], w[column])
    return sums


def experts_reference(
    x: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    shape: ExpertShape, *, gate_up_bias: torch.Tensor | None = None, down_bias: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Plain torch version of `experts`, on a CPU."""
    n, k = numbers.shape
    rows = numbers.flatten()
    h = gated_reference(product_reference(x.repeat_interleave(k, dim=0), rows, gate_up, slots, gate_up_bias), shape)
    y = product_reference(h, rows, down, slots, down_bias).view(n, k, shape.hidden)
    out = torch.zeros(n, shape.hidden)
    for choice in range(k):
        out = fma_reference(y[:, choice].float(), weights[:, choice, None], out)
    return out.to(x.dtype)


def experts(
    x: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    shape: ExpertShape, *, gate_up_bias: torch.Tensor | None = None, down_bias: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return what the chosen experts make of rows, [N, H] in the dtype of x, on the current stream.

    Args:
        x: [N, H], contiguous.
        numbers: [N, k] int64, contiguous: the experts of every row, ascending, none of them twice.
        weights: [N, k] fp32, contiguous: what the result of each is multiplied with.
        gate_up: [S, 2I, H] in the dtype of x, each expert contiguous: as `shape` says, gates first or interleaved.
        down: [S, H, I], likewise.
        shape: Of these.
        gate_up_bias: [E, 2I] by the expert's number, in the order of the rows of `gate_up`, or None.
        down_bias: [E, H] or None.
        slots: [E] int32: where an expert's matrices lie in `gate_up` and `down`, of which only those of chosen ones are
            read; None where they lie at the expert's number.
    """
    assert x.is_contiguous() and numbers.is_contiguous() and weights.is_contiguous()
    assert gate_up.shape[1:] == (2 * shape.inner, shape.hidden) and down.shape[1:] == (shape.hidden, shape.inner)
    assert gate_up[0].is_contiguous() and down[0].is_contiguous() and x.dtype == gate_up.dtype == down.dtype
    assert numbers.shape == weights.shape and numbers.dtype == torch.int64 and weights.dtype == torch.float32
    run = experts_triton if x.is_cuda else experts_reference
    return run(x, numbers, weights, gate_up, down, shape, gate_up_bias=gate_up_bias, down_bias=down_bias, slots=slots)
