"""This machine: what the system says of its processor and memory, and NVIDIA's management library of a GPU's link; and
the measurements behind a profile: links, memories, products, launches, transfers between cards, and page-locking.

Of one GPU the current device is measured, which callers set.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from offload_runtime_kernels.coded_bf16 import CODED, CodedRow
from offload_runtime_kernels.coded_linear import coded_linear_triton
from offload_runtime_kernels.gguf_blocks import FORMATS
from offload_runtime_kernels.gguf_linear import gguf_linear_triton
from offload_runtime_kernels.scaled_linear import scaled_linear_triton
from offload_runtime_kernels.scaled_rows import ScaledFormat, ScaledRows

from offload_runtime.sizes import GB, GIB, format_bytes
from offload_runtime.stream.arena import HostArena, Registrar, host_memory
from offload_runtime.stream.device import Card, TransferBuffers, current_device, open_nvml, transfer
from offload_runtime.stream.queue import make_copy_engine

MIB = 1 << 20
# A copy is as large as a layer, more than any cache holds; so many are queued at once.
_LINK_BYTES, _QUEUED = 256 * MIB, 3
# The card's clocks, and with them the link, need a moment of work to rise.
_WAKING_S = 0.3
_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Blocks of common files, numbers of common quantised checkpoints (in groups of 128 columns, in rows, in squares), and
# [M, K] of the matrices of a layer of an 8B Llama: small ones are slower than large ones.
_MEASURED_BLOCKS = ("Q4_0", "Q8_0", "Q4_K", "Q6_K")
_MEASURED_NUMBERS = {
    "INT4": ScaledFormat("uint4", 1, 128, torch.float16, 8), "INT8": ScaledFormat("int8", 1, 1 << 16, torch.bfloat16),
    "FP8": ScaledFormat("FP8", 128, 128, torch.float32),
}  # fmt: skip
_LAYER_MATRICES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
# 112 to 334 MB each, so that no second-level cache (72 MB of an RTX 4090) has what is read again.
_LAYERS = 4
# Rows of one token and of a piece of a prompt. Transfers are enqueued while their card spins, some 25 ms: timed is what
# cards take, not what Python does to launch it.
_FEW_BYTES, _MANY_BYTES, _TRANSFERS, _SPIN_CYCLES = 8 << 10, 8 * MIB, 16, 50_000_000
_GRAPH_KERNELS = 1000
# Stays with the system and with other programs: an eighth of the memory, at most 8 GiB.
_KEPT_SHARE, _MOST_KEPT_BYTES = 8, 8 * GIB


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# GB/s of one lane by PCIe generation, after line coding and before packet headers.
_LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563, 7: 15.125}


@dataclass(frozen=True)
class HostInfo:
    """Processor and memory, in bytes, as of when the system was asked.

    `cores` are the logical ones that this process may use. `ram_bytes` and `available_bytes` are the container's where
    it has less than the machine; `locked_limit_bytes` is RLIMIT_MEMLOCK (None: unlimited, or not known here).
    """

    cpu_name: str
    cores: int
    ram_bytes: int
    available_bytes: int
    locked_limit_bytes: int | None
    wsl: bool
    huge_pages: bool = True  # the system gives them to who asks


def read_host_info() -> HostInfo:
    """Ask the system; Linux alone tells the name of the processor properly."""
    # Under Windows, whose driver locks only a part of the memory, Linux says so in its version.
    is_wsl = "microsoft" in _text_of(Path("/proc/version")).lower()
    named = re.search(r"^model name\s*:[ \t]*(.+)$", _text_of(Path("/proc/cpuinfo")), re.MULTILINE)
    name = named[1] if named else platform.processor() or platform.machine() or "unknown processor"
    locked_bytes = None
    if hasattr(psutil, "RLIMIT_MEMLOCK"):  # Linux
        soft_bytes, _ = psutil.Process().rlimit(psutil.RLIMIT_MEMLOCK)
        locked_bytes = None if soft_bytes == psutil.RLIM_INFINITY else soft_bytes
    huge_pages = "[never]" not in _text_of(HUGE_PAGES)
    return HostInfo(printable(name), usable_cores(), *host_memory(), locked_bytes, is_wsl, huge_pages)


def usable_cores() -> int:
    """Return the logical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _text_of(file: Path) -> str:
    """Return what one of Linux's own files says; nothing where there is none."""
    with suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace")
    return ""


