"""Which machines a device can emulate: those with less memory and a slower link. A run then has that memory as a limit,
and copy queues that keep the pace of that link (copy/queue.py)."""

from __future__ import annotations

from contextlib import closing

import psutil
import torch

from offload_runtime.copy import make_copy_engine, measure_link_gbps
from offload_runtime.errors import DeviceError
from offload_runtime.hardware import Emulation
from offload_runtime.memory import HostArena
from offload_runtime.sizes import format_bytes

# The link's peak is measured as so much less at times; pacing is no better than that either.
_LINK_TOLERANCE = 0.02
_PROBE_BYTES = 64 << 20


def require_memory(emulation: Emulation, device: torch.device, count: int = 1) -> None:
    """Refuse `count` cards of a machine with more memory than `device` has. Raises `DeviceError`."""
    on_gpu = device.type == "cuda"
    there_bytes = torch.cuda.get_device_properties(device).total_memory if on_gpu else psutil.virtual_memory().total
    if count * emulation.whole_vram_bytes > there_bytes:
        sizes = format_bytes(count * emulation.whole_vram_bytes), format_bytes(there_bytes)
        why = f"it has {sizes[0]} of device memory and {device} has {sizes[1]}"
        raise DeviceError(f"{emulation.name} cannot be emulated here: {why}: emulate a smaller card")


def require_link(emulation: Emulation, device: torch.device, count: int = 1) -> None:
    """Measure the link of `device` in both directions and refuse `count` cards whose links are faster together.

    Takes 64 MiB on the device for a moment, and some 20 ms. Raises `DeviceError`.
    """
    wanted = (count * emulation.link_gbps, count * emulation.link_back_gbps)
    directions = zip(wanted, _measure_link(device), ("to the device", "back to the host"), strict=True)
    for wanted_gbps, there_gbps, direction in directions:
        if wanted_gbps > there_gbps * (1 + _LINK_TOLERANCE):
            why = f"its link carries {wanted_gbps:.3g} GB/s {direction} and that of {device} {there_gbps:.3g}"
            raise DeviceError(f"{emulation.name} cannot be emulated here: {why}: emulate a card with a slower link")


def _measure_link(device: torch.device) -> tuple[float, float]:
    """Peak of the link in GB/s to the device and back, as fast as it goes, with large copies."""
    arena = HostArena(_PROBE_BYTES, name="a measurement of the link")
    with closing(arena) as host, closing(make_copy_engine(device)) as engine:
        host.buffer.fill_(1)  # pages that were never touched are all one page of zeros
        gpu = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            host.pin()
            torch.cuda.current_stream(device).synchronize()  # what had this memory before may still be in use
        h2d_gbps = measure_link_gbps(engine, gpu, host.buffer)
        d2h_gbps = measure_link_gbps(engine, host.buffer, gpu)
    del gpu
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return h2d_gbps, d2h_gbps
