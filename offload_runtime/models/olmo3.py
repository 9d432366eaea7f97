"""OLMo 3: OLMo 2's layers, three of four of which slide, and rotate without the scaling of the others."""

from collections.abc import Collection

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.olmo2 import DEFAULTS, layer_of
from offload_runtime.models.reading import decoder_by_type, num_layers
from offload_runtime.models.registry import Family


def _model(fields: Fields) -> ModelConfig:
    slides = [bool((layer + 1) % 4) for layer in range(num_layers(fields))]
    theta = fields.number("rope_theta")
    return decoder_by_type(fields, layer_of(fields), slides, local_theta=theta)


def _of_gguf(fields: Fields, names: Collection[str]) -> dict[str, float]:
    return {"rope_theta": fields.number("rope.freq_base", 500000.0)}


FAMILY = Family(_model, {**DEFAULTS, "rope_theta": 500000.0, "sliding_window": 4096}, of_gguf=_of_gguf)
