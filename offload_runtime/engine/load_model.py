"""From opened checkpoints and a plan to models that are ready to run, weights and KV caches in their places."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from offload_runtime_kernels._jit import triton_available
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS
from offload_runtime_kernels.linear import TILE_ROWS

from offload_runtime.cache import DeviceKVCache, HostKVCache, HostKVCard
from offload_runtime.cache.device import StreamingDraftCache
from offload_runtime.cache.retrieval import RetrievedDraftCache
from offload_runtime.core import Batch, TokenTree
from offload_runtime.engine.staged_layers import StagedMemory, lock_layers, locked_shares
from offload_runtime.errors import DeviceError
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import Weights
from offload_runtime.models.rope import RopeTable
from offload_runtime.plan import ModelPlan, Placement, RunPlan
from offload_runtime.runners import CapturedPasses, Decoder, ModelRunner
from offload_runtime.sampling import WARM_UP_SAMPLINGS, SlotSampling, sample
from offload_runtime.stream import (
    Card,
    CopyEngine,
    CopyQueues,
    DeviceBudget,
    HostArena,
    LayerPartition,
    Registrar,
    current_device,
    measure_link_gbps,
    require_readable_arenas,
)
from offload_runtime.stream.queue import CardRing, LayerStreamer
from offload_runtime.weights import (
    CheckpointSource,
    HostWeights,
    SharedVocabulary,
    load_weights,
    open_checkpoint,
    share_vocabulary,
)

LoadProgress = Callable[[str, int, int], None]
TargetCache = DeviceKVCache | HostKVCache | StreamingDraftCache | RetrievedDraftCache


def make_cache(plan: ModelPlan, cards: Sequence[OpenCard], name: str, memories: Sequence[StagedMemory]) -> TargetCache:
    """The KV cache of a model.

    Args:
        plan: Of the model.
        cards: Those that its layers are on.
        name: Of the cache in their ledgers.
        memories: How a cache on the host is page-locked and staged for each of them.
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
        )  # fmt: skip
    if not plan.on_host:
        return DeviceKVCache(
            plan.config, plan.dtype, capacity_tokens=plan.context_tokens, batch=plan.batch, budgets=budgets,
            owners=plan.owners, name=name, spare_positions=plan.tree_positions, pass_rows=plan.pass_rows,
        )  # fmt: skip
    on_host = list[HostKVCard]()
    for one, own, memory in zip(cards, plan.cards, memories, strict=True):
        assert memory.registrar is not None or one.budget.device.type == "cpu", "a GPU copies from what is locked"
        assert one.queues.d2h is not None, "what is kept on the host has to get there"
        writeback, sizes = memory.to_host(one.queues.d2h), (own.kv_piece_bytes, own.prefill_workspace_bytes)
        on_host.append(HostKVCard(one.budget, writeback, memory.locking, *sizes))
    return HostKVCache(
        plan.config, plan.dtype, capacity_tokens=plan.context_tokens, batch=plan.batch,
        window_tokens=plan.window_tokens, cards=on_host, owners=plan.owners,
        resident_layers=plan.placement.resident_kv_layers, pass_rows=plan.pass_rows, name=name,
    )  # fmt: skip


@dataclass(frozen=True)
class OpenCard:
    """A card that models are loaded onto: the ledger of its memory, and the queues of its link."""

    card: Card
    budget: DeviceBudget
    queues: CopyQueues


