"""Times of kernels and of answers, and what a link carries at best, by which they are judged."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import harness  # noqa: F401 (finds the package, installed or not)
import torch

from offload_runtime.engine import EndEvent, ErrorEvent, GenerationResult, Scheduler, TokenEvent
from offload_runtime.hardware.bench import LinkBench, measure_hbm_gbps, measure_links_gbps, spent
from offload_runtime.params import GenerationParams

BUDGET_S = 0.5  # of what measures a device
_COPY_BYTES = 2 << 30
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


def event_times_ms(run: Callable[[], object], *, repeats: int) -> list[float]:
    """Milliseconds of one `run` on the GPU, `repeats` times, launching included; an untimed one comes first."""
    run()
    times_ms = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times_ms.append(start.elapsed_time(stop))
    return times_ms


def measure_link_gbps(device: torch.device) -> float | None:
    """What copies to a GPU carry at best in GB/s, the bound of everything streamed; None without a CUDA device."""
    return measure_links_gbps([LinkBench(device)], spent(BUDGET_S))[0] if device.type == "cuda" else None


def measure_copy_gbps(device: torch.device) -> float:
    """What copies within a GPU's memory carry at best in GB/s, bytes read and written both counted."""
    return measure_hbm_gbps(device, _COPY_BYTES, budget_s=BUDGET_S)
