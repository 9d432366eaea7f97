"""Measure accelerate's `cpu_offload`: every decoder layer's weights are copied in before use and dropped after it.

    python tools/peers/accelerate_offload.py --shape llama2-7b --layers 32 --out accelerate.json

accelerate has no prefetch; its copies are blocking. It takes its host weights from any mapping, so they can be pinned,
which is the default here because it is the fastest it can do; `--no-pin` measures its own default, pageable memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
import transformers
from common import PeerOptions, peer_parser
from measurement import Prepared, run_peer
from models import fill, fill_resident, make_meta_model, require_whole_model, resident_layers
from torch import nn
from transformers import StaticCache

from offload_runtime.errors import OffloadError


def load_offloading() -> tuple[Callable[..., object], str]:
    """accelerate's `cpu_offload` and its version. Raises `OffloadError` when it is not installed."""
    try:
        import accelerate
    except ImportError as error:
        raise OffloadError(f"accelerate cannot be imported ({error}): pip install accelerate") from error
    return accelerate.cpu_offload, accelerate.__version__


def host_weights(layer: nn.Module, prefix: str, *, pin: bool, options: PeerOptions) -> dict[str, torch.Tensor]:
    """The weights of one layer by name, in host memory, pinned if asked."""
    found = {}
    for name, parameter in layer.named_parameters():
        host = torch.empty(parameter.shape, dtype=options.dtype, pin_memory=pin)
        fill(options.source, prefix + name, host)
        found[name] = host
    return found


def prepare(options: PeerOptions, *, pin: bool, whole: bool = False, compiled: bool = False) -> Prepared:
    """Build the model on the meta device, fill it, and offload all but the first resident decoder layers.

    Args:
        options: What to build.
        pin: Whether the offloaded weights are page-locked.
        whole: Raise `BudgetError` unless all layers fit the device: nothing is offloaded.
        compiled: As `whole`, with a static cache, for which transformers compiles decoding itself, on a GPU.
    """
    whole = whole or compiled
    if whole:
        require_whole_model(options)
    num_resident = options.layers if whole else resident_layers(options, working_layers=1)
    cpu_offload, version = (None, "") if num_resident == options.layers else load_offloading()
    pin_possible = pin and options.device.type == "cuda"
    model = make_meta_model(options.source, options)
    bytes_per_pass = pinned_bytes = 0
    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}."
        if cpu_offload is None or index < num_resident:
            fill_resident(layer, prefix, options.source, options)
            continue
        host = host_weights(layer, prefix, pin=pin_possible, options=options)
        bytes_per_pass += sum(weight.nbytes for weight in host.values())
        pinned_bytes += sum(weight.nbytes for weight in host.values() if pin_possible and weight.is_pinned())
        cpu_offload(layer, execution_device=options.device, offload_buffers=False, state_dict=host)
    notes = []
    if cpu_offload is not None:
        notes.append("embeddings, norm and head on the device; accelerate copies each weight when its module runs")
        if options.device.type != "cuda":
            notes.append("no GPU: weights are not pinned and nothing crosses a link, the times mean nothing")
    here = "transformers, compiled" if compiled else "transformers"
    return Prepared(
        system=here if cpu_offload is None else "accelerate cpu_offload", version=version or transformers.__version__,
        model=model, bytes_per_pass=bytes_per_pass, pinned_bytes=pinned_bytes,
        system_settings={"resident_layers": num_resident, "pinned": pin_possible and cpu_offload is not None},
        notes=tuple(notes),
        static_cache=StaticCache(model.config, max_cache_len=options.context_tokens) if compiled else None,
    )  # fmt: skip


def prepare_from(arguments: argparse.Namespace) -> Callable[[PeerOptions], Prepared]:
    """Bind the script's own options."""
    return partial(prepare, pin=arguments.pin, whole=arguments.whole, compiled=arguments.compiled)


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = peer_parser("Measure transformers with decoder layers in host memory under accelerate's cpu_offload.")
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True, help="weights in pinned memory")
    parser.add_argument("--whole", action="store_true", help="no offloading: exit code 3 where the model does not fit")
    parser.add_argument("--compiled", action="store_true", help="as --whole, compiled, with a static cache")
    return run_peer(parser, prepare_from)


if __name__ == "__main__":
    sys.exit(main())
