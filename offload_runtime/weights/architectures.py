"""From configurations in the form of `config.json` to our `ModelConfig`, refusing what the decoder does not implement.

The refusals matter more than the translation: an option that the decoder would silently ignore gives wrong tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload_runtime.config import ModelConfig
from offload_runtime.errors import CheckpointError, OptionError, UnsupportedArchitectureError
from offload_runtime.weights.fields import MOST, Fields, shown
from offload_runtime.weights.unsupported import unsupported_model

# transformers' model_type to the architecture the decoder implements.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
# The text parts of models that read images, and whose they are like: of text, whose positions are the same on all three
# axes, the rotations of `mrope` are the plain ones.
_TEXT_PARTS = {
    "qwen2_vl": "qwen2", "qwen2_vl_text": "qwen2", "qwen2_5_vl": "qwen2", "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}  # fmt: skip
# What configurations of text parts leave out, which have been saved as differences from transformers' defaults.
_SIZES: dict[str, Any] = {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_TEXT_SIZES = {
    "llama": {**_SIZES, "intermediate_size": 11008}, "mistral": {**_SIZES, "intermediate_size": 14336},
}  # fmt: skip
_OF_WHOLE = ("quantization_config", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")
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
# transformers' values for what a file leaves out, where they are not None or False.
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "sliding_window": 4096,
    "max_window_layers": 28, "rope_theta": 10000.0, "no_rope_layer_interval": 4,
}  # fmt: skip
_DEFAULTS_OF: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "eos_token_id": 2},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "eos_token_id": 2},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "smollm3": {
        "num_key_value_heads": 4, "eos_token_id": 128001, "tie_word_embeddings": True, "sliding_window": None,
        "rope_theta": 2000000.0,
    },
}  # fmt: skip


def language_settings(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """What `config.json` says of the language model: all of it, or of a model that reads images or sounds too the part
    about text, where the decoder implements that."""
    fields = Fields(where, settings)
    part, outer = fields.mapping("text_config"), fields.text("model_type", "")
    if not part and outer in _TEXT_PARTS:
        part = settings
    named = part.get("model_type", "")
    family = _TEXT_PARTS.get(named, named) if isinstance(named, str) else ""
    generates = [name for name in fields.items("architectures", str) if not name.endswith("ForConditionalGeneration")]
    if family not in ARCHITECTURES or generates or fields.flag("is_encoder_decoder"):
        return settings
    ties = [values["tie_word_embeddings"] for values in (settings, part) if "tie_word_embeddings" in values]
    return {
        **{name: settings[name] for name in _OF_WHOLE if settings.get(name) is not None}, **_TEXT_SIZES.get(family, {}),
        **{name: value for name, value in part.items() if name != "vision_config"},
        "model_type": family, "architectures": [ARCHITECTURES[family]], "text_part_of": outer,
        # Whoever saves a head of its own says so, or it is seen from the head.
        "tie_word_embeddings": any(ties) if ties else True,
    }  # fmt: skip


def _architecture(fields: Fields) -> str:
    """The name of the architecture that a configuration describes, e.g. `LlamaForCausalLM`.

    Raises:
        UnsupportedArchitectureError: The decoder does not implement it; says why, and what runs.
    """
    name = ARCHITECTURES.get(fields.text("model_type", ""))
    # A configuration made by hand has no list of class names; a base model's head is seen from its tensors.
    found = fields.items("architectures", str) or [name or ""]
    if name is None or not {name, name.replace("ForCausalLM", "Model")}.intersection(found):
        raise unsupported_model(fields)
    return name


def end_ids(fields: Fields) -> tuple[int, ...]:
    """Token ids that end an answer: a number, a list of numbers or nothing."""
    value = fields.values.get("eos_token_id")
    listed = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return tuple(Fields(fields.where, {"eos_token_id": listed}).items("eos_token_id", int))


def _check_rope_numbers(rope: Fields, rope_type: str, head_dim: int) -> None:
    """Refuse scalings that would rotate by infinities, or fail deep in the decoder."""
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


def _rope_parameters(fields: Fields, head_dim: int) -> dict[str, Any]:
    """The rotary embedding in the form that transformers 5 writes, once it is something the decoder rotates by; old
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


