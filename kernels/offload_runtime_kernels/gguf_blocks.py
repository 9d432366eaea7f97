"""Blocks of GGUF files: weights of 2 to 8 bits with scales, decoded by the formulas of llama.cpp's formats.

    w = (d * scale) * q - dmin * minimum;    Q4_1, Q5_1: w = d * q + m;    without minima: w = (d * scale) * q or d * q

in fp32, rounded once to the dtype of the result. d, dmin and m are fp16 and of a whole block; scale and minimum are
integers of 4 to 8 bits, one for each group of weights; q is an integer of 2 to 8 bits, or a number of a code book.
Only the sum rounds: fp32 holds every product exactly (at most 11 + 7 + 5 significant bits), so that a fused
multiply-add has the same bits.

A table says where the integers of each format lie, and both the reference and the kernel go by it.
"""

from typing import NamedTuple

import torch

from offload_runtime_kernels._jit import constant, jit, require_triton, tl, triton

_PROGRAM_WEIGHTS = 4096
_REFERENCE_WEIGHTS = 1 << 18  # decoded at a time: 1 MB of fp32
_CODE_BOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4
# Its magnitudes, eight in a word.
_NEGATIVE_CODES = tl.constexpr(sum(-code << 8 * i for i, code in enumerate(_CODE_BOOK[:8])))
_POSITIVE_CODES = tl.constexpr(sum(code << 8 * i for i, code in enumerate(_CODE_BOOK[8:])))


class Bits(NamedTuple):
    """Where integers x = 0, 1, ... of a block lie: the `bits` bits from `first + bits * (x // span % shifts)` on of
    byte `at + x // (span * sharing) * stride + x % span`."""

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


class BlockFormat(NamedTuple):
    """How a block of so many `weights` lies in `nbytes`: `group` weights have one scale; `d` and `m` are the places of
    fp16 numbers, `m` of what is added or, with `minimum`, of what scales that."""

    weights: int
    nbytes: int
    group: int
    q: Integers
    d: int
    m: int | None = None
    scale: Integers | None = None
    minimum: Integers | None = None
    coded: bool = False


def _bits(at: int, bits: int, span: int, sharing: int = 0, shifts: int = 0, stride: int = 0, first: int = 0) -> Bits:
    """By default every byte is full of integers that are `span` apart."""
    sharing = sharing or 8 // bits
    return Bits(at, bits, span, sharing, shifts or sharing, stride or span, first)


# Six bits each of eight scales and eight minima, of Q4_K and Q5_K.
_K_SCALE = Integers(_bits(4, 4, 4, sharing=1, stride=8), _bits(4, 2, 4, sharing=2, first=4))
_K_MINIMUM = Integers(_bits(8, 4, 4, sharing=1, shifts=2), _bits(8, 2, 4, sharing=2, first=4))
_BYTES = 8  # of integers of eight bits, how many are in a row does not matter