def printable(text: str) -> str:
    """Return the text as one line that a profile can hold."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


@dataclass(frozen=True)
class PcieLink:
    """Generation and lanes of a card's link: now, and the most that card and system could do."""

    generation: int
    width: int
    generation_max: int
    width_max: int

    @property
    def peak_gbps(self) -> float:
        """Return what the link carries each way before packet headers, in GB/s."""
        return _LANE_GBPS[self.generation] * self.width


@dataclass(frozen=True)
class NvmlAnswer:
    """Holds what NVML says: the driver's version and the link, or `reason`, why it is None."""

    driver: str | None
    link: PcieLink | None
    reason: str


def read_nvml(uuid: str) -> NvmlAnswer:
    """Ask NVML about one card. An idle link drops to a lower generation: ask while copies run.

    Args:
        uuid: The card's, as torch gives it: torch counts the cards of CUDA_VISIBLE_DEVICES, NVML all of them.
    """
    driver, link = None, None
    try:
        nvml = open_nvml()
        driver = str(nvml.nvmlSystemGetDriverVersion())
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        now = nvml.nvmlDeviceGetCurrPcieLinkGeneration, nvml.nvmlDeviceGetCurrPcieLinkWidth
        most = nvml.nvmlDeviceGetMaxPcieLinkGeneration, nvml.nvmlDeviceGetMaxPcieLinkWidth
        link = PcieLink(*(int(ask(handle)) for ask in (*now, *most)))
    except Exception as error:  # no driver and no library, or a query that virtual machines and WSL2 do not support
        return NvmlAnswer(driver, None, f"NVML is not available, or refuses a query: {error}")
    if link.generation not in _LANE_GBPS or not 1 <= link.width <= 32:  # some virtual machines have no real link
        return NvmlAnswer(driver, None, f"NVML tells of a link of generation {link.generation}, x{link.width}")
    return NvmlAnswer(driver, link, "")


# --- measuring


class CannotMeasureError(Exception):
    """A figure cannot be had on this machine; the text is the reason. Becomes part of the report, never an end."""


def _best_time_s(action: Callable[[], float | None], *, budget_s: float) -> float:
    """Return the shortest time of one `action` in seconds, which it returns if it measures itself: others on the
    machine only ever make it longer. One call comes first that does not count; then calls follow until `budget_s` is
    spent, at least three of them."""
    action()
    times_s: list[float] = []
    started_s = time.perf_counter()
    while len(times_s) < 3 or time.perf_counter() - started_s < budget_s:
        before_s = time.perf_counter()
        own_s = action()
        times_s.append(time.perf_counter() - before_s if own_s is None else own_s)
    return min(times_s)


def _event_time_s(enqueue: Callable[[], object], *, budget_s: float, spin_cycles: int = 0) -> float:
    """Return the shortest time between two events around `enqueue` on the current stream, in seconds. Before the first
    event the device spins, so that all is enqueued before it begins."""

    def once() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if spin_cycles:
            torch.cuda._sleep(spin_cycles)
        start.record()
        enqueue()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return _best_time_s(once, budget_s=budget_s)


# --- links


