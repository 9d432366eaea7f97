"""What was asked of a measurement and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload_runtime.errors import OptionError
from offload_runtime.machine_profile.gpu_info import NvmlAnswer
from offload_runtime.machine_profile.host_info import HostInfo, printable
from offload_runtime.machine_profile.schema import MachineProfile
from offload_runtime.machine_profile.timing import CannotMeasureError


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
        except (CannotMeasureError, OSError, RuntimeError) as error:  # all that torch and CUDA raise are RuntimeErrors
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
