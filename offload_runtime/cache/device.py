"""The KV cache on the compute device, which is the base of all others.

It is reserved in full up front; `cache.host` has the one whose blocks live in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from itertools import pairwise

import torch
from offload_runtime_kernels.attention import AttentionParams, QueryRows, attention
from offload_runtime_kernels.compact_rows import compact_rows
from offload_runtime_kernels.gated_delta import CHUNK_TOKENS
from offload_runtime_kernels.gather_chunks import BlockTable
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from offload_runtime.cache.delta import DeltaStates, anchors_within
from offload_runtime.cache.saved_blocks import SavedBlock
from offload_runtime.errors import BudgetError, ContextLengthError
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import DeltaPass, Rows
from offload_runtime.sizes import format_bytes
from offload_runtime.stream.arena import Registrar
from offload_runtime.stream.device import DeviceBudget, current_device, upload

# Told about blocks of a layer and a slot that have become full, while they are in a batch row of `KVBlocks` on the
# device; enqueues work, keeps nothing.
OnBlocks = Callable[[int, int, KVBlocks, int, range], None]


class KVCache:
    """A cache of whole sequences, of which a token becomes part when it is committed; a `LayerCache`.

    It lives on the compute device, or where layers are on several cards each one's on its card.

    Rolling back is only a length: what lies behind it is overwritten later.

    Args:
        config: The model's shape.
        dtype: Of keys and values.
        capacity_tokens: Tokens per sequence; tentative ones may use the rest of the last block, too.
        batch: Sequences.
        budgets: Ledgers of the cards to reserve from.
        owners: The card of each layer by its number; empty: all are on the first.
        name: What to call it in the ledger.
        spare_positions: Places behind all tokens of each sequence, for keys and values of what may become part of it.
        pass_rows: Most rows that a pass has of a sequence at a time; layers with sliding windows reserve no more than
            these reach, in rings of blocks. None: they keep all, as beside spare positions.
        elsewhere: Layers whose blocks a subclass keeps.
        window_tokens: Most tokens that a decoding pass, or steps one after the other, put behind the committed ones,
            where layers keep states.
        registrar: Page-locks host memory for states to go back to.
        drafts: Whether it is a draft's, whose passes but prefills are steps: what they commit may be taken back.
    """

    mixes = True  # a pass may read several prompts, and beside windows
    prefills_by_layer = False  # a prefill has to take all pieces of a prompt through one layer before the next

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, capacity_tokens: int, batch: int,
        budgets: Sequence[DeviceBudget], owners: Sequence[int] = (), name: str = "KV cache", spare_positions: int = 0,
        pass_rows: int | None = None, elsewhere: Collection[int] = (), window_tokens: int = 0,
        registrar: Registrar | None = None, drafts: bool = False,
    ) -> None:  # fmt: skip
        assert pass_rows is None or not spare_positions, "they lie behind the last block of a layer, not in a ring"
        self._devices, self._pass_rows = [budget.device for budget in budgets], pass_rows
        attentions = config.attentions
        # Of the layers that have keys and values.
        self._num_blocks = {
            layer: num_blocks(one.reserved_tokens(capacity_tokens, pass_rows)) for layer, one in attentions.items()
        }
        self._windows = {
            (one.window, num_blocks(one.reserved_tokens(capacity_tokens, pass_rows)))
            for one in config.all_attentions.values()
            if one.window is not None
        }
        # Of every sequence the end of what was ever written, and the first block that was restored in layers of these.
        self._written, self._restored_from = [0] * batch, [0] * batch
        # Of whole blocks, which the first of several machines is given of all.
        self._saved_layers = {layer for layer in config.all_attentions if layer >= 0 or config.has_ends}
        self._owners = owners or (0,) * config.num_layers
        self.capacity_tokens = capacity_tokens
        self.max_tokens_with_draft = num_blocks(capacity_tokens) * BLOCK_TOKENS
        self.spare_positions = range(self.max_tokens_with_draft, self.max_tokens_with_draft + spare_positions)
        self.observers: list[OnBlocks] = []
        # Is told of a slot which rows of its window become part of it: other machines keep those of their layers.
        self.on_path: Callable[[int, Sequence[int]], None] | None = None
        self._lengths = [0] * batch
        self._ends = [0] * batch  # tokens that the announced window reaches
        self._rows = slice(None)  # of the batch, that the running pass is about
        self._tables: dict[int, BlockTable] = {}  # of layers, once somebody asks for one
        # Layers of one card and shape [L, B, N, 2, H_kv, 256, D], and of each layer [B, N, 2, H_kv, 256, D].
        spare_blocks = num_blocks(spare_positions)
        here = {layer: own + spare_blocks for layer, own in self._num_blocks.items() if layer not in elsewhere}
        shapes = block_shapes(config, batch, here)
        stacks, self._of_layers = allocate_layers(budgets, self._owners, name, dtype, shapes)
        self._stacks = [*stacks.values()]
        self._states: DeltaStates | None = None
        if config.deltas:
            self._states = DeltaStates(
                config, dtype, lengths=self._lengths, window_tokens=window_tokens, budgets=budgets,
                owners=self._owners, name=f"{name}: states", registrar=registrar,
                spare_positions=self.spare_positions if drafts else None,
            )  # fmt: skip
        self._renewed_from: DeltaStates | None = None  # as a copy sees it: the model's own
        # Of trees one path alone leads over the end of so many positions; None: any do.
        self.chunk_tokens = None if self._states is None else CHUNK_TOKENS
        # Tokens that steps may put behind the committed ones of a sequence; None: as many as there is room for.
        self.step_tokens = None if self._states is None else window_tokens

    def for_copy(
        self, config: ModelConfig, dtype: torch.dtype, *, budgets: Sequence[DeviceBudget], name: str
    ) -> KVCache:
        """Return this cache as a copy of the model's layers sees it, whose steps write guesses: all is the same but for
        the states of gated delta layers, of which it has its own, and a text's are taken over by `renew`. `name` is
        what these are called in the ledgers."""
        found = copy(self)
        if self._states is not None:
            assert self.step_tokens is not None
            found._renewed_from = self._states
            found._states = DeltaStates(
                config, dtype, lengths=self._lengths, window_tokens=self.step_tokens, budgets=budgets,
                owners=self._owners, name=name, registrar=None, spare_positions=self.spare_positions,
            )  # fmt: skip
        return found

    def renew(self, slot: int) -> None:
        """Let a copy's states of a sequence be those behind its committed tokens; enqueued on the current stream."""
        if self._states is not None and self._renewed_from is not None:
            self._states.take_over(self._renewed_from, slot)

    @property
    def pinned_bytes(self) -> int:
        """Return the page-locked host memory that it holds."""
        return 0 if self._states is None else self._states.pinned_bytes

    @property
    def anchor_bytes(self) -> int:
        """Return the host memory of states to go back to, so far."""
        return 0 if self._states is None else self._states.anchor_bytes

    @property
    def step_lag(self) -> int:
        """Return what steps of the announced window depend on besides device memory, where layers have states."""
        return 0 if self._states is None else self._states.lag

    def anchors_within(self, start: int, end: int) -> list[int]:
        """Return where a prompt that brings a sequence from `start` to `end` tokens leaves states to go back to: a
        piece of it has to begin at each of these."""
        return [] if self._states is None else anchors_within(start, end)

    def length(self, slot: int) -> int:
        """Committed tokens of a sequence."""
        return self._lengths[slot]

    def begin_window(self, slots: Sequence[int], counts: Sequence[int], prompts: Collection[int] = ()) -> None:
        """The next pass puts `counts[i]` tokens behind the committed ones of `slots[i]`: windows, and `prompts`, which
        are committed as a whole.

        Raises:
            ContextLengthError: They reach beyond `max_tokens_with_draft`.
            BudgetError: The memory that they need was refused. Committed tokens are kept.
        """
        for slot, count in zip(slots, counts, strict=True):
            self._ends[slot] = self._lengths[slot] + count
            check_capacity(self._ends[slot], self.max_tokens_with_draft)
        self._begin(dict(zip(slots, counts, strict=True)), prompts)
        self._rows = slice(None)

    def begin_prefill(self, slot: int, count: int) -> None:
        """The next pass is a prefill of `count` tokens behind the committed ones, and its rows call this sequence 0.
        Once it has been issued they are committed.

        Raises as `begin_window`, and where they are more than `capacity_tokens`. Memory that is page-locked meanwhile
        may also be refused in `attend`, by a `BudgetError`; committed tokens are kept then, too.
        """
        check_capacity(self._lengths[slot] + count, self.capacity_tokens)
        assert self.keeps(slot, self._lengths[slot]) == self._lengths[slot], "its windows reach what is not there"
        self._begin({slot: count}, [slot], in_background=True)
        self._rows = slice(slot, slot + 1)

    def _begin(self, counts: Mapping[int, int], prompts: Collection[int], *, in_background: bool = False) -> None:
        ends = {slot: self._lengths[slot] + count for slot, count in counts.items()}
        for slot, end in ends.items():
            self._make_room(slot, end, in_background=in_background)
        for slot, end in ends.items():
            self._written[slot] = max(self._written[slot], end)
        if self._states is not None:
            self._states.begin(ends, prompts)

    def _make_room(self, slot: int, length: int, *, in_background: bool = False) -> None:
        """Reserve what a sequence of so many tokens needs besides memory of the device. Raises as `begin_window`."""

    def keeps(self, slot: int, length: int) -> int:
        """Return to how many of the first `length` tokens of a sequence it could be cut: any number. There are none
        where newer tokens, rejected ones included, lie where a sliding window would reach."""
        if self._states is not None:
            length = self._states.keeps(slot, length)
        for window, blocks in self._windows:
            oldest = max(num_blocks(self._written[slot]) - blocks, self._restored_from[slot])
            if max(0, length + 1 - window) // BLOCK_TOKENS < oldest:
                return 0
        return length

    def saves(self, slot: int, length: int) -> int:
        """Return how many of the first `length` tokens of a sequence it could be brought back to from saved blocks."""
        return length if self._states is None else self._states.saves(slot, length)

    def truncate(self, slot: int, length: int) -> int:
        """Forget everything behind the first `length` tokens of a sequence, or behind those of them that it `keeps`.
        Returns how many these are; whoever wants more reads the others again."""
        assert 0 <= length <= self._lengths[slot]
        self._lengths[slot] = length = self.keeps(slot, length)
        if not length:
            self._written[slot] = self._restored_from[slot] = 0
        if self._states is not None:
            self._states.truncate(slot)
        return length

    def save_block(self, slot: int, block: int, to: SavedBlock, *, length: int) -> None:
        """Copy layers of a block, of which the first `length` tokens of a sequence have some, to host memory; waits for
        it."""
        for layer in to.keys() & self._num_blocks.keys():
            to[layer][0].copy_(self._block(layer, slot, block), non_blocking=True)
        self._wait()
        if self._states is not None:
            self._states.save(slot, min((block + 1) * BLOCK_TOKENS, length), to)

    def restore_block(self, slot: int, saved: SavedBlock, count: int) -> None:
        """Commit the first `count` tokens of a saved block behind the committed ones, which are whole blocks; waits
        until they are there. Layers that it does not have are those whose windows will not reach it; it has those of
        machines behind, too."""
        block, rest = divmod(self._lengths[slot], BLOCK_TOKENS)
        assert not rest and 0 < count <= BLOCK_TOKENS
        self.begin_window([slot], [count])
        for layer in saved.keys() & self._num_blocks.keys():
            self._block(layer, slot, block).copy_(saved[layer][0], non_blocking=True)
        if not self._saved_layers <= saved.keys():
            self._restored_from[slot] = block + 1
        self._wait()
        if self._states is not None:  # they come with the last block: there is nothing left to commit of them then
            self._states.restore(slot, self._lengths[slot] + count, saved)
        self.commit(slot, count)

    def _wait(self) -> None:
        """Until the copies are done that the current stream of each card has been given."""
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def _block(self, layer: int, slot: int, block: int) -> torch.Tensor:
        """A block with committed tokens, or the next one, wherever it lies: [2, H_kv, 256, D]."""
        return self._of_layers[layer][slot, block % self._of_layers[layer].shape[1]]

    def _notify(self, layer: int, slot: int, kv: KVBlocks, row: int, blocks: range) -> None:
        """Tell the observers about blocks that have become full."""
        for observer in self.observers if blocks else ():
            with current_device(kv.data.device):
                observer(layer, slot, kv, row, blocks)

    def store(self, layer: int) -> KVBlocks:
        return KVBlocks(self._of_layers[layer][self._rows])

    def attend(self, layer: int, q: torch.Tensor, rows: QueryRows, params: AttentionParams) -> torch.Tensor:
        assert self._pass_rows is None or q.shape[1] <= self._pass_rows, "more rows than windows have room for"
        return attention(q, self.store(layer), rows, params)

    def take_steps(self, budgets: Sequence[DeviceBudget], name: str) -> None:
        """Let steps write guesses, which windows overwrite, behind what layers with states have committed."""
        if self._states is not None:
            self._states.take_steps(budgets, name, each_layer=False)

    def delta(self, layer: int, rows: Rows, *, in_step: bool = False) -> DeltaPass:
        """Return what `LayerCache.delta` says, of a step that writes guesses, or of any other pass."""
        assert self._states is not None, "the model has such layers"
        return self._states.of_layer(layer, rows, in_step=in_step)

    def commit(self, slot: int, count: int, path: Sequence[int] = ()) -> None:
        """Make the first `count` tentative tokens of a sequence part of it, whose states are in the rows of a `path` if
        that is not empty."""
        before = self._lengths[slot]
        assert count >= 0 and before + count <= self.max_tokens_with_draft
        self._lengths[slot] += count
        if self._states is not None:
            self._states.commit(slot, before, path)
        full = filled_blocks(before, self._lengths[slot])
        for layer, data in self._of_layers.items() if full else ():
            self._notify(layer, slot, KVBlocks(data), slot, full)

    def commit_path(self, slot: int, rows: Sequence[int]) -> None:
        """Make a path through a sequence's window part of it: its rows, ascending from the root 0.

        Their keys and values move to where their positions belong, on the current stream and before anybody is told
        about blocks that have become full. Leading rows that are there already, all of a chain, do not move.
        """
        if len(rows) > 1:  # else the root, which is where it belongs
            compact_path([data[:, slot] for data in self._stacks], self._lengths[slot], rows)
        if self.on_path is not None:
            self.on_path(slot, rows)
        self.commit(slot, len(rows), rows)

    def adopt(self, slot: int, cache_positions: Sequence[int], first: int) -> None:
        """Copy the keys and values in some spare slots, in this order, to the places of the positions from `first` on:
        one launch a card on its current stream, however many. Commits nothing."""
        assert all(one in self.spare_positions for one in cache_positions)
        assert first + len(cache_positions) <= self.capacity_tokens
        if cache_positions:
            move_rows([data[:, slot] for data in self._stacks], cache_positions, first)

    def recent_blocks(self, slot: int) -> range:
        """Return the open block, a full one before it, and what the announced window reaches."""
        return range(kept_from(self._lengths[slot]), num_blocks(self._ends[slot]))

    def block_table(self, layer: int) -> BlockTable:
        """Return where the layer's blocks lie."""
        if layer not in self._tables:
            data = self._of_layers[layer]
            table = BlockTable.empty(data.shape[0], data.shape[1], data.device)
            for slot, blocks in enumerate(data):
                table.put(slot, 0, blocks)
            self._tables[layer] = table
        return self._tables[layer]

    def begin_restore(self, slot: int, length: int) -> None:
        """Saved blocks will make a sequence so long: make room for them. Raises as `begin_prefill`."""
        check_capacity(length, self.capacity_tokens)

    def close(self) -> None:
        """Give host memory back."""
        if self._states is not None:
            self._wait()
            self._states.close()


