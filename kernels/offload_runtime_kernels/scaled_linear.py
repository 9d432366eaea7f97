"""Products of a few rows with a matrix of small numbers with scales, decoded in registers: see `encoded_linear`."""

import torch

from offload_runtime_kernels._jit import gdc_wait, jit, require_triton, tl
from offload_runtime_kernels.encoded_linear import columns_at, half_rows, launch_options, operand, store_product
from offload_runtime_kernels.gguf_blocks import TILE, units_at
from offload_runtime_kernels.scaled_rows import (
    BITS,
    ScaledFormat,
    ScaledRows,
    columns_of_scale,
    decoded_half,
    shared_words_at,
)


@jit(do_not_specialize=("num_rows", "height", "stride"))
def _scaled_linear_kernel(
    x_ptr, numbers_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, num_rows, height, stride, columns, row_bytes,
    scale_bytes, zero_bytes, rows_of_scale, tiles_of_scale, NUMBER: tl.constexpr, BITS: tl.constexpr,
    ZERO: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    scale: tl.constexpr = scales_ptr.dtype.element_ty
    rows: tl.constexpr = M // 2
    near, far = half_rows(M, height)
    near_ptr, far_ptr = numbers_ptr + near.to(tl.int64) * row_bytes, numbers_ptr + far.to(tl.int64) * row_bytes
    near_scale_row, far_scale_row = (near // rows_of_scale).to(tl.int64), (far // rows_of_scale).to(tl.int64)
    scale_bytes_ptr = scales_ptr.to(tl.pointer_type(tl.uint8))
    near_scales_ptr = scale_bytes_ptr + near_scale_row * scale_bytes
    far_scales_ptr = scale_bytes_ptr + far_scale_row * scale_bytes
    near_zeros_ptr, far_zeros_ptr = zeros_ptr + near_scale_row * zero_bytes, zeros_ptr + far_scale_row * zero_bytes
    if GROUP == 0:  # one scale a row
        near_shared = shared_words_at(near_scales_ptr, near_zeros_ptr, 0, BITS, ZEROS, GROUP, scale, rows)
        far_shared = shared_words_at(far_scales_ptr, far_zeros_ptr, 0, BITS, ZEROS, GROUP, scale, rows)
    sums = tl.zeros([M, N], dtype=tl.float32)
    for tile in tl.range(0, tl.cdiv(columns, 256), num_stages=STAGES):
        near_units = units_at(near_ptr, tile, row_bytes, 32 * BITS, WHOLE, rows)
        far_units = units_at(far_ptr, tile, row_bytes, 32 * BITS, WHOLE, rows)
        if GROUP > 0:
            scale_tile = tile // tiles_of_scale
            near_shared = shared_words_at(near_scales_ptr, near_zeros_ptr, scale_tile, BITS, ZEROS, GROUP, scale, rows)
            far_shared = shared_words_at(far_scales_ptr, far_zeros_ptr, scale_tile, BITS, ZEROS, GROUP, scale, rows)
        for half in tl.static_range(2):
            x = columns_at(x_ptr, (2 * tile + half) * 128, num_rows, columns, WHOLE, N)
            near_w = decoded_half(
                near_units, near_shared, half, NUMBER, BITS, ZERO, ZEROS, GROUP, scale, dtype, rows, False
            )  # fmt: skip
            far_w = decoded_half(
                far_units, far_shared, half, NUMBER, BITS, ZERO, ZEROS, GROUP, scale, dtype, rows, False
            )  # fmt: skip
            sums = tl.dot(operand(near_w, far_w, M), x, sums, input_precision="ieee")
    store_product(sums, bias_ptr, out_ptr, num_rows, height, stride, dtype, M, N, HAS_BIAS, HAS_RESIDUAL, OVERLAP)


def scaled_linear_triton(
    x: torch.Tensor, stored: ScaledRows, form: ScaledFormat, out: torch.Tensor, *, bias: torch.Tensor | None = None,
    add: bool = False,
) -> None:  # fmt: skip
    """Multiply rows with a matrix, into `out` or, with `add`, added to it; enqueued on the current stream.

    Args:
        x: [N, K], contiguous, N at most `MOST_ROWS`, of 16 bits an element (32 in the interpreter).
        stored: The matrix, whose scales are below 2^100 and whose numbers are all numbers.
        form: How it is stored: one that `columns_of_scale` knows.
        out: [N, M] in the dtype of x; its rows may be part of longer ones.
        bias: [M] or None, contiguous.
        add: Whether the product is added to what `out` has.
    """
    require_triton("a product with quantised weights")
    (num_rows, k), height = x.shape, len(stored.numbers)
    group = columns_of_scale(form, k)
    assert group is not None and stored.numbers.shape[1] == form.row_bytes(k) and out.shape[1] == height
    scale_bytes, zero_bytes = form.scale_row_bytes(k)
    grid, options = launch_options(x, out, bias, add=add)
    with torch.cuda.device_of(x):
        _scaled_linear_kernel[grid](
            x, stored.numbers, stored.scales, stored.zeros, bias if bias is not None else x, out, num_rows, height,
            out.stride(0), k, stored.numbers.shape[1], scale_bytes, zero_bytes, form.rows, max(1, form.columns // TILE),
            NUMBER=form.number, BITS=BITS[form.number], ZERO=form.zero, ZEROS=form.zeros, GROUP=group,
            WHOLE=k % TILE == 0, **options,
        )  # fmt: skip
