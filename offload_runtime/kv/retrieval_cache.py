"""The retrieval verifier's view of sequences: the chunks that their queries choose, and the target's newest blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from offload_runtime_kernels.attention import KeySource, QueryRows, attend_sources
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from offload_runtime.config import ModelConfig
from offload_runtime.kv.device import BlockObserver, DeviceKVCache, kv_cache_bytes, num_blocks
from offload_runtime.kv.host import HostKVCache
from offload_runtime.kv.retrieval import ChunkPolicy, RetrievalPolicy, RetrievedChunks, retrieved_bytes, summaries_bytes
from offload_runtime.memory import DeviceBudget, overwrite

_NO_LIMIT = (1 << 31) - 1
# Launches are made for the next multiple of so many blocks of far context: a growing text needs another only then.
_FAR_BLOCKS = 16


class RetrievalCache:
    """A `LayerCache` of several sequences: each one's retrieved chunks beside the target's newest blocks, with nothing
    between. What belongs to a sequence alone is on the device, so that passes of equal `shape` are the same launches.

    Args:
        source: The target's cache. It takes tentative keys and values, which the target's own pass overwrites.
        config: The target's shape.
        dtype: Of keys and values.
        budget_tokens: Retrieved tokens per layer and KV head, a multiple of `chunk_size`.
        chunk_size: Tokens of a chunk, a power of two from 2 to 64.
        batch: Sequences of all of them.
        budget: Ledger to reserve from; see `retrieved_bytes` and `summaries_bytes`.
        name: What to call the chunks in the ledger.
        make_policy: Makes what chooses chunks by the queries of a pass; takes the arguments of `RetrievalPolicy`.

    Raises:
        OptionError: The retrieval budget or the chunk size makes no sense.
        BudgetError: The device memory is not there.
    """

    def __init__(
        self, source: DeviceKVCache | HostKVCache, config: ModelConfig, dtype: torch.dtype, *, budget_tokens: int,
        chunk_size: int, batch: int, budget: DeviceBudget, name: str = "retrieved KV",
        make_policy: Callable[..., ChunkPolicy] = RetrievalPolicy,
    ) -> None:  # fmt: skip
        sizes = {"budget_tokens": budget_tokens, "chunk_size": chunk_size, "batch": batch}
        self.chunks = RetrievedChunks(config, dtype, **sizes, budget=budget, name=name)
        self._policy = make_policy(config, dtype, **sizes, capacity_tokens=source.capacity_tokens, budget=budget)
        self.warm_up = self._policy.warm_up
        source.observers.append(self._policy)
        self._source = source
        self._batch = batch
        self._rows = range(0)  # sequences of the running passes: every pass is about all of these
        self._recent = [range(0)] * batch
        self._refresh = True  # whether the next pass chooses chunks anew
        # Of every row of a pass the chunks to choose from, and the bounds of its far and its recent keys: int32 [3, W],
        # in one tensor that never moves. Each part begins at a multiple of 16 bytes.
        self._numbers = torch.zeros(3, -(-2 * batch // 4) * 4, dtype=torch.int32, device=budget.device)
        self._numbers_host: list[list[int]] = []
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
        chunks_per_block = BLOCK_TOKENS // self.chunks.chunk_size
        blocks = -(-max(self._available) // chunks_per_block)
        most = -(-blocks // _FAR_BLOCKS) * _FAR_BLOCKS
        return min(most, num_blocks(self._source.max_tokens_with_draft)) * chunks_per_block

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
        size = self.chunks.chunk_size
        self._available = [blocks.start * BLOCK_TOKENS // size for blocks in recent]
        keys = [min(available, self.chunks.budget_chunks) * size for available in self._available]
        self._far_blocks, self._recent_blocks = num_blocks(max(keys)), max(len(blocks) for blocks in recent)
        far = [number for count in keys for number in (0, count)]
        near = [number for blocks in recent for number in (blocks.start, _NO_LIMIT)]
        self._send([self._available, far, near])
        return grown

    def _send(self, numbers: list[list[int]]) -> None:
        """Put the numbers of the next passes' rows on the device, on the current stream and without waiting."""
        if numbers != self._numbers_host:
            width = self._numbers.shape[1]
            host = torch.tensor([part + [0] * (width - len(part)) for part in numbers], dtype=torch.int32)
            overwrite(self._numbers, host)
            self._numbers_host = numbers

    def begin_pass(self, *, refresh: bool) -> None:
        """The next pass chooses chunks anew, or uses what is there; a replay runs no other code of this class."""
        self._refresh = refresh

    def forget(self) -> None:
        """Other sequences begin: what was retrieved is of no use."""
        for sequence in range(self._batch):
            self.chunks.forget(sequence)
        self._recent = [range(0)] * self._batch

    def store(self, layer: int) -> KVBlocks:
        return self._source.store(layer)

    def attend(
        self, layer: int, q: torch.Tensor, rows: QueryRows, *, scale: float, sliding_window: int | None, prefill: bool
    ) -> torch.Tensor:
        """Choose chunks if asked to, then attend to them and to the recent blocks."""
        assert sliding_window is None and not prefill and q.shape[0] == len(self._rows)
        first, count = self._rows.start, len(self._rows)
        available, bounds = self._numbers[0, :count], self._numbers[1:, : 2 * count].view(2, count, 2)
        if self._refresh and self._far_blocks:
            selected = self._policy.select(
                layer, q, available, scale=scale, rows_used=rows.used, sequence=first,
                held=self.chunks.resident(layer)[first : first + count], most=self._most_available,
            )  # fmt: skip
            self.chunks.update(layer, selected, self._source.block_table(layer), sequence=first, used=rows.used)
        # Retrieved keys lie at the front of blocks of their own, so every query is behind all of them.
        far = KeySource(self.chunks.blocks(layer), range(self._far_blocks), bounds=bounds[0])
        near = KeySource(self._source.store(layer), range(self._recent_blocks), bounds=bounds[1])
        return attend_sources(q, [far, near], rows, scale=scale)


