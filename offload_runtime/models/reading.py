"""What families read of a `config.json` alike: sizes, rotations and sliding windows, each checked before it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offload_runtime.errors import CheckpointError, UnsupportedArchitectureError
from offload_runtime.fields import MOST, Fields, shown
from offload_runtime.models.layers import Attention, DecoderLayer, GatedMLP

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_MOST_LAYERS, _MOST_HEAD_DIM = 1 << 8, 1 << 12  # the deepest models have 130 layers
_SMALLEST, _LARGEST = 1e-6, 1e6  # of what scales rotations: beyond is a slip, and its inverse or its product overflows
# What each type of RoPE scaling must have, and what it may have, from which number on.
_ROPE_NEEDS: dict[str, tuple[str, ...]] = dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",))
_ROPE_NEEDS["llama3"] = ("factor", "low_freq_factor", "high_freq_factor")
_ROPE_FACTORS = {"factor": 1.0} | dict.fromkeys(
    ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    _SMALLEST,
)


def num_layers(fields: Fields) -> int:
    """How many layers there are."""
    return fields.integer("num_hidden_layers", at_most=_MOST_LAYERS)


def decoder_layers(
    fields: Fields, *, windows: Sequence[int | None] | None = None, rotates: Sequence[bool] | None = None,
    qkv_bias: bool = False, o_bias: bool = False, mlp_bias: bool = False, qk_norm: bool = False,
) -> tuple[DecoderLayer, ...]:  # fmt: skip
    """Layers of the usual sizes and names; those that are alike are one object.

    Args:
        fields: What the configuration says.
        windows: The sliding window of each layer; None: all attend to everything.
        rotates: Whether each rotates its queries and keys; None: all do.
        qkv_bias, o_bias, mlp_bias, qk_norm: As of the layers.
    """
    count = num_layers(fields)
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", hidden // num_heads, at_least=4, at_most=_MOST_HEAD_DIM)
    if head_dim % 2:
        fields.refuse("head_dim", head_dim, "an even number")  # pairs of channels are rotated
    activation = fields.text("hidden_act")
    if activation not in ("silu", "swish"):  # two names of one function
        raise UnsupportedArchitectureError(
            f"hidden activation {shown(activation)} is not supported: only silu is; choose another model"
        )
    eps, mlp = fields.number("rms_norm_eps", at_least=0, at_most=1), fields.integer("intermediate_size")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    kinds = list(zip(windows or (None,) * count, rotates or (True,) * count, strict=True))
    made = {
        (window, rotated): DecoderLayer(
            Attention(
                hidden, num_heads, num_kv_heads, head_dim, eps, window=window, rotates=rotated, qkv_bias=qkv_bias,
                o_bias=o_bias, qk_norm=qk_norm,
            ),
            GatedMLP(hidden, mlp, bias=mlp_bias), eps,
        )
        for window, rotated in dict.fromkeys(kinds)
    }  # fmt: skip
    return tuple(made[kind] for kind in kinds)


def sliding_window(fields: Fields) -> int | None:
    """The window of layers that slide, where it is switched on by `use_sliding_window`."""
    slides = fields.flag("use_sliding_window") and "sliding_window" in fields
    return fields.integer("sliding_window") if slides else None


def windows_by_type(fields: Fields, otherwise: Sequence[bool]) -> tuple[int | None, ...]:
    """The window of each layer by `layer_types`; where a file has none, `otherwise` says which layers slide."""
    count, window = num_layers(fields), sliding_window(fields)
    kinds = fields.items("layer_types", str)[:count]
    if not kinds:
        return tuple(window if slides else None for slides in otherwise)
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) < count:
        raise UnsupportedArchitectureError(
            f"layer_types has {len(kinds)} entries for {count} layers, unknown ones {shown(unknown)}: "
            "only full_attention and sliding_attention are supported"
        )
    if "sliding_attention" in kinds and window is None:
        raise CheckpointError(
            f"config.json asks for sliding attention in {kinds.count('sliding_attention')} layers but switches the "
            "sliding window off: set use_sliding_window and sliding_window, or make every layer full_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def upper_layers_slide(fields: Fields) -> tuple[int | None, ...]:
    """Qwen's windows: by `layer_types`, or else of the layers from `max_window_layers` on."""
    first = fields.integer("max_window_layers", at_least=0)
    return windows_by_type(fields, [layer >= first for layer in range(num_layers(fields))])


def _check_rope_numbers(rope: Fields, rope_type: str, head_dim: int) -> None:
    """Refuse scalings that would rotate by infinities, or fail deep in a layer."""
    rope.number("rope_theta", at_least=1 + _SMALLEST, at_most=1e30)
    needed = _ROPE_NEEDS.get(rope_type, ())
    for name, at_least in _ROPE_FACTORS.items():
        if name in needed or (name in rope and rope_type != "default"):
            rope.number(name, at_least=at_least, at_most=_LARGEST)
    if rope_type == "llama3" and rope.number("low_freq_factor") == rope.number("high_freq_factor"):
        rope.refuse("high_freq_factor", rope.values["high_freq_factor"], "more than low_freq_factor")
    if "original_max_position_embeddings" in rope:
        rope.number("original_max_position_embeddings", at_least=2, at_most=MOST)
    rope.flag("truncate")
    for name in ("short_factor", "long_factor") if rope_type == "longrope" else ():
        factors = rope.items(name, float, at_least=_SMALLEST, at_most=_LARGEST)
        if len(factors) != head_dim // 2:
            raise CheckpointError(
                f"longrope's {name} is {len(factors)} numbers, expected {head_dim // 2}, half the head's {head_dim}: "
                f"fix {rope.where}"
            )


def rope_parameters(fields: Fields, head_dim: int) -> dict[str, Any]:
    """The rotary embedding in the form that transformers 5 writes, once it is something that layers rotate by; old
    files have the keys `rope_scaling`, `rope_theta` and `type`."""
    values = fields.values
    found = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    rope = {name: value for name, value in found.items() if value is not None}
    rope.setdefault("rope_theta", values["rope_theta"])
    rope_type = rope.setdefault("rope_type", rope.get("type", "default"))
    if rope.pop("mrope_section", None) and rope_type == "mrope":
        rope_type = rope["rope_type"] = "default"
    if rope_type not in ROPE_TYPES:
        raise UnsupportedArchitectureError(
            f"RoPE parameters of type {shown(rope_type)} are not supported: use a model with one of "
            f"{', '.join(ROPE_TYPES)}"
        )
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial is not None and partial != 1:
        raise UnsupportedArchitectureError(
            f"partial_rotary_factor is {shown(partial)}, and only 1 (the whole head is rotated) is supported: "
            "choose another model"
        )
    if rope_type in ("llama3", "yarn", "longrope"):
        name = "original_max_position_embeddings"
        lengths = (values.get(name), rope.get(name), values["max_position_embeddings"])
        rope[name] = next((length for length in lengths if length is not None), None)
    _check_rope_numbers(Fields(fields.where, rope), rope_type, head_dim)
    return {**rope, "rope_theta": float(rope["rope_theta"])}  # as an integer it may be more than torch takes
