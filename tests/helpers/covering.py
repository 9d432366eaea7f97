"""Which rows of a grid of parameters are tried by default: a few, in which every pair of values occurs if it can."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any


def _pairs(row: Mapping[str, Any]) -> set[tuple[Any, ...]]:
    """Values of a row, alone and by twos."""
    values = sorted(row.items())
    return {(value,) for value in values} | set(combinations(values, 2))


def few(rows: Sequence[Mapping[str, Any]], count: int) -> list[int]:
    """Choose `count` rows of a grid, the first among them: each holds as many new pairs of values as any other does.

    Args:
        rows: Each parameter's value, or its number.
        count: How many rows are wanted.

    Returns:
        Their places; of rows that are as good the one that is farthest from those chosen.
    """
    pairs = [_pairs(row) for row in rows]
    chosen, seen = [0], set(pairs[0])
    while len(chosen) < min(count, len(rows)):
        left = (at for at in range(len(rows)) if at not in chosen)
        best = max(left, key=lambda at: (len(pairs[at] - seen), min(abs(at - other) for other in chosen)))
        chosen.append(best)
        seen |= pairs[best]
    return chosen
