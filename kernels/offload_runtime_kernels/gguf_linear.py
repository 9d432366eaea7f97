"""Products of a few rows with a matrix of GGUF blocks, which is decoded in registers on its way to the matrix units.

    y = x W^T + b;    out = y   or   out + y

with the bits of `linear` and the decoded matrix: one accumulator for one element, in ascending order of K, and the same
rounding. A warp decodes 16 rows at a time as two times eight, of which each lane has just what the matrix units take
from it. Nothing of a weight goes through shared memory where a program has rows enough; for matrices of few rows,
whose programs would be too few to hide what one of them waits for, each warp decodes a stretch of the same 16 rows.
"""

from typing import NamedTuple

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
from offload_runtime_kernels.gguf_blocks import INTEGER_BITS, TILE, BlockFormat, decode_half, decode_tile, load_tile

# Of more rows of x a matrix is decoded into memory and multiplied there. One size for all fewer ones, as eight are
# hardly faster and a kernel takes some eight seconds to compile.
MOST_ROWS = 16
# A W of fewer rows has too few programs of rows of their own.
_TALL = 8192


class _Cut(NamedTuple):
    """Rows of W for a program, stretches of K that it decodes at a time, and its warps."""

    block_m: int
    stretches: int
    num_warps: int


_TALL_CUT, _SHORT_CUT = _Cut(32, 1, 2), _Cut(16, 2, 2)


