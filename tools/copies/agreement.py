"""Where a copy, or another draft, says what the target says: at places of the target's answers, and in chains."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from offload_runtime_kernels.gumbel_argmax import gumbel_noise, inverse_temperature
from torch import Tensor
from torch.nn import functional
from training.target import HeldOut

CHAINS = (8, 16, 48)


class Keys:
    """Attention over own keys and values in blocks of an answer, and over the target's in front of them.

    Attributes:
        block: Tokens of a block; None makes all keys own.
        first: The row that chooses an answer's first token, where the first block begins.
        of_target: By layer, what the target made: [B, H_kv, T, D] keys and values.
        records: Whether what comes by is the target's, and kept.
    """

    def __init__(self) -> None:
        self.block: int | None = None
        self.first = 0
        self.of_target: dict[int, tuple[Tensor, Tensor]] = {}
        self.records = False

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: object, **others: Any
    ) -> tuple[Tensor, None]:
        """transformers' attention: rotated queries [B, H, T, D], keys and values [B, H_kv, T, D] -> [B, T, H, D]."""
        if self.records:
            self.of_target[module.layer_idx] = key, value
        scale = others["scaling"]
        if self.block is None:
            # One row more than there are keys would be a cached step, which the target takes when it answers.
            causal = query.shape[2] == key.shape[2]
            found = functional.scaled_dot_product_attention(
                query, key, value, is_causal=causal, scale=scale, enable_gqa=True
            )
            return found.transpose(1, 2), None
        rows = torch.arange(query.shape[2])
        blocks = torch.div(rows - self.first, self.block, rounding_mode="floor")
        earlier, same = blocks[None] < blocks[:, None], blocks[None] == blocks[:, None]
        visible = torch.cat((earlier, same & (rows[None] <= rows[:, None])), dim=1)
        keys, values = (
            torch.cat(pair, dim=2) for pair in zip(self.of_target[module.layer_idx], (key, value), strict=True)
        )
        found = functional.scaled_dot_product_attention(query, keys, values, visible, scale=scale, enable_gqa=True)
        return found.transpose(1, 2), None


@dataclass(frozen=True)
class Answers:
    """Answers of the target, with the noise that chose them.

    Attributes:
        noise: [places * T, V] fp32; None at T = 0.
        of_target: What `Keys` calls so, of these answers.
    """

    held: HeldOut
    noise: Tensor | None
    of_target: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, held: HeldOut, vocab_size: int) -> Answers:
        """Make the noise once: every copy is asked with it."""
        if held.temperature == 0:
            return cls(held, None)
        places, count = held.tokens.shape[0], held.tokens.shape[1] - held.prompt_tokens
        positions = torch.arange(held.prompt_tokens - 1, held.tokens.shape[1] - 1).repeat(places)
        slots = torch.arange(places).repeat_interleave(count)
        return cls(held, gumbel_noise(positions, slots, held.keys, vocab_size=vocab_size))

    @property
    def said(self) -> Tensor:
        """The answers' tokens, [places, T]."""
        return self.held.tokens[:, self.held.prompt_tokens :]

    def agreeing(self, model: Any) -> Tensor:
        """Where a model says the same behind the same tokens: [places, T] bool."""
        states = model.model(self.held.tokens[:, :-1], use_cache=False).last_hidden_state
        states = states[:, self.held.prompt_tokens - 1 :].flatten(0, 1)
        tokens = list[Tensor]()
        for at in range(0, len(states), 256):
            logits = model.lm_head(states[at : at + 256])
            if self.noise is not None:
                logits.mul_(inverse_temperature(self.held.temperature)).add_(self.noise[at : at + 256])
            tokens.append(logits.argmax(-1))
        return torch.cat(tokens).view_as(self.said) == self.said


def tokens_per_pass(agreeing: Tensor, chain: int) -> float | None:
    """The mean of passes whose chains begin where the one before has ended, by where answers [places, T] agree.

    Passes that begin so late that their chain would leave the answer are not counted, so that a pass's length decides
    nothing about its being counted. None where answers are shorter than a chain.
    """
    tokens = passes = 0
    for row in agreeing.tolist():
        at = 0
        while at + chain < len(row):
            accepted = next((depth for depth in range(chain) if not row[at + depth]), chain)
            tokens, passes, at = tokens + accepted + 1, passes + 1, at + accepted + 1
    return tokens / passes if passes else None


def agreement_of(agreeing: Tensor, held: HeldOut) -> dict[str, Any]:
    """Figures of one kind of text and temperature."""
    by_place = agreeing.double().mean(1)
    error = float(by_place.std() / math.sqrt(len(by_place))) if len(by_place) > 1 else None
    return {
        "text": held.text, "temperature": held.temperature, "agreement": float(by_place.mean()),
        "standard_error": error, "positions": agreeing.numel(),
        "tokens_per_pass": {str(chain): tokens_per_pass(agreeing, chain) for chain in CHAINS},
    }  # fmt: skip
