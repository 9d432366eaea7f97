"""bf16 matrices in 12 bits an element, without loss: sign and mantissa in eight bits, an index of the exponent in four.

    exponent = base + index for index 1 to 15;    0 for index 0;    listed apart for exceptions, whose index is 0 too

The base is the row's own, the one with the fewest exceptions: trained weights have their exponents side by side, and
where the 15 of a window are not enough for a row, exponent 0 (zeros and subnormals) mostly is what is missing. A window
is decoded with an addition, where any 15 exponents would take a table.

Rows are stored one after the other, each by itself: any of them can be decoded alone, and all take the same bytes,
which are known before a weight is read. With K columns and room for E exceptions, a row is

    low       K        sign and mantissa; of each 2 * SPAN columns the first SPAN are the even bytes, the others the odd
    index     K / 2    in the same order; of each 4 * SPAN columns the lower halves of bytes, then the upper ones
    column    2 E      of each exception, ascending, uint16
    exponent  E        of each exception
    base, count        the last two bytes; `count` of the E exceptions are there

so that a thread makes whole words of the result out of whole words of both planes: 3.4 operations an element, and none
that moves elements between threads. Exceptions are written over what the window made of them. The mean of Gaussian rows
is 0.013 % of the columns, of those of Student's t with three degrees of freedom 0.07 %; a row has room for 8 and 0.4 %.
"""

from typing import NamedTuple

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton

_WINDOW = 15  # exponents that an index stands for
_LEAST_SPAN = 16
_MOST_SPAN = 64  # of 128 bytes of the result
_MOST_COLUMNS = 1 << 16
_MOST_EXCEPTIONS = 255
_ALIGNMENT_BYTES = 16  # of rows, for vector loads
_PROGRAM_WORDS = 512  # of indices, worked on at a time: 4096 columns
_PATCHED = 32  # exceptions written at a time
_REFERENCE_ELEMENTS = 1 << 20  # decoded at a time
_CODED_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 22}  # at a time: some 60 MB of a GPU, which is waited for each time
_SIGN_MANTISSA = -32641  # 0x807F


