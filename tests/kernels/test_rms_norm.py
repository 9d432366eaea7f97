"""`rms_norm`: the Triton kernel against plain torch, and rows that do not know of each other."""

import pytest
import torch
from offload_runtime_kernels.rms_norm import rms_norm, rms_norm_reference, rms_norm_triton

from tests.helpers.kernel_conditions import UNIT_ROUNDOFF, assert_within, poisoned_outputs, random_tensor

EPS = 1e-5


def _check(rows: int, width: int, *, dtype: torch.dtype, offset: float | None = None, centred: bool = False) -> None:
    x = random_tensor(rows, width, seed=1, dtype=dtype, scale=3.0)
    weight = random_tensor(width, seed=3, dtype=dtype)
    expected, before = rms_norm_reference(x, weight, EPS, offset, centred=centred), x.clone()
    with poisoned_outputs():
        normed = rms_norm_triton(x, weight, EPS, offset=offset, centred=centred)
    assert torch.equal(x, before)
    # Sums in another order and rsqrt move the normalised value across at most one rounding boundary, and the product
    # with the weight is rounded once more: three roundings between them, in fp32 a few more for the sum itself.
    roundings = 16 if dtype == torch.float32 else 4
    # Below fp16's normal numbers the spacing, 2^-24, is absolute; weights of up to 4 multiply it.
    atol = 5 * 2.0**-24 if dtype == torch.float16 else 1e-30
    assert_within(normed, expected, atol=atol, rtol=roundings * 2 * UNIT_ROUNDOFF[dtype])


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (3, 77), (5, 576), (2, 1030)])
@pytest.mark.parametrize("offset", [None, 0.0, 1.0])
def test_matches_reference(rows: int, width: int, offset: float | None) -> None:
    _check(rows, width, dtype=torch.float32, offset=offset)


def test_it_adds_to_a_stream_and_norms_a_part_of_longer_rows_in_place() -> None:
    x, weight = random_tensor(3, 100, seed=1), random_tensor(40, seed=2)
    part, stream = x[:, 30:70], random_tensor(3, 40, seed=3)
    expected, before = rms_norm_reference(part, weight, EPS, 1.0), x.clone()
    for run in (rms_norm, rms_norm_triton):
        total = stream.clone()
        assert run(part, weight, EPS, offset=1.0, out=total, add=True) is total
        assert_within(total, stream + expected, atol=1e-6)
        rows = before.clone()
        run(rows[:, 30:70], weight, EPS, offset=1.0, out=rows[:, 30:70])
        assert_within(rows[:, 30:70], expected, atol=1e-6)
        assert torch.equal(rows[:, :30], before[:, :30]) and torch.equal(rows[:, 70:], before[:, 70:])


@pytest.mark.parametrize("width", [16, 77, 1030])
def test_less_its_mean_a_row_is_normed_as_by_layer_norm(width: int) -> None:
    x, weight = 5 + random_tensor(3, width, seed=1), random_tensor(width, seed=2)
    expected = torch.nn.functional.layer_norm(x.double(), (width,), weight.double(), eps=EPS)
    for run in (rms_norm, rms_norm_triton):
        assert_within(run(x, weight, EPS, offset=0.0, centred=True), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_an_offset_is_added_in_fp32_and_rounded_once() -> None:
    x, weight = random_tensor(4, 64, seed=1, dtype=torch.bfloat16), random_tensor(64, seed=2, dtype=torch.bfloat16)
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    assert_within(rms_norm_triton(x, weight, EPS, offset=1.0), normed * (1 + weight.double()), rtol=2**-8, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (17, 77), (33, 576), (9, 4096), (3, 5120)])
def test_matches_reference_in_half_precision(rows: int, width: int, dtype: torch.dtype) -> None:
    _check(rows, width, dtype=dtype)
    _check(rows, width, dtype=dtype, offset=1.0)
    _check(rows, width, dtype=dtype, offset=0.0, centred=True)


def test_eps_matters_for_a_tiny_row() -> None:
    residual = random_tensor(2, 48, seed=4, scale=1e-3)
    weight = torch.ones_like(residual[0])
    normed = rms_norm_triton(residual, weight, 1e-2)
    expected = residual.double() / (residual.double().square().mean(-1, keepdim=True) + 1e-2).sqrt()
    assert_within(normed, expected, atol=1e-30, rtol=1e-5)


@pytest.mark.gpu
def test_row_bits_do_not_depend_on_the_number_of_rows() -> None:
    residual = random_tensor(512, 4096, seed=5, dtype=torch.bfloat16)
    weight = random_tensor(4096, seed=7, dtype=torch.bfloat16)
    together = rms_norm_triton(residual, weight, EPS)
    for start, count in ((0, 1), (100, 1), (100, 17), (511, 1), (3, 200)):
        rows = slice(start, start + count)
        alone = rms_norm_triton(residual[rows], weight, EPS)
        assert torch.equal(alone, together[rows])
