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
from functools import partial
from types import ModuleType
from typing import Any

import torch
from common import PeerOptions, peer_parser
from measurement import Prepared, run_peer
from models import fill, fill_rotary, layer_elements, make_module, resident_layers, transformers_config
from transformers import PreTrainedModel

from offload_runtime.errors import OffloadError, OptionError
from offload_runtime.options import require_positive


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


def zero_config(options: PeerOptions, *, prefetch_layers: int, live_layers: int) -> dict[str, Any]:
    """DeepSpeed's configuration. Its buckets and limits are counted in elements, not bytes.

    On entering a layer it gathers up to `prefetch_layers` more of them, until `live_layers` are on the device.
    """
    config = options.source.config()
    layer = layer_elements(config)
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
            "stage3_param_persistence_threshold": config.hidden_size,
            "memory_efficient_linear": False,
        },
    }


def build_partitioned(deepspeed: ModuleType, options: PeerOptions, config: dict[str, Any]) -> PreTrainedModel:
    """The model with every parameter partitioned to host memory, filled there without a gather.

    transformers would initialise each weight twice through the GPU; here it is read into DeepSpeed's host tensor.
    """
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = make_module(transformers_config(options.source, options.dtype), options.dtype)
    fill_rotary(model, options.device)
    if options.source.config().tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        fill(options.source, name, parameter.ds_tensor.view(parameter.ds_shape))
    return model


def keep_resident(model: PreTrainedModel, num_layers: int) -> None:
    """Mark embeddings, final norm, lm_head and the first layers as persistent: gathered once, then never released.

    DeepSpeed's thresholds cannot say this (the embedding is larger than any matrix of a layer), so the mark that they
    would set is set here.
    """
    modules = [model.model.embed_tokens, model.model.norm, model.lm_head, *model.model.layers[:num_layers]]
    for module in modules:
        for parameter in module.parameters():
            parameter.ds_persist = True


def prepare(options: PeerOptions, *, prefetch_layers: int, live_layers: int) -> Prepared:
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
    layer_class = type(model.model.layers[0])
    deepspeed.utils.set_z3_leaf_modules(model, [layer_class])
    engine = deepspeed.initialize(model=model, config=config)[0]
    num_resident = resident_layers(options, working_layers=live_layers)
    keep_resident(model, num_resident)
    streamed = [p for p in model.model.layers.parameters() if not p.ds_persist]
    host = [p.ds_tensor for p in model.parameters() if p.ds_tensor.device.type == "cpu"]
    notes = ["embeddings, lm_head and all norms on the device; nothing is prefetched across passes"]
    if options.device.type != "cuda":
        notes.append("no GPU: weights are not pinned and nothing crosses a link, the times mean nothing")
    return Prepared(
        system="DeepSpeed ZeRO-Inference", version=deepspeed.__version__, model=engine.module,
        bytes_per_pass=sum(p.ds_numel * p.ds_tensor.element_size() for p in streamed),
        pinned_bytes=sum(t.nbytes for t in host if options.device.type == "cuda" and t.is_pinned()),
        system_settings={
            "resident_layers": num_resident, "prefetch_layers": prefetch_layers, "live_layers": live_layers,
            "leaf_modules": [layer_class.__name__], "deepspeed_config": config,
        },
        notes=tuple(notes),
    )  # fmt: skip


def prepare_from(arguments: argparse.Namespace) -> Callable[[PeerOptions], Prepared]:
    """Bind DeepSpeed's own options."""
    return partial(prepare, prefetch_layers=arguments.prefetch_layers, live_layers=arguments.live_layers)


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
    return run_peer(parser, prepare_from, close=close)


if __name__ == "__main__":
    sys.exit(main())
