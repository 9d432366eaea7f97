"""What crosses the link, pass after pass: layer weights and, where the KV cache is in host memory, its pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from offload_runtime.copy_engine import CopyEngine
from offload_runtime.copy_schedule import CopySchedule, Item, PassPlan
from offload_runtime.tracing import COMPUTE, TraceRecorder

LayerViews = dict[str, torch.Tensor]
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

    def begin_pass(self, snapshot: Any, feed: KVFeed) -> None:
        """A pass begins; its pieces come out of `feed`."""


class KVFeed:
    """Hands the pieces of the KV cache to it, one after the other."""

    def __init__(self, schedule: CopySchedule) -> None:
        self._schedule = schedule

    def take(self, key: tuple[int, ...]) -> torch.Tensor:
        """The next piece, which must be `key`: uint8 [slot_bytes] on the device, valid until `release`."""
        return self._schedule.take(KV, key)

    def release(self) -> None:
        """Let go of the piece that was taken first."""
        self._schedule.release(KV)
        self._schedule.fill()


class ResidentLayers:
    """Weights that are all on the device, for passes that do not take part in the streaming.

    Args:
        views: The layers, in order.
    """

    def __init__(self, views: Sequence[LayerViews]) -> None:
        self._views = views
        self.num_layers = len(views)

    def layers(self) -> Iterator[tuple[int, LayerViews]]:
        """Iterate over one pass: (layer index, its weights), in order."""
        return enumerate(self._views)


class LayerStreamer:
    """Hands out the weights of one layer after the other, pass after pass.

    Args:
        layers_host: One packed buffer per layer: uint8 [layer_bytes], host, pinned on CUDA.
        resident: Device buffers of the layers that stay: layer index to uint8 [layer_bytes].
        slots: Device buffers of the ring: uint8 [layer_bytes] each; none when every layer is resident.
        make_views: Turns a packed buffer into its named tensors without copying.
        engine: The copy queue.
        kv: A KV cache whose pieces cross the link in the same order, or None.
        kv_slots: Device buffers of its ring: uint8 each.
    """

    def __init__(
        self,
        layers_host: Sequence[torch.Tensor],
        resident: dict[int, torch.Tensor],
        slots: Sequence[torch.Tensor],
        *,
        make_views: Callable[[torch.Tensor], LayerViews],
        engine: CopyEngine,
        kv: StreamedKV | None = None,
        kv_slots: Sequence[torch.Tensor] = (),
    ) -> None:
        self._layers_host = layers_host
        self._resident = {index: make_views(buffer) for index, buffer in resident.items()}
        self._streamed = [index for index in range(len(layers_host)) if index not in resident]
        assert bool(slots) == bool(self._streamed), "a ring is needed exactly when something is streamed"
        assert len(slots) <= len(self._streamed), "a ring larger than what it streams wastes slots"
        assert bool(kv_slots) == (kv is not None)
        self._kv = kv
        self._slot_views = {slot.data_ptr(): make_views(slot) for slot in slots}
        self._bytes_begun = 0
        self.recorder: TraceRecorder | None = None  # whoever wants a trace of the layers sets it
        self.schedule = CopySchedule(engine, {WEIGHTS: slots, KV: kv_slots}, self._plan_pass)
        self.schedule.fill()

    @property
    def num_layers(self) -> int:
        """Layers of the model, resident and streamed."""
        return len(self._layers_host)

    @property
    def num_streamed(self) -> int:
        """Layers that pass through the ring."""
        return len(self._streamed)

    @property
    def bytes_per_pass(self) -> int:
        """Bytes of weights over the link for one trip through all layers."""
        return sum(self._layers_host[index].nbytes for index in self._streamed)

    @property
    def bytes_begun(self) -> int:
        """Bytes of all passes begun so far, weights and KV."""
        return self._bytes_begun

    def layers(self) -> Iterator[tuple[int, LayerViews]]:
        """Iterate over one pass: (layer index, its weights on the device), in order.

        The weights of a streamed layer may be read until the next one is asked for. After an interrupted pass the
        cycle starts again at layer 0.
        """
        kv = self._kv
        plan = self.schedule.begin_pass(lambda snapshot: kv is None or kv.is_valid(snapshot))
        self._bytes_begun += sum(item.source.nbytes for item in plan.items)
        if kv is not None:
            kv.begin_pass(plan.snapshot, KVFeed(self.schedule))
        recorder = self.recorder
        for index in range(self.num_layers):
            streamed = index not in self._resident
            if streamed:
                weights = self._slot_views[self.schedule.take(WEIGHTS, (index,)).data_ptr()]
            else:
                weights = self._resident[index]
            started = None if recorder is None else recorder.mark()
            yield index, weights
            if recorder is not None:
                told = {"layer": index, "streamed": streamed}
                recorder.add(COMPUTE, f"layer {index}", started, recorder.mark(), told)
            if streamed:
                # Not in a `finally`: an abandoned pass ends whenever the garbage collector finds it, in the middle of
                # a later one.
                self.schedule.release(WEIGHTS)
                self.schedule.fill()

    def resident_layers(self) -> ResidentLayers | None:
        """The weights for passes of their own beside this stream; None when some are streamed."""
        return None if self._streamed else ResidentLayers([self._resident[index] for index in range(self.num_layers)])

    def _plan_pass(self) -> PassPlan:
        snapshot = None if self._kv is None else self._kv.snapshot()
        items: list[Item] = []
        for index, source in enumerate(self._layers_host):
            if index not in self._resident:
                items.append(Item(WEIGHTS, (index,), source))
            if self._kv is not None:
                items += [Item(KV, key, source) for key, source in self._kv.pieces(index, snapshot)]
        return PassPlan(items, snapshot)
