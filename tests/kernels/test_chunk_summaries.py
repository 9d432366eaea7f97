"""`chunk_summaries`: the Triton kernel against plain torch, and both against the definition in fp64."""

from collections.abc import Callable

import pytest
import torch
from offload_runtime_kernels import chunk_summaries as ops
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from tests.helpers.kernel_conditions import KERNEL_DEVICE, random_tensor

CAPACITY_BLOCKS = 6
FP16_ROUNDOFF = 2.0**-11


def _ring(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVBlocks:
    """Two sequences; four places hold blocks 2 to 5 in the order 5, 2, 3, 4, between NaN blocks and NaN values."""
    data = torch.full((2, 6, 2, num_kv_heads, BLOCK_TOKENS, head_dim), float("nan"), dtype=dtype, device=KERNEL_DEVICE)
    data[:, 1:5, 0] = random_tensor(2, 4, num_kv_heads, BLOCK_TOKENS, head_dim, seed=1, dtype=dtype)
    return KVBlocks(data[:, 1:5], first_block=1)


def _keys(kv: KVBlocks, sequence: int, chunk: int, chunk_size: int) -> torch.Tensor:
    """[H_kv, chunk_size, D] fp64, a chunk's keys."""
    block, first = divmod(chunk * chunk_size, BLOCK_TOKENS)
    return kv.data[sequence, (block - kv.first_block) % 4, 0, :, first : first + chunk_size].double().cpu()


def _empty(kv: KVBlocks, chunk_size: int) -> ops.ChunkSummaries:
    """Room for a sequence more than there is, so that what is not to be written can be seen."""
    shape = (3, kv.data.shape[3], CAPACITY_BLOCKS * BLOCK_TOKENS // chunk_size)
    codes = torch.full((*shape, kv.data.shape[5]), -128, dtype=torch.int8, device=KERNEL_DEVICE)
    return ops.ChunkSummaries(codes, torch.full((*shape, 2), -1.0, dtype=torch.float16, device=KERNEL_DEVICE))


def _check_equal(num_kv_heads: int, head_dim: int, chunk_size: int, dtype: torch.dtype) -> None:
    kv = _ring(num_kv_heads, head_dim, dtype)
    expected, actual = _empty(kv, chunk_size), _empty(kv, chunk_size)
    ops.chunk_summaries_reference(kv, range(3, 6), expected, chunk_size=chunk_size)
    ops.chunk_summaries_triton(kv, range(3, 6), actual, chunk_size=chunk_size)
    assert torch.equal(actual.codes, expected.codes)
    assert torch.equal(actual.factors[..., 0], expected.factors[..., 0])
    # The spread is summed in another order, which may round it to the next fp16 number.
    assert torch.allclose(actual.factors[..., 1].float(), expected.factors[..., 1].float(), rtol=2 * FP16_ROUNDOFF)


@pytest.mark.few(1)
@pytest.mark.parametrize("chunk_size", [2, 8, 64])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(3, 16), (1, 80), (2, 96)])
def test_kernel_equals_reference(num_kv_heads: int, head_dim: int, chunk_size: int) -> None:
    _check_equal(num_kv_heads, head_dim, chunk_size, torch.float32)


@pytest.mark.few(3)
@pytest.mark.parametrize("run", [ops.chunk_summaries_reference, ops.chunk_summaries_triton])
@pytest.mark.parametrize("chunk_size", [2, 8, 64])
def test_every_chunk_of_the_blocks_and_no_other(run: Callable[..., None], chunk_size: int) -> None:
    kv = _ring(2, 16, torch.float32)
    summaries = _empty(kv, chunk_size)
    run(kv, range(3, 6), summaries, chunk_size=chunk_size)
    per_block = BLOCK_TOKENS // chunk_size
    for written in ((summaries.codes != -128).all(-1), (summaries.factors >= 0).all(-1)):  # [3, H_kv, C]
        assert bool(written[:2, :, 3 * per_block :].all()) and int(written.sum()) == 2 * 2 * 3 * per_block
    for sequence in range(2):
        for chunk in (3 * per_block, 4 * per_block - 1, 4 * per_block, 6 * per_block - 1):
            keys = _keys(kv, sequence, chunk, chunk_size)
            mean, variance = keys.mean(1), keys.var(1, unbiased=False).mean(-1)
            scale, spread = summaries.factors[sequence, :, chunk].double().cpu().unbind(-1)
            decoded = summaries.codes[sequence, :, chunk].double().cpu() * scale[:, None]
            # Half a step of the code; where the scale was rounded down, the largest channel is cut by what it lost.
            step = mean.abs().amax(-1, keepdim=True) / 127
            assert bool(((decoded - mean).abs() <= step * (0.51 + 127 * FP16_ROUNDOFF)).all())
            assert bool(((decoded - mean).abs() <= 0.51 * step).double().mean() > 0.9)
            assert torch.allclose(spread, variance, rtol=1.1 * FP16_ROUNDOFF)


def test_bits_do_not_depend_on_how_the_blocks_are_cut() -> None:
    kv = _ring(2, 16, torch.float32)
    together, apart = _empty(kv, 8), _empty(kv, 8)
    ops.chunk_summaries(kv, range(2, 6), together, chunk_size=8)
    for block in (4, 2, 5, 3):
        one = KVBlocks(kv.data[1:2], kv.first_block)
        ops.chunk_summaries(one, range(block, block + 1), apart.rows(1, 2), chunk_size=8)
    assert torch.equal(together.codes[1, :, 64:], apart.codes[1, :, 64:])
    assert torch.equal(together.factors[1, :, 64:], apart.factors[1, :, 64:])
    assert bool((together.factors[1, :, 64:] >= 0).all())
    ops.chunk_summaries(kv, range(7, 7), apart, chunk_size=8)  # no block is no work


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_size", [2, 4, 8, 16, 32, 64])
def test_kernel_equals_reference_in_half_precision(chunk_size: int) -> None:
    """Of every chunk size both dtypes, and in each dtype every size of head."""
    for number, (num_kv_heads, head_dim) in enumerate(((3, 64), (2, 80), (1, 96), (8, 128))):
        dtype = (torch.bfloat16, torch.float16)[(number + chunk_size.bit_length()) % 2]
        _check_equal(num_kv_heads, head_dim, chunk_size, dtype)
