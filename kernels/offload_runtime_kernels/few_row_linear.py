"""Matrix products of a few rows, with the RMSNorm before and the residual or SwiGLU behind them in the same kernel.

    y = f(x) W^T + b,    f(x) = x   or   norm_weight * x / sqrt(mean(x^2) + eps)
    out = y   or   residual + y   or   silu(y_gate) * y_up

The cost is reading W once. A program holds some rows of W and walks along K. One or two rows of x are multiplied in
registers, where a whole tile is in flight at once. More go through the matrix units, W's rows on their side of 16; few
rows of W are split along K between the warps, for one warp's chain of dependent products would take longer than W does.
RMSNorm's factor is one number a row, multiplied in behind the sum, so that x is read once.

Sums are fp32, in an order that depends on the number of rows: a row's bits depend on how many share its pass. This is
for passes that promise no bits, a draft's and the retrieval verifier's.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from offload_runtime_kernels._jit import (
    gdc_launch_dependents,
    gdc_wait,
    is_roomy,
    jit,
    overlap_options,
    require_triton,
    tl,
    triton,
)

MOST_ROWS = 32
# Up to so many rows are multiplied in registers; each takes as many accumulators again.
LANE_ROWS = 2
# Programs that keep 128 (RTX 4090) or 132 (H200) multiprocessors busy: one each, or better two.
_ENOUGH_PROGRAMS = 128
_WARP_LOAD_BYTES = 512  # 16 for each of its threads
# x times the norm's weight, before its row's factor makes it small, can leave the range of fp16: it is kept smaller.
_FP16_HEADROOM = 64.0


@dataclass(frozen=True)
class RowNorm:
    """RMSNorm of the rows that go into a product: `weight` [K], `eps` added to the mean square."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class LinearConfig:
    """How a product is cut.

    `block_m` rows of W in a program (gates and ups both counted), steps of `block_k` along K, `num_warps`, `num_stages`
    steps that are loaded ahead. Where warps outnumber tiles of 16 rows of W, they split each step along K.
    """

    block_m: int
    block_k: int
    num_warps: int
    num_stages: int


