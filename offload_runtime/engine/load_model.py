"""From opened checkpoints and a plan to models that are ready to run, weights and KV caches in their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from offload_runtime_kernels._jit import triton_available
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.config import ModelConfig
from offload_runtime.copy import CopyEngine, CopyQueues, measure_link_gbps
from offload_runtime.copy.schedule import LayerStreamer
from offload_runtime.engine.staged_layers import StagedMemory, lock_layers, stage_d2h, stage_h2d
from offload_runtime.errors import DeviceError, VocabularyMismatchError
from offload_runtime.kv import KV_RING_SLOTS, BlockLocking, DeviceKVCache, HostKVCache
from offload_runtime.kv.device import StreamingDraftCache
from offload_runtime.kv.retrieval import RetrievedDraftCache
from offload_runtime.memory import DeviceBudget, HostArena, Registrar, make_registrar
from offload_runtime.model import Decoder, RopeTable, RowBuilder, Window
from offload_runtime.plan import ModelPlan, Placement, RunPlan
from offload_runtime.runners import ModelRunner
from offload_runtime.sampling import DIFFERENT_WAYS, SlotSampling, sample
from offload_runtime.weights import CheckpointSource, HostWeights, load_weights, open_checkpoint


def make_cache(
    plan: ModelPlan, budget: DeviceBudget, name: str, *, writeback: CopyEngine | None,
    registrar: Registrar | None, staged: StagedMemory | None,
) -> tuple[DeviceKVCache | HostKVCache | StreamingDraftCache | RetrievedDraftCache, list[torch.Tensor]]:  # fmt: skip
    """The KV cache, and the slots of its ring on the link (none when no layer of it is streamed).

    Args:
        plan: Of the model.
        budget: Ledger of the device.
        name: Of the model there.
        writeback: The queue of a cache on the host, which closes it; None where nothing is written there.
        registrar: Who page-locks what of it is in host memory; None where that does nothing.
        staged: What is not to be locked, and the rings for it; None where nothing is staged.
    """
    if plan.cache == "streaming":
        return StreamingDraftCache(
            plan.config, plan.dtype, sink_tokens=plan.options.sink_tokens, recent_tokens=plan.recent_tokens,
            window_tokens=plan.streaming_window_tokens, batch=plan.batch, budget=budget, name=f"{name}: KV cache",
            spare_slots=plan.tree_slots,
        ), []  # fmt: skip
    if plan.cache == "retrieval":
        return RetrievedDraftCache(
            plan.config, plan.dtype, capacity_tokens=plan.context_tokens, budget_tokens=plan.options.budget_tokens,
            chunk_size=plan.options.chunk_size, batch=plan.batch, budget=budget, name=f"{name}: KV cache",
        ), []  # fmt: skip
    if not plan.on_host:
        return DeviceKVCache(
            plan.config, plan.dtype, capacity_tokens=plan.context_tokens, batch=plan.batch, budget=budget,
            name=f"{name}: KV cache", spare_slots=plan.tree_slots,
        ), []  # fmt: skip
    assert registrar is not None or budget.device.type == "cpu", "what a GPU copies from is page-locked or staged"
    assert writeback is not None, "what is kept on the host has to get there"
    slots: list[torch.Tensor] = []
    if plan.kv_layers_on_host:
        slots = list(budget.allocate(f"{name}: KV ring", plan.kv_ring_bytes).view(KV_RING_SLOTS, -1))
    locking = BlockLocking(registrar)
    if staged is not None:
        locking = BlockLocking(registrar, staged.pageable, staged.placement.staged_kv_layers)
    return HostKVCache(
        plan.config, plan.dtype, capacity_tokens=plan.context_tokens, batch=plan.batch,
        window_tokens=plan.window_tokens, piece_bytes=plan.kv_piece_bytes, budget=budget,
        writeback=stage_d2h(writeback, staged), locking=locking,
        workspace_bytes=plan.prefill_workspace_bytes, resident_layers=plan.placement.resident_kv_layers,
        name=f"{name}: KV cache",
    ), slots  # fmt: skip


LoadProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what of it stays on the host.

    `link_peak_gbps` is the bandwidth of back-to-back copies into its ring; None when nothing is streamed. `rope` is
    the table that rotates its queries and keys. `engine` is the queue of its copies, which ends with `engine.close`;
    `staged` holds the rings that some of its layers, or of their keys and values, are staged through.
    """

    runner: ModelRunner
    weights: HostWeights
    placement: Placement
    link_peak_gbps: float | None
    rope: RopeTable
    engine: CopyEngine
    staged: StagedMemory | None = None

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory of the weights and the staging rings."""
        rings_bytes = 0 if self.staged is None else self.staged.pinned_bytes
        return rings_bytes + sum(arena.pinned_bytes for arena in self.weights.layers)

    def close(self) -> None:
        """Give all memory back. Nothing may be copying any more."""
        self.runner.cache.close()
        self.weights.close()
        if self.staged is not None:
            self.staged.close()


def require_kernels(device: torch.device) -> None:
    """Refuse a GPU that the kernels cannot be compiled for."""
    if device.type == "cuda" and not triton_available:
        raise DeviceError("the GPU kernels need Triton, which is not installed: pip install triton, or --device cpu")


def check_vocabulary(target: Any, draft: Any, target_config: ModelConfig, draft_config: ModelConfig) -> None:
    """Refuse a draft whose token ids mean other text than the target's.

    Args:
        target: Tokenizer of the target.
        draft: Tokenizer of the draft.
        target_config: For the size of its logits.
        draft_config: The same of the draft.
    """
    target_vocab, draft_vocab = target.get_vocab(), draft.get_vocab()
    if target_vocab == draft_vocab:
        return
    different = sum(target_vocab.get(token) != index for token, index in draft_vocab.items())
    different += sum(token not in draft_vocab for token in target_vocab)
    raise VocabularyMismatchError(
        f"the draft's vocabulary ({len(draft_vocab)} tokens, {draft_config.vocab_size} logits) is not the target's "
        f"({len(target_vocab)} tokens, {target_config.vocab_size} logits): {different} entries differ. "
        "Take a draft of the same family, or --draft ngram"
    )


@dataclass(frozen=True)
class Sources:
    """Opened checkpoints, and what of them is needed besides weights."""

    target: CheckpointSource
    draft: CheckpointSource | None
    tokenizer: Any
    eos_token_ids: frozenset[int]


@dataclass(frozen=True)
class LoadedModels:
    """Target and draft, ready to run."""

    target: LoadedModel
    draft: LoadedModel | None


def open_sources(target: str | Path | CheckpointSource, draft: str | Path | CheckpointSource | None) -> Sources:
    """Open the checkpoints and read everything that can be wrong about them, short of the weights."""
    target_source = open_checkpoint(target) if isinstance(target, str | Path) else target
    draft_source = open_checkpoint(draft) if isinstance(draft, str | Path) else draft
    tokenizer = target_source.tokenizer()
    if draft_source is not None:
        check_vocabulary(tokenizer, draft_source.tokenizer(), target_source.config(), draft_source.config())
    return Sources(target_source, draft_source, tokenizer, frozenset(target_source.generation_eos()))


def reserve_workspace(plan: RunPlan, budget: DeviceBudget) -> None:
    """Enter the workspace and the CUDA graphs in the ledger."""
    budget.reserve("workspace", plan.workspace_bytes)
    if plan.graph_bytes:
        budget.reserve("CUDA graphs", plan.graph_bytes)


def load_models(
    sources: Sources, plan: RunPlan, budget: DeviceBudget, queues: CopyQueues, *, on_progress: LoadProgress | None,
    trees: bool = False,
) -> LoadedModels:  # fmt: skip
    """Load the draft, then the target; on a GPU also warm both up, the target for windows that are `trees` too."""
    draft = None
    if sources.draft is not None and plan.draft is not None:
        draft = load_model(sources.draft, plan.draft, budget, queues, name="draft", on_progress=on_progress)
    target = load_model(sources.target, plan.target, budget, queues, name="target", on_progress=on_progress)
    if budget.device.type == "cuda":
        try:
            warm_up(target, trees=trees)
            if draft is not None:
                warm_up(draft)
        except BaseException:
            target.engine.close()
            target.runner.cache.close()  # its queue goes before the memory that it copies
            raise
    return LoadedModels(target, draft)


def load_model(
    source: CheckpointSource, plan: ModelPlan, budget: DeviceBudget, queues: CopyQueues, *, name: str,
    on_progress: LoadProgress | None,
) -> LoadedModel:  # fmt: skip
    """Read the weights and connect the parts of one model."""
    stage = f"{name} weights"
    report = None if on_progress is None else (lambda done, total: on_progress(stage, done, total))
    registrar = make_registrar(budget.device)
    # Only what is streamed is copied asynchronously; systems that lock little memory can keep the rest.
    pin = set() if registrar is None else set(plan.placement.streamed_layers) - set(plan.placement.staged_layers)
    weights = load_weights(source, plan.dtype, layout=plan.layout, pin=pin, blockwise=registrar, on_progress=report)
    staged = None
    try:
        if registrar is not None:
            staged = lock_layers(weights, plan, registrar)
        return connect_model(weights, plan, budget, queues, name=name, registrar=registrar, staged=staged)
    except BaseException:
        weights.close()
        if staged is not None:
            staged.close()
        raise


def connect_model(
    weights: HostWeights, plan: ModelPlan, budget: DeviceBudget, queues: CopyQueues, *, name: str,
    registrar: Registrar | None = None, staged: StagedMemory | None = None,
) -> LoadedModel:  # fmt: skip
    """Give loaded weights their places and build the runner. Host memory of resident layers is given back on CUDA.

    `registrar` page-locks what a KV cache on the host takes as it grows. `staged` says what is not page-locked; without
    it all that is streamed must be.
    """
    placement = plan.placement if staged is None else staged.placement
    device, layout = budget.device, weights.layout
    layers_host = [weights.block(index) for index in range(len(weights.layers))]
    slots: list[torch.Tensor] = []
    if placement.num_slots:
        ring = budget.allocate(f"{name}: ring", placement.num_slots * max(layout.layer_bytes))
        slots = list(ring.view(placement.num_slots, -1))
    (shared,) = _on_device([weights.block(None)], budget, f"{name}: embedding and head")
    kept = placement.resident_layers
    buffers = _on_device([layers_host[index] for index in kept], budget, f"{name}: resident layers")
    resident = dict(zip(kept, buffers, strict=True))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        weights.shared.close()
        for index in kept:
            weights.layers[index].close()
            layers_host[index] = torch.empty(0, dtype=torch.uint8)  # even an empty view would hold the pages
    cache, kv_slots = make_cache(plan, budget, name, writeback=queues.d2h, registrar=registrar, staged=staged)
    with ExitStack() as undo:  # what has threads, the copies before the memory that they copy
        undo.callback(cache.close)
        link_peak_gbps = _measure_link(layers_host, placement, slots, kv_slots, queues.h2d, staged)
        decoder = Decoder(plan.config, layout.shared.views(shared))
        # Sinks and recent tokens are never further apart than their cache is long, however long the text is.
        fixed_length = cache.capacity_tokens if isinstance(cache, StreamingDraftCache) else None
        rope = RopeTable(plan.config, device, fixed_length=fixed_length)
        rows = RowBuilder(rope, device)
        engine = queues.h2d if staged is None else stage_h2d(queues.h2d, staged)
        undo.callback(engine.close)
        streamer = LayerStreamer(
            layers_host, resident, slots, make_views=layout.layer_views, engine=engine,
            kv=cache if isinstance(cache, HostKVCache) and kv_slots else None, kv_slots=kv_slots,
        )  # fmt: skip
        undo.pop_all()
    runner = ModelRunner(decoder, streamer, cache, rows, plan.shape)
    return LoadedModel(runner, weights, placement, link_peak_gbps, rope, engine, staged)


def _measure_link(
    layers_host: Sequence[torch.Tensor], placement: Placement, slots: Sequence[torch.Tensor],
    kv_slots: Sequence[torch.Tensor], engine: CopyEngine, staged: StagedMemory | None,
) -> float | None:  # fmt: skip
    """Peak of the link into a slot, from page-locked memory; None when nothing is streamed."""
    if not slots and not kv_slots:
        return None
    slot = (*slots, *kv_slots)[0]
    pinned = [layers_host[index] for index in placement.streamed_layers if index not in placement.staged_layers]
    if pinned or staged is not None:
        source = pinned[0] if pinned or staged is None else staged.h2d.pieces[0][: slot.nbytes]
        return measure_link_gbps(engine, slot[: source.nbytes], source)
    # Only keys and values will be streamed, from memory that is locked as it grows; so some is made as theirs will be.
    with closing(HostArena(slot.nbytes, name="a measurement of the link")) as arena:
        if slot.is_cuda:
            arena.pin()
        return measure_link_gbps(engine, slot, arena.buffer[: slot.nbytes])


def _on_device(blocks: list[torch.Tensor], budget: DeviceBudget, name: str) -> list[torch.Tensor]:
    """Packed blocks on the compute device, cut from one allocation: the allocator rounds each up. On the CPU they are
    already there and only entered in the ledger."""
    if not blocks:
        return []
    sizes = [block.nbytes for block in blocks]
    if budget.device.type == "cpu":
        budget.reserve(name, sum(sizes))
        return blocks
    buffers = list(budget.allocate(name, sum(sizes)).split(sizes))
    for buffer, block in zip(buffers, blocks, strict=True):
        buffer.copy_(block)
    return buffers


def warm_up(model: LoadedModel, *, trees: bool = False) -> None:
    """Compile kernels, load library modules and let the allocator take its blocks, with products of their full height.

    With `trees` also what verifies a tree and moves a path of it. Only useful on CUDA. Leaves the cache empty.
    """
    runner, cache = model.runner, model.runner.cache
    most = runner.shape.window_rows
    tokens = max(1, min(runner.shape.prefill_chunk_tokens, cache.capacity_tokens - most))
    runner.prefill(0, [0] * tokens)
    rows = min(most, cache.capacity_tokens - tokens)
    window, branches = Window((0,) * rows), trees and rows > 2
    if branches:
        if tokens < BLOCK_TOKENS:  # behind a whole block the pass of a tree runs a chain's kernels too
            runner.verify([window], [0])
        window = Window(window.tokens, (-1, *(0,) * (rows - 1)))
    logits = runner.verify([window], [0])
    if branches:
        cache.commit_path(0, [0, 2])
    positions = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
    for params in DIFFERENT_WAYS:
        sample(logits, SlotSampling.of([params], logits.device), positions, torch.zeros_like(positions))
    cache.truncate(0, 0)
    torch.cuda.synchronize(logits.device)
