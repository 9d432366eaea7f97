"""Codes what is left of matrices given their copies in 4 bits: what `low_bit_rest` decodes, and says how it lies.

Some rows are coded at a time, by torch's operations or by two kernels: one counts the words of each row, so that it is
known where the next one begins, the other writes them. Both find out about steps just as decoding does.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl
from offload_runtime_kernels.gguf_blocks import FORMATS, unpack_rows
from offload_runtime_kernels.low_bit_rest import (
    BF16,
    FP8,
    KINDS,
    Q8_0,
    Q8_BLOCK,
    bf16_places,
    bf16_steps,
    parts_of,
    pieces,
    places_of,
    scaled_steps,
    scales_of,
    steps_at,
)
from offload_runtime_kernels.scaled_rows import ScaledFormat, ScaledRows, unpack_numbers

_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 23}  # coded at a time; MAKING_BYTES of plans has room for what that takes


class CodedRows(NamedTuple):
    """Some rows of a matrix and their copy.

    Attributes:
        kind: What the matrix is in.
        numbers: [R, K], contiguous: patterns of bf16 (int16), numbers of Q8_0 (int8) or patterns of E4M3 (uint8).
        copy: Of these rows.
        scales: Of Q8_0 fp16 [R, K / 32], of FP8 those of the whole matrix; none of bf16.
        first: The row of the matrix that the first of them is, as far as scales are concerned.
        form: How scales are shared.
    """

    kind: str
    numbers: torch.Tensor
    copy: ScaledRows
    scales: torch.Tensor
    first: int
    form: ScaledFormat

    @property
    def words_ahead(self) -> int:
        """Words of each row that scales take in front of its codes."""
        return -(-self.scales.shape[1] // 2) if self.kind == Q8_0 else 0


_ALONE = ScaledFormat(FP8, 1, Q8_BLOCK, torch.float16)  # as Q8_0's scales are shared, too


# --- by torch's operations


def _packed(
    codes: torch.Tensor, sizes: torch.Tensor, excepted: torch.Tensor, whole: torch.Tensor, ahead: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of each row int64 [R], and of all of them what is not zero: [R, words of the longest] int64, behind so many
    that are ahead of the codes."""
    codes = torch.where(excepted, (1 << sizes) - 1, codes).long()
    ends, listed = sizes.cumsum(1, dtype=torch.int32) + 32 * ahead, excepted.cumsum(1)
    counts = ((ends[:, -1] + 31) >> 5) + ((listed[:, -1] + 1) >> 1)
    width, begins = int(counts.max()), ends - sizes
    words, at = torch.zeros(len(codes), width, dtype=torch.int64, device=codes.device), (begins >> 5).long()
    codes <<= begins & 31
    words.scatter_add_(1, at, codes & 0xFFFFFFFF)
    words.scatter_add_(1, (at + 1).clamp_max_(width - 1), codes >> 32)  # nothing, where there is no next word
    row, column = excepted.nonzero(as_tuple=True)
    half = 2 * counts[row] - listed[row, column]
    words.index_put_((row, half >> 1), (whole[row, column].long() & 0xFFFF) << 16 * (half & 1), accumulate=True)
    return counts, words