@dataclass(frozen=True)
class LoadedCard:
    """The link of a card that has layers of a model.

    `engine` is the queue of its copies, which ends with `engine.close`; `staged` says where the layers are, and holds
    the rings that some of them are staged through. `link_peak_gbps` is the bandwidth of back-to-back copies into its
    ring; None when nothing is streamed.
    """

    engine: CopyEngine
    staged: StagedMemory
    link_peak_gbps: float | None


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
    shared: SharedVocabulary | None = None  # of a draft, with its target; None where that was not compared

    @property
    def config(self) -> ModelConfig:
        """Its shape."""
        return self.runner.decoder.config

    @property
    def placement(self) -> Placement:
        """Where its layers are."""
        return self.plan.placement

    @property
    def link_peak_gbps(self) -> float | None:
        """The bandwidth of all links together; None when nothing is streamed."""
        return sum(card.link_peak_gbps or 0.0 for card in self.cards) or None

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory of the weights and the staging rings."""
        rings = [arena for card in self.cards for arena, _ in card.staged.rings]
        return sum(arena.pinned_bytes for arena in (*self.weights.layers.values(), *rings))

    def end_copies(self) -> None:
        """Before anything that is copied is let go of."""
        for card in self.cards:
            card.engine.close()


def require_kernels(device: torch.device) -> None:
    """Refuse a GPU that the kernels cannot be compiled for."""
    if device.type == "cuda" and not triton_available:
        raise DeviceError("the GPU kernels need Triton, which is not installed: pip install triton, or --device cpu")


def read_tokenizer(
    target: CheckpointSource, draft: CheckpointSource | None
) -> tuple[Any, SharedVocabulary | None]:  # fmt: skip
    """The target's tokenizer, and what a draft may propose.

    Raises:
        CheckpointError: There is none that can be read.
        VocabularyMismatchError: A draft's token ids mean other text.
    """
    return target.tokenizer(), None if draft is None else share_vocabulary(target, draft)


def open_sources(
    target: str | Path | CheckpointSource, draft: str | Path | CheckpointSource | None
) -> tuple[CheckpointSource, CheckpointSource | None]:
    """Open the checkpoints and read everything that can be wrong about them, short of tokenizers and weights."""
    target_source = open_checkpoint(target) if isinstance(target, str | Path) else target
    return target_source, open_checkpoint(draft) if isinstance(draft, str | Path) else draft


def load_models(
    target_source: CheckpointSource, draft_source: CheckpointSource | None, plan: RunPlan, cards: Sequence[OpenCard],
    *, shared: SharedVocabulary | None, registrar: Registrar | None, on_progress: LoadProgress | None, undo: ExitStack,
) -> tuple[LoadedModel, LoadedModel | None]:  # fmt: skip
    """The target and its draft, which is loaded first, onto the first card, and proposes what is `shared`.

    `undo` ends the copies of both and gives their memory back, when loading fails or the runtime is closed.
    """
    on_gpu = cards[0].budget.device.type == "cuda"
    if plan.has_verifier and plan.target.on_host and on_gpu:
        for card in cards:
            require_readable_arenas(card.budget.device)
    load = partial(
        load_model, registrar=registrar, pinned_bytes=plan.limits.pinned_bytes, on_progress=on_progress, undo=undo
    )
    draft = load(draft_source, plan.draft, cards[:1], name="draft") if draft_source and plan.draft else None
    target = load(target_source, plan.target, cards, name="target")
    runner, layers = target.runner, target.runner.streamer.resident_layers()
    if on_gpu and plan.captured_bytes and layers is not None:
        runner.captured = CapturedPasses(runner.decoder, layers, runner.cache, runner.rope)
    return target, draft and replace(draft, shared=shared)


def load_model(
    source: CheckpointSource, plan: ModelPlan, cards: Sequence[OpenCard], *, name: str, registrar: Registrar | None,
    on_progress: LoadProgress | None, undo: ExitStack, pinned_bytes: int | None = None,
) -> LoadedModel:  # fmt: skip
    """Read the weights and connect the parts of one model, which `undo` gives back again."""
    report = None if on_progress is None else partial(on_progress, f"{name} weights")
    # Only what is streamed is copied asynchronously; systems that lock little memory can keep the rest.
    pin = set() if registrar is None else set(plan.placement.streamed_layers) - set(plan.placement.staged_layers)
    device = cards[0].budget.device
    held: dict[int | None, torch.Tensor] = {}
    for one, own in zip(cards, plan.cards, strict=False):  # a draft is on the first
        held |= device_blocks(own, one.budget, name=name)
    weights = load_weights(
        source, plan.layout, onto=held, pin=pin, registrar=registrar, pinned_bytes=pinned_bytes, on_progress=report,
        coding_device=device,
    )  # fmt: skip
    undo.callback(weights.close)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what passed through
    return connect_model(weights, held, plan, cards, name=name, registrar=registrar, undo=undo)


def device_blocks(plan: ModelPlan, budget: DeviceBudget, *, name: str) -> dict[int | None, torch.Tensor]:
    """Memory for the weights that stay on the device, by layer, that of None for embedding and head, where a card has
    them: uint8 each. Layers are cut from one allocation: the allocator rounds each up."""
    layout, kept = plan.layout, plan.placement.resident_layers
    sizes = [layout.layer_bytes[index] for index in kept]
    layers = budget.allocate(f"{name}: resident layers", sum(sizes)).split(sizes) if kept else ()
    found: dict[int | None, torch.Tensor] = dict(zip(kept, layers, strict=True))
    if plan.has_head:
        found[None] = budget.allocate(f"{name}: embedding and head", layout.shared.total_bytes)
    return found


def connect_model(
    weights: HostWeights, held: Mapping[int | None, torch.Tensor], plan: ModelPlan, cards: Sequence[OpenCard], *,
    name: str, registrar: Registrar | None, undo: ExitStack,
) -> LoadedModel:  # fmt: skip
    """Connect loaded weights, those on the host and those that `device_blocks` holds, and build the runner.

    What `undo` does ends what has threads, the copies before the memory that they copy.
    """
    cards = cards[: len(plan.placements)]
    partition = LayerPartition(tuple(one.card for one in cards), plan.owners)
    layout, owners = weights.layout, partition.owners
    memories, scratches, buffers, kv_buffers = [], list[torch.Tensor | None](), [], []
    for one, own, locked_bytes in zip(cards, plan.cards, locked_shares(weights, plan), strict=True):
        with current_device(one.card.device):
            memories.append(lock_layers(weights, own, registrar, undo, locked_bytes=locked_bytes))
        buffers.append(_ring(one.budget, f"{name}: ring", memories[-1].placement.num_buffers, own.layer_bytes))
        scratch_bytes = own.scratch_bytes(one.budget.device.type)
        scratches.append(one.budget.allocate(f"{name}: decoded matrix", scratch_bytes) if scratch_bytes else None)
        num_kv_buffers = own.placement.kv_ring_buffers if own.kv_layers_on_host else 0
        kv_buffers.append(_ring(one.budget, f"{name}: KV ring", num_kv_buffers, own.kv_piece_bytes))
    cache = make_cache(plan, cards, f"{name}: KV cache", memories)
    undo.callback(cache.close)
    loaded = list[LoadedCard]()
    for one, memory, *rings in zip(cards, memories, buffers, kv_buffers, strict=True):
        with current_device(one.card.device):
            peak_gbps = _measure_link(weights, [*chain(*rings)], one.queues.h2d, memory)
        loaded.append(LoadedCard(memory.to_device(one.queues.h2d), memory, peak_gbps))
        undo.callback(loaded[-1].engine.close)
    nothing, arenas = torch.empty(0, dtype=torch.uint8), weights.layers
    streamer = LayerStreamer(
        [weights.block(index) if index in arenas else nothing for index in range(plan.config.num_layers)],
        {index: block for index, block in held.items() if index is not None},
        [CardRing(one.engine, *rings) for one, *rings in zip(loaded, buffers, kv_buffers, strict=True)], owners=owners,
        make_views=lambda layer, buffer: layout.layers[layer].views(buffer, scratches[owners[layer]]),
        kv=cache if isinstance(cache, HostKVCache) and any(kv_buffers) else None,
    )  # fmt: skip
    decoder = Decoder(plan.config, layout.shared.views(held[None], scratches[0]), partition)
    plan = replace(plan, placements=tuple(memory.placement for memory in memories))
    # Sinks and recent tokens are never further apart than their cache is long, however long the text is.
    fixed_length = cache.capacity_tokens if isinstance(cache, StreamingDraftCache) else None
    rope = RopeTable(plan.config, cards[0].budget.device, fixed_length=fixed_length)
    runner = ModelRunner(decoder, streamer, cache, rope, plan.chunk_tokens)
    return LoadedModel(runner, weights, rope, tuple(loaded), plan)


def _ring(budget: DeviceBudget, name: str, count: int, buffer_bytes: int) -> list[torch.Tensor]:
    """Buffers of a ring on the device, cut from one allocation: uint8 [buffer_bytes] each."""
    return list(budget.allocate(name, count * buffer_bytes).view(count, -1)) if count else []


def _measure_link(
    weights: HostWeights, buffers: Sequence[torch.Tensor], engine: CopyEngine, memory: StagedMemory
) -> float | None:
    """Peak of the link into a buffer, from page-locked memory of a card's layers; None when nothing is streamed."""
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


