"""What families read of a `config.json` alike: sizes, rotations and sliding windows, each checked before it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from offload_runtime_kernels.kv_blocks import Rotation
from offload_runtime_kernels.linear import Activation

from offload_runtime.errors import CheckpointError, UnsupportedArchitectureError
from offload_runtime.fields import MOST, Fields, shown
from offload_runtime.models.config import ModelConfig, Rope
from offload_runtime.models.experts import Experts
from offload_runtime.models.layers import Attention, DecoderLayer, GatedMLP, RowNorm

_GELU = "gelu_pytorch_tanh"
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
MOST_LAYERS, _MOST_HEAD_DIM, _MOST_EXPERTS = 1 << 8, 1 << 12, 1 << 12  # the deepest models have 130 layers
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SMALLEST, _LARGEST = 1e-6, 1e6  # of what scales rotations: beyond is a slip, and its inverse or its product overflows
# What each type of RoPE scaling must have, and what it may have, from which number on.
_ROPE_NEEDS: dict[str, tuple[str, ...]] = dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",))
_ROPE_NEEDS["llama3"] = ("factor", "low_freq_factor", "high_freq_factor")
_ROPE_FACTORS = {"factor": 1.0} | dict.fromkeys(
    ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    _SMALLEST,
)


def num_layers(fields: Fields) -> int:
    """Return how many layers there are."""
    return fields.integer("num_hidden_layers", at_most=MOST_LAYERS)


def attention_of(fields: Fields, *, norm_offset: float | None = None) -> Attention:
    """Attention of the usual sizes, all of whose channels are rotated, with norms of `rms_norm_eps` and this offset,
    and no biases."""
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", hidden // num_heads, at_least=4, at_most=_MOST_HEAD_DIM)
    if head_dim % 2:
        fields.refuse("head_dim", head_dim, "an even number")  # pairs of channels are rotated
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    eps = fields.number("rms_norm_eps", at_least=0, at_most=1)
    norm = RowNorm(eps, norm_offset)
    return Attention(hidden, num_heads, num_kv_heads, head_dim, norm, rotation=Rotation(0, head_dim // 2))


def mlp_of(fields: Fields, *, activation: Activation = "silu", size: str = "intermediate_size") -> GatedMLP:
    """Return a gated MLP of this activation, as wide as the field `size` says."""
    key, names = ("hidden_act", ("silu", "swish")) if activation == "silu" else ("hidden_activation", (_GELU,))
    if (stated := fields.text(key, names[0])) not in names:
        raise UnsupportedArchitectureError(
            f"hidden activation {shown(stated)} is not supported: only {names[0]} is; choose another model"
        )
    return GatedMLP(fields.integer("hidden_size"), fields.integer(size), activation)


def experts_of(fields: Fields, *, size: str = "moe_intermediate_size") -> Experts:
    """Experts of the usual number, each as wide as the field `size` says, chosen by a softmax of all."""
    said = [name for name in _EXPERT_COUNTS if name in fields] or _EXPERT_COUNTS[:1]
    (count, number), *others = [(name, fields.integer(name, at_most=_MOST_EXPERTS)) for name in said]
    for other, value in others:
        if value != number:
            fields.refuse(other, value, f"the {number} of {count}")
    return Experts(mlp_of(fields, size=size), number, _chosen_of(fields, "num_experts_per_tok", count, number))


def experts_of_gguf(fields: Fields, name: str) -> dict[str, int]:
    """Return how many experts there are, by a family's `name` for it, and are chosen, of the metadata of a GGUF file:
    what is wrong there is said by its own keys."""
    number = fields.integer("expert_count", at_most=_MOST_EXPERTS)
    return {name: number, "num_experts_per_tok": _chosen_of(fields, "expert_used_count", "expert_count", number)}


def _chosen_of(fields: Fields, name: str, of: str, number: int) -> int:
    """How many experts a token goes through, no more than the `number` that the field `of` says."""
    chosen = fields.integer(name)
    if chosen > number:
        fields.refuse(name, chosen, f"at most the {number} of {of}")
    return chosen


def sparse_layers(fields: Fields) -> list[int]:
    """Qwen's layers that have experts: every `decoder_sparse_step`th but for `mlp_only_layers`."""
    step, dense = fields.integer("decoder_sparse_step", 1), fields.items("mlp_only_layers", int)
    return [layer for layer in range(num_layers(fields)) if not (layer + 1) % step and layer not in dense]


def decoder(
    fields: Fields, layer: DecoderLayer, *, windows: Sequence[int | None] | None = None,
    rotations: Sequence[Rotation | None] | None = None, ropes: tuple[Rope, ...] | None = None,
    others: Mapping[int, DecoderLayer] = MappingProxyType({}),
) -> ModelConfig:  # fmt: skip
    """Return a model of layers that differ in their windows and rotations at most; those that are alike are one object.

    Args:
        fields: What the configuration says.
        layer: What all layers are.
        windows: The sliding window of each; None: all are as `layer` says.
        rotations: How each rotates its queries and keys; None: all do as `layer` says.
        ropes: What they rotate by; None: what the configuration says of all.
        others: Layers of another kind, by their numbers.
    """
    count, one = num_layers(fields), layer.attention
    assert isinstance(one, Attention), "the others are of another kind"
    kinds = list(zip(windows or (one.window,) * count, rotations or (one.rotation,) * count, strict=True))
    made = {
        (window, rotation): replace(layer, attention=replace(one, window=window, rotation=rotation))
        for window, rotation in dict.fromkeys(kinds)
    }
    return ModelConfig(
        architecture=fields.text("architecture"),
        layers=tuple(others.get(number, made[kind]) for number, kind in enumerate(kinds)),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        ropes=(rope(fields, one.head_dim),) if ropes is None else ropes,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=end_ids(fields),
    )


