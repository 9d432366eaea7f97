"""The cards that a model's layers are dealt out to, and how the rows of a pass hop from one to the next.

A card is a device with a budget, a link, a copy queue and caches of its own. One device that is named twice makes two
cards: all that keeps them apart is which tensors are whose, so whoever works for a card says so (`on_card`), and a
test can watch that nobody touches another's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch
from offload_runtime_kernels.copy_words import copy_words

from offload_runtime.memory.device import current_device, hold_pinned

_WORD_BYTES = 4


@dataclass(frozen=True)
class Card:
    """One of the cards of a run, by its number."""

    number: int
    device: torch.device


@dataclass(frozen=True)
class LayerPartition:
    """Which card each layer of a model is on. The first card has what is not of any layer: embedding, head, tokens.

    `owners` are the numbers of the cards, by layer.
    """

    cards: tuple[Card, ...]
    owners: tuple[int, ...]

    @classmethod
    def of_one(cls, device: torch.device, num_layers: int) -> LayerPartition:
        """All layers on one card."""
        return cls((Card(0, device),), (0,) * num_layers)

    @property
    def on_one_device(self) -> bool:
        """Whether all cards are one device, whose work a CUDA graph can hold."""
        return len({card.device for card in self.cards}) == 1

    def card_of(self, layer: int) -> Card:
        """The card of a layer; behind the last one the first card."""
        return self.cards[self.owners[layer] if layer < len(self.owners) else 0]

    def layers_of(self, card: Card) -> list[int]:
        """The layers of a card, in order."""
        return [layer for layer, owner in enumerate(self.owners) if owner == card.number]

    def layer_slots(self) -> list[tuple[int, int]]:
        """Of each layer its card, and which of the card's layers it is."""
        counts = [0] * len(self.cards)
        found = []
        for owner in self.owners:
            found.append((owner, counts[owner]))
            counts[owner] += 1
        return found


_CURRENT: ContextVar[int | None] = ContextVar("current card", default=0)


def current_card() -> int | None:
    """The number of the card that is worked for, the first one outside of `on_card`; None in a `hop`, which works for
    two. So a test can watch that nobody touches another card's tensors."""
    return _CURRENT.get()


@contextmanager
def on_card(card: Card) -> Iterator[None]:
    """Work for a card: its device is the current one meanwhile."""
    with _working_for(card.number), current_device(card.device):
        yield


@contextmanager
def _working_for(number: int | None) -> Iterator[None]:
    before = _CURRENT.set(number)
    try:
        yield
    finally:
        _CURRENT.reset(before)


@dataclass(frozen=True)
class Departure:
    """Tensors on their way from one card to another: on the first, or in page-locked memory where the other does not
    reach that. `left` fires when they are there; None on one device."""

    tensors: Sequence[torch.Tensor]
    source: Card
    pinned: Sequence[torch.Tensor] = ()
    left: torch.cuda.Event | None = None


def hop(tensors: Sequence[torch.Tensor], source: Card, target: Card) -> list[torch.Tensor]:
    """Copies of tensors on `source` for `target`, of which the same tensors if both are one card."""
    return arrive(depart(tensors, source, target), target)


def depart(tensors: Sequence[torch.Tensor], source: Card, target: Card) -> Departure:
    """The first half of a hop, enqueued behind what the current stream of `source` has to do. Never waits.

    Between devices that do not reach each other's memory the bytes go through page-locked memory, by kernels: in a copy
    queue they would wait behind a layer, 11 to 20 ms.
    """
    if source.device == target.device:
        return Departure(tensors, source)
    with on_card(source):
        pinned = [] if reaches(source.device, target.device) else to_host(tensors, source.device)
        left = torch.cuda.Event()
        left.record(torch.cuda.current_stream(source.device))
    return Departure(tensors, source, pinned, left)


def arrive(departure: Departure, target: Card) -> list[torch.Tensor]:
    """The second half: in front of what comes next on the current stream of `target`, and in nobody else's way, so that
    the source goes on with other rows meanwhile. The memory is the allocator's again when the stream has come so far.
    """
    tensors, source = departure.tensors, departure.source
    if source == target:
        return list(tensors)
    with on_card(target):
        landed = [torch.empty(tensor.shape, dtype=tensor.dtype, device=target.device) for tensor in tensors]
        if departure.left is not None:
            torch.cuda.current_stream(target.device).wait_event(departure.left)
    with _working_for(None), current_device(target.device):
        if departure.pinned:
            from_host(departure.pinned, landed)
            return landed
        with (
            nullcontext() if departure.left is None else _behind(departure.left, source.device, target.device, tensors)
        ):
            for one, tensor in zip(landed, tensors, strict=True):
                one.copy_(tensor, non_blocking=True)
    return landed


@contextmanager
def _behind(
    left: torch.cuda.Event, source: torch.device, target: torch.device, tensors: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Around copies of tensors to another device, which torch enqueues on the current stream of the source and orders
    with that of the target both ways: a stream of their own, behind `left`, keeps what else the source does out of it.
    """
    stream = _hop_stream(source)
    stream.wait_event(left)
    for tensor in tensors:
        tensor.record_stream(stream)
    with torch.cuda.stream(stream), torch.cuda.device(target):
        yield


@cache
def _hop_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def to_host(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Bytes of tensors of a GPU in page-locked memory, in whole words: int32 [n] each, written by kernels on the
    device's current stream."""
    found = []
    for tensor in tensors:
        words = -(-tensor.nbytes // _WORD_BYTES)
        pinned = torch.empty(words, dtype=torch.int32, pin_memory=True)
        copy_words(_words(tensor, words), pinned)
        hold_pinned(pinned, device)
        found.append(pinned)
    return found


def from_host(pinned: Sequence[torch.Tensor], landed: Sequence[torch.Tensor]) -> None:
    """The way back, into tensors of another GPU, on its current stream."""
    for host, tensor in zip(pinned, landed, strict=True):
        words = torch.empty_like(host, device=tensor.device)
        copy_words(host, words)
        hold_pinned(host, tensor.device)
        tensor.copy_(words.view(torch.uint8)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))


@cache
def reaches(one: torch.device, other: torch.device) -> bool:
    """Whether a GPU reads the memory of another one."""
    return torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one)


def _words(tensor: torch.Tensor, count: int) -> torch.Tensor:
    data = tensor.contiguous().view(-1).view(torch.uint8)
    missing = count * _WORD_BYTES - data.numel()
    return (torch.nn.functional.pad(data, (0, missing)) if missing else data).view(torch.int32)
