"""Measure this machine: every figure that a plan needs, for those that cannot be had the reason why not, and advice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import date
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from offload_runtime.config import card_names
from offload_runtime.errors import BudgetError, DeviceError
from offload_runtime.hardware import MachineProfile, bench
from offload_runtime.hardware.bench import (
    HUGE_PAGES,
    CannotMeasureError,
    HostInfo,
    LinkBench,
    NvmlAnswer,
    printable,
    read_host_info,
    read_nvml,
)
from offload_runtime.options import require
from offload_runtime.sizes import GIB, format_bytes
from offload_runtime.stream.device import Card, current_device, reaches, resolve_device, resolve_devices
from offload_runtime.stream.staging import staging_threads

_GPU_KEYS = tuple(entry.name for entry in fields(MachineProfile) if entry.metadata.get("gpu"))
_CARDS_KEYS = ("links_at_once_gbps", "transfer_us", "transfer_gbps")
# Called with (stage, done steps, steps).
OnProgress = Callable[[str, int, int], None]
# What may end a measurement; torch and CUDA raise RuntimeErrors.
_FAILURES = (CannotMeasureError, BudgetError, RuntimeError)
_HOST_BYTES = 2 * GIB  # that are read, or copied


@dataclass(frozen=True)
class GpuReport:
    """Holds what is of interest about GPUs today but of no use to a planner.

    `names` are all GPUs that torch sees; `capability` is the measured ones', and `free_bytes` what the first had free
    with the CUDA context and nothing else in it. Of several cards `links_alone_gbps` are their links, each while the
    others are idle, and `peer_to_peer` says whether rows cross from one to the other without the host's memory.
    """

    names: tuple[str, ...]
    capability: tuple[int, int]
    free_bytes: int
    nvml: NvmlAnswer
    links_alone_gbps: tuple[float, ...] = ()
    peer_to_peer: bool = False


@dataclass(frozen=True)
class MachineReport:
    """A measured machine; `missing` gives by key of the profile the reason why there is no figure."""

    profile: MachineProfile
    host: HostInfo
    missing: Mapping[str, str]
    gpu: GpuReport | None
    seconds: float


# What all links carry together of the sum of what each does; two that share one carry half of it.
_FAIR_SHARE_AT_ONCE = 0.8
# Of the link's peak before packet headers: 88 % on an H200 (PCIe 5), 79 % on an RTX 4090 (PCIe 4).
_FAIR_LINK_SHARE = 0.65
# A CUDA context with its libraries takes 0.6 GB; a desktop as much again.
_FAIR_TAKEN_VRAM_BYTES = 1_500_000_000
# A 7B model in 16 bits, which streams from there.
_SMALL_MODEL_BYTES = 13_500_000_000
_FIRST_WITH_BF16 = (8, 0)


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


def _measure_gpus(found: Findings, devices: Sequence[torch.device], host: HostInfo, *, quick: bool) -> GpuReport:
    """Measure everything that one GPU has to itself, of the first, and what several have to each other."""
    device, budget_s = devices[0], 0.15 if quick else 1.0
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    names = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    found.figures |= {"gpu_name": printable(names[device.index]), "vram_bytes": total_bytes}
    nvml = NvmlAnswer(None, None, "the link could not be measured")

    def link_gbps() -> float:
        over = bench.spent(budget_s)

        def over_and_asked() -> bool:  # an idle link drops to a lower generation: NVML is asked while copies run
            nonlocal nvml
            if is_over := over():
                nvml = read_nvml(str(torch.cuda.get_device_properties(device).uuid))
            return is_over

        return bench.measure_links_gbps([LinkBench(device)], over_and_asked)[0]

    def staging_gbps() -> float:
        threads, nbytes = staging_threads(host.cores), bench.sample_bytes(host, _HOST_BYTES)
        return bench.measure_staging_gbps(LinkBench(device), nbytes, threads, budget_s=budget_s)

    found.take("link, to the device", "link_gbps", link_gbps)
    found.take(
        "link, back", "link_back_gbps",
        lambda: bench.measure_links_gbps([LinkBench(device, back=True)], bench.spent(budget_s))[0],
    )  # fmt: skip
    found.take("copies beside the link", "staging_gbps", staging_gbps)
    found.take("HBM", "hbm_gbps", bench.measure_hbm_gbps, device, GIB if quick else 2 * GIB, budget_s=budget_s)
    found.take("CUDA graphs", "graph_launch_us", bench.measure_graph_launch_us, device, budget_s=budget_s)
    found.take("matrix products", "tflops", bench.measure_tflops, device, budget_s=budget_s)
    if quick:
        found.miss(["decode_gweights_per_s"], "left out of --quick")
    else:
        decode, key = bench.measure_decode_gweights_per_s, "decode_gweights_per_s"
        found.take("decoding in registers", key, decode, device, budget_s=budget_s / 2)
    # Only now all modules are loaded that a runtime loads as well.
    found.take("reserved VRAM", "vram_reserved_bytes", _reserved_bytes, device)
    alone, peers = _measure_cards(found, devices, budget_s) if len(devices) > 1 else ((), False)
    return GpuReport(names, torch.cuda.get_device_capability(device), free_bytes, nvml, alone, peers)


def _measure_cards(found: Findings, devices: Sequence[torch.device], budget_s: float) -> tuple[tuple[float, ...], bool]:
    """Measure the links of several cards, each alone and all at once, and transfers between them. Returns the links
    alone, and whether all cards reach each other's memory."""
    own, cards = Findings(found.on_progress), [Card(number, device) for number, device in enumerate(devices)]

    def links() -> tuple[tuple[float, ...], tuple[float, ...]]:
        benches = [LinkBench(device) for device in devices]
        alone = [bench.measure_links_gbps([one], bench.spent(budget_s)) for one in benches]
        return tuple(gbps for (gbps,) in alone), bench.measure_links_gbps(benches, bench.spent(budget_s))

    own.take("links of all cards", ("alone", "links_at_once_gbps"), links)
    own.take("transfers from card to card", _CARDS_KEYS[1:], bench.measure_transfers, cards, budget_s=budget_s / 4)
    alone = own.figures.pop("alone", ())
    if [device.index for device in devices] == [*range(len(devices))]:
        found.figures |= own.figures
        found.missing |= {key: reason for key, reason in own.missing.items() if key != "alone"}
    else:
        found.miss(_CARDS_KEYS, f"a profile has them from cuda:0 on, and these are {','.join(map(str, devices))}")
    return alone, all(reaches(one, other) for one, other in pairwise([*devices, devices[0]]))


