"""`quantise`: copies are near, finite, and the same by every arithmetic; their decoding and products are those of
`scaled_rows`, whose kernels have the reference's bits on them."""

from functools import partial

import pytest
import torch
from offload_runtime_kernels.low_bit_copy import COPY, quantise, quantise_reference, quantise_triton
from offload_runtime_kernels.scaled_linear import scaled_linear_triton
from offload_runtime_kernels.scaled_rows import (
    MIDDLE,
    ScaledRows,
    decode_scaled_reference,
    decode_scaled_triton,
    unpack_numbers,
)

from offload_runtime.weights.encoding import scaled_bytes, scaled_rows
from tests.helpers.kernel_conditions import KERNEL_DEVICE
from tests.kernels.test_coded_bf16 import MATRICES, SPECIAL, drawn, gaussian, sprinkled
from tests.kernels.test_encoded_linear import TILES, Stored, check_close, products
from tests.kernels.test_gguf_blocks import assert_same_bits

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def copy_of(values: torch.Tensor, importance: torch.Tensor | None = None) -> ScaledRows:
    """On the device of the values, within bytes that had others."""
    shape = values.shape
    stored = torch.full((scaled_bytes(COPY, *shape),), 255, dtype=torch.uint8, device=values.device)
    found = scaled_rows(stored, COPY, *shape)
    quantise(values, found, importance)
    return found


