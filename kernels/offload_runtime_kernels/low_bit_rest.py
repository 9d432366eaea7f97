"""What makes a bf16 matrix out of its copy in 4 bits (`low_bit_copy`), every bit of it.

A copy says in which step of its scale a weight lies, about, and how many numbers of bf16 are in that step: a code that
says which one it is takes just as many bits as it must. So the lengths of all codes are known before one is read, and a
row's weights are decoded together, after adding lengths up.

    u = (q - 7.5) s + c;    a step is [u - s / 2, u + s / 2], of the least and the largest q one and a half more outward
    place(w) = 0 for |w| < s / 256, otherwise the position among the numbers from there on, negative below zero
    code = place(w) - place(where the step begins), in bits enough for 15/16 of the step's places and one more
    the largest code stands for an exception: places behind the code's room, out of the step, or 0

Of a row first all codes follow one another from the lowest bit of a word on; exceptions, whole patterns of 16 bits,
begin at the end and go backwards. A matrix is

    starts    4 (M + 1)             the words at which its rows begin, uint32, and the last one ends
    rows      M (17 K / 16 + 8)     one behind the other; what is left over is behind the last

SmolLM2's matrices, off any grid by noise, take 7.39 to 7.69 bits a weight, but for two of its first layer, which take
7.91 and 7.98; Gaussian weights take 7.34, those of Student's t with three degrees of freedom 8.24. There is room for
8.5. A code of 8 bits for each weight takes 8.4 of SmolLM2's with exceptions in further bytes, and 9.2 with ones of 16
bits.

What decoding computes in fp32 has one rounding in every sum and none in a product: it is the same on every device.
"""

import math

import torch

from offload_runtime_kernels._jit import jit, require_triton, tl
from offload_runtime_kernels.low_bit_copy import COPY, GROUP
from offload_runtime_kernels.scaled_rows import MIDDLE, ScaledRows, unpack_numbers

_FLOOR = 8 << 7  # from the pattern of a scale down to that of its 256th
_ALIGNMENT_BYTES = 256
_ROOM, _ROW_BYTES = 17 / 16, 8  # bytes of a weight, and of a row's words that are not filled
_DECODED_GROUPS = 8  # of a row, at a time
_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 21}  # worked on at a time, some 200 MB of a GPU


