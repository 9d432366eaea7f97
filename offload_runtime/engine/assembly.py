"""Puts a runtime together: open, plan, reserve, load, connect. Every check that needs no weights comes first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from offload_runtime_kernels._jit import triton_available

from offload_runtime.config import GB, ModelConfig, SamplingParams, format_bytes
from offload_runtime.copy_engine import CopyEngine, measure_link_gbps
from offload_runtime.errors import ContextLengthError, DeviceError, OptionError, VocabularyMismatchError
from offload_runtime.kv_cache import DeviceKVCache, kv_cache_bytes
from offload_runtime.memory import DeviceBudget
from offload_runtime.model import Decoder, RopeTable, RowBuilder, Window
from offload_runtime.model.linear import padded_rows
from offload_runtime.planner import MemoryNeeds, Placement, all_resident, place_layers, workspace_bytes
from offload_runtime.runners import ModelRunner, PassShape
from offload_runtime.sampling import sample
from offload_runtime.streaming import LayerStreamer
from offload_runtime.weights import (
    CheckpointSource,
    HostWeights,
    layer_layout,
    load_weights,
    open_checkpoint,
    packed_bytes,
    shared_layout,
)

LoadProgress = Callable[[str, int, int], None]

# Heights of the matrix products; they depend on nothing but the model and the kind of device, or the bits would depend
# on the placement. On a GPU 64 rows cost what one costs (the products of a 7B model: 3.76 ms at 64 rows, 3.57 ms at 1,
# 5.6 ms at 256; H200). A model of 8 GB and more is streamed on the cards this is for, its passes take hundreds of
# milliseconds, and 256 rows keep a window of 1024 tokens at 26 launches a layer, which the launch queue of 1024 holds.
# On a CPU every row costs.
_SMALL_TARGET_SHAPE = PassShape(64, 512, 1024)
_LARGE_TARGET_SHAPE = PassShape(256, 512, 1024)
_LARGE_TARGET_BYTES = 8 * GB
_CPU_TARGET_SHAPE = PassShape(8, 64, 256)
# A draft promises no bits, so its heights only have to be quick.
_DRAFT_SHAPES = {"cuda": PassShape(8, 256, 1024), "cpu": PassShape(1, 64, 256)}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_AUTO_CONTEXT_TOKENS = 8192


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what of it stays on the host.

    `link_peak_gbps` is the bandwidth of back-to-back copies into its ring; None when nothing is streamed. `rope` is
    the table that rotates its queries and keys.
    """

    runner: ModelRunner
    weights: HostWeights
    placement: Placement
    link_peak_gbps: float | None
    rope: RopeTable


def require_kernels(device: torch.device) -> None:
    """Refuse a GPU that the kernels cannot be compiled for."""
    if device.type == "cuda" and not triton_available:
        raise DeviceError("the GPU kernels need Triton, which is not installed: pip install triton, or --device cpu")


def resolve_dtype(name: str, source: CheckpointSource, device: torch.device) -> torch.dtype:
    """Turn `auto`, `bf16`, `fp16` or `fp32` into a dtype that the device computes in.

    `auto` is the checkpoint's own on a GPU and fp32 on a CPU.
    """
    if name == "auto":
        dtype = source.native_dtype if device.type == "cuda" else torch.float32
    elif name in _DTYPES:
        dtype = _DTYPES[name]
    else:
        raise OptionError(f"dtype must be auto, bf16, fp16 or fp32, not {name!r}")
    if device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        raise DeviceError(f"{torch.cuda.get_device_name(device)} does not compute in bf16: use --dtype fp16")
    return dtype


def resolve_context(context: int | str, config: ModelConfig) -> int:
    """Tokens to reserve for: asked for, or the model's maximum up to 8192."""
    if context == "auto":
        return min(config.max_position_embeddings, _AUTO_CONTEXT_TOKENS)
    try:
        tokens = int(context)
    except ValueError:
        raise OptionError(f"context must be auto or a number of tokens, not {context!r}") from None
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
    """Tokens that the model's positions reach, its RoPE scaling included."""
    rope, longest = config.rope_parameters, config.max_position_embeddings
    if rope["rope_type"] == "yarn":
        original = rope.get("original_max_position_embeddings") or longest
        return max(longest, int(original * rope["factor"]))
    return int(longest * rope["factor"]) if rope["rope_type"] == "dynamic" else longest


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
class ModelPlan:
    """One model's bytes before it is loaded."""

    config: ModelConfig
    dtype: torch.dtype
    shape: PassShape
    context_tokens: int
    window_tokens: int

    @property
    def layer_bytes(self) -> int:
        """One packed layer."""
        return layer_layout(self.config, self.dtype).total_bytes

    @property
    def shared_bytes(self) -> int:
        """Embedding, final norm and head."""
        return shared_layout(self.config, self.dtype).total_bytes

    @property
    def kv_bytes(self) -> int:
        """The KV cache."""
        return kv_cache_bytes(self.config, self.dtype, capacity_tokens=self.context_tokens, batch=1)

    @property
    def workspace_bytes(self) -> int:
        """Activations of the largest pass."""
        return workspace_bytes(
            self.config, self.dtype.itemsize, context_tokens=self.context_tokens,
            chunk_rows=min(self.shape.prefill_chunk_tokens, padded_rows(self.context_tokens, self.shape.prefill_rows)),
            window_rows=padded_rows(self.window_tokens, self.shape.window_rows),
        )  # fmt: skip

    @property
    def all_bytes(self) -> int:
        """Everything on the device, all layers resident, without a workspace."""
        return self.config.num_layers * self.layer_bytes + self.shared_bytes + self.kv_bytes


