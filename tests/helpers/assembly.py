"""From a transformers model to one of our runners, through our loader."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from offload_runtime_kernels.experts_cpu import ExpertsCpu
from offload_runtime_kernels.scaled_rows import ScaledFormat

from offload_runtime.cache.device import KVCache, block_bytes, num_blocks
from offload_runtime.cache.host import HostKVCache
from offload_runtime.cache.host_io import HostKVCard
from offload_runtime.core import Batch, TokenTree
from offload_runtime.engine.load_model import NO_CPU, CpuThreads, add_experts, lent_to_head, make_pool
from offload_runtime.models.heads import HeadConfig
from offload_runtime.models.layers import ExpertStore, LayerWeights
from offload_runtime.models.rope import RopeTable
from offload_runtime.runners.head_decoder import HeadDecoder
from offload_runtime.runners.model_runner import Decoder, ModelRunner, RowsDecoder, decide
from offload_runtime.sampling import SlotSampling
from offload_runtime.stream.arena import Registrar, Staging
from offload_runtime.stream.copy_engine import CopyEngine, CopyQueues
from offload_runtime.stream.device import DeviceBudget, LayerPartition
from offload_runtime.stream.expert_pool import ExpertPool, ResidentExperts
from offload_runtime.stream.queue import CardRing, LayerStreamer, make_copy_engine
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.layout import EMBEDDING, ModelLayout, checkpoint_tensors
from offload_runtime.weights.loader import HostWeights, load_weights
from offload_runtime.weights.sources import open_checkpoint
from tests.helpers.families import family_model
from tests.helpers.kernel_conditions import NUMBERS, experts_library
from tests.helpers.models import model_config_from_transformers, random_model

CPU = torch.device("cpu")


def prefill(
    runner: ModelRunner, slot: int, tokens: Sequence[int], on_layer: Callable[[int, int], None] | None = None
) -> torch.Tensor:
    """Read a prompt: logits [1, V] behind its last token."""
    return runner.forward(Batch(prompts={slot: tokens}, on_layer=on_layer)).logits


def verify(runner: ModelRunner, trees: Mapping[int, TokenTree]) -> torch.Tensor:
    """Logits [N, V] of one pass over trees."""
    return runner.forward(Batch(trees)).logits


def tokens_behind(
    logits: torch.Tensor, sampling: SlotSampling, trees: Mapping[int, TokenTree], committed: Sequence[int]
) -> list[int]:
    """What is chosen behind the rows of trees."""
    batch = Batch(trees)
    batch.logits = logits
    decide(batch, sampling, committed)
    assert batch.tokens is not None
    return batch.tokens()


CHUNK_TOKENS = 32


@dataclass(frozen=True)
class HostKV:
    """A KV cache in host memory: buffers of its ring on the link, and the layers that stay on the device."""

    buffers: int = 2
    resident_layers: tuple[int, ...] = ()
    window_tokens: int = 40


@dataclass(frozen=True)
class Assembled:
    """A runner and what it stands on; the engine's worker ends with the process at the latest."""

    runner: ModelRunner
    engine: CopyEngine
    weights: HostWeights

    def close(self) -> None:
        """End the copy engine and unlock the weights."""
        self.engine.close()
        self.runner.cache.close()
        self.weights.close()


def _copy_weight(weight: torch.Tensor, out: torch.Tensor, _: Staging | None = None) -> None:
    out.copy_(weight)


def in_memory(hf_model: Any) -> CheckpointSource:
    """A transformers model as a checkpoint without files and without a tokenizer."""
    config, weights = model_config_from_transformers(hf_model.config), hf_model.state_dict()
    fills = {name: partial(_copy_weight, weights[name]) for name in checkpoint_tensors(config)}
    return CheckpointSource(config, hf_model.dtype, "memory", hf_model.config.to_dict(), fills, lambda: None)


