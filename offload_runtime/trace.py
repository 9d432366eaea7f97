"""What happened when: spans of passes, copies, layers, drafting and the host, for the file that `--trace` names.

Beside the token's journey, not on it: whoever works on a token tells a `TraceRecorder` when it did, if there is one.
It collects spans by clocks of what a device computes, and puts all on one clock when it is done. A CPU's clock is the
host's own, a GPU's are its timing events. A mark stands for a moment on the device. Marks are read when they are past,
so nothing ever waits for one while tokens are decoded; only the beginning and the end of a recording do.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload_runtime.files import write_atomically

TRACE_VERSION = 1
PASSES, LINK, LINK_BACK, COMPUTE, STALLS, DRAFT, HOST = ROWS = (
    "passes", "link", "link back", "compute", "stalls", "draft", "host",
)  # fmt: skip
# A pass over a 7B model and 120K tokens of keys and values makes 3000; half a kilobyte of host memory each.
MOST_SPANS = 1_000_000
# Of so many attempts to catch host and device at one moment the tightest counts.
_ALIGNMENTS = 5
REMEDY = "name another place with --trace"
OF_CARD = " of card "


class CudaClock:
    """The clock of a GPU: marks moments of what it computes. Seconds count from the clock's making.

    The driver tells the time between two events in milliseconds of 24 bits: microseconds become coarse after some ten
    seconds. So marks are read against a base that follows them.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        base, self._started_s = self._now()
        # Events that have fired, and when: the base, and the last that was read.
        self._base = self._last = base, 0.0

    def mark(self) -> torch.cuda.Event:
        """Mark the moment when all is done that the current stream has been given so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, start: torch.cuda.Event, end: torch.cuda.Event) -> tuple[float, float]:
        """Return the seconds of two marks, once both are past; one may be before the base."""
        start_s = self._seconds(start)
        self._last = end, start_s + start.elapsed_time(end) / 1e3
        return start_s, self._last[1]

    def move_base(self) -> None:
        """Go by the last mark that was read from now on; never waits. To be called once for many marks that were read,
        as each move rounds."""
        self._base = self._last

    def is_past(self, mark: torch.cuda.Event) -> bool:
        """Return whether the moment has come; never waits."""
        return mark.query()

    def to_host(self, *, wait: bool = True) -> Callable[[float], float]:
        """Return what turns this clock's seconds into those of `time.perf_counter`. Waits for the current stream;
        without `wait` it goes by the clock's beginning, for a device that answers no more."""
        started_s, rate = self._started_s, 1.0
        if wait:
            event, ended_s = self._now()
            rate = (ended_s - started_s) / self._seconds(event)
        return lambda seconds: started_s + rate * seconds

    def _seconds(self, event: torch.cuda.Event) -> float:
        base, base_s = self._base
        return base_s + base.elapsed_time(event) / 1e3

    def _now(self) -> tuple[torch.cuda.Event, float]:
        """One moment as an event and on the host's clock."""
        stream = torch.cuda.current_stream(self._device)
        stream.synchronize()
        tries = []
        for _ in range(_ALIGNMENTS):
            event = torch.cuda.Event(enable_timing=True)
            before_s = time.perf_counter()
            event.record(stream)
            event.synchronize()
            after_s = time.perf_counter()
            tries.append((after_s - before_s, (before_s + after_s) / 2, event))
        _, middle_s, event = min(tries, key=lambda attempt: attempt[0])
        return event, middle_s


class HostClock:
    """The same of a CPU, which is its own device: what it computes is over when the call returns, and marks are
    seconds of `time.perf_counter`."""

    def mark(self) -> float:
        return time.perf_counter()

    def read(self, start: float, end: float) -> tuple[float, float]:
        return start, end

    def move_base(self) -> None:
        pass

    def is_past(self, mark: float) -> bool:
        return True

    def to_host(self, *, wait: bool = True) -> Callable[[float], float]:
        return lambda seconds: seconds


# --- what is recorded


