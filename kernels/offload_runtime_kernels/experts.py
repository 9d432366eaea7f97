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

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from offload_runtime_kernels.experts_decoded import DECODED_ROWS, expert_rows_decoded
from offload_runtime_kernels.experts_triton import (
    EXP_RANGE,
    EXP_TERMS,
    LN2_PARTS,
    LOG2_E,
    combine_experts_triton,
    expert_rows_triton,
)
from offload_runtime_kernels.gguf_blocks import DTYPE_KINDS, FORMATS, KIND_DTYPES, decode_blocks
from offload_runtime_kernels.scaled_rows import ScaledFormat, ScaledRow, decode_scaled_reference, rows_apart

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
    """

    num_experts: int
    hidden: int
    inner: int
    limit: float | None = None
    alpha: float = 1.702


def row_bytes(encoding: str | ScaledFormat, columns: int) -> int:
    """Of a row of a matrix of `StoredMatrices`."""
    if isinstance(encoding, ScaledFormat):
        row = ScaledRow.of(encoding, columns)
        assert row is not None, f"rows of {encoding} are not stored by themselves"
        return row.nbytes
    if encoding in FORMATS:
        return FORMATS[encoding].row_bytes(columns)
    return columns * KIND_DTYPES[encoding].itemsize


@dataclass(frozen=True)
class StoredMatrices:
    """A matrix of every expert, each in a buffer: what is read of a pool.

    Args:
        data: uint8 [S, rows * row_bytes]: a buffer's bytes side by side, at an address that 16 divides.
        encoding: How a matrix is stored, row after row: "F32", "F16" or "BF16" as its elements, or as blocks of one of
            `gguf_blocks.FORMATS`, rows in planes as `pack_rows` makes them; or as numbers with scales, each row by
            itself as `ScaledRow` says.
        rows: Of a matrix.
        columns: Likewise.
    """

    data: torch.Tensor
    encoding: str | ScaledFormat
    rows: int
    columns: int

    def __post_init__(self) -> None:
        assert self.data.dtype == torch.uint8 and self.data.shape[1] == self.rows * self.row_bytes
        assert self.data.stride(1) == 1 and (len(self.data) == 1 or self.data.stride(0) % 16 == 0)

    @classmethod
    def of(cls, matrices: torch.Tensor) -> StoredMatrices:
        """Look at [S, rows, columns], each matrix contiguous."""
        data = matrices.flatten(1).view(torch.uint8)
        return cls(data, DTYPE_KINDS[matrices.dtype], *matrices.shape[1:])

    @property
    def row_bytes(self) -> int:
        """Of a stored row."""
        return row_bytes(self.encoding, self.columns)

    def decoded(self, buffers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrices in some buffers, [A, rows, columns]."""
        stored, shape = self.data[buffers], (len(buffers), self.rows, self.columns)
        rows, out = stored.view(-1, self.row_bytes), torch.empty(shape, dtype=dtype, device=stored.device)
        if isinstance(self.encoding, ScaledFormat):
            numbers = rows_apart(rows, self.encoding, self.columns)
            decode_scaled_reference(numbers, self.encoding, 0, out.view(-1, self.columns))
        elif self.encoding in FORMATS:
            decode_blocks(rows, FORMATS[self.encoding], out.view(-1, self.columns))
        else:
            out = stored.view(KIND_DTYPES[self.encoding]).view(shape).to(dtype)
        return out


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
    dtype = gate_up.dtype
    gate, up = gate_up.float().chunk(2, dim=-1)
    if shape.limit is None:
        return ((gate / (1 + exp_reference(-gate))).to(dtype).float() * up).to(dtype)
    gate, up = gate.clamp(max=shape.limit), up.clamp(-shape.limit, shape.limit)
    return ((up + 1) * (gate / (1 + exp_reference(gate * -_fp32(shape.alpha))))).to(dtype)


def gates_first(biases: torch.Tensor) -> torch.Tensor:
    """Return biases [E, 2I] of gates and ups in turn as rows of a matrix have them, gates first."""
    return biases.unflatten(1, (-1, 2)).mT.flatten(1)


