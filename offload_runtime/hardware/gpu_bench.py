"""Measurements of a GPU: what NVIDIA's management library (NVML) tells of its link, and the speed of its link, memory,
products and launches; and of several cards, whose links may get into each other's way, and of transfers between them.

That NVML is missing or refuses costs a reason, no more. Of one GPU the current device is measured, which callers set.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from operator import eq

import torch
from offload_runtime_kernels.coded_bf16 import CODED, CodedRow
from offload_runtime_kernels.coded_linear import coded_linear_triton
from offload_runtime_kernels.gguf_blocks import FORMATS
from offload_runtime_kernels.gguf_linear import gguf_linear_triton
from offload_runtime_kernels.linear import LIBRARY_ROWS, library_agrees
from offload_runtime_kernels.scaled_linear import scaled_linear_triton
from offload_runtime_kernels.scaled_rows import ScaledFormat, ScaledRows

from offload_runtime.hardware.host_bench import CannotMeasureError, HostReader, best_time_s
from offload_runtime.sizes import GB, format_bytes
from offload_runtime.stream import Card, TransferBuffers, current_device, transfer

# [M, K] of the products of Llamas of 135M, 7B, 8B and 70B.
_MODEL_MATRICES = (
    (960, 576), (576, 576), (3072, 576), (576, 1536), (12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008),
    (6144, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672),
)  # fmt: skip
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
        """Return what the link carries each way before packet headers, in GB/s."""
        return _LANE_GBPS[self.generation] * self.width


@dataclass(frozen=True)
class NvmlAnswer:
    """What NVML told: the driver's version and the link, or `reason`, why it is None."""

    driver: str | None
    link: PcieLink | None
    reason: str


def read_nvml(uuid: str) -> NvmlAnswer:
    """Ask NVML about one card.

    An idle link drops to a lower generation: ask while copies run.

    Args:
        uuid: Of the card as torch gives it: torch counts the cards of CUDA_VISIBLE_DEVICES, NVML all of them.
    """
    driver, link = None, None
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        try:
            driver = str(nvml.nvmlSystemGetDriverVersion())
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
            now = nvml.nvmlDeviceGetCurrPcieLinkGeneration, nvml.nvmlDeviceGetCurrPcieLinkWidth
            most = nvml.nvmlDeviceGetMaxPcieLinkGeneration, nvml.nvmlDeviceGetMaxPcieLinkWidth
            link = PcieLink(*(int(ask(handle)) for ask in (*now, *most)))
        finally:
            nvml.nvmlShutdown()
    except Exception as error:  # no driver and no library, or a query that virtual machines and WSL2 do not support
        return NvmlAnswer(driver, None, f"NVML is not available, or refuses a query: {error}")
    if link.generation not in _LANE_GBPS or not 1 <= link.width <= 32:  # some virtual machines have no real link
        return NvmlAnswer(driver, None, f"NVML tells of a link of generation {link.generation}, x{link.width}")
    return NvmlAnswer(driver, link, "")


MIB = 1 << 20
# Streaming cuts larger copies into pieces of this size.
_PIECE_BYTES = 64 * MIB
_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# The card's clocks, and with them the link, need a moment of work to rise.
WAKING_S = 0.3
# Hops are enqueued while their card spins, some 25 ms: timed is what cards take, not what Python does to launch it.
_SPIN_CYCLES = 50_000_000
_TRANSFERS = 16
_EAGER_LAUNCHES = 2000
_GRAPH_KERNELS = 1000


def _event_time_s(enqueue: Callable[[], object], *, budget_s: float, spin_cycles: int = 0) -> float:
    """Return the shortest time between two events around `enqueue` on the current stream, in seconds; see
    `best_time_s`. Before the first event the device spins, so that all is enqueued before it begins."""
    times_s: list[float] = []

    def once() -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if spin_cycles:
            torch.cuda._sleep(spin_cycles)
        start.record()
        enqueue()
        end.record()
        end.synchronize()
        times_s.append(start.elapsed_time(end) / 1e3)

    best_time_s(once, budget_s=budget_s)
    return min(times_s[1:])


