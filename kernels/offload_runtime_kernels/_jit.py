"""The one place that imports Triton, so that installs without it (CPU-only, Windows) can import every kernel module.

Without Triton `jit` leaves functions as they are and `tl` knows `constexpr` only: enough for the module-level
definitions of a kernel file. The `*_triton` wrappers call `require_triton` before they launch.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    triton_available = True
except ImportError:
    triton_available = False


class _Language:
    """Stands in for `triton.language`: `tl.constexpr` works as an annotation and as a wrapper of a constant."""

    @staticmethod
    def constexpr(value: Any) -> Any:
        return value


def _identity_jit(fn: Callable[..., Any] | None = None, *, do_not_specialize: tuple[str, ...] = ()) -> Any:
    """Stand in for `triton.jit`, bare (`@jit`) or called (`@jit(do_not_specialize=...)`)."""
    return fn if fn is not None else lambda decorated: decorated


if not triton_available:
    triton, tl, gdc_launch_dependents, gdc_wait = None, _Language(), None, None

# What a field of a constexpr is wrapped in where it is passed on: Triton before 3.7 takes a bare tuple apart, and the
# interpreter does not know constants in constants.
constant: Any = tl.constexpr if triton_available and not triton.knobs.runtime.interpret else lambda value: value
jit: Any = triton.jit if triton_available else _identity_jit


def require_triton(op: str) -> None:
    """Raise `RuntimeError` with the way out when `op` needs Triton and it is not installed."""
    if not triton_available:
        raise RuntimeError(f"{op} on a GPU needs triton, which is not installed: pip install triton, or run on the CPU")


# Shared memory of a program on data centre cards, from the A100 on; consumer cards have 99 KB.
_ROOMY_BYTES = 160 << 10


@cache
def is_roomy(device: torch.device) -> bool:
    """Whether programs on this device may take more shared memory than a consumer card has."""
    if device.type != "cuda":
        return False
    return bool(torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= _ROOMY_BYTES)  # type: ignore[attr-defined]


# Programmatic dependent launch, from Hopper on.
_OVERLAPPING_CAPABILITY = (9, 0)


@cache
def _overlaps(device: torch.device) -> bool:
    """Whether a kernel can be launched while the one before it ends."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _OVERLAPPING_CAPABILITY


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Launch options for a kernel that is set up while the one before it on its stream ends, where the GPU can.

    Such a kernel has a `tl.constexpr` OVERLAP. With it, it calls `gdc_wait` before it touches anything that another
    kernel writes or reads, which waits until all before it have ended, and `gdc_launch_dependents` once it needs no
    more of the memory's bandwidth: earlier, the next one's programs would take places of its own.
    """
    return {"OVERLAP": True, "launch_pdl": True} if _overlaps(device) else {"OVERLAP": False}
