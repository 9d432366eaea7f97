"""A Llama of any shape whose weights cost no time to make: one block of Gaussian numbers, over and over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig
from widening.gaussian import fill_gaussian, named_generator
from widening.shapes import WideShape

from offload_runtime.config import ModelConfig
from offload_runtime.weights import Shard, checkpoint_tensors, model_config_from_transformers, packed_bytes

_BLOCK_ELEMENTS = 1 << 20
VOCAB_SIZE = 32000


class RepeatedLlama:
    """A `CheckpointSource` without a language, for measuring passes over token ids; it has no tokenizer.

    Args:
        shape: Of the decoder.
        context_tokens: Longest context.
        vocab_size: Rows of embedding and head.
    """

    def __init__(self, shape: WideShape, *, context_tokens: int, vocab_size: int = VOCAB_SIZE) -> None:
        self._hf_config = LlamaConfig(
            architectures=["LlamaForCausalLM"], vocab_size=vocab_size, hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size, num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
            max_position_embeddings=context_tokens, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self._config = model_config_from_transformers(self._hf_config)
        self._block = torch.empty(_BLOCK_ELEMENTS, dtype=torch.bfloat16)
        fill_gaussian(self._block, named_generator(torch.device("cpu"), "repeated"), mean=0.0)

    def _fill(self, out: torch.Tensor) -> None:
        if out.dim() == 1:  # Llama's only vectors are norms
            out.fill_(1)
            return
        for part in out.view(-1).split(_BLOCK_ELEMENTS):
            part.copy_(self._block[: part.numel()])

    @property
    def reference(self) -> str:
        """For messages."""
        return "repeated random weights"

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
        """All tensors as one shard, which is no file."""
        yield Shard(Path("repeated"), tuple((name, self._fill) for name in checkpoint_tensors(self._config)))

    def tokenizer(self) -> Any:
        """None: there is no text."""
        return None

    def generation_settings(self) -> dict[str, Any]:
        """None."""
        return {}

    def generation_eos(self) -> tuple[int, ...]:
        """Nothing ends an answer."""
        return ()