def _starts_bytes(rows: int) -> int:
    return -(-4 * (rows + 1) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def rest_bytes(rows: int, columns: int) -> int:
    """Return the bytes of what is left of a matrix, as far as there is room for it."""
    return _starts_bytes(rows) + rows * (math.ceil(columns * _ROOM / 4) * 4 + _ROW_BYTES)


def used_bytes(stored: torch.Tensor, rows: int) -> int:
    """Return the bytes that a coded matrix has of those there is room for."""
    return _starts_bytes(rows) + 4 * int(stored[4 * rows : 4 * (rows + 1)].view(torch.int32))


def _parts(stored: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the starts int32 [M + 1] and of all words int32."""
    return stored[: 4 * (rows + 1)].view(torch.int32), stored[_starts_bytes(rows) :].view(torch.int32)


# --- the reference and the encoder, by torch's operations; all are [R, K] int32


def _places(patterns: torch.Tensor, floors: torch.Tensor) -> torch.Tensor:
    """Places of patterns of bf16, of which bits above the lower 16 count for nothing."""
    outside = (patterns & 0x7FFF).sub_(floors).add_(1).clamp_min_(0)
    return torch.where((patterns & 0x8000) != 0, -outside, outside)


def _steps(copy: ScaledRows, rows: slice, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The place at which each weight's step begins, the size of its code, and the pattern of its floor."""
    pairs = unpack_numbers(copy.numbers[rows], COPY, columns)
    q = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)[:, :columns].float()
    groups = torch.arange(columns, device=q.device) // GROUP
    s, c = copy.scales[rows], copy.zeros[rows].view(COPY.scale)
    floors = (s.contiguous().view(torch.int16).int() - _FLOOR).clamp_min_(0)[:, groups]
    s, c = s.float()[:, groups], c.float()[:, groups]
    u, outward = (q - MIDDLE).mul_(s).add_(c), torch.where((q == 0) | (q == 2 * MIDDLE), 1.5, 0.5) * s
    lowest = u - torch.where(q == 0, outward, 0.5 * s)
    highest = u + torch.where(q == 0, 0.5 * s, outward)
    first, last = (_places(ends.view(torch.int32) >> 16, floors) for ends in (lowest, highest))
    needed = ((last - first + 2) * 15 - 1) >> 4
    # The exponent of a number is one less than its bits.
    return first, (needed.float().view(torch.int32) >> 23).sub_(126).clamp_min_(0), floors


def _encode(patterns: torch.Tensor, copy: ScaledRows, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of each row int64 [R], and all of them int32."""
    first, sizes, floors = _steps(copy, rows, patterns.shape[1])
    places, largest = _places(patterns, floors), (1 << sizes) - 1
    codes = places - first
    excepted = (places == 0) | (codes < 0) | (codes >= largest)
    codes = torch.where(excepted, largest, codes).long()
    ends, listed = sizes.cumsum(1, dtype=torch.int32), excepted.cumsum(1)
    counts = ((ends[:, -1] + 31) >> 5) + ((listed[:, -1] + 1) >> 1)
    width, begins = int(counts.max()), ends - sizes
    words, at = torch.zeros(len(patterns), width, dtype=torch.int64, device=codes.device), (begins >> 5).long()
    codes <<= begins & 31
    words.scatter_add_(1, at, codes & 0xFFFFFFFF)
    words.scatter_add_(1, (at + 1).clamp_max_(width - 1), codes >> 32)  # nothing, where there is no next word
    row, column = excepted.nonzero(as_tuple=True)
    half = 2 * counts[row] - listed[row, column]
    words.index_put_((row, half >> 1), (patterns[row, column].long() & 0xFFFF) << 16 * (half & 1), accumulate=True)
    there = torch.arange(width, device=words.device) < counts[:, None]
    return counts, words[there].to(torch.int32)


def encode_rest(values: torch.Tensor, copy: ScaledRows, out: torch.Tensor) -> bool:
    """Code what is left of a matrix with torch's operations, some rows at a time; the device is waited for.

    Args:
        values: bf16 [M, K], contiguous.
        copy: Of the matrix, by `quantise`, on the same device.
        out: uint8 [rest_bytes], or another number of whole words, on any device; written.

    Returns:
        Whether there was room for it; if not, `out` cannot be decoded.
    """
    height, columns = values.shape
    assert values.dtype == torch.bfloat16 and values.is_contiguous() and len(copy.numbers) == height
    assert out.dtype == torch.uint8 and out.is_contiguous()
    starts, pool = _parts(out, height)
    step, end = max(1, _ELEMENTS[values.device.type] // columns), 0
    starts[0] = 0
    for start in range(0, height, step):
        rows = slice(start, start + step)
        counts, words = _encode(values[rows].view(torch.int16).int(), copy, rows)
        if end + len(words) > len(pool):
            return False
        starts[1:][rows].copy_(counts.cumsum(0) + end)
        pool[end : end + len(words)].copy_(words)
        end += len(words)
    pool[end:] = 0
    return True


def _decode_reference(stored: torch.Tensor, copy: ScaledRows, rows: slice, out: torch.Tensor) -> None:
    starts, pool = _parts(stored, len(copy.numbers))
    first, sizes, floors = _steps(copy, rows, out.shape[1])
    begins = sizes.cumsum(1) - sizes
    at = starts[:-1][rows, None] + (begins >> 5)
    low, high = (pool[word].long() & 0xFFFFFFFF for word in (at, (at + 1).clamp_max_(len(pool) - 1)))
    largest = (1 << sizes) - 1
    codes = ((high << 32 | low) >> (begins & 31) & largest).int()
    places, excepted = first + codes, codes == largest
    patterns = (places.abs() - 1 + floors) | (places < 0).int() << 15
    row, column = excepted.nonzero(as_tuple=True)
    halves = 2 * starts[1:][rows][row] - excepted.cumsum(1)[row, column]
    patterns[row, column] = pool.view(torch.int16)[halves].int()
    out.copy_(patterns.to(torch.int16).view(torch.bfloat16))


def decode_rest_reference(stored: torch.Tensor, copy: ScaledRows, start: int, out: torch.Tensor) -> None:
    """Plain torch version of `decode_rest`."""
    step = max(1, _ELEMENTS[out.device.type] // out.shape[1])
    for first in range(0, len(out), step):
        some = out[first : first + step]
        _decode_reference(stored, copy, slice(start + first, start + first + len(some)), some)


# --- the kernel: a program decodes a row, so many groups at a time; tensors are [groups, 64]


@jit
def _places_of(bits, floors):
    """Places of fp32 numbers cut off to bf16, by their bits."""
    outside = tl.maximum(((bits >> 16) & 0x7FFF).to(tl.int32) - floors + 1, 0)
    return tl.where(bits >= 0x80000000, -outside, outside)


@jit
def _numbers_at(row_ptr, k, there):
    """Numbers of columns k, out of units as `pack_numbers` makes them."""
    pair = k % 128 // 2
    words = tl.load(row_ptr + (k // 128 * 16 + pair % 4 * 4 + pair // 16), mask=there, other=0)
    return (words >> (k % 2 * 16 + pair // 4 % 4 * 4).to(tl.uint32)) & 15


@jit
def _steps_of(q, s_bits, c_bits):
    """What `_steps` has, of numbers and the patterns of their scales and centres."""
    s, c = (s_bits << 16).to(tl.float32, bitcast=True), (c_bits << 16).to(tl.float32, bitcast=True)
    floors = tl.maximum(s_bits.to(tl.int32) - 1024, 0)
    u = (q.to(tl.float32) - 7.5) * s + c
    lowest = u - tl.where(q == 0, 1.5, 0.5) * s
    highest = u + tl.where(q == 15, 1.5, 0.5) * s
    first = _places_of(lowest.to(tl.uint32, bitcast=True), floors)
    last = _places_of(highest.to(tl.uint32, bitcast=True), floors)
    needed = (((last - first + 2) * 15 - 1) >> 4).to(tl.float32)
    return first, tl.maximum((needed.to(tl.int32, bitcast=True) >> 23) - 126, 0), floors


@jit
def _before(counts):
    """What is in front of each, in the order of columns, and all of it."""
    of_group = tl.sum(counts, 1)
    before = tl.cumsum(of_group, 0) - of_group
    return tl.cumsum(counts, 1) - counts + before[:, None], tl.sum(of_group)


@jit(do_not_specialize=("start",))
def _decode_rest_kernel(
    starts_ptr, pool_ptr, numbers_ptr, scales_ptr, centres_ptr, out_ptr, start, columns, number_words, row_scales,
    GROUPS: tl.constexpr,
):  # fmt: skip
    row = (start + tl.program_id(0)).to(tl.int64)
    codes_ptr = pool_ptr + tl.load(starts_ptr + row)
    list_ptr = (pool_ptr + tl.load(starts_ptr + row + 1)).to(tl.pointer_type(tl.uint16))
    numbers_ptr, out_ptr = numbers_ptr + row * number_words, out_ptr + tl.program_id(0).to(tl.int64) * columns
    bits, listed = 0, 0
    for first_group in range(0, (columns + 63) // 64, GROUPS):
        group = first_group + tl.arange(0, GROUPS)[:, None]
        k = group * 64 + tl.arange(0, 64)[None, :]
        there, real = k < columns, group * 64 < columns
        s_bits = tl.load(scales_ptr + row * row_scales + group, mask=real, other=0).to(tl.uint32)
        c_bits = tl.load(centres_ptr + row * row_scales + group, mask=real, other=0).to(tl.uint32)
        first, sizes, floors = _steps_of(_numbers_at(numbers_ptr, k, there), s_bits, c_bits)
        sizes = tl.where(there, sizes, 0)
        begins, all_bits = _before(sizes)
        begins += bits
        shift = (begins & 31).to(tl.uint32)
        low = tl.load(codes_ptr + (begins >> 5), mask=there, other=0)
        high = tl.load(codes_ptr + (begins >> 5) + 1, mask=there & ((begins & 31) + sizes > 32), other=0)
        largest = (1 << sizes) - 1
        codes = ((low >> shift) | ((high << 1) << (31 - shift))).to(tl.int32, bitcast=True) & largest
        excepted = there & (codes == largest)
        before, all_listed = _before(excepted.to(tl.int32))
        whole = tl.load(list_ptr - (listed + before + 1), mask=excepted, other=0).to(tl.int32)
        places = first + codes
        found = (tl.abs(places) - 1 + floors) | tl.where(places < 0, 0x8000, 0)
        found = tl.where(excepted, whole, found)
        if out_ptr.dtype.element_ty == tl.uint16:
            found = found.to(tl.uint16)
        else:
            found = (found << 16).to(tl.float32, bitcast=True).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + k, found, mask=there)
        bits += all_bits
        listed += all_listed


def decode_rest_triton(stored: torch.Tensor, copy: ScaledRows, start: int, out: torch.Tensor) -> None:
    """Triton version of `decode_rest`."""
    require_triton("decoding what is left of weights")
    starts, pool = _parts(stored, len(copy.numbers))
    with torch.cuda.device_of(out):
        _decode_rest_kernel[(len(out),)](
            starts, pool.view(torch.uint32), copy.numbers.view(torch.uint32), copy.scales.view(torch.uint16),
            copy.zeros.view(torch.uint16), out.view(torch.uint16) if out.dtype == torch.bfloat16 else out, start,
            out.shape[1], copy.numbers.shape[1] // 4, copy.scales.stride(0), GROUPS=_DECODED_GROUPS, num_warps=1,
        )  # fmt: skip


def decode_rest(stored: torch.Tensor, copy: ScaledRows, start: int, out: torch.Tensor) -> None:
    """Decode rows of a matrix, enqueued on the current stream of the device.

    Args:
        stored: uint8, what `encode_rest` has written, contiguous, at an address that four divides.
        copy: The one that it was coded with, of the whole matrix, on the same device.
        start: The first row that is decoded.
        out: [rows, K] of any float dtype, contiguous; every element is written.
    """
    assert out.is_contiguous() and 0 <= start <= start + len(out) <= len(copy.numbers)
    assert stored.dtype == torch.uint8 and stored.is_contiguous()
    (decode_rest_triton if out.is_cuda else decode_rest_reference)(stored, copy, start, out)
