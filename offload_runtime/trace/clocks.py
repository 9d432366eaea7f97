"""Clocks of what a device computes: a CPU's is the host's own, a GPU's are its timing events.

A mark stands for a moment on the device. Marks are read when they are past, so nothing ever waits for one while tokens
are decoded; only the beginning and the end of a recording do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# Of so many attempts to catch host and device at one moment the tightest counts.
_ALIGNMENTS = 5


Reader = Callable[[Any, Any], tuple[float, float]]


class DeviceClock(Protocol):
    """Marks moments of what a device computes. Seconds count from the clock's making."""

    def mark(self) -> Any:
        """The moment when all is done that the current stream has been given so far."""

    def reader(self) -> Reader:
        """What tells the seconds of two marks made from now on, once both are past."""

    def move_base(self) -> None:
        """Let later readers go by a later moment; never waits. To be called where the current stream is idle."""

    def is_past(self, mark: Any) -> bool:
        """Whether the moment has come; never waits."""

    def give_back(self, mark: Any) -> None:
        """The mark is of no more use to anybody."""

    def to_host(self, *, wait: bool = True) -> Callable[[float], float]:
        """What turns this clock's seconds into those of `time.perf_counter`. Waits for the current stream; without
        `wait` it goes by the clock's beginning, for a device that answers no more."""


class HostClock:
    """The CPU is its own device: what it computes is over when the call returns, and marks are seconds."""

    def mark(self) -> float:
        return time.perf_counter()

    def reader(self) -> Reader:
        return lambda start, end: (start, end)

    def move_base(self) -> None:
        pass

    def is_past(self, mark: float) -> bool:
        return True

    def give_back(self, mark: float) -> None:
        pass

    def to_host(self, *, wait: bool = True) -> Callable[[float], float]:
        return lambda seconds: seconds


@dataclass(frozen=True)
class _Base:
    """An event that has fired, and when: seconds since the clock's making."""

    event: torch.cuda.Event
    seconds: float

    def seconds_of(self, later: torch.cuda.Event) -> float:
        """The same of an event that has fired since."""
        return self.seconds + self.event.elapsed_time(later) / 1e3


class CudaClock:
    """The clock of a GPU.

    The driver tells the time between two events in milliseconds of 24 bits: microseconds become coarse after some ten
    seconds. So marks are read against a base that follows them.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: list[torch.cuda.Event] = []
        event, self._started_s = self._now()
        self._base = _Base(event, 0.0)
        self._next_base: torch.cuda.Event | None = None

    def mark(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def reader(self) -> Reader:
        base = self._base

        def read(start: torch.cuda.Event, end: torch.cuda.Event) -> tuple[float, float]:
            start_s = base.seconds_of(start)
            return start_s, start_s + start.elapsed_time(end) / 1e3

        return read

    def move_base(self) -> None:
        # Only what has fired becomes the base, so that no mark made afterwards is before it.
        if self._next_base is not None and self._next_base.query():
            self._base = _Base(self._next_base, self._base.seconds_of(self._next_base))
            self._next_base = None
        if self._next_base is None:
            self._next_base = torch.cuda.Event(enable_timing=True)
            self._next_base.record(torch.cuda.current_stream(self._device))

    def is_past(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def give_back(self, mark: torch.cuda.Event) -> None:
        self._spare.append(mark)

    def to_host(self, *, wait: bool = True) -> Callable[[float], float]:
        started_s, rate = self._started_s, 1.0
        if wait:
            event, ended_s = self._now()
            rate = (ended_s - started_s) / self._base.seconds_of(event)
        return lambda seconds: started_s + rate * seconds

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


def make_clock(device: torch.device) -> DeviceClock:
    """The clock that fits `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
