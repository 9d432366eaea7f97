"""The target and the draft as transformers' own modules, filled with the weights that every system gets, and the device
memory that a peer may take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil
import torch
from common import PeerOptions
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from offload_runtime.errors import BudgetError, DeviceError
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import GatedMLP
from offload_runtime.sizes import format_bytes
from offload_runtime.stream.device import device_memory_used_by_others
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.layout import ModelLayout, checkpoint_tensors
from offload_runtime.weights.sources import open_checkpoint

# Beside weights and keys: what torch's allocator, cuBLAS and the logits of a step take.
_RESERVE_BYTES = 1_000_000_000


def open_device(options: PeerOptions) -> tuple[PeerOptions, int]:
    """Make the device current and cap torch's allocator so that the process as a whole stays within `vram_bytes`.

    Comes before anything else touches the GPU: afterwards others' memory could not be told from its own, and all that
    is in use would count.

    Returns:
        The options with what other programs hold, and the bytes of VRAM that this one has in use already, those of
        CUDA's context (0 on the CPU).

    Raises:
        DeviceError: There is no such device.
        BudgetError: CUDA's context alone exceeds the cap.
    """
    if options.device.type == "cpu":
        return options, 0
    if options.device.type != "cuda" or not torch.cuda.is_available():
        raise DeviceError(f"{options.device} is not there: run on a machine with a CUDA GPU, or try with --device cpu")
    index, count = options.device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise DeviceError(f"{options.device} is not there: this machine has {count} CUDA devices, numbered from 0")
    others_bytes = device_memory_used_by_others(index) or 0
    torch.cuda.set_device(index)
    torch.cuda.synchronize()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    in_use_bytes = max(0, total_bytes - free_bytes - others_bytes)
    limit_bytes = total_bytes - others_bytes
    if options.vram_bytes is not None:
        limit_bytes = min(options.vram_bytes, limit_bytes)
    if limit_bytes <= in_use_bytes:
        raise BudgetError(
            f"{format_bytes(in_use_bytes)} of VRAM is in use before any weight is loaded, the cap is "
            f"{format_bytes(limit_bytes)}: raise --vram or free the GPU"
        )
    torch.cuda.set_per_process_memory_fraction((limit_bytes - in_use_bytes) / total_bytes)
    return replace(options, others_bytes=others_bytes), in_use_bytes


def free_bytes(options: PeerOptions) -> int:
    """Device memory that this process may still take; on a CPU the free RAM, within the same cap."""
    if options.device.type == "cpu":
        free = psutil.virtual_memory().available
        return free if options.vram_bytes is None else min(free, options.vram_bytes)
    free, total = torch.cuda.mem_get_info(options.device)
    return free if options.vram_bytes is None else free - max(0, total - options.others_bytes - options.vram_bytes)


def fill(source: CheckpointSource, name: str, out: torch.Tensor) -> None:
    """Read a tensor of a checkpoint, by transformers' name of it, into `out`: contiguous, of its shape, on any device;
    converted to `out`'s dtype.

    Raises:
        CheckpointError: The file cannot be read.
    """
    host = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype)
    source.fills[name](host)
    if host is not out:
        out.copy_(host)


def layer_elements(config: ModelConfig) -> int:
    """Weights in the matrices of one decoder layer."""
    tensors = [tensor for tensor in checkpoint_tensors(config).values() if tensor.layer == 0]
    return sum(math.prod(tensor.shape) for tensor in tensors if len(tensor.shape) > 1)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let modules built inside make parameters of `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def transformers_config(source: CheckpointSource, dtype: torch.dtype) -> Any:
    """The model's configuration, with torch's fused attention."""
    config = AutoConfig.for_model(**source.settings)
    config.dtype = dtype
    config._attn_implementation = "sdpa"
    return config


def make_module(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the current device (see `torch.device` as a context), its weights not initialised.

    What it generates ends at the asked length: the checkpoint's end-of-sequence token and its sampling are left out.
    """
    with no_init_weights(), default_dtype(dtype):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    model.generation_config = GenerationConfig()
    return model.eval().requires_grad_(False)


def fill_rotary(model: PreTrainedModel, device: torch.device) -> None:
    """Give the model a fresh RoPE module on `device`, in fp32.

    One built on the meta device has no frequencies, and one built under DeepSpeed's `zero.Init` has them in bf16.
    """
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)


