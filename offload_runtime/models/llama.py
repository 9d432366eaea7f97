"""Llama 1 to 3, and what has its layers: TinyLlama, SmolLM2, Yi, many others."""

from dataclasses import replace

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import DecoderLayer
from offload_runtime.models.reading import attention_of, decoder, mlp_of
from offload_runtime.models.registry import Family


def _model(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    attention = replace(attention_of(fields), qkv_bias=bias, o_bias=bias)
    return decoder(fields, DecoderLayer(attention, replace(mlp_of(fields), bias=fields.flag("mlp_bias"))))


FAMILY = Family(
    _model,
    {"max_position_embeddings": 2048, "eos_token_id": 2},
    text_sizes={
        "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 11008,
    },
    gguf_interleaved=True,
)  # fmt: skip
