"""Products of a few rows with a matrix of small numbers with scales, decoded in registers: see `encoded_linear`."""

import torch

from offload_runtime_kernels._jit import gdc_wait, jit, require_triton, tl
from offload_runtime_kernels.encoded_linear import (
    EncodedTile,
    add_products,
    launch_options,
    no_sums,
    row_starts,
    rows_of_x,
    store_product,
)
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
    ZERO: tl.constexpr, ZERO_BITS: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, W_FIRST: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    scale: tl.constexpr = scales_ptr.dtype.element_ty
    parts: tl.constexpr = 2 if W_FIRST else 1
    rows: tl.constexpr = M // parts
    row, scale_bytes_ptr = tl.program_id(0) * M, scales_ptr.to(tl.pointer_type(tl.uint8))
    row_ptrs = row_starts(numbers_ptr, row, row_bytes, 1, height, M, W_FIRST)
    scale_ptrs = row_starts(scale_bytes_ptr, row, scale_bytes, rows_of_scale, height, M, W_FIRST)
    zero_ptrs = row_starts(zeros_ptr, row, zero_bytes, rows_of_scale, height, M, W_FIRST)
    first = ()  # type: tuple[object, ...]
    if GROUP == 0:  # one scale a row
        for part in tl.static_range(parts):
            first += (shared_words_at(scale_ptrs[part], zero_ptrs[part], 0, ZERO_BITS, GROUP, scale, rows),)
    sums = no_sums(M, N, W_FIRST)
    for tile in tl.range(0, tl.cdiv(columns, 256), num_stages=STAGES):
        units, shared = (), first  # type: tuple[tuple[object, ...], tuple[object, ...]]
        for part in tl.static_range(parts):
            units += (units_at(row_ptrs[part], tile, row_bytes, 32 * BITS, WHOLE, rows),)
            if GROUP > 0:
                at = tile // tiles_of_scale
                shared += (shared_words_at(scale_ptrs[part], zero_ptrs[part], at, ZERO_BITS, GROUP, scale, rows),)
        for half in tl.static_range(2):
            x = rows_of_x(x_ptr, (2 * tile + half) * 128, num_rows, columns, WHOLE, N, W_FIRST)
            weights = ()  # type: tuple[object, ...]
            for part in tl.static_range(parts):
                weights += (
                    decoded_half(
                        units[part], shared[part], half, NUMBER, BITS, ZERO, ZERO_BITS, GROUP, scale, dtype, rows, False
                    ),
                )
            sums = add_products(sums, x, weights, M, W_FIRST)
    store_product(
        sums, bias_ptr, out_ptr, row, num_rows, height, stride, dtype, M, N, W_FIRST, HAS_BIAS, HAS_RESIDUAL, OVERLAP
    )


def scaled_linear_triton(
    x: torch.Tensor, stored: ScaledRows, form: ScaledFormat, out: torch.Tensor, *, bias: torch.Tensor | None = None,
    add: bool = False, tile: EncodedTile | None = None,
) -> None:  # fmt: skip
    """Multiply rows with a matrix, into `out` or, with `add`, added to it; enqueued on the current stream.

    Args:
        x: [N, K], contiguous, N at most `MOST_ROWS`, of 16 bits an element (32 in the interpreter).
        stored: The matrix, whose scales are below 2^100 and whose numbers are all numbers.
        form: How it is stored: one that `columns_of_scale` knows.
        out: [N, M] in the dtype of x; its rows may be part of longer ones.
        bias: [M] or None, contiguous.
        add: Whether the product is added to what `out` has.
        tile: Overrides how the product is cut.
    """
    require_triton("a product with quantised weights")
    (num_rows, k), height = x.shape, len(stored.numbers)
    group = columns_of_scale(form, k)
    assert group is not None and stored.numbers.shape[1] == form.row_bytes(k) and out.shape[1] == height
    scale_bytes, zero_bytes = form.scale_row_bytes(k)
    grid, options = launch_options(x, out, bias, add=add, tile=tile)
    with torch.cuda.device_of(x):
        _scaled_linear_kernel[grid](
            x, stored.numbers, stored.scales, stored.zeros, bias if bias is not None else x, out, num_rows, height,
            out.stride(0), k, stored.numbers.shape[1], scale_bytes, zero_bytes, form.rows, max(1, form.columns // TILE),
            NUMBER=form.number, BITS=BITS[form.number], ZERO=form.zero, ZERO_BITS=form.zero_bits, GROUP=group,
            WHOLE=k % TILE == 0, **options,
        )  # fmt: skip
