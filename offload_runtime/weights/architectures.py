"""From transformers' configuration objects to our `ModelConfig`, refusing what the decoder does not implement.

The refusals matter more than the translation: an option that the decoder would silently ignore gives wrong tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
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
ACTIVATIONS = ("silu", "swish")  # two names of one function
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
# transformers' values for what a file leaves out.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "sliding_window": 4096, "use_sliding_window": False,
    "max_window_layers": 28, "layer_types": None, "rope_theta": 10000.0, "no_rope_layers": None,
    "no_rope_layer_interval": 4,
}  # fmt: skip
_DEFAULTS_OF: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "bos_token_id": 1, "eos_token_id": 2,
    },
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "smollm3": {
        "num_key_value_heads": 4, "bos_token_id": 128000, "eos_token_id": 128001, "tie_word_embeddings": True,
        "sliding_window": None, "rope_theta": 2000000.0,
    },
}  # fmt: skip


def check_model_type(model_type: object, architectures: object) -> str:
    """Return the architecture's name, e.g. `LlamaForCausalLM`.

    Args:
        model_type: `model_type` of a configuration.
        architectures: Its list of class names, or None when it has none (a configuration made by hand).

    Raises:
        UnsupportedArchitectureError: The decoder does not implement it; names those that it does.
    """
    supported = ", ".join(ARCHITECTURES.values())
    name = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    found = architectures if isinstance(architectures, (list, tuple)) and architectures else [name]
    if name is None or name not in found:
        shown = ", ".join(str(item) for item in found if item) or f"model_type {model_type!r}"
        raise UnsupportedArchitectureError(f"{shown} is not supported: use a model of one of {supported}")
    return name


def _is_number(value: object, *, at_least: float) -> bool:
    """Whether it is a finite number (a boolean is none)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) and value >= at_least


def _head_dim(hf_config: Any) -> int:
    head_dim: int = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    return head_dim


