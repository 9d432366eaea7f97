"""The copy queue of a GPU: a stream, with CUDA events, which also time its copies and stalls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from offload_runtime_kernels.pace_link import pace_link

from offload_runtime.config import GB
from offload_runtime.copy.cpu import LinkPace
from offload_runtime.errors import CopyError
from offload_runtime.trace import CopyLog, Label, OnDone

# One cudaMemcpyAsync of a whole layer would make every small upload of the compute stream wait behind it;
# 64 MiB pieces keep the link at its peak and let others in between.
COPY_PIECE_BYTES = 64 << 20


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
    """Sums the time between pairs of CUDA events without ever waiting for one."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event, OnDone | None]] = deque()
        self._spare: list[torch.cuda.Event] = []

    def event(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)

    def add(self, start: torch.cuda.Event, end: torch.cuda.Event, done: OnDone | None) -> None:
        self._open.append((start, end, done))

    def harvest(self) -> float:
        """Add what has finished to the total and return it, in seconds."""
        while self._open and self._open[0][1].query():
            start, end, done = self._open.popleft()
            self.total_s += start.elapsed_time(end) / 1e3
            if done is not None:
                done(start, end)
            self._spare += (start, end)
        return self.total_s


class CudaCopyEngine:
    """Copy engine of a GPU: a dedicated stream, ordered against the current compute stream by events only.

    Args:
        device: The GPU.
        before_copy: Called with the copy stream current before each copy: tests inject delays with it.
        pace: Of the link that the copies emulate; None: none.
        log: Of a trace; None: none.
    """

    def __init__(
        self, device: torch.device, *, before_copy: Callable[[], None] | None = None, pace: LinkPace | None = None,
        log: CopyLog | None = None,
    ) -> None:  # fmt: skip
        self.bytes_copied = 0
        self._pace = pace
        self.log = log
        self._device = device
        self._before_copy = before_copy
        # What keeps the pace is a kernel: it must not queue behind the compute's.
        self._stream = torch.cuda.Stream(device, priority=0 if pace is None else -1)
        self._copies = _IntervalTimer()
        self._stalls = _IntervalTimer()
        if log is not None:
            log.recorder.before_finish += [self.copy_seconds, self.stall_seconds]

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps

    def enqueue(
        self, dst: torch.Tensor, src: torch.Tensor, *, free: torch.cuda.Event, ready: torch.cuda.Event,
        source_free: torch.cuda.Event | None = None, label: Label | None = None,
    ) -> None:  # fmt: skip
        self._copies.harvest()
        start, end = self._copies.event(), self._copies.event()
        done = None if self.log is None else self.log.on_copied(label, src.nbytes)
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                self._stream.wait_event(free)
                if self._before_copy is not None:
                    self._before_copy()
                start.record(self._stream)
                if self._pace is not None:
                    self._pace(0)
                for offset in range(0, src.nbytes, COPY_PIECE_BYTES):
                    piece = slice(offset, offset + COPY_PIECE_BYTES)
                    dst[piece].copy_(src[piece], non_blocking=True)
                    if self._pace is not None:
                        self._pace(src[piece].nbytes)
                end.record(self._stream)
                ready.record(self._stream)
                if source_free is not None:
                    source_free.record(self._stream)
        except RuntimeError as error:
            raise CopyError(f"a copy to the device failed ({error}): load the runtime again") from error
        self._copies.add(start, end, done)
        self.bytes_copied += src.nbytes

    def compute_wait(self, ready: torch.cuda.Event) -> None:
        self._stalls.harvest()
        stream = torch.cuda.current_stream(self._device)
        start, end = self._stalls.event(), self._stalls.event()
        done = None if self.log is None else self.log.on_stalled()
        start.record(stream)
        stream.wait_event(ready)
        end.record(stream)
        self._stalls.add(start, end, done)

    def compute_record(self, free: torch.cuda.Event) -> None:
        free.record(torch.cuda.current_stream(self._device))

    def is_done(self, ready: torch.cuda.Event) -> bool:
        return ready.query()

    def wait(self, ready: torch.cuda.Event) -> None:
        try:
            ready.synchronize()
        except RuntimeError as error:
            raise CopyError(f"a copy to the device failed ({error}): load the runtime again") from error

    def copy_seconds(self) -> float:
        return self._copies.harvest()

    def stall_seconds(self) -> float:
        return self._stalls.harvest()

    def drain(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self.drain()
