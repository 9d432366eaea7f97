"""Where a peer's weights come from: a checkpoint through the runtime's own reader, or random numbers by name."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from widening.checkpoint import WidenedCheckpoint
from widening.shapes import TINY, WideShape, shape_named
from widening.untrained import UntrainedLlama

from offload_runtime.config import ModelConfig, require_positive
from offload_runtime.weights import CheckpointSource, checkpoint_tensors, open_checkpoint

WEIGHT_STD = 0.02


@dataclass(frozen=True)
class Shape:
    """A Llama with a vocabulary and a context of its own; `--layers` may cut the decoder."""

    decoder: WideShape
    vocab_size: int
    max_position_embeddings: int


SHAPES = {
    "tiny": Shape(replace(TINY, num_layers=4), 256, 1024),
    "llama-68m": Shape(shape_named("llama-68m"), 32000, 2048),
    "llama2-7b": Shape(shape_named("llama2-7b"), 32000, 4096),
    "llama2-13b": Shape(shape_named("llama2-13b"), 32000, 4096),
    "llama3-8b": Shape(shape_named("llama3-8b"), 128256, 8192),
}


def _decoder(shape_name: str, layers: int | None) -> WideShape:
    """The decoder of one of `SHAPES`, cut to `layers`. Raises `OptionError`."""
    decoder = SHAPES[shape_name].decoder
    if layers is None:
        return decoder
    require_positive("layers", layers)
    return replace(decoder, num_layers=layers)


def widened_source(
    shape_name: str, small: str, *, layers: int | None, noise: float, seed: int, device: torch.device
) -> WidenedCheckpoint:
    """A small model's language in a large shape, made in memory: what `widen_model.py` writes, without the files.

    Args:
        shape_name: One of `SHAPES`; vocabulary and context are the small model's.
        small: Checkpoint: a directory, a .gguf file or a hub id.
        layers: Decoder layers; None for the shape's.
        noise: Relative, on the small model's matrices.
        seed: Of the noise and of the surplus.
        device: Where the surplus is drawn.

    Raises:
        CheckpointError, OptionError: The small model cannot be opened, or does not fit the shape.
    """
    return WidenedCheckpoint(open_checkpoint(small), _decoder(shape_name, layers), noise, seed, device=device)


def random_source(shape_name: str, *, layers: int | None, seed: int, device: torch.device) -> UntrainedLlama:
    """Random weights without a language.

    Args:
        shape_name: One of `SHAPES`.
        layers: Decoder layers; None for the shape's.
        seed: Of the weights, together with their names: they do not depend on the order in which they are read.
        device: Where they are drawn: a CPU core needs minutes for 7B of them.
    """
    shape, decoder = SHAPES[shape_name], _decoder(shape_name, layers)

    def fill(name: str, out: torch.Tensor) -> None:
        out.copy_(random_weight(name, out.shape, dtype=out.dtype, seed=seed, device=device))

    return UntrainedLlama(
        decoder, fill, vocab_size=shape.vocab_size, context_tokens=shape.max_position_embeddings,
        reference=f"random {shape_name}",
    )  # fmt: skip


def random_weight(
    name: str, shape: Sequence[int], *, dtype: torch.dtype, seed: int, device: torch.device
) -> torch.Tensor:
    """The weight `name`, `[*shape]` of `dtype` on `device`: N(0, 0.02^2), norms one."""
    if len(shape) == 1:  # Llama's only vectors are norms
        return torch.ones(*shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()) ^ seed)
    weight = torch.empty(*shape, dtype=dtype, device=device)
    return weight.normal_(0.0, WEIGHT_STD, generator=generator)


class NamedWeights:
    """The tensors of a checkpoint by transformers' names, for models that are laid out otherwise than ours."""

    def __init__(self, source: CheckpointSource) -> None:
        self._fills = {name: fill for shard in source.shards() for name, fill in shard.tensors}

    def fill(self, name: str, out: torch.Tensor) -> None:
        """Read one tensor into `out`: contiguous, of its shape, on any device; converted to `out`'s dtype.

        Raises:
            CheckpointError: The file cannot be read.
        """
        if out.device.type == "cpu":
            self._fills[name](out)
            return
        host = torch.empty(out.shape, dtype=out.dtype)
        self._fills[name](host)
        out.copy_(host)


def layer_elements(config: ModelConfig) -> int:
    """Weights in the matrices of one decoder layer."""
    tensors = [tensor for tensor in checkpoint_tensors(config).values() if tensor.layer == 0]
    return sum(math.prod(tensor.shape) for tensor in tensors if len(tensor.shape) > 1)
