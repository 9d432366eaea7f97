"""Gemma 2: norms on both sides of each block, GELU, soft caps; every second layer slides."""

from collections.abc import Collection
from dataclasses import replace

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import DecoderLayer, Norms
from offload_runtime.models.reading import attention_of, decoder, mlp_of, num_layers, refuse_set, windows_by_type
from offload_runtime.models.registry import Family, less_one

NORMS = Norms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
DEFAULTS = {
    "num_key_value_heads": 4, "head_dim": 256, "eos_token_id": 1, "tie_word_embeddings": True, "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}  # fmt: skip


def layer_of(fields: Fields) -> DecoderLayer:
    """Return a decoder layer of Gemma 2, of which Gemma 3's is made."""
    refuse_set(fields, "use_bidirectional_attention", "see what comes behind a token")
    bias, cap = fields.flag("attention_bias"), "attn_logit_softcapping"
    attention = replace(
        attention_of(fields, norm_offset=1.0), qkv_bias=bias, o_bias=bias,
        scale=fields.number("query_pre_attn_scalar", at_least=1) ** -0.5,
        soft_cap=fields.number(cap, at_least=1e-3) if cap in fields else None,
    )  # fmt: skip
    return DecoderLayer(attention, mlp_of(fields, activation="gelu"), NORMS)


def around(fields: Fields, model: ModelConfig) -> ModelConfig:
    """Return the model with what all Gemmas have around their layers."""
    cap, multiplier = "final_logit_softcapping", model.hidden_size**0.5
    capped = fields.number(cap, at_least=1e-3) if cap in fields else None
    return replace(model, embedding_multiplier=multiplier, rounds_multiplier=True, logits_cap=capped)


def _model(fields: Fields) -> ModelConfig:
    slides = [layer % 2 == 0 for layer in range(num_layers(fields))]
    windows = windows_by_type(fields, slides, fields.integer("sliding_window"))
    return around(fields, decoder(fields, layer_of(fields), windows=windows))


def gguf_scalar(fields: Fields, largest: int) -> float:
    """Return what llama.cpp takes for the root of in attention: of the largest model, of so many layers, another."""
    if fields.integer("block_count") == largest:
        return fields.integer("embedding_length") / fields.integer("attention.head_count")
    return fields.integer("attention.key_length")


def _of_gguf(fields: Fields, names: Collection[str]) -> dict[str, float]:
    return {
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": gguf_scalar(fields, 46),
    }


FAMILY = Family(
    _model,
    {
        **DEFAULTS, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    of_gguf=_of_gguf, gguf_undo={"norm.weight": less_one},
)  # fmt: skip
