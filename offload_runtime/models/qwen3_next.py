"""Qwen3-Next: Qwen3.5's layers, whose projections go by key heads."""

from collections.abc import Collection
from typing import Any

from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.gated_delta import DeltaModules
from offload_runtime.models.qwen3_5_moe_text import FAMILY as QWEN3_5
from offload_runtime.models.qwen3_5_moe_text import with_shared
from offload_runtime.models.qwen3_5_text import hybrid_of
from offload_runtime.models.reading import mlp_of, num_layers, sparse_layers
from offload_runtime.models.registry import Family

_MODULES = DeltaModules(inputs=("in_proj_qkvz",), gate=None, decays=("in_proj_ba",))


def _model(fields: Fields) -> ModelConfig:
    count, sparse = num_layers(fields), sparse_layers(fields) if fields.integer("num_experts", at_least=0) else []
    mixture = with_shared(fields, normed=fields.flag("norm_topk_prob")) if sparse else None
    dense = mlp_of(fields) if len(sparse) < count else None
    mlps = [mixture if layer in sparse else dense for layer in range(count)]
    modules = DeltaModules(decays=_MODULES.decays) if fields.flag("linear_gates_apart") else _MODULES
    return hybrid_of(fields, [mlp for mlp in mlps if mlp is not None], modules)


def _of_gguf(fields: Fields, names: Collection[str]) -> dict[str, Any]:
    """llama.cpp's converter takes gates apart from what the convolution reads, but for its first files, and leaves the
    heads of values where they are."""
    apart = any(name.endswith(".attn_gate.weight") for name in names)
    return {**QWEN3_5.of_gguf(fields, names), "linear_value_heads_tiled": False, "linear_gates_apart": apart}


FAMILY = Family(
    _model,
    {**QWEN3_5.defaults, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
    of_gguf=_of_gguf, gguf_undo=QWEN3_5.gguf_undo,
)  # fmt: skip
