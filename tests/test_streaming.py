"""The ring of layers: what arrives is the right layer, and stays it for as long as it is used. And the copy queue
below: order, events, counters and failures, on a thread and on a CUDA stream."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from offload_runtime.errors import CopyError
from offload_runtime.stream.copy_engine import Copies, CopyEngine
from offload_runtime.stream.queue import (
    CardRing,
    CudaCopyEngine,
    LayerStreamer,
    LayerViews,
    ThreadCopyEngine,
    make_copy_engine,
)
from tests.helpers.reordering import ReorderingCopyEngine, before_each_copy

LAYER_BYTES = 4096


def _layer(index: int) -> torch.Tensor:
    """Layer `index`, recognisable by every byte: uint8 [LAYER_BYTES], host."""
    return torch.full((LAYER_BYTES,), 7 * index + 1, dtype=torch.uint8)


def _views(index: int, buffer: torch.Tensor) -> LayerViews:
    return {"w": buffer}


def _ring(engine: CopyEngine, num_layers: int = 7, buffers: int = 2, resident: tuple[int, ...] = ()) -> LayerStreamer:
    return LayerStreamer(
        [_layer(index) for index in range(num_layers)],
        {index: _layer(index) for index in resident},
        [CardRing(engine, [torch.zeros(LAYER_BYTES, dtype=torch.uint8) for _ in range(buffers)])],
        make_views=_views,
    )


def _is_layer(weights: LayerViews, index: int) -> bool:
    return torch.equal(weights["w"], _layer(index))


def _run_pass(streamer: LayerStreamer, *, compute_s: float = 0.0) -> list[int]:
    """One pass: the layers in order, each found intact at the start and at the end of its use."""
    seen = []
    for index, weights in streamer.layers():
        assert _is_layer(weights, index), f"layer {index} was not there when its use began"
        time.sleep(compute_s)
        assert _is_layer(weights, index), f"layer {index} was overwritten while it was in use"
        seen.append(index)
    return seen


def _random_delays(seed: int, most_s: float) -> Callable[[], None]:
    generator = random.Random(seed)
    return lambda: time.sleep(generator.uniform(0, most_s))


@pytest.fixture
def engine() -> Iterator[ThreadCopyEngine]:
    made = ThreadCopyEngine(pace=before_each_copy(_random_delays(0, 0.002)))
    yield made
    made.close()


class _InterruptedError(Exception):
    pass


def _interrupt(streamer: LayerStreamer, at: int) -> None:
    for index, weights in streamer.layers():
        assert _is_layer(weights, index)
        if index == at:
            raise _InterruptedError


@pytest.mark.few(6)
@pytest.mark.parametrize("resident", [(), (0,), (6,), (1, 3, 4)])
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_every_layer_arrives_intact(engine: ThreadCopyEngine, buffers: int, resident: tuple[int, ...]) -> None:
    """And starts over behind passes that are interrupted, at each of the layers."""
    streamer = _ring(engine, buffers=buffers, resident=resident)
    for number in range(14):  # slots and streamed layers do not divide each other: every alignment occurs
        assert _run_pass(streamer, compute_s=0.001 * (number % 2)) == list(range(7))
        if number % 2:
            with pytest.raises(_InterruptedError):
                _interrupt(streamer, number // 2)


@pytest.mark.few(3)
@pytest.mark.parametrize("resident", [(), (1, 3, 4)])
@pytest.mark.parametrize("buffers", [2, 3, 4])
def test_copies_that_overtake_each_other_arrive_intact(buffers: int, resident: tuple[int, ...]) -> None:
    """In passes that end, and behind some that are interrupted."""
    engine = ReorderingCopyEngine(random.Random(buffers), _random_delays(0, 0.002))
    streamer = _ring(engine, buffers=buffers, resident=resident)
    for number in range(10):
        assert _run_pass(streamer, compute_s=0.001 * (number % 2)) == list(range(7))
        with pytest.raises(_InterruptedError):
            _interrupt(streamer, number % 7)
    assert engine.num_overtaken > 0
    engine.close()


class _InterruptedEngine(ThreadCopyEngine):
    """Ctrl-C is pressed in a call of it: the one of this name, behind as many others."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call, self.others = call, -1

    def _interrupt(self, call: str) -> None:
        if call == self.call:
            self.others -= 1
            if self.others == -1:
                raise _InterruptedError

    def enqueue(self, copies: Copies, **others: Any) -> None:
        super().enqueue(copies, **others)
        self._interrupt("enqueue")

    def compute_wait(self, ready: Any) -> None:
        super().compute_wait(ready)
        self._interrupt("compute_wait")

    def compute_record(self, free: Any) -> None:
        super().compute_record(free)
        self._interrupt("compute_record")