def _check_rope_numbers(rope: dict[str, Any], head_dim: int) -> None:
    """Refuse scalings that would rotate by infinities, or fail deep in the decoder."""
    rope_type, factor = rope["rope_type"], rope.get("factor")
    # yarn and longrope take it from the two context lengths when it is left out.
    required = rope_type in ("linear", "dynamic", "llama3")
    if rope_type != "default" and (required or factor is not None) and not _is_number(factor, at_least=1.0):
        raise CheckpointError(f"the {rope_type} RoPE has factor {factor!r}, not a number from 1 on: fix config.json")
    for name in ("rope_theta", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"):
        if rope.get(name) is not None and not _is_number(rope[name], at_least=_SMALLEST):
            raise CheckpointError(f"RoPE parameter {name} is {rope[name]!r}, not a positive number: fix config.json")
    for name in ("short_factor", "long_factor") if rope_type == "longrope" else ():
        factors = rope.get(name)
        if not isinstance(factors, (list, tuple)) or len(factors) != head_dim // 2:
            found = f"{len(factors)} numbers" if isinstance(factors, (list, tuple)) else repr(factors)
            raise CheckpointError(
                f"longrope's {name} is {found}, expected {head_dim // 2}, half the head's {head_dim}: fix config.json"
            )
        if not all(_is_number(value, at_least=_SMALLEST) for value in factors):
            raise CheckpointError(f"longrope's {name} holds something else than positive numbers: fix config.json")


def _checked_rope(hf_config: Any, head_dim: int) -> dict[str, Any]:
    """transformers' `rope_parameters` as a plain dictionary, once it is something the decoder rotates by."""
    rope = dict(getattr(hf_config, "rope_parameters", None) or {})
    rope_type = rope.get("rope_type")
    if rope_type not in ROPE_TYPES:
        raise UnsupportedArchitectureError(
            f"RoPE parameters of type {rope_type!r} are not supported: use a model with one of {', '.join(ROPE_TYPES)}"
        )
    partial = rope.get("partial_rotary_factor", getattr(hf_config, "partial_rotary_factor", None))
    if partial is not None and partial != 1:
        raise UnsupportedArchitectureError(
            f"partial_rotary_factor is {partial}, and only 1 (the whole head is rotated) is supported: "
            "choose another model"
        )
    _check_rope_numbers(rope, head_dim)
    return rope


def _layer_windows(hf_config: Any, model_type: str) -> tuple[int | None, ...]:
    """Sliding window of each layer in tokens, None for full attention."""
    num_layers: int = hf_config.num_hidden_layers
    window: int | None = getattr(hf_config, "sliding_window", None)
    if model_type == "llama":
        return (None,) * num_layers
    if model_type == "mistral":
        return (window,) * num_layers
    kinds = list(hf_config.layer_types)[:num_layers]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) < num_layers:
        raise UnsupportedArchitectureError(
            f"layer_types has {len(kinds)} entries for {num_layers} layers, unknown ones {unknown}: "
            "only full_attention and sliding_attention are supported"
        )
    if "sliding_attention" in kinds and (window is None or not getattr(hf_config, "use_sliding_window", False)):
        raise CheckpointError(
            f"config.json asks for sliding attention in {kinds.count('sliding_attention')} layers but switches the "
            "sliding window off: set use_sliding_window and sliding_window, or make every layer full_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _layer_rope(hf_config: Any, model_type: str) -> tuple[bool, ...]:
    """Whether each layer rotates its queries and keys; in SmolLM3's `no_rope_layers` a 1 means that it does."""
    num_layers: int = hf_config.num_hidden_layers
    if model_type != "smollm3":
        return (True,) * num_layers
    flags = list(hf_config.no_rope_layers)[:num_layers]
    if len(flags) < num_layers:
        raise CheckpointError(f"no_rope_layers has {len(flags)} entries for {num_layers} layers: fix config.json")
    return tuple(bool(flag) for flag in flags)


def token_ids(value: object) -> tuple[int, ...]:
    """Token ids from a configuration's field: a number, a list of numbers or nothing."""
    if value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    if isinstance(value, (list, tuple)) and all(isinstance(item, int) for item in value):
        return tuple(value)
    raise CheckpointError(f"{value!r} is not a token id nor a list of them: fix eos_token_id in the configuration")


def model_config_from_transformers(hf_config: Any) -> ModelConfig:
    """Translate a transformers (5.17 to 5.23) configuration object.

    Args:
        hf_config: LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config or SmolLM3Config.

    Raises:
        UnsupportedArchitectureError: Another architecture, or an option of these that the decoder does not implement.
        CheckpointError: The values contradict each other.
    """
    model_type = getattr(hf_config, "model_type", None)
    architecture = check_model_type(model_type, getattr(hf_config, "architectures", None))
    assert isinstance(model_type, str)
    if hf_config.hidden_act not in ACTIVATIONS:
        raise UnsupportedArchitectureError(
            f"hidden activation {hf_config.hidden_act!r} is not supported: only silu is; choose another model"
        )
    attention_bias = model_type != "mistral" and bool(getattr(hf_config, "attention_bias", False))
    bos = token_ids(hf_config.bos_token_id)
    try:
        return ModelConfig(
            architecture=architecture,
            hidden_size=hf_config.hidden_size,
            intermediate_size=hf_config.intermediate_size,
            num_layers=hf_config.num_hidden_layers,
            num_heads=hf_config.num_attention_heads,
            num_kv_heads=hf_config.num_key_value_heads or hf_config.num_attention_heads,
            head_dim=_head_dim(hf_config),
            vocab_size=hf_config.vocab_size,
            max_position_embeddings=hf_config.max_position_embeddings,
            rms_norm_eps=hf_config.rms_norm_eps,
            rope_parameters=_checked_rope(hf_config, _head_dim(hf_config)),
            tie_word_embeddings=bool(hf_config.tie_word_embeddings),
            # Qwen2 has biases on q, k and v whatever its config says, and none on o.
            qkv_bias=model_type == "qwen2" or attention_bias,
            o_bias=model_type != "qwen2" and attention_bias,
            mlp_bias=model_type in ("llama", "smollm3") and bool(getattr(hf_config, "mlp_bias", False)),
            qk_norm=model_type == "qwen3",
            layer_windows=_layer_windows(hf_config, model_type),
            layer_rope=_layer_rope(hf_config, model_type),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=token_ids(hf_config.eos_token_id),
        )
    except (OptionError, ZeroDivisionError) as error:
        raise CheckpointError(f"config.json describes an impossible model: {error}") from error


def refuse_quantised(raw: Mapping[str, Any], reference: str) -> None:
    """Raise `CheckpointError` when a configuration says that the weights are quantised."""
    method = raw.get("quantization_config")
    if method:
        method = method.get("quant_method") if isinstance(method, dict) else method
        raise CheckpointError(
            f"{reference} is quantised ({method}), which is not supported: use the 16-bit checkpoint or a GGUF file"
        )


def model_config_from_json(raw: Mapping[str, Any], reference: str) -> ModelConfig:
    """Translate the content of a `config.json`.

    Args:
        raw: The parsed file.
        reference: What the user named, for messages.

    Raises:
        UnsupportedArchitectureError, CheckpointError: As `model_config_from_transformers`.
    """
    check_model_type(raw.get("model_type"), raw.get("architectures"))
    refuse_quantised(raw, reference)
    values = {**_DEFAULTS, **_DEFAULTS_OF[raw["model_type"]], **raw}
    missing = [name for name in _SIZES if not _is_count(values.get(name))]
    if missing:
        raise CheckpointError(f"{reference}: its configuration has no usable {', '.join(missing)}: download it again")
    values["rope_parameters"] = _rope_parameters(values)
    values |= _layer_kinds(values)
    return model_config_from_transformers(SimpleNamespace(**values))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _rope_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """The old keys `rope_scaling`, `rope_theta` and `type` in the form that transformers 5 writes."""
    rope = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    rope.setdefault("rope_theta", values["rope_theta"])
    if values.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", values["partial_rotary_factor"])
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        outside = values.get("original_max_position_embeddings")
        if outside is not None:
            rope["original_max_position_embeddings"] = outside
        rope.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    return rope


def _layer_kinds(values: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers slide and which rotate, where the file does not list them."""
    layers = range(values["num_hidden_layers"])
    if values["model_type"] in ("llama", "mistral"):
        return {}
    window = values["sliding_window"] if values["use_sliding_window"] else None
    slides = [window is not None and layer >= values["max_window_layers"] for layer in layers]
    rotates = values["no_rope_layers"]
    if values["model_type"] == "smollm3":
        if rotates is None:
            rotates = [int((layer + 1) % values["no_rope_layer_interval"] != 0) for layer in layers]
        slides = [window is not None and not flag for flag in rotates]
        window = values["sliding_window"]
    kinds = values["layer_types"] or ["sliding_attention" if flag else "full_attention" for flag in slides]
    return {"sliding_window": window, "layer_types": kinds, "no_rope_layers": rotates}