def decoded(stored: ScaledRows, columns: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    out = torch.full((len(stored.numbers), columns), float("nan"), dtype=dtype, device=stored.numbers.device)
    decode_scaled_reference(stored, COPY, 0, out)
    return out


def error(copy: torch.Tensor, values: torch.Tensor, weights: torch.Tensor | float = 1.0) -> float:
    return float(((copy.double() - values.double()).square() * weights).sum())


@pytest.mark.parametrize("name", MATRICES)
def test_copies_are_finite_and_round_but_once(name: str) -> None:
    """fp64 holds what fp32 is said to."""
    for shape in ((5, 192), (3, 100), (2, 9)):
        values = MATRICES[name](*shape) if shape[1] > 9 else MATRICES[name](2, 64)[:, :9].contiguous()
        stored = copy_of(values)
        found = decoded(stored, shape[1])
        assert bool(found.isfinite().all())
        numbers = unpack_numbers(stored.numbers, COPY, shape[1])
        numbers = torch.stack((numbers & 15, numbers >> 4), 2).flatten(1)[:, : shape[1]].double()
        groups = torch.arange(shape[1]) // 64
        sums = (numbers - MIDDLE) * stored.scales.double()[:, groups]
        sums += stored.zeros.view(BF16).double()[:, groups]
        assert torch.equal(sums, sums.float().double()) and torch.equal(sums.bfloat16(), found)


def test_copies_are_near() -> None:
    """Of trained weights' kind by less than a tenth; a group of one value is that."""
    for values in (gaussian(64, 512), gaussian(64, 500), gaussian(64, 512) * 2.0**-120):
        assert error(decoded(copy_of(values), values.shape[1]), values) < 0.1**2 * error(torch.zeros(1), values)
    for value in (-1.7, 0.0, 3e38, 1e-40):
        constant = torch.full((2, 100), value, dtype=BF16)
        torch.testing.assert_close(decoded(copy_of(constant), 100), constant.clamp(max=2.0**125))


def test_what_counts_more_is_nearer() -> None:
    torch.manual_seed(0)
    values, importance = drawn(torch.distributions.StudentT(4.0), 32, 256).float(), torch.rand(256).pow(4)
    plain, weighted = (decoded(copy_of(values, one), 256) for one in (None, importance))
    assert error(weighted, values, importance) < error(plain, values, importance)
    assert error(plain, values) < error(weighted, values)
    assert torch.equal(plain, decoded(copy_of(values, torch.ones(256) * 3), 256))


def test_pieces_of_a_matrix_do_not_change_it() -> None:
    values = sprinkled(gaussian(3000, 128), SPECIAL, 3)
    whole = copy_of(values)
    assert_same_bits(decoded(whole, 128)[2000:], decoded(copy_of(values[2000:].contiguous()), 128))


@pytest.mark.parametrize("dtype", [FP32, FP16, pytest.param(BF16, marks=pytest.mark.gpu)])
def test_kernel_has_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    """Of whole tiles, of shorter last ones and groups, and of a row within a group."""
    for shape in ((24, 512), (9, 576), (5, 96), (3, 40)):
        values = gaussian(*shape) if KERNEL_DEVICE.type == "cuda" else exactly_bf16(*shape)
        stored = copy_of(values.to(KERNEL_DEVICE))
        out = torch.full((shape[0] + 1, shape[1]), 7.0, dtype=dtype, device=KERNEL_DEVICE)
        decode_scaled_triton(stored, COPY, 0, out[:-1])
        assert_same_bits(out[:-1].cpu(), decoded(stored, shape[1], dtype).cpu())
        assert bool((out[-1] == 7.0).all())


def exactly_bf16(rows: int, columns: int) -> torch.Tensor:
    """Values on the grid of their copies, which need no rounding: the interpreter cuts off where a GPU rounds."""
    torch.manual_seed(columns)
    numbers = torch.randint(16, (rows, columns))
    numbers[:, ::64], numbers[:, 1::64] = 0, 15
    scales = torch.ldexp(torch.ones(rows, columns // 64 + 1), torch.randint(-9, -3, (rows, columns // 64 + 1)))
    scales = scales[:, torch.arange(columns) // 64]
    return (numbers - MIDDLE) * scales + 2.5 * scales


@pytest.mark.few(1)
@pytest.mark.parametrize("tile", TILES)
def test_products(tile: object) -> None:
    for columns in (512, 576, 40):
        values = exactly_bf16(72, columns).to(KERNEL_DEVICE)
        check_close(multiplied(values, FP32), 9 if tile is TILES[1] else 3, tile=tile)


def multiplied(values: torch.Tensor, dtype: torch.dtype) -> Stored:
    """The copy of a matrix, and what it is decoded to."""

    def multiply(stored: ScaledRows, x: torch.Tensor, out: torch.Tensor, **fused: object) -> None:
        scaled_linear_triton(x, stored, COPY, out, **fused)

    stored = copy_of(values)
    return Stored(partial(multiply, stored), decoded(stored, values.shape[1], dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_products_have_the_bits_of_the_decoded_matrix(dtype: torch.dtype) -> None:
    for height, columns in ((72, 4096), (8200, 576), (8200, 1024)):
        one = multiplied(gaussian(height, columns).to(KERNEL_DEVICE), dtype)
        for num_rows, tile in ((1, TILES[0]), (8, TILES[1]), (9, None), (16, TILES[0])):
            found, expected = products(one, num_rows, bias=num_rows == 1, add=num_rows == 9, tile=tile)
            assert torch.equal(found, expected), (height, columns, num_rows)


@pytest.mark.gpu
def test_copies_are_made_again_as_they_were() -> None:
    values = sprinkled(gaussian(4096, 4100), SPECIAL, 3).to(KERNEL_DEVICE)
    first, second = (decoded(copy_of(values), 4100) for _ in range(2))
    assert_same_bits(first, second)


def test_a_kernel_makes_copies_as_near() -> None:
    """Of shorter last groups and units, too; infinities and NaN are zeros."""
    for shape in ((3, 256), (3, 100), (2, 200)):
        values, weights = drawn(torch.distributions.StudentT(4.0), *shape).float(), torch.rand(shape[1]) + 0.1
        values[0, 3], values[1, 70] = float("inf"), float("nan")
        found = list[float]()
        for make, device in ((quantise_reference, torch.device("cpu")), (quantise_triton, KERNEL_DEVICE)):
            stored = torch.zeros(scaled_bytes(COPY, *shape), dtype=torch.uint8, device=device)
            make(values.to(device), scaled_rows(stored, COPY, *shape), weights.to(device))
            copy = decoded(scaled_rows(stored, COPY, *shape), shape[1], FP32).cpu()
            found.append(error(copy, values.nan_to_num(0.0, 0.0, 0.0), weights))
        assert found[0] == pytest.approx(found[1], rel=1e-3)
