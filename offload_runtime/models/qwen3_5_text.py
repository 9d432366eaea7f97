"""Qwen 3.5 and 3.6, dense: three layers of four are gated delta layers, the fourth attends, with a gate behind it."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from offload_runtime_kernels.gated_delta import DeltaShape

from offload_runtime.errors import CheckpointError, UnsupportedArchitectureError
from offload_runtime.fields import Fields, shown
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.gated_delta import GatedDelta
from offload_runtime.models.layers import DecoderLayer
from offload_runtime.models.reading import attention_of, decoder, mlp_of, num_layers, rope
from offload_runtime.models.registry import Family, less_one

_KINDS = ("linear_attention", "full_attention")


def delta_of(fields: Fields) -> DeltaShape:
    """The heads of gated delta layers.

    Raises:
        CheckpointError: Those of keys cannot be shared evenly, or have channels that kernels have no tiles for.
    """
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    key_heads, value_heads, key_dim, value_dim, taps = (
        fields.integer(f"linear_{name}", at_most=1 << 12) for name in names
    )
    tiled = fields.flag("linear_value_heads_tiled")  # as GGUF files have them
    shape = DeltaShape(key_heads, value_heads, key_dim, value_dim, taps, tiled)
    for name, size in (("key", shape.key_dim), ("value", shape.value_dim)):
        if size < 32 or size & (size - 1):
            fields.refuse(f"linear_{name}_head_dim", size, "a power of two from 32 on")
    if shape.value_heads % shape.key_heads:
        raise CheckpointError(
            f"{fields.where}: {shape.value_heads} heads of values cannot share {shape.key_heads} of keys evenly"
        )
    return shape


def layer_kinds(fields: Fields) -> list[str]:
    """`layer_types`, or every layer of an interval attends, the last one of it."""
    count, every = num_layers(fields), fields.integer("full_attention_interval", 4)
    kinds = fields.items("layer_types", str)[:count] or [_KINDS[not (n + 1) % every] for n in range(count)]
    if len(kinds) < count or "full_attention" not in kinds or {*kinds} - {*_KINDS}:
        raise UnsupportedArchitectureError(
            f"{fields.where}: layer_types {shown(kinds)} of {count} layers: only {' and '.join(_KINDS)} are supported, "
            "and one layer at least has to attend"
        )
    return kinds


def _model(fields: Fields) -> ModelConfig:
    plain, bias = attention_of(fields, norm_offset=1.0), fields.flag("attention_bias")
    rotary = rope(fields, plain.head_dim, partial=True)
    attention = replace(
        plain, qkv_bias=bias, o_bias=bias, qk_norm="head", gated=True, rotation=rotary.rotation()
    )  # fmt: skip
    layer = DecoderLayer(attention, mlp_of(fields))
    delta = replace(layer, attention=GatedDelta(plain.hidden_size, plain.norm, delta_of(fields)))
    others = {number: delta for number, kind in enumerate(layer_kinds(fields)) if kind == "linear_attention"}
    return decoder(fields, layer, ropes=(rotary,), others=others)


def _of_gguf(fields: Fields, names: Collection[str]) -> dict[str, Any]:
    """llama.cpp's converter tiles the heads of values, and counts layers that guess further tokens."""
    heads, size = fields.integer("ssm.time_step_rank"), fields.integer("ssm.inner_size")
    if size % heads:
        raise CheckpointError(f"{fields.where}: ssm.inner_size {size} are no whole channels of {heads} heads of values")
    recurrent = fields.values.get("qwen35.attention.recurrent_layers")
    return {
        "num_hidden_layers": fields.integer("block_count") - fields.integer("nextn_predict_layers", 0, at_least=0),
        "full_attention_interval": fields.integer("full_attention_interval", 4),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in names),
        "linear_num_key_heads": fields.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": fields.integer("ssm.state_size"),
        "linear_value_head_dim": size // heads,
        "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel"),
        "linear_value_heads_tiled": True,
        **({"layer_types": [_KINDS[not one] for one in recurrent]} if isinstance(recurrent, list) else {}),
    }


FAMILY = Family(
    _model,
    {
        "head_dim": 256, "num_key_value_heads": 4, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    text_sizes={
        "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_attention_heads": 16,
    },
    of_gguf=_of_gguf,
    gguf_undo={
        **dict.fromkeys(("layernorm.weight", "_norm.weight", "model.norm.weight"), less_one),
        "A_log": lambda rates: rates.neg().log(),
    },
)  # fmt: skip
