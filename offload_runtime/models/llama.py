"""Llama 1 to 3, and what has its layers: TinyLlama, SmolLM2, Yi, many others."""

from offload_runtime.fields import Fields
from offload_runtime.models.layers import DecoderLayer
from offload_runtime.models.reading import decoder_layers
from offload_runtime.models.registry import Family


def _layers(fields: Fields) -> tuple[DecoderLayer, ...]:
    bias = fields.flag("attention_bias")
    return decoder_layers(fields, qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias"))


FAMILY = Family(
    _layers,
    {"max_position_embeddings": 2048, "eos_token_id": 2},
    text_sizes={
        "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 11008,
    },
    gguf_interleaved=True,
)  # fmt: skip
