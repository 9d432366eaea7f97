"""Page-locking of host memory, block by block: it can stop where the system refuses, and what was locked stays so.

What could not be locked is pageable: who copies it, and who writes to it, find out here.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_right, insort
from concurrent.futures import CancelledError, Future
from operator import itemgetter
from typing import Protocol

import torch

# WSL2 and Windows lock only a part of the memory: of an arena that does not fit, whole blocks are locked all the same.
# A multiple of the pieces that copies are made in: no copy may reach across two registrations.
LOCK_BLOCK_BYTES = 1 << 30


class Registrar(Protocol):
    """Locks pages for full-speed asynchronous copies. Addresses and sizes are multiples of the page size."""

    def register(self, address: int, nbytes: int) -> int:
        """Lock `nbytes` from `address` on; returns CUDA's error code, 0 for success."""

    def unregister(self, address: int) -> None:
        """Unlock what was locked from `address` on, in one piece."""


class CudaRegistrar:
    """Locks pages for all GPUs of this process."""

    def register(self, address: int, nbytes: int) -> int:
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if code != 0:
            # CUDA keeps the code of the failed call for this thread's next kernel launch, which would raise it.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device="cuda")
        return code

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)


class CountedRegistrar:
    """Counts what is locked at the moment.

    Args:
        below: Who locks.
    """

    def __init__(self, below: Registrar) -> None:
        self._below = below
        self._blocks: dict[int, int] = {}

    @property
    def locked_bytes(self) -> int:
        """Locked now."""
        return sum(self._blocks.values())

    def register(self, address: int, nbytes: int) -> int:
        code = self._below.register(address, nbytes)
        if code == 0:
            self._blocks[address] = nbytes
        return code

    def unregister(self, address: int) -> None:
        del self._blocks[address]
        self._below.unregister(address)


def make_registrar(device: torch.device) -> Registrar | None:
    """What locks pages for copies to `device`; None for a CPU, which reads any memory as fast."""
    return CudaRegistrar() if device.type == "cuda" else None


class LockedPages:
    """The locked blocks of one range of memory; they lie side by side from its beginning on.

    Args:
        address: Of the range, a multiple of the page size.
        nbytes: Its size, a multiple of the page size.
        registrar: Who locks.
    """

    def __init__(self, address: int, nbytes: int, registrar: Registrar) -> None:
        self.locked_bytes = 0
        self._address = address
        self._nbytes = nbytes
        self._registrar = registrar
        self._blocks: list[int] = []

    def lock(self, block_bytes: int) -> int:
        """Lock what is not locked yet in blocks of `block_bytes`; returns the code of a refusal, or 0."""
        while self.locked_bytes < self._nbytes:
            address = self._address + self.locked_bytes
            nbytes = min(block_bytes, self._nbytes - self.locked_bytes)
            code = self._registrar.register(address, nbytes)
            if code != 0:
                return code
            self._blocks.append(address)
            self.locked_bytes += nbytes
        return 0

    def unlock(self) -> None:
        """Unlock all blocks."""
        while self._blocks:
            self._registrar.unregister(self._blocks.pop())
        self.locked_bytes = 0


class PageableMemory:
    """Which memory is not page-locked, and whether some of it is still to be read. For any thread.

    Whoever owns memory enters it before it is copied and forgets it before it is given back; before it writes where a
    copy may have been asked for, it waits until everything has been read.
    """

    def __init__(self) -> None:
        # Reentrant: the garbage collector may give memory back in any thread, at any moment.
        self._lock = threading.RLock()
        self._ranges: list[tuple[int, int]] = []  # first address and that behind the last, ascending
        self._reads: list[Future[None]] = []

    @property
    def nbytes(self) -> int:
        """What is entered now."""
        with self._lock:
            return sum(end - start for start, end in self._ranges)

    def enter(self, memory: torch.Tensor) -> None:
        """Take up memory, no part of which is known yet: uint8 [n], host."""
        if memory.nbytes:
            with self._lock:
                insort(self._ranges, (memory.data_ptr(), memory.data_ptr() + memory.nbytes))

    def forget(self, memory: torch.Tensor) -> None:
        """Drop `memory` if it was entered as such."""
        with self._lock:
            self._ranges = [known for known in self._ranges if known[0] != memory.data_ptr()]

    def locked_bytes(self, memory: torch.Tensor) -> int:
        """How much of the beginning of `memory`, which lies in one arena, is page-locked; all behind it is not."""
        start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        with self._lock:
            index = bisect_right(self._ranges, start, key=itemgetter(1))  # the first that ends behind `start`
            pageable_from = self._ranges[index][0] if index < len(self._ranges) else end
        return max(0, min(pageable_from, end) - start)

    def begin_read(self, read: Future[None]) -> None:
        """Some of it is read until `read` is done, however it ends."""
        with self._lock:
            self._reads = [*(other for other in self._reads if not other.done()), read]

    def settle(self) -> None:
        """Wait until everything has been read that was asked for."""
        for read in self._reads:
            with contextlib.suppress(CancelledError):
                read.exception()
