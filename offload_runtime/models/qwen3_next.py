"""Qwen3-Next without experts: Qwen3.5's layers, whose projections go by key heads."""

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.gated_delta import DeltaModules
from offload_runtime.models.qwen3_5_text import FAMILY as QWEN3_5
from offload_runtime.models.qwen3_5_text import hybrid_of
from offload_runtime.models.reading import num_layers
from offload_runtime.models.registry import Family, unsupported_model

_MODULES = DeltaModules(inputs=("in_proj_qkvz",), gate=None, decays=("in_proj_ba",))


def _model(fields: Fields) -> ModelConfig:
    dense, step = fields.items("mlp_only_layers", int), fields.integer("decoder_sparse_step")
    sparse = {layer for layer in range(num_layers(fields)) if not (layer + 1) % step}
    if fields.integer("num_experts", at_least=0) and sparse.difference(dense):
        raise unsupported_model(fields)
    return hybrid_of(fields, _MODULES)


FAMILY = Family(
    _model, {**QWEN3_5.defaults, "num_key_value_heads": 2, "num_experts": 512, "decoder_sparse_step": 1}
)  # fmt: skip
