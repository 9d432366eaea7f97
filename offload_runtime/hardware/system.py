"""What the system says of this machine: its processor, its memory, and a GPU's link by NVIDIA's management library."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from offload_runtime.stream import host_memory, open_nvml

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# GB/s of one lane by PCIe generation, after line coding and before packet headers.
_LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563, 7: 15.125}


@dataclass(frozen=True)
class HostInfo:
    """Processor and memory, in bytes, as of when the system was asked.

    `cores` are the logical ones that this process may use. `ram_bytes` and `available_bytes` are the container's where
    it has less than the machine; `locked_limit_bytes` is RLIMIT_MEMLOCK (None: unlimited, or not known here).
    """

    cpu_name: str
    cores: int
    ram_bytes: int
    available_bytes: int
    locked_limit_bytes: int | None
    wsl: bool
    huge_pages: bool = True  # the system gives them to who asks


def read_host_info() -> HostInfo:
    """Ask the system; Linux alone tells the name of the processor properly."""
    # Under Windows, whose driver locks only a part of the memory, Linux says so in its version.
    is_wsl = "microsoft" in _text_of(Path("/proc/version")).lower()
    named = re.search(r"^model name\s*:[ \t]*(.+)$", _text_of(Path("/proc/cpuinfo")), re.MULTILINE)
    name = named[1] if named else platform.processor() or platform.machine() or "unknown processor"
    locked_bytes = None
    if hasattr(psutil, "RLIMIT_MEMLOCK"):  # Linux
        soft_bytes, _ = psutil.Process().rlimit(psutil.RLIMIT_MEMLOCK)
        locked_bytes = None if soft_bytes == psutil.RLIM_INFINITY else soft_bytes
    huge_pages = "[never]" not in _text_of(HUGE_PAGES)
    return HostInfo(printable(name), usable_cores(), *host_memory(), locked_bytes, is_wsl, huge_pages)


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


@dataclass(frozen=True)
class PcieLink:
    """Generation and lanes of a card's link: now, and the most that card and system could do."""

    generation: int
    width: int
    generation_max: int
    width_max: int

    @property
    def peak_gbps(self) -> float:
        """Return what the link carries each way before packet headers, in GB/s."""
        return _LANE_GBPS[self.generation] * self.width


@dataclass(frozen=True)
class NvmlAnswer:
    """Holds what NVML says: the driver's version and the link, or `reason`, why it is None."""

    driver: str | None
    link: PcieLink | None
    reason: str


def read_nvml(uuid: str) -> NvmlAnswer:
    """Ask NVML about one card. An idle link drops to a lower generation: ask while copies run.

    Args:
        uuid: The card's, as torch gives it: torch counts the cards of CUDA_VISIBLE_DEVICES, NVML all of them.
    """
    driver, link = None, None
    try:
        nvml = open_nvml()
        driver = str(nvml.nvmlSystemGetDriverVersion())
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        now = nvml.nvmlDeviceGetCurrPcieLinkGeneration, nvml.nvmlDeviceGetCurrPcieLinkWidth
        most = nvml.nvmlDeviceGetMaxPcieLinkGeneration, nvml.nvmlDeviceGetMaxPcieLinkWidth
        link = PcieLink(*(int(ask(handle)) for ask in (*now, *most)))
    except Exception as error:  # no driver and no library, or a query that virtual machines and WSL2 do not support
        return NvmlAnswer(driver, None, f"NVML is not available, or refuses a query: {error}")
    if link.generation not in _LANE_GBPS or not 1 <= link.width <= 32:  # some virtual machines have no real link
        return NvmlAnswer(driver, None, f"NVML tells of a link of generation {link.generation}, x{link.width}")
    return NvmlAnswer(driver, link, "")
