"""How long spans take together, counted once where they overlap."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def union_seconds(intervals: Iterable[Interval]) -> float:
    """Seconds that are in any of the intervals (start, end)."""
    return sum(end - start for start, end in merged(intervals))


def covered_seconds(intervals: Iterable[Interval], by: Iterable[Interval]) -> float:
    """Seconds that are in any of `intervals` and in any of `by`."""
    left, right = merged(intervals), merged(by)
    return union_seconds(left) + union_seconds(right) - union_seconds([*left, *right])
