"""Llamas without a language: any shape, the weights made as they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig
from widening.gaussian import fill_gaussian, named_generator
from widening.shapes import WideShape

from offload_runtime.config import ModelConfig
from offload_runtime.weights import (
    CheckpointSource,
    Shard,
    checkpoint_tensors,
    model_config_from_transformers,
    packed_bytes,
)

_BLOCK_ELEMENTS = 1 << 20
_VOCAB_SIZE = 32000


class UntrainedLlama:
    """A `CheckpointSource` of which just the cost of passes is measured.

    Args:
        shape: Of the decoder.
        fill: Computes the tensor of a name into a tensor of its shape.
        vocab_size: Rows of embedding and head.
        context_tokens: Longest context.
        reference: What it is, for messages.
        words: Gives the tokenizer and the tokens that end an answer; without it there is no text and no end.
    """

    def __init__(
        self, shape: WideShape, fill: Callable[[str, torch.Tensor], None], *, vocab_size: int, context_tokens: int,
        reference: str, words: CheckpointSource | None = None,
    ) -> None:  # fmt: skip
        self._fill, self._reference, self._words = fill, reference, words
        described = None if words is None else words.hf_config()
        self._hf_config = LlamaConfig(
            architectures=["LlamaForCausalLM"], vocab_size=vocab_size, hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size, num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
            max_position_embeddings=context_tokens, tie_word_embeddings=False,
            bos_token_id=getattr(described, "bos_token_id", None),
            eos_token_id=getattr(described, "eos_token_id", None),
            pad_token_id=getattr(described, "pad_token_id", None),
        )  # fmt: skip
        self._config = model_config_from_transformers(self._hf_config)

    @property
    def reference(self) -> str:
        """For messages."""
        return self._reference

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
        """All tensors as one shard, which is no file; nothing is held between fills."""
        names = checkpoint_tensors(self._config)
        yield Shard(Path(self._reference), tuple((name, partial(self._fill, name)) for name in names))

    def tokenizer(self) -> Any:
        """That of `words`, or None."""
        return None if self._words is None else self._words.tokenizer()

    def generation_settings(self) -> dict[str, Any]:
        """Those of `words`, or none."""
        return {} if self._words is None else self._words.generation_settings()

    def generation_eos(self) -> tuple[int, ...]:
        """Those of `words`; otherwise nothing ends an answer."""
        return () if self._words is None else self._words.generation_eos()


def random_llama(
    source: CheckpointSource, shape: WideShape, seed: int = 0, *, device: torch.device | None = None
) -> UntrainedLlama:
    """Random weights under a real vocabulary: a draft whose steps cost what a known small model's cost.

    Args:
        source: Gives the vocabulary, the tokenizer and the longest context, so that the result drafts for whatever
            shares them; none of its weights is read.
        shape: What is made.
        seed: Each tensor is seeded by its name.
        device: Where the numbers are drawn. A GPU draws others.
    """

    def fill(name: str, out: torch.Tensor) -> None:
        mean = 1.0 if out.dim() == 1 else 0.0  # Llama's only vectors are norms
        fill_gaussian(out, named_generator(device or torch.device("cpu"), seed, "random", name), mean=mean)

    return UntrainedLlama(
        shape, fill, vocab_size=source.config().vocab_size, context_tokens=source.config().max_position_embeddings,
        reference=f"random weights under the vocabulary of {source.reference}", words=source,
    )  # fmt: skip


def repeated_llama(shape: WideShape, *, context_tokens: int) -> UntrainedLlama:
    """Weights that cost no time to make: one block of Gaussian numbers, over and over.

    Args:
        shape: Of the decoder.
        context_tokens: Longest context.
    """
    block = torch.empty(_BLOCK_ELEMENTS, dtype=torch.bfloat16)
    fill_gaussian(block, named_generator(torch.device("cpu"), "repeated"), mean=0.0)

    def fill(name: str, out: torch.Tensor) -> None:
        if out.dim() == 1:  # Llama's only vectors are norms
            out.fill_(1)
            return
        for part in out.view(-1).split(_BLOCK_ELEMENTS):
            part.copy_(block[: part.numel()])

    return UntrainedLlama(
        shape, fill, vocab_size=_VOCAB_SIZE, context_tokens=context_tokens, reference="repeated random weights"
    )