class LinkBench:
    """Buffers on both sides of one card's link: each uint8 [nbytes], pinned or on the device, all pages touched. On a
    CPU both sides are pageable memory.

    Args:
        device: The GPU, with its index, or a CPU, of which only copies to the device are measured.
        nbytes: Of one buffer; the largest copy. Takes twice as much on either side once copies go both ways.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self._in, self._back = self._buffers(), cache(self._buffers)

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Make one on the host and one on the device."""
        # A page that was never written is the kernel's one zero page, which stays in the caches.
        host = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda").fill_(1)
        return host, torch.ones(self.nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, piece_bytes: int = _PIECE_BYTES, *, back: bool = False) -> None:
        """Enqueue the whole buffer to the device on the current stream, in copies of `piece_bytes`; or another one from
        there to the host."""
        target, source = self._back() if back else reversed(self._in)
        for to, piece in zip(target.split(piece_bytes), source.split(piece_bytes), strict=True):
            to.copy_(piece, non_blocking=True)

    def by_copy_mib(self, sizes_mib: Sequence[float], *, budget_s: float) -> tuple[dict[float, float], float]:
        """Measure host to device in GB/s by MiB of one copy, and the best of these. Copies walk through the buffer, not
        over one cached place."""
        rates = {}
        for size_mib in sizes_mib:
            assert size_mib * MIB <= self.nbytes, "a copy larger than the buffer"
            seconds = _event_time_s(partial(self.copy, int(size_mib * MIB)), budget_s=budget_s)
            rates[size_mib] = self.nbytes / seconds / GB
        return rates, max(rates.values())

    def back_gbps(self, *, budget_s: float) -> float:
        """Measure device to host in GB/s."""
        return self.nbytes / _event_time_s(partial(self.copy, back=True), budget_s=budget_s) / GB

    def both_gbps(self, *, budget_s: float) -> float:
        """Measure each direction in GB/s while both run, by the slower one."""
        streams = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

        def both() -> None:
            current = torch.cuda.current_stream(self.device)
            for back, stream in enumerate(streams):
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    for _ in range(4):  # the moment in which only one has begun must not count
                        self.copy(back=bool(back))
            for stream in streams:
                current.wait_stream(stream)

        return 4 * self.nbytes / _event_time_s(both, budget_s=budget_s) / GB


@contextmanager
def _own_stream(device: torch.device) -> Iterator[Callable[[], Callable[[], None]]]:
    """Work on a stream of one's own. Yields what gives for all that was enqueued so far a function that waits for it,
    which is none on a CPU."""
    if device.type == "cpu":
        yield lambda: lambda: None
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield lambda: stream.record_event().synchronize
    stream.synchronize()


@contextmanager
def busy_link(bench: LinkBench) -> Iterator[Callable[[], tuple[int, float]]]:
    """Keep the link to the device busy from a thread while the `with` block runs.

    Yields:
        What tells how many bytes have arrived by now, and when on `time.perf_counter` the last of them did, in seconds.
        It raises what has ended the copies, as does the end of the block.

    Raises:
        CannotMeasureError: The copies failed.
    """
    stop, arrived = threading.Event(), (0, time.perf_counter())

    def copy_on() -> None:
        nonlocal arrived
        try:
            with _own_stream(bench.device) as waiter:
                bench.copy()
                previous = waiter()
                while not stop.is_set():
                    bench.copy()  # the next ones wait in the queue while those before run
                    latest = waiter()
                    previous()
                    arrived = arrived[0] + bench.nbytes, time.perf_counter()
                    previous = latest
        except RuntimeError as failure:
            raise CannotMeasureError(f"copies beside it failed: {failure}") from failure

    with ThreadPoolExecutor(1) as thread:
        copying = thread.submit(copy_on)

        def tell() -> tuple[int, float]:
            if copying.done():
                copying.result()
            return arrived

        try:
            yield tell
        finally:
            stop.set()
    copying.result()


def measure_links_gbps(benches: Sequence[LinkBench], *, budget_s: float) -> tuple[float, ...]:
    """Measure host to device in GB/s over the link of each card, while all of them copy on streams of their own.

    Each rate is of the copies that ended within the same `budget_s` seconds, in which no link was idle: one that is
    done earlier would leave the others what they do not have otherwise. Cards that are one device have one stream, and
    an equal part of its rate each: of two streams that are never empty one may wait for ever for the copy engine (seen
    on an H200).

    Raises:
        CannotMeasureError: Copies failed.
    """
    cards_of = Counter(bench.device for bench in benches)
    with ExitStack() as running:
        links = {bench.device: bench for bench in benches}
        tells = [running.enter_context(busy_link(bench)) for bench in links.values()]
        time.sleep(WAKING_S)
        while not all(tell()[0] for tell in tells):
            time.sleep(0.01)
        begun, started_s = [tell() for tell in tells], time.perf_counter()
        ended = begun
        while time.perf_counter() - started_s < budget_s or any(map(eq, ended, begun)):
            time.sleep(min(budget_s, 0.01))
            ended = [tell() for tell in tells]
    rates = {
        device: (after_bytes - before_bytes) / (after_s - before_s) / GB / cards_of[device]
        for device, (before_bytes, before_s), (after_bytes, after_s) in zip(links, begun, ended, strict=True)
    }
    return tuple(rates[bench.device] for bench in benches)