def _kinds_of_layers(model: LoadedModel) -> list[Hashable]:
    """What the kernels of each layer depend on."""
    config, kv_layers, owners = model.config, model.placement.resident_kv_layers, model.runner.decoder.partition.owners
    kinds = zip(model.weights.layout.layers, config.layers, owners, strict=True)
    return [(*kind, index in kv_layers) for index, kind in enumerate(kinds)]


@torch.inference_mode()
def warm_up(model: LoadedModel, *, trees: bool = False) -> None:
    """Compile kernels, load library modules and let the allocator take its blocks, with every way to cut a product.

    Passes go as far as there has been a layer of every kind: the others have the same shapes, and streamed ones would
    cross the link for nothing. With `trees` also what verifies a tree and moves a path of it. Only useful on CUDA. The
    cache is empty before and afterwards.
    """
    runner, cache, kinds = model.runner, model.runner.cache, _kinds_of_layers(model)
    tokens = max(1, min(runner.chunk_tokens, cache.capacity_tokens - TILE_ROWS[-1]))
    firsts = {kinds.index(kind) for kind in kinds}

    def layers() -> Iterator[tuple[int, Weights]]:
        return islice(runner.streamer.layers(), max(firsts) + 1)

    for layer in layers():
        for count in TILE_ROWS if layer[0] in firsts else ():
            if count <= cache.capacity_tokens:
                runner.forward(Batch({0: TokenTree((0,) * count)}), layers=[layer])
    runner.forward(Batch(prompts={0: [0] * tokens}), layers=layers())
    rows = min(TILE_ROWS[-1], cache.capacity_tokens - tokens)
    window, branches = TokenTree((0,) * rows), trees and rows > 2
    if branches:
        if tokens < BLOCK_TOKENS:  # behind a whole block the pass of a tree runs a chain's kernels too
            runner.forward(Batch({0: window}), layers=layers())
        window = TokenTree(window.tokens, (-1, *(0,) * (rows - 1)))
    logits = runner.forward(Batch({0: window}), layers=layers()).logits
    if branches:
        cache.commit_path(0, [0, 2])
    positions = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
    for params in WARM_UP_SAMPLINGS:
        sample(logits, SlotSampling.of([params], logits.device), positions, torch.zeros_like(positions))
    cache.truncate(0, 0)
    if logits.is_cuda:
        for card in runner.decoder.partition.cards:
            torch.cuda.synchronize(card.device)
