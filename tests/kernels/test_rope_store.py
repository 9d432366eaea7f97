"""`rope_store`: rotated queries, and keys and values in the right cache slots and nowhere else."""

from __future__ import annotations

import pytest
import torch
from offload_runtime_kernels.rope_store import HeadNorm, RopeRows, rope_store_reference, rope_store_triton

from tests.helpers.kernel_conditions import (
    KERNEL_DEVICE,
    UNIT_ROUNDOFF,
    assert_within,
    poisoned_outputs,
    random_tensor,
)

NUM_SEQUENCES, CAPACITY_TOKENS = 3, 11


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=KERNEL_DEVICE)


def _rows(head_dim: int, *, rotate: bool) -> RopeRows:
    """Seven rows over three sequences, two of them padding, which name a slot that holds something."""
    positions = _ints(4, 9, -1, 0, 700, -1, 3)
    inv_freq = 10000.0 ** (-torch.arange(0, head_dim, 2, device=KERNEL_DEVICE) / head_dim)
    angle = positions.clamp_min(0)[:, None] * inv_freq
    return RopeRows(
        cos=1.1 * angle.cos() if rotate else None,
        sin=1.1 * angle.sin() if rotate else None,
        positions=positions,
        slots=_ints(4, 10, 0, 0, 7, 4, 3),
        sequences=_ints(0, 0, 0, 1, 2, 0, 1),
    )


def _check(num_heads: int, num_kv_heads: int, head_dim: int, *, rotate: bool, norm: bool, dtype: torch.dtype) -> None:
    rows = _rows(head_dim, rotate=rotate)
    # Two rows more than positions: the height of the matrix product is padded.
    qkv = random_tensor(9, (num_heads + 2 * num_kv_heads) * head_dim, seed=1, dtype=dtype)
    head_norm = None
    if norm:
        q_weight, k_weight = (random_tensor(head_dim, seed=seed, dtype=dtype) for seed in (2, 3))
        head_norm = HeadNorm(q_weight, k_weight, 1e-5)
    # Views into a larger block with a gap between slots, as a cache of several layers is laid out.
    caches = random_tensor(2, 2, NUM_SEQUENCES, CAPACITY_TOKENS, num_kv_heads, head_dim, seed=4, dtype=dtype)
    expected, actual = caches[0], caches[0].clone()
    expected_q = rope_store_reference(qkv, rows, expected[0], expected[1], head_norm)
    with poisoned_outputs():
        q = rope_store_triton(qkv, rows, actual[0], actual[1], head_norm)
    # Products with cos and sin cancel, so the error is relative to the head's largest value: a few roundings of it.
    bound = max(float(t.abs().max()) for t in (expected_q, expected)) * UNIT_ROUNDOFF[dtype]
    assert_within(q, expected_q, atol=bound * (8 if dtype == torch.float32 else 4))
    assert_within(actual[0], expected[0], atol=bound * (8 if dtype == torch.float32 else 4))
    assert torch.equal(actual[1], expected[1])
    assert bool((q[rows.positions < 0] == 0).all())


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (3, 1), (7, 1)])
def test_matches_reference(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    _check(num_heads, num_kv_heads, head_dim, rotate=True, norm=False, dtype=torch.float32)


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_layers_without_rotation_and_with_head_norms(rotate: bool, norm: bool) -> None:
    _check(6, 2, 80, rotate=rotate, norm=norm, dtype=torch.float32)


@pytest.mark.parametrize("store", [rope_store_reference, rope_store_triton])
def test_writes_only_the_slots_of_real_rows(store: object) -> None:
    rows = _rows(16, rotate=True)
    qkv = random_tensor(7, 4 * 16, seed=5)
    caches = torch.full((2, NUM_SEQUENCES, CAPACITY_TOKENS, 1, 16), float("nan"), device=KERNEL_DEVICE)
    assert callable(store)
    store(qkv, rows, caches[0], caches[1], None)
    written = caches.isfinite().all(-1)[0, :, :, 0]
    real = [(0, 4), (0, 10), (1, 0), (2, 7), (1, 3)]
    assert sorted(map(tuple, written.nonzero().tolist())) == sorted(real)
    for row, place in zip((0, 1, 3, 4, 6), real, strict=True):
        assert torch.equal(caches[1, place[0], place[1], 0], qkv[row, 3 * 16 :])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_matches_reference_in_half_precision(head_dim: int, dtype: torch.dtype) -> None:
    for rotate, norm in ((True, False), (True, True), (False, False)):
        _check(6, 2, head_dim, rotate=rotate, norm=norm, dtype=dtype)


@pytest.mark.gpu
def test_row_bits_do_not_depend_on_the_number_of_rows() -> None:
    num_rows, num_heads, num_kv_heads, head_dim = 300, 8, 2, 128
    qkv = random_tensor(num_rows, (num_heads + 2 * num_kv_heads) * head_dim, seed=6, dtype=torch.bfloat16)
    weight = random_tensor(head_dim, seed=7, dtype=torch.bfloat16)
    angle = random_tensor(num_rows, head_dim // 2, seed=8)
    places = torch.arange(num_rows, dtype=torch.int32, device=KERNEL_DEVICE)

    def run(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.zeros(2, 1, num_rows, num_kv_heads, head_dim, dtype=torch.bfloat16, device=KERNEL_DEVICE)
        where = RopeRows(
            angle[rows].cos(), angle[rows].sin(), places[rows].clone(), places[rows].clone(),
            torch.zeros_like(places[rows]),
        )  # fmt: skip
        q = rope_store_triton(qkv[rows].clone(), where, cache[0], cache[1], HeadNorm(weight, weight, 1e-6))
        return q, cache[:, 0, rows]

    q_together, kv_together = run(slice(0, num_rows))
    for start, count in ((0, 1), (100, 17), (299, 1), (64, 200)):
        rows = slice(start, start + count)
        q, kv = run(rows)
        assert torch.equal(q, q_together[rows])
        assert torch.equal(kv, kv_together[:, rows])
