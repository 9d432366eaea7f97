"""The copy queue that fits a device, and how fast its link is."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload_runtime.copy_engine.on_cpu import ThreadCopyEngine
from offload_runtime.copy_engine.on_cuda import CudaCopyEngine
from offload_runtime.copy_engine.protocol import CopyEngine
from offload_runtime.link_pace import current_link_pace
from offload_runtime.tracing import current_copy_log


def make_copy_engine(device: torch.device, *, before_copy: Callable[[], None] | None = None) -> CopyEngine:
    """The copy engine that fits `device`; within `paced_link` it emulates a slower link, within `traced_copies` it is
    part of a trace."""
    pace, log = current_link_pace(device), current_copy_log()
    if device.type == "cuda":
        return CudaCopyEngine(device, before_copy=before_copy, pace=pace, log=log)
    return ThreadCopyEngine(before_copy=before_copy, pace=pace, log=log)


def measure_link_gbps(engine: CopyEngine, dst: torch.Tensor, src: torch.Tensor, *, repeats: int = 8) -> float:
    """Peak bandwidth of back-to-back copies of `src` into `dst`, in GB/s; what is on the host is pinned on CUDA.

    Waits for the engine to drain; uses the same calls as streaming does, so streaming cannot beat it.
    """
    free, ready = engine.new_event(), engine.new_event()
    engine.enqueue(dst, src, free=free, ready=ready)  # the first touch of a buffer is slower
    engine.drain()
    before_s = engine.copy_seconds()
    for _ in range(repeats):
        engine.enqueue(dst, src, free=free, ready=ready)
    engine.drain()
    return repeats * src.nbytes / (engine.copy_seconds() - before_s) / 1e9
