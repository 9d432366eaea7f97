"""The pieces of a trace: clocks that drift, spans that are read late, shares, the file."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_runtime.errors import StorageError
from offload_runtime.trace import (
    CopyLog,
    Span,
    Trace,
    TraceRecorder,
    covered_seconds,
    require_writable,
    union_seconds,
    write_trace,
)

DRIFT = 2e-5  # seconds that the host's clock gains in each of the device's


class _Card:
    """A GPU's events without one: `now_s` is what the time is there; marks come to pass `lag_s` after their making."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = self.lag_s = 0.0
        self.fails = False
        self.waits = 0  # of the host for the device
        card = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: object) -> None:
                self.at_s = card.now_s + card.lag_s

            def query(self) -> bool:
                return self.at_s <= card.now_s

            def synchronize(self) -> None:
                if card.fails:
                    raise torch.AcceleratorError("gone")
                card.waits += 1
                card.now_s = max(card.now_s, self.at_s)

            def elapsed_time(self, end: Event) -> float:
                assert self.query() and end.query(), "not past"
                return float(struct.unpack("f", struct.pack("f", 1e3 * (end.at_s - self.at_s)))[0])

        class Stream:
            def synchronize(self) -> None:
                card.waits += 1
                card.now_s += card.lag_s

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
        patch.setattr(time, "perf_counter", lambda: 70.0 + (1 + DRIFT) * card.now_s)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> _Card:
    return _Card(monkeypatch)


def test_an_hour_on_a_gpu_is_told_to_the_microsecond(card: _Card) -> None:
    recorder = TraceRecorder(torch.device("cuda"))
    truth = []
    for number in range(900):
        start, start_s = recorder.mark(), card.now_s
        card.now_s += 4.0007313
        recorder.add("passes", str(number), start, recorder.mark(), {})
        truth.append((70.0 + (1 + DRIFT) * start_s, 70.0 + (1 + DRIFT) * card.now_s))
        recorder.settle()
        assert len(recorder.spans) == number + 1
    trace = recorder.finish()
    for span, (start_s, end_s) in zip(trace.spans, truth, strict=True):
        assert span.start_s == pytest.approx(start_s, abs=5e-5, rel=0)
        assert span.end_s == pytest.approx(end_s, abs=5e-5, rel=0)
        assert span.end_s - span.start_s == pytest.approx(4.0007313 * (1 + DRIFT), abs=1e-6, rel=0)


def test_marks_are_read_when_they_are_past_and_not_before(card: _Card) -> None:
    recorder = TraceRecorder(torch.device("cuda"))
    assert card.waits > 0  # when it begins, and when it is over
    card.lag_s, card.waits = 1.0, 0  # the device is behind the host
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for event in (start, end):
        event.record(torch.cuda.current_stream())
        card.now_s += 0.25
    recorder.add("link", "weights of layer 0", start, end, {})
    recorder.add("compute", "layer 0", recorder.mark(), recorder.mark(), {})
    recorder.settle()
    assert recorder.spans == []
    card.now_s += 1.0
    recorder.settle()
    assert [(span.name, span.start_s, span.end_s) for span in recorder.spans] == [
        ("weights of layer 0", 1.0, 1.25), ("layer 0", 1.5, 1.5),
    ]  # fmt: skip
    recorder.begin_pass(0)
    recorder.end_pass("verify", [1], 10)
    recorder.decided(accepted=[0])
    with recorder.span("draft steps", host=True):
        pass
    assert card.waits == 0
    recorder.finish()
    assert card.waits > 0


def test_a_card_that_has_failed_leaves_what_was_read(card: _Card) -> None:
    recorder = TraceRecorder(torch.device("cuda"))
    recorder.add("compute", "layer 0", recorder.mark(), recorder.mark(), {})
    recorder.settle()
    recorder.add("compute", "layer 1", recorder.mark(), recorder.mark(), {})
    card.fails = True
    trace = recorder.finish()
    assert ([span.name for span in trace.spans], trace.dropped) == (["layer 0"], 1)


def test_spans_beyond_the_most_are_counted() -> None:
    recorder = TraceRecorder(torch.device("cpu"), most_spans=3)
    for number in range(5):
        CopyLog(recorder, "link").copied(("weights", (number,)), 10, number, number + 1)
    trace = recorder.finish()
    assert ([span.args["layer"] for span in trace.spans], trace.dropped) == ([0, 1, 2], 2)


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
