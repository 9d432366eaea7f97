"""Where a peer's weights come from: a checkpoint through the runtime's own reader, or random numbers by name."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from offload_runtime.config import ModelConfig, require_positive
from offload_runtime.weights import (
    CheckpointSource,
    Shard,
    checkpoint_tensors,
    model_config_from_transformers,
    packed_bytes,
)

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


class RandomSource:
    """A `CheckpointSource` of random weights without a language and without a tokenizer.

    Args:
        shape_name: One of `SHAPES`.
        layers: Decoder layers; None for the shape's.
        seed: Of the weights, together with their names: they do not depend on the order in which they are read.
        device: Where they are drawn: a CPU core needs minutes for 7B of them.
    """

    def __init__(self, shape_name: str, *, layers: int | None, seed: int, device: torch.device) -> None:
        shape = SHAPES[shape_name]
        self._name, self._seed, self._device = shape_name, seed, device
        num_layers = shape.num_layers if layers is None else layers
        require_positive("layers", num_layers)
        self._hf_config = LlamaConfig(
            architectures=["LlamaForCausalLM"], vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size, num_hidden_layers=num_layers,
            num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads,
            max_position_embeddings=shape.max_position_embeddings, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        self._config = model_config_from_transformers(self._hf_config)

    def _fill(self, name: str, out: torch.Tensor) -> None:
        out.copy_(random_weight(name, out.shape, dtype=out.dtype, seed=self._seed, device=self._device))

    @property
    def reference(self) -> str:
        """For messages."""
        return f"random {self._name}"

    @property
    def native_dtype(self) -> torch.dtype:
        """bf16: there is nothing to keep."""
        return torch.bfloat16

    def config(self) -> ModelConfig:
        """Shape and flags."""
        return self._config

    def hf_config(self) -> LlamaConfig:
        """The transformers configuration object, without an end-of-sequence token."""
        return self._hf_config

    def total_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the packed weights in `dtype`."""
        return packed_bytes(self._config, dtype)

    def shards(self) -> Iterator[Shard]:
        """All tensors as one shard, which is no file."""
        names = checkpoint_tensors(self._config)
        yield Shard(Path("random"), tuple((name, partial(self._fill, name)) for name in names))

    def tokenizer(self) -> Any:
        """None: there is no text."""
        return None

    def generation_settings(self) -> dict[str, Any]:
        """None."""
        return {}

    def generation_eos(self) -> tuple[int, ...]:
        """Nothing ends an answer."""
        return ()


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
