"""What lies around the layers of a model: embedding and head, with their weights, and where each layer is."""

from __future__ import annotations

import torch
from offload_runtime_kernels.rms_norm import rms_norm

from offload_runtime.memory import LayerPartition
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.layers import LayerCache, Rows, Weights


class Decoder:
    """The maths of one model; stateless but for the shared weights.

    Args:
        config: Its layers, and what they share.
        shared: `embedding` [V, H], `final_norm` [H], and `lm_head` [V, H] unless it is tied; on the compute device, of
            several cards the first.
        partition: Which card each layer is on; None: all are where the shared weights are.
    """

    def __init__(self, config: ModelConfig, shared: Weights, partition: LayerPartition | None = None) -> None:
        self.config = config
        self.embedding = shared["embedding"]
        self.lm_head = shared.get("lm_head", shared["embedding"])
        self.final_norm: torch.Tensor = shared["final_norm"].dense
        self._multiplier = config.embedding_multiplier
        if config.rounds_multiplier:
            self._multiplier = torch.tensor(self._multiplier, dtype=self.final_norm.dtype).item()
        self.partition = partition or LayerPartition.of_one(self.final_norm.device, config.num_layers)

    def embed(self, rows: Rows) -> torch.Tensor:
        """The residual stream at the bottom: [N, H]."""
        embedded = self.embedding.rows(rows.tokens)
        return embedded if self._multiplier == 1 else embedded.mul_(self._multiplier)

    def layer(self, index: int, weights: Weights, residual: torch.Tensor, rows: Rows, cache: LayerCache) -> None:
        """Run one layer, which adds to the residual stream [N, H]."""
        self.config.layers[index].forward(index, residual, weights, rows, cache)

    def head(self, residual: torch.Tensor) -> torch.Tensor:
        """Logits [N, V], in the model's dtype, of rows of the residual stream [N, H] behind the last layer."""
        own, attention = self.config, self.config.attention
        normed = rms_norm(residual, self.final_norm, attention.eps, offset=attention.norm_offset)
        logits = self.lm_head.linear(normed)
        if own.logits_divisor != 1:
            logits = logits.div_(own.logits_divisor)
        return logits if own.logits_cap is None else logits.div_(own.logits_cap).tanh_().mul_(own.logits_cap)
