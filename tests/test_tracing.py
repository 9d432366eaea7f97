"""The pieces of a trace: clocks that drift, spans that are read late, shares, the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_runtime.errors import StorageError
from offload_runtime.trace import (
    Span,
    Trace,
    covered_seconds,
    require_writable,
    union_seconds,
    write_trace,
)

_intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], sum(pair))))


@given(_intervals, _intervals)
def test_shares_are_counted_once(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    def moments(intervals: list[tuple[int, int]]) -> set[int]:
        return {moment for start, end in intervals for moment in range(start, end)}

    assert union_seconds(left) == len(moments(left))
    assert covered_seconds(left, right) == len(moments(left) & moments(right))


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    require_writable(path)
    assert list(tmp_path.iterdir()) == []
    write_trace(path, Trace([Span("link", "a", 5.5, 5.75, {"bytes": 1}, on_device=False)], 5.0, 2), {"device": "cpu"})
    record = json.loads(path.read_text())
    (span,) = (event for event in record["traceEvents"] if event["ph"] == "X")
    assert (span["ts"], span["dur"], span["cat"], span["args"]) == (500_000.0, 250_000.0, "link", {"bytes": 1})
    assert record["otherData"] == {"offload_runtime_trace": 1, "dropped_spans": 2, "device": "cpu"}
    unwritable = Trace([Span("link", "a", 0.0, 1.0, {"bytes": object()}, on_device=False)], 0.0, 0)
    with pytest.raises(TypeError):
        write_trace(path, unwritable, {})
    assert json.loads(path.read_text()) == record
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(StorageError, match="name another place with --trace"):
        write_trace(tmp_path / "absent" / "t.json", Trace([], 0.0, 0), {})
