"""Memory with hard limits: page-aligned host arenas and a ledger of device memory.

Host arenas hold the packed weights that the copy engine streams. They are plain anonymous pages, page-locked with
`cudaHostRegister` when CUDA is there: torch's own pinned allocator would round every arena up to a power of two.

The device ledger reserves everything up front. On CUDA it also caps torch's allocator, so that a mistake in the
arithmetic ends in an error instead of in more memory than the user allowed.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import weakref
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from offload_runtime.config import format_bytes, size_option_down
from offload_runtime.errors import BudgetError, DeviceError
from offload_runtime.page_locking import LOCK_BLOCK_BYTES, CudaRegistrar, LockedPages, Registrar

PAGE_BYTES = mmap.PAGESIZE

# Context, cuBLAS and Triton modules of one process, when nothing was there to measure it by (H200, torch 2.11: 0.5 GB).
TYPICAL_CONTEXT_BYTES = 600_000_000
# Modules that load lazily, after the context has been measured.
LAZY_MODULE_BYTES = 200_000_000


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
            self._pages = mmap.mmap(-1, self.nbytes)
        except OSError as error:
            raise BudgetError(
                f"{name} needs {format_bytes(nbytes)} of host memory and the system refused it ({error}): "
                "close other programs or choose a smaller model"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):  # fewer pages to lock: faster pinning
            with contextlib.suppress(OSError):  # a kernel built without huge pages
                self._pages.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = torch.frombuffer(self._pages, dtype=torch.uint8)  # [nbytes] uint8, host
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


@dataclass(frozen=True)
class Reservation:
    """One line of the ledger."""

    name: str
    nbytes: int


class DeviceBudget:
    """Ledger of device memory with a hard limit.

    Args:
        device: Where the memory is. On the CPU the ledger only counts, so that the same plans can be tried anywhere.
        limit_bytes: Most that this process may take on the device, everything included; None: all that is free.
        other_bytes: On CUDA, what other processes already held before this one touched the device.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None, *, other_bytes: int | None = None) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.reservations: list[Reservation] = []
        self._other_bytes = 0
        self.context_bytes = 0
        if device.type == "cuda":
            limit_bytes = self._measure_context(limit_bytes, other_bytes)
        self.limit_bytes = limit_bytes
        self._peak_bytes = 0
        self._cap_allocator()

    def _measure_context(self, limit_bytes: int | None, other_bytes: int | None) -> int:
        torch.zeros(1, device=self.device)  # creates the context
        gc.collect()
        torch.cuda.empty_cache()  # what an earlier runtime's last tensors left with the allocator would count as ours
        torch.cuda.synchronize(self.device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        used_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(self.device)
        if other_bytes is None:
            other_bytes = max(0, used_bytes - TYPICAL_CONTEXT_BYTES)
        self._other_bytes = min(other_bytes, used_bytes)
        self.context_bytes = used_bytes - self._other_bytes + LAZY_MODULE_BYTES
        available_bytes = total_bytes - self._other_bytes
        if limit_bytes is None:
            return available_bytes
        if limit_bytes > available_bytes:
            raise BudgetError(
                f"--vram {format_bytes(limit_bytes)} is more than the {format_bytes(available_bytes)} that "
                f"{self.device} has free: lower it to {size_option_down(available_bytes)} or close other programs "
                "that use the card"
            )
        return limit_bytes

    @property
    def reserved_bytes(self) -> int:
        """Sum of the ledger and of the CUDA context."""
        return self.context_bytes + sum(item.nbytes for item in self.reservations)

    @property
    def free_bytes(self) -> int | None:
        """What may still be reserved; None without a limit."""
        return None if self.limit_bytes is None else self.limit_bytes - self.reserved_bytes

    def reserve(self, name: str, nbytes: int) -> None:
        """Enter `nbytes` for `name`, or raise `BudgetError` when the limit would be exceeded."""
        free_bytes = self.free_bytes
        if free_bytes is not None and nbytes > free_bytes:
            raise BudgetError(
                f"{name} needs {format_bytes(nbytes)} of device memory but {format_bytes(max(free_bytes, 0))} of "
                f"{format_bytes(self.limit_bytes or 0)} is left: raise --vram, lower --context or "
                "keep fewer layers resident"
            )
        self.reservations.append(Reservation(name, nbytes))

    def allocate(self, name: str, nbytes: int) -> torch.Tensor:
        """Reserve and allocate a device buffer: uint8 [nbytes]."""
        self.reserve(name, nbytes)
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"{name}: the device refused {format_bytes(nbytes)} although the budget allows it: "
                "another program took the memory; close it or lower --vram"
            ) from error

    def _cap_allocator(self) -> None:
        """Hold torch's allocator to the limit: what exceeds it raises instead of being taken."""
        if self.device.type != "cuda" or self.limit_bytes is None:
            return
        total_bytes = torch.cuda.mem_get_info(self.device)[1]
        # What this process holds already belongs to others than this budget's owner.
        allowed_bytes = self.limit_bytes - self.context_bytes + torch.cuda.memory_reserved(self.device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, allowed_bytes) / total_bytes), self.device)

    def release(self) -> None:
        """Lift the cap of torch's allocator again; the memory itself is given back by whoever holds it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def peak_bytes(self) -> int:
        """Most device memory seen: as the driver reports it on CUDA (context included), the ledger on the CPU."""
        if self.device.type == "cuda":
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
            self._peak_bytes = max(self._peak_bytes, total_bytes - free_bytes - self._other_bytes)
        else:
            self._peak_bytes = max(self._peak_bytes, self.reserved_bytes)
        return self._peak_bytes


def device_memory_used_by_others(index: int) -> int | None:
    """Bytes in use on GPU `index` before this process touches it, from the driver; None when that cannot be told.

    Must be called before the CUDA context exists, since afterwards the context itself is counted.
    """
    if torch.cuda.is_initialized():
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver library: nothing to measure by
        return None
    try:
        used_by_uuid: dict[str, int] = {}
        for position in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(position)
            uuid = str(pynvml.nvmlDeviceGetUUID(handle)).removeprefix("GPU-")
            # Version 2 leaves out the driver's own reserve, as `cudaMemGetInfo` does.
            info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
            used_by_uuid[uuid] = int(info.used)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    return used_by_uuid.get(str(torch.cuda.get_device_properties(index).uuid))


def current_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a GPU the current one for a while: kernels, events and page-locking go where the current device is."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def check_host_memory(needed_bytes: int, *, what: str = "the weights", cgroup: Path = Path("/sys/fs/cgroup")) -> None:
    """Refuse what the machine's free memory, or the container's, cannot hold: the system would kill us later.

    Raises:
        BudgetError: Less is available than `needed_bytes`.
    """
    available_bytes = psutil.virtual_memory().available
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            available_bytes = min(available_bytes, int(limit) - int((cgroup / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # not Linux, or another kind of control group
    if needed_bytes > available_bytes:
        raise BudgetError(
            f"{what} would take {format_bytes(needed_bytes)} of host memory and {format_bytes(available_bytes)} is "
            "available: close other programs, choose a 16-bit --dtype or a smaller model"
        )


def resolve_device(name: str) -> torch.device:
    """Turn `auto`, `cpu`, `cuda` or `cuda:N` into a device that exists.

    Raises:
        DeviceError: CUDA was asked for and is not there, or there is no such GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"{name!r} is not a device: use auto, cuda, cuda:N or cpu") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise DeviceError(f"device {name!r} is not supported: use cuda or cpu")
    if not torch.cuda.is_available():
        raise DeviceError("no CUDA device is available to torch: use --device cpu, or install a CUDA build of torch")
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise DeviceError(f"there is no cuda:{index}: this machine has {torch.cuda.device_count()} GPU(s)")
    return torch.device("cuda", index)
