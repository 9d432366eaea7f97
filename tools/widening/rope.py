"""Rotary frequencies of the widened model: the small head's own, whatever scaling made them."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers

from offload_runtime.errors import UnsupportedArchitectureError
from offload_runtime.models.config import ModelConfig

# These scale each frequency by itself, and unscaled the frequencies agree already.
_KEPT_TYPES = ("default", "linear", "llama3")


def frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """A model's scaled frequencies as transformers makes them, [D/2] fp32, and the factor on cosines and sines."""
    hf_config = transformers.LlamaConfig(
        hidden_size=config.hidden_size, num_attention_heads=config.attention.num_heads,
        num_key_value_heads=config.attention.num_kv_heads, head_dim=config.attention.head_dim,
        max_position_embeddings=config.max_position_embeddings, rope_parameters=dict(config.ropes[0].parameters),
    )  # fmt: skip
    functions = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS
    inv_freq, scaling = functions[config.ropes[0].parameters["rope_type"]](hf_config, torch.device("cpu"))
    return inv_freq.float(), float(scaling)


def _widened_yarn(config: ModelConfig) -> dict[str, Any]:
    """YaRN's parameters for a head s times as large, whatever s is, which scale pair j * s as the small head's pair j.

    YaRN slows pairs down along a ramp between two pair numbers, which follow from `beta_fast` and `beta_slow`:

        pair(beta) = d * ln(original / (2 pi beta)) / (2 ln theta)

    rounded outward and clipped. Unrounded, the betas of those two numbers give s times as much in a head of d * s, and
    on the ramp (j * s - low * s) / (high * s - low * s) is the small head's value: to the last bit of fp32 for s a
    power of two, otherwise up to rounding.
    """
    rope, small_dim = dict(config.ropes[0].parameters), config.attention.head_dim
    theta = float(rope["rope_theta"])
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings

    def pair(beta: float) -> float:
        return small_dim * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(theta))

    def beta(pair: float) -> float:
        return float(original / (2 * math.pi) * theta ** (-2 * pair / small_dim))

    low, high = pair(rope.get("beta_fast") or 32), pair(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    high = min(high, small_dim - 1)  # as in the small head; the lower end is clipped to 0 in a head of any size
    # A factor left out is the ratio of the two lengths, which both stay.
    return rope | {
        "original_max_position_embeddings": original, "beta_fast": beta(low), "beta_slow": beta(high),
        "truncate": False,
    }  # fmt: skip


def widened_rope(config: ModelConfig, large_dim: int) -> dict[str, Any]:
    """transformers' `rope_parameters` for heads of `large_dim`, equal to the small head's at its pairs.

    YaRN counts rotary pairs, so with the same parameters a larger head would scale other frequencies: it gets other
    parameters. It stays YaRN, which does not change with the length of a sequence; its factor on the attention does not
    depend on the head.

    Args:
        config: The small model.
        large_dim: A multiple of its head dimension.

    Raises:
        UnsupportedArchitectureError: A scaling that depends on the head dimension and the length at once.
    """
    rope = dict(config.ropes[0].parameters)
    small_dim = config.attention.head_dim
    kind, step = rope["rope_type"], large_dim // small_dim
    if kind in _KEPT_TYPES or step == 1:
        return rope
    if kind == "yarn":
        return _widened_yarn(config)
    raise UnsupportedArchitectureError(
        f"RoPE scaling {kind!r} changes with the head dimension and cannot be widened from {small_dim} to "
        f"{large_dim} channels: set yarn, linear or no scaling in the source's config.json"
    )
