"""Products of a few rows with a matrix of GGUF blocks, which is decoded in registers: see `encoded_linear`."""

import torch

from offload_runtime_kernels._jit import gdc_wait, jit, require_triton, tl
from offload_runtime_kernels.encoded_linear import columns_at, half_rows, launch_options, operand, store_product
from offload_runtime_kernels.gguf_blocks import TILE, BlockFormat, decode_half, load_tile


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
    near, far = half_rows(M, height)
    near_ptr, far_ptr = stored_ptr + near.to(tl.int64) * row_bytes, stored_ptr + far.to(tl.int64) * row_bytes
    sums = tl.zeros([M, N], dtype=tl.float32)
    for tile in tl.range(0, tl.cdiv(columns, 256), num_stages=STAGES):
        near_planes = load_tile(near_ptr, tile, blocks, FORM, WHOLE, rows)
        far_planes = load_tile(far_ptr, tile, blocks, FORM, WHOLE, rows)
        for half in tl.static_range(2):
            x = columns_at(x_ptr, (2 * tile + half) * 128, num_rows, columns, WHOLE, N)
            near_w = decode_half(near_planes, half, FORM, rows, dtype, False)
            far_w = decode_half(far_planes, half, FORM, rows, dtype, False)
            sums = tl.dot(operand(near_w, far_w, M), x, sums, input_precision="ieee")
    store_product(sums, bias_ptr, out_ptr, num_rows, height, stride, dtype, M, N, HAS_BIAS, HAS_RESIDUAL, OVERLAP)


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
    assert stored.is_contiguous() and stored.shape[1] == form.row_bytes(k) and out.shape[1] == height
    grid, options = launch_options(x, out, bias, add=add)
    with torch.cuda.device_of(x):
        _gguf_linear_kernel[grid](
            x, stored, bias if bias is not None else x, out, num_rows, height, out.stride(0), k, form.num_blocks(k),
            stored.shape[1], FORM=form, WHOLE=k % TILE == 0, **options,
        )  # fmt: skip