def few_row_linear_reference(
    x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None, norm: RowNorm | None = None,
    residual: torch.Tensor | None = None, gated: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Plain torch version of `few_row_linear`; fp32 until the result is rounded."""
    rows = x.float()
    if norm is not None:
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
    y = F.linear(rows, weight.float(), None if bias is None else bias.float())
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y.to(x.dtype) if residual is None else residual.copy_(residual.float() + y)


@jit
def _sums_along_k(
    w_ptrs, x_ptrs, norm_ptrs, w_k, x_k, real, sums, squares,
    K: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, HAS_NORM: tl.constexpr, DOT: tl.constexpr,
    FP32: tl.constexpr, SHRINK: tl.constexpr,
):  # fmt: skip
    # The same walk for every arrangement of the axes: `w_k` and `x_k` say which k each element of a tile has.
    if HAS_NORM:
        norm_ahead = tl.load(norm_ptrs, mask=x_k < K, other=0.0)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            w = tl.load(w_ptrs + start, eviction_policy="evict_first")
            x = tl.load(x_ptrs + start, mask=real, other=0.0)
        else:
            w = tl.load(w_ptrs + start, mask=start + w_k < K, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptrs + start, mask=real & (start + x_k < K), other=0.0)
        if HAS_NORM:
            # Two bytes a thread are too few for an asynchronous copy: this one is a step ahead by hand.
            norm_weight = norm_ahead.to(tl.float32) * SHRINK
            norm_ahead = tl.load(norm_ptrs + start + BLOCK_K, mask=start + BLOCK_K + x_k < K, other=0.0)
            x32 = x.to(tl.float32)
            squares += x32 * x32
            x = (x32 * norm_weight).to(x.dtype if DOT else tl.float32)
        if not DOT:
            sums += w.to(tl.float32) * x.to(tl.float32)
        elif FP32:
            sums = tl.dot(w, x, sums, input_precision="ieee")
        else:
            sums = tl.dot(w, x, sums)
    return sums, squares


@jit(do_not_specialize=("num_rows",))
def _few_row_linear_kernel(
    x_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, width, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, DOT: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, SHRINK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    fp32: tl.constexpr = weight_ptr.dtype.element_ty == tl.float32
    part_k: tl.constexpr = BLOCK_K // PARTS
    lane = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    # A gate and its up are neighbours in the tile. What lies behind the last row reads that row and stores nothing.
    column = lane // 2 if GATED else lane
    w_row = tl.minimum(column, width - 1)
    if GATED:
        w_row += (lane % 2) * width
    row = tl.arange(0, ROWS)
    k = tl.arange(0, part_k)
    if not DOT:  # [BLOCK_M, ROWS, BLOCK_K]; three axes from the start, or W would change its layout in shared memory
        w_k, x_k = k[None, None, :], k[None, None, :]
        w_ptrs = weight_ptr + w_row.to(tl.int64)[:, None, None] * K + w_k
        x_row = row[None, :, None]
        sums = tl.zeros([BLOCK_M, ROWS, BLOCK_K], dtype=tl.float32)
        squares = tl.zeros([1, ROWS, BLOCK_K], dtype=tl.float32)
    elif PARTS > 1:  # [PARTS, BLOCK_M, part_k] times [PARTS, part_k, ROWS], a part for each warp
        part = tl.arange(0, PARTS)[:, None, None] * part_k
        w_k, x_k = part + k[None, None, :], part + k[None, :, None]
        w_ptrs = weight_ptr + w_row.to(tl.int64)[None, :, None] * K + w_k
        x_row = row[None, None, :]
        sums = tl.zeros([PARTS, BLOCK_M, ROWS], dtype=tl.float32)
        squares = tl.zeros([PARTS, part_k, ROWS], dtype=tl.float32)
    else:
        w_k, x_k = k[None, :], k[:, None]
        w_ptrs = weight_ptr + w_row.to(tl.int64)[:, None] * K + w_k
        x_row = row[None, :]
        sums = tl.zeros([BLOCK_M, ROWS], dtype=tl.float32)
        squares = tl.zeros([BLOCK_K, ROWS], dtype=tl.float32)
    sums, squares = _sums_along_k(
        w_ptrs, x_ptr + x_row * K + x_k, norm_ptr + x_k, w_k, x_k, x_row < num_rows, sums, squares,
        K, BLOCK_K, STAGES, HAS_NORM, DOT, fp32, SHRINK,
    )  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    if not DOT:
        y = tl.sum(sums, axis=2)
        square = tl.sum(tl.sum(squares, axis=2), axis=0)
    elif PARTS > 1:
        y = tl.sum(sums, axis=0)
        square = tl.sum(tl.sum(squares, axis=1), axis=0)
    else:
        y = sums
        square = tl.sum(squares, axis=0)
    if HAS_NORM:
        y *= (tl.rsqrt(square / K + eps) / SHRINK)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + w_row).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, [BLOCK_M // 2, 2, ROWS]), (0, 2, 1)))
        y = gate / (1.0 + tl.exp(-gate)) * up
        column = tl.program_id(0) * (BLOCK_M // 2) + tl.arange(0, BLOCK_M // 2)
    out_ptrs = out_ptr + row[None, :] * width + column[:, None]
    written = (row[None, :] < num_rows) & (column[:, None] < width)
    if HAS_RESIDUAL:
        y += tl.load(out_ptrs, mask=written, other=0.0).to(tl.float32)
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=written)


def default_config(rows: int, m: int, k: int, dtype: torch.dtype, *, normed: bool, roomy: bool) -> LinearConfig:
    """How to cut a product of `rows` rows with W [m, k].

    Shared memory stays below the 99 KB of consumer cards, and with `roomy` below the 227 KB of an H200.
    """
    if rows <= LANE_ROWS:
        # All of a short K at once: a small matrix is read in the time of one access to memory. The tile is as wide as
        # its warps, so that W, x and their products share one layout; 64 accumulators a thread leave room for loads.
        if k > 4096:
            return LinearConfig(8 // rows if dtype.itemsize == 2 else 4, 1024 // dtype.itemsize, 2, 3)
        block_k = min(triton.next_power_of_2(k), 8192 // dtype.itemsize)
        num_warps = max(1, block_k * dtype.itemsize // _WARP_LOAD_BYTES)
        most_m = (8 if num_warps <= 4 else 4) // rows
        if m < 4 * _ENOUGH_PROGRAMS * most_m:
            most_m //= 2
        return LinearConfig(max(2, most_m if m >= 4 * _ENOUGH_PROGRAMS else most_m // 2), block_k, num_warps, 1)
    if dtype.itemsize == 4:
        return LinearConfig(16, 64, 2, 2)
    # Tall tiles read x less often, which comes out of the L2 cache for every program.
    if m >= 128 * _ENOUGH_PROGRAMS:
        return LinearConfig(64, 128, 4, 3)
    if m >= 64 * _ENOUGH_PROGRAMS:
        return LinearConfig(32, 128, 2, 4) if rows <= 16 else LinearConfig(128, 128, 8, 4 if roomy else 2)
    # A warp takes 128 of K: with 64 the rows of a tile of 16 would fall on the same banks of shared memory.
    if rows <= 16:
        return LinearConfig(16, 256, 4, 4)
    if roomy:
        return LinearConfig(64, 128, 4, 6)
    return LinearConfig(64, 128, 4, 3 if normed else 4)  # what is normalised goes through shared memory once more


def few_row_linear_triton(
    x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None, norm: RowNorm | None = None,
    residual: torch.Tensor | None = None, gated: bool = False, config: LinearConfig | None = None,
) -> torch.Tensor:  # fmt: skip
    """Triton version of `few_row_linear`; `config` overrides how the product is cut."""
    require_triton("few_row_linear")
    (num_rows, k), m = x.shape, weight.shape[0]
    cut = config or default_config(num_rows, m, k, x.dtype, normed=norm is not None, roomy=is_roomy(x.device))
    dot = num_rows > LANE_ROWS
    rows = max(16, triton.next_power_of_2(num_rows)) if dot else triton.next_power_of_2(num_rows)
    width = m // 2 if gated else m
    out = residual if residual is not None else x.new_empty(num_rows, width)
    shrink = 1.0 / _FP16_HEADROOM if norm is not None and x.dtype == torch.float16 else 1.0
    with torch.cuda.device_of(x):
        # Triton wants a pointer for every argument; an unused one may point anywhere.
        _few_row_linear_kernel[(triton.cdiv(m, cut.block_m),)](
            x, norm.weight if norm is not None else x, weight, bias if bias is not None else x, out,
            num_rows, width, norm.eps if norm is not None else 0.0,
            K=k, ROWS=rows, BLOCK_M=cut.block_m, BLOCK_K=cut.block_k,
            PARTS=cut.num_warps if dot and cut.block_m < 16 * cut.num_warps else 1,
            STAGES=cut.num_stages, DOT=dot, HAS_NORM=norm is not None, HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None, GATED=gated, SHRINK=shrink, num_warps=cut.num_warps,
            **overlap_options(x.device),
        )  # fmt: skip
    return out


def few_row_linear(
    x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None, norm: RowNorm | None = None,
    residual: torch.Tensor | None = None, gated: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Multiply a few rows with a matrix, normalised before and added or gated behind. Not window-invariant.

    Args:
        x: [N, K], contiguous, N from 1 to `MOST_ROWS`.
        weight: [M, K], contiguous, in the dtype of x; with `gated` M / 2 rows of gates and then as many of ups.
        bias: [M] or None.
        norm: RMSNorm of each row of x before the product, or None.
        residual: [N, M], contiguous, updated in place; it must not overlap x. Excludes `gated`.
        gated: Return silu(gate) * up.

    Returns:
        [N, M], or [N, M / 2] with `gated`, in the dtype of x; `residual` itself where there is one.
    """
    (num_rows, k), m = x.shape, weight.shape[0]
    assert 0 < num_rows <= MOST_ROWS and weight.shape == (m, k) and not (gated and (m % 2 or residual is not None))
    assert x.is_contiguous() and weight.is_contiguous() and weight.dtype == x.dtype
    assert bias is None or (bias.shape == (m,) and bias.is_contiguous())
    assert norm is None or (norm.weight.shape == (k,) and norm.weight.is_contiguous())
    if residual is not None:
        assert residual.shape == (num_rows, m) and residual.is_contiguous() and residual.data_ptr() != x.data_ptr()
    run = few_row_linear_triton if x.is_cuda else few_row_linear_reference
    return run(x, weight, bias=bias, norm=norm, residual=residual, gated=gated)
