"""From configurations in the form of `config.json` to our `ModelConfig`, refusing what the decoder does not implement.

The refusals matter more than the translation: an option that the decoder would silently ignore gives wrong tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload_runtime.config import ModelConfig
from offload_runtime.errors import CheckpointError, OptionError, UnsupportedArchitectureError

# transformers' model_type to the architecture the decoder implements.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_SMALLEST = 1e-6  # of what must be positive: anything below is a slip, and its inverse overflows
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


def _architecture(raw: Mapping[str, Any], where: object) -> str:
    """The name of the architecture that a configuration describes, e.g. `LlamaForCausalLM`.

    Raises:
        UnsupportedArchitectureError: The decoder does not implement it; names those that it does.
        CheckpointError: The weights are quantised.
    """
    model_type, architectures = raw.get("model_type"), raw.get("architectures")
    name = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    # A configuration made by hand has no list of class names.
    found = architectures if isinstance(architectures, (list, tuple)) and architectures else [name]
    if name is None or name not in found:
        shown = ", ".join(str(item) for item in found if item) or f"model_type {model_type!r}"
        supported = ", ".join(ARCHITECTURES.values())
        raise UnsupportedArchitectureError(f"{shown} is not supported: use a model of one of {supported}")
    method = raw.get("quantization_config")
    if method:
        method = method.get("quant_method") if isinstance(method, dict) else method
        raise CheckpointError(
            f"{where} is quantised ({method}), which is not supported: use the 16-bit checkpoint or a GGUF file"
        )
    return name


def checked_number(where: object, name: str, value: Any, *, at_least: float = -math.inf, integer: bool = False) -> Any:
    """A number that a file says, as it says it.

    Args:
        where: The file, for the message.
        name: What the number is called there.
        value: What was found, of whatever type; None where there is nothing.
        at_least: The smallest that makes sense.
        integer: Only whole numbers do. Infinities, NaN and booleans never do.

    Raises:
        CheckpointError: It is something else.
    """
    is_number = isinstance(value, int if integer else (int, float)) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and value >= at_least:
        return value
    found = f"no usable {name}" if value is None else f"{name} {value!r}"
    bound = f" from {at_least:g} on" if math.isfinite(at_least) else ""
    raise CheckpointError(
        f"{where} has {found}, where {'an integer' if integer else 'a number'}{bound} is needed: "
        "fix it, or download or convert it again"
    )


def token_ids(value: object) -> tuple[int, ...]:
    """Token ids from a configuration's field: a number, a list of numbers or nothing."""
    ids = () if value is None else value if isinstance(value, (list, tuple)) else (value,)
    if not all(isinstance(item, int) for item in ids):
        raise CheckpointError(f"{value!r} is not a token id nor a list of them: fix eos_token_id in the configuration")
    return tuple(ids)


