"""`swiglu`: the Triton kernel against plain torch, and rows that do not know of each other."""

from __future__ import annotations

import pytest
import torch
from offload_runtime_kernels.swiglu import swiglu_reference, swiglu_triton

from tests.helpers.kernel_conditions import UNIT_ROUNDOFF, assert_within, poisoned_outputs, random_tensor

SUBNORMAL_SPACING = 2.0**-24  # of fp16


def _check(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = random_tensor(rows, 2 * width, seed=1, dtype=dtype, scale=4.0)
    expected = swiglu_reference(gate_up)
    with poisoned_outputs():
        out = swiglu_triton(gate_up)
    assert out.shape == (rows, width)
    # silu may land on the other side of a rounding boundary, then the product is rounded: two of each. The fast
    # exponential adds a few fp32 roundings, which only fp32 can show. Below fp16's normal numbers the spacing, 6e-8,
    # is absolute; `up` of up to 20 multiplies it.
    roundings = 16 if dtype == torch.float32 else 2
    atol = 20 * SUBNORMAL_SPACING if dtype == torch.float16 else 1e-30
    assert_within(out, expected, atol=atol, rtol=roundings * 2 * UNIT_ROUNDOFF[dtype])


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 77), (2, 1024), (2, 2500)])
def test_matches_reference(rows: int, width: int) -> None:
    _check(rows, width, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (17, 77), (33, 1536), (5, 11008)])
def test_matches_reference_in_half_precision(rows: int, width: int, dtype: torch.dtype) -> None:
    _check(rows, width, dtype)


def test_large_gates_saturate_without_nan() -> None:
    gate_up = random_tensor(1, 8, seed=2)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -90.0, 0.0])
    up = gate_up[0, 4:]
    out = swiglu_triton(gate_up)
    assert_within(out[0], torch.stack((0 * up[0], 200 * up[1], 0 * up[2], 0 * up[3])), atol=1e-30, rtol=1e-6)


@pytest.mark.gpu
def test_row_bits_do_not_depend_on_the_number_of_rows() -> None:
    gate_up = random_tensor(256, 2 * 11008, seed=3, dtype=torch.bfloat16)
    together = swiglu_triton(gate_up)
    for start, count in ((0, 1), (100, 17), (255, 1), (3, 200)):
        rows = slice(start, start + count)
        assert torch.equal(swiglu_triton(gate_up[rows].clone()), together[rows])
