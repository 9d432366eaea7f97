"""Matrix products of a fixed height, so that a row's bits do not depend on how many rows share the pass.

A library chooses its kernel, and with it the order of its sums, by the shape of the product. At one fixed height the
rows of cuBLAS bf16 products are bitwise independent of their place and neighbours (measured on an H200 for heights 1 to
1024). So every product here has exactly `tile_rows` rows; longer inputs are cut, shorter ones are padded beforehand.
"""

from __future__ import annotations

import torch


def padded_rows(num_rows: int, tile_rows: int) -> int:
    """`num_rows` rounded up to whole tiles."""
    return -(-num_rows // tile_rows) * tile_rows


def tiled_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile_rows: int) -> torch.Tensor:
    """x W^T + b, tile by tile.

    Args:
        x: [N, K], contiguous, N a multiple of `tile_rows`.
        weight: [M, K].
        bias: [M] or None.
        tile_rows: Rows of every product.

    Returns:
        [N, M].
    """
    assert x.shape[0] % tile_rows == 0
    out = x.new_empty(x.shape[0], weight.shape[0])
    transposed = weight.t()
    for x_tile, out_tile in zip(x.split(tile_rows), out.split(tile_rows), strict=True):
        if bias is None:
            torch.mm(x_tile, transposed, out=out_tile)
        else:
            torch.addmm(bias, x_tile, transposed, out=out_tile)
    return out