def _layer_rope(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer rotates its queries and keys; in SmolLM3's `no_rope_layers` a 1 means that it does."""
    if fields.text("model_type") != "smollm3":
        return (True,) * num_layers
    flags = fields.items("no_rope_layers", int)
    if "no_rope_layers" not in fields:
        interval = fields.integer("no_rope_layer_interval")
        flags = [(layer + 1) % interval for layer in range(num_layers)]
    if len(flags) < num_layers:
        raise CheckpointError(f"no_rope_layers has {len(flags)} entries for {num_layers} layers: fix config.json")
    return tuple(bool(flag) for flag in flags[:num_layers])


def _layer_windows(fields: Fields, layer_rope: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Sliding window of each layer in tokens, None for full attention."""
    num_layers, family = len(layer_rope), fields.text("model_type")
    slides = family == "mistral" or (family != "llama" and fields.flag("use_sliding_window"))
    window = fields.integer("sliding_window") if slides and "sliding_window" in fields else None
    if family in ("llama", "mistral"):
        return (window,) * num_layers
    kinds = fields.items("layer_types", str)[:num_layers]
    if not kinds:  # Qwen's upper layers slide, and those of SmolLM3 that do not rotate
        first = fields.integer("max_window_layers", at_least=0)
        upper = [layer >= first for layer in range(num_layers)]
        flags = [not rotates for rotates in layer_rope] if family == "smollm3" else upper
        return tuple(window if flag else None for flag in flags)
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) < num_layers:
        raise UnsupportedArchitectureError(
            f"layer_types has {len(kinds)} entries for {num_layers} layers, unknown ones {shown(unknown)}: "
            "only full_attention and sliding_attention are supported"
        )
    if "sliding_attention" in kinds and window is None:
        raise CheckpointError(
            f"config.json asks for sliding attention in {kinds.count('sliding_attention')} layers but switches the "
            "sliding window off: set use_sliding_window and sliding_window, or make every layer full_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def model_config_from_json(raw: Mapping[str, Any], reference: str) -> ModelConfig:
    """Translate the content of a `config.json`.

    Args:
        raw: The parsed file.
        reference: What the user named, for messages.

    Raises:
        UnsupportedArchitectureError: Another architecture, or an option of these that the decoder does not implement.
        CheckpointError: A size is missing, or the values contradict each other.
    """
    architecture = _architecture(Fields(reference, raw))
    family: str = raw["model_type"]
    fields = Fields(reference, {**_DEFAULTS, **_DEFAULTS_OF[family], **raw})
    if "hidden_size" not in raw:  # what some repositories of GGUF files have beside them
        raise CheckpointError(
            f"{reference} has a config.json without sizes, as those of GGUF files may be: name the file, on a hub as "
            "org/name:Q4_K_M, or give a checkpoint with safetensors"
        )
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", hidden // num_heads, at_least=4, at_most=_MOST_HEAD_DIM)
    if head_dim % 2:
        fields.refuse("head_dim", head_dim, "an even number")  # pairs of channels are rotated
    activation = fields.text("hidden_act")
    if activation not in ("silu", "swish"):  # two names of one function
        raise UnsupportedArchitectureError(
            f"hidden activation {shown(activation)} is not supported: only silu is; choose another model"
        )
    attention_bias = fields.flag("attention_bias") and family != "mistral"
    layer_rope = _layer_rope(fields, fields.integer("num_hidden_layers", at_most=_MOST_LAYERS))
    try:
        return ModelConfig(
            architecture=architecture,
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=len(layer_rope),
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            vocab_size=fields.integer("vocab_size"),
            max_position_embeddings=fields.integer("max_position_embeddings"),
            rms_norm_eps=fields.number("rms_norm_eps", at_least=0, at_most=1),
            rope_parameters=_rope_parameters(fields, head_dim),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            # Qwen2 has biases on q, k and v whatever its config says, and none on o.
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=family != "qwen2" and attention_bias,
            mlp_bias=family in ("llama", "smollm3") and fields.flag("mlp_bias"),
            qk_norm=family == "qwen3",
            layer_windows=_layer_windows(fields, layer_rope),
            layer_rope=layer_rope,
            eos_token_ids=end_ids(fields),
        )
    except OptionError as error:
        raise CheckpointError(f"{reference} describes an impossible model: {error}") from error
