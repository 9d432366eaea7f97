"""Qwen3-Next: Qwen3.5's layers, whose projections go by key heads."""

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
    return hybrid_of(fields, [mlp for mlp in mlps if mlp is not None], _MODULES)


FAMILY = Family(_model, {**QWEN3_5.defaults, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True})
