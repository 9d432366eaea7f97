"""How a tensor is stored, and the products of a matrix with rows: the seam behind which weights may be anything.

A block is laid out by what each of its tensors' encodings says of its bytes, filled through them, moved as bytes by
everything that moves it, and read by the decoder through a `Weight` for every tensor. Today all are stored as they are
computed with; another encoding is another pair of classes here, subclasses of `Encoding` and of `Weight`, and a layout
that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from offload_runtime_kernels.few_row_linear import MOST_ROWS, RowNorm, few_row_linear
from offload_runtime_kernels.rms_norm import add_rms_norm
from offload_runtime_kernels.swiglu import swiglu

# Fills a contiguous CPU tensor of the checkpoint tensor's shape, converting to that tensor's dtype. It opens its file,
# reads and closes it again, so nothing stays mapped, and fills may run in parallel threads.
Fill = Callable[[torch.Tensor], None]


@dataclass(frozen=True, eq=False)
class Weight:
    """One tensor of a block: a matrix [M, K] with its bias, or a vector. It looks at the block's bytes, wherever they
    are, and holds nothing of its own that would age when other bytes arrive there.

    This one is stored as its elements: `stored` is [M, K] or [M], `bias` [M] or None. One that is stored otherwise is a
    subclass that says how it is decoded (`dense`) and filled; its products are those of the decoded tensor, unless it
    has faster ones.
    """

    stored: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def dense(self) -> torch.Tensor:
        """The decoded tensor, without the bias, in the dtype that the model computes in."""
        return self.stored

    def fill(self, row_start: int, row_end: int, fill: Fill) -> None:
        """Let `fill` write the rows `[row_start, row_end)`, which stay as they are stored; in host memory only."""
        fill(self.stored[row_start:row_end])

    def linear(self, x: torch.Tensor, tile_rows: int) -> torch.Tensor:
        """x W^T + b in products of exactly `tile_rows` rows, so that a row's bits do not depend on its company.

        A library chooses its kernel, and with it the order of its sums, by the shape of the product. At one fixed
        height the rows of cuBLAS bf16 products are bitwise independent of their place and neighbours (measured on an
        H200 for heights 1 to 1024). So every product has exactly `tile_rows` rows; longer inputs are cut, shorter ones
        are padded beforehand.

        Args:
            x: [N, K], contiguous, N a multiple of `tile_rows`.
            tile_rows: Rows of every product.

        Returns:
            [N, M].
        """
        assert x.shape[0] % tile_rows == 0
        transposed = self.dense.t()
        out = x.new_empty(x.shape[0], transposed.shape[1])
        for x_tile, out_tile in zip(x.split(tile_rows), out.split(tile_rows), strict=True):
            if self.bias is None:
                torch.mm(x_tile, transposed, out=out_tile)
            else:
                torch.addmm(self.bias, x_tile, transposed, out=out_tile)
        return out

    def fused_linear(
        self, x: torch.Tensor, *, norm: RowNorm | None = None, residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """The same of few rows and without promised bits, in as few launches as there is a way to: `few_row_linear`,
        which also describes the arguments, or the same in ordinary kernels where there are too many rows for it."""
        if x.shape[0] <= MOST_ROWS:
            return few_row_linear(x, self.dense, bias=self.bias, norm=norm, residual=residual, gated=gated)
        if norm is not None:
            x = add_rms_norm(x, None, norm.weight, norm.eps)
        y = self.linear(x, x.shape[0])
        if gated:
            y = swiglu(y)
        return y if residual is None else residual.add_(y)


@dataclass(frozen=True)
class Encoding:
    """A way to store tensors: this one their elements one after the other, in the dtype that the model computes in.

    Another way is a subclass that says how many bytes it takes and which `Weight` sees a tensor through them.
    """

    dtype: torch.dtype

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a stored tensor."""
        return math.prod(shape) * self.dtype.itemsize

    def weight(self, stored: torch.Tensor, shape: tuple[int, ...], bias: torch.Tensor | None) -> Weight:
        """A tensor seen through its bytes, without copying.

        Args:
            stored: uint8 [nbytes(shape)], host or device, aligned to 256 bytes.
            shape: Of the decoded tensor.
            bias: [M], of a matrix that has one.
        """
        return Weight(stored.view(self.dtype).view(shape), bias)
