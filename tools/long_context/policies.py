"""Other ways to choose chunks than the runtime's, to measure it against: the exact scores, and none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from offload_runtime_kernels.chunk_scores import chunk_scores, row_counts
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks
from offload_runtime_kernels.select_chunks import different_counts, select_chunks

from offload_runtime.config import ModelConfig, SpeculationOptions, chunks_of_budget
from offload_runtime.errors import OptionError
from offload_runtime.kv import kv_cache_bytes, num_blocks
from offload_runtime.kv.retrieval import RetrievalPolicy
from offload_runtime.memory import DeviceBudget


class TopKPolicy(RetrievalPolicy):
    """Chunks whose keys get the most attention from the queries, exactly: what every other policy is measured against.

    The score is the softmax mass of a chunk's keys among all far keys. All keys stay on the device for it, half of the
    KV cache, and all are read for every choice: for experiments, not for speed. Arguments as of `RetrievalPolicy`.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, budget_tokens: int, chunk_size: int, capacity_tokens: int,
        batch: int, budget: DeviceBudget,
    ) -> None:  # fmt: skip
        self._chunk_size = chunk_size
        self._budget_chunks = chunks_of_budget(budget_tokens, chunk_size)
        tokens = num_blocks(capacity_tokens) * BLOCK_TOKENS
        shape = (config.num_layers, batch, config.num_kv_heads, tokens, config.head_dim)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        self._keys = budget.allocate("far keys of the top-k policy", nbytes).view(dtype).view(shape)

    def on_blocks(self, layer: int, sequence: int, kv: KVBlocks, row: int, blocks: range) -> None:
        for block in blocks:
            here = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
            self._keys[layer, sequence, :, here] = kv.data[row, (block - kv.first_block) % kv.num_blocks, 0]

    def select(
        self, layer: int, q: torch.Tensor, available: Sequence[int] | torch.Tensor, *, scale: float,
        held: torch.Tensor | None = None, rows_used: torch.Tensor | None = None, sequence: int = 0, most: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        size = self._chunk_size
        counts = row_counts(available, q.shape[0], q.device)
        most = most if isinstance(available, torch.Tensor) else max(available)
        keys = self._keys[layer, sequence : sequence + q.shape[0], :, : most * size]
        masses = chunk_scores(q, keys, counts * size, scale=scale, rows_used=rows_used)
        scores = masses.unflatten(2, (-1, size)).sum(-1)
        return select_chunks(scores, counts, budget_chunks=self._budget_chunks)

    def warm_up(self) -> None:
        num_kv_heads, tokens = self._keys.shape[2:4]
        for count in different_counts(tokens // self._chunk_size):
            scores = torch.zeros(1, num_kv_heads, count, device=self._keys.device)
            select_chunks(scores, count, budget_chunks=self._budget_chunks)


class StreamingPolicy(RetrievalPolicy):
    """The first chunks and the most recent ones, whatever the queries (StreamingLLM, arXiv 2309.17453).

    Arguments as of `RetrievalPolicy`, most of which it has no use for. As many of the first tokens are kept as a draft
    keeps by itself, in whole chunks.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, budget_tokens: int, chunk_size: int, capacity_tokens: int,
        batch: int, budget: DeviceBudget,
    ) -> None:  # fmt: skip
        self._budget_chunks = chunks_of_budget(budget_tokens, chunk_size)
        self._num_kv_heads = config.num_kv_heads
        self._sink_chunks = min(self._budget_chunks, -(-SpeculationOptions.sink_tokens // chunk_size))

    def on_blocks(self, layer: int, sequence: int, kv: KVBlocks, row: int, blocks: range) -> None:
        pass  # the choice does not look at keys

    def select(
        self, layer: int, q: torch.Tensor, available: Sequence[int] | torch.Tensor, *, scale: float,
        held: torch.Tensor | None = None, rows_used: torch.Tensor | None = None, sequence: int = 0, most: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        counts = row_counts(available, q.shape[0], q.device)[:, None]
        place = torch.arange(self._budget_chunks, dtype=torch.int32, device=q.device)
        skipped = (counts - self._budget_chunks).clamp_min(0)
        chunk = place + skipped * (place >= self._sink_chunks)
        chunk = chunk.masked_fill(place >= counts, -1)  # [B, K]
        return chunk[:, None].expand(-1, self._num_kv_heads, -1).contiguous()

    def warm_up(self) -> None:
        pass


def far_keys_bytes(config: ModelConfig, dtype: torch.dtype, *, capacity_tokens: int, batch: int) -> int:
    """Device bytes of the keys of a `TopKPolicy`."""
    return kv_cache_bytes(config, dtype, capacity_tokens=capacity_tokens, batch=batch) // 2


CHUNK_POLICIES: dict[str, type[RetrievalPolicy]] = {
    "retrieval": RetrievalPolicy, "topk": TopKPolicy, "streaming": StreamingPolicy,
}  # fmt: skip


def chunk_policy(name: str) -> type[RetrievalPolicy]:
    """The policy of this name. Raises `OptionError`."""
    if name not in CHUNK_POLICIES:
        raise OptionError(f"policy must be {', '.join(CHUNK_POLICIES)}, not {name!r}")
    return CHUNK_POLICIES[name]