class CodedRow(NamedTuple):
    """How a row lies in `nbytes`, in spans of so many columns; there is `room` for exceptions."""

    columns: int
    span: int
    room: int
    nbytes: int

    @classmethod
    def of(cls, columns: int) -> "CodedRow | None":
        """None where rows of so many columns are not coded: 64 must divide them, and code take fewer bytes."""
        span = min(_MOST_SPAN, (columns & -columns) // 4)
        planes_bytes, wanted = columns + columns // 2, 8 + columns // 256
        nbytes = -(-(planes_bytes + 3 * wanted + 2) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if span < _LEAST_SPAN or columns > _MOST_COLUMNS or nbytes >= 2 * columns:
            return None
        return cls(columns, span, min(_MOST_EXCEPTIONS, (nbytes - planes_bytes - 2) // 3), nbytes)


def _exceptions(stored: torch.Tensor, row: CodedRow) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of coded rows uint8 [R, nbytes]: columns int16 [R, room], exponents uint8 [R, room]."""
    start = row.columns + row.columns // 2
    columns = stored[:, start : start + 2 * row.room].view(torch.int16)
    return columns, stored[:, start + 2 * row.room : start + 3 * row.room]


def _encode(values: torch.Tensor, row: CodedRow, out: torch.Tensor) -> int:
    count, columns = values.shape
    bits = values.view(torch.int16)
    exponent = (bits >> 7).to(torch.uint8)
    number = torch.arange(count, dtype=torch.int32, device=values.device)[:, None]
    histogram = torch.bincount((number * 256 + exponent).view(-1), minlength=256 * count).view(count, 256)
    histogram[:, 0] = 0
    below = torch.nn.functional.pad(histogram.cumsum(1), (1, 0))
    covered = below[:, 1 + _WINDOW :] - below[:, 1:-_WINDOW]
    # Of several windows that cover as much the lowest, on every device.
    base = (covered * 256 - torch.arange(covered.shape[1], device=values.device)).argmax(1, keepdim=True)
    index = exponent - base.to(torch.uint8)  # wraps
    index *= (index <= _WINDOW) & (exponent != 0)
    at, column = ((index == 0) & (exponent != 0)).nonzero(as_tuple=True)
    found = torch.bincount(at, minlength=count)
    out.zero_()
    low = (bits & 127 | (bits >> 8) & 128).to(torch.uint8)
    out[:, :columns] = low.view(count, -1, 2, row.span).transpose(2, 3).reshape(count, columns)
    lower, upper = index.view(count, -1, 2, 2, row.span).transpose(3, 4).unbind(2)
    out[:, columns : columns + columns // 2] = (lower | upper << 4).reshape(count, -1)
    out[:, -2] = base[:, 0].to(torch.uint8)
    out[:, -1] = found.clamp(max=row.room).to(torch.uint8)
    place = torch.arange(len(at), device=values.device) - (found.cumsum(0) - found)[at]
    fits = place < row.room
    at, column, place = at[fits], column[fits], place[fits]
    exception_columns, exception_exponents = _exceptions(out, row)
    exception_columns[at, place] = column.to(torch.int16)  # wraps
    exception_exponents[at, place] = exponent[at, column]
    return int((found > row.room).sum())


def encode_rows(values: torch.Tensor, row: CodedRow, out: torch.Tensor, device: torch.device) -> int:
    """Code rows with torch's operations, a piece at a time.

    Args:
        values: bf16 [R, columns], contiguous, on any device.
        row: How a row lies in its bytes.
        out: uint8 [R, nbytes], contiguous, on any device; written.
        device: Where to work.

    Returns:
        Rows that have more exceptions than room, of which `out` cannot be decoded. Waits for the device.
    """
    assert values.dtype == torch.bfloat16 and values.is_contiguous() and values.shape[1] == row.columns
    assert out.dtype == torch.uint8 and out.is_contiguous() and out.shape == (len(values), row.nbytes)
    step, failed = max(1, _CODED_ELEMENTS[device.type] // row.columns), 0
    for rows, coded in zip(values.split(step), out.split(step), strict=True):
        made = torch.empty_like(coded, device=device)
        failed += _encode(rows.to(device), row, made)
        coded.copy_(made)
    return failed


def _decode_reference(stored: torch.Tensor, row: CodedRow, out: torch.Tensor) -> None:
    count, columns = out.shape
    low = stored[:, :columns].view(torch.int8).view(count, -1, row.span, 2).transpose(2, 3).reshape(count, columns)
    index = stored[:, columns : columns + columns // 2].view(count, -1, row.span, 2)
    index = torch.stack((index & 15, index >> 4), 2).transpose(3, 4).reshape(count, columns)
    exponent = (index + stored[:, -2:-1]) * (index != 0)
    exception_columns, exception_exponents = _exceptions(stored, row)
    at, place = (torch.arange(row.room, device=stored.device) < stored[:, -1:]).nonzero(as_tuple=True)
    exponent[at, exception_columns[at, place].long() & 0xFFFF] = exception_exponents[at, place]
    out.copy_(low.to(torch.int16) & _SIGN_MANTISSA | exponent.to(torch.int16) << 7)


def decode_rows_reference(stored: torch.Tensor, row: CodedRow, out: torch.Tensor) -> None:
    """Plain torch version of `decode_rows`."""
    step = max(1, _REFERENCE_ELEMENTS // row.columns)
    for rows, part in zip(stored.split(step), out.view(torch.int16).split(step), strict=True):
        _decode_reference(rows, row, part)


@jit
def exponents(index, base):
    """Four exponents in a word, of four indices below 16 and the row's base, all uint32."""
    return index + (((index + 0x0F0F0F0F) >> 4) & 0x01010101) * base


@jit
def even_elements(low, exponent):
    """The bits of two elements, of bytes 0 and 2 of words of signs and mantissas and of exponents, all uint32."""
    return (low & 0x007F007F) | ((low << 8) & 0x80008000) | ((exponent << 7) & 0x7F807F80)


@jit
def odd_elements(low, exponent):
    """The same of bytes 1 and 3."""
    return ((low >> 8) & 0x007F007F) | (low & 0x80008000) | ((exponent >> 1) & 0x7F807F80)


@jit
def _byte(ptr, mask=None):
    return tl.load(ptr, mask=mask).to(tl.uint32)


@jit
def _decode_rows_kernel(
    stored_ptr, out_ptr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, ROOM: tl.constexpr, ROW_BYTES: tl.constexpr,
    GROUPS: tl.constexpr, PATCHED: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    row_ptr, to_ptr = stored_ptr + number * ROW_BYTES, out_ptr + number * COLUMNS
    base, count = _byte(row_ptr + ROW_BYTES - 2), _byte(row_ptr + ROW_BYTES - 1).to(tl.int32)
    words: tl.constexpr = SPAN // 2  # of a span of the result, of two spans of `low`, of four of `index`
    groups: tl.constexpr = COLUMNS // (4 * SPAN)
    low_ptr, to_words_ptr = row_ptr.to(tl.pointer_type(tl.uint32)), to_ptr.to(tl.pointer_type(tl.uint32))
    index_ptr = (row_ptr + COLUMNS).to(tl.pointer_type(tl.uint32))
    word = tl.arange(0, words)[None, :]
    for start in tl.static_range(0, groups, GROUPS):
        group = start + tl.arange(0, GROUPS)[:, None]
        inside = (group < groups) & (word >= 0)
        indices = tl.load(index_ptr + group * words + word, mask=inside)
        for half in tl.static_range(2):
            low = tl.load(low_ptr + (2 * group + half) * words + word, mask=inside)
            exponent = exponents((indices >> (4 * half)) & 0x0F0F0F0F, base)
            to = to_words_ptr + (4 * group + 2 * half) * words + word
            tl.store(to, even_elements(low, exponent), mask=inside)
            tl.store(to + words, odd_elements(low, exponent), mask=inside)
    # Other threads of this program may have written what exceptions are written over.
    tl.debug_barrier()
    column_ptr = (row_ptr + COLUMNS + COLUMNS // 2).to(tl.pointer_type(tl.uint16))
    exponent_ptr = row_ptr + COLUMNS + COLUMNS // 2 + 2 * ROOM
    for start in range(0, count, PATCHED):
        place = start + tl.arange(0, PATCHED)
        there = place < count
        column = tl.load(column_ptr + place, mask=there, other=0).to(tl.int32)
        byte = column // (2 * SPAN) * (2 * SPAN) + column % SPAN * 2 + column // SPAN % 2
        bits = even_elements(_byte(row_ptr + byte, there), _byte(exponent_ptr + place, there))
        tl.store(to_ptr + column, bits.to(tl.uint16), mask=there)


def decode_rows_triton(stored: torch.Tensor, row: CodedRow, out: torch.Tensor) -> None:
    """Triton version of `decode_rows`: a program for each row."""
    require_triton("decoding 12-bit weights")
    groups = row.columns // (4 * row.span)
    with torch.cuda.device_of(stored):
        _decode_rows_kernel[(len(stored),)](
            stored, out.view(torch.uint16), COLUMNS=row.columns, SPAN=row.span, ROOM=row.room,
            ROW_BYTES=row.nbytes, GROUPS=min(triton.next_power_of_2(groups), 2 * _PROGRAM_WORDS // row.span),
            PATCHED=_PATCHED, num_warps=4,
        )  # fmt: skip


def decode_rows(stored: torch.Tensor, row: CodedRow, out: torch.Tensor) -> None:
    """Decode whole rows, enqueued on the current stream of the device.

    Args:
        stored: uint8 [R, nbytes], contiguous, at an address that 16 divides.
        row: How a row lies in its bytes.
        out: bf16 [R, columns], contiguous; every element is written.
    """
    assert stored.dtype == torch.uint8 and stored.is_contiguous() and stored.shape[1] == row.nbytes
    assert out.dtype == torch.bfloat16 and out.is_contiguous() and out.shape == (len(stored), row.columns)
    (decode_rows_triton if stored.is_cuda else decode_rows_reference)(stored, row, out)
