"""The pieces of a trace: clocks that drift, spans that are read late, shares, the file."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload_runtime.trace import covered_seconds, union_seconds

_intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], sum(pair))))


@given(_intervals, _intervals)
def test_shares_are_counted_once(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    def moments(intervals: list[tuple[int, int]]) -> set[int]:
        return {moment for start, end in intervals for moment in range(start, end)}

    assert union_seconds(left) == len(moments(left))
    assert covered_seconds(left, right) == len(moments(left) & moments(right))
