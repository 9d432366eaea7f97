"""Qwen 2 and 2.5: biases on q, k and v whatever the configuration says, and none on o; upper layers may slide."""

from dataclasses import replace

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import DecoderLayer
from offload_runtime.models.reading import attention_of, decoder, mlp_of, upper_layers_slide
from offload_runtime.models.registry import Family


def _model(fields: Fields) -> ModelConfig:
    layer = DecoderLayer(replace(attention_of(fields), qkv_bias=True), mlp_of(fields))
    return decoder(fields, layer, windows=upper_layers_slide(fields))


FAMILY = Family(_model, {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28})
