"""Copies from memory that could not be page-locked: threads move it into page-locked pieces, and those are copied.

A copy of the driver's own from pageable memory would hold the calling thread until it is done. The way to the host is
in `staging_d2h`; what both share, and the sizes of what is staged through, stands here.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from offload_runtime.copy.queue import CopyEngine
from offload_runtime.errors import CopyError
from offload_runtime.memory import PageableMemory
from offload_runtime.trace import Label

# Each thread fills a piece of its own. Copies of 16 MiB and more have the link's peak; a thread takes 2 to 3 ms for 32.
_PIECE_BYTES = 32 << 20
_MOST_PIECES = 12
# Of a small layer a piece is so much, that several threads work on it.
_PIECES_OF_A_LAYER = 4
# One piece is filled while the other is on the link.
FEWEST_PIECES = 2
MOST_THREADS = 8
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class RingShape:
    """Size of a staging ring: `num_pieces` of `piece_bytes` each."""

    piece_bytes: int
    num_pieces: int

    @property
    def nbytes(self) -> int:
        """Page-locked memory of the ring."""
        return self.piece_bytes * self.num_pieces


def ring_shape(layer_bytes: int, available_bytes: int | None = None) -> RingShape:
    """The ring for layers of `layer_bytes`, within `available_bytes` of page-locked memory or, at least, two pieces."""
    share = -(-layer_bytes // _PIECES_OF_A_LAYER)
    piece_bytes = min(_PIECE_BYTES, -(-share // _PAGE_BYTES) * _PAGE_BYTES)
    fitting = _MOST_PIECES if available_bytes is None else available_bytes // piece_bytes
    return RingShape(piece_bytes, max(FEWEST_PIECES, min(_MOST_PIECES, fitting)))


def staging_threads(usable_cores: int) -> int:
    """Threads that fill the ring: half of the cores, the others launch, copy and wait."""
    return max(1, min(MOST_THREADS, usable_cores // 2))


def move_bytes(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copy `src`, uint8 [n] on the host, to the beginning of `dst`.

    Plain memmove lets go of the interpreter's lock, and beyond the caches stores without reading first.
    """
    ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.nbytes)


class StagingQueue:
    """What both ways have in common: a queue below, and threads that move bytes between it and pageable memory.

    The threads share one lock. Once they are over, whoever waits for one of its conditions has to look again.

    Args:
        engine: The queue below, from now on this one's: it is closed with it.
        pageable: Which memory is staged.
        failed: What to say where a thread has failed, with a place for the `{error}`.
    """

    def __init__(self, engine: CopyEngine, pageable: PageableMemory, failed: str) -> None:
        self.log = engine.log
        self._engine = engine
        self._pageable = pageable
        self._failed = failed
        # Reentrant: the garbage collector may close a dropped runtime in any of these threads, at any moment.
        self._lock = threading.RLock()
        self._conditions: list[threading.Condition] = []
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None
        self._closed = False
        self._waited_s = 0.0

    # --- as of `CopyEngine`

    @property
    def bytes_copied(self) -> int:
        return self._engine.bytes_copied

    def new_event(self) -> Any:
        return self._engine.new_event()

    def compute_record(self, free: Any) -> None:
        self._engine.compute_record(free)

    def copy_seconds(self) -> float:
        return self._engine.copy_seconds()

    def stall_seconds(self) -> float:
        """Of the queue below, and what the host waited for the threads, whatever the device did meanwhile."""
        return self._waited_s + self._engine.stall_seconds()

    def close(self) -> None:
        """Drop what has not reached its end, end the threads, and close the queue below."""
        with self._lock:
            self._closed = True
            self._notify()
        if threading.current_thread() in self._threads:
            # This one, where the garbage collector closes, may hold the lock, without which the others cannot end.
            threading.Thread(target=self._finish, name="staging-end", daemon=True).start()
        else:
            self._finish()

    # --- for the two ways

    def _condition(self) -> threading.Condition:
        """A condition over the lock, notified when the threads are over."""
        self._conditions.append(threading.Condition(self._lock))
        return self._conditions[-1]

    def _start(self, work: Callable[[], None], name: str) -> None:
        """Begin a thread; `work` returns when the threads are over."""
        thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _raise_failure(self) -> None:
        """Raise `CopyError` if a thread has failed."""
        if isinstance(self._failure, CopyError):
            raise CopyError(str(self._failure)) from self._failure
        if self._failure is not None:
            raise CopyError(self._failed.format(error=self._failure)) from self._failure
        assert not self._closed, "the queue is closed"

    def _wait_for(self, condition: threading.Condition, ready: Callable[[], object]) -> None:
        """Wait, with the lock held, until `ready` says yes; raise as `_raise_failure` does where it never will."""
        self._has_work(condition, ready)
        self._raise_failure()

    def _has_work(self, condition: threading.Condition, ready: Callable[[], object]) -> bool:
        """Wait, with the lock held, until `ready` says yes; False where the threads are over."""
        condition.wait_for(lambda: ready() or self._closed or self._failure is not None)
        return not self._closed and self._failure is None

    @contextmanager
    def _host_waits(self) -> Iterator[None]:
        """What the calling thread spends in here counts as a stall."""
        started = time.perf_counter()
        yield
        ended = time.perf_counter()
        self._waited_s += ended - started
        if self.log is not None:
            self.log.staged(started, ended)

    def _finish(self) -> None:
        for thread in self._threads:
            thread.join()
        self._engine.close()

    def _notify(self) -> None:
        for condition in self._conditions:
            condition.notify_all()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error
                self._notify()


