"""`coded_linear`: the product of rows with 12-bit bf16 against the product of the matrix as it was."""

from __future__ import annotations

import pytest
import torch
from offload_runtime_kernels.coded_bf16 import CodedRow, encode_rows
from offload_runtime_kernels.coded_linear import coded_linear_triton
from offload_runtime_kernels.encoded_linear import MOST_ROWS
from offload_runtime_kernels.linear import linear_triton

from tests.helpers.kernel_conditions import KERNEL_DEVICE
from tests.kernels.test_coded_bf16 import gaussian, sprinkled
from tests.kernels.test_gguf_linear import assert_close

BF16 = torch.bfloat16
# Of a few magnitudes that no window of Gaussian weights has, so that sums stay ordinary.
UNUSUAL = torch.tensor([1e-30, -3e-20, 2.0, -7.0, 0.0, 1e-38], dtype=BF16)


def products(
    values: torch.Tensor, num_rows: int, dtype: torch.dtype, *, bias: bool, add: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """With the coded matrix, as columns of a wider tensor whose others must stay, and with `values` [M, K]."""
    height, columns = values.shape
    row = CodedRow.of(columns)
    assert row is not None
    stored = torch.empty(height, row.nbytes, dtype=torch.uint8)
    assert encode_rows(values, row, stored, stored.device) == 0
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, columns, generator=generator) * torch.randn(num_rows, columns, generator=generator).exp()
    added = torch.randn(height, generator=generator).to(KERNEL_DEVICE, dtype) if bias else None
    before = torch.randn(num_rows, height, generator=generator).to(KERNEL_DEVICE, dtype)
    x, values = x.to(KERNEL_DEVICE, dtype), values.to(KERNEL_DEVICE, dtype)
    wide = torch.full((num_rows, height + 32), float("nan"), dtype=dtype, device=KERNEL_DEVICE)
    found, expected = wide[:, 16 : 16 + height], before.clone()
    if add:
        found.copy_(before)
    coded_linear_triton(x, stored.to(KERNEL_DEVICE), row, found, bias=added, add=add)
    assert bool(wide[:, :16].isnan().all()) and bool(wide[:, 16 + height :].isnan().all())
    linear_triton(x, values, expected, bias=added, add=add)
    return found.contiguous(), expected


def matrix(height: int, columns: int, exceptions: int) -> torch.Tensor:
    return sprinkled(gaussian(height, columns), UNUSUAL, exceptions)


# No exceptions, ones that lie beside their 256 columns, and more.
@pytest.mark.parametrize("exceptions", [0, 2, 9])
def test_products_are_those_of_the_matrix(exceptions: int) -> None:
    """Ks that are no whole number of tiles, and rows of W that are no whole number of programs'."""
    for columns, num_rows in ((576, 3), (256, 9)):
        values = matrix(72, columns, exceptions)
        assert_close(*products(values, num_rows, torch.float32, bias=True, add=True))


@pytest.mark.gpu
@pytest.mark.parametrize("exceptions", [0, 2, 9])
@pytest.mark.parametrize("columns", [576, 1024, 4096])
def test_products_have_the_bits_of_the_matrix(columns: int, exceptions: int) -> None:
    for height in (72, 8200):
        values = matrix(height, columns, exceptions)
        for num_rows in (1, 8, 9, MOST_ROWS):
            found, expected = products(values, num_rows, BF16, bias=num_rows in (1, 9), add=num_rows in (8, 9))
            assert torch.equal(found, expected), (height, num_rows)
