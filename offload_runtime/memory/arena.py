"""Host memory for what the copy engine streams: page-aligned arenas, and a check of what the machine has.

An arena is plain anonymous pages, page-locked with `cudaHostRegister` when CUDA is there: torch's own pinned allocator
would round every arena up to a power of two.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from pathlib import Path

import psutil
import torch

from offload_runtime.config import format_bytes
from offload_runtime.errors import BudgetError
from offload_runtime.memory.page_locking import LOCK_BLOCK_BYTES, CudaRegistrar, LockedPages, Registrar

PAGE_BYTES = mmap.PAGESIZE


class HostArena:
    """One page-aligned block of anonymous host memory, optionally page-locked.

    Args:
        nbytes: Size in bytes; rounded up to whole pages, nothing more.
        name: What it holds, for error messages.
    """

    def __init__(self, nbytes: int, *, name: str) -> None:
        self.name = name
        self.nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        try:
            pages = mmap.mmap(-1, self.nbytes)
        except OSError as error:
            raise BudgetError(
                f"{name} needs {format_bytes(nbytes)} of host memory and the system refused it ({error}): "
                "close other programs or choose a smaller model"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):  # fewer pages to lock: faster pinning
            with contextlib.suppress(OSError):  # a kernel built without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = torch.frombuffer(pages, dtype=torch.uint8)  # [nbytes] uint8, host; alone holds the pages
        self._locked: LockedPages | None = None

    def pin(self, registrar: Registrar | None = None) -> None:
        """Page-lock the arena, as one block, for full-speed asynchronous copies.

        Args:
            registrar: Who locks; None for CUDA.

        Raises:
            BudgetError: The system does not let this process lock that much memory.
        """
        code = self._lock(registrar or CudaRegistrar(), self.nbytes)
        if code != 0:
            self.unpin()
            raise BudgetError(
                f"could not page-lock {format_bytes(self.nbytes)} for {self.name} (CUDA error {code}): "
                "raise the locked-memory limit (ulimit -l; WSL2 and Windows lock at most about half of the RAM), lower "
                "--pinned or choose a smaller model"
            )

    def pin_blocks(self, registrar: Registrar, block_bytes: int | None = None) -> bool:
        """Page-lock the arena block by block until the system refuses; returns whether it locked everything.

        No copy may reach across two blocks of `block_bytes`, a multiple of the page size; None: 1 GiB.
        """
        return self._lock(registrar, LOCK_BLOCK_BYTES if block_bytes is None else block_bytes) == 0

    def _lock(self, registrar: Registrar, block_bytes: int) -> int:
        if self._locked is None:
            self._locked = LockedPages(self.buffer.data_ptr(), self.nbytes, registrar)
            # Locked pages that are unmapped stay registered: the next arena at their address could not be locked.
            weakref.finalize(self, self._locked.unlock)
        return self._locked.lock(block_bytes)

    @property
    def pinned_bytes(self) -> int:
        """Bytes from the beginning on whose pages are locked."""
        return 0 if self._locked is None else self._locked.locked_bytes

    @property
    def pinned(self) -> bool:
        """Whether all pages are locked."""
        return self.pinned_bytes == self.nbytes

    def unpin(self) -> None:
        """Unlock the pages."""
        if self._locked is not None:
            self._locked.unlock()

    def close(self) -> None:
        """Unlock the pages. They are returned to the system when the last tensor that views them is gone."""
        self.unpin()
        self.buffer = torch.empty(0, dtype=torch.uint8)


def check_host_memory(needed_bytes: int, *, what: str = "the weights", cgroup: Path = Path("/sys/fs/cgroup")) -> None:
    """Refuse what the machine's free memory, or the container's, cannot hold: the system would kill us later.

    Raises:
        BudgetError: Less is available than `needed_bytes`.
    """
    available_bytes = psutil.virtual_memory().available
    try:
        limit_bytes = int((cgroup / "memory.max").read_text())
        available_bytes = min(available_bytes, limit_bytes - int((cgroup / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no limit ("max"), not Linux, or another kind of control group
    if needed_bytes > available_bytes:
        raise BudgetError(
            f"{what} would take {format_bytes(needed_bytes)} of host memory and {format_bytes(available_bytes)} is "
            "available: close other programs, choose a 16-bit --dtype or a smaller model"
        )
