"""The host as the system describes it: processor, memory, and what limits page-locking. Measures nothing."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

from offload_runtime.hardware.profile import CpuFigures

# Flags of /proc/cpuinfo that decide how fast attention on the CPU is.
_FEATURES = (
    "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16", "sve",
)  # fmt: skip


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


def read_host_info(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> HostInfo:
    """Ask the system; `proc` and `cgroup` are where Linux tells it."""
    memory = psutil.virtual_memory()
    ram_bytes, available_bytes = int(memory.total), int(memory.available)
    try:
        limit_bytes = int((cgroup / "memory.max").read_text())
        used_bytes = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        pass  # no limit ("max"), not Linux, or another kind of control group
    else:
        ram_bytes = min(ram_bytes, limit_bytes)
        available_bytes = min(available_bytes, max(0, limit_bytes - used_bytes))
    return HostInfo(read_cpu(proc), ram_bytes, available_bytes, _locked_limit_bytes(), is_wsl(proc))


def read_cpu(proc: Path) -> CpuFigures:
    """Name, usable logical cores and features; Linux alone tells name and features properly."""
    try:
        lines = (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    entries: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        entries.setdefault(key.strip(), value.strip())
    flags = set((entries.get("flags") or entries.get("Features") or "").split())
    name = entries.get("model name") or platform.processor() or platform.machine() or "unknown processor"
    return CpuFigures(printable(name), usable_cores(), tuple(flag for flag in _FEATURES if flag in flags))


def usable_cores() -> int:
    """Logical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_wsl(proc: Path) -> bool:
    """Whether this is Linux under Windows, whose driver locks only a part of the memory."""
    try:
        return "microsoft" in (proc / "version").read_text(errors="replace").lower()
    except OSError:
        return False


def printable(text: str) -> str:
    """The text as one line that a profile can hold."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _locked_limit_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft_bytes == resource.RLIM_INFINITY else soft_bytes
