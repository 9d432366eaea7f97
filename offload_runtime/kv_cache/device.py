"""The KV cache on the compute device, reserved in full up front."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from offload_runtime_kernels.attention import QueryRows, attention
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from offload_runtime.config import ModelConfig, format_bytes
from offload_runtime.errors import BudgetError, ContextLengthError
from offload_runtime.memory import DeviceBudget


class DeviceKVCache:
    """A cache that lives on the compute device.

    Rolling back is only a length: what lies behind it is overwritten later.

    Args:
        config: The model's shape.
        dtype: Of keys and values.
        capacity_tokens: Tokens per sequence, tentative ones included.
        batch: Sequences.
        budget: Ledger to reserve from.
        name: What to call it in the ledger.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, capacity_tokens: int, batch: int, budget: DeviceBudget,
        name: str = "KV cache",
    ) -> None:  # fmt: skip
        self.capacity_tokens = capacity_tokens
        self._lengths = [0] * batch
        self._rows = slice(None)  # of the batch, that the running pass is about
        shape = (config.num_layers, batch, num_blocks(capacity_tokens), *block_shape(config))
        nbytes = kv_cache_bytes(config, dtype, capacity_tokens=capacity_tokens, batch=batch)
        # Zeros, not garbage: a masked key still meets a zero weight, and 0 * NaN is NaN.
        try:
            self._data = budget.allocate(name, nbytes).view(dtype).view(shape).zero_()
        except (RuntimeError, MemoryError) as error:
            raise BudgetError(f"{name} of {format_bytes(nbytes)} was refused ({error}): lower --context") from error

    def store(self, layer: int) -> KVBlocks:
        return KVBlocks(self._data[layer, self._rows])

    def attend(
        self, layer: int, q: torch.Tensor, rows: QueryRows, *, scale: float, sliding_window: int | None, prefill: bool
    ) -> torch.Tensor:
        return attention(q, self.store(layer), rows, scale=scale, sliding_window=sliding_window, prefill=prefill)

    @property
    def pinned_bytes(self) -> int:
        return 0

    def length(self, sequence: int) -> int:
        return self._lengths[sequence]

    def begin_window(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        for sequence, count in zip(sequences, counts, strict=True):
            check_capacity(self._lengths[sequence] + count, self.capacity_tokens)
        self._rows = slice(None)

    def begin_prefill(self, sequence: int, count: int) -> None:
        check_capacity(self._lengths[sequence] + count, self.capacity_tokens)
        self._rows = slice(sequence, sequence + 1)

    def end_prefill(self, sequence: int, count: int) -> None:
        self.commit(sequence, count)

    def commit(self, sequence: int, count: int) -> None:
        assert count >= 0 and self._lengths[sequence] + count <= self.capacity_tokens
        self._lengths[sequence] += count

    def truncate(self, sequence: int, length: int) -> None:
        assert 0 <= length <= self._lengths[sequence]
        self._lengths[sequence] = length

    def close(self) -> None:
        pass


def check_capacity(needed_tokens: int, capacity_tokens: int) -> None:
    """Raise `ContextLengthError` when a sequence would not fit."""
    if needed_tokens > capacity_tokens:
        raise ContextLengthError(
            f"{needed_tokens} tokens do not fit the {capacity_tokens} that the KV cache was reserved for: "
            "raise --context, shorten the prompt or lower --max-new-tokens"
        )


def num_blocks(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


def block_shape(config: ModelConfig) -> tuple[int, int, int, int]:
    """Shape of one layer's block: keys and values, heads, tokens, channels."""
    return 2, config.num_kv_heads, BLOCK_TOKENS, config.head_dim


def block_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one layer's block."""
    return 2 * config.num_kv_heads * BLOCK_TOKENS * config.head_dim * dtype.itemsize


def kv_cache_bytes(config: ModelConfig, dtype: torch.dtype, *, capacity_tokens: int, batch: int) -> int:
    """Bytes of a `DeviceKVCache`."""
    return config.num_layers * batch * num_blocks(capacity_tokens) * block_bytes(config, dtype)
