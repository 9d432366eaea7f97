"""`chunk_means`: the Triton kernel against plain torch to the last bit, and both against means in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from offload_runtime_kernels.chunk_means import chunk_means, chunk_means_reference, chunk_means_triton
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from tests.helpers.kernel_conditions import KERNEL_DEVICE, UNIT_ROUNDOFF, assert_within, random_tensor

CAPACITY_BLOCKS = 6


def _ring(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVBlocks:
    """Two sequences; four places hold blocks 2 to 5 in the order 5, 2, 3, 4, between NaN blocks and NaN values."""
    data = torch.full((2, 6, 2, num_kv_heads, BLOCK_TOKENS, head_dim), float("nan"), dtype=dtype, device=KERNEL_DEVICE)
    data[:, 1:5, 0] = random_tensor(2, 4, num_kv_heads, BLOCK_TOKENS, head_dim, seed=1, dtype=dtype)
    return KVBlocks(data[:, 1:5], first_block=1)


def _key(kv: KVBlocks, sequence: int, position: int) -> torch.Tensor:
    """[H_kv, D]"""
    place = (position // BLOCK_TOKENS - kv.first_block) % 4
    return kv.data[sequence, place, 0, :, position % BLOCK_TOKENS]


def _nan_means(kv: KVBlocks, chunk_size: int) -> torch.Tensor:
    """Room for a sequence more than there is, so that what is not to be written can be seen."""
    shape = (3, kv.data.shape[3], CAPACITY_BLOCKS * BLOCK_TOKENS // chunk_size, kv.data.shape[5])
    return torch.full(shape, float("nan"), dtype=kv.data.dtype, device=KERNEL_DEVICE)


def _check_equal(num_kv_heads: int, head_dim: int, chunk_size: int, dtype: torch.dtype) -> None:
    kv = _ring(num_kv_heads, head_dim, dtype)
    expected, actual = _nan_means(kv, chunk_size), _nan_means(kv, chunk_size)
    chunk_means_reference(kv, range(3, 6), expected, chunk_size=chunk_size)
    chunk_means_triton(kv, range(3, 6), actual, chunk_size=chunk_size)
    assert torch.equal(actual.nan_to_num(nan=-1e4), expected.nan_to_num(nan=-1e4))


@pytest.mark.parametrize("chunk_size", [1, 2, 8, 64])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(3, 16), (1, 80), (2, 96)])
def test_kernel_equals_reference(num_kv_heads: int, head_dim: int, chunk_size: int) -> None:
    _check_equal(num_kv_heads, head_dim, chunk_size, torch.float32)


@pytest.mark.parametrize("run", [chunk_means_reference, chunk_means_triton])
@pytest.mark.parametrize("chunk_size", [2, 8, 64])
def test_mean_of_every_chunk_of_the_blocks_and_of_no_other(run: Callable[..., None], chunk_size: int) -> None:
    kv = _ring(2, 16, torch.float32)
    means = _nan_means(kv, chunk_size)
    run(kv, range(3, 6), means, chunk_size=chunk_size)
    per_block = BLOCK_TOKENS // chunk_size
    written = ~means.isnan().any(-1)  # [3, H_kv, C]
    assert bool(written[:2, :, 3 * per_block :].all()) and int(written.sum()) == 2 * 2 * 3 * per_block
    for sequence in range(2):
        for chunk in (3 * per_block, 4 * per_block - 1, 4 * per_block, 6 * per_block - 1):
            keys = [_key(kv, sequence, chunk * chunk_size + token).double() for token in range(chunk_size)]
            # chunk_size sums of at most 4 * chunk_size, each rounded once, divided by chunk_size.
            atol = 4 * chunk_size * UNIT_ROUNDOFF[torch.float32]
            assert_within(means[sequence, :, chunk], torch.stack(keys).mean(0), atol=atol)


def test_bits_do_not_depend_on_how_the_blocks_are_cut() -> None:
    kv = _ring(2, 16, torch.float32)
    together, apart = _nan_means(kv, 8), _nan_means(kv, 8)
    chunk_means(kv, range(2, 6), together, chunk_size=8)
    for block in (4, 2, 5, 3):
        one = KVBlocks(kv.data[1:2], kv.first_block)
        chunk_means(one, range(block, block + 1), apart[1:2], chunk_size=8)
    assert torch.equal(together[1, :, 64:], apart[1, :, 64:]) and bool(together[1, :, 64:].isfinite().all())
    chunk_means(kv, range(7, 7), apart, chunk_size=8)  # no block is no work


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk_size", [1, 2, 4, 8, 16, 32, 64])
def test_kernel_equals_reference_in_half_precision(chunk_size: int, dtype: torch.dtype) -> None:
    for num_kv_heads, head_dim in ((3, 64), (2, 80), (1, 96), (8, 128)):
        _check_equal(num_kv_heads, head_dim, chunk_size, dtype)
