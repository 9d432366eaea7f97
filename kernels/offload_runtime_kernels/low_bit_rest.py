"""What makes a matrix out of its copy in 4 bits (`low_bit_copy`), every bit of it: one in bf16, Q8_0 or FP8.

A copy says in which step of its scale a weight lies, about, and how many numbers of the file's format are in that step:
a code that says which one it is takes just as many bits as it must. So the lengths of all codes are known before one is
read, and a row's weights are decoded together, after adding lengths up.

    u = (q - 7.5) s + c;    a step is [u - s / 2, u + s / 2], of the least and the largest q s more outward
    code = place(w) - place(where the step begins), in bits enough for 15/16 of the step's places and one more
    the largest code stands for an exception: places behind the code's room, or out of the step

In bf16 place(w) is the position among the numbers from s / 256 on, negative below zero; nearer to it is place 0, an
exception. In Q8_0 the place is the integer that is next to w (1 / d), d being the block's scale: w = d place(w). In
FP8, whose scales d are kept elsewhere, for a multiple of 32 columns each, it is the position of w (1 / d) among the
numbers of E4M3, the one below it towards zero; -0 and what is no number are exceptions.

Of a row first all codes follow one another from the lowest bit of a word on, in Q8_0 behind the scales of all blocks;
exceptions, whole patterns of 16 bits or integers, begin at the end and go backwards. A matrix is

    starts    4 (M + 1)      the words at which its rows begin, uint32, and the last one ends
    rows      M (R K + 8)    one behind the other; what is left over is behind the last. R is 17/16, 11/16 or 5/8

SmolLM2's matrices in bf16, off any grid by noise, take 7.39 to 7.69 bits a weight, but for two of its first layer,
which take 7.91 and 7.98; Gaussian weights take 7.34, those of Student's t with three degrees of freedom 8.24. A code of
8 bits for each weight takes 8.4 of SmolLM2's with exceptions in further bytes, and 9.2 with ones of 16 bits. In Q8_0
all of these take 5.1 to 5.2 bits in place of 8.5, in FP8 with scales of 128 x 128 SmolLM2's 4.0, Gaussian ones 3.9 and
those of three degrees of freedom 4.7.

What decoding computes in fp32 has one rounding in every sum and quotient and none in a product: it is the same on every
device.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl
from offload_runtime_kernels.low_bit_copy import COPY, GROUP
from offload_runtime_kernels.scaled_rows import MIDDLE, ScaledFormat, ScaledRows, unpack_numbers

_FLOOR = 8 << 7  # from the pattern of a scale down to that of its 256th
_ALIGNMENT_BYTES = 256
BF16, Q8_0, FP8 = "BF16", "Q8_0", "FP8"  # what matrices are in
KINDS = {BF16: 0, Q8_0: 1, FP8: 2}  # for kernels
# Bytes of a weight, and of a row's words that are not filled.
_ROOM, _ROW_BYTES = {BF16: 17 / 16, Q8_0: 11 / 16, FP8: 5 / 8}, 8
Q8_BLOCK = 32
LEAST_OWN_COLUMNS = 32  # of a scale of FP8, or a multiple of it
_DECODED_TILES = 2  # together: what one waits for comes while another is worked on
_ELEMENTS = 1 << 19  # worked on at a time


def _starts_bytes(rows: int) -> int:
    return -(-4 * (rows + 1) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def rest_bytes(rows: int, columns: int, kind: str = BF16) -> int:
    """Return the bytes of what is left of a matrix, as far as there is room for it."""
    return _starts_bytes(rows) + rows * (math.ceil(columns * _ROOM[kind] / 4) * 4 + _ROW_BYTES)


def used_bytes(stored: torch.Tensor, rows: int) -> int:
    """Return the bytes that a coded matrix has of those there is room for."""
    return _starts_bytes(rows) + 4 * int(stored[4 * rows : 4 * (rows + 1)].view(torch.int32))


def parts_of(stored: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the starts int32 [M + 1] and of all words int32."""
    return stored[: 4 * (rows + 1)].view(torch.int32), stored[_starts_bytes(rows) :].view(torch.int32)


# --- the reference, by torch's operations; all are [R, K], of integers int32


