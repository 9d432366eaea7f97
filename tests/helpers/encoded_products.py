"""Products of a few rows with a matrix as it is stored, and with the same matrix decoded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from offload_runtime_kernels.encoded_linear import EncodedTile
from offload_runtime_kernels.linear import linear_triton

from tests.helpers.kernel_conditions import KERNEL_DEVICE

# With rows of W as the first operand of the matrix units, and as the second.
TILES = (EncodedTile(32, 2, 3, True), EncodedTile(32, 4, 4, False))


def products(
    multiply: Callable[..., None], decoded: torch.Tensor, num_rows: int, *, bias: bool, add: bool,
    tile: EncodedTile | None = TILES[0],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What `multiply(x, out, bias=..., add=..., tile=...)` makes, as columns of a wider tensor whose others must stay,
    and the product with `decoded` [M, K]: [num_rows, M] each, in its dtype."""
    (height, columns), dtype = decoded.shape, decoded.dtype
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, columns, generator=generator) * torch.randn(num_rows, columns, generator=generator).exp()
    x = x.to(KERNEL_DEVICE, dtype)
    added = torch.randn(height, generator=generator).to(KERNEL_DEVICE, dtype) if bias else None
    before = torch.randn(num_rows, height, generator=generator).to(KERNEL_DEVICE, dtype)
    wide = torch.full((num_rows, height + 32), float("nan"), dtype=dtype, device=KERNEL_DEVICE)
    found, expected = wide[:, 16 : 16 + height], before.clone()
    if add:
        found.copy_(before)
    multiply(x, found, bias=added, add=add, tile=tile)
    assert bool(wide[:, :16].isnan().all()) and bool(wide[:, 16 + height :].isnan().all())
    linear_triton(x, decoded, expected, bias=added, add=add)
    return found.contiguous(), expected


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """In the interpreter, whose sums take another order with every shape of a tile: roundings apart."""
    half = found.dtype == torch.float16  # two roundings to 11 bits, of the product and of the sum
    tolerance = 2.0**-10 if half else 1e-4
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=float(expected.abs().max()) * tolerance)
