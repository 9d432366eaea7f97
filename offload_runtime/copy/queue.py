"""The copy queue: what everything that goes over the link needs of it, and the ones of a CPU (a thread) and of CUDA (a
stream), with the pace of an emulated link."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from offload_runtime_kernels.pace_link import pace_link, pace_link_reference

from offload_runtime.errors import CopyError
from offload_runtime.sizes import GB
from offload_runtime.trace import CopyLog, Label

# One cudaMemcpyAsync of a whole layer would make every small upload of the compute stream wait behind it;
# 64 MiB pieces keep the link at its peak and let others in between.
COPY_PIECE_BYTES = 64 << 20

# A sleeping thread wakes up to a tenth of a millisecond late, and much later on a busy machine.
_HOST_SLACK_NS = 5_000_000
# Makes the copies of one queue as slow as a slower link would. Called where the copies run, in their order: with 0 when
# a copy begins, after whatever it waited for, and then with the bytes that have been copied since the last call, to go
# on when the slower link would be done with them.
LinkPace = Callable[[int], None]


class CopyEngine(Protocol):
    """An ordered copy queue beside the compute. Events are opaque and belong to the engine that made them."""

    log: CopyLog | None  # of the trace that the queue reports to

    @property
    def bytes_copied(self) -> int:
        """Bytes of all copies: finished ones on the CPU, on CUDA those handed to the stream."""

    def new_event(self) -> Any:
        """An event that counts as fired until it is first used."""

    def enqueue(
        self, dst: torch.Tensor, src: torch.Tensor, *, free: Any, ready: Any, source_free: Any | None = None,
        label: Label | None = None,
    ) -> None:  # fmt: skip
        """Queue a copy of `src` (host) to `dst` (device), after `free` has fired; fires `ready` when it is done.

        `src` must stay unchanged, and `dst` unread, until `ready` has fired. `source_free` fires with it, for whoever
        owns `src`. `label` says what it is, for a trace.
        """

    def compute_wait(self, ready: Any) -> None:
        """Make the compute side wait for the latest `enqueue` with this event."""

    def compute_record(self, free: Any) -> None:
        """Fire `free` once all compute issued so far has finished."""

    def is_done(self, ready: Any) -> bool:
        """Whether the latest `enqueue` with this event has finished; never waits."""

    def wait(self, ready: Any) -> None:
        """Hold the calling thread, which may be any, until the latest `enqueue` with this event has finished."""

    def copy_seconds(self) -> float:
        """Total time that finished copies have kept the link busy, in seconds."""

    def stall_seconds(self) -> float:
        """Total time that the compute side has waited for `ready` events, in seconds, as far as known by now."""

    def drain(self) -> None:
        """Wait until every queued copy has finished."""

    def close(self) -> None:
        """Finish outstanding work and release the queue."""


def make_copy_engine(device: torch.device, *, pace_gbps: float | None = None, log: CopyLog | None = None) -> CopyEngine:
    """The copy queue that fits `device`.

    Args:
        device: Where to or where from the copies go.
        pace_gbps: Of an emulated link, which the copies are as slow as, GB/s; None: as fast as they can.
        log: Of a trace that the queue reports to; None: none.
    """
    if device.type == "cuda":
        return CudaCopyEngine(device, pace=None if pace_gbps is None else stream_pace(pace_gbps, device), log=log)
    return ThreadCopyEngine(pace=None if pace_gbps is None else host_pace(pace_gbps), log=log)


@dataclass(frozen=True)
class CopyQueues:
    """The queues of both ways: `h2d` to the device, `d2h` for what is written back to the host (None: nothing is)."""

    h2d: CopyEngine
    d2h: CopyEngine | None = None


def measure_link_gbps(engine: CopyEngine, dst: torch.Tensor, src: torch.Tensor, *, repeats: int = 8) -> float:
    """Peak bandwidth of back-to-back copies of `src` into `dst`, in GB/s; what is on the host is pinned on CUDA.

    Waits for the engine to drain; uses the same calls as streaming does, so streaming cannot beat it.
    """
    free, ready = engine.new_event(), engine.new_event()
    engine.enqueue(dst, src, free=free, ready=ready)  # the first touch of a buffer is slower
    engine.drain()
    before_s = engine.copy_seconds()
    for _ in range(repeats):
        engine.enqueue(dst, src, free=free, ready=ready)
    engine.drain()
    return repeats * src.nbytes / (engine.copy_seconds() - before_s) / 1e9


def host_pace(gbps: float) -> LinkPace:
    """Pace of a thread that copies: it sleeps.

    Args:
        gbps: Of the emulated link, GB/s.
    """
    assert gbps > 0
    deadline_ns = 0

    def pace(nbytes: int) -> None:
        nonlocal deadline_ns
        now_ns, duration_ns = time.perf_counter_ns(), round(nbytes / (gbps * GB) * 1e9)
        deadline_ns = pace_link_reference(deadline_ns, now_ns, duration_ns, slack_ns=_HOST_SLACK_NS)
        if deadline_ns > now_ns:
            time.sleep((deadline_ns - now_ns) / 1e9)

    return pace


# Work that is done: what an event stands for as long as no copy has been asked for with it.
DONE: Future[None] = Future()
DONE.set_result(None)


class _HostEvent:
    """Has fired when the latest copy that it stands for is done; what is computed is done when it is recorded."""

    copy: Future[None] = DONE


class ThreadCopyEngine:
    """Copy engine of the CPU: a worker thread copies while the main thread computes.

    Args:
        pace: Of the link that the copies emulate; None: none.
        log: Of a trace; None: none.
    """

    def __init__(self, *, pace: LinkPace | None = None, log: CopyLog | None = None) -> None:
        self.log = log
        self.bytes_copied = 0
        self._pace = pace or (lambda nbytes: None)
        self._worker: Executor = ThreadPoolExecutor(1, "copy-engine")
        self._last = DONE
        self._failure: BaseException | None = None
        self._copy_s = 0.0
        self._stall_s = 0.0

    def new_event(self) -> _HostEvent:
        return _HostEvent()

    def enqueue(
        self, dst: torch.Tensor, src: torch.Tensor, *, free: _HostEvent, ready: _HostEvent,
        source_free: _HostEvent | None = None, label: Label | None = None,
    ) -> None:  # fmt: skip
        if self._last.done():
            self._wait(self._last)
        ready.copy = self._last = self._worker.submit(self._copy, dst, src, free.copy, label)
        if source_free is not None:
            source_free.copy = ready.copy

    def _copy(self, dst: torch.Tensor, src: torch.Tensor, before: Future[None], label: Label | None) -> None:
        before.result()
        try:
            if self._failure is not None:
                raise self._failure
            started = time.perf_counter()
            self._pace(0)
            with torch.inference_mode():  # a mode of the thread; buffers may come from a thread that is in it
                dst.copy_(src)
            self._pace(src.nbytes)
            ended = time.perf_counter()
            self._copy_s += ended - started
            if self.log is not None:
                self.log.copied(label, src.nbytes, started, ended)
        except BaseException as error:
            self._failure = error
            raise
        self.bytes_copied += src.nbytes

    def compute_wait(self, ready: _HostEvent) -> None:
        started = time.perf_counter()
        self.wait(ready)
        ended = time.perf_counter()
        self._stall_s += ended - started
        if self.log is not None:
            self.log.stalled(started, ended)

    def compute_record(self, free: _HostEvent) -> None:
        free.copy = DONE

    def is_done(self, ready: _HostEvent) -> bool:
        return ready.copy.done() and ready.copy.exception() is None

    def wait(self, ready: _HostEvent) -> None:
        self._wait(ready.copy)

    def _wait(self, copy: Future[None]) -> None:
        if (error := copy.exception()) is not None:
            raise CopyError(
                f"a copy to the device failed ({error}): the streamed weights cannot be trusted any more; "
                "load the runtime again"
            ) from error

    def copy_seconds(self) -> float:
        return self._copy_s

    def stall_seconds(self) -> float:
        return self._stall_s

    def drain(self) -> None:
        self._wait(self._last)

    def close(self) -> None:
        self._worker.shutdown()


def stream_pace(gbps: float, device: torch.device) -> LinkPace:
    """Pace of the current CUDA stream: a kernel of one warp waits by the GPU's clock, the host waits for nothing.

    Args:
        gbps: Of the emulated link, GB/s.
        device: The GPU.
    """
    assert gbps > 0
    deadline_ns = torch.zeros(1, dtype=torch.int64, device=device)  # on the GPU's clock
    pace_link(deadline_ns, 0)  # compiles
    torch.cuda.current_stream(device).synchronize()  # the copies have a stream of their own
    return lambda nbytes: pace_link(deadline_ns, round(nbytes / (gbps * GB) * 1e9))


class _IntervalTimer:
    """Sums the time between pairs of CUDA events without ever waiting for one, in the order in which they were made."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def around(self, stream: torch.cuda.Stream) -> Iterator[tuple[torch.cuda.Event, torch.cuda.Event]]:
        """Time what a stream is given meanwhile. Gives the events before and behind it, which a trace may have as well:
        no pair is recorded a second time."""
        self.harvest()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        yield start, end
        end.record(stream)
        self._open.append((start, end))

    def harvest(self) -> float:
        """Add what has finished to the total and return it, in seconds."""
        while self._open and self._open[0][1].query():
            start, end = self._open.popleft()
            self.total_s += start.elapsed_time(end) / 1e3
        return self.total_s


