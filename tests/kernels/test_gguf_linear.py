"""`gguf_linear`: the product of rows with GGUF blocks against the product of the decoded matrix."""

from __future__ import annotations

import pytest
import torch
from offload_runtime_kernels.gguf_blocks import FORMATS, decode_blocks_reference
from offload_runtime_kernels.gguf_linear import gguf_linear_triton
from offload_runtime_kernels.linear import linear_triton

from tests.helpers.kernel_conditions import KERNEL_DEVICE
from tests.kernels.test_gguf_blocks import blocks_of, in_rows

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Below and above what is cut otherwise: so many rows of W that each program has rows of its own.
SHORT, TALL = 72, 8200


def matrix(kind: str, height: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks of ordinary scales: stored rows, and the decoded ones."""
    form = FORMATS[kind]
    blocks_a_row = columns // form.weights
    blocks = blocks_of(kind, height * blocks_a_row, (0x1A2B, 0x93C5, 0x9001, 0x1800))[256:]
    stored = in_rows(kind, blocks, blocks_a_row)
    out = torch.empty(height, columns, dtype=dtype)
    decode_blocks_reference(stored, form, out)
    return stored.to(KERNEL_DEVICE), out.to(KERNEL_DEVICE)


def products(
    kind: str, num_rows: int, height: int, columns: int, dtype: torch.dtype, *, bias: bool, add: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """With blocks, as columns of a wider tensor whose others must stay, and with the decoded matrix."""
    stored, decoded = matrix(kind, height, columns, dtype)
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, columns, generator=generator) * torch.randn(num_rows, columns, generator=generator).exp()
    x = x.to(KERNEL_DEVICE, dtype)
    added = torch.randn(height, generator=generator).to(KERNEL_DEVICE, dtype) if bias else None
    before = torch.randn(num_rows, height, generator=generator).to(KERNEL_DEVICE, dtype)
    wide = torch.full((num_rows, height + 32), float("nan"), dtype=dtype, device=KERNEL_DEVICE)
    found, expected = wide[:, 16 : 16 + height], before.clone()
    if add:
        found.copy_(before)
    gguf_linear_triton(x, stored, FORMATS[kind], found, bias=added, add=add)
    assert bool(wide[:, :16].isnan().all()) and bool(wide[:, 16 + height :].isnan().all())
    linear_triton(x, decoded, expected, bias=added, add=add)
    return found.contiguous(), expected


@pytest.mark.parametrize("kind", FORMATS)
def test_products_are_those_of_the_decoded_matrix(kind: str) -> None:
    """In the interpreter, whose sums take another order with every shape of a tile."""
    columns = 768 if FORMATS[kind].weights == 256 else 544
    found, expected = products(kind, 3, SHORT, columns, FP32, bias=True, add=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0", "Q6_K"])
def test_products_with_tall_matrices_are_those_of_the_decoded_matrix(kind: str) -> None:
    found, expected = products(kind, 9, TALL, 256 if kind != "Q5_0" else 160, FP32, bias=False, add=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("kind", FORMATS)
def test_products_have_the_bits_of_the_decoded_matrix(kind: str, dtype: torch.dtype) -> None:
    """Of every way to cut them; a K that is no multiple of a tile, and one of an odd number of blocks."""
    for height in (SHORT, TALL):
        for num_rows in (1, 9, 33) if dtype == BF16 else (5,):
            for columns in (1024, 768 if FORMATS[kind].weights == 256 else 544):
                found, expected = products(
                    kind, num_rows, height, columns, dtype, bias=num_rows == 1, add=num_rows == 9
                )
                assert torch.equal(found, expected), (height, num_rows, columns)
