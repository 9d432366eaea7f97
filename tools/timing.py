"""Times of kernels and of answers, and what the device does at best, by which they are judged: copies, matrix products,
the link."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import harness  # noqa: F401 (finds the package, installed or not)
import torch

from offload_runtime.engine import EndEvent, ErrorEvent, GenerationResult, Scheduler, TokenEvent
from offload_runtime.params import GenerationParams
from offload_runtime.sizes import GB

# Large enough for a GPU, and for a CPU not slow.
_COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
_PRODUCT_ROWS = {"cuda": 8192, "cpu": 512}


# Who a `TokenEvent` says has proposed the token that ends a pass: nobody, it is the target's own.
_TARGET = "target"


@dataclass(frozen=True)
class Answer:
    """One answer, pass by pass.

    Attributes:
        result: The answer and its figures.
        asked_s: When it was asked for.
        stamps_s: When each pass's tokens were there; the first one reads the prompt.
        counts: Tokens of each pass.
    """

    result: GenerationResult
    asked_s: float
    stamps_s: tuple[float, ...]
    counts: tuple[int, ...]


def timed_answer(
    scheduler: Scheduler, tokens: Sequence[int], params: GenerationParams, *, speculate: bool = True
) -> Answer:
    """Ask as a server does, and wait for the end. What a slot holds of the prompt already is not read again."""
    events = queue.SimpleQueue[tuple[float, TokenEvent | EndEvent | ErrorEvent]]()
    asked_s = time.perf_counter()
    scheduler.submit(
        tokens, params, on_event=lambda event: events.put((time.perf_counter(), event)), speculate=speculate
    )
    stamps_s, counts = list[float](), [0]
    while True:
        now_s, event = events.get()
        if isinstance(event, ErrorEvent):
            raise event.error
        if isinstance(event, EndEvent):
            return Answer(event.result, asked_s, tuple(stamps_s), tuple(count for count in counts if count))
        if not counts[-1]:
            stamps_s.append(now_s)
        stamps_s[-1] = now_s
        counts[-1] += 1
        if event.source == _TARGET:
            counts.append(0)


def graph_times_ms(run: Callable[[], object], *, calls: int, repeats: int) -> list[float]:
    """Milliseconds of one `run`, `repeats` times: `calls` of them in a CUDA graph, so that launching costs nothing.

    That is also how a draft step runs it. The first call is outside the graph and compiles the kernels.
    """
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return [time_ms / calls for time_ms in event_times_ms(graph.replay, repeats=repeats)]


def event_times_ms(run: Callable[[], object], *, repeats: int, warmups: int = 1) -> list[float]:
    """Milliseconds of one `run`, `repeats` times, launching included; without a GPU by the host's clock."""
    for _ in range(warmups):
        run()
    times_ms = []
    for _ in range(repeats):
        if not torch.cuda.is_available():
            times_ms.append(1e3 * best_time_s(run, torch.device("cpu"), repeats=1))
            continue
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times_ms.append(start.elapsed_time(stop))
    return times_ms


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU is done with what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def best_time_s(action: Callable[[], object], device: torch.device, *, repeats: int, calls: int = 1) -> float:
    """Seconds of one `action`: the shortest of `repeats` timings of `calls` of them; an untimed call comes first."""
    action()
    synchronize(device)
    best_s = math.inf
    for _ in range(repeats):
        start_s = time.perf_counter()
        for _ in range(calls):
            action()
        synchronize(device)
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s / calls


def measure_link_gbps(device: torch.device, *, size_bytes: int = 256 << 20, repeats: int = 5) -> float | None:
    """Peak of a pinned host-to-device memcpy in GB/s, the bound of everything streamed; None without a CUDA device.

    The best of a few: a peak is wanted, and other tenants of the host only ever slow a copy down. The pinned buffer is
    filled first, because a page that was never touched maps to the kernel's one zero page.
    """
    if device.type != "cuda":
        return None
    source_pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).fill_(1)  # [size_bytes] uint8, pinned
    target_gpu = torch.empty(size_bytes, dtype=torch.uint8, device=device)  # [size_bytes] uint8, on the GPU
    seconds = best_time_s(lambda: target_gpu.copy_(source_pinned, non_blocking=True), device, repeats=repeats)
    return size_bytes / seconds / GB


def measure_copy_gbps(device: torch.device) -> float:
    """A copy within the device's memory in GB/s, bytes read and written both counted: the memory's practical peak."""
    source = torch.ones(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_time_s(lambda: target.copy_(source), device, repeats=10, calls=4) / GB


def measure_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large matrix product in `dtype`."""
    rows = _PRODUCT_ROWS[device.type]
    matrix = torch.randn(rows, rows, device=device).to(dtype)
    return 2 * rows**3 / best_time_s(lambda: matrix @ matrix, device, repeats=10, calls=2)
