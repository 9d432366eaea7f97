"""transformers' offloaded KV cache, made to compute what it should, and not to be slow after assisted generation.

Until 5.19 it brings the next layer's keys and values to the device without waiting for what the device still does: the
copy of the same keys to the host may not have been made, and the memory that is written to may still be read. Where the
host runs ahead, as in the passes over a long prompt's chunks, answers become noise (5.20 waits). In all versions, 5.23
included, dropping rejected proposals leaves strided views of the layers' keys on the host, which torch first copies
there, to memory that is not page-locked: ten times as long as the link takes.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

NOTE = "transformers' offloaded cache, mended: its copies wait for each other, and cropped layers are copied whole"


class MendedCache(DynamicCache):
    """An offloaded cache whose copies wait for each other, and whose cropped layers cross the link as they were.

    Args:
        config: transformers' configuration of the model.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config, offloading=True)
        self.layers = [WholeLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Join [B, H, T, D] new keys and values of a layer to its old ones, and begin to fetch the next layer's."""
        self.prefetch_stream.wait_stream(torch.cuda.default_stream(key_states.device))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class WholeLayer(DynamicLayer):
    """Keys and values of a layer that are fetched in one copy, what was cropped included, and cut on the device."""

    uncropped: tuple[torch.Tensor, torch.Tensor] | None = None

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens."""
        if self.uncropped is None and self.is_initialized:
            self.uncropped = self.keys, self.values
        super().crop(tokens_to_remove)

    def prefetch(self) -> None:
        """Bring all to the device, then leave out what was dropped."""
        if self.is_initialized and self.keys.device != self.device and self.uncropped is not None:
            length = self.keys.shape[-2]
            self.keys, self.values = (
                whole.to(self.device, non_blocking=True)[..., :length, :] for whole in self.uncropped
            )
        else:
            super().prefetch()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Join [B, H, T, D] new keys and values to the old ones."""
        self.uncropped = None
        return super().update(key_states, value_states, *args, **kwargs)
