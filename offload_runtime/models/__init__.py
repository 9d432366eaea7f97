"""Models: layers, and a file for each family that says which of them a model has."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload_runtime.models.config import ModelConfig
    from offload_runtime.models.layers import Attention, DecoderLayer, GatedMLP, LayerCache, Tensor, Weights
    from offload_runtime.models.registry import FAMILIES, family_named, language_settings, model_config_from_json
    from offload_runtime.models.rope import RopeTable, RowFrequencies

# Nothing is imported before it is asked for: a family that does not run is refused without torch.
_HOMES = {
    "config": "ModelConfig",
    "layers": "Attention DecoderLayer GatedMLP LayerCache Tensor Weights",
    "registry": "FAMILIES family_named language_settings model_config_from_json",
    "rope": "RopeTable RowFrequencies",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