_FAILED = (
    "staging from pageable memory failed ({error}): what is streamed cannot be trusted any more; load the runtime again"
)


@dataclass
class _Piece:
    """One page-locked buffer of the ring; `free` fires when its last copy has been made."""

    buffer: torch.Tensor  # uint8 [piece_bytes], host, page-locked
    free: Any


@dataclass(eq=False)
class _Copy:
    """A part of what was enqueued: straight from `src`, or through a piece of the ring once one is filled with it."""

    dst: torch.Tensor  # uint8 [n], device
    src: torch.Tensor  # uint8 [n], host
    free: Any
    ready: Any
    staged: bool
    last: bool  # of what was enqueued together
    label: Label | None
    piece: _Piece | None = None

    @property
    def is_filled(self) -> bool:
        """Whether it can be handed to the link."""
        return not self.staged or self.piece is not None


class StagingCopyEngine(StagingQueue):
    """A copy queue some of whose sources are pageable; see `CopyEngine` for what its methods promise.

    Sources that are page-locked go straight to the queue below, unless something staged is before them.

    Args:
        engine: The queue below, from now on this one's: it is closed with it.
        ring: Page-locked buffers: uint8 [piece_bytes] each, host.
        pageable: Which sources are staged, or from which byte on. Others may be entered at any time.
        num_threads: That fill the ring.
        before_fill: Called in those threads before each piece: tests inject delays and failures with it.
    """

    def __init__(
        self, engine: CopyEngine, ring: Sequence[torch.Tensor], pageable: PageableMemory, *, num_threads: int,
        before_fill: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        assert len(ring) >= FEWEST_PIECES and num_threads > 0
        super().__init__(engine, pageable, _FAILED)
        self._before_fill = before_fill
        self._piece_bytes = ring[0].nbytes
        self._to_fill, self._to_issue, self._issued = (self._condition() for _ in range(3))
        self._link = threading.Lock()  # the queue below is asked by one thread at a time
        self._fills: deque[_Copy] = deque()  # that no thread has begun
        self._pending: deque[_Copy] = deque()  # not yet handed to the queue below, in order
        self._unissued: Counter[int] = Counter()  # by `ready` event
        self._unused = deque(_Piece(buffer, engine.new_event()) for buffer in ring)
        self._used: deque[_Piece] = deque()  # their copies are in the queue below, in order
        for number in range(num_threads):
            self._start(self._fill, f"staging-{number}")
        self._start(self._issue, "staging-link")

    def enqueue(
        self, dst: torch.Tensor, src: torch.Tensor, *, free: Any, ready: Any, source_free: Any | None = None,
        label: Label | None = None,
    ) -> None:  # fmt: skip
        assert source_free is None, "whoever owns pageable memory does not write to it"
        with self._lock:
            self._raise_failure()
            locked_bytes = self._pageable.locked_bytes(src)
            # What is pending stays in the queue until it is handed on, so nothing can overtake it here.
            straight = locked_bytes >= src.nbytes and not self._pending
            if not straight:
                self._append(self._parts(dst, src, locked_bytes, free, ready, label))
        if straight:
            with self._link:
                self._engine.enqueue(dst, src, free=free, ready=ready, label=label)

    def _parts(
        self, dst: torch.Tensor, src: torch.Tensor, locked_bytes: int, free: Any, ready: Any, label: Label | None
    ) -> list[_Copy]:
        cuts = [0] if locked_bytes else []
        cuts += [*range(locked_bytes, src.nbytes, self._piece_bytes), src.nbytes]
        return [
            _Copy(
                dst[start:end],
                src[start:end],
                free,
                ready,
                staged=start >= locked_bytes,
                last=end == src.nbytes,
                label=label,
            )
            for start, end in pairwise(cuts)
        ]

    def _append(self, parts: list[_Copy]) -> None:
        staged = [part for part in parts if part.staged]
        self._unissued[id(parts[0].ready)] += 1
        self._pending += parts
        self._fills += staged
        self._pageable.begin_reads(len(staged))
        self._to_fill.notify(len(staged))
        self._to_issue.notify()

    def compute_wait(self, ready: Any) -> None:
        self._wait_until_issued(ready)
        self._engine.compute_wait(ready)

    def is_done(self, ready: Any) -> bool:
        with self._lock:
            self._raise_failure()
            return not self._unissued[id(ready)] and self._engine.is_done(ready)

    def wait(self, ready: Any) -> None:
        self._wait_until_issued(ready)
        self._engine.wait(ready)

    def copy_seconds(self) -> float:
        with self._link:
            return super().copy_seconds()

    def drain(self) -> None:
        with self._lock:
            self._wait_for(self._issued, lambda: not self._pending)
        self._engine.drain()

    def _wait_until_issued(self, ready: Any) -> None:
        """A copy that is not in the queue below has fired no event that could be waited for."""
        with self._host_waits(), self._lock:
            self._wait_for(self._issued, lambda: not self._unissued[id(ready)])

    # --- the threads

    def _fill(self) -> None:
        try:
            self._fill_pieces()
        finally:  # an owner that waits for reads that nobody will make would wait for ever
            self._pageable.end_reading()

    def _fill_pieces(self) -> None:
        """Fill pieces, each with the oldest part that no other thread has begun."""
        while True:
            with self._lock:
                if not self._has_work(self._to_fill, lambda: self._fills and (self._unused or self._used)):
                    return
                copy = self._fills.popleft()
                in_flight = not self._unused
                piece = self._used.popleft() if in_flight else self._unused.popleft()
            if in_flight:
                self._engine.wait(piece.free)
            if self._before_fill is not None:
                self._before_fill()
            move_bytes(piece.buffer, copy.src)
            self._pageable.end_read()
            with self._lock:
                copy.piece = piece
                self._to_issue.notify()

    def _issue(self) -> None:
        """Hand parts to the queue below in their order, each as soon as it is filled."""
        while True:
            with self._lock:
                if not self._has_work(self._to_issue, lambda: self._pending and self._pending[0].is_filled):
                    return
                copy = self._pending[0]
            piece = copy.piece
            with self._link:
                if piece is None:
                    self._engine.enqueue(copy.dst, copy.src, free=copy.free, ready=copy.ready, label=copy.label)
                else:
                    source = piece.buffer[: copy.src.nbytes]
                    self._engine.enqueue(
                        copy.dst, source, free=copy.free, ready=copy.ready, source_free=piece.free, label=copy.label
                    )
            with self._lock:
                self._pending.popleft()
                if piece is not None:
                    self._used.append(piece)
                    self._to_fill.notify()
                if copy.last:
                    self._unissued[id(copy.ready)] -= 1
                    self._issued.notify_all()
