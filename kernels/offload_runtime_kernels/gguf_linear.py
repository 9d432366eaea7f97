"""Products of a few rows with a matrix of GGUF blocks, which is decoded in registers on its way to the matrix units.

    y = x W^T + b;    out = y   or   out + y

with the bits of `linear` and the decoded matrix: one accumulator for one element, in ascending order of K, and the same
rounding. A warp decodes 16 rows at a time as two times eight, of which each lane has just what the matrix units take
from it, so that nothing of a weight goes through shared memory once it is decoded.
"""

import torch

from offload_runtime_kernels._jit import (
    gdc_launch_dependents,
    gdc_wait,
    jit,
    overlap_options,
    require_triton,
    tl,
    triton,
    triton_available,
)
from offload_runtime_kernels.gguf_blocks import TILE, BlockFormat, decode_half, load_tile

# Of more rows of x a matrix is decoded into memory and multiplied there.
MOST_ROWS = 16
FEW_ROWS = 8  # as many as the matrix units take at least: with eight the largest matrices are a fifth faster
# Rows of W for a program, its warps, and how far ahead what is stored is loaded into shared memory.
BLOCK_M, NUM_WARPS, NUM_STAGES = 32, 2, 3

# Whether Triton interprets kernels, which knows no assembly.
_INTERPRETED = tl.constexpr(triton_available and triton.knobs.runtime.interpret)


@jit
def hidden(w):
    """The same tensor, so that Triton does not see how an operand of `tl.dot` is decoded: where it does, it takes
    columns out of their order, so that each thread loads more at a time."""
    if not _INTERPRETED:
        w = tl.inline_asm_elementwise("mov.b16 $0, $1;", "=h,h", [w], dtype=w.dtype, is_pure=False, pack=1)
    return w


@jit
def by_sixteen(near, far, M: tl.constexpr):
    """[M, 128] of halves of tiles, of 16 rows the first eight and the others."""
    w = tl.reshape(tl.join(near, far), [M // 16, 8, 128, 2])
    return tl.reshape(tl.permute(w, (0, 3, 1, 2)), [M, 128])


@jit
def columns_at(x_ptrs, start, k, real, columns, WHOLE: tl.constexpr):
    """[128, N] of x, zero behind the last column."""
    if WHOLE:
        x = tl.load(x_ptrs + start, mask=real, other=0.0)
    else:
        x = tl.load(x_ptrs + start, mask=real & (start + k < columns), other=0.0)
    return x


@jit(do_not_specialize=("num_rows", "height", "stride", "blocks"))
def _gguf_linear_kernel(
    x_ptr, stored_ptr, bias_ptr, out_ptr, num_rows, height, stride, columns, blocks, row_bytes,
    FORM: tl.constexpr, WHOLE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows: tl.constexpr = M // 2
    i = tl.arange(0, rows)[:, None]
    near = tl.program_id(0) * M + i // 8 * 16 + i % 8
    # What lies behind the last row reads that row and stores nothing.
    near_ptr = stored_ptr + tl.minimum(near, height - 1).to(tl.int64) * row_bytes
    far_ptr = stored_ptr + tl.minimum(near + 8, height - 1).to(tl.int64) * row_bytes
    row = tl.arange(0, N)[None, :]
    real = row < num_rows
    k = tl.arange(0, 128)[:, None]
    x_ptrs = x_ptr + row.to(tl.int64) * columns + k
    sums = tl.zeros([M, N], dtype=tl.float32)
    for tile in tl.range(0, tl.cdiv(columns, 256), num_stages=STAGES):
        near_planes = load_tile(near_ptr, tile, blocks, FORM, WHOLE, rows)
        far_planes = load_tile(far_ptr, tile, blocks, FORM, WHOLE, rows)
        for half in tl.static_range(2):
            x = columns_at(x_ptrs, (2 * tile + half) * 128, k, real, columns, WHOLE)
            w_near = decode_half(near_planes, half, FORM, rows, dtype, False)
            w_far = decode_half(far_planes, half, FORM, rows, dtype, False)
            sums = tl.dot(hidden(by_sixteen(w_near, w_far, M)), x, sums, input_precision="ieee")
    if OVERLAP:
        gdc_launch_dependents()
    column = tl.program_id(0) * M + tl.arange(0, M)[:, None]
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
    with torch.cuda.device_of(x):
        _gguf_linear_kernel[(triton.cdiv(height, BLOCK_M),)](
            x, stored, bias if bias is not None else x, out, num_rows, height, out.stride(0), k, form.num_blocks(k),
            stored.shape[1], FORM=form, WHOLE=k % TILE == 0, M=BLOCK_M,
            N=FEW_ROWS if num_rows <= FEW_ROWS else MOST_ROWS, STAGES=NUM_STAGES, HAS_BIAS=bias is not None,
            HAS_RESIDUAL=add, num_warps=NUM_WARPS, **overlap_options(x.device),
        )  # fmt: skip
