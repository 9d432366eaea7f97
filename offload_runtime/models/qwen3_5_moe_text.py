"""Qwen 3.5's and 3.6's mixtures of experts: the layers of the dense ones, with a shared expert that has a gate."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from offload_runtime.fields import Fields
from offload_runtime.models import qwen3_moe
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.experts import Experts, Shared
from offload_runtime.models.qwen3_5_text import FAMILY as DENSE
from offload_runtime.models.qwen3_5_text import hybrid_of
from offload_runtime.models.reading import experts_of, mlp_of, num_layers
from offload_runtime.models.registry import Family


def with_shared(fields: Fields, *, normed: bool = True) -> Experts:
    """Qwen's experts and the one that all rows have."""
    shared = Shared("shared_expert", mlp_of(fields, size="shared_expert_intermediate_size"), gated=True)
    return replace(experts_of(fields), normed=normed, shared=shared)


def _model(fields: Fields) -> ModelConfig:
    return hybrid_of(fields, [with_shared(fields)] * num_layers(fields))


def _of_gguf(fields: Fields, names: Collection[str]) -> dict[str, Any]:
    shared = fields.integer("expert_shared_feed_forward_length")
    of_layers = {**DENSE.of_gguf(fields, names), **qwen3_moe.FAMILY.of_gguf(fields, names)}
    return {**of_layers, "shared_expert_intermediate_size": shared}


FAMILY = Family(
    _model,
    {
        **DENSE.defaults, "num_key_value_heads": 2, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    text_sizes={
        "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_experts": 256,
    },
    of_gguf=_of_gguf, gguf_undo=DENSE.gguf_undo,
)  # fmt: skip
