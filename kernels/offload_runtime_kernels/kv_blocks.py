"""Where the keys and values of a sequence's positions lie: blocks of 256 tokens, one layout everywhere."""

from dataclasses import dataclass

import torch

BLOCK_TOKENS = 256


@dataclass(frozen=True)
class KVBlocks:
    """Blocks of one layer's keys and values.

    `data` [B, N, 2, H_kv, 256, D], keys before values, the last three dimensions contiguous. The key of position p of
    batch row b lies in data[b, (p // 256 - first_block) % N, 0, :, p % 256]: N blocks may be a whole sequence, a piece
    of one that begins at `first_block`, or a ring that the newest blocks go around in.
    """

    data: torch.Tensor
    first_block: int = 0

    def __post_init__(self) -> None:
        assert self.data.ndim == 6 and self.data.shape[2] == 2 and self.data.shape[4] == BLOCK_TOKENS
        assert self.data.stride()[3:] == (BLOCK_TOKENS * self.head_dim, self.head_dim, 1)

    @property
    def num_blocks(self) -> int:
        """N."""
        return self.data.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """H_kv."""
        return self.data.shape[3]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.data.shape[5]

    def at(self, slots: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions, each [..., H_kv, D], a copy; the shapes of the arguments broadcast."""
        slots, positions = slots.long(), positions.long()
        block = (positions // BLOCK_TOKENS - self.first_block) % self.num_blocks
        cache_position = positions % BLOCK_TOKENS
        keys, values = self.data[slots, block, :, :, cache_position].unbind(-3)
        return keys, values
