"""What a KV cache is to the decoder, the runners and the engine, and the one on the compute device.

That one is reserved in full up front; `kv.host` has the one whose blocks live in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from offload_runtime_kernels.attention import QueryRows, attention
from offload_runtime_kernels.compact_rows import compact_rows
from offload_runtime_kernels.gather_chunks import BlockTable
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from offload_runtime.errors import BudgetError, ContextLengthError
from offload_runtime.kv.block_store import SavedBlock
from offload_runtime.memory import DeviceBudget, upload
from offload_runtime.models import ModelConfig
from offload_runtime.sizes import format_bytes


class LayerCache(Protocol):
    """What a decoder layer needs: a place for new keys and values, and attention over all that its queries see, within
    the layer's sliding window."""

    def store(self, layer: int) -> KVBlocks:
        """Where the rows of the running pass write their keys and values."""

    def attend(self, layer: int, q: torch.Tensor, rows: QueryRows) -> torch.Tensor:
        """Attention of the rotated queries [B, T, H, D] (their own keys are stored): [B, T, H, D]."""


class BlockObserver(Protocol):
    """Told about blocks that have become full, while they are on the device."""

    def on_blocks(self, layer: int, slot: int, kv: KVBlocks, row: int, blocks: range) -> None:
        """Blocks `blocks` of a sequence are full; they lie in batch row `row` of `kv`. Enqueues work, keeps nothing."""


