"""A draft's cache of the whole text, of which its steps read a few chunks that their own queries choose.

Everything is on the device, as the draft is small; what is saved is reading it. The draft of a long text attends to
what matters far back, and a step's bytes do not grow with the text.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from offload_runtime_kernels.attention import QueryRows
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.config import ModelConfig
from offload_runtime.kv_cache.device import DeviceKVCache, kv_cache_bytes
from offload_runtime.kv_cache.protocol import BlockObserver
from offload_runtime.kv_cache.retrieval import RetrievalPolicy, RetrievedChunks, retrieved_bytes, summaries_bytes
from offload_runtime.kv_cache.retrieval_cache import RetrievalCache
from offload_runtime.memory import DeviceBudget


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
        self._chunks = RetrievedChunks(
            config, dtype, budget_tokens=budget_tokens, chunk_size=chunk_size, batch=batch, budget=budget,
            name=f"{name}: retrieved",
        )  # fmt: skip
        policy = RetrievalPolicy(
            config, dtype, budget_tokens=budget_tokens, chunk_size=chunk_size, capacity_tokens=capacity_tokens,
            batch=batch, budget=budget,
        )  # fmt: skip
        self._full.observers.append(policy)
        self.warm_up = policy.warm_up
        self._view = RetrievalCache(self._full, self._chunks, policy, batch=batch, device=budget.device)
        self._reach = [0] * batch  # no token from here on is in a retrieved chunk
        self.store, self.length = self._full.store, self._full.length
        self.begin_prefill, self.end_prefill = self._full.begin_prefill, self._full.end_prefill
        self.commit, self.commit_path = self._full.commit, self._full.commit_path
        self.close, self.reach_tokens = self._full.close, self._full.reach_tokens
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
