"""Qwen 3.5 and 3.6, dense: three layers of four are gated delta layers, the fourth attends, with a gate behind it."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from offload_runtime_kernels.gated_delta import DeltaShape

from offload_runtime.errors import CheckpointError, UnsupportedArchitectureError
from offload_runtime.fields import Fields, shown
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.gated_delta import USUAL_MODULES, DeltaModules, GatedDelta
from offload_runtime.models.layers import DecoderLayer, RowMixer
from offload_runtime.models.reading import attention_of, decoder, mlp_of, num_layers, rope
from offload_runtime.models.registry import Family, less_one

_KINDS = ("linear_attention", "full_attention")


def delta_of(fields: Fields, *, beta_scale: float = 1.0) -> DeltaShape:
    """Return the heads of gated delta layers.

    Raises:
        CheckpointError: Those of keys cannot be shared evenly, or have channels that kernels have no tiles for.
    """
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    key_heads, value_heads, key_dim, value_dim, taps = (
        fields.integer(f"linear_{name}", at_most=1 << 12) for name in names
    )
    for name, size in (("key", key_dim), ("value", value_dim)):
        if size % 32:
            fields.refuse(f"linear_{name}_head_dim", size, "a multiple of 32")
    if value_heads % key_heads:
        raise CheckpointError(
            f"{fields.where}: {value_heads} heads of values cannot share {key_heads} of keys evenly: fix it, or "
            "download or convert it again"
        )
    tiled = fields.flag("linear_value_heads_tiled")  # as GGUF files have them
    return DeltaShape(key_heads, value_heads, key_dim, value_dim, taps, tiled, beta_scale)


def linear_layers(fields: Fields, interval: int = 4) -> list[int]:
    """Return the layers that do not attend: by `layer_types`, or all but the last of each interval, by default of this
    one.

    Raises:
        CheckpointError: The two say different things, or `layer_types` not one of each layer.
        UnsupportedArchitectureError: There are other kinds, or no layer attends.
    """
    count, kinds = num_layers(fields), fields.items("layer_types", str)
    interval = fields.integer("full_attention_interval", interval)
    by_interval = [_KINDS[not (layer + 1) % interval] for layer in range(count)]
    if kinds and len(kinds) != count:
        raise CheckpointError(
            f"{fields.where}: layer_types has {len(kinds)} entries for {count} layers: fix it, or download or convert "
            "it again"
        )
    if unknown := sorted({*kinds} - {*_KINDS}):
        raise UnsupportedArchitectureError(
            f"{fields.where}: layer_types has {shown(unknown)}, and only {' and '.join(_KINDS)} are supported: choose "
            "another model"
        )
    if kinds and "full_attention_interval" in fields and kinds != by_interval:
        layer = next(layer for layer, (one, other) in enumerate(zip(kinds, by_interval, strict=True)) if one != other)
        raise CheckpointError(
            f"{fields.where}: layer {layer} is {kinds[layer]} by layer_types and {by_interval[layer]} by "
            f"full_attention_interval {interval}: take out the one that is wrong, or download it again"
        )
    found = [layer for layer, kind in enumerate(kinds or by_interval) if kind == _KINDS[0]]
    if len(found) == count:
        raise UnsupportedArchitectureError(
            f"{fields.where}: none of {count} layers attends, and one has to: choose another model"
        )
    return found


def hybrid_of(fields: Fields, mlps: Sequence[RowMixer], modules: DeltaModules = USUAL_MODULES) -> ModelConfig:
    """Return the layers with these MLPs, of which some attend and the others are gated delta layers of such
    `modules`."""
    plain, bias = attention_of(fields, norm_offset=1.0), fields.flag("attention_bias")
    linear = linear_layers(fields)
    rotary = rope(fields, plain.head_dim, partial=True)
    attention = replace(plain, qkv_bias=bias, o_bias=bias, qk_norm="head", gated=True, rotation=rotary.rotation())
    delta = GatedDelta(plain.hidden_size, plain.norm, delta_of(fields), plain.norm.eps, modules)
    mixers = [attention if layer not in linear else delta for layer in range(len(mlps))]
    layers = dict(enumerate(map(DecoderLayer, mixers, mlps)))
    return decoder(fields, layers[mixers.index(attention)], ropes=(rotary,), others=layers)


def _model(fields: Fields) -> ModelConfig:
    return hybrid_of(fields, [mlp_of(fields)] * num_layers(fields))


def _of_gguf(fields: Fields, names: Collection[str]) -> dict[str, Any]:
    """llama.cpp's converter tiles the heads of values, and counts layers that guess further tokens."""
    heads, size = fields.integer("ssm.time_step_rank"), fields.integer("ssm.inner_size")
    if size % heads:
        raise CheckpointError(
            f"{fields.where}: ssm.inner_size {size} are no whole channels of {heads} heads of values: convert it again"
        )
    count = fields.integer("block_count") - fields.integer("nextn_predict_layers", 0, at_least=0)
    recurrent = fields.items("attention.recurrent_layers", bool)
    kinds = {"layer_types": [_KINDS[not one] for one in recurrent[:count]]} if recurrent else {}
    return {
        "num_hidden_layers": count,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in names),
        "linear_num_key_heads": fields.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": fields.integer("ssm.state_size"),
        "linear_value_head_dim": size // heads,
        "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel"),
        "linear_value_heads_tiled": True,
        **(kinds or {"full_attention_interval": fields.integer("full_attention_interval", 4)}),
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
        **dict.fromkeys(
            ("layernorm.weight", "_norm.weight", "model.norm.weight", "enorm.weight", "hnorm.weight",
             "shared_head.norm.weight"), less_one,
        ),
        "A_log": lambda rates: rates.neg().log(),
    },
)  # fmt: skip
