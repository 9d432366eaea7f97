"""The copy queues, a thread on a CPU and a stream on CUDA, and the cyclic schedule of what goes through them.

Items pass through rings of device buffers in a fixed order without end: the first ones of the next pass are on their
way while this pass computes and tokens are drafted. The link idles only when every buffer that could be taken is full.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from offload_runtime.stream.copy_engine import Copies, CopyEngine, LinkPace, copy_failed
from offload_runtime.stream.expert_pool import ExpertPool
from offload_runtime.trace import COMPUTE, CopyLog, Label, TraceRecorder

# One cudaMemcpyAsync of a whole layer would make every small upload of the compute stream wait behind it;
# 64 MiB pieces keep the link at its peak and let others in between.
COPY_PIECE_BYTES = 64 << 20


def make_copy_engine(device: torch.device, *, pace: LinkPace | None = None, log: CopyLog | None = None) -> CopyEngine:
    """Return the copy queue that fits `device`, at a pace if there is one; it reports to the log of a trace."""
    return CudaCopyEngine(device, pace=pace, log=log) if device.type == "cuda" else ThreadCopyEngine(pace=pace, log=log)


# Work that is done: what an event stands for as long as no copy has been asked for with it.
DONE: Future[None] = Future()
DONE.set_result(None)


class _HostEvent:
    """Has fired when the latest copy that it stands for is done; what is computed is done when it is recorded."""

    copy: Future[None] = DONE


class ThreadCopyEngine:
    """Copy engine of the CPU: a worker thread copies while the main thread computes.

    Args:
        pace: Slows the copies down; None: they are as fast as they can be.
        log: The trace that it reports to; None: none.
    """

    def __init__(self, *, pace: LinkPace | None = None, log: CopyLog | None = None) -> None:
        self.log = log
        self.bytes_copied = 0
        self._pace = pace or (lambda nbytes: None)
        self._worker: Executor = ThreadPoolExecutor(1, "copy-engine")
        self._last = DONE
        self._failure: BaseException | None = None
        self._copy_s = 0.0
        self._stall_s = 0.0

    def new_event(self) -> _HostEvent:
        return _HostEvent()

    def enqueue(
        self, copies: Copies, *, free: _HostEvent, ready: _HostEvent, source_free: _HostEvent | None = None,
        label: Label | None = None,
    ) -> None:  # fmt: skip
        if self._last.done():
            self._wait(self._last)
        for dst, src in copies:
            ready.copy = self._last = self._worker.submit(self._copy, dst, src, free.copy, label)
        if source_free is not None:
            source_free.copy = ready.copy

    def _copy(self, dst: torch.Tensor, src: torch.Tensor, before: Future[None], label: Label | None) -> None:
        before.result()
        try:
            if self._failure is not None:
                raise self._failure
            started = time.perf_counter()
            self._pace(0)
            with torch.inference_mode():  # a mode of the thread; buffers may come from a thread that is in it
                dst.copy_(src)
            self._pace(src.nbytes)
            ended = time.perf_counter()
            self._copy_s += ended - started
            if self.log is not None:
                self.log.copied(label, src.nbytes, started, ended)
        except BaseException as error:
            self._failure = error
            raise
        self.bytes_copied += src.nbytes

    def compute_wait(self, ready: _HostEvent) -> None:
        started = time.perf_counter()
        self.wait(ready)
        ended = time.perf_counter()
        self._stall_s += ended - started
        if self.log is not None:
            self.log.stalled(started, ended)

    def compute_record(self, free: _HostEvent) -> None:
        free.copy = DONE

    def is_done(self, ready: _HostEvent) -> bool:
        return ready.copy.done() and ready.copy.exception() is None

    def wait(self, ready: _HostEvent) -> None:
        self._wait(ready.copy)

    def _wait(self, copy: Future[None]) -> None:
        if (error := copy.exception()) is not None:
            raise copy_failed("a copy to the device", error) from error

    def copy_seconds(self) -> float:
        return self._copy_s

    def stall_seconds(self) -> float:
        return self._stall_s

    def drain(self) -> None:
        self._wait(self._last)

    def close(self) -> None:
        self._worker.shutdown()


class _IntervalTimer:
    """Sums the time between pairs of CUDA events without ever waiting for one, in the order in which they were made."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def around(self, stream: torch.cuda.Stream) -> Iterator[tuple[torch.cuda.Event, torch.cuda.Event]]:
        """Time what a stream is given meanwhile. Gives the events before and behind it, which a trace may have as well:
        no pair is recorded a second time."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        yield start, end
        end.record(stream)
        self._open.append((start, end))
        self.harvest()  # behind what was given, which may be waited for

    def harvest(self) -> float:
        """Add what has finished to the total and return it, in seconds."""
        while self._open and self._open[0][1].query():
            start, end = self._open.popleft()
            self.total_s += start.elapsed_time(end) / 1e3
        return self.total_s


class CudaCopyEngine:
    """Copy engine of a GPU: a dedicated stream, ordered against the current compute stream by events only.

    Args:
        device: The GPU.
        pace: Slows the copies down; None: they are as fast as they can be.
        log: The trace that it reports to; None: none.
    """

    def __init__(self, device: torch.device, *, pace: LinkPace | None = None, log: CopyLog | None = None) -> None:
        self.log = log
        self.bytes_copied = 0
        self._pace = pace or (lambda nbytes: None)
        self._device = device
        # What keeps the pace is a kernel: it must not queue behind the compute's.
        self._stream = torch.cuda.Stream(device, priority=0 if pace is None else -1)
        self._copies, self._stalls = _IntervalTimer(), _IntervalTimer()
        self.copy_seconds, self.stall_seconds = self._copies.harvest, self._stalls.harvest

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps

    def enqueue(
        self, copies: Copies, *, free: torch.cuda.Event, ready: torch.cuda.Event,
        source_free: torch.cuda.Event | None = None, label: Label | None = None,
    ) -> None:  # fmt: skip
        # The pace is kept a piece at a time, or as much of smaller copies.
        nbytes, unpaced_bytes = 0, 0
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                self._stream.wait_event(free)
                with self._copies.around(self._stream) as (start, end):
                    self._pace(0)
                    for dst, src in copies:
                        large, nbytes = len(src) > COPY_PIECE_BYTES, nbytes + src.nbytes
                        split = (one.split(COPY_PIECE_BYTES) if large else (one,) for one in (dst, src))
                        for target, piece in zip(*split, strict=True):
                            if unpaced_bytes + piece.nbytes > COPY_PIECE_BYTES:
                                self._pace(unpaced_bytes)
                                unpaced_bytes = 0
                            target.copy_(piece, non_blocking=True)
                            unpaced_bytes += piece.nbytes
                    self._pace(unpaced_bytes)
                for event in (ready, source_free):
                    if event is not None:
                        event.record(self._stream)
        except RuntimeError as error:
            raise copy_failed("a copy to the device", error) from error
        if self.log is not None:
            self.log.copied(label, nbytes, start, end)
        self.bytes_copied += nbytes

    def compute_wait(self, ready: torch.cuda.Event) -> None:
        stream = torch.cuda.current_stream(self._device)
        with self._stalls.around(stream) as (start, end):
            stream.wait_event(ready)
        if self.log is not None:
            self.log.stalled(start, end)

    def compute_record(self, free: torch.cuda.Event) -> None:
        free.record(torch.cuda.current_stream(self._device))

    def is_done(self, ready: torch.cuda.Event) -> bool:
        return ready.query()

    def wait(self, ready: torch.cuda.Event) -> None:
        try:
            ready.synchronize()
        except RuntimeError as error:
            raise copy_failed("a copy to the device", error) from error

    def drain(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self.drain()


# One thing to bring to the device: the lane whose buffer it takes, with its key there, and its source: uint8 [n], host.
Item = tuple[Label, torch.Tensor]


@dataclass(eq=False)
class _Buffer:
    """One device buffer: `ready` fires when its item has arrived, `free` after the item's last read."""

    data: torch.Tensor  # uint8 [buffer_bytes], device
    ready: Any
    free: Any


