"""The cards that a model's layers are dealt out to, and how the rows of a pass hop from one to the next.

A card is a device with a budget, a link, a copy queue and caches of its own. One device that is named twice makes two
cards: all that keeps them apart is which tensors are whose, so whoever works for a card says so (`on_card`), and a
test can watch that nobody touches another's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
class Deal:
    """Which card each layer of a model is on. The first card has what is not of any layer: embedding, head, tokens.

    `owners` are the numbers of the cards, by layer.
    """

    cards: tuple[Card, ...]
    owners: tuple[int, ...]

    @classmethod
    def to_one(cls, device: torch.device, num_layers: int) -> Deal:
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

    def places(self) -> list[tuple[int, int]]:
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


def hop(tensors: Sequence[torch.Tensor], source: Card, target: Card) -> list[torch.Tensor]:
    """Copies of tensors on `source` for `target`, of which the same tensors if both are one card.

    Enqueued behind the current stream of the one, in front of that of the other; never waits. Between devices that do
    not reach each other's memory the bytes go through page-locked memory, by kernels: in a copy queue they would wait
    behind a layer, 11 to 20 ms.
    """
    if source == target:
        return list(tensors)
    with on_card(target):
        landed = [torch.empty(tensor.shape, dtype=tensor.dtype, device=target.device) for tensor in tensors]
    pairs = list(zip(landed, tensors, strict=True))
    with _working_for(None):
        if source.device == target.device or _reaches(source.device, target.device):
            with current_device(target.device):
                for one, tensor in pairs:
                    one.copy_(tensor, non_blocking=True)
        else:
            _copy_through_host(pairs, source.device, target.device)
    return landed


def _copy_through_host(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], source: torch.device, target: torch.device
) -> None:
    """Copy the second of each pair to the first, on another GPU."""
    with current_device(source):
        pinned = [_to_host(tensor) for _, tensor in pairs]
        written = torch.cuda.Event()
        written.record(torch.cuda.current_stream(source))
    with current_device(target):
        torch.cuda.current_stream(target).wait_event(written)
        for host, (landed, _) in zip(pinned, pairs, strict=True):
            words = torch.empty_like(host, device=target)
            copy_words(host, words)
            landed.copy_(words.view(torch.uint8)[: landed.nbytes].view(landed.dtype).view(landed.shape))
        hold_pinned(pinned, target)


@cache
def _reaches(one: torch.device, other: torch.device) -> bool:
    """Whether a GPU reads the memory of another one."""
    return torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes in page-locked memory, in whole words: int32."""
    words = -(-tensor.nbytes // _WORD_BYTES)
    pinned = torch.empty(words, dtype=torch.int32, pin_memory=True)
    copy_words(_words(tensor, words), pinned)
    return pinned


def _words(tensor: torch.Tensor, count: int) -> torch.Tensor:
    data = tensor.contiguous().view(-1).view(torch.uint8)
    missing = count * _WORD_BYTES - data.numel()
    return (torch.nn.functional.pad(data, (0, missing)) if missing else data).view(torch.int32)
