"""gpt-oss: sinks, every other layer slides, biases, experts with a clamped SwiGLU."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from offload_runtime.fields import Fields
from offload_runtime.models import reading
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import DecoderLayer
from offload_runtime.models.registry import Family

_ROPE = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip


def _model(fields: Fields) -> ModelConfig:
    bias, slides = fields.flag("attention_bias"), [not layer % 2 for layer in range(reading.num_layers(fields))]
    attention = replace(reading.attention_of(fields), qkv_bias=bias, o_bias=bias, sinks=True)
    swiglu = fields.number("swiglu_alpha", at_least=0), fields.number("swiglu_limit", at_least=0)
    experts = replace(
        reading.experts_of(fields, size="intermediate_size"), scores="softmax of the chosen", normed=False,
        swiglu=swiglu,
    )  # fmt: skip
    windows = reading.windows_by_type(fields, slides, reading.sliding_window(fields))
    return reading.decoder(fields, DecoderLayer(attention, experts), windows=windows)


def _of_gguf(fields: Fields, names: Collection[str]) -> dict[str, Any]:
    counts = reading.experts_of_gguf(fields, "num_local_experts")
    return {**counts, "intermediate_size": fields.integer("expert_feed_forward_length")}


FAMILY = Family(
    _model,
    {
        "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "attention_bias": True, "sliding_window": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0, "rope_parameters": _ROPE,
    },
    transposed=True, of_gguf=_of_gguf,
    rope_of_gguf=lambda _, rope: {**rope, "truncate": False},  # as its makers do, where llama.cpp rounds
)  # fmt: skip