def allocate_layers(
    budgets: Sequence[DeviceBudget], owners: Sequence[int], name: str, dtype: torch.dtype,
    shapes: Mapping[int, tuple[int, ...]],
) -> tuple[dict[tuple[int, tuple[int, ...]], torch.Tensor], dict[int, torch.Tensor]]:  # fmt: skip
    """Room for keys and values of layers, and for what is kept about them, each in the memory of its card.

    Zeros: a masked key still meets a zero weight, and 0 * NaN is NaN.

    Args:
        budgets: Ledgers of the cards.
        owners: The card of each layer by its number.
        name: What to call it in the ledgers.
        dtype: Of the numbers.
        shapes: By layer, of those that there is to be room for.

    Returns:
        By card and shape the layers that have both, [L, *shape], and of each layer its part of that, [*shape].
    """
    alike = dict[tuple[int, tuple[int, ...]], list[int]]()
    for layer, shape in sorted(shapes.items()):
        alike.setdefault((owners[layer], shape), []).append(layer)
    stacks, of_layers = dict[tuple[int, tuple[int, ...]], torch.Tensor](), dict[int, torch.Tensor]()
    for (card, shape), layers in alike.items():
        nbytes = len(layers) * math.prod(shape) * dtype.itemsize
        try:
            stack = budgets[card].allocate(name, nbytes).view(dtype).view(len(layers), *shape).zero_()
        except (RuntimeError, MemoryError) as error:
            raise BudgetError(f"{name} of {format_bytes(nbytes)} was refused ({error}): lower --context") from error
        stacks[card, shape] = stack
        of_layers.update(zip(layers, stack, strict=True))
    return stacks, dict(sorted(of_layers.items()))


