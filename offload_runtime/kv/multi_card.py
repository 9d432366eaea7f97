"""Keys and values of a model whose layers are dealt out to several cards: each card's are in a cache of its own, which
knows its layers by numbers of its own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from offload_runtime_kernels.attention import QueryRows
from offload_runtime_kernels.kv_blocks import KVBlocks

from offload_runtime.kv.block_store import SavedBlock
from offload_runtime.kv.device import KVCache, check_capacity
from offload_runtime.kv.host import HostKVCache
from offload_runtime.kv.host_io import check_growth
from offload_runtime.kv.retrieval import RetrievalCache
from offload_runtime.memory import LayerPartition, on_card
from offload_runtime.models import LayerCache

Cache = TypeVar("Cache", bound=LayerCache)
Found = TypeVar("Found")


class _MultiCardLayers(Generic[Cache]):
    """What a decoder layer needs, from the cache of its card."""

    def __init__(self, partition: LayerPartition, caches: Sequence[Cache]) -> None:
        assert len(caches) == len(partition.cards)
        self.caches, self._partition, self._layer_slots = caches, partition, partition.layer_slots()

    def store(self, layer: int) -> KVBlocks:
        card, number = self._layer_slots[layer]
        return self.caches[card].store(number)

    def attend(self, layer: int, q: torch.Tensor, rows: QueryRows) -> torch.Tensor:
        card, number = self._layer_slots[layer]
        return self.caches[card].attend(number, q, rows)

    def _for_each_card(self, call: Callable[[Cache], Found]) -> list[Found]:
        """What a call gives of the cache of each card, which is worked for meanwhile."""
        found = []
        for card, cache in zip(self._partition.cards, self.caches, strict=True):
            with on_card(card):
                found.append(call(cache))
        return found


class MultiCardKVCache(_MultiCardLayers[KVCache]):
    """A cache of whole sequences, on the device or in host memory: all cards' hold the same tokens of each.

    Args:
        partition: Which card each layer is on.
        caches: Of the cards.
    """

    def __init__(self, partition: LayerPartition, caches: Sequence[KVCache]) -> None:
        super().__init__(partition, caches)
        first = caches[0]
        self.capacity_tokens, self.max_tokens_with_draft = first.capacity_tokens, first.max_tokens_with_draft
        self.mixes = first.mixes

    @property
    def prefills_by_layer(self) -> bool:
        return any(cache.prefills_by_layer for cache in self.caches)

    @property
    def pinned_bytes(self) -> int:
        return sum(cache.pinned_bytes for cache in self.caches)

    def length(self, slot: int) -> int:
        # An interruption may have come between two cards; every slot is cut to what is kept before the next answer.
        return min(cache.length(slot) for cache in self.caches)

    def begin_window(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        self._for_each_card(lambda cache: cache.begin_window(slots, counts))

    def begin_prefill(self, slot: int, count: int) -> None:
        check_capacity(self.length(slot) + count, self.capacity_tokens)
        self._check_growth(slot, count)
        self._for_each_card(lambda cache: cache.begin_prefill(slot, count))

    def _check_growth(self, slot: int, count: int) -> None:
        """Refuse what the host has no room for on all cards together. What one makes is touched in the background: the
        next one would still see it among what is available."""
        check_growth(sum(one.growth_bytes(slot, count) for one in self.caches if isinstance(one, HostKVCache)))

    def end_prefill(self, slot: int, count: int) -> None:
        self._for_each_card(lambda cache: cache.end_prefill(slot, count))

    def commit(self, slot: int, count: int) -> None:
        self._for_each_card(lambda cache: cache.commit(slot, count))

    def commit_path(self, slot: int, rows: Sequence[int]) -> None:
        self._for_each_card(lambda cache: cache.commit_path(slot, rows))

    def truncate(self, slot: int, length: int) -> None:
        self._for_each_card(lambda cache: cache.truncate(slot, length))

    def save_block(self, slot: int, block: int, to: SavedBlock) -> None:
        shares = iter(self._shares(to))
        self._for_each_card(lambda cache: cache.save_block(slot, block, next(shares)))

    def begin_restore(self, slot: int, length: int) -> None:
        self._check_growth(slot, length - self.length(slot))
        self._for_each_card(lambda cache: cache.begin_restore(slot, length))

    def restore_block(self, slot: int, saved: SavedBlock, count: int) -> None:
        shares = iter(self._shares(saved))
        self._for_each_card(lambda cache: cache.restore_block(slot, next(shares), count))

    def _shares(self, saved: SavedBlock) -> list[SavedBlock]:
        """Each card's layers of a block."""
        return [[saved[layer] for layer in self._partition.layers_of(card)] for card in self._partition.cards]

    def close(self) -> None:
        self._for_each_card(lambda cache: cache.close())


class MultiCardRetrievalCache(_MultiCardLayers[RetrievalCache]):
    """What a retrieval verifier sees of such a cache: each card's chunks beside its newest blocks.

    Args:
        partition: Which card each layer is on.
        caches: Of the cards.
    """

    def begin_steps(self, rows: range, counts: Mapping[int, int]) -> bool:
        """As of `RetrievalCache`."""
        return any(self._for_each_card(lambda cache: cache.begin_steps(rows, counts)))

    def begin_step(self, *, first: bool) -> Hashable:
        """As of `RetrievalCache`."""
        return tuple(self._for_each_card(lambda cache: cache.begin_step(first=first)))

    def forget(self, slot: int) -> None:
        """As of `RetrievalCache`."""
        self._for_each_card(lambda cache: cache.forget(slot))

    def warm_up(self) -> None:
        """As of `RetrievalCache`."""
        self._for_each_card(lambda cache: cache.warm_up())
