"""A model's shape from its `config.json` alone, without weights and without transformers, whose import takes seconds.

For planning. What is loaded goes by transformers' own reading of the file; the tests hold the two to the same result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from offload_runtime.config import ModelConfig
from offload_runtime.errors import CheckpointError
from offload_runtime.weights.architectures import check_model_type, model_config_from_transformers
from offload_runtime.weights.checkpoint import find_checkpoint, open_checkpoint, readable
from offload_runtime.weights.safetensors import DTYPES, read_header, read_json, refuse_quantised

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
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
_DTYPE_NAMES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class ModelDescription(Protocol):
    """What a plan has to know of a model; every `CheckpointSource` is one."""

    @property
    def native_dtype(self) -> torch.dtype:
        """What `--dtype auto` means."""
        ...

    def config(self) -> ModelConfig:
        """Shape and flags of the model."""
        ...


@dataclass(frozen=True)
class DescribedModel:
    """A model that is known by its configuration."""

    model_config: ModelConfig
    native_dtype: torch.dtype

    def config(self) -> ModelConfig:
        """Shape and flags of the model."""
        return self.model_config


def describe_model(reference: str | Path) -> ModelDescription:
    """What a plan has to know of a model; reads configuration files and headers, downloads at most a `config.json`.

    Args:
        reference: A directory with `config.json`, a safetensors or `.gguf` file, or `org/name` on the hub.

    Raises:
        CheckpointError, UnsupportedArchitectureError, HubError: As `open_checkpoint`, but for missing weights.
    """
    with readable(str(reference)):
        found = find_checkpoint(reference)
        if isinstance(found, str):
            from offload_runtime.weights.hub import download_config

            return _describe_directory(download_config(found).parent)
        if found.suffix == ".safetensors":
            return _describe_directory(found.parent)
        if found.is_dir() and ((found / "config.json").exists() or not any(found.glob("*.gguf"))):
            return _describe_directory(found)
        return open_checkpoint(found)


def _describe_directory(directory: Path) -> ModelDescription:
    raw = read_json(directory / "config.json")
    return DescribedModel(model_config_from_json(raw, str(directory)), _stored_dtype(directory, raw))


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
    missing = [name for name in _SIZES if not _is_count(raw.get(name))]
    if missing:
        raise CheckpointError(f"{reference}: config.json has no usable {', '.join(missing)}: download it again")
    values = {**_DEFAULTS, **_DEFAULTS_OF[raw["model_type"]], **raw}
    if not _is_count(values["max_position_embeddings"]):
        raise CheckpointError(f"{reference}: config.json has no usable max_position_embeddings: download it again")
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


def _stored_dtype(directory: Path, raw: Mapping[str, Any]) -> torch.dtype:
    """The dtype of the embedding where weights are there, else what the configuration says."""
    for path in sorted(directory.glob("*.safetensors")):
        stored = read_header(path).get("model.embed_tokens.weight")
        if stored is not None and stored.dtype in DTYPES:
            return torch.float32 if stored.dtype == "F64" else DTYPES[stored.dtype]
    name = str(raw.get("dtype") or raw.get("torch_dtype")).removeprefix("torch.")
    return _DTYPE_NAMES.get(name, torch.bfloat16)
