"""Host memory that weights pass through on their way from a file to where they stay, a piece at a time."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock

import torch

from offload_runtime.stream import HostArena, Registrar, current_device

# Of a tensor, read at a time where it passes through memory of its own.
PIECE_BYTES = 8 << 20
_LINE_BYTES = 64
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Piece:
    """Memory of one thread, on the way to `device` or over it: uint8, host. `turn` is for all threads of a GPU."""

    memory: torch.Tensor
    device: torch.device
    turn: Lock

    def cut(self, *sizes: int) -> list[torch.Tensor]:
        """Return the tensors of so many bytes, one behind the other: uint8, each from a cache line on."""
        starts = accumulate((-(-size // _LINE_BYTES) * _LINE_BYTES for size in sizes), initial=0)
        return [self.memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def convert(self, nbytes: int, out: torch.Tensor, convert: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        """Have `convert(stored, out)` make `out` of the first `nbytes`, on the device, and wait for it.

        Copies and kernels are enqueued on the current stream, by one thread after the other, so that of all threads
        one piece at a time is on a GPU. What is for the host returns through the piece.

        Args:
            nbytes: What has been read; the piece is as large as `out` too.
            out: Contiguous, on the device or the host.
            convert: Is given tensors of the device.
        """
        stored = self.memory[:nbytes]
        if self.device.type == "cpu":
            convert(stored, out)
            return
        done = torch.cuda.Event(blocking=True) if self.device.type == "cuda" else None
        with self.turn:
            made = torch.empty_like(out, device=self.device) if out.is_cpu else out
            convert(stored.to(self.device, non_blocking=True), made)
            if out.is_cpu:
                received = self.memory[: out.nbytes]
                received.view(out.dtype).view(out.shape).copy_(made, non_blocking=True)
            if done is not None:
                done.record()
        if done is not None:
            done.synchronize()
        if out.is_cpu:  # without the interpreter's lock
            ctypes.memmove(out.data_ptr(), received.data_ptr(), out.nbytes)


class Staging(AbstractContextManager["Staging"]):
    """The pieces of one load, one for each thread that reads: what a thread leaves is the next one's until the end, as
    page-locking makes all of a GPU wait.

    Args:
        device: Where rows are coded, decoded or brought in order that are not kept as a file has them; on its current
            stream.
        registrar: Page-locks pieces on their way to a GPU; None: they stay pageable. Once it has refused no other piece
            is asked for.
        most_locked_bytes: How much of them is locked.
    """

    def __init__(
        self, device: torch.device = _CPU, registrar: Registrar | None = None, most_locked_bytes: float = math.inf
    ) -> None:
        self.device = device
        self.locked_bytes = 0
        self._registrar, self._most_locked_bytes = registrar, most_locked_bytes
        self._turn, self._lock = Lock(), Lock()
        self._arenas: list[HostArena] = []
        self._free: list[HostArena] = []

    @contextmanager
    def piece(self, nbytes: int, device: torch.device) -> Iterator[Piece]:
        """Lend memory of this thread on the way to or over `device`, which is the current one for as long: at least
        `nbytes`. Nothing is copying from it any more at the end, whatever ends it."""
        arena = self._taken(nbytes)
        try:
            with current_device(device):
                if device.type != "cpu":
                    self._page_lock(arena)
                try:
                    yield Piece(arena.buffer, device, self._turn)
                except BaseException:
                    if device.type == "cuda":  # a copy that was asked for before the error
                        torch.cuda.current_stream(device).synchronize()
                    raise
        finally:
            with self._lock:
                self._free.append(arena)

    def _taken(self, nbytes: int) -> HostArena:
        with self._lock:
            fitting = next((arena for arena in self._free if arena.nbytes >= nbytes), None)
            if fitting is not None:
                self._free.remove(fitting)
                return fitting
            arena = HostArena(max(nbytes, PIECE_BYTES), name="pieces of weights")  # of one size, for any tensor
            self._arenas.append(arena)
            return arena

    def _page_lock(self, arena: HostArena) -> None:
        with self._lock:
            fits = self.locked_bytes + arena.nbytes <= self._most_locked_bytes
            if self._registrar is None or arena.pinned or not fits:
                return
            if arena.lock(self._registrar, arena.nbytes):
                self._registrar = None
            else:
                self.locked_bytes += arena.nbytes

    def __exit__(self, *_: object) -> None:
        for arena in self._arenas:
            arena.close()


def own_or(staging: Staging | None) -> AbstractContextManager[Staging]:
    """Return what is given, which stays open, or one of its own for a single tensor."""
    return Staging() if staging is None else nullcontext(staging)
