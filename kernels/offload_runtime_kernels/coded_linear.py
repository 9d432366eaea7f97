"""Products of a few rows with a bf16 matrix in 12 bits, which is decoded in registers: see `encoded_linear`."""

import torch

from offload_runtime_kernels._jit import gdc_wait, jit, require_triton, tl
from offload_runtime_kernels.coded_bf16 import CodedRow, half_of, load_coded, tail_of, uppers_of
from offload_runtime_kernels.encoded_linear import columns_at, half_rows, launch_options, operand, store_product


@jit
def _sums(
    sums, start, end, x_ptr, num_rows, near_ptr, far_ptr, near_tail, far_tail, most, COLUMNS: tl.constexpr,
    LIST_START: tl.constexpr, ROOM: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add the products of the tiles from `start` to `end`: fp32 [M, N]. Rows have at most so many exceptions."""
    rows: tl.constexpr = M // 2
    for tile in tl.range(start, end, num_stages=STAGES):
        near_low, near_index, near_table = load_coded(near_ptr, tile, COLUMNS, rows)
        far_low, far_index, far_table = load_coded(far_ptr, tile, COLUMNS, rows)
        near_uppers = uppers_of(near_index, near_table, near_tail, near_ptr, most, tile, LIST_START, ROOM)
        far_uppers = uppers_of(far_index, far_table, far_tail, far_ptr, most, tile, LIST_START, ROOM)
        for half in tl.static_range(2):
            x = columns_at(x_ptr, (2 * tile + half) * 128, num_rows, COLUMNS, COLUMNS % 256 == 0, N)
            near_w = half_of(near_low, near_uppers, half, rows).to(tl.bfloat16, bitcast=True).to(x.dtype)
            far_w = half_of(far_low, far_uppers, half, rows).to(tl.bfloat16, bitcast=True).to(x.dtype)
            sums = tl.dot(operand(near_w, far_w, M), x, sums, input_precision="ieee")
    return sums


@jit(do_not_specialize=("num_rows", "height", "stride"))
def _coded_linear_kernel(
    x_ptr, stored_ptr, bias_ptr, out_ptr, num_rows, height, stride, COLUMNS: tl.constexpr, LIST_START: tl.constexpr,
    ROOM: tl.constexpr, ROW_BYTES: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    near, far = half_rows(M, height)
    near_ptr, far_ptr = stored_ptr + near.to(tl.int64) * ROW_BYTES, stored_ptr + far.to(tl.int64) * ROW_BYTES
    near_tail, far_tail = tail_of(near_ptr, ROW_BYTES), tail_of(far_ptr, ROW_BYTES)
    most = tl.max(tl.maximum(near_tail[1], far_tail[1]))
    # Each in a loop of its own: what only few rows need must not hold others up.
    tiles = tl.cdiv(COLUMNS, 256)
    plain = tl.where(most == 0, tiles, 0)
    sums = tl.zeros([M, N], dtype=tl.float32)
    sums = _sums(
        sums, 0, plain, x_ptr, num_rows, near_ptr, far_ptr, near_tail, far_tail, 0, COLUMNS, LIST_START, ROOM, M, N,
        STAGES,
    )  # fmt: skip
    sums = _sums(
        sums, plain, tiles, x_ptr, num_rows, near_ptr, far_ptr, near_tail, far_tail, most, COLUMNS, LIST_START, ROOM, M,
        N, STAGES,
    )  # fmt: skip
    store_product(
        sums, bias_ptr, out_ptr, num_rows, height, stride, x_ptr.dtype.element_ty, M, N, HAS_BIAS, HAS_RESIDUAL, OVERLAP
    )  # fmt: skip


def coded_linear_triton(
    x: torch.Tensor, stored: torch.Tensor, row: CodedRow, out: torch.Tensor, *, bias: torch.Tensor | None = None,
    add: bool = False,
) -> None:  # fmt: skip
    """Multiply rows with a matrix, into `out` or, with `add`, added to it; enqueued on the current stream.

    Args:
        x: bf16 [N, K], contiguous, N at most `MOST_ROWS` (fp32 in the interpreter).
        stored: uint8 [M, nbytes], contiguous, at an address that 16 divides.
        row: How a row lies in its bytes.
        out: [N, M] in the dtype of x; its rows may be part of longer ones.
        bias: [M] or None, contiguous.
        add: Whether the product is added to what `out` has.
    """
    require_triton("a product with 12-bit weights")
    num_rows, height = len(x), len(stored)
    assert x.shape[1] == row.columns and out.shape[1] == height
    assert stored.is_contiguous() and stored.shape[1] == row.nbytes
    grid, options = launch_options(x, out, bias, add=add)
    with torch.cuda.device_of(x):
        _coded_linear_kernel[grid](
            x, stored, bias if bias is not None else x, out, num_rows, height, out.stride(0), COLUMNS=row.columns,
            LIST_START=row.list_start, ROOM=row.room, ROW_BYTES=row.nbytes, **options,
        )  # fmt: skip
