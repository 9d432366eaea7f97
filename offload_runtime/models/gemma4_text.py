"""Gemma 4's dense text without embeddings for each layer: heads of two sizes, values that are keys, scaled layers."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from offload_runtime.errors import UnsupportedArchitectureError
from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig, Rope
from offload_runtime.models.gemma2 import NORMS, around
from offload_runtime.models.layers import DecoderLayer
from offload_runtime.models.reading import attention_of, decoder, mlp_of, num_layers, refuse_set, rope, windows_by_type
from offload_runtime.models.registry import Family

_FULL, _SLIDING = "full_attention", "sliding_attention"
_OTHERS = {
    "hidden_size_per_layer_input": "embeddings for each layer", "num_kv_shared_layers": "shared keys and values",
    "enable_moe_block": "experts",
}  # fmt: skip
_ROPES = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


def _refuse_others(fields: Fields) -> None:
    """Refuse the models of the family that have more than these layers, by what they have."""
    for name, what in _OTHERS.items():
        if fields.values.get(name):
            raise UnsupportedArchitectureError(
                f"{fields.where}: Gemma 4 with {what} ({name}) does not run: take a dense one such as gemma-4-31B"
            )
    refuse_set(fields, "attention_bias", "have biases")
    if fields.values.get("use_bidirectional_attention") == "all":
        refuse_set(fields, "use_bidirectional_attention", "see what comes behind a token")


def _proportional(fields: Fields, head_dim: int, stated: dict[str, Any]) -> Rope:
    """A rotation of a whole head, most of whose pairs stand still."""
    share = Fields(fields.where, stated).number("partial_rotary_factor", 1.0, at_least=0, at_most=1)
    whole = {name: value for name, value in stated.items() if name != "partial_rotary_factor"}
    found = rope(fields, head_dim, whole, types=("default", "proportional"))
    return replace(found, parameters={**found.parameters, "partial_rotary_factor": share})


def _full_heads(fields: Fields, num_kv_heads: int, windows: Sequence[int | None]) -> tuple[int, int]:
    """Heads of keys, and channels of a head, of layers that attend to everything: as older files say it of all, and as
    transformers 5 says it of each."""
    stated = {str(layer): entry for layer, entry in fields.mapping("per_layer_config").items()}
    if not stated:
        of_all = fields.flag("attention_k_eq_v") and "num_global_key_value_heads" in fields
        heads = fields.integer("num_global_key_value_heads") if of_all else num_kv_heads
        return heads, fields.integer("global_head_dim", 512)
    full = {str(layer) for layer, window in enumerate(windows) if window is None}
    own = next(iter(stated.values()))
    if set(stated) != full or any(entry != own for entry in stated.values()) or not isinstance(own, dict):
        fields.refuse("per_layer_config", stated, "the same entry for each layer of full_attention")
    one = Fields(fields.where, own)
    return one.integer("num_key_value_heads", num_kv_heads), one.integer("head_dim", fields.integer("head_dim"))


def _model(fields: Fields) -> ModelConfig:
    _refuse_others(fields)
    stated = Fields(fields.where, fields.mapping("rope_parameters"))
    slides = [bool((layer + 1) % 6) for layer in range(num_layers(fields))]
    windows = (*windows_by_type(fields, slides, fields.integer("sliding_window"))[:-1], None)  # the last one sees all
    near = replace(attention_of(fields, norm_offset=0.0), scale=1.0, qk_norm="head", v_norm=True)
    shared, (heads, head_dim) = fields.flag("attention_k_eq_v"), _full_heads(fields, near.num_kv_heads, windows)
    ropes = (
        _proportional(fields, head_dim, stated.mapping(_FULL)), rope(fields, near.head_dim, stated.mapping(_SLIDING))
    )  # fmt: skip
    window, turned = fields.integer("sliding_window"), ropes[1].rotation(first=ropes[0].channels // 2)
    near = replace(near, rotation=turned, window=window)
    far = replace(
        near, num_kv_heads=heads, head_dim=head_dim, values_are_keys=shared, rotation=ropes[0].rotation(), window=None
    )
    layers = {one: DecoderLayer(one, mlp_of(fields, activation="gelu"), NORMS, scaled=True) for one in (near, far)}
    model = decoder(fields, layers[near], ropes=ropes)
    return around(fields, replace(model, layers=tuple(layers[far if window is None else near] for window in windows)))


def _of_gguf(fields: Fields, names: Collection[str]) -> dict[str, Any]:
    """Sizes of heads are those of layers that attend to everything, whose values may have no matrix."""
    count = fields.integer("block_count")
    slides = fields.values.get("gemma4.attention.sliding_window_pattern")
    kinds = slides if isinstance(slides, list) and len(slides) == count else [False] * count
    kv_heads = fields.values.get("gemma4.attention.head_count_kv")
    of_layer = kv_heads if isinstance(kv_heads, list) and len(kv_heads) == count else [kv_heads] * count
    cap, far = "final_logit_softcapping", kinds.index(False)
    return {
        "num_key_value_heads": of_layer[kinds.index(True) if True in kinds else far],
        "num_global_key_value_heads": of_layer[far],
        "attention_k_eq_v": f"blk.{far}.attn_v.weight" not in names,
        "head_dim": fields.integer("attention.key_length_swa", fields.integer("attention.key_length")),
        "global_head_dim": fields.integer("attention.key_length"),
        "hidden_size_per_layer_input": fields.integer("embedding_length_per_layer_input", 0, at_least=0),
        "num_kv_shared_layers": fields.integer("attention.shared_kv_layers", 0, at_least=0),
        **({cap: fields.number(cap)} if cap in fields else {}),
    }


def _rope_of_gguf(fields: Fields, rope: dict[str, Any]) -> dict[str, Any]:
    """What divides the frequencies of pairs that stand still is so large that they do."""
    divisors = rope.get("short_factor", [1.0])
    share = sum(divisor == 1 for divisor in divisors) / len(divisors)
    return {
        _FULL: {**_ROPES[_FULL], "rope_theta": rope["rope_theta"], "partial_rotary_factor": share},
        _SLIDING: {**_ROPES[_SLIDING], "rope_theta": fields.number("rope.freq_base_swa", 10000.0)},
    }


FAMILY = Family(
    _model,
    {
        "num_key_value_heads": 4, "head_dim": 256, "eos_token_id": 1, "tie_word_embeddings": True,
        "max_position_embeddings": 131072, "sliding_window": 512, "rope_parameters": _ROPES,
        "hidden_size_per_layer_input": 256,
    },
    text_sizes={
        "vocab_size": 262144, "hidden_size": 2304, "num_hidden_layers": 30, "num_attention_heads": 8,
        "intermediate_size": 9216,
    },
    of_gguf=_of_gguf, rope_of_gguf=_rope_of_gguf,
)  # fmt: skip
