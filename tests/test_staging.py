"""The staging ring: whatever is page-locked and however late its threads are, each layer arrives as it is."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload_runtime.copy import MOST_THREADS, CopyEngine, StagingCopyEngine, ring_shape, staging_threads
from offload_runtime.copy.queue import ThreadCopyEngine
from offload_runtime.copy.schedule import LayerStreamer, LayerViews
from offload_runtime.errors import CopyError
from offload_runtime.memory import PageableMemory
from tests.helpers.copy_hooks import before_each_copy

PIECE_BYTES = 64
LAYER_BYTES = 5 * PIECE_BYTES + 8
NUM_LAYERS = 6


def _layer(index: int) -> torch.Tensor:
    """Layer `index`, no two pieces of any two layers alike: uint8 [LAYER_BYTES], host."""
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, 256, (LAYER_BYTES,), dtype=torch.uint8, generator=generator)


LAYERS = [_layer(index) for index in range(NUM_LAYERS)]


def _views(index: int, buffer: torch.Tensor) -> LayerViews:
    return {"w": buffer}


@contextmanager
def staged(
    pinned_bytes: Mapping[int, int], *, pieces: int = 3, threads: int = 2, slots: int = 3,
    before_fill: Callable[[], None] = lambda: None, before_copy: Callable[[], None] | None = None,
    locked: Sequence[torch.Tensor] = (),
) -> Iterator[tuple[LayerStreamer, StagingCopyEngine]]:  # fmt: skip
    """A streamer over all layers; `pinned_bytes` has for each staged layer what of its beginning is page-locked, and
    `locked` is page-locked as well."""
    sources = [layer.clone() for layer in LAYERS]
    ring = torch.zeros(pieces, PIECE_BYTES, dtype=torch.uint8)
    pageable = PageableMemory()
    for index, nbytes in pinned_bytes.items():
        pageable.enter(sources[index][nbytes:])
    below = _LockedSourcesOnly(before_copy=before_copy)
    for memory in (ring, *locked):
        below.allow(memory)
    for index, source in enumerate(sources):
        below.allow(source[: pinned_bytes.get(index, LAYER_BYTES)])
    engine = StagingCopyEngine(below, list(ring), pageable, num_threads=threads, before_move=before_fill)
    try:
        slot_buffers = [torch.zeros(LAYER_BYTES, dtype=torch.uint8) for _ in range(slots)]
        yield LayerStreamer(sources, {}, slot_buffers, make_views=_views, engine=engine), engine
    finally:
        engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("staging")]


class _LockedSourcesOnly(ThreadCopyEngine):
    """Insists that what it copies lies in one page-locked range, as CUDA needs it."""

    def __init__(self, *, before_copy: Callable[[], None] | None) -> None:
        super().__init__(pace=before_each_copy(before_copy))
        self._ranges: list[range] = []

    def allow(self, memory: torch.Tensor) -> None:
        self._ranges.append(range(memory.data_ptr(), memory.data_ptr() + memory.nbytes))

    def enqueue(self, dst: torch.Tensor, src: torch.Tensor, **events: object) -> None:
        assert src.nbytes, "an empty copy"
        assert any(src.data_ptr() in r and src.data_ptr() + src.nbytes - 1 in r for r in self._ranges), "pageable"
        super().enqueue(dst, src, **events)  # type: ignore[arg-type]


def _run_pass(streamer: LayerStreamer, *, interrupt_at: int | None = None, compute_s: float = 0.0) -> None:
    """One pass, or a part of one: every layer intact at the start and at the end of its use."""
    for number, (index, weights) in enumerate(streamer.layers()):
        assert torch.equal(weights["w"], LAYERS[index]), f"layer {index} was not there when its use began"
        time.sleep(compute_s)
        assert torch.equal(weights["w"], LAYERS[index]), f"layer {index} was overwritten while it was in use"
        if number == interrupt_at:
            return


ALL = dict.fromkeys(range(NUM_LAYERS), 0)
EVERY_OTHER = dict.fromkeys(range(0, NUM_LAYERS, 2), 0)
IN_PART = {0: PIECE_BYTES, 1: 0, 3: LAYER_BYTES - 1, 5: 2 * PIECE_BYTES + 3}


@pytest.mark.few(15)
@pytest.mark.parametrize("pinned_bytes", [{}, ALL, EVERY_OTHER, {5: 0}, IN_PART])
@pytest.mark.parametrize(("pieces", "threads"), [(2, 1), (3, 4), (12, 8)])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_layers_arrive_intact_and_are_counted_once(
    pinned_bytes: dict[int, int], pieces: int, threads: int, slots: int
) -> None:
    with staged(pinned_bytes, pieces=pieces, threads=threads, slots=slots) as (streamer, engine):
        for _ in range(3):
            _run_pass(streamer)
        engine.drain()
        assert engine.bytes_copied == (3 * NUM_LAYERS + slots) * LAYER_BYTES  # the ring runs ahead into the next pass
        assert streamer.bytes_per_pass == NUM_LAYERS * LAYER_BYTES
        assert engine.copy_seconds() > 0 and engine.stall_seconds() >= 0


@st.composite
def _delays(draw: st.DrawFn) -> Callable[[], None]:
    """Sleeps of up to a few milliseconds, most of them none: the order of the threads' steps is what varies."""
    seed, share, most_s = draw(st.integers(0, 2**32)), draw(st.sampled_from([0.0, 0.1, 0.5])), 0.002
    generator = random.Random(seed)

    def sleep() -> None:
        if generator.random() < share:
            time.sleep(generator.uniform(0, most_s))

    return sleep


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    pinned_bytes=st.dictionaries(st.integers(0, NUM_LAYERS - 1), st.integers(0, LAYER_BYTES)),
    pieces=st.integers(2, 7), threads=st.integers(1, 5), slots=st.integers(1, 3), before_fill=_delays(),
    before_copy=_delays(), interrupts=st.lists(st.none() | st.integers(0, NUM_LAYERS - 1), min_size=2, max_size=4),
)  # fmt: skip
def test_no_delay_changes_a_byte(
    pinned_bytes: dict[int, int], pieces: int, threads: int, slots: int, before_fill: Callable[[], None],
    before_copy: Callable[[], None], interrupts: list[int | None],
) -> None:  # fmt: skip
    with staged(
        pinned_bytes, pieces=pieces, threads=threads, slots=slots, before_fill=before_fill, before_copy=before_copy
    ) as (streamer, _):
        for interrupt_at in interrupts:
            _run_pass(streamer, interrupt_at=interrupt_at)
        _run_pass(streamer)


