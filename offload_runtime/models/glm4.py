"""GLM-4 of April 2025: norms on both sides of each block; neighbouring channels of half of each head are rotated."""

from dataclasses import replace

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import DecoderLayer, Norms
from offload_runtime.models.reading import attention_of, decoder, mlp_of, rope
from offload_runtime.models.registry import Family


def _model(fields: Fields) -> ModelConfig:
    norms = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    plain = attention_of(fields)
    rotary = rope(fields, plain.head_dim, partial=True)
    attention = replace(plain, qkv_bias=fields.flag("attention_bias"), rotation=rotary.rotation(interleaved=True))
    return decoder(fields, DecoderLayer(attention, replace(mlp_of(fields), fused=True), norms), ropes=(rotary,))


FAMILY = Family(
    _model,
    {
        "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "max_position_embeddings": 131072,
        "rms_norm_eps": 0.00000015625, "eos_token_id": [151329, 151336, 151338], "partial_rotary_factor": 0.5,
    },
)  # fmt: skip