def product_reference(
    x: torch.Tensor, choices: torch.Tensor, matrices: StoredMatrices, buffers: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Return [R, out]: rows x [R, K], each multiplied with the matrix of its expert, of `choices` [R].

    Columns are taken one after the other, for all rows of some experts at once.
    """
    (height, k), dtype = (matrices.rows, matrices.columns), x.dtype
    out = x.new_empty(x.shape[0], height)
    chosen, of_row, counts = choices.unique(return_inverse=True, return_counts=True)
    ranks = torch.empty_like(of_row)  # of a row among those of its expert
    ranks[of_row.argsort(stable=True)] = torch.cat([torch.arange(count) for count in (0, *counts.tolist())])
    together = max(1, _COPIED_ELEMENTS // (height * max(k, *counts.tolist(), 1)))
    for first in range(0, len(chosen), together):
        some = chosen[first : first + together]
        own = ((of_row >= first) & (of_row < first + together)).nonzero()[:, 0]
        place = (of_row[own] - first, ranks[own])
        rows = x.new_zeros(len(some), int(counts[first : first + together].max()), k)
        rows[place] = x[own]
        sums = _chains(rows, matrices.decoded(some if buffers is None else buffers[some].long(), dtype))
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


def expert_rows_reference(
    x: torch.Tensor, choices: torch.Tensor, gate_up: StoredMatrices, down: StoredMatrices, shape: ExpertShape, *,
    buffers: torch.Tensor | None, gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, out: torch.Tensor,
) -> None:  # fmt: skip
    """Plain torch version of `expert_rows`, on a CPU."""
    gate_up_bias = None if gate_up_bias is None else gates_first(gate_up_bias)
    rows, inputs = choices.flatten(), x.repeat_interleave(choices.shape[1], dim=0)
    is_here = rows >= 0 if buffers is None else (rows >= 0) & (buffers[rows] >= 0)
    here = is_here.nonzero()[:, 0]
    h = gated_reference(product_reference(inputs[here], rows[here], gate_up, buffers, gate_up_bias), shape)
    out.view(len(rows), -1)[here] = product_reference(h, rows[here], down, buffers, down_bias)


def combine_experts_reference(
    y: torch.Tensor, weights: torch.Tensor, *, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Plain torch version of `combine_experts`, on a CPU."""
    out = torch.zeros(len(y), y.shape[2])
    for choice in range(y.shape[1]):
        weight = weights[:, choice, None]
        out = fma_reference(y[:, choice].float().masked_fill(weight == 0, 0.0), weight, out)
    return out.to(y.dtype) if residual is None else residual.add_(out.to(y.dtype))


def expert_rows(
    x: torch.Tensor, choices: torch.Tensor, gate_up: StoredMatrices, down: StoredMatrices, shape: ExpertShape, *,
    out: torch.Tensor, buffers: torch.Tensor | None = None, gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None, scratch: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write what each chosen expert makes of its row, rounded to the dtype of x; enqueued on the current stream.

    Args:
        x: [N, H], contiguous.
        choices: [N, k] int64, contiguous: the experts of every row, ascending, none of them twice; -1 of rows that only
            fill up.
        gate_up: [2I, H] of an expert, gates first.
        down: [H, I].
        shape: Of these.
        out: [N, k, H] in the dtype of x, contiguous. Rows of -1 and of experts that lie nowhere are left as they are.
        buffers: [E] int32: in which buffer an expert's matrices lie, of both, or -1 where they lie in none; None where
            all lie at the expert's number.
        gate_up_bias: [E, 2I] by the expert's number, gates and ups in turn, in the dtype of x, or None.
        down_bias: [E, H] or None.
        scratch: uint8 of `decoding_bytes`, on a GPU: where experts of many rows are decoded; what shares it is enqueued
            on the same stream. None: they are decoded on the way.
    """
    assert x.is_contiguous() and choices.is_contiguous() and choices.dtype == torch.int64
    assert (gate_up.rows, gate_up.columns) == (2 * shape.inner, shape.hidden)
    assert (down.rows, down.columns) == (shape.hidden, shape.inner)
    assert out.shape == (*choices.shape, shape.hidden) and out.dtype == x.dtype and out.is_contiguous()
    run: Callable[..., None] = expert_rows_triton if x.is_cuda else expert_rows_reference
    if scratch is not None and choices.numel() > DECODED_ROWS * shape.num_experts:
        run = partial(expert_rows_decoded, scratch=scratch)
    run(x, choices, gate_up, down, shape, buffers=buffers, gate_up_bias=gate_up_bias, down_bias=down_bias, out=out)


def combine_experts(y: torch.Tensor, weights: torch.Tensor, *, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Return the weighted sum over the choices of each row, [N, H] in the dtype of y; enqueued on the current stream.

    Args:
        y: [N, k, H], contiguous: what `expert_rows` has written; anything where the weight is 0.
        weights: [N, k] fp32, contiguous: what each is multiplied with.
        residual: [N, H] in the dtype of y, contiguous, which the rounded sum is added to, and which is returned.
    """
    assert y.is_contiguous() and weights.is_contiguous()
    assert y.shape[:2] == weights.shape and weights.dtype == torch.float32
    if residual is not None:
        assert residual.shape == (len(y), y.shape[2]) and residual.dtype == y.dtype and residual.is_contiguous()
    return (combine_experts_triton if y.is_cuda else combine_experts_reference)(y, weights, residual=residual)
