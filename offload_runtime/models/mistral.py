"""Mistral: Llama's layers without biases, all of which slide where a window is given."""

from dataclasses import replace

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import DecoderLayer
from offload_runtime.models.reading import attention_of, decoder, mlp_of, sliding_window
from offload_runtime.models.registry import Family


def _model(fields: Fields) -> ModelConfig:
    window = sliding_window(fields)
    return decoder(fields, DecoderLayer(replace(attention_of(fields), window=window), mlp_of(fields)))


FAMILY = Family(
    _model,
    {"max_position_embeddings": 131072, "num_key_value_heads": 8, "eos_token_id": 2, "sliding_window": 4096},
    text_sizes={
        "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 14336,
    },
    gguf_interleaved=True,
)  # fmt: skip
