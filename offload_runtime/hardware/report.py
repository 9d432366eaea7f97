"""What was asked of a measurement, what came of it, and what to do about a machine that is slower than it could be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload_runtime.config import GB, format_bytes
from offload_runtime.errors import BudgetError, OptionError
from offload_runtime.hardware.gpu_bench import NvmlAnswer
from offload_runtime.hardware.host_bench import CannotMeasureError
from offload_runtime.hardware.host_info import HostInfo, printable
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


@dataclass
class Findings:
    """Figures, and reasons for those that there are not, while they come in."""

    figures: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def take(self, keys: str | tuple[str, ...], measure: Callable[[], Any]) -> None:
        """Enter what `measure` returns, one figure for each of several keys; or why there is nothing."""
        names = (keys,) if isinstance(keys, str) else keys
        try:
            value = measure()
        except (
            CannotMeasureError,
            BudgetError,
            OSError,
            RuntimeError,
        ) as error:  # all that torch and CUDA raise are RuntimeErrors
            self.miss(names, str(error).strip() or type(error).__name__)
            return
        for name, figure in zip(names, (value,) if isinstance(keys, str) else value, strict=True):
            self.figures[name] = _rounded(figure)

    def miss(self, keys: Iterable[str], reason: str) -> None:
        """Enter why there is nothing: the first line of `reason`."""
        self.missing.update(dict.fromkeys(keys, printable(reason.strip().partition("\n")[0])))


def _rounded(figure: Any) -> Any:
    """Four digits of a rate: more are noise."""
    if isinstance(figure, float):
        return float(f"{figure:.4g}")
    if isinstance(figure, Mapping):
        return {key: _rounded(value) for key, value in figure.items()}
    return figure


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
        gpu_lines = [
            f"no GPU was measured ({report.missing['gpu_name']}): models run on the CPU, where streaming gains nothing"
        ]
    else:
        gpu_lines = [*_link_advice(report, report.gpu), *_card_advice(report, report.gpu), *_pinning_advice(report)]
    return [*gpu_lines, *_host_advice(report)]


def _link_advice(report: MachineReport, gpu: GpuReport) -> list[str]:
    link, lines = gpu.nvml.link, []
    if link is None:
        return [f"whether the slot holds the link back cannot be told: {gpu.nvml.reason}"]
    if link.width < link.width_max:
        lines.append(
            f"the card runs at x{link.width} and could do x{link.width_max}: move it to another slot, the one nearest "
            "to the processor, or take out what shares its lanes; streaming is as fast as this link"
        )
    if link.generation < link.generation_max:
        lines.append(
            f"the link runs at PCIe {link.generation} while it copies and could do PCIe {link.generation_max}: look at "
            "the slot's setting in the BIOS and at riser cables"
        )
    measured_gbps = report.profile.link_gbps
    if measured_gbps is not None and measured_gbps < _FAIR_LINK_SHARE * link.peak_gbps:
        lines.append(
            f"copies to the card reach {measured_gbps:.1f} of the link's {link.peak_gbps:.1f} GB/s: look for other "
            "load on host memory, a single memory channel, or a card at another processor than this program's"
        )
    return lines


def _card_advice(report: MachineReport, gpu: GpuReport) -> list[str]:
    lines = []
    taken_bytes = (report.profile.vram_bytes or 0) - gpu.free_bytes
    if taken_bytes > _FAIR_TAKEN_VRAM_BYTES:
        lines.append(
            f"{format_bytes(taken_bytes)} of {format_bytes(report.profile.vram_bytes or 0)} VRAM was taken before we "
            "began: close other programs that use the card"
        )
    if gpu.capability < _FIRST_WITH_BF16:
        version = ".".join(map(str, gpu.capability))
        lines.append(f"the card (compute capability {version}) has no bf16 matrix units: use --dtype fp16")
    others = sorted({name for name in gpu.names if name != report.profile.gpu_name})
    if others:
        lines.append(
            f"other cards are not part of this profile: {', '.join(others)}; choose a card with CUDA_VISIBLE_DEVICES"
        )
    return lines


def _pinning_advice(report: MachineReport) -> list[str]:
    host, lines = report.host, []
    if "pin_gbps" in report.missing:
        limit = "" if host.locked_limit_bytes is None else f"; ulimit -l is {format_bytes(host.locked_limit_bytes)}"
        lines.append(
            f"{report.missing['pin_gbps']}{limit}: raise the limit; unlocked memory copies several times slower"
        )
    if host.wsl:
        lines.append(
            f"this is Linux under Windows (WSL2), which locks about half of the {format_bytes(host.ram_bytes)} it has: "
            "give it more memory in .wslconfig, or stream larger models from Linux itself"
        )
    return lines


def _host_advice(report: MachineReport) -> list[str]:
    host, lines = report.host, []
    if host.available_bytes < _SMALL_MODEL_BYTES:
        lines.append(
            f"only {format_bytes(host.available_bytes)} of {format_bytes(host.ram_bytes)} RAM is free, and a 7B model "
            f"in 16 bits takes {format_bytes(_SMALL_MODEL_BYTES)}: close other programs or add memory"
        )
    disk_gbps = report.profile.disk_gbps
    if disk_gbps is not None and disk_gbps < _SLOW_DISK_GBPS:
        seconds = _SMALL_MODEL_BYTES / GB / disk_gbps
        lines.append(
            f"the disk reads {disk_gbps:.2f} GB/s, so that a 7B model in 16 bits loads in {seconds:.0f} s: keep models "
            "on a faster one"
        )
    return lines