def pool_of(
    weights: HostWeights, size: int | None, device: torch.device, cpu_share: float | None
) -> ResidentExperts | ExpertPool | None:  # fmt: skip
    """The experts of a model: all of them, or as many as have room in so many buffers beside what the CPU computes."""
    experts, dtype, cpu = weights.layout.experts, weights.layout.dtype, NO_CPU
    buffer_bytes = max(one.block.total_bytes for one in experts.values())
    total = sum(one.num_experts for one in experts.values()) if size is None else size
    buffers = torch.full((total, buffer_bytes), 255, dtype=torch.uint8, device=device)
    if size is None:
        of_layers = buffers.split([one.num_experts for one in experts.values()])
        for layer, part in zip(experts, of_layers, strict=True):
            part[:, : experts[layer].block.total_bytes] = weights.experts_of(layer).to(device)
    elif cpu_share != 0:
        kinds = {place.encoding for one in experts.values() for place in one.places.values()}
        is_scaled = dtype == torch.bfloat16 and any(isinstance(kind, ScaledFormat) for kind in kinds)
        library = experts_library(dtype, kinds | {*NUMBERS} if is_scaled else kinds)
        cpu = CpuThreads(cpu_share, ExpertsCpu(library, 1))
    engine = make_copy_engine(device)
    queues = None if size is None else CopyQueues(engine, demand=engine)
    x = torch.empty(0, weights.config.hidden_size, dtype=dtype, device=device)
    pool = make_pool(experts, buffers, queues, x, cpu=cpu)
    if isinstance(pool, ExpertPool):
        add_experts(pool, weights, experts, cpu, {})
    return pool


def make_runner(
    model: Any,
    *,
    buffers: int = 0,
    pool_buffers: int | None = None,
    cpu_share: float | None = 0,
    resident: tuple[int, ...] | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    capacity_tokens: int = 160,
    batch: int = 3,
    window_tokens: int = 40,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    host_kv: HostKV | None = None,
    layout: ModelLayout | None = None,
    target: ModelRunner | None = None,
) -> Assembled:
    """Load a model with our loader and build a runner.

    Args:
        model: An opened checkpoint, or a transformers model.
        buffers: Those of the ring; 0 keeps every layer resident.
        pool_buffers: Those of experts; None: all experts stay.
        cpu_share: Of the missing ones, what the CPU computes; None: by measured rates.
        resident: Layers that stay on the device when there is a ring; by default none.
        chunk_tokens: Pieces that a prompt is worked on in.
        capacity_tokens: Of the cache, per sequence.
        batch: Sequences of the cache.
        window_tokens: Most tokens of a window, where layers keep states.
        device: Where to compute.
        dtype: Of weights, activations and cache.
        host_kv: Keeps the KV cache in host memory.
        layout: How the weights are stored; by default plainly.
        target: Of a head, which shares its embedding and its `lm_head`.
    """
    source = model if isinstance(model, CheckpointSource) else in_memory(model)
    pin = range(source.config().num_layers) if device.type == "cuda" else ()
    registrar = Registrar() if device.type == "cuda" else None
    weights = load_weights(source, layout or ModelLayout.of(source.config(), dtype), pin=pin, registrar=registrar)
    config = weights.config
    engine = make_copy_engine(device)
    layout, buffer_bytes = weights.layout, max(weights.layout.layer_bytes)
    layers = [weights.block(index) for index in range(config.num_layers)]
    assert buffers or resident is None, "without a ring every layer is resident"
    staying = tuple(range(config.num_layers)) if not buffers else resident or ()
    budget, kv_buffers = DeviceBudget(device, None), []
    cache: KVCache
    if host_kv is None:
        cache = KVCache(
            config, dtype, capacity_tokens=capacity_tokens, batch=batch, budgets=[budget], window_tokens=window_tokens
        )
    else:
        piece_bytes = block_bytes(config, dtype, 0)
        workspace_bytes = num_blocks(capacity_tokens) * piece_bytes
        cache = HostKVCache(
            config, dtype, capacity_tokens=capacity_tokens, batch=batch, window_tokens=host_kv.window_tokens,
            cards=[HostKVCard(budget, make_copy_engine(device), piece_bytes, workspace_bytes, registrar)],
            resident_layers=host_kv.resident_layers,
        )  # fmt: skip
        kv_buffers = [torch.full((piece_bytes,), 255, dtype=torch.uint8, device=device) for _ in range(host_kv.buffers)]
    scratch_bytes = layout.scratch_bytes(device.type, range(config.num_layers), head=target is None)
    scratch = torch.full((scratch_bytes,), 255, dtype=torch.uint8, device=device) if scratch_bytes else None
    # NaN in any dtype
    ring = [torch.full((buffer_bytes,), 255, dtype=torch.uint8, device=device) for _ in range(buffers)]
    pool = pool_of(weights, pool_buffers, device, cpu_share) if layout.experts else None

    def make_views(layer: int, buffer: torch.Tensor) -> LayerWeights:
        found = LayerWeights(layout.layers[layer].views(buffer, scratch))
        if pool is not None and layer in layout.experts:
            matrices = layout.experts[layer].matrices(pool.buffers)
            found.experts = ExpertStore(matrices, partial(pool.fetch, layer))
        return found

    streamer = LayerStreamer(
        layers,
        {index: layers[index].to(device) for index in staying},
        [CardRing(engine, ring, kv_buffers, pool if isinstance(pool, ExpertPool) else None)],
        make_views=make_views,
        kv=cache if isinstance(cache, HostKVCache) else None,
    )
    shared = layout.shared.views(weights.block(None).to(device), scratch) if config.has_ends else {}
    if EMBEDDING in weights.arenas:
        shared |= layout.embedding.views(weights.block(EMBEDDING).to(device))
    rope = RopeTable(config, device)
    if target is not None:
        assert isinstance(config, HeadConfig)
        shared = {**lent_to_head(target.decoder, scratch), **shared}
    if not config.has_ends:
        decoder: Decoder = RowsDecoder(config, dtype, LayerPartition.of_one(device, config.num_layers))
    else:
        decoder = HeadDecoder(config, shared) if isinstance(config, HeadConfig) else Decoder(config, shared)
    runner = ModelRunner(decoder, streamer, cache, rope, chunk_tokens)
    return Assembled(runner, engine, weights)


