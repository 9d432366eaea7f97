"""What is left of stored weights given a low-bit copy of them: differences on the grid of what is stored, in codes of
fixed length, some of which go on in further bytes.

The numbers that a format has lie in order on a line, by their patterns: `place` of a pattern is its place there,
negative below zero. Those of magnitudes below a group's `floor` share place 0 and are stored as they are: near zero a
float's grid is so fine that the copy says nothing about a place in it.

    code = place(w) - place(copy)       where the code has room for that
    code = one of EXTENSIONS, a byte    of places up to 1024 away: the code says which 256 of them, the byte which one
    code = the lowest, whole pattern    otherwise

No position is stored: a tile of weights knows where its bytes begin, and a weight's are found by adding up those of the
codes in front of it in the tile. A decoder adds an integer to a pattern that it has just rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 1024  # weights that share the 32 bits which say where their bytes begin
EXTENSIONS = 8
_FAR = 128 * EXTENSIONS
_LEFT_OUT = 1 / 16  # of a step's places may be exceptions, where that saves a bit


@dataclass(frozen=True)
class Rest:
    """Codes and further bytes of N weights.

    Attributes:
        bits: Of a code.
        pattern_bytes: Of a stored weight.
        extensions: How many codes go on in one byte; 0 where a pattern is no longer.
        codes: [N] int16.
        further: [E] uint8, in the order of the weights.
    """

    bits: int
    pattern_bytes: int
    extensions: int
    codes: Tensor
    further: Tensor

    @property
    def lowest(self) -> int:
        """The code of whole patterns."""
        return -(1 << (self.bits - 1))

    @property
    def bits_per_weight(self) -> float:
        """All of it."""
        count = self.codes.numel()
        return self.bits + (8 * len(self.further) + 32 * -(-count // TILE)) / count

    @property
    def whole(self) -> float:
        """The share of weights that are stored as they are."""
        return float((self.codes == self.lowest).double().mean())

    @property
    def extended(self) -> float:
        """The share of weights whose code goes on in a byte."""
        return float(self.is_extended.double().mean())

    @property
    def is_extended(self) -> Tensor:
        """[N] bool."""
        return (self.codes > self.lowest) & (self.codes <= self.lowest + self.extensions)

    @property
    def begins(self) -> Tensor:
        """Where the further bytes of each weight begin, [N] int32."""
        sizes = self.is_extended.int() + self.pattern_bytes * (self.codes == self.lowest).int()
        return sizes.cumsum(0, dtype=torch.int32) - sizes


def patterns_of(stored: Tensor) -> Tensor:
    """Patterns of bf16 or FP8 as int32 of 0 and more."""
    view, mask = (torch.int16, 0xFFFF) if stored.element_size() == 2 else (torch.uint8, 0xFF)
    return stored.view(view).int() & mask


def place(patterns: Tensor, floors: Tensor | None, pattern_bits: int) -> Tensor:
    """Places of patterns of sign and magnitude, int32; 0 of magnitudes below `floors`. Of integers, which have no
    floors, they themselves."""
    if floors is None:
        return patterns
    sign = 1 << (pattern_bits - 1)
    outside = ((patterns & (sign - 1)) - floors + 1).clamp_min_(0)
    return torch.where(patterns >= sign, -outside, outside)


def pattern_at(places: Tensor, floors: Tensor | None, pattern_bits: int) -> Tensor:
    """What has these places; what place 0 above floors becomes means nothing."""
    if floors is None:
        return places
    return places.abs() - 1 + floors + (places < 0).int() * (1 << (pattern_bits - 1))


def encode(patterns: Tensor, base: Tensor, floors: Tensor | None, bits: int, pattern_bits: int) -> Rest:
    """What is left of patterns [N] int32 given those of the copy, [N], and the floors of their groups, [N]."""
    places = place(patterns, floors, pattern_bits)
    codes = places - place(base, floors, pattern_bits)
    pattern_bytes, extensions = pattern_bits // 8, EXTENSIONS if pattern_bits > 8 else 0
    lowest = -(1 << (bits - 1))
    fits = (codes > lowest + extensions) & (codes < -lowest)
    near = (codes >= -_FAR) & (codes < _FAR) & ~fits if extensions else torch.zeros_like(fits)
    if floors is not None:
        fits &= places != 0
        near &= places != 0
    far = codes + _FAR
    kept = torch.where(fits, codes, torch.where(near, lowest + 1 + (far >> 8), lowest)).short()
    rest = Rest(bits, pattern_bytes, extensions, kept, torch.empty(0, dtype=torch.uint8))
    begins, whole = rest.begins, ~(fits | near)
    further = torch.empty(int(near.sum() + pattern_bytes * whole.sum()), dtype=torch.uint8)
    further[begins[near]] = (far[near] & 255).to(torch.uint8)
    for byte in range(pattern_bytes):
        further[begins[whole] + byte] = (patterns[whole] >> (8 * byte) & 255).to(torch.uint8)
    return Rest(bits, pattern_bytes, extensions, kept, further)


def decode(rest: Rest, base: Tensor, floors: Tensor | None) -> Tensor:
    """The patterns of all weights, [N] int32."""
    pattern_bits, begins = 8 * rest.pattern_bytes, rest.begins
    codes, near, whole = rest.codes.int(), rest.is_extended, rest.codes == rest.lowest
    codes[near] = (codes[near] - rest.lowest - 1) * 256 - _FAR + rest.further[begins[near]].int()
    found = pattern_at(place(base, floors, pattern_bits) + codes, floors, pattern_bits)
    if floors is None:  # integers of one byte
        found[whole] = rest.further[begins[whole]].view(torch.int8).int()
    else:
        parts = (rest.further[begins[whole] + byte].int() << (8 * byte) for byte in range(rest.pattern_bytes))
        found[whole] = torch.stack([*parts]).sum(0, dtype=torch.int32)
    return found


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
    return float(needed.double().mean()) + pattern_bits * share + 32 / TILE, share


def entropy(numbers: Tensor) -> float:
    """Bits a number of integers [N] has, by how often each occurs."""
    shares = torch.bincount(numbers - numbers.min()).double() / numbers.numel()
    return float(-(shares * shares.clamp_min(1e-300).log2()).sum())
