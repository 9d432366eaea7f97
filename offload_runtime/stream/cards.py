"""The cards that a model's layers are dealt out to, and how the rows of a pass cross from one to the next.

A card is a device with a budget, a link, a copy queue and caches of its own. One device that is named twice makes two
cards.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby

import torch
from offload_runtime_kernels.copy_words import copy_words

from offload_runtime.stream.device import current_device

_ALIGNED_BYTES = 16


@dataclass(frozen=True)
class Card:
    """One of the cards of a run, by its number."""

    number: int
    device: torch.device


class TransferBuffers:
    """Page-locked memory that rows pass through where cards do not reach each other's memory.

    All transfers of a piece of a pass go through one buffer: who writes it has computed from what was read there last.
    Made when it is first needed, and never given back, so that a CUDA graph may hold it.

    Args:
        peers: Whether GPUs that reach each other's memory copy there and leave this one alone.
    """

    def __init__(self, *, peers: bool = True) -> None:
        self.peers = peers
        self._buffers: dict[Hashable, list[torch.Tensor]] = {}  # the last one is the largest

    def of(self, piece: Hashable, words: int) -> torch.Tensor:
        """Return the buffer of a piece: int32 [words]."""
        made = self._buffers.setdefault(piece, [])
        if not made or len(made[-1]) < words:
            made.append(torch.empty(words, dtype=torch.int32, pin_memory=True))
        return made[-1][:words]


@dataclass(frozen=True)
class LayerPartition:
    """Which card each layer of a model is on. The first card has what is not of any layer: embedding, head, tokens.

    `owners` are the numbers of the cards, by layer.
    """

    cards: tuple[Card, ...]
    owners: tuple[int, ...]
    transfer_buffers: TransferBuffers = field(default_factory=TransferBuffers, compare=False)

    @classmethod
    def of_one(cls, device: torch.device, num_layers: int) -> LayerPartition:
        """All layers on one card."""
        return cls((Card(0, device),), (0,) * num_layers)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of the cards, each once, the first card's first."""
        return tuple(dict.fromkeys(card.device for card in self.cards))

    @property
    def in_blocks(self) -> bool:
        """Return whether there are several cards and the layers of each follow one another."""
        return len(self.cards) > 1 and are_blocks(self.owners)

    def card_of(self, layer: int) -> Card:
        """The card of a layer; behind the last one the first card."""
        return self.cards[self.owners[layer] if layer < len(self.owners) else 0]


def are_blocks(owners: Sequence[int]) -> bool:
    """Return whether the layers of each card follow one another, by the numbers of their cards."""
    return len(list(groupby(owners))) == len({*owners})


@dataclass(frozen=True)
class Transfer:
    """Tensors on their way from one card to another, packed so that all of them cross at once: uint8 on the source, or
    in page-locked memory (int32) where the target does not reach that; None where both are one card. `left` fires when
    they are there; None on one device."""

    tensors: Sequence[torch.Tensor]
    source: Card
    target: Card
    packed: torch.Tensor | None = None
    left: torch.cuda.Event | None = None


def transfer(
    tensors: Sequence[torch.Tensor], source: Card, target: Card, buffers: TransferBuffers, piece: Hashable = 0
) -> list[torch.Tensor]:
    """Copies of tensors on `source` for `target`, of which the same tensors if both are one card. Arguments as of
    `send`."""
    return receive(send(tensors, source, target, buffers, piece))


def send(
    tensors: Sequence[torch.Tensor], source: Card, target: Card, buffers: TransferBuffers, piece: Hashable = 0
) -> Transfer:
    """The first half of a transfer, enqueued behind what the current stream of `source` has to do. Never waits.

    Between devices that do not reach each other's memory the bytes go through page-locked memory, by kernels: in a copy
    queue they would wait behind a layer, 11 to 20 ms.

    Args:
        tensors: What crosses.
        source: Whose they are.
        target: Whose their copies will be.
        buffers: The run's.
        piece: The part of the pass: what crosses must have been computed from its last transfer, or come after that.
    """
    if source == target:
        return Transfer(tensors, source, target)
    with current_device(source.device):
        packed = _packed(tensors)
        if source.device == target.device:
            return Transfer(tensors, source, target, packed)
        if not (buffers.peers and reaches(source.device, target.device)):
            words = packed.view(torch.int32)
            packed = buffers.of(piece, len(words))
            copy_words(words, packed)
        left = torch.cuda.Event()
        left.record(torch.cuda.current_stream(source.device))
    return Transfer(tensors, source, target, packed, left)


def receive(sent: Transfer, destination: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The second half: in front of what comes next on the current stream of `target`, and in nobody else's way, so that
    the source goes on with other rows meanwhile.

    Args:
        sent: What `send` returned.
        destination: Where it goes if it comes from another card: `aligned_bytes` of the target, uint8, whose last
            content it was computed from, if there was any. None: memory is taken, and is the allocator's again when the
            stream has come so far.
    """
    source, target, packed, left = sent.source, sent.target, sent.packed, sent.left
    if packed is None:
        return list(sent.tensors)
    with current_device(target.device):
        room = destination
        if room is None:
            room = torch.empty(packed.nbytes, dtype=torch.uint8, device=target.device)
        if left is not None:
            torch.cuda.current_stream(target.device).wait_event(left)
        if left is None:
            room.copy_(packed)
        elif packed.device.type == "cpu":
            copy_words(packed, room.view(torch.int32))
        else:
            with _behind(left, source.device, target.device, packed):
                room.copy_(packed, non_blocking=True)
        return _unpacked(room, sent.tensors)


@contextmanager
def _behind(left: torch.cuda.Event, source: torch.device, target: torch.device, packed: torch.Tensor) -> Iterator[None]:
    """Around a copy to another device, which torch enqueues on the current stream of the source and orders with that of
    the target both ways: a stream of their own, behind `left`, keeps what else the source does out of it."""
    stream = _transfer_stream(source)
    stream.wait_event(left)
    packed.record_stream(stream)
    with torch.cuda.stream(stream), torch.cuda.device(target):
        yield


@cache
def _transfer_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def reaches(one: torch.device, other: torch.device) -> bool:
    """Return whether a GPU reads the memory of another one."""
    return torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one)


def aligned_bytes(nbytes: int) -> int:
    """Return what a tensor of so many bytes takes on its way."""
    return -(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of tensors, those of each from a multiple of 16 on: uint8. One that fills its bytes is not
    copied."""
    parts = []
    for tensor in tensors:
        data = tensor.contiguous().view(-1).view(torch.uint8)
        parts += [data, data.new_empty(-len(data) % _ALIGNED_BYTES)]
    parts = [part for part in parts if len(part)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _unpacked(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a packed tensor with the shapes and dtypes of others."""
    found, start = [], 0
    for tensor in like:
        found.append(packed[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += aligned_bytes(tensor.nbytes)
    return found