@jit
def _half_rows(
    near, far, HALF: tl.constexpr, integer_bits, FORM: tl.constexpr, BLOCK_M: tl.constexpr, DTYPE: tl.constexpr
):
    """[BLOCK_M, 128], a half of a tile; of 16 rows `near` has the first eight."""
    rows: tl.constexpr = BLOCK_M // 2
    w = tl.join(
        decode_half(near, HALF, integer_bits, FORM, rows, DTYPE),
        decode_half(far, HALF, integer_bits, FORM, rows, DTYPE),
    )
    w = tl.permute(tl.reshape(w, [BLOCK_M // 16, 8, 128, 2]), (0, 3, 1, 2))
    return tl.reshape(w, [BLOCK_M, 128])


@jit
def _stretches(near, far, integer_bits, FORM: tl.constexpr, STRETCHES: tl.constexpr, DTYPE: tl.constexpr):
    """[16, STRETCHES * 256], a tile for each eight rows of `near` and `far`."""
    rows: tl.constexpr = STRETCHES * 8
    w = tl.join(decode_tile(near, integer_bits, FORM, rows, DTYPE), decode_tile(far, integer_bits, FORM, rows, DTYPE))
    w = tl.permute(tl.reshape(w, [STRETCHES, 8, 256, 2]), (3, 1, 0, 2))
    return tl.reshape(w, [16, STRETCHES * 256])


@jit
def _columns_at(x_ptrs, start, k, real, columns, WHOLE: tl.constexpr):
    """[width, N] of x, zero behind the last column."""
    if WHOLE:
        x = tl.load(x_ptrs + start, mask=real, other=0.0)
    else:
        x = tl.load(x_ptrs + start, mask=real & (start + k < columns), other=0.0)
    return x


@jit(do_not_specialize=("num_rows", "height", "stride", "integer_bits", "blocks"))
def _gguf_linear_kernel(
    x_ptr, stored_ptr, bias_ptr, out_ptr, num_rows, height, stride, integer_bits, columns, blocks, row_bytes,
    FORM: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRETCHES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    integer_bits = integer_bits.to(tl.uint32)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows: tl.constexpr = BLOCK_M // 2 * STRETCHES
    # Eight rows of a stretch are neighbours.
    i = tl.arange(0, rows)[:, None]
    near = tl.program_id(0) * BLOCK_M + i // (8 * STRETCHES) * 16 + i % 8
    stretch = i // 8 % STRETCHES
    # What lies behind the last row reads that row and stores nothing.
    near_ptr = stored_ptr + tl.minimum(near, height - 1).to(tl.int64) * row_bytes
    far_ptr = stored_ptr + tl.minimum(near + 8, height - 1).to(tl.int64) * row_bytes
    row = tl.arange(0, BLOCK_N)[None, :]
    real = row < num_rows
    tiles = tl.cdiv(columns, 256)
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    # Triton must not see how an operand of `tl.dot` is decoded: where it does, it takes columns out of their order, so
    # that each thread loads more at a time. It looks neither behind a branch nor behind the last step of a loop.
    if STRETCHES == 1:
        k = tl.arange(0, 128)[:, None]
        x_ptrs = x_ptr + row.to(tl.int64) * columns + k
        near_planes = load_tile(near_ptr, 0, blocks, FORM, WHOLE, rows)
        far_planes = load_tile(far_ptr, 0, blocks, FORM, WHOLE, rows)
        for tile in tl.range(0, tiles, num_stages=3):
            after = tl.minimum(tile + 1, tiles - 1)
            next_near = load_tile(near_ptr, after, blocks, FORM, WHOLE, rows)
            next_far = load_tile(far_ptr, after, blocks, FORM, WHOLE, rows)
            for half in tl.static_range(2):
                x = _columns_at(x_ptrs, (2 * tile + half) * 128, k, real, columns, WHOLE)
                w = tl.zeros([BLOCK_M, 128], dtype)
                if integer_bits != 0:  # always
                    w = _half_rows(near_planes, far_planes, half, integer_bits, FORM, BLOCK_M, dtype)
                sums = tl.dot(w, x, sums, input_precision="ieee")
            near_planes, far_planes = next_near, next_far
    else:
        width: tl.constexpr = STRETCHES * 256
        k = tl.arange(0, width)[:, None]
        x_ptrs = x_ptr + row.to(tl.int64) * columns + k
        first = tl.minimum(stretch, tiles - 1)
        near_planes = load_tile(near_ptr, first, blocks, FORM, WHOLE, rows)
        far_planes = load_tile(far_ptr, first, blocks, FORM, WHOLE, rows)
        w = _stretches(near_planes, far_planes, integer_bits, FORM, STRETCHES, dtype)
        first = tl.minimum(stretch + STRETCHES, tiles - 1)
        near_planes = load_tile(near_ptr, first, blocks, FORM, WHOLE, rows)
        far_planes = load_tile(far_ptr, first, blocks, FORM, WHOLE, rows)
        for step in tl.range(0, tl.cdiv(columns, width), num_stages=3):
            after = tl.minimum((step + 2) * STRETCHES + stretch, tiles - 1)
            next_near = load_tile(near_ptr, after, blocks, FORM, WHOLE, rows)
            next_far = load_tile(far_ptr, after, blocks, FORM, WHOLE, rows)
            x = _columns_at(x_ptrs, step * width, k, real, columns, False)
            sums = tl.dot(w, x, sums, input_precision="ieee")
            w = _stretches(near_planes, far_planes, integer_bits, FORM, STRETCHES, dtype)
            near_planes, far_planes = next_near, next_far
    if OVERLAP:
        gdc_launch_dependents()
    column = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    written = real & (column < height)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + column, mask=column < height, other=0.0).to(tl.float32)
    y = sums.to(dtype).to(tl.float32)
    out_ptrs = out_ptr + row.to(tl.int64) * stride + column
    if HAS_RESIDUAL:
        y += tl.load(out_ptrs, mask=written, other=0.0).to(tl.float32)
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=written)


def gguf_linear_triton(
    x: torch.Tensor, stored: torch.Tensor, form: BlockFormat, out: torch.Tensor, *, bias: torch.Tensor | None = None,
    add: bool = False,
) -> None:  # fmt: skip
    """Multiply rows with a matrix, into `out` or, with `add`, added to it; enqueued on the current stream.

    Args:
        x: [N, K], contiguous, N at most `MOST_ROWS`, of 16 bits an element (32 in the interpreter).
        stored: uint8 [M, row_bytes], rows in planes, contiguous, at an address that 16 divides.
        form: How each block is stored: one of `gguf_blocks.FORMATS`.
        out: [N, M] in the dtype of x; its rows may be part of longer ones.
        bias: [M] or None, contiguous.
        add: Whether the product is added to what `out` has.
    """
    require_triton("a product with GGUF blocks")
    (num_rows, k), height = x.shape, len(stored)
    assert num_rows <= MOST_ROWS and x.is_contiguous()
    assert stored.is_contiguous() and stored.shape[1] == form.row_bytes(k)
    assert out.shape == (num_rows, height) and out.stride(1) == 1 and out.dtype == x.dtype
    cut = _TALL_CUT if height >= _TALL else _SHORT_CUT
    with torch.cuda.device_of(x):
        _gguf_linear_kernel[(triton.cdiv(height, cut.block_m),)](
            x, stored, bias if bias is not None else x, out, num_rows, height, out.stride(0), INTEGER_BITS, k,
            form.num_blocks(k), stored.shape[1], FORM=form, WHOLE=k % TILE == 0, BLOCK_M=cut.block_m,
            BLOCK_N=MOST_ROWS, STRETCHES=cut.stretches, HAS_BIAS=bias is not None, HAS_RESIDUAL=add,
            num_warps=cut.num_warps, **overlap_options(x.device),
        )  # fmt: skip