class KVCache(LayerCache, Protocol):
    """A cache of whole sequences; a token becomes part of one when it is committed."""

    capacity_tokens: int
    max_tokens_with_draft: int  # of a sequence with what is only tentative: the capacity in whole blocks

    @property
    def mixes(self) -> bool:
        """Whether the windows of a pass may be prompts, too, to be committed as a whole."""

    @property
    def prefills_by_layer(self) -> bool:
        """Whether a prefill has to take all pieces of a prompt through one layer before the next."""

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory that it holds."""

    def length(self, slot: int) -> int:
        """Committed tokens of a sequence."""

    def begin_window(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """The next pass puts `counts[i]` tokens behind the committed ones of `sequences[i]`.

        Raises:
            ContextLengthError: They reach beyond `max_tokens_with_draft`.
            BudgetError: The memory that they need was refused. Committed tokens are kept.
        """

    def begin_prefill(self, slot: int, count: int) -> None:
        """The next pass is a prefill of `count` tokens behind the committed ones, and its rows call this sequence 0.

        Raises as `begin_window`, and where they are more than `capacity_tokens`. Memory that is page-locked meanwhile
        may also be refused in `attend`, by a `BudgetError`; committed tokens are kept then, too.
        """

    def end_prefill(self, slot: int, count: int) -> None:
        """That pass has been issued: commit its tokens."""

    def commit(self, slot: int, count: int) -> None:
        """Make the first `count` tentative tokens of a sequence part of it."""

    def commit_path(self, slot: int, rows: Sequence[int]) -> None:
        """Make a path through a sequence's window part of it: its rows, ascending from the root 0.

        Their keys and values move to where their positions belong, on the current stream and before anybody is told
        about blocks that have become full. Leading rows that are there already, all of a chain, do not move.
        """

    def truncate(self, slot: int, length: int) -> None:
        """Forget everything behind the first `length` tokens of a sequence."""

    def save_block(self, slot: int, block: int, to: SavedBlock) -> None:
        """Copy a block with committed tokens to host memory; waits for it."""

    def begin_restore(self, slot: int, length: int) -> None:
        """Saved blocks will make a sequence so long: make room for them. Raises as `begin_prefill`."""

    def restore_block(self, slot: int, saved: SavedBlock, count: int) -> None:
        """Commit the first `count` tokens of a saved block behind the committed ones, which are whole blocks; waits
        until they are there."""

    def close(self) -> None:
        """Give host memory back."""


class BlockCache:
    """What caches of whole sequences have in common: how long these are, the rows of the running pass and how far its
    windows reach, who is told about full blocks, and the tables through which blocks are found. Subclasses provide
    `store`, where keys and values are written, `commit` and `_block`, and enter their blocks into the tables.

    Args:
        config: The model's shape.
        capacity_tokens: Tokens per sequence; tentative ones may use the rest of the last block, too.
        batch: Sequences.
        device: Where passes run.
    """

    prefills_by_layer = False

    def __init__(self, config: ModelConfig, *, capacity_tokens: int, batch: int, device: torch.device) -> None:
        self._config, self._device = config, device
        self.capacity_tokens = capacity_tokens
        self.max_tokens_with_draft = num_blocks(capacity_tokens) * BLOCK_TOKENS
        self.observers: list[BlockObserver] = []
        self._lengths = [0] * batch
        self._ends = [0] * batch  # tokens that the announced window reaches
        self._rows = slice(None)  # of the batch, that the running pass is about
        self._tables: dict[int, BlockTable] = {}  # of layers, once somebody asks for one

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def begin_window(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        for slot, count in zip(slots, counts, strict=True):
            self._ends[slot] = self._lengths[slot] + count
            check_capacity(self._ends[slot], self.max_tokens_with_draft)
        self._rows = slice(None)

    def save_block(self, slot: int, block: int, to: SavedBlock) -> None:
        for layer, target in enumerate(to):
            target.copy_(self._block(layer, slot, block), non_blocking=True)
        self._wait()

    def restore_block(self, slot: int, saved: SavedBlock, count: int) -> None:
        block, rest = divmod(self._lengths[slot], BLOCK_TOKENS)
        assert not rest and 0 < count <= BLOCK_TOKENS
        self.begin_window([slot], [count])
        for layer, source in enumerate(saved):
            self._block(layer, slot, block).copy_(source, non_blocking=True)
        self._wait()
        self.commit(slot, count)

    def _wait(self) -> None:
        """Until the copies are done that the current stream has been given."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _attend_to(self, kv: KVBlocks, layer: int, q: torch.Tensor, rows: QueryRows) -> torch.Tensor:
        """Attention to all that queries see, which lies in one place."""
        own = self._config.layers[layer].attention
        return attention(q, kv, rows, scale=own.scale, sliding_window=own.window)

    def _block(self, layer: int, slot: int, block: int) -> torch.Tensor:
        """A block with committed tokens, or the next one, wherever it lies: [2, H_kv, 256, D]."""
        raise NotImplementedError

    def commit(self, slot: int, count: int) -> None:
        raise NotImplementedError

    def _notify(self, layer: int, slot: int, kv: KVBlocks, row: int, blocks: range) -> None:
        """Tell the observers about blocks that have become full."""
        for observer in self.observers if blocks else ():
            observer.on_blocks(layer, slot, kv, row, blocks)