class _Lane:
    """A ring of buffers that items of one kind take in turn: each is idle, then its item arrives, then it is held until
    whoever reads it lets go of it.

    In each state the oldest comes first, so that the buffers keep their order.
    """

    def __init__(self, buffers: Sequence[_Buffer]) -> None:
        self.buffers = buffers
        self.idle = deque(buffers)  # every earlier user has let go of them
        self.arriving = deque[_Buffer]()  # their items are queued, and not yet in use
        self.held = deque[_Buffer]()  # in use


class CopySchedule:
    """Queues the items of pass after pass as far ahead as there are buffers.

    A pass may be interrupted anywhere: what it leaves shows where buffers and items are counted, as both are moved one
    at a time, and an item is forgotten when its buffer has been moved.

    Args:
        engine: The copy queue.
        lanes: Device buffers of each ring: uint8 [buffer_bytes] each.
        plan_pass: Called whenever the schedule has to know what another pass will bring, in the order of its use.
    """

    def __init__(
        self, engine: CopyEngine, lanes: Mapping[str, Sequence[torch.Tensor]], plan_pass: Callable[[], Sequence[Item]]
    ) -> None:
        self._engine = engine
        self._plan_pass = plan_pass
        self._lanes = {
            name: _Lane([_Buffer(data, engine.new_event(), engine.new_event()) for data in buffers])
            for name, buffers in lanes.items()
        }
        self._left: deque[Item] = deque()  # of the running pass and the planned one, what has not been taken yet
        # Planned and not begun. Not more than one, because the state that it was planned from goes stale.
        self._planned: Sequence[Item] | None = None
        for lane in self._lanes.values():
            for buffer in lane.buffers:  # the allocator may hand out memory that queued kernels still use
                engine.compute_record(buffer.free)

    def begin_pass(self, *, is_valid: bool) -> Sequence[Item]:
        """Start a pass, whose items are returned; what an interrupted one left behind is dropped.

        `fill` has to follow: planning another pass in here would replace the state that this one was planned from.

        Args:
            is_valid: Whether what was planned last still describes the pass.
        """
        items, rings = self._planned, self._lanes.values()
        # None is held, or was on its way from one state to the next when a pass was interrupted.
        has_ended = all(len(ring.idle) + len(ring.arriving) == len(ring.buffers) for ring in rings)
        if items is None or len(self._left) > len(items) or not has_ended or not is_valid:
            # Copies run in order, so a buffer's next copy cannot overtake one that is dropped, and its `free` event
            # still guards reads. Planning may be interrupted, and then nothing is planned.
            self._planned = None
            self._left.clear()
            for ring in rings:
                held = [one for one in ring.buffers if one not in ring.idle and one not in ring.arriving]
                for buffer in held:  # kernels that are already queued may still read what an interrupted pass held
                    self._engine.compute_record(buffer.free)
                ring.idle, ring.arriving, ring.held = deque([*ring.idle, *ring.arriving, *held]), deque(), deque()
            items = self._plan()
        self._planned = None
        return items

    def take(self, lane: str, key: tuple[int, ...]) -> torch.Tensor:
        """Return the buffer of the pass's next item, which must be `key` of `lane`: uint8 [buffer_bytes], to be read by
        compute issued from now on, until `release`."""
        (label, _), ring = self._left[0], self._lanes[lane]
        assert label == (lane, key), f"{lane} {key} is not next: {label} is"
        assert ring.arriving, "every buffer is held: the item cannot arrive"
        buffer = ring.arriving.popleft()
        ring.held.append(buffer)
        self._left.popleft()
        self._engine.compute_wait(buffer.ready)
        return buffer.data

    def release(self, lane: str) -> None:
        """Let go of the buffer of `lane` that was taken first, behind the compute that has been issued so far, and fill
        it again."""
        ring = self._lanes[lane]
        buffer = ring.held.popleft()
        self._engine.compute_record(buffer.free)
        ring.idle.append(buffer)
        self.fill()

    def fill(self) -> None:
        """Queue copies as far ahead as there are buffers."""
        while True:
            queued = sum(len(lane.arriving) for lane in self._lanes.values())  # items at the front of `_left`
            if queued == len(self._left) and (self._planned is not None or not self._plan()):
                return
            label, source = self._left[queued]
            ring = self._lanes[label[0]]
            if not ring.idle:
                return
            buffer = ring.idle[0]
            copies = [(buffer.data[: source.nbytes], source)]
            self._engine.enqueue(copies, free=buffer.free, ready=buffer.ready, label=label)
            ring.arriving.append(ring.idle.popleft())

    def _plan(self) -> Sequence[Item]:
        items = self._plan_pass()
        self._left.extend(items)
        self._planned = items
        return items


