"""Attention to a few chunks of the far context, chosen by the current queries (TriForce, arXiv 2404.11912).

Of every layer and KV head a `RetrievalCache` holds the chunks that are selected, fetched from the blocks that a cache
keeps (in host or device memory), only what is new each time. Keys keep the positions they were rotated for. What is
recent is read from that cache's own open blocks. A draft that decodes so has a `RetrievedDraftCache`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

import torch
from offload_runtime_kernels.attention import AttentionParams, KeySource, QueryRows, attend_sources
from offload_runtime_kernels.chunk_scores import chunk_scores
from offload_runtime_kernels.chunk_summaries import FACTOR_BYTES, ChunkSummaries, chunk_summaries
from offload_runtime_kernels.gather_chunks import gather_chunks
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks
from offload_runtime_kernels.select_chunks import different_counts, select_chunks

from offload_runtime.cache.device import KVCache, allocate_layers, block_bytes, block_shapes, num_blocks
from offload_runtime.config import chunks_of_budget
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import DeltaPass, Rows
from offload_runtime.stream.arena import Registrar
from offload_runtime.stream.device import DeviceBudget, current_device, overwrite

_NO_LIMIT = (1 << 31) - 1
# Launches are made for the next multiple of so many blocks of far context: a growing text needs another only then.
_FAR_BLOCKS = 16
# A chunk has to be better than one that is held by this share of an average score to be fetched for it. Without a
# margin a third of the chunks change in every step, most of them for nothing: with it half as many are fetched, and the
# agreement with the full cache falls by 0.002 (120,000 tokens, budget 4096). Heads that attend to nothing in particular
# fetch almost nothing.
_HELD_MARGIN = 0.1


class RetrievalCache:
    """A `LayerCache` of several sequences: each one's retrieved chunks beside the target's newest blocks, with nothing
    between. What belongs to a sequence alone is on the device, so that the passes of `begin_step` can be replayed.

    Chosen are the chunks whose keys promise the largest softmax score, and the first chunk (TriForce, arXiv
    2404.11912), by summaries that stay on the device: about 1 / (4 chunk_size) of a KV cache of 16 bits; see
    `summaries_bytes`. A chunk that is held gives way only to one that is better by a margin.

    Args:
        source: The target's cache. It takes tentative keys and values, which the target's own pass overwrites.
        config: The target's shape.
        dtype: Of keys and values.
        budget_tokens: Retrieved tokens per layer and KV head, a multiple of `chunk_size`.
        chunk_size: Tokens of a chunk, a power of two from 2 to 64.
        batch: Sequences of all of them.
        budgets: Ledgers of the cards to reserve from; see `retrieved_bytes` and `summaries_bytes`.
        owners: The card of each layer by its number; empty: all are on the first.
        name: What to call the chunks in the ledger.

    Raises:
        OptionError: The retrieval budget or the chunk size makes no sense.
        BudgetError: The device memory is not there.
    """

    def __init__(
        self, source: KVCache, config: ModelConfig, dtype: torch.dtype, *, budget_tokens: int,
        chunk_size: int, batch: int, budgets: Sequence[DeviceBudget], owners: Sequence[int] = (),
        name: str = "retrieved KV",
    ) -> None:  # fmt: skip
        self._chunk_size, self._budget_chunks = chunk_size, chunks_of_budget(budget_tokens, chunk_size)
        self._owners = owners = owners or (0,) * config.num_layers
        # The chunks, by layer [B, ceil(budget / 256), 2, H_kv, 256, D], and [B, H_kv, K] int32 which lies in each
        # place, -1 for none. After an update the places in use are the first.
        sizes = block_shapes(config, batch, dict.fromkeys(config.attentions, num_blocks(budget_tokens)))
        self._stacks, self._chunks = allocate_layers(budgets, owners, name, dtype, sizes)
        sizes = {layer: (batch, size[3], self._budget_chunks) for layer, size in sizes.items()}
        self._places, self._resident = allocate_layers(budgets, owners, f"{name}: places", torch.int32, sizes)
        for places in self._places.values():
            places.fill_(-1)
        count = num_blocks(source.capacity_tokens) * BLOCK_TOKENS // chunk_size
        attentions = config.attentions.items()
        shapes = {layer: (batch, one.num_kv_heads, count, one.head_dim) for layer, one in attentions}
        _, codes = allocate_layers(budgets, owners, "codes of chunks", torch.int8, shapes)
        shapes = {layer: (*shape[:3], 2) for layer, shape in shapes.items()}
        _, factors = allocate_layers(budgets, owners, "factors of chunks", torch.float16, shapes)
        self._summaries = {layer: ChunkSummaries(own, factors[layer]) for layer, own in codes.items()}
        source.observers.append(self._summarise)
        self._source = source
        self._rows = range(0)  # sequences of the running passes: every pass is about all of these
        self.recent = [range(0)] * batch  # of every sequence the blocks that are attended to in full
        self._refresh = True  # whether the next pass chooses chunks anew
        # Of every row of a pass the chunks to choose from, and the bounds of its far and its recent keys: int32 [3, W],
        # in one tensor of each card that never moves. Each part begins at a multiple of 16 bytes.
        width = -(-2 * batch // 4) * 4
        self._numbers = [torch.zeros(3, width, dtype=torch.int32, device=budget.device) for budget in budgets]
        self._numbers_host: list[list[int]] = []
        self._most_available = 0  # chunks that no sequence has more of to choose from
        self._far_blocks = self._recent_blocks = 0  # of the sequence that has the most

    def _summarise(self, layer: int, slot: int, kv: KVBlocks, row: int, blocks: range) -> None:
        """Summarise every block of a sequence's far context."""
        one = KVBlocks(kv.data[row : row + 1], kv.first_block)
        chunk_summaries(one, blocks, self._summaries[layer].rows(slot, slot + 1), chunk_size=self._chunk_size)

    def warm_up(self) -> None:
        """Compile what chooses, however many chunks there are to choose from."""
        for num_heads, num_chunks, device in {
            (*one.codes.shape[1:3], one.codes.device) for one in self._summaries.values()
        }:
            for count in different_counts(num_chunks):
                scores = torch.zeros(1, num_heads, count, device=device)
                with current_device(device):
                    select_chunks(scores, count, budget_chunks=self._budget_chunks)

    def begin_steps(self, rows: range, counts: Mapping[int, int]) -> bool:
        """Steps over the sequences `rows` will put `counts[s]` tokens behind the committed ones of s; all others stand
        still in every one of them.

        Returns:
            Whether the far part of a sequence has grown since its last steps: the first of these must choose chunks.

        Raises:
            ContextLengthError: They do not fit the context.
        """
        self._source.begin_window(list(counts), list(counts.values()))
        return self.announce(rows, counts)

    def borrow_workspace(self, card: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of the memory of a card's chunks, at most all of it where its layers are alike; the chunks are
        forgotten."""
        for (owner, _), places in self._places.items():
            if owner == card:
                places.fill_(-1)
        largest = max((stack for (owner, _), stack in self._stacks.items() if owner == card), key=torch.numel)
        assert nbytes <= largest.nbytes
        return largest.view(-1).view(torch.uint8)[:nbytes]

    def announce(self, rows: range, counts: Mapping[int, int]) -> bool:
        """Begin steps as `begin_steps` says, once the target's cache knows."""
        self._rows, grown = rows, False
        recent = [range(0)] * len(rows)
        for slot in counts:
            before, now = self.recent[slot].start, self._source.recent_blocks(slot)
            self.recent[slot] = recent[rows.index(slot)] = now
            grown |= now.start != before
        size = self._chunk_size
        most_blocks = -(-max(blocks.start for blocks in recent) // _FAR_BLOCKS) * _FAR_BLOCKS
        most_blocks = min(most_blocks, num_blocks(self._source.max_tokens_with_draft))
        self._most_available = most_blocks * BLOCK_TOKENS // size
        available = [blocks.start * BLOCK_TOKENS // size for blocks in recent]
        keys = [min(count, self._budget_chunks) * size for count in available]
        self._far_blocks, self._recent_blocks = num_blocks(max(keys)), max(len(blocks) for blocks in recent)
        far = [number for count in keys for number in (0, count)]
        near = [number for blocks in recent for number in (blocks.start, _NO_LIMIT)]
        numbers = [available, far, near]
        if numbers != self._numbers_host:
            width = self._numbers[0].shape[1]
            host = torch.tensor([part + [0] * (width - len(part)) for part in numbers], dtype=torch.int32)
            for target in self._numbers:
                with current_device(target.device):
                    overwrite(target, host)
            self._numbers_host = numbers
        return grown

    def begin_step(self, *, first: bool) -> Hashable:
        """The next pass is one of the announced steps: one that chooses chunks anew or one that uses what is there. A
        replay runs no other code of this class.

        Returns:
            All that the pass depends on besides device memory: steps with equal ones enqueue the same work.
        """
        self._refresh = first
        sizes = self._most_available, self._far_blocks, self._recent_blocks, self._source.step_lag
        return self._rows, first, *sizes

    def forget(self, slot: int) -> None:
        """Let another sequence begin in this place: what was retrieved is of no use."""
        self.cut(slot, 0)
        self.recent[slot] = range(0)

    def cut(self, slot: int, length: int) -> None:
        """A sequence was cut to `length` tokens: chunks that reach behind them will be fetched again when selected.

        Until their next update layers that held such a chunk are of no use.
        """
        for places in self._places.values():
            resident = places[:, slot]
            resident.masked_fill_(resident >= length // self._chunk_size, -1)

    def store(self, layer: int) -> KVBlocks:
        return self._source.store(layer)

    def delta(self, layer: int, rows: Rows) -> DeltaPass:
        return self._source.delta(layer, rows, in_step=True)

    def attend(self, layer: int, q: torch.Tensor, rows: QueryRows, params: AttentionParams) -> torch.Tensor:
        """Choose chunks if asked to, and fetch those that are not here yet; then attend to them and to the recent
        blocks. Never synchronises."""
        assert q.shape[0] == len(self._rows)
        first, count = self._rows.start, len(self._rows)
        ours = slice(first, first + count)
        numbers = self._numbers[self._owners[layer]]
        available, bounds = numbers[0, :count], numbers[1:, : 2 * count].view(2, count, 2)
        if self._refresh and self._far_blocks:
            here = self._summaries[layer].rows(first, first + count).first(self._most_available)
            scores = chunk_scores(q[:, : rows.most_used], here, available, scale=params.scale, rows_used=rows.used)
            budget, held = self._budget_chunks, self._resident[layer][ours]
            selected = select_chunks(
                scores, available, budget_chunks=budget, held=held, held_margin=_HELD_MARGIN / budget
            )
            table, chunks = self._source.block_table(layer).rows(first, first + count), self._chunks[layer][ours]
            gather_chunks(selected, held, table, KVBlocks(chunks), chunk_size=self._chunk_size, used=rows.used)
        # Retrieved keys lie at the front of blocks of their own, so every query is behind all of them.
        far = KeySource(KVBlocks(self._chunks[layer]), range(self._far_blocks), bounds=bounds[0])
        near = KeySource(self._source.store(layer), range(self._recent_blocks), bounds=bounds[1])
        return attend_sources(q, [far, near], rows, params)


class RetrievedDraftCache(KVCache):
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
        budgets: Ledgers of the cards to reserve from.
        name: What to call it in the ledger.
        window_tokens, registrar: As of a `KVCache`.

    Raises:
        OptionError: The retrieval budget or the chunk size makes no sense.
        BudgetError: The device memory is not there.
    """

    mixes = False

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, capacity_tokens: int, budget_tokens: int, chunk_size: int,
        batch: int, budgets: Sequence[DeviceBudget], name: str = "draft: KV cache", window_tokens: int = 0,
        registrar: Registrar | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            config, dtype, capacity_tokens=capacity_tokens, batch=batch, budgets=budgets, name=name,
            window_tokens=window_tokens, registrar=registrar, drafts=True,
        )  # fmt: skip
        self._retrieved = retrieved = RetrievalCache(
            self, config, dtype, budget_tokens=budget_tokens, chunk_size=chunk_size, batch=batch, budgets=budgets,
            name=f"{name}: retrieved",
        )  # fmt: skip
        self.warm_up, self.begin_step = retrieved.warm_up, retrieved.begin_step
        self._reach = [0] * batch  # no token from here on is in a retrieved chunk
        self._whole = False  # the running pass attends to everything

    def begin_prefill(self, slot: int, count: int) -> None:
        super().begin_prefill(slot, count)
        self._whole = True

    def begin_window(self, slots: Sequence[int], counts: Sequence[int], prompts: Collection[int] = ()) -> None:
        """A pass will put `counts[0]` tokens behind the committed ones of the one sequence, by fresh choice.

        Raises:
            ContextLengthError: They do not fit the context.
        """
        (slot,), (count,) = slots, counts
        self.begin_steps(range(slot, slot + 1), {slot: count})
        self.begin_step(first=True)

    def begin_steps(self, rows: range, counts: Mapping[int, int]) -> bool:
        """Begin steps as a `RetrievalCache` does."""
        super().begin_window(list(counts), list(counts.values()))
        grown, self._whole = self._retrieved.announce(rows, counts), False
        for slot in counts:
            self._reach[slot] = max(self._reach[slot], self._retrieved.recent[slot].start * BLOCK_TOKENS)
        return grown

    def attend(self, layer: int, q: torch.Tensor, rows: QueryRows, params: AttentionParams) -> torch.Tensor:
        # A sliding window is close by, and no chunk stands for it.
        whole = self._whole or params.window is not None
        return (super().attend if whole else self._retrieved.attend)(layer, q, rows, params)

    def truncate(self, slot: int, length: int) -> int:
        length = super().truncate(slot, length)
        # Not at every rejected guess: those lie behind what is retrieved.
        if length < self._reach[slot]:
            self._retrieved.cut(slot, length)
            self._reach[slot] = length
        return length


def summaries_bytes(config: ModelConfig, *, chunk_size: int, capacity_tokens: int, batch: int) -> int:
    """Return the device bytes of the chunks' summaries of a `RetrievalCache`."""
    chunk_bytes = sum(one.num_kv_heads * (one.head_dim + FACTOR_BYTES) for one in config.attentions.values())
    return batch * num_blocks(capacity_tokens) * BLOCK_TOKENS // chunk_size * chunk_bytes


def retrieved_bytes(config: ModelConfig, dtype: torch.dtype, *, budget_tokens: int, chunk_size: int, batch: int) -> int:
    """Return the device bytes of the chunks of a `RetrievalCache`: the blocks and the table of places."""
    num_heads = sum(one.num_kv_heads for one in config.attentions.values())
    places = batch * num_heads * chunks_of_budget(budget_tokens, chunk_size)
    each_bytes = sum(block_bytes(config, dtype, layer) for layer in config.attentions)
    return batch * num_blocks(budget_tokens) * each_bytes + 4 * places
