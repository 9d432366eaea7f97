"""OLMo 2: blocks are normed behind them alone, and queries and keys over all heads together."""

from dataclasses import replace

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import DecoderLayer, Norms
from offload_runtime.models.reading import attention_of, decoder, mlp_of
from offload_runtime.models.registry import Family

DEFAULTS = {"max_position_embeddings": 2048, "eos_token_id": 50279, "rms_norm_eps": 1e-5}


def layer_of(fields: Fields) -> DecoderLayer:
    """Return a decoder layer of OLMo 2, which is OLMo 3's, too."""
    bias = fields.flag("attention_bias")
    attention = replace(attention_of(fields, norm_offset=0.0), qk_norm="all", qkv_bias=bias, o_bias=bias)
    norms = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
    return DecoderLayer(attention, mlp_of(fields), norms)


def _model(fields: Fields) -> ModelConfig:
    return decoder(fields, layer_of(fields))


FAMILY = Family(_model, DEFAULTS)