def measure_machine(
    device: str = "auto", *, quick: bool = False, full: bool = False,
    on_progress: OnProgress = lambda stage, done, steps: None,
) -> MachineReport:  # fmt: skip
    """Measure the machine: half a minute, or about ten seconds with `quick`.

    Args:
        device: auto (all cards of the first one's kind), cuda, cuda:N or cpu, or several GPUs such as `cuda:0,cuda:1`,
            of one kind.
        quick: Measure less.
        full: Lock nearly all free memory to find the limit.
        on_progress: Called with (stage, done steps, steps).

    Raises:
        DeviceError: The asked device is not there or cannot be used.
        OptionError: `full` on a machine without a GPU, or a device that is named twice.
    """
    started_s, host = time.perf_counter(), read_host_info()
    devices, why_none = _choose_devices(device)
    on_gpu = devices[0].type == "cuda"
    why = f"--full tries how much memory can be page-locked, which needs a GPU ({why_none}): drop it"
    require(on_gpu or not full, why)
    found, gpu = Findings(on_progress), None
    nbytes, budget_s = bench.sample_bytes(host, _HOST_BYTES), 0.15 if quick else 1.0
    found.take("host memory", "host_gbps", bench.measure_host_gbps, nbytes, host.cores, budget_s=budget_s)
    found.figures["gpus"] = len(devices) if on_gpu else 0
    if on_gpu:
        with current_device(devices[0]):
            gpu = _measure_gpus(found, devices, host, quick=quick)
            pinnable = bench.try_pinnable_bytes if full else partial(bench.estimate_pinnable_bytes, wanted_bytes=GIB)
            found.take("pinning", "pinnable_bytes", pinnable, host)
    else:
        found.miss(_GPU_KEYS, why_none)
    driver = f", driver {gpu.nvml.driver}" if gpu is not None and gpu.nvml.driver else ""
    how = "offload-runtime profile" + " --quick" * quick + " --full" * full
    source = f"measured on {date.today()} by {how}, torch {torch.__version__}{driver}"
    profile = MachineProfile("this-machine", source, ram_bytes=host.ram_bytes, **found.figures)
    return MachineReport(profile, host, found.missing, gpu, time.perf_counter() - started_s)


def _choose_devices(name: str) -> tuple[list[torch.device], str]:
    """Return the GPUs to measure; or a CPU, and why there is no GPU.

    Raises:
        OptionError: A device is named twice.
        DeviceError: A GPU was asked for by name and cannot be had, or GPUs are of different kinds.
    """
    names = card_names(name)
    require(len({*names}) == len(names), f"--device {name} names a device twice: name each once")
    if names[0] == "cpu":
        return [resolve_device("cpu")], f"--device {name} leaves the GPU out"
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
    links = _link_advice(report.profile, report.gpu)
    return [*links, *_card_advice(report.profile, report.gpu), *_pinning_advice(report), *_host_advice(report)]


def _link_advice(profile: MachineProfile, gpu: GpuReport) -> Iterator[str]:
    link, alone, at_once_gbps = gpu.nvml.link, gpu.links_alone_gbps, sum(profile.links_at_once_gbps)
    if link is None:
        yield f"whether the slot holds the link back cannot be told: {gpu.nvml.reason}"
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
    if 0 < at_once_gbps < _FAIR_SHARE_AT_ONCE * sum(alone):
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
    host, pinnable_bytes = report.host, report.profile.pinnable_bytes
    if "pinnable_bytes" in report.missing:
        yield report.missing["pinnable_bytes"]
    elif pinnable_bytes is not None and pinnable_bytes == host.locked_limit_bytes:
        yield (
            f"the system refuses to lock more than {format_bytes(pinnable_bytes)}: raise the limit (ulimit -l); "
            "unlocked memory copies several times slower"
        )
    if host.wsl:
        yield (
            f"this is Linux under Windows (WSL2), which locks about half of the {format_bytes(host.ram_bytes)} it has: "
            "give it more memory in .wslconfig, or stream larger models from Linux itself"
        )


def _host_advice(report: MachineReport) -> Iterator[str]:
    host = report.host
    if host.available_bytes < _SMALL_MODEL_BYTES:
        yield (
            f"only {format_bytes(host.available_bytes)} of {format_bytes(host.ram_bytes)} RAM is free, and a 7B model "
            f"in 16 bits takes {format_bytes(_SMALL_MODEL_BYTES)}: close other programs or add memory"
        )
    if not host.huge_pages:
        yield (
            "huge pages are off, without which memory for weights and a KV cache on the host is made and page-locked "
            f"several times slower: echo madvise | sudo tee {HUGE_PAGES}"
        )