class Span(NamedTuple):
    """Is something that took its time. `start_s` and `end_s` are on the device's clock or else on the host's."""

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

    `mark` and `settle` are for one thread, the one that computes; `add` and `add_host` for any, but what lies in one
    row and is added by marks for one at a time.

    Args:
        device: The one that computes, by whose clock it is told when; of several cards the first.
        most_spans: Any further ones are only counted.
    """

    def __init__(self, device: torch.device, *, most_spans: int = MOST_SPANS) -> None:
        self.spans: list[Span] = []
        self._clock = CudaClock(device) if device.type == "cuda" else HostClock()
        self._most_spans = most_spans
        self._dropped = 0
        self._started_s = time.perf_counter()
        # Spans whose marks may not be past yet: name, start, end, arguments. Each row is in order; one may be ahead of
        # another.
        self._open: dict[str, deque[tuple[str, Any, Any, dict[str, Any]]]] = {row: deque() for row in ROWS}
        self._passes = 0
        # Of the last pass: when it began, on the host's clock and as a mark, and the bytes before; then what it did,
        # whose outcome is not known yet, and when the host was done with it.
        self._pass_start: tuple[float, Any, int] = 0.0, None, 0
        self._pass_args: dict[str, Any] = {}
        self._launched_s = 0.0
        self._others: list[TraceRecorder] = []

    def of_card(self, number: int, device: torch.device) -> TraceRecorder:
        """Return who is told what happens on one of several cards, by its own clock: for the first this one, for each
        of the others one whose rows this one has as well. To be asked for in the order of the numbers."""
        if number:
            assert number == len(self._others) + 1
            self._others.append(TraceRecorder(device, most_spans=self._most_spans))
        return self._others[number - 1] if number else self

    def mark(self) -> Any:
        """Mark a moment of the device: when all is done that the current stream has been given."""
        return self._clock.mark()

    def add(self, row: str, name: str, start: Any, end: Any, args: dict[str, Any]) -> None:
        """A span between two marks, which are the recorder's from now on, or timing events that have been recorded on
        any stream of the device. `args` may be completed until the end."""
        self._open[row].append((name, start, end, args))

    @contextmanager
    def span(self, name: str, *, row: str = DRAFT, host: bool = False, **args: Any) -> Iterator[dict[str, Any]]:
        """Record a span around what is enqueued on the current stream meanwhile; with `host` also one around the host's
        own work. Gives its arguments, which may be completed."""
        started_s, started = time.perf_counter(), self.mark()
        yield args
        self.add(row, name, started, self.mark(), args)
        if host:
            self.add_host(name, started_s, time.perf_counter(), {})

    def add_host(self, name: str, start_s: float, end_s: float, args: dict[str, Any]) -> None:
        """A span of the host's own work, by `time.perf_counter`."""
        self._keep(Span(HOST, name, start_s, end_s, args, on_device=False))

    def begin_pass(self, nbytes: int) -> None:
        """A pass of the target begins; the link has begun so many bytes so far."""
        self._pass_start = time.perf_counter(), self.mark(), nbytes

    def end_pass(self, kind: str, tokens: list[int], nbytes: int, prompts: list[int] | None = None) -> None:
        """All of the pass has been enqueued: of which kind it is, the tokens of its windows, or of the prompts that it
        is about, and those of prompts that it has read beside windows."""
        ended, self._launched_s = self.mark(), time.perf_counter()
        (started_s, started, bytes_before), number = self._pass_start, {"pass": self._passes}
        self._pass_args = {**number, "kind": kind, "tokens": tokens, "bytes": nbytes - bytes_before}
        if prompts:
            self._pass_args["prompts"] = prompts
        self.add(PASSES, f"{kind} {self._passes}", started, ended, self._pass_args)
        self.add_host("launch", started_s, self._launched_s, number)
        self._passes += 1

    def decided(self, **outcome: Any) -> None:
        """Note what came of the last pass, whose tokens the host has just read."""
        self._pass_args |= outcome
        self.add_host("wait and accept", self._launched_s, time.perf_counter(), {"pass": self._pass_args["pass"]})
        self.settle()

    def settle(self) -> None:
        """Read the marks that are past; never waits. To be called where the device has just been waited for."""
        for row, waiting in self._open.items():
            while waiting and self._clock.is_past(waiting[0][2]):
                name, start, end, args = waiting.popleft()
                self._keep(Span(row, name, *self._clock.read(start, end), args, on_device=True))
        self._clock.move_base()
        for other in self._others:
            other.settle()

    def position(self) -> tuple[int, ...]:
        """Return how many spans there are of each card so far, those included whose marks are past; never waits."""
        self.settle()
        return tuple(len(one.spans) for one in (self, *self._others))

    def since(self, position: Sequence[int]) -> list[Span]:
        """Return the spans of all cards behind a `position`, in the rows of one card. Those of several cards are put on
        one clock, the host's, which waits for their current streams."""
        if not self._others:
            return self.spans[position[0] :]
        cards = zip((self, *self._others), position, strict=True)
        return [span for one, start in cards for span in _on_host(one.spans[start:], one._clock.to_host())]

    def finish(self) -> Trace:
        """Wait for the device, read what is left and put everything on the host's clock."""
        try:
            to_host = self._clock.to_host()
            self.settle()
        except torch.AcceleratorError:  # what the device did before it failed is what the trace is for
            to_host = self._clock.to_host(wait=False)
        dropped = self._dropped + sum(map(len, self._open.values()))
        spans = _on_host(self.spans, to_host)
        for number, other in enumerate(self._others, 1):
            found = other.finish()
            spans += [span._replace(row=f"{span.row}{OF_CARD}{number}") for span in found.spans]
            dropped += found.dropped
        return Trace(sorted(spans, key=lambda span: span.start_s), self._started_s, dropped)

    def _keep(self, span: Span) -> None:
        if len(self.spans) < self._most_spans:
            self.spans.append(span)
        else:
            self._dropped += 1


