"""Measure this machine: every figure that can be had, and for every other one the reason why not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Any

import torch

from offload_runtime.config import GIB, user_directory
from offload_runtime.errors import BudgetError, DeviceError, OptionError, StorageError
from offload_runtime.hardware import gpu_bench, host_bench
from offload_runtime.hardware.gpu_bench import LinkBench, NvmlAnswer
from offload_runtime.hardware.host_bench import CannotMeasureError, HostInfo, HostReader, printable
from offload_runtime.hardware.profile import DTYPES, MachineProfile
from offload_runtime.hardware.report import GpuReport, MachineReport, MeasureOptions
from offload_runtime.memory import resolve_device

_GPU_KEYS = tuple(entry.name for entry in fields(MachineProfile) if entry.metadata.get("gpu"))
_LINK_KEYS = tuple(key for key in _GPU_KEYS if "link" in key or key.startswith("pcie"))
# Called with (stage, done steps, steps).
OnProgress = Callable[[str, int, int], None]
# What may end a measurement; torch and CUDA raise RuntimeErrors.
_FAILURES = (CannotMeasureError, BudgetError, StorageError, OSError, RuntimeError)
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


@dataclass
class Findings:
    """Figures by key of the profile, and reasons for those that there are not, while they come in."""

    on_progress: OnProgress = _no_progress
    figures: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def take(self, stage: str, keys: str | tuple[str, ...], measure: Callable[[], Any]) -> None:
        """Enter what `measure` returns, one figure for each of several keys; or why there is nothing."""
        names = (keys,) if isinstance(keys, str) else keys
        self.on_progress(stage, 0, 1)
        try:
            value = measure()
            figures = (value,) if isinstance(keys, str) else value
            self.figures |= {name: _rounded(figure) for name, figure in zip(names, figures, strict=True)}
        except _FAILURES as error:
            self.miss(names, str(error).strip() or type(error).__name__)
        self.on_progress(stage, 1, 1)

    def miss(self, keys: Iterable[str], reason: str) -> None:
        """Enter why there is nothing: the first line of `reason`."""
        self.missing.update(dict.fromkeys(keys, _first_line(reason)))


def _first_line(reason: str) -> str:
    return printable(reason.strip().partition("\n")[0])


def _rounded(figure: Any) -> Any:
    """Four digits of a rate: more are noise."""
    if isinstance(figure, float):
        return float(f"{figure:.4g}")
    if isinstance(figure, Mapping):
        return {key: _rounded(value) for key, value in figure.items()}
    return figure


def _measure_gpu(found: Findings, effort: _Effort, device: torch.device, reader: HostReader) -> GpuReport:
    """Everything that one GPU has to itself."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    names = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    name, budget_s = names[device.index], effort.budget_s
    found.figures |= {"gpus": names.count(name), "gpu_name": printable(name), "vram_bytes": total_bytes}
    answer = _measure_link(found, effort, device, reader)
    found.take("HBM", "hbm_gbps", lambda: gpu_bench.measure_hbm_gbps(device, effort.hbm_bytes, budget_s=budget_s))
    found.take("launches", "launch_us", lambda: gpu_bench.measure_launch_us(device, budget_s=budget_s))
    found.take("CUDA graphs", "graph_launch_us", lambda: gpu_bench.measure_graph_launch_us(device, budget_s=budget_s))
    found.take("matrix products", "tflops", lambda: gpu_bench.measure_tflops(device, DTYPES, budget_s=budget_s))
    # Only now all modules are loaded that a runtime loads as well.
    found.take("reserved VRAM", "vram_reserved_bytes", lambda: _reserved_bytes(device))
    return GpuReport(names, torch.cuda.get_device_capability(device), free_bytes, answer)