def decoder_by_type(fields: Fields, layer: DecoderLayer, slides: Sequence[bool], *, local_theta: float) -> ModelConfig:
    """Return a model whose layers rotate in one way where they slide and in another one where they attend to
    everything.

    Args:
        fields: What the configuration says: `rope_parameters` of each type, or of older files those of full attention.
        layer: What all layers are.
        slides: Which do, where no `layer_types` say it.
        local_theta: The base of those that slide, where no `rope_parameters` of their own say it.
    """
    windows = windows_by_type(fields, slides, fields.integer("sliding_window"))
    assert isinstance(layer.attention, Attention)
    stated, head_dim = fields.mapping("rope_parameters"), layer.attention.head_dim
    types = Fields(fields.where, stated)
    by_type = any(isinstance(value, dict) for value in stated.values())
    full = {**(types.mapping("full_attention") if by_type else stated), **fields.mapping("rope_scaling")}
    local = {"rope_theta": local_theta, **(types.mapping("sliding_attention") if by_type else {})}
    ropes = rope(fields, head_dim, full), rope(fields, head_dim, local)
    far, near = ropes[0].rotation(), ropes[1].rotation(first=ropes[0].channels // 2)
    rotations = [far if window is None else near for window in windows]
    return decoder(fields, layer, windows=windows, rotations=rotations, ropes=ropes)


def refuse_set(fields: Fields, name: str, what: str) -> None:
    """Refuse an option that the layers would ignore."""
    if fields.values.get(name):
        raise UnsupportedArchitectureError(
            f"{name} is {shown(fields.values[name])}: layers that {what} are not supported; choose another model"
        )


def end_ids(fields: Fields) -> tuple[int, ...]:
    """Token ids that end an answer: a number, a list of numbers or nothing."""
    value = fields.values.get("eos_token_id")
    listed = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return tuple(Fields(fields.where, {"eos_token_id": listed}).items("eos_token_id", int))


def sliding_window(fields: Fields, *, switched: bool = False) -> int | None:
    """Return the window of layers that slide, None where there is none; of some families `use_sliding_window` switches
    it."""
    slides = "sliding_window" in fields and (fields.flag("use_sliding_window") or not switched)
    return fields.integer("sliding_window") if slides else None


def windows_by_type(fields: Fields, otherwise: Sequence[bool], window: int | None) -> tuple[int | None, ...]:
    """Return the window of each layer by `layer_types`; where a file has none, `otherwise` says which layers slide."""
    count = num_layers(fields)
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
    slides = [layer >= first for layer in range(num_layers(fields))]
    return windows_by_type(fields, slides, sliding_window(fields, switched=True))


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


def rope(
    fields: Fields, head_dim: int, stated: Mapping[str, Any] | None = None, *, types: Sequence[str] = ROPE_TYPES,
    partial: bool = False,
) -> Rope:  # fmt: skip
    """Return the rotary embedding in the form that transformers 5 writes, once it is something that layers rotate by;
    old files have the keys `rope_scaling`, `rope_theta` and `type`.

    Args:
        fields: What the configuration says.
        head_dim: Channels of a head.
        stated: What it says of this rotation; None: of all.
        types: Which the layers have.
        partial: Whether only the first channels of a head may be rotated.
    """
    values = fields.values
    found = (fields.mapping("rope_scaling") or fields.mapping("rope_parameters")) if stated is None else stated
    own = {name: value for name, value in found.items() if value is not None}
    own.setdefault("rope_theta", values["rope_theta"])
    rope_type = own.setdefault("rope_type", own.get("type", "default"))
    if own.pop("mrope_section", None) and rope_type == "mrope":
        rope_type = own["rope_type"] = "default"
    if rope_type not in types:
        raise UnsupportedArchitectureError(
            f"RoPE parameters of type {shown(rope_type)} are not supported: use a model with one of {', '.join(types)}"
        )
    share, name = own.pop("partial_rotary_factor", None), "partial_rotary_factor"
    share = values.get(name) if share is None else share
    share = Fields(fields.where, {name: share}).number(name, 1.0, at_least=0, at_most=1)
    if share != 1 and not partial:
        raise UnsupportedArchitectureError(
            f"partial_rotary_factor is {share:g}, and only 1 (the whole head is rotated) is supported: "
            "choose another model"
        )
    channels = int(head_dim * share)
    if channels < 2 or channels % 2:
        fields.refuse(name, share, f"a share of a head's {head_dim} channels that is an even number")
    if rope_type in ("llama3", "yarn", "longrope"):
        name = "original_max_position_embeddings"
        lengths = (values.get(name), own.get(name), values["max_position_embeddings"])
        own[name] = next((length for length in lengths if length is not None), None)
    _check_rope_numbers(Fields(fields.where, own), rope_type, channels)
    if rope_type == "longrope":  # what transformers takes too, but with a warning
        ratio = fields.integer("max_position_embeddings") / own["original_max_position_embeddings"]
        own.setdefault("factor", max(1.0, ratio))
    return Rope({**own, "rope_theta": float(own["rope_theta"])}, channels)  # an integer may be more than torch takes
