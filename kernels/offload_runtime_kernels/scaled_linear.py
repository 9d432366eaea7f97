"""Products of a few rows with a matrix of small numbers with scales, decoded in registers: see `encoded_linear`.

Numbers and offsets are read in `scaled_rows`' way, where their differences are exact. Two at a time are subtracted and
multiplied in the dtype of the scales, where that has 16 bits and holds numbers as they lie there; others in fp32.
"""

import torch

from offload_runtime_kernels._jit import gdc_launch_dependents, gdc_wait, jit, require_triton, tl
from offload_runtime_kernels.encoded_linear import (
    INTERPRETED,
    columns_at,
    half_rows,
    launch_options,
    operand,
    store_product,
)
from offload_runtime_kernels.gguf_blocks import TILE, units_at, words_at
from offload_runtime_kernels.scaled_rows import (
    BITS,
    ScaledFormat,
    ScaledRows,
    as_float,
    in_columns,
    number_bits,
    number_offset_bits,
)

_GROUPS = (32, 64, 128)  # columns of a scale, of which several are in a tile


def columns_of_scale(form: ScaledFormat, columns: int) -> int | None:
    """How many columns of a tile have one scale, 0 where a whole row has; None if such a matrix is not multiplied as it
    is stored."""
    if form.ordered:
        return None
    if form.columns >= columns:
        return 0
    if form.columns in _GROUPS:
        return form.columns
    return TILE if form.columns % TILE == 0 else None


