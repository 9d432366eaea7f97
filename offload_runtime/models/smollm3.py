"""SmolLM3: Llama's layers, of which some do not rotate, and those may slide."""

from offload_runtime.errors import CheckpointError
from offload_runtime.fields import Fields
from offload_runtime.models.layers import DecoderLayer
from offload_runtime.models.reading import decoder_layers, num_layers, windows_by_type
from offload_runtime.models.registry import Family


def _layers(fields: Fields) -> tuple[DecoderLayer, ...]:
    rotates, bias = _rotates(fields), fields.flag("attention_bias")
    windows = windows_by_type(fields, [not rotated for rotated in rotates])
    mlp_bias = fields.flag("mlp_bias")
    return decoder_layers(fields, windows=windows, rotates=rotates, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


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
    _layers,
    {
        "num_key_value_heads": 4, "eos_token_id": 128001, "tie_word_embeddings": True, "rope_theta": 2000000.0,
        "no_rope_layer_interval": 4,
    },
    gguf_interleaved=True,
)  # fmt: skip
