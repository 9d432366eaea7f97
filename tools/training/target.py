"""The model that a head or a low-bit copy guesses, as transformers runs it, and its answers at places of texts that
nothing is trained on: what guesses are compared with."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from typing import Any

import texts
import torch
import transformers
from offload_runtime_kernels.gumbel_argmax import gumbel_argmax, noise_keys
from torch import Tensor
from widening.made import transformers_config_of
from widening.shapes import WideShape, check_architecture

from offload_runtime.errors import OptionError
from offload_runtime.weights.checkpoint import CheckpointSource

TEMPERATURES = (0.0, 0.6)
WRITTEN = torch.bfloat16


@dataclass(frozen=True)
class Target:
    """The model that is guessed, as transformers runs it, and what heads need of it.

    Attributes:
        angles: [positions, D/2] complex64: what its heads rotate by.
    """

    source: CheckpointSource
    model: Any
    angles: Tensor
    shape: WideShape

    @classmethod
    def load(cls, source: CheckpointSource, device: torch.device, positions: int) -> Target:
        """Read it: in bf16 on a GPU, otherwise the same values in fp32.

        Raises:
            UnsupportedArchitectureError: It is no plain Llama.
        """
        config = source.config()
        check_architecture(config)
        on_gpu = device.type == "cuda"
        model = transformers.AutoModelForCausalLM.from_config(
            transformers_config_of(source), dtype=WRITTEN if on_gpu else torch.float32
        )
        for name, parameter in model.named_parameters():
            read = torch.empty(parameter.shape, dtype=WRITTEN)
            source.fills[name](read)
            parameter.data.copy_(read)
        rotary = model.model.rotary_emb
        angles = torch.outer(torch.arange(positions).float(), rotary.inv_freq.float())
        rotations = torch.polar(torch.full_like(angles, rotary.attention_scaling), angles).to(device)
        return cls(source, model.to(device).eval().requires_grad_(False), rotations, WideShape.of(config))

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.angles.device

    @torch.no_grad()
    def read(self, tokens: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return its logits [B, L, V] and its residual stream below each layer, the last its normed output."""
        out = self.model(tokens, output_hidden_states=True, use_cache=False)
        return out.logits, out.hidden_states

    @torch.no_grad()
    def continued(self, tokens: Tensor, count: int, keys: Tensor) -> Tensor:
        """Return [B, P + count]: prompts [B, P] and what it writes behind them, row by row with a key of noise."""
        cache, slots, last = transformers.DynamicCache(), torch.arange(len(tokens), device=self.device), tokens
        for _ in range(count):
            out = self.model(last, None, None, cache, use_cache=True, logits_to_keep=1)  # versions name it differently
            rows = torch.full_like(slots, tokens.shape[1] - 1)
            last = gumbel_argmax(out.logits[:, -1].contiguous(), rows, slots, keys)[:, None]
            tokens = torch.cat((tokens, last), dim=1)
        return tokens

    def autocast(self) -> AbstractContextManager[Any]:
        """Products of a head in bf16 on a GPU."""
        return torch.autocast(self.device.type, WRITTEN, enabled=self.device.type == "cuda")


@dataclass(frozen=True)
class HeldOut:
    """Answers of the target at places of a text that are never trained on.

    Attributes:
        tokens: [places, P + T], prompts of P tokens and answers.
        keys: [places, 4] int32, of the noise of the answers.
    """

    text: str
    temperature: float
    prompt_tokens: int
    tokens: Tensor
    keys: Tensor


def held_out(options: argparse.Namespace, target: Target) -> list[HeldOut]:
    """Answers of each text and temperature. Raises `OptionError`: there are fewer places, or they are short."""
    asked = options.places, options.prompt_tokens, target.source.tokenizer().encode
    prompts, found = texts.prompts(options, ("prose", "code"), *asked), list[HeldOut]()
    if (least := min(len(row) for rows in prompts.values() for row in rows)) < options.prompt_tokens:
        raise OptionError(f"a held-out place has {least} tokens: lower --prompt-tokens")
    for (name, rows), temperature in product(prompts.items(), TEMPERATURES):
        keys = noise_keys([(temperature, options.seed, row) for row in range(len(rows))]).to(target.device)
        tokens = target.continued(torch.tensor(rows, device=target.device), options.new_tokens, keys)
        found.append(HeldOut(name, temperature, options.prompt_tokens, tokens, keys))
    return found
