"""Measure DeepSpeed ZeRO-Inference: ZeRO stage 3 with the parameters in pinned host memory, gathered ahead of use.

    python tools/peers/deepspeed_zero.py --shape llama2-7b --layers 32 --out deepspeed.json

Set up to be as fast as it goes: decoder layers are leaf modules (one gather for a layer instead of one for each
matrix), the prefetch reaches two layers ahead, nothing streamed is kept for reuse, and the linear layers are torch's
own instead of the ones meant for training. It prefetches in the order of the pass it recorded, hence the warm-up.

Needs `DS_BUILD_OPS=0 pip install deepspeed`: no compiled operator is used, and none is built.
"""

from __future__ import annotations

import argparse
import importlib
import os
import socket
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from common import (
    PeerOptions,
    default_dtype,
    llama_config,
    peer_parser,
    random_weight,
    rotary_embedding,
)
from measurement import Prepared, run_peer
from transformers import LlamaForCausalLM
from transformers.initialization import no_init_weights
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from offload_runtime.config import require_positive
from offload_runtime.errors import OffloadError, OptionError


def load_deepspeed(device: torch.device) -> ModuleType:
    """Import DeepSpeed for a single process on `device`. Raises `OffloadError` when it is not installed.

    Sets the launcher's environment variables (unless a launcher did), because without them DeepSpeed looks for MPI.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    defaults = {"RANK": "0", "LOCAL_RANK": str(device.index or 0), "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    defaults |= {"MASTER_PORT": str(free_port), "DS_ACCELERATOR": device.type}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("deepspeed")
    except ImportError as error:
        raise OffloadError(
            f"DeepSpeed cannot be imported ({error}): install it with DS_BUILD_OPS=0 pip install deepspeed"
        ) from error


def layer_elements(options: PeerOptions) -> int:
    """Weights of one decoder layer that stream: its seven matrices."""
    shape = options.shape
    head_dim = shape.hidden_size // shape.num_heads
    attention = 2 * shape.hidden_size * head_dim * (shape.num_heads + shape.num_kv_heads)
    return attention + 3 * shape.hidden_size * shape.intermediate_size


def zero_config(options: PeerOptions, *, prefetch_layers: int, live_layers: int) -> dict[str, Any]:
    """DeepSpeed's configuration. Its buckets and limits are counted in elements, not bytes.

    On entering a layer it gathers up to `prefetch_layers` more of them, until `live_layers` are on the device.
    """
    layer = layer_elements(options)
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": options.dtype == torch.bfloat16},
        "fp16": {"enabled": options.dtype == torch.float16},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": options.device.type == "cuda"},
            "stage3_prefetch_bucket_size": prefetch_layers * layer,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": live_layers * layer,
            # The norms stay on the device, as under DeepSpeed's default of 100,000: a copy of 8 KiB costs its latency.
            "stage3_param_persistence_threshold": options.shape.hidden_size,
            "memory_efficient_linear": False,
        },
    }


def build_partitioned(deepspeed: ModuleType, options: PeerOptions, config: dict[str, Any]) -> LlamaForCausalLM:
    """The model with every parameter partitioned to host memory, filled there without a gather.

    transformers would initialise each weight twice through the GPU; here it is drawn on the GPU once and written to
    DeepSpeed's host tensor.
    """
    model_config = llama_config(options)
    with deepspeed.zero.Init(config_dict_or_path=config), no_init_weights(), default_dtype(options.dtype):
        model = LlamaForCausalLM(model_config)
    model.model.rotary_emb = rotary_embedding(model_config, options.device)
    for name, parameter in model.named_parameters():
        weight = random_weight(name, parameter.ds_shape, options)
        parameter.ds_tensor.copy_(weight.view(-1))
    return model.eval().requires_grad_(False)


def keep_resident(model: LlamaForCausalLM, resident_layers: int) -> None:
    """Mark embeddings, final norm, lm_head and the first layers as persistent: gathered once, then never released.

    DeepSpeed's thresholds cannot say this (the embedding is larger than any matrix of a layer), so the mark that they
    would set is set here.
    """
    modules = [model.model.embed_tokens, model.model.norm, model.lm_head, *model.model.layers[:resident_layers]]
    for module in modules:
        for parameter in module.parameters():
            parameter.ds_persist = True


def prepare(options: PeerOptions, *, prefetch_layers: int, live_layers: int, leaf_modules: bool) -> Prepared:
    """Build the model under ZeRO stage 3 and hand it to DeepSpeed's engine, whose hooks stream it."""
    require_positive("prefetch_layers", prefetch_layers)
    if live_layers <= prefetch_layers:
        raise OptionError(
            f"live_layers is {live_layers} but must hold the layer in use beside {prefetch_layers} prefetched ones"
        )
    deepspeed = load_deepspeed(options.device)
    deepspeed.init_distributed(dist_backend="nccl" if options.device.type == "cuda" else "gloo")
    config = zero_config(options, prefetch_layers=prefetch_layers, live_layers=live_layers)
    model = build_partitioned(deepspeed, options, config)
    if leaf_modules:
        deepspeed.utils.set_z3_leaf_modules(model, [LlamaDecoderLayer])
    engine = deepspeed.initialize(model=model, config=config)[0]
    keep_resident(model, options.resident_layers)
    streamed = [p for p in model.model.layers.parameters() if not p.ds_persist]
    host = [p.ds_tensor for p in model.parameters() if p.ds_tensor.device.type == "cpu"]
    notes = ["embeddings, lm_head and all norms on the device; nothing is prefetched across passes"]
    if options.device.type != "cuda":
        notes.append("no GPU: weights are not pinned and nothing crosses a link, the times mean nothing")
    return Prepared(
        system="DeepSpeed ZeRO-Inference",
        version=deepspeed.__version__,
        model=engine.module,
        bytes_per_token=sum(p.ds_numel * p.ds_tensor.element_size() for p in streamed),
        pinned_bytes=sum(t.nbytes for t in host if options.device.type == "cuda" and t.is_pinned()),
        prefetch={
            "layers": prefetch_layers,
            "live_layers": live_layers,
            "bucket_elements": config["zero_optimization"]["stage3_prefetch_bucket_size"],
            "leaf_modules": [LlamaDecoderLayer.__name__] if leaf_modules else [],
        },
        system_settings={"deepspeed_config": config},
        notes=tuple(notes),
    )


def prepare_from(arguments: argparse.Namespace) -> Callable[[PeerOptions], Prepared]:
    """Bind DeepSpeed's own options."""
    prefetch_layers: int = arguments.prefetch_layers
    live_layers: int = arguments.live_layers
    leaf_modules: bool = arguments.leaf_modules
    return lambda options: prepare(
        options, prefetch_layers=prefetch_layers, live_layers=live_layers, leaf_modules=leaf_modules
    )


def close() -> None:
    """Leave the process group, if one was made: NCCL complains at exit otherwise, after the JSON line."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = peer_parser("Measure DeepSpeed ZeRO-Inference on a random Llama whose layers lie in pinned host memory.")
    parser.add_argument("--prefetch-layers", type=int, default=2, help="layers gathered ahead of the one in use")
    # DeepSpeed's own default of 1e9 elements is five layers of 7B.
    parser.add_argument("--live-layers", type=int, default=5, help="layers on the device at once, at most")
    parser.add_argument(
        "--leaf-modules", action=argparse.BooleanOptionalAction, default=True, help="gather a decoder layer as one"
    )
    return run_peer(parser, prepare_from, close=close)


if __name__ == "__main__":
    sys.exit(main())