def _on_host(spans: Iterable[Span], to_host: Callable[[float], float]) -> list[Span]:
    """The same with all seconds on the host's clock."""
    return [
        span._replace(start_s=to_host(span.start_s), end_s=to_host(span.end_s)) if span.on_device else span
        for span in spans
    ]


# What is copied: `weights` of (layer,), or `kv` of (layer, sequence, first block).
Label = tuple[str, tuple[int, ...]]
_KEYS = ("layer", "sequence", "block")


@dataclass(frozen=True)
class CopyLog:
    """Says where the spans of one copy queue go: its copies into `row`, and what waits for them into that of stalls."""

    recorder: TraceRecorder
    row: str

    def copied(self, label: Label | None, nbytes: int, start: Any, end: Any) -> None:
        """A copy is made between these two marks."""
        kind, key = label or ("measurement", ())
        name = f"{kind} of layer {key[0]}" if key else kind
        args = {"kind": kind, **dict(zip(_KEYS, key, strict=False)), "bytes": nbytes}
        self.recorder.add(self.row, name, start, end, args)

    def stalled(self, start: Any, end: Any) -> None:
        """The same for a wait of the computing side for a copy."""
        self.recorder.add(STALLS, f"wait for the {self.row}", start, end, {})

    def staged(self, start_s: float, end_s: float) -> None:
        """The host waited for pageable memory to be staged."""
        self.recorder.add_host(f"staging for the {self.row}", start_s, end_s, {})


Interval = tuple[float, float]


def union_seconds(intervals: Iterable[Interval]) -> float:
    """Return the seconds that are in any of the intervals (start, end)."""
    seconds, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        seconds += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return seconds


def covered_seconds(intervals: Iterable[Interval], by: Iterable[Interval]) -> float:
    """Return the seconds that are in any of `intervals` and in any of `by`."""
    left, right = list(intervals), list(by)
    return union_seconds(left) + union_seconds(right) - union_seconds([*left, *right])


# --- the file that chrome://tracing and ui.perfetto.dev open: the JSON object of Chrome's "Trace Event Format", one
# process with a row for each kind of work, complete events (`ph` X) with `ts` and `dur` in microseconds.


def write_trace(path: Path, trace: Trace, about: Mapping[str, Any]) -> None:
    """Write a trace as a whole or not at all; a file that was there is replaced.

    Args:
        path: Where to.
        trace: What was recorded.
        about: What else to say in `otherData`.

    Raises:
        StorageError: It cannot be written; an older file is then still there.
    """
    other = {"offload_runtime_trace": TRACE_VERSION, "dropped_spans": trace.dropped, **about}
    events = ",\n".join(json.dumps(event) for event in _events(trace))
    text = f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(other)}, "traceEvents": [\n{events}\n]}}\n'
    write_atomically(path, text, remedy=REMEDY)


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "offload_runtime"}}
    others = sorted({span.row for span in trace.spans} - {*ROWS})
    threads = {row: number for number, row in enumerate([*ROWS, *others], start=1)}
    for row, number in threads.items():
        thread = {"ph": "M", "pid": 1, "tid": number}
        yield {**thread, "name": "thread_name", "args": {"name": row}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": number}}
    for span in trace.spans:
        yield {
            "ph": "X", "name": span.name, "cat": span.row, "pid": 1, "tid": threads[span.row],
            "ts": _microseconds(span.start_s - trace.started_s), "dur": _microseconds(span.end_s - span.start_s),
            "args": span.args,
        }  # fmt: skip


def _microseconds(seconds: float) -> float:
    """To the nanosecond, which is finer than any of the clocks."""
    return round(1e6 * seconds, 3)
