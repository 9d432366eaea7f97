"""The middle level's view of a sequence: the chunks its queries choose, and the newest blocks of the target's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from offload_runtime_kernels.attention import KeySource, QueryRows, attend_sources
from offload_runtime_kernels.gather_chunks import BlockTable
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from offload_runtime.kv_cache.device import num_blocks
from offload_runtime.kv_cache.retrieval import ChunkPolicy, RetrievedChunks


class ChunkSource(Protocol):
    """What the middle level needs of the target's own cache."""

    def store(self, layer: int) -> KVBlocks:
        """Where new keys and values go: tentative ones, which the target's own pass overwrites."""

    def recent_blocks(self, sequence: int) -> range:
        """Blocks that are at hand on the device, up to the end of the announced window; the earlier ones are complete
        where `block_table` says."""

    def block_table(self, layer: int) -> BlockTable:
        """Where the layer's blocks lie."""

    def begin_window(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        """Passes will put `counts[i]` tokens behind the committed ones of `sequences[i]`."""


class RetrievalCache:
    """A `LayerCache` of one sequence: retrieved chunks beside the target's newest blocks, with nothing between.

    Args:
        source: The target's cache.
        chunks: What is retrieved.
        policy: Chooses it by the queries of a pass.
        sequence: Batch row in all of them.
    """

    def __init__(self, source: ChunkSource, chunks: RetrievedChunks, policy: ChunkPolicy, *, sequence: int = 0) -> None:
        self._source = source
        self._chunks = chunks
        self._policy = policy
        self._sequence = sequence
        self.recent = range(0)
        self.refresh = True  # whether the next pass chooses chunks anew
        self.num_keys = 0  # tokens that the next pass finds retrieved

    @property
    def num_available(self) -> int:
        """Chunks to choose from: all before the recent blocks."""
        return self.recent.start * BLOCK_TOKENS // self._chunks.chunk_size

    def begin_window(self, count: int) -> bool:
        """Passes will put `count` tokens behind the committed ones; whether the far part has grown since the last."""
        self._source.begin_window([self._sequence], [count])
        before, self.recent = self.recent.start, self._source.recent_blocks(self._sequence)
        return self.recent.start != before

    def begin_pass(self, *, refresh: bool) -> None:
        """The next pass chooses chunks anew, or uses what is there; a replay runs no other code of this class."""
        self.refresh = refresh
        if refresh:
            self.num_keys = min(self.num_available, self._chunks.budget_chunks) * self._chunks.chunk_size

    def forget(self) -> None:
        """Another sequence begins: what was retrieved is of no use."""
        self._chunks.forget(self._sequence)
        self.recent, self.num_keys = range(0), 0

    def store(self, layer: int) -> KVBlocks:
        return self._source.store(layer)

    def attend(
        self, layer: int, q: torch.Tensor, rows: QueryRows, *, scale: float, sliding_window: int | None, prefill: bool
    ) -> torch.Tensor:
        """Choose chunks if asked to, then attend to them and to the recent blocks."""
        assert sliding_window is None and not prefill
        if self.refresh and self.num_available:
            held = self._chunks.resident(layer)[self._sequence : self._sequence + 1]
            selected = self._policy.select(
                layer, q, [self.num_available], scale=scale, held=held, sequence=self._sequence
            )
            self._chunks.update(
                layer, selected, self._source.block_table(layer), [self.num_available], sequence=self._sequence
            )
        # Retrieved keys lie at the front of blocks of their own, so every query is behind all of them.
        far = KeySource(self._chunks.blocks(layer), range(num_blocks(self.num_keys)), num_keys=self.num_keys)
        return attend_sources(q, [far, KeySource(self._source.store(layer), self.recent)], rows, scale=scale)
