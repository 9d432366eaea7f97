"""A prefill beside a KV cache in host memory, one layer at a time.

The layer's whole KV stays in a workspace on the device while all pieces of the prompt go through it, and its full
blocks are written to the host on the way.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from offload_runtime.config import ModelConfig
from offload_runtime.copy import CopyEngine
from offload_runtime.kv.device import block_bytes, kept_from, num_blocks
from offload_runtime.kv.host_io import HostBlocks, Run


class HostPrefill:
    """A prefill on its way.

    Args:
        sequence: Which one is prefilled.
        start: Tokens committed before.
        total: Tokens there will be.
        workspace: For one layer: [1, N, 2, H_kv, 256, D], device.
        blocks: Where full blocks go.
        piece_blocks: Most blocks of one copy.
        writeback: The copy queue to there.
    """

    def __init__(
        self, sequence: int, start: int, total: int, workspace: torch.Tensor, *, blocks: HostBlocks, piece_blocks: int,
        writeback: CopyEngine,
    ) -> None:  # fmt: skip
        self.sequence = sequence
        self.start = start
        self.total = total
        self.layer = -1
        self.finished_slots: list[int] = []  # of layers on the host, those that all pieces have gone through
        self.written = writeback.new_event()  # the workspace's blocks have been copied
        self._read = writeback.new_event()  # they may be
        self._workspace = workspace
        self._blocks = blocks
        self._piece_blocks = piece_blocks
        self._writeback = writeback
        self._blocks_written = 0

    @property
    def kv(self) -> KVBlocks:
        """The running layer's keys and values."""
        return KVBlocks(self._workspace)

    def begin_layer(
        self, layer: int, pieces: Iterable[tuple[Run, KVBlocks]], ring: torch.Tensor, first_in_ring: int
    ) -> None:
        """Bring what the sequence had before into the workspace.

        Args:
            layer: The layer that begins.
            pieces: Its blocks on the host, as they come over the link.
            ring: Its newest blocks: [R, 2, H_kv, 256, D], device.
            first_in_ring: The first block to take from there.
        """
        if self.layer >= 0:
            self._writeback.compute_wait(self.written)  # the layer before is still being copied from there
        self.layer, self._blocks_written = layer, self.start // BLOCK_TOKENS
        blocks = self._workspace[0]
        for run, kv in pieces:
            blocks[run.blocks.start : run.blocks.stop] = kv.data[0]
        for block in range(first_in_ring, num_blocks(self.start)):
            blocks[block] = ring[block % len(ring)]

    def write(self, layer_slot: int, end: int, ring: torch.Tensor) -> bool:
        """Send blocks that are full to the host; after the layer's last piece also fill the ring.

        Args:
            layer_slot: The layer's index among those on the host.
            end: Tokens that the workspace holds.
            ring: As in `begin_layer`.

        Returns:
            Whether this was the layer's last piece.
        """
        full = end // BLOCK_TOKENS
        self._writeback.compute_record(self._read)
        for run in self._blocks.runs(self.sequence, self._blocks_written, full, self._piece_blocks):
            source = self._workspace[0, run.blocks.start : run.blocks.stop].view(-1).view(torch.uint8)
            label = "kv", (self.layer, self.sequence, run.first_block)
            self._writeback.enqueue(
                self._blocks.block(layer_slot, *run), source, free=self._read, ready=self.written, label=label
            )
        self._blocks_written = max(full, self._blocks_written)
        if end < self.total:
            return False
        self.finished_slots.append(layer_slot)
        # Full blocks from before are in the ring already, and here only where a sliding window reaches them.
        for block in range(max(kept_from(end), self.start // BLOCK_TOKENS), num_blocks(end)):
            ring[block % len(ring)] = self._workspace[0, block]
        return True


def prefill_workspace_bytes(config: ModelConfig, dtype: torch.dtype, tokens: int) -> int:
    """Device bytes that hold one layer's keys and values of a whole prompt."""
    return num_blocks(tokens) * block_bytes(config, dtype)
