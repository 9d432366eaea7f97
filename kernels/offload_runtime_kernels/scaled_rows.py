"""Rows of small numbers with scales, as quantised safetensors checkpoints have them: FP8, int8, int4.

    w = ((q - z) * s rounded to the scales' dtype), rounded to the dtype of the result

q is a number of 8 bits in two's complement (int8), without a sign (uint8) or as E4M3 (FP8: four bits of exponent with
bias 7, three of mantissa, no infinity, 0x7F and 0xFF no number), or of 4 bits without a sign (uint4, the even column in
the lower half of a byte). z is a constant, or is added to an integer that is stored like q beside every scale.
q - z and its product with a scale of 16 bits are exact in fp32 (at most 9 + 11 bits), so that only what the formula
names rounds; where scales are fp32, the product itself does.

One scale is for a rectangle of weights: all, a row, a group of columns, or a block; or the columns say themselves
which group they are of (the order of activations).
"""

import math
from typing import NamedTuple

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl, triton

_PROGRAM_WEIGHTS = 4096
_MOST_LANES = 128  # columns of one scale that are decoded together
_REFERENCE_WEIGHTS = 1 << 18  # decoded at a time: 1 MB of fp32
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

    def row_bytes(self, count: int) -> int:
        """Bytes of so many numbers in a row."""
        return -(-count * BITS[self.number] // 8)

    def scales(self, rows: int, columns: int) -> tuple[int, int]:
        """How many scales a matrix has: down and across."""
        return -(-rows // self.rows), -(-columns // self.columns)


class ScaledRows(NamedTuple):
    """What is stored of a matrix [M, K], contiguous, on one device.

    Attributes:
        numbers: uint8 [M, row_bytes(K)].
        scales: [rows, columns] of scales.
        zeros: uint8 [rows of scales, row_bytes(columns of scales)]; empty without them.
        groups: int32 [K], the group of each column; empty unless it is `ordered`.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor


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
        w = _numbers_reference(stored.numbers[first:last], width, form.number) - form.zero
        if form.zeros:
            w -= _numbers_reference(stored.zeros[own], stored.scales.shape[1], form.number)[:, groups]
        w *= stored.scales[own][:, groups].float()
        out[first - start : last - start] = w.to(form.scale).to(out.dtype)


@jit
def _numbers_at(row_ptr, at, NUMBER: tl.constexpr):
    """fp32 numbers of rows."""
    if NUMBER == "uint4":
        return ((tl.load(row_ptr + at // 2).to(tl.int32) >> (at % 2 * 4)) & 15).to(tl.float32)
    byte = tl.load(row_ptr + at)
    if NUMBER == "FP8":
        # By integers, as GPUs before 8.9 do not convert them: an fp16 whose exponent is 8 too small.
        bits = byte.to(tl.int16)
        half = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
        number = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), number)
    if NUMBER == "int8":
        return byte.to(tl.int8, bitcast=True).to(tl.float32)
    return byte.to(tl.float32)


@jit
def scaled(
    numbers_ptr, scales_ptr, zeros_ptr, groups_ptr, row, chunk, lane, row_bytes, num_groups, zero_bytes, rows, chunks,
    NUMBER: tl.constexpr, ZERO: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """fp32 [C, LANES] weights of C chunks of rows: `row` and `chunk` (which of its row) [C, 1], `lane` [1, LANES]. One
    scale is for `rows` times `chunks`."""
    column = chunk * LANES + lane
    group = tl.load(groups_ptr + column) if ORDERED else chunk // chunks
    own = (row // rows).to(tl.int64)
    w = _numbers_at(numbers_ptr + row.to(tl.int64) * row_bytes, column, NUMBER) - ZERO
    if ZEROS:
        w -= _numbers_at(zeros_ptr + own * zero_bytes, group, NUMBER)
    scale = tl.load(scales_ptr + own * num_groups + group)
    return (w * scale.to(tl.float32)).to(scale.dtype).to(tl.float32)


@jit(do_not_specialize=("start", "num_chunks", "row_chunks", "num_groups", "zero_bytes", "rows", "chunks"))
def _decode_scaled_kernel(
    numbers_ptr, scales_ptr, zeros_ptr, groups_ptr, out_ptr, start, num_chunks, row_chunks, row_bytes, num_groups,
    zero_bytes, rows, chunks, NUMBER: tl.constexpr, ZERO: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr,
    LANES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    # What lies behind the last chunk reads that one and stores nothing.
    read = tl.minimum(number, num_chunks - 1)
    w = scaled(
        numbers_ptr, scales_ptr, zeros_ptr, groups_ptr, start + read // row_chunks, read % row_chunks, lane,
        row_bytes, num_groups, zero_bytes, rows, chunks, NUMBER, ZERO, ZEROS, ORDERED, LANES,
    )  # fmt: skip
    place = number.to(tl.int64) * LANES + lane
    tl.store(out_ptr + place, w.to(out_ptr.dtype.element_ty), mask=(number < num_chunks) & (lane >= 0))


def decode_scaled_triton(stored: ScaledRows, form: ScaledFormat, start: int, out: torch.Tensor) -> None:
    """Triton version of `decode_scaled`."""
    require_triton("decoding quantised weights")
    height, width = out.shape
    together = width if form.ordered else math.gcd(width, form.columns)
    lanes = min(_MOST_LANES, together & -together)
    num_chunks, chunks = height * (width // lanes), _PROGRAM_WEIGHTS // lanes
    with torch.cuda.device_of(out):
        _decode_scaled_kernel[(triton.cdiv(num_chunks, chunks),)](
            stored.numbers, stored.scales, stored.zeros, stored.groups, out, start, num_chunks, width // lanes,
            stored.numbers.shape[1], stored.scales.shape[1], stored.zeros.shape[-1], form.rows,
            max(1, form.columns // lanes), NUMBER=form.number, ZERO=form.zero, ZEROS=form.zeros, ORDERED=form.ordered,
            LANES=lanes, CHUNKS=chunks, num_warps=4,
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
