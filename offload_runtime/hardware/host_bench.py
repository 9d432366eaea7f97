"""The host: what the system says of its processor and memory; measurements of memory, disk and page-locking.

Also what all measurements share: how long one may take, and how it says that it cannot be made.
"""

from __future__ import annotations

import mmap
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from offload_runtime.hardware import CpuFigures
from offload_runtime.sizes import GB, GIB, format_bytes
from offload_runtime.stream import HostArena, Registrar, host_memory

# --- what the system says

# Flags of /proc/cpuinfo that decide how fast attention on the CPU is.
_FEATURES = (
    "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16", "sve",
)  # fmt: skip


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True)
class HostInfo:
    """Memory in bytes, as of when it was asked.

    `ram_bytes` and `available_bytes` are the container's where it has less than the machine; `locked_limit_bytes` is
    RLIMIT_MEMLOCK (None: unlimited, or not known here).
    """

    cpu: CpuFigures
    ram_bytes: int
    available_bytes: int
    locked_limit_bytes: int | None
    wsl: bool
    huge_pages: bool = True  # the system gives them to who asks


def read_host_info() -> HostInfo:
    """Ask the system; Linux alone tells name and features of the processor properly."""
    # Under Windows, whose driver locks only a part of the memory, Linux says so in its version.
    is_wsl = "microsoft" in _text_of(Path("/proc/version")).lower()
    found = re.findall(r"^([^:\n]*\w)\s*:[ \t]*(.*)$", _text_of(Path("/proc/cpuinfo")), re.MULTILINE)
    entries = dict(reversed(found))  # the first core's stay
    flags = set((entries.get("flags") or entries.get("Features") or "").split())
    name = entries.get("model name") or platform.processor() or platform.machine() or "unknown processor"
    cpu = CpuFigures(printable(name), usable_cores(), tuple(flag for flag in _FEATURES if flag in flags))
    locked_bytes = None
    if hasattr(psutil, "RLIMIT_MEMLOCK"):  # Linux
        soft_bytes, _ = psutil.Process().rlimit(psutil.RLIMIT_MEMLOCK)
        locked_bytes = None if soft_bytes == psutil.RLIM_INFINITY else soft_bytes
    return HostInfo(cpu, *host_memory(), locked_bytes, is_wsl, "[never]" not in _text_of(HUGE_PAGES))


def usable_cores() -> int:
    """Return the logical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _text_of(file: Path) -> str:
    """Return what one of Linux's own files says; nothing where there is none."""
    with suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace")
    return ""


