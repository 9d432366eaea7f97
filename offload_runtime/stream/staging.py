"""Copies from and to memory that could not be page-locked: threads move it through page-locked pieces.

A copy of the driver's own from or to pageable memory would hold the calling thread until it is done. On the way to the
device threads fill pieces, which are handed to the link in order; on the way back the link fills pieces, which threads
empty. The pieces of a ring are used in turn, so that none of its users ever waits for a later one.
"""

from __future__ import annotations

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import cycle, pairwise
from typing import Any, ClassVar

import torch

from offload_runtime.errors import CopyError
from offload_runtime.stream.arena import PAGE_BYTES, PageableMemory
from offload_runtime.stream.copy_engine import Copies, CopyEngine, copy_failed
from offload_runtime.stream.queue import DONE
from offload_runtime.trace import Label

# Each thread fills a piece of its own. Copies of 16 MiB and more have the link's peak; a thread takes 2 to 3 ms for 32.
_PIECE_BYTES = 32 << 20
_MOST_PIECES = 12
# Of a small layer a piece is so much, that several threads work on it.
_PIECES_OF_A_LAYER = 4
# One piece is filled while the other is on the link.
FEWEST_PIECES = 2
MOST_THREADS = 8
_THREADS = "staging"


@dataclass(frozen=True)
class RingShape:
    """Size of a staging ring: `num_pieces` of `piece_bytes` each."""

    piece_bytes: int
    num_pieces: int

    @property
    def nbytes(self) -> int:
        """Return the page-locked memory of the ring."""
        return self.piece_bytes * self.num_pieces


