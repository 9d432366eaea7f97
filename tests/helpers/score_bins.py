"""The bins that scores of chunks fall into, one number at a time."""

from __future__ import annotations

import math


def score_bin(score: float) -> int:
    """Sixteenths of an octave, linear within it, from 2^-31 on; what is less is in the first of 512."""
    if score < 2.0**-31:
        return 0
    mantissa, exponent = math.frexp(score)  # mantissa in [0.5, 1)
    return min(511, (exponent + 30) * 16 + math.floor((2 * mantissa - 1) * 16))
