"""Rows of small numbers with scales, as quantised safetensors checkpoints have them: FP8, int8, int4.

    w = ((q - z) * s rounded to the scales' dtype), rounded to the dtype of the result

q is a number of 8 bits in two's complement (int8), without a sign (uint8) or as E4M3 (FP8: four bits of exponent with
bias 7, three of mantissa, no infinity, 0x7F and 0xFF no number), or of 4 bits without a sign (uint4). z is a constant,
or is added to an integer that is stored like q beside every scale. q - z and its product with a scale of 16 bits are
exact in fp32 (at most 9 + 11 bits), so that only what the formula names rounds; where scales are fp32, the product
itself does.

One scale is for a rectangle of weights: all, a row, a group of columns, or a block; or the columns say themselves
which group they are of (the order of activations).

Numbers are kept in units (`pack_numbers`), so that a lane of a warp loads side by side what it has to hand to the
matrix units: of each 64 bytes of a row every fourth pair of numbers belongs to one of four lanes. Of eight numbers of 4
bits in a word those of even columns come first.

Kernels read numbers as fp16 without converting them: below ten bits of 1024 (or below the upper six of 64) an integer
is added to that, and an E4M3 has the bits of an fp16 whose exponent is 8 too small.
"""

import math
from typing import NamedTuple

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton
from offload_runtime_kernels.encoded_linear import INTERPRETED
from offload_runtime_kernels.gguf_blocks import TILE, units_at

_UNITS_BYTES = 64  # of two units, which the lanes of a row load at once
_WORD_BYTES = 4
_DECODED_ROWS = 16  # of a program
_REFERENCE_WEIGHTS = 1 << 18  # decoded at a time: 1 MB of fp32
LARGEST_SCALE = 2.0**100  # which scales are below: kernels multiply them with up to 2^10
BITS = {"FP8": 8, "int8": 8, "uint8": 8, "uint4": 4}