def ring_shape(layer_bytes: int, available_bytes: int | None = None) -> RingShape:
    """Return the ring for layers of `layer_bytes`, within `available_bytes` of page-locked memory or, at least, two
    pieces."""
    share = -(-layer_bytes // _PIECES_OF_A_LAYER)
    piece_bytes = min(_PIECE_BYTES, -(-share // PAGE_BYTES) * PAGE_BYTES)
    fitting = _MOST_PIECES if available_bytes is None else available_bytes // piece_bytes
    return RingShape(piece_bytes, max(FEWEST_PIECES, min(_MOST_PIECES, fitting)))


def staging_threads(usable_cores: int) -> int:
    """Threads that fill the ring: half of the cores, the others launch, copy and wait."""
    return max(1, min(MOST_THREADS, usable_cores // 2))


@dataclass
class _Piece:
    """One page-locked buffer of a ring. `copied` fires when the link is through with it, `user` is the work of the
    part that has it or had it last."""

    buffer: torch.Tensor  # uint8 [piece_bytes], host, page-locked
    copied: Any
    user: Future[None]


@dataclass(eq=False)
class _StagingQueue(ABC):
    """Has what both directions have in common: a queue below, a ring of pieces, and threads that move bytes.

    The work of the threads begins in order. What fails in one stays the failure of all that comes behind it.

    Attributes:
        engine: The queue below, from now on this one's: it is closed with it.
        ring: Page-locked buffers: uint8 [piece_bytes] each, host.
        pageable: Which memory is staged.
        num_threads: That move bytes.
    """

    engine: CopyEngine
    ring: Sequence[torch.Tensor]
    pageable: PageableMemory
    _: KW_ONLY
    num_threads: int
    failing: ClassVar[str]  # what has failed where a thread has

    def __post_init__(self) -> None:
        self.log = self.engine.log
        self.new_event, self.compute_record = self.engine.new_event, self.engine.compute_record
        self._piece_bytes = self.ring[0].nbytes
        self._pieces = cycle([_Piece(buffer, self.engine.new_event(), DONE) for buffer in self.ring])
        self._movers = ThreadPoolExecutor(self.num_threads, _THREADS)
        self._link = ThreadPoolExecutor(1, f"{_THREADS}-link")  # one thread, so that what it is given stays in order
        self._below = threading.Lock()  # the queue below is asked by one thread at a time
        self._waited_s = 0.0

    @property
    def bytes_copied(self) -> int:
        return self.engine.bytes_copied

    def copy_seconds(self) -> float:
        with self._below:
            return self.engine.copy_seconds()

    def stall_seconds(self) -> float:
        """Add to those of the queue below what the host waited for the threads, whatever the device did meanwhile."""
        return self._waited_s + self.engine.stall_seconds()

    def close(self) -> None:
        """Drop what has not reached its end, end the threads, and close the queue below."""
        for threads in (self._movers, self._link):
            threads.shutdown(wait=False, cancel_futures=True)
        if threading.current_thread().name.startswith(_THREADS):
            # The garbage collector closes a dropped runtime in any thread; one of these cannot wait for itself.
            threading.Thread(target=self._finish, name=f"{_THREADS}-end", daemon=True).start()
        else:
            self._finish()

    def _finish(self) -> None:
        for threads in (self._movers, self._link):
            threads.shutdown()
        self.engine.close()

    def enqueue(
        self, copies: Copies, *, free: Any, ready: Any, source_free: Any | None = None, label: Label | None = None
    ) -> None:
        assert source_free is None, "pieces have the event of their own"
        for dst, src in copies:
            self._enqueue(dst, src, free, ready, label)

    @abstractmethod
    def _enqueue(self, dst: torch.Tensor, src: torch.Tensor, free: Any, ready: Any, label: Label | None) -> None:
        """Queue a copy, staged where one of its sides is pageable."""

    def wait(self, ready: Any) -> None:
        self._settle(ready)
        self.engine.wait(ready)

    def drain(self) -> None:
        self._settle(None)
        self.engine.drain()

    @abstractmethod
    def _settle(self, ready: Any | None) -> None:
        """Wait until the threads are through with what `ready` stands for, None for everything."""

    def move(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy `src` to the beginning of `dst`: uint8 [n], host."""
        # Plain memmove lets go of the interpreter's lock, and beyond the caches stores without reading first.
        ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.nbytes)

    def _wait(self, work: Future[None]) -> None:
        """Wait for work of the threads, which counts as a stall.

        Raises:
            CopyError: It has failed, or what it needed.
        """
        started, is_over = time.perf_counter(), work.done()
        try:
            work.result()
        except CopyError:
            raise
        except Exception as error:  # without words where it was dropped
            raise copy_failed(self.failing, str(error) or "the queue is closed") from error
        finally:
            ended = time.perf_counter()
            if not is_over:
                self._waited_s += ended - started
                if self.log is not None:
                    self.log.staged(started, ended)


@dataclass(eq=False)
class StagingCopyEngine(_StagingQueue):
    """A copy queue some of whose sources are pageable; see `CopyEngine` for what its methods promise.

    Sources that are page-locked go straight to the queue below, unless something staged is before them.

    Attributes:
        engine: The queue below, from now on this one's: it is closed with it.
        ring: Page-locked buffers, two at least: uint8 [piece_bytes] each, host.
        pageable: Which sources are staged, or from which byte on. Others may be entered at any time.
        num_threads: That fill the ring.
    """

    failing = "staging from pageable memory"
    _last: Future[None] = field(init=False, default=DONE)  # of the link's thread
    # The last part of each `ready` event, handed to the queue below.
    _issued: dict[int, Future[None]] = field(init=False, default_factory=dict)

    def _enqueue(self, dst: torch.Tensor, src: torch.Tensor, free: Any, ready: Any, label: Label | None) -> None:
        locked_bytes = self.pageable.locked_bytes(src)
        if self._last.done():
            self._wait(self._last)
            if locked_bytes >= src.nbytes:
                self.engine.enqueue([(dst, src)], free=free, ready=ready, label=label)
                return
        cuts = [*([0] if locked_bytes else []), *range(locked_bytes, src.nbytes, self._piece_bytes), src.nbytes]
        enqueue = partial(self.engine.enqueue, free=free, ready=ready, label=label)
        for start, end in pairwise(cuts):
            target = dst[start:end]
            if start < locked_bytes:
                self._last = self._link.submit(self._issue, partial(enqueue, [(target, src[start:end])]), self._last)
                continue
            piece = next(self._pieces)
            filled = self._movers.submit(self._fill, piece, piece.user, src[start:end])
            self.pageable.begin_read(filled)
            staged = partial(enqueue, [(target, piece.buffer[: end - start])], source_free=piece.copied)
            self._last = piece.user = self._link.submit(self._issue, staged, self._last, filled)
        self._issued[id(ready)] = self._last

    def _fill(self, piece: _Piece, before: Future[None], src: torch.Tensor) -> None:
        """Fill a piece once what it held before has left it."""
        before.result()
        self.engine.wait(piece.copied)
        self.move(piece.buffer, src)

    def _issue(self, enqueue: Callable[[], None], *before: Future[None]) -> None:
        """Hand a part to the queue below, unless one before it has failed, or what fills its piece."""
        for work in before:
            work.result()
        with self._below:
            enqueue()

    def compute_wait(self, ready: Any) -> None:
        self._settle(ready)
        self.engine.compute_wait(ready)

    def is_done(self, ready: Any) -> bool:
        # A copy that is not in the queue below has fired no event that could be waited for.
        if not self._issued.get(id(ready), DONE).done():
            return False
        self._settle(ready)
        return self.engine.is_done(ready)

    def _settle(self, ready: Any | None) -> None:
        self._wait(self._last if ready is None else self._issued.get(id(ready), DONE))


@dataclass(eq=False)
class StagingWriteEngine(_StagingQueue):
    """A queue of copies from the device some of whose targets are pageable; see `CopyEngine` for what it promises.

    For the compute side, which sees nothing of the host's memory, a copy is done when its source has been read; for
    `is_done`, `wait` and `drain` when it has arrived, and all before it. Arrivals are not ordered: nobody writes to
    memory that an earlier copy has not reached yet. `enqueue` holds the calling thread while no piece is free; that
    takes what is computed already, the link and the threads, but nothing that this thread has still to do.

    Attributes:
        engine: The queue below, from now on this one's: it is closed with it.
        ring: Page-locked buffers: uint8 [piece_bytes] each, host.
        pageable: Which targets are pageable, each of them wholly or not at all.
        num_threads: That move what has come.
    """

    failing = "writing to pageable memory"
    _arrivals: deque[Future[None]] = field(init=False, default_factory=deque)  # the first asked for first

    def _enqueue(self, dst: torch.Tensor, src: torch.Tensor, free: Any, ready: Any, label: Label | None) -> None:
        locked_bytes = self.pageable.locked_bytes(dst)
        if locked_bytes >= dst.nbytes:
            self.engine.enqueue([(dst, src)], free=free, ready=ready, label=label)
            return
        assert locked_bytes == 0, "a target is pageable wholly or not at all"
        for target, source in zip(dst.split(self._piece_bytes), src.split(self._piece_bytes), strict=True):
            piece = next(self._pieces)
            self._wait(piece.user)
            into = piece.buffer[: source.nbytes]
            self.engine.enqueue([(into, source)], free=free, ready=ready, source_free=piece.copied, label=label)
            piece.user = self._movers.submit(self._arrive, piece, target)
            self._arrivals.append(piece.user)

    def _arrive(self, piece: _Piece, dst: torch.Tensor) -> None:
        """Move a piece to where it belongs, once it has come over the link."""
        self.engine.wait(piece.copied)
        self.move(dst, piece.buffer[: dst.nbytes])

    def compute_wait(self, ready: Any) -> None:
        self.engine.compute_wait(ready)

    def is_done(self, ready: Any) -> bool:
        while self._arrivals and self._arrivals[0].done():
            self._wait(self._arrivals[0])  # what has failed stays
            self._arrivals.popleft()
        return not self._arrivals and self.engine.is_done(ready)

    def _settle(self, ready: Any | None) -> None:
        for arrival in list(self._arrivals):
            self._wait(arrival)
