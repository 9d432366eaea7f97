"""Kernels of routed experts: `experts` defines what they compute, and this is how.

Rows are numbered by token and choice: row t k + c is token t's choice c, before and behind every product, so that
nothing is gathered or scattered in memory. A program multiplies rows of one expert with some rows of its matrix, in
steps of a few columns. The matrix units have no fp32: `tl.dot` of fp32 with `ieee` is a loop of multiply-adds over
ascending columns, as long as the compiler may fuse (`enable_fp_fusion`); what must not depend on that is a `tl.fma`.

Of few tokens a program has a single row, and rows that share an expert decode it each: 8 of Qwen3-30B-A3B in Q4_K_M
take an H200 0.10 ms, and 0.13 where a program goes through its expert's rows one by one or two by two; 64 in Q4_K
0.56, and 0.76 to 0.86 where two, four or eight share it. Of many, a kernel has sorted the rows by expert, stably, and
an expert has programs for four times the rows that are due to it: more go around once more, fewer leave some with
nothing to do. Neither waits for the host, and shapes follow from the number of tokens: graphs can hold them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from offload_runtime_kernels.experts_blocks import block_products, element_products, scaled_products
from offload_runtime_kernels.gguf_blocks import FORMATS, KIND_DTYPES
from offload_runtime_kernels.scaled_rows import ScaledFormat, ScaledRow

if TYPE_CHECKING:
    from offload_runtime_kernels.experts import ExpertShape, StoredMatrices

# Most tokens whose rows have programs of their own: of elements; and of what each of these decodes by itself, where an
# expert has no more than so many rows on average, as was measured.
_FEW_TOKENS, _FEW_DECODING_TOKENS, _FEW_ROWS = 16, 64, 4

# e^x = 2^n e^r, |r| <= ln 2 / 2: ln 2 in two parts, of which the first has nine bits, and Cephes' polynomial. Outside
# of the range the nearest end is taken: result and 2^n stay normal numbers.
LOG2_E = 1.44269504088896341
LN2_PARTS = (0.693359375, -2.12194440e-4)
EXP_TERMS = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0,
)  # fmt: skip
EXP_RANGE = (-87.0, 88.0)
_LOG2_E = tl.constexpr(LOG2_E)
_LN2_HIGH, _LN2_LOW = tl.constexpr(-LN2_PARTS[0]), tl.constexpr(-LN2_PARTS[1])
_EXP_LOW, _EXP_HIGH = tl.constexpr(EXP_RANGE[0]), tl.constexpr(EXP_RANGE[1])
_TERM_0, _TERM_1, _TERM_2, _TERM_3, _TERM_4, _TERM_5, _TERM_6, _TERM_7 = (tl.constexpr(term) for term in EXP_TERMS)


@dataclass(frozen=True)
class ExpertTile:
    """How a product is cut: `rows` of an expert by `block` rows of its matrix, `block_k` columns at a time; of steps,
    which are twice as many elements or a part of 256 blocks' weights, `num_stages` - 1 are loaded ahead."""

    rows: int
    block: int
    block_k: int
    num_warps: int
    num_stages: int


# By the most rows that an expert has of a pass on average; rows alone have the first. Programs have as many threads as
# rows of a matrix.
_TILES = {
    0: ExpertTile(1, 32, 32, 1, 4), 8: ExpertTile(8, 128, 16, 4, 3), 64: ExpertTile(32, 128, 16, 4, 3),
    sys.maxsize: ExpertTile(64, 128, 16, 4, 3),
}  # fmt: skip
BLOCK_TILES = {
    0: ExpertTile(1, 32, 256, 1, 3), 2: ExpertTile(2, 32, 64, 1, 3), 8: ExpertTile(8, 128, 16, 4, 2),
    64: ExpertTile(16, 128, 16, 4, 2), sys.maxsize: ExpertTile(32, 128, 16, 4, 2),
}  # fmt: skip


def default_tile(rows: float, *, blocks: bool = False) -> ExpertTile:
    """How products with elements, or with blocks, are cut, of so many rows an expert; of rows alone by 0."""
    return next(tile for most, tile in (BLOCK_TILES if blocks else _TILES).items() if most >= rows)