CAPACITY = 1600
# One of each kind of layers and of each place of what they need: a model, and options of `make_runner`.
RUNNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "resident": ("llama-gqa", {}), "streamed": ("llama-gqa", {"buffers": 2}),
    "host KV": ("llama-gqa", {"host_kv": HostKV()}), "windows": ("mistral-window", {}),
    "hybrid": ("qwen3_5_text", {}), "mixture": ("qwen3_moe", {}),
    "streamed mixture": ("qwen3_moe", {"buffers": 2, "pool_buffers": 6}),
}  # fmt: skip


def runner_of(kind: str, directory: Path, **options: Any) -> Assembled:
    """One of `RUNNERS`; a directory is for mixtures, whose experts are stored one by one."""
    name, own = RUNNERS[kind]
    model = random_model(name) if "-" in name else family_model(name, 1)
    if name.endswith("moe"):
        model.save_pretrained(directory)
        model = open_checkpoint(directory)
    return make_runner(model, **own, **options)


def assemble(name: str, **options: Any) -> Assembled:
    """A runner of a model of that name with room for `CAPACITY` tokens."""
    return make_runner(random_model(name), capacity_tokens=CAPACITY, **options)


def copying_threads() -> set[threading.Thread]:
    """Those of the copy engines, staging ones included."""
    return {thread for thread in threading.enumerate() if thread.name.startswith(("staging", "copy-engine"))}


def reset(*runners: ModelRunner) -> None:
    """Empty the caches."""
    for runner in runners:
        for slot in range(3):
            runner.cache.truncate(slot, 0)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit, and nothing of it undefined."""
    return torch.equal(left, right) and bool(left.isfinite().all())
