"""One decoder for the Llama family: embedding, layers, head. Stateless but for the shared weights.

Everything works on flat rows [N, H]. Nothing that a row computes depends on the other rows of its pass or on how many
there are, except through the keys and values it is meant to see.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from offload_runtime_kernels.rms_norm import rms_norm
from offload_runtime_kernels.rope_store import HeadNorm, rope_store

from offload_runtime.config import ModelConfig
from offload_runtime.kv import LayerCache
from offload_runtime.memory import LayerPartition
from offload_runtime.model.rows import PassRows
from offload_runtime.weights import Weight

Weights = Mapping[str, Weight]


class Decoder:
    """The maths of one model.

    Args:
        config: Shape and flags.
        shared: `embedding` [V, H], `final_norm` [H], and `lm_head` [V, H] unless it is tied; on the compute device, of
            several cards the first.
        partition: Which card each layer is on; None: all are where the shared weights are.
    """

    def __init__(self, config: ModelConfig, shared: Weights, partition: LayerPartition | None = None) -> None:
        self.config = config
        self.embedding = shared["embedding"]
        self.lm_head = shared.get("lm_head", shared["embedding"])
        self.final_norm = shared["final_norm"].dense
        self.partition = partition or LayerPartition.of_one(self.final_norm.device, config.num_layers)

    def embed(self, rows: PassRows) -> torch.Tensor:
        """The residual stream at the bottom: [N, H]."""
        return self.embedding.rows(rows.tokens)

    def layer(self, index: int, weights: Weights, residual: torch.Tensor, rows: PassRows, cache: LayerCache) -> None:
        """One layer. Writes the rows' keys and values into the cache.

        Args:
            index: Which layer.
            weights: Its packed tensors (see `weights.layout`).
            residual: [N, H]; the layer adds to it.
            rows: The pass.
            cache: Where keys and values live.
        """
        eps = self.config.rms_norm_eps
        normed = rms_norm(residual, weights["input_norm"].dense, eps)
        mixed = self.attend(index, weights, weights["qkv"].linear(normed), rows, cache)
        weights["o"].linear(mixed, residual=residual)
        normed = rms_norm(residual, weights["post_norm"].dense, eps)
        weights["down"].linear(weights["gate_up"].linear(normed, gated=True), residual=residual)

    def head(self, residual: torch.Tensor) -> torch.Tensor:
        """Logits [N, V], in the model's dtype, of rows of the residual stream [N, H] behind the last layer."""
        return self.lm_head.linear(rms_norm(residual, self.final_norm, self.config.rms_norm_eps))

    def attend(
        self, index: int, weights: Weights, qkv: torch.Tensor, rows: PassRows, cache: LayerCache
    ) -> torch.Tensor:
        """Rotate queries and keys, store keys and values, attend.

        Args:
            index: Which layer.
            weights: Its packed tensors.
            qkv: [N, qkv_size], the fused projection of the rows.
            rows: The pass.
            cache: Where keys and values live.

        Returns:
            [N, q_size], contiguous.
        """
        config, norm = self.config, None
        if config.qk_norm:
            norm = HeadNorm(weights["q_norm"].dense, weights["k_norm"].dense, config.rms_norm_eps)
        q = rope_store(qkv, rows.full if config.layer_rope[index] else rows.plain, cache.store(index), norm)
        q = q.view(*rows.query.positions.shape, config.num_heads, config.head_dim)
        mixed = cache.attend(index, q, rows.query)
        return mixed.reshape(rows.num_rows, -1).contiguous()
