"""Keys and values of a model whose layers are dealt out to several cards: each card's are in a cache of its own, which
knows its layers by numbers of its own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from offload_runtime_kernels.attention import QueryRows
from offload_runtime_kernels.kv_blocks import KVBlocks

from offload_runtime.kv.device import KVCache, LayerCache
from offload_runtime.kv.retrieval import RetrievalCache
from offload_runtime.memory import Deal, on_card

Cache = TypeVar("Cache", bound=LayerCache)
Found = TypeVar("Found")


class _DealtLayers(Generic[Cache]):
    """What a decoder layer needs, from the cache of its card."""

    def __init__(self, deal: Deal, caches: Sequence[Cache]) -> None:
        assert len(caches) == len(deal.cards)
        self.caches, self._deal, self._places = caches, deal, deal.places()

    def store(self, layer: int) -> KVBlocks:
        card, number = self._places[layer]
        return self.caches[card].store(number)

    def attend(self, layer: int, q: torch.Tensor, rows: QueryRows) -> torch.Tensor:
        card, number = self._places[layer]
        return self.caches[card].attend(number, q, rows)

    def _of_each(self, call: Callable[[Cache], Found]) -> list[Found]:
        """What a call gives of the cache of each card, which is worked for meanwhile."""
        found = []
        for card, cache in zip(self._deal.cards, self.caches, strict=True):
            with on_card(card):
                found.append(call(cache))
        return found


class DealtKVCache(_DealtLayers[KVCache]):
    """A cache of whole sequences, on the device or in host memory: all cards' hold the same tokens of each.

    Args:
        deal: Which card each layer is on.
        caches: Of the cards.
    """

    def __init__(self, deal: Deal, caches: Sequence[KVCache]) -> None:
        super().__init__(deal, caches)
        first = caches[0]
        self.capacity_tokens, self.max_tokens_with_draft = first.capacity_tokens, first.max_tokens_with_draft

    @property
    def pinned_bytes(self) -> int:
        return sum(cache.pinned_bytes for cache in self.caches)

    def length(self, sequence: int) -> int:
        # An interruption may have come between two cards.
        return min(cache.length(sequence) for cache in self.caches)

    def begin_window(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        self._of_each(lambda cache: cache.begin_window(sequences, counts))

    def begin_prefill(self, sequence: int, count: int) -> None:
        self._of_each(lambda cache: cache.begin_prefill(sequence, count))

    def end_prefill(self, sequence: int, count: int) -> None:
        self._of_each(lambda cache: cache.end_prefill(sequence, count))

    def commit(self, sequence: int, count: int) -> None:
        self._of_each(lambda cache: cache.commit(sequence, count))

    def commit_path(self, sequence: int, rows: Sequence[int]) -> None:
        self._of_each(lambda cache: cache.commit_path(sequence, rows))

    def truncate(self, sequence: int, length: int) -> None:
        self._of_each(lambda cache: cache.truncate(sequence, length))

    def close(self) -> None:
        for cache in self.caches:
            cache.close()


class DealtRetrievalCache(_DealtLayers[RetrievalCache]):
    """What a retrieval verifier sees of such a cache: each card's chunks beside its newest blocks.

    Args:
        deal: Which card each layer is on.
        caches: Of the cards.
    """

    def begin_steps(self, rows: range, counts: Mapping[int, int]) -> bool:
        """As of `RetrievalCache`."""
        return any(self._of_each(lambda cache: cache.begin_steps(rows, counts)))

    def begin_step(self, *, first: bool) -> Hashable:
        """As of `RetrievalCache`."""
        return tuple(cache.begin_step(first=first) for cache in self.caches)

    def forget(self) -> None:
        """As of `RetrievalCache`."""
        self._of_each(lambda cache: cache.forget())

    def warm_up(self) -> None:
        """As of `RetrievalCache`."""
        self._of_each(lambda cache: cache.warm_up())
