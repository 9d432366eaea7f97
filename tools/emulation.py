"""A smaller machine emulated by this one: its memory is a limit, its link the pace of copies, its tokens are the same.

What computes stays as fast as it is. Gathers of retrieved chunks, which kernels make, are not paced.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil
import torch
from offload_runtime_kernels.pace_link import pace_link, pace_link_reference

from offload_runtime.config import RuntimeConfig
from offload_runtime.errors import DeviceError, OptionError
from offload_runtime.hardware import MachineProfile, load_profile, profile_of_gpu
from offload_runtime.options import require
from offload_runtime.sizes import GB, format_bytes
from offload_runtime.stream.arena import HostArena
from offload_runtime.stream.copy_engine import LinkPace, measure_link_gbps
from offload_runtime.stream.device import current_device, resolve_devices, within
from offload_runtime.stream.queue import make_copy_engine

# The link's peak is measured as so much less at times; pacing is no better than that either.
_LINK_TOLERANCE = 0.02
_PROBE_BYTES = 64 << 20
# A sleeping thread wakes up to a tenth of a millisecond late, and much later on a busy machine.
_HOST_SLACK_NS = 5_000_000


def emulated(
    machine: str | Path | MachineProfile | None, *, device: str = "auto", vram: Any = None,
    profile: str | Path | MachineProfile | None = None, dtype: str = "auto",
) -> dict[str, Any]:  # fmt: skip
    """Return options of `Runtime.load` with which this machine emulates another one, on one GPU if no more are named;
    those that are given, where it is none. A profile of the GPU is looked up for `dtype`, bf16 for `auto`.

    Raises:
        OptionError: The profile says too little of a GPU, or more or fewer devices are named than it has cards.
        BudgetError: More memory is asked for than its cards have.
        DeviceError: This machine has less memory, or a slower link.
    """
    given = {"device": device, "vram": vram, "profile": profile}
    if machine is None:
        return given
    other = load_profile(machine)
    if not other.gpus or other.vram_bytes is None or other.link_gbps is None:
        raise OptionError(
            f"the profile {other.name} cannot be emulated: it needs a GPU with vram_bytes and link_gbps: choose "
            "another with --emulate"
        )
    asked = RuntimeConfig("the target", device=device, vram=vram)
    devices = resolve_devices(asked.devices)
    if device == "auto" or len(devices) == 1:
        devices = list(islice(cycle(devices), other.gpus))
    cards = f"{other.name} has {other.gpus} card{'s' * (other.gpus != 1)}"
    require(len(devices) == other.gpus, f"{cards} and --device {device} names {len(devices)}: name as many")
    # A run on a GPU counts its own context; a reserve that was measured holds one, and what others have. As in a plan
    # a size that is asked for takes the place of what others are taken to have.
    usable_bytes = other.vram_bytes - (other.vram_others_bytes or other.vram_reserved_bytes or 0)
    whose, otherwise = f"of an emulated {other.name}", "emulate a larger card"
    sizes = asked.vram if isinstance(asked.vram, tuple) else [asked.vram] * other.gpus
    there_bytes = [usable_bytes if one is None else other.vram_bytes for one in sizes]
    limits_bytes = tuple(
        within("--vram", one, there, whose, otherwise) for one, there in zip(sizes, there_bytes, strict=True)
    )
    rates_gbps = other.link_gbps, other.link_back_gbps or other.link_gbps
    for one, count in Counter(devices).items():
        _require_memory(other, one, count)
        with current_device(one):
            _require_link(other.name, rates_gbps, one, count)
    figures = None if profile is None else load_profile(profile)
    if figures is None and devices[0].type == "cuda":
        figures = profile_of_gpu(torch.cuda.get_device_name(devices[0]), "bf16" if dtype == "auto" else dtype)
    if figures is not None:
        figures = replace(figures, link_gbps=other.link_gbps, links_at_once_gbps=())
    vram_bytes = limits_bytes if len(limits_bytes) > 1 else limits_bytes[0]
    named = ",".join(map(str, devices))
    return {"device": named, "vram": vram_bytes, "profile": figures, "pace": partial(_paces, rates_gbps)}


def _require_memory(other: MachineProfile, device: torch.device, count: int) -> None:
    """Refuse so many cards of a machine with more memory than `device` has."""
    on_gpu = device.type == "cuda"
    there_bytes = torch.cuda.get_device_properties(device).total_memory if on_gpu else psutil.virtual_memory().total
    whole_bytes = count * (other.vram_bytes or 0)
    if whole_bytes > there_bytes:
        why = f"it has {format_bytes(whole_bytes)} of device memory and {device} has {format_bytes(there_bytes)}"
        raise DeviceError(f"{other.name} cannot be emulated here: {why}: emulate a smaller card")


def _require_link(name: str, rates_gbps: tuple[float, float], device: torch.device, count: int) -> None:
    """Measure the link of a device in both directions and refuse so many cards whose links are faster together. Takes
    64 MiB on the device for a moment, and some 20 ms."""
    for rate_gbps, there_gbps, direction in zip(
        rates_gbps, _measure_link(device), ("to the device", "back to the host"), strict=True
    ):
        if count * rate_gbps > there_gbps * (1 + _LINK_TOLERANCE):
            why = f"its link carries {count * rate_gbps:.3g} GB/s {direction} and that of {device} {there_gbps:.3g}"
            raise DeviceError(f"{name} cannot be emulated here: {why}: emulate a card with a slower link")


def _measure_link(device: torch.device) -> tuple[float, float]:
    """Peak of the link in GB/s to the device and back, as fast as it goes, with large copies."""
    arena = HostArena(_PROBE_BYTES, name="a measurement of the link")
    with closing(arena) as host, closing(make_copy_engine(device)) as engine:
        host.buffer.fill_(1)  # pages that were never touched are all one page of zeros
        gpu = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            host.pin()
            torch.cuda.current_stream(device).synchronize()  # what had this memory before may still be in use
        rates_gbps = measure_link_gbps(engine, gpu, host.buffer), measure_link_gbps(engine, host.buffer, gpu)
    del gpu
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rates_gbps


def _paces(rates_gbps: tuple[float, float], device: torch.device) -> tuple[LinkPace, LinkPace]:
    """What keeps the link to a device and back as slow as another one's."""
    make: Callable[[float], LinkPace] = partial(stream_pace, device=device) if device.type == "cuda" else host_pace
    return make(rates_gbps[0]), make(rates_gbps[1])


