"""The large shapes, and where the small model's heads go inside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from offload_runtime.errors import OptionError, UnsupportedArchitectureError
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import GatedMLP
from offload_runtime.options import require_positive


@dataclass(frozen=True)
class WideShape:
    """What decides the cost of a decoder; the vocabulary stays the small model's."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not False:
                require_positive(name, value)
        if self.num_heads % self.num_kv_heads:
            raise OptionError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")

    def settings(self) -> dict[str, Any]:
        """Its family and sizes, as transformers calls them."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size, "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads, "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim, "tie_word_embeddings": False,
        }  # fmt: skip

    @classmethod
    def of(cls, config: ModelConfig) -> WideShape:
        """That of a model without experts."""
        mlp = config.layers[0].mlp
        assert isinstance(mlp, GatedMLP)
        return cls(
            config.hidden_size, mlp.intermediate_size, config.num_layers, config.attention.num_heads,
            config.attention.num_kv_heads, config.attention.head_dim,
        )  # fmt: skip


@dataclass(frozen=True)
class HybridShape(WideShape):
    """That of a Qwen3.5, of whose layers every fourth attends: the others are gated delta layers.

    Attributes:
        key_heads, value_heads: Of gated delta layers.
        delta_dim: Channels of those heads.
        tied: Whether the embedding is the head, too.
    """

    key_heads: int
    value_heads: int
    delta_dim: int = 128
    tied: bool = False

    def settings(self) -> dict[str, Any]:
        """Its family and sizes, as transformers calls them."""
        return super().settings() | {
            "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
            "linear_num_key_heads": self.key_heads, "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.delta_dim, "linear_value_head_dim": self.delta_dim,
            "linear_conv_kernel_dim": 4, "tie_word_embeddings": self.tied,
        }  # fmt: skip


@dataclass(frozen=True)
class MixtureShape(WideShape):
    """That of a mixture of experts, each as wide as `intermediate_size`: a Qwen3's, or gpt-oss'.

    Attributes:
        experts: Of each layer.
        chosen: For each row.
        gpt_oss: Whether it is gpt-oss' rather than Qwen3's.
    """

    experts: int
    chosen: int
    gpt_oss: bool = False

    def settings(self) -> dict[str, Any]:
        """Its family and sizes, as transformers calls them."""
        same = super().settings() | {"num_experts_per_tok": self.chosen}
        if self.gpt_oss:
            own = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": self.experts}
            return same | own
        return same | {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": self.experts,
            "moe_intermediate_size": self.intermediate_size, "norm_topk_prob": True,
        }  # fmt: skip


SHAPES = {
    "llama2-7b": WideShape(4096, 11008, 32, 32, 32, 128), "llama2-13b": WideShape(5120, 13824, 40, 40, 40, 128),
    "llama3-8b": WideShape(4096, 14336, 32, 32, 8, 128), "qwen2.5-32b": WideShape(5120, 27648, 64, 40, 8, 128),
    "llama2-70b": WideShape(8192, 28672, 80, 64, 8, 128), "llama-68m": WideShape(768, 3072, 2, 12, 12, 64),
    "qwen3.5-0.8b": HybridShape(1024, 3584, 24, 8, 2, 256, 16, 16, tied=True),
    "qwen3.6-27b": HybridShape(5120, 17408, 64, 24, 4, 256, 16, 48),
    "qwen3-30b-a3b": MixtureShape(2048, 768, 48, 32, 4, 128, 128, 8),
    "gpt-oss-20b": MixtureShape(2880, 2880, 24, 64, 8, 64, 32, 4, gpt_oss=True),
    "gpt-oss-120b": MixtureShape(2880, 2880, 36, 64, 8, 64, 128, 4, gpt_oss=True),
    # For trying a benchmark out; too small to hold a real language.
    "tiny": WideShape(64, 160, 8, 4, 2, 16), "tiny-hybrid": HybridShape(64, 160, 4, 4, 2, 32, 1, 2, 32),
    "tiny-mixture": MixtureShape(64, 64, 4, 4, 2, 32, 8, 2),
    "tiny-gpt-oss": MixtureShape(64, 64, 4, 4, 2, 32, 8, 2, gpt_oss=True),
}  # fmt: skip


def shape_named(name: str, layers: int | None = None) -> WideShape:
    """The shape of a known model, cut to so many layers.

    Raises:
        OptionError: There is none of that name, or `layers` is no number of layers.
    """
    if name not in SHAPES:
        raise OptionError(f"shape {name!r} is not known: use one of {', '.join(SHAPES)}")
    if layers is None:
        return SHAPES[name]
    require_positive("layers", layers)
    return replace(SHAPES[name], num_layers=layers)


def check_architecture(config: ModelConfig) -> None:
    """Refuse a small model that is more than a plain Llama.

    Raises:
        UnsupportedArchitectureError: Another family's layers, biases, sliding windows.
    """
    attention, mlp = config.attention, config.layers[0].mlp
    extras = {
        "layers of their own": config.architecture not in ("LlamaForCausalLM", "MistralForCausalLM"),
        "biases": attention.qkv_bias or attention.o_bias or getattr(mlp, "bias", False),
        "sliding windows": any(window is not None for window in config.layer_windows),
    }
    found = [name for name, present in extras.items() if present]
    if found:
        raise UnsupportedArchitectureError(
            f"{config.architecture} with {' and '.join(found)} cannot be widened: use a plain Llama, like SmolLM2"
        )


@dataclass(frozen=True)
class HeadPlaces:
    """Rows and columns of the small attention inside the large one.

    A small KV head with its g query heads takes ceil(g / G) large KV heads of G query heads each, all with the same
    keys and values. Within a head of D channels, rotary pair j of the small head's d/2 is pair j * D/d, where the
    unscaled frequency theta^(-2j/d) is the same; the values take the first d channels.

    Attributes:
        query_rows: [n * d] int64, rows of the large q_proj for the rows of the small one.
        silent_query_rows: [n * (D - d)] int64, the other channels of the same heads; zeros there silence the keys'.
        key_rows, key_sources: [copies * m * d] int64, rows of the large k_proj and the small rows that fill them.
        value_rows, value_sources: The same of v_proj.
        output_columns: [n * d] int64, columns of the large o_proj for the columns of the small one.
    """

    query_rows: torch.Tensor
    silent_query_rows: torch.Tensor
    key_rows: torch.Tensor
    key_sources: torch.Tensor
    value_rows: torch.Tensor
    value_sources: torch.Tensor
    output_columns: torch.Tensor


def _rows(heads: list[int], head_dim: int, channels: torch.Tensor) -> torch.Tensor:
    """Row numbers of the given channels of every head, head by head."""
    return (torch.tensor(heads)[:, None] * head_dim + channels[None, :]).reshape(-1)


def rotary_channels(small_dim: int, large_dim: int) -> torch.Tensor:
    """Channels of a large head for those of a small one, [d] int64; both rotate channel i with channel i + D/2."""
    pairs = torch.arange(small_dim // 2) * (large_dim // small_dim)
    return torch.cat([pairs, pairs + large_dim // 2])


def place_heads(config: ModelConfig, shape: WideShape) -> HeadPlaces:
    """Map the heads of a checked pair of shapes."""
    small = config.attention
    small_dim, large_dim = small.head_dim, shape.head_dim
    group, large_group = small.num_heads // small.num_kv_heads, shape.num_heads // shape.num_kv_heads
    copies = -(-group // large_group)
    query_heads = [
        ((head // group) * copies + (head % group) // large_group) * large_group + (head % group) % large_group
        for head in range(small.num_heads)
    ]
    kv_heads = list(range(small.num_kv_heads * copies))
    kv_sources = [head // copies for head in kv_heads]
    rotary, plain = rotary_channels(small_dim, large_dim), torch.arange(small_dim)
    silent = torch.ones(large_dim, dtype=torch.bool)
    silent[rotary] = False
    sources = _rows(kv_sources, small_dim, plain)
    return HeadPlaces(
        query_rows=_rows(query_heads, large_dim, rotary),
        silent_query_rows=_rows(query_heads, large_dim, silent.nonzero().flatten()),
        key_rows=_rows(kv_heads, large_dim, rotary), key_sources=sources,
        value_rows=_rows(kv_heads, large_dim, plain), value_sources=sources,
        output_columns=_rows(query_heads, large_dim, plain),
    )  # fmt: skip


def check_fits(config: ModelConfig, shape: WideShape) -> None:
    """Refuse a shape that the small model cannot be embedded in.

    Raises:
        OptionError: Something of the large shape is smaller, the head dimensions do not divide, or it is no Llama's.
    """
    if type(shape) is not WideShape:
        raise OptionError("a small Llama has a place in a larger one alone: choose another shape, or random weights")
    for name, least in vars(WideShape.of(config)).items():
        large = getattr(shape, name)
        if least > large:
            raise OptionError(f"the shape has {name} {large}, less than the source's {least}: choose a larger shape")
    small = config.attention
    if shape.head_dim % small.head_dim or small.head_dim % 2:
        raise OptionError(
            f"heads of {small.head_dim} channels do not divide heads of {shape.head_dim}, so the rotary frequencies "
            "would differ: choose a source or a shape whose head dimensions divide"
        )
    group, large_group = small.num_heads // small.num_kv_heads, shape.num_heads // shape.num_kv_heads
    needed = small.num_kv_heads * -(-group // large_group)
    if needed > shape.num_kv_heads:
        raise OptionError(
            f"{small.num_heads} query heads over {small.num_kv_heads} KV heads need {needed} KV heads of "
            f"{large_group} query heads each, and the shape has {shape.num_kv_heads}: choose a larger shape"
        )
