"""Measure this machine: every figure that can be had, and for every other one the reason why not."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload_runtime.config import card_names
from offload_runtime.errors import BudgetError, DeviceError, StorageError
from offload_runtime.files import user_directory
from offload_runtime.hardware import MachineProfile, gpu_bench, host_bench
from offload_runtime.hardware.gpu_bench import LinkBench, NvmlAnswer
from offload_runtime.hardware.host_bench import CannotMeasureError, HostInfo, HostReader, printable
from offload_runtime.options import require
from offload_runtime.sizes import GB, GIB, format_bytes
from offload_runtime.stream import Card, current_device, reaches, resolve_device, resolve_devices

_GPU_KEYS = tuple(entry.name for entry in fields(MachineProfile) if entry.metadata.get("gpu"))
_LINKS_KEYS = ("links_alone_gbps", "links_at_once_gbps")
_TRANSFER_KEYS = ("transfer_us_by_kib", "transfer_us", "transfer_gbps")
_LINK_KEYS = tuple(key for key in _GPU_KEYS if ("link" in key or key.startswith("pcie")) and key not in _LINKS_KEYS)
# Called with (stage, done steps, steps).
OnProgress = Callable[[str, int, int], None]
# What may end a measurement; torch and CUDA raise RuntimeErrors.
_FAILURES = (CannotMeasureError, BudgetError, StorageError, OSError, RuntimeError)
# From a row of a model to a piece of a prompt.
_TRANSFER_SIZES_KIB = (8.0, 64.0, 1024.0, 8192.0)


@dataclass(frozen=True)
class GpuReport:
    """What is of interest about a GPU today but of no use to a planner.

    `names` are all GPUs that torch sees; `capability` is the measured one's, and `free_bytes` what it had free with
    the CUDA context and nothing else in it.
    """

    names: tuple[str, ...]
    capability: tuple[int, int]
    free_bytes: int
    nvml: NvmlAnswer


@dataclass(frozen=True)
class CardsReport:
    """Several cards: their links and transfers between them, as the profile has them, but here also of a CPU and of
    logical cards on one device. `peer_to_peer` says whether transfers need no host memory; then
    `transfer_us_through_host` has how long they would take through it, by KiB."""

    devices: tuple[str, ...]
    peer_to_peer: bool
    links_alone_gbps: tuple[float, ...] = ()
    links_at_once_gbps: tuple[float, ...] = ()
    transfer_us_by_kib: Mapping[float, float] = field(default_factory=dict)
    transfer_us: float | None = None
    transfer_gbps: float | None = None
    transfer_us_through_host: Mapping[float, float] = field(default_factory=dict)

    @property
    def on_one_device(self) -> bool:
        """Return whether two of them are one device, whose link they share."""
        return len({*self.devices}) < len(self.devices)


@dataclass(frozen=True)
class MachineReport:
    """A measured machine; `missing` gives by key of the profile the reason why there is no figure."""

    profile: MachineProfile
    host: HostInfo
    missing: Mapping[str, str]
    gpu: GpuReport | None
    seconds: float
    cards: CardsReport | None = None


# What all links carry together of the sum of what each does; two that share one carry half of it.
_FAIR_SHARE_AT_ONCE = 0.8
# Of the link's peak before packet headers: 88 % on an H200 (PCIe 5), 79 % on an RTX 4090 (PCIe 4).
_FAIR_LINK_SHARE = 0.65
# A CUDA context with its libraries takes 0.6 GB; a desktop as much again.
_FAIR_TAKEN_VRAM_BYTES = 1_500_000_000
# A 7B model in 16 bits, which streams from there.
_SMALL_MODEL_BYTES = 13_500_000_000
_SLOW_DISK_GBPS = 1.0
_FIRST_WITH_BF16 = (8, 0)


@dataclass(frozen=True)
class _Effort:
    """How much of each thing is measured, and for how long; `budget_s` is of one figure. `host_bytes` are read and
    locked of the host's memory, and half as many read from a disk."""

    budget_s: float
    host_bytes: int
    link_bytes: int
    copy_sizes_mib: tuple[float, ...]
    hbm_bytes: int