class ScaledFormat(NamedTuple):
    """How a matrix [M, K] is stored: numbers of a kind of `BITS`, whose `rows` x `columns` share one scale of a dtype;
    `zero` is what is subtracted, beside the stored one with `zeros`; each column of an `ordered` one says its group."""

    number: str
    rows: int
    columns: int
    scale: torch.dtype
    zero: int = 0
    zeros: bool = False
    ordered: bool = False

    @property
    def tile_scales(self) -> int:
        """Scales of a row that lie in a tile, at most."""
        return max(1, TILE // self.columns)

    def file_bytes(self, count: int) -> int:
        """Bytes of so many numbers that follow one another."""
        return -(-count * BITS[self.number] // 8)

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of numbers."""
        return -(-self.file_bytes(columns) // _UNITS_BYTES) * _UNITS_BYTES

    def scales(self, rows: int, columns: int) -> tuple[int, int]:
        """How many scales a matrix has: down and across."""
        return -(-rows // self.rows), -(-columns // self.columns)

    def scale_row_bytes(self, columns: int) -> tuple[int, int]:
        """Bytes from one row of scales to the next, and from one of zeros: of whole tiles and words."""
        count = -(-self.scales(1, columns)[1] // self.tile_scales) * self.tile_scales
        scales, zeros = count * self.scale.itemsize, self.file_bytes(count) if self.zeros else 0
        return -(-scales // _WORD_BYTES) * _WORD_BYTES, -(-zeros // _WORD_BYTES) * _WORD_BYTES


class ScaledRows(NamedTuple):
    """What is stored of a matrix [M, K], on one device. What lies between rows of scales is zero.

    Attributes:
        numbers: uint8 [M, row_bytes(K)], in units, contiguous.
        scales: [rows, columns] of scales, rows `scale_row_bytes` apart.
        zeros: uint8 [rows of scales, file_bytes(columns of scales)], rows `scale_row_bytes` apart, the even one in the
            lower half of a byte; empty without them.
        groups: int32 [K], the group of each column; empty unless it is `ordered`.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor


# --- units


def _in_lanes(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pairs of numbers of rows in the order of columns, uint8 [R, whole units], as [R, units, lane, pair]."""
    pairs = numbers if bits == 4 else numbers.view(torch.int16)
    return pairs.unflatten(1, (-1, 64 // bits, 4)).transpose(2, 3)


def _exchange(words: torch.Tensor, mask: int, shift: int) -> None:
    """Of each word the bits of a mask with those that many above them."""
    differing = (words >> shift).bitwise_xor_(words).bitwise_and_(mask)
    words ^= differing
    words ^= differing.bitwise_left_shift_(shift)


def pack_numbers(numbers: torch.Tensor, form: ScaledFormat, out: torch.Tensor) -> None:
    """Bring rows of numbers into units.

    Args:
        numbers: uint8 [R, file_bytes], contiguous, in the order of columns, the even one in the lower half of a byte.
        form: How the matrix is stored.
        out: uint8 [R, row_bytes], contiguous; written.
    """
    bits, rows = BITS[form.number], max(1, _REFERENCE_WEIGHTS // out.shape[1])
    for some, to in zip(numbers.split(rows), out.split(rows), strict=True):
        if some.shape[1] != to.shape[1]:
            some = torch.nn.functional.pad(some, (0, to.shape[1] - some.shape[1]))
        in_lanes = _in_lanes(some, bits)
        to.view(in_lanes.dtype).view(in_lanes.shape).copy_(in_lanes)
        if bits == 4:
            words = to.view(torch.int32)
            _exchange(words, 0x00F000F0, 4)
            _exchange(words, 0x0000FF00, 8)


def unpack_numbers(stored: torch.Tensor, form: ScaledFormat, columns: int) -> torch.Tensor:
    """What `pack_numbers` was given, uint8 [R, file_bytes], of the rows that it made, uint8 [R, row_bytes]."""
    bits, found = BITS[form.number], torch.empty_like(stored)
    if bits == 4:
        words = stored.view(torch.int32).clone()
        _exchange(words, 0x0000FF00, 8)
        _exchange(words, 0x00F000F0, 4)
        stored = words.view(torch.uint8)
    in_lanes = _in_lanes(found, bits)
    in_lanes.copy_(stored.view(in_lanes.dtype).view(in_lanes.shape))
    return found[:, : form.file_bytes(columns)].contiguous()


# --- the reference


def _numbers_reference(stored: torch.Tensor, count: int, number: str) -> torch.Tensor:
    """fp32 [rows, count] of uint8 [rows, bytes]."""
    if number == "uint4":
        return torch.stack((stored & 15, stored >> 4), dim=-1).view(len(stored), -1)[:, :count].float()
    return stored.view({"FP8": torch.float8_e4m3fn, "int8": torch.int8, "uint8": torch.uint8}[number]).float()


def decode_scaled_reference(stored: ScaledRows, form: ScaledFormat, start: int, out: torch.Tensor) -> None:
    """Plain torch version of `decode_scaled`."""
    height, width = out.shape
    groups = stored.groups if form.ordered else torch.arange(width, device=out.device) // form.columns
    step = max(1, _REFERENCE_WEIGHTS // width)
    for first in range(start, start + height, step):
        last = min(first + step, start + height)
        own = torch.arange(first, last, device=out.device) // form.rows
        numbers = unpack_numbers(stored.numbers[first:last], form, width)
        w = _numbers_reference(numbers, width, form.number) - form.zero
        if form.zeros:
            w -= _numbers_reference(stored.zeros[own], stored.scales.shape[1], form.number)[:, groups]
        w *= stored.scales[own][:, groups].float()
        out[first - start : last - start] = w.to(form.scale).to(out.dtype)


# --- kernels
#
# A tensor [R, 8] has two words of each of the four lanes of a row.


@jit
def _masked(words, MASK: tl.constexpr, FLIPPED: tl.constexpr):
    """What a mask has of words, with bits flipped: one instruction, which compilers make two of for its constants."""
    if INTERPRETED:
        found = (words & MASK) ^ FLIPPED
    else:
        mask, flipped = tl.full([1, 1], MASK, tl.uint32), tl.full([1, 1], FLIPPED, tl.uint32)
        found = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0x6A;", "=r,r,r,r", [words, mask, flipped], dtype=tl.uint32, is_pure=True, pack=1
        )
    return found


@jit
def number_bits(words, P: tl.constexpr, NUMBER: tl.constexpr, BF16: tl.constexpr):
    """Two numbers of each word, in its halves, as 16 bits float each; those of 4 bits in bf16 where that is asked for.

    Of 4 bits those of columns 8 P and 8 P + 1 behind the lane's first; of 8 bits of columns P and P + 8."""
    if NUMBER == "FP8":
        if P == 0:
            words = words << 8
        found = (words & 0x80008000) | ((words & 0x7F007F00) >> 1)
    elif NUMBER == "uint4" and BF16:
        found = _masked(words >> (4 * P), 0x000F000F, 0x43004300)
    elif NUMBER == "uint4":
        found = _masked(words >> (P // 2 * 8), 0x000F000F << (P % 2 * 4), 0x64006400 - P % 2 * 0x10001000)
    else:
        found = _masked(words >> (8 * P), 0x00FF00FF, 0x64806480 if NUMBER == "int8" else 0x64006400)
    return found


@jit
def number_offset_bits(stored, ZERO: tl.constexpr, P: tl.constexpr, NUMBER: tl.constexpr, BF16: tl.constexpr):
    """What is subtracted from numbers P: what is stored, and `ZERO`, as `number_bits` has them."""
    if BF16:
        found = stored + (ZERO + 0x4300)
    elif NUMBER == "uint4" and P % 2 == 1:
        found = (stored << 4) + (ZERO * 16 + 0x5400)
    elif NUMBER == "int8":
        found = (stored ^ 0x80) + (ZERO + 0x6400)
    else:
        found = stored + (ZERO + 0x6400)
    return found


@jit
def as_float(bits, DTYPE: tl.constexpr):
    """The lower bits of words, as many as the dtype has."""
    if DTYPE.primitive_bitwidth == 16:
        bits = bits.to(tl.uint16)
    return bits.to(DTYPE, bitcast=True)


@jit
def in_columns(parts, BITS: tl.constexpr, ROWS: tl.constexpr):
    """[R, 128] of eight [R, 8, 2]: for each unit of 128 columns what `number_bits` has of it, P by P."""
    even = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
    odd = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
    # Rows, lane, word, half of it; then the number of the part, the highest bit first.
    found = tl.reshape(tl.join(even, odd), [ROWS, 4, 2, 2, 2, 2, 2])
    if BITS == 4:
        found = tl.permute(found, (0, 4, 2, 5, 6, 1, 3))
    else:
        found = tl.permute(found, (0, 4, 5, 2, 3, 1, 6))
    return tl.reshape(found, [ROWS, 128])


@jit
def _integer_at(row_ptr, at, NUMBER: tl.constexpr):
    """fp32 integers of rows."""
    if NUMBER == "uint4":
        found = (tl.load(row_ptr + at // 2) >> (at % 2 * 4).to(tl.uint8)) & 15
    elif NUMBER == "int8":
        found = tl.load(row_ptr + at).to(tl.int8, bitcast=True)
    else:
        found = tl.load(row_ptr + at)
    return found.to(tl.float32)


@jit
def _numbers_of(
    units, HALF: tl.constexpr, NUMBER: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """fp32 [R, 128] of a half of a tile, less `ZERO`."""
    parts = ()  # type: tuple[object, ...]
    for unit in tl.static_range(HALF * BITS // 2, (HALF + 1) * BITS // 2):
        for p in tl.static_range(16 // BITS):
            bits = number_bits(units[unit], p, NUMBER, False)
            number = tl.join(as_float(bits, tl.float16), as_float(bits >> 16, tl.float16)).to(tl.float32)
            if NUMBER == "FP8":
                number = tl.where(tl.abs(number) == 1.875, float("nan"), number * 256.0)
            else:
                none = tl.full([1, 1, 1], 0, tl.uint32)
                number -= as_float(number_offset_bits(none, ZERO, p, NUMBER, False), tl.float16).to(tl.float32)
            parts += (number,)
    return in_columns(parts, BITS, ROWS)


@jit(do_not_specialize=("start", "num_rows", "num_groups", "scale_stride", "zero_stride", "rows", "chunks"))
def _decode_scaled_kernel(
    numbers_ptr, scales_ptr, zeros_ptr, groups_ptr, out_ptr, start, num_rows, columns, row_bytes, num_groups,
    scale_stride, zero_stride, rows, chunks, NUMBER: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    ZEROS: tl.constexpr, ORDERED: tl.constexpr, LANES: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # One scale is for `rows` rows of `chunks` times `LANES` columns.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    # What lies behind the last row or column reads that one and stores nothing.
    read = start + tl.minimum(row, num_rows - 1)
    units = units_at(numbers_ptr + read * row_bytes, tl.program_id(1), row_bytes, 32 * BITS, WHOLE, ROWS)
    w = tl.join(_numbers_of(units, 0, NUMBER, BITS, ZERO, ROWS), _numbers_of(units, 1, NUMBER, BITS, ZERO, ROWS))
    w = tl.reshape(tl.permute(w, (0, 2, 1)), [ROWS, 256 // LANES, LANES])
    chunk = tl.program_id(1) * (256 // LANES) + tl.arange(0, 256 // LANES)[None, :, None]
    if ORDERED:
        group = tl.load(groups_ptr + tl.minimum(chunk, columns - 1))
    else:
        group = tl.minimum(chunk // chunks, num_groups - 1)
    own = (read // rows)[:, :, None]
    if ZEROS:
        w -= _integer_at(zeros_ptr + own * zero_stride, group, NUMBER)
    scale = tl.load(scales_ptr + own * scale_stride + group)
    w = tl.reshape((w * scale.to(tl.float32)).to(scale.dtype).to(tl.float32), [ROWS, 256])
    column = tl.program_id(1) * 256 + tl.arange(0, 256)[None, :]
    written = (row < num_rows) & (column < columns)
    tl.store(out_ptr + row * columns + column, w.to(out_ptr.dtype.element_ty), mask=written)


def decode_scaled_triton(stored: ScaledRows, form: ScaledFormat, start: int, out: torch.Tensor) -> None:
    """Triton version of `decode_scaled`."""
    require_triton("decoding quantised weights")
    height, width = out.shape
    together = min(form.columns, -(-width // TILE) * TILE)
    lanes = 1 if form.ordered else math.gcd(together, TILE)
    with torch.cuda.device_of(out):
        _decode_scaled_kernel[(triton.cdiv(height, _DECODED_ROWS), triton.cdiv(width, TILE))](
            stored.numbers, stored.scales, stored.zeros, stored.groups, out, start, height, width,
            stored.numbers.shape[1], stored.scales.shape[1], stored.scales.stride(0), stored.zeros.stride(0), form.rows,
            together // lanes, NUMBER=form.number, BITS=BITS[form.number], ZERO=form.zero, ZEROS=form.zeros,
            ORDERED=form.ordered, LANES=lanes, WHOLE=width % TILE == 0, ROWS=_DECODED_ROWS, num_warps=4,
        )  # fmt: skip


def decode_scaled(stored: ScaledRows, form: ScaledFormat, start: int, out: torch.Tensor) -> None:
    """Decode rows of a matrix, enqueued on the current stream of the device.

    Args:
        stored: The whole matrix.
        form: How it is stored.
        start: The first row that is decoded.
        out: [rows, K] of any float dtype, contiguous; every element is written.
    """
    height, width = out.shape
    assert out.is_contiguous() and 0 <= start <= start + height <= len(stored.numbers)
    assert stored.numbers.shape[1] == form.row_bytes(width) and stored.scales.dtype == form.scale
    (decode_scaled_triton if out.is_cuda else decode_scaled_reference)(stored, form, start, out)
