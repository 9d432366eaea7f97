"""Gemma 3's text: Gemma 2's layers with norms of each head, of which five of six slide and rotate faster."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.gemma2 import DEFAULTS, around, gguf_scalar, layer_of
from offload_runtime.models.layers import Attention
from offload_runtime.models.reading import decoder_by_type, num_layers
from offload_runtime.models.registry import Family, less_one


def _model(fields: Fields) -> ModelConfig:
    layer, period = layer_of(fields), fields.integer("sliding_window_pattern", 6)
    assert isinstance(layer.attention, Attention)
    layer = replace(layer, attention=replace(layer.attention, qk_norm="head"))
    slides = [bool((number + 1) % period) for number in range(num_layers(fields))]
    theta = fields.number("rope_local_base_freq", 10000.0)
    return around(fields, decoder_by_type(fields, layer, slides, local_theta=theta))


def _of_gguf(fields: Fields, names: Collection[str]) -> dict[str, Any]:
    cap = "final_logit_softcapping"
    return {
        "query_pre_attn_scalar": gguf_scalar(fields, 62),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10000.0),
        **({cap: fields.number(cap)} if cap in fields else {}),
    }


FAMILY = Family(
    _model,
    {**DEFAULTS, "max_position_embeddings": 131072, "rope_theta": 1000000.0},
    text_sizes={
        "vocab_size": 262208, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8,
        "intermediate_size": 9216,
    },
    of_gguf=_of_gguf, gguf_undo={"norm.weight": less_one},
)  # fmt: skip
