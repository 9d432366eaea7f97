"""`coded_linear`: the product of rows with 12-bit bf16 against the product of the matrix as it was."""

from __future__ import annotations

import pytest
import torch
from offload_runtime_kernels.coded_bf16 import CodedRow, encode_rows
from offload_runtime_kernels.coded_linear import coded_linear_triton
from offload_runtime_kernels.encoded_linear import MOST_ROWS, EncodedTile

from tests.helpers import encoded_products
from tests.helpers.encoded_products import TILES, assert_close
from tests.helpers.kernel_conditions import KERNEL_DEVICE
from tests.kernels.test_coded_bf16 import gaussian, sprinkled

BF16 = torch.bfloat16
# Of a few magnitudes that no window of Gaussian weights has, so that sums stay ordinary.
UNUSUAL = torch.tensor([1e-30, -3e-20, 2.0, -7.0, 0.0, 1e-38], dtype=BF16)


def products(
    values: torch.Tensor, num_rows: int, dtype: torch.dtype, *, bias: bool, add: bool,
    tile: EncodedTile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """With the coded matrix, and with `values` [M, K]."""
    height, columns = values.shape
    row = CodedRow.of(columns)
    assert row is not None
    stored = torch.empty(height, row.nbytes, dtype=torch.uint8)
    assert encode_rows(values, row, stored, stored.device) == 0
    stored = stored.to(KERNEL_DEVICE)
    return encoded_products.products(
        lambda x, out, **fused: coded_linear_triton(x, stored, row, out, **fused), values.to(KERNEL_DEVICE, dtype),
        num_rows, bias=bias, add=add, tile=tile,
    )  # fmt: skip


def matrix(height: int, columns: int, exceptions: int) -> torch.Tensor:
    return sprinkled(gaussian(height, columns), UNUSUAL, exceptions)


@pytest.mark.few(1)
# None that is listed but by chance, in some rows, and in all programs'.
@pytest.mark.parametrize("exceptions", [0, 2, 9])
def test_products_are_those_of_the_matrix(exceptions: int) -> None:
    """Ks that are no whole number of tiles, and rows of W that are no whole number of programs'."""
    for columns, num_rows, tile in ((576, 3, TILES[0]), (256, 9, TILES[0]), (576, 9, None)):
        values = matrix(72, columns, exceptions)
        assert_close(*products(values, num_rows, torch.float32, bias=True, add=True, tile=tile))


@pytest.mark.gpu
@pytest.mark.parametrize("exceptions", [0, 2, 9])
@pytest.mark.parametrize("columns", [576, 1024, 4096])
def test_products_have_the_bits_of_the_matrix(columns: int, exceptions: int) -> None:
    for height in (72, 8200):
        values = matrix(height, columns, exceptions)
        for num_rows in (1, 8, 9, MOST_ROWS):
            for tile in (*TILES, None):
                fused = {"bias": num_rows in (1, 9), "add": num_rows in (8, 9)}
                found, expected = products(values, num_rows, BF16, **fused, tile=tile)
                assert torch.equal(found, expected), (height, num_rows, tile)
