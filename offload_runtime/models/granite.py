"""Granite 3: Llama's layers, with multipliers of embeddings, blocks and attention, and a divisor of the logits."""

from collections.abc import Collection
from dataclasses import replace

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import DecoderLayer
from offload_runtime.models.reading import attention_of, decoder, mlp_of
from offload_runtime.models.registry import Family

_SMALLEST = 1e-9  # of a multiplier: with less a block says nothing


def _model(fields: Fields) -> ModelConfig:
    bias, scale = fields.flag("attention_bias"), fields.number("attention_multiplier", 1.0, at_least=_SMALLEST)
    attention = replace(attention_of(fields), qkv_bias=bias, o_bias=bias, scale=scale)
    multiplier = fields.number("residual_multiplier", 1.0)
    mlp = replace(mlp_of(fields), bias=fields.flag("mlp_bias"))
    return replace(
        decoder(fields, DecoderLayer(attention, mlp, residual_multiplier=multiplier)),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logits_divisor=fields.number("logits_scaling", 1.0, at_least=_SMALLEST),
    )


def _of_gguf(fields: Fields, names: Collection[str]) -> dict[str, float]:
    keys = {
        "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    }  # fmt: skip
    return {name: fields.number(key) for name, key in keys.items() if key in fields}


FAMILY = Family(_model, {"max_position_embeddings": 2048, "eos_token_id": 2}, of_gguf=_of_gguf, gguf_interleaved=True)
