"""Addresses of the blocks of a KV cache in host memory, for kernels that read them where they lie."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from offload_runtime_kernels.gather_chunks import BlockTable

from offload_runtime.config import ModelConfig
from offload_runtime.kv_cache.device import block_shape
from offload_runtime.kv_cache.host_blocks import HostBlocks


class HostBlockTables:
    """A table for each layer, all blocks there are entered.

    Args:
        config: The model's shape.
        dtype: Of keys and values.
        blocks: What is in host memory.
        place: Index there of each layer that is.
        resident: The other layers: [B, N, 2, H_kv, 256, D] each, device.
        batch: Sequences.
        device: Where the kernels run.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, blocks: HostBlocks, place: Mapping[int, int],
        resident: Mapping[int, torch.Tensor], batch: int, device: torch.device,
    ) -> None:  # fmt: skip
        self._dtype = dtype
        self._block_shape = block_shape(config)
        self._blocks = blocks
        self._place = place
        self._tables = {
            layer: BlockTable.empty(batch, blocks.most_blocks, device) for layer in range(config.num_layers)
        }
        for layer, data in resident.items():
            for sequence in range(batch):
                self._tables[layer].put(sequence, 0, data[sequence])
        for sequence in range(batch):
            self.enter(sequence, 0)

    def layer(self, layer: int) -> BlockTable:
        """Where the layer's blocks lie."""
        return self._tables[layer]

    def enter(self, sequence: int, first: int) -> None:
        """Enter a sequence's host blocks from `first` on."""
        for layer, place in self._place.items():
            for run in self._blocks.runs(sequence, first, self._blocks.num_blocks(sequence), 1 << 30):
                memory = self._blocks.block(place, sequence, run.first_block, run.num_blocks).view(self._dtype)
                self._tables[layer].put(sequence, run.first_block, memory.view(run.num_blocks, *self._block_shape))
