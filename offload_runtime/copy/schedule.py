"""The cyclic schedule of copies to the device.

Items pass through rings of device buffers in a fixed order, pass after pass without end: the first items of the next
pass are on their way while this pass still computes, while tokens are sampled, while a draft drafts. The link idles
only when every buffer that the next item could take is full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from offload_runtime.copy.queue import CopyEngine
from offload_runtime.memory import LayerPartition
from offload_runtime.trace import COMPUTE, Label, TraceRecorder

# One thing to bring to the device: the ring, or lane, whose buffer it takes, with its key there, and its source: uint8
# [n], host.
Item = tuple[Label, torch.Tensor]


@dataclass
class _Buffer:
    """One device buffer: `ready` fires when its item has arrived, `free` after the item's last read."""

    data: torch.Tensor  # uint8 [buffer_bytes], device
    ready: Any
    free: Any


@dataclass
class _Lane:
    """A ring of buffers that items of one kind take in turn: each is idle, then its item arrives, then it is held until
    whoever reads it lets go of it.

    In each state the oldest comes first, so that the buffers keep their order.
    """

    idle: deque[_Buffer]  # every earlier user has let go of them
    arriving: deque[_Buffer] = field(default_factory=deque)  # their items are queued, and not yet in use
    held: deque[_Buffer] = field(default_factory=deque)  # in use


class CopySchedule:
    """Queues the items of pass after pass as far ahead as there are buffers.

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
            name: _Lane(deque(_Buffer(data, engine.new_event(), engine.new_event()) for data in buffers))
            for name, buffers in lanes.items()
        }
        self._left: deque[Item] = deque()  # of the running pass and the planned one, what has not been taken yet
        # Planned and not begun. Not more than one, because the state that it was planned from goes stale.
        self._planned: Sequence[Item] | None = None
        for lane in self._lanes.values():
            for buffer in lane.idle:  # the allocator may hand out memory that queued kernels still use
                engine.compute_record(buffer.free)

    def begin_pass(self, *, is_valid: bool) -> Sequence[Item]:
        """Start a pass, whose items are returned; what an interrupted one left behind is dropped.

        `fill` has to follow: planning another pass in here would replace the state that this one was planned from.

        Args:
            is_valid: Whether what was planned last still describes the pass.
        """
        for ring in self._lanes.values():
            while ring.held:  # kernels that are already queued may still read what an interrupted pass held
                self._let_go(ring)
        items = self._planned
        if items is None or len(self._left) > len(items) or not is_valid:
            # Copies run in order, so a buffer's next copy cannot overtake one that is dropped, and its `free` event
            # still guards reads. Planning may be interrupted, and then nothing is planned.
            self._planned = None
            self._left.clear()
            for ring in self._lanes.values():
                ring.idle.extend(ring.arriving)
                ring.arriving.clear()
            items = self._plan()
        self._planned = None
        return items

    def take(self, lane: str, key: tuple[int, ...]) -> torch.Tensor:
        """The buffer of the pass's next item, which must be `key` of `lane`: uint8 [buffer_bytes], to be read by
        compute issued from now on, until `release`."""
        (label, _), ring = self._left.popleft(), self._lanes[lane]
        assert label == (lane, key), f"{lane} {key} is not next: {label} is"
        assert ring.arriving, "every buffer is held: the item cannot arrive"
        buffer = ring.arriving.popleft()
        ring.held.append(buffer)
        self._engine.compute_wait(buffer.ready)
        return buffer.data

    def release(self, lane: str) -> None:
        """Let go of the buffer of `lane` that was taken first, and fill it again."""
        self._let_go(self._lanes[lane])
        self.fill()

    def _let_go(self, ring: _Lane) -> None:
        """Let go of the buffer of a ring that was taken first, behind the compute that has been issued so far."""
        buffer = ring.held.popleft()
        self._engine.compute_record(buffer.free)
        ring.idle.append(buffer)

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
            self._engine.enqueue(
                buffer.data[: source.nbytes], source, free=buffer.free, ready=buffer.ready, label=label
            )
            ring.arriving.append(ring.idle.popleft())

    def _plan(self) -> Sequence[Item]:
        self._planned = items = self._plan_pass()
        self._left.extend(items)
        return items


LayerViews = Mapping[str, Any]  # the weights of a layer by name; how they are stored is nothing to a copy
WEIGHTS = "weights"
KV = "kv"


class StreamedKV(Protocol):
    """What the streamer needs of a KV cache that lives in host memory."""

    def snapshot(self) -> Any:
        """Which of its blocks a pass that is planned now would stream."""

    def is_valid(self, snapshot: Any) -> bool:
        """Whether a pass that begins now may go by this snapshot."""

    def pieces(self, layer: int, snapshot: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        """Key and source (uint8 [n], host) of each of the layer's pieces, in the order in which they are taken."""

    def begin_pass(self, snapshot: Any, schedule: CopySchedule) -> None:
        """A pass begins; its pieces come out of the lane `KV` of the schedule."""


