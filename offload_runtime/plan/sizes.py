"""What a run is asked for, what it may take, and what it holds: its models, part by part, in bytes of device and host.

A request is the `RuntimeConfig` that `Runtime.load` takes, with a `DescribedModel` (an opened checkpoint is one) for
each model. A machine is the `MachineProfile` of one that need not be here. So a plan and a run cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.errors import BudgetError, ContextLengthError, OptionError
from offload_runtime.hardware import MachineProfile, load_profile, shipped_directory
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.heads import HeadConfig
from offload_runtime.options import require
from offload_runtime.plan.model import ModelPlan, Parts, Placement, all_resident
from offload_runtime.runners import graphs
from offload_runtime.runners.draft_kv import REWRITTEN_TOKENS
from offload_runtime.runners.head_kv import HEAD_CATCH_UP_TOKENS, hidden_store_rows
from offload_runtime.runners.model_runner import EXPERT_CHUNK_TOKENS, PREFILL_CHUNK_TOKENS
from offload_runtime.sizes import counted, format_bytes, format_bytes_up
from offload_runtime.speculation.ngram import MOST_PENDING_TOKENS
from offload_runtime.speculation.triforce import most_guess_rows, verifier_step_bytes
from offload_runtime.speculation.window import MOST_LEVELS
from offload_runtime.stream.device import LAZY_MODULE_BYTES, TYPICAL_CONTEXT_BYTES, within
from offload_runtime.weights.checkpoint import DescribedModel, share_vocabulary
from offload_runtime.weights.copies import COPY_BITS, MAKING_BYTES, copy_layout, rest_layout
from offload_runtime.weights.expert_hits import PUBLISHED_EXPONENT
from offload_runtime.weights.layout import ModelLayout
from offload_runtime.weights.loader import passing_bytes
from offload_runtime.weights.sources import describe_model, open_draft

# Sizes of trees for which room is planned unasked: a pass verifies them at hardly any cost where everything is on the
# device, and beside what is streamed, the more of it the more.
TREE_ROOMS = (32, 256, 512, 1024)
# The same of a copy of the target, each of whose steps takes a tenth of a pass or so.
COPY_TREE_ROOMS = (32, 64, 128, 256)
# Reserved where nobody says how much, and nothing grows on the host.
AUTO_CONTEXT_TOKENS = 8192
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# What is planned for where nothing else is known, and its name where plans are only compared by it.
COMMON_PROFILE, USUAL_CARD = "rtx4090", "a usual card"


class ShortageError(BudgetError):
    """A memory is too small for a plan: `memory` names it, by `missing_bytes`."""

    def __init__(self, message: str, memory: str, missing_bytes: int) -> None:
        super().__init__(message)
        self.memory, self.missing_bytes = memory, missing_bytes


def describe_models(config: RuntimeConfig) -> RuntimeConfig:
    """Return the same request, of models that are known by their configuration files. Errors as of `describe_model` and
    `share_vocabulary`."""
    request = replace(config, target=describe_model(config.target), draft=config.drafter)
    if request.draft != "the draft":
        return request
    draft = open_draft(config.draft, request.target, describe_model, config.target)
    share_vocabulary(request.target, draft)
    return replace(request, draft=draft)


def common_figures() -> MachineProfile:
    """Return the machine to choose by where nothing is known of the one that is there."""
    return replace(load_profile(shipped_directory() / f"{COMMON_PROFILE}.toml"), name=USUAL_CARD)


def resolve_dtype(name: str, source: DescribedModel, device_type: str) -> torch.dtype:
    """Turn `auto`, `bf16`, `fp16` or `fp32` into a dtype; `auto` is the model's own on a GPU and fp32 on a CPU."""
    if name == "auto":
        return source.native_dtype if device_type == "cuda" else torch.float32
    return next(dtype for dtype, known in DTYPE_NAMES.items() if known == name)


