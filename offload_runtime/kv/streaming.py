"""A cache that holds a part of a sequence: the draft's sinks and recent tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.config import ModelConfig
from offload_runtime.kv.device import DeviceKVCache, kv_cache_bytes, num_blocks
from offload_runtime.memory import DeviceBudget


class StreamingDraftCache(DeviceKVCache):
    """Attention sinks and recent tokens of a draft (Xiao et al., StreamingLLM, arXiv 2309.17453).

    It keeps the first `sink_tokens` tokens of a sequence and, once it has grown, between `recent_tokens` and
    `recent_tokens` + 255 of its newest. The kept tokens lie without a gap: the token of absolute position p at index p
    when it is a sink and at p - `start` otherwise, `start` being a multiple of 256. All lengths and positions of this
    `KVCache` are such indices, so the draft sees no distance beyond `capacity_tokens` and needs no second attention for
    the sinks.

    RoPE depends on differences of positions only. So a recent key stays as it was rotated when `start` moves and its
    block with it: at its index plus `rope_shift`. The sinks have to be computed anew for the indices 0 to
    `sink_tokens` - 1 plus `rope_shift`, which is one small pass.

    Args:
        config: The draft's shape.
        dtype: Of keys and values.
        sink_tokens: Most of them are of no use beyond 4; 1 to 256.
        recent_tokens: Least number of recent tokens, at least 2.
        window_tokens: Most tokens proposed at a time.
        batch: Sequences.
        budget: Ledger to reserve from.
        name: What to call it in the ledger.
        spare_slots: As of a `DeviceKVCache`. They stay where they are when `start` moves, rotated as they were.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, sink_tokens: int, recent_tokens: int, window_tokens: int,
        batch: int, budget: DeviceBudget, name: str = "draft: KV cache", spare_slots: int = 0,
    ) -> None:  # fmt: skip
        assert 1 <= sink_tokens <= BLOCK_TOKENS and recent_tokens >= 2
        capacity = streaming_capacity_tokens(sink_tokens, recent_tokens, window_tokens)
        super().__init__(
            config, dtype, capacity_tokens=capacity, batch=batch, budget=budget, name=name, spare_slots=spare_slots
        )
        self.sink_tokens = sink_tokens
        self._recent_tokens = recent_tokens
        self._starts = [0] * batch
        self._rope_shifts = [0] * batch

    def start(self, sequence: int) -> int:
        """Tokens between the sinks and the recent ones that are not kept."""
        return self._starts[sequence]

    def rope_shift(self, sequence: int) -> int:
        """How much further keys are rotated than their indices say."""
        return self._rope_shifts[sequence]

    def start_for(self, length: int) -> int:
        """The `start` of a sequence of `length` tokens: 0 as long as it fits."""
        return max(0, (length - self.sink_tokens - self._recent_tokens) // BLOCK_TOKENS * BLOCK_TOKENS)

    def reset(self, sequence: int, start: int) -> None:
        """Forget the sequence; what comes is its sinks and then its tokens from `start` + `sink_tokens` on."""
        assert start % BLOCK_TOKENS == 0
        self.truncate(sequence, 0)
        self._starts[sequence], self._rope_shifts[sequence] = start, 0

    def move(self, sequence: int, start: int) -> None:
        """Let go of the oldest recent tokens; enqueues copies on the current stream.

        The sinks' keys must be written anew before anything is attended to.
        """
        dropped = start - self._starts[sequence]
        kept = self.length(sequence) - dropped
        assert dropped > 0 and dropped % BLOCK_TOKENS == 0 and kept >= self.sink_tokens
        first, count = dropped // BLOCK_TOKENS, num_blocks(kept)
        for data in self._data[:, sequence]:  # [N, 2, H_kv, 256, D] of a layer
            data[:count] = data[first : first + count].clone()  # source and target overlap
        self.truncate(sequence, kept)
        self._starts[sequence] = start
        self._rope_shifts[sequence] += dropped


def streaming_capacity_tokens(sink_tokens: int, recent_tokens: int, window_tokens: int) -> int:
    """Tokens of a sequence that a `StreamingDraftCache` holds: what it keeps at most, and a window, in whole blocks."""
    return num_blocks(sink_tokens + recent_tokens + BLOCK_TOKENS - 1 + window_tokens) * BLOCK_TOKENS


def streaming_cache_bytes(
    config: ModelConfig, dtype: torch.dtype, *, sink_tokens: int, recent_tokens: int, window_tokens: int, batch: int,
    spare_slots: int = 0,
) -> int:  # fmt: skip
    """Bytes of a `StreamingDraftCache`; moving takes as much as one layer's share of it on top, for a moment."""
    capacity = streaming_capacity_tokens(sink_tokens, recent_tokens, window_tokens)
    return kv_cache_bytes(config, dtype, capacity_tokens=capacity, batch=batch, spare_slots=spare_slots)


def kept_positions(sequence_length: int, start: int, sink_tokens: int) -> Sequence[int]:
    """Absolute positions of what a `StreamingDraftCache` keeps, in the order of its indices."""
    return range(sequence_length) if not start else [*range(sink_tokens), *range(start + sink_tokens, sequence_length)]
