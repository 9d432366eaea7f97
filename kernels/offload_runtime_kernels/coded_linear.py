"""Products of a few rows with a bf16 matrix in 12 bits, which is decoded in registers: see `encoded_linear`."""

import torch

from offload_runtime_kernels._jit import gdc_wait, jit, require_triton, tl
from offload_runtime_kernels.coded_bf16 import CodedRow, half_of, load_coded, tail_of, uppers_of
from offload_runtime_kernels.encoded_linear import (
    EncodedTile,
    add_products,
    launch_options,
    no_sums,
    row_starts,
    rows_of_x,
    store_product,
)
from offload_runtime_kernels.gguf_blocks import TILE

# For matrices of every height, by an H200: 1 to 30 % faster than rows of W as the first operand, of 57344 to 4096 rows,
# and 10 to 20 % than with a fourth stage, which leaves room for fewer programs.
_TILE = EncodedTile(32, 4, 3, False)


@jit
def _sums(
    sums, start, end, x_ptr, num_rows, row_ptrs, tails, columns, list_start, room, most, WHOLE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, W_FIRST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add the products of the tiles from `start` to `end`. Rows have at most so many exceptions."""
    parts: tl.constexpr = 2 if W_FIRST else 1
    rows: tl.constexpr = M // parts
    for tile in tl.range(start, end, num_stages=STAGES):
        lows, uppers = (), ()  # type: tuple[tuple[object, ...], tuple[object, ...]]
        for part in tl.static_range(parts):
            low, index, table = load_coded(row_ptrs[part], tile, columns, WHOLE, rows)
            lows += (low,)
            uppers += (uppers_of(index, table, tails[part], row_ptrs[part], list_start, room, most, tile),)
        for half in tl.static_range(2):
            x = rows_of_x(x_ptr, (2 * tile + half) * 128, num_rows, columns, WHOLE, N, W_FIRST)
            weights = ()  # type: tuple[object, ...]
            for part in tl.static_range(parts):
                bits = half_of(lows[part], uppers[part], half, rows)
                weights += (bits.to(tl.bfloat16, bitcast=True).to(x.dtype),)
            sums = add_products(sums, x, weights, M, W_FIRST)
    return sums


@jit(do_not_specialize=("num_rows", "height", "stride", "list_start", "room"))
def _coded_linear_kernel(
    x_ptr, stored_ptr, bias_ptr, out_ptr, num_rows, height, stride, columns, list_start, room, row_bytes,
    WHOLE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, W_FIRST: tl.constexpr, STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    row_ptrs = row_starts(stored_ptr, tl.program_id(0) * M, row_bytes, 1, height, M, W_FIRST)
    tails = ()  # type: tuple[object, ...]
    most = 0
    for part in tl.static_range(2 if W_FIRST else 1):
        tails += (tail_of(row_ptrs[part], row_bytes),)
        most = tl.maximum(most, tl.max(tails[part][1]).to(tl.int32))
    # Each in a loop of its own: what only few rows need must not hold others up.
    tiles = tl.cdiv(columns, 256)
    plain = tl.where(most == 0, tiles, 0)
    sums = no_sums(M, N, W_FIRST)
    sums = _sums(
        sums, 0, plain, x_ptr, num_rows, row_ptrs, tails, columns, list_start, room, 0, WHOLE, M, N, W_FIRST, STAGES
    )
    sums = _sums(
        sums, plain, tiles, x_ptr, num_rows, row_ptrs, tails, columns, list_start, room, most, WHOLE, M, N, W_FIRST,
        STAGES,
    )  # fmt: skip
    store_product(
        sums, bias_ptr, out_ptr, tl.program_id(0) * M, num_rows, height, stride, x_ptr.dtype.element_ty, M, N, W_FIRST,
        HAS_BIAS, HAS_RESIDUAL, OVERLAP,
    )  # fmt: skip


def coded_linear_triton(
    x: torch.Tensor, stored: torch.Tensor, row: CodedRow, out: torch.Tensor, *, bias: torch.Tensor | None = None,
    add: bool = False, tile: EncodedTile | None = None,
) -> None:  # fmt: skip
    """Multiply rows with a matrix, into `out` or, with `add`, added to it; enqueued on the current stream.

    Args:
        x: bf16 [N, K], contiguous, N at most `MOST_ROWS` (fp32 in the interpreter).
        stored: uint8 [M, nbytes], contiguous, at an address that 16 divides.
        row: How a row lies in its bytes.
        out: [N, M] in the dtype of x; its rows may be part of longer ones.
        bias: [M] or None, contiguous.
        add: Whether the product is added to what `out` has.
        tile: Overrides how the product is cut.
    """
    require_triton("a product with 12-bit weights")
    num_rows, height = len(x), len(stored)
    assert x.shape[1] == row.columns and out.shape[1] == height
    assert stored.is_contiguous() and stored.shape[1] == row.nbytes
    grid, options = launch_options(x, out, bias, add=add, tile=tile or _TILE)
    with torch.cuda.device_of(x):
        _coded_linear_kernel[grid](
            x, stored, bias if bias is not None else x, out, num_rows, height, out.stride(0), row.columns,
            row.list_start, row.room, row.nbytes, WHOLE=row.columns % TILE == 0, **options,
        )  # fmt: skip
