"""`KVBlocks`: which position lies where; and `rope_store`: rotated queries, keys and values in their slots alone."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from offload_runtime_kernels import kv_blocks as ops

from tests.helpers.kernel_conditions import KERNEL_DEVICE, UNIT_ROUNDOFF, assert_within, poisoned_outputs, random_tensor

NUM_SEQUENCES, NUM_BLOCKS = 3, 2


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=KERNEL_DEVICE)


def _rows(head_dim: int) -> ops.RopeRows:
    """Seven rows over three sequences, two of them padding, which name a slot that holds something."""
    positions = _ints(4, 9, -1, 0, 700, -1, 3)
    inv_freq = 10000.0 ** (-torch.arange(0, head_dim, 2, device=KERNEL_DEVICE) / head_dim)
    angle = positions.clamp_min(0)[:, None] * inv_freq
    return ops.RopeRows(
        cos=1.1 * angle.cos(),
        sin=1.1 * angle.sin(),
        positions=positions,
        cache_positions=_ints(4, 300, 0, 0, 511, 4, 256),
        slots=_ints(0, 0, 0, 1, 2, 0, 1),
    )


def _check(
    num_heads: int, num_kv_heads: int, head_dim: int, *, rotation: ops.Rotation | None, dtype: torch.dtype,
    norm: bool = False, offset: float | None = None, of_values: bool = False, shared: bool = False,
) -> None:  # fmt: skip
    rows = _rows(head_dim)
    # Two rows more than positions: the height of the matrix product is padded.
    qkv = random_tensor(9, (num_heads + (1 if shared else 2) * num_kv_heads) * head_dim, seed=1, dtype=dtype)
    head_norm = None
    if norm:
        q_weight, k_weight = (random_tensor(head_dim, seed=seed, dtype=dtype) for seed in (2, 3))
        head_norm = ops.HeadNorm(q_weight, k_weight, 1e-5, offset, of_values)
    # Every other block of a larger memory, with values far from keys: the outer dimensions may be strided.
    shape = (2, NUM_SEQUENCES, 2 * NUM_BLOCKS, num_kv_heads, ops.BLOCK_TOKENS, head_dim)
    memory = random_tensor(*shape, seed=4, dtype=dtype)
    expected, actual = (ops.KVBlocks(m.permute(1, 2, 0, 3, 4, 5)[:, ::2]) for m in (memory, memory.clone()))
    expected_q = ops.rope_store_reference(qkv, rows, expected, rotation, head_norm, values_are_keys=shared)
    with poisoned_outputs():
        q = ops.rope_store_triton(qkv, rows, actual, rotation, head_norm, values_are_keys=shared)
    # Products with cos and sin cancel, so the error is relative to the head's largest value: a few roundings of it.
    bound = max(float(t.abs().max()) for t in (expected_q, memory)) * UNIT_ROUNDOFF[dtype]
    assert_within(q, expected_q, atol=bound * (8 if dtype == torch.float32 else 4))
    assert_within(actual.data[:, :, 0], expected.data[:, :, 0], atol=bound * (8 if dtype == torch.float32 else 4))
    if of_values:
        assert_within(actual.data[:, :, 1], expected.data[:, :, 1], atol=bound * 8)
    else:
        assert torch.equal(actual.data[:, :, 1], expected.data[:, :, 1])
    assert bool((q[rows.positions < 0] == 0).all())


@pytest.mark.few(3)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (3, 1), (7, 1)])
def test_matches_reference(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    _check(num_heads, num_kv_heads, head_dim, rotation=ops.Rotation(0, head_dim // 2), dtype=torch.float32)


@pytest.mark.few(1)
@pytest.mark.parametrize("rotation", [None, ops.Rotation(0, 40), ops.Rotation(9, 20), ops.Rotation(4, 20, True)])
@pytest.mark.parametrize("norm", [True, False])
def test_layers_without_rotation_and_with_head_norms(rotation: ops.Rotation | None, norm: bool) -> None:
    _check(6, 2, 80, rotation=rotation, norm=norm, dtype=torch.float32)


@pytest.mark.parametrize(("rotation", "shared"), [(ops.Rotation(3, 12), True), (ops.Rotation(0, 40, True), False)])
def test_norms_with_an_offset_and_of_values(rotation: ops.Rotation, shared: bool) -> None:
    _check(6, 2, 80, rotation=rotation, norm=True, offset=1.0, of_values=True, shared=shared, dtype=torch.float32)


def test_values_may_be_the_keys_before_they_are_rotated() -> None:
    rows, qkv = _rows(16), random_tensor(7, 3 * 16, seed=5)
    kv = ops.KVBlocks(torch.zeros(NUM_SEQUENCES, NUM_BLOCKS, 2, 1, ops.BLOCK_TOKENS, 16, device=KERNEL_DEVICE))
    q = ops.rope_store_triton(qkv, rows, kv, ops.Rotation(0, 8), values_are_keys=True)
    keys, values = kv.at(rows.slots[:2].long(), rows.cache_positions[:2].long())
    assert q.shape == (7, 2, 16)
    assert torch.equal(values[:, 0], qkv[:2, 32:]) and not torch.equal(keys, values)


def test_pairs_are_halves_or_neighbours_of_the_channels_that_are_rotated() -> None:
    """By the definition: those behind them pass, and the angles begin at their column."""
    rows, qkv = _rows(16), random_tensor(7, 3 * 16, seed=5)
    for rotation, first, second in (
        (ops.Rotation(2, 3), [0, 1, 2], [3, 4, 5]), (ops.Rotation(2, 3, True), [0, 2, 4], [1, 3, 5])
    ):  # fmt: skip
        kv = ops.KVBlocks(torch.zeros(NUM_SEQUENCES, NUM_BLOCKS, 2, 1, ops.BLOCK_TOKENS, 16, device=KERNEL_DEVICE))
        expected = qkv[:, :16].clone()
        cos, sin = rows.cos[:, 2:5], rows.sin[:, 2:5]
        expected[:, first] = qkv[:, first] * cos - qkv[:, second] * sin
        expected[:, second] = qkv[:, second] * cos + qkv[:, first] * sin
        found = ops.rope_store_reference(qkv, rows, kv, rotation)[:, 0]
        assert_within(found[rows.positions >= 0], expected[rows.positions >= 0], atol=1e-6)


Store = Callable[[torch.Tensor, ops.RopeRows, ops.KVBlocks, ops.Rotation | None], torch.Tensor]
stores = pytest.mark.parametrize("store", [ops.rope_store_reference, ops.rope_store_triton])


@stores
def test_writes_only_the_slots_of_real_rows(store: Store) -> None:
    rows = _rows(16)
    qkv = random_tensor(7, 4 * 16, seed=5)
    shape = (NUM_SEQUENCES, NUM_BLOCKS, 2, 1, ops.BLOCK_TOKENS, 16)
    data = torch.full(shape, float("nan"), device=KERNEL_DEVICE)
    store(qkv, rows, ops.KVBlocks(data), ops.Rotation(0, 8))
    written = data.isfinite()
    assert int(written.sum()) == 5 * 2 * 16
    for row, (sequence, block, cache_position) in zip(
        (0, 1, 3, 4, 6), ((0, 0, 4), (0, 1, 44), (1, 0, 0), (2, 1, 255), (1, 1, 0)), strict=True
    ):
        assert bool(written[sequence, block, 0, 0, cache_position].all())
        assert torch.equal(data[sequence, block, 1, 0, cache_position], qkv[row, 3 * 16 :])


@stores
def test_pieces_and_rings_take_a_token_where_its_block_lies(store: Store) -> None:
    rows = replace(_rows(16), cache_positions=_ints(4 * 256, 5 * 256 + 7, 0, 6 * 256, 7 * 256 + 1, 0, 7 * 256))
    qkv = random_tensor(7, 4 * 16, seed=5)
    # Blocks 4 to 7 from the beginning, and in rings that begin with block 6 and, of five blocks, with 5.
    for first_block, num_blocks, places in ((4, 5, (0, 1, 2, 3)), (0, 3, (1, 2, 0, 1)), (0, 5, (4, 0, 1, 2))):
        data = torch.full((NUM_SEQUENCES, num_blocks, 2, 1, ops.BLOCK_TOKENS, 16), float("nan"), device=KERNEL_DEVICE)
        store(qkv, rows, ops.KVBlocks(data, first_block), None)
        assert int(data.isfinite().sum()) == 5 * 2 * 16
        for row, sequence, block, position in ((0, 0, 4, 0), (1, 0, 5, 7), (3, 1, 6, 0), (4, 2, 7, 1), (6, 1, 7, 0)):
            assert torch.equal(data[sequence, places[block - 4], 0, 0, position], qkv[row, 2 * 16 : 3 * 16])
            assert torch.equal(data[sequence, places[block - 4], 1, 0, position], qkv[row, 3 * 16 :])


@stores
def test_batch_rows_may_be_one_row_expanded(store: Store) -> None:
    """As a prefill's workspace, which any sequence may name."""
    rows = replace(_rows(16), slots=_ints(*[2] * 7), cache_positions=_ints(0, 1, 0, 2, 300, 0, 4))
    qkv = random_tensor(7, 4 * 16, seed=5)
    data = torch.zeros(1, NUM_BLOCKS, 2, 1, ops.BLOCK_TOKENS, 16, device=KERNEL_DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store(qkv, rows, ops.KVBlocks(data.expand(NUM_SEQUENCES, -1, -1, -1, -1, -1)), None)
    assert torch.equal(data[0, 0, 0, 0, :3], qkv[[0, 1, 3], 2 * 16 : 3 * 16])
    assert torch.equal(data[0, 1, 1, 0, 44], qkv[4, 3 * 16 :])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_matches_reference_in_half_precision(head_dim: int, dtype: torch.dtype) -> None:
    whole, part = ops.Rotation(0, head_dim // 2), ops.Rotation(4, head_dim // 4, True)
    for rotation, norm, offset in ((whole, False, None), (whole, True, None), (part, True, 1.0), (None, False, None)):
        _check(6, 2, head_dim, rotation=rotation, norm=norm, offset=offset, dtype=dtype)


@pytest.mark.gpu
def test_row_bits_do_not_depend_on_the_number_of_rows() -> None:
    num_rows, num_heads, num_kv_heads, head_dim = 300, 8, 2, 128
    qkv = random_tensor(num_rows, (num_heads + 2 * num_kv_heads) * head_dim, seed=6, dtype=torch.bfloat16)
    weight = random_tensor(head_dim, seed=7, dtype=torch.bfloat16)
    angle = random_tensor(num_rows, head_dim // 2, seed=8)
    places = torch.arange(num_rows, dtype=torch.int32, device=KERNEL_DEVICE)

    def run(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (1, 2, 2, num_kv_heads, ops.BLOCK_TOKENS, head_dim)
        kv = ops.KVBlocks(torch.zeros(shape, dtype=torch.bfloat16, device=KERNEL_DEVICE))
        where = ops.RopeRows(
            angle[rows].cos(), angle[rows].sin(), places[rows].clone(), places[rows].clone(),
            torch.zeros_like(places[rows]),
        )  # fmt: skip
        q = ops.rope_store_triton(
            qkv[rows].clone(), where, kv, ops.Rotation(0, head_dim // 2), ops.HeadNorm(weight, weight, 1e-6)
        )
        return q, torch.stack(kv.at(torch.zeros_like(where.cache_positions), where.cache_positions))

    q_together, kv_together = run(slice(0, num_rows))
    for start, count in ((0, 1), (100, 17), (299, 1), (64, 200)):
        rows = slice(start, start + count)
        q, kv = run(rows)
        assert torch.equal(q, q_together[rows])
        assert torch.equal(kv, kv_together[:, rows])
