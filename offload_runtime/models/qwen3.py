"""Qwen 3: norms of each head's queries and keys; upper layers may slide."""

from offload_runtime.fields import Fields
from offload_runtime.models.layers import DecoderLayer
from offload_runtime.models.reading import decoder_layers, upper_layers_slide
from offload_runtime.models.registry import Family


def _layers(fields: Fields) -> tuple[DecoderLayer, ...]:
    bias = fields.flag("attention_bias")
    return decoder_layers(fields, windows=upper_layers_slide(fields), qkv_bias=bias, o_bias=bias, qk_norm=True)


FAMILY = Family(_layers, {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28})
