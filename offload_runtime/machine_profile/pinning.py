"""Page-locking: how fast it goes and how much of the memory may be locked."""

from __future__ import annotations

import contextlib
import mmap
import time

import torch

from offload_runtime.config import GB, GIB, format_bytes
from offload_runtime.machine_profile.host_info import HostInfo
from offload_runtime.machine_profile.timing import CannotMeasureError, OnProgress, counted
from offload_runtime.page_locking import CudaRegistrar

# Stays with the system and with other programs: an eighth of the memory, at most 8 GiB.
_KEPT_SHARE, _MOST_KEPT_BYTES = 8, 8 * GIB
_HUGE_PAGE_BYTES = 2 << 20
_TRIALS = 3


def kept_bytes(ram_bytes: int) -> int:
    """Memory in bytes that is never to be locked."""
    return min(ram_bytes // _KEPT_SHARE, _MOST_KEPT_BYTES)


def sample_bytes(host: HostInfo, wanted_bytes: int) -> int:
    """As much of `wanted_bytes` as can be locked for a moment without anybody noticing."""
    return max(_HUGE_PAGE_BYTES, min(wanted_bytes, host.available_bytes // 8) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES)


class _Pages:
    """Anonymous memory that has been written to, [nbytes] uint8, so that locking it is all that is left to do."""

    def __init__(self, nbytes: int) -> None:
        pages = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # as the arenas of the weights ask for
            with contextlib.suppress(OSError):  # a kernel built without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        self._buffer = torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
        self.nbytes = nbytes

    def lock(self) -> int:
        """Lock the pages; returns CUDA's error code, 0 for success."""
        return CudaRegistrar().register(self._buffer.data_ptr(), self.nbytes)

    def unlock(self) -> None:
        """Unlock the pages."""
        CudaRegistrar().unregister(self._buffer.data_ptr())


def measure_pin_gbps(nbytes: int) -> float:
    """Locking `nbytes` that have been written to, in GB/s; the best of a few.

    Raises:
        CannotMeasureError: The system refuses to lock that much.
    """
    pages = _Pages(nbytes)
    times_s = []
    for _ in range(_TRIALS):
        started_s = time.perf_counter()
        code = pages.lock()
        times_s.append(time.perf_counter() - started_s)
        if code != 0:
            raise CannotMeasureError(f"the system refuses to lock {format_bytes(nbytes)} (CUDA error {code})")
        pages.unlock()
    return nbytes / min(times_s) / GB


def estimate_pinnable_bytes(host: HostInfo, *, sample_locked: bool) -> int:
    """What may be locked, judged by free memory and the kind of system, without trying it.

    `sample_locked` says whether a sample could be locked: drivers do not count CUDA's locking against RLIMIT_MEMLOCK,
    so the limit is believed only where the sample was refused.

    Raises:
        CannotMeasureError: Not even the sample could be locked, and no limit says why.
    """
    if not sample_locked:
        if not host.locked_limit_bytes:
            raise CannotMeasureError("the system refuses to lock memory")
        return min(host.locked_limit_bytes, host.ram_bytes)
    spare_bytes = host.available_bytes - kept_bytes(host.ram_bytes)
    if host.wsl:  # Windows' driver locks about half of what the virtual machine has
        spare_bytes = min(spare_bytes, host.ram_bytes // 2)
    if spare_bytes <= 0:
        raise CannotMeasureError(
            f"{format_bytes(host.available_bytes)} of memory is free and {format_bytes(kept_bytes(host.ram_bytes))} of "
            "it stays with the system: close other programs"
        )
    return spare_bytes


def try_pinnable_bytes(host: HostInfo, *, on_progress: OnProgress) -> int:
    """Lock memory in blocks of 1 GiB until the system refuses or only its own share is free; in bytes.

    Raises:
        CannotMeasureError: Not one block can be locked.
    """
    blocks = max(0, host.available_bytes - kept_bytes(host.ram_bytes)) // GIB
    locked: list[_Pages] = []
    try:
        for _ in counted(range(blocks), "pinning all", on_progress):
            pages = _Pages(GIB)
            if pages.lock() != 0:
                break
            locked.append(pages)
    finally:
        for pages in locked:
            pages.unlock()
    if not locked:
        raise CannotMeasureError("the system refuses to lock 1 GiB, or has none free")
    return len(locked) * GIB