def fill_resident(module: nn.Module, prefix: str, source: CheckpointSource, options: PeerOptions) -> None:
    """Replace the module's parameters by ones on the device; `prefix` is its name with a dot, or empty."""
    for name, parameter in list(module.named_parameters()):
        owner_name, _, leaf = name.rpartition(".")
        weight = torch.empty(parameter.shape, dtype=options.dtype, device=options.device)
        fill(source, prefix + name, weight)
        setattr(module.get_submodule(owner_name), leaf, nn.Parameter(weight, requires_grad=False))


def make_meta_model(source: CheckpointSource, options: PeerOptions) -> PreTrainedModel:
    """A model of which embeddings, final norm and head are on the device, and the decoder layers nowhere yet."""
    config = transformers_config(source, options.dtype)
    with torch.device("meta"):
        model = make_module(config, options.dtype)
    fill_rotary(model, options.device)
    for name in ("model.embed_tokens", "model.norm"):
        fill_resident(model.get_submodule(name), name + ".", source, options)
    if source.config().tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    else:
        fill_resident(model.lm_head, "lm_head.", source, options)
    return model


def resident_model(source: CheckpointSource, options: PeerOptions) -> PreTrainedModel:
    """All of a model on the device."""
    model = make_meta_model(source, options)
    for index, layer in enumerate(model.model.layers):
        fill_resident(layer, f"model.layers.{index}.", source, options)
    return model


def load_draft(options: PeerOptions) -> PreTrainedModel | None:
    """The draft on the device; None where none is asked for.

    transformers 5.17 and 5.23 divide the logits of an assistant by the temperature twice: once themselves, once by the
    processors of the target that they hand on. The tokens stay right and fewer are accepted, which would be unfair:
    they are multiplied by it here.
    """
    if options.draft is None:
        return None
    draft = resident_model(open_checkpoint(options.draft), options)
    if options.temperature:
        draft.lm_head.register_forward_hook(lambda module, inputs, logits: logits * options.temperature)
    return draft


def prefill_bytes(config: ModelConfig, options: PeerOptions) -> int:
    """Device memory of what a prompt's pass computes: activations and, of a chunk, the mask over all keys.

    Only a whole prompt needs no mask. That of a chunk is made as booleans and handed to the attention kernel in the
    dtype of the queries, a padded copy included.
    """
    mlp = config.layers[0].mlp
    assert isinstance(mlp, GatedMLP)
    itemsize, tokens, inner = options.dtype.itemsize, options.context_tokens, mlp.intermediate_size
    chunk = options.prefill_chunk
    if chunk is None or chunk >= tokens:
        return 8 * tokens * inner * itemsize
    return 8 * chunk * inner * itemsize + chunk * tokens * (1 + 2 * itemsize)


def fitting_layers(options: PeerOptions, *, working_layers: int) -> int:
    """Decoder layers that fit the device beside the rest of the model, the draft, its keys, and `working_layers`.

    The keys and values of the target count as well, unless they are kept on the host.
    """
    config, itemsize = options.source.config(), options.dtype.itemsize
    layout = ModelLayout.of(config, options.dtype)
    layer_bytes = layout.layer_bytes[0]
    others = layout.total_bytes - config.num_layers * layer_bytes + _RESERVE_BYTES
    kv_bytes = config.kv_bytes_per_token(itemsize) * options.context_tokens
    # A concatenation holds the old and the new keys of a layer, and the offloaded cache the next layer's.
    others += kv_bytes if options.kv_cache == "device" else 4 * kv_bytes // config.num_layers
    working_bytes = prefill_bytes(config, options)
    if options.draft is not None:
        draft = open_checkpoint(options.draft)
        others += ModelLayout.of(draft.config(), options.dtype).total_bytes
        others += draft.config().kv_bytes_per_token(itemsize) * options.context_tokens
        working_bytes = max(working_bytes, prefill_bytes(draft.config(), options))
    others += working_bytes
    return max(0, min(config.num_layers, (free_bytes(options) - others) // layer_bytes - working_layers))


def resident_layers(options: PeerOptions, *, working_layers: int) -> int:
    """The layers asked for, or as many as fit."""
    if options.resident_layers is not None:
        return options.resident_layers
    return fitting_layers(options, working_layers=working_layers)


def require_whole_model(options: PeerOptions) -> None:
    """Raise `BudgetError`, before anything is loaded, unless the whole model fits the device."""
    fitting = fitting_layers(options, working_layers=0)
    if fitting < options.layers:
        raise BudgetError(
            f"{options.source.reference} does not fit: {fitting} of {options.layers} layers do in the "
            f"{format_bytes(free_bytes(options))} that are free on {options.device}"
        )
