"""Low-bit copies of weight matrices: groups of neighbouring columns that share a scale and a centre.

    c = bf16( (q - (2^bits - 1) / 2) * scale + centre )

`scale` and `centre` are bf16. (q - …) has one bit more than the code, so its product with a scale is exact in fp32: a
multiply-add and a multiplication with an addition give the same bits, on every device. A symmetric copy has no centre.
Copies with centres and least squares are the runtime's, of any bits and groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from offload_runtime_kernels.low_bit_copy import CLIPPED_TO, LARGEST, fit, relative_weights
from torch import Tensor

ROUNDED, FITTED, WEIGHTED = "rounded", "fitted", "weighted"
METHODS = (ROUNDED, FITTED, WEIGHTED)
_CHUNK_ELEMENTS = 1 << 17  # which are fitted together, in the cache


@dataclass(frozen=True)
class CopyFormat:
    """Bits of a code, columns of a group, and whether groups have no centre."""

    bits: int
    group: int
    symmetric: bool = False

    @property
    def middle(self) -> float:
        """What is subtracted from a code."""
        return (2**self.bits - 1) / 2

    @property
    def bits_per_weight(self) -> float:
        """Codes and what groups share."""
        return self.bits + (16 if self.symmetric else 32) / self.group


@dataclass(frozen=True)
class LowBitCopy:
    """A copy of a matrix [M, K] in groups of G columns.

    Attributes:
        codes: [M, K/G, G] uint8.
        scales: [M, K/G, 1] bf16, not negative.
        centres: [M, K/G, 1] bf16, zero in symmetric copies.
    """

    form: CopyFormat
    codes: Tensor
    scales: Tensor
    centres: Tensor

    def decoded(self) -> Tensor:
        """Return the copy's values, [M, K/G, G] bf16."""
        return _values(self.codes.float(), self.form, self.scales, self.centres).to(torch.bfloat16)


def _values(codes: Tensor, form: CopyFormat, scales: Tensor, centres: Tensor) -> Tensor:
    """What codes stand for, in fp32."""
    return (codes - form.middle) * scales.float() + centres.float()


def _codes(x: Tensor, form: CopyFormat, scales: Tensor, centres: Tensor) -> Tensor:
    """The nearest codes, in fp32; any where a scale is zero."""
    steps = (x - centres.float()) / scales.float()
    return steps.add_(form.middle).round_().nan_to_num_(0.0).clamp_(0, 2**form.bits - 1)


def _rounded(scales: Tensor, centres: Tensor, form: CopyFormat) -> tuple[Tensor, Tensor]:
    """Scales and centres as they are kept."""
    kept = torch.zeros_like(centres) if form.symmetric else centres
    return scales.to(torch.bfloat16), kept.to(torch.bfloat16)


def _rounded_groups(x: Tensor, form: CopyFormat) -> tuple[Tensor, Tensor]:
    """Scales and centres [..., 1] bf16 of groups `x`, from the least to the largest value."""
    high, low = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
    if form.symmetric:
        high = torch.maximum(high, -low)
        low = -high
    return _rounded((high - low) / (2 * form.middle), (high + low) / 2, form)


def _fit_symmetric(x: Tensor, form: CopyFormat, weights: Tensor) -> tuple[Tensor, Tensor]:
    """What `low_bit_copy.fit` does, without centres, of groups `x` [R, K/G, G] within [-1, 1]."""
    half = x.abs().amax(-1, keepdim=True)
    best = _rounded(half / form.middle, torch.zeros_like(half), form)

    def error(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        codes = _codes(x, form, *pair)
        return codes, (_values(codes, form, *pair) - x).square_().mul_(weights).sum(-1, keepdim=True)

    _, least = error(best)
    for clip in CLIPPED_TO:
        tried = _rounded(half * (clip / form.middle), torch.zeros_like(half), form)
        for _ in range(2):
            codes, found = error(tried)
            # NaN is not less than anything: a group that cannot be refined stays as it is.
            better = (found < least) & (tried[0] > 0)
            least = torch.where(better, found, least)
            best = torch.where(better, tried[0], best[0]), best[1]
            a = codes - form.middle
            squares = (a * a * weights).sum(-1, keepdim=True)
            tried = _rounded((a * x * weights).sum(-1, keepdim=True) / squares, best[1], form)
    return best


@dataclass(frozen=True)
class Variant:
    """A copy: its format and how its scales are chosen."""

    form: CopyFormat
    method: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        form = self.form
        return {
            "bits": form.bits, "group": form.group, "symmetric": form.symmetric, "method": self.method,
            "bits_per_weight": form.bits_per_weight,
        }  # fmt: skip

    def __str__(self) -> str:
        form = self.form
        return f"{form.bits} bits, groups of {form.group}, {'symmetric, ' * form.symmetric}{self.method}"


def quantise(weight: Tensor, form: CopyFormat, method: str, importance: Tensor | None = None) -> LowBitCopy:
    """Make a copy of a matrix.

    Args:
        weight: [M, K] bf16 or fp32; K is a multiple of the group. Of infinities and NaN the copy has zeros.
        method: ROUNDED: each group from its least to its largest value. FITTED: clipped and scaled so that the squared
            error is least. WEIGHTED: so that the squared error times `importance` is.
        importance: [K] fp32: mean squares of what the columns are multiplied with.
    """
    assert weight.shape[1] % form.group == 0, f"{weight.shape[1]} columns in groups of {form.group}"
    assert (importance is not None) == (method == WEIGHTED), f"{method} and importance"
    parts = list[LowBitCopy]()
    weights: Tensor | None = None
    if method != ROUNDED:
        every = torch.ones(weight.shape[1]) if importance is None else relative_weights(importance)
        weights = every.view(-1, form.group)
    for rows in weight.split(max(1, _CHUNK_ELEMENTS // weight.shape[1])):
        groups = rows.unflatten(1, (-1, form.group))
        if weights is not None and not form.symmetric:
            parts.append(LowBitCopy(form, *fit(groups, weights, form.middle)))
            continue
        x = groups.float().nan_to_num(0.0, 0.0, 0.0).clamp_(-LARGEST, LARGEST)
        largest = x.abs().amax(-1, keepdim=True)
        inside = torch.where(largest > 0, x / largest, 0.0)  # squares of small weights would be zeros
        pair = _rounded_groups(inside, form) if weights is None else _fit_symmetric(inside, form, weights)
        scales, centres = _rounded(pair[0].float() * largest, pair[1].float() * largest, form)
        parts.append(LowBitCopy(form, _codes(x, form, scales, centres).to(torch.uint8), scales, centres))
    joined = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales", "centres"))
    return LowBitCopy(form, *joined)


def copy_of(variant: Variant, weight: Tensor, importance: Tensor | None, shift: int) -> LowBitCopy:
    """A copy of a matrix whose columns have been shifted, which makes use of `importance` if it is to."""
    known = importance.roll(shift) if importance is not None and variant.method == WEIGHTED else None
    return quantise(weight.roll(shift, 1), variant.form, variant.method, known)