# Copies from a few rows of a KV cache to a whole layer, none larger than the buffers.
_THOROUGH = _Effort(1.0, 2 * GIB, GIB // 4, (0.0625, 0.25, 1.0, 4.0, 16.0, 64.0, 256.0), 2 * GIB)
_QUICK = _Effort(0.15, GIB // 2, GIB // 8, (0.25, 1.0, 16.0, 64.0), GIB)


@dataclass
class Findings:
    """Figures by key of the profile, and reasons for those that there are not, while they come in."""

    on_progress: OnProgress = lambda stage, done, steps: None
    figures: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def take(
        self, stage: str, keys: str | tuple[str, ...], measure: Callable[..., Any], *about: Any, **how: Any
    ) -> None:
        """Enter what `measure(*about, **how)` returns, one figure for each of several keys; or why there is nothing."""
        names = (keys,) if isinstance(keys, str) else keys
        self.on_progress(stage, 0, 1)
        try:
            value = measure(*about, **how)
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
    """Return four digits of a rate: more are noise."""
    if isinstance(figure, float):
        return float(f"{figure:.4g}")
    if isinstance(figure, tuple):
        return tuple(map(_rounded, figure))
    if isinstance(figure, Mapping):
        return {key: _rounded(value) for key, value in figure.items()}
    return figure


def _measure_gpu(found: Findings, effort: _Effort, device: torch.device, reader: HostReader) -> GpuReport:
    """Measure everything that one GPU has to itself."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    names = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    name, budget_s = names[device.index], effort.budget_s
    found.figures |= {"gpu_name": printable(name), "vram_bytes": total_bytes}
    answer = _measure_link(found, effort, device, reader)
    found.take("HBM", "hbm_gbps", gpu_bench.measure_hbm_gbps, device, effort.hbm_bytes, budget_s=budget_s)
    found.take("launches", "launch_us", gpu_bench.measure_launch_us, device, budget_s=budget_s)
    found.take("CUDA graphs", "graph_launch_us", gpu_bench.measure_graph_launch_us, device, budget_s=budget_s)
    found.take("matrix products", "tflops", gpu_bench.measure_tflops, device, budget_s=budget_s)
    if effort is _THOROUGH:
        found.take("the library's products", "library_rows", gpu_bench.measure_library_rows, device)
        decode, key = gpu_bench.measure_decode_gweights_per_s, "decode_gweights_per_s"
        found.take("decoding in registers", key, decode, device, budget_s=budget_s / 2)
    else:
        found.miss(("library_rows", "decode_gweights_per_s"), "left out of --quick")
    # Only now all modules are loaded that a runtime loads as well.
    found.take("reserved VRAM", "vram_reserved_bytes", _reserved_bytes, device)
    return GpuReport(names, torch.cuda.get_device_capability(device), free_bytes, answer)


def _measure_link(found: Findings, effort: _Effort, device: torch.device, reader: HostReader) -> NvmlAnswer:
    """Measure the link both ways, alone and beside the host's own reading, and what NVML tells of it while it is
    busy."""
    uuid, budget_s = str(torch.cuda.get_device_properties(device).uuid), effort.budget_s
    try:
        bench = LinkBench(device, effort.link_bytes)
    except RuntimeError as error:
        found.miss(_LINK_KEYS, str(error))
        return gpu_bench.read_nvml(uuid)

    by_threads = found.figures.get("host_by_threads", {1: 0.0})
    best = max(by_threads, key=by_threads.__getitem__)
    both, sizes = ("link_by_copy_mib", "link_gbps"), effort.copy_sizes_mib
    found.take("link, to the device", both, bench.by_copy_mib, sizes, budget_s=budget_s / 2)
    found.take("link, back", "link_back_gbps", bench.back_gbps, budget_s=budget_s / 2)
    found.take("link, both ways", "link_both_gbps", bench.both_gbps, budget_s=budget_s)
    keys = "host_gbps_while_link_busy", "link_gbps_while_host_busy"
    found.take("link and memory", keys, gpu_bench.measure_during_copies, bench, reader, best, budget_s=budget_s)
    try:
        with gpu_bench.busy_link(bench):
            time.sleep(gpu_bench.WAKING_S)
            answer = gpu_bench.read_nvml(uuid)
    except CannotMeasureError as error:
        answer = NvmlAnswer(None, None, str(error))
    if answer.link is None:
        found.miss(("pcie_generation", "pcie_width"), answer.reason)
    else:
        found.figures |= {"pcie_generation": answer.link.generation, "pcie_width": answer.link.width}
    return answer


def _measure_cards(found: Findings, effort: _Effort, devices: Sequence[torch.device]) -> CardsReport:
    """Measure the links of several cards, each alone and all at once, and transfers: entered as figures of the machine
    where all cards are GPUs of their own."""
    cards, own = [Card(number, device) for number, device in enumerate(devices)], Findings(found.on_progress)

    def links() -> tuple[tuple[float, ...], tuple[float, ...]]:
        benches = [LinkBench(device, effort.link_bytes) for device in devices]
        alone = [gpu_bench.measure_links_gbps([bench], budget_s=effort.budget_s) for bench in benches]
        return tuple(gbps for (gbps,) in alone), gpu_bench.measure_links_gbps(benches, budget_s=effort.budget_s)

    own.take("links of all cards", _LINKS_KEYS, links)
    about, budget_s = (cards, _TRANSFER_SIZES_KIB), effort.budget_s / 4
    own.take("transfers from card to card", _TRANSFER_KEYS, gpu_bench.measure_transfers, *about, budget_s=budget_s)
    names, apart = tuple(map(str, devices)), len({*devices}) == len(devices)
    peers = apart and all(reaches(one, other) for one, other in itertools.pairwise([*devices, devices[0]]))
    if peers:
        own.take(
            "transfers through host memory", "transfer_us_through_host",
            lambda: gpu_bench.measure_transfers(*about, budget_s=budget_s, peers=False)[0],
        )  # fmt: skip
    if devices[0].type == "cuda":
        numbers, these, keys = [device.index for device in devices], ",".join(names), (*_LINKS_KEYS, *_TRANSFER_KEYS)
        if not apart:
            found.miss(keys, f"{these} are logical cards of one GPU")
        elif numbers != [*range(len(numbers))]:
            found.miss(keys, f"a profile has them from cuda:0 on, and these are {these}")
        else:
            found.figures |= {key: own.figures[key] for key in keys if key in own.figures}
    found.missing |= own.missing
    return CardsReport(names, peers, **own.figures)


def _measure_pinning(found: Findings, effort: _Effort, host: HostInfo, *, full: bool) -> None:
    """Measure how fast memory is locked, and how much of it can be."""
    nbytes = host_bench.sample_bytes(host, effort.host_bytes)
    found.take("pinning", "pin_gbps", host_bench.measure_pin_gbps, nbytes)
    judge = partial(host_bench.estimate_pinnable_bytes, sample_locked="pin_gbps" in found.figures)
    found.take("pinning all", "pinnable_bytes", host_bench.try_pinnable_bytes if full else judge, host)


def _disk_gbps(nbytes: int, file: Path | None, *, quick: bool) -> float:
    """Measure how fast the disk is read, by the file that was named or by one of our own."""
    if file is not None:
        return host_bench.measure_disk_gbps(file, most_bytes=4 * nbytes)
    if quick:
        raise CannotMeasureError("left out of --quick: name a file with --disk-file")
    # Beside the models that were downloaded, where a large file may lie for a moment.
    directory = user_directory("cache", holds="the file that the disk is measured by")
    with host_bench.temporary_disk_file(directory, nbytes) as own:
        return host_bench.measure_disk_gbps(own, most_bytes=nbytes)


def measure_machine(
    device: str = "auto", *, quick: bool = False, full: bool = False, disk_file: Path | None = None,
    on_progress: OnProgress = lambda stage, done, steps: None,
) -> MachineReport:  # fmt: skip
    """Measure the machine: a minute, or about ten seconds with `quick`.

    Args:
        device: auto (all cards of the first one's kind), cuda, cuda:N or cpu, or several such as `cuda:0,cuda:1`, of
            one kind; one that is named twice is two logical cards.
        quick: Measure less, and not the disk.
        full: Lock nearly all free memory to find the limit.
        disk_file: What the disk is read by; without it a temporary file.
        on_progress: Called with (stage, done steps, steps).

    Raises:
        DeviceError: The asked device is not there or cannot be used.
        OptionError: `full` on a machine without a GPU, or `disk_file` is no file.
    """
    is_file = disk_file is None or os.path.isfile(disk_file)
    require(is_file, f"--disk-file {disk_file} is not a file: name one of 16 MiB or more, such as a model")
    started_s = time.perf_counter()
    host = host_bench.read_host_info()
    devices, why_none = _choose_devices(device)
    first, cards = devices[0], None
    why = f"--full tries how much memory can be page-locked, which needs a GPU ({why_none}): drop it"
    require(first.type == "cuda" or not full, why)
    found, gpu = Findings(on_progress), None
    effort = _QUICK if quick else _THOROUGH
    # Far larger than the caches and small beside what is free.
    read_bytes = max(1 << 20, min(effort.host_bytes, host.available_bytes // 8))
    with closing(HostReader(read_bytes, host.cpu.cores)) as reader:
        counts, both = host_bench.thread_counts(host.cpu.cores, quick=quick), ("host_by_threads", "host_gbps")
        found.take("host memory", both, reader.by_threads, counts, budget_s=effort.budget_s / 2)
        found.figures["gpus"] = len({*devices}) if first.type == "cuda" else 0
        if first.type == "cpu":
            found.miss(_GPU_KEYS, why_none)
        else:
            with torch.cuda.device(first):
                gpu = _measure_gpu(found, effort, first, reader)
                _measure_pinning(found, effort, host, full=full)
    if len(devices) > 1:
        with current_device(first):
            cards = _measure_cards(found, effort, devices)
    found.take("disk", "disk_gbps", _disk_gbps, effort.host_bytes // 2, disk_file, quick=quick)
    driver = f", driver {gpu.nvml.driver}" if gpu is not None and gpu.nvml.driver else ""
    how = "offload-runtime profile" + " --quick" * quick + " --full" * full
    source = f"measured on {date.today()} by {how}, torch {torch.__version__}{driver}"
    profile = MachineProfile("this-machine", source, ram_bytes=host.ram_bytes, cpu=host.cpu, **found.figures)
    return MachineReport(profile, host, found.missing, gpu, time.perf_counter() - started_s, cards)


def _choose_devices(name: str) -> tuple[list[torch.device], str]:
    """Return the GPUs to measure; or as many CPUs as are named or, by itself, one, and why there is no GPU.

    Raises:
        OptionError: Cards of different kinds are named.
        DeviceError: A GPU was asked for by name and cannot be had, or GPUs are of different kinds.
    """
    names = card_names(name)
    if names[0] == "cpu":
        return [resolve_device(one) for one in names], f"--device {name} leaves the GPU out"
    try:
        if name == "auto":
            resolve_device("cuda")  # says what is missing, where `auto` would be the CPU
        devices = sorted(resolve_devices(names), key=lambda device: device.index)  # by which profiles have them
        kinds = sorted({torch.cuda.get_device_name(device) for device in devices})
        if len(kinds) > 1:
            these = " and ".join(kinds)
            raise DeviceError(f"a profile is of cards of one kind, and these are {these}: name equal ones")
        for device in devices:
            torch.zeros(1, device=device)  # creates the context
        return devices, ""
    except DeviceError as error:  # says itself what would help
        reason = str(error)
    except RuntimeError as error:
        reason = f"{_first_line(str(error))}: use --device cpu, or repair CUDA first"
    if name == "auto":
        return [torch.device("cpu")], reason
    raise DeviceError(f"{name} cannot be measured: {reason}")


def _reserved_bytes(device: torch.device) -> int:
    """Return the VRAM in bytes that torch cannot have: the driver's, the context's, other programs'."""
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes - torch.cuda.memory_reserved(device)


# --- what to do about a machine that is slower than it could be


def advise(report: MachineReport) -> list[str]:
    """Return what matters, one line each, the gravest first; empty when nothing is wrong."""
    if report.gpu is None:
        no_gpu = f"no GPU was measured ({report.missing['gpu_name']})"
        return [f"{no_gpu}: models run on the CPU, where streaming gains nothing", *_host_advice(report)]
    links = _link_advice(report.profile, report.gpu.nvml)
    return [*links, *_card_advice(report.profile, report.gpu), *_pinning_advice(report), *_host_advice(report)]


def _link_advice(profile: MachineProfile, nvml: NvmlAnswer) -> Iterator[str]:
    link, alone, at_once_gbps = nvml.link, profile.links_alone_gbps, sum(profile.links_at_once_gbps)
    if link is None:
        yield f"whether the slot holds the link back cannot be told: {nvml.reason}"
    if link is not None and link.width < link.width_max:
        yield (
            f"the card runs at x{link.width} and could do x{link.width_max}: move it to another slot, the one nearest "
            "to the processor, or take out what shares its lanes; streaming is as fast as this link"
        )
    if link is not None and link.generation < link.generation_max:
        yield (
            f"the link runs at PCIe {link.generation} while it copies and could do PCIe {link.generation_max}: look at "
            "the slot's setting in the BIOS and at riser cables"
        )
    if link is not None and profile.link_gbps is not None and profile.link_gbps < _FAIR_LINK_SHARE * link.peak_gbps:
        yield (
            f"copies to the card reach {profile.link_gbps:.1f} of the link's {link.peak_gbps:.1f} GB/s: look for other "
            "load on host memory, a single memory channel, or a card at another processor than this program's"
        )

    if at_once_gbps < _FAIR_SHARE_AT_ONCE * sum(alone):
        yield (
            f"the links of the cards carry {sum(alone):.1f} GB/s one by one and {at_once_gbps:.1f} at once: they share "
            "lanes, a chipset's link or slow host memory; use slots that lead to the processor"
        )
    if len(alone) > 1 and min(alone) < _FAIR_SHARE_AT_ONCE * max(alone):
        rates = " and ".join(f"{gbps:.1f}" for gbps in alone)
        yield f"the links of the cards carry {rates} GB/s: a card with a slow one gets fewer layers to stream"


def _card_advice(profile: MachineProfile, gpu: GpuReport) -> Iterator[str]:
    vram_bytes = profile.vram_bytes or 0
    taken_bytes = vram_bytes - gpu.free_bytes
    if taken_bytes > _FAIR_TAKEN_VRAM_BYTES:
        yield (
            f"{format_bytes(taken_bytes)} of {format_bytes(vram_bytes)} VRAM was taken before we began: close other "
            "programs that use the card"
        )
    if gpu.capability < _FIRST_WITH_BF16:
        version = ".".join(map(str, gpu.capability))
        yield f"the card (compute capability {version}) has no bf16 matrix units: use --dtype fp16"
    if others := ", ".join(sorted({name for name in gpu.names if name != profile.gpu_name})):
        yield f"other cards are not part of this profile: {others}; choose a card with CUDA_VISIBLE_DEVICES"


def _pinning_advice(report: MachineReport) -> Iterator[str]:
    host = report.host
    if "pin_gbps" in report.missing:
        limit = "" if host.locked_limit_bytes is None else f"; ulimit -l is {format_bytes(host.locked_limit_bytes)}"
        yield f"{report.missing['pin_gbps']}{limit}: raise the limit; unlocked memory copies several times slower"
    if host.wsl:
        yield (
            f"this is Linux under Windows (WSL2), which locks about half of the {format_bytes(host.ram_bytes)} it has: "
            "give it more memory in .wslconfig, or stream larger models from Linux itself"
        )


def _host_advice(report: MachineReport) -> Iterator[str]:
    host, disk_gbps = report.host, report.profile.disk_gbps
    if host.available_bytes < _SMALL_MODEL_BYTES:
        yield (
            f"only {format_bytes(host.available_bytes)} of {format_bytes(host.ram_bytes)} RAM is free, and a 7B model "
            f"in 16 bits takes {format_bytes(_SMALL_MODEL_BYTES)}: close other programs or add memory"
        )
    if not host.huge_pages:
        yield (
            "huge pages are off, without which memory for weights and a KV cache on the host is made and page-locked "
            f"several times slower: echo madvise | sudo tee {host_bench.HUGE_PAGES}"
        )
    if disk_gbps is not None and disk_gbps < _SLOW_DISK_GBPS:
        seconds = _SMALL_MODEL_BYTES / GB / disk_gbps
        yield (
            f"the disk reads {disk_gbps:.2f} GB/s, so that a 7B model in 16 bits loads in {seconds:.0f} s: keep models "
            "on a faster one"
        )
