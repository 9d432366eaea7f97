"""Measure accelerate's `cpu_offload`: every decoder layer's weights are copied in before use and dropped after it.

    python tools/peers/accelerate_offload.py --shape llama2-7b --layers 32 --out accelerate.json

accelerate has no prefetch; its copies are blocking. It takes its host weights from any mapping, so they can be pinned,
which is the default here because it is the fastest it can do; `--no-pin` measures its own default, pageable memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import accelerate  # type: ignore[import-untyped]
import torch
from accelerate import cpu_offload
from common import PeerOptions, default_dtype, llama_config, peer_parser, random_weight, rotary_embedding
from measurement import Prepared, run_peer
from torch import nn
from transformers import LlamaForCausalLM
from transformers.initialization import no_init_weights


def fill_resident(module: nn.Module, prefix: str, options: PeerOptions) -> None:
    """Replace the module's meta parameters by random ones on the device; `prefix` is its name with a dot, or empty."""
    for name, parameter in list(module.named_parameters()):
        owner_name, _, leaf = name.rpartition(".")
        weight = random_weight(prefix + name, parameter.shape, options)
        setattr(module.get_submodule(owner_name), leaf, nn.Parameter(weight, requires_grad=False))


def host_weights(layer: nn.Module, prefix: str, *, pin: bool, options: PeerOptions) -> dict[str, torch.Tensor]:
    """Random weights of one layer by name, in host memory, pinned if asked. Drawn on the device, then copied out."""
    weights = {}
    for name, parameter in layer.named_parameters():
        host = torch.empty(parameter.shape, dtype=options.dtype, pin_memory=pin)
        weights[name] = host.copy_(random_weight(prefix + name, parameter.shape, options))
    return weights


def prepare(options: PeerOptions, *, pin: bool) -> Prepared:
    """Build the model on the meta device, fill it, and offload all but the first `resident_layers` decoder layers."""
    pin_possible = pin and options.device.type == "cuda"
    config = llama_config(options)
    with torch.device("meta"), no_init_weights(), default_dtype(options.dtype):
        model = LlamaForCausalLM(config)
    model.eval().requires_grad_(False)
    model.model.rotary_emb = rotary_embedding(config, options.device)
    for name in ("model.embed_tokens", "model.norm", "lm_head"):
        fill_resident(model.get_submodule(name), name + ".", options)
    bytes_per_token = pinned_bytes = 0
    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}."
        if index < options.resident_layers:
            fill_resident(layer, prefix, options)
            continue
        weights = host_weights(layer, prefix, pin=pin_possible, options=options)
        bytes_per_token += sum(weight.nbytes for weight in weights.values())
        pinned_bytes += sum(weight.nbytes for weight in weights.values() if pin_possible and weight.is_pinned())
        cpu_offload(layer, execution_device=options.device, offload_buffers=False, state_dict=weights)
    notes = ["embeddings, final norm and lm_head on the device; accelerate copies each weight when its module runs"]
    if pin and not pin_possible:
        notes.append("no GPU: weights are not pinned and nothing crosses a link, the times mean nothing")
    return Prepared(
        system="accelerate cpu_offload",
        version=accelerate.__version__,
        model=model,
        bytes_per_token=bytes_per_token,
        pinned_bytes=pinned_bytes,
        prefetch={"layers": 0},
        system_settings={"offload_buffers": False, "pinned": pin_possible},
        notes=tuple(notes),
    )


def prepare_from(arguments: argparse.Namespace) -> Callable[[PeerOptions], Prepared]:
    """Bind accelerate's own option."""
    pin: bool = arguments.pin
    return lambda options: prepare(options, pin=pin)


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = peer_parser("Measure accelerate's cpu_offload on a random Llama whose layers lie in host memory.")
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True, help="weights in pinned memory")
    return run_peer(parser, prepare_from)


if __name__ == "__main__":
    sys.exit(main())
