"""Ministral 3: Mistral's layers, whose queries grow beyond the length that the rotations were made for."""

from dataclasses import replace
from typing import Any

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import DecoderLayer, QueryGrowth
from offload_runtime.models.reading import attention_of, decoder, mlp_of, rope, sliding_window
from offload_runtime.models.registry import Family

_ROPE = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def _model(fields: Fields) -> ModelConfig:
    parameters = fields.mapping("rope_parameters")
    stated = Fields(fields.where, dict(parameters))
    beta, growth = stated.number("llama_4_scaling_beta", 0.0, at_least=0), None
    parameters.pop("llama_4_scaling_beta", None)  # transformers' rotations do not know it
    if beta:
        growth = QueryGrowth(beta, stated.integer("original_max_position_embeddings"))
    window = sliding_window(fields)
    attention = replace(attention_of(fields), window=window, query_growth=growth)
    ropes = (rope(fields, attention.head_dim, parameters),)
    return decoder(fields, DecoderLayer(attention, mlp_of(fields)), ropes=ropes)


def _rope_of_gguf(fields: Fields, stated: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp reads a logarithmic multiplier of this architecture alone, and how queries grow."""
    found = {**stated, "llama_4_scaling_beta": fields.number("attention.temperature_scale", 0.0)}
    if multiplier := fields.number("rope.scaling.yarn_log_multiplier", 0.0):
        found |= {"attention_factor": None, "mscale": 1.0, "mscale_all_dim": multiplier}
    return found


FAMILY = Family(
    _model,
    {
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
        "eos_token_id": 2, "rope_parameters": _ROPE,
    },
    text_sizes={
        "vocab_size": 131072, "hidden_size": 4096, "num_hidden_layers": 34, "num_attention_heads": 32,
        "intermediate_size": 14336,
    },
    rope_of_gguf=_rope_of_gguf, gguf_interleaved=True,
)  # fmt: skip
