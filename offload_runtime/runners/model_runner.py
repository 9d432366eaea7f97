"""Runners: tokens in, logits or samples out. They join weights in motion, decoder and cache into passes.

A pass is layer-major: every piece of its rows goes through layer 0, then layer 1, …, so that each streamed layer
crosses the link once per pass, however long the prompt is.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate, chain, groupby, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from offload_runtime_kernels.attention import QueryRows
from offload_runtime_kernels.attention_triton import SPLIT_TOKENS
from offload_runtime_kernels.attention_triton import WORKSPACE_BYTES as SPLITS_WORKSPACE_BYTES
from offload_runtime_kernels.kv_blocks import RopeRows
from offload_runtime_kernels.linear import TILE_ROWS

from offload_runtime.cache.device import KVCache
from offload_runtime.cache.saved_blocks import SavedBlock
from offload_runtime.core import Batch, BatchShape, TokenTree
from offload_runtime.grammar import token_masks
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.experts import Experts
from offload_runtime.models.layers import LayerCache, LayerWeights, Rows, Weights
from offload_runtime.models.rope import RopeTable, RowFrequencies
from offload_runtime.runners.graphs import (
    CAPTURED_GRAPHS,
    CAPTURED_PARTS,
    CAPTURED_ROWS,
    StepGraphs,
    captured_pass_shape,
)
from offload_runtime.sampling import SlotSampling, sample
from offload_runtime.stream import device as stream
from offload_runtime.stream.queue import LayerStreamer
from offload_runtime.trace import COMPUTE, TraceRecorder

Layers = Iterable[tuple[int, LayerWeights]]  # of one pass: (layer index, its weights on the device), in order
# A layer, and what its weights may be read within.
Stage = tuple[int, Callable[[], AbstractContextManager[LayerWeights]]]
OnLayer = Callable[[int, int], None]  # called with (layers done, layers) as the host enqueues them


# By kind of device: prompts are worked on in pieces of so many tokens, which bounds the activations and changes no bit.
PREFILL_CHUNK_TOKENS = {"cuda": 1024, "cpu": 256}
# Likewise the most that go through a layer's experts together, once each piece has been attended to. Of 128 experts, of
# which a token chooses four, one has 32 rows of 1024 tokens, and 256 of these: enough that decoding it first pays.
EXPERT_CHUNK_TOKENS = {"cuda": 8192, "cpu": 0}
# Rows of passes that cut products in all ways: those of experts are others for one token, and for two.
WARM_UP_ROWS = (1, 2, *TILE_ROWS)
# Fragmentation of the allocator and rounding of its blocks, as a share of the workspace.
_WORKSPACE_MARGIN = 1.25
# cuBLAS takes 32 MiB a handle on Hopper, 8 MiB elsewhere; once for the compute stream, once for cublasLt.
_LIBRARY_WORKSPACE_BYTES = 72 << 20


def most_prompt_tokens(chunk_tokens: int, context_tokens: int) -> int:
    """Return the most tokens of all prompts that a pass reads, which has room for the longest one."""
    return max(chunk_tokens, context_tokens)


def workspace_bytes(
    config: ModelConfig, element_bytes: int, *, chunk_tokens: int, context_tokens: int, batch: int, rows: int,
    sampled_rows: int, expert_tokens: int = 0, has_head: bool = True, mixes: bool = False,
    step_reach: int | None = None,
) -> int:  # fmt: skip
    """Return the device bytes of the activations of the largest pass.

    Args:
        config: The model's shape.
        element_bytes: Of its dtype.
        chunk_tokens: Pieces of a prompt.
        context_tokens: Longest prompt (its residual stream is held through a layer-major prefill).
        batch: Sequences.
        rows: Of their decoding windows.
        sampled_rows: Of these, rows that tokens are sampled from at once.
        expert_tokens: Of prompts that go through experts together; 0: pieces do one by one.
        has_head: Whether logits are made here.
        mixes: Whether a pass reads several prompts besides windows.
        step_reach: Where there are only steps of few rows, whose products no library does: the most tokens that a row
            looks at.
    """
    of_prompts = most_prompt_tokens(chunk_tokens, context_tokens) if mixes else context_tokens
    tokens = of_prompts + (rows if mixes else 0)
    arrived = 0 if config.has_ends else tokens + CAPTURED_ROWS  # as they came from another machine
    residual = (tokens + arrived) * config.hidden_size
    chunk = max(min(chunk_tokens, context_tokens), rows) * config.row_elements
    more_tokens = min(expert_tokens, of_prompts) - min(chunk_tokens, context_tokens)
    of_experts = max(0, more_tokens) * config.prompt_row_elements
    angles = 4 * tokens * config.num_angles * 4  # cos, sin and their making, fp32
    # fp32 copies while sampling with filters
    logits = (rows * element_bytes + sampled_rows * 6 * 4) * config.vocab_size if has_head else 0
    crossing = batch * config.crossing_bytes if rows > batch else 0
    splits, library = SPLITS_WORKSPACE_BYTES, _LIBRARY_WORKSPACE_BYTES
    if step_reach is not None:
        of_split = 4 * rows * max((one.num_heads * (one.head_dim + 2) for one in config.attentions.values()), default=0)
        splits, library = min(splits, (-(-step_reach // SPLIT_TOKENS) + 2) * of_split), 0
    passing = (chunk + of_experts) * element_bytes + crossing + angles + logits + 2 * splits
    return residual * element_bytes + int(_WORKSPACE_MARGIN * passing) + library


class Decoder:
    """Computes what lies around the layers of one model; stateless but for the shared weights.

    Args:
        config: Its layers, and what they share.
        shared: `embedding` [V, H], `final_norm` [H], and `lm_head` [V, H] unless it is tied; on the compute device, of
            several cards the first.
        partition: Which card each layer is on; None: all are where the shared weights are.

    Attributes:
        taps: What passes of a target keep for a head; None of other models.
    """

    taps: HiddenTaps | None = None

    def __init__(self, config: ModelConfig, shared: Weights, partition: stream.LayerPartition | None = None) -> None:
        self.config, self.shared = config, shared
        self.embedding = shared["embedding"]
        self.lm_head = shared.get("lm_head", shared["embedding"])
        self.final_norm: torch.Tensor = shared["final_norm"].dense
        self._normed = config.attention.norm
        self._multiplier = config.embedding_multiplier
        if config.rounds_multiplier:
            self._multiplier = torch.tensor(self._multiplier, dtype=self.final_norm.dtype).item()
        self.num_layers = config.num_layers
        self.partition = partition or stream.LayerPartition.of_one(self.final_norm.device, config.num_layers)
        self.in_blocks = self.partition.in_blocks

    def embed(self, rows: Rows) -> torch.Tensor:
        """Return the residual stream at the bottom: [N, H]."""
        embedded = self.embedding.rows(rows.tokens)
        return embedded if self._multiplier == 1 else embedded.mul_(self._multiplier)

    def layer(self, index: int, weights: LayerWeights, residual: torch.Tensor, rows: Rows, cache: LayerCache) -> None:
        """Run one layer, which adds to the residual stream [N, H]."""
        self.config.layers[index].forward(index, residual, weights, rows, cache)

    def head(self, residual: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V], in the model's dtype, of rows of the residual stream [N, H] behind the last
        layer."""
        return self.outputs(residual)[0]

    def outputs(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits [N, V] of rows of the residual stream [N, H], and these normed; of a head in their place
        what rows about the tokens that follow read as `Rows.hidden`, [N, W]."""
        normed = self._normed(residual, self.final_norm)
        return self.logits(normed), normed

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of normed rows [N, H]."""
        own, logits = self.config, self.lm_head.linear(normed)
        if own.logits_divisor != 1:
            logits = logits.div_(own.logits_divisor)
        return logits if own.logits_cap is None else logits.div_(own.logits_cap).tanh_().mul_(own.logits_cap)


@dataclass(frozen=True)
class HiddenTaps:
    """Says what passes keep of the residual stream of each row, for a head to read.

    Attributes:
        layers: The stream is read below these; their number means behind the last. Those of negative numbers are on
            other machines.
        width: Channels of what is kept of a row.
        tap: Writes what the tap of a number says of rows [N, H] into [N, width], or adds it to what those before it
            have; both are on the first card.
        in_place: Whether the only tap is behind the last layer and may write over the rows that it reads.
    """

    layers: tuple[int, ...]
    width: int
    tap: Callable[[int, torch.Tensor, torch.Tensor], None]
    in_place: bool = False


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Is where a pass keeps what a head wants to read.

    Attributes:
        taps: What that is.
        partition: Of the model's layers.
        pieces: Of each piece of the pass [N, width], on the first card; none where their residual streams are.
    """

    taps: HiddenTaps
    partition: stream.LayerPartition
    pieces: Sequence[torch.Tensor]

    @classmethod
    def of(cls, taps: HiddenTaps, decoder: Decoder, pieces: Sequence[Rows]) -> KeptRows:
        """Return new memory for the pieces of a pass, as far as it takes any."""
        lengths = [] if taps.in_place else [rows.num_rows for rows in pieces]
        memory = decoder.final_norm.new_empty(sum(lengths), taps.width)
        return cls(taps, decoder.partition, memory.split(lengths) if lengths else ())

    @property
    def reads_last(self) -> bool:
        """Return whether anything is wanted of the streams behind the last layer."""
        return len(self.partition.owners) in self.taps.layers

    def keep(self, layer: int, piece: int, residual: torch.Tensor) -> None:
        """Keep what is wanted of a piece's residual stream, [N, H], below a layer, on whose card it is."""
        first, card, buffers = self.partition.cards[0], self.partition.card_of(layer), self.partition.transfer_buffers
        for number, at in enumerate(self.taps.layers):
            if at == layer:
                # The layer goes on with the stream, which may not have left the card by then.
                leaving = residual if card == first else residual.clone()
                (x,) = stream.transfer([leaving], card, first, buffers, ("hidden", number, piece))
                with stream.current_device(first.device):
                    self.taps.tap(number, x, self.pieces[piece])

    def behind(self, residuals: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Keep what is wanted of the pieces' streams behind the last layer, [N, H], which are on the first card and of
        no other use any more. Returns all that was kept."""
        pieces = self.pieces or residuals
        if self.reads_last:
            for residual, out in zip(residuals, pieces, strict=True):
                self.taps.tap(len(self.taps.layers) - 1, residual, out)
        return pieces


class RowsDecoder(Decoder):
    """Has nothing around its layers, which are not the first ones of a model: the tokens of a pass are numbers of rows
    that come from another machine, and what it says of them is the residual stream behind the last of its layers.

    Args:
        config: Its layers.
        dtype: Of the residual stream.
        partition: Of one card.

    Attributes:
        room: Where few rows lie when they have come, [CAPTURED_ROWS, H]: it never moves, as graphs read it.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, partition: stream.LayerPartition) -> None:
        self.config, self.shared, self.partition = config, {}, partition
        self.num_layers, self.in_blocks = config.num_layers, partition.in_blocks
        self.final_norm = torch.empty(0, dtype=dtype, device=partition.cards[0].device)  # says dtype and place alone
        self.room, self._taken = self.final_norm.new_zeros(CAPTURED_ROWS, config.hidden_size), 0
        self._arrived: Callable[[int], torch.Tensor] = lambda count: self.room  # for a warm-up
        self.exchange: Callable[[torch.Tensor], torch.Tensor]

    def begin_pass(
        self, arrived: Callable[[int], torch.Tensor], exchange: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Begin a pass.

        Args:
            arrived: Waits until so many of its rows are there, or all, and returns where they are: [N, H].
            exchange: Gives the rows behind a stride back, [N, H] without those that fill up windows, and waits for the
                same below the next one, on the host.
        """
        self._arrived, self.exchange, self._taken = arrived, exchange, 0

    def embed(self, rows: Rows) -> torch.Tensor:
        """Return the residual stream below its layers: [N, H]. Pieces take their rows one after the other."""
        self._taken += rows.num_rows
        return self._arrived(self._taken).index_select(0, rows.tokens)

    def outputs(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows of the residual stream [N, H] as they are, twice."""
        return residual, residual


class NextStage(Protocol):
    """Has the layers of a model that follow those of a runner, on another machine. All of it raises `HostError` where
    that has ended, is not heard from, or has failed."""

    def run(
        self, batch: Batch, committed: Sequence[int], residuals: Iterable[torch.Tensor], num_kept: int
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Take a pass through them, and wait for it; what is there of it they begin with.

        Args:
            batch: What the pass is about.
            committed: Tokens of each of its slots.
            residuals: Behind the layers before, [N, H] of each piece of the prompts, then of all rows of trees.
            num_kept: How many of the streams there a head reads.

        Returns:
            Behind the last layer [N, H], on the compute device: the rows of the trees, then of each prompt that of its
            last token. And of each stream that a head reads, in ascending order, what it is of all rows, [N, H], on
            the host.
        """

    def run_stride(
        self, number: int, batch: Batch, committed: Sequence[int], residuals: Iterable[torch.Tensor]
    ) -> torch.Tensor:
        """Take a pass through a stride of them that is not the last one, and wait for it; arguments as of `run`, which
        follows for the last. Returns the rows behind it, [N, H], on the host."""

    def save_block(self, slot: int, block: int, to: SavedBlock, *, length: int) -> None:
        """Copy those layers of a block that are there, as `KVCache.save_block` does those that are here."""

    def begin_restore(self, slot: int, length: int) -> None:
        """Make room for a sequence, as `KVCache.begin_restore` does here."""

    def restore_block(self, slot: int, saved: SavedBlock, count: int) -> None:
        """Commit tokens of a saved block, as `KVCache.restore_block` does here; the caches are as long still."""


@dataclass(eq=False)
class ModelRunner:
    """Runs passes of one model.

    Attributes:
        decoder: The maths.
        streamer: The weights, resident or streamed.
        cache: Keys and values; the runner owns what is committed to it.
        rope: The model's rotary table, on the compute device.
        chunk_tokens: Pieces that a prompt is worked on in.
        expert_tokens: Tokens of prompts that go through a layer's experts together, where they lie on one card; 0: the
            pieces do one by one.
        recorder: Of a trace, if there is one.
        captured: Runs trees as CUDA graphs; set where all that they need is on the device and there is room for it.
        taps: What a head wants to read of every pass; None where there is no head.
        following: The layers that other machines have; None where all are here.
    """

    decoder: Decoder
    streamer: LayerStreamer
    cache: KVCache
    rope: RopeTable
    chunk_tokens: int
    expert_tokens: int = 0
    recorder: TraceRecorder | None = None
    captured: CapturedPasses | None = None
    taps: HiddenTaps | None = None
    following: NextStage | None = None

    def __post_init__(self) -> None:
        self._is_in_strides = len(self.decoder.config.strides) > 1

    @property
    def most_prompt_tokens(self) -> int:
        """The most tokens of all prompts that a pass reads."""
        return most_prompt_tokens(self.chunk_tokens, self.cache.capacity_tokens)

    @torch.inference_mode()
    def forward(self, batch: Batch, sampling: SlotSampling | None = None, *, layers: Layers | None = None) -> Batch:
        """Enqueue one pass over a batch on the current stream. Waits for nothing but, where a pass brings whole layers
        of experts, the one before.

        Args:
            batch: More than one prompt, or trees with prompts, take a cache that `mixes`, and several prompts are no
                more than `most_prompt_tokens`.
            sampling: How the tokens of every slot are chosen; None where they are not asked for. Where there are
                penalties it has seen all tokens up to the first of each tree, and so have the matchers of grammars.
                Where only temperature and noise count the token of each sequence is chosen within a captured pass;
                filters, penalties and masks are kernels of many kinds, each of which would need graphs of its own.
            layers: The weights of some layers, where the pass is about them alone; None for all.

        Returns:
            The batch, with its logits, and with its tokens where they are asked for.

        Raises:
            ContextLengthError, BudgetError: The cache has no room. Nothing was committed.
        """
        prompts, slots = batch.prompts, batch.slots
        widths, lengths = [len(tree) for tree in batch.trees.values()], [len(tokens) for tokens in prompts.values()]
        assert slots and all(widths) and all(lengths), "every slot has a token"
        if self.recorder is not None:
            self.recorder.begin_pass(self.streamer.bytes_begun)
        alone = len(slots) == len(prompts) == 1
        if alone:
            self.cache.begin_prefill(slots[0], lengths[0])
        else:
            assert not prompts or self.cache.mixes
            self.cache.begin_window(slots, widths + lengths, prompts)
        committed = [self.cache.length(slot) for slot in slots]
        batch.firsts = [0, *accumulate([*widths, *(1 for _ in prompts)])][:-1]
        captured = self.captured
        if captured is not None and (prompts or layers is not None):
            captured.forget()
            captured = None
        if captured is None or not captured.run(batch, committed, sampling, self.recorder):
            batch.logits = self._logits(batch, committed, layers, alone=alone)
        elif self.following is not None:
            residual, _ = self.following.run(batch, committed, [batch.logits], 0)
            batch.logits = self.decoder.head(residual)
        for slot, length in zip(prompts, lengths, strict=True):
            self.cache.commit(slot, length)
        if self.recorder is not None:
            kind, tokens, others = ("verify", widths, lengths) if widths else ("prefill", lengths, [])
            self.recorder.end_pass(kind, tokens, self.streamer.bytes_begun, others)
        if sampling is not None and batch.tokens is None:
            decide(batch, sampling, committed)
        return batch

    def save_block(self, slot: int, block: int, to: SavedBlock, *, length: int) -> None:
        """Copy layers of a block, as `KVCache.save_block` does, wherever they are. Raises `HostError`."""
        self.cache.save_block(slot, block, self._own_numbers(to), length=length)
        if self.following is not None:
            self.following.save_block(slot, block, to, length=length)

    def begin_restore(self, slot: int, length: int) -> None:
        """Make room for a sequence, as `KVCache.begin_restore` does, wherever layers are. Raises as that, and
        `HostError`."""
        self.cache.begin_restore(slot, length)
        if self.following is not None:
            self.following.begin_restore(slot, length)

    def restore_block(self, slot: int, saved: SavedBlock, count: int) -> None:
        """Commit tokens of a saved block, as `KVCache.restore_block` does, wherever layers are. Raises `HostError`."""
        if self.following is not None:  # first: a cache that is ahead of this one is cut, none is behind it
            self.following.restore_block(slot, saved, count)
        self.cache.restore_block(slot, self._own_numbers(saved), count)

    def _own_numbers(self, block: SavedBlock) -> SavedBlock:
        """Return a block of a whole model by the numbers that layers have here."""
        return {self.decoder.config.own_number(layer): parts for layer, parts in block.items()}

    def go_ahead(self) -> bool:
        """Enqueue, where that is possible, the plain pass behind the one that is running, which `CapturedPasses` says
        more about: if the next `forward` is about it, the device has not waited for the host. Of the running pass
        nothing but tokens and what a head reads may be looked at any more. Returns whether it was enqueued."""
        return self.captured is not None and self.recorder is None and self.captured.go_ahead()

    @property
    def is_ahead(self) -> bool:
        """Whether the pass of a next plain step of the same slots has been enqueued."""
        return self.captured is not None and self.captured.is_ahead

    def _logits(self, batch: Batch, committed: Sequence[int], layers: Layers | None, *, alone: bool) -> torch.Tensor:
        """Return [N, V], a row for each token of the trees and for the last of each prompt, and note what is kept of
        all. The cache calls a prompt that is `alone` its batch row 0."""
        trees, pieces, last = [*batch.trees.values()], list[Rows](), list[int]()
        for (slot, tokens), start in zip(batch.prompts.items(), committed[len(trees) :], strict=True):
            end = start + len(tokens)
            for at, stop in pairwise([*self._beginnings(start, end), end]):
                chunk = TokenTree(tuple(tokens[at - start : stop - start]))
                piece = self.rows([chunk], [at], [0 if alone else slot], prompt_length=end)
                pieces.append(replace(piece, prompt=(slot, at)))
            last.append(len(pieces) - 1)
        if trees:
            pieces.append(self.rows(trees, committed[: len(trees)], [*batch.trees]))
            last.append(len(pieces) - 1)
        hidden = None if self.taps is None or layers is not None else KeptRows.of(self.taps, self.decoder, pieces)
        reads_all = self.following is not None or (hidden is not None and hidden.reads_last)
        wanted = range(len(pieces)) if reads_all else last
        if layers is None and self._is_in_strides:
            residuals = self._in_strides(batch, committed, pieces, hidden)
            found = [residuals[piece] for piece in wanted]
        elif layers is None and self._can_be_in_pieces(pieces) and self.decoder.config.is_part:
            streams = self._piece_by_piece(pieces, batch.on_layer, hidden)
            if self.following is not None:
                return self._behind(self.following, batch, committed, pieces, streams, hidden)
            found = [stream for piece, stream in enumerate(streams) if piece in wanted]
        else:
            found = self._run(pieces, wanted, batch.on_layer, layers, hidden, prompts=bool(batch.prompts))
        if self.following is not None:
            return self._behind(self.following, batch, committed, pieces, found, hidden)
        residuals = [found[wanted.index(piece)] for piece in last]
        of_trees = _present(residuals.pop(), trees) if trees else []
        decisive = [*of_trees, *(residual[-1:] for residual in residuals)]
        logits = self.decoder.head(decisive[0] if len(decisive) == 1 else torch.cat(decisive))
        if hidden is not None:
            batch.hidden = _by_slot(hidden.behind(found), pieces, batch.trees)
        return logits

    def _behind(
        self, following: NextStage, batch: Batch, committed: Sequence[int], pieces: Sequence[Rows],
        found: Iterable[torch.Tensor], hidden: KeptRows | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return as `_logits`, where other machines have the layers behind those of which it `found` the streams, and
        let what is read there be kept, too."""
        trees, streams = [*batch.trees.values()], list[torch.Tensor]()
        in_place = hidden is not None and not hidden.pieces

        def there() -> Iterator[torch.Tensor]:
            for rows, residual in zip(pieces, found, strict=True):
                if in_place:
                    streams.append(residual)
                yield torch.cat(_present(residual, trees)) if rows.prompt is None else residual

        taps = () if hidden is None else hidden.taps.layers
        elsewhere = [number for number, layer in enumerate(taps) if layer < 0]
        residual, kept = following.run(batch, committed, there(), len(elsewhere))
        if hidden is not None:
            batch.hidden = _by_slot(hidden.pieces or streams, pieces, batch.trees)
            parts = [part for parts in batch.hidden.values() for part in parts]
            for number, rows in zip(elsewhere, kept, strict=True):
                for part, x in zip(parts, rows.split([len(part) for part in parts]), strict=True):
                    hidden.taps.tap(number, x.to(part.device), part)
        return self.decoder.head(residual)

    def _in_strides(
        self, batch: Batch, committed: Sequence[int], pieces: list[Rows], hidden: KeptRows | None
    ) -> list[torch.Tensor]:
        """Return the residual streams of the pieces behind the last layer here, [N, H], where other machines have those
        between the strides. Meanwhile rings fill up here, as they do there while rows are here, so that all links are
        busy."""
        decoder, streamer = self.decoder, self.streamer
        streamer.begin_pass(sum(rows.num_rows for rows in pieces))
        residuals = _begin_on_one_card(decoder, pieces)
        for number, stride in enumerate(decoder.config.strides):
            if number:
                self._exchange(number - 1, batch, committed, pieces, residuals)
            _run_layers(
                decoder, streamer.stride(stride), self.cache, pieces, [], batch.on_layer, hidden, self.expert_tokens,
                residuals,
            )  # fmt: skip
        streamer.end_pass()
        return residuals

    def _exchange(
        self, number: int, batch: Batch, committed: Sequence[int], pieces: Sequence[Rows],
        residuals: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        """Bring residual streams behind a stride of this number, in place, to where the next one here begins."""
        trees, decoder = [*batch.trees.values()], self.decoder
        present = [
            _present(residual, trees) if rows.prompt is None else [residual]
            for rows, residual in zip(pieces, residuals, strict=True)
        ]
        there: Iterator[torch.Tensor] = map(torch.cat, present)
        if self.following is not None:
            there = iter([self.following.run_stride(number, batch, committed, there)])
        rows = decoder.exchange(torch.cat([*there])) if isinstance(decoder, RowsDecoder) else next(there)
        parts = [*chain(*present)]
        for part, found in zip(parts, rows.split([len(part) for part in parts]), strict=True):
            part.copy_(found)

    def _can_be_in_pieces(self, pieces: Sequence[Rows]) -> bool:
        """Return whether a piece may go through all layers before the next one, where other machines have layers, too:
        these then have something to do meanwhile (two ranks whose layers take 0.1 s each, a prompt of 8 pieces: 5.7 s
        in place of 9.5). Experts decode once for many pieces."""
        by_layer = self.cache.prefills_by_layer or bool(self.decoder.config.mixtures)
        return len(pieces) > 1 and self.streamer.has_all and not by_layer

    def _piece_by_piece(
        self, pieces: Sequence[Rows], on_layer: OnLayer | None, hidden: KeptRows | None
    ) -> Iterator[torch.Tensor]:
        """Yield the residual stream behind the last layer of each piece, [N, H], before the next one is begun."""
        layers = self.streamer.resident_layers()
        assert layers is not None, "they are all here"
        for piece, rows in enumerate(pieces):
            kept = None if hidden is None else replace(hidden, pieces=hidden.pieces[piece : piece + 1])
            tell = on_layer if piece == len(pieces) - 1 else None
            yield from _run_layers(self.decoder, layers, self.cache, [rows], [0], tell, kept)

    def _beginnings(self, start: int, end: int) -> Sequence[int]:
        """Return where pieces of a prompt begin that brings a sequence from `start` to `end` tokens: at multiples of
        the size of pieces where it leaves states to go back to, so that these cut as few as possible of them."""
        size, anchors = self.chunk_tokens, self.cache.anchors_within(start, end)
        if not anchors:
            return range(start, end, size)
        return sorted({start, *range((start // size + 1) * size, end, size), *anchors})

    def _run(
        self, pieces: list[Rows], kept: Sequence[int], on_layer: OnLayer | None, layers: Layers | None,
        hidden: KeptRows | None, *, prompts: bool,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Return residual streams behind the last layer, [N, H], of the pieces of these numbers.

        Where each card has one block of layers and nothing is streamed, a piece of a prompt goes through all layers of
        a card before the next piece, so that the next card has something to do.
        """
        decoder, streamer = self.decoder, self.streamer
        in_blocks = prompts and layers is None and decoder.in_blocks
        if in_blocks and streamer.has_all and not self.cache.prefills_by_layer:
            streamer.begin_pass()
            blocks = groupby(range(decoder.num_layers), key=decoder.partition.card_of)
            stages: list[list[Stage]] = [
                [(index, partial(streamer.layer, index)) for index in block] for _, block in blocks
            ]
            return _run_on_cards(decoder, stages, self.cache, pieces, kept, on_layer, hidden)
        layers = streamer.layers(sum(rows.num_rows for rows in pieces)) if layers is None else layers
        return _run_layers(decoder, layers, self.cache, pieces, kept, on_layer, hidden, self.expert_tokens)

    def rows(
        self, trees: Sequence[TokenTree], committed: Sequence[int], slots: Sequence[int], *, prompt_length: int = 0,
        rope_shift: int = 0,
    ) -> Rows:  # fmt: skip
        """Lay out trees behind so many committed tokens of slots and upload them.

        Args:
            trees: Of any lengths.
            committed: Tokens of each slot in the cache.
            slots: Batch rows of the cache.
            prompt_length: Of the prompt that this is a piece of, by which some models rotate; 0 for others.
            rope_shift: Rotates as if every position were so much larger.
        """
        shape = BatchShape.of(trees, committed)
        parts = shape.lay_out(trees, committed, slots)
        frequencies = self.rope.row_frequencies(parts[1], prompt_length)
        return device_rows(
            shape, stream.upload(stream.pack(parts), self.rope.device), self.rope, frequencies, rope_shift or None
        )

    @torch.inference_mode()
    def write_rows(self, rows: Rows) -> None:
        """Write the keys and values of prepared rows. Commits nothing and never waits for the device."""
        _run_layers(self.decoder, self.streamer.layers(rows.num_rows), self.cache, [rows], [])


def device_rows(
    shape: BatchShape, words: torch.Tensor, rope: RopeTable, frequencies: torch.Tensor,
    rope_shift: int | torch.Tensor | None = None,
) -> Rows:  # fmt: skip
    """Return the rows that the host has laid out; fit for a CUDA graph.

    Args:
        shape: Of the pass.
        words: Its packed parts, int32 on the device, and perhaps others behind them.
        rope: Of the model.
        frequencies: [P] or [B*T, P] fp32, device: of all rows, or of each.
        rope_shift: How much larger the positions are by which all rows rotate, or each row does (int32, device).
    """
    tokens, positions, cache_positions, owners, slots, committed, ancestors = stream.unpack(words, shape.sizes)
    cos, sin = rope.angles(positions if rope_shift is None else positions + rope_shift, frequencies)
    query = QueryRows(
        positions.view(shape.batch, -1), slots, shape.reach, committed=committed,
        ancestors=ancestors.view(shape.batch, -1, shape.depth) if shape.depth else None,
    )  # fmt: skip
    return Rows(tokens, query, RopeRows(cos, sin, positions, cache_positions, owners))


def window_residual(
    decoder: Decoder, layers: Layers, cache: LayerCache, rows: Rows, hidden: KeptRows | None = None
) -> torch.Tensor:
    """Run the layers of one decoding pass over prepared rows. Commits nothing and never waits for the device.

    Args:
        decoder: The maths.
        layers: The weights, as one pass meets them.
        cache: Keys and values.
        rows: Which tokens, and where.
        hidden: Where to keep what a head wants to read of them.

    Returns:
        The residual stream behind the last layer, [B * T, H].
    """
    (residual,) = _run_layers(decoder, layers, cache, [rows], [0], hidden=hidden)
    return residual


def decide(batch: Batch, sampling: SlotSampling, committed: Sequence[int]) -> None:
    """Choose the token behind each row of a batch's logits, whose slots had so many committed tokens.

    A row's noise is that of the position behind it, so siblings share it, and its penalties and its grammar's mask are
    by the tokens of its own path. Of these `sampling` has seen all up to the first of each tree, behind which the
    others are. Masks are computed now, while the device works on the logits.
    """
    # Of a prompt only the last token has a row, as if it were a tree by itself.
    trees = [*batch.trees.values(), *(TokenTree(tuple(tokens[-1:])) for tokens in batch.prompts.values())]
    read = [0] * len(batch.trees) + [len(tokens) - 1 for tokens in batch.prompts.values()]
    starts = [start + more + 1 for start, more in zip(committed, read, strict=True)]
    positions = [start + depth for tree, start in zip(trees, starts, strict=True) for depth in tree.depths]
    owners = [slot for slot, tree in zip(batch.slots, trees, strict=True) for _ in tree.tokens]
    below = paths_below_roots(trees) if sampling.adjustments.penalised else None
    parts = [positions, owners, *([] if below is None else [below])]
    rows = stream.unpack(stream.upload(stream.pack(parts), batch.logits.device), [len(part) for part in parts])
    paths = None if below is None else rows[2].view(len(positions), -1)
    matchers, masks = [sampling.matchers.get(slot) for slot in batch.slots], None
    if any(matchers):
        masks = token_masks(matchers, [(tree.tokens, tree.parents) for tree in trees], batch.logits.device)
    batch.tokens = sample(batch.logits, sampling, rows[0], rows[1], paths, masks).tolist


def paths_below_roots(trees: Sequence[TokenTree]) -> array[int]:
    """Return [R, A] int32, flat, A at least 1: of each row of trees the tokens of its path behind the tree's first one,
    as far as itself; -1 behind them."""
    depth = max(1, *(max(tree.depths) for tree in trees))
    found, first = array("i", [-1]) * (depth * sum(map(len, trees))), 0
    for tree in trees:
        for t, (parent, above) in enumerate(zip(tree.parents, tree.depths, strict=True)):
            if above:
                at, origin = (first + t) * depth, (first + parent) * depth
                found[at : at + above - 1] = found[origin : origin + above - 1]
                found[at + above - 1] = tree.tokens[t]
        first += len(tree)
    return found


def _present(rows: torch.Tensor, trees: Sequence[TokenTree]) -> list[torch.Tensor]:
    """Return the rows [at least B * T, …] that trees have tokens for, each tree's or all of them at once."""
    width = len(rows) // len(trees)
    if all(len(tree) == width for tree in trees):
        return [rows]
    return [rows[first * width :][: len(tree)] for first, tree in enumerate(trees)]


def _by_slot(
    kept: Sequence[torch.Tensor], pieces: Sequence[Rows], trees: Mapping[int, TokenTree]
) -> dict[int, list[torch.Tensor]]:
    """Return what was kept of the pieces of a pass, those of prompts and then all trees, of the rows that there are."""
    found: dict[int, list[torch.Tensor]] = {}
    for hidden, rows in zip(kept, pieces, strict=True):
        if rows.prompt is not None:
            found.setdefault(rows.prompt[0], []).append(hidden)
    return found | _of_trees(kept[-1], trees)


def _of_trees(rows: torch.Tensor, trees: Mapping[int, TokenTree]) -> dict[int, list[torch.Tensor]]:
    """Return of rows [B * T, …] by slot those that its tree has tokens for."""
    width = len(rows) // max(1, len(trees))
    return {slot: [rows[at * width :][: len(tree)]] for at, (slot, tree) in enumerate(trees.items())}


class _Launched(NamedTuple):
    """A captured pass that was enqueued: the rows that it is about, the sampling of its tokens, if it chooses them, and
    which part of what the host and graphs exchange it has."""

    slots: list[int]
    committed: list[int]
    shape: BatchShape
    sampling: SlotSampling | None
    part: int


_OF_WINDOWS = CAPTURED_PARTS - 1  # the part


class CapturedPasses:
    """Runs passes over trees of a model that has everything on the device, as CUDA graphs.

    Launched one by one, the kernels of a layer take a host longer than a layer of few rows takes the device. Each shape
    of a pass is a graph, and trees are filled up to the next one.

    Behind a pass that chooses one token of each sequence the next one may be launched at once: it finds the tokens on
    the device, and the host does what it has to between two passes while it runs. The host and two such passes
    exchange numbers in memory of which each has a part. Tokens behind windows are chosen outside of their graphs, which
    are the same however that is done. Where other machines have layers, too, a graph ends behind its own, and what it
    shows in place of logits is the residual stream.

    Args:
        decoder: The maths.
        streamer: The weights, on the device but for experts.
        cache: Keys and values, all on the device.
        rope: The model's rotary table.
        taps: What a head wants to read of every pass.
    """

    def __init__(
        self, decoder: Decoder, streamer: LayerStreamer, cache: KVCache, rope: RopeTable, taps: HiddenTaps | None = None
    ) -> None:
        self._decoder, self._streamer, self._cache, self._rope = decoder, streamer, cache, rope
        layers = streamer.resident_layers()
        assert layers is not None, "layers on their way cannot be captured"
        self._layers: Layers = layers
        self._words = stream.packed_words(BatchShape(CAPTURED_ROWS, 1, CAPTURED_ROWS, 0).sizes)
        self.graphs = StepGraphs(
            rope.device,
            input_words=CAPTURED_PARTS * self._words,
            output_words=4 * CAPTURED_ROWS,
            most_graphs=CAPTURED_GRAPHS,
            end_step=streamer.end_pass,
        )
        self._frequencies = RowFrequencies(rope, CAPTURED_ROWS)
        self._is_part = decoder.config.is_part
        width = decoder.config.hidden_size if self._is_part else decoder.config.vocab_size
        self._logits = decoder.final_norm.new_empty(CAPTURED_ROWS, width)
        self._taps = taps
        self._hidden = decoder.final_norm.new_empty(CAPTURED_PARTS, CAPTURED_ROWS, 0 if taps is None else taps.width)
        self._chosen = torch.zeros(CAPTURED_ROWS, dtype=torch.int32, device=rope.device)  # by the last pass
        self._done = [torch.cuda.Event() if rope.device.type == "cuda" else None for _ in range(CAPTURED_PARTS)]
        self._last: _Launched | None = None  # the pass that was run last, and the tokens that the host has been shown
        self._shown: list[int] = []
        self._ahead: _Launched | None = None

    def run(
        self, batch: Batch, committed: Sequence[int], sampling: SlotSampling | None, recorder: TraceRecorder | None
    ) -> bool:
        """Run a pass over a batch without prompts, which the cache has room for, and note its logits in it, and its
        tokens where `sampling` is plain. A trace has its layers as one span.

        Returns:
            Whether it was run: passes of more than `CAPTURED_ROWS`, with those that fill them up, are not captured, and
            neither are those that may choose more experts than have room.
        """
        trees, ahead = [*batch.trees.values()], self._ahead
        self.forget()
        shape = captured_pass_shape(BatchShape.of(trees, committed), self._cache.max_tokens_with_draft)
        if shape.num_rows > CAPTURED_ROWS or not self._streamer.can_capture(shape.num_rows):
            return False
        chooses = sampling is not None and sampling.is_plain and shape.width == 1 and not self._is_part
        plain = sampling if chooses else None
        part = _OF_WINDOWS if shape.width > 1 else 0 if ahead is None else ahead.part
        wanted = _Launched(batch.slots, [*committed], shape, plain, part)
        if ahead != wanted or self._shown != [tree.tokens[0] for tree in trees]:
            if ahead is not None and shape.width == 1:
                wanted = wanted._replace(part=1 - ahead.part)  # what nobody asks for may still be running
            with recorder.span("all layers", row=COMPUTE, layer=None, streamed=False) if recorder else nullcontext():
                self._launch(wanted, trees)
        self._last = wanted
        batch.logits = self._logits
        if self._taps is not None:
            batch.hidden = _of_trees(self._hidden[wanted.part, : shape.num_rows], batch.trees)
        if plain is not None:
            batch.tokens = partial(self._tokens, wanted)
        else:
            batch.logits = torch.cat(_present(self._logits[: shape.num_rows], trees))
        return True

    def go_ahead(self) -> bool:
        """Launch the pass behind the one that was run last, over the tokens that it chooses, which the host need not
        know yet: if the next one is about these, it has been launched already. What the last one has left on the
        device, but for its tokens and what a head reads, is overwritten.

        There is nothing to do where it has chosen other tokens than one of each sequence, where layers with states wait
        for what is committed, at the end of a context, and as long as passes of the next one's shape are no graphs, so
        that it does not come late. Experts that it fetches are counted whether it is asked for or not. Returns whether
        it was launched.
        """
        last, cache = self._last, self._cache
        if last is None or last.sampling is None or last.shape.width != 1 or cache.step_tokens is not None:
            return False
        committed = [count + 1 for count in last.committed]
        if max(committed) >= min(cache.max_tokens_with_draft, cache.capacity_tokens):
            return False
        trees = [TokenTree((-1,))] * len(committed)
        shape = captured_pass_shape(BatchShape.of(trees, committed), cache.max_tokens_with_draft)
        ahead = last._replace(committed=committed, shape=shape, part=1 - last.part)
        if not self._streamer.can_capture(shape.num_rows) or not self.graphs.has((shape, last.sampling, last.part)):
            return False
        self.graphs.capture((shape, last.sampling, ahead.part), partial(self._pass, shape, last.sampling, ahead.part))
        cache.begin_window(last.slots, [2] * len(committed))
        self._launch(ahead, trees)
        self._ahead = ahead
        return True

    @property
    def is_ahead(self) -> bool:
        """Whether a pass was launched ahead that has not been asked for."""
        return self._ahead is not None

    def forget(self) -> None:
        """What was launched ahead is about nothing: other passes follow."""
        self._last = self._ahead = None

    def _launch(self, launched: _Launched, trees: Sequence[TokenTree]) -> None:
        """Enqueue a pass over trees, of which a token -1 is the one that the pass before chooses."""
        slots, committed, shape, sampling, part = launched
        self._streamer.begin_pass(shape.num_rows)
        parts = shape.lay_out(trees, committed, slots)
        words = stream.pack_words(parts)
        self._wait(part)  # the pass that has had it before
        first = part * self._words
        self.graphs.inputs_host[first : first + len(words)] = words
        self._frequencies.set_rows(parts[1])
        self.graphs.run((shape, sampling, part), partial(self._pass, shape, sampling, part))
        if (done := self._done[part]) is not None:
            done.record(torch.cuda.current_stream(self._rope.device))

    def _wait(self, part: int) -> None:
        if (done := self._done[part]) is not None:
            done.synchronize()

    @torch.inference_mode()
    def _pass(self, shape: BatchShape, sampling: SlotSampling | None, part: int) -> None:
        """Run the pass; captured: no tensor of the host but those that never move."""
        count = shape.num_rows
        self.graphs.fetch(stream.packed_words(shape.sizes), part * self._words)
        tokens = self.graphs.inputs[:count]
        if shape.width == 1:
            tokens.copy_(torch.where(tokens < 0, self._chosen[:count], tokens))
        rows = device_rows(shape, self.graphs.inputs, self._rope, self._frequencies.tensor[:count])
        taps, hidden = self._taps, self._hidden[part, :count]
        kept = None if taps is None else KeptRows(taps, self._decoder.partition, [hidden])
        residual = window_residual(self._decoder, self._layers, self._cache, rows, kept)
        logits = residual if self._is_part else self._decoder.head(residual)
        if kept is not None:
            kept.behind([residual])
        self._logits[:count].copy_(logits)
        if sampling is not None:
            found = sample(logits, sampling, rows.query.positions.view(-1) + 1, rows.rope.slots)
            self._chosen[:count].copy_(found.clamp_min(0))  # behind NaN there is no token, and nothing follows
            self.graphs.show(found, part * 2 * CAPTURED_ROWS)

    def _tokens(self, launched: _Launched) -> list[int]:
        """Return those that a pass has chosen. Waits for it."""
        self._wait(launched.part)
        first, count = launched.part * CAPTURED_ROWS, launched.shape.num_rows
        self._shown = self.graphs.outputs_host.view(np.int64)[first : first + count].tolist()
        return self._shown


def _run_layers(
    decoder: Decoder, layers: Layers, cache: LayerCache, pieces: list[Rows], kept: Sequence[int],
    on_layer: OnLayer | None = None, hidden: KeptRows | None = None, expert_tokens: int = 0,
    residuals: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    """Return the residual streams behind the last layer, [N, H], of the pieces of these numbers. On one card, pieces of
    prompts of up to `expert_tokens` go through a layer's experts together, and there may be `residuals`, which the
    layers add to; None: those at the bottom."""
    if len(decoder.partition.cards) > 1:
        assert residuals is None, "layers in strides are on one card"
        stages: Iterator[list[Stage]] = ([(index, partial(_given, weights))] for index, weights in layers)
        return _run_on_cards(decoder, stages, cache, pieces, kept, on_layer, hidden)
    residuals = _begin_on_one_card(decoder, pieces) if residuals is None else residuals
    together = _together(residuals, pieces, expert_tokens)
    for index, weights in layers:
        layer = decoder.config.layers[index]
        joined = together if isinstance(layer.mlp, Experts) and not layer.parallel else []
        for piece, (residual, rows) in enumerate(zip(residuals, pieces, strict=True)):
            if hidden is not None:
                hidden.keep(index, piece, residual)
            if joined:
                layer.attend(index, residual, weights, rows, cache)
            else:
                decoder.layer(index, weights, residual, rows, cache)
        for residual, rows in joined:
            layer.mix(residual, weights, rows)
        if on_layer is not None:
            on_layer(index + 1, decoder.num_layers)
    return [residuals[piece] for piece in kept]


def _begin_on_one_card(decoder: Decoder, pieces: list[Rows]) -> list[torch.Tensor]:
    """Return the residual streams of the pieces at the bottom, [N, H]."""
    if len(pieces) == 1:
        return [decoder.embed(pieces[0])]
    return list(_embedded(decoder, pieces, _residual_buffers(decoder, pieces, decoder.final_norm.device)))


def _together(
    residuals: Sequence[torch.Tensor], pieces: Sequence[Rows], most_tokens: int
) -> list[tuple[torch.Tensor, Rows]]:
    """Return the residual streams of the pieces of a pass, [N, H], those of prompts that lie side by side as one of up
    to so many tokens, with what the first says of its rows: of prompts, mixers of rows ask for no more. None where each
    is alone."""
    found = list[tuple[torch.Tensor, Rows]]()
    for residual, rows in zip(residuals, pieces, strict=True):
        before, first = found[-1] if found else (residual, rows)
        adjacent = before.data_ptr() + before.nbytes == residual.data_ptr()
        size = len(before) + len(residual)
        if adjacent and first.prompt is not None and rows.prompt is not None and size <= most_tokens:
            found[-1] = before.as_strided((size, before.shape[1]), before.stride()), first
        else:
            found.append((residual, rows))
    return found if len(found) < len(pieces) else []


def _given(weights: LayerWeights) -> AbstractContextManager[LayerWeights]:
    """Return weights that may be read at any time."""
    return nullcontext(weights)


def _residual_buffers(decoder: Decoder, pieces: list[Rows], device: torch.device) -> Sequence[torch.Tensor]:
    """Return where the residual stream of each piece lies on a device, uint8: all of them one piece of memory, of
    which the allocator loses nothing in between."""
    row_bytes = decoder.config.hidden_size * decoder.final_norm.dtype.itemsize
    lengths = [stream.aligned_bytes(len(rows.tokens) * row_bytes) for rows in pieces]
    return torch.empty(sum(lengths), dtype=torch.uint8, device=device).split(lengths)


def _embedded(decoder: Decoder, pieces: list[Rows], destinations: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Return the residual streams of the pieces at the bottom, [N, H], one after the other in this memory."""
    for rows, destination in zip(pieces, destinations, strict=True):
        embedded = decoder.embed(rows)
        yield destination[: embedded.nbytes].view(embedded.dtype).view(embedded.shape).copy_(embedded)


def _run_on_cards(
    decoder: Decoder, stages: Iterable[list[Stage]], cache: LayerCache, pieces: list[Rows], kept: Sequence[int],
    on_layer: OnLayer | None, hidden: KeptRows | None,
) -> list[torch.Tensor]:  # fmt: skip
    """Do the same where the layers are on several cards, in stages: layers of one card that a piece goes through before
    the next one does.

    Where the next stage is on another card a piece leaves as soon as it is done and arrives just before that stage, so
    that both cards compute while there are more pieces than one. The first one arrives before the card waits for a
    layer's weights: what it then waits for is its link, and not the other cards as well.
    """
    partition, buffers = decoder.partition, decoder.partition.transfer_buffers
    with _over_cards(partition):
        rows_of, destinations, in_transit = _begin_on_cards(decoder, pieces)

        def received(piece: int) -> list[torch.Tensor]:
            return stream.receive(in_transit[piece], destinations[in_transit[piece].target][piece])

        arrived = received(0)
        for stage in stages:
            done = stage[-1][0] + 1
            card, following = partition.card_of(stage[0][0]), partition.card_of(done)
            for piece, rows in enumerate(rows_of[card]):
                here = received(piece) if piece else arrived
                # A warm-up leaves layers out, so that the piece may be on its way to the card of one of those.
                (residual,) = stream.transfer(here, in_transit[piece].target, card, buffers, piece)
                with stream.current_device(card.device):
                    for index, layer in stage:
                        if hidden is not None:
                            hidden.keep(index, piece, residual)
                        with layer() as weights:
                            decoder.layer(index, weights, residual, rows, cache)
                in_transit[piece] = stream.send([residual], card, following, buffers, piece)
            if done < decoder.num_layers:
                arrived = received(0)
            if on_layer is not None:
                on_layer(done, decoder.num_layers)
        first, behind = partition.cards[0], list[torch.Tensor]()
        for piece in kept:
            sent = stream.send(received(piece), in_transit[piece].target, first, buffers, piece)
            behind += stream.receive(sent, destinations[first][piece])
        return behind


@contextmanager
def _over_cards(partition: stream.LayerPartition) -> Iterator[None]:
    """Wait, where a pass over several cards breaks off, for what they still have to do: else one could write to a
    buffer of transfers behind what the next pass has written there."""
    try:
        yield
    except BaseException:
        for device in partition.devices:
            if device.type == "cuda":
                with suppress(torch.AcceleratorError):
                    torch.cuda.synchronize(device)
        raise


def _begin_on_cards(
    decoder: Decoder, pieces: list[Rows]
) -> tuple[dict[stream.Card, list[Rows]], dict[stream.Card, Sequence[torch.Tensor]], list[stream.Transfer]]:
    """Return for every card the rows of each piece and where its residual stream arrives there, uint8; and the streams,
    [N, H], on the way to the card of the first layer.

    If each stream that arrives took memory of its own, what leaves could not be used again until the device has sent
    it, and the host is layers ahead.
    """
    partition = decoder.partition
    first, buffers = partition.cards[0], partition.transfer_buffers
    rows_of, destinations = dict[stream.Card, list[Rows]](), dict[stream.Card, Sequence[torch.Tensor]]()
    for card in partition.cards:
        rows_of[card] = [_moved(rows, first, card, buffers, (card.number, piece)) for piece, rows in enumerate(pieces)]
        with stream.current_device(card.device):
            destinations[card] = _residual_buffers(decoder, pieces, card.device)
    in_transit = [
        stream.send([residual], first, partition.card_of(0), buffers, piece)
        for piece, residual in enumerate(_embedded(decoder, pieces, destinations[first]))
    ]
    return rows_of, destinations, in_transit


def _moved(
    rows: Rows, source: stream.Card, target: stream.Card, buffers: stream.TransferBuffers, piece: Hashable
) -> Rows:
    """Return rows, which are on `source`, for another card. Arguments as of `transfer`."""
    if source == target:
        return rows
    parts = {part: _tensors(getattr(rows, part)) for part in ("query", "rope")}
    tensors = [tensor for part in parts.values() for tensor in part.values()]
    tokens, *rest = stream.transfer([rows.tokens, *tensors], source, target, buffers, piece)
    moved = iter(rest)
    query, rope = (
        replace(getattr(rows, part), **{name: next(moved) for name in tensors}) for part, tensors in parts.items()
    )
    return replace(rows, tokens=tokens, query=query, rope=rope)


def _tensors(part: QueryRows | RopeRows) -> dict[str, torch.Tensor]:
    """Return the fields that are tensors."""
    return {one.name: value for one in fields(part) if isinstance(value := getattr(part, one.name), torch.Tensor)}
