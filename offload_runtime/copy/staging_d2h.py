"""The way back: what is copied to pageable memory lands in page-locked pieces first, from where threads move it on.

A copy of the driver's own to pageable memory would hold the calling thread until it is done.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload_runtime.copy.queue import CopyEngine
from offload_runtime.copy.staging import StagingQueue, move_bytes
from offload_runtime.memory import PageableMemory
from offload_runtime.trace import Label

_FAILED = (
    "writing to pageable memory failed ({error}): the keys and values there cannot be trusted any more; load the "
    "runtime again"
)


@dataclass(frozen=True)
class _Piece:
    """One page-locked buffer; `filled` fires when what was copied into it last is there."""

    buffer: torch.Tensor  # uint8 [piece_bytes], host, page-locked
    filled: Any


@dataclass(frozen=True, eq=False)
class _Landing:
    """The content of a piece that still has to be moved to `dst`."""

    dst: torch.Tensor  # uint8 [n], host
    piece: _Piece
    ready: Any


class StagingWriteEngine(StagingQueue):
    """A queue of copies from the device some of whose targets are pageable; see `CopyEngine` for what it promises.

    For the compute side, which sees nothing of the host's memory, a copy is done when its source has been read; for
    `is_done`, `wait` and `drain` when it has landed. Landings are not ordered: nobody writes to memory that an earlier
    copy has not reached yet. `enqueue` holds the calling thread while no piece is free; that takes what is computed
    already, the link and the threads, but nothing that this thread has still to do.

    Args:
        engine: The queue below, from now on this one's: it is closed with it.
        pieces: Page-locked buffers: uint8 [piece_bytes] each, host.
        pageable: Which targets are pageable, each of them wholly or not at all.
        num_threads: That move what has come.
        before_landing: Called in those threads before each piece: tests inject delays and failures with it.
    """

    def __init__(
        self, engine: CopyEngine, pieces: Sequence[torch.Tensor], pageable: PageableMemory, *, num_threads: int,
        before_landing: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        assert pieces and num_threads > 0
        super().__init__(engine, pageable, _FAILED)
        self._before_landing = before_landing
        self._piece_bytes = pieces[0].nbytes
        self._to_land, self._landed = (self._condition() for _ in range(2))
        self._landings: deque[_Landing] = deque()  # that no thread has begun
        self._unlanded: Counter[int] = Counter()  # by `ready` event, which the landings keep alive
        self._free = deque(_Piece(buffer, engine.new_event()) for buffer in pieces)
        for number in range(num_threads):
            self._start(self._land, f"staging-d2h-{number}")

    def enqueue(
        self, dst: torch.Tensor, src: torch.Tensor, *, free: Any, ready: Any, source_free: Any | None = None,
        label: Label | None = None,
    ) -> None:  # fmt: skip
        assert source_free is None, "pieces need the event of their own"
        locked_bytes = self._pageable.locked_bytes(dst)
        if locked_bytes >= dst.nbytes:
            self._engine.enqueue(dst, src, free=free, ready=ready, label=label)
            return
        assert locked_bytes == 0, "a target is pageable wholly or not at all"
        for start in range(0, dst.nbytes, self._piece_bytes):
            part = slice(start, start + self._piece_bytes)
            piece = self._take_piece()
            into = piece.buffer[: dst[part].nbytes]
            self._engine.enqueue(into, src[part], free=free, ready=ready, source_free=piece.filled, label=label)
            with self._lock:
                self._unlanded[id(ready)] += 1
                self._landings.append(_Landing(dst[part], piece, ready))
                self._to_land.notify()

    def _take_piece(self) -> _Piece:
        with self._host_waits(), self._lock:
            self._wait_for(self._landed, lambda: self._free)
            return self._free.popleft()

    def compute_wait(self, ready: Any) -> None:
        self._raise_failure()
        self._engine.compute_wait(ready)

    def is_done(self, ready: Any) -> bool:
        with self._lock:
            self._raise_failure()
            return id(ready) not in self._unlanded and self._engine.is_done(ready)

    def wait(self, ready: Any) -> None:
        with self._lock:
            self._wait_for(self._landed, lambda: id(ready) not in self._unlanded)
        self._engine.wait(ready)

    def drain(self) -> None:
        with self._lock:
            self._wait_for(self._landed, lambda: not self._unlanded)
        self._engine.drain()

    def _land(self) -> None:
        """Move pieces to where they belong, each when it has come over the link."""
        while True:
            with self._lock:
                if not self._has_work(self._to_land, lambda: self._landings):
                    return
                landing = self._landings.popleft()
            self._engine.wait(landing.piece.filled)
            if self._before_landing is not None:
                self._before_landing()
            move_bytes(landing.dst, landing.piece.buffer[: landing.dst.nbytes])
            with self._lock:
                self._free.append(landing.piece)
                self._unlanded[id(landing.ready)] -= 1
                if not self._unlanded[id(landing.ready)]:
                    del self._unlanded[id(landing.ready)]
                self._landed.notify_all()
