"""Qwen 3: norms of each head's queries and keys; upper layers may slide."""

from dataclasses import replace

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import Attention, DecoderLayer
from offload_runtime.models.reading import attention_of, decoder, mlp_of, upper_layers_slide
from offload_runtime.models.registry import Family


def attention(fields: Fields) -> Attention:
    """Return the attention of all layers, but for windows."""
    bias = fields.flag("attention_bias")
    return replace(attention_of(fields), qkv_bias=bias, o_bias=bias, qk_norm="head")


def _model(fields: Fields) -> ModelConfig:
    layer = DecoderLayer(attention(fields), mlp_of(fields))
    return decoder(fields, layer, windows=upper_layers_slide(fields))


FAMILY = Family(_model, {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28})
