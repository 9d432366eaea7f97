"""How many bits a weight are left of matrices given a low-bit copy of them, as bf16, FP8 and Q8_0: entropies, the size
of a code as long as the copy says, and what the runtime's takes, whose bits all come back.

The numbers that a format has lie in order on a line, by their patterns: `place` of a pattern is its place there,
negative below zero. Those of magnitudes below a group's floor share place 0 and are exceptions: near zero a float's
grid is so fine that the copy says nothing about a place in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from copies.quantise import ROUNDED, CopyFormat, LowBitCopy, Variant, quantise
from harness import say
from offload_runtime_kernels import low_bit_copy
from offload_runtime_kernels.low_bit_encode import encode_rest
from offload_runtime_kernels.low_bit_rest import decode_rest, used_bytes
from torch import Tensor

from offload_runtime.weights.encoding import scaled_bytes, scaled_rows

_COLUMNS, _BROKEN_ROWS = 4096, 32  # of random matrices
_STD, _DEGREES = 0.02, 4
_E4M3_LARGEST, _FP8_BLOCK, _Q8_GROUP = 448.0, 128, 32
_FLOORS = (4, 16, 256)  # what a group's scale is divided by, of which the best is taken
_LEFT_OUT = 1 / 16  # of a step's places may be exceptions, where that saves a bit
_TILE = 1024  # weights that share the 32 bits which say where their bytes begin


def patterns_of(stored: Tensor) -> Tensor:
    """Patterns of bf16 or FP8 as int32 of 0 and more."""
    view, mask = (torch.int16, 0xFFFF) if stored.element_size() == 2 else (torch.uint8, 0xFF)
    return stored.view(view).int() & mask


def place(patterns: Tensor, floors: Tensor, pattern_bits: int) -> Tensor:
    """Places of patterns of sign and magnitude, int32; 0 of magnitudes below `floors`."""
    sign = 1 << (pattern_bits - 1)
    outside = ((patterns & (sign - 1)) - floors + 1).clamp_min_(0)
    return torch.where(patterns >= sign, -outside, outside)


def sized_by_copy(
    patterns: Tensor, lowest: Tensor, highest: Tensor, floors: Tensor, pattern_bits: int
) -> tuple[float, float]:
    """The size of a code whose lengths the copy says, too: as many bits as the places of a weight's step need.

    All lengths are known before a bit is read, so that a tile is decoded at once, after adding them up.

    Args:
        lowest, highest: [N]: patterns of the ends of the step that the copy says a weight is in.

    Returns:
        Bits a weight, with exceptions, and their share.
    """
    first, last = (place(ends, floors, pattern_bits) for ends in (lowest, highest))
    places = place(patterns, floors, pattern_bits)
    # One more than the places is the exception's. A step of one binade would need another bit for that alone.
    needed = (last - first + 2).clamp_min_(1).float().mul_(1 - _LEFT_OUT).log2_().ceil_()
    exception = (places == 0) | (places < first) | (places - first >= needed.exp2() - 1)
    share = float(exception.double().mean())
    return float(needed.double().mean()) + pattern_bits * share + 32 / _TILE, share


def entropy(numbers: Tensor) -> float:
    """Bits a number of integers [N] has, by how often each occurs."""
    shares = torch.bincount(numbers - numbers.min()).double() / numbers.numel()
    return float(-(shares * shares.clamp_min(1e-300).log2()).sum())


def joined(parts: Iterable[Tensor]) -> Tensor:
    """Tensors of groups as one row."""
    return torch.cat([part.flatten() for part in parts])


def smallest_sized(
    patterns: Tensor, low: Tensor, high: Tensor, scales: Tensor, pattern_bits: int, step: int
) -> dict[str, Any]:
    """The best floor of codes that are as long as the copy says; patterns are `step` apart from a power of two to the
    next."""
    found, magnitudes = list[tuple[float, float, int]](), scales & ((1 << (pattern_bits - 1)) - 1)
    for divisor in _FLOORS:
        floors = (magnitudes - step * (divisor.bit_length() - 1)).clamp_min(0)
        found.append((*sized_by_copy(patterns, low, high, floors, pattern_bits), divisor))
    bits, exceptions, divisor = min(found)
    return {"bits_per_weight": bits, "exceptions": exceptions, "floor": 1 / divisor}


def by_level(residuals: Tensor, copies: Iterable[LowBitCopy], bits: int) -> float:
    """Entropy of what is left if each level of the copy has a code of its own."""
    levels = joined(one.codes for one in copies).int()
    return entropy(residuals.int() * (1 << bits) + levels) - entropy(levels)


def runtime_rest(matrices: Iterable[tuple[Tensor, Tensor | None]]) -> dict[str, Any]:
    """What the runtime keeps of bf16 matrices beside its copies, by the importance of columns where that is known."""
    used = count = 0
    same = True
    for weight, importance in matrices:
        stored = torch.empty(scaled_bytes(low_bit_copy.COPY, *weight.shape), dtype=torch.uint8)
        copy = scaled_rows(stored, low_bit_copy.COPY, *weight.shape)
        low_bit_copy.quantise(weight, copy, importance)
        rest, out = torch.empty(6 * weight.numel() + 4096, dtype=torch.uint8), torch.empty_like(weight)
        assert encode_rest(weight.contiguous(), copy, rest), "any weight takes less than 40 bits"
        decode_rest(rest, copy, 0, out)
        same &= torch.equal(out.view(torch.int16), weight.view(torch.int16))
        used, count = used + used_bytes(rest, len(weight)), count + weight.numel()
    return {"bits_per_weight": 8 * used / count, "round_trip": same}


def rest_of(
    weights: str, variant: Variant, pairs: Sequence[tuple[Tensor, LowBitCopy]],
    importance: Sequence[Tensor | None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What is left of bf16 matrices given their copies."""
    form = variant.form
    patterns = joined(patterns_of(weight) for weight, _ in pairs)
    decoded = [copy.decoded() for _, copy in pairs]
    base = joined(map(patterns_of, decoded))
    scales = joined(patterns_of(copy.scales).expand(copy.codes.shape) for _, copy in pairs)
    half = [copy.scales.float() / 2 for _, copy in pairs]
    low, high = (
        joined(patterns_of((c.float() + side * s).to(torch.bfloat16)) for c, s in zip(decoded, half, strict=True))
        for side in (-1, 1)
    )
    # The plain difference on the line of all patterns, without a gap between the zeros.
    line = [torch.where(one >= 0x8000, 0x7FFF - one, one) for one in (patterns, base)]
    residuals = line[0] - line[1]
    sized = smallest_sized(patterns, low, high, scales, 16, 128)
    in_byte = float(((residuals >= -127) & (residuals <= 127)).double().mean())
    row = {
        "weights": weights, "stored": "bf16", "copy": variant.as_dict(), "stored_entropy_bits": entropy(patterns),
        "entropy_bits": entropy(residuals),
        "entropy_bits_by_level": by_level(residuals, (copy for _, copy in pairs), form.bits),
        # One of 256 says that there is an exception, which has 16 bits, beside 16 of its position or without them.
        "in_signed_byte": in_byte, "byte_and_exceptions_bits": 8 + 16 * (1 - in_byte),
        "byte_and_positions_bits": 8 + 32 * (1 - in_byte),
        "sized_by_copy": sized,
    }  # fmt: skip
    if variant.form == CopyFormat(4, low_bit_copy.GROUP) and variant.method != ROUNDED:
        known = [None] * len(pairs) if importance is None else importance
        kept = runtime_rest((one, by) for (one, _), by in zip(pairs, known, strict=True))
        row["runtime"] = kept
        say(f"{weights}: {variant}: the runtime's takes {kept['bits_per_weight']:.2f} bits")
    say(
        f"{weights}: {variant}: {row['entropy_bits']:.2f} bits, {row['entropy_bits_by_level']:.2f} by level, a byte "
        f"holds {in_byte:.3f}; sized by the copy {sized['bits_per_weight']:.2f}"
    )
    return row