def measure_transfers(
    cards: Sequence[Card], sizes_kib: Sequence[float], *, budget_s: float, peers: bool = True
) -> tuple[dict[float, float], float, float]:
    """Measure hops of rows from card to card, each behind the one before, as in a pass: round all cards and back to the
    first.

    Args:
        cards: At least two.
        sizes_kib: Of the rows of one transfer, in KiB.
        budget_s: For each size, in seconds.
        peers: As of `TransferBuffers`.

    Returns:
        Microseconds of one transfer by KiB, those of the smallest, and the GB/s at which the largest one's bytes arrive
        beyond these. A device that is named twice does not cross: it copies within its memory.

    Raises:
        CannotMeasureError: The largest takes no longer than the smallest.
    """
    ring = [*zip(cards, [*cards[1:], cards[0]], strict=True)] * max(1, _TRANSFERS // len(cards))
    transfer_us, buffers = {}, TransferBuffers(peers=peers)
    for size_kib in sizes_kib:
        rows = torch.ones(int(size_kib * 1024), dtype=torch.uint8, device=cards[0].device)

        def laps(rows: torch.Tensor = rows) -> None:
            tensors = [rows]
            for source, target in ring:
                tensors = transfer(tensors, source, target, buffers)

        with current_device(cards[0].device):
            timed = partial(_event_time_s, spin_cycles=_SPIN_CYCLES) if rows.is_cuda else best_time_s
            seconds = timed(laps, budget_s=budget_s)
        transfer_us[size_kib] = seconds / len(ring) * 1e6
    least, most = min(transfer_us), max(transfer_us)
    beyond_us = transfer_us[most] - transfer_us[least]
    if beyond_us <= 0:
        raise CannotMeasureError(f"a transfer of {most:g} KiB takes no longer than one of {least:g} KiB")
    return transfer_us, transfer_us[least], most * 1024 / (beyond_us * 1e-6) / GB


def measure_during_copies(
    bench: LinkBench, reader: HostReader, threads: int, *, budget_s: float
) -> tuple[float, float]:
    """Measure host memory read by `threads` and the link to the device while both run, each in GB/s."""
    passes = 0
    with busy_link(bench) as arrived:
        reader.read(threads)  # the copies have begun by its end
        before_bytes, started_s = arrived()[0], time.perf_counter()
        while passes < 3 or time.perf_counter() - started_s < budget_s:
            reader.read(threads)
            passes += 1
        seconds = time.perf_counter() - started_s
        copied_bytes = arrived()[0] - before_bytes
    if copied_bytes == 0:
        raise CannotMeasureError("no copy ended while the memory was read")
    return passes * reader.nbytes / seconds / GB, copied_bytes / seconds / GB


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


def measure_library_rows(device: torch.device) -> dict[str, int]:
    """Find, by shape of a bf16 matrix, the least rows of a product by the library that has our own products' bits; 0
    where none has, so that ours are taken for prompts too."""
    found, generator = {}, torch.Generator(device).manual_seed(0)
    for m, k in _MODEL_MATRICES:
        weight = torch.empty(m, k, dtype=torch.bfloat16, device=device).normal_(std=0.02, generator=generator)
        heights = [rows for rows in LIBRARY_ROWS[device.type] if library_agrees(rows, weight, None, gated=None)]
        found[f"{m}x{k}"] = min(heights, default=0)
    return found


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
        for multiply in products:  # compiled before a capture
            multiply()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for multiply in products:
                multiply()
        rates[kind] = weights / _event_time_s(graph.replay, budget_s=budget_s) / 1e9
    return rates


def measure_launch_us(device: torch.device, *, budget_s: float) -> float:
    """Measure one small kernel launched from Python through torch, back to back, in microseconds."""
    count = torch.zeros(1, device=device)

    def launch() -> None:
        for _ in range(_EAGER_LAUNCHES):
            count.add_(1)
        torch.cuda.synchronize(device)

    return best_time_s(launch, budget_s=budget_s) / _EAGER_LAUNCHES * 1e6


def measure_graph_launch_us(device: torch.device, *, budget_s: float) -> float:
    """Measure one small kernel within a CUDA graph of many, each after the one before, in microseconds."""
    count = torch.zeros(1, device=device)
    count.add_(1)  # its module must be loaded before a capture
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_GRAPH_KERNELS):
            count.add_(1)
    return _event_time_s(graph.replay, budget_s=budget_s) / _GRAPH_KERNELS * 1e6