@jit
def exponential(x):
    x = tl.minimum(tl.maximum(x, _EXP_LOW), _EXP_HIGH)
    n = tl.floor(tl.fma(x, _LOG2_E, 0.5))
    r = tl.fma(n, _LN2_LOW, tl.fma(n, _LN2_HIGH, x))
    power = tl.fma(r, _TERM_0, _TERM_1)
    power = tl.fma(power, r, _TERM_2)
    power = tl.fma(power, r, _TERM_3)
    power = tl.fma(power, r, _TERM_4)
    power = tl.fma(power, r, _TERM_5)
    power = tl.fma(power, r, _TERM_6)
    power = tl.fma(power, r, _TERM_7)
    # Exact, so that it does not matter whether the compiler makes a multiply-add of this and an addition.
    return power * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@jit
def _gated(gate, up, DTYPE: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    if LIMIT is None:
        h = tl.div_rn(gate, 1.0 + exponential(-gate)).to(DTYPE).to(tl.float32) * up
    else:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        h = (up + 1.0) * tl.div_rn(gate, 1.0 + exponential(gate * -ALPHA))
    return h


@jit(do_not_specialize=("num_rows",))
def _sort_kernel(
    choices_ptr, order_ptr, starts_ptr, num_rows, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Write the rows of one expert, ascending, behind those of the ones before it, and where they start."""
    if OVERLAP:
        gdc_wait()
    expert = tl.program_id(0)
    start, end = 0, 0
    for first in range(0, num_rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        number = tl.load(choices_ptr + row, mask=row < num_rows, other=tl.num_programs(0))
        start += tl.sum((number < expert).to(tl.int32))
        end += tl.sum((number <= expert).to(tl.int32))
    tl.store(starts_ptr + expert, start)
    tl.store(starts_ptr + expert + 1, end)
    for first in range(0, num_rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        own = (tl.load(choices_ptr + row, mask=row < num_rows, other=-1) == expert).to(tl.int32)
        tl.store(order_ptr + start + tl.cumsum(own) - own, row, mask=own > 0)
        start += tl.sum(own)


@jit(do_not_specialize=("first_expert",))
def _expert_kernel(
    x_ptr, choices_ptr, order_ptr, starts_ptr, pool_ptr, buffers_ptr, bias_ptr, out_ptr, first_expert,
    buffer_stride,
    HEIGHT: tl.constexpr, K: tl.constexpr, ROWS_OF_X: tl.constexpr, FEW: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, HAS_BUFFERS: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, FORM: tl.constexpr,
    ROW: tl.constexpr, BLOCKS: tl.constexpr, ROW_BYTES: tl.constexpr, GROUPED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Multiply rows of x, one for every `ROWS_OF_X` rows, with some rows of their experts' matrices: blocks of a
    format, rows of numbers, or, without either, elements.

    With `FEW` every row has programs of its own. Otherwise a group of experts, from the first one on, may have been
    brought to one place.

    Of few rows the next kernel's programs come as soon as there are places, as waiting for memory is most of what these
    do at first; those of a second product find out where to read before they wait.
    """
    # A second product's are launched once all of the first one's have waited: choices and buffers are written by then.
    if OVERLAP and (GATED or not FEW):
        gdc_wait()
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if FEW:
        expert = tl.load(choices_ptr + tl.program_id(2)).to(tl.int32)
        count = tl.where(expert < 0, 0, 1)
    else:
        expert = first_expert + tl.program_id(2)
        start = tl.load(starts_ptr + expert)
        count = tl.load(starts_ptr + expert + 1) - start
    buffer = expert
    if HAS_BUFFERS:
        buffer = tl.load(buffers_ptr + expert, mask=expert >= 0, other=-1)
        count = tl.where(buffer < 0, 0, count)
    if GROUPED:
        buffer = tl.program_id(2)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # A gate and its up are neighbours in the tile and among biases. What lies behind the last row reads that row and
    # stores nothing.
    place_of_bias = tl.minimum(lane, HEIGHT - 1)
    column = place_of_bias
    if GATED:
        column = column // 2 + column % 2 * (HEIGHT // 2)
    w_ptr = pool_ptr + buffer.to(tl.int64) * buffer_stride
    if OVERLAP and FEW:
        if not GATED:
            gdc_wait()
        gdc_launch_dependents()
    for first in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        wanted = first + tl.arange(0, ROWS)
        real = (wanted < count)[:, None]
        if FEW:
            row = tl.program_id(2) + tl.arange(0, ROWS)
        else:
            row = tl.load(order_ptr + start + wanted, mask=wanted < count, other=0)
        row_of_x = row // ROWS_OF_X
        if ROW is not None:
            w_ptrs = w_ptr + column[:, None] * ROW_BYTES
            sums = scaled_products(x_ptr, row_of_x, w_ptrs, dtype, ROW, K, ROWS, BLOCK, BLOCK_K, STAGES)
        elif FORM is None:
            sums = element_products(
                x_ptr, row_of_x, w_ptr + column[:, None] * K, dtype, K, ROWS, BLOCK, BLOCK_K, STAGES
            )
        else:
            sums = block_products(
                x_ptr, row_of_x, w_ptr + column[:, None] * ROW_BYTES, dtype, FORM, BLOCKS, K, ROWS, BLOCK, BLOCK_K,
                STAGES,
            )  # fmt: skip
        if HAS_BIAS:
            sums += tl.load(bias_ptr + expert.to(tl.int64) * HEIGHT + place_of_bias).to(tl.float32)[None, :]
        y = sums.to(dtype)
        if GATED:
            gate, up = tl.split(tl.reshape(y.to(tl.float32), [ROWS, BLOCK // 2, 2]))
            y = _gated(gate, up, dtype, LIMIT, ALPHA).to(dtype)
            width = HEIGHT // 2
            place = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        else:
            width = HEIGHT
            place = lane
        out_ptrs = out_ptr + row.to(tl.int64)[:, None] * width + place[None, :]
        tl.store(out_ptrs, y, mask=real & (place < width)[None, :])
    if OVERLAP and not FEW:
        gdc_launch_dependents()


@jit
def _sum_kernel(
    y_ptr, weights_ptr, out_ptr, NUM_CHOSEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ADDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        row = token * NUM_CHOSEN + choice
        y = tl.load(y_ptr + row * WIDTH + column, mask=column < WIDTH, other=0.0)
        weight = tl.load(weights_ptr + row)
        total = tl.fma(tl.where(weight == 0.0, 0.0, y.to(tl.float32)), weight, total)
    out_ptrs = out_ptr + token * WIDTH + column
    total = total.to(out_ptr.dtype.element_ty).to(tl.float32)
    if ADDS:
        total += tl.load(out_ptrs, mask=column < WIDTH, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_launch_dependents()
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=column < WIDTH)


_SORTED_TOGETHER = 1024
_SUMMED_TOGETHER = 512


@dataclass(frozen=True)
class Routes:
    """The experts of a pass's rows, `choices` [N, k]."""

    choices: torch.Tensor
    num_experts: int
    are_alone: bool  # rows have programs of their own
    order: torch.Tensor  # [N k] int32: otherwise the rows by expert, and [E + 1] where each one's start
    starts: torch.Tensor

    @classmethod
    def of(cls, choices: torch.Tensor, num_experts: int, *, elements: bool) -> Routes:
        """Sort the rows of many tokens, which are multiplied with elements, or with other matrices."""
        num_rows, (tokens, num_chosen) = choices.numel(), choices.shape
        most = _FEW_TOKENS if elements else min(_FEW_DECODING_TOKENS, _FEW_ROWS * num_experts // num_chosen)
        if tokens <= most:
            return cls(choices, num_experts, True, choices, choices)
        order, starts = (choices.new_empty(size, dtype=torch.int32) for size in (num_rows, num_experts + 1))
        _sort_kernel[(num_experts,)](
            choices, order, starts, num_rows, BLOCK=_SORTED_TOGETHER, num_warps=4, **overlap_options(choices.device)
        )
        return cls(choices, num_experts, False, order, starts)

    def product(
        self, x: torch.Tensor, matrices: StoredMatrices, buffers: torch.Tensor | None, bias: torch.Tensor | None,
        out: torch.Tensor, *, gated: ExpertShape | None = None, tile: ExpertTile | None = None,
        first: int | None = None,
    ) -> None:  # fmt: skip
        """Write [N k, rows] of x, a row of a token or of a choice; or [N k, rows / 2], `gated` as a shape says. With
        `first` those of some of the experts: `matrices` are theirs, one after the other, from that number on."""
        (tokens, num_chosen), how, height, row, form = self.choices.shape, matrices.encoding, matrices.rows, None, None
        pool = matrices.data
        if isinstance(how, ScaledFormat):
            row = ScaledRow.of(how, matrices.columns)
        elif how in FORMATS:
            form = FORMATS[how]
        else:
            pool = pool.view(KIND_DTYPES[how])
        num_rows, few = tokens * num_chosen, self.are_alone
        tile = tile or default_tile(0 if few else num_rows / self.num_experts, blocks=bool(form or row))
        due = triton.cdiv(num_rows, self.num_experts * tile.rows)  # tiles, if all experts have as many rows
        tiles = 1 if few else min(4 * due, triton.cdiv(tokens, tile.rows))
        experts = num_rows if few else self.num_experts if first is None else len(pool)
        grid = (tiles, triton.cdiv(height, tile.block), experts)
        # Triton wants a pointer for every argument; an unused one may point anywhere.
        _expert_kernel[grid](
            x, self.choices, self.order, self.starts, pool, x if buffers is None else buffers,
            x if bias is None else bias, out, first or 0, pool.stride(0),
            HEIGHT=height, K=matrices.columns, ROWS_OF_X=num_rows // len(x), FEW=few, ROWS=tile.rows,
            BLOCK=tile.block, BLOCK_K=tile.block_k, STAGES=tile.num_stages, HAS_BUFFERS=buffers is not None,
            HAS_BIAS=bias is not None, GATED=gated is not None, LIMIT=gated and gated.limit,
            ALPHA=gated.alpha if gated else 0.0, FORM=form, ROW=row, BLOCKS=form and form.num_blocks(matrices.columns),
            ROW_BYTES=matrices.row_bytes, GROUPED=first is not None, num_warps=tile.num_warps, enable_fp_fusion=True,
            **overlap_options(x.device),
        )  # fmt: skip


def expert_rows_triton(
    x: torch.Tensor, choices: torch.Tensor, gate_up: StoredMatrices, down: StoredMatrices, shape: ExpertShape, *,
    buffers: torch.Tensor | None, gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, out: torch.Tensor,
    tile: ExpertTile | None = None,
) -> None:  # fmt: skip
    """Triton version of `expert_rows`; `tile` overrides how products are cut."""
    require_triton("experts")
    with torch.cuda.device_of(x):
        routes = Routes.of(choices, shape.num_experts, elements=gate_up.encoding in KIND_DTYPES)
        h = x.new_empty(choices.numel(), shape.inner)
        routes.product(x, gate_up, buffers, gate_up_bias, h, gated=shape, tile=tile)
        routes.product(h, down, buffers, down_bias, out, tile=tile)


def combine_experts_triton(
    y: torch.Tensor, weights: torch.Tensor, *, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Triton version of `combine_experts`."""
    require_triton("experts")
    tokens, num_chosen, width = y.shape
    out = y.new_empty(tokens, width) if residual is None else residual
    with torch.cuda.device_of(y):
        _sum_kernel[(tokens, triton.cdiv(width, _SUMMED_TOGETHER))](
            y, weights, out, NUM_CHOSEN=num_chosen, WIDTH=width, BLOCK=_SUMMED_TOGETHER, ADDS=residual is not None,
            num_warps=4, **overlap_options(y.device),
        )  # fmt: skip
    return out
