"""The GPU as NVIDIA's management library (NVML) describes it. That it is missing or refuses costs a reason, no more."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offload_runtime.machine_profile.schema import PCIE_WIDTHS

# GB/s of one lane by PCIe generation, after line coding and before packet headers.
_LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563, 7: 15.125}


@dataclass(frozen=True)
class PcieLink:
    """Generation and lanes of a card's link: now, and the most that card and system could do."""

    generation: int
    width: int
    generation_max: int
    width_max: int

    @property
    def peak_gbps(self) -> float:
        """What the link carries each way before packet headers, in GB/s."""
        return _LANE_GBPS[self.generation] * self.width


@dataclass(frozen=True)
class NvmlAnswer:
    """What NVML told: the driver's version and the link, or `reason`, why it is None."""

    driver: str | None
    link: PcieLink | None
    reason: str


def load_nvml() -> Any:
    """The binding of NVML; raises what importing it raises."""
    return importlib.import_module("pynvml")


def read_nvml(uuid: str, load: Callable[[], Any] = load_nvml) -> NvmlAnswer:
    """Ask NVML about one card.

    An idle link drops to a lower generation: ask while copies run.

    Args:
        uuid: Of the card as torch gives it: torch counts the cards of CUDA_VISIBLE_DEVICES, NVML all of them.
        load: Gives the module `pynvml`, or what stands for it.
    """
    try:
        nvml = load()
        nvml.nvmlInit()
    except Exception as error:  # without a driver the library itself is missing; its errors have many types
        return NvmlAnswer(None, None, f"NVML is not available: {error}")
    driver: str | None = None
    try:
        driver = str(nvml.nvmlSystemGetDriverVersion())
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        link = PcieLink(
            generation=int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
            width=int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
            generation_max=int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
            width_max=int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        )
    except Exception as error:  # virtual machines and WSL2 answer some queries with "not supported"
        return NvmlAnswer(driver, None, f"NVML refuses a query: {error}")
    finally:
        nvml.nvmlShutdown()
    if link.generation not in _LANE_GBPS or link.width not in PCIE_WIDTHS:  # some virtual machines have no real link
        return NvmlAnswer(driver, None, f"NVML tells of a link of generation {link.generation}, x{link.width}")
    return NvmlAnswer(driver, link, "")
