"""GLM-4.5 to 4.7: sigmoid scores with a bias by which experts are chosen, a shared expert, dense first layers."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from offload_runtime.errors import UnsupportedArchitectureError
from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.experts import Shared
from offload_runtime.models.layers import DecoderLayer
from offload_runtime.models.reading import attention_of, decoder, experts_of, experts_of_gguf, mlp_of, num_layers, rope
from offload_runtime.models.registry import Family


def _model(fields: Fields) -> ModelConfig:
    if fields.integer("n_group") > 1:
        raise UnsupportedArchitectureError(
            f"n_group is {fields.values['n_group']}: experts that are chosen by groups are not supported; choose "
            "another model"
        )
    plain, normed = attention_of(fields), fields.flag("use_qk_norm")
    rotary, bias = rope(fields, plain.head_dim, partial=True), fields.flag("attention_bias")
    attention = replace(plain, qkv_bias=bias, qk_norm="head" if normed else None, rotation=rotary.rotation())
    experts = replace(
        experts_of(fields), scores="sigmoid", corrected=True, normed=fields.flag("norm_topk_prob"), rounds=False,
        scale=fields.number("routed_scaling_factor"), router_dtype=torch.float32,
    )  # fmt: skip
    if shared := fields.integer("n_shared_experts", at_least=0):
        mlp = replace(experts.expert, intermediate_size=shared * experts.expert.intermediate_size)
        experts = replace(experts, shared=Shared("shared_experts", mlp))
    dense = DecoderLayer(attention, mlp_of(fields))
    sparse = range(fields.integer("first_k_dense_replace", at_least=0), num_layers(fields))
    return decoder(fields, dense, ropes=(rotary,), others=dict.fromkeys(sparse, replace(dense, mlp=experts)))


def _of_gguf(fields: Fields, names: Collection[str]) -> dict[str, Any]:
    """llama.cpp counts layers that guess further tokens."""
    count = fields.integer("block_count") - fields.integer("nextn_predict_layers", 0, at_least=0)
    return {
        "num_hidden_layers": count,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in names,
        **experts_of_gguf(fields, "n_routed_experts"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "n_shared_experts": fields.integer("expert_shared_count", 0, at_least=0),
        "first_k_dense_replace": fields.integer("leading_dense_block_count", 0, at_least=0),
        "n_group": fields.integer("expert_group_count", 1),
        "norm_topk_prob": fields.flag("expert_weights_norm"),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
    }


FAMILY = Family(
    _model,
    {
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5, "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "norm_topk_prob": True, "n_group": 1,
    },
    of_gguf=_of_gguf,
)  # fmt: skip