@jit
def _bits_of(words, number: tl.constexpr, EACH: tl.constexpr):
    """A number of so many bits, and what lies above it."""
    return words[number * EACH // 32] >> (number * EACH % 32)


@jit
def _shared(words, UNIT: tl.constexpr, EACH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr):
    """What columns of each word of a unit share, [R, 1] or [R, 8], out of a tile's words, of `EACH` bits a group."""
    WORD: tl.constexpr = 128 // BITS
    FIRST: tl.constexpr = 2 * WORD * UNIT // GROUP if GROUP > 0 else 0
    found = _bits_of(words, FIRST, EACH)
    if GROUP == WORD:
        found = tl.where(tl.arange(0, 8)[None, :] % 2 == 0, found, _bits_of(words, FIRST + 1, EACH))
    return found


@jit
def _scaled_pairs(numbers, offset, scale):
    """(numbers - offset) * scale in 16 bits, two at a time; [R, 8, 2] of the numbers' and [R, 1 or 8, 1]."""
    if INTERPRETED:
        found = (numbers - offset) * scale
    elif scale.dtype == tl.float16:
        found = tl.inline_asm_elementwise(
            "{.reg .b32 q; sub.rn.f16x2 q, $1, $2; mul.rn.f16x2 $0, q, $3;}", "=r,r,r,r", [numbers, offset, scale],
            dtype=scale.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    else:  # by multiply-add, as GPUs before 9.0 have no more in bf16
        found = tl.inline_asm_elementwise(
            "{.reg .b32 q, c; mov.b32 c, 0xBF80BF80; fma.rn.bf16x2 q, $2, c, $1; mov.b32 c, 0x80008000; "
            "fma.rn.bf16x2 $0, q, $3, c;}", "=r,r,r,r", [numbers, offset, scale], dtype=scale.dtype, is_pure=True,
            pack=2,
        )  # fmt: skip
    return found


@jit
def _weights(words, scale, zero, P: tl.constexpr, NUMBER: tl.constexpr, ZERO: tl.constexpr, DTYPE: tl.constexpr):
    """[R, 8, 2]: numbers P of words, with scales and stored zeros [R, 1 or 8]."""
    IN_PAIRS: tl.constexpr = NUMBER == "uint4" and scale.dtype.primitive_bitwidth == 16
    BF16: tl.constexpr = IN_PAIRS and scale.dtype == tl.bfloat16
    FORM: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    bits, offset_bits = number_bits(words, P, NUMBER, BF16), number_offset_bits(zero, ZERO, P, NUMBER, BF16)
    numbers, offset = tl.join(as_float(bits, FORM), as_float(bits >> 16, FORM)), as_float(offset_bits, FORM)[:, :, None]
    if IN_PAIRS:
        w = _scaled_pairs(numbers, offset, scale[:, :, None])
    else:
        numbers, offset, s = numbers.to(tl.float32), offset.to(tl.float32), scale.to(tl.float32)[:, :, None]
        if NUMBER == "FP8":
            w = numbers * (s * 256.0)
        elif scale.dtype.primitive_bitwidth == 32:
            w = (numbers - offset) * s
        else:  # exact: products of at most 11 + 11 bits, and a difference of 9 + 11
            w = numbers * s - offset * s
        w = w.to(scale.dtype)
    return w.to(DTYPE)


@jit
def _decoded_half(
    planes, HALF: tl.constexpr, NUMBER: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, ZEROS: tl.constexpr,
    GROUP: tl.constexpr, SCALE: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """[R, 128] of a tile: of units, and the words of scales and zeros."""
    units, scales, zeros = planes
    parts = ()  # type: tuple[object, ...]
    for unit in tl.static_range(HALF * BITS // 2, (HALF + 1) * BITS // 2):
        scale = as_float(_shared(scales, unit, SCALE.primitive_bitwidth, GROUP, BITS), SCALE)
        zero = tl.full([1, 1], 0, tl.uint32)
        if ZEROS:
            zero = _shared(zeros, unit, BITS, GROUP, BITS) & ((1 << BITS) - 1)
        for p in tl.static_range(16 // BITS):
            parts += (_weights(units[unit], scale, zero, p, NUMBER, ZERO, DTYPE),)
    return in_columns(parts, BITS, ROWS)


@jit
def _shared_words_at(
    scales_ptr, zeros_ptr, tile, BITS: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The words of a tile's scales and zeros."""
    COUNT: tl.constexpr = 256 // GROUP if GROUP > 0 else 1
    scales = words_at(scales_ptr, tile, 0, COUNT * SCALE.primitive_bitwidth, True, ROWS)
    zeros = scales
    if ZEROS:
        zeros = words_at(zeros_ptr, tile, 0, COUNT * BITS, True, ROWS)
    return scales, zeros


@jit(do_not_specialize=("num_rows", "height", "stride"))
def _scaled_linear_kernel(
    x_ptr, numbers_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, num_rows, height, stride, columns, row_bytes,
    scale_bytes, zero_bytes, rows_of_scale, tiles_of_scale, NUMBER: tl.constexpr, BITS: tl.constexpr,
    ZERO: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    scale: tl.constexpr = scales_ptr.dtype.element_ty
    rows: tl.constexpr = BLOCK_M // 2
    near, far = half_rows(BLOCK_M, height)
    near_ptr, far_ptr = numbers_ptr + near.to(tl.int64) * row_bytes, numbers_ptr + far.to(tl.int64) * row_bytes
    near_own, far_own = (near // rows_of_scale).to(tl.int64), (far // rows_of_scale).to(tl.int64)
    scales_ptr = scales_ptr.to(tl.pointer_type(tl.uint8))
    near_scales_ptr, far_scales_ptr = scales_ptr + near_own * scale_bytes, scales_ptr + far_own * scale_bytes
    near_zeros_ptr, far_zeros_ptr = zeros_ptr + near_own * zero_bytes, zeros_ptr + far_own * zero_bytes
    near_first = _shared_words_at(near_scales_ptr, near_zeros_ptr, 0, BITS, ZEROS, GROUP, scale, rows)
    far_first = _shared_words_at(far_scales_ptr, far_zeros_ptr, 0, BITS, ZEROS, GROUP, scale, rows)
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for tile in tl.range(0, tl.cdiv(columns, 256), num_stages=STAGES):
        near_units = units_at(near_ptr, tile, row_bytes, 32 * BITS, WHOLE, rows)
        far_units = units_at(far_ptr, tile, row_bytes, 32 * BITS, WHOLE, rows)
        if GROUP == 0:
            near_shared, far_shared = near_first, far_first  # one scale a row
        else:
            own = tile // tiles_of_scale
            near_shared = _shared_words_at(near_scales_ptr, near_zeros_ptr, own, BITS, ZEROS, GROUP, scale, rows)
            far_shared = _shared_words_at(far_scales_ptr, far_zeros_ptr, own, BITS, ZEROS, GROUP, scale, rows)
        near_planes = (near_units, near_shared[0], near_shared[1])
        far_planes = (far_units, far_shared[0], far_shared[1])
        for half in tl.static_range(2):
            x = columns_at(x_ptr, (2 * tile + half) * 128, num_rows, columns, WHOLE, BLOCK_N)
            near_w = _decoded_half(near_planes, half, NUMBER, BITS, ZERO, ZEROS, GROUP, scale, dtype, rows)
            far_w = _decoded_half(far_planes, half, NUMBER, BITS, ZERO, ZEROS, GROUP, scale, dtype, rows)
            sums = tl.dot(operand(near_w, far_w, BLOCK_M), x, sums, input_precision="ieee")
    if OVERLAP:
        gdc_launch_dependents()
    store_product(
        sums, bias_ptr, out_ptr, num_rows, height, stride, dtype, BLOCK_M, BLOCK_N, HAS_BIAS, HAS_RESIDUAL
    )  # fmt: skip


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