class LinkBench:
    """Copies without end over a device's link, as streaming makes them: from page-locked memory or, `back`, to it."""

    def __init__(self, device: torch.device, *, back: bool = False) -> None:
        # A page that was never written is the kernel's one zero page, which stays in the caches.
        host = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda").fill_(1)
        there = torch.ones(_LINK_BYTES, dtype=torch.uint8, device=device)
        self._copy = [(host, there) if back else (there, host)]
        self.engine, self._queued = make_copy_engine(device), deque[Any]()

    def feed(self) -> None:
        """Keep a few copies queued."""
        while self._queued and self.engine.is_done(self._queued[0]):
            self._queued.popleft()
        while len(self._queued) < _QUEUED:
            self._queued.append(self.engine.new_event())
            self.engine.enqueue(self._copy, free=self.engine.new_event(), ready=self._queued[-1])


def measure_links_gbps(benches: Sequence[LinkBench], until: Callable[[], bool]) -> tuple[float, ...]:
    """Keep links busy side by side until something is so. Returns what each carried in GB/s of the time that its copies
    took, of which no link was idle but for the last few."""
    engines, found = [bench.engine for bench in benches], list[list[tuple[int, float]]]()
    for over in (spent(_WAKING_S), until):
        while True:
            for bench in benches:
                bench.feed()
            if over():
                break
            time.sleep(0.001)
        for engine in engines:
            engine.drain()
        found.append([(engine.bytes_copied, engine.copy_seconds()) for engine in engines])
    return tuple((after[0] - before[0]) / (after[1] - before[1]) / GB for before, after in zip(*found, strict=True))


def spent(budget_s: float) -> Callable[[], bool]:
    """Return what says whether a time from the first question on is over."""
    started_s = cache(time.perf_counter)
    return lambda: time.perf_counter() - started_s() >= budget_s


def measure_transfers(cards: Sequence[Card], *, budget_s: float) -> tuple[float, float]:
    """Measure transfers of rows from card to card, each behind the one before, as in a pass: round all cards and back.

    Returns:
        Microseconds of a transfer of a token's rows, and the GB/s at which more bytes arrive.

    Raises:
        CannotMeasureError: Many rows take no longer than one.
    """
    ring = [*zip(cards, [*cards[1:], cards[0]], strict=True)] * max(1, _TRANSFERS // len(cards))
    seconds, buffers = [], TransferBuffers()
    for nbytes in (_FEW_BYTES, _MANY_BYTES):
        rows = torch.ones(nbytes, dtype=torch.uint8, device=cards[0].device)

        def laps(rows: torch.Tensor = rows) -> None:
            tensors = [rows]
            for source, target in ring:
                tensors = transfer(tensors, source, target, buffers)

        with current_device(cards[0].device):
            seconds.append(_event_time_s(laps, budget_s=budget_s, spin_cycles=_SPIN_CYCLES) / len(ring))
    few_s, many_s = seconds
    if many_s <= few_s:
        raise CannotMeasureError(f"a transfer of {format_bytes(_MANY_BYTES)} takes no longer than one of a few kB")
    return few_s * 1e6, (_MANY_BYTES - _FEW_BYTES) / (many_s - few_s) / GB


# --- what a card computes


def measure_hbm_gbps(device: torch.device, most_bytes: int, *, budget_s: float) -> float:
    """Measure copying within the device's memory, bytes read and written together, in GB/s."""
    free_bytes = torch.cuda.mem_get_info(device)[0]
    nbytes = min(most_bytes, free_bytes // 4)
    if nbytes < 128 * MIB:  # the second-level cache would answer
        raise CannotMeasureError(f"only {format_bytes(free_bytes)} of VRAM is free: close other programs")
    source, sink = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))  # [nbytes] uint8, GPU
    return 2 * nbytes / _event_time_s(lambda: sink.copy_(source), budget_s=budget_s) / GB


def measure_tflops(device: torch.device, *, budget_s: float) -> dict[str, float]:
    """Measure dense products of two square matrices of random numbers, in TFLOP/s by element type, as torch is set."""
    size = 8192 if torch.cuda.mem_get_info(device)[0] > 2 * GB else 4096
    rates = {}
    for name, dtype in _TORCH_DTYPES.items():
        # Products of zeros draw less power and run at higher clocks than any model's.
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))  # [n, n], GPU
        product = torch.empty_like(left)
        multiply = partial(torch.mm, left, right, out=product)
        rates[name] = 2 * size**3 / _event_time_s(multiply, budget_s=budget_s) / 1e12
    return rates