FORMATS = {
    "Q4_0": BlockFormat(32, 18, 32, Integers(_bits(2, 4, 16), offset=8), d=0),
    "Q4_1": BlockFormat(32, 20, 32, Integers(_bits(4, 4, 16)), d=0, m=2),
    "Q5_0": BlockFormat(32, 22, 32, Integers(_bits(6, 4, 16), _bits(2, 1, 1), offset=16), d=0),
    "Q5_1": BlockFormat(32, 24, 32, Integers(_bits(8, 4, 16), _bits(4, 1, 1)), d=0, m=2),
    "Q8_0": BlockFormat(32, 34, 32, Integers(_bits(2, 8, _BYTES), offset=128, flip=128), d=0),
    "Q2_K": BlockFormat(
        256, 84, 16, Integers(_bits(16, 2, 32)), d=80, m=82,
        scale=Integers(_bits(0, 4, 1, sharing=1)), minimum=Integers(_bits(0, 4, 1, sharing=1, first=4)),
    ),
    "Q3_K": BlockFormat(
        256, 110, 16, Integers(_bits(32, 2, 32), _bits(0, 1, 32), offset=4), d=108,
        scale=Integers(_bits(96, 4, 8), _bits(104, 2, 4), offset=32),
    ),
    "Q4_K": BlockFormat(256, 144, 32, Integers(_bits(16, 4, 32)), d=0, m=2, scale=_K_SCALE, minimum=_K_MINIMUM),
    "Q5_K": BlockFormat(
        256, 176, 32, Integers(_bits(48, 4, 32), _bits(16, 1, 32)), d=0, m=2, scale=_K_SCALE, minimum=_K_MINIMUM
    ),
    "Q6_K": BlockFormat(
        256, 210, 16, Integers(_bits(0, 4, 64), _bits(128, 2, 32), offset=32), d=208,
        scale=Integers(_bits(192, 8, _BYTES), offset=128, flip=128),
    ),
    "IQ4_NL": BlockFormat(32, 18, 32, Integers(_bits(2, 4, 16)), d=0, coded=True),
    "IQ4_XS": BlockFormat(
        256, 136, 32, Integers(_bits(8, 4, 16)), d=0, scale=Integers(_bits(4, 4, 1), _bits(2, 2, 1), offset=32),
        coded=True,
    ),
}  # fmt: skip


# The reference has a row for each byte of a block and a column for each block: long rows are what torch is fast with.