def resolve_context(tokens: int | None, config: ModelConfig, *, kv: str) -> int:
    """Return how many tokens to reserve for: asked for, or the model's maximum, up to 8192 unless the KV cache grows on
    the host."""
    if tokens is None:
        longest = config.max_position_embeddings
        return longest if kv == "host" else min(longest, AUTO_CONTEXT_TOKENS)
    if tokens < 2:
        raise OptionError(f"context must hold at least a token of the prompt and a new one: 2, not {tokens}")
    longest = longest_context(config)
    if tokens > longest:
        raise ContextLengthError(
            f"a context of {tokens} tokens is more than the {longest} that the model was made for: lower --context, or "
            "set a RoPE scaling in the model's config.json"
        )
    return tokens


def longest_context(config: ModelConfig) -> int:
    """Return how many tokens the model's positions reach, its RoPE scaling included."""
    longest = config.max_position_embeddings
    for rope in (rope.parameters for rope in config.ropes):
        if rope["rope_type"] == "yarn":
            original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            longest = max(longest, int(original * rope["factor"]))
        elif rope["rope_type"] == "dynamic":
            longest = max(longest, int(config.max_position_embeddings * rope["factor"]))
    return longest


# --- limits


@dataclass(frozen=True)
class CardLimit:
    """Says the most memory that a run may take of one card, None for no limit, and what of it is taken already;
    `link_ratio` is the bandwidth of its link over that of the machine's first card."""

    device_bytes: int | None
    reserved_bytes: int
    link_ratio: float = 1.0


@dataclass(frozen=True)
class MemoryLimits:
    """Says the most memory that a run may take, this process included; None: no limit.

    `ram_bytes` are of the host, and of these `pinned_bytes` page-locked, if `page_locks` says that the device's copies
    need that at all; `transfers_through_host` that rows pass through it from card to card. The names say whose limits
    these are, for messages.
    """

    cards: tuple[CardLimit, ...]
    ram_bytes: int
    ram_name: str
    pinned_bytes: int | None
    pinned_name: str
    page_locks: bool = True
    device_name: str = "device memory"
    transfers_through_host: bool = False

    @property
    def device_bytes(self) -> int | None:
        """Return what all cards may take together; None where one has no limit."""
        found = [card.device_bytes for card in self.cards if card.device_bytes is not None]
        return sum(found) if len(found) == len(self.cards) else None

    def of_card(self, card: int) -> MemoryLimits:
        """Return the same of one of several cards alone, whose name says which it is."""
        return replace(self, cards=self.cards[card : card + 1], device_name=f"{self.device_name} on card {card}")


def limits_of(machine: MachineProfile, request: RuntimeConfig) -> MemoryLimits:
    """Return what a run may take of a machine that need not be here: of the cards that are named, or of all of them.

    Raises:
        BudgetError: More device, host or page-locked memory is asked for than there is.
        OptionError: More cards are named than there are, or not as many limits as cards.
    """
    name, other = machine.require_gpu().name, "choose another --profile"
    names = [f"cuda:{card}" for card in range(machine.gpus)] if request.device == "auto" else request.devices
    fine = len(names) <= machine.gpus or request.device_type == "cpu"
    require(fine, f"--devices names {len(names)} cards and {name} has {machine.gpus}: name fewer, or {other}")
    assert machine.vram_bytes is not None
    reserved_bytes = machine.vram_reserved_bytes or TYPICAL_CONTEXT_BYTES + LAZY_MODULE_BYTES
    cards = []
    for asked, ratio in zip(request.vram_of_cards(len(names)), machine.link_ratios(names), strict=True):
        device_bytes = within("--vram", asked, machine.vram_bytes, f"of a card of {name}", other)
        others_bytes = machine.vram_others_bytes or 0 if asked is None else 0
        cards.append(CardLimit(device_bytes - others_bytes, reserved_bytes, ratio))
    ram_bytes = within("--ram", request.ram, machine.ram_bytes, f"of {name}", other)
    pinned_bytes, pinned_name = machine.pinnable_bytes, name
    if request.pinned is not None:
        pinned_name, there_bytes = "--pinned", machine.pinnable_bytes or machine.ram_bytes
        pinned_bytes = within(pinned_name, request.pinned, there_bytes, f"that {name} page-locks", other)
    ram_name = "--ram" if ram_bytes < machine.ram_bytes else "the host memory"
    return MemoryLimits(
        tuple(cards), ram_bytes, ram_name, pinned_bytes, pinned_name,
        transfers_through_host=request.device_type != "cpu",
    )  # fmt: skip


