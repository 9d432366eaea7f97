"""From opened checkpoints and a plan to models that are ready to run, weights and KV caches in their places.

What could not be page-locked (`StagedMemory`) crosses rings: layers spread among those that could, keys and values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice

import torch
from offload_runtime_kernels.experts_cpu import ExpertsCpu, NoCpuShare, load_experts_library
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS
from offload_runtime_kernels.linear import LIBRARY_ROWS, TILE_ROWS

from offload_runtime.cache.device import KVCache, StreamingDraftCache
from offload_runtime.cache.host import HostKVCache
from offload_runtime.cache.host_io import HostKVCard
from offload_runtime.cache.retrieval import RetrievedDraftCache
from offload_runtime.core import Batch, TokenTree
from offload_runtime.errors import BudgetError
from offload_runtime.files import user_directory
from offload_runtime.hardware.bench import usable_cores
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.experts import Experts
from offload_runtime.models.layers import ExpertStore, LayerWeights, Weight, Weights
from offload_runtime.models.rope import RopeTable
from offload_runtime.options import require
from offload_runtime.plan.model import ModelPlan, Placement
from offload_runtime.plan.search import place_staged, with_staging_rings
from offload_runtime.plan.sizes import RunPlan
from offload_runtime.runners import graphs
from offload_runtime.runners.head_decoder import HeadDecoder
from offload_runtime.runners.model_runner import WARM_UP_ROWS, CapturedPasses, Decoder, ModelRunner, RowsDecoder
from offload_runtime.sampling import WARM_UP_SAMPLINGS, SlotSampling, sample
from offload_runtime.sizes import counted, format_bytes
from offload_runtime.stream import staging
from offload_runtime.stream.arena import HostArena, PageableMemory, Registrar, require_readable_arenas
from offload_runtime.stream.copy_engine import CopyEngine, CopyQueues, measure_link_gbps
from offload_runtime.stream.cpu_experts import CpuExperts
from offload_runtime.stream.device import Card, DeviceBudget, LayerPartition, current_device
from offload_runtime.stream.expert_pool import ExpertPool, ExpertUnits, ResidentExperts
from offload_runtime.stream.queue import CardRing, LayerStreamer
from offload_runtime.weights.checkpoint import CheckpointSource, SharedVocabulary
from offload_runtime.weights.encoding import StackedWeight
from offload_runtime.weights.layout import EMBEDDING, ExpertBlocks
from offload_runtime.weights.loader import HostWeights, load_weights


@dataclass(frozen=True)
class StagedMemory:
    """Says where everything is as it turned out, and the rings that what could not be page-locked crosses.

    `registrar` page-locks; None where the device's copies need no locked memory. What is staged crosses `h2d` to the
    device and `d2h` from there, both ways by `pageable`; without `h2d` nothing is staged, without `d2h` nothing that is
    written. These are the memory of the rings of the placement, page-locked as far as the system allows: at least two
    pieces of each.
    """

    placement: Placement
    registrar: Registrar | None = None
    h2d: HostArena | None = None
    d2h: HostArena | None = None
    pageable: PageableMemory = field(default_factory=PageableMemory)

    @property
    def rings(self) -> list[tuple[HostArena, staging.RingShape]]:
        """Return those that there are: memory and pieces."""
        rings = (self.h2d, self.placement.h2d_ring), (self.d2h, self.placement.d2h_ring)
        return [(arena, shape) for arena, shape in rings if arena is not None]

    def queue(self, engine: CopyEngine, *, to_host: bool = False) -> CopyEngine:
        """Return the queue over `engine` that stages what is not page-locked on its way to the device, or keys and
        values on theirs to the host; closing it closes `engine`."""
        arena, shape = (self.d2h, self.placement.d2h_ring) if to_host else (self.h2d, self.placement.h2d_ring)
        if arena is None:
            return engine
        make = staging.StagingWriteEngine if to_host else staging.StagingCopyEngine
        pieces = list(arena.buffer[: shape.nbytes].view(shape.num_pieces, -1))
        return make(engine, pieces, self.pageable, num_threads=staging.staging_threads(usable_cores()))

    def close(self) -> None:
        """Give the rings' memory back. Nothing may be copying any more."""
        for arena, _ in self.rings:
            arena.close()


