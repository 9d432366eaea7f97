"""What checkpoints that are computed while they are read have in common: all but their tensors, and random numbers."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from offload_runtime.config import ModelConfig
from offload_runtime.weights import CheckpointSource

_STD = 0.02
_CHUNK_ELEMENTS = 1 << 22  # random numbers drawn at a time: 16 MiB of fp32


def named_generator(device: torch.device, *words: object) -> torch.Generator:
    """A generator seeded by words, so that each tensor's numbers depend on its name alone."""
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def fill_gaussian(out: torch.Tensor, generator: torch.Generator, *, mean: float) -> None:
    """Numbers of std 0.02 around `mean`, made on the generator's device, into a host tensor of any shape and dtype."""
    flat = out.view(-1)
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        part = flat[start : start + _CHUNK_ELEMENTS]
        numbers = torch.randn(part.numel(), generator=generator, device=generator.device)
        part.copy_(numbers.mul_(_STD).add_(mean).to(out.dtype))


class MadeCheckpoint:
    """A `CheckpointSource` but for its `shards`.

    Args:
        reference: What it is, for messages.
        hf_config: The transformers configuration object.
        config: Shape and flags.
        words: Gives the tokenizer, the dtype and the tokens that end an answer; without it there is no text and no end.
    """

    def __init__(self, reference: str, hf_config: Any, config: ModelConfig, words: CheckpointSource | None) -> None:
        self.reference = reference
        self._hf_config, self._config, self._words = hf_config, config, words

    @property
    def native_dtype(self) -> torch.dtype:
        """That of the words; bf16 where there are none."""
        return torch.bfloat16 if self._words is None else self._words.native_dtype

    def config(self) -> ModelConfig:
        """Shape and flags."""
        return self._config

    def hf_config(self) -> Any:
        """The transformers configuration object."""
        return self._hf_config

    def tokenizer(self) -> Any:
        """That of the words, or None."""
        return None if self._words is None else self._words.tokenizer()

    def generation_settings(self) -> dict[str, Any]:
        """Those of the words, or none."""
        return {} if self._words is None else self._words.generation_settings()

    def generation_eos(self) -> tuple[int, ...]:
        """Those of the words; otherwise nothing ends an answer."""
        return () if self._words is None else self._words.generation_eos()
