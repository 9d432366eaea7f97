"""What was asked of a measurement, what came of it, and what to do about a machine that is slower than it could be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from offload_runtime.config import GB, format_bytes
from offload_runtime.errors import OptionError
from offload_runtime.hardware.gpu_bench import NvmlAnswer
from offload_runtime.hardware.host_bench import HostInfo
from offload_runtime.hardware.profile import MachineProfile


@dataclass(frozen=True)
class MeasureOptions:
    """What the user asked for.

    `device`: auto, cuda, cuda:N or cpu. `full` locks nearly all free memory to find the limit. `disk_file` is what
    the disk is read by; without it a temporary file, and nothing when `quick`.
    """

    device: str = "auto"
    quick: bool = False
    full: bool = False
    disk_file: Path | None = None

    def __post_init__(self) -> None:
        if self.disk_file is not None and not self.disk_file.is_file():
            raise OptionError(
                f"--disk-file {self.disk_file} is not a file: name one of 16 MiB or more, such as a model"
            )


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
class MachineReport:
    """A measured machine; `missing` gives by key of the profile the reason why there is no figure."""

    profile: MachineProfile
    host: HostInfo
    missing: Mapping[str, str]
    gpu: GpuReport | None
    seconds: float


# Of the link's peak before packet headers: 88 % on an H200 (PCIe 5), 79 % on an RTX 4090 (PCIe 4).
_FAIR_LINK_SHARE = 0.65
# A CUDA context with its libraries takes 0.6 GB; a desktop as much again.
_FAIR_TAKEN_VRAM_BYTES = 1_500_000_000
# A 7B model in 16 bits, which streams from there.
_SMALL_MODEL_BYTES = 13_500_000_000
_SLOW_DISK_GBPS = 1.0
_FIRST_WITH_BF16 = (8, 0)


def advise(report: MachineReport) -> list[str]:
    """What matters, one line each, the gravest first; empty when nothing is wrong."""
    if report.gpu is None:
        no_gpu = f"no GPU was measured ({report.missing['gpu_name']})"
        return [f"{no_gpu}: models run on the CPU, where streaming gains nothing", *_host_advice(report)]
    return [
        *_link_advice(report.profile, report.gpu.nvml), *_card_advice(report.profile, report.gpu),
        *_pinning_advice(report), *_host_advice(report),
    ]  # fmt: skip


def _link_advice(profile: MachineProfile, nvml: NvmlAnswer) -> Iterator[str]:
    link = nvml.link
    if link is None:
        yield f"whether the slot holds the link back cannot be told: {nvml.reason}"
        return
    if link.width < link.width_max:
        yield (
            f"the card runs at x{link.width} and could do x{link.width_max}: move it to another slot, the one nearest "
            "to the processor, or take out what shares its lanes; streaming is as fast as this link"
        )
    if link.generation < link.generation_max:
        yield (
            f"the link runs at PCIe {link.generation} while it copies and could do PCIe {link.generation_max}: look at "
            "the slot's setting in the BIOS and at riser cables"
        )
    if profile.link_gbps is not None and profile.link_gbps < _FAIR_LINK_SHARE * link.peak_gbps:
        yield (
            f"copies to the card reach {profile.link_gbps:.1f} of the link's {link.peak_gbps:.1f} GB/s: look for other "
            "load on host memory, a single memory channel, or a card at another processor than this program's"
        )


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
    if disk_gbps is not None and disk_gbps < _SLOW_DISK_GBPS:
        seconds = _SMALL_MODEL_BYTES / GB / disk_gbps
        yield (
            f"the disk reads {disk_gbps:.2f} GB/s, so that a 7B model in 16 bits loads in {seconds:.0f} s: keep models "
            "on a faster one"
        )
