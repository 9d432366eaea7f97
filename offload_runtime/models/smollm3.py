"""SmolLM3: Llama's layers, of which some do not rotate, and those may slide."""

from dataclasses import replace

from offload_runtime.errors import CheckpointError
from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import DecoderLayer
from offload_runtime.models.reading import attention_of, decoder, mlp_of, num_layers, sliding_window, windows_by_type
from offload_runtime.models.registry import Family


def _model(fields: Fields) -> ModelConfig:
    rotates, bias = _rotates(fields), fields.flag("attention_bias")
    attention = replace(attention_of(fields), qkv_bias=bias, o_bias=bias)
    layer = DecoderLayer(attention, replace(mlp_of(fields), bias=fields.flag("mlp_bias")))
    rotations = [attention.rotation if rotated else None for rotated in rotates]
    windows = windows_by_type(fields, [not rotated for rotated in rotates], sliding_window(fields, switched=True))
    return decoder(fields, layer, windows=windows, rotations=rotations)


def _rotates(fields: Fields) -> tuple[bool, ...]:
    """Whether each layer rotates its queries and keys; in `no_rope_layers` a 1 means that it does."""
    count, flags = num_layers(fields), fields.items("no_rope_layers", int)
    if "no_rope_layers" not in fields:
        interval = fields.integer("no_rope_layer_interval")
        flags = [(layer + 1) % interval for layer in range(count)]
    if len(flags) < count:
        raise CheckpointError(f"no_rope_layers has {len(flags)} entries for {count} layers: fix config.json")
    return tuple(bool(flag) for flag in flags[:count])


FAMILY = Family(
    _model,
    {
        "num_key_value_heads": 4, "eos_token_id": 128001, "tie_word_embeddings": True, "rope_theta": 2000000.0,
        "no_rope_layer_interval": 4,
    },
    gguf_interleaved=True,
)  # fmt: skip