def _graph_time_s(calls: Sequence[Callable[[], object]], device: torch.device, *, budget_s: float) -> float:
    """Return the shortest time of a CUDA graph of some calls, in seconds."""
    for call in calls:  # compiled, and its module loaded, before a capture
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return _event_time_s(graph.replay, budget_s=budget_s)


def measure_graph_launch_us(device: torch.device, *, budget_s: float) -> float:
    """Measure one small kernel within a CUDA graph of many, each after the one before, in microseconds."""
    count = torch.zeros(1, device=device)
    return _graph_time_s([lambda: count.add_(1)] * _GRAPH_KERNELS, device, budget_s=budget_s) / _GRAPH_KERNELS * 1e6


def _stored_product(kind: str, m: int, k: int, device: torch.device) -> Callable[[], None]:
    """Return a product of one row with a matrix [M, K] as it is stored, of whatever random bytes decode to."""
    x, out = (torch.ones(1, width, dtype=torch.bfloat16, device=device) for width in (k, m))
    randint = partial(torch.randint, 256, dtype=torch.uint8, device=device)
    if kind == CODED:
        row = CodedRow.of(k)
        assert row is not None
        stored = torch.zeros(m, row.nbytes, dtype=torch.uint8, device=device)  # weights without exceptions
        return partial(coded_linear_triton, x, stored, row, out)
    if kind in _MEASURED_NUMBERS:
        form = _MEASURED_NUMBERS[kind]
        (down, across), (scale_bytes, _) = form.scales(m, k), form.scale_row_bytes(k)
        scales = torch.ones(down, scale_bytes // form.scale.itemsize, dtype=form.scale, device=device)[:, :across]
        none, numbers = torch.empty(0, device=device), randint((m, form.row_bytes(k)))
        return partial(scaled_linear_triton, x, ScaledRows(numbers, scales, none.byte(), none.int()), form, out)
    blocks = FORMATS[kind]
    return partial(gguf_linear_triton, x, randint((m, blocks.row_bytes(k))), blocks, out)


def measure_decode_gweights_per_s(device: torch.device, *, budget_s: float) -> dict[str, float]:
    """Measure products of one row with layers as they are stored, within a CUDA graph: weights in 1e9 a second by how
    they are. Where memory is slower than decoding, this is what it delivers."""
    rates, weights = {}, _LAYERS * sum(m * k for m, k in _LAYER_MATRICES)
    for kind in (*_MEASURED_BLOCKS, *_MEASURED_NUMBERS, CODED):
        products = [_stored_product(kind, m, k, device) for m, k in _LAYERS * _LAYER_MATRICES]
        rates[kind] = weights / _graph_time_s(products, device, budget_s=budget_s) / 1e9
    return rates


# --- the host's memory


def sample_bytes(host: HostInfo, wanted_bytes: int) -> int:
    """Return as much of `wanted_bytes` as can be taken for a moment without anybody noticing, in whole huge pages."""
    return max(2 * MIB, min(wanted_bytes, host.available_bytes // 8) // (2 * MIB) * 2 * MIB)


def measure_host_gbps(nbytes: int, threads: int, *, budget_s: float) -> float:
    """Measure reading memory with a number of threads, in GB/s."""
    parts = np.array_split(np.empty(nbytes // 4, dtype=np.float32), threads)
    with ThreadPoolExecutor(threads) as pool:
        # Pages are placed beside the core that first writes them, so each thread writes the part it will read.
        list(pool.map(lambda part: part.fill(1.0), parts))

        def read() -> None:  # numpy lets other threads run meanwhile, and the maximum is what memory limits soonest
            list(pool.map(np.max, parts))

        return nbytes / _best_time_s(read, budget_s=budget_s) / GB


def measure_staging_gbps(bench: LinkBench, nbytes: int, threads: int, *, budget_s: float) -> float:
    """Measure copies within host memory by a number of threads while the link to a device is busy, in GB/s."""
    parts = [torch.ones(2, nbytes // threads // 2, dtype=torch.uint8) for _ in range(threads)]
    over = threading.Event()

    def move(part: torch.Tensor) -> int:
        target, source, copies = *part, 0
        while not over.is_set():
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
            copies += 1
        return copies * source.nbytes

    with ThreadPoolExecutor(threads) as pool:
        started_s, moving = time.perf_counter(), [pool.submit(move, part) for part in parts]
        try:
            measure_links_gbps([bench], spent(budget_s))
        finally:
            over.set()
        return sum(one.result() for one in moving) / (time.perf_counter() - started_s) / GB


def _locked(nbytes: int, registrar: Registrar, arenas: ExitStack) -> int:
    """Take, write and lock memory, which `arenas` gives back. Returns what of it was locked."""
    arena = arenas.enter_context(closing(HostArena(nbytes, name="a measurement of page-locking")))
    arena.buffer.fill_(1)
    arena.lock(registrar)
    return arena.pinned_bytes


def estimate_pinnable_bytes(host: HostInfo, wanted_bytes: int) -> int:
    """Return what may be locked, judged by free memory and the kind of system, without trying more than a sample.

    Drivers do not count CUDA's locking against RLIMIT_MEMLOCK, so the limit is believed only where the sample is
    refused.

    Raises:
        CannotMeasureError: Not even the sample can be locked, and no limit says why; or hardly any memory is free.
        BudgetError: The system refuses to give the sample.
    """
    nbytes = sample_bytes(host, wanted_bytes)
    with ExitStack() as arenas:
        refused = _locked(nbytes, Registrar(), arenas) < nbytes
    if refused and not host.locked_limit_bytes:
        refusal = f"the system refuses to lock {format_bytes(nbytes)} of memory"
        raise CannotMeasureError(f"{refusal}: raise the limit; unlocked memory copies several times slower")
    return judge_pinnable_bytes(host, refused=refused)


def judge_pinnable_bytes(host: HostInfo, *, refused: bool) -> int:
    """Return what may be locked, of a system that has `refused` a sample or not. Errors as of
    `estimate_pinnable_bytes`."""
    if refused:
        return min(host.locked_limit_bytes or 0, host.ram_bytes)
    spare_bytes = host.available_bytes - _kept_bytes(host)
    if host.wsl:  # Windows' driver locks about half of what the virtual machine has
        spare_bytes = min(spare_bytes, host.ram_bytes // 2)
    if spare_bytes <= 0:
        raise CannotMeasureError(
            f"{format_bytes(host.available_bytes)} of memory is free and {format_bytes(_kept_bytes(host))} of it stays "
            "with the system: close other programs"
        )
    return spare_bytes


def _kept_bytes(host: HostInfo) -> int:
    return min(host.ram_bytes // _KEPT_SHARE, _MOST_KEPT_BYTES)


def try_pinnable_bytes(host: HostInfo) -> int:
    """Lock memory in blocks of 1 GiB until the system refuses or only its own share is free; in bytes.

    Raises:
        CannotMeasureError: Not one block can be locked.
        BudgetError: The system refuses to give as much.
    """
    registrar, locked_bytes = Registrar(), 0
    with ExitStack() as arenas:
        # One after the other: where the system refuses early, no more than that is ever written.
        for _ in range(max(0, host.available_bytes - _kept_bytes(host)) // GIB):
            locked_bytes += (more := _locked(GIB, registrar, arenas))
            if more < GIB:
                break
    if not locked_bytes:
        raise CannotMeasureError("the system refuses to lock 1 GiB, or has none free")
    return locked_bytes
