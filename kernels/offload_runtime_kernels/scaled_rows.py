"""Rows of small numbers with scales, as quantised safetensors checkpoints have them: FP8, int8, int4, NVFP4.

    w = ((q - z) * s rounded to the scales' dtype), rounded to the dtype of the result
    w = ((q - 7.5) * s + c rounded to the scales' dtype), likewise, where groups have a centre c

q is a number of 8 bits in two's complement (int8), without a sign (uint8) or as E4M3 (FP8: four bits of exponent with
bias 7, three of mantissa, no infinity, 0x7F and 0xFF no number), or of 4 bits without a sign (uint4) or as E2M1 (two
bits of exponent with bias 1, one of mantissa, neither infinity nor NaN). z is a constant,
or is added to an integer that is stored like q beside every scale. q - z and its product with a scale of 16 bits are
exact in fp32 (at most 9 + 11 bits), so that only what the formula names rounds; where scales are fp32, the product
itself does. Centres are those of copies in 4 bits (`low_bit_copy`), which are chosen so that fp32 holds the sum, too.

One scale is for a rectangle of weights: all, a row, a group of columns, or a block; or the columns say themselves
which group they are of (the order of activations).

Numbers are kept in units (`pack_numbers`), so that a lane of a warp loads side by side what it has to hand to the
matrix units: of each 64 bytes of a row every fourth pair of numbers belongs to one of four lanes. Of eight numbers of 4
bits in a word those of even columns come first.

Kernels read numbers as floats of 16 bits without converting them: an integer in the lowest bits of fp16's 1024, from
bit 4 on of fp16's 64, or in the lowest bits of bf16's 128 is added to that, an E4M3 has the bits of an fp16 whose
exponent is 8 too small, and an E2M1 those of one that is 14 too small. Zeros are read likewise, so that differences are
those of the numbers. Where integers of 4 bits have scales of 16, both operations are done in the scales' dtype, on two
weights at a time; elsewhere in fp32.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton
from offload_runtime_kernels.encoded_linear import INTERPRETED
from offload_runtime_kernels.gguf_blocks import TILE, UNITS_BYTES, masked, units_at, words_at

_WORD_BYTES = 4
_DECODED_ROWS = 32  # of a program
_REFERENCE_WEIGHTS = 1 << 18  # decoded at a time: 1 MB of fp32
LARGEST_SCALE = 2.0**100  # which scales are below: kernels multiply them with up to 2^10
_GROUPS = (32, 64, 128)  # columns of a scale, of which several are in a tile
BITS = {"FP8": 8, "int8": 8, "uint8": 8, "uint4": 4, "E2M1": 4}
MIDDLE = 7.5  # of the numbers that have centres
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class ScaledFormat(NamedTuple):
    """How a matrix [M, K] is stored: numbers of a kind of `BITS`, whose `rows` x `columns` share one scale of a dtype;
    `zero` is what is subtracted, beside the stored one with `zeros`; each column of an `ordered` one says its group.
    With `centres`, of uint4 and scales in bf16, each scale has one in place of a zero."""

    number: str
    rows: int
    columns: int
    scale: torch.dtype
    zero: int = 0
    zeros: bool = False
    ordered: bool = False
    centres: bool = False

    @property
    def zero_bits(self) -> int:
        """Bits that lie beside each scale: of its zero, of its centre, or none."""
        return 8 * self.scale.itemsize if self.centres else BITS[self.number] if self.zeros else 0

    @property
    def tile_scales(self) -> int:
        """Scales of a row that lie in a tile, at most."""
        return max(1, TILE // self.columns)

    def file_bytes(self, count: int) -> int:
        """Bytes of so many numbers that follow one another."""
        return -(-count * BITS[self.number] // 8)

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of numbers."""
        return -(-self.file_bytes(columns) // UNITS_BYTES) * UNITS_BYTES

    def scales(self, rows: int, columns: int) -> tuple[int, int]:
        """How many scales a matrix has: down and across."""
        return -(-rows // self.rows), -(-columns // self.columns)

    def zero_bytes(self, count: int) -> int:
        """Bytes of so many zeros or centres that follow one another."""
        return -(-count * self.zero_bits // 8)

    def scale_row_bytes(self, columns: int) -> tuple[int, int]:
        """Bytes from one row of scales to the next, and from one of zeros: of whole tiles and words."""
        count = -(-self.scales(1, columns)[1] // self.tile_scales) * self.tile_scales
        scales, zeros = count * self.scale.itemsize, self.zero_bytes(count)
        return -(-scales // _WORD_BYTES) * _WORD_BYTES, -(-zeros // _WORD_BYTES) * _WORD_BYTES


class ScaledRows(NamedTuple):
    """What is stored of a matrix [M, K], on one device. What lies between rows of scales is zero.

    Attributes:
        numbers: uint8 [M, row_bytes(K)], in units, contiguous.
        scales: [rows, columns] of scales, rows `scale_row_bytes` apart.
        zeros: uint8 [rows of scales, zero_bytes(columns of scales)], rows `scale_row_bytes` apart, the even one in the
            lower half of a byte, or centres in the dtype of the scales; empty without either.
        groups: int32 [K], the group of each column; empty unless it is `ordered`.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor

    def some(self, rows: slice) -> "ScaledRows":
        """Return some rows of a matrix each of whose rows has scales of its own, without copying."""
        return ScaledRows(self.numbers[rows], self.scales[rows], self.zeros[rows], self.groups)


def columns_of_scale(form: ScaledFormat, columns: int) -> int | None:
    """How many columns of a tile have one scale, 0 where a whole row has; None if groups do not divide tiles so, or
    columns say themselves which one they are of."""
    if form.ordered:
        return None
    if form.columns >= columns:
        return 0
    if form.columns in _GROUPS:
        return form.columns
    return TILE if form.columns % TILE == 0 else None


# --- rows by themselves

STEP = 128  # columns of a row that products of experts decode together
WHOLE_ROW = 1 << 30  # columns of a scale that every row has one of, however long it is
_STEP_GROUPS = (16, *_GROUPS)  # columns of a scale, of which several may be in a step
_ROW_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class ScaledRow:
    """How a row lies that has its own scales and zeros behind its numbers, so that it is decoded by itself, as rows of
    experts are. Scales of several rows come again in each: of blocks of 128 x 128 in fp32 that is a 32nd of FP8.

    Attributes:
        number, zero, zeros: As of `ScaledFormat`.
        scale: The dtype of its scales, in words: "float32", "float16" or "bfloat16".
        group: Columns of a step that have one scale, 0 where the whole row has.
        steps: Of as many steps one scale.
        numbers_bytes: Where the scales begin.
        zeros_at: Where the zeros do.
        nbytes: Of a row.
    """

    number: str
    zero: int
    zeros: bool
    scale: str
    group: int
    steps: int
    numbers_bytes: int
    zeros_at: int
    nbytes: int

    @classmethod
    def of(cls, form: ScaledFormat, columns: int) -> "ScaledRow | None":
        """Return that of so many columns; None if groups do not divide steps or have centres, or columns say
        themselves which one they are of."""
        whole = form.columns >= columns
        small = form.columns in _STEP_GROUPS and (form.columns > 16 or BITS[form.number] == 4)
        if form.ordered or form.centres or not (whole or small or form.columns % STEP == 0):
            return None
        numbers_bytes, (scale_bytes, zero_bytes) = form.row_bytes(columns), form.scale_row_bytes(columns)
        end = numbers_bytes + scale_bytes + zero_bytes
        return cls(
            form.number, form.zero, form.zeros, str(form.scale).removeprefix("torch."),
            0 if whole else min(form.columns, STEP), 1 if whole else max(1, form.columns // STEP), numbers_bytes,
            numbers_bytes + scale_bytes, -(-end // _ROW_ALIGNMENT_BYTES) * _ROW_ALIGNMENT_BYTES,
        )  # fmt: skip

    # For kernels.

    @property
    def bits(self) -> int:
        return BITS[self.number]

    @property
    def zero_bits(self) -> int:
        return BITS[self.number] if self.zeros else 0

    @property
    def scale_type(self) -> Any:
        return {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}[self.scale]


def rows_apart(stored: torch.Tensor, form: ScaledFormat, columns: int) -> ScaledRows:
    """Return what rows by themselves hold, uint8 [R, nbytes of a `ScaledRow`] at addresses that four divides, without
    copying: a matrix of a format in which every row has its own scales."""
    row, across = ScaledRow.of(form, columns), form.scales(1, columns)[1]
    assert row is not None and stored.shape[1] == row.nbytes and stored.stride(1) == 1
    scales = stored[:, row.numbers_bytes : row.numbers_bytes + across * form.scale.itemsize].view(form.scale)
    zeros = stored[:, row.zeros_at : row.zeros_at + form.zero_bytes(across)]
    groups = torch.empty(0, dtype=torch.int32, device=stored.device)
    return ScaledRows(stored[:, : row.numbers_bytes], scales, zeros, groups)


# --- units


def _in_lanes(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pairs of numbers of rows in the order of columns, uint8 [R, whole units], as [R, units, lane, pair]."""
    pairs = numbers if bits == 4 else numbers.view(torch.int16)
    return pairs.unflatten(1, (-1, 64 // bits, 4)).transpose(2, 3)


def exchange(words: torch.Tensor, mask: int, shift: int) -> None:
    """Of each word the bits of a mask with those that many above them."""
    differing = (words >> shift).bitwise_xor_(words).bitwise_and_(mask)
    words ^= differing
    words ^= differing.bitwise_left_shift_(shift)


def pack_numbers(numbers: torch.Tensor, form: ScaledFormat, out: torch.Tensor) -> None:
    """Bring rows of numbers into units.

    Args:
        numbers: uint8 [R, file_bytes], contiguous, in the order of columns, the even one in the lower half of a byte.
        form: How the matrix is stored.
        out: uint8 [R, row_bytes], each row contiguous; written. Behind the last column its number comes again, so that
            weights that meet no row of x are not too large for a number either.
    """
    bits, rows = BITS[form.number], max(1, _REFERENCE_WEIGHTS // out.shape[1])
    for some, to in zip(numbers.split(rows), out.split(rows), strict=True):
        if (missing := to.shape[1] - some.shape[1]) > 0:
            last = some[:, -1:]
            some = torch.cat((some, (last if bits == 8 else (last >> 4) * 17).expand(-1, missing)), dim=1)
        in_lanes = _in_lanes(some, bits)
        to.view(in_lanes.dtype).view(in_lanes.shape).copy_(in_lanes)
        if bits == 4:
            words = to.view(torch.int32)
            exchange(words, 0x00F000F0, 4)
            exchange(words, 0x0000FF00, 8)


def unpack_numbers(stored: torch.Tensor, form: ScaledFormat, columns: int) -> torch.Tensor:
    """What `pack_numbers` was given, uint8 [R, file_bytes], of the rows that it made, uint8 [R, row_bytes]."""
    bits, found = BITS[form.number], torch.empty_like(stored)
    if bits == 4:
        words = stored.view(torch.int32).clone()
        exchange(words, 0x0000FF00, 8)
        exchange(words, 0x00F000F0, 4)
        stored = words.view(torch.uint8)
    in_lanes = _in_lanes(found, bits)
    in_lanes.copy_(stored.view(in_lanes.dtype).view(in_lanes.shape))
    return found[:, : form.file_bytes(columns)].contiguous()


# --- the reference


def _numbers_reference(stored: torch.Tensor, count: int, number: str) -> torch.Tensor:
    """fp32 [rows, count] of uint8 [rows, bytes]."""
    if BITS[number] == 4:
        found = torch.stack((stored & 15, stored >> 4), dim=-1).view(len(stored), -1)[:, :count]
        return found.float() if number == "uint4" else torch.tensor(_E2M1, device=stored.device)[found.long()]
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
        w = _numbers_reference(numbers, width, form.number) - (MIDDLE if form.centres else form.zero)
        if form.zeros:
            w -= _numbers_reference(stored.zeros[own], stored.scales.shape[1], form.number)[:, groups]
        w *= stored.scales[own][:, groups].float()
        if form.centres:
            w += stored.zeros[own].view(form.scale)[:, groups].float()
        out[first - start : last - start] = w.to(form.scale).to(out.dtype)


# --- kernels
#
# A tensor [R, 8] has two words of each of the four lanes of a row.


@jit
def _number_bits(words, P: tl.constexpr, NUMBER: tl.constexpr, BF16: tl.constexpr, CENTRED: tl.constexpr):
    """Two numbers of each word, in its halves, as 16 bits float each; those of 4 bits in bf16 where that is asked for,
    beside 64 if centred, where bf16 has halves.

    Of 4 bits those of columns 8 P and 8 P + 1 behind the lane's first; of 8 bits of columns P and P + 8."""
    if NUMBER == "FP8":
        if P == 0:
            words = words << 8
        found = (words & 0x80008000) | ((words & 0x7F007F00) >> 1)
    elif NUMBER == "E2M1":
        words = words >> (4 * P)
        found = ((words & 0x00080008) << 12) | ((words & 0x00070007) << 9)
    elif CENTRED:
        found = masked(words << 1 if P == 0 else words >> (4 * P - 1), 0x001E001E, 0x42804280)
    elif NUMBER == "uint4" and BF16:
        found = masked(words >> (4 * P), 0x000F000F, 0x43004300)
    elif NUMBER == "uint4":
        found = masked(words >> (P // 2 * 8), 0x000F000F << (P % 2 * 4), 0x64006400 - P % 2 * 0x10001000)
    else:
        found = masked(words >> (8 * P), 0x00FF00FF, 0x64806480 if NUMBER == "int8" else 0x64006400)
    return found


@jit
def _number_offset_bits(stored, ZERO: tl.constexpr, P: tl.constexpr, NUMBER: tl.constexpr, BF16: tl.constexpr):
    """What is subtracted from numbers P: what is stored, and `ZERO`, as `_number_bits` has them."""
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
def _as_float(bits, DTYPE: tl.constexpr):
    """The lower bits of words, as many as the dtype has."""
    if DTYPE.primitive_bitwidth == 16:
        bits = bits.to(tl.uint16)
    return bits.to(DTYPE, bitcast=True)


@jit
def _in_columns(parts, BITS: tl.constexpr, ROWS: tl.constexpr):
    """[R, 128] of eight [R, 8, 2]: of each unit of 128 columns what `_number_bits` has, P by P."""
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
def _centred_pairs(numbers, scale, centre):
    """(numbers - 64 - 7.5) * scale + centre in bf16, whose multiply-add rounds once."""
    if INTERPRETED:
        found = ((numbers.to(tl.float32) - 71.5) * scale.to(tl.float32) + centre.to(tl.float32)).to(scale.dtype)
    else:
        found = tl.inline_asm_elementwise(
            "{.reg .b32 q, c; mov.b32 c, 0xBF80BF80; mov.b32 q, 0x428F428F; fma.rn.bf16x2 q, q, c, $1; "
            "fma.rn.bf16x2 $0, q, $2, $3;}", "=r,r,r,r", [numbers, scale, centre], dtype=scale.dtype, is_pure=True,
            pack=2,
        )  # fmt: skip
    return found


@jit
def _scaled_pairs(numbers, offset, scale):
    """(numbers - offset) * scale, [R, 8, 2], in 16 bits, of which two lie in one word."""
    if INTERPRETED:
        found = ((numbers.to(tl.float32) - offset.to(tl.float32)) * scale.to(tl.float32)).to(scale.dtype)
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
def _weights(
    words, scale, zero, P: tl.constexpr, NUMBER: tl.constexpr, ZERO: tl.constexpr, ZERO_BITS: tl.constexpr,
    DTYPE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """[R, 8, 2]: numbers P of words, with scales and stored zeros, or centres, [R, 1 or 8, 1 or 2].

    Unless this has to be exact, zeros may be positive whatever the sign of the scale, scales are below `LARGEST_SCALE`
    and all numbers are some."""
    IN_PAIRS: tl.constexpr = NUMBER == "uint4" and scale.dtype.primitive_bitwidth == 16
    BF16: tl.constexpr = IN_PAIRS and scale.dtype == tl.bfloat16
    FORM: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    CENTRED: tl.constexpr = ZERO_BITS == 16
    bits = _number_bits(words, P, NUMBER, BF16, CENTRED)
    numbers = tl.join(_as_float(bits, FORM), _as_float(bits >> 16, FORM))
    offset = _as_float(_number_offset_bits(zero, ZERO, P, NUMBER, BF16), FORM)
    if CENTRED:
        w = _centred_pairs(numbers, scale, _as_float(zero, FORM))
    elif IN_PAIRS:
        w = _scaled_pairs(numbers, offset, scale)
    else:
        numbers, offset, s = numbers.to(tl.float32), offset.to(tl.float32), scale.to(tl.float32)
        if NUMBER == "FP8" and EXACT:
            w = tl.where(tl.abs(numbers) == 1.875, float("nan"), numbers * 256.0) * s
        elif NUMBER == "FP8":
            w = numbers * (s * 256.0)
        elif NUMBER == "E2M1":
            w = numbers * 16384.0 * s
        elif EXACT or scale.dtype.primitive_bitwidth == 32:
            w = (numbers - offset) * s
        else:  # products of at most 11 + 11 bits, and a difference of 9 + 11
            w = numbers * s - offset * s
        w = w.to(scale.dtype)
    if w.dtype != DTYPE:  # not at once from one of 16 bits to another, for which GPUs have an eighth of the units
        w = w.to(tl.float32).to(DTYPE)
    return w


@jit
def _bits_of(words, number: tl.constexpr, EACH: tl.constexpr):
    """A number of so many bits, and what lies above it."""
    return words[number * EACH // 32] >> (number * EACH % 32)


@jit
def _shared(words, UNIT: tl.constexpr, P: tl.constexpr, EACH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr):
    """What numbers P of each word of a unit share, [R, 1] or [R, 8], out of a tile's words, of `EACH` bits a group."""
    WORD: tl.constexpr = 128 // BITS
    FIRST: tl.constexpr = (2 * WORD * UNIT + (8 * P if BITS == 4 else 0)) // GROUP if GROUP > 0 else 0
    found = _bits_of(words, FIRST, EACH)
    if GROUP > 0 and GROUP <= WORD:
        found = tl.where(tl.arange(0, 8)[None, :] % 2 == 0, found, _bits_of(words, FIRST + WORD // GROUP, EACH))
    return found


@jit
def shared_words_at(
    scales_ptr, zeros_ptr, tile, ZERO_BITS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr = 256, ALONE: tl.constexpr = False,
):  # fmt: skip
    """The words of the scales and zeros of a tile of so many columns."""
    COUNT: tl.constexpr = COLUMNS // GROUP if GROUP > 0 else 1
    scales = words_at(scales_ptr, tile, 0, COUNT * SCALE.primitive_bitwidth, True, 1, ROWS, ALONE)
    zeros = scales
    if ZERO_BITS > 0:
        zeros = words_at(zeros_ptr, tile, 0, COUNT * ZERO_BITS, True, 1, ROWS, ALONE)
    return scales, zeros


@jit
def decoded_half(
    units, shared, HALF: tl.constexpr, NUMBER: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    ZERO_BITS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """[R, 128]: half the weights of a tile, whose units are in registers, and what `shared_words_at` has of it."""
    parts = ()  # type: tuple[object, ...]
    for unit in tl.static_range(HALF * BITS // 2, (HALF + 1) * BITS // 2):
        for p in tl.static_range(16 // BITS):
            scale = _as_float(_shared(shared[0], unit, p, SCALE.primitive_bitwidth, GROUP, BITS), SCALE)
            zero = tl.full([1, 1], 0, tl.uint32)
            if ZERO_BITS > 0:
                zero = _shared(shared[1], unit, p, ZERO_BITS, GROUP, BITS) & ((1 << ZERO_BITS) - 1)
            parts += (
                _weights(units[unit], scale[:, :, None], zero[:, :, None], p, NUMBER, ZERO, ZERO_BITS, DTYPE, EXACT),
            )
    return _in_columns(parts, BITS, ROWS)


@jit
def _gathered_half(
    units, scales_ptr, zeros_ptr, groups_ptr, columns, HALF: tl.constexpr, NUMBER: tl.constexpr, BITS: tl.constexpr,
    ZERO: tl.constexpr, ZERO_BITS: tl.constexpr, ORDERED: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The same, where each column loads its own scale."""
    word, in_pair = tl.arange(0, 8)[None, :, None], tl.arange(0, 2)[None, None, :]
    first = tl.program_id(1) * 256 + word % 2 * (128 // BITS) + word // 2 * 2
    parts = ()  # type: tuple[object, ...]
    for unit in tl.static_range(HALF * BITS // 2, (HALF + 1) * BITS // 2):
        for p in tl.static_range(16 // BITS):
            column = first + unit * (256 // BITS) + (8 * p + in_pair if BITS == 4 else 8 * in_pair + p)
            column = tl.minimum(column, columns - 1)  # what lies behind the last is not stored
            group = tl.load(groups_ptr + column) if ORDERED else column // GROUP
            zero = tl.full([1, 1, 1], 0, tl.uint32)
            if ZERO_BITS > 0:
                zero = tl.load(zeros_ptr + group * BITS // 8).to(tl.uint32) >> (group * BITS % 8).to(tl.uint32)
                zero &= (1 << BITS) - 1
            scale = tl.load(scales_ptr + group)
            parts += (_weights(units[unit], scale, zero, p, NUMBER, ZERO, ZERO_BITS, DTYPE, True),)
    return _in_columns(parts, BITS, ROWS)


@jit(do_not_specialize=("start", "num_rows"))
def _decode_scaled_kernel(
    numbers_ptr, scales_ptr, zeros_ptr, groups_ptr, out_ptr, start, num_rows, columns, row_bytes, scale_bytes,
    zero_bytes, rows_of_scale, tiles_of_scale, NUMBER: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    ZERO_BITS: tl.constexpr, ORDERED: tl.constexpr, GATHERED: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    scale: tl.constexpr = scales_ptr.dtype.element_ty
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    # What lies behind the last row reads that one and stores nothing.
    read = start + tl.minimum(row, num_rows - 1)
    units = units_at(numbers_ptr + read * row_bytes, tl.program_id(1), row_bytes, 32 * BITS, WHOLE, ROWS)
    own = read // rows_of_scale
    scales_ptr = scales_ptr.to(tl.pointer_type(tl.uint8)) + own * scale_bytes
    zeros_ptr += own * zero_bytes
    if GATHERED:
        scales_ptr, zeros_ptr = scales_ptr.to(tl.pointer_type(scale))[:, :, None], zeros_ptr[:, :, None]
        left = _gathered_half(
            units, scales_ptr, zeros_ptr, groups_ptr, columns, 0, NUMBER, BITS, ZERO, ZERO_BITS, ORDERED, GROUP, dtype,
            ROWS,
        )  # fmt: skip
        right = _gathered_half(
            units, scales_ptr, zeros_ptr, groups_ptr, columns, 1, NUMBER, BITS, ZERO, ZERO_BITS, ORDERED, GROUP, dtype,
            ROWS,
        )  # fmt: skip
    else:
        tile = tl.program_id(1) // tiles_of_scale if GROUP > 0 else 0
        shared = shared_words_at(scales_ptr, zeros_ptr, tile, ZERO_BITS, GROUP, scale, ROWS)
        left = decoded_half(units, shared, 0, NUMBER, BITS, ZERO, ZERO_BITS, GROUP, scale, dtype, ROWS, True)
        right = decoded_half(units, shared, 1, NUMBER, BITS, ZERO, ZERO_BITS, GROUP, scale, dtype, ROWS, True)
    w = tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), [ROWS, 256])
    column = tl.program_id(1) * 256 + tl.arange(0, 256)[None, :]
    tl.store(out_ptr + row * columns + column, w, mask=(row < num_rows) & (column < columns))


def decode_scaled_triton(stored: ScaledRows, form: ScaledFormat, start: int, out: torch.Tensor) -> None:
    """Triton version of `decode_scaled`."""
    require_triton("decoding quantised weights")
    height, width = out.shape
    group, (scale_bytes, zero_bytes) = columns_of_scale(form, width), form.scale_row_bytes(width)
    assert not form.centres or (group is not None and form.number == "uint4" and form.scale == torch.bfloat16)
    with torch.cuda.device_of(out):
        _decode_scaled_kernel[(triton.cdiv(height, _DECODED_ROWS), triton.cdiv(width, TILE))](
            stored.numbers, stored.scales, stored.zeros, stored.groups, out, start, height, width,
            stored.numbers.shape[1], scale_bytes, zero_bytes, form.rows, max(1, form.columns // TILE),
            NUMBER=form.number, BITS=BITS[form.number], ZERO=form.zero, ZERO_BITS=form.zero_bits, ORDERED=form.ordered,
            GATHERED=group is None, GROUP=form.columns if group is None else group, WHOLE=width % TILE == 0,
            ROWS=_DECODED_ROWS, num_warps=4,
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
