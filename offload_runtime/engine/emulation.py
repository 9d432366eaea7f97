"""A smaller card played by a larger one: less device memory, and a link that is held to its bandwidth.

What computes stays as fast as it is, but for what waits on the device for a paced copy: matrix products beside one took
9 % longer on an H200. Loading is not paced, nor are reads of host memory that are no copies: the chunks that a middle
level gathers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from offload_runtime.config import format_bytes
from offload_runtime.copy import CopyEngine, make_copy_engine, measure_link_gbps
from offload_runtime.errors import DeviceError, OptionError
from offload_runtime.hardware import MachineProfile, load_profile
from offload_runtime.memory import HostArena
from offload_runtime.plan import RunPlan

# Of the link's peak is measured that much too little at times; pacing is no better than that either.
_LINK_TOLERANCE = 0.02
_PROBE_BYTES = 64 << 20


@dataclass(frozen=True)
class Emulation:
    """What is emulated: `whole_vram_bytes` is all of the card's memory, `vram_bytes` what of it a program can have.

    `link_gbps` is host to device, `link_back_gbps` device to host, in GB/s.
    """

    name: str
    whole_vram_bytes: int
    vram_bytes: int
    link_gbps: float
    link_back_gbps: float

    def limit_bytes(self, asked_bytes: int | None) -> int:
        """The limit of device memory, where `asked_bytes` is one as well."""
        return self.vram_bytes if asked_bytes is None else min(asked_bytes, self.vram_bytes)


def emulation_of(profile: str | Path | MachineProfile) -> Emulation:
    """What to emulate of a machine; a link of unknown speed back is as fast as it is forth.

    Args:
        profile: The name of a profile, its file, or the profile itself.

    Raises:
        ProfileError: There is no such profile; OptionError: it says too little of a GPU.
    """
    found = profile if isinstance(profile, MachineProfile) else load_profile(profile)
    if not found.gpus or found.vram_bytes is None or found.link_gbps is None:
        raise OptionError(
            f"the profile {found.name} cannot be emulated: it needs a GPU with vram_bytes and link_gbps: choose "
            "another with --emulate"
        )
    back_gbps = found.link_gbps if found.link_back_gbps is None else found.link_back_gbps
    # A reserve holds a context, and a run on a GPU counts its own again: it has some 0.8 GB less than the card would.
    usable_bytes = found.vram_bytes - (found.vram_reserved_bytes or 0)
    return Emulation(found.name, found.vram_bytes, usable_bytes, found.link_gbps, back_gbps)


def require_memory(emulation: Emulation, device: torch.device) -> None:
    """Refuse a card with more memory than `device` has.

    Raises:
        DeviceError: It has.
    """
    if device.type == "cuda":
        there_bytes = torch.cuda.get_device_properties(device).total_memory
    else:
        there_bytes = psutil.virtual_memory().total
    if emulation.whole_vram_bytes > there_bytes:
        raise DeviceError(
            f"{emulation.name} cannot be emulated here: it has {format_bytes(emulation.whole_vram_bytes)} of device "
            f"memory and {device} has {format_bytes(there_bytes)}: emulate a smaller card"
        )


def require_link(emulation: Emulation, device: torch.device) -> None:
    """Measure the link of `device` in both directions and refuse a card whose link is faster.

    Takes 64 MiB on the device for a moment, and some 20 ms.

    Raises:
        DeviceError: It is faster.
    """
    there = measure_link_both_ways(device)
    pairs = (emulation.link_gbps, there[0], "to the device"), (emulation.link_back_gbps, there[1], "back to the host")
    for wanted_gbps, there_gbps, direction in pairs:
        if wanted_gbps > there_gbps * (1 + _LINK_TOLERANCE):
            raise DeviceError(
                f"{emulation.name} cannot be emulated here: its link carries {wanted_gbps:.3g} GB/s {direction} and "
                f"that of {device} was measured at {there_gbps:.3g} GB/s: emulate a card with a slower link"
            )


def measure_link_both_ways(device: torch.device, *, nbytes: int = _PROBE_BYTES) -> tuple[float, float]:
    """Peak of the link in GB/s to the device and back, as fast as it goes, with copies of `nbytes` bytes."""
    host = HostArena(nbytes, name="a measurement of the link")
    engine: CopyEngine = make_copy_engine(device)
    try:
        host.buffer.fill_(1)  # pages that were never touched are all one page of zeros
        if device.type == "cuda":
            host.pin()
        gpu = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # what had this memory before may still be in use
        h2d_gbps = measure_link_gbps(engine, gpu, host.buffer[:nbytes])
        d2h_gbps = measure_link_gbps(engine, host.buffer[:nbytes], gpu)
    finally:
        engine.close()
        host.close()
    del gpu
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return h2d_gbps, d2h_gbps


def describe_emulation(emulation: Emulation, plan: RunPlan) -> str:
    """One phrase for the line that says what lives where."""
    unpaced = plan.verifier is not None and plan.target.on_host
    return (
        f"emulating {emulation.name}: link paced to {emulation.link_gbps:g} GB/s, {emulation.link_back_gbps:g} back"
        + (" (but not the gathers of retrieved chunks)" if unpaced else "")
    )
