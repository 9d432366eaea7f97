"""The cyclic schedule of layer weights: what is resident, what is arriving, what is computing.

Streamed layers pass through a ring of device slots in the fixed order 0, 1, …, L-1, 0, 1, … without end: the first
layers of the next pass are on their way while this pass still computes, while tokens are sampled, while a draft
drafts. The link idles only when every slot is full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload_runtime.copy_engine import CopyEngine

LayerViews = dict[str, torch.Tensor]


@dataclass
class _Slot:
    """One device buffer of the ring: `ready` fires when its layer has arrived, `free` after the layer's last read."""

    buffer: torch.Tensor  # [layer_bytes] uint8, device
    views: LayerViews
    ready: Any
    free: Any


class LayerStreamer:
    """Hands out the weights of one layer after the other, pass after pass.

    Args:
        layers_host: One packed buffer per layer: uint8 [layer_bytes], host, pinned on CUDA.
        resident: Device buffers of the layers that stay: layer index to uint8 [layer_bytes].
        slots: Device buffers of the ring: uint8 [layer_bytes] each; none when every layer is resident.
        make_views: Turns a packed buffer into its named tensors without copying.
        engine: The copy queue.
    """

    def __init__(
        self,
        layers_host: Sequence[torch.Tensor],
        resident: dict[int, torch.Tensor],
        slots: Sequence[torch.Tensor],
        *,
        make_views: Callable[[torch.Tensor], LayerViews],
        engine: CopyEngine,
    ) -> None:
        self._layers_host = layers_host
        self._resident = {index: make_views(buffer) for index, buffer in resident.items()}
        self._streamed = [index for index in range(len(layers_host)) if index not in resident]
        assert bool(slots) == bool(self._streamed), "a ring is needed exactly when something is streamed"
        assert len(slots) <= len(self._streamed), "a ring larger than what it streams wastes slots"
        self._slots = [_Slot(buffer, make_views(buffer), engine.new_event(), engine.new_event()) for buffer in slots]
        self._engine = engine
        self._num_used = 0  # streamed items handed out so far, over all passes
        self._num_queued = 0  # streamed items queued for copying so far, over all passes
        self._held: _Slot | None = None  # the slot whose layer is in use
        for slot in self._slots:  # the allocator may hand out memory that queued kernels still use
            engine.compute_record(slot.free)
        self._fill()

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
        """Bytes over the link for one trip through all layers."""
        return sum(self._layers_host[index].nbytes for index in self._streamed)

    def layers(self) -> Iterator[tuple[int, LayerViews]]:
        """Iterate over one pass: (layer index, its weights on the device), in order.

        The weights of a streamed layer may be read until the next one is asked for. After an interrupted pass the
        cycle starts again at layer 0.
        """
        self._release()  # what an interrupted pass held: kernels that are already queued may still read it
        self._rewind()
        self._fill()
        for index in range(self.num_layers):
            if index in self._resident:
                yield index, self._resident[index]
            else:
                yield index, self._acquire(index)
                # Not in a `finally`: an abandoned pass ends whenever the garbage collector finds it, in the middle of
                # a later one.
                self._release()
                self._fill()

    def _acquire(self, index: int) -> LayerViews:
        assert self._streamed[self._num_used % self.num_streamed] == index
        self._held = self._slots[self._num_used % len(self._slots)]
        self._engine.compute_wait(self._held.ready)
        return self._held.views

    def _release(self) -> None:
        if self._held is not None:
            self._engine.compute_record(self._held.free)
            self._held = None
            self._num_used += 1

    def _fill(self) -> None:
        while self._slots and self._num_queued - self._num_used < len(self._slots):
            slot = self._slots[self._num_queued % len(self._slots)]
            source = self._layers_host[self._streamed[self._num_queued % self.num_streamed]]
            self._engine.enqueue(slot.buffer, source, free=slot.free, ready=slot.ready)
            self._num_queued += 1

    def _rewind(self) -> None:
        """Start at layer 0 again when the last pass was left in the middle; what is in flight is dropped."""
        if not self._slots or self._num_used % self.num_streamed == 0:
            return
        # Copies run in order, so a slot's next copy cannot overtake the dropped one; its free event still guards reads.
        cycle = self.num_streamed * len(self._slots)  # a multiple of both, so that slots and layers line up again
        self._num_used = self._num_queued = -(-self._num_queued // cycle) * cycle