class DeviceKVCache(BlockCache):
    """A cache that lives on the compute device.

    Rolling back is only a length: what lies behind it is overwritten later.

    Args:
        config: The model's shape.
        dtype: Of keys and values.
        capacity_tokens: Tokens per sequence; tentative ones may use the rest of the last block, too.
        batch: Sequences.
        budget: Ledger to reserve from.
        name: What to call it in the ledger.
        spare_positions: Places behind all tokens of each sequence, for keys and values of what may become part of it.
    """

    pinned_bytes, mixes = 0, True

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, capacity_tokens: int, batch: int, budget: DeviceBudget,
        name: str = "KV cache", spare_positions: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(config, capacity_tokens=capacity_tokens, batch=batch, device=budget.device)
        self.spare_positions = range(self.max_tokens_with_draft, self.max_tokens_with_draft + spare_positions)
        blocks = num_blocks(capacity_tokens) + num_blocks(spare_positions)
        shape = (config.num_layers, batch, blocks, *block_shape(config))
        self._data = allocate_zeros(budget, name, dtype, shape)

    def store(self, layer: int) -> KVBlocks:
        return KVBlocks(self._data[layer, self._rows])

    def attend(self, layer: int, q: torch.Tensor, rows: QueryRows) -> torch.Tensor:
        return self._attend_to(self.store(layer), layer, q, rows)

    def begin_prefill(self, slot: int, count: int) -> None:
        check_capacity(self._lengths[slot] + count, self.capacity_tokens)
        self._rows = slice(slot, slot + 1)

    def end_prefill(self, slot: int, count: int) -> None:
        self.commit(slot, count)

    def commit(self, slot: int, count: int) -> None:
        before = self._lengths[slot]
        assert count >= 0 and before + count <= self.max_tokens_with_draft
        self._lengths[slot] += count
        full = filled_blocks(before, self._lengths[slot])
        for layer in range(self._data.shape[0]) if full else ():
            self._notify(layer, slot, KVBlocks(self._data[layer]), slot, full)

    def commit_path(self, slot: int, rows: Sequence[int]) -> None:
        if len(rows) > 1:  # else the root, which is where it belongs
            compact_path((self._data[:, slot],), self._lengths[slot], rows)
        self.commit(slot, len(rows))

    def adopt(self, slot: int, cache_positions: Sequence[int], first: int) -> None:
        """Copy the keys and values in some spare slots, in this order, to the places of the positions from `first` on:
        one launch on the current stream, however many. Commits nothing."""
        assert (
            all(cache_position in self.spare_positions for cache_position in cache_positions)
            and first + len(cache_positions) <= self.capacity_tokens
        )
        if cache_positions:
            sources = upload(torch.tensor(list(cache_positions), dtype=torch.int32), self._data.device)
            compact_rows(KVBlocks(self._data[:, slot]), sources, first)

    def recent_blocks(self, slot: int) -> range:
        """The open block, a full one before it, and what the announced window reaches."""
        return range(kept_from(self._lengths[slot]), num_blocks(self._ends[slot]))

    def block_table(self, layer: int) -> BlockTable:
        """Where the layer's blocks lie."""
        if layer not in self._tables:
            table = BlockTable.empty(self._data.shape[1], self._data.shape[2], self._data.device)
            for slot in range(self._data.shape[1]):
                table.put(slot, 0, self._data[layer, slot])
            self._tables[layer] = table
        return self._tables[layer]

    def truncate(self, slot: int, length: int) -> None:
        assert 0 <= length <= self._lengths[slot]
        self._lengths[slot] = length

    def begin_restore(self, slot: int, length: int) -> None:
        check_capacity(length, self.capacity_tokens)

    def _block(self, layer: int, slot: int, block: int) -> torch.Tensor:
        return self._data[layer, slot, block]

    def close(self) -> None:
        pass


