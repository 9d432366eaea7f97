"""What products of a few rows with encoded matrices have in common, whatever decodes these in registers on their way to
the matrix units.

    y = x W^T + b;    out = y   or   out + y

with the bits of `linear` and the decoded matrix: one accumulator for one element, in ascending order of K, and the same
rounding. A warp decodes 16 rows at a time as two times eight, of which each lane has just what the matrix units take
from it, so that nothing of a weight goes through shared memory once it is decoded.
"""

from typing import Any

import torch

from offload_runtime_kernels._jit import (
    gdc_launch_dependents,
    jit,
    overlap_options,
    tl,
    triton,
    triton_available,
)

# Of more rows of x a matrix is decoded into memory and multiplied there.
MOST_ROWS = 16
_FEW_ROWS = 8  # as many as the matrix units take at least: with eight the largest matrices are a fifth faster
# Rows of W for a program, its warps, and how far ahead what is stored is loaded into shared memory.
_BLOCK_M, _NUM_WARPS, _NUM_STAGES = 32, 2, 3

# Whether Triton interprets kernels, which knows no assembly.
INTERPRETED = tl.constexpr(triton_available and triton.knobs.runtime.interpret)


@jit
def half_rows(M: tl.constexpr, height):
    """[M / 2, 1]: of each 16 rows of a program the first eight, and the others. What lies behind the last row is
    that row, and is not stored."""
    i = tl.arange(0, M // 2)[:, None]
    near = tl.program_id(0) * M + i // 8 * 16 + i % 8
    return tl.minimum(near, height - 1), tl.minimum(near + 8, height - 1)


@jit
def operand(near, far, M: tl.constexpr):
    """[M, 128] of the weights of half the rows each, [M / 2, ...]: the first operand of `tl.dot`.

    Triton does not see how it is decoded: where it does, it takes columns out of their order, so that each thread loads
    more at a time."""
    w = tl.reshape(tl.join(near, far), [M // 16, 8, 128, 2])
    w = tl.reshape(tl.permute(w, (0, 3, 1, 2)), [M, 128])
    if not INTERPRETED:
        w = tl.inline_asm_elementwise("mov.b16 $0, $1;", "=h,h", [w], dtype=w.dtype, is_pure=False, pack=1)
    return w


@jit
def columns_at(x_ptr, start, num_rows, columns, WHOLE: tl.constexpr, N: tl.constexpr):
    """[128, N] of x, zero behind the last column."""
    row, k = tl.arange(0, N)[None, :], tl.arange(0, 128)[:, None]
    real = row < num_rows
    if not WHOLE:
        real &= start + k < columns
    return tl.load(x_ptr + row.to(tl.int64) * columns + k + start, mask=real, other=0.0)


@jit
def store_product(
    sums, bias_ptr, out_ptr, num_rows, height, stride, DTYPE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.arange(0, N)[None, :]
    column = tl.program_id(0) * M + tl.arange(0, M)[:, None]
    written = (row < num_rows) & (column < height)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + column, mask=column < height, other=0.0).to(tl.float32)
    y = sums.to(DTYPE).to(tl.float32)
    out_ptrs = out_ptr + row.to(tl.int64) * stride + column
    if HAS_RESIDUAL:
        y += tl.load(out_ptrs, mask=written, other=0.0).to(tl.float32)
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=written)


def launch_options(
    x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, add: bool
) -> tuple[tuple[int], dict[str, Any]]:
    """Programs, and constants and options of a kernel; checks what is multiplied."""
    (num_rows, _), height = x.shape, out.shape[1]
    assert num_rows <= MOST_ROWS and x.is_contiguous()
    assert len(out) == num_rows and out.stride(1) == 1 and out.dtype == x.dtype
    options = {
        "M": _BLOCK_M, "N": _FEW_ROWS if num_rows <= _FEW_ROWS else MOST_ROWS, "STAGES": _NUM_STAGES,
        "HAS_BIAS": bias is not None, "HAS_RESIDUAL": add, "num_warps": _NUM_WARPS, **overlap_options(x.device),
    }  # fmt: skip
    return (-(-height // _BLOCK_M),), options
