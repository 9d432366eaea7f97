"""`scaled_linear`: the product of rows with small numbers that have scales against that of the decoded matrix."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from offload_runtime_kernels.encoded_linear import MOST_ROWS, EncodedTile
from offload_runtime_kernels.scaled_linear import scaled_linear_triton
from offload_runtime_kernels.scaled_rows import ScaledFormat, ScaledRows, columns_of_scale, decode_scaled_reference

from tests.helpers import encoded_products
from tests.helpers.encoded_products import TILES, assert_close
from tests.helpers.kernel_conditions import KERNEL_DEVICE
from tests.kernels.test_scaled_rows import on_device, stored_rows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HEIGHT = 72  # no whole number of programs' rows
# Every number, with a scale for all, rows, blocks and groups, and with each kind of zeros; those of 4 bits, which are
# decoded otherwise, with every group. 1024 stands for all columns.
FORMATS = {
    "FP8 of a tensor": ScaledFormat("FP8", HEIGHT, 1024, FP16),
    "FP8 of rows": ScaledFormat("FP8", 1, 1024, BF16),
    "FP8 of blocks": ScaledFormat("FP8", 32, 128, FP32),
    "int8 of rows": ScaledFormat("int8", 1, 1024, FP16),
    "int8 with zeros": ScaledFormat("int8", 1, 1024, FP32, zeros=True),
    "int8 of long groups": ScaledFormat("int8", 1, 512, BF16, zeros=True),
    "uint8 of groups": ScaledFormat("uint8", 1, 32, FP16, 128),
    "uint8 with zeros": ScaledFormat("uint8", 1, 64, FP16, 1, zeros=True),
    "uint4 of rows": ScaledFormat("uint4", 1, 1024, FP16, 8),
    "uint4 of rows with zeros": ScaledFormat("uint4", 1, 1024, BF16, zeros=True),
    "uint4 of groups": ScaledFormat("uint4", 1, 128, BF16, 8),
    "uint4 of groups with zeros": ScaledFormat("uint4", 1, 128, FP16, 1, zeros=True),
    "uint4 of small groups": ScaledFormat("uint4", 1, 32, FP16, 1, zeros=True),
    "uint4 of middling groups": ScaledFormat("uint4", 1, 64, FP32, zeros=True),
    "uint4 of long groups": ScaledFormat("uint4", 1, 256, FP16, 8),
}
# The interpreter has no arithmetic in bf16.
INTERPRETED = [name for name, form in FORMATS.items() if form.scale != BF16]
# What is added has code of its own, which no format changes.
FUSED = ("uint4 of groups", "FP8 of blocks")


def matrix(form: ScaledFormat, columns: int, dtype: torch.dtype) -> tuple[ScaledRows, torch.Tensor]:
    """Random numbers with ordinary scales, and some that are subnormal in fp16: as stored, and decoded."""
    (down, across), generator = form.scales(HEIGHT, columns), torch.Generator().manual_seed(columns)
    numbers = torch.randint(256, (HEIGHT, form.file_bytes(columns)), generator=generator, dtype=torch.uint8)
    if form.number == "FP8":
        numbers[numbers & 0x7F == 0x7F] = 0x7E
    scales = torch.randn(down, across, generator=generator) * 2.0 ** torch.randint(
        -16, -4, (down, 1), generator=generator
    )
    zeros = torch.randint(256, (down, form.file_bytes(across)), generator=generator, dtype=torch.uint8)
    stored = stored_rows(form, numbers, scales.to(form.scale), zeros, torch.empty(0, dtype=torch.int32))
    out = torch.empty(HEIGHT, columns, dtype=dtype)
    decode_scaled_reference(stored, form, 0, out)
    return on_device(stored), out.to(KERNEL_DEVICE)


def products(
    form: ScaledFormat, stored: ScaledRows, decoded: torch.Tensor, num_rows: int, *, bias: bool, add: bool,
    tile: EncodedTile = TILES[0],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """With what is stored, and with the decoded matrix."""
    return encoded_products.products(
        lambda x, out, **fused: scaled_linear_triton(x, stored, form, out, **fused), decoded, num_rows,
        bias=bias, add=add, tile=tile,
    )  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("name", INTERPRETED)
def test_products_are_those_of_the_decoded_matrix(name: str, dtype: torch.dtype) -> None:
    """A K that ends within a tile and within a unit."""
    assert_close(*products(FORMATS[name], *matrix(FORMATS[name], 544, dtype), 3, bias=True, add=True))


@pytest.mark.parametrize("name", ["uint4 of small groups", "FP8 of blocks"])
def test_rows_of_w_may_be_the_second_operand(name: str) -> None:
    form = FORMATS[name]
    assert_close(*products(form, *matrix(form, 544, FP32), 9, bias=True, add=True, tile=TILES[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", FORMATS)
def test_products_have_the_bits_of_the_decoded_matrix(name: str, dtype: torch.dtype) -> None:
    """Of whole tiles, and of a K that ends within one, and within a unit."""
    for columns, num_rows in product((1024, 768, 544), (1, 5, 8, 9, MOST_ROWS)):
        stored, decoded = matrix(FORMATS[name], columns, dtype)
        bias, add = name in FUSED and num_rows in (1, 8), name in FUSED and num_rows in (8, 9)
        for tile in TILES if name in FUSED or num_rows == 5 else TILES[:1]:
            found, expected = products(FORMATS[name], stored, decoded, num_rows, bias=bias, add=add, tile=tile)
            assert torch.equal(found, expected), (num_rows, columns, tile)


@pytest.mark.parametrize("zeros", [False, True])
def test_weights_behind_the_last_column_are_no_infinities(zeros: bool) -> None:
    """Numbers below the least real one would be, in fp16 with a large scale."""
    form = ScaledFormat("uint4", 1, 1024, FP16, 0 if zeros else 8, zeros=zeros)
    numbers, stored_zeros = torch.full((1, 272), 0xFF, dtype=torch.uint8), torch.full((1, 1), 8, dtype=torch.uint8)
    scales = torch.full((1, 1), 9000.0, dtype=FP16)
    stored = on_device(stored_rows(form, numbers, scales, stored_zeros, torch.empty(0, dtype=torch.int32)))
    out, x = torch.empty(1, 1, dtype=FP16, device=KERNEL_DEVICE), torch.full((1, 544), 2.0**-12, dtype=FP16)
    scaled_linear_triton(x.to(KERNEL_DEVICE), stored, form, out)
    assert float(out) == pytest.approx(544 * 63000 * 2.0**-12, rel=1e-3)


def test_what_is_multiplied_as_it_is_stored() -> None:
    """Not columns in an order of their own, nor groups that tiles do not divide."""
    form = ScaledFormat("uint4", 1, 128, FP16)
    expected = {32: 32, 64: 64, 128: 128, 256: 256, 768: 256, 4096: 0, 16: None, 96: None, 384: None}
    for columns, group in expected.items():
        assert columns_of_scale(form._replace(columns=columns), 4096) == group
    assert columns_of_scale(form._replace(ordered=True), 4096) is None