def rest_words_reference(rows: CodedRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch version of `rest_words_triton`."""
    kind, numbers, every = rows.kind, rows.numbers.int(), slice(0, len(rows.numbers))
    if kind == BF16:
        first, sizes, floors = bf16_steps(rows.copy, every, numbers.shape[1])
        places = bf16_places(numbers, floors)
        none = places == 0
    else:
        own = slice(rows.first, rows.first + len(numbers))
        first, sizes = scaled_steps(rows.copy, every, scales_of(rows.scales, rows.form, own, numbers.shape[1]), kind)
        places = torch.where(numbers >= 128, 128 - numbers, numbers) if kind == FP8 else numbers
        none = (numbers == 128) & (kind == FP8)
    codes = places - first
    excepted = none | (codes < 0) | (codes >= (1 << sizes) - 1)
    counts, words = _packed(codes, sizes, excepted, numbers, rows.words_ahead)
    if ahead := rows.words_ahead:
        scales = rows.scales.view(torch.int16).long() & 0xFFFF
        scales = torch.nn.functional.pad(scales, (0, scales.shape[1] % 2)).unflatten(1, (-1, 2))
        words[:, :ahead] = scales[:, :, 0] | scales[:, :, 1] << 16
    return counts, words[torch.arange(words.shape[1], device=words.device) < counts[:, None]].to(torch.int32)


# --- the kernels: as in `low_bit_rest` a program, one warp, codes a row, of which each lane has four columns


@jit
def _coded_at(
    numbers_ptr, copy_ptr, scales_ptr, centres_ptr, d_ptr, row, tile, columns, number_words, row_scales,
    OWN_COLUMNS: tl.constexpr, KIND: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return of a tile of a row each lane's four steps and codes, which of these are exceptions, and what they are."""
    steps = steps_at(
        copy_ptr + row * number_words, scales_ptr + row * row_scales, centres_ptr + row * row_scales, d_ptr, tile,
        columns, OWN_COLUMNS, KIND, WHOLE,
    )  # fmt: skip
    numbers_ptr += row * columns
    k = tile * 128 + 4 * tl.arange(0, 32)
    codes = ()  # type: tuple[Any, ...]
    excepted = ()  # type: tuple[Any, ...]
    whole = ()  # type: tuple[Any, ...]
    for j in tl.static_range(4):
        number = tl.load(numbers_ptr + k + j, mask=None if WHOLE else k + j < columns, other=None if WHOLE else 0)
        number = number.to(tl.int32)
        if KIND == 0:
            places = places_of(number.to(tl.uint32, bitcast=True) << 16, steps[4])
            none = places == 0
        elif KIND == 1:
            places = number
            none = places != places
        else:
            places = tl.where(number >= 128, 128 - number, number)
            none = number == 128
        size, code = steps[j] & 31, places - (steps[j] >> 5)
        largest = (1 << size) - 1
        outside = none | (code < 0) | (code >= largest)
        outside = outside if WHOLE else outside & (size > 0)
        codes += (tl.where(outside, largest, code) & largest,)  # nothing behind the last column
        excepted += (outside,)
        whole += (number,)
    return steps, codes, excepted, whole


@jit
def _count_kernel(
    numbers_ptr, copy_ptr, scales_ptr, centres_ptr, own_scales_ptr, counts_ptr, first, ahead, columns, number_words,
    row_scales, own_row_scales, own_rows, OWN_COLUMNS: tl.constexpr, KIND: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d_ptr = own_scales_ptr + (first + row) // own_rows * own_row_scales
    bits, listed = tl.zeros([32], tl.int32), tl.zeros([32], tl.int32)
    for tile in range((columns + 127) // 128):
        steps, _codes, excepted, _whole = _coded_at(
            numbers_ptr, copy_ptr, scales_ptr, centres_ptr, d_ptr, row, tile, columns, number_words, row_scales,
            OWN_COLUMNS, KIND, WHOLE,
        )  # fmt: skip
        for j in tl.static_range(4):
            bits += steps[j] & 31
            listed += excepted[j].to(tl.int32)
    count = ahead + ((tl.sum(bits, 0) + 31) >> 5) + ((tl.sum(listed, 0) + 1) >> 1)
    tl.store(counts_ptr + row, count)


@jit
def _write_kernel(
    numbers_ptr, copy_ptr, scales_ptr, centres_ptr, own_scales_ptr, ends_ptr, words_ptr, first, ahead, columns,
    number_words, row_scales, own_row_scales, own_rows, OWN_COLUMNS: tl.constexpr, KIND: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, 32)
    d_ptr = own_scales_ptr + (first + row) // own_rows * own_row_scales
    start = tl.load(ends_ptr + row - 1, mask=row > 0, other=0)
    if KIND == 1:
        scales_out_ptr = (words_ptr + start).to(tl.pointer_type(tl.float16))
        for block in range(0, columns // OWN_COLUMNS, 32):
            real = block + lane < columns // OWN_COLUMNS
            tl.store(scales_out_ptr + block + lane, tl.load(d_ptr + block + lane, mask=real, other=0.0), mask=real)
    list_ptr = (words_ptr + tl.load(ends_ptr + row)).to(tl.pointer_type(tl.uint16)) - 1
    words_ptr += start + ahead
    bits, listed = 0, 0
    for tile in range((columns + 127) // 128):
        steps, codes, excepted, whole = _coded_at(
            numbers_ptr, copy_ptr, scales_ptr, centres_ptr, d_ptr, row, tile, columns, number_words, row_scales,
            OWN_COLUMNS, KIND, WHOLE,
        )  # fmt: skip
        joined, length = tl.zeros([32], tl.uint64), tl.zeros([32], tl.int32)
        exceptions = tl.zeros([32], tl.int32)
        for j in tl.static_range(4):
            joined |= codes[j].to(tl.uint64) << length.to(tl.uint64)
            length += steps[j] & 31
            exceptions += excepted[j].to(tl.int32)
        begins = bits + tl.cumsum(length, 0) - length
        bits += tl.sum(length, 0)
        # Into three words, which lanes share with their neighbours.
        ptrs, shift = words_ptr + (begins >> 5), (begins & 31).to(tl.uint32)
        low, high = (joined & 0xFFFFFFFF).to(tl.uint32), (joined >> 32).to(tl.uint32)
        parts = (low << shift, (high << shift) | ((low >> 1) >> (31 - shift)), (high >> 1) >> (31 - shift))
        for part in tl.static_range(3):
            word = parts[part].to(tl.int32, bitcast=True)
            tl.atomic_or(ptrs + part, word, mask=word != 0, sem="relaxed")
        at = listed + tl.cumsum(exceptions, 0) - exceptions
        listed += tl.sum(exceptions, 0)
        for j in tl.static_range(4):
            tl.store(list_ptr - at, whole[j].to(tl.uint16), mask=excepted[j])
            at += excepted[j].to(tl.int32)


def rest_words_triton(rows: CodedRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the words of each row, integers [R], and all words, int32, one row's behind the other's."""
    require_triton("coding what is left of weights")
    numbers, copy, scales, form, kind = rows.numbers, rows.copy, rows.scales, rows.form, rows.kind
    height, columns = numbers.shape
    if kind == BF16:
        numbers, scales = numbers.view(torch.uint16), copy.scales
    given = (
        numbers, copy.numbers.view(torch.uint32), copy.scales.view(torch.uint16), copy.zeros.view(torch.uint16), scales,
    )  # fmt: skip
    sizes = (
        rows.first, rows.words_ahead, columns, copy.numbers.shape[1] // 4, copy.scales.stride(0), scales.stride(0),
        form.rows,
    )  # fmt: skip
    options: dict[str, Any] = {
        "OWN_COLUMNS": form.columns, "KIND": KINDS[kind], "WHOLE": columns % 128 == 0, "num_warps": 1,
    }  # fmt: skip
    counts = torch.zeros(height, dtype=torch.int32, device=numbers.device)
    with torch.cuda.device_of(numbers):
        _count_kernel[(height,)](*given, counts, *sizes, **options)
        ends = counts.cumsum(0)
        words = torch.zeros(int(ends[-1]), dtype=torch.int32, device=numbers.device)
        _write_kernel[(height,)](*given, ends, words, *sizes, **options)
    return counts, words


# --- whole matrices


def _encode_all(
    rows: Callable[[slice], CodedRows], shape: tuple[int, ...], device: torch.device, out: torch.Tensor
) -> bool:
    """Write rows that are coded, one behind the other."""
    assert out.dtype == torch.uint8 and out.is_contiguous()
    (height, columns), (starts, pool), end = shape, parts_of(out, shape[0]), 0
    starts[0] = 0
    code = rest_words_triton if device.type == "cuda" else rest_words_reference
    for some in pieces(height, columns, _ELEMENTS[device.type]):
        counts, words = code(rows(some))
        if end + len(words) > len(pool):
            return False
        starts[1:][some].copy_(counts.cumsum(0) + end)
        pool[end : end + len(words)].copy_(words)
        end += len(words)
    pool[end:] = 0
    return True


def encode_rest(values: torch.Tensor, copy: ScaledRows, out: torch.Tensor) -> bool:
    """Code what is left of a matrix in bf16, some rows at a time; the device is waited for.

    Args:
        values: bf16 [M, K], contiguous.
        copy: Of the matrix, by `quantise`, on the same device.
        out: uint8 [rest_bytes], or another number of whole words, on any device; written.

    Returns:
        Whether there was room for it; if not, `out` cannot be decoded.
    """
    assert values.dtype == torch.bfloat16 and values.is_contiguous() and len(copy.numbers) == len(values)
    bits, nothing = values.view(torch.int16), values.new_empty(0, 0)

    def coded(rows: slice) -> CodedRows:
        return CodedRows(BF16, bits[rows], copy.some(rows), nothing, 0, _ALONE)

    return _encode_all(coded, bits.shape, values.device, out)


def encode_q8_rest(stored: torch.Tensor, columns: int, copy: ScaledRows, out: torch.Tensor) -> bool:
    """The same of a matrix in Q8_0: uint8 [M, bytes of a row in planes], contiguous."""
    form = FORMATS["Q8_0"]
    assert len(copy.numbers) == len(stored) and columns % Q8_BLOCK == 0

    def coded(rows: slice) -> CodedRows:
        blocks = unpack_rows(stored[rows], form, columns).view(-1, columns // Q8_BLOCK, form.nbytes)
        scales = blocks[:, :, :2].contiguous().view(torch.float16).flatten(1)
        numbers = blocks[:, :, 2:].contiguous().view(torch.int8).flatten(1)
        return CodedRows(Q8_0, numbers, copy.some(rows), scales, 0, _ALONE)

    return _encode_all(coded, (len(stored), columns), stored.device, out)


def encode_fp8_rest(whole: ScaledRows, form: ScaledFormat, columns: int, copy: ScaledRows, out: torch.Tensor) -> bool:
    """The same of a matrix of FP8 numbers, whose scales are kept elsewhere; columns are in no order of their own."""
    height = len(whole.numbers)
    assert len(copy.numbers) == height and form.number == FP8 and not form.ordered

    def coded(rows: slice) -> CodedRows:
        numbers = unpack_numbers(whole.numbers[rows], form, columns)
        return CodedRows(FP8, numbers, copy.some(rows), whole.scales, rows.start, form)

    return _encode_all(coded, (height, columns), whole.numbers.device, out)