@dataclass(frozen=True)
class Plans:
    """Plans of target and draft."""

    target: ModelPlan
    draft: ModelPlan | None

    @property
    def host_bytes(self) -> int:
        """Host memory that both models' weights take while they are loaded."""
        plans = [self.target] if self.draft is None else [self.target, self.draft]
        return sum(packed_bytes(plan.config, plan.dtype) for plan in plans)


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


def open_sources(target: str | Path, draft: str | Path | None) -> Sources:
    """Open the checkpoints and read everything that can be wrong about them, short of the weights."""
    target_source = open_checkpoint(target)
    draft_source = None if draft is None else open_checkpoint(draft)
    tokenizer = target_source.tokenizer()
    if draft_source is not None:
        check_vocabulary(tokenizer, draft_source.tokenizer(), target_source.config(), draft_source.config())
    return Sources(target_source, draft_source, tokenizer, frozenset(target_source.generation_eos()))


def make_plans(sources: Sources, dtype: str, device: torch.device, *, context: int | str, window: int) -> Plans:
    """What both models will take. Raises `OptionError`, `ContextLengthError`, `DeviceError`."""
    torch_dtype = resolve_dtype(dtype, sources.target, device)
    config = sources.target.config()
    tokens = resolve_context(context, config)
    target = target_plan(config, torch_dtype, device, context=tokens, window=window)
    if sources.draft is None:
        return Plans(target, None)
    return Plans(target, draft_plan(sources.draft.config(), torch_dtype, device, context=tokens, window=window))


def load_models(
    sources: Sources, plans: Plans, placement: Placement, budget: DeviceBudget, engine: CopyEngine, *,
    on_progress: LoadProgress | None,
) -> LoadedModels:  # fmt: skip
    """Load the draft, then the target; on a GPU also warm both up."""
    draft = None
    if sources.draft is not None and plans.draft is not None:
        everything = all_resident(plans.draft.config.num_layers)
        draft = load_model(
            sources.draft, plans.draft, everything, budget, engine, name="draft", on_progress=on_progress
        )
    target = load_model(sources.target, plans.target, placement, budget, engine, name="target", on_progress=on_progress)
    if budget.device.type == "cuda":
        for model in (target, draft):
            if model is not None:
                warm_up(model)
    return LoadedModels(target, draft)


def target_plan(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, context: int, window: int
) -> ModelPlan:
    """Plan of a target."""
    if device.type == "cpu":
        shape = _CPU_TARGET_SHAPE
    else:
        shape = _LARGE_TARGET_SHAPE if packed_bytes(config, dtype) >= _LARGE_TARGET_BYTES else _SMALL_TARGET_SHAPE
    return ModelPlan(config, dtype, shape, context, window)


def draft_plan(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, context: int, window: int
) -> ModelPlan:
    """Plan of a draft model; its own maximum may shorten its context."""
    context = min(context, longest_context(config))
    return ModelPlan(config, dtype, _DRAFT_SHAPES[device.type], context, window)


def plan_placement(
    target: ModelPlan, draft: ModelPlan | None, budget: DeviceBudget, resident_layers: int | None
) -> Placement:
    """Place the target's layers beside everything else, or say what is short."""
    needs = MemoryNeeds(
        layer_bytes=target.layer_bytes,
        num_layers=target.config.num_layers,
        shared_bytes=target.shared_bytes,
        kv_bytes=target.kv_bytes,
        draft_bytes=draft.all_bytes if draft is not None else 0,
        # Draft and target take turns on one stream, so they share the allocator's blocks.
        workspace_bytes=max(target.workspace_bytes, draft.workspace_bytes if draft is not None else 0),
        context_bytes=budget.reserved_bytes,
    )
    placement = place_layers(needs, budget.limit_bytes, resident_layers)
    budget.reserve("workspace", needs.workspace_bytes)
    return placement


def load_model(
    source: CheckpointSource, plan: ModelPlan, placement: Placement, budget: DeviceBudget, engine: CopyEngine,
    *, name: str, on_progress: LoadProgress | None,
) -> LoadedModel:  # fmt: skip
    """Read the weights and connect the parts of one model."""
    stage = f"{name} weights"
    report = None if on_progress is None else (lambda done, total: on_progress(stage, done, total))
    # Only what is streamed is copied asynchronously; systems that lock little memory can keep the rest.
    streamed = set(range(placement.num_layers)) - set(placement.resident_layers)
    pin = streamed if budget.device.type == "cuda" else set()
    weights = load_weights(source, plan.dtype, pin=pin, on_progress=report)
    try:
        return connect_model(weights, plan, placement, budget, engine, name=name)
    except BaseException:
        weights.close()
        raise


