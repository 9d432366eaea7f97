"""What is known of a machine: the figures of a profile, of this GPU's own, or of a common card in their place."""

from __future__ import annotations

from dataclasses import replace

import torch

from offload_runtime.copy import MOST_THREADS
from offload_runtime.engine.costs import DTYPE_NAMES
from offload_runtime.errors import OptionError, ProfileError
from offload_runtime.hardware import MachineProfile, list_profiles, load_profile
from offload_runtime.hardware.store import shipped_directory
from offload_runtime.memory import LAZY_MODULE_BYTES, TYPICAL_CONTEXT_BYTES
from offload_runtime.planner import DEFAULT_GRAPH_LAUNCH_US, DEFAULT_STAGING_GBPS, MachineFigures

# What is planned for where nothing else is known.
COMMON_PROFILE = "rtx4090"


def machine_figures(profile: MachineProfile) -> MachineFigures:
    """What the planner needs of a profile.

    Raises:
        OptionError: The profile has no GPU, or leaves out a figure that cannot be done without.
    """
    if not profile.gpus or profile.vram_bytes is None:
        raise OptionError(f"the profile {profile.name} has no GPU to plan for: choose another with --profile")
    missing = [name for name in ("link_gbps", "hbm_gbps") if getattr(profile, name) is None]
    if missing:
        raise OptionError(f"the profile {profile.name} does not know {', '.join(missing)}: add it, or measure again")
    assert profile.link_gbps is not None and profile.hbm_gbps is not None
    reserved_bytes = profile.vram_reserved_bytes
    launch_us = DEFAULT_GRAPH_LAUNCH_US if profile.graph_launch_us is None else profile.graph_launch_us
    return MachineFigures(
        profile.name, profile.vram_bytes,
        TYPICAL_CONTEXT_BYTES + LAZY_MODULE_BYTES if reserved_bytes is None else reserved_bytes,
        profile.link_gbps, profile.hbm_gbps, profile.ram_bytes, profile.tflops, profile.pinnable_bytes,
        launch_us, profile.gpus, _staging_gbps(profile),
    )  # fmt: skip


def _staging_gbps(profile: MachineProfile) -> float:
    """Copying within host memory while the link is busy: half of what threads read then, since it writes as much."""
    read_gbps = profile.host_gbps_while_link_busy
    if read_gbps is None and profile.host_gbps is not None and profile.link_gbps is not None:
        read_gbps = max(profile.host_gbps - profile.link_gbps, profile.host_gbps / 4)
    if read_gbps is None:
        return DEFAULT_STAGING_GBPS
    of_threads = [gbps for threads, gbps in profile.host_by_threads.items() if threads <= MOST_THREADS]
    return min([read_gbps, max(of_threads, default=read_gbps)]) / 2


def known_figures(profile: MachineProfile | None, device: torch.device, dtype: torch.dtype) -> MachineFigures | None:
    """Figures of the machine to predict with: of the profile given, or of one that knows this GPU.

    The user's own profiles come before those that are shipped. Nothing is known of a CPU unless it is given.

    Args:
        profile: What to go by; None looks for one.
        device: Where the target runs.
        dtype: Of the target, in which the machine's arithmetic has to be known.

    Raises:
        OptionError: The profile leaves out what is needed.
    """
    if profile is not None:
        return _figures(profile, dtype)
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for entry in sorted(list_profiles(), key=lambda entry: entry.shipped):
        try:
            found = load_profile(entry.path)
            if found.gpu_name == name:
                return _figures(found, dtype)
        except (ProfileError, OptionError):  # nobody asked for this one
            continue
    return None


def common_figures() -> MachineFigures:
    """Figures to choose by where nothing is known of the machine; their name says so."""
    figures = machine_figures(load_profile(shipped_directory() / f"{COMMON_PROFILE}.toml"))
    return replace(figures, name=f"{COMMON_PROFILE}, as nothing is known of this machine")


def _figures(profile: MachineProfile, dtype: torch.dtype) -> MachineFigures:
    figures = machine_figures(profile)
    figures.flops(DTYPE_NAMES[str(dtype)])
    return figures
