"""Host memory for what the copy engine streams: page-aligned arenas, page-locked as far as may be.

An arena is plain anonymous pages, huge ones where the system has them, page-locked with `cudaHostRegister` when CUDA is
there: torch's own pinned allocator would round every arena up to a power of two. Locking block by block can stop where
the system refuses, and what was locked stays so; what could not be locked is pageable: who copies it, and who writes to
it, find out here. Weights pass through arenas of `Staging`, a piece at a time, from a file to where they stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from pathlib import Path

import psutil
import torch

from offload_runtime.errors import BudgetError, DeviceError
from offload_runtime.sizes import format_bytes
from offload_runtime.stream.device import current_device

_CPU = torch.device("cpu")
PAGE_BYTES = mmap.PAGESIZE
# WSL2 and Windows lock only a part of the memory: of an arena that does not fit, whole blocks are locked all the same.
# A multiple of the pieces that copies are made in: no copy may reach across two registrations.
LOCK_BLOCK_BYTES = 1 << 30
# Pages are made by so many threads, in pieces of so many bytes.
_TOUCHING_THREADS, _TOUCH_PIECE_BYTES = 8, 64 << 20
_CAN_USE_HOST_POINTER = 91  # CUDA's number of "Can Use Host Pointer For Registered Mem", an attribute of a device


# --- page-locking


class Registrar:
    """Locks pages for full-speed asynchronous copies to and from all GPUs of this process."""

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}  # bytes by address

    @property
    def locked_bytes(self) -> int:
        """Return what it has locked at the moment."""
        return sum(self._blocks.values())

    def register(self, address: int, nbytes: int) -> int:
        """Lock `nbytes` from `address` on, multiples of the page size; returns CUDA's error code, 0 for success."""
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if code == 0:
            self._blocks[address] = nbytes
        else:
            # CUDA keeps the code of the failed call for this thread's next kernel launch, which would raise it.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device="cuda")
        return code

    def unregister(self, address: int) -> None:
        """Unlock what was locked from `address` on, in one piece."""
        del self._blocks[address]
        torch.cuda.cudart().cudaHostUnregister(address)


def registrar_for(device: torch.device) -> Registrar | None:
    """Return what page-locks memory that `device` copies from and to; None for a CPU, which reads any memory as
    fast."""
    return Registrar() if device.type == "cuda" else None


def require_readable_arenas(device: torch.device, who: str) -> None:
    """Refuse a GPU whose kernels cannot read page-locked arenas at the addresses that the host has for them.

    Copies do not care, and neither does torch's own pinned memory, whose addresses are the same on both sides.

    Raises:
        DeviceError: It has other addresses for them, or the driver does not say.
    """
    answer, driver = ctypes.c_int(0), ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    if driver.cuDeviceGetAttribute(ctypes.byref(answer), _CAN_USE_HOST_POINTER, device.index) or not answer.value:
        raise DeviceError(
            f"kernels of {device} cannot read page-locked host memory by its own addresses (CUDA device attribute "
            f"{_CAN_USE_HOST_POINTER}), as {who}"
        )


# --- arenas