def filled_blocks(before: int, after: int) -> range:
    """Return the blocks of a sequence that become full when it grows from `before` to `after` tokens."""
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
    """Return how many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


def block_shapes(config: ModelConfig, batch: int, blocks: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Return the shapes of so many blocks of each of some layers: [B, N, 2, H_kv, 256, D]."""
    return {layer: (batch, count, *config.attentions[layer].kv_block_shape) for layer, count in blocks.items()}


def block_bytes(config: ModelConfig, dtype: torch.dtype, layer: int) -> int:
    """Return the bytes of a layer's block."""
    return config.attentions[layer].kv_elements(BLOCK_TOKENS) * dtype.itemsize


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
    move_rows(caches, [committed + row for row in rows[kept:]], committed + kept)


def move_rows(caches: Sequence[torch.Tensor], cache_positions: Sequence[int], first: int) -> None:
    """Copy the keys and values at some positions to those from `first` on, on the current stream of each device.
    `caches` as of `compact_path`."""
    host, sources = torch.tensor(list(cache_positions), dtype=torch.int32), dict[torch.device, torch.Tensor]()
    for data in caches:
        if data.numel():
            with current_device(data.device):
                if data.device not in sources:
                    sources[data.device] = upload(host, data.device)
                compact_rows(KVBlocks(data), sources[data.device], first)


