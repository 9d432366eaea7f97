"""A Llama of random weights under a real vocabulary: a draft whose steps cost what a known small model's cost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig
from widening.gaussian import fill_gaussian, named_generator
from widening.shapes import WideShape

from offload_runtime.config import ModelConfig
from offload_runtime.weights import CheckpointSource, Shard, checkpoint_tensors, packed_bytes
from offload_runtime.weights.architecture import model_config_from_transformers


class RandomLlama:
    """A `CheckpointSource` of a shape without a language.

    Args:
        source: Gives the vocabulary, the tokenizer and the longest context, so that the result drafts for whatever
            shares them; none of its weights is read.
        shape: What is made.
        seed: Each tensor is seeded by its name.
        device: Where the numbers are drawn. A GPU draws others.
    """

    def __init__(
        self, source: CheckpointSource, shape: WideShape, seed: int = 0, *, device: torch.device | None = None
    ) -> None:
        self._source, self._seed = source, seed
        self._device = device or torch.device("cpu")
        vocabulary, described = source.config(), source.hf_config()
        self._hf_config = LlamaConfig(
            vocab_size=vocabulary.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=vocabulary.max_position_embeddings,
            tie_word_embeddings=False,
            bos_token_id=described.bos_token_id,
            eos_token_id=described.eos_token_id,
            pad_token_id=getattr(described, "pad_token_id", None),
        )
        self._config = model_config_from_transformers(self._hf_config)

    def _fill(self, name: str, out: torch.Tensor) -> None:
        mean = 1.0 if out.dim() == 1 else 0.0  # Llama's only vectors are norms
        fill_gaussian(out, named_generator(self._device, self._seed, "random", name), mean=mean)

    @property
    def reference(self) -> str:
        """Whose vocabulary it has, for messages."""
        return f"random weights under the vocabulary of {self._source.reference}"

    @property
    def native_dtype(self) -> torch.dtype:
        """bf16: there is nothing to keep."""
        return torch.bfloat16

    def config(self) -> ModelConfig:
        """Shape and flags."""
        return self._config

    def hf_config(self) -> LlamaConfig:
        """The transformers configuration object."""
        return self._hf_config

    def total_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the packed weights in `dtype`."""
        return packed_bytes(self._config, dtype)

    def shards(self) -> Iterator[Shard]:
        """All tensors as one shard; nothing is held between fills."""
        path = next(iter(self._source.shards())).path
        yield Shard(path, tuple((name, partial(self._fill, name)) for name in checkpoint_tensors(self._config)))

    def tokenizer(self) -> Any:
        """The source's tokenizer."""
        return self._source.tokenizer()

    def generation_settings(self) -> dict[str, Any]:
        """The source's."""
        return self._source.generation_settings()

    def generation_eos(self) -> tuple[int, ...]:
        """The source's."""
        return self._source.generation_eos()
