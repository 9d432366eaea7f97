"""Qwen 2 and 2.5: biases on q, k and v whatever the configuration says, and none on o; upper layers may slide."""

from offload_runtime.fields import Fields
from offload_runtime.models.layers import DecoderLayer
from offload_runtime.models.reading import decoder_layers, upper_layers_slide
from offload_runtime.models.registry import Family


def _layers(fields: Fields) -> tuple[DecoderLayer, ...]:
    return decoder_layers(fields, windows=upper_layers_slide(fields), qkv_bias=True)


FAMILY = Family(_layers, {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28})
