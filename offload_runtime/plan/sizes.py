"""What a run holds: its models with their caches and layers, part by part, in bytes of the device and of the host.

Who allocates a tensor says how large it is (`models`, `kv`, `runners`, `weights`); here it is only added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime import kv
from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.copy import RingShape
from offload_runtime.errors import OptionError
from offload_runtime.kv.device import streaming_capacity_tokens
from offload_runtime.kv.retrieval import retrieved_bytes, summaries_bytes
from offload_runtime.memory import PAGE_BYTES
from offload_runtime.models.config import ModelConfig
from offload_runtime.options import require
from offload_runtime.plan.request import (
    AUTO_CONTEXT_TOKENS,
    DTYPE_NAMES,
    TREE_ROOMS,
    MemoryLimits,
    longest_context,
    resolve_context,
    resolve_dtype,
)
from offload_runtime.runners import captured_pass_bytes, draft_graph_bytes, step_graph_bytes, tree_positions
from offload_runtime.runners.draft_kv import REWRITTEN_TOKENS
from offload_runtime.runners.graphs import MOST_DEPTH, STEP_ROWS
from offload_runtime.runners.model_runner import PREFILL_CHUNK_TOKENS, workspace_bytes
from offload_runtime.sampling import MOST_FILTERED_ROWS
from offload_runtime.sizes import format_bytes
from offload_runtime.speculation import MOST_LEVELS, most_guess_rows, verifier_step_bytes
from offload_runtime.weights import DescribedModel, ModelLayout
from offload_runtime.weights.loader import passing_bytes

# Where nothing is staged.
NO_RING = RingShape(0, 0)
# Python, torch and the CUDA libraries of one process, which no ledger counts; and how much of it there is while weights
# are read, before kernels are compiled and library modules are loaded (H200, torch 2.11, a 70B in Q4_K_M: 1.62 GB where
# all of it was on the card, 1.57 beside streamed layers; 0.81 and 0.82 while it was read).
PROCESS_BYTES, _LOADING_PROCESS_BYTES = 1_620_000_000, 840_000_000


@dataclass(frozen=True)
class MemoryPart:
    """Bytes of one thing; `pinned` where they must be page-locked."""

    name: str
    nbytes: int
    pinned: bool = False


Parts = tuple[MemoryPart, ...]


def listed(parts: Iterable[MemoryPart]) -> str:
    """The names and sizes of parts, for people."""
    return ", ".join(f"{part.name} {format_bytes(part.nbytes)}" for part in parts)


def total(parts: Iterable[MemoryPart]) -> int:
    """The bytes of parts together."""
    return sum(part.nbytes for part in parts)


def merged(parts: Iterable[MemoryPart]) -> Parts:
    """Parts of several cards, those of one name as one; without those that are nothing."""
    found: dict[str, MemoryPart] = {}
    for part in parts:
        before = found.get(part.name)
        found[part.name] = part if before is None else replace(part, nbytes=before.nbytes + part.nbytes)
    return tuple(part for part in found.values() if part.nbytes)


@dataclass(frozen=True)
class Placement:
    """Where the layers of a model are that one card has, or all of them: which stay on the device, and how many buffers
    the others pass through.

    `staged_layers` are those of the others whose host memory is not page-locked; they cross the page-locked `h2d_ring`
    on their way. `resident_kv_layers` and `staged_kv_layers` are the same of a KV cache on the host, which passes
    through `kv_ring_buffers`, and crosses the `d2h_ring` on its way there (of no pieces where nothing goes there).
    """

    layers: tuple[int, ...]
    resident_layers: tuple[int, ...]
    num_buffers: int = 0
    staged_layers: tuple[int, ...] = ()
    resident_kv_layers: tuple[int, ...] = ()
    staged_kv_layers: tuple[int, ...] = ()
    kv_ring_buffers: int = kv.KV_RING_BUFFERS
    h2d_ring: RingShape = NO_RING
    d2h_ring: RingShape = NO_RING

    @property
    def ring_bytes(self) -> int:
        """Page-locked memory that staging takes."""
        return self.h2d_ring.nbytes + self.d2h_ring.nbytes

    @cached_property
    def streamed_layers(self) -> tuple[int, ...]:
        """Layers whose weights cross the link in every pass."""
        return tuple(sorted({*self.layers} - {*self.resident_layers}))


def all_resident(layers: Iterable[int]) -> Placement:
    """Every one of some layers on the device, nothing streamed."""
    return Placement(tuple(layers), tuple(layers))


@dataclass(frozen=True)
class ModelPlan:
    """One model of a run, before it is loaded. `layout` is how its weights lie in memory, and its layers are dealt out
    to as many cards as there are `placements`. What one of several cards has of it is such a plan, too, of fewer
    layers: `card` is its number, and the first one has what is not of any layer.

    `cache` is `full` (on the device), `host` (in host memory, but for the layers that the placement keeps) or, of a
    draft, `retrieval` or `streaming`, whose sizes are those of `options`, as are those of what a retrieval verifier
    reads of a target's. A prefill that `borrows` may take the memory of retrieved chunks.
    """

    config: ModelConfig
    layout: ModelLayout
    chunk_tokens: int  # pieces that a prompt is worked on in
    context_tokens: int
    window_tokens: int
    batch: int
    placements: tuple[Placement, ...]
    options: SpeculationOptions
    cache: str = "full"
    borrows: bool = False
    tree_nodes: int = 0  # most nodes of the trees that a draft grows
    step_rows: int | None = None  # of a draft, which proposes step by step; None: windows are verified
    card: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.layout.dtype

    @cached_property
    def placement(self) -> Placement:
        """Where all of its layers are. Buffers of layers are those of all cards; other rings are as large as the
        largest."""
        cards = self.placements
        if len(cards) == 1:
            return cards[0]
        names = ("layers", "resident_layers", "staged_layers", "resident_kv_layers", "staged_kv_layers")
        layers = {name: tuple(sorted(chain(*(getattr(one, name) for one in cards)))) for name in names}
        return Placement(
            **layers, num_buffers=sum(one.num_buffers for one in cards),
            kv_ring_buffers=max(one.kv_ring_buffers for one in cards),
            h2d_ring=max((one.h2d_ring for one in cards), key=lambda ring: ring.nbytes),
            d2h_ring=max((one.d2h_ring for one in cards), key=lambda ring: ring.nbytes),
        )  # fmt: skip

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the layers that it is about, all or those of a card."""
        return self.placement.layers

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The card of each layer of the model, by its number."""
        found = {layer: card for card, placement in enumerate(self.placements) for layer in placement.layers}
        return tuple(found.get(layer, 0) for layer in range(self.config.num_layers))

    @cached_property
    def cards(self) -> tuple[ModelPlan, ...]:
        """What each card has of it."""
        if len(self.placements) == 1:
            return (self,)
        return tuple(replace(self, placements=(one,), card=card) for card, one in enumerate(self.placements))

    @property
    def has_head(self) -> bool:
        """Whether logits are made here, as on the first of several cards."""
        return self.card == 0

    @property
    def on_host(self) -> bool:
        """Whether the KV cache lives in host memory."""
        return self.cache == "host"

    @property
    def tree_positions(self) -> int:
        """Of a draft that grows trees: places for what may become part of a sequence."""
        return tree_positions(self.tree_nodes) if self.tree_nodes else 0

    # --- weights

    @cached_property
    def layer_bytes(self) -> int:
        """The largest packed layer, which a buffer of the ring holds."""
        return max(map(self.layout.layer_bytes.__getitem__, self.layers))

    def bytes_of_layers(self, layers: Iterable[int]) -> int:
        """Some packed layers."""
        return sum(map(self.layout.layer_bytes.__getitem__, layers))

    def host_bytes_of_layers(self, layers: Iterable[int]) -> int:
        """Some packed layers in host memory, which is given out in whole pages."""
        return sum(-(-self.layout.layer_bytes[layer] // PAGE_BYTES) * PAGE_BYTES for layer in layers)

    def scratch_bytes(self, device_type: str) -> int:
        """The largest matrix that is decoded before a product."""
        return self.layout.scratch_bytes(device_type, self.layers, head=self.has_head)

    def held_bytes(self, placement: Placement) -> int:
        """What a placement takes of the device: the layers that stay, and the ring."""
        return self.bytes_of_layers(placement.resident_layers) + placement.num_buffers * self.layer_bytes

    # --- keys and values

    @cached_property
    def kv_layers_on_host(self) -> tuple[int, ...]:
        """Layers whose keys and values are in host memory."""
        kept = self.placement.resident_kv_layers
        return tuple(layer for layer in self.full_layers if layer not in kept) if self.on_host else ()

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """Layers that attend to everything. The others keep what their windows reach on the device."""
        return tuple(layer for layer in self.layers if self.config.layer_windows[layer] is None)

    @cached_property
    def largest_kv_layer(self) -> tuple[int]:
        """Of those that attend to everything, if there are any, the layer that keeps the most of a token."""
        return (max(self.full_layers or self.layers, key=lambda layer: self.kv_bytes_of((layer,), 1)),)

    @property
    def pass_rows(self) -> int | None:
        """Most rows that a pass has of a sequence, and as many again as may be taken back; None for caches that keep
        all that they are given, as those of drafts."""
        return self.chunk_tokens + self.window_tokens if self.step_rows is None else None

    def kv_bytes_of(self, layers: Iterable[int], tokens: int) -> int:
        """What some layers keep of so many tokens of a sequence."""
        declared = (self.config.layers[layer].attention.kv_elements(tokens) for layer in layers)
        return sum(declared) * self.dtype.itemsize

    @property
    def kv_block_bytes(self) -> int:
        """A block of keys and values of one sequence, of all layers."""
        return self.kv_bytes_of(self.layers, BLOCK_TOKENS)

    def reserved_kv_bytes(self, layers: Iterable[int]) -> int:
        """What some layers reserve of the whole context."""
        tokens, rows = self.context_tokens, self.pass_rows
        reserved = ((layer, self.config.layers[layer].attention.reserved_tokens(tokens, rows)) for layer in layers)
        return self.batch * sum(self.kv_bytes_of((layer,), tokens) for layer, tokens in reserved)

    @property
    def host_kv_bytes(self) -> int:
        """Host memory of the keys and values of the whole context that are not on the device."""
        return self.reserved_kv_bytes(self.kv_layers_on_host)

    def open_kv_bytes(self, layers: Iterable[int]) -> int:
        """On the device, of layers whose cache is on the host: their newest blocks."""
        return self.batch * self.kv_bytes_of(layers, kv.ring_blocks(self.window_tokens) * BLOCK_TOKENS)

    @property
    def whole_kv_bytes(self) -> int:
        """The KV cache of all that is kept of the context, wherever it is."""
        kept_bytes = self.reserved_kv_bytes(self.layers)
        if self.cache == "streaming":
            kept_bytes = self.batch * self.kv_bytes_of(self.layers, self.streaming_tokens)
        tree_tokens = kv.num_blocks(self.tree_positions) * BLOCK_TOKENS
        return kept_bytes + self.batch * self.kv_bytes_of(self.layers, tree_tokens)

    @cached_property
    def kv_piece_bytes(self) -> int:
        """A buffer of the ring that a cache on the host is streamed through."""
        overlapped = self.placement.kv_ring_buffers > kv.KV_RING_BUFFERS
        return kv.kv_piece_bytes(self.config, self.dtype, self.context_tokens, overlapped=overlapped)

    def kv_pieces(self, streamed_bytes: int) -> int:
        """Copies that bring so many bytes of a layer, of all sequences alike."""
        return self.batch * -(-streamed_bytes // (self.batch * self.kv_piece_bytes))

    @property
    def kv_ring_bytes(self) -> int:
        """All buffers of that ring."""
        return self.placement.kv_ring_buffers * self.kv_piece_bytes

    def with_overlapped_kv_ring(self, num_cards: int) -> ModelPlan:
        """The same, of one card, with a ring of keys and values with which the links of all cards are busy at once. A
        card brings those of its next layer while the others attend, one after the other, to what their links bring; of
        n cards each needs room for (n - 1) / n of a layer, the piece that it attends to and one that arrives."""
        least = kv.KV_RING_BUFFERS + 1
        ring = replace(self, placements=(replace(self.placement, kv_ring_buffers=least),))
        largest = self.streamed_kv_bytes(*self.largest_kv_layer, self.context_tokens - 1)
        buffers = max(least, 2 + -(-ring.kv_pieces(largest) * (num_cards - 1) // num_cards))
        return replace(self, placements=(replace(self.placement, kv_ring_buffers=buffers),))

    @property
    def prefill_workspace_bytes(self) -> int:
        """What a prefill reserves for one layer's keys and values, when it cannot borrow as much."""
        needed_bytes = self.reserved_kv_bytes(self.largest_kv_layer) // self.batch
        chosen_tokens = kv.num_blocks(self.options.budget_tokens) * BLOCK_TOKENS
        return 0 if self.borrows and self.kv_bytes_of(self.layers, chosen_tokens) >= needed_bytes else needed_bytes

    @property
    def kv_parts(self) -> Parts:
        """What the KV cache takes of the device."""
        if len(self.placements) > 1:
            return merged(chain(*(card.kv_parts for card in self.cards)))
        if not self.on_host:
            chosen_bytes = self.retrieved_bytes if self.cache == "retrieval" else 0
            return (MemoryPart("KV cache", self.whole_kv_bytes + chosen_bytes),)
        streamed = self.kv_layers_on_host
        return (
            MemoryPart("KV of resident layers", self.reserved_kv_bytes({*self.layers}.difference(streamed))),
            MemoryPart("open KV blocks", self.open_kv_bytes(streamed)),
            MemoryPart("ring of KV pieces", self.kv_ring_bytes if streamed else 0),
            MemoryPart("prefill workspace", self.prefill_workspace_bytes if streamed else 0),
        )

    @cached_property
    def summaries_bytes(self) -> int:
        """What chunks are chosen by, where a retrieval verifier or a draft reads chunks of the cache."""
        sizes = {"chunk_size": self.options.chunk_size, "capacity_tokens": self.context_tokens, "batch": self.batch}
        return summaries_bytes(self.own_config, **sizes)

    @cached_property
    def retrieved_bytes(self) -> int:
        """The chunks that are read, which lie on the device once more, and what they are chosen by."""
        sizes = {"budget_tokens": self.options.budget_tokens, "chunk_size": self.options.chunk_size}
        return self.summaries_bytes + retrieved_bytes(self.own_config, self.dtype, **sizes, batch=self.batch)

    @property
    def own_config(self) -> ModelConfig:
        """The model as if it had no other layers than those that it is about."""
        own = len(self.layers) == self.config.num_layers
        return (
            self.config if own else replace(self.config, layers=tuple(self.config.layers[one] for one in self.layers))
        )

    @property
    def recent_tokens(self) -> int:
        """Newest tokens that a streaming cache keeps: there are no more of them than the context has."""
        return min(self.options.recent_tokens, max(2, self.context_tokens))

    @property
    def streaming_window_tokens(self) -> int:
        """Tokens in a row behind a text: where trees are grown no more than they are deep, so that longer chains are
        cut; steps of a retrieval verifier may go beyond what is asked for."""
        in_a_row = min(self.window_tokens, MOST_DEPTH + 1) if self.tree_nodes else self.window_tokens
        return in_a_row + self.options.gamma_draft + MOST_LEVELS + 2

    @property
    def streaming_tokens(self) -> int:
        """Tokens that a streaming cache has room for."""
        return streaming_capacity_tokens(self.options.sink_tokens, self.recent_tokens, self.streaming_window_tokens)

    def streamed_kv_bytes(self, layer: int, length_tokens: int) -> int:
        """What a pass behind `length_tokens` tokens of each sequence streams for a layer whose cache is on the host:
        all full blocks."""
        return self.batch * self.kv_bytes_of((layer,), length_tokens // BLOCK_TOKENS * BLOCK_TOKENS)

    def streamed_kv(self, length_tokens: int) -> dict[int, int]:
        """The same of every layer whose cache is on the host, by layer."""
        return {layer: self.streamed_kv_bytes(layer, length_tokens) for layer in self.kv_layers_on_host}

    # --- what passes take

    @property
    def mixes(self) -> bool:
        """Whether its passes read several prompts, and beside windows."""
        return self.step_rows is None and self.batch > 1 and not self.on_host

    @cached_property
    def workspace_bytes(self) -> int:
        """Activations of the largest pass."""
        # A tree's step keeps its logits beside those that the pass makes.
        rows = self.batch * self.window_tokens if self.step_rows is None else 2 * self.step_rows
        sampled_rows = min(rows, max(MOST_FILTERED_ROWS, self.step_rows or 0))
        return workspace_bytes(
            self.config, self.dtype.itemsize, chunk_tokens=self.chunk_tokens, context_tokens=self.context_tokens,
            rows=rows, sampled_rows=sampled_rows, has_head=self.has_head, mixes=self.mixes,
        )  # fmt: skip


def unmatched_kv_bytes(cards: Sequence[ModelPlan], length_tokens: int) -> list[int]:
    """Of each of several cards that stream keys and values in turn, what its link could bring while it has to wait: for
    a layer that another streams more than it does, as far as its own ring has no room meanwhile."""
    streamed = [card.streamed_kv(length_tokens).values() for card in cards]
    most, largest = max(map(len, streamed)), max((nbytes for one in streamed for nbytes in one), default=0)
    pairs = zip(cards, streamed, strict=True)
    return [(most - len(one)) * max(0, largest - card.kv_ring_bytes) for card, one in pairs]


@dataclass(frozen=True)
class RunPlan:
    """A run as it was asked for and as it is placed: what lives where, in bytes.

    A retrieval verifier, if it `has_verifier`, is the target over retrieved chunks, between the draft and the target;
    `reason` says why it has one or not, when `auto` decided it, and `draft_note` who drafts where that was left open.
    Trees of `tree_room` nodes have room.

    Layers may be dealt out to several cards: then device memory is that of all of them together, and `cards` are plans
    of what each has. The draft, embedding and head are on the first.
    """

    request: RuntimeConfig
    limits: MemoryLimits
    target: ModelPlan
    draft: ModelPlan | None = None
    has_verifier: bool = False
    tree_room: int = 0
    draft_note: str = ""
    reason: str = ""

    @property
    def num_cards(self) -> int:
        """That the target's layers are dealt out to."""
        return len(self.target.placements)

    @cached_property
    def cards(self) -> tuple[RunPlan, ...]:
        """What each card has of it; the draft is on the first."""
        if self.num_cards == 1:
            return (self,)
        return tuple(
            replace(self, target=one, draft=None if one.card else self.draft, limits=self.limits.of_card(one.card))
            for one in self.target.cards
        )

    def with_placements(self, *placements: Placement) -> RunPlan:
        """The same with the target's layers elsewhere, of each card."""
        return replace(self, target=replace(self.target, placements=placements))

    @property
    def placement(self) -> Placement:
        """Of the target's layers."""
        return self.target.placement

    @property
    def proposer(self) -> str:
        """Who proposes, if it is not the retrieval verifier: `none`, `ngram` or `the draft`."""
        return "none" if self.request.speculation.mode == "none" else self.request.proposed_by

    @property
    def on_cpu(self) -> bool:
        """Whether device memory is the host's."""
        return self.request.device_type == "cpu"

    # --- of the device

    @cached_property
    def device(self) -> Parts:
        """Device memory, part by part."""
        return merged((*self.needed, MemoryPart("CUDA graphs of passes", self.captured_bytes)))

    @cached_property
    def captured_bytes(self) -> int:
        """CUDA graphs of the target's passes, where all that these need is on the device, with room for them; none yet
        where passes cross from card to card."""
        target = self.target
        if self.on_cpu or self.num_cards > 1 or len(target.layers) < target.config.num_layers:
            return 0
        if self.placement.streamed_layers or target.kv_layers_on_host:
            return 0
        nbytes, limit_bytes = captured_pass_bytes(target.config, target.dtype.itemsize), self.limits.device_bytes
        return nbytes if limit_bytes is None or total(self.needed) + nbytes <= limit_bytes else 0

    @cached_property
    def needed(self) -> Parts:
        """Device memory of what there must be."""
        if self.num_cards > 1:
            return merged(chain(*(card.needed for card in self.cards)))
        target, draft, placement = self.target, self.draft, self.placement
        return (
            MemoryPart("CUDA context", self.limits.cards[0].reserved_bytes),
            MemoryPart("embedding and head", target.layout.shared.total_bytes if target.has_head else 0),
            MemoryPart("resident layers", target.bytes_of_layers(placement.resident_layers)),
            MemoryPart("ring of layers", placement.num_buffers * target.layer_bytes),
            *target.kv_parts,
            MemoryPart("retrieval cache", self.verifier_bytes if self.has_verifier else 0),
            MemoryPart("draft weights", 0 if draft is None else draft.layout.total_bytes),
            MemoryPart("draft KV cache", 0 if draft is None else total(draft.kv_parts)),
            MemoryPart("CUDA graphs", self.graph_bytes),
            MemoryPart("decoded matrices", sum(one.scratch_bytes(self.request.device_type) for one in self.models)),
            MemoryPart("workspace", self.workspace_bytes),
        )

    @cached_property
    def device_bytes(self) -> int:
        """Peak of the device's memory."""
        return total(self.device)

    @property
    def models(self) -> list[ModelPlan]:
        """The target, and the draft if there is one here."""
        return [model for model in (self.target, self.draft) if model is not None]

    @property
    def workspace_bytes(self) -> int:
        """Activations of both models on a card. They take turns on one stream and share the allocator's blocks, unless
        the draft runs beside a pass."""
        each = [model.workspace_bytes for model in self.models]
        return sum(each) if self.draft is not None and self.draft.tree_positions else max(each)

    @property
    def graph_bytes(self) -> int:
        """CUDA graphs of the draft's and the verifier's steps on a card."""
        draft, nbytes = self.draft, step_graph_bytes(len(self.target.layers)) if self.has_verifier else 0
        if draft is not None:
            rows, batch = draft.batch * REWRITTEN_TOKENS, draft.batch
            if self.has_verifier:
                rows = most_guess_rows(draft.options.gamma_draft, batch, others=REWRITTEN_TOKENS)
            trees, element_bytes = draft.tree_positions > 0, draft.dtype.itemsize
            nbytes += draft_graph_bytes(draft.config, element_bytes, rows=rows, batch=batch, trees=trees)
        return 0 if self.on_cpu else nbytes

    @property
    def verifier_bytes(self) -> int:
        """Of a retrieval verifier: retrieved chunks, what they are chosen by, and what steps need but for graphs."""
        return sum(card.verifier_step_bytes + card.target.retrieved_bytes for card in self.cards)

    @property
    def verifier_step_bytes(self) -> int:
        """Of these, on a card, the window and what a step computes on its way, of all sequences."""
        target, rows = self.target, self.target.batch
        if self.request.proposed_by == "the draft":  # of the newest tokens as many as there are levels are written anew
            rows = most_guess_rows(target.options.gamma_draft, target.batch, others=1 + MOST_LEVELS)
        sizes = {"rows": rows, "far_chunks": target.context_tokens // target.options.chunk_size, "batch": target.batch}
        return verifier_step_bytes(target.config, target.dtype.itemsize, **sizes, has_head=target.has_head)

    # --- of the host

    @cached_property
    def host(self) -> Parts:
        """Host memory once the models are loaded, at the longest context, part by part."""
        target, placement, pinned = self.target, self.placement, self.limits.page_locks
        rings = target.placements  # each has its own
        staged_bytes = target.host_bytes_of_layers(placement.staged_layers)
        streamed_bytes = target.host_bytes_of_layers(placement.streamed_layers)
        staged_kv_bytes = target.reserved_kv_bytes(placement.staged_kv_layers)
        return merged(
            [
                MemoryPart("streamed layers", streamed_bytes - staged_bytes, pinned),
                MemoryPart("staged layers", staged_bytes),
                MemoryPart("staging ring", sum(one.h2d_ring.nbytes for one in rings), pinned),
                MemoryPart("KV cache", target.host_kv_bytes - staged_kv_bytes, pinned),
                MemoryPart("staged KV cache", staged_kv_bytes),
                MemoryPart("pieces to write KV through", sum(one.d2h_ring.nbytes for one in rings), pinned),
                MemoryPart("rows between cards", self.transfer_bytes, pinned),
                # Of a CPU, whose memory is the host's.
                MemoryPart("all that a GPU would hold", self.device_bytes if self.on_cpu else 0),
                MemoryPart("Python and libraries", PROCESS_BYTES),
            ]
        )

    @property
    def transfer_bytes(self) -> int:
        """Page-locked memory that rows pass through: a buffer for each piece of a pass, and for each further card one
        for where its rows are, which the allocator rounds up to powers of two. Several prompts of a pass have together
        as many pieces as the longest, and all but one of them and the windows one more."""
        if self.num_cards == 1 or not self.limits.transfers_through_host:
            return 0
        target, config = self.target, self.target.config
        rows = min(target.chunk_tokens, target.context_tokens)
        sizes = [config.hidden_size * target.dtype.itemsize, *[8 * config.num_angles + 32] * (self.num_cards - 1)]
        pieces = -(-target.context_tokens // rows) + (target.batch if target.mixes else 0)
        return pieces * sum(1 << (rows * size - 1).bit_length() for size in sizes)

    @cached_property
    def loading(self) -> Parts:
        """Host memory while the target's weights are read, part by part, or the draft's, if that is more."""
        sources = (self.request.draft, self.draft), (self.request.target, self.target)
        models = [(source, model.layout) for source, model in sources if model is not None]
        streamed, held_bytes = self.placement.streamed_layers, sum(layout.total_bytes for _, layout in models)
        held_bytes -= self.target.bytes_of_layers(streamed)
        return merged(
            [
                MemoryPart("streamed layers", self.target.host_bytes_of_layers(streamed)),
                MemoryPart("weights on their way", max(passing_bytes(source, layout) for source, layout in models)),
                MemoryPart("weights that a GPU would hold", held_bytes if self.on_cpu else 0),
                MemoryPart("Python and libraries", _LOADING_PROCESS_BYTES),
            ]
        )

    @cached_property
    def host_bytes(self) -> int:
        """Peak of host memory."""
        return max(total(self.host), total(self.loading))

    @property
    def short_of_host_bytes(self) -> int:
        """What of that peak is more than the run may take; 0 where it fits."""
        return max(0, self.host_bytes - self.limits.ram_bytes)

    @property
    def pinned_bytes(self) -> int:
        """Peak of page-locked host memory; while weights are read, pieces of them are locked in what is left of the
        limit."""
        return total(part for part in self.host if part.pinned)

    # --- what of it moves, and how

    @cached_property
    def streamed_bytes(self) -> int:
        """Bytes that a pass at the full context brings over the link."""
        target = self.target
        kv_bytes = sum(target.streamed_kv(target.context_tokens - 1).values())
        return target.bytes_of_layers(self.placement.streamed_layers) + kv_bytes

    @property
    def resident_kv_layers(self) -> tuple[int, ...]:
        """Layers whose keys and values stay on the device."""
        return tuple(layer for layer in self.placement.layers if layer not in self.target.kv_layers_on_host)

    @property
    def is_staged(self) -> bool:
        """Whether anything is streamed from pageable memory."""
        return bool(self.placement.staged_layers or self.placement.staged_kv_layers)


def make_plan(request: RuntimeConfig, limits: MemoryLimits, *, tree_nodes: int) -> RunPlan:
    """What both models will take with room for trees of `tree_nodes`, nothing placed yet. Asks nothing of the device.

    Raises:
        OptionError, ContextLengthError: Of the request's element type, context, window or caches.
    """
    config, proposed = request.target.config(), max(request.max_gamma, tree_nodes)
    dtype = resolve_dtype(request.dtype, request.target, request.device_type)
    tokens, longest = resolve_context(request.context, config, kv=request.kv), longest_context(config)
    many = f"{proposed} proposals in a window are more than the {longest} tokens that the model was made for"
    require(proposed <= max(longest, *TREE_ROOMS), f"{many}: lower --gamma or --tree-nodes")
    coded, placements = request.encode == "always", (all_resident(range(config.num_layers)),)
    layout = _layout(request, request.target, dtype, coded=coded)
    if coded and not layout.has_coded:
        raise OptionError(
            f"--encode always has nothing to code in a run in {DTYPE_NAMES[dtype]}: no matrix would be in bf16 with "
            f"columns that 64 divides: drop it{'' if dtype == torch.bfloat16 else ', or take --dtype bf16'}"
        )
    chunk_tokens = PREFILL_CHUNK_TOKENS[request.device_type]
    assert request.max_batch is not None, "it is chosen by then"
    target = ModelPlan(
        config, layout, chunk_tokens, tokens, proposed + 1, request.max_batch, placements, request.speculation
    )
    draft = _plan_draft(request, target, tree_nodes) if request.proposed_by == "the draft" else None
    return RunPlan(request, limits, target, draft, tree_room=tree_nodes)


def _layout(request: RuntimeConfig, model: DescribedModel, dtype: torch.dtype, *, coded: bool = False) -> ModelLayout:
    """How weights lie in memory: of quantised files as they are stored, if nothing else is asked for, but on a CPU,
    which has no link and would decode for every token what it can decode once."""
    decoded = request.weights == "decoded" or (request.weights == "auto" and request.device_type == "cpu")
    return (replace(model, decoded=True) if decoded and model.kinds else model).layout(dtype, coded=coded)


def _plan_draft(request: RuntimeConfig, target: ModelPlan, tree_nodes: int) -> ModelPlan:
    """Plan of a draft model. A full cache ends where the draft's own positions do.

    Raises:
        OptionError: The cache that was asked for needs positions that the draft does not have, or would retrieve more
            than there can be; or trees were asked for and the cache is one of retrieved chunks.
    """
    config, options, context = request.draft.config(), request.speculation, target.context_tokens
    longest, cache = longest_context(config), options.draft_cache
    if cache == "auto":
        fits = context <= longest and options.budget_tokens <= context and not tree_nodes
        cache = "full" if context <= min(longest, AUTO_CONTEXT_TOKENS) else "retrieval" if fits else "streaming"
    plan = replace(
        target, config=config, layout=_layout(request, request.draft, target.dtype), cache=cache,
        placements=(all_resident(range(config.num_layers)),), tree_nodes=tree_nodes,
        step_rows=max(STEP_ROWS, target.batch), context_tokens=min(context, longest) if cache == "full" else context,
    )  # fmt: skip
    kept, retrieves = plan.streaming_tokens, cache == "retrieval"
    for fine, why, remedies in (
        (cache != "streaming" or kept <= longest,
         f"a streaming draft cache of {kept} tokens (sinks, recent tokens and the window) is more than the {longest} "
         "that the draft was made for", f"lower --recent-tokens by {kept - longest}"),
        (not (retrieves and tree_nodes),
         f"trees of {tree_nodes} nodes need a draft whose KV cache holds whole branches, not retrieved chunks",
         "use --draft-cache streaming or full, or --tree-nodes 0"),
        (not retrieves or context <= longest,
         f"a retrieval cache keeps the positions of all {context} tokens, and the draft was made for {longest}",
         "use --draft-cache streaming, lower --context, or set a RoPE scaling in its config.json"),
        (not retrieves or options.budget_tokens <= context,
         f"a draft that retrieves {options.budget_tokens} of at most {context} tokens reserves memory for nothing",
         "lower --budget-tokens, raise --context, or use --draft-cache full"),
    ):  # fmt: skip
        require(fine, f"{why}: {remedies}")
    return plan