LayerViews = Any  # the weights of a layer; how they are stored is nothing to a copy
WEIGHTS = "weights"
KV = "kv"


class StreamedKV(Protocol):
    """Says what the streamer needs of a KV cache that lives in host memory."""

    def snapshot(self) -> Any:
        """Return which of its blocks a pass that is planned now would stream."""

    def is_valid(self, snapshot: Any) -> bool:
        """Return whether a pass that begins now may go by this snapshot."""

    def pieces(self, layer: int, snapshot: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        """Return the key and source (uint8 [n], host) of each of the layer's pieces, in the order in which they are
        taken."""

    def begin_pass(self, card: int, snapshot: Any, schedule: CopySchedule) -> None:
        """A pass begins; the pieces of a card's layers come out of the lane `KV` of its schedule."""


@dataclass(frozen=True)
class CardRing:
    """Holds what the layers of a card are streamed through: its copy queue, and buffers of its memory, uint8 [n] each.

    `buffers` hold a layer of weights, the largest of the card's; there are none where all of these are resident.
    `kv_buffers` hold pieces of keys and values; there are none where the card streams none. Its layers' experts are in
    a `pool`, if some of them are missing.
    """

    engine: CopyEngine
    buffers: Sequence[torch.Tensor]
    kv_buffers: Sequence[torch.Tensor] = ()
    pool: ExpertPool | None = None


class LayerStreamer:
    """Hands out the weights of one layer after the other, pass after pass. The layers of each card come through a ring
    of its own, and all rings are filled ahead at the same time.

    Args:
        layers_host: One packed buffer per layer: uint8 [bytes of this layer], host, pinned on CUDA.
        resident: Device buffers of the layers that stay: layer index to uint8 [bytes of this layer].
        rings: By the number of the card.
        owners: The card of each layer by its number; empty: all are on the first.
        make_views: Turns a layer's index and its packed buffer into its named weights without copying.
        kv: A KV cache whose pieces cross the links in the same order, or None.
        pool_first: What the pools of experts call the first layer.
    """

    def __init__(
        self, layers_host: Sequence[torch.Tensor], resident: Mapping[int, torch.Tensor], rings: Sequence[CardRing], *,
        make_views: Callable[[int, torch.Tensor], LayerViews], owners: Sequence[int] = (), kv: StreamedKV | None = None,
        pool_first: int = 0,
    ) -> None:  # fmt: skip
        self.num_layers = len(layers_host)
        self._in_pools = range(pool_first, pool_first + self.num_layers)
        self._owners = owners or (0,) * self.num_layers
        streamed = [index for index in range(self.num_layers) if index not in resident]
        for card, ring in enumerate(rings):
            count = sum(self._owners[index] == card for index in streamed)
            assert bool(ring.buffers) == bool(count), "a ring is needed exactly when something is streamed"
            assert len(ring.buffers) <= count, "a ring larger than what it streams wastes buffers"
        assert any(ring.kv_buffers for ring in rings) == (kv is not None)
        self.num_streamed = len(streamed)
        self.bytes_per_pass = sum(layers_host[index].nbytes for index in streamed)  # of weights, over all links
        self._layers_host = layers_host
        self._resident = {index: make_views(index, buffer) for index, buffer in resident.items()}
        self._buffer_views = {
            (index, buffer.data_ptr()): make_views(index, buffer)
            for index in streamed
            for buffer in rings[self._owners[index]].buffers
        }
        self._kv = [kv if ring.kv_buffers else None for ring in rings]
        self._snapshots: list[Any] = [None] * len(rings)  # of the cache, from which the latest passes were planned
        self._planned_bytes_begun = 0
        self._pools = [ring.pool for ring in rings]
        # Of the cards, for a trace of their layers; the engine sets them.
        self.recorders: Sequence[TraceRecorder | None] = [None] * len(rings)
        self._schedules = [
            CopySchedule(ring.engine, {WEIGHTS: ring.buffers, KV: ring.kv_buffers}, partial(self._plan_pass, card))
            for card, ring in enumerate(rings)
        ]
        for schedule in self._schedules:
            schedule.fill()

    @property
    def bytes_begun(self) -> int:
        """Return those of all passes so far: weights, keys and values."""
        return self._planned_bytes_begun + sum(pool.counts.fetched_bytes for pool in self._pools if pool is not None)

    @property
    def has_all(self) -> bool:
        """Return whether all weights are on the device for ever."""
        return not self.num_streamed and not any(self._pools)

    def can_capture(self, rows: int) -> bool:
        """Return whether a pass of so many rows goes on without the host, once it is enqueued."""
        return not any(pool is not None and pool.prefetches_layers(rows) for pool in self._pools)

    def layers(self, rows: int = 1) -> Iterator[tuple[int, LayerViews]]:
        """Iterate over one pass of so many rows: (layer index, its weights on the device), in order.

        The weights of a streamed layer may be read until the next one is asked for. After an interrupted pass the
        cycle starts again at layer 0.
        """
        self.begin_pass(rows)
        yield from self.stride(range(self.num_layers))
        self.end_pass()

    def stride(self, indices: Iterable[int]) -> Iterator[tuple[int, LayerViews]]:
        """Iterate over the next layers of a pass that has begun, as `layers` does. Behind the last one no buffer is
        held: all are filled while the pass is elsewhere."""
        for index in indices:
            with self.layer(index) as weights:
                yield index, weights

    def begin_pass(self, rows: int = 1) -> None:
        """A pass of so many rows begins, which asks for one `layer` after the other."""
        for pool in self._pools:
            if pool is not None:
                pool.begin_pass(rows, self._in_pools)
        for card, (kv, schedule) in enumerate(zip(self._kv, self._schedules, strict=True)):
            items = schedule.begin_pass(is_valid=kv is None or kv.is_valid(self._snapshots[card]))
            self._planned_bytes_begun += sum(source.nbytes for _, source in items)
            if kv is not None:
                kv.begin_pass(card, self._snapshots[card], schedule)
            schedule.fill()  # which may plan the next pass, by a snapshot of its own

    def end_pass(self) -> None:
        """End a pass over the layers, all of which have been enqueued."""
        for pool in self._pools:
            if pool is not None:
                pool.end_pass()

    @contextmanager
    def layer(self, index: int) -> Iterator[LayerViews]:
        """Return the weights of a layer, which may be read meanwhile; of what is streamed it is the next one of its
        card."""
        streamed, card = index not in self._resident, self._owners[index]
        schedule, recorder, pool = self._schedules[card], self.recorders[card], self._pools[card]
        if streamed:
            weights = self._buffer_views[index, schedule.take(WEIGHTS, (index,)).data_ptr()]
        else:
            weights = self._resident[index]
        tracing: AbstractContextManager[Any] = nullcontext()
        if recorder is not None:
            tracing = recorder.span(f"layer {index}", row=COMPUTE, layer=index, streamed=streamed)
        if pool is not None:
            pool.enter(self._in_pools[index])
        with tracing:
            yield weights
        if pool is not None:
            pool.leave(self._in_pools[index])
        if streamed:
            # Not in a `finally`: an abandoned pass ends whenever the garbage collector finds it, in the middle of a
            # later one.
            schedule.release(WEIGHTS)

    @property
    def resident(self) -> Mapping[int, LayerViews]:
        """Return the weights of the layers that stay on the device."""
        return self._resident

    def resident_layers(self) -> list[tuple[int, LayerViews]] | None:
        """Return what `layers` hands out, for passes that take no part in the streaming; None when some are
        streamed. Where experts are missing such a pass, too, begins with `begin_pass` and ends with `end_pass`."""
        return None if self.num_streamed else [(index, self._resident[index]) for index in range(self.num_layers)]

    def _plan_pass(self, card: int) -> list[Item]:
        """Return what the next pass brings to a card."""
        items: list[Item] = []
        if (kv := self._kv[card]) is not None:
            self._snapshots[card] = kv.snapshot()
        for index, source in enumerate(self._layers_host):
            if self._owners[index] != card:
                continue
            if index not in self._resident:
                items.append(((WEIGHTS, (index,)), source))
            if kv is not None:
                items += [((KV, key), source) for key, source in kv.pieces(index, self._snapshots[card])]
        return items
