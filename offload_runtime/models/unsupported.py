"""Why a model does not run here, and which comparable one does, told by what its configuration says.

Asked before anything but a configuration is read; needs neither torch nor transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from offload_runtime.errors import UnsupportedArchitectureError
from offload_runtime.fields import Fields, shown

_SUPPORTED = (
    "Llama, Mistral, Ministral 3, Qwen2, Qwen2.5, Qwen3, Gemma 2 to 4, Phi-3 and Phi-4, GLM-4, Cohere 2, Granite 3, "
    "OLMo 2 and 3 and SmolLM3 run"
)


class _Reason(NamedTuple):
    """Why models do not run: those that have one of `keys`, in `config.json` or in GGUF behind the architecture's name,
    or layers of one of `layers`, or are called as one of `names` or by that and more behind a `_` or `-`."""

    why: str
    keys: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()


# The most telling first.
_REASONS = (
    _Reason("is an encoder-decoder model, and only decoders run", ("is_encoder_decoder",), (
        "t5", "mt5", "umt5", "t5gemma", "bart", "mbart", "whisper", "pegasus", "marian", "m2m_100", "encoder-decoder")),
    _Reason("makes images, sound or embeddings, and no text", ("_diffusers_version", "projector_type"), (
        "clip", "siglip", "vit", "dinov2", "flux", "sd1", "sd3", "sdxl", "wan", "ltxv", "hidream", "lumina2", "cosmos",
        "hyvid", "bert", "roberta", "xlm-roberta", "modernbert", "modern-bert", "nomic-bert", "jina-bert", "t5encoder",
        "mpnet", "distilbert", "wav2vec2", "gemma-embedding")),
    _Reason("is a mixture of experts, and only dense models run", (
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "expert_count"), (
        "mixtral", "gpt-oss", "gpt_oss", "dbrx", "grok", "llama4", "arctic")),
    _Reason("is a hybrid with linear attention or a state space, and models of attention alone run", (
        "linear_num_value_heads", "mamba_d_state", "mamba_num_heads", "ssm_state_size", "state_size", "conv_L_cache",
        "hybrid_override_pattern", "ssm.state_size", "shortconv.l_cache", "wkv.head_size"), (
        "mamba", "mamba2", "rwkv", "jamba", "recurrent_gemma", "zamba2"), ("linear", "mamba", "conv", "recurrent")),
    _Reason("has latent attention, which does not run", ("kv_lora_rank", "attention.kv_lora_rank")),
    _Reason("has embeddings for each layer, which do not run", (
        "hidden_size_per_layer_input", "embedding_length_per_layer_input"), ("gemma3n",)),
    _Reason("attends to images in some of its layers, which does not run", (
        "cross_attention_layers", "attention.cross_attention_layers"), ("mllama",)),
)  # fmt: skip
_OTHER_LAYERS = "has layers of another kind (other norms, activations or attention), which do not run"
_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "RewardModel", "ForRetrieval")
# What to take instead, up to so many billions of parameters of a dense model about as good.
_COMPARABLE = {
    2.5: "Qwen3-1.7B or Llama-3.2-1B", 6: "Qwen3-4B or SmolLM3-3B", 11: "Qwen3-8B or Llama-3.1-8B",
    20: "Qwen3-14B or Mistral-Nemo-12B", 48: "Qwen3-32B or Mistral-Small-24B",
    math.inf: "Llama-3.3-70B or Qwen2.5-72B",
}  # fmt: skip


def _says(value: Any) -> bool:
    return value not in (None, False, 0, 1, "") and value != [] and value != {}


def _why(values: Mapping[str, Any], names: Iterable[str]) -> str:
    """The first reason that a configuration and the names of a model's parts and classes give."""
    kinds = values.get("layer_types")
    layers = {str(kind).split("_")[0] for kind in kinds} if isinstance(kinds, list) else set()
    for reason in _REASONS:
        called = any(name == one or name.startswith((f"{one}_", f"{one}-")) for name in names for one in reason.names)
        if called or layers.intersection(reason.layers) or any(_says(values.get(key)) for key in reason.keys):
            return reason.why
    return "has another head than a language model's" if any(name.endswith(_HEADS) for name in names) else _OTHER_LAYERS


def _comparable(values: Mapping[str, Any]) -> str:
    """Supported models about as good as one of these sizes: a mixture counts as the geometric mean of all its weights
    and those that a token uses, as is usually said of them."""

    def size(*names: str) -> float:
        found = [
            item
            for name in names
            for item in (values[name] if isinstance(values.get(name), list) else [values.get(name)])
        ]
        return max((float(item) for item in found if isinstance(item, (int, float)) and 0 < item < 1e6), default=0.0)

    layers, hidden = size("num_hidden_layers", "block_count"), size("hidden_size", "embedding_length")
    dense = size("intermediate_size", "feed_forward_length")
    inner = size("moe_intermediate_size", "expert_feed_forward_length") or dense
    experts = size("num_experts", "num_local_experts", "n_routed_experts", "expert_count")
    used = size("num_experts_per_tok", "expert_used_count") or 1.0
    widths = (inner * experts, inner * used) if experts > 1 else (dense, dense)
    whole, active = (layers * hidden * (2.5 * hidden + 3 * width) for width in widths)
    billions = math.sqrt(whole * active) / 1e9 or 8.0  # of a usual size where none is said
    return next(name for most, name in _COMPARABLE.items() if billions <= most)


def unsupported_model(fields: Fields) -> UnsupportedArchitectureError:
    """The error for a model that the decoder does not implement.

    Args:
        fields: What its `config.json` says; or the metadata of a GGUF file about the model, with its architecture as
            `model_type`.
    """
    part, classes = fields.mapping("text_config"), fields.items("architectures", str)
    outer, inner = fields.text("model_type", ""), part.get("model_type")
    what = ", ".join(shown(name)[1:-1] for name in classes[:3]) or f"model_type {shown(outer)}"
    if not (classes or outer or inner):
        return UnsupportedArchitectureError(
            f"{fields.where} does not say what model it is (no model_type, no general.architecture): give a checkpoint "
            "of transformers, or a GGUF file of a model"
        )
    values, names = {**fields.values, **part}, [outer, *([inner] if isinstance(inner, str) else []), *classes]
    which = f"{what}'s text part ({shown(inner)[1:-1]})" if part and isinstance(inner, str) else what
    return UnsupportedArchitectureError(
        f"{fields.where}: {which} {_why(values, names)}: take another model, such as {_comparable(values)} "
        f"({_SUPPORTED})"
    )
