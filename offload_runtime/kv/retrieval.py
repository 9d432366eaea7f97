"""The retrieval verifier's cache: a few chunks of the far context on the device, chosen by the current queries.

Of every layer and KV head it holds the chunks that a policy selects, fetched from the blocks that the target's cache
keeps (in host or device memory), only what is new each time. Keys keep the positions they were rotated for. What is
recent is not here: the verifier reads it from the target's own open blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from offload_runtime_kernels.chunk_scores import chunk_scores, row_counts
from offload_runtime_kernels.chunk_summaries import FACTOR_BYTES, ChunkSummaries, chunk_summaries
from offload_runtime_kernels.gather_chunks import BlockTable, gather_chunks
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks
from offload_runtime_kernels.select_chunks import different_counts, select_chunks

from offload_runtime.config import ModelConfig, chunks_of_budget
from offload_runtime.kv.device import BlockObserver, block_shape, kv_cache_bytes, num_blocks
from offload_runtime.memory import DeviceBudget

# A chunk has to be better than one that is held by this share of an average score to be fetched for it. Without a
# margin a third of the chunks change in every step, most of them for nothing: with it half as many are fetched, and the
# agreement with the full cache falls by 0.002 (120,000 tokens, budget 4096). Heads that attend to nothing in particular
# fetch almost nothing.
_HELD_MARGIN = 0.1


class RetrievedChunks:
    """Selected chunks of keys and values of every layer and KV head, on the device.

    Args:
        config: The model's shape.
        dtype: Of keys and values.
        budget_tokens: Tokens per layer and head, a multiple of `chunk_size`.
        chunk_size: Tokens of a chunk, a power of two from 2 to 64.
        batch: Sequences.
        budget: Ledger to reserve from.
        name: What to call it in the ledger.

    Raises:
        OptionError: The budget or the chunk size makes no sense.
        BudgetError: The device memory is not there.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, budget_tokens: int, chunk_size: int, batch: int,
        budget: DeviceBudget, name: str = "retrieved KV",
    ) -> None:  # fmt: skip
        self.chunk_size = chunk_size
        self.budget_chunks = chunks_of_budget(budget_tokens, chunk_size)
        shape = (config.num_layers, batch, num_blocks(budget_tokens), *block_shape(config))
        nbytes = kv_cache_bytes(config, dtype, capacity_tokens=budget_tokens, batch=batch)
        # Zeros, not garbage: a masked key still meets a zero weight, and 0 * NaN is NaN.
        self._data = budget.allocate(name, nbytes).view(dtype).view(shape).zero_()
        places = (config.num_layers, batch, config.num_kv_heads, self.budget_chunks)
        table = budget.allocate(f"{name}: places", 4 * torch.Size(places).numel())
        self._resident = table.view(torch.int32).view(places).fill_(-1)

    def borrow_workspace(self, nbytes: int) -> torch.Tensor | None:
        """uint8 [nbytes] of the memory of the chunks, which are forgotten; None when there is less."""
        memory = self._data.view(-1).view(torch.uint8)
        if nbytes > memory.nbytes:
            return None
        for sequence in range(self._resident.shape[1]):
            self.forget(sequence)
        return memory[:nbytes]

    def blocks(self, layer: int) -> KVBlocks:
        """[B, ceil(budget / 256), 2, H_kv, 256, D]: the chunks, in the order of their places; see `resident`."""
        return KVBlocks(self._data[layer])

    def resident(self, layer: int) -> torch.Tensor:
        """[B, H_kv, K] int32 on the device: which chunk lies in each place, -1 for none. After an update the places in
        use are the first."""
        return self._resident[layer]

    def update(
        self, layer: int, selected: torch.Tensor, source: BlockTable, *, sequence: int = 0,
        used: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Hold the selected chunks of some sequences, fetching only those that are not here yet.

        Args:
            layer: Whose.
            selected: [B, H_kv, K] int32 as a policy selects them.
            source: Where the blocks of that layer lie, of all sequences.
            sequence: The first row's; the others follow it.
            used: [B] int32 on the device: 0 leaves the chunks of a row as they are. None: all are served.

        Returns:
            [B, H_kv] int32 on the device: chunks that were fetched.

        Enqueues on the current stream and never synchronises. What attends to the chunks must be ordered with it, and
        the blocks must be complete and stay as they are until it is done.
        """
        rows = slice(sequence, sequence + selected.shape[0])
        assert rows.stop <= self._resident.shape[1]
        data, table = KVBlocks(self._data[layer, rows]), source.rows(rows.start, rows.stop)
        return gather_chunks(selected, self._resident[layer, rows], table, data, chunk_size=self.chunk_size, used=used)

    def forget(self, sequence: int, length: int = 0) -> None:
        """A sequence was cut to `length` tokens: chunks that reach behind them will be fetched again when selected.

        Until their next update layers that held such a chunk are of no use.
        """
        resident = self._resident[:, sequence]
        kept_chunks = length // self.chunk_size
        resident.masked_fill_(resident >= kept_chunks, -1)


class ChunkPolicy(BlockObserver, Protocol):
    """Chooses the chunks. It observes every block of a sequence's far context."""

    def select(
        self, layer: int, q: torch.Tensor, available: Sequence[int] | torch.Tensor, *, scale: float,
        held: torch.Tensor | None = None, rows_used: torch.Tensor | None = None, sequence: int = 0, most: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        """Choose chunks by queries.

        Args:
            layer: Whose.
            q: [B, R, H, D], rotated queries of B sequences, R at most 32.
            available: How many chunks there are to choose from, those before the recent part: one number of each
                sequence, on the host or [B] int32 on the device.
            scale: Of the attention logits.
            held: [B, H_kv, K] int32 on the device: the chunks that are at hand, -1 for none; they may be preferred.
            rows_used: [B] int32 on the device: only so many of a sequence's first queries count. None: all.
            sequence: The first row's; the others follow it.
            most: Where the numbers are on the device: none of them is larger.

        Returns:
            [B, H_kv, K] int32 on the device: min(K, available) chunks of each head in ascending order, then -1.

        Enqueues on the current stream and never synchronises.
        """

    def warm_up(self) -> None:
        """Compile what chooses, however many chunks there are to choose from."""


class RetrievalPolicy:
    """Chunks whose keys promise the largest softmax score, and the first chunk (TriForce, arXiv 2404.11912).

    Summaries of all chunks stay on the device, about 1 / (4 chunk_size) of a KV cache of 16 bits; see
    `summaries_bytes`. A chunk that is held gives way only to one that is better by a margin.

    Args:
        config: The model's shape.
        dtype: Of the keys.
        budget_tokens: Tokens to select per layer and head.
        chunk_size: Tokens of a chunk.
        capacity_tokens: Most tokens of a sequence.
        batch: Sequences.
        budget: Ledger to reserve from.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, budget_tokens: int, chunk_size: int, capacity_tokens: int,
        batch: int, budget: DeviceBudget,
    ) -> None:  # fmt: skip
        self._budget_chunks = chunks_of_budget(budget_tokens, chunk_size)
        self._chunk_size = chunk_size
        chunks = num_blocks(capacity_tokens) * BLOCK_TOKENS // chunk_size
        shape = (config.num_layers, batch, config.num_kv_heads, chunks)
        count = torch.Size(shape).numel()
        codes = budget.allocate("codes of chunks", config.head_dim * count).view(torch.int8)
        factors = budget.allocate("factors of chunks", FACTOR_BYTES * count).view(torch.float16)
        self._summaries = [
            ChunkSummaries(*parts)
            for parts in zip(codes.view(*shape, config.head_dim), factors.view(*shape, 2), strict=True)
        ]

    def on_blocks(self, layer: int, sequence: int, kv: KVBlocks, row: int, blocks: range) -> None:
        one = KVBlocks(kv.data[row : row + 1], kv.first_block)
        here = self._summaries[layer].rows(sequence, sequence + 1)
        chunk_summaries(one, blocks, here, chunk_size=self._chunk_size)

    def select(
        self, layer: int, q: torch.Tensor, available: Sequence[int] | torch.Tensor, *, scale: float,
        held: torch.Tensor | None = None, rows_used: torch.Tensor | None = None, sequence: int = 0, most: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        counts = row_counts(available, q.shape[0], q.device)
        most = most if isinstance(available, torch.Tensor) else max(available)
        here = self._summaries[layer].rows(sequence, sequence + q.shape[0]).first(most)
        scores = chunk_scores(q, here, counts, scale=scale, rows_used=rows_used)
        return select_chunks(
            scores, counts, budget_chunks=self._budget_chunks, held=held, held_margin=_HELD_MARGIN / self._budget_chunks
        )

    def warm_up(self) -> None:
        codes = self._summaries[0].codes
        for count in different_counts(codes.shape[2]):
            scores = torch.zeros(1, codes.shape[1], count, device=codes.device)
            select_chunks(scores, count, budget_chunks=self._budget_chunks)


def summaries_bytes(config: ModelConfig, *, chunk_size: int, capacity_tokens: int, batch: int) -> int:
    """Device bytes of the chunks' summaries of a `RetrievalPolicy`."""
    chunks = num_blocks(capacity_tokens) * BLOCK_TOKENS // chunk_size
    return config.num_layers * batch * config.num_kv_heads * chunks * (config.head_dim + FACTOR_BYTES)


def retrieved_bytes(config: ModelConfig, dtype: torch.dtype, *, budget_tokens: int, chunk_size: int, batch: int) -> int:
    """Device bytes of `RetrievedChunks`: the blocks and the table of places."""
    places = config.num_layers * batch * config.num_kv_heads * chunks_of_budget(budget_tokens, chunk_size)
    return kv_cache_bytes(config, dtype, capacity_tokens=budget_tokens, batch=batch) + 4 * places
