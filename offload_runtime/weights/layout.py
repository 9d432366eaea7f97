"""How weights lie in memory: every layer one contiguous block, q, k, v fused and gate, up fused.

First stop on the token's journey: the copy engine moves a whole layer as one large copy because of this layout, and
the decoder sees the same bytes through views. Nothing here reads a file; a checkpoint source only has to know which
of its tensors fills which rows of which packed tensor (`checkpoint_tensors`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from offload_runtime.config import ModelConfig

ALIGNMENT_BYTES = 256  # what cudaMalloc guarantees; keeps every view fit for vector loads and TMA


@dataclass(frozen=True)
class TensorSpec:
    """One packed tensor: where it starts in its block and what shape it has."""

    name: str
    shape: tuple[int, ...]
    offset_bytes: int
    nbytes: int


@dataclass(frozen=True)
class PackedLayout:
    """Ordered tensors of one dtype in one block; each starts on a multiple of 256 bytes, and so does the end."""

    tensors: tuple[TensorSpec, ...]
    dtype: torch.dtype
    total_bytes: int

    @classmethod
    def build(cls, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> PackedLayout:
        """Lay `shapes` out one after the other in the order given."""
        specs: list[TensorSpec] = []
        offset_bytes = 0
        for name, shape in shapes.items():
            nbytes = math.prod(shape) * dtype.itemsize
            specs.append(TensorSpec(name, shape, offset_bytes, nbytes))
            offset_bytes += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(tuple(specs), dtype, offset_bytes)

    @property
    def matrix_elements(self) -> int:
        """Elements of the matrices: two operations each for every row."""
        return sum(math.prod(spec.shape) for spec in self.tensors if len(spec.shape) == 2)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name the parts of a block without copying.

        Args:
            buffer: uint8 [at least total_bytes], host or device, starting where the block starts.

        Returns:
            Packed name to a view of `dtype` and the packed shape.
        """
        assert buffer.dtype == torch.uint8 and buffer.dim() == 1 and buffer.numel() >= self.total_bytes, (
            f"a block of {self.total_bytes} bytes cannot be seen through {buffer.dtype} {tuple(buffer.shape)}"
        )
        return {
            spec.name: buffer[spec.offset_bytes : spec.offset_bytes + spec.nbytes].view(self.dtype).view(spec.shape)
            for spec in self.tensors
        }


@dataclass(frozen=True)
class Destination:
    """Where one checkpoint tensor goes: rows `[row_start, row_end)` of a packed tensor.

    `layer` is None for what all layers share (embedding, final norm, lm_head). `shape` is the checkpoint tensor's.
    """

    layer: int | None
    packed: str
    row_start: int
    row_end: int
    shape: tuple[int, ...]

    def of(self, views: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The rows to fill, contiguous and of `shape`, out of the views of its block."""
        return views[self.packed][self.row_start : self.row_end]


@dataclass(frozen=True)
class _Part:
    """A checkpoint tensor of one layer, in the order in which parts stack up to a packed tensor."""

    packed: str
    checkpoint: str  # name below `model.layers.N.`
    shape: tuple[int, ...]


def _layer_parts(config: ModelConfig) -> list[_Part]:
    hidden, inner = config.hidden_size, config.intermediate_size
    qkv_rows = (("q", config.q_size), ("k", config.kv_size), ("v", config.kv_size))
    parts = [_Part("input_norm", "input_layernorm.weight", (hidden,))]
    parts += [_Part("qkv", f"self_attn.{name}_proj.weight", (rows, hidden)) for name, rows in qkv_rows]
    if config.qkv_bias:
        parts += [_Part("qkv_bias", f"self_attn.{name}_proj.bias", (rows,)) for name, rows in qkv_rows]
    if config.qk_norm:
        parts += [_Part(f"{name}_norm", f"self_attn.{name}_norm.weight", (config.head_dim,)) for name in ("q", "k")]
    parts.append(_Part("o", "self_attn.o_proj.weight", (hidden, config.q_size)))
    if config.o_bias:
        parts.append(_Part("o_bias", "self_attn.o_proj.bias", (hidden,)))
    parts.append(_Part("post_norm", "post_attention_layernorm.weight", (hidden,)))
    parts += [_Part("gate_up", f"mlp.{name}_proj.weight", (inner, hidden)) for name in ("gate", "up")]
    if config.mlp_bias:
        parts += [_Part("gate_up_bias", f"mlp.{name}_proj.bias", (inner,)) for name in ("gate", "up")]
    parts.append(_Part("down", "mlp.down_proj.weight", (hidden, inner)))
    if config.mlp_bias:
        parts.append(_Part("down_bias", "mlp.down_proj.bias", (hidden,)))
    return parts


def _shared_parts(config: ModelConfig) -> list[_Part]:
    parts = [
        _Part("embedding", "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)),
        _Part("final_norm", "model.norm.weight", (config.hidden_size,)),
    ]
    if not config.tie_word_embeddings:
        parts.append(_Part("lm_head", "lm_head.weight", (config.vocab_size, config.hidden_size)))
    return parts


def _stacked_shapes(parts: list[_Part]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        rows = shapes[part.packed][0] if part.packed in shapes else 0
        shapes[part.packed] = (rows + part.shape[0], *part.shape[1:])
    return shapes


def layer_layout(config: ModelConfig, dtype: torch.dtype) -> PackedLayout:
    """The block of one decoder layer; all layers of a model share it.

    With H hidden, I intermediate, D head dim: `input_norm [H]`, `qkv [qkv_size, H]`, `o [H, q_size]`, `post_norm [H]`,
    `gate_up [2I, H]` (gate rows first), `down [H, I]`, and by the config's flags `qkv_bias`, `q_norm [D]`,
    `k_norm [D]`, `o_bias`, `gate_up_bias`, `down_bias`.
    """
    return PackedLayout.build(_stacked_shapes(_layer_parts(config)), dtype)


def shared_layout(config: ModelConfig, dtype: torch.dtype) -> PackedLayout:
    """The block of what all layers share: `embedding [V, H]`, `final_norm [H]`, `lm_head [V, H]` unless tied."""
    return PackedLayout.build(_stacked_shapes(_shared_parts(config)), dtype)


def packed_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of all packed blocks of a model: every layer and the shared block."""
    return config.num_layers * layer_layout(config, dtype).total_bytes + shared_layout(config, dtype).total_bytes


def checkpoint_tensors(config: ModelConfig) -> dict[str, Destination]:
    """Every checkpoint tensor the model needs, by transformers' name, and where it goes.

    Together the destinations cover every element of every packed tensor exactly once.
    """
    table: dict[str, Destination] = {}

    def add(prefix: str, layer: int | None, parts: list[_Part]) -> None:
        filled: dict[str, int] = {}
        for part in parts:
            start = filled.get(part.packed, 0)
            filled[part.packed] = start + part.shape[0]
            table[prefix + part.checkpoint] = Destination(layer, part.packed, start, filled[part.packed], part.shape)

    add("", None, _shared_parts(config))
    for layer in range(config.num_layers):
        add(f"model.layers.{layer}.", layer, _layer_parts(config))
    return table
