"""One model of a run before it is loaded: where its layers are, and what of it takes how many bytes.

Who allocates a tensor says how large it is (`models`, `cache`, `runners`, `weights`); here it is only added up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from offload_runtime_kernels.encoded_linear import MOST_ROWS
from offload_runtime_kernels.gguf_blocks import DTYPE_KINDS, KIND_DTYPES
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.cache import delta, host_io
from offload_runtime.cache.device import num_blocks, streaming_capacity_tokens
from offload_runtime.cache.retrieval import retrieved_bytes, summaries_bytes
from offload_runtime.cache.saved_blocks import BlockLayout
from offload_runtime.config import SpeculationOptions
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.dflash import DFlashConfig
from offload_runtime.models.heads import HeadConfig
from offload_runtime.runners.graphs import MOST_DELTA_DEPTH, MOST_DEPTH, tree_positions
from offload_runtime.runners.model_runner import most_prompt_tokens, workspace_bytes
from offload_runtime.sampling import MOST_FILTERED_ROWS
from offload_runtime.sizes import counted, format_bytes
from offload_runtime.speculation.window import MOST_LEVELS
from offload_runtime.stream.arena import PAGE_BYTES, HostArena
from offload_runtime.stream.staging import RingShape
from offload_runtime.weights.encoding import aligned
from offload_runtime.weights.expert_hits import PUBLISHED_EXPONENT
from offload_runtime.weights.layout import ExpertBlocks, ModelLayout

# Where nothing is staged.
NO_RING = RingShape(0, 0)


# Bytes by what they are for.
Parts = Counter[str]


def listed(parts: Parts) -> str:
    """Return the names and sizes of parts, for people."""
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts.items())


# Decoded at a time at least of a larger matrix: gates and ups of a 32B take 566 MB, and each slice launches of its own.
_SLICE_BYTES = 160 << 20
# Rows of an expert beyond which more tokens together bring nothing but activations.
_EXPERT_ROWS = 256


@dataclass(frozen=True)
class Placement:
    """Says where the layers of a model are that one card has, or all of them: which stay on the device, and how many
    buffers the others pass through.

    `staged_layers` are those of the others whose host memory is not page-locked; they cross the page-locked `h2d_ring`
    on their way. `resident_kv_layers` and `staged_kv_layers` are the same of a KV cache on the host, which passes
    through `kv_ring_buffers`, and crosses the `d2h_ring` on its way there (of no pieces where nothing goes there).
    `pool_buffers` are those of experts; None: of all that the layers have; 0: they are in the target's pool.
    """

    layers: tuple[int, ...]
    resident_layers: tuple[int, ...]
    num_buffers: int = 0
    staged_layers: tuple[int, ...] = ()
    resident_kv_layers: tuple[int, ...] = ()
    staged_kv_layers: tuple[int, ...] = ()
    kv_ring_buffers: int = host_io.KV_RING_BUFFERS
    h2d_ring: RingShape = NO_RING
    d2h_ring: RingShape = NO_RING
    pool_buffers: int | None = None

    @property
    def ring_bytes(self) -> int:
        """Return the page-locked memory that staging takes."""
        return self.h2d_ring.nbytes + self.d2h_ring.nbytes

    @cached_property
    def streamed_layers(self) -> tuple[int, ...]:
        """Return the layers whose weights cross the link in every pass."""
        return tuple(sorted({*self.layers} - {*self.resident_layers}))


def all_resident(layers: Iterable[int]) -> Placement:
    """Place every one of some layers on the device."""
    return Placement(tuple(layers), tuple(layers))


@dataclass(frozen=True)
class ModelPlan:
    """One model of a run, before it is loaded. `layout` is how its weights lie in memory, and its layers are dealt out
    to as many cards as there are `placements`. What one of several cards has of it is such a plan, too, of fewer
    layers: `card` is its number, and the first one has what is not of any layer.

    `cache` is `full` (on the device), `host` (in host memory, but for the layers that the placement keeps) or, of a
    draft, `retrieval` or `streaming`, whose sizes are those of `options`, as are those of what a retrieval verifier
    reads of a target's, or `target`: keys, values and whatever lies around the layers are the target's, and of the
    layers that are streamed it reads the `copies` that this has on the device. A prefill that `borrows` may take the
    memory of retrieved chunks. An `embedding_on_host`, which is not the head too, is page-locked, and passes read its
    rows there. `hit_exponent` is of `expected_hits`. The pool of a target's first card also has the `head_experts`, of
    the layers of a head, which are numbered behind its own.
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
    verified: bool = False  # by steps of a retrieval verifier before it is by passes
    tree_nodes: int = 0  # most nodes of the trees that a draft grows
    step_rows: int | None = None  # of a draft, which proposes step by step; None: windows are verified
    card: int = 0
    embedding_on_host: bool = False
    hit_exponent: float = PUBLISHED_EXPONENT
    head_experts: tuple[ExpertBlocks, ...] = ()
    most_expert_tokens: int = 0  # of prompts that go through experts together; 0: experts are not decoded first
    copies: ModelLayout | None = None  # of all layers of a target that drafts by itself
    rest: ModelLayout | None = None  # of all layers given their copies; None: they are streamed as they are
    whole: ModelLayout | None = None  # as layers are read of which the rest is streamed
    stored_rest: ModelLayout | None = None  # in no more room than it has turned out to take

    @property
    def dtype(self) -> torch.dtype:
        """Return what it computes in."""
        return self.layout.dtype

    @cached_property
    def placement(self) -> Placement:
        """Return where all of its layers are, and the buffers of all cards; every card has further rings of its own."""
        cards = self.placements
        if len(cards) == 1:
            return cards[0]
        names = ("layers", "resident_layers", "staged_layers", "resident_kv_layers", "staged_kv_layers")
        layers: dict[str, Any] = {name: tuple(sorted(chain(*(getattr(one, name) for one in cards)))) for name in names}
        pools = [card.num_experts if one.pool_buffers is None else one.pool_buffers
                 for card, one in zip(self.cards, cards, strict=True)]  # fmt: skip
        buffers = None if all(one.pool_buffers is None for one in cards) else sum(pools)
        return Placement(**layers, num_buffers=sum(one.num_buffers for one in cards), pool_buffers=buffers)

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers that it is about, all or those of a card."""
        return self.placement.layers

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Return the card of each layer of the model, by its number."""
        found = {layer: card for card, placement in enumerate(self.placements) for layer in placement.layers}
        return tuple(found.get(layer, 0) for layer in range(self.config.num_layers))

    @cached_property
    def cards(self) -> tuple[ModelPlan, ...]:
        """Return what each card has of it."""
        if len(self.placements) == 1:
            return (self,)
        return tuple(replace(self, placements=(one,), card=card) for card, one in enumerate(self.placements))

    @property
    def has_head(self) -> bool:
        """Return whether logits are made here, as on the first of several cards."""
        return self.card == 0

    @property
    def is_draft(self) -> bool:
        """Return whether it proposes step by step."""
        return self.step_rows is not None

    @property
    def is_head(self) -> bool:
        """Return whether it drafts from what its target's passes keep."""
        return self.config.is_head

    @property
    def is_copy(self) -> bool:
        """Return whether it drafts with copies of its target's layers, and all else of the target."""
        return self.cache == "target"

    @property
    def acceptance_is_assumed(self) -> bool:
        """Return whether no run has measured what is usually accepted of such drafts."""
        return self.is_head or self.is_copy

    @property
    def head(self) -> HeadConfig | None:
        """Its configuration, if it does."""
        return self.config if isinstance(self.config, HeadConfig) else None

    @property
    def on_host(self) -> bool:
        """Return whether the KV cache lives in host memory."""
        return self.cache == "host"

    @property
    def tree_positions(self) -> int:
        """Places in the cache of a draft that grows trees, or of a target whose copy does, for what may become part of
        a sequence."""
        few, grows = bool(self.config.deltas or self.copies or self.is_copy), self.tree_nodes and not self.block_rows
        return tree_positions(self.tree_nodes, few=few) if grows else 0

    @property
    def block_rows(self) -> int:
        """Return how many rows of each sequence are in a step of a drafter that proposes whole blocks at once; 0 of
        others."""
        return self.config.block_size if isinstance(self.config, DFlashConfig) else 0

    # --- weights

    @cached_property
    def layer_bytes(self) -> int:
        """Return the bytes of the largest layer that may cross the link."""
        return max(map(self._streamed.layer_bytes.__getitem__, self.layers))

    @property
    def _streamed(self) -> ModelLayout:
        """How layers lie in memory that cross the link, in all the room that they have there."""
        return self.layout if self.rest is None else self.rest

    @cached_property
    def placed_layout(self) -> ModelLayout:
        """Return how all lies in memory where layers are placed so, in all the room that there is for it."""
        return self.layout if self.rest is None else self.layout.with_layers(self.rest, self.placement.streamed_layers)

    def ring_bytes(self, placement: Placement) -> int:
        """Return what the buffers take that layers cross: where the rest of layers crosses a whole one has room in
        all of them, while its copy is made."""
        count, whole_bytes = placement.num_buffers, 0
        if self.whole is not None:
            whole_bytes = max((self.whole.layer_bytes[layer] for layer in placement.streamed_layers), default=0)
        each_bytes = max(self.layer_bytes, aligned(-(-whole_bytes // max(1, count))))
        return count * each_bytes

    def bytes_of_layers(self, layers: Iterable[int]) -> int:
        """Add up some packed layers."""
        return sum(map(self.layout.layer_bytes.__getitem__, layers))

    def copied_bytes(self, layers: Iterable[int]) -> int:
        """Add up the copies of some layers."""
        return 0 if self.copies is None else sum(map(self.copies.layer_bytes.__getitem__, layers))

    def copying(self, target: ModelPlan) -> ModelPlan:
        """Return the same of a copy beside a target that is placed so: of what is streamed it reads the copies."""
        assert target.copies is not None
        return replace(self, layout=target.layout.with_layers(target.copies, target.placement.streamed_layers))

    def of_card(self, target: ModelPlan) -> ModelPlan:
        """Return the same of a copy on the card that the target has these layers on."""
        return replace(self.copying(target), placements=(all_resident(target.layers),), card=target.card)

    def bytes_over_link(self, layers: Iterable[int]) -> int:
        """Add up some layers as they cross the link."""
        return sum(map((self.stored_rest or self._streamed).layer_bytes.__getitem__, layers))

    def host_bytes_of_layers(self, layers: Iterable[int]) -> int:
        """Add up some layers that cross the link in host memory, which is given out in whole pages."""
        nbytes = self._streamed.layer_bytes
        return sum(-(-nbytes[layer] // PAGE_BYTES) * PAGE_BYTES for layer in layers)

    @property
    def head_parts(self) -> Parts:
        """Return what of the device is taken by what lies around the layers."""
        nbytes, own_bytes = self.layout.shared.total_bytes, self.layout.embedding.total_bytes
        parts = {"head": nbytes} if self.embedding_on_host else {"embedding and head": nbytes + own_bytes}
        return Parts(parts if self.has_head else {})

    @property
    def host_embedding_bytes(self) -> int:
        """Return the host memory of the embedding."""
        return HostArena.rounded(self.layout.embedding.total_bytes) if self.embedding_on_host and self.has_head else 0

    def scratch_bytes(self, device_type: str) -> int:
        """Return the bytes of the largest matrix that is decoded before a product, or a slice of it where most of the
        card is taken by copies, or the experts that are decoded together."""
        layouts = [self.layout] if self.rest is None else [self.layout, self.rest]
        found = max(one.scratch_bytes(device_type, self.layers, head=self.has_head) for one in layouts)
        if self.rest is not None and device_type == "cuda":
            found = min(found, _SLICE_BYTES)
        return max(self.expert_scratch_bytes, found)

    def copy_scratch_bytes(self, device_type: str) -> int:
        """Return the same of a copy that drafts, whichever layers it is of."""
        assert self.copies is not None
        layouts = [self.layout, self.copies]
        if device_type == "cuda" and self.batch <= MOST_ROWS:
            layouts = [one.without_register_reads for one in layouts]
        return max(one.scratch_bytes(device_type, self.layers, head=self.has_head) for one in layouts)

    def held_bytes(self, placement: Placement) -> int:
        """Return what a placement takes of the device: the layers that stay, the ring, copies of the others, and the
        pool of experts."""
        held_bytes = self.bytes_of_layers(placement.resident_layers) + self.ring_bytes(placement)
        return held_bytes + self.copied_bytes(placement.streamed_layers) + self.pool_bytes(placement.pool_buffers)

    # --- experts

    @cached_property
    def experts(self) -> dict[int, ExpertBlocks]:
        """Return the experts of the layers that have some, by layer, and of a head's that are in the same pool."""
        own = {layer: one for layer, one in self.layout.experts.items() if layer in self.placement.layers}
        return own | dict(enumerate(self.head_experts if self.card == 0 else (), self.config.num_layers))

    @cached_property
    def num_experts(self) -> int:
        """Return the number of experts of all its layers."""
        return sum(one.num_experts for one in self.experts.values())

    @cached_property
    def expert_bytes(self) -> int:
        """Return the bytes of the largest expert, which a buffer of the pool holds."""
        return max((one.block.total_bytes for one in self.experts.values()), default=0)

    def pool_bytes(self, buffers: int | None) -> int:
        """Return what a pool of so many buffers takes of a card; None: of all experts."""
        return (self.num_experts if buffers is None else buffers) * self.expert_bytes

    @cached_property
    def expert_tokens(self) -> int:
        """Return how many tokens of prompts go through a layer's experts together: as many as give each enough rows,
        where pieces of prompts have fewer. 0: pieces go through them one by one, as they do over several cards."""
        if len(self.placements) > 1 or len(self.layers) < self.config.num_layers:
            return 0
        enough = [_EXPERT_ROWS * one.num_experts // one.chosen for one in self.config.mixtures]
        tokens = min(self.most_expert_tokens, max(enough, default=0))
        return tokens if tokens > self.chunk_tokens and self._decoding_bytes(tokens) else 0

    @cached_property
    def expert_scratch_bytes(self) -> int:
        """Return where prompts have experts of its layers decoded, unless all are elements."""
        stored = {place.encoding for one in self.layout.experts.values() for place in one.places.values()}
        if not self.most_expert_tokens or not stored - KIND_DTYPES.keys():
            return 0
        return self._decoding_bytes(max(self.expert_tokens, self.chunk_tokens))

    def _decoding_bytes(self, tokens: int) -> int:
        """Of passes of up to so many tokens; 0 where decoding does not pay."""
        rows = min(tokens, self.context_tokens)
        return max((one.scratch_bytes(rows, self.dtype.itemsize) for one in self.config.mixtures), default=0)

    @property
    def pool_share(self) -> float:
        """Return the share of the experts that the pools have room for; 1 where there are none."""
        buffers = self.placement.pool_buffers
        return 1.0 if buffers is None else buffers / self.num_experts

    @property
    def host_expert_bytes(self) -> int:
        """Return the host memory of the experts of cards that have no room for all of theirs."""
        return sum(HostArena.rounded(one.total_bytes) for one in self.host_experts.values())

    @property
    def host_experts(self) -> dict[int, ExpertBlocks]:
        """Those, by layer."""
        partial = [card.experts for card in self.cards if card.placement.pool_buffers is not None]
        return {layer: one for experts in partial for layer, one in experts.items()}

    def missed_bytes(self, rows: int) -> int:
        """Return what so many rows are expected to bring to one card, or all, of experts; a head reads each of them,
        too."""
        if len(self.placements) > 1:  # each of which has a share of its own
            return sum(card.missed_bytes(rows) for card in self.cards)
        used_bytes = sum(one.used(rows) * one.block.total_bytes for one in self.experts.values())
        return round(used_bytes * (1 - self.expected_hits))

    def missed_bytes_of_prompt(self, pieces: int) -> int:
        """Return what so many pieces of a prompt bring to one card of experts: of each layer once what is missing, for
        which others go that two layers at most have; or, where there is no room for a layer, all of it, and in every
        further piece what there is no room for."""
        buffers, counts = self.placement.pool_buffers, [one.num_experts for one in self.experts.values()]
        if buffers is None:
            return 0
        missing = self.num_experts - buffers
        brought = min(self.num_experts, missing + 2 * max(counts), 2 * missing)
        if buffers < max(counts):
            brought = sum(count + (pieces - 1) * max(0, count - buffers) for count in counts)
        return brought * self.expert_bytes

    @property
    def pool_room(self) -> float:
        """Return the share of the experts, beyond what a token takes of all layers but one, that there is room for."""
        buffers, chosen = self.placement.pool_buffers, [one.chosen for one in self.experts.values()]
        if buffers is None:
            return 1.0
        others = sum(chosen) - max(chosen)
        return max(0.0, (buffers - others) / (self.num_experts - others))

    @property
    def expected_hits(self) -> float:
        """Return the share of a token's experts that are expected in the pools; 1 where there are none.

        They keep what was used last, so that experts of a layer are still there behind all other layers only where
        there is more room than a token's experts of those take: of the rest, the root, or as runs of the model have
        measured. Measured with random routers:
        0, 0.32 and 0.77 with room for 4, 8 and 18 of 24 (8 in each of 3 layers, of which a token has 3), where it says
        0, 0.33 and 0.82. Published: 0.44, 0.62 and 0.79 of 0.18, 0.36 and 0.73 (512 in a layer), 0.9 and more of 0.4
        (Qwen3-30B-A3B), where it says 0.4, 0.6, 0.85 and 0.6.
        """
        return float(self.pool_room**self.hit_exponent)

    @property
    def experts_in_words(self) -> str:
        """Return one phrase: how many experts are on the device, and what is expected of that; nothing without any."""
        if not self.experts:
            return ""
        widened = sum(not one.as_stored for one in self.experts.values())
        dtype = DTYPE_KINDS[self.dtype].lower()
        experts = f"{self.num_experts} experts" + (" with the head's" if self.head_experts else "")
        kept = f", those of {counted(widened, 'layer')} in {dtype} and not as they are stored" if widened else ""
        if self.placement.pool_buffers is None:
            return f"all {experts} on the device{kept}"
        room = f"room for {self.placement.pool_buffers} of {experts} on the device"
        share, hits = 100 * self.pool_share, 100 * self.expected_hits
        return f"{room} ({share:.0f} %), expected hits {hits:.0f} %{kept}"

    # --- keys and values

    @cached_property
    def kv_layers_on_host(self) -> tuple[int, ...]:
        """Return the layers whose keys and values are in host memory."""
        kept = self.placement.resident_kv_layers
        return tuple(layer for layer in self.full_layers if layer not in kept) if self.on_host else ()

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """Return the layers that attend to everything. The others keep on the device what their windows reach, or their
        states."""
        attentions = self.config.attentions
        return tuple(layer for layer in self.layers if layer in attentions and attentions[layer].window is None)

    @cached_property
    def largest_kv_layer(self) -> tuple[int]:
        """Return the layer that keeps the most of a token, of those that attend to everything, if there are any."""
        return (max(self.full_layers or self.layers, key=self.config.kv_elements.__getitem__),)

    @property
    def pass_rows(self) -> int | None:
        """Return the most rows that a pass has of a sequence, and as many again as may be taken back; None for caches
        that keep all that they are given, as those of drafts, and those in which trees grow."""
        keeps_all = self.is_draft or self.copies is not None
        return None if keeps_all else self.chunk_tokens + self.window_tokens

    def kv_bytes_of(self, layers: Iterable[int], tokens: int) -> int:
        """Return what some layers keep of so many tokens of a sequence."""
        return tokens * sum(map(self.config.kv_elements.__getitem__, layers)) * self.dtype.itemsize

    @property
    def token_bytes(self) -> float:
        """Return what a token more of context takes of all sequences, wherever it is: keys and values, and states to go
        back to."""
        return self.batch * self.kv_bytes_of(self.full_layers, 1) + self.anchor_bytes / self.context_tokens

    @property
    def kv_block_bytes(self) -> int:
        """Return the bytes of a saved block of one sequence, of all layers, those of other machines, too, with the
        states behind it."""
        return BlockLayout.of(self.config.complete, self.dtype).nbytes

    def reserved_kv_bytes(self, layers: Iterable[int]) -> int:
        """Return what some layers reserve of the whole context."""
        tokens = Counter[int]()  # by what a token takes
        for layer in self.config.attentions.keys() & layers:
            reserved = self.config.attentions[layer].reserved_tokens(self.context_tokens, self.pass_rows)
            tokens[self.config.kv_elements[layer]] += reserved
        return self.batch * sum(each * count for each, count in tokens.items()) * self.dtype.itemsize

    @property
    def host_kv_bytes(self) -> int:
        """Return the host memory of the keys and values of the whole context that are not on the device."""
        return self.reserved_kv_bytes(self.kv_layers_on_host)

    def open_kv_bytes(self, layers: Iterable[int]) -> int:
        """Return the bytes of the newest blocks of layers whose cache is on the host, which are on the device."""
        return self.batch * self.kv_bytes_of(layers, host_io.ring_blocks(self.window_tokens) * BLOCK_TOKENS)

    @property
    def whole_kv_bytes(self) -> int:
        """Return the bytes of the KV cache of all that is kept of the context, wherever it is."""
        kept_bytes = self.reserved_kv_bytes(self.layers)
        if self.cache == "streaming":
            kept_bytes = self.batch * self.kv_bytes_of(self.layers, self.streaming_tokens)
        tree_tokens = num_blocks(self.tree_positions) * BLOCK_TOKENS
        return kept_bytes + self.batch * self.kv_bytes_of(self.layers, tree_tokens)

    @cached_property
    def kv_piece_bytes(self) -> int:
        """Return the bytes of a buffer of the ring that a cache on the host is streamed through."""
        overlapped = self.placement.kv_ring_buffers > host_io.KV_RING_BUFFERS
        return host_io.kv_piece_bytes(self.config, self.dtype, self.context_tokens, overlapped=overlapped)

    def kv_pieces(self, streamed_bytes: int) -> int:
        """Return how many copies bring so many bytes of a layer, of all sequences alike."""
        return self.batch * -(-streamed_bytes // (self.batch * self.kv_piece_bytes))

    @property
    def kv_ring_bytes(self) -> int:
        """Return the bytes of all buffers of that ring."""
        return self.placement.kv_ring_buffers * self.kv_piece_bytes

    def with_overlapped_kv_ring(self, num_cards: int) -> ModelPlan:
        """Return the same, of one card, with a ring of keys and values with which the links of all cards are busy at
        once. A card brings those of its next layer while the others attend, one after the other, to what their links
        bring; of n cards each needs room for (n - 1) / n of a layer, the piece that it attends to and one that
        arrives."""
        least = host_io.KV_RING_BUFFERS + 1
        ring = replace(self, placements=(replace(self.placement, kv_ring_buffers=least),))
        largest = self.streamed_kv_bytes(*self.largest_kv_layer, self.context_tokens - 1)
        buffers = max(least, 2 + -(-ring.kv_pieces(largest) * (num_cards - 1) // num_cards))
        return replace(self, placements=(replace(self.placement, kv_ring_buffers=buffers),))

    @property
    def prefill_workspace_bytes(self) -> int:
        """Return what a prefill reserves for one layer's keys and values, when it cannot borrow as much."""
        needed_bytes = self.reserved_kv_bytes(self.largest_kv_layer) // self.batch
        chosen_tokens = num_blocks(self.options.budget_tokens) * BLOCK_TOKENS
        return 0 if self.borrows and self.kv_bytes_of(self.layers, chosen_tokens) >= needed_bytes else needed_bytes

    @property
    def state_bytes(self) -> int:
        """Return what gated delta layers keep of all sequences, and what rows of steps bring of each layer of a draft,
        or of any one of a target."""
        of_layers = self.config, self.layers, self.dtype, self.state_window_tokens
        kept_bytes = self.batch * delta.state_bytes(*of_layers)
        if not self.is_draft and not self.verified:
            return kept_bytes
        spare = self.tree_positions if self.is_draft else None
        return kept_bytes + delta.step_bytes(*of_layers, batch=self.batch, spare_positions=spare)

    @property
    def state_window_tokens(self) -> int:
        """Return how many tokens behind the committed ones layers with states have room for. A draft's trees are
        cut where its paths end; steps of a retrieval verifier may go beyond what is asked for."""
        if self.is_copy or self.copies is not None:  # which hand over what they have
            return max(self.window_tokens, self.streaming_window_tokens, MOST_DELTA_DEPTH)
        if self.is_draft:
            return max(self.streaming_window_tokens, MOST_DELTA_DEPTH)
        return self.window_tokens + (MOST_LEVELS + 2 if self.verified else 0)

    @property
    def anchor_bytes(self) -> int:
        """Return the host memory of the states that sequences can be taken back to, which a copy's are not."""
        if self.is_copy:
            return 0
        return self.batch * delta.anchor_bytes(self.config, self.layers, self.dtype, self.context_tokens)

    @property
    def kv_parts(self) -> Parts:
        """Return what the KV cache takes of the device."""
        if len(self.placements) > 1:
            return sum((card.kv_parts for card in self.cards), Parts())
        if self.is_copy:
            return Parts({"states": self.state_bytes})
        if not self.on_host:
            chosen_bytes = self.retrieved_bytes if self.cache == "retrieval" else 0
            return Parts({"KV cache": self.whole_kv_bytes + chosen_bytes, "states": self.state_bytes})
        streamed = self.kv_layers_on_host
        return Parts(
            {
                "states": self.state_bytes,
                "KV of resident layers": self.reserved_kv_bytes({*self.layers}.difference(streamed)),
                "open KV blocks": self.open_kv_bytes(streamed),
                "ring of KV pieces": self.kv_ring_bytes if streamed else 0,
                "prefill workspace": self.prefill_workspace_bytes if streamed else 0,
            }
        )

    @cached_property
    def summaries_bytes(self) -> int:
        """Return what chunks are chosen by, where a retrieval verifier or a draft reads chunks of the cache."""
        sizes = {"chunk_size": self.options.chunk_size, "capacity_tokens": self.context_tokens, "batch": self.batch}
        return summaries_bytes(self.own_config, **sizes)

    @cached_property
    def retrieved_bytes(self) -> int:
        """Return the bytes of the chunks that are read, which lie on the device once more, and what they are chosen
        by."""
        sizes = {"budget_tokens": self.options.budget_tokens, "chunk_size": self.options.chunk_size}
        return self.summaries_bytes + retrieved_bytes(self.own_config, self.dtype, **sizes, batch=self.batch)

    @property
    def own_config(self) -> ModelConfig:
        """Return the model as if it had no other layers than those that it is about."""
        return replace(self.config, layers=tuple(map(self.config.layers.__getitem__, self.layers)))

    @property
    def recent_tokens(self) -> int:
        """Return how many of the newest tokens a streaming cache keeps: there are no more of them than the context
        has."""
        return min(self.options.recent_tokens, max(2, self.context_tokens))

    @property
    def streaming_window_tokens(self) -> int:
        """Return how many tokens in a row there may be behind a text: where trees are grown no more than they are deep,
        so that longer chains are cut; steps of a retrieval verifier may go beyond what is asked for."""
        in_a_row = min(self.window_tokens, MOST_DEPTH + 1) if self.tree_nodes else self.window_tokens
        return in_a_row + self.options.gamma_draft + MOST_LEVELS + 2

    @property
    def streaming_tokens(self) -> int:
        """Return how many tokens a streaming cache has room for."""
        return streaming_capacity_tokens(self.options.sink_tokens, self.recent_tokens, self.streaming_window_tokens)

    def streamed_kv_bytes(self, layer: int, length_tokens: int) -> int:
        """Return what a pass behind `length_tokens` tokens of each sequence streams for a layer whose cache is on the
        host: all full blocks."""
        return self.batch * self.kv_bytes_of((layer,), length_tokens // BLOCK_TOKENS * BLOCK_TOKENS)

    def streamed_kv(self, length_tokens: int) -> dict[int, int]:
        """Return the same of every layer whose cache is on the host, by layer."""
        return {layer: self.streamed_kv_bytes(layer, length_tokens) for layer in self.kv_layers_on_host}

    # --- what passes take

    @property
    def mixes(self) -> bool:
        """Return whether its passes read several prompts, and beside windows."""
        return self.step_rows is None and self.batch > 1 and not self.on_host

    @property
    def most_rows(self) -> int:
        """Return how many rows the largest pass has: of prompts, and of windows beside them."""
        return most_prompt_tokens(self.chunk_tokens, self.context_tokens) + self.batch * self.window_tokens

    @cached_property
    def workspace_bytes(self) -> int:
        """Return the bytes of the activations of the largest pass."""
        # A tree's step keeps its logits beside those that the pass makes.
        rows = self.batch * self.window_tokens if self.step_rows is None else 2 * self.step_rows
        sampled_rows = min(rows, max(MOST_FILTERED_ROWS, self.step_rows or 0))
        # A copy reads no prompts.
        context_tokens = rows if self.is_copy else self.context_tokens
        return workspace_bytes(
            self.config, self.dtype.itemsize, chunk_tokens=self.chunk_tokens, context_tokens=context_tokens,
            batch=self.batch, rows=rows, sampled_rows=sampled_rows, expert_tokens=self.expert_tokens,
            has_head=self.has_head, mixes=self.mixes,
            step_reach=self.context_tokens + self.tree_positions if self.is_copy else None,
        )  # fmt: skip
