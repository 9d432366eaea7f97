"""Qwen 3's mixtures of experts: its attention, and experts in all layers but for a few."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import DecoderLayer
from offload_runtime.models.qwen3 import attention
from offload_runtime.models.reading import decoder, experts_of, experts_of_gguf, mlp_of, sliding_window, sparse_layers
from offload_runtime.models.registry import Family


def _model(fields: Fields) -> ModelConfig:
    mixer = replace(attention(fields), window=sliding_window(fields, switched=True))
    dense, sparse = DecoderLayer(mixer, mlp_of(fields)), sparse_layers(fields)
    mixture = replace(dense, mlp=replace(experts_of(fields), normed=fields.flag("norm_topk_prob")))
    return decoder(fields, dense, others=dict.fromkeys(sparse, mixture))


def of_gguf(fields: Fields, names: Collection[str]) -> dict[str, Any]:
    """llama.cpp has experts in all layers and weights that sum to 1."""
    return {
        **experts_of_gguf(fields, "num_experts"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


FAMILY = Family(
    _model,
    {
        "num_key_value_heads": 4, "sliding_window": 4096, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    of_gguf=of_gguf,
)  # fmt: skip