def _check_rope_numbers(rope: Mapping[str, Any], head_dim: int, where: str) -> None:
    """Refuse scalings that would rotate by infinities, or fail deep in the decoder."""
    rope_type = rope["rope_type"]
    # yarn and longrope take it from the two context lengths when it is left out.
    if rope_type in ("linear", "dynamic", "llama3") or (rope_type != "default" and rope.get("factor") is not None):
        checked_number(where, f"{rope_type} RoPE factor", rope.get("factor"), at_least=1)
    for name in ("rope_theta", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"):
        if rope.get(name) is not None:
            checked_number(where, name, rope[name], at_least=_SMALLEST)
    for name in ("short_factor", "long_factor") if rope_type == "longrope" else ():
        factors = rope.get(name)
        if not isinstance(factors, (list, tuple)) or len(factors) != head_dim // 2:
            found = f"{len(factors)} numbers" if isinstance(factors, (list, tuple)) else repr(factors)
            raise CheckpointError(
                f"longrope's {name} is {found}, expected {head_dim // 2}, half the head's {head_dim}: fix {where}"
            )
        for factor in factors:
            checked_number(where, f"longrope {name}", factor, at_least=_SMALLEST)


def _rope_parameters(values: Mapping[str, Any], head_dim: int, where: str) -> dict[str, Any]:
    """The rotary embedding in the form that transformers 5 writes, once it is something the decoder rotates by; old
    files have the keys `rope_scaling`, `rope_theta` and `type`."""
    rope = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    rope.setdefault("rope_theta", values["rope_theta"])
    rope_type = rope.setdefault("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise UnsupportedArchitectureError(
            f"RoPE parameters of type {rope_type!r} are not supported: use a model with one of {', '.join(ROPE_TYPES)}"
        )
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial is not None and partial != 1:
        raise UnsupportedArchitectureError(
            f"partial_rotary_factor is {partial}, and only 1 (the whole head is rotated) is supported: "
            "choose another model"
        )
    if rope_type in ("llama3", "yarn", "longrope"):
        outside = values.get("original_max_position_embeddings")
        if outside is not None:
            rope["original_max_position_embeddings"] = outside
        rope.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    _check_rope_numbers(rope, head_dim, where)
    return rope


def _layer_rope(values: Mapping[str, Any]) -> tuple[bool, ...]:
    """Whether each layer rotates its queries and keys; in SmolLM3's `no_rope_layers` a 1 means that it does."""
    num_layers = values["num_hidden_layers"]
    if values["model_type"] != "smollm3":
        return (True,) * num_layers
    flags = values.get("no_rope_layers")
    if flags is None:
        flags = [(layer + 1) % values["no_rope_layer_interval"] for layer in range(num_layers)]
    if len(flags) < num_layers:
        raise CheckpointError(f"no_rope_layers has {len(flags)} entries for {num_layers} layers: fix config.json")
    return tuple(bool(flag) for flag in flags[:num_layers])


def _layer_windows(values: Mapping[str, Any], layer_rope: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Sliding window of each layer in tokens, None for full attention."""
    num_layers, family, window = values["num_hidden_layers"], values["model_type"], values["sliding_window"]
    if family in ("llama", "mistral"):
        return (window if family == "mistral" else None,) * num_layers
    if not values.get("use_sliding_window"):
        window = None
    kinds = values.get("layer_types")
    if not kinds:  # Qwen's upper layers slide, and those of SmolLM3 that do not rotate
        slides = [layer >= values["max_window_layers"] for layer in range(num_layers)]
        if family == "smollm3":
            slides = [not rotates for rotates in layer_rope]
        return tuple(window if flag else None for flag in slides)
    kinds = kinds[:num_layers]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) < num_layers:
        raise UnsupportedArchitectureError(
            f"layer_types has {len(kinds)} entries for {num_layers} layers, unknown ones {unknown}: "
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
    architecture = _architecture(raw, reference)
    family: str = raw["model_type"]
    values = {**_DEFAULTS, **_DEFAULTS_OF[family], **raw}

    def size(name: str, default: int | None = None) -> int:
        return int(checked_number(reference, name, values.get(name) or default, at_least=1, integer=True))

    hidden, num_layers, num_heads = size("hidden_size"), size("num_hidden_layers"), size("num_attention_heads")
    head_dim = size("head_dim", hidden // num_heads)
    if values["hidden_act"] not in ("silu", "swish"):  # two names of one function
        raise UnsupportedArchitectureError(
            f"hidden activation {values['hidden_act']!r} is not supported: only silu is; choose another model"
        )
    attention_bias = family != "mistral" and bool(values.get("attention_bias"))
    layer_rope = _layer_rope(values)
    try:
        return ModelConfig(
            architecture=architecture,
            hidden_size=hidden,
            intermediate_size=size("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=size("num_key_value_heads", num_heads),
            head_dim=head_dim,
            vocab_size=size("vocab_size"),
            max_position_embeddings=size("max_position_embeddings"),
            rms_norm_eps=checked_number(reference, "rms_norm_eps", values["rms_norm_eps"]),
            rope_parameters=_rope_parameters(values, head_dim, reference),
            tie_word_embeddings=bool(values.get("tie_word_embeddings")),
            # Qwen2 has biases on q, k and v whatever its config says, and none on o.
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=family != "qwen2" and attention_bias,
            mlp_bias=family in ("llama", "smollm3") and bool(values.get("mlp_bias")),
            qk_norm=family == "qwen3",
            layer_windows=_layer_windows(values, layer_rope),
            layer_rope=layer_rope,
            eos_token_ids=token_ids(values.get("eos_token_id")),
        )
    except OptionError as error:
        raise CheckpointError(f"{reference} describes an impossible model: {error}") from error


def read_configuration(settings: Mapping[str, Any], where: Path) -> tuple[Any, ModelConfig]:
    """transformers' object for the content of a `config.json`, and what we read in it.

    Raises:
        UnsupportedArchitectureError, CheckpointError: As `model_config_from_json`, or transformers refuses it.
    """
    _architecture(settings, where)
    from transformers import AutoConfig

    try:
        hf_config = AutoConfig.for_model(**settings)
    except Exception as error:  # its validation raises errors of many libraries; each means the same here
        raise CheckpointError(f"the configuration in {where} was refused by transformers: {error}") from error
    return hf_config, model_config_from_json(hf_config.to_dict(), str(where))
