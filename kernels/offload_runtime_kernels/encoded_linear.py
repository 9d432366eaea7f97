"""What products of a few rows with encoded matrices have in common, whatever decodes these in registers on their way to
the matrix units.

    y = x W^T + b;    out = y   or   out + y

with the bits of `linear` and the decoded matrix: one accumulator for one element, in ascending order of K, and the same
rounding. A warp decodes eight rows at a time, or 16 as two times eight, of which each lane has just what the matrix
units take from it, so that nothing of a weight goes through shared memory once it is decoded.
"""

from dataclasses import dataclass
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


@dataclass(frozen=True)
class EncodedTile:
    """How a product is cut: a program has `block_m` rows of W, steps of 256 columns, `num_stages` of which are loaded
    into shared memory ahead of their use.

    With `w_first` a warp decodes 16 rows of W, the matrix units' first operand, otherwise eight, the second: twice as
    many warps, whose every product takes 16 rows of x.
    """

    block_m: int
    num_warps: int
    num_stages: int
    w_first: bool


# With more rows of W every multiprocessor of an RTX 4090 (128) or H200 (132) has programs enough to hide one's decoding
# behind another's loads. With fewer, twice the warps are a fifth to a quarter faster; with more, a tenth slower.
_ONE_WAVE_ROWS = 4096
_SMALL_TILE = EncodedTile(32, 4, 4, False)
_LARGE_TILE = EncodedTile(32, 2, 3, True)

# Whether Triton interprets kernels, which knows no assembly.
INTERPRETED = tl.constexpr(triton_available and triton.knobs.runtime.interpret)


@jit
def row_starts(ptr, first_row, row_bytes, rows_together, height, M: tl.constexpr, W_FIRST: tl.constexpr):
    """Pointers to the rows of a program, from the first one on, [R, 1] each, of a matrix with `height` rows, so many of
    which share what is stored of one: with `W_FIRST` of each 16 the first eight, and the others. What lies behind the
    last row is that row, and is not stored."""
    if W_FIRST:
        i = tl.arange(0, M // 2)[:, None]
        row = first_row + i // 8 * 16 + i % 8
        rows = (tl.minimum(row, height - 1), tl.minimum(row + 8, height - 1))  # type: tuple[Any, ...]
    else:
        rows = (tl.minimum(first_row + tl.arange(0, M)[:, None], height - 1),)
    found = ()  # type: tuple[Any, ...]
    for part in tl.static_range(2 if W_FIRST else 1):
        found += (ptr + (rows[part] // rows_together).to(tl.int64) * row_bytes,)
    return found


@jit
def no_sums(M: tl.constexpr, N: tl.constexpr, W_FIRST: tl.constexpr):
    """Where products are added up: of rows of W and of x, or the other way round."""
    if W_FIRST:
        sums = tl.zeros([M, N], dtype=tl.float32)
    else:
        sums = tl.zeros([N, M], dtype=tl.float32)
    return sums


@jit
def rows_of_x(x_ptr, start, num_rows, columns, WHOLE: tl.constexpr, N: tl.constexpr, W_FIRST: tl.constexpr):
    """128 columns of x, zero behind the last one: an operand of `tl.dot`."""
    if W_FIRST:
        row, k = tl.arange(0, N)[None, :], tl.arange(0, 128)[:, None]
    else:
        row, k = tl.arange(0, N)[:, None], tl.arange(0, 128)[None, :]
    real = row < num_rows
    if not WHOLE:
        real &= start + k < columns
    return tl.load(x_ptr + row.to(tl.int64) * columns + k + start, mask=real, other=0.0)


@jit
def add_products(sums, x, weights, M: tl.constexpr, W_FIRST: tl.constexpr):
    """Add the products of 128 columns, with the weights of the rows of `row_starts`, [R, ...] each.

    Triton does not see how they are decoded: where it does, it takes columns out of their order, so that each thread
    loads more at a time."""
    if W_FIRST:
        w = tl.reshape(tl.join(weights[0], weights[1]), [M // 16, 8, 128, 2])
        w = tl.reshape(tl.permute(w, (0, 3, 1, 2)), [M, 128])
    else:
        w = tl.trans(tl.reshape(weights[0], [M, 128]))
    if not INTERPRETED:
        w = tl.inline_asm_elementwise("mov.b16 $0, $1;", "=h,h", [w], dtype=w.dtype, is_pure=False, pack=1)
    if W_FIRST:
        sums = tl.dot(w, x, sums, input_precision="ieee")
    else:
        sums = tl.dot(x, w, sums, input_precision="ieee")
    return sums


@jit
def store_product(
    sums, bias_ptr, out_ptr, first_row, num_rows, height, stride, DTYPE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, W_FIRST: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Store the sums of the rows of W from the first one on that are below `height`."""
    if OVERLAP:
        gdc_launch_dependents()
    row, column = tl.arange(0, N), first_row + tl.arange(0, M)
    if W_FIRST:
        row, column = row[None, :], column[:, None]
    else:
        row, column = row[:, None], column[None, :]
    written = (row < num_rows) & (column < height)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + column, mask=column < height, other=0.0).to(tl.float32)
    y = sums.to(DTYPE).to(tl.float32)
    out_ptrs = out_ptr + row.to(tl.int64) * stride + column
    if HAS_RESIDUAL:
        y += tl.load(out_ptrs, mask=written, other=0.0).to(tl.float32)
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=written)


def launch_options(
    x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, add: bool, tile: EncodedTile | None
) -> tuple[tuple[int], dict[str, Any]]:
    """Programs, and constants and options of a kernel; checks what is multiplied."""
    (num_rows, _), height = x.shape, out.shape[1]
    cut = tile or (_SMALL_TILE if height <= _ONE_WAVE_ROWS else _LARGE_TILE)
    assert num_rows <= MOST_ROWS and x.is_contiguous()
    assert len(out) == num_rows and out.stride(1) == 1 and out.dtype == x.dtype
    options = {
        "M": cut.block_m, "N": _FEW_ROWS if cut.w_first and num_rows <= _FEW_ROWS else MOST_ROWS,
        "W_FIRST": cut.w_first, "STAGES": cut.num_stages, "HAS_BIAS": bias is not None, "HAS_RESIDUAL": add,
        "num_warps": cut.num_warps, **overlap_options(x.device),
    }  # fmt: skip
    return (-(-height // cut.block_m),), options
