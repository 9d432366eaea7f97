"""What is wrong or missing on a measured machine and matters to offloading, each with its way out."""

from __future__ import annotations

from offload_runtime.config import GB, format_bytes
from offload_runtime.machine_profile.report import GpuReport, MachineReport

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
