"""The decoder of a head: rows begin and end as its kind says, and logits are about the target's tokens."""

from __future__ import annotations

import torch

from offload_runtime.models.eagle3 import FirstLayer
from offload_runtime.models.heads import HeadConfig
from offload_runtime.models.layers import LayerCache, LayerWeights, Rows, Weights
from offload_runtime.runners.model_runner import Decoder, HiddenTaps
from offload_runtime.stream.device import LayerPartition


class HeadDecoder(Decoder):
    """Computes what lies around the layers of a head, whose rows bring `Rows.hidden`.

    Args:
        config: Its layers, and what they share.
        shared: Its own, and of the target's what it has not, and `target_norm`.
        partition: As of `Decoder`.

    Attributes:
        config, shared: As given.
    """

    config: HeadConfig

    def __init__(self, config: HeadConfig, shared: Weights, partition: LayerPartition | None = None) -> None:
        super().__init__(config, shared, partition)
        self.taps = HiddenTaps(config.taps, config.width, self.tap, config.taps_in_place)
        self._ids: torch.Tensor | None = None  # of the tokens that there are logits of, [draft tokens] int64
        if "d2t" in shared:
            offsets = shared["d2t"].dense
            self._ids = offsets + torch.arange(len(offsets), device=offsets.device)

    def tap(self, number: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Keep of the target's rows [N, T] what the tap of this number says, in [N, W]."""
        self.config.tap(number, x, self.shared, out)

    def embed(self, rows: Rows) -> torch.Tensor:
        """Return the residual stream at the bottom: [N, H]."""
        assert rows.hidden is not None, "a head reads what the target made of the tokens before"
        return self.config.enter(super().embed(rows), rows.hidden, self.shared)

    def layer(self, index: int, weights: LayerWeights, residual: torch.Tensor, rows: Rows, cache: LayerCache) -> None:
        """Run one layer, which adds to the residual stream [N, H]."""
        if isinstance(self.config.layers[index], FirstLayer):
            weights = LayerWeights(weights, embedding=self.embedding)
        super().layer(index, weights, residual, rows, cache)

    def outputs(self, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits [N, V], and what rows about the tokens that follow read: [N, W]."""
        normed, hidden = self.config.leave(residual, self.shared)
        return self.logits(normed), hidden

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of normed rows [N, H]; minus infinity of tokens that the head does not know."""
        found = super().logits(normed)
        if self._ids is None:
            return found
        # The noise of a token is by the target's number of it, so that all the rest goes by that.
        return found.new_full((len(found), self.config.vocab_size), -torch.inf).index_copy_(1, self._ids, found)
