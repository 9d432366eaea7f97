"""The copy queue of the CPU: a worker thread, with counters in place of CUDA events; and the pace of a slower link."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from offload_runtime_kernels.pace_link import pace_link_reference

from offload_runtime.config import GB
from offload_runtime.errors import CopyError
from offload_runtime.trace import CopyLog, Label

# A sleeping thread wakes up to a tenth of a millisecond late, and much later on a busy machine.
_HOST_SLACK_NS = 5_000_000

# Makes the copies of one queue as slow as a slower link would. Called where the copies run, in their order: with 0 when
# a copy begins, after whatever it waited for, and then with the bytes that have been copied since the last call, to go
# on when the slower link would be done with them.
LinkPace = Callable[[int], None]


def host_pace(
    gbps: float, *, clock_ns: Callable[[], int] = time.perf_counter_ns, sleep: Callable[[float], None] = time.sleep
) -> LinkPace:
    """Pace of a thread that copies: it sleeps.

    Args:
        gbps: Of the emulated link, GB/s.
        clock_ns: Nanoseconds of a clock.
        sleep: Waits for so many seconds.
    """
    assert gbps > 0
    deadline_ns = 0

    def pace(nbytes: int) -> None:
        nonlocal deadline_ns
        now_ns, duration_ns = clock_ns(), round(nbytes / (gbps * GB) * 1e9)
        deadline_ns = pace_link_reference(deadline_ns, now_ns, duration_ns, slack_ns=_HOST_SLACK_NS)
        if deadline_ns > now_ns:
            sleep((deadline_ns - now_ns) / 1e9)

    return pace


class _HostEvent:
    """Counts how often it was armed and how often it fired; fired as often as armed means done."""

    def __init__(self) -> None:
        self.armed = 0
        self.fired = 0


class ThreadCopyEngine:
    """Copy engine of the CPU: a worker thread copies while the main thread computes.

    Args:
        before_copy: Called in the worker before each copy: tests inject delays and failures with it.
        pace: Of the link that the copies emulate; None: none.
        log: Of a trace; None: none.
    """

    def __init__(
        self, *, before_copy: Callable[[], None] | None = None, pace: LinkPace | None = None,
        log: CopyLog | None = None,
    ) -> None:  # fmt: skip
        self.bytes_copied = 0
        self._pace = pace
        self.log = log
        self._before_copy = before_copy
        self._queue: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._pending = 0
        self._copy_s = 0.0
        self._stall_s = 0.0
        self._worker = threading.Thread(target=self._run, name="copy-engine", daemon=True)
        self._worker.start()

    def new_event(self) -> _HostEvent:
        return _HostEvent()

    def enqueue(
        self, dst: torch.Tensor, src: torch.Tensor, *, free: _HostEvent, ready: _HostEvent,
        source_free: _HostEvent | None = None, label: Label | None = None,
    ) -> None:  # fmt: skip
        self._raise_failure()
        fired = (ready,) if source_free is None else (ready, source_free)
        with self._changed:
            for event in fired:
                event.armed += 1
            self._pending += 1
            self._queue.put((dst, src, free, free.armed, fired, label))

    def compute_wait(self, ready: _HostEvent) -> None:
        started = time.perf_counter()
        self.wait(ready)
        ended = time.perf_counter()
        self._stall_s += ended - started
        if self.log is not None:
            self.log.on_stalled()(started, ended)

    def compute_record(self, free: _HostEvent) -> None:
        with self._changed:
            free.armed += 1
            free.fired = free.armed
            self._changed.notify_all()

    def is_done(self, ready: _HostEvent) -> bool:
        return ready.fired >= ready.armed

    def wait(self, ready: _HostEvent) -> None:
        target = ready.armed
        with self._changed:
            self._changed.wait_for(lambda: ready.fired >= target or self._failure is not None)
        self._raise_failure()

    def copy_seconds(self) -> float:
        return self._copy_s

    def stall_seconds(self) -> float:
        return self._stall_s

    def drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending == 0 or self._failure is not None)
        self._raise_failure()

    def close(self) -> None:
        self._queue.put(None)
        self._worker.join()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise CopyError(
                f"a copy to the device failed ({self._failure}): the streamed weights cannot be trusted any more; "
                "load the runtime again"
            ) from self._failure

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            dst, src, free, free_target, fired, label = item
            try:
                with self._changed:
                    self._changed.wait_for(lambda: free.fired >= free_target)  # noqa: B023 (used at once)
                if self._before_copy is not None:
                    self._before_copy()
                started = time.perf_counter()
                if self._pace is not None:
                    self._pace(0)
                with torch.inference_mode():  # a mode of the thread; buffers may come from a thread that is in it
                    dst.copy_(src)
                if self._pace is not None:
                    self._pace(src.nbytes)
                ended = time.perf_counter()
                self._copy_s += ended - started
                if self.log is not None:
                    self.log.on_copied(label, src.nbytes)(started, ended)
            except BaseException as error:
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self.bytes_copied += src.nbytes
                for event in fired:
                    event.fired += 1
                self._pending -= 1
                self._changed.notify_all()