def printable(text: str) -> str:
    """Return the text as one line that a profile can hold."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


# --- measurements


class CannotMeasureError(Exception):
    """A figure cannot be had on this machine; the text is the reason. Becomes part of the report, never an end."""


def best_time_s(action: Callable[[], object], *, budget_s: float) -> float:
    """Return the shortest time of one `action`, in seconds: others on the machine only ever make it longer.

    One untimed call comes first; then calls follow until `budget_s` is spent, at least three of them.
    """
    action()
    times_s: list[float] = []
    started_s = time.perf_counter()
    while len(times_s) < 3 or time.perf_counter() - started_s < budget_s:
        before_s = time.perf_counter()
        action()
        times_s.append(time.perf_counter() - before_s)
    return min(times_s)


# Large enough that the kernel keeps several requests in flight for one reader.
_DISK_BLOCK_BYTES = 16 << 20
_IN_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


class HostReader:
    """Reads a large array with a number of threads.

    Args:
        nbytes: Of the array; far more than the caches hold.
        threads: Most threads that will read.
    """

    def __init__(self, nbytes: int, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads)
        # Pages are placed beside the core that first writes them, so each thread writes the part it will read.
        self._words = np.empty(nbytes // 4, dtype=np.float32)
        list(self._pool.map(lambda part: part.fill(1.0), np.array_split(self._words, threads)))
        self.nbytes = self._words.nbytes

    def read(self, threads: int) -> None:
        """Read the whole array once with this many threads."""
        # numpy lets other threads run meanwhile, and the maximum is what memory limits soonest.
        list(self._pool.map(np.max, np.array_split(self._words, threads)))

    def by_threads(self, counts: Sequence[int], *, budget_s: float) -> tuple[dict[int, float], float]:
        """Measure reading in GB/s for each number of threads, and the best of these."""
        rates = {
            threads: self.nbytes / best_time_s(partial(self.read, threads), budget_s=budget_s) / GB
            for threads in counts
        }
        return rates, max(rates.values())

    def close(self) -> None:
        """End the threads and give the array back."""
        self._pool.shutdown()
        self._words = np.empty(0, dtype=np.float32)


def thread_counts(cores: int, *, quick: bool) -> list[int]:
    """Return the numbers of threads to try: powers of two and all cores; quick: one and all."""
    powers = [1] if quick else [1 << power for power in range(cores.bit_length())]
    return sorted({*powers, cores})


def measure_disk_gbps(file: Path, *, most_bytes: int) -> float:
    """Measure sequential reading of a file's first `most_bytes` past the page cache, in GB/s.

    Raises:
        CannotMeasureError: The file is in memory, too small to time, or cannot be read around the cache.
        OSError: It cannot be read at all.
    """
    refuse_memory_file(file)
    total_bytes = min(file.stat().st_size, most_bytes) // _DISK_BLOCK_BYTES * _DISK_BLOCK_BYTES
    if total_bytes == 0:
        raise CannotMeasureError(f"{file} has less than {_DISK_BLOCK_BYTES >> 20} MiB to read")
    # Anonymous pages are aligned, as direct reads want.
    with open(file, "rb", buffering=0, opener=_open_past_cache) as source, mmap.mmap(-1, _DISK_BLOCK_BYTES) as block:
        block.write(bytes(_DISK_BLOCK_BYTES))  # page faults are not the disk's time
        started_s = time.perf_counter()
        for _ in range(0, total_bytes, _DISK_BLOCK_BYTES):
            if source.readinto(block) != _DISK_BLOCK_BYTES:
                raise CannotMeasureError(f"{file} became shorter while it was read")
        return total_bytes / (time.perf_counter() - started_s) / GB


def _open_past_cache(path: str, flags: int) -> int:
    """Return a descriptor whose reads come from the disk: direct, or else with the file's cached pages dropped
    first."""
    if not hasattr(os, "posix_fadvise"):
        raise CannotMeasureError("this system cannot read around its file cache")
    try:
        return os.open(path, flags | os.O_DIRECT)
    except (OSError, AttributeError):  # the file system, or a system that is not Linux, has no direct reads
        descriptor = os.open(path, flags)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return descriptor


@contextmanager
def temporary_disk_file(directory: Path, nbytes: int) -> Iterator[Path]:
    """Return a file of `nbytes` of noise (file systems compress zeros) in `directory`, on the disk and gone afterwards.

    Raises:
        CannotMeasureError: Less than twice as much is free there, or the directory is in memory.
        OSError: It cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    refuse_memory_file(directory)
    free_bytes = psutil.disk_usage(str(directory)).free
    if free_bytes < 2 * nbytes:
        raise CannotMeasureError(f"{directory} has only {format_bytes(free_bytes)} free: name a file with --disk-file")
    block = np.random.default_rng(0).bytes(min(nbytes, _DISK_BLOCK_BYTES))
    with tempfile.NamedTemporaryFile(dir=directory, prefix="offload-runtime-", suffix=".tmp") as file:
        for _ in range(0, nbytes, len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        yield Path(file.name)


def refuse_memory_file(path: Path) -> None:
    """Refuse what no disk holds, however much it looks like a file.

    Raises:
        CannotMeasureError: The path lies in a file system that is memory.
    """
    resolved = path.resolve()
    mounts = {Path(disk.mountpoint): disk.fstype for disk in psutil.disk_partitions(all=True)}
    holding = next((mounts[parent] for parent in (resolved, *resolved.parents) if parent in mounts), "")
    if holding in _IN_MEMORY_FILE_SYSTEMS:
        raise CannotMeasureError(f"{path} is in memory ({holding}): name a file on a disk with --disk-file")


# Stays with the system and with other programs: an eighth of the memory, at most 8 GiB.
_KEPT_SHARE, _MOST_KEPT_BYTES = 8, 8 * GIB
_HUGE_PAGE_BYTES = 2 << 20
_TRIALS = 3


def kept_bytes(ram_bytes: int) -> int:
    """Return memory in bytes that is never to be locked."""
    return min(ram_bytes // _KEPT_SHARE, _MOST_KEPT_BYTES)


def sample_bytes(host: HostInfo, wanted_bytes: int) -> int:
    """Return as much of `wanted_bytes` as can be locked for a moment without anybody noticing."""
    return max(_HUGE_PAGE_BYTES, min(wanted_bytes, host.available_bytes // 8) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES)


def _written_arena(nbytes: int) -> HostArena:
    """Return memory that has been written to, so that locking it is all that is left to do."""
    arena = HostArena(nbytes, name="a measurement of page-locking")
    arena.buffer.fill_(1)
    return arena


def measure_pin_gbps(nbytes: int) -> float:
    """Measure locking `nbytes` that have been written to, in GB/s; the best of a few.

    Raises:
        CannotMeasureError: The system refuses to lock that much.
        BudgetError: It refuses to give it.
    """
    arena = _written_arena(nbytes)
    times_s = []
    for _ in range(_TRIALS):
        started_s = time.perf_counter()
        code = arena.lock(Registrar(), nbytes)
        times_s.append(time.perf_counter() - started_s)
        if code != 0:
            raise CannotMeasureError(f"the system refuses to lock {format_bytes(nbytes)} (CUDA error {code})")
        arena.unpin()
    return nbytes / min(times_s) / GB


def estimate_pinnable_bytes(host: HostInfo, *, sample_locked: bool) -> int:
    """Return what may be locked, judged by free memory and the kind of system, without trying it.

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


def try_pinnable_bytes(host: HostInfo) -> int:
    """Lock memory in blocks of 1 GiB until the system refuses or only its own share is free; in bytes.

    Raises:
        CannotMeasureError: Not one block can be locked.
        BudgetError: The system refuses to give as much.
    """
    registrar, locked_bytes = Registrar(), 0
    with ExitStack() as arenas:
        # One after the other: where the system refuses early, no more than that is ever written.
        for _ in range(max(0, host.available_bytes - kept_bytes(host.ram_bytes)) // GIB):
            arena = arenas.enter_context(closing(_written_arena(GIB)))
            refused = arena.lock(registrar)
            locked_bytes += arena.pinned_bytes
            if refused:
                break
    if not locked_bytes:
        raise CannotMeasureError("the system refuses to lock 1 GiB, or has none free")
    return locked_bytes
