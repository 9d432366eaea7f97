"""Mixtral: Mistral's attention, and experts in all layers."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import DecoderLayer
from offload_runtime.models.reading import attention_of, decoder, experts_of, experts_of_gguf, sliding_window
from offload_runtime.models.registry import Family


def _model(fields: Fields) -> ModelConfig:
    attention = replace(attention_of(fields), window=sliding_window(fields))
    experts = replace(experts_of(fields, size="intermediate_size"), rounds=False)
    return decoder(fields, DecoderLayer(attention, experts))


def _of_gguf(fields: Fields, names: Collection[str]) -> dict[str, Any]:
    return experts_of_gguf(fields, "num_local_experts")


FAMILY = Family(
    _model,
    {
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "eos_token_id": 2, "num_experts_per_tok": 2,
    },
    renamed={"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"},
    of_gguf=_of_gguf, gguf_interleaved=True,
)  # fmt: skip