def fp8_rest(weights: str, variant: Variant, matrices: Sequence[Tensor]) -> dict[str, Any]:
    """What is left of E4M3 numbers with a scale for each block of 128 x 128."""
    patterns, bases, lows, highs, steps = (list[Tensor]() for _ in range(5))
    copies = list[LowBitCopy]()
    for matrix in matrices:
        height, width = (min(size, _FP8_BLOCK) for size in matrix.shape)
        rows, columns = matrix.shape[0] // height * height, matrix.shape[1] // width * width
        blocks = matrix[:rows, :columns].float().unflatten(0, (-1, height)).unflatten(2, (-1, width))
        scale = blocks.abs().amax((1, 3), keepdim=True) / _E4M3_LARGEST
        stored = (blocks / scale).to(torch.float8_e4m3fn)
        copy = quantise((stored.float() * scale).view(rows, columns), variant.form, ROUNDED)
        in_blocks = scale.expand_as(blocks).reshape(copy.codes.shape)
        half = copy.scales.float() / 2
        for places, side in ((bases, 0), (lows, -1), (highs, 1)):
            relative = ((copy.decoded().float() + side * half) / in_blocks).clamp(-_E4M3_LARGEST, _E4M3_LARGEST)
            places.append(patterns_of(relative.to(torch.float8_e4m3fn)).reshape(-1))
        patterns.append(patterns_of(stored).reshape(-1))
        steps.append(patterns_of((copy.scales.float() / in_blocks).to(torch.float8_e4m3fn)).reshape(-1))
        copies.append(copy)
    stored_bits, base, scales = joined(patterns), joined(bases), joined(steps)
    line = [torch.where(one >= 0x80, 0x7F - one, one) for one in (stored_bits, base)]
    row = _stored_row(weights, "FP8", variant, stored_bits, line[0] - line[1], copies)
    return row | {"sized_by_copy": smallest_sized(stored_bits, joined(lows), joined(highs), scales, 8, 8)}


