"""Collects spans while a runtime works and puts them on one clock when it is done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from offload_runtime.trace.clocks import DeviceClock

PASSES, LINK, LINK_BACK, COMPUTE, STALLS, DRAFT, HOST = ROWS = (
    "passes", "link", "link back", "compute", "stalls", "draft", "host",
)  # fmt: skip
# A pass over a 7B model and 120K tokens of keys and values makes 3000; half a kilobyte of host memory each.
MOST_SPANS = 1_000_000

OnDone = Callable[[Any, Any], None]


class Span(NamedTuple):
    """Something that took its time. `start_s` and `end_s` are on the device's clock or else on the host's."""

    row: str
    name: str
    start_s: float
    end_s: float
    args: dict[str, Any]
    on_device: bool


@dataclass(frozen=True)
class Trace:
    """A finished recording: all spans by `time.perf_counter`, which was `started_s` when it began.

    `dropped` spans were not kept or could not be read.
    """

    spans: Sequence[Span]
    started_s: float
    dropped: int


class TraceRecorder:
    """Owns what is recorded.

    `mark`, `add` and `settle` are for one thread, the one that computes; `add_host` and `on_done` for any.

    Args:
        clock: Of the device that computes.
        most_spans: Any further ones are only counted.
    """

    def __init__(self, clock: DeviceClock, *, most_spans: int = MOST_SPANS) -> None:
        self.spans: list[Span] = []
        # Called before the end: whoever waits for marks of its own reads them.
        self.before_finish: list[Callable[[], object]] = []
        self._clock = clock
        self._most_spans = most_spans
        self._dropped = 0
        self._started_s = time.perf_counter()
        # Spans whose marks may not be past yet: start, end, what keeps it. Each row is in order; one may be ahead of
        # another.
        self._open: dict[str, deque[tuple[Any, Any, OnDone]]] = {}

    def mark(self) -> Any:
        """A moment of the device: when all is done that the current stream has been given."""
        return self._clock.mark()

    def add(self, row: str, name: str, start: Any, end: Any, args: dict[str, Any]) -> None:
        """A span between two marks, which are the recorder's from now on. `args` may be completed until the end."""
        self._open.setdefault(row, deque()).append((start, end, self.on_done(row, name, args)))

    def add_host(self, row: str, name: str, start_s: float, end_s: float, args: dict[str, Any]) -> None:
        """A span by `time.perf_counter`."""
        self._keep(Span(row, name, start_s, end_s, args, on_device=False))

    def on_done(self, row: str, name: str, args: dict[str, Any]) -> OnDone:
        """For a span between two events that the caller is about to record and keeps: to be called with them once both
        are past."""
        read = self._clock.reader()

        def done(start: Any, end: Any) -> None:
            self._keep(Span(row, name, *read(start, end), args, on_device=True))

        return done

    def settle(self) -> None:
        """Read the marks that are past; never waits. To be called where the device has just been waited for."""
        for waiting in self._open.values():
            while waiting and self._clock.is_past(waiting[0][1]):
                start, end, done = waiting.popleft()
                done(start, end)
                self._clock.give_back(start)
                self._clock.give_back(end)
        self._clock.move_base()

    def finish(self) -> Trace:
        """Wait for the device, read what is left and put everything on the host's clock."""
        try:
            to_host = self._clock.to_host()
            self.settle()
            for read in self.before_finish:
                read()
        except torch.AcceleratorError:  # what the device did before it failed is what the trace is for
            to_host = self._clock.to_host(wait=False)
        self._dropped += sum(len(waiting) for waiting in self._open.values())
        self._open.clear()
        spans = [
            span._replace(start_s=to_host(span.start_s), end_s=to_host(span.end_s)) if span.on_device else span
            for span in self.spans
        ]
        return Trace(sorted(spans, key=lambda span: span.start_s), self._started_s, self._dropped)

    def _keep(self, span: Span) -> None:
        if len(self.spans) < self._most_spans:
            self.spans.append(span)
        else:
            self._dropped += 1


# What is copied: `weights` of (layer,), or `kv` of (layer, sequence, first block).
Label = tuple[str, tuple[int, ...]]
_KEYS = ("layer", "sequence", "block")


@dataclass(frozen=True)
class CopyLog:
    """Where the spans of one copy queue go: its copies into `row`, and what waits for them into that of stalls."""

    recorder: TraceRecorder
    row: str

    def on_copied(self, label: Label | None, nbytes: int) -> OnDone:
        """To be called with the marks around a copy that is about to be made, once both are past."""
        if label is None:
            return self.recorder.on_done(self.row, "measurement", {"kind": "measurement", "bytes": nbytes})
        kind, key = label
        args = {"kind": kind, **dict(zip(_KEYS, key, strict=False)), "bytes": nbytes}
        return self.recorder.on_done(self.row, f"{kind} of layer {key[0]}", args)

    def on_stalled(self) -> OnDone:
        """The same for a wait of the computing side for a copy."""
        return self.recorder.on_done(STALLS, f"wait for the {self.row}", {})

    def staged(self, start_s: float, end_s: float) -> None:
        """The host waited for pageable memory to be staged."""
        self.recorder.add_host(HOST, f"staging for the {self.row}", start_s, end_s, {})


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