# Python, torch and the CUDA libraries of one process, which no ledger counts; and how much of it there is while weights
# are read, before kernels are compiled and library modules are loaded (H200, torch 2.11, a 70B in Q4_K_M: 1.62 GB where
# all of it was on the card, 1.57 beside streamed layers; 0.81 and 0.82 while it was read).
PROCESS_BYTES, _LOADING_PROCESS_BYTES = 1_620_000_000, 840_000_000

_PAGE_LOCKED = (
    "streamed layers", "experts in host memory", "embedding", "staging ring", "KV cache", "pieces to write KV through",
    "rows between cards",
)  # fmt: skip


@dataclass(frozen=True)
class RunPlan:
    """A run as it was asked for and as it is placed: what lives where, in bytes.

    A retrieval verifier, if it `has_verifier`, is the target over retrieved chunks, between the draft and the target;
    `reason` says why it has one or not, when `auto` decided it, and `draft_note` who drafts where that was left open.
    Trees of `tree_room` nodes have room.

    Layers may be dealt out to several cards: then device memory is that of all of them together, and `cards` are plans
    of what each has. The draft and what lies around the layers are on the first.
    """

    request: RuntimeConfig
    limits: MemoryLimits
    target: ModelPlan
    draft: ModelPlan | None = None
    has_verifier: bool = False
    tree_room: int = 0
    draft_note: str = ""
    reason: str = ""
    passing_bytes: int = 0  # of host memory that weights pass through while they are read

    @property
    def num_cards(self) -> int:
        """Return how many cards the target's layers are dealt out to."""
        return len(self.target.placements)

    @cached_property
    def cards(self) -> tuple[RunPlan, ...]:
        """Return what each card has of it; the draft is on the first, but a copy where its layers are."""
        if self.num_cards == 1:
            return (self,)

        def card(one: ModelPlan) -> RunPlan:
            draft = None if one.card else self.draft
            if self.draft is not None and self.draft.is_copy:
                draft = self.draft.of_card(one)
            return replace(self, target=one, draft=draft, limits=self.limits.of_card(one.card))

        return tuple(map(card, self.target.cards))

    def with_placements(self, *placements: Placement) -> RunPlan:
        """Return the same with the target's layers elsewhere, of each card."""
        target, draft = replace(self.target, placements=placements), self.draft
        return replace(self, target=target, draft=draft.copying(target) if draft and draft.is_copy else draft)

    @property
    def placement(self) -> Placement:
        """Return where the target's layers are."""
        return self.target.placement

    @property
    def drafter_in_words(self) -> str:
        """Return who drafts, for people."""
        if self.draft is not None and self.draft.is_copy:
            return f"a copy of its streamed layers in {COPY_BITS} bits"
        head = self.draft.head if self.draft else None
        return f"the {head.title} head" if head else "the draft"

    @property
    def drafter(self) -> str:
        """Return who proposes, if it is not the retrieval verifier: `none`, `ngram` or `the draft`."""
        return "none" if self.request.speculation.mode == "none" else self.request.proposed_by

    @property
    def on_cpu(self) -> bool:
        """Return whether device memory is the host's."""
        return self.request.device_type == "cpu"

    # --- of the device

    @cached_property
    def device(self) -> Parts:
        """Return the device memory, part by part."""
        return self.needed + Parts({"CUDA graphs of passes": self.captured_bytes})

    @cached_property
    def captured_bytes(self) -> int:
        """CUDA graphs of the target's passes, where all that these need is on the device, with room for them; none yet
        where passes cross from card to card, or come back to it from other machines, or a head reads what these say."""
        target, head = self.target, self.draft.head if self.draft else None
        crosses = self.num_cards > 1 or len(target.layers) < target.config.num_layers
        crosses = crosses or len(target.config.strides) > 1
        is_read_elsewhere = target.config.is_part and (head is not None or target.config.num_streams)
        comes_later = self.placement.streamed_layers or target.kv_layers_on_host
        if self.on_cpu or crosses or is_read_elsewhere or comes_later:
            return 0
        nbytes = graphs.captured_pass_bytes(target.config, target.dtype.itemsize, target.batch)
        limit_bytes = self.limits.device_bytes
        return nbytes if limit_bytes is None or self.needed.total() + nbytes <= limit_bytes else 0

    @cached_property
    def needed(self) -> Parts:
        """Return the device memory of what there must be."""
        if self.num_cards > 1:
            return sum((card.needed for card in self.cards), Parts())
        target, draft, placement = self.target, self.draft, self.placement
        return +Parts(
            {
                "CUDA context": self.limits.cards[0].reserved_bytes,
                **target.head_parts,
                "resident layers": target.bytes_of_layers(placement.resident_layers),
                "ring of layers": target.ring_bytes(placement),
                "experts": target.pool_bytes(placement.pool_buffers),
                **target.kv_parts,
                "retrieval cache": self.verifier_bytes if self.has_verifier else 0,
                "draft weights": self.draft_weight_bytes,
                "draft KV cache": 0 if draft is None else draft.kv_parts.total(),
                "hidden states for the draft": self.hidden_bytes,
                "CUDA graphs": self.graph_bytes,
                "decoded matrices": self.scratch_bytes,
                "workspace": self.workspace_bytes,
            }
        )

    @cached_property
    def device_bytes(self) -> int:
        """Return the peak of the device's memory."""
        return self.device.total()

    @property
    def models(self) -> list[ModelPlan]:
        """Return the target, and the draft if there is one here."""
        return [model for model in (self.target, self.draft) if model is not None]

    @property
    def scratch_bytes(self) -> int:
        """Return what matrices are decoded into, of both models, which work side by side."""
        draft, device_type = self.draft, self.request.device_type
        if draft is not None and draft.is_copy:
            own_bytes = self.target.copy_scratch_bytes(device_type)
        else:
            own_bytes = 0 if draft is None else draft.scratch_bytes(device_type)
        return self.target.scratch_bytes(device_type) + own_bytes

    @property
    def draft_weight_bytes(self) -> int:
        """Return what the draft has of its own."""
        draft = self.draft
        if draft is None:
            return 0
        if draft.is_copy:
            return self.target.copied_bytes(self.placement.streamed_layers)
        return draft.held_bytes(draft.placement) + draft.head_parts.total()

    @property
    def workspace_bytes(self) -> int:
        """Return the activations of both models on a card. They take turns on one stream and share the allocator's
        blocks, unless the draft runs beside a pass."""
        each = [model.workspace_bytes for model in self.models]
        if self.draft is not None and self.draft.is_copy and not self.on_cpu:
            return each[0] + max(each[1], MAKING_BYTES)
        return sum(each) if self.draft is not None and self.draft.tree_positions else max(each)

    @property
    def hidden_bytes(self) -> int:
        """Return what the target's passes keep for a head, of all rows of prompts and windows unless it takes the place
        of their residual streams, of what was accepted and of rows of graphs, what a head observes together, which is
        joined for that, and what of it steps read."""
        draft, target = self.draft, self.target
        if draft is None or draft.head is None:  # twice, as they are joined
            streams_bytes = target.config.num_streams * target.config.hidden_size * target.dtype.itemsize
            return 2 * target.most_rows * streams_bytes
        rows = target.batch * target.window_tokens + graphs.CAPTURED_PARTS * graphs.CAPTURED_ROWS
        rows += hidden_store_rows(target.batch, draft.tree_positions) + (target.batch + 1) * MOST_PENDING_TOKENS
        rows += 0 if draft.head.taps_in_place else target.most_rows
        return rows * draft.head.width * target.dtype.itemsize

    @property
    def graph_bytes(self) -> int:
        """CUDA graphs of the draft's and the verifier's steps on a card."""
        draft, nbytes = self.draft, graphs.step_graph_bytes(len(self.target.layers)) if self.has_verifier else 0
        if draft is not None:
            first_rows = HEAD_CATCH_UP_TOKENS if draft.is_head else REWRITTEN_TOKENS
            rows, batch = draft.batch * max(first_rows, draft.block_rows), draft.batch
            if self.has_verifier:
                rows = most_guess_rows(draft.options.gamma_draft, batch, others=REWRITTEN_TOKENS)
            trees, element_bytes = draft.tree_positions > 0, draft.dtype.itemsize
            nbytes += graphs.draft_graph_bytes(draft.config, element_bytes, rows=rows, batch=batch, trees=trees)
        return 0 if self.on_cpu else nbytes

    @property
    def verifier_bytes(self) -> int:
        """Return what a retrieval verifier takes but for graphs: chunks, what they are chosen by, and what steps
        need."""
        return sum(card.verifier_step_bytes + card.target.retrieved_bytes for card in self.cards)

    @property
    def verifier_step_bytes(self) -> int:
        """Return what of this is on a card for the window and what a step computes on its way, of all sequences."""
        target, rows = self.target, self.target.batch
        if self.request.proposed_by == "the draft":  # of the newest tokens as many as there are levels are written anew
            rows = most_guess_rows(target.options.gamma_draft, target.batch, others=1 + MOST_LEVELS)
        sizes = {"rows": rows, "far_chunks": target.context_tokens // target.options.chunk_size, "batch": target.batch}
        return verifier_step_bytes(target.config, target.dtype.itemsize, **sizes, has_head=target.has_head)

    # --- of the host

    @cached_property
    def host(self) -> Parts:
        """Return the host memory once the models are loaded, at the longest context, part by part."""
        target, placement, rings = self.target, self.placement, self.target.placements  # each card has its own
        staged_bytes = target.host_bytes_of_layers(placement.staged_layers)
        staged_kv_bytes = target.reserved_kv_bytes(placement.staged_kv_layers)
        return +Parts(
            {
                "streamed layers": target.host_bytes_of_layers(placement.streamed_layers) - staged_bytes,
                "staged layers": staged_bytes,
                "experts in host memory": target.host_expert_bytes,
                "embedding": target.host_embedding_bytes,
                "staging ring": sum(one.h2d_ring.nbytes for one in rings),
                "KV cache": target.host_kv_bytes - staged_kv_bytes,
                "staged KV cache": staged_kv_bytes,
                "states to go back to": sum(one.anchor_bytes for one in self.models),
                "pieces to write KV through": sum(one.d2h_ring.nbytes for one in rings),
                "rows between cards": self.transfer_bytes,
                # Of a CPU, whose memory is the host's.
                "all that a GPU would hold": self.device_bytes if self.on_cpu else 0,
                "rows between machines": self.message_bytes,
                "Python and libraries": PROCESS_BYTES,
            }
        )

    @property
    def message_bytes(self) -> int:
        """Return what the largest pass takes of the host where other machines have layers of the target: its rows
        twice, and so what a head reads of them."""
        target, head = self.target, self.draft.head if self.draft else None
        streams = 1 + target.config.num_streams
        streams += sum(target.config.own_number(tap) < 0 for tap in (head.taps if head else ()))
        rows_bytes = target.most_rows * target.config.hidden_size * target.dtype.itemsize
        return 2 * streams * rows_bytes if target.config.is_part else 0

    @property
    def transfer_bytes(self) -> int:
        """Return the page-locked memory that rows pass through: a buffer for each piece of a pass, for each further
        card one for where its rows are, and one for each place on these that a head reads; the allocator rounds them up
        to powers of two. Several prompts of a pass have together as many pieces as the longest, and all but one of them
        and the windows one more."""
        if self.num_cards == 1 or not self.limits.transfers_through_host:
            return 0
        target, config = self.target, self.target.config
        rows = min(target.chunk_tokens, target.context_tokens)
        head = self.draft.head if self.draft else None
        taps = head.taps if head else ()
        streams = 1 + sum(target.owners[tap] > 0 for tap in taps if tap < config.num_layers)
        sizes = [config.hidden_size * target.dtype.itemsize] * streams
        sizes += [8 * config.num_angles + 32] * (self.num_cards - 1)
        cut = 2 if config.deltas else 0  # behind what comes before a prompt, and at the last anchor in it
        pieces = -(-target.context_tokens // rows) + (target.batch * (1 + cut) if target.mixes else cut)
        return pieces * sum(1 << (rows * size - 1).bit_length() for size in sizes)

    @cached_property
    def loading(self) -> Parts:
        """Return the host memory while the target's weights are read, part by part, or the draft's, if that is more."""
        streamed = self.placement.streamed_layers
        held_bytes = self.target.layout.total_bytes - self.target.bytes_of_layers(streamed)
        if self.draft is not None:
            held_bytes += self.draft_weight_bytes if self.draft.is_copy else self.draft.layout.total_bytes
        held_bytes -= self.target.host_embedding_bytes
        held_bytes -= sum(one.total_bytes for one in self.target.host_experts.values())
        return +Parts(
            {
                "streamed layers": self.target.host_bytes_of_layers(streamed),
                "experts in host memory": self.target.host_expert_bytes,
                "embedding": self.target.host_embedding_bytes,
                "weights on their way": self.passing_bytes,
                "weights that a GPU would hold": held_bytes if self.on_cpu else 0,
                "Python and libraries": _LOADING_PROCESS_BYTES,
            }
        )

    @cached_property
    def host_bytes(self) -> int:
        """Return the peak of host memory."""
        return max(self.host.total(), self.loading.total())

    @property
    def short_of_host_bytes(self) -> int:
        """Return what of that peak is more than the run may take; 0 where it fits."""
        return max(0, self.host_bytes - self.limits.ram_bytes)

    @property
    def page_locked(self) -> Parts:
        """Return what of host memory is to be page-locked, states where that has no limit alone."""
        names = (*_PAGE_LOCKED, *(["states to go back to"] if self.limits.pinned_bytes is None else []))
        return Parts({name: self.host[name] for name in names if self.limits.page_locks})

    @property
    def pinned_bytes(self) -> int:
        """Return the peak of page-locked host memory; while weights are read, pieces of them are locked in what is left
        of the limit."""
        return self.page_locked.total()

    # --- what of it moves, and how

    @cached_property
    def streamed_bytes(self) -> int:
        """Return the bytes that a pass at the full context brings over the link."""
        target = self.target
        kv_bytes = sum(target.streamed_kv(target.context_tokens - 1).values())
        return target.bytes_over_link(self.placement.streamed_layers) + kv_bytes + target.missed_bytes(target.batch)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Return the layers that keep keys and values, which those with states do not."""
        return tuple(layer for layer in self.placement.layers if layer in self.target.config.attentions)

    @property
    def resident_kv_layers(self) -> tuple[int, ...]:
        """Return the layers whose keys and values stay on the device."""
        return tuple(layer for layer in self.kv_layers if layer not in self.target.kv_layers_on_host)

    @property
    def is_staged(self) -> bool:
        """Return whether anything is streamed from pageable memory."""
        return bool(self.placement.staged_layers or self.placement.staged_kv_layers)


def make_plan(request: RuntimeConfig, limits: MemoryLimits, *, tree_nodes: int) -> RunPlan:
    """Return what both models will take with room for trees of `tree_nodes`, nothing placed yet. Asks nothing of the
    device.

    Raises:
        OptionError, ContextLengthError: The request's element type, context, window or caches cannot be.
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
    _check_experts(request, layout)
    chunk_tokens = PREFILL_CHUNK_TOKENS[request.device_type]
    assert request.max_batch is not None, "it is chosen by then"
    target = ModelPlan(
        config, layout, chunk_tokens, tokens, proposed + 1, request.max_batch, placements, request.speculation,
        hit_exponent=request.target.hit_exponent or PUBLISHED_EXPONENT,
        most_expert_tokens=EXPERT_CHUNK_TOKENS[request.device_type],
    )  # fmt: skip
    draft = None
    if request.drafts_itself:
        whole = _layout(request, request.target, dtype)
        rest = rest_layout(whole, config, request.target.uncoded)
        target = replace(target, copies=copy_layout(whole), rest=rest, whole=rest and whole, tree_nodes=tree_nodes)
        draft = _plan_copy(request, target)
    elif request.proposed_by == "the draft":
        draft = _plan_draft(request, target, tree_nodes)
    # A head's experts join the target's where its buffers hold them; larger ones would leave room for fewer of all.
    if draft is not None and draft.is_head and 0 < draft.expert_bytes <= target.expert_bytes:
        target = replace(target, head_experts=tuple(draft.experts.values()))
        draft = replace(draft, placements=(replace(draft.placement, pool_buffers=0),))
    plans = [(request.target, target)]
    if draft is not None and not draft.is_copy:
        plans.append((request.draft, draft))
    passing = max(passing_bytes(source, plan.layout) for source, plan in plans)
    return RunPlan(request, limits, target, draft, tree_room=tree_nodes, passing_bytes=passing)


def check_experts(request: RuntimeConfig) -> None:
    """Refuse a pool that is too small for a token, and options about experts where the target has none; asks nothing of
    the machine. Raises `OptionError`, `BudgetError`, and as `describe_model`."""
    if request.expert_pool is not None or request.cpu_share is not None:
        model = describe_model(request.target)
        dtype = resolve_dtype(request.dtype, model, request.device_type)
        _check_experts(request, _layout(request, model, dtype))


def _check_experts(request: RuntimeConfig, layout: ModelLayout) -> None:
    size, experts = request.expert_pool, layout.experts.values()
    for option, value in (("--expert-pool", size), ("--cpu-share", request.cpu_share)):
        require(value is None or bool(experts), f"{option} does nothing for a model without experts: drop it")
    if size is None:
        return
    least, each_bytes = max(one.chosen for one in experts), max(one.block.total_bytes for one in experts)
    if size < least * each_bytes:
        chosen = f"{counted(least, 'expert')} of {format_bytes(each_bytes)}, which a token goes through in a layer"
        raise BudgetError(
            f"--expert-pool {format_bytes(size)} has no room for {chosen}: raise it to "
            f"{format_bytes_up(least * each_bytes)}"
        )


def _layout(request: RuntimeConfig, model: DescribedModel, dtype: torch.dtype, *, coded: bool = False) -> ModelLayout:
    """How weights lie in memory: of quantised files as they are stored, if nothing else is asked for, but on a CPU,
    which has no link and would decode for every token what it can decode once."""
    decoded = request.weights == "decoded" or (request.weights == "auto" and request.device_type == "cpu")
    return (model.as_decoded if decoded else model).layout(dtype, coded=coded)


def _plan_copy(request: RuntimeConfig, target: ModelPlan) -> ModelPlan:
    """Plan of copies of the target's layers that draft. Raises `OptionError` where there cannot be any."""
    _check_idle_options("a copy of the target", "shares its KV cache", target.options)
    named, copies = "--draft self", target.copies
    assert copies is not None
    share = sum(copies.layer_bytes) / sum(target.layout.layer_bytes)
    for fine, why, remedy in (
        (not target.layout.experts, "a copy of experts would be far larger than what a token needs of them",
         "take --draft auto"),
        (share <= _MOST_COPY_SHARE, f"a copy in {COPY_BITS} bits would be {share:.0%} of the layers as they are, whose "
         "place on the card is better taken by these themselves", "take --draft auto"),
        (request.kv != "host", "the copy reads the target's KV cache on the card, not in host memory",
         "drop --kv host, or take --draft auto"),
        (request.resident_layers != target.config.num_layers, _NOTHING_STREAMED,
         f"lower --resident-layers (now {request.resident_layers}), or take --draft auto"),
    ):  # fmt: skip
        require(fine, f"{named}: {why}: {remedy}")
    rows = max(graphs.COPY_STEP_ROWS, target.batch)
    draft = replace(target, cache="target", copies=None, rest=None, whole=None, most_expert_tokens=0, step_rows=rows)
    return draft.copying(target)


# Of a layer's bytes, what its copy may take: of Q6_K it is 69 %, of Q5_K 82.
_MOST_COPY_SHARE = 0.75
_NOTHING_STREAMED = "all layers are on the card as they are, and there is nothing to copy"


def check_copy(plan: RunPlan) -> None:
    """Refuse copies where nothing is streamed. Raises `OptionError`."""
    idle = plan.draft is not None and plan.draft.is_copy and not plan.placement.streamed_layers
    require(not idle, f"--draft self: {_NOTHING_STREAMED}: take --draft auto")


def _plan_draft(request: RuntimeConfig, target: ModelPlan, tree_nodes: int) -> ModelPlan:
    """Plan of a draft model. A full cache ends where the draft's own positions do.

    Raises:
        OptionError: The cache that was asked for needs positions that the draft does not have, or would retrieve more
            than there can be; or trees were asked for and the cache is one of retrieved chunks.
    """
    config, options, context = request.draft.config(), request.speculation, target.context_tokens
    longest, cache, layout = longest_context(config), options.draft_cache, _layout(request, request.draft, target.dtype)
    if isinstance(config, HeadConfig):
        _check_head_options(config, options)
        # What makers write of their heads is what they were trained with, 2048 beside a target of 131072; rotations are
        # relative, and what a head guesses too far off is not accepted.
        longest, cache = context, "full"
        if "lm_head" not in config.owned:
            layout = replace(layout, lent=target.layout.head.tensors[0])
    elif cache == "auto":
        fits = context <= longest and options.budget_tokens <= context and not tree_nodes
        fits_all = config.deltas or context <= min(longest, AUTO_CONTEXT_TOKENS)  # most layers keep nothing of a token
        cache = "full" if fits_all else "retrieval" if fits else "streaming"
    plan = replace(
        target, config=config, layout=layout, cache=cache, most_expert_tokens=0,
        placements=(all_resident(range(config.num_layers)),), tree_nodes=tree_nodes,
        context_tokens=min(context, longest) if cache == "full" else context,
    )  # fmt: skip
    plan = replace(plan, step_rows=max(graphs.STEP_ROWS, target.batch * max(1, plan.block_rows)))
    kept, retrieves = plan.streaming_tokens, cache == "retrieval"
    for fine, why, remedies in (
        (cache != "streaming" or not config.deltas,
         "a draft with gated delta layers cannot let go of tokens, which are in its states",
         "use --draft-cache full or retrieval"),
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


def _check_head_options(head: HeadConfig, options: SpeculationOptions) -> None:
    """Refuse what a head cannot do, and what nothing would look at beside one. Raises `OptionError`."""
    name = f"the {head.title} head"
    why = "drafts from what passes of the target keep, and those of a retrieval verifier keep nothing"
    require(options.mode != "triforce", f"--speculation triforce: {name} {why}: take --speculation chain")
    _check_idle_options(name, "has few layers, whose keys and values all have room", options)


def _check_idle_options(name: str, why: str, options: SpeculationOptions) -> None:
    """Refuse options about a cache of few tokens, and about TriForce, beside a draft that has neither. Raises
    `OptionError`."""
    usual = SpeculationOptions()
    require(options.draft_cache in ("auto", "full"), f"--draft-cache {options.draft_cache}: {name} {why}: drop it")
    for one in ("sink_tokens", "recent_tokens", "chunk_size", "budget_tokens", "gamma_draft", "refresh_steps"):
        fine = getattr(options, one) == getattr(usual, one)
        require(fine, f"--{one.replace('_', '-')} does nothing with {name}: drop it")
