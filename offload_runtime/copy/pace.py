"""The pace of an emulated link: how long copies have to take at the least, on whatever runs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from offload_runtime_kernels.pace_link import pace_link, pace_link_reference

from offload_runtime.config import GB

# A sleeping thread wakes up to a tenth of a millisecond late, and much later on a busy machine.
_HOST_SLACK_NS = 5_000_000


class LinkPace(Protocol):
    """Makes the copies of one queue as slow as a slower link would. Called where the copies run, in their order."""

    def begin(self) -> None:
        """A copy begins, after whatever it waited for."""

    def carried(self, nbytes: int) -> None:
        """`nbytes` have been copied since the last call: go on when the slower link would be done with them."""


class HostPace:
    """Pace of a thread that copies: it sleeps.

    Args:
        gbps: Of the emulated link, GB/s.
        clock_ns: Nanoseconds of a clock.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self, gbps: float, *, clock_ns: Callable[[], int] = time.perf_counter_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        assert gbps > 0
        self._ns_per_byte = 1e9 / (gbps * GB)
        self._clock_ns = clock_ns
        self._sleep = sleep
        self._deadline_ns = 0

    def begin(self) -> None:
        self._wait(0)

    def carried(self, nbytes: int) -> None:
        self._wait(nbytes)

    def _wait(self, nbytes: int) -> None:
        now_ns = self._clock_ns()
        duration_ns = round(nbytes * self._ns_per_byte)
        self._deadline_ns = pace_link_reference(self._deadline_ns, now_ns, duration_ns, slack_ns=_HOST_SLACK_NS)
        if self._deadline_ns > now_ns:
            self._sleep((self._deadline_ns - now_ns) / 1e9)


class StreamPace:
    """Pace of the current CUDA stream: a kernel of one warp waits by the GPU's clock, the host waits for nothing.

    Args:
        gbps: Of the emulated link, GB/s.
        device: The GPU.
    """

    def __init__(self, gbps: float, device: torch.device) -> None:
        assert gbps > 0
        self._ns_per_byte = 1e9 / (gbps * GB)
        self._deadline_ns = torch.zeros(1, dtype=torch.int64, device=device)  # on the GPU's clock
        pace_link(self._deadline_ns, 0)  # compiles
        torch.cuda.current_stream(device).synchronize()  # the copies have a stream of their own

    def begin(self) -> None:
        pace_link(self._deadline_ns, 0)

    def carried(self, nbytes: int) -> None:
        pace_link(self._deadline_ns, round(nbytes * self._ns_per_byte))


def make_link_pace(device: torch.device, gbps: float) -> LinkPace:
    """The pace that fits what copies to and from `device`."""
    return StreamPace(gbps, device) if device.type == "cuda" else HostPace(gbps)
