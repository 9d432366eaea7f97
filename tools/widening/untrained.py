"""Llamas without a language: any shape, the weights made as they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaConfig
from widening.made import MadeCheckpoint, fill_gaussian, named_generator
from widening.shapes import WideShape

from offload_runtime.weights import CheckpointSource, Shard, checkpoint_tensors, model_config_from_transformers

_BLOCK_ELEMENTS = 1 << 20
_VOCAB_SIZE = 32000


class UntrainedLlama(MadeCheckpoint):
    """A `CheckpointSource` of which just the cost of passes is measured.

    Args:
        shape: Of the decoder.
        fill: Computes the tensor of a name into a tensor of its shape.
        vocab_size: Rows of embedding and head.
        context_tokens: Longest context.
        reference: What it is, for messages.
        words: As of `MadeCheckpoint`.
    """

    def __init__(
        self, shape: WideShape, fill: Callable[[str, torch.Tensor], None], *, vocab_size: int, context_tokens: int,
        reference: str, words: CheckpointSource | None = None,
    ) -> None:  # fmt: skip
        self._fill = fill
        described = None if words is None else words.hf_config()
        hf_config = LlamaConfig(
            architectures=["LlamaForCausalLM"], vocab_size=vocab_size, hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size, num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
            max_position_embeddings=context_tokens, tie_word_embeddings=False,
            bos_token_id=getattr(described, "bos_token_id", None),
            eos_token_id=getattr(described, "eos_token_id", None),
            pad_token_id=getattr(described, "pad_token_id", None),
        )  # fmt: skip
        super().__init__(reference, hf_config, model_config_from_transformers(hf_config), words)

    def shards(self) -> Iterator[Shard]:
        """All tensors as one shard, which is no file; nothing is held between fills."""
        names = checkpoint_tensors(self.config())
        yield Shard(Path(self.reference), tuple((name, partial(self._fill, name)) for name in names))


def random_llama(
    shape: WideShape, seed: int = 0, *, vocab_size: int, context_tokens: int, reference: str,
    words: CheckpointSource | None = None, device: torch.device | None = None,
) -> UntrainedLlama:  # fmt: skip
    """Random weights: a target, or a draft whose steps cost what a known small model's cost.

    Args:
        shape: What is made.
        seed: Each tensor is seeded by its name, in whatever order it is read.
        vocab_size, context_tokens, reference, words: As of `UntrainedLlama`.
        device: Where the numbers are drawn: a CPU core needs minutes for 7B of them. A GPU draws others.
    """

    def fill(name: str, out: torch.Tensor) -> None:
        mean = 1.0 if out.dim() == 1 else 0.0  # Llama's only vectors are norms
        fill_gaussian(out, named_generator(device or torch.device("cpu"), seed, "random", name), mean=mean)

    return UntrainedLlama(
        shape, fill, vocab_size=vocab_size, context_tokens=context_tokens, reference=reference, words=words
    )


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
