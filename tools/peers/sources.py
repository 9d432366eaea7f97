"""Where a peer's weights come from: a checkpoint through the runtime's own reader, or random numbers by name."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LlamaConfig
from wordless_llama import WordlessLlama

from offload_runtime.config import ModelConfig, require_positive
from offload_runtime.weights import CheckpointSource, checkpoint_tensors

WEIGHT_STD = 0.02


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Llama decoder; `num_layers` is what `--layers` may cut."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_position_embeddings: int


SHAPES = {
    "tiny": Shape(64, 160, 4, 4, 2, 256, 1024),
    "llama-68m": Shape(768, 3072, 2, 12, 12, 32000, 2048),
    "llama2-7b": Shape(4096, 11008, 32, 32, 32, 32000, 4096),
    "llama2-13b": Shape(5120, 13824, 40, 40, 40, 32000, 4096),
    "llama3-8b": Shape(4096, 14336, 32, 32, 8, 128256, 8192),
}


def random_source(shape_name: str, *, layers: int | None, seed: int, device: torch.device) -> WordlessLlama:
    """Random weights without a language.

    Args:
        shape_name: One of `SHAPES`.
        layers: Decoder layers; None for the shape's.
        seed: Of the weights, together with their names: they do not depend on the order in which they are read.
        device: Where they are drawn: a CPU core needs minutes for 7B of them.
    """
    shape = SHAPES[shape_name]
    num_layers = shape.num_layers if layers is None else layers
    require_positive("layers", num_layers)
    hf_config = LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size, num_hidden_layers=num_layers,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_position_embeddings, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip

    def fill(name: str, out: torch.Tensor) -> None:
        out.copy_(random_weight(name, out.shape, dtype=out.dtype, seed=seed, device=device))

    return WordlessLlama(hf_config, fill, reference=f"random {shape_name}")


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
