"""A Llama without a language: any shape, its weights computed as they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from offload_runtime.config import ModelConfig
from offload_runtime.weights import Shard, checkpoint_tensors, model_config_from_transformers, packed_bytes


class WordlessLlama:
    """A `CheckpointSource` for measuring passes over token ids; it has no tokenizer, and nothing ends an answer.

    Args:
        hf_config: The transformers configuration object.
        fill: Computes the tensor of a name into a tensor of its shape.
        reference: What it is, for messages.
    """

    def __init__(self, hf_config: LlamaConfig, fill: Callable[[str, torch.Tensor], None], *, reference: str) -> None:
        self._hf_config, self._fill, self._reference = hf_config, fill, reference
        self._config = model_config_from_transformers(hf_config)

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
        """The transformers configuration object, without an end-of-sequence token."""
        return self._hf_config

    def total_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the packed weights in `dtype`."""
        return packed_bytes(self._config, dtype)

    def shards(self) -> Iterator[Shard]:
        """All tensors as one shard, which is no file."""
        names = checkpoint_tensors(self._config)
        yield Shard(Path(self._reference), tuple((name, partial(self._fill, name)) for name in names))

    def tokenizer(self) -> Any:
        """None: there is no text."""
        return None

    def generation_settings(self) -> dict[str, Any]:
        """None."""
        return {}

    def generation_eos(self) -> tuple[int, ...]:
        """Nothing ends an answer."""
        return ()
