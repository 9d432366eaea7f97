"""Phi-3 and Phi-4, of text: Llama's layers in fused matrices; a part of each head may be rotated, and all may slide."""

from dataclasses import replace

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import DecoderLayer
from offload_runtime.models.reading import attention_of, decoder, mlp_of, rope, sliding_window
from offload_runtime.models.registry import Family


def _model(fields: Fields) -> ModelConfig:
    plain, stated = attention_of(fields), fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    for name in ("rope_type", "type"):
        if stated.get(name) in ("su", "yarn"):  # what old files call it
            stated[name] = "longrope"
    original = "original_max_position_embeddings"
    stated.setdefault(original, fields.integer(original, 4096))
    rotary = rope(fields, plain.head_dim, stated, types=("default", "longrope"), partial=True)
    window = sliding_window(fields)
    attention = replace(plain, fused=True, window=window, rotation=rotary.rotation())
    return decoder(fields, DecoderLayer(attention, replace(mlp_of(fields), fused=True)), ropes=(rotary,))


FAMILY = Family(
    _model,
    {
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 32000,
    },
)  # fmt: skip
