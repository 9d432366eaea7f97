"""How a GGUF file's queries and keys are rotated, as llama.cpp reads it, in transformers' parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from offload_runtime.errors import CheckpointError, UnsupportedArchitectureError
from offload_runtime.fields import Fields, shown

_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = ("rope_freqs.weight", _SHORT, _LONG)
_BETA_FAST, _BETA_SLOW = 32.0, 1.0  # turns in the original context that YaRN's ramp lies between
# What llama.cpp does not read of these models, and the values that change nothing.
_NO_SCALING: dict[str, tuple[float, ...]] = {
    "yarn_ext_factor": (-1.0, 1.0), "yarn_attn_factor": (1.0,), "yarn_beta_fast": (_BETA_FAST,),
    "yarn_beta_slow": (_BETA_SLOW,),
    "yarn_log_multiplier": (0.0,), "alpha": (0.0, 1.0),
}  # fmt: skip


def rope_of_gguf(
    fields: Fields, arch: str, channels: int, vectors: Mapping[str, list[float]], *, reads_multiplier: bool = False
) -> dict[str, Any]:
    """How llama.cpp rotates (`llama-model.cpp`, `llama-context.cpp`, `rope_yarn` of ggml): pairs of channels by their
    usual frequency, divided by the factor and by what a tensor says of each, which transformers calls longrope.

    Args:
        fields: The metadata of the architecture.
        arch: Its name.
        channels: Those of a head that are rotated.
        vectors: Those of `ROPE_TENSORS` that the file has.
        reads_multiplier: Whether llama.cpp reads YaRN's logarithmic multiplier of it.

    Raises:
        UnsupportedArchitectureError: A scaling that llama.cpp does not have for such a model.
        CheckpointError: A tensor of another size.
    """
    kind, divisors = fields.text("rope.scaling.type", "linear"), _stored_divisors(fields.where, vectors, channels // 2)
    if kind not in ("none", "linear", "yarn") and not (kind == "longrope" and divisors):
        raise UnsupportedArchitectureError(
            f"{fields.where}: RoPE scaling {shown(kind)} is not supported: use a model with none, linear, yarn or "
            "longrope (with its factors)"
        )
    for name, without in _NO_SCALING.items():
        if name == "yarn_log_multiplier" and reads_multiplier:
            continue
        if (value := fields.number(f"rope.scaling.{name}", without[0])) not in without:
            raise UnsupportedArchitectureError(
                f"{fields.where}: rope.scaling.{name} is {value:g}, which is not supported, and llama.cpp does not "
                f"read it for {shown(arch)}: use a file with {without[0]:g}, or without it"
            )
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0)) or 1.0
    factor = 1.0 if kind == "none" else factor
    base, attention = fields.number("rope.freq_base", 10000.0), fields.number("rope.scaling.attn_factor", 1.0)
    original = fields.integer("rope.scaling.original_context_length", fields.integer("context_length"))
    if kind == "yarn" and factor > 1:
        attention *= 0.1 * math.log(factor) + 1.0
    of_yarn = {"original_max_position_embeddings": original, "attention_factor": attention}
    if not divisors and factor >= 1:  # transformers has the same
        if kind == "yarn":
            return {"rope_theta": base, "rope_type": "yarn", "factor": factor, **of_yarn}
        if attention == 1.0:
            return {"rope_theta": base} | ({"rope_type": "linear", "factor": factor} if factor > 1 else {})
    ramped = kind == "yarn" and factor > 0 and base > 1
    scales = _yarn_divisors(channels, base, original, factor) if ramped else [factor] * (channels // 2)
    short, long = ([one * scale for one, scale in zip(each, scales, strict=True)]
                   for each in divisors or ([1.0] * len(scales),) * 2)  # fmt: skip
    return {
        "rope_theta": base, "rope_type": "longrope", "factor": 1.0, **of_yarn, "short_factor": short,
        "long_factor": long,
    }  # fmt: skip


def _stored_divisors(
    where: object, vectors: Mapping[str, list[float]], num_pairs: int
) -> tuple[list[float], list[float]] | None:
    """What each frequency is divided by in short texts and in long ones: Llama 3's scaling, whose parameters are not in
    the file, or Phi's."""
    names = (ROPE_TENSORS[0],) * 2 if ROPE_TENSORS[0] in vectors else (_SHORT, _LONG)
    if not vectors.keys() & {*names}:
        return None
    for name in names:
        if name not in vectors:
            raise CheckpointError(f"{where} has no {name} beside its like: download or convert it again")
        if len(vectors[name]) != num_pairs:
            raise CheckpointError(
                f"{where} has {len(vectors[name])} numbers in {name}, expected {num_pairs}, half of the rotated "
                "channels: download or convert it again"
            )
    return vectors[names[0]], vectors[names[1]]


def _yarn_divisors(head_dim: int, base: float, original: int, factor: float) -> list[float]:
    """By what YaRN divides each frequency: 1 for pairs that turn often in the original context, the factor for those
    that turn less than once, and between them by a ramp of the frequencies."""

    def pair_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0, math.floor(pair_of(_BETA_FAST))), min(head_dim - 1, math.ceil(pair_of(_BETA_SLOW)))
    ramp = [1 - min(1.0, max(0.0, (pair - low) / max(0.001, high - low))) for pair in range(head_dim // 2)]
    return [1 / (kept + (1 - kept) / factor) for kept in ramp]