def connect_model(
    weights: HostWeights, plan: ModelPlan, placement: Placement, budget: DeviceBudget, engine: CopyEngine, *, name: str
) -> LoadedModel:
    """Give loaded weights their places and build the runner. Host memory of resident layers is given back on CUDA."""
    device, layout = budget.device, weights.layer_layout
    layers_host = [arena.buffer[: layout.total_bytes] for arena in weights.layers]
    slots: list[torch.Tensor] = []
    if placement.num_slots:
        ring = budget.allocate(f"{name}: ring", placement.num_slots * layout.total_bytes)
        slots = _split(ring, placement.num_slots)
    shared_host = weights.shared.buffer[: weights.shared_layout.total_bytes]
    shared = _on_device(shared_host, budget, f"{name}: embedding and head")
    resident = _resident_layers(layers_host, placement, budget, f"{name}: resident layers")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        weights.shared.close()
        for index in placement.resident_layers:
            weights.layers[index].close()
            layers_host[index] = layers_host[index][:0]
    cache = DeviceKVCache(
        plan.config, plan.dtype, capacity_tokens=plan.context_tokens, batch=1, budget=budget, name=f"{name}: KV cache"
    )
    link_peak_gbps = None
    if slots:
        streamed = next(index for index in range(len(layers_host)) if index not in resident)
        link_peak_gbps = measure_link_gbps(engine, slots[0], layers_host[streamed])
    streamer = LayerStreamer(layers_host, resident, slots, make_views=layout.views, engine=engine)
    decoder = Decoder(plan.config, weights.shared_layout.views(shared))
    rope = RopeTable(plan.config, device)
    runner = ModelRunner(decoder, streamer, cache, RowBuilder(rope, device), plan.shape)
    return LoadedModel(runner, weights, placement, link_peak_gbps, rope)


def _on_device(host: torch.Tensor, budget: DeviceBudget, name: str) -> torch.Tensor:
    """The packed block on the compute device; on the CPU it is already there and only entered in the ledger."""
    if budget.device.type == "cpu":
        budget.reserve(name, host.nbytes)
        return host
    gpu = budget.allocate(name, host.nbytes)
    gpu.copy_(host)
    return gpu


def _resident_layers(
    layers_host: list[torch.Tensor], placement: Placement, budget: DeviceBudget, name: str
) -> dict[int, torch.Tensor]:
    """Device buffers of the layers that stay, cut from one block: the allocator rounds each block up."""
    chosen = placement.resident_layers
    if not chosen:
        return {}
    nbytes = sum(layers_host[index].nbytes for index in chosen)
    if budget.device.type == "cpu":  # already there, and only entered in the ledger
        budget.reserve(name, nbytes)
        return {index: layers_host[index] for index in chosen}
    block = budget.allocate(name, nbytes)
    buffers = dict(zip(chosen, _split(block, len(chosen)), strict=True))
    for index, buffer in buffers.items():
        buffer.copy_(layers_host[index])
    return buffers


def _split(block: torch.Tensor, count: int) -> list[torch.Tensor]:
    """`count` equal pieces of a block."""
    return list(block.view(count, -1))


def warm_up(model: LoadedModel) -> None:
    """Compile kernels, load library modules and let the allocator take its blocks, with the largest shapes.

    Only useful on CUDA. Leaves the cache empty.
    """
    runner, cache = model.runner, model.runner.cache
    tokens = min(runner.shape.prefill_chunk_tokens, cache.capacity_tokens - 1)
    runner.prefill(0, [0] * tokens)
    logits = runner.verify([Window((0,) * min(runner.shape.window_rows, cache.capacity_tokens - tokens))], [0])[0]
    positions = torch.arange(len(logits), device=logits.device)
    for temperature in (0.0, 1.0):
        sample(logits, SamplingParams(temperature=temperature), positions, torch.zeros_like(positions))
    cache.truncate(0, 0)
    torch.cuda.synchronize(logits.device)


def describe_placement(model: LoadedModel, plans: Plans, budget: DeviceBudget) -> str:
    """One line: what is resident, what is streamed, through how many slots."""
    placement, streamed = model.placement, model.placement.num_streamed
    where = f"{len(placement.resident_layers)} of {placement.num_layers} layers resident"
    if streamed:
        nbytes = model.runner.streamer.bytes_per_pass
        where += f", {streamed} streamed ({format_bytes(nbytes)} a pass) through {placement.num_slots} slots"
    limit = f" of {format_bytes(budget.limit_bytes)}" if budget.limit_bytes is not None else ""
    shorter = ""
    if plans.draft is not None and plans.draft.context_tokens < plans.target.context_tokens:
        shorter = f"; the draft has nothing to say behind {plans.draft.context_tokens} tokens"
    return (
        f"{where}; KV cache {format_bytes(plans.target.kv_bytes)} for {plans.target.context_tokens} tokens; "
        f"{format_bytes(budget.reserved_bytes)}{limit} of device memory reserved{shorter}"
    )
