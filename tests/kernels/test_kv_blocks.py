"""`KVBlocks`: which position lies where, in whole caches, pieces and rings."""

from __future__ import annotations

import pytest
import torch
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from tests.helpers.attention_cases import int32
from tests.helpers.kernel_conditions import KERNEL_DEVICE, random_tensor


def _data(num_blocks: int, *, batch: int = 2) -> torch.Tensor:
    return random_tensor(batch, num_blocks, 2, 3, BLOCK_TOKENS, 16, seed=1)


def test_shape() -> None:
    kv = KVBlocks(_data(4))
    assert (kv.num_blocks, kv.num_kv_heads, kv.head_dim) == (4, 3, 16)


@pytest.mark.parametrize(("first_block", "position", "block"), [(0, 0, 0), (0, 511, 1), (2, 512, 0), (2, 1279, 2)])
def test_a_position_lies_in_its_block(first_block: int, position: int, block: int) -> None:
    data = _data(3)
    k, v = KVBlocks(data, first_block).at(int32(1), int32(position))
    assert torch.equal(k, data[1, block, 0, :, position % BLOCK_TOKENS])
    assert torch.equal(v, data[1, block, 1, :, position % BLOCK_TOKENS])


def test_a_ring_takes_block_seven_where_block_four_was() -> None:
    data = _data(3)
    for side, found in enumerate(KVBlocks(data).at(int32(0), int32([4 * 256 + 9, 7 * 256 + 9, 8 * 256]))):
        assert torch.equal(found, torch.stack((data[0, 1, side, :, 9], data[0, 1, side, :, 9], data[0, 2, side, :, 0])))


def test_sequences_and_positions_broadcast() -> None:
    data = _data(2)
    positions = torch.arange(300, device=KERNEL_DEVICE)
    k, v = KVBlocks(data).at(int32([[1], [0]]), positions)
    flat = data.permute(2, 0, 1, 4, 3, 5).flatten(2, 3)  # [2, B, S, H_kv, D]
    assert torch.equal(k, flat[0, [1, 0], :300]) and torch.equal(v, flat[1, [1, 0], :300])