@pytest.mark.parametrize("at", range(NUM_LAYERS))
def test_a_pass_after_an_interrupted_one_starts_over(at: int) -> None:
    with staged(EVERY_OTHER, before_fill=lambda: time.sleep(0.001)) as (streamer, _):
        for _ in range(2):
            _run_pass(streamer, interrupt_at=at)
            _run_pass(streamer)


def test_the_ring_runs_ahead_while_nothing_is_asked_for() -> None:
    with staged(ALL, slots=2) as (streamer, engine):
        engine.drain()
        assert engine.bytes_copied == 2 * LAYER_BYTES
        _run_pass(streamer)


def test_page_locked_sources_do_not_wait_for_a_thread() -> None:
    """Only what is behind something staged takes the way through the threads."""
    fills = 0

    def count() -> None:
        nonlocal fills
        fills += 1

    with staged({NUM_LAYERS - 1: 0}, before_fill=count) as (streamer, engine):
        engine.drain()
        assert fills == 0
        _run_pass(streamer)
        engine.drain()
        assert fills == 6  # pieces of one layer


class _EarlyReuse(ThreadCopyEngine):
    """Deliberately wrong: says that a copy has been made when it may still be on its way."""

    def wait(self, ready: object) -> None:
        pass

    def compute_wait(self, ready: object) -> None:
        super().wait(ready)  # type: ignore[arg-type]


def test_the_intactness_check_catches_a_piece_that_is_filled_too_early() -> None:
    sources = [layer.clone() for layer in LAYERS]
    ring = torch.zeros(2, PIECE_BYTES, dtype=torch.uint8)
    below = _EarlyReuse(pace=before_each_copy(lambda: time.sleep(0.002)))
    pageable = PageableMemory()
    for source in sources:
        pageable.enter(source)
    engine = StagingCopyEngine(below, list(ring), pageable, num_threads=2)
    slots = [torch.zeros(LAYER_BYTES, dtype=torch.uint8) for _ in range(2)]
    streamer = LayerStreamer(sources, {}, slots, make_views=_views, engine=engine)
    with pytest.raises(AssertionError, match="was not there when"):
        for _ in range(3):
            _run_pass(streamer)
    engine.close()


def _failing(after: int) -> Callable[[], None]:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        if calls == after + 1:
            time.sleep(0.05)  # the schedule may be filled before
            raise OSError("the memory is gone")

    return call


@pytest.mark.parametrize("after", [0, 3, 17])
@pytest.mark.parametrize("where", ["before_fill", "before_copy"])
def test_a_failure_is_raised_stays_raised_and_ends_the_threads(where: str, after: int) -> None:
    hooks = {where: _failing(after)}
    with staged(ALL, pieces=2, **hooks) as (streamer, engine):  # type: ignore[arg-type]
        for _ in range(2):
            with pytest.raises(CopyError, match="the memory is gone"):
                for _ in range(3):
                    _run_pass(streamer)
        with pytest.raises(CopyError, match="load the runtime again"):
            engine.drain()


def test_closing_ends_the_threads_in_the_verifier_of_everything() -> None:
    started = time.perf_counter()
    with staged(ALL, slots=3, before_fill=lambda: time.sleep(0.01)) as (streamer, _):
        layers = streamer.layers()
        next(layers)
    assert time.perf_counter() - started < 10  # far more than a few pieces, far less than hanging
    engine: CopyEngine
    with staged(ALL) as (_, engine):
        engine.close()  # once more at the end


def test_an_event_is_not_done_before_its_copy_was_made() -> None:
    gate = threading.Event()
    source = torch.arange(PIECE_BYTES, dtype=torch.uint8)
    with staged(ALL, before_fill=lambda: bool(gate.wait(10)) or None, locked=[source]) as (_, engine):
        target = torch.zeros(PIECE_BYTES, dtype=torch.uint8)
        free, ready = engine.new_event(), engine.new_event()
        engine.enqueue(target, source, free=free, ready=ready)  # page-locked, but behind what is staged
        assert not engine.is_done(ready) and not bool(target.any())
        gate.set()
        engine.wait(ready)
        assert engine.is_done(ready) and torch.equal(target, source)


def test_the_ring_is_small_and_never_less_than_two_pieces() -> None:
    large = ring_shape(400 << 20)
    assert (large.piece_bytes, large.num_pieces, large.nbytes) == (32 << 20, 12, 384 << 20)
    assert ring_shape(400 << 20, 100 << 20).num_pieces == 3
    assert ring_shape(400 << 20, 0).num_pieces == 2
    small = ring_shape(100_000)
    assert small.piece_bytes % 4096 == 0 and 25_000 <= small.piece_bytes <= 25_000 + 4096
    assert [staging_threads(cores) for cores in (1, 2, 4, 16, 64)] == [1, 1, 2, 8, MOST_THREADS]
