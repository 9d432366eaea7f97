"""`gated`: the Triton kernel against plain torch, and rows that do not know of each other."""

from __future__ import annotations

import pytest
import torch
from offload_runtime_kernels.linear import Activation, gated_product_reference, gated_product_triton

from tests.helpers.kernel_conditions import UNIT_ROUNDOFF, assert_within, poisoned_outputs, random_tensor

SUBNORMAL_SPACING = 2.0**-24  # of fp16


def _check(rows: int, width: int, dtype: torch.dtype, activation: Activation = "silu") -> None:
    gate_up = random_tensor(rows, 2 * width, seed=1, dtype=dtype, scale=4.0)
    expected = gated_product_reference(gate_up, activation)
    with poisoned_outputs():
        out = gated_product_triton(gate_up, activation)
    assert out.shape == (rows, width)
    # It may land on the other side of a rounding boundary, then the product is rounded: two of each. The fast
    # exponential adds a few fp32 roundings, which only fp32 can show. Below fp16's normal numbers the spacing, 6e-8,
    # is absolute; `up` of up to 20 multiplies it.
    roundings = 16 if dtype == torch.float32 else 2
    atol = 20 * SUBNORMAL_SPACING if dtype == torch.float16 else 1e-30
    if activation == "gelu":  # torch's 1 + tanh(u) loses what is small: a rounding of fp32 times gate and up
        atol += 300 * UNIT_ROUNDOFF[torch.float32]
    assert_within(out, expected, atol=atol, rtol=roundings * 2 * UNIT_ROUNDOFF[dtype])


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 77), (2, 1024), (2, 2500)])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_matches_reference(rows: int, width: int, activation: Activation) -> None:
    _check(rows, width, torch.float32, activation)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (17, 77), (33, 1536), (5, 11008)])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_matches_reference_in_half_precision(rows: int, width: int, dtype: torch.dtype, activation: Activation) -> None:
    _check(rows, width, dtype, activation)


def test_large_gates_saturate_without_nan() -> None:
    gate_up = random_tensor(1, 8, seed=2)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -90.0, 0.0])
    up = gate_up[0, 4:]
    out = gated_product_triton(gate_up, "gelu")
    assert_within(out[0], torch.stack((0 * up[0], 200 * up[1], 0 * up[2], 0 * up[3])), atol=1e-30, rtol=1e-6)


@pytest.mark.gpu
def test_row_bits_do_not_depend_on_the_number_of_rows() -> None:
    gate_up = random_tensor(256, 2 * 11008, seed=3, dtype=torch.bfloat16)
    together = gated_product_triton(gate_up, "gelu")
    for start, count in ((0, 1), (100, 17), (255, 1), (3, 200)):
        rows = slice(start, start + count)
        assert torch.equal(gated_product_triton(gate_up[rows].clone(), "gelu"), together[rows])