def host_pace(gbps: float) -> LinkPace:
    """Pace of a thread that copies: it sleeps.

    Args:
        gbps: What the emulated link carries, GB/s.
    """
    assert gbps > 0
    deadline_ns = 0

    def pace(nbytes: int | torch.Tensor, *, begins: bool = False) -> None:
        nonlocal deadline_ns
        now_ns, duration_ns = time.perf_counter_ns(), 0 if begins else round(int(nbytes) / (gbps * GB) * 1e9)
        deadline_ns = pace_link_reference(deadline_ns, now_ns, duration_ns, slack_ns=_HOST_SLACK_NS)
        if deadline_ns > now_ns:
            time.sleep((deadline_ns - now_ns) / 1e9)

    return pace


def stream_pace(gbps: float, device: torch.device) -> LinkPace:
    """Pace of the current CUDA stream: a kernel of one warp waits by the GPU's clock, the host waits for nothing. It is
    launched as a graph, which the host is through with sooner, unless only the device knows the bytes.

    Args:
        gbps: What the emulated link carries, GB/s.
        device: The GPU.
    """
    assert gbps > 0
    deadline_ns = torch.zeros(1, dtype=torch.int64, device=device)  # on the GPU's clock
    pace_link(deadline_ns, 0)  # compiles
    torch.cuda.current_stream(device).synchronize()  # the copies have a stream of their own
    capturing, graphs = torch.cuda.Stream(device), dict[int, torch.cuda.CUDAGraph]()

    def pace(nbytes: int | torch.Tensor, *, begins: bool = False) -> None:
        if isinstance(nbytes, torch.Tensor):
            pace_link(deadline_ns, nbytes=nbytes, byte_ns=0.0 if begins else 1e9 / (gbps * GB))
            return
        if nbytes not in graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(capturing):
                graph.capture_begin(capture_error_mode="thread_local")
                pace_link(deadline_ns, round(nbytes / (gbps * GB) * 1e9))
                graph.capture_end()
            graphs[nbytes] = graph
        graphs[nbytes].replay()

    return pace
