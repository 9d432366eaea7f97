"""One decoder for the Llama family: embedding, layers, head. Stateless but for the shared weights.

Everything works on flat rows [N, H], N padded to whole tiles of the matrix products. Nothing that a row computes
depends on the other rows of its pass, except through the keys and values it is meant to see.
"""

from __future__ import annotations

from typing import Protocol

import torch
from offload_runtime_kernels.attention import QueryRows
from offload_runtime_kernels.kv_blocks import KVBlocks
from offload_runtime_kernels.rms_norm import add_rms_norm
from offload_runtime_kernels.rope_store import HeadNorm, rope_store
from offload_runtime_kernels.swiglu import swiglu

from offload_runtime.config import ModelConfig
from offload_runtime.model.linear import padded_rows, tiled_linear
from offload_runtime.model.rows import PassRows

Weights = dict[str, torch.Tensor]


class LayerCache(Protocol):
    """What a layer needs of a KV cache."""

    def store(self, layer: int) -> KVBlocks:
        """Where the rows of the running pass write their keys and values."""

    def attend(
        self, layer: int, q: torch.Tensor, rows: QueryRows, *, scale: float, sliding_window: int | None, prefill: bool
    ) -> torch.Tensor:
        """Attention of the rotated queries [B, T, H, D], whose own keys are stored: [B, T, H, D]."""


class Decoder:
    """The maths of one model.

    Args:
        config: Shape and flags.
        shared: `embedding` [V, H], `final_norm` [H], and `lm_head` [V, H] unless it is tied; on the compute device.
    """

    def __init__(self, config: ModelConfig, shared: Weights) -> None:
        self.config = config
        self.embedding = shared["embedding"]
        self.final_norm = shared["final_norm"]
        self.lm_head = shared.get("lm_head", shared["embedding"])
        self._attention_scale = config.head_dim**-0.5

    def embed(self, rows: PassRows, tile_rows: int) -> torch.Tensor:
        """The residual stream at the bottom: [N padded to tiles, H]; padding rows are zero."""
        hidden = self.embedding.new_zeros(padded_rows(rows.num_rows, tile_rows), self.config.hidden_size)
        torch.index_select(self.embedding, 0, rows.tokens, out=hidden[: rows.num_rows])
        return hidden

    def layer(
        self, index: int, weights: Weights, residual: torch.Tensor, delta: torch.Tensor | None, rows: PassRows,
        cache: LayerCache, tile_rows: int,
    ) -> torch.Tensor:  # fmt: skip
        """One layer. Writes the rows' keys and values into the cache.

        Args:
            index: Which layer.
            weights: Its packed tensors (see `weights.layout`).
            residual: [N, H]; updated in place.
            delta: [N, H], what the layer below adds to the residual; None at the bottom.
            rows: The pass.
            cache: Where keys and values live.
            tile_rows: Height of the matrix products.

        Returns:
            [N, H], what this layer adds to the residual.
        """
        eps = self.config.rms_norm_eps
        normed = add_rms_norm(residual, delta, weights["input_norm"], eps)
        qkv = tiled_linear(normed, weights["qkv"], weights.get("qkv_bias"), tile_rows)
        mixed = self.attend(index, weights, qkv, rows, cache)
        delta = tiled_linear(mixed, weights["o"], weights.get("o_bias"), tile_rows)
        normed = add_rms_norm(residual, delta, weights["post_norm"], eps)
        gate_up = tiled_linear(normed, weights["gate_up"], weights.get("gate_up_bias"), tile_rows)
        return tiled_linear(swiglu(gate_up), weights["down"], weights.get("down_bias"), tile_rows)

    def head(
        self, residual: torch.Tensor, delta: torch.Tensor, tile_rows: int, *, select: torch.Tensor | slice
    ) -> torch.Tensor:
        """Logits of the selected rows.

        Args:
            residual: [N, H].
            delta: [N, H], of the last layer.
            tile_rows: Height of the matrix product.
            select: Which rows.

        Returns:
            [R, V] in the model's dtype.
        """
        residual, delta = residual[select], delta[select]
        count = residual.shape[0]
        padding = padded_rows(count, tile_rows) - count
        # A copy in any case: the addition is done in place.
        residual = torch.nn.functional.pad(residual, (0, 0, 0, padding)).contiguous()
        delta = _padded(delta, padding)
        normed = add_rms_norm(residual, delta, self.final_norm, self.config.rms_norm_eps)
        return tiled_linear(normed, self.lm_head, None, tile_rows)[:count]

    def attend(
        self, index: int, weights: Weights, qkv: torch.Tensor, rows: PassRows, cache: LayerCache
    ) -> torch.Tensor:
        """Rotate queries and keys, store keys and values, attend.

        Args:
            index: Which layer.
            weights: Its packed tensors.
            qkv: [N, qkv_size], the fused projection of the rows; N may be padded.
            rows: The pass.
            cache: Where keys and values live.

        Returns:
            [N, q_size], contiguous; zero in padding rows.
        """
        config = self.config
        norm = HeadNorm(weights["q_norm"], weights["k_norm"], config.rms_norm_eps) if config.qk_norm else None
        q = rope_store(qkv, rows.full if config.layer_rope[index] else rows.plain, cache.store(index), norm)
        out = cache.attend(
            index, q.view(*rows.shape, config.num_heads, config.head_dim), rows.query,
            scale=self._attention_scale, sliding_window=config.layer_windows[index], prefill=rows.prefill,
        )  # fmt: skip
        mixed = out.reshape(rows.num_rows, config.q_size)
        return _padded(mixed, qkv.shape[0] - rows.num_rows)


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """[N, H] with `count` rows of zeros behind; itself, without a copy, when there are none."""
    return torch.nn.functional.pad(rows, (0, 0, 0, count)) if count else rows.contiguous()
