"""Routed experts of many rows, decoded a few at a time into memory, with the bits of `experts_triton`.

A kernel that decodes on the way does so again for every tile of rows, and what it repeats hardly fits the cache of
instructions: of a prompt's rows it reaches 44 % of what multiply-adds in fp32 allow, with elements 76 % (8192 rows, an
H200). So a group of experts is decoded, rounded to the run's dtype, and multiplied as elements by the same kernel. Its
chains of multiply-adds do not depend on what a weight was decoded from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton
from offload_runtime_kernels.experts_triton import Routes
from offload_runtime_kernels.gguf_blocks import DTYPE_KINDS, FORMATS, KIND_DTYPES, decode_half, load_tile, units_at
from offload_runtime_kernels.scaled_rows import STEP, ScaledFormat, ScaledRow, decoded_half, shared_words_at

if TYPE_CHECKING:
    from offload_runtime_kernels.experts import ExpertShape, StoredMatrices

# It pays to decode experts first of which a pass has more rows on average.
DECODED_ROWS = 64
_SCRATCH_BYTES = 256 << 20
_ROWS_TOGETHER = 32


def decoding_bytes(shape: ExpertShape, tokens: int, num_chosen: int, element_bytes: int) -> int:
    """Return the bytes of memory in which passes of up to so many tokens decode experts of a shape, to elements of so
    many bytes; 0 where they never do, and of experts that are too large."""
    one = 2 * shape.inner * shape.hidden * element_bytes
    if one > _SCRATCH_BYTES or tokens * num_chosen <= DECODED_ROWS * shape.num_experts:
        return 0
    return min(shape.num_experts, _SCRATCH_BYTES // one) * one


@jit(do_not_specialize=("first",))
def _decode_kernel(
    pool_ptr, buffers_ptr, starts_ptr, out_ptr, first, buffer_stride, HEIGHT: tl.constexpr, K: tl.constexpr,
    HAS_BUFFERS: tl.constexpr, FORM: tl.constexpr, ROW: tl.constexpr, BLOCKS: tl.constexpr, ROW_BYTES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Decode some rows and columns of the matrix of one of the experts from `first` on, if a row has chosen it."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    step, expert = tl.program_id(1), first + tl.program_id(2)
    buffer = expert
    if HAS_BUFFERS:
        buffer = tl.load(buffers_ptr + expert)
    if (buffer >= 0) & (tl.load(starts_ptr + expert) < tl.load(starts_ptr + expert + 1)):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
        column = step * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        # What lies behind the last row reads that row and stores nothing.
        w_ptrs = pool_ptr + buffer.to(tl.int64) * buffer_stride + tl.minimum(row, HEIGHT - 1).to(tl.int64) * ROW_BYTES
        if ROW is not None:
            number: tl.constexpr = ROW.number
            scale: tl.constexpr = ROW.scale_type
            units = units_at(w_ptrs, step, ROW.numbers_bytes, 16 * ROW.bits, K % COLUMNS == 0, ROWS)
            at = step // ROW.steps if ROW.group > 0 else 0
            scale_ptrs, zero_ptrs = w_ptrs + ROW.numbers_bytes, w_ptrs + ROW.zeros_at
            shared = shared_words_at(scale_ptrs, zero_ptrs, at, ROW.zero_bits, ROW.group, scale, ROWS, COLUMNS)
            w = decoded_half(
                units, shared, 0, number, ROW.bits, ROW.zero, ROW.zero_bits, ROW.group, scale, dtype, ROWS, True
            )  # fmt: skip
        else:
            planes = load_tile(w_ptrs, step, BLOCKS, FORM, K % COLUMNS == 0, ROWS)
            w = tl.join(
                decode_half(planes, 0, FORM, ROWS, dtype, True), decode_half(planes, 1, FORM, ROWS, dtype, True)
            )
            w = tl.reshape(tl.permute(w, (0, 7, 1, 2, 3, 4, 5, 6)), [ROWS, COLUMNS])
        out_ptrs = out_ptr + (tl.program_id(2) * HEIGHT + row).to(tl.int64) * K + column
        tl.store(out_ptrs, w, mask=(row < HEIGHT) & (column < K))


def decode_experts(
    matrices: StoredMatrices, buffers: torch.Tensor | None, starts: torch.Tensor, first: int, out: torch.Tensor
) -> None:
    """Decode the matrices of experts of consecutive numbers, those that rows have chosen, which is known on the device.

    Args:
        matrices: Of all experts, blocks or numbers with scales.
        buffers: int32 [E], as of `expert_rows`.
        starts: int32 [E + 1], of each expert's rows, as of `Routes`.
        first: The number of the first expert.
        out: [experts, rows, K], contiguous, in the dtype of the run; those of experts without rows stay as they are.
    """
    num_experts, height, columns = out.shape
    how = matrices.encoding
    row, form = (ScaledRow.of(how, columns), None) if isinstance(how, ScaledFormat) else (None, FORMATS[how])
    together = STEP if row else 256
    grid = (triton.cdiv(height, _ROWS_TOGETHER), triton.cdiv(columns, together), num_experts)
    _decode_kernel[grid](
        matrices.data, starts if buffers is None else buffers, starts, out, first, matrices.data.stride(0),
        HEIGHT=height, K=columns, HAS_BUFFERS=buffers is not None, FORM=form, ROW=row,
        BLOCKS=form and form.num_blocks(columns), ROW_BYTES=matrices.row_bytes, ROWS=_ROWS_TOGETHER, COLUMNS=together,
        num_warps=4,
    )  # fmt: skip


def expert_rows_decoded(
    x: torch.Tensor, choices: torch.Tensor, gate_up: StoredMatrices, down: StoredMatrices, shape: ExpertShape, *,
    buffers: torch.Tensor | None, gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, out: torch.Tensor,
    scratch: torch.Tensor,
) -> None:  # fmt: skip
    """Version of `expert_rows` for many rows, with memory of `decoding_bytes`, uint8, at an address that 16 divides."""
    require_triton("experts")
    with torch.cuda.device_of(x):
        routes, h = Routes.of(choices, shape.num_experts, elements=True), x.new_empty(choices.numel(), shape.inner)
        _product(routes, x, gate_up, buffers, gate_up_bias, h, scratch, gated=shape)
        _product(routes, h, down, buffers, down_bias, out, scratch)


def _product(
    routes: Routes, x: torch.Tensor, matrices: StoredMatrices, buffers: torch.Tensor | None,
    bias: torch.Tensor | None, out: torch.Tensor, scratch: torch.Tensor, gated: ExpertShape | None = None,
) -> None:  # fmt: skip
    """`Routes.product`, a group of experts after the other. What is stored as elements is multiplied as it is."""
    if matrices.encoding in KIND_DTYPES:
        routes.product(x, matrices, buffers, bias, out, gated=gated)
        return
    size = matrices.rows * matrices.columns * x.itemsize
    most = scratch.nbytes // size
    assert most > 0, "there is room for an expert"
    for first in range(0, routes.num_experts, most):
        count = min(most, routes.num_experts - first)
        decoded = scratch[: count * size].view(x.dtype).view(count, matrices.rows, matrices.columns)
        decode_experts(matrices, buffers, routes.starts, first, decoded)
        elements = replace(matrices, data=decoded.flatten(1).view(torch.uint8), encoding=DTYPE_KINDS[x.dtype])
        routes.product(x, elements, buffers, bias, out, gated=gated, first=first)