class StreamingDraftCache(KVCache):
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
        budgets: Ledgers of the cards to reserve from.
        name: What to call it in the ledger.
        spare_positions: As of a `KVCache`. They stay where they are when `start` moves, rotated as they were.

    Attributes:
        starts: Of every sequence, the tokens between the sinks and the recent ones that are not kept.
        rope_shifts: Of every sequence, how much further keys are rotated than their indices say.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, sink_tokens: int, recent_tokens: int, window_tokens: int,
        batch: int, budgets: Sequence[DeviceBudget], name: str = "draft: KV cache", spare_positions: int = 0,
    ) -> None:  # fmt: skip
        assert 1 <= sink_tokens <= BLOCK_TOKENS and recent_tokens >= 2
        capacity = streaming_capacity_tokens(sink_tokens, recent_tokens, window_tokens)
        super().__init__(
            config, dtype, capacity_tokens=capacity, batch=batch, budgets=budgets, name=name,
            spare_positions=spare_positions,
        )  # fmt: skip
        self.sink_tokens = sink_tokens
        self._recent_tokens = recent_tokens
        self.starts = [0] * batch
        self.rope_shifts = [0] * batch

    def start_for(self, length: int) -> int:
        """Return the `start` of a sequence of `length` tokens: 0 as long as it fits."""
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
        for data in self._of_layers.values():
            data[slot, :count] = data[slot, first : first + count].clone()  # source and target overlap
        self.truncate(slot, kept)
        self.starts[slot] = start
        self.rope_shifts[slot] += dropped


def streaming_capacity_tokens(sink_tokens: int, recent_tokens: int, window_tokens: int) -> int:
    """Return how many tokens of a sequence a `StreamingDraftCache` holds: what it keeps at most, and a window, in
    whole blocks.

    Moving takes as much as one layer's share of it on top, for a moment.
    """
    return num_blocks(sink_tokens + recent_tokens + BLOCK_TOKENS - 1 + window_tokens) * BLOCK_TOKENS


def kept_positions(sequence_length: int, start: int, sink_tokens: int) -> Sequence[int]:
    """Absolute positions of what a `StreamingDraftCache` keeps, in the order of its indices."""
    return range(sequence_length) if not start else [*range(sink_tokens), *range(start + sink_tokens, sequence_length)]
