"""Rotary frequencies of the widened model: the small head's own, whatever scaling made them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from offload_runtime.config import ModelConfig
from offload_runtime.errors import OptionError, UnsupportedArchitectureError

# These scale each frequency by itself, and unscaled the frequencies agree already.
_KEPT_TYPES = ("default", "linear", "llama3")


def with_context_rope(config: ModelConfig, text: str) -> ModelConfig:
    """Scale a model's rotary embedding to a longer context.

    Args:
        config: A model without scaling.
        text: `yarn:FACTOR`, e.g. `yarn:16`.

    Raises:
        OptionError: Not of that form, or the model has a scaling already.
    """
    kind, _, number = text.partition(":")
    try:
        factor = float(number)
    except ValueError:
        factor = 0.0
    if kind != "yarn" or not 1 < factor < math.inf:
        raise OptionError(f"context rope {text!r} is not known: write it like yarn:16, with a factor above 1")
    if config.rope_parameters["rope_type"] != "default":
        raise OptionError(
            f"the source has a RoPE scaling of type {config.rope_parameters['rope_type']} already: leave "
            "--context-rope out, or change the source's config.json"
        )
    original = config.max_position_embeddings
    rope = {
        "rope_type": "yarn",
        "rope_theta": config.rope_parameters["rope_theta"],
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    return dataclasses.replace(config, rope_parameters=rope, max_position_embeddings=int(original * factor))


def frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """A model's scaled frequencies as transformers makes them, [D/2] fp32, and the factor on cosines and sines."""
    hf_config = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),
    )
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](hf_config, torch.device("cpu"))
    return inv_freq.float(), float(scaling)


def _factors_for(wanted: torch.Tensor, theta: float, large_dim: int, step: int) -> list[float]:
    """longrope's factors [D/2] that give the frequencies `wanted` [d/2] at every `step`-th pair, 1 elsewhere.

    What YaRN leaves alone comes out to the last bit; of what it slows down a few pairs miss by one rounding, for
    SmolLM2 at a factor of 16 a turn of 6e-5 at the last of 128K positions.
    """
    powers = theta ** (torch.arange(0, large_dim, 2, dtype=torch.int64).float() / large_dim)  # as transformers does
    factors = torch.ones(large_dim // 2, dtype=torch.float64)
    factors[::step] = 1.0 / (wanted.double() * powers[::step].double())
    return [float(factor) for factor in factors.float()]


def _spread(factors: list[float], step: int) -> list[float]:
    """A small head's factors at every `step`-th pair of a large head."""
    return [float(factors[index // step]) if index % step == 0 else 1.0 for index in range(len(factors) * step)]


def widened_rope(config: ModelConfig, large_dim: int) -> dict[str, Any]:
    """transformers' `rope_parameters` for heads of `large_dim`, equal to the small head's at its pairs.

    YaRN counts rotary pairs, so a larger head would scale other frequencies: its result is written out as longrope's
    explicit factors, the same for short and long sequences, with its factor on the attention.

    Args:
        config: The small model.
        large_dim: A multiple of its head dimension.

    Raises:
        UnsupportedArchitectureError: A scaling that depends on the head dimension and the length at once.
    """
    rope = dict(config.rope_parameters)
    kind, step = rope["rope_type"], large_dim // config.head_dim
    if kind in _KEPT_TYPES or step == 1:
        return rope
    if kind == "longrope":
        return rope | {name: _spread(rope[name], step) for name in ("short_factor", "long_factor")}
    if kind != "yarn":
        raise UnsupportedArchitectureError(
            f"RoPE scaling {kind!r} changes with the head dimension and cannot be widened from {config.head_dim} to "
            f"{large_dim} channels: set yarn, linear or no scaling in the source's config.json"
        )
    wanted, scaling = frequencies(config)
    factors = _factors_for(wanted, float(rope["rope_theta"]), large_dim, step)
    original = int(rope["original_max_position_embeddings"])
    return {
        "rope_type": "longrope",
        "rope_theta": rope["rope_theta"],
        "factor": float(rope.get("factor") or config.max_position_embeddings / original),
        "attention_factor": scaling,
        "original_max_position_embeddings": original,
        "short_factor": factors,
        "long_factor": factors,
    }