class HostArena:
    """One page-aligned block of anonymous host memory, optionally page-locked.

    Args:
        nbytes: Size in bytes; rounded up to whole pages, nothing more.
        name: What it holds, for error messages.
    """

    def __init__(self, nbytes: int, *, name: str) -> None:
        self.name = name
        self.nbytes = self.rounded(nbytes)
        # Private ones: shared pages are small where `shmem_enabled` is `never`, as it usually is.
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        try:
            pages = mmap.mmap(-1, self.nbytes, **flags)
        except OSError as error:
            raise BudgetError(
                f"{name} needs {format_bytes(nbytes)} of host memory and the system refused it ({error}): "
                "close other programs or choose a smaller model"
            ) from error
        # Fewer pages to lock: faster pinning. A forked process would get copies of those that are locked.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with contextlib.suppress(AttributeError, OSError):  # not Linux, or a kernel built without huge pages
                pages.madvise(getattr(mmap, advice))
        self.buffer = torch.frombuffer(pages, dtype=torch.uint8)  # [nbytes] uint8, host; alone holds the pages
        self.pinned_bytes = 0  # from the beginning on
        self._unlock = contextlib.ExitStack()  # of blocks side by side, each by who locked it
        # Locked pages that are unmapped stay registered: the next arena at their address could not be locked.
        weakref.finalize(self, self._unlock.close)

    @staticmethod
    def rounded(nbytes: int) -> int:
        """Return what an arena for so many bytes takes."""
        return -(-nbytes // PAGE_BYTES) * PAGE_BYTES

    def lock(self, registrar: Registrar, block_bytes: int | None = None) -> int:
        """Page-lock what is not locked yet, block by block, until the system refuses; what was locked before stays so,
        and a later call goes on from there. Returns CUDA's code of the refusal, or 0 once everything is locked.

        No copy may reach across two blocks of `block_bytes`, a multiple of the page size; None: 1 GiB.
        """
        while self.pinned_bytes < self.nbytes:
            address = self.buffer.data_ptr() + self.pinned_bytes
            nbytes = min(block_bytes or LOCK_BLOCK_BYTES, self.nbytes - self.pinned_bytes)
            code = registrar.register(address, nbytes)
            if code != 0:
                return code
            self._unlock.callback(registrar.unregister, address)
            self.pinned_bytes += nbytes
        return 0

    def pin(self, registrar: Registrar | None = None) -> None:
        """Page-lock the arena, as one block, for full-speed asynchronous copies.

        Args:
            registrar: Who locks; None for a `Registrar` of its own.

        Raises:
            BudgetError: The system does not let this process lock that much memory.
        """
        code = self.lock(registrar or Registrar(), self.nbytes)
        if code != 0:
            self.unpin()
            raise BudgetError(
                f"could not page-lock {format_bytes(self.nbytes)} for {self.name} (CUDA error {code}): "
                "raise the locked-memory limit (ulimit -l; WSL2 and Windows lock at most about half of the RAM), lower "
                "--pinned or choose a smaller model"
            )

    @property
    def pinned(self) -> bool:
        """Return whether all pages are locked."""
        return self.pinned_bytes == self.nbytes

    def unpin(self) -> None:
        """Unlock the pages."""
        self._unlock.close()
        self.pinned_bytes = 0

    def close(self) -> None:
        """Unlock the pages. They are returned to the system when the last tensor that views them is gone."""
        self.unpin()
        self.buffer = torch.empty(0, dtype=torch.uint8)


def touch(arenas: Iterable[HostArena]) -> None:
    """Have the system make the pages of new arenas, as zeros, by several threads: one alone gets 1.7 to 6 GB/s, and the
    driver that locks untouched pages no more."""
    pieces = list[torch.Tensor]()
    for arena in arenas:
        share_bytes = -(-arena.nbytes // (_TOUCHING_THREADS * PAGE_BYTES)) * PAGE_BYTES
        pieces += arena.buffer.split(min(share_bytes, _TOUCH_PIECE_BYTES))
    with ThreadPoolExecutor(_TOUCHING_THREADS, thread_name_prefix="touch") as pool:
        # A pool's threads are not in inference mode, but arenas may have been made in it.
        deque(pool.map(torch.inference_mode()(lambda piece: piece[::PAGE_BYTES].zero_()), pieces), maxlen=0)


class PageableMemory:
    """Knows which memory is not page-locked, and whether some of it is still to be read. For any thread.

    Whoever owns memory enters it before it is copied and forgets it before it is given back; before it writes where a
    copy may have been asked for, it waits until everything has been read.
    """

    def __init__(self) -> None:
        # Reentrant: the garbage collector may give memory back in any thread, at any moment.
        self._lock = threading.RLock()
        self._ranges: list[tuple[int, int]] = []  # first address and that behind the last, ascending
        self.nbytes = 0  # of all of them
        self._reads: list[Future[None]] = []

    def enter(self, memory: torch.Tensor) -> None:
        """Take up memory, no part of which is known yet: uint8 [n], host."""
        if memory.nbytes:
            with self._lock:
                insort(self._ranges, (memory.data_ptr(), memory.data_ptr() + memory.nbytes))
                self.nbytes += memory.nbytes

    def forget(self, memory: torch.Tensor) -> None:
        """Drop `memory` if it was entered as such."""
        with self._lock:
            self._ranges = [entered for entered in self._ranges if entered[0] != memory.data_ptr()]
            self.nbytes = sum(end - start for start, end in self._ranges)

    def locked_bytes(self, memory: torch.Tensor) -> int:
        """Return how much of the beginning of `memory`, which lies in one arena, is page-locked; all behind it is
        not."""
        start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        with self._lock:
            index = bisect_right(self._ranges, start, key=itemgetter(1))  # the first that ends behind `start`
            pageable_from = self._ranges[index][0] if index < len(self._ranges) else end
        return max(0, min(pageable_from, end) - start)

    def begin_read(self, read: Future[None]) -> None:
        """Let some of it be read until `read` is done, however it ends."""
        with self._lock:
            self._reads = [*(other for other in self._reads if not other.done()), read]

    def settle(self) -> None:
        """Wait until everything has been read that was asked for."""
        for read in self._reads:
            with contextlib.suppress(CancelledError):
                read.exception()


def host_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Return the bytes of host memory and what of it is available: the container's where it has less than the machine.

    `cgroup` is where Linux tells of control groups.
    """
    memory = psutil.virtual_memory()
    try:
        limit_bytes = int((cgroup / "memory.max").read_text())
        used_bytes = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no limit ("max"), not Linux, or another kind of control group
        return memory.total, memory.available
    return min(memory.total, limit_bytes), min(memory.available, max(0, limit_bytes - used_bytes))


def check_host_memory(needed_bytes: int, *, what: str = "the weights", cgroup: Path = Path("/sys/fs/cgroup")) -> None:
    """Refuse what the machine's free memory, or the container's, cannot hold: the system would kill us later.

    Raises:
        BudgetError: Less is available than `needed_bytes`.
    """
    available_bytes = host_memory(cgroup)[1]
    if needed_bytes > available_bytes:
        raise BudgetError(
            f"{what} would take {format_bytes(needed_bytes)} of host memory and {format_bytes(available_bytes)} is "
            "available: close other programs, choose a 16-bit --dtype or a smaller model"
        )


# --- pieces that weights pass through on their way from a file to where they stay

# Of a tensor, read at a time where it passes through memory of its own.
PIECE_BYTES = 8 << 20
_LINE_BYTES = 64


@dataclass(frozen=True)
class Piece:
    """Memory of one thread, on the way to `device` or over it: uint8, host. `turn` is for all threads of a GPU."""

    memory: torch.Tensor
    device: torch.device
    turn: threading.Lock

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


class Staging(contextlib.AbstractContextManager["Staging"]):
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
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._arenas: list[HostArena] = []
        self._free: list[HostArena] = []

    @contextlib.contextmanager
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


def own_or(staging: Staging | None) -> contextlib.AbstractContextManager[Staging]:
    """Return what is given, which stays open, or one of its own for a single tensor."""
    return Staging() if staging is None else contextlib.nullcontext(staging)
