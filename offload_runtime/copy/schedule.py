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
from functools import partial
from typing import Any, Protocol

import torch

from offload_runtime.copy.queue import CopyEngine
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

    def begin_pass(self, card: int, snapshot: Any, schedule: CopySchedule) -> None:
        """A pass begins; the pieces of a card's layers come out of the lane `KV` of its schedule."""


@dataclass(frozen=True)
class CardRing:
    """What the layers of a card are streamed through: its copy queue, and buffers of its memory, uint8 [n] each.

    `buffers` hold a layer of weights, the largest of the card's; there are none where all of these are resident.
    `kv_buffers` hold pieces of keys and values; there are none where the card streams none.
    """

    engine: CopyEngine
    buffers: Sequence[torch.Tensor]
    kv_buffers: Sequence[torch.Tensor] = ()


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
    """

    def __init__(
        self, layers_host: Sequence[torch.Tensor], resident: Mapping[int, torch.Tensor], rings: Sequence[CardRing], *,
        make_views: Callable[[int, torch.Tensor], LayerViews], owners: Sequence[int] = (), kv: StreamedKV | None = None,
    ) -> None:  # fmt: skip
        self.num_layers = len(layers_host)
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
        self.bytes_begun = 0  # of all passes so far, weights and KV
        # Of the cards, for a trace of their layers; the engine sets them.
        self.recorders: Sequence[TraceRecorder | None] = [None] * len(rings)
        self._schedules = [
            CopySchedule(ring.engine, {WEIGHTS: ring.buffers, KV: ring.kv_buffers}, partial(self._plan_pass, card))
            for card, ring in enumerate(rings)
        ]
        for schedule in self._schedules:
            schedule.fill()

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
        for card, (kv, schedule) in enumerate(zip(self._kv, self._schedules, strict=True)):
            items = schedule.begin_pass(is_valid=kv is None or kv.is_valid(self._snapshots[card]))
            self.bytes_begun += sum(source.nbytes for _, source in items)
            if kv is not None:
                kv.begin_pass(card, self._snapshots[card], schedule)
            schedule.fill()  # which may plan the next pass, by a snapshot of its own

    @contextmanager
    def layer(self, index: int) -> Iterator[LayerViews]:
        """The weights of a layer, which may be read meanwhile; of what is streamed it is the next one of its card."""
        streamed, card = index not in self._resident, self._owners[index]
        schedule, recorder = self._schedules[card], self.recorders[card]
        if streamed:
            weights = self._buffer_views[index, schedule.take(WEIGHTS, (index,)).data_ptr()]
        else:
            weights = self._resident[index]
        tracing: AbstractContextManager[Any] = nullcontext()
        if recorder is not None:
            tracing = recorder.span(f"layer {index}", row=COMPUTE, layer=index, streamed=streamed)
        with tracing:
            yield weights
        if streamed:
            # Not in a `finally`: an abandoned pass ends whenever the garbage collector finds it, in the middle of a
            # later one.
            schedule.release(WEIGHTS)

    def resident_layers(self) -> list[tuple[int, LayerViews]] | None:
        """What `layers` hands out, for passes that take no part in the streaming; None when some are streamed."""
        return None if self.num_streamed else [(index, self._resident[index]) for index in range(self.num_layers)]

    def _plan_pass(self, card: int) -> list[Item]:
        """What the next pass brings to a card."""
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
