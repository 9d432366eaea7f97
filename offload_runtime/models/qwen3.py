"""Qwen 3: norms of each head's queries and keys; upper layers may slide."""

from dataclasses import replace

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import DecoderLayer
from offload_runtime.models.reading import attention_of, decoder, mlp_of, upper_layers_slide
from offload_runtime.models.registry import Family


def _model(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    attention = replace(attention_of(fields), qkv_bias=bias, o_bias=bias, qk_norm="head")
    return decoder(fields, DecoderLayer(attention, mlp_of(fields)), windows=upper_layers_slide(fields))


FAMILY = Family(_model, {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28})
