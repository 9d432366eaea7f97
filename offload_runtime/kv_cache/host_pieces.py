"""What a pass brings over the link from a KV cache in host memory: each layer's blocks, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from offload_runtime.config import ModelConfig
from offload_runtime.kv_cache.device import block_shape
from offload_runtime.kv_cache.host_blocks import HostBlocks, Run


class PieceFeed(Protocol):
    """Hands out streamed pieces in order."""

    def take(self, key: tuple[int, ...]) -> torch.Tensor:
        """The next piece, which must be `key`: uint8 [slot_bytes] on the device, valid until `release`."""

    def release(self) -> None:
        """Let go of the piece that was taken first."""


@dataclass(frozen=True)
class Snapshot:
    """Which host blocks a pass streams: the first `blocks[s]` of sequence s, of `lengths[s]` committed tokens."""

    epoch: int
    blocks: tuple[int, ...]
    lengths: tuple[int, ...]


class StreamedPieces:
    """Cuts what a snapshot names into pieces, and takes them in the same order when the pass runs.

    Args:
        config: The model's shape.
        dtype: Of keys and values.
        blocks: What is in host memory.
        place: Index there of each layer that is.
        piece_blocks: Most blocks of a piece.
        snapshot: Until the first pass begins.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, blocks: HostBlocks, place: Mapping[int, int],
        piece_blocks: int, snapshot: Snapshot,
    ) -> None:  # fmt: skip
        self._config = config
        self._dtype = dtype
        self._blocks = blocks
        self._place = place
        self._piece_blocks = piece_blocks
        self.snapshot = snapshot  # of the running pass
        self._feed: PieceFeed | None = None

    def planned(self, layer: int, snapshot: Snapshot) -> list[tuple[tuple[int, ...], torch.Tensor]]:
        """Key and host memory (uint8 [n]) of each of the layer's pieces, in order."""
        place = self._place.get(layer)
        if place is None:
            return []
        return [
            (
                (layer, run.sequence, run.first_block),
                self._blocks.block(place, run.sequence, run.first_block, run.num_blocks),
            )
            for run in self._runs(layer, snapshot)
        ]

    def begin_pass(self, snapshot: Snapshot, feed: PieceFeed) -> None:
        """A pass begins; its pieces come out of `feed`."""
        self.snapshot, self._feed = snapshot, feed

    def passing(self, layer: int) -> Iterator[tuple[Run, KVBlocks]]:
        """The layer's pieces as they come over the link; each may be read until the next one is asked for."""
        feed = self._feed
        assert feed is not None, "a pass begins before it reads"
        for run in self._runs(layer, self.snapshot):
            buffer = feed.take((layer, run.sequence, run.first_block))
            data = buffer[: run.num_blocks * self._blocks.block_bytes].view(self._dtype)
            yield run, KVBlocks(data.view(1, run.num_blocks, *block_shape(self._config)), run.first_block)
            # Not in a `finally`: what an interrupted pass holds is let go of when the next one begins.
            feed.release()

    def _runs(self, layer: int, snapshot: Snapshot) -> list[Run]:
        """The layer's pieces; blocks that no sliding window reaches any more stay where they are."""
        reach = self._config.layer_windows[layer]
        runs: list[Run] = []
        for sequence, blocks in enumerate(snapshot.blocks):
            first = 0 if reach is None else max(0, snapshot.lengths[sequence] - reach) // BLOCK_TOKENS
            runs += self._blocks.runs(sequence, first, blocks, self._piece_blocks)
        return runs