class CudaCopyEngine:
    """Copy engine of a GPU: a dedicated stream, ordered against the current compute stream by events only.

    Args:
        device: The GPU.
        pace: Of the link that the copies emulate; None: none.
        log: Of a trace; None: none.
    """

    def __init__(self, device: torch.device, *, pace: LinkPace | None = None, log: CopyLog | None = None) -> None:
        self.log = log
        self.bytes_copied = 0
        self._pace = pace or (lambda nbytes: None)
        self._device = device
        # What keeps the pace is a kernel: it must not queue behind the compute's.
        self._stream = torch.cuda.Stream(device, priority=0 if pace is None else -1)
        self._copies, self._stalls = _IntervalTimer(), _IntervalTimer()
        self.copy_seconds, self.stall_seconds = self._copies.harvest, self._stalls.harvest

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps

    def enqueue(
        self, dst: torch.Tensor, src: torch.Tensor, *, free: torch.cuda.Event, ready: torch.cuda.Event,
        source_free: torch.cuda.Event | None = None, label: Label | None = None,
    ) -> None:  # fmt: skip
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                self._stream.wait_event(free)
                with self._copies.around(self._stream) as (start, end):
                    self._pace(0)
                    for target, piece in zip(dst.split(COPY_PIECE_BYTES), src.split(COPY_PIECE_BYTES), strict=True):
                        target.copy_(piece, non_blocking=True)
                        self._pace(piece.nbytes)
                ready.record(self._stream)
                if source_free is not None:
                    source_free.record(self._stream)
        except RuntimeError as error:
            raise CopyError(f"a copy to the device failed ({error}): load the runtime again") from error
        if self.log is not None:
            self.log.copied(label, src.nbytes, start, end)
        self.bytes_copied += src.nbytes

    def compute_wait(self, ready: torch.cuda.Event) -> None:
        stream = torch.cuda.current_stream(self._device)
        with self._stalls.around(stream) as (start, end):
            stream.wait_event(ready)
        if self.log is not None:
            self.log.stalled(start, end)

    def compute_record(self, free: torch.cuda.Event) -> None:
        free.record(torch.cuda.current_stream(self._device))

    def is_done(self, ready: torch.cuda.Event) -> bool:
        return ready.query()

    def wait(self, ready: torch.cuda.Event) -> None:
        try:
            ready.synchronize()
        except RuntimeError as error:
            raise CopyError(f"a copy to the device failed ({error}): load the runtime again") from error

    def drain(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self.drain()
