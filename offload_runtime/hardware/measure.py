"""Measure this machine: every figure that can be had, and for every other one the reason why not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any

import torch

from offload_runtime.config import GIB
from offload_runtime.errors import DeviceError, OptionError
from offload_runtime.hardware import gpu_bench, host_bench
from offload_runtime.hardware.gpu_bench import BusyLink, LinkBench, NvmlAnswer, load_nvml, read_nvml
from offload_runtime.hardware.host_bench import CannotMeasureError, HostReader, OnProgress, counted
from offload_runtime.hardware.host_info import HostInfo, printable, read_host_info
from offload_runtime.hardware.profile import DTYPES, MachineProfile
from offload_runtime.hardware.report import Findings, GpuReport, MachineReport, MeasureOptions

# A key of the profile, or several, and what gives its figure.
_Measurement = tuple[str | tuple[str, ...], Callable[[], Any]]

_GPU_KEYS = tuple(entry.name for entry in fields(MachineProfile) if entry.metadata.get("gpu"))
_LINK_KEYS = (
    "link_by_copy_mib", "link_gbps", "link_back_gbps", "link_both_gbps", "host_gbps_while_link_busy",
    "link_gbps_while_host_busy", "pcie_generation", "pcie_width",
)  # fmt: skip
# The card's clocks, and with them the link, need a moment of work to rise.
_WAKING_S = 0.3


@dataclass(frozen=True)
class _Effort:
    """How much of each thing is measured, and for how long; `budget_s` is of one figure."""

    budget_s: float
    host_bytes: int
    link_bytes: int
    copy_sizes_mib: tuple[float, ...]
    hbm_bytes: int
    pin_bytes: int
    disk_bytes: int


_THOROUGH = _Effort(1.0, 2 * GIB, GIB // 4, gpu_bench.COPY_SIZES_MIB, 2 * GIB, 2 * GIB, GIB)
_QUICK = _Effort(0.15, GIB // 2, GIB // 8, gpu_bench.QUICK_COPY_SIZES_MIB, GIB, GIB // 2, GIB // 4)


def _no_progress(stage: str, done: int, total: int) -> None:
    """Show nothing."""


class _Session:
    """One round of measuring: what was asked, the host, and the findings so far."""

    def __init__(self, options: MeasureOptions, host: HostInfo, on_progress: OnProgress) -> None:
        self.found = Findings()
        self._options = options
        self._host = host
        self._effort = _QUICK if options.quick else _THOROUGH
        self._on_progress = on_progress

    def new_reader(self) -> HostReader:
        """An array of host memory to read, far larger than the caches and small beside what is free."""
        nbytes = max(1 << 20, min(self._effort.host_bytes, self._host.available_bytes // 8))
        return HostReader(nbytes, self._host.cpu.cores)

    def measure_host(self, reader: HostReader) -> None:
        """Host memory by number of threads."""
        counts = host_bench.thread_counts(self._host.cpu.cores, quick=self._options.quick)

        def by_threads() -> tuple[dict[int, float], float]:
            rates = host_bench.measure_host_by_threads(
                reader, counts, budget_s=self._effort.budget_s / 2, on_progress=self._on_progress
            )
            return rates, max(rates.values())

        self.found.take(("host_by_threads", "host_gbps"), by_threads)

    def measure_gpu(self, device: torch.device, reader: HostReader, nvml: Callable[[], Any]) -> GpuReport:
        """Everything that one GPU has to itself."""
        found, effort = self.found, self._effort
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        names = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        name = names[device.index]
        found.figures |= {"gpus": names.count(name), "gpu_name": printable(name), "vram_bytes": total_bytes}
        answer = self._measure_link(device, reader, nvml)
        budget_s = effort.budget_s
        self._take_each(
            "HBM and launches",
            [
                (
                    "hbm_gbps",
                    lambda: gpu_bench.measure_hbm_gbps(device, most_bytes=effort.hbm_bytes, budget_s=budget_s),
                ),
                ("launch_us", lambda: gpu_bench.measure_launch_us(device, budget_s=budget_s)),
                ("graph_launch_us", lambda: gpu_bench.measure_graph_launch_us(device, budget_s=budget_s)),
            ],
        )
        found.take(
            "tflops",
            lambda: gpu_bench.measure_tflops(device, DTYPES, budget_s=budget_s, on_progress=self._on_progress),
        )
        # Only now all modules are loaded that a runtime loads as well.
        found.take("vram_reserved_bytes", lambda: _reserved_bytes(device))
        return GpuReport(names, torch.cuda.get_device_capability(device), free_bytes, answer)

    def _measure_link(self, device: torch.device, reader: HostReader, nvml: Callable[[], Any]) -> NvmlAnswer:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        try:
            bench = LinkBench(device, self._effort.link_bytes)
        except RuntimeError as error:
            self.found.miss(_LINK_KEYS, str(error))
            return read_nvml(uuid, nvml)
        with closing(bench):
            self._measure_copies(bench, reader)
            try:
                with BusyLink(bench):
                    time.sleep(_WAKING_S)
                    answer = read_nvml(uuid, nvml)
            except CannotMeasureError as error:
                answer = NvmlAnswer(None, None, str(error))
        if answer.link is None:
            self.found.miss(("pcie_generation", "pcie_width"), answer.reason)
        else:
            self.found.figures |= {"pcie_generation": answer.link.generation, "pcie_width": answer.link.width}
        return answer

    def _measure_copies(self, bench: LinkBench, reader: HostReader) -> None:
        found, budget_s = self.found, self._effort.budget_s

        def by_size() -> tuple[dict[float, float], float]:
            rates = bench.by_copy_mib(self._effort.copy_sizes_mib, budget_s=budget_s / 2, on_progress=self._on_progress)
            return rates, max(rates.values())

        def beside() -> tuple[float, float]:
            by_threads = found.figures.get("host_by_threads")
            if by_threads is None:
                raise CannotMeasureError(found.missing["host_by_threads"])
            best = max(by_threads, key=by_threads.__getitem__)
            return gpu_bench.measure_beside_link(bench, reader, best, budget_s=budget_s)

        found.take(("link_by_copy_mib", "link_gbps"), by_size)
        self._take_each(
            "link, back and both ways",
            [
                ("link_back_gbps", lambda: bench.back_gbps(budget_s=budget_s / 2)),
                ("link_both_gbps", lambda: bench.both_gbps(budget_s=budget_s)),
                (("host_gbps_while_link_busy", "link_gbps_while_host_busy"), beside),
            ],
        )

    def measure_pinning(self) -> None:
        """How fast memory is locked, and how much of it can be."""
        found, host = self.found, self._host
        nbytes = host_bench.sample_bytes(host, self._effort.pin_bytes)
        self._take_each("pinning", [("pin_gbps", lambda: host_bench.measure_pin_gbps(nbytes))])
        locked = "pin_gbps" in found.figures
        if self._options.full:
            found.take("pinnable_bytes", lambda: host_bench.try_pinnable_bytes(host, on_progress=self._on_progress))
        else:
            found.take("pinnable_bytes", lambda: host_bench.estimate_pinnable_bytes(host, sample_locked=locked))

    def measure_disk(self) -> None:
        """The disk, by the file that was named or by one of our own."""
        if self._options.disk_file is None and self._options.quick:
            self.found.miss(("disk_gbps",), "left out of --quick: name a file with --disk-file")
            return
        self.found.take("disk_gbps", self._disk_gbps)

    def _disk_gbps(self) -> float:
        if self._options.disk_file is not None:
            return host_bench.measure_disk_gbps(
                self._options.disk_file, most_bytes=4 * self._effort.disk_bytes, on_progress=self._on_progress
            )
        nbytes, on_progress = self._effort.disk_bytes, self._on_progress
        with host_bench.temporary_disk_file(_cache_directory(), nbytes, on_progress=on_progress) as file:
            return host_bench.measure_disk_gbps(file, most_bytes=nbytes, on_progress=on_progress)

    def _take_each(self, stage: str, measurements: Sequence[_Measurement]) -> None:
        """Take one figure after another as the steps of a stage."""
        for keys, measure in counted(measurements, stage, self._on_progress):
            self.found.take(keys, measure)


def measure_machine(
    options: MeasureOptions,
    *,
    on_progress: OnProgress = _no_progress,
    host: HostInfo | None = None,
    nvml: Callable[[], Any] = load_nvml,
) -> MachineReport:
    """Measure the machine: a minute, or about ten seconds with `quick`.

    Args:
        options: What to measure.
        on_progress: Called with (stage, done steps, steps).
        host: What to take the host for; by default what the system tells.
        nvml: Gives the module `pynvml`, or what stands for it.

    Raises:
        DeviceError: The asked device is not there or cannot be used.
        OptionError: `full` on a machine without a GPU.
    """
    started_s = time.perf_counter()
    host = host if host is not None else read_host_info()
    device, why_none = _choose_device(options.device)
    if options.full and device is None:
        raise OptionError(f"--full tries how much memory can be page-locked, which needs a GPU ({why_none}): drop it")
    session, gpu = _Session(options, host, on_progress), None
    found = session.found
    with closing(session.new_reader()) as reader:
        session.measure_host(reader)
        if device is None:
            found.figures["gpus"] = 0
            found.miss(_GPU_KEYS, why_none)
        else:
            with torch.cuda.device(device):
                gpu = session.measure_gpu(device, reader, nvml)
                session.measure_pinning()
    session.measure_disk()
    profile = MachineProfile(
        name="this-machine", source=_source(options, gpu), ram_bytes=host.ram_bytes, cpu=host.cpu, **found.figures
    )
    return MachineReport(profile, host, found.missing, gpu, time.perf_counter() - started_s)


def _choose_device(name: str) -> tuple[torch.device | None, str]:
    """The GPU to measure, or None and why there is none.

    Raises:
        DeviceError: A GPU was asked for by name and cannot be had.
    """
    if name == "cpu":
        return None, "--device cpu leaves the GPU out"
    if name != "auto" and name.partition(":")[0] != "cuda":
        raise DeviceError(f"{name!r} is not a device: use auto, cuda, cuda:N or cpu")
    try:
        if not torch.cuda.is_available():
            raise DeviceError("torch sees no CUDA device")
        index = torch.device("cuda" if name == "auto" else name).index or 0
        if index >= torch.cuda.device_count():
            raise DeviceError(f"there is no cuda:{index}: torch sees {torch.cuda.device_count()} GPU(s)")
        device = torch.device("cuda", index)
        torch.zeros(1, device=device)  # creates the context
    except (DeviceError, RuntimeError) as error:
        reason = printable(str(error).strip().partition("\n")[0])
        if name == "auto":
            return None, reason
        raise DeviceError(f"{name} cannot be measured ({reason}): use --device cpu, or repair CUDA first") from error
    return device, ""


def _reserved_bytes(device: torch.device) -> int:
    """VRAM in bytes that torch cannot have: the driver's, the context's, other programs'."""
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes - torch.cuda.memory_reserved(device)


def _source(options: MeasureOptions, gpu: GpuReport | None) -> str:
    """When and by what it was measured."""
    how = "offload-runtime profile" + (" --quick" if options.quick else "") + (" --full" if options.full else "")
    driver = f", driver {gpu.nvml.driver}" if gpu is not None and gpu.nvml.driver else ""
    return f"measured on {date.today().isoformat()} by {how}, torch {torch.__version__}{driver}"


def _cache_directory() -> Path:
    """Where a large file may lie for a moment: beside the models that were downloaded."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "offload-runtime"