def _measure_link(found: Findings, effort: _Effort, device: torch.device, reader: HostReader) -> NvmlAnswer:
    """The link both ways, alone and beside the host's own reading, and what NVML tells of it while it is busy."""
    uuid, budget_s = str(torch.cuda.get_device_properties(device).uuid), effort.budget_s
    try:
        bench = LinkBench(device, effort.link_bytes)
    except RuntimeError as error:
        found.miss(_LINK_KEYS, str(error))
        return gpu_bench.read_nvml(uuid)

    def beside_reading() -> tuple[float, float]:
        by_threads = found.figures.get("host_by_threads")
        if by_threads is None:
            raise CannotMeasureError(found.missing["host_by_threads"])
        best = max(by_threads, key=by_threads.__getitem__)
        return gpu_bench.measure_beside_link(bench, reader, best, budget_s=budget_s)

    found.take(
        "link, to the device", ("link_by_copy_mib", "link_gbps"),
        lambda: bench.by_copy_mib(effort.copy_sizes_mib, budget_s=budget_s / 2),
    )  # fmt: skip
    found.take("link, back", "link_back_gbps", lambda: bench.back_gbps(budget_s=budget_s / 2))
    found.take("link, both ways", "link_both_gbps", lambda: bench.both_gbps(budget_s=budget_s))
    found.take("link and memory", ("host_gbps_while_link_busy", "link_gbps_while_host_busy"), beside_reading)
    try:
        with gpu_bench.busy_link(bench):
            time.sleep(_WAKING_S)
            answer = gpu_bench.read_nvml(uuid)
    except CannotMeasureError as error:
        answer = NvmlAnswer(None, None, str(error))
    if answer.link is None:
        found.miss(("pcie_generation", "pcie_width"), answer.reason)
    else:
        found.figures |= {"pcie_generation": answer.link.generation, "pcie_width": answer.link.width}
    return answer


def _measure_pinning(found: Findings, effort: _Effort, host: HostInfo, *, full: bool) -> None:
    """How fast memory is locked, and how much of it can be."""

    def pinnable_bytes() -> int:
        if full:
            return host_bench.try_pinnable_bytes(host)
        return host_bench.estimate_pinnable_bytes(host, sample_locked="pin_gbps" in found.figures)

    nbytes = host_bench.sample_bytes(host, effort.pin_bytes)
    found.take("pinning", "pin_gbps", lambda: host_bench.measure_pin_gbps(nbytes))
    found.take("pinning all", "pinnable_bytes", pinnable_bytes)


def _measure_disk(found: Findings, nbytes: int, options: MeasureOptions) -> None:
    """The disk, by the file that was named or by one of our own."""

    def reading() -> float:
        if options.disk_file is not None:
            return host_bench.measure_disk_gbps(options.disk_file, most_bytes=4 * nbytes)
        if options.quick:
            raise CannotMeasureError("left out of --quick: name a file with --disk-file")
        with host_bench.temporary_disk_file(_cache_directory(), nbytes) as own:
            return host_bench.measure_disk_gbps(own, most_bytes=nbytes)

    found.take("disk", "disk_gbps", reading)


def measure_machine(options: MeasureOptions, *, on_progress: OnProgress = _no_progress) -> MachineReport:
    """Measure the machine: a minute, or about ten seconds with `quick`.

    Args:
        options: What to measure.
        on_progress: Called with (stage, done steps, steps).

    Raises:
        DeviceError: The asked device is not there or cannot be used.
        OptionError: `full` on a machine without a GPU.
    """
    started_s = time.perf_counter()
    host = host_bench.read_host_info()
    device, why_none = _choose_device(options.device)
    if options.full and device is None:
        raise OptionError(f"--full tries how much memory can be page-locked, which needs a GPU ({why_none}): drop it")
    found, gpu = Findings(on_progress), None
    effort = _QUICK if options.quick else _THOROUGH
    # Far larger than the caches and small beside what is free.
    read_bytes = max(1 << 20, min(effort.host_bytes, host.available_bytes // 8))
    with closing(HostReader(read_bytes, host.cpu.cores)) as reader:
        counts, budget_s = host_bench.thread_counts(host.cpu.cores, quick=options.quick), effort.budget_s / 2
        found.take(
            "host memory", ("host_by_threads", "host_gbps"), lambda: reader.by_threads(counts, budget_s=budget_s)
        )
        if device is None:
            found.figures["gpus"] = 0
            found.miss(_GPU_KEYS, why_none)
        else:
            with torch.cuda.device(device):
                gpu = _measure_gpu(found, effort, device, reader)
                _measure_pinning(found, effort, host, full=options.full)
    _measure_disk(found, effort.disk_bytes, options)
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
    try:
        device = resolve_device("cuda" if name == "auto" else name)
        torch.zeros(1, device=device)  # creates the context
        return device, ""
    except DeviceError as error:  # says itself what would help
        reason = str(error)
    except RuntimeError as error:
        reason = f"{_first_line(str(error))}: use --device cpu, or repair CUDA first"
    if name == "auto":
        return None, reason
    raise DeviceError(f"{name} cannot be measured: {reason}")


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
    return user_directory("CACHE", "the file that the disk is measured by")