def _bits_reference(stored: torch.Tensor, count: int, bits: Bits) -> torch.Tensor:
    x = torch.arange(count, device=stored.device)
    byte = bits.at + x // (bits.span * bits.sharing) * bits.stride + x % bits.span
    shift = bits.first + bits.bits * (x // bits.span % bits.shifts)
    found = stored.index_select(0, byte).bitwise_right_shift_(shift.to(torch.uint8)[:, None])
    return found.bitwise_and_((1 << bits.bits) - 1)


def _integers_reference(stored: torch.Tensor, count: int, integers: Integers) -> torch.Tensor:
    """The first `count` of each block: fp32 [count, blocks]."""
    found = _bits_reference(stored, count, integers.low)
    if integers.high is not None:
        found |= _bits_reference(stored, count, integers.high).bitwise_left_shift_(integers.low.bits)
    return found.bitwise_xor_(integers.flip).float().sub_(integers.offset)


def _half_reference(stored: torch.Tensor, at: int) -> torch.Tensor:
    return stored[at : at + 2].t().contiguous().view(torch.float16).float().t()


def _decode_reference(stored: torch.Tensor, form: BlockFormat) -> torch.Tensor:
    """fp32 [weights, blocks] of uint8 [nbytes, blocks]."""
    groups = form.weights // form.group
    q = _integers_reference(stored, form.weights, form.q)
    if form.coded:
        q = torch.tensor(_CODE_BOOK, dtype=torch.float32, device=q.device)[q.long()]
    d = _half_reference(stored, form.d)
    if form.scale is not None:
        d = d * _integers_reference(stored, groups, form.scale)
    w = q.view(len(d), -1, q.shape[1]).mul_(d[:, None])
    if form.m is not None:
        m = _half_reference(stored, form.m)
        if form.minimum is not None:
            m = m * -_integers_reference(stored, groups, form.minimum)
        w += m[:, None]
    return w.view(q.shape)


def decode_blocks_reference(stored: torch.Tensor, form: BlockFormat, out: torch.Tensor) -> None:
    """Plain torch version of `decode_blocks`."""
    step = _REFERENCE_WEIGHTS // form.weights
    parts = out.view(-1, form.weights).split(step)
    for blocks, part in zip(stored.view(-1, form.nbytes).split(step), parts, strict=True):
        part.copy_(_decode_reference(blocks.t().contiguous(), form).to(out.dtype).t())


@jit
def _bits_at(block_ptr, x, BITS: tl.constexpr):
    byte = BITS.at + x // (BITS.span * BITS.sharing) * BITS.stride + x % BITS.span
    shift = BITS.first + BITS.bits * (x // BITS.span % BITS.shifts)
    return (tl.load(block_ptr + byte).to(tl.uint32) >> shift) & ((1 << BITS.bits) - 1)


@jit
def _integers_at(block_ptr, x, INTEGERS: tl.constexpr):
    found = _bits_at(block_ptr, x, constant(INTEGERS.low))
    if INTEGERS.high is not None:
        found |= _bits_at(block_ptr, x, constant(INTEGERS.high)) << INTEGERS.low.bits
    return (found ^ INTEGERS.flip).to(tl.int32) - INTEGERS.offset


@jit
def _half_at(block_ptr, at):
    return tl.load((block_ptr + at).to(tl.pointer_type(tl.float16))).to(tl.float32)


@jit
def decoded(block_ptr, group, lane, FORM: tl.constexpr):
    """fp32 [G, group] weights of G groups of blocks: `block_ptr` and `group` [G, 1], `lane` [1, group], unsigned."""
    q = _integers_at(block_ptr, group * FORM.group + lane, constant(FORM.q))
    if FORM.coded:
        shift = (q % 8 * 8).to(tl.int64)
        negative = (tl.full([], _NEGATIVE_CODES, tl.int64) >> shift) & 255
        positive = (tl.full([], _POSITIVE_CODES, tl.int64) >> shift) & 255
        q = tl.where(q < 8, -negative, positive).to(tl.int32)
    d = _half_at(block_ptr, FORM.d)
    if FORM.scale is not None:
        d *= _integers_at(block_ptr, group, constant(FORM.scale)).to(tl.float32)
    w = d * q.to(tl.float32)
    if FORM.m is not None:
        m = _half_at(block_ptr, FORM.m)
        if FORM.minimum is None:
            w += m
        else:
            w -= m * _integers_at(block_ptr, group, constant(FORM.minimum)).to(tl.float32)
    return w


@jit(do_not_specialize=("num_blocks",))
def _decode_blocks_kernel(stored_ptr, out_ptr, num_blocks, FORM: tl.constexpr, GROUPS: tl.constexpr):
    groups: tl.constexpr = FORM.weights // FORM.group
    number = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    lane = tl.arange(0, FORM.group)[None, :]
    # What lies behind the last block reads that block and stores nothing.
    block = tl.minimum(number // groups, num_blocks - 1)
    group = (number % groups).to(tl.uint32)
    w = decoded(stored_ptr + block * FORM.nbytes, group, lane.to(tl.uint32), FORM)
    written = (number // groups < num_blocks) & (lane >= 0)
    tl.store(out_ptr + number * FORM.group + lane, w.to(out_ptr.dtype.element_ty), mask=written)


def decode_blocks_triton(stored: torch.Tensor, form: BlockFormat, out: torch.Tensor) -> None:
    """Triton version of `decode_blocks`."""
    require_triton("decoding GGUF blocks")
    programs = triton.cdiv(out.numel(), _PROGRAM_WEIGHTS)
    with torch.cuda.device_of(stored):
        _decode_blocks_kernel[(programs,)](
            stored, out, out.numel() // form.weights, FORM=form, GROUPS=_PROGRAM_WEIGHTS // form.group, num_warps=4
        )


def decode_blocks(stored: torch.Tensor, form: BlockFormat, out: torch.Tensor) -> None:
    """Decode whole blocks, enqueued on the current stream of the device.

    Args:
        stored: uint8, the blocks one after the other, contiguous, at an even address.
        form: How each is stored: one of `FORMATS`.
        out: Of any float dtype and shape, contiguous; every element is written.
    """
    assert stored.dtype == torch.uint8 and stored.is_contiguous() and out.is_contiguous()
    assert stored.numel() // form.nbytes * form.weights == out.numel() and stored.numel() % form.nbytes == 0
    (decode_blocks_triton if stored.is_cuda else decode_blocks_reference)(stored, form, out)