def allocate_zeros(budget: DeviceBudget, name: str, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Room on the device for keys and values, and for what is kept about them.

    Zeros: a masked key still meets a zero weight, and 0 * NaN is NaN.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        return budget.allocate(name, nbytes).view(dtype).view(shape).zero_()
    except (RuntimeError, MemoryError) as error:
        raise BudgetError(f"{name} of {format_bytes(nbytes)} was refused ({error}): lower --context") from error


def filled_blocks(before: int, after: int) -> range:
    """Blocks of a sequence that become full when it grows from `before` to `after` tokens."""
    return range(before // BLOCK_TOKENS, after // BLOCK_TOKENS)


def kept_from(length: int) -> int:
    """First of the blocks that are kept at hand of `length` tokens: the open one and a full one before it."""
    return max(0, length // BLOCK_TOKENS - 1)


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
    return math.prod(block_shape(config)) * dtype.itemsize


def kv_cache_bytes(
    config: ModelConfig, dtype: torch.dtype, *, capacity_tokens: int, batch: int, spare_positions: int = 0
) -> int:
    """Bytes of a `DeviceKVCache`."""
    blocks = num_blocks(capacity_tokens) + num_blocks(spare_positions)
    return config.num_layers * batch * blocks * block_bytes(config, dtype)


def compact_path(caches: Sequence[torch.Tensor], committed: int, rows: Sequence[int]) -> None:
    """Move the rows of a window that form a path, in place, on the current stream. Leading rows that are where they
    belong, all of a chain, are left alone and cost nothing.

    Args:
        caches: What holds layers of the sequence, each [L, N, 2, H_kv, 256, D], device: one launch each.
        committed: Tokens of the sequence before the window, whose row i lies at `committed` + i.
        rows: Of the window, ascending from its root 0.
    """
    assert list(rows[:1]) in ([], [0]) and all(a < b for a, b in pairwise(rows)), "a path from the root"
    if not rows or rows[-1] == len(rows) - 1:
        return
    kept = next(index for index, row in enumerate(rows) if row != index)
    sources = upload(torch.tensor([committed + row for row in rows[kept:]], dtype=torch.int32), caches[0].device)
    for data in caches:
        if data.numel():
            compact_rows(KVBlocks(data), sources, committed + kept)


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
        spare_positions: As of a `DeviceKVCache`. They stay where they are when `start` moves, rotated as they were.

    Attributes:
        starts: Of every sequence, the tokens between the sinks and the recent ones that are not kept.
        rope_shifts: Of every sequence, how much further keys are rotated than their indices say.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, sink_tokens: int, recent_tokens: int, window_tokens: int,
        batch: int, budget: DeviceBudget, name: str = "draft: KV cache", spare_positions: int = 0,
    ) -> None:  # fmt: skip
        assert 1 <= sink_tokens <= BLOCK_TOKENS and recent_tokens >= 2
        capacity = streaming_capacity_tokens(sink_tokens, recent_tokens, window_tokens)
        super().__init__(
            config,
            dtype,
            capacity_tokens=capacity,
            batch=batch,
            budget=budget,
            name=name,
            spare_positions=spare_positions,
        )
        self.sink_tokens = sink_tokens
        self._recent_tokens = recent_tokens
        self.starts = [0] * batch
        self.rope_shifts = [0] * batch

    def start_for(self, length: int) -> int:
        """The `start` of a sequence of `length` tokens: 0 as long as it fits."""
        return max(0, (length - self.sink_tokens - self._recent_tokens) // BLOCK_TOKENS * BLOCK_TOKENS)

    def reset(self, slot: int, start: int) -> None:
        """Forget the sequence; what comes is its sinks and then its tokens from `start` + `sink_tokens` on."""
        assert start % BLOCK_TOKENS == 0
        self.truncate(slot, 0)
        self.starts[slot], self.rope_shifts[slot] = start, 0

    def move(self, slot: int, start: int) -> None:
        """Let go of the oldest recent tokens; enqueues copies on the current stream.

        The sinks' keys must be written anew before anything is attended to.
        """
        dropped = start - self.starts[slot]
        kept = self.length(slot) - dropped
        assert dropped > 0 and dropped % BLOCK_TOKENS == 0 and kept >= self.sink_tokens
        first, count = dropped // BLOCK_TOKENS, num_blocks(kept)
        for data in self._data[:, slot]:  # [N, 2, H_kv, 256, D] of a layer
            data[:count] = data[first : first + count].clone()  # source and target overlap
        self.truncate(slot, kept)
        self.starts[slot] = start
        self.rope_shifts[slot] += dropped


def streaming_capacity_tokens(sink_tokens: int, recent_tokens: int, window_tokens: int) -> int:
    """Tokens of a sequence that a `StreamingDraftCache` holds: what it keeps at most, and a window, in whole blocks.

    It takes the `kv_cache_bytes` of these; moving takes as much as one layer's share of it on top, for a moment.
    """
    return num_blocks(sink_tokens + recent_tokens + BLOCK_TOKENS - 1 + window_tokens) * BLOCK_TOKENS


def kept_positions(sequence_length: int, start: int, sink_tokens: int) -> Sequence[int]:
    """Absolute positions of what a `StreamingDraftCache` keeps, in the order of its indices."""
    return range(sequence_length) if not start else [*range(sink_tokens), *range(start + sink_tokens, sequence_length)]
