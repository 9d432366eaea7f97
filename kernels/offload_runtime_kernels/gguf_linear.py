"""Products of a few rows with a matrix of GGUF blocks, which is decoded in registers: see `encoded_linear`."""

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
from offload_runtime_kernels.gguf_blocks import TILE, BlockFormat, decode_half, load_tile


@jit
def _sums(
    x_ptr, stored_ptr, first_row, num_rows, height, columns, blocks, row_bytes, FORM: tl.constexpr, WHOLE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, W_FIRST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The products with `M` of so many rows, from the first one on."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    parts: tl.constexpr = 2 if W_FIRST else 1
    rows: tl.constexpr = M // parts
    row_ptrs = row_starts(stored_ptr, first_row, row_bytes, 1, height, M, W_FIRST)
    sums = no_sums(M, N, W_FIRST)
    for tile in tl.range(0, tl.cdiv(columns, 256), num_stages=STAGES):
        planes = ()  # type: tuple[object, ...]
        for part in tl.static_range(parts):
            planes += (load_tile(row_ptrs[part], tile, blocks, FORM, WHOLE, rows),)
        for half in tl.static_range(2):
            x = rows_of_x(x_ptr, (2 * tile + half) * 128, num_rows, columns, WHOLE, N, W_FIRST)
            weights = ()  # type: tuple[object, ...]
            for part in tl.static_range(parts):
                weights += (decode_half(planes[part], half, FORM, rows, dtype, False),)
            sums = add_products(sums, x, weights, M, W_FIRST)
    return sums


@jit(do_not_specialize=("num_rows", "height", "height_behind", "stride", "blocks", "blocks_behind"))
def _gguf_linear_kernel(
    x_ptr, stored_ptr, behind_ptr, bias_ptr, out_ptr, num_rows, height, height_behind, stride, columns, blocks,
    blocks_behind, row_bytes, row_bytes_behind, FORM: tl.constexpr, BEHIND: tl.constexpr, WHOLE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, W_FIRST: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """With `BEHIND` there are rows in another format behind the others, which programs of their own multiply."""
    if OVERLAP:
        gdc_wait()
    row = tl.program_id(0) * M
    first, end = row, height
    if BEHIND is None:
        sums = _sums(
            x_ptr, stored_ptr, row, num_rows, height, columns, blocks, row_bytes, FORM, WHOLE, M, N, W_FIRST, STAGES
        )
    else:
        programs = tl.cdiv(height, M)
        if tl.program_id(0) < programs:
            sums = _sums(
                x_ptr, stored_ptr, row, num_rows, height, columns, blocks, row_bytes, FORM, WHOLE, M, N, W_FIRST, STAGES
            )
        else:
            row -= programs * M
            first, end = height + row, height + height_behind
            sums = _sums(
                x_ptr, behind_ptr, row, num_rows, height_behind, columns, blocks_behind, row_bytes_behind, BEHIND,
                WHOLE, M, N, W_FIRST, STAGES,
            )  # fmt: skip
    store_product(
        sums, bias_ptr, out_ptr, first, num_rows, end, stride, x_ptr.dtype.element_ty, M, N, W_FIRST, HAS_BIAS,
        HAS_RESIDUAL, OVERLAP,
    )  # fmt: skip


def gguf_linear_triton(
    x: torch.Tensor, stored: torch.Tensor, form: BlockFormat, out: torch.Tensor, *,
    behind: tuple[torch.Tensor, BlockFormat] | None = None, bias: torch.Tensor | None = None, add: bool = False,
    tile: EncodedTile | None = None,
) -> None:  # fmt: skip
    """Multiply rows with a matrix, into `out` or, with `add`, added to it; enqueued on the current stream.

    Args:
        x: [N, K], contiguous, N at most `MOST_ROWS`, of 16 bits an element (32 in the interpreter).
        stored: uint8 [M, row_bytes], rows in planes, contiguous, at an address that 16 divides.
        form: How each block is stored: one of `gguf_blocks.FORMATS`.
        out: [N, M] in the dtype of x; its rows may be part of longer ones.
        behind: Further rows of the matrix, in another format; M are all of them.
        bias: [M] or None, contiguous.
        add: Whether the product is added to what `out` has.
        tile: Overrides how the product is cut.
    """
    require_triton("a product with GGUF blocks")
    num_rows, k = x.shape
    rest, form_behind = behind or (stored[:0], form)
    height, height_behind = len(stored), len(rest)
    assert stored.is_contiguous() and stored.shape[1] == form.row_bytes(k) and out.shape[1] == height + height_behind
    assert rest.is_contiguous() and rest.shape[1] == form_behind.row_bytes(k)
    _, options = launch_options(x, out, bias, add=add, tile=tile)
    programs = sum(-(-rows // options["M"]) for rows in (height, height_behind))
    with torch.cuda.device_of(x):
        _gguf_linear_kernel[(programs,)](
            x, stored, rest, bias if bias is not None else x, out, num_rows, height, height_behind, out.stride(0), k,
            form.num_blocks(k), form_behind.num_blocks(k), stored.shape[1], rest.shape[1], FORM=form,
            BEHIND=None if behind is None else form_behind, WHOLE=k % TILE == 0, **options,
        )  # fmt: skip
