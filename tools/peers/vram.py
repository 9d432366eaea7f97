"""The device memory that a peer may take."""

from __future__ import annotations

from dataclasses import replace

import psutil
import torch
from common import PeerOptions

from offload_runtime.config import format_bytes
from offload_runtime.errors import BudgetError, DeviceError
from offload_runtime.memory import device_memory_used_by_others


def open_device(options: PeerOptions) -> tuple[PeerOptions, int]:
    """Make the device current and cap torch's allocator so that the process as a whole stays within `vram_bytes`.

    Comes before anything else touches the GPU: afterwards others' memory could not be told from its own, and all that
    is in use would count.

    Returns:
        The options with what other programs hold, and the bytes of VRAM that this one has in use already, those of
        CUDA's context (0 on the CPU).

    Raises:
        DeviceError: There is no such device.
        BudgetError: CUDA's context alone exceeds the cap.
    """
    if options.device.type == "cpu":
        return options, 0
    if options.device.type != "cuda" or not torch.cuda.is_available():
        raise DeviceError(f"{options.device} is not there: run on a machine with a CUDA GPU, or try with --device cpu")
    index, count = options.device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise DeviceError(f"{options.device} is not there: this machine has {count} CUDA devices, numbered from 0")
    others_bytes = device_memory_used_by_others(index) or 0
    torch.cuda.set_device(index)
    torch.cuda.synchronize()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    in_use_bytes = max(0, total_bytes - free_bytes - others_bytes)
    limit_bytes = total_bytes - others_bytes
    if options.vram_bytes is not None:
        limit_bytes = min(options.vram_bytes, limit_bytes)
    if limit_bytes <= in_use_bytes:
        raise BudgetError(
            f"{format_bytes(in_use_bytes)} of VRAM is in use before any weight is loaded, the cap is "
            f"{format_bytes(limit_bytes)}: raise --vram or free the GPU"
        )
    torch.cuda.set_per_process_memory_fraction((limit_bytes - in_use_bytes) / total_bytes)
    return replace(options, others_bytes=others_bytes), in_use_bytes


def free_bytes(options: PeerOptions) -> int:
    """Device memory that this process may still take; on a CPU the free RAM, within the same cap."""
    if options.device.type == "cpu":
        free = psutil.virtual_memory().available
        return free if options.vram_bytes is None else min(free, options.vram_bytes)
    free, total = torch.cuda.mem_get_info(options.device)
    return free if options.vram_bytes is None else free - max(0, total - options.others_bytes - options.vram_bytes)
