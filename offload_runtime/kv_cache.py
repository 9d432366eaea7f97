"""Keys and values of committed and tentative tokens.

A token's key and value are written by the pass that computes them, behind the committed ones; they become committed
when verification accepts the token. Rolling back is only a length: what lies behind it is overwritten later.
"""

from __future__ import annotations

from typing import Protocol

import torch

from offload_runtime.config import ModelConfig, format_bytes
from offload_runtime.errors import BudgetError, ContextLengthError
from offload_runtime.memory import DeviceBudget


class KVCache(Protocol):
    """What runners and engine need of a cache; `layer` is what the decoder needs."""

    capacity_tokens: int

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of layer `index`, each [B, S, H_kv, D] on the compute device, heads contiguous."""

    def length(self, sequence: int) -> int:
        """Committed tokens of a sequence."""

    def commit(self, sequence: int, count: int) -> None:
        """Make the first `count` tentative tokens of a sequence part of it."""

    def truncate(self, sequence: int, length: int) -> None:
        """Forget everything behind the first `length` tokens of a sequence."""

    def check_room(self, sequence: int, count: int) -> None:
        """Raise `ContextLengthError` unless `count` more tokens fit."""


class DeviceKVCache:
    """A cache that lives on the compute device, reserved in full up front.

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
        shape = (config.num_layers, 2, batch, capacity_tokens, config.num_kv_heads, config.head_dim)
        nbytes = kv_cache_bytes(config, dtype, capacity_tokens=capacity_tokens, batch=batch)
        # Zeros, not garbage: a masked key still meets a zero weight, and 0 * NaN is NaN.
        try:
            self._kv = budget.allocate(name, nbytes).view(dtype).view(shape).zero_()
        except (RuntimeError, MemoryError) as error:
            raise BudgetError(f"{name} of {format_bytes(nbytes)} was refused ({error}): lower --context") from error

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kv[index, 0], self._kv[index, 1]

    def length(self, sequence: int) -> int:
        return self._lengths[sequence]

    def commit(self, sequence: int, count: int) -> None:
        assert count >= 0 and self._lengths[sequence] + count <= self.capacity_tokens
        self._lengths[sequence] += count

    def truncate(self, sequence: int, length: int) -> None:
        assert 0 <= length <= self._lengths[sequence]
        self._lengths[sequence] = length

    def check_room(self, sequence: int, count: int) -> None:
        needed = self._lengths[sequence] + count
        if needed > self.capacity_tokens:
            raise ContextLengthError(
                f"{needed} tokens do not fit the {self.capacity_tokens} that the KV cache was reserved for: "
                "raise --context, shorten the prompt or lower --max-new-tokens"
            )


def kv_cache_bytes(config: ModelConfig, dtype: torch.dtype, *, capacity_tokens: int, batch: int) -> int:
    """Bytes of a `DeviceKVCache`."""
    return config.kv_bytes_per_token(dtype.itemsize) * capacity_tokens * batch
