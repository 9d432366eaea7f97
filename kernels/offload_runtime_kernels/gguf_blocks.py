"""Blocks of GGUF files: weights of 2 to 8 bits with scales, decoded by the formulas of llama.cpp's formats.

    w = (d * scale) * q - dmin * minimum;    Q4_1, Q5_1: w = d * q + m;    without minima: w = (d * scale) * q or d * q

in fp32, rounded once to the dtype of the result. d, dmin and m are fp16 and of a whole block; scale and minimum are
integers of 4 to 8 bits, one for each group of weights; q is an integer of 2 to 8 bits, or a number of a code book. Of
MXFP4 q is a number of E2M1 and d a power of two in one byte, E8M0: 0 is 2^-127, and 255, which stands for no number, is
2^128; its negative zero is 0, as llama.cpp has it. Only the sum rounds: fp32 holds every product exactly (at most
11 + 7 + 5 significant bits), so that a fused multiply-add has the same bits.

A row is kept in planes (`pack_rows`): the same field of all of its blocks, then the next field, so that words can be
loaded where blocks of a file lie at even addresses. In the planes of q, of each 32 bytes ("a unit") every fourth pair
belongs to one of four lanes, whose eight bytes lie side by side, those of two units together where a tile has so many:
what a lane of a warp decodes is then what it has to hand to the matrix units, and no weight moves between lanes. A
table says where the integers of each format lie, and both the reference and the kernels go by it.

Kernels read integers as fp16 where they lie: of eleven bits that are not shifted down, the value is 2^-24 times them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from offload_runtime_kernels._jit import constant, jit, require_triton, tl, triton
from offload_runtime_kernels.encoded_linear import INTERPRETED

TILE = 256  # weights of a row that are decoded together
UNITS_BYTES = 64  # of two units, which the lanes of a row load at once
_ROW_ALIGNMENT_BYTES = 16
_DECODED_ROWS = 32  # of a program
_REFERENCE_WEIGHTS = 1 << 18  # decoded at a time: 1 MB of fp32
# What elements in a dtype are called in files.
DTYPE_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
KIND_DTYPES = {kind: dtype for dtype, kind in DTYPE_KINDS.items()}
_CODE_BOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the numbers
# Its numbers and 128, four in a word.
_CODE_0, _CODE_4, _CODE_8, _CODE_12 = (
    tl.constexpr(sum(code + 128 << 8 * i for i, code in enumerate(_CODE_BOOK[first : first + 4])))
    for first in range(0, 16, 4)
)


class Bits(NamedTuple):
    """Where integers x = 0, 1, ... of a block lie: the `bits` bits from `first + bits * (x // span % shifts)` on of
    byte `at + x // (span * sharing) * stride + x % span` of a field."""

    field: int
    at: int
    bits: int
    span: int
    sharing: int  # spans that lie in the same bytes
    shifts: int
    stride: int
    first: int


class Integers(NamedTuple):
    """Integers `((low | high << low.bits) ^ flip) - offset`."""

    low: Bits
    high: Bits | None = None
    offset: int = 0
    flip: int = 0


class Half(NamedTuple):
    """Where the fp16 number of a block lies."""

    field: int
    at: int


@dataclass(frozen=True)
class BlockFormat:
    """How a block of so many `weights` lies in `nbytes`: `group` weights have one scale; `m` is what is added or, with
    `minimum`, what scales that; with `e2m1` d is a byte.

    `fields` are pieces of a block of the file, (start, bytes), in the order of a row's planes. The first has q, or its
    lower bits; the second the upper ones where there are some. `packed` scales and minima are those of Q4_K.
    """

    weights: int
    nbytes: int
    group: int
    fields: tuple[tuple[int, int], ...]
    q: Integers
    d: Half
    m: Half | None = None
    scale: Integers | None = None
    minimum: Integers | None = None
    packed: bool = False
    coded: bool = False
    e2m1: bool = False

    @property
    def has_upper_units(self) -> bool:
        """Whether the second plane has units too."""
        return self.q.high is not None and self.q.high.span > 1

    @property
    def file_halves(self) -> tuple[int, ...]:
        """Where d, and m where there is one, begin in a block of a file, if they are fp16."""
        return (
            ()
            if self.e2m1
            else tuple(self.fields[half.field][0] + half.at for half in (self.d, self.m) if half is not None)
        )

    def file_bytes(self, columns: int) -> int:
        """Bytes of a row in a file."""
        return columns // self.weights * self.nbytes

    def num_blocks(self, columns: int) -> int:
        """Of a row in planes: as many as whole units take."""
        together = max(1, UNITS_BYTES // self.fields[0][1])
        return -(-columns // (self.weights * together)) * together

    def row_bytes(self, columns: int) -> int:
        """Of a row in planes."""
        return -(-self.num_blocks(columns) * self.nbytes // _ROW_ALIGNMENT_BYTES) * _ROW_ALIGNMENT_BYTES

    # For kernels, which take no tuples of tuples: bytes of the fields, of the one that d lies in, words of the scales'.

    @property
    def bytes_0(self) -> int:
        return self.fields[0][1]

    @property
    def bytes_1(self) -> int:
        return self.fields[1][1]

    @property
    def bytes_2(self) -> int:
        return self.fields[2][1] if len(self.fields) > 2 else 0

    @property
    def bytes_3(self) -> int:
        return self.fields[3][1] if len(self.fields) > 3 else 0

    @property
    def words_1(self) -> int:
        """Of the second plane, what belongs to two units of the first."""
        return max(1, self.bytes_1 * UNITS_BYTES // (4 * self.bytes_0))

    @property
    def words_2(self) -> int:
        return max(1, self.bytes_2 * UNITS_BYTES // (4 * self.bytes_0))

    @property
    def d_bytes(self) -> int:
        return self.fields[self.d.field][1]

    @property
    def scale_words(self) -> int:
        assert self.scale is not None
        return self.fields[self.scale.low.field][1] // 4


def _bits(
    field: int, at: int, bits: int, span: int, sharing: int = 0, shifts: int = 0, stride: int = 0, first: int = 0
) -> Bits:
    """By default every byte is full of integers that are `span` apart."""
    sharing = sharing or 8 // bits
    return Bits(field, at, bits, span, sharing, shifts or sharing, stride or span, first)


def _packed(field: int) -> dict[str, Any]:
    """Six bits each of eight scales and eight minima, in bytes 4 to 15 of a field."""
    return {
        "packed": True,
        "scale": Integers(_bits(field, 4, 4, 4, sharing=1, stride=8), _bits(field, 4, 2, 4, sharing=2, first=4)),
        "minimum": Integers(_bits(field, 8, 4, 4, sharing=1, shifts=2), _bits(field, 8, 2, 4, sharing=2, first=4)),
    }


_BYTES = 32  # of integers of eight bits, how many are in a row does not matter

FORMATS = {
    "Q4_0": BlockFormat(32, 18, 32, ((2, 16), (0, 2)), Integers(_bits(0, 0, 4, 16), offset=8), d=Half(1, 0)),
    "Q4_1": BlockFormat(32, 20, 32, ((4, 16), (0, 4)), Integers(_bits(0, 0, 4, 16)), d=Half(1, 0), m=Half(1, 2)),
    "Q5_0": BlockFormat(
        32, 22, 32, ((6, 16), (2, 4), (0, 2)), Integers(_bits(0, 0, 4, 16), _bits(1, 0, 1, 1), offset=16), d=Half(2, 0)
    ),
    "Q5_1": BlockFormat(
        32, 24, 32, ((8, 16), (4, 4), (0, 4)), Integers(_bits(0, 0, 4, 16), _bits(1, 0, 1, 1)), d=Half(2, 0),
        m=Half(2, 2),
    ),
    "Q8_0": BlockFormat(
        32, 34, 32, ((2, 32), (0, 2)), Integers(_bits(0, 0, 8, _BYTES), offset=128, flip=128), d=Half(1, 0)
    ),
    "Q2_K": BlockFormat(
        256, 84, 16, ((16, 64), (0, 16), (80, 4)), Integers(_bits(0, 0, 2, 32)), d=Half(2, 0), m=Half(2, 2),
        scale=Integers(_bits(1, 0, 4, 1, sharing=1)), minimum=Integers(_bits(1, 0, 4, 1, sharing=1, first=4)),
    ),
    "Q3_K": BlockFormat(
        256, 110, 16, ((32, 64), (0, 32), (96, 12), (108, 2)),
        Integers(_bits(0, 0, 2, 32), _bits(1, 0, 1, 32), offset=4), d=Half(3, 0),
        scale=Integers(_bits(2, 0, 4, 8), _bits(2, 8, 2, 4), offset=32),
    ),
    "Q4_K": BlockFormat(
        256, 144, 32, ((16, 128), (0, 16)), Integers(_bits(0, 0, 4, 32)), d=Half(1, 0), m=Half(1, 2), **_packed(1),
    ),
    "Q5_K": BlockFormat(
        256, 176, 32, ((48, 128), (16, 32), (0, 16)), Integers(_bits(0, 0, 4, 32), _bits(1, 0, 1, 32)), d=Half(2, 0),
        m=Half(2, 2), **_packed(2),
    ),
    "Q6_K": BlockFormat(
        256, 210, 16, ((0, 128), (128, 64), (192, 16), (208, 2)),
        Integers(_bits(0, 0, 4, 64), _bits(1, 0, 2, 32), offset=32), d=Half(3, 0),
        scale=Integers(_bits(2, 0, 8, _BYTES), offset=128, flip=128),
    ),
    "TQ2_0": BlockFormat(256, 66, 256, ((0, 64), (64, 2)), Integers(_bits(0, 0, 2, 32), offset=1), d=Half(1, 0)),
    "IQ4_NL": BlockFormat(32, 18, 32, ((2, 16), (0, 2)), Integers(_bits(0, 0, 4, 16)), d=Half(1, 0), coded=True),
    "IQ4_XS": BlockFormat(
        256, 136, 32, ((8, 128), (0, 8)), Integers(_bits(0, 0, 4, 16)), d=Half(1, 0),
        scale=Integers(_bits(1, 4, 4, 1), _bits(1, 2, 2, 1), offset=32), coded=True,
    ),
    "MXFP4": BlockFormat(32, 17, 32, ((1, 16), (0, 1)), Integers(_bits(0, 0, 4, 16)), d=Half(1, 0), e2m1=True),
}  # fmt: skip


# --- planes


def _lane_pairs(pairs: torch.Tensor, nbytes: int) -> torch.Tensor:
    """int16 pairs of bytes [R, blocks, pairs] of the order of a file as [R, ..., lane, ...], `nbytes` one by one."""
    blocks = nbytes // (pairs.shape[2] * 2)
    if blocks <= 1:
        return pairs.unflatten(2, (-1, nbytes // 8, 4)).transpose(-1, -2)
    return pairs.unflatten(1, (-1, blocks)).unflatten(3, (-1, 4)).permute(0, 1, 4, 2, 3)


def _fields(blocks: torch.Tensor, rows: torch.Tensor, form: BlockFormat) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of each field its pairs of bytes, or single ones of an odd field, in blocks of a file [R, blocks, pairs], and the
    same in rows in planes [R, pairs]: two views of one shape. Behind a first byte of their own blocks of an odd size
    have pairs too."""
    start, odd = 0, form.nbytes % 2
    for number, (at, nbytes) in enumerate(form.fields):
        element = torch.uint8 if nbytes % 2 else torch.int16
        size, end = element.itemsize, start + blocks.shape[1] * nbytes
        field = blocks.view(element)[:, :, (odd + at) // size : (odd + at + nbytes) // size]
        if number == 0 or (number == 1 and form.has_upper_units):
            field = _lane_pairs(field, min(UNITS_BYTES, TILE // form.weights * nbytes))
        yield field, rows.view(element)[:, start // size : end // size].unflatten(1, field.shape[1:])
        start = end


def pack_rows(blocks: torch.Tensor, form: BlockFormat, columns: int, out: torch.Tensor) -> None:
    """Bring rows from the order of a file to planes.

    Args:
        blocks: uint8 [R, file_bytes], contiguous, at an even address.
        form: How a block is stored.
        columns: Weights of a row.
        out: uint8 [R, row_bytes], on the same device, at an even address, rows one after the other; written.
    """
    count, odd, blocks = form.num_blocks(columns), form.nbytes % 2, blocks.view(len(blocks), -1, form.nbytes)
    if odd or blocks.shape[1] != count:
        blocks = torch.nn.functional.pad(blocks, (odd, 0, 0, count - blocks.shape[1]))
    for in_blocks, in_row in _fields(blocks, out, form):
        in_row.copy_(in_blocks)
    out[:, count * form.nbytes :] = 0


def unpack_rows(stored: torch.Tensor, form: BlockFormat, columns: int) -> torch.Tensor:
    """What `pack_rows` was given, uint8 [R, file_bytes], of the rows that it made, uint8 [R, row_bytes]."""
    odd = form.nbytes % 2
    shape = (len(stored), form.num_blocks(columns), odd + form.nbytes)
    blocks = torch.empty(shape, dtype=torch.uint8, device=stored.device)
    for in_blocks, in_row in _fields(blocks, stored, form):
        in_blocks.copy_(in_row)
    return blocks[:, :, odd:].flatten(1)[:, : form.file_bytes(columns)].contiguous()


# --- the reference: long rows are what torch is fast with, so it has one for each byte of a block


def _bits_reference(stored: torch.Tensor, count: int, bits: Bits, form: BlockFormat) -> torch.Tensor:
    x = torch.arange(count, device=stored.device)
    byte = bits.at + x // (bits.span * bits.sharing) * bits.stride + x % bits.span
    shift = bits.first + bits.bits * (x // bits.span % bits.shifts)
    found = stored.index_select(0, form.fields[bits.field][0] + byte)
    return found.bitwise_right_shift_(shift.to(torch.uint8)[:, None]).bitwise_and_((1 << bits.bits) - 1)


def _integers_reference(stored: torch.Tensor, count: int, integers: Integers, form: BlockFormat) -> torch.Tensor:
    """The first `count` of each block: fp32 [count, blocks]."""
    found = _bits_reference(stored, count, integers.low, form)
    if integers.high is not None:
        found |= _bits_reference(stored, count, integers.high, form).bitwise_left_shift_(integers.low.bits)
    return found.bitwise_xor_(integers.flip).float().sub_(integers.offset)


def _half_reference(stored: torch.Tensor, half: Half, form: BlockFormat) -> torch.Tensor:
    """fp32 [1, blocks]."""
    at = form.fields[half.field][0] + half.at
    return (stored[at].short() | stored[at + 1].short() << 8).view(torch.float16).float()[None]


def _power_reference(stored: torch.Tensor, power: Half, form: BlockFormat) -> torch.Tensor:
    """fp32 [1, blocks]: half of 2^(e - 127), of which the two least are no normal numbers."""
    e = stored[form.fields[power.field][0] + power.at].int()
    return torch.where(e < 2, 1 << e + 21, e - 1 << 23).view(torch.float32)[None]


def _decode_reference(stored: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """fp32 [weights, blocks] of uint8 [bytes, blocks]."""
    groups = form.weights // form.group
    q = _integers_reference(stored, form.weights, form.q, form)
    if form.coded or form.e2m1:
        q = torch.tensor(_E2M1 if form.e2m1 else _CODE_BOOK, dtype=torch.float32, device=q.device)[q.long()]
    d = (_power_reference if form.e2m1 else _half_reference)(stored, form.d, form)
    if form.scale is not None:
        d = d * _integers_reference(stored, groups, form.scale, form)
    w = q.view(len(d), -1, q.shape[1]).mul_(d[:, None])
    if form.m is not None:
        m = _half_reference(stored, form.m, form)
        if form.minimum is not None:
            m = m * -_integers_reference(stored, groups, form.minimum, form)
        w += m[:, None]
    return w.view(q.shape)


def decode_file_blocks(blocks: torch.Tensor, form: BlockFormat, out: torch.Tensor) -> None:
    """Decode rows as a file has them with torch's operations, a piece at a time.

    Args:
        blocks: uint8 [R, file_bytes].
        form: How a block is stored.
        out: [R, columns] of any float dtype, on the same device; every element is written.
    """
    step = max(1, _REFERENCE_WEIGHTS // out.shape[1])
    for rows, part in zip(blocks.split(step), out.split(step), strict=True):
        w = _decode_reference(rows.reshape(-1, form.nbytes).t().contiguous(), form)
        part.copy_(w.to(out.dtype).t().reshape(part.shape))


def decode_blocks_reference(stored: torch.Tensor, form: BlockFormat, out: torch.Tensor) -> None:
    """Plain torch version of `decode_blocks`."""
    columns = out.shape[1]
    step = max(1, _REFERENCE_WEIGHTS // columns)
    for rows, part in zip(stored.split(step), out.split(step), strict=True):
        decode_file_blocks(unpack_rows(rows, form, columns), form, part)


# --- kernels
#
# A tensor [R, 8] has two words of each of the four lanes of a row. What the lanes of a row share is [R, 1] or [R, 8].
# With `ALONE` a lane has rows of its own instead, for products that are no matrix units'.


@jit
def within(index, count, WHOLE: tl.constexpr):
    """An index of a plane; behind its last tile's end the last one, whose weights meet no row of x."""
    if not WHOLE:
        index = tl.minimum(index, count - 1)
    return index


@jit
def _each(words, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """[R, 1] of [R, COUNT]. What is taken apart is in one lane."""
    if COUNT == 1:
        found = (tl.reshape(words, [ROWS])[:, None],)  # type: tuple[Any, ...]
    else:
        first, second = tl.split(tl.permute(tl.reshape(words, [ROWS, 2, COUNT // 2]), (0, 2, 1)))
        found = _each(first, ROWS, COUNT // 2) + _each(second, ROWS, COUNT // 2)
    return found


@jit
def _together(words, ROWS: tl.constexpr, COUNT: tl.constexpr, START: tl.constexpr):
    """[R, COUNT] of as many [R, 1], from one on."""
    if COUNT == 1:
        found = words[START]
    else:
        first = _together(words, ROWS, COUNT // 2, START)
        second = _together(words, ROWS, COUNT // 2, START + COUNT // 2)
        found = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), [ROWS, COUNT])
    return found


@jit
def in_one_lane(words, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """[R, COUNT] as they are, of which a lane then has all of a row."""
    return _together(_each(words, ROWS, COUNT), ROWS, COUNT, 0)


@jit
def units_at(
    plane_ptr, tile, plane_bytes, BYTES: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
    ALONE: tl.constexpr = False,
):  # fmt: skip
    """The units of a tile: [R, 8] each."""
    ptr = plane_ptr.to(tl.pointer_type(tl.uint32))
    if BYTES == 32:
        words = tl.load(ptr + tl.arange(0, 8)[None, :] + tile * 8)
        if ALONE:
            words = in_one_lane(words, ROWS, 8)
        found = (words,)  # type: tuple[Any, ...]
    else:
        found = ()
        for unit in tl.static_range(BYTES // 64):
            at = within(tile * (BYTES // 64) + unit, plane_bytes // 64, WHOLE) * 16
            words = tl.load(ptr + tl.arange(0, 16)[None, :] + at)
            if ALONE:
                words = in_one_lane(words, ROWS, 16)
            first, second = tl.split(tl.permute(tl.reshape(words, [ROWS, 4, 2, 2]), (0, 1, 3, 2)))
            found += (tl.reshape(first, [ROWS, 8]), tl.reshape(second, [ROWS, 8]))
    return found


@jit
def _for_both_words(t, ROWS: tl.constexpr):
    """[R, 4], of lanes, as [R, 8]."""
    return tl.reshape(tl.broadcast_to(t[:, :, None], [ROWS, 4, 2]), [ROWS, 8])


@jit
def _four_words_at(
    ptr, first, count, WHOLE: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr, ALONE: tl.constexpr
):
    """Four words of a row, which every lane loads at once: [R, 8] each, or [R, 1]. Behind the last one as many as are
    `TOGETHER` come again."""
    at = first + tl.arange(0, 4 if ALONE else 16)[None, :] % 4
    if not WHOLE:
        at = within(at // TOGETHER, count // TOGETHER, WHOLE) * TOGETHER + at % TOGETHER
    words = tl.load(ptr + at)
    if ALONE:
        found = _each(words, ROWS, 4)  # type: tuple[Any, ...]
    else:
        even, odd = tl.split(tl.reshape(words, [ROWS, 4, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        found = (
            _for_both_words(a, ROWS), _for_both_words(b, ROWS), _for_both_words(c, ROWS), _for_both_words(d, ROWS),
        )  # fmt: skip
    return found


@jit
def words_at(
    plane_ptr, tile, plane_bytes, EACH: tl.constexpr, WHOLE: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr,
    ALONE: tl.constexpr = False,
):  # fmt: skip
    """The words of a tile of a plane that has `EACH` bits for one: [R, 1] or [R, 8] each."""
    ptr = plane_ptr.to(tl.pointer_type(tl.uint32))
    words: tl.constexpr = EACH // 32
    if EACH < 32:  # within a word, as fewer than four bytes are not copied to shared memory ahead of their use
        found = (tl.load(ptr + tile // (32 // EACH)) >> (tile % (32 // EACH) * EACH),)  # type: tuple[Any, ...]
    elif words % 4 == 0:
        count = (plane_bytes + 3) // 4
        found = _four_words_at(ptr, tile * words, count, WHOLE, TOGETHER, ROWS, ALONE)
        if words == 8:
            found += _four_words_at(ptr, tile * words + 4, count, WHOLE, TOGETHER, ROWS, ALONE)
    else:
        found = (tl.load(ptr + tile * words),)
        for word in tl.static_range(1, words):
            found += (tl.load(ptr + tile * words + word),)
    return found


@jit
def load_tile(
    row_ptr, tile, blocks, FORM: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, ALONE: tl.constexpr = False
):
    """What is stored of a tile of rows, for `decode_half`: words of each plane. `row_ptr` is [R, 1] of uint8; with
    `WHOLE` the `blocks` of a row are whole tiles. Behind the last blocks these come again in all planes, so that no
    weight there is larger than a real one."""
    each: tl.constexpr = 256 // FORM.weights
    count = blocks * FORM.bytes_0
    found = (units_at(row_ptr, tile, count, each * FORM.bytes_0, WHOLE, ROWS, ALONE),)  # type: tuple[Any, ...]
    ptr, count = row_ptr + count, blocks * FORM.bytes_1
    if FORM.has_upper_units:
        found += (units_at(ptr, tile, count, each * FORM.bytes_1, WHOLE, ROWS, ALONE),)
    else:
        found += (words_at(ptr, tile, count, 8 * each * FORM.bytes_1, WHOLE, FORM.words_1, ROWS, ALONE),)
    if FORM.bytes_2 != 0:
        ptr, count = ptr + count, blocks * FORM.bytes_2
        found += (words_at(ptr, tile, count, 8 * each * FORM.bytes_2, WHOLE, FORM.words_2, ROWS, ALONE),)
    if FORM.bytes_3 != 0:
        ptr, count = ptr + count, blocks * FORM.bytes_3
        found += (words_at(ptr, tile, count, 8 * each * FORM.bytes_3, WHOLE, 1, ROWS, ALONE),)
    return found


@jit
def load_half(row_ptr, half, blocks, FORM: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr):
    """The same with rows of a lane's own of half a tile, counted from a row's beginning: what only the other half of
    the tile has is this half's again."""
    tile = load_tile(row_ptr, half // 2, blocks, FORM, WHOLE, ROWS, True)
    nbytes: tl.constexpr = 128 * FORM.bytes_0 // FORM.weights
    found = (tile[0],)  # type: tuple[Any, ...]
    if nbytes >= 64:
        units = units_at(row_ptr, half, blocks * FORM.bytes_0, nbytes, WHOLE, ROWS, True)
        found = (units + units,)
    for plane in tl.static_range(1, len(tile)):
        found += (tile[plane],)
    return found


@jit
def _small_number(bits):
    """fp32 of what the lower 16 bits are as fp16: of integers below 2048 they themselves, times 2^-24."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def _half_of(planes, BLOCK: tl.constexpr, HALF: tl.constexpr, NBYTES: tl.constexpr):
    """fp32 of the fp16 number of a block of the tile, or, of a single byte, 2^14 times the power of two."""
    byte: tl.constexpr = BLOCK * NBYTES + HALF.at
    word = planes[HALF.field][byte // 4] >> (8 * (byte % 4))
    if NBYTES == 1:
        found = (((word & 255) + 14) << 23).to(tl.float32, bitcast=True)
    else:
        found = word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return found


@jit
def _halves_of(planes, unit: tl.constexpr, HALF: tl.constexpr, FORM: tl.constexpr):
    """The same for the words of a unit."""
    if FORM.weights == 256:
        found = _half_of(planes, 0, HALF, FORM.d_bytes)
    elif FORM.bytes_0 == 32:
        found = _half_of(planes, unit, HALF, FORM.d_bytes)
    else:
        even, odd = _half_of(planes, 2 * unit, HALF, FORM.d_bytes), _half_of(planes, 2 * unit + 1, HALF, FORM.d_bytes)
        found = tl.where(tl.arange(0, 8)[None, :] % 2 == 0, even, odd)
    return found


@jit
def _bits_of(planes, x, BITS: tl.constexpr, WORDS: tl.constexpr):
    """Integers x of a block, which threads know when compiled, wherever words of a lane are in one thread."""
    words = planes[BITS.field]
    byte = BITS.at + x // (BITS.span * BITS.sharing) * BITS.stride + x % BITS.span
    word = words[0]
    for number in tl.static_range(1, WORDS):
        word = tl.where(byte // 4 == number, words[number], word)
    shift = 8 * (byte % 4) + BITS.first + BITS.bits * (x // BITS.span % BITS.shifts)
    return (word >> shift.to(tl.uint32)) & ((1 << BITS.bits) - 1)


@jit
def _integers_of(planes, x, INTEGERS: tl.constexpr, WORDS: tl.constexpr):
    """fp32: them and their offset, times 2^-24."""
    found = _bits_of(planes, x, constant(INTEGERS.low), WORDS)
    if INTEGERS.high is not None:
        found |= _bits_of(planes, x, constant(INTEGERS.high), WORDS) << INTEGERS.low.bits
    return _small_number(found ^ INTEGERS.flip)


@jit
def _unpacked(words):
    """Of twelve bytes with eight scales and eight minima of six bits: four scales, four, four minima, four, in bytes.
    The first word stays."""
    first, a, b, c = words
    scales = (c & 0x0F0F0F0F) | ((a >> 2) & 0x30303030)
    minima = ((c >> 4) & 0x0F0F0F0F) | ((b >> 2) & 0x30303030)
    return first, a & 0x3F3F3F3F, scales, b & 0x3F3F3F3F, minima


@jit
def _byte_times(words, d, BYTE: tl.constexpr):
    """2^-24 d times a byte below 64."""
    pairs = (words[BYTE // 4] >> (BYTE % 2 * 8)) & 0x3F003F
    return d * _small_number(pairs >> (BYTE % 4 // 2 * 16))


@jit
def _scales_of(
    planes, x, unit: tl.constexpr, s: tl.constexpr, PLACE: tl.constexpr, FORM: tl.constexpr, ZERO_SIGNS: tl.constexpr
):  # fmt: skip
    """fp32: what the numbers of words are multiplied with, and what is added or, with minima, subtracted."""
    d = _halves_of(planes, unit, constant(FORM.d), FORM) * 2.0 ** (24 - PLACE)
    m = d
    if FORM.m is not None:
        m = _halves_of(planes, unit, constant(FORM.m), FORM)
    if FORM.scale is not None:
        d *= 2.0**24
    if FORM.minimum is not None:
        m *= 2.0**24
    if FORM.packed:
        words = _unpacked(planes[FORM.scale.low.field])
        d = _byte_times(words, d, 4 + 2 * unit + s)
        m = _byte_times(words, m, 12 + 2 * unit + s)
    elif FORM.scale is not None:
        scale = _integers_of(planes, x // FORM.group, constant(FORM.scale), FORM.scale_words)
        offset: tl.constexpr = FORM.scale.offset * 2.0**-24
        if ZERO_SIGNS or offset == 0:
            d *= scale - offset
        else:
            d = d * scale - d * offset
        if FORM.minimum is not None:
            m *= _integers_of(planes, x // FORM.group, constant(FORM.minimum), FORM.scale_words)  # from 0 on
    return d, m


@jit
def _upper_word(planes, x, unit: tl.constexpr, FORM: tl.constexpr):
    """The upper bits of the four weights of words, each in its byte, among others where several units share them."""
    high: tl.constexpr = constant(FORM.q.high)
    if high.span == 1:
        i = tl.arange(0, 8)[None, :]
        word = tl.where(i % 2 == 0, planes[1][2 * unit], planes[1][2 * unit + 1]) >> (i // 2 * 2 + x).to(tl.uint32)
        pairs = (word & 3) | ((word & 0x300) << 8)
        found = pairs | (pairs << 7)
    else:
        found = planes[1][unit // (FORM.q.low.bits // high.bits)]
    return found


@jit
def masked(words, MASK: tl.constexpr, FLIPPED: tl.constexpr):
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
def picked_bytes(first, second, selector):
    """Of the eight bytes of two words those that the lowest four half-bytes of `selector` say; all uint32."""
    if INTERPRETED:
        found = selector & 0
        for byte in tl.static_range(4):
            place = (selector >> (4 * byte)) & 7
            word = tl.where(place < 4, first, second)
            found |= ((word >> (place % 4 * 8)) & 255) << (8 * byte)
    else:
        found = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [first, second, selector], dtype=tl.uint32, is_pure=True, pack=1
        )
    return found


@jit
def _four_codes(places, upper):
    """Of each half of the code book what is at places, and of both what `upper` says."""
    lower = picked_bytes(places * 0 + _CODE_0, places * 0 + _CODE_4, places)
    return picked_bytes(lower, picked_bytes(places * 0 + _CODE_8, places * 0 + _CODE_12, places), upper)


@jit
def _codes(words):
    """What the code book has, and 128, for the half-bytes of words: four bytes for the lower half of each, and four."""
    places, upper = words & 0x77777777, ((words >> 1) & 0x44444444) | 0x32103210
    first = _four_codes(places, upper)
    return first, _four_codes(places >> 16, upper >> 16)


@jit
def _numbers_at(words, upper, unit: tl.constexpr, s: tl.constexpr, BYTE: tl.constexpr, FORM: tl.constexpr):
    """Of words of a unit, and of those with their upper bits, the numbers `s` of bytes BYTE and BYTE + 2, where the
    lower bits of the first of them lie, and as far up in the upper half."""
    low: tl.constexpr = constant(FORM.q.low)
    place: tl.constexpr = low.bits * s
    if FORM.q.flip:
        return masked(words >> (8 * BYTE), ((1 << low.bits) - 1) * 0x10001 << place, FORM.q.flip * 0x10001 << place)
    found = (words >> (8 * BYTE)) & (((1 << low.bits) - 1) * 0x10001 << place)
    if FORM.q.high is not None:
        high: tl.constexpr = constant(FORM.q.high)
        x: tl.constexpr = unit * 32 // low.span * (low.span * low.sharing) + s * low.span + unit * 32 % low.span
        there: tl.constexpr = 8 * BYTE + high.bits * (x // high.span % high.shifts)
        here: tl.constexpr = place + low.bits
        if there > here:
            upper = upper >> (there - here)
        else:
            upper = upper << (here - there)
        found |= upper & (((1 << high.bits) - 1) * 0x10001 << here)
    return found


@jit
def _weights_of(numbers, d, m, PLACE: tl.constexpr, FORM: tl.constexpr, ZERO_SIGNS: tl.constexpr):
    """fp32 weights of the numbers at bit `PLACE` of both halves. They are not moved from there, but scaled back. Where
    zeros may be positive whatever the sign of d, an offset is a part of one multiply-add."""
    low, high = _small_number(numbers), _small_number(numbers >> 16)
    offset: tl.constexpr = (128 if FORM.coded else FORM.q.offset) * 2.0 ** (PLACE - 24)
    if offset == 0:
        low, high = low * d, high * d
    elif ZERO_SIGNS:
        low, high = (low - offset) * d, (high - offset) * d
    elif FORM.coded:  # of up to 8 + 11 + 6 bits, which fp32 has none to spare for: fused, whatever the compiler does
        low, high = tl.fma(low, d, d * -offset), tl.fma(high, d, d * -offset)
    else:
        low, high = low * d - d * offset, high * d - d * offset
    if FORM.minimum is not None:
        low, high = low - m, high - m
    elif FORM.m is not None:
        low, high = low + m, high + m
    return low, high


@jit
def _shifted(words, LEFT: tl.constexpr):
    if LEFT < 0:
        words = words >> -LEFT
    elif LEFT > 0:
        words = words << LEFT
    return words


@jit
def _e2m1_weights(words, d, PLACE: tl.constexpr):
    """fp32 weights of the numbers of E2M1 at bit `PLACE` of both halves of words. Where fp16 has its sign and the three
    bits around the point between exponent and mantissa, they are 2^-14 times themselves, subnormal ones too."""
    numbers = (_shifted(words, 9 - PLACE) & 0x0E000E00) | (_shifted(words, 12 - PLACE) & 0x80008000)
    return _small_number(numbers) * d + 0.0, _small_number(numbers >> 16) * d + 0.0  # no zero is negative


@jit
def _unit_shares(
    planes, unit: tl.constexpr, s: tl.constexpr, FORM: tl.constexpr, DTYPE: tl.constexpr, ZERO_SIGNS: tl.constexpr
):  # fmt: skip
    """[R, 8, 2, 2] of a unit: of each of its bytes the weight that is number `s` of those that share it."""
    bits: tl.constexpr = constant(FORM.q.low)
    words = planes[0][unit]
    # Number in the block of the first weight of a word.
    byte = unit * 32 + 16 * (tl.arange(0, 8)[None, :] % 2)
    x = (byte // bits.span * (bits.span * bits.sharing) + s * bits.span + byte % bits.span) % FORM.weights
    place: tl.constexpr = bits.bits * s
    upper = words
    if FORM.q.high is not None:
        upper = _upper_word(planes, x, unit, FORM)
    if FORM.e2m1:
        d = _halves_of(planes, unit, constant(FORM.d), FORM)
        w00, w10 = _e2m1_weights(words, d, place)
        w01, w11 = _e2m1_weights(words, d, 8 + place)
    elif FORM.coded:
        d, m = _scales_of(planes, x, unit, s, 0, FORM, ZERO_SIGNS)
        first, second = _codes(words)
        w00, w01 = _weights_of(masked(first >> (8 * s), 0x00FF00FF, 0), d, m, 0, FORM, ZERO_SIGNS)
        w10, w11 = _weights_of(masked(second >> (8 * s), 0x00FF00FF, 0), d, m, 0, FORM, ZERO_SIGNS)
    else:
        d, m = _scales_of(planes, x, unit, s, place, FORM, ZERO_SIGNS)
        w00, w10 = _weights_of(_numbers_at(words, upper, unit, s, 0, FORM), d, m, place, FORM, ZERO_SIGNS)
        w01, w11 = _weights_of(_numbers_at(words, upper, unit, s, 1, FORM), d, m, place, FORM, ZERO_SIGNS)
    return tl.join(tl.join(w00, w10), tl.join(w01, w11)).to(DTYPE)


@jit
def _unit_of(planes, unit: tl.constexpr, FORM: tl.constexpr, DTYPE: tl.constexpr, ZERO_SIGNS: tl.constexpr):
    """[R, 8, 2, 2] of a unit, and more dimensions of two: which of the weights that share a byte, higher bits last."""
    found = _unit_shares(planes, unit, 0, FORM, DTYPE, ZERO_SIGNS)
    if FORM.q.low.bits == 4:
        found = tl.join(found, _unit_shares(planes, unit, 1, FORM, DTYPE, ZERO_SIGNS))
    elif FORM.q.low.bits == 2:
        odd = tl.join(
            _unit_shares(planes, unit, 1, FORM, DTYPE, ZERO_SIGNS),
            _unit_shares(planes, unit, 3, FORM, DTYPE, ZERO_SIGNS),
        )
        found = tl.join(tl.join(found, _unit_shares(planes, unit, 2, FORM, DTYPE, ZERO_SIGNS)), odd)
    return found


@jit
def decode_half(
    planes, HALF: tl.constexpr, FORM: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr, ZERO_SIGNS: tl.constexpr
):  # fmt: skip
    """[R, 2, 2, 2, 2, 4, 2]: 128 weights of rows, a half of what `load_tile` has loaded, of which each lane has those
    of its index in the dimension of four."""
    bits: tl.constexpr = constant(FORM.q.low)
    units: tl.constexpr = bits.bits // 2
    first: tl.constexpr = HALF * units
    found = _unit_of(planes, first, FORM, DTYPE, ZERO_SIGNS)
    if units == 2:
        found = tl.join(found, _unit_of(planes, first + 1, FORM, DTYPE, ZERO_SIGNS))
    elif units == 4:
        found = tl.join(found, _unit_of(planes, first + 1, FORM, DTYPE, ZERO_SIGNS))
        others = _unit_of(planes, first + 2, FORM, DTYPE, ZERO_SIGNS)
        found = tl.join(found, tl.join(others, _unit_of(planes, first + 3, FORM, DTYPE, ZERO_SIGNS)))
    # Rows, lane, word, upper pair, byte of it; then which of a byte's two and unit, of four, or unit's two bits.
    found = tl.reshape(found, [ROWS, 4, 2, 2, 2, 2, 2])
    if bits.bits == 2:
        found = tl.permute(found, (0, 5, 6, 2, 3, 1, 4))
    elif bits.bits == 8 or bits.span == 32:
        found = tl.permute(found, (0, 6, 5, 2, 3, 1, 4))
    elif bits.span == 16:
        found = tl.permute(found, (0, 6, 2, 5, 3, 1, 4))
    else:
        found = tl.permute(found, (0, 5, 6, 2, 3, 1, 4))
    return found


@jit(do_not_specialize=("num_rows", "blocks"))
def _decode_blocks_kernel(
    stored_ptr, out_ptr, num_rows, columns, blocks, row_bytes, FORM: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * 256 + tl.arange(0, 256)[None, :]
    # What lies behind the last row reads that row and stores nothing.
    row_ptr = stored_ptr + tl.minimum(row, num_rows - 1) * row_bytes
    planes = load_tile(row_ptr, tl.program_id(1), blocks, FORM, WHOLE, ROWS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    w = tl.join(decode_half(planes, 0, FORM, ROWS, dtype, True), decode_half(planes, 1, FORM, ROWS, dtype, True))
    w = tl.reshape(tl.permute(w, (0, 7, 1, 2, 3, 4, 5, 6)), [ROWS, 256])
    tl.store(out_ptr + row * columns + column, w, mask=(row < num_rows) & (column < columns))


def decode_blocks_triton(stored: torch.Tensor, form: BlockFormat, out: torch.Tensor) -> None:
    """Triton version of `decode_blocks`."""
    require_triton("decoding GGUF blocks")
    rows, columns = out.shape
    with torch.cuda.device_of(stored):
        _decode_blocks_kernel[(triton.cdiv(rows, _DECODED_ROWS), triton.cdiv(columns, TILE))](
            stored, out, rows, columns, form.num_blocks(columns), stored.shape[1], FORM=form,
            WHOLE=columns % TILE == 0, ROWS=_DECODED_ROWS, num_warps=4,
        )  # fmt: skip


def decode_blocks(stored: torch.Tensor, form: BlockFormat, out: torch.Tensor) -> None:
    """Decode rows, enqueued on the current stream of the device.

    Args:
        stored: uint8 [R, row_bytes], rows in planes, contiguous, at an address that 16 divides.
        form: How each block is stored: one of `FORMATS`; of E8M0 no power beyond 2^113.
        out: [R, columns] of any float dtype, contiguous; every element is written.
    """
    assert stored.dtype == torch.uint8 and stored.is_contiguous() and out.is_contiguous()
    assert stored.shape == (out.shape[0], form.row_bytes(out.shape[1]))
    (decode_blocks_triton if stored.is_cuda else decode_blocks_reference)(stored, form, out)