def _ends(copy: ScaledRows, rows: slice, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each weight's step begins and ends, fp32, and the pattern of its scale's 256th."""
    pairs = unpack_numbers(copy.numbers[rows], COPY, columns)
    q = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)[:, :columns].float()
    groups = torch.arange(columns, device=q.device) // GROUP
    s, c = copy.scales[rows], copy.zeros[rows].view(COPY.scale)
    floors = (s.contiguous().view(torch.int16).int() - _FLOOR).clamp_min_(0)[:, groups]
    s, c = s.float()[:, groups], c.float()[:, groups]
    u = (q - MIDDLE).mul_(s).add_(c)
    lowest = u - torch.where(q == 0, 1.5, 0.5) * s
    return lowest, u.add_(torch.where(q == 2 * MIDDLE, 1.5, 0.5) * s), floors


def bf16_places(patterns: torch.Tensor, floors: torch.Tensor) -> torch.Tensor:
    """Places of patterns of bf16, of which bits above the lower 16 count for nothing."""
    outside = (patterns & 0x7FFF).sub_(floors).add_(1).clamp_min_(0)
    return torch.where((patterns & 0x8000) != 0, -outside, outside)


def _scaled_places(x: torch.Tensor, d: torch.Tensor, kind: str) -> torch.Tensor:
    """Places of fp32 numbers among those of Q8_0 or FP8 with these scales; any, of scales that are none."""
    relative = x * (1 / torch.where(d == 0, 1.0, d))
    relative = torch.where(relative.isnan(), 0.0, relative)
    if kind == Q8_0:
        return relative.clamp_(-128.0, 127.0).add_(0.5).floor_().int()
    size = relative.abs().clamp_max_(448.0)
    places = torch.where(size < 2.0**-6, (size * 512).int(), (size.view(torch.int32) >> 20) - 960)
    return torch.where(relative < 0, -places, places)


def _sizes(first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """The sizes of codes of steps."""
    needed = ((last - first + 2) * 15 - 1) >> 4
    # The exponent of a number is one less than its bits.
    return (needed.float().view(torch.int32) >> 23).sub_(126).clamp_min_(0)


def bf16_steps(copy: ScaledRows, rows: slice, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of bf16 the place at which each weight's step begins, the size of its code, and the pattern of its floor."""
    lowest, highest, floors = _ends(copy, rows, columns)
    first, last = (bf16_places(ends.view(torch.int32) >> 16, floors) for ends in (lowest, highest))
    return first, _sizes(first, last), floors


def scaled_steps(copy: ScaledRows, rows: slice, d: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of Q8_0 or FP8 the same of numbers with the scales [R, K] fp32."""
    lowest, highest, _ = _ends(copy, rows, d.shape[1])
    ends = _scaled_places(lowest, d, kind), _scaled_places(highest, d, kind)
    first, last = torch.minimum(*ends), torch.maximum(*ends)  # a scale may be negative
    return first, _sizes(first, last)


def scales_of(scales: torch.Tensor, form: ScaledFormat, rows: slice, columns: int) -> torch.Tensor:
    """Scales of each of some rows' numbers, fp32 [R, K]."""
    own = torch.arange(rows.start, rows.stop, device=scales.device) // form.rows
    return scales[own][:, torch.arange(columns, device=scales.device) // form.columns].float()


def pieces(height: int, columns: int, elements: int = _ELEMENTS) -> Iterator[slice]:
    """Yield rows of a matrix, about so many elements at a time."""
    step = max(1, elements // columns)
    return (slice(start, min(start + step, height)) for start in range(0, height, step))


def _unpacked(
    starts: torch.Tensor, pool: torch.Tensor, sizes: torch.Tensor, ahead: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of rows that begin and end at `starts` [R + 1], behind so many words; where exceptions are, row and column,
    and these, int32."""
    begins = sizes.cumsum(1) - sizes
    at = starts[:-1, None] + ahead + (begins >> 5)
    low, high = (pool[word].long() & 0xFFFFFFFF for word in (at, (at + 1).clamp_max_(len(pool) - 1)))
    largest = (1 << sizes) - 1
    codes = ((high << 32 | low) >> (begins & 31) & largest).int()
    excepted = codes == largest
    at = excepted.nonzero()
    halves = 2 * starts[1:][at[:, 0]] - excepted.cumsum(1)[at[:, 0], at[:, 1]]
    return codes, at, pool.view(torch.int16)[halves].int()


def _decode_reference(stored: torch.Tensor, copy: ScaledRows, rows: slice, out: torch.Tensor) -> None:
    starts, pool = parts_of(stored, len(copy.numbers))
    first, sizes, floors = bf16_steps(copy, rows, out.shape[1])
    codes, at, whole = _unpacked(starts[rows.start : rows.stop + 1], pool, sizes, 0)
    places = first + codes
    patterns = (places.abs() - 1 + floors) | (places < 0).int() << 15
    patterns[at[:, 0], at[:, 1]] = whole
    out.copy_(patterns.to(torch.int16).view(torch.bfloat16))


def _decode_q8_reference(stored: torch.Tensor, copy: ScaledRows, rows: slice, out: torch.Tensor) -> None:
    starts, pool = parts_of(stored, len(copy.numbers))
    count = out.shape[1] // Q8_BLOCK
    at = 2 * starts[:-1][rows, None] + torch.arange(count, device=out.device)
    d = pool.view(torch.float16)[at].float().repeat_interleave(Q8_BLOCK, 1)
    first, sizes = scaled_steps(copy, rows, d, Q8_0)
    codes, at, whole = _unpacked(starts[rows.start : rows.stop + 1], pool, sizes, (count + 1) // 2)
    places = first + codes
    places[at[:, 0], at[:, 1]] = whole
    out.copy_(places * d)


def _decode_fp8_reference(
    stored: torch.Tensor, copy: ScaledRows, rows: slice, out: torch.Tensor, scales: torch.Tensor, form: ScaledFormat
) -> None:
    starts, pool = parts_of(stored, len(copy.numbers))
    d = scales_of(scales, form, rows, out.shape[1])
    first, sizes = scaled_steps(copy, rows, d, FP8)
    codes, at, whole = _unpacked(starts[rows.start : rows.stop + 1], pool, sizes, 0)
    places = first + codes
    patterns = places.abs() | (places < 0).int() << 7
    patterns[at[:, 0], at[:, 1]] = whole
    numbers = patterns.to(torch.uint8).view(torch.float8_e4m3fn).float()
    out.copy_(numbers.mul_(d).to(form.scale))


def decode_rest_reference(
    stored: torch.Tensor, copy: ScaledRows, start: int, out: torch.Tensor, kind: str = BF16,
    scales: torch.Tensor | None = None, form: ScaledFormat | None = None,
) -> None:  # fmt: skip
    """Plain torch version of `decode_rest`."""
    for some in pieces(len(out), out.shape[1]):
        rows = slice(start + some.start, start + some.stop)
        if scales is not None and form is not None:
            _decode_fp8_reference(stored, copy, rows, out[some], scales, form)
        else:
            (_decode_q8_reference if kind == Q8_0 else _decode_reference)(stored, copy, rows, out[some])


# --- the kernel: a program, one warp, decodes a row, some tiles of 128 columns at a time. Tensors are [32], of its
# lanes, which have four columns each, so that 16 have a group. A step is one of a group's 16, of which each lane finds
# out about one.


@jit
def places_of(bits, floors):
    """Places of fp32 numbers cut off to bf16, by their bits."""
    outside = tl.maximum(((bits >> 16) & 0x7FFF).to(tl.int32) - floors + 1, 0)
    return tl.where(bits >= 0x80000000, -outside, outside)


@jit
def _scaled_places_of(x, inverse, KIND: tl.constexpr):
    """Places of fp32 numbers among those of Q8_0 or FP8, by the inverse of their scale."""
    relative = x * inverse
    relative = tl.where(relative == relative, relative, 0.0)
    if KIND == 1:
        found = tl.floor(tl.minimum(tl.maximum(relative, -128.0), 127.0) + 0.5).to(tl.int32)
    else:
        size = tl.minimum(tl.abs(relative), 448.0)
        normal = (size.to(tl.int32, bitcast=True) >> 20) - 960
        found = tl.where(size < 0.015625, (size * 512).to(tl.int32), normal)
        found = tl.where(relative < 0, -found, found)
    return found


@jit
def _steps_of(q, s, c, floors, d, KIND: tl.constexpr):
    """What `bf16_steps` and `scaled_steps` have, of numbers of the copy: place << 5 | size of the code."""
    u = (q - 7.5) * s + c
    lowest = u - tl.where(q == 0, 1.5, 0.5) * s
    highest = u + tl.where(q == 15, 1.5, 0.5) * s
    if KIND > 0:
        inverse = tl.div_rn(1.0, tl.where(d == 0, 1.0, d))
        one, other = _scaled_places_of(lowest, inverse, KIND), _scaled_places_of(highest, inverse, KIND)
        first, last = tl.minimum(one, other), tl.maximum(one, other)
    else:
        first = places_of(lowest.to(tl.uint32, bitcast=True), floors)
        last = places_of(highest.to(tl.uint32, bitcast=True), floors)
    needed = (((last - first + 2) * 15 - 1) >> 4).to(tl.float32)
    return first << 5 | tl.maximum((needed.to(tl.int32, bitcast=True) >> 23) - 126, 0)


@jit
def _fp8_numbers(patterns):
    """fp32 of patterns of E4M3."""
    halves = ((patterns & 0x80) << 8 | (patterns & 0x7F) << 7).to(tl.uint16).to(tl.float16, bitcast=True)
    numbers = halves.to(tl.float32)
    return tl.where(tl.abs(numbers) == 1.875, float("nan"), numbers * 256.0)


@jit
def steps_at(
    numbers_ptr, scales_ptr, centres_ptr, d_ptr, tile, columns, OWN_COLUMNS: tl.constexpr, KIND: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Of a tile each lane's four steps, 0 behind the last column, then the floor and the own scale of its columns."""
    lane = tl.arange(0, 32)
    k, group = tile * 128 + 4 * lane, tile * 2 + lane // 16
    real, in_group = (k < columns, group * 64 < columns) if not WHOLE else (None, None)
    # Units as `pack_numbers` makes them: pairs 2 l and 2 l + 1 are in two words, of eight columns each.
    word = numbers_ptr + tile * 16 + lane % 2 * 8 + lane // 8
    here = tl.load(word, mask=real, other=0 if not WHOLE else None) >> (lane // 2 % 4 * 4).to(tl.uint32)
    there = tl.load(word + 4, mask=real, other=0 if not WHOLE else None) >> (lane // 2 % 4 * 4).to(tl.uint32)
    s_bits = tl.load(scales_ptr + group, mask=in_group, other=0 if not WHOLE else None).to(tl.uint32)
    c_bits = tl.load(centres_ptr + group, mask=in_group, other=0 if not WHOLE else None).to(tl.uint32)
    s, c = (s_bits << 16).to(tl.float32, bitcast=True), (c_bits << 16).to(tl.float32, bitcast=True)
    floors, q, d = tl.maximum(s_bits.to(tl.int32) - 1024, 0), (lane % 16).to(tl.float32), 0.0
    if KIND > 0:
        ends = in_group if not WHOLE else None
        d = tl.load(d_ptr + group * 64 // OWN_COLUMNS, mask=ends, other=0 if not WHOLE else None).to(tl.float32)
    steps = _steps_of(q, s, c, floors, d, KIND)
    if KIND > 0 and OWN_COLUMNS % 64 > 0:  # halves of a group have their own
        ends = group * 64 + 32 < columns if not WHOLE else None
        second = (group * 64 + 32) // OWN_COLUMNS
        other_d = tl.load(d_ptr + second, mask=ends, other=0 if not WHOLE else None).to(tl.float32)
        steps = (steps & 0xFFFF) | _steps_of(q, s, c, floors, other_d, KIND) << 16
        d = tl.where(lane // 8 % 2 == 0, d, other_d)
    found = ()  # type: tuple[Any, ...]
    for j in tl.static_range(4):
        words = here if j < 2 else there
        number = ((words >> (j % 2 * 16)) & 15).to(tl.int32)
        step = tl.gather(steps, lane // 16 * 16 + number, 0)
        if KIND > 0 and OWN_COLUMNS % 64 > 0:
            step = step << (16 - lane // 8 % 2 * 16) >> 16
        found += (step if WHOLE else tl.where(k + j < columns, step, 0),)
    found += (floors, d)
    return found


@jit
def _codes_at(codes_ptr, begins, steps, count, WHOLE: tl.constexpr):
    """The codes of four steps, of so many bits together, that follow one another, and whether each is an exception: at
    most 64 bits of three words."""
    ptrs, shift = codes_ptr + (begins >> 5), (begins & 31).to(tl.uint32)
    end = (begins & 31) + count
    low = tl.load(ptrs, mask=None if WHOLE else count > 0, other=None if WHOLE else 0)
    middle = tl.load(ptrs + 1, mask=end > 32, other=0)
    high = tl.load(ptrs + 2, mask=end > 64, other=0)
    low = (low >> shift) | ((middle << 1) << (31 - shift))
    high = (middle >> shift) | ((high << 1) << (31 - shift))
    left = low.to(tl.uint64) | high.to(tl.uint64) << 32
    codes = ()  # type: tuple[Any, ...]
    excepted = ()  # type: tuple[Any, ...]
    for j in tl.static_range(4):
        size = steps[j] & 31
        largest = (1 << size) - 1
        codes += (left.to(tl.int32) & largest,)
        excepted += (codes[j] == largest if WHOLE else (codes[j] == largest) & (size > 0),)
        left = left >> size.to(tl.uint64)
    return codes, excepted


@jit(do_not_specialize=("start",))
def _decode_rest_kernel(
    starts_ptr, pool_ptr, numbers_ptr, scales_ptr, centres_ptr, own_scales_ptr, out_ptr, start, columns,
    number_words, row_scales, own_row_scales, own_rows, OWN_COLUMNS: tl.constexpr, KIND: tl.constexpr,
    WHOLE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    out_row = tl.program_id(0)
    row = (start + out_row).to(tl.int64)
    codes_ptr = pool_ptr + tl.load(starts_ptr + row)
    list_ptr = (pool_ptr + tl.load(starts_ptr + row + 1)).to(tl.pointer_type(tl.uint16)) - 1
    d_ptr = own_scales_ptr + row // own_rows * own_row_scales
    if KIND == 1:
        d_ptr = codes_ptr.to(tl.pointer_type(tl.float16))
        codes_ptr += (columns + 63) // 64
    numbers_ptr, out_ptr = numbers_ptr + row * number_words, out_ptr + out_row.to(tl.int64) * columns
    scales_ptr, centres_ptr = scales_ptr + row * row_scales, centres_ptr + row * row_scales
    bits, listed = 0, 0
    for first_tile in range(0, (columns + 127) // 128, TILES):
        # Counts of tiles are added up together, in 16 bits each.
        steps = ()  # type: tuple[Any, ...]
        counts = tl.zeros([32], tl.int32)
        for t in tl.static_range(TILES):
            steps += (
                steps_at(
                    numbers_ptr, scales_ptr, centres_ptr, d_ptr, first_tile + t, columns, OWN_COLUMNS, KIND, WHOLE
                ),
            )
            for j in tl.static_range(4):
                counts += (steps[t][j] & 31) << 16 * t
        before, all_bits = tl.cumsum(counts, 0) - counts, tl.sum(counts, 0)
        codes = ()  # type: tuple[Any, ...]
        exceptions = tl.zeros([32], tl.int32)
        for t in tl.static_range(TILES):
            begins, count = bits + (before >> 16 * t & 0xFFFF), counts >> 16 * t & 0xFFFF
            codes += (_codes_at(codes_ptr, begins, steps[t], count, WHOLE),)
            bits += all_bits >> 16 * t & 0xFFFF
            for j in tl.static_range(4):
                exceptions += codes[t][1][j].to(tl.int32) << 16 * t
        before, all_listed = tl.cumsum(exceptions, 0) - exceptions, tl.sum(exceptions, 0)
        for t in tl.static_range(TILES):
            found = ()  # type: tuple[Any, ...]
            at, d = listed + (before >> 16 * t & 0xFFFF), steps[t][5]
            for j in tl.static_range(4):
                excepted = codes[t][1][j]
                whole = tl.load(list_ptr - at, mask=excepted, other=0)
                at += excepted.to(tl.int32)
                places = (steps[t][j] >> 5) + codes[t][0][j]
                if KIND == 1:
                    places = tl.where(excepted, whole.to(tl.int16, bitcast=True).to(tl.int32), places)
                    w = (places.to(tl.float32) * d).to(out_ptr.dtype.element_ty)
                elif KIND == 2:
                    patterns = tl.where(excepted, whole.to(tl.int32), tl.abs(places) | tl.where(places < 0, 0x80, 0))
                    w = (_fp8_numbers(patterns) * d).to(own_scales_ptr.dtype.element_ty)
                    w = w.to(tl.float32).to(out_ptr.dtype.element_ty)
                else:
                    patterns = (tl.abs(places) - 1 + steps[t][4]) | tl.where(places < 0, 0x8000, 0)
                    patterns = tl.where(excepted, whole.to(tl.int32), patterns)
                    if out_ptr.dtype.element_ty == tl.uint16:
                        w = patterns.to(tl.uint16)
                    else:
                        w = (patterns << 16).to(tl.float32, bitcast=True).to(out_ptr.dtype.element_ty)
                found += (w,)
            listed += all_listed >> 16 * t & 0xFFFF
            pairs = tl.join(tl.join(found[0], found[2]), tl.join(found[1], found[3]))
            k = (first_tile + t) * 128 + tl.arange(0, 128)
            tl.store(out_ptr + k, tl.reshape(pairs, [128]), mask=None if WHOLE else k < columns)


def decode_rest_triton(
    stored: torch.Tensor, copy: ScaledRows, start: int, out: torch.Tensor, kind: str = BF16,
    scales: torch.Tensor | None = None, form: ScaledFormat | None = None,
) -> None:  # fmt: skip
    """Triton version of `decode_rest`."""
    require_triton("decoding what is left of weights")
    starts, pool = parts_of(stored, len(copy.numbers))
    bits = out.view(torch.uint16) if out.dtype == torch.bfloat16 and kind == BF16 else out
    own, own_rows, own_columns = copy.scales, 1, Q8_BLOCK
    if scales is not None and form is not None:
        own, own_rows, own_columns = scales, form.rows, form.columns
    columns = out.shape[1]
    options: dict[str, Any] = {
        "OWN_COLUMNS": own_columns, "KIND": KINDS[kind], "WHOLE": columns % (_DECODED_TILES * 128) == 0,
        "TILES": _DECODED_TILES, "num_warps": 1,
    }  # fmt: skip
    with torch.cuda.device_of(out):
        _decode_rest_kernel[(len(out),)](
            starts, pool.view(torch.uint32), copy.numbers.view(torch.uint32), copy.scales.view(torch.uint16),
            copy.zeros.view(torch.uint16), own, bits, start, columns, copy.numbers.shape[1] // 4,
            copy.scales.stride(0), own.stride(0), own_rows, **options,
        )  # fmt: skip


def decode_rest(
    stored: torch.Tensor, copy: ScaledRows, start: int, out: torch.Tensor, kind: str = BF16,
    scales: torch.Tensor | None = None, form: ScaledFormat | None = None,
) -> None:  # fmt: skip
    """Decode rows of a matrix, enqueued on the current stream of the device.

    Args:
        stored: uint8, what one of the encoders has written, contiguous, at an address that four divides.
        copy: The one that it was coded with, of the whole matrix, on the same device.
        start: The first row that is decoded.
        out: [rows, K] of any float dtype, contiguous; every element is written.
        kind: What the matrix is in.
        scales: Of FP8: [rows of scales, columns of scales].
        form: Of FP8: how scales are shared.
    """
    assert (kind == FP8) == (scales is not None) == (form is not None)
    assert form is None or form.columns % LEAST_OWN_COLUMNS == 0
    assert out.is_contiguous() and 0 <= start <= start + len(out) <= len(copy.numbers)
    assert stored.dtype == torch.uint8 and stored.is_contiguous()
    (decode_rest_triton if out.is_cuda else decode_rest_reference)(stored, copy, start, out, kind, scales, form)
