"""The middle level's view of sequences: the chunks that their queries choose, and the target's newest blocks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

import torch
from offload_runtime_kernels.attention import KeySource, QueryRows, attend_sources
from offload_runtime_kernels.gather_chunks import BlockTable
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from offload_runtime.kv_cache.device import num_blocks
from offload_runtime.kv_cache.retrieval import ChunkPolicy, RetrievedChunks

_NO_LIMIT = (1 << 31) - 1
# Launches are made for the next multiple of so many blocks of far context: a growing text needs another only then.
_FAR_BLOCKS = 16


class ChunkSource(Protocol):
    """What the middle level needs of the target's own cache."""

    reach_tokens: int

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
    """A `LayerCache` of several sequences: each one's retrieved chunks beside the target's newest blocks, with nothing
    between. What belongs to a sequence alone is on the device, so that passes of equal `shape` are the same launches.

    Args:
        source: The target's cache.
        chunks: What is retrieved.
        policy: Chooses it by the queries of a pass.
        batch: Sequences of all of them.
        device: The compute device.
    """

    def __init__(
        self, source: ChunkSource, chunks: RetrievedChunks, policy: ChunkPolicy, *, batch: int, device: torch.device
    ) -> None:
        self._source = source
        self._chunks = chunks
        self._policy = policy
        self._batch = batch
        self._rows = range(0)  # sequences of the running passes: every pass is about all of these
        self._recent = [range(0)] * batch
        self._refresh = True  # whether the next pass chooses chunks anew
        # Of every row of a pass the chunks to choose from, and the bounds of its far and its recent keys.
        self._words = _RowWords(batch, device)
        self._available: list[int] = []
        self._far_blocks = self._recent_blocks = 0  # of the sequence that has the most

    def recent(self, sequence: int = 0) -> range:
        """Blocks of a sequence that are attended to in full."""
        return self._recent[sequence]

    @property
    def shape(self) -> Hashable:
        """All that the next pass depends on besides device memory."""
        return self._rows, self._refresh, self._most_available, self._far_blocks, self._recent_blocks

    @property
    def _most_available(self) -> int:
        """Chunks that no sequence has more of to choose from."""
        chunks_per_block = BLOCK_TOKENS // self._chunks.chunk_size
        blocks = -(-max(self._available) // chunks_per_block)
        most = -(-blocks // _FAR_BLOCKS) * _FAR_BLOCKS
        return min(most, num_blocks(self._source.reach_tokens)) * chunks_per_block

    def begin_window(self, rows: range, counts: Mapping[int, int]) -> bool:
        """Passes over the sequences `rows` will put `counts[s]` tokens behind the committed ones of s; all others stand
        still in every one of them.

        Returns:
            Whether the far part of a sequence has grown since its last window: the first pass must choose chunks.
        """
        self._source.begin_window(list(counts), list(counts.values()))
        self._rows, grown = rows, False
        recent = [range(0)] * len(rows)
        for sequence in counts:
            before, now = self._recent[sequence].start, self._source.recent_blocks(sequence)
            self._recent[sequence] = recent[rows.index(sequence)] = now
            grown |= now.start != before
        size = self._chunks.chunk_size
        self._available = [blocks.start * BLOCK_TOKENS // size for blocks in recent]
        keys = [min(available, self._chunks.budget_chunks) * size for available in self._available]
        self._far_blocks, self._recent_blocks = num_blocks(max(keys)), max(len(blocks) for blocks in recent)
        self._words.put(
            self._available, [(0, count) for count in keys], [(blocks.start, _NO_LIMIT) for blocks in recent]
        )
        return grown

    def begin_pass(self, *, refresh: bool) -> None:
        """The next pass chooses chunks anew, or uses what is there; a replay runs no other code of this class."""
        self._refresh = refresh

    def forget(self) -> None:
        """Other sequences begin: what was retrieved is of no use."""
        for sequence in range(self._batch):
            self._chunks.forget(sequence)
        self._recent = [range(0)] * self._batch

    def store(self, layer: int) -> KVBlocks:
        return self._source.store(layer)

    def attend(
        self, layer: int, q: torch.Tensor, rows: QueryRows, *, scale: float, sliding_window: int | None, prefill: bool
    ) -> torch.Tensor:
        """Choose chunks if asked to, then attend to them and to the recent blocks."""
        assert sliding_window is None and not prefill and q.shape[0] == len(self._rows)
        first, count = self._rows.start, len(self._rows)
        if self._refresh and self._far_blocks:
            selected = self._policy.select(
                layer, q, self._words.available(count), scale=scale, rows_used=rows.used, sequence=first,
                held=self._chunks.resident(layer)[first : first + count], most=self._most_available,
            )  # fmt: skip
            self._chunks.update(
                layer, selected, self._source.block_table(layer), self._available, sequence=first, used=rows.used
            )
        # Retrieved keys lie at the front of blocks of their own, so every query is behind all of them.
        far = KeySource(self._chunks.blocks(layer), range(self._far_blocks), bounds=self._words.far(count))
        near = KeySource(self._source.store(layer), range(self._recent_blocks), bounds=self._words.near(count))
        return attend_sources(q, [far, near], rows, scale=scale)


class _RowWords:
    """A few integers of every row of a pass, in one tensor that never moves and one copy to the device.

    Args:
        batch: Most rows.
        device: Where they are read.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        # Each part begins at a multiple of 16 bytes.
        self._starts = [0, -(-batch // 4) * 4, -(-batch // 4) * 4 + -(-2 * batch // 4) * 4]
        self._device = torch.zeros(self._starts[2] + 2 * batch, dtype=torch.int32, device=device)
        self._host: list[int] = []

    def put(self, available: Sequence[int], far: Sequence[tuple[int, int]], near: Sequence[tuple[int, int]]) -> None:
        """Send the integers of the next passes' rows, on the current stream and without waiting."""
        words = [0] * len(self._device)
        parts = available, [word for pair in far for word in pair], [word for pair in near for word in pair]
        for start, part in zip(self._starts, parts, strict=True):
            words[start : start + len(part)] = part
        if words != self._host:
            host = torch.tensor(words, dtype=torch.int32)
            self._device.copy_(host.pin_memory() if self._device.is_cuda else host, non_blocking=True)
            self._host = words

    def available(self, count: int) -> torch.Tensor:
        """[count] int32: chunks to choose from."""
        return self._device[:count]

    def far(self, count: int) -> torch.Tensor:
        """[count, 2] int32: bounds of the retrieved keys; see `KeySource`."""
        return self._device[self._starts[1] :][: 2 * count].view(count, 2)

    def near(self, count: int) -> torch.Tensor:
        """[count, 2] int32: bounds of the recent keys."""
        return self._device[self._starts[2] :][: 2 * count].view(count, 2)