class LayerStreamer:
    """Hands out the weights of one layer after the other, pass after pass.

    Args:
        layers_host: One packed buffer per layer: uint8 [bytes of this layer], host, pinned on CUDA.
        resident: Device buffers of the layers that stay: layer index to uint8 [bytes of this layer].
        buffers: Device buffers of the ring: uint8 [bytes of the largest layer] each; none when every layer is resident.
        make_views: Turns a layer's index and its packed buffer into its named weights without copying.
        engine: The copy queue.
        kv: A KV cache whose pieces cross the link in the same order, or None.
        kv_buffers: Device buffers of its ring: uint8 each.
        numbers: Of each layer its number in the model that these are some layers of, for a trace; None: its own.
    """

    def __init__(
        self, layers_host: Sequence[torch.Tensor], resident: dict[int, torch.Tensor],
        buffers: Sequence[torch.Tensor], *,
        make_views: Callable[[int, torch.Tensor], LayerViews], engine: CopyEngine, kv: StreamedKV | None = None,
        kv_buffers: Sequence[torch.Tensor] = (), numbers: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self._numbers = numbers or range(len(layers_host))
        streamed = [index for index in range(len(layers_host)) if index not in resident]
        assert bool(buffers) == bool(streamed), "a ring is needed exactly when something is streamed"
        assert len(buffers) <= len(streamed), "a ring larger than what it streams wastes buffers"
        assert bool(kv_buffers) == (kv is not None)
        self.num_layers, self.num_streamed = len(layers_host), len(streamed)
        self.bytes_per_pass = sum(layers_host[index].nbytes for index in streamed)  # of weights, over the link
        self._layers_host = layers_host
        self._resident = {index: make_views(index, buffer) for index, buffer in resident.items()}
        self._buffer_views = {(i, buffer.data_ptr()): make_views(i, buffer) for i in streamed for buffer in buffers}
        self._kv = kv
        self._snapshot: Any = None  # of the cache, from which the latest pass was planned
        self.bytes_begun = 0  # of all passes so far, weights and KV
        self.recorder: TraceRecorder | None = None  # whoever wants a trace of the layers sets it
        self.schedule = CopySchedule(engine, {WEIGHTS: buffers, KV: kv_buffers}, self._plan_pass)
        self.schedule.fill()

    def layers(self) -> Iterator[tuple[int, LayerViews]]:
        """Iterate over one pass: (layer index, its weights on the device), in order.

        The weights of a streamed layer may be read until the next one is asked for. After an interrupted pass the
        cycle starts again at layer 0.
        """
        self.begin_pass()
        for index in range(self.num_layers):
            with self.layer(index) as weights:
                yield index, weights

    def begin_pass(self) -> None:
        """A pass begins, which asks for one `layer` after the other."""
        kv = self._kv
        items = self.schedule.begin_pass(is_valid=kv is None or kv.is_valid(self._snapshot))
        self.bytes_begun += sum(source.nbytes for _, source in items)
        if kv is not None:
            kv.begin_pass(self._snapshot, self.schedule)
        self.schedule.fill()  # which may plan the next pass, by a snapshot of its own

    @contextmanager
    def layer(self, index: int) -> Iterator[LayerViews]:
        """The weights of the next layer of a pass, which may be read meanwhile; of a resident one of any layer."""
        streamed, recorder = index not in self._resident, self.recorder
        if streamed:
            weights = self._buffer_views[index, self.schedule.take(WEIGHTS, (index,)).data_ptr()]
        else:
            weights = self._resident[index]
        number = self._numbers[index]
        tracing: AbstractContextManager[Any] = nullcontext()
        if recorder is not None:
            tracing = recorder.span(f"layer {number}", row=COMPUTE, layer=number, streamed=streamed)
        with tracing:
            yield weights
        if streamed:
            # Not in a `finally`: an abandoned pass ends whenever the garbage collector finds it, in the middle of a
            # later one.
            self.schedule.release(WEIGHTS)

    def resident_layers(self) -> list[tuple[int, LayerViews]] | None:
        """What `layers` hands out, for passes that take no part in the streaming; None when some are streamed."""
        return None if self.num_streamed else [(index, self._resident[index]) for index in range(self.num_layers)]

    def _plan_pass(self) -> list[Item]:
        items: list[Item] = []
        if self._kv is not None:
            self._snapshot = self._kv.snapshot()
        for index, source in enumerate(self._layers_host):
            if index not in self._resident:
                items.append(((WEIGHTS, (index,)), source))
            if self._kv is not None:
                items += [((KV, key), source) for key, source in self._kv.pieces(index, self._snapshot)]
        return items


class MultiCardStreamer:
    """The same of a model whose layers are dealt out: each card streams its own over a link of its own, and all of
    these work ahead at the same time.

    Args:
        partition: Which card each layer is on.
        streamers: Of the cards.
    """

    def __init__(self, partition: LayerPartition, streamers: Sequence[LayerStreamer]) -> None:
        self._streamers, self._layer_slots = streamers, partition.layer_slots()
        self.num_layers, self.num_streamed = len(self._layer_slots), sum(one.num_streamed for one in streamers)
        self.bytes_per_pass = sum(one.bytes_per_pass for one in streamers)

    @property
    def bytes_begun(self) -> int:
        """Of all passes so far, over all links."""
        return sum(one.bytes_begun for one in self._streamers)

    def layers(self) -> Iterator[tuple[int, LayerViews]]:
        """As of `LayerStreamer`."""
        self.begin_pass()
        for index in range(self.num_layers):
            with self.layer(index) as weights:
                yield index, weights

    def begin_pass(self) -> None:
        """As of `LayerStreamer`."""
        for streamer in self._streamers:
            streamer.begin_pass()

    def layer(self, index: int) -> AbstractContextManager[LayerViews]:
        """As of `LayerStreamer`."""
        card, number = self._layer_slots[index]
        return self._streamers[card].layer(number)

    def resident_layers(self) -> list[tuple[int, LayerViews]] | None:
        """As of `LayerStreamer`."""
        if self.num_streamed:
            return None
        of_cards = [dict(one.resident_layers() or ()) for one in self._streamers]
        return [(index, of_cards[card][number]) for index, (card, number) in enumerate(self._layer_slots)]