class RetrievedDraftCache:
    """All keys and values of a small model, and for decoding the chunks that its queries choose (cf. arXiv 2404.11912).

    A prefill attends to everything. Every other pass attends to each sequence's retrieved chunks and newest blocks; its
    own queries choose the chunks, unless `begin_step` says otherwise. Layers with a sliding window attend to their
    window. A text that the budget holds is attended to in full.

    Args:
        config: The draft's shape.
        dtype: Of keys and values.
        capacity_tokens: Tokens per sequence; tentative ones may use the rest of the last block, too.
        budget_tokens: Retrieved tokens per layer and KV head, a multiple of `chunk_size`.
        chunk_size: Tokens of a chunk, a power of two from 2 to 64.
        batch: Sequences.
        budget: Ledger to reserve from; see `retrieved_draft_bytes`.
        name: What to call it in the ledger.

    Raises:
        OptionError: The retrieval budget or the chunk size makes no sense.
        BudgetError: The device memory is not there.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, capacity_tokens: int, budget_tokens: int, chunk_size: int,
        batch: int, budget: DeviceBudget, name: str = "draft: KV cache",
    ) -> None:  # fmt: skip
        self.capacity_tokens = capacity_tokens
        self._full = DeviceKVCache(
            config, dtype, capacity_tokens=capacity_tokens, batch=batch, budget=budget, name=name
        )
        self._view = RetrievalCache(
            self._full, config, dtype, budget_tokens=budget_tokens, chunk_size=chunk_size, batch=batch, budget=budget,
            name=f"{name}: retrieved",
        )  # fmt: skip
        self._chunks, self.warm_up = self._view.chunks, self._view.warm_up
        self._reach = [0] * batch  # no token from here on is in a retrieved chunk
        self.store, self.length = self._full.store, self._full.length
        self.begin_prefill, self.end_prefill = self._full.begin_prefill, self._full.end_prefill
        self.commit, self.commit_path = self._full.commit, self._full.commit_path
        self.close, self.max_tokens_with_draft = self._full.close, self._full.max_tokens_with_draft
        self.observers: list[BlockObserver] = self._full.observers

    @property
    def pinned_bytes(self) -> int:
        return 0

    def begin_window(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        """A pass will put `counts[0]` tokens behind the committed ones of the one sequence, by fresh choice.

        Raises:
            ContextLengthError: They do not fit the context.
        """
        (sequence,), (count,) = sequences, counts
        self.begin_steps(range(sequence, sequence + 1), {sequence: count})
        self._view.begin_pass(refresh=True)

    def begin_steps(self, rows: range, counts: Mapping[int, int]) -> None:
        """Steps over the sequences `rows` will put `counts[s]` tokens behind the committed ones of s; all others stand
        still.

        Raises:
            ContextLengthError: They do not fit the context.
        """
        self._view.begin_window(rows, counts)
        for sequence in counts:
            self._reach[sequence] = max(self._reach[sequence], self._view.recent(sequence).start * BLOCK_TOKENS)

    def begin_step(self, *, first: bool) -> Hashable:
        """The next pass is one of the announced steps; the first chooses chunks, the others use them.

        Returns:
            All that the pass depends on besides device memory: steps with equal ones enqueue the same work.
        """
        self._view.begin_pass(refresh=first)
        return self._view.shape

    def attend(
        self, layer: int, q: torch.Tensor, rows: QueryRows, *, scale: float, sliding_window: int | None, prefill: bool
    ) -> torch.Tensor:
        whole = prefill or sliding_window is not None  # a window is close by, and no chunk stands for it
        cache = self._full if whole else self._view
        return cache.attend(layer, q, rows, scale=scale, sliding_window=sliding_window, prefill=prefill)

    def truncate(self, sequence: int, length: int) -> None:
        self._full.truncate(sequence, length)
        # Not at every rejected guess: those lie behind what is retrieved.
        if length < self._reach[sequence]:
            self._chunks.forget(sequence, length)
            self._reach[sequence] = length


def retrieved_draft_bytes(
    config: ModelConfig, dtype: torch.dtype, *, capacity_tokens: int, budget_tokens: int, chunk_size: int, batch: int
) -> int:
    """Device bytes of a `RetrievedDraftCache`: all keys and values, the retrieved ones, and what chooses them."""
    return (
        kv_cache_bytes(config, dtype, capacity_tokens=capacity_tokens, batch=batch)
        + retrieved_bytes(config, dtype, budget_tokens=budget_tokens, chunk_size=chunk_size, batch=batch)
        + summaries_bytes(config, chunk_size=chunk_size, capacity_tokens=capacity_tokens, batch=batch)
    )