@pytest.mark.parametrize("call", ["enqueue", "compute_wait", "compute_record"])
def test_no_buffer_is_lost_where_the_queue_itself_is_interrupted(call: str) -> None:
    engine = _InterruptedEngine(call)
    streamer = _ring(engine, buffers=3)
    for others in range(9):
        engine.others = others
        with pytest.raises(_InterruptedError):
            while True:
                _run_pass(streamer)
        assert _run_pass(streamer) == list(range(7))
    engine.close()


@dataclass(frozen=True)
class _GpuRing:
    """Layers large enough to be caught in the middle of a copy."""

    engine: CudaCopyEngine
    streamer: LayerStreamer
    num_elements: int

    @classmethod
    def make(cls, num_layers: int, buffers: int, cycles: int, queue: type[CudaCopyEngine] = CudaCopyEngine) -> _GpuRing:
        device, num_elements = torch.device("cuda"), 1 << 22
        engine = queue(device, pace=before_each_copy(lambda: torch.cuda._sleep(cycles)))
        layers = [torch.full((num_elements,), i + 1, dtype=torch.uint8).pin_memory() for i in range(num_layers)]
        ring = [torch.zeros(num_elements, dtype=torch.uint8, device=device) for _ in range(buffers)]
        return cls(engine, LayerStreamer(layers, {}, [CardRing(engine, ring)], make_views=_views), num_elements)

    def wrong_bytes(self, *, passes: int, compute_cycles: int) -> int:
        """Bytes that were not their layer's at the beginning or at the end of its use, counted on the device."""
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(passes):
            for index, weights in self.streamer.layers():
                wrong += (weights["w"] != index + 1).sum()
                torch.cuda._sleep(compute_cycles)
                wrong += (weights["w"] != index + 1).sum()
        return int(wrong)


@pytest.mark.gpu
@pytest.mark.parametrize(("cycles", "compute_cycles"), [(2_000_000, 0), (0, 2_000_000), (500_000, 500_000)])
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_layers_are_intact_on_the_gpu(buffers: int, cycles: int, compute_cycles: int) -> None:
    ring = _GpuRing.make(num_layers=5, buffers=buffers, cycles=cycles)
    assert ring.wrong_bytes(passes=6, compute_cycles=compute_cycles) == 0
    ring.engine.drain()
    assert ring.engine.bytes_copied == (6 * 5 + buffers) * ring.num_elements


def _bytes(value: int, nbytes: int = 1000) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def test_a_failed_copy_raises_on_every_later_use() -> None:
    engine = ThreadCopyEngine()
    free, ready = engine.new_event(), engine.new_event()
    engine.enqueue([(_bytes(0, 10), _bytes(1, 11))], free=free, ready=ready)  # sizes that do not match
    for use in (
        lambda: engine.compute_wait(ready),
        engine.drain,
        lambda: engine.enqueue([(_bytes(0), _bytes(1))], free=free, ready=ready),
    ):
        with pytest.raises(CopyError, match="load the runtime again") as caught:
            use()
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert engine.bytes_copied == 0
    engine.close()


@pytest.mark.gpu
def test_cuda_copies_wait_for_free_and_compute_waits_for_ready() -> None:
    device = torch.device("cuda")
    engine = make_copy_engine(device)
    assert isinstance(engine, CudaCopyEngine)
    src = torch.full((1 << 20,), 2, dtype=torch.uint8).pin_memory()
    dst = torch.ones(1 << 20, dtype=torch.uint8, device=device)
    free, ready = engine.new_event(), engine.new_event()
    torch.cuda._sleep(20_000_000)
    before = dst.clone()  # the slow last read
    engine.compute_record(free)
    engine.enqueue([(dst, src)], free=free, ready=ready)
    engine.compute_wait(ready)
    after = dst.clone()
    assert bool((before == 1).all())
    assert bool((after == 2).all())
    engine.drain()
    assert engine.bytes_copied == 1 << 20
    assert engine.stall_seconds() > 0
    assert engine.copy_seconds() > 0


@pytest.mark.gpu
def test_a_failed_cuda_copy_is_typed() -> None:
    engine = CudaCopyEngine(torch.device("cuda"))
    dst = torch.zeros(10, dtype=torch.uint8, device="cuda")
    with pytest.raises(CopyError, match="load the runtime again"):
        engine.enqueue([(dst, _bytes(1, 11).pin_memory())], free=engine.new_event(), ready=engine.new_event())
