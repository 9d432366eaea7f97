"""One decoder for the Llama family: embedding, layers, head. Stateless but for the shared weights.

Everything works on flat rows [N, H]. There are two ways through a layer. `layer` promises bits: N is padded to whole
tiles of the matrix products, and nothing that a row computes depends on the other rows of its pass, except through the
keys and values it is meant to see. `fused_layer` is for the steps of a draft and of the retrieval verifier, passes of
few rows that promise no bits: five kernels a layer besides attention, with norms, residual and SwiGLU part of the
products. What such a layer adds goes straight into the residual stream, so nothing else is carried to the next.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from offload_runtime_kernels.few_row_linear import RowNorm
from offload_runtime_kernels.rms_norm import add_rms_norm
from offload_runtime_kernels.rope_store import HeadNorm, rope_store
from offload_runtime_kernels.swiglu import swiglu

from offload_runtime.config import ModelConfig
from offload_runtime.kv import LayerCache
from offload_runtime.model.rows import PassRows
from offload_runtime.weights import Weight

Weights = Mapping[str, Weight]


def padded_rows(num_rows: int, tile_rows: int) -> int:
    """`num_rows` rounded up to whole tiles."""
    return -(-num_rows // tile_rows) * tile_rows


class Decoder:
    """The maths of one model.

    Args:
        config: Shape and flags.
        shared: `embedding` [V, H], `final_norm` [H], and `lm_head` [V, H] unless it is tied; on the compute device.
    """

    def __init__(self, config: ModelConfig, shared: Weights) -> None:
        self.config = config
        self.embedding = shared["embedding"].dense
        self.lm_head = shared.get("lm_head", shared["embedding"])
        self._final_norm = RowNorm(shared["final_norm"].dense, config.rms_norm_eps)

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
        normed = add_rms_norm(residual, delta, weights["input_norm"].dense, eps)
        mixed = self.attend(index, weights, weights["qkv"].linear(normed, tile_rows), rows, cache)
        delta = weights["o"].linear(mixed, tile_rows)
        normed = add_rms_norm(residual, delta, weights["post_norm"].dense, eps)
        return weights["down"].linear(swiglu(weights["gate_up"].linear(normed, tile_rows)), tile_rows)

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
        normed = add_rms_norm(residual, _padded(delta, padding), self._final_norm.weight, self._final_norm.eps)
        return self.lm_head.linear(normed, tile_rows)[:count]

    def fused_embed(self, rows: PassRows) -> torch.Tensor:
        """The residual stream at the bottom of a pass that promises no bits: [N, H], no padding."""
        return self.embedding.index_select(0, rows.tokens)

    def fused_layer(
        self, index: int, weights: Weights, residual: torch.Tensor, rows: PassRows, cache: LayerCache
    ) -> None:
        """One layer without promised bits. Writes the rows' keys and values into the cache.

        Args:
            index: Which layer.
            weights: Its packed tensors (see `weights.layout`).
            residual: [N, H]; the layer adds to it.
            rows: The pass.
            cache: Where keys and values live.
        """
        eps = self.config.rms_norm_eps
        qkv = weights["qkv"].fused_linear(residual, norm=RowNorm(weights["input_norm"].dense, eps))
        weights["o"].fused_linear(self.attend(index, weights, qkv, rows, cache), residual=residual)
        norm = RowNorm(weights["post_norm"].dense, eps)
        activation = weights["gate_up"].fused_linear(residual, norm=norm, gated=True)
        weights["down"].fused_linear(activation, residual=residual)

    def fused_head(self, residual: torch.Tensor) -> torch.Tensor:
        """Logits [N, V], in the model's dtype, of a residual stream [N, H] that `fused_layer` has made."""
        return self.lm_head.fused_linear(residual, norm=self._final_norm)

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
        config, norm = self.config, None
        if config.qk_norm:
            norm = HeadNorm(weights["q_norm"].dense, weights["k_norm"].dense, config.rms_norm_eps)
        q = rope_store(qkv, rows.full if config.layer_rope[index] else rows.plain, cache.store(index), norm)
        q = q.view(*rows.query.positions.shape, config.num_heads, config.head_dim)
        mixed = cache.attend(index, q, rows.query, prefill=rows.prefill).reshape(rows.num_rows, -1)
        return _padded(mixed, qkv.shape[0] - rows.num_rows)


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """[N, H] with `count` rows of zeros behind; itself, without a copy, when there are none."""
    return torch.nn.functional.pad(rows, (0, 0, 0, count)) if count else rows.contiguous()