def q8_rest(weights: str, variant: Variant, matrices: Sequence[Tensor]) -> dict[str, Any]:
    """What is left of Q8_0: signed bytes with an fp16 scale for each 32 columns."""
    numbers, bases, copies = list[Tensor](), list[Tensor](), list[LowBitCopy]()
    for matrix in matrices:
        groups = matrix.float().unflatten(1, (-1, _Q8_GROUP))
        scale = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
        stored = (groups / scale).round_().nan_to_num_(0.0)
        copy = quantise((stored * scale).flatten(1), variant.form, ROUNDED)
        of_copy = copy.decoded().float().view_as(groups)
        numbers.append(stored.int().flatten())
        bases.append((of_copy / scale).round_().nan_to_num_(0.0).clamp_(-127, 127).int().flatten())
        copies.append(copy)
    number = joined(numbers)
    return _stored_row(weights, "Q8_0", variant, number, number - joined(bases), copies)


def _stored_row(
    weights: str, stored: str, variant: Variant, patterns: Tensor, residuals: Tensor, copies: Sequence[LowBitCopy]
) -> dict[str, Any]:
    """What rows of quantised weights have in common."""
    row = {
        "weights": weights, "stored": stored, "copy": variant.as_dict(), "stored_entropy_bits": entropy(patterns),
        "entropy_bits": entropy(residuals), "entropy_bits_by_level": by_level(residuals, copies, variant.form.bits),
    }  # fmt: skip
    say(
        f"{weights} in {stored}: {variant}: {row['entropy_bits']:.2f} bits, {row['entropy_bits_by_level']:.2f} by level"
    )
    return row


def random_matrices(seed: int, rows: int) -> dict[str, Tensor]:
    """Made-up weights [M, K] bf16 by what they are."""
    draw = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(rows, _COLUMNS, generator=draw) * _STD
    # Student's t: a Gaussian over the root of a chi-square, which is twice a gamma of half its degrees.
    squares = torch.randn(_DEGREES, rows, _COLUMNS, generator=draw).square().sum(0)
    broken = gaussian[:_BROKEN_ROWS].clone()
    broken[0], broken[1], broken[2] = torch.inf, -torch.inf, torch.nan
    broken[3, ::7], broken[4, 5], broken[5, ::2], broken[6], broken[7] = torch.nan, torch.inf, 3e38, 0.0, -0.0
    broken[8, ::2], broken[9] = -0.0, broken[9] * 1e38
    return {
        name: one.to(torch.bfloat16)
        for name, one in {
            "Gaussian": gaussian,
            "Student t": gaussian / (squares / _DEGREES).sqrt(),
            "constant": torch.full((_BROKEN_ROWS, _COLUMNS), _STD),
            "subnormal": gaussian[:_BROKEN_ROWS] * 1e-38,
            "not finite": broken,
        }.items()
    }