def locked_shares(weights: HostWeights, plan: ModelPlan) -> list[int | None]:
    """Return the page-locked memory to plan each card's share of the loaded layers by where the system has refused
    some, so that no card is left without; None where it has locked all that was planned."""
    cards = plan.cards
    if not _refused(weights, plan.placement):
        return [None] * len(cards)
    locked_bytes = sum(arena.pinned_bytes for arena in weights.layers.values())
    wanted = [card.host_bytes_of_layers(card.placement.streamed_layers) for card in cards]
    return [locked_bytes * nbytes // max(1, sum(wanted)) for nbytes in wanted]


def lock_layers(
    weights: HostWeights, plan: ModelPlan, registrar: Registrar | None, undo: ExitStack, *, locked_bytes: int | None
) -> StagedMemory:
    """Settle which of the loaded layers are page-locked, and make the rings for what of them is not, if anything.

    Loading has locked what was planned. Where the system refused some of it, the `locked_bytes` that it allowed are the
    limit to plan by again, and locks are moved so that locked and staged layers alternate. What `undo` does gives the
    rings back.

    Raises:
        BudgetError: The system does not even lock enough for the rings.
    """
    placement = plan.placement
    if registrar is None:
        return StagedMemory(placement)
    if locked_bytes is not None:
        # Where not even a layer was locked a ring may be: it is smaller.
        placement = place_staged(plan, max(locked_bytes, with_staging_rings(plan, 0).ring_bytes))
    elif not placement.staged_layers and not placement.staged_kv_layers:
        return StagedMemory(placement, registrar)
    h2d, d2h = HostArena(placement.h2d_ring.nbytes, name="the ring to stage layers through"), None
    if placement.d2h_ring.num_pieces:
        d2h = HostArena(placement.d2h_ring.nbytes, name="the pieces to write the KV cache through")
    memory = StagedMemory(placement, registrar, h2d, d2h)
    undo.callback(memory.close)
    _move_locks(weights, memory, registrar)
    # A lock that was given up and is refused now leaves a layer staged.
    staged = sorted({*placement.staged_layers, *_refused(weights, placement)})
    for index in staged:
        arena = weights.layers[index]
        memory.pageable.enter(arena.buffer[arena.pinned_bytes :])
    h2d_ring, d2h_ring = _locked_part(h2d, placement.h2d_ring), _locked_part(d2h, placement.d2h_ring)
    settled = replace(placement, staged_layers=tuple(staged), h2d_ring=h2d_ring, d2h_ring=d2h_ring)
    return replace(memory, placement=settled)


def _locked_part(arena: HostArena | None, shape: staging.RingShape) -> staging.RingShape:
    """Return what of a ring is page-locked."""
    return shape if arena is None else replace(shape, num_pieces=arena.pinned_bytes // shape.piece_bytes)


def _refused(weights: HostWeights, placement: Placement) -> list[int]:
    """Layers that were to be locked and are not."""
    wanted = set(placement.streamed_layers) - set(placement.staged_layers)
    return [index for index in sorted(wanted) if not weights.layers[index].pinned]


def _move_locks(weights: HostWeights, memory: StagedMemory, registrar: Registrar) -> None:
    """Lock what is to be locked and nothing else; without rings nothing can be staged, so they come first."""
    placement, rings = memory.placement, memory.rings
    for index in placement.staged_layers:
        weights.layers[index].unpin()
    kept = [index for index in placement.streamed_layers if weights.layers[index].pinned]
    remedy = "keep all layers resident with more --vram" + (" and take --kv gpu" if len(rings) > 1 else "")
    for arena, shape in rings:
        least_bytes = staging.FEWEST_PIECES * shape.piece_bytes
        while arena.lock(registrar, shape.piece_bytes) and arena.pinned_bytes < least_bytes:
            if not kept:
                refused = f"the system refuses to page-lock even {format_bytes(least_bytes)} for {arena.name}"
                raise BudgetError(f"{refused}: raise the locked-memory limit (ulimit -l), or {remedy}")
            weights.layers[kept.pop()].unpin()
    for index in set(placement.streamed_layers) - set(placement.staged_layers):
        if weights.layers[index].lock(registrar):
            break


LoadProgress = Callable[[str, int, int], None]


def make_cache(
    plan: ModelPlan, cards: Sequence[OpenCard], name: str, memories: Sequence[StagedMemory],
    registrar: Registrar | None = None,
) -> KVCache:  # fmt: skip
    """Return the KV cache of a model.

    Args:
        plan: Of the model.
        cards: Those that its layers are on.
        name: Of the cache in their ledgers.
        memories: How a cache on the host is page-locked and staged for each of them.
        registrar: Page-locks states to go back to.
    """
    budgets = [one.budget for one in cards]
    if plan.cache == "streaming":
        return StreamingDraftCache(
            plan.config, plan.dtype, sink_tokens=plan.options.sink_tokens, recent_tokens=plan.recent_tokens,
            window_tokens=plan.streaming_window_tokens, batch=plan.batch, budgets=budgets, name=name,
            spare_positions=plan.tree_positions,
        )  # fmt: skip
    if plan.cache == "retrieval":
        return RetrievedDraftCache(
            plan.config, plan.dtype, capacity_tokens=plan.context_tokens, budget_tokens=plan.options.budget_tokens,
            chunk_size=plan.options.chunk_size, batch=plan.batch, budgets=budgets, name=name,
            window_tokens=plan.state_window_tokens, registrar=registrar,
        )  # fmt: skip
    if not plan.on_host:
        return KVCache(
            plan.config, plan.dtype, capacity_tokens=plan.context_tokens, batch=plan.batch, budgets=budgets,
            owners=plan.owners, name=name, spare_positions=plan.tree_positions, pass_rows=plan.pass_rows,
            window_tokens=plan.state_window_tokens, registrar=registrar, drafts=plan.is_draft,
        )  # fmt: skip
    on_host = list[HostKVCard]()
    for one, own, memory in zip(cards, plan.cards, memories, strict=True):
        assert memory.registrar is not None or one.budget.device.type == "cpu", "a GPU copies from what is locked"
        assert one.queues.d2h is not None, "what is kept on the host has to get there"
        writeback, sizes = memory.queue(one.queues.d2h, to_host=True), (own.kv_piece_bytes, own.prefill_workspace_bytes)
        staged = () if memory.h2d is None else (memory.pageable, memory.placement.staged_kv_layers)
        on_host.append(HostKVCard(one.budget, writeback, *sizes, memory.registrar, *staged))
    return HostKVCache(
        plan.config, plan.dtype, capacity_tokens=plan.context_tokens, batch=plan.batch,
        window_tokens=plan.window_tokens, cards=on_host, owners=plan.owners,
        resident_layers=plan.placement.resident_kv_layers, pass_rows=plan.pass_rows, name=name,
        registrar=registrar, state_tokens=plan.state_window_tokens,
    )  # fmt: skip


@dataclass(frozen=True)
class OpenCard:
    """Is a card that models are loaded onto: the ledger of its memory, and the queues of its link."""

    budget: DeviceBudget
    queues: CopyQueues

    @property
    def device(self) -> torch.device:
        """Return where it computes."""
        return self.budget.device


@dataclass(frozen=True)
class LoadedCard:
    """The link of a card that has layers of a model.

    `engine` is the queue of its copies, which ends with `engine.close`; `staged` says where the layers are, and holds
    the rings that some of them are staged through. `link_peak_gbps` is the bandwidth of back-to-back copies into its
    ring, whose `buffers` are one allocation; None when nothing is streamed. `experts` are those of its layers, if they
    have any; matrices are decoded into the `scratch`.
    """

    engine: CopyEngine
    staged: StagedMemory
    link_peak_gbps: float | None
    experts: ResidentExperts | ExpertPool | None = None
    buffers: Sequence[torch.Tensor] = ()
    scratch: torch.Tensor | None = None

    @property
    def pool(self) -> ExpertPool | None:
        """Return the pool of the experts; None where none are missing."""
        return self.experts if isinstance(self.experts, ExpertPool) else None

    @property
    def engines(self) -> list[CopyEngine]:
        """Return all queues to the card."""
        return [self.engine] if self.pool is None else [self.engine, self.pool.engine]

    def end_copies(self) -> None:
        """End the copies, and wait for passes that fetch experts or wait for those of the CPU, before anything that is
        copied, or computed with, is let go of."""
        for engine in self.engines:
            engine.close()
        if self.pool is not None and self.pool.buffers.is_cuda:
            with suppress(torch.AcceleratorError):  # it has failed, which was said where it did
                torch.cuda.synchronize(self.pool.buffers.device)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what of it stays on the host.

    `rope` is the table that rotates its queries and keys. Who had it loaded gives its memory back.
    """

    runner: ModelRunner
    weights: HostWeights
    rope: RopeTable
    cards: tuple[LoadedCard, ...]
    plan: ModelPlan  # as it turned out
    cpu: CpuThreads
    shared: SharedVocabulary | None = None  # of a draft, with its target; None where that was not compared
    copy_runner: ModelRunner | None = None  # of a target that drafts with copies of its own layers

    @property
    def config(self) -> ModelConfig:
        """Return its shape."""
        return self.runner.decoder.config

    @property
    def placement(self) -> Placement:
        """Return where its layers are."""
        return self.plan.placement

    @property
    def link_peak_gbps(self) -> float | None:
        """Return the bandwidth of all links together; None when nothing is streamed."""
        return sum(card.link_peak_gbps or 0.0 for card in self.cards) or None

    @property
    def pinned_bytes(self) -> int:
        """Return the page-locked host memory of the weights and the staging rings."""
        rings = [arena for card in self.cards for arena, _ in card.staged.rings]
        weights = self.weights
        return sum(arena.pinned_bytes for arena in (*weights.arenas.values(), *weights.experts.values(), *rings))

    def experts_with(self, head: ModelPlan) -> ResidentExperts | ExpertPool | None:
        """Return what has the experts of a head of this model, too; None where the head has its own, or none."""
        return self.cards[0].experts if head.placement.pool_buffers == 0 else None

    def end_copies(self) -> None:
        """End the copies, before anything that is copied is let go of, or that passes read or write: one that was
        launched ahead of an answer's end may be running."""
        for card in self.cards:
            card.end_copies()
        for device in self.runner.decoder.partition.devices:
            if device.type == "cuda":
                with suppress(torch.AcceleratorError):  # it has failed, which was said where it did
                    torch.cuda.synchronize(device)


def load_models(
    target_source: CheckpointSource, draft_source: CheckpointSource | None, plan: RunPlan, cards: Sequence[OpenCard],
    *, shared: SharedVocabulary | None, registrar: Registrar | None, on_progress: LoadProgress | None, undo: ExitStack,
) -> tuple[LoadedModel, LoadedModel | None]:  # fmt: skip
    """Load the target and its draft, which is on the first card, and which proposes what is `shared`.

    `undo` ends the copies of both and gives their memory back, when loading fails or the runtime is closed.
    """
    on_gpu = cards[0].budget.device.type == "cuda"
    if plan.has_verifier and plan.target.on_host and on_gpu:
        for card in cards:
            require_readable_arenas(
                card.budget.device,
                "a retrieval verifier over a KV cache there does: take --speculation chain or --kv gpu",
            )
    for card in cards if plan.target.host_experts and on_gpu else ():
        require_readable_arenas(card.budget.device, "experts on demand do: have room for all of them on the device")
    load = partial(
        load_model, registrar=registrar, pinned_bytes=plan.limits.pinned_bytes, on_progress=on_progress, undo=undo
    )
    share = plan.request.cpu_share
    share = 0.0 if share is None and not on_gpu else share
    target = load(target_source, plan.target, cards, name="target", cpu_share=share)
    runner, draft = target.runner, None
    if draft_source and plan.draft:
        draft = load(draft_source, plan.draft, cards[:1], name="draft", lender=target)
        if (taps := draft.runner.decoder.taps) is not None:
            runner.taps = replace(taps, layers=tuple(map(plan.target.config.own_number, taps.layers)))
    if on_gpu and plan.captured_bytes and not runner.streamer.num_streamed:
        runner.captured = CapturedPasses(runner.decoder, runner.streamer, runner.cache, runner.rope, runner.taps)
    return target, draft and replace(draft, shared=shared)


def load_model(
    source: CheckpointSource, plan: ModelPlan, cards: Sequence[OpenCard], *, name: str, registrar: Registrar | None,
    on_progress: LoadProgress | None, undo: ExitStack, pinned_bytes: int | None = None, cpu_share: float | None = 0,
    lender: LoadedModel | None = None,
) -> LoadedModel:  # fmt: skip
    """Read the weights and connect the parts of one model, which `undo` gives back again. `cpu_share` is that of the
    missing experts which the CPU computes; None: by measured rates. A head has what it has not of the `lender`, its
    target, and perhaps a place in the pool of this."""
    report = None if on_progress is None else partial(on_progress, f"{name} weights")
    # Only what is streamed is copied asynchronously; systems that lock little memory can keep the rest.
    pin = set() if registrar is None else set(plan.placement.streamed_layers) - set(plan.placement.staged_layers)
    if registrar is not None and plan.embedding_on_host:
        pin.add(EMBEDDING)
    device = cards[0].budget.device
    # The experts on each card, and those of layers that all are there.
    pools = [_buffers_of_experts(one.budget, own, name) for one, own in zip(cards, plan.cards, strict=False)]
    experts = dict[int, torch.Tensor]()
    for buffers, own in zip(pools, plan.cards, strict=True):
        if own.placement.pool_buffers is None:
            counts = [one.num_experts for one in own.experts.values()]
            experts |= zip(own.experts, buffers.split(counts), strict=True)
    if lender is not None and isinstance(shared := lender.experts_with(plan), ResidentExperts):
        experts = {layer: shared.held[lender.config.num_layers + layer] for layer in plan.experts}
    # What stays on a device, by layer, that of None for the head: uint8 each.
    held: dict[int | None, torch.Tensor] = {}
    for one, own in zip(cards, plan.cards, strict=False):  # a draft is on the first
        around = dict.fromkeys(own.head_parts, [None] if own.embedding_on_host else [None, EMBEDDING])
        for what, kept in {"resident layers": own.placement.resident_layers, **around}.items():
            sizes = [own.layout.block(index).total_bytes for index in kept]
            if kept:  # cut from one allocation, as the allocator rounds each up
                held |= zip(kept, one.budget.allocate(f"{name}: {what}", sum(sizes)).split(sizes), strict=True)
    weights = load_weights(
        source, plan.placed_layout, onto=held, experts_onto=experts, pin=pin, registrar=registrar,
        pinned_bytes=pinned_bytes, on_progress=report, coding_device=device,
        later=() if plan.rest is None else plan.placement.streamed_layers,
    )  # fmt: skip
    undo.callback(weights.close)
    if device.type == "cuda":
        if plan.embedding_on_host:
            undo.callback(torch.cuda.synchronize, device)  # passes may be reading rows
        torch.cuda.empty_cache()  # of what passed through
    limited, cpu = pinned_bytes is not None, _start_cpu(plan, cpu_share, undo)
    return connect_model(
        weights, held, pools, plan, cards, name=name, registrar=registrar, undo=undo, limited=limited, cpu=cpu,
        lender=lender,
    )  # fmt: skip


@dataclass(frozen=True)
class CpuThreads:
    """Has the threads of the CPU that compute some of the missing experts, `share` of them or, by None, as many as
    keeps link and CPU busy alike; or the reason why there are none."""

    share: float | None
    threads: ExpertsCpu | None = None
    why_not: str = ""

    @property
    def in_words(self) -> str:
        """Return one phrase about them; nothing where there need not be any."""
        if self.threads is None:
            return self.why_not
        library = self.threads.library
        threads = counted(expert_threads(), "thread")
        return f"the CPU computes some of the experts with {threads} ({library.instructions})"


NO_CPU = CpuThreads(0)
_LEFT_CORES, _MOST_THREADS = 2, 16  # which launch and copy; no memory feeds more


def expert_threads() -> int:
    """Return how many threads of the CPU compute experts."""
    return max(1, min(_MOST_THREADS, usable_cores() - _LEFT_CORES))


def _start_cpu(plan: ModelPlan, share: float | None, undo: ExitStack) -> CpuThreads:
    """Start the CPU's threads where a card has not all experts. Raises `OptionError` where a share was asked for that
    the CPU cannot take."""
    if share == 0 or not plan.host_experts:
        return CpuThreads(0, why_not="--cpu-share does nothing, as no expert is missing") if share else NO_CPU
    kinds = {place.encoding for one in plan.host_experts.values() for place in one.places.values()}
    try:
        library = load_experts_library(user_directory("cache", holds="compiled code") / "experts", plan.dtype, kinds)
        threads = ExpertsCpu(library, expert_threads())
    except NoCpuShare as error:
        require(share is None, f"--cpu-share {share}: {error}")
        logging.getLogger(__name__).warning("%s", error)
        return CpuThreads(0, why_not=str(error))
    undo.callback(threads.close)  # before what they may still read
    return CpuThreads(share, threads)


def _buffers_of_experts(budget: DeviceBudget, own: ModelPlan, name: str) -> torch.Tensor:
    """Return the buffers of a card's pool: uint8 [S, bytes of the largest expert]."""
    nbytes = own.pool_bytes(own.placement.pool_buffers)
    return budget.allocate(f"{name}: experts", nbytes).view(-1, own.expert_bytes) if nbytes else torch.empty(0, 0)


def make_pool(
    experts: Mapping[int, ExpertBlocks], buffers: torch.Tensor, queues: CopyQueues | None, x: torch.Tensor, *,
    cpu: CpuThreads,
) -> ResidentExperts | ExpertPool | None:  # fmt: skip
    """Return what holds the `experts` of a card's layers; None where these have none.

    Args:
        experts: By layer, those of a head behind the model's own.
        buffers: Of theirs. They hold all where there are no `queues`.
        queues: Bring experts.
        x: Like the rows of a pass: their dtype, width and device.
        cpu: Computes some of what is missing.
    """
    if not experts:
        return None
    layers = {layer: ExpertUnits(one.num_experts, one.chosen) for layer, one in experts.items()}
    if queues is None:
        return ResidentExperts(buffers, layers)
    make_cpu, engine = None, queues.demand
    assert engine is not None
    if cpu.threads is not None:
        chosen = max(one.chosen for one in experts.values())
        make_cpu = partial(CpuExperts, cpu.threads, cpu.share, engine, num_chosen=chosen, x=x)
    return ExpertPool(buffers, layers, engine, pace=queues.pace, make_cpu=make_cpu)


def add_experts(
    pool: ExpertPool, weights: HostWeights, layers: Iterable[int], cpu: CpuThreads,
    held: Mapping[int | None, torch.Tensor], *, first: int = 0,
) -> None:  # fmt: skip
    """Let experts of some layers of a model, which a pool calls `first` and so on, be fetched into it and computed on
    the CPU. Layers that are not `held` on a device are in host memory."""
    for layer in layers:
        on_cpu, layout = None, weights.layout
        if cpu.threads is not None:
            mixer = weights.config.layers[layer].mlp
            assert isinstance(mixer, Experts)
            views = layout.layers[layer].views(held[layer] if layer in held else weights.block(layer))
            on_cpu = mixer.on_cpu(cpu.threads.library, layout.experts[layer].places, views)
        pool.add(first + layer, weights.experts_of(layer), on_cpu)


def connect_model(
    weights: HostWeights, held: Mapping[int | None, torch.Tensor], experts: Sequence[torch.Tensor], plan: ModelPlan,
    cards: Sequence[OpenCard], *, name: str, registrar: Registrar | None, undo: ExitStack, limited: bool,
    cpu: CpuThreads = NO_CPU, lender: LoadedModel | None = None,
) -> LoadedModel:  # fmt: skip
    """Connect loaded weights, those on the host and those `held` on devices, with buffers of `experts` on each card,
    and build the runner. Where page-locked memory is `limited` all of it is for what passes stream.

    What `undo` does ends what has threads, the copies before the memory that they copy.
    """
    cards = cards[: len(plan.placements)]
    partition = LayerPartition(tuple(Card(n, one.budget.device) for n, one in enumerate(cards)), plan.owners)
    layout, owners = weights.layout, partition.owners
    memories, scratches, buffers, kv_buffers = [], list[torch.Tensor | None](), [], []
    for one, own, locked_bytes in zip(cards, plan.cards, locked_shares(weights, plan), strict=True):
        with current_device(one.budget.device):
            memories.append(lock_layers(weights, own, registrar, undo, locked_bytes=locked_bytes))
        placement = memories[-1].placement
        buffers.append(_ring(one.budget, f"{name}: ring", placement.num_buffers, own.ring_bytes(placement)))
        scratch_bytes = own.scratch_bytes(one.budget.device.type)
        scratches.append(one.budget.allocate(f"{name}: decoded matrix", scratch_bytes) if scratch_bytes else None)
        num_kv_buffers = own.placement.kv_ring_buffers if own.kv_layers_on_host else 0
        kv_buffers.append(_ring(one.budget, f"{name}: KV ring", num_kv_buffers, num_kv_buffers * own.kv_piece_bytes))
    cache = make_cache(plan, cards, f"{name}: KV cache", memories, None if limited else registrar)
    undo.callback(cache.close)
    joined, pool_first, computing = None if lender is None else lender.experts_with(plan), 0, cpu
    if lender is not None and joined is not None:  # whose own layers come first
        pool_first, computing = lender.config.num_layers, lender.cpu
    pools = list[ResidentExperts | ExpertPool | None]()
    for one, own, of_card in zip(cards, plan.cards, experts, strict=True):
        queues = None if own.placement.pool_buffers is None else one.queues
        x = torch.empty(0, plan.config.hidden_size, dtype=plan.dtype, device=of_card.device)
        pools.append(joined or make_pool(own.experts, of_card, queues, x, cpu=cpu))
        if isinstance(pool := pools[-1], ExpertPool):
            add_experts(pool, weights, own.experts.keys() & layout.experts, computing, held, first=pool_first)
    stores = {
        layer: ExpertStore(
            one.matrices(pool.buffers),
            partial(pool.fetch, pool_first + layer),
            scratch if own.expert_scratch_bytes else None,
        )
        for pool, own, scratch in zip(pools, plan.cards, scratches, strict=True)
        if pool is not None
        for layer, one in own.experts.items()
    }
    loaded = list[LoadedCard]()
    for one, memory, pool, scratch, *rings in zip(cards, memories, pools, scratches, buffers, kv_buffers, strict=True):
        with current_device(one.budget.device):
            peak_gbps = _measure_link(weights, [*chain(*rings)], one.queues.h2d, memory, None if pool_first else pool)
        loaded.append(LoadedCard(memory.queue(one.queues.h2d), memory, peak_gbps, pool, rings[0], scratch))
        undo.callback(loaded[-1].end_copies)
    nothing, arenas = torch.empty(0, dtype=torch.uint8), weights.layers

    def make_views(layer: int, buffer: torch.Tensor) -> LayerWeights:
        found = LayerWeights(layout.layers[layer].views(buffer, scratches[owners[layer]]))
        if layer in stores:
            found.experts = stores[layer]
        return found

    parts = zip(loaded, buffers, kv_buffers, strict=True)
    streamer = LayerStreamer(
        [weights.block(index) if index in arenas else nothing for index in range(plan.config.num_layers)],
        {index: held[index] for index in plan.placement.resident_layers},
        [CardRing(one.engine, layers, kv, one.pool) for one, layers, kv in parts],
        owners=owners, make_views=make_views, kv=cache if isinstance(cache, HostKVCache) and any(kv_buffers) else None,
        pool_first=pool_first,
    )  # fmt: skip
    embedding = held[EMBEDDING] if EMBEDDING in held else weights.block(EMBEDDING)
    shared = layout.shared.views(held[None], scratches[0]) | layout.embedding.views(embedding)
    if not plan.config.has_ends:
        decoder: Decoder = RowsDecoder(plan.config, plan.dtype, partition)
    elif plan.head is not None:
        assert lender is not None, "a head is loaded behind its target"
        around = {**lent_to_head(lender.runner.decoder, scratches[0]), **shared}
        decoder = HeadDecoder(plan.head, around, partition)
    else:
        decoder = Decoder(plan.config, shared, partition)
    plan = replace(plan, placements=tuple(memory.placement for memory in memories))
    # Sinks and recent tokens are never further apart than their cache is long, however long the text is.
    fixed_length = cache.capacity_tokens if isinstance(cache, StreamingDraftCache) else None
    rope = RopeTable(plan.config, cards[0].budget.device, fixed_length=fixed_length)
    runner = ModelRunner(decoder, streamer, cache, rope, plan.chunk_tokens, plan.expert_tokens)
    return LoadedModel(runner, weights, rope, tuple(loaded), plan, cpu)


def lent_to_head(target: Decoder, scratch: torch.Tensor | None) -> dict[str, Weight]:
    """Return what a head shares of its target. What has to be decoded goes through the head's own `scratch`: it drafts
    while the target's passes use theirs."""
    found = {"embedding": target.embedding, "lm_head": target.lm_head, "target_norm": target.shared["final_norm"]}
    return through_scratch(found, scratch)


def through_scratch(weights: Weights, scratch: torch.Tensor | None) -> dict[str, Weight]:
    """Return the same weights, of which what has to be decoded goes through this scratch."""
    return {
        name: replace(one, scratch=scratch) if isinstance(one, StackedWeight) else one for name, one in weights.items()
    }


def _ring(budget: DeviceBudget, name: str, count: int, nbytes: int) -> list[torch.Tensor]:
    """Return the buffers of a ring on the device, cut from one allocation of `nbytes`: uint8 [nbytes / count] each."""
    return list(budget.allocate(name, nbytes).view(count, -1)) if count else []


def _measure_link(
    weights: HostWeights, buffers: Sequence[torch.Tensor], engine: CopyEngine, memory: StagedMemory,
    experts: ResidentExperts | ExpertPool | None,
) -> float | None:  # fmt: skip
    """Return the peak of the link into a buffer, from page-locked memory of a card's layers; None when nothing is
    streamed, and no expert is brought."""
    if not buffers and isinstance(experts, ExpertPool) and (unit := experts.host_unit) is not None:
        return measure_link_gbps(engine, experts.buffers[0, : unit.nbytes], unit)
    if not buffers:
        return None
    buffer, placement = buffers[0], memory.placement
    pinned = [weights.block(index) for index in placement.streamed_layers if index not in placement.staged_layers]
    if not pinned and memory.h2d is not None:
        pinned = [memory.h2d.buffer[: min(buffer.nbytes, placement.h2d_ring.piece_bytes)]]
    if pinned:
        return measure_link_gbps(engine, buffer[: pinned[0].nbytes], pinned[0])
    # Only keys and values will be streamed, from memory that is locked as it grows; so some is made as theirs will be.
    with closing(HostArena(buffer.nbytes, name="a measurement of the link")) as arena:
        if buffer.is_cuda:
            arena.pin()
        return measure_link_gbps(engine, buffer, arena.buffer[: buffer.nbytes])


@torch.inference_mode()
def warm_up(model: LoadedModel, *, trees: bool = False) -> None:
    """Compile kernels, load library modules and let the allocator take its blocks, with every way to cut a product.

    Passes go as far as there has been a layer of every kind: the others have the same shapes, and streamed ones would
    cross the link for nothing. With `trees` also what verifies a tree and moves a path of it. Only useful on CUDA. The
    cache is empty before and afterwards.
    """
    runner, cache, resident_kv = model.runner, model.runner.cache, model.placement.resident_kv_layers
    # What the kernels of each layer depend on.
    parts = model.plan.placed_layout.layers, model.config.layers, runner.decoder.partition.owners
    kinds = [(*kind, layer in resident_kv) for layer, kind in enumerate(zip(*parts, strict=True))]
    firsts = {kinds.index(kind) for kind in kinds}
    tokens = max(1, min(max(runner.chunk_tokens, runner.expert_tokens), cache.capacity_tokens - TILE_ROWS[-1]))

    def layers(rows: int) -> Iterator[tuple[int, LayerWeights]]:
        return islice(runner.streamer.layers(rows), max(firsts) + 1)

    for layer in layers(1):
        for count in WARM_UP_ROWS if layer[0] in firsts else ():
            if count <= cache.capacity_tokens:
                runner.forward(Batch({0: TokenTree((0,) * count)}), layers=[layer])
    for count in LIBRARY_ROWS["cuda"]:  # whether the library has the bits takes 0.1 s a matrix to find out
        if count <= tokens:
            runner.forward(Batch(prompts={0: [0] * count}), layers=layers(count))
            cache.truncate(0, 0)
    runner.forward(Batch(prompts={0: [0] * tokens}), layers=layers(tokens))
    rows = min(TILE_ROWS[-1], cache.capacity_tokens - tokens)
    window, branches = TokenTree((0,) * rows), trees and rows > 2
    if branches:
        if tokens < BLOCK_TOKENS:  # behind a whole block the pass of a tree runs a chain's kernels too
            runner.forward(Batch({0: window}), layers=layers(rows))
        window = TokenTree(window.tokens, (-1, *(0,) * (rows - 1)))
    logits = runner.forward(Batch({0: window}), layers=layers(rows)).logits
    if branches:
        cache.commit_path(0, [0, 2])
    positions = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
    for params in WARM_UP_SAMPLINGS:
        sample(logits, SlotSampling.of([params], logits.device), positions, torch.zeros_like(positions))
    cache.truncate(0, 0)
    if logits.is_cuda:
        for card in runner.decoder.partition.cards:
            torch.cuda.synchronize(card.device)


@torch.inference_mode()
def capture_passes(runner: ModelRunner, sampling: SlotSampling, *, widest: int, trees: bool) -> None:
    """Capture the passes over one text of a model that is all on the device: in an answer the first two of a shape took
    some 50 ms each, seven times as long as those behind them (13B, H200). Leaves the cache empty.

    Args:
        runner: Of the target.
        sampling: How its tokens will be chosen, where it has no layers on other machines.
        widest: Rows of the largest window.
        trees: Whether windows may be trees.
    """
    assert runner.captured is not None, "nothing is captured"
    # Tokens that are filtered or penalised are chosen behind the pass.
    samplings = [None] if runner.decoder.config.is_part else [None, sampling]
    for length in graphs.texts_to_capture(runner.cache.max_tokens_with_draft):
        if length and not runner.streamer.has_all:
            break  # all experts of all layers would cross the link for its prompt
        if length:
            runner.forward(Batch(prompts={0: [0] * length}))
        for width in graphs.widths_to_capture(widest):
            row, star = TokenTree((0,) * width), TokenTree((0,) * width, (-1, *(0,) * (width - 1)))
            for tree in (row, star) if trees and width > 2 else (row,):
                for chosen_by in samplings if width == 1 else samplings[-1:]:
                    for _ in range(2 if runner.streamer.can_capture(width) else 0):
                        runner.forward(Batch({0: tree}), chosen_by)
            if width == 1:
                runner.go_ahead()
        runner.cache.truncate(0, 0)
