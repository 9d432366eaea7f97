"""How a tensor is stored, and the products of a matrix with rows: the seam behind which weights may be anything.

A block is laid out by what each of its tensors' encodings says of its bytes, filled through them, moved as bytes by
everything that moves it, and read by the decoder through a `Weight` for every tensor. Here all are stored as they are
computed with; another encoding is a pair of subclasses of `Encoding` and `Weight` in a file of `weights.encodings`, and
a layout that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from offload_runtime_kernels.linear import linear

# What elements in a dtype are called in files.
DTYPE_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
ALIGNMENT_BYTES = 256  # what cudaMalloc guarantees; keeps every view fit for vector loads and TMA
# Fills a contiguous CPU tensor of the checkpoint tensor's shape, converting to that tensor's dtype, or where rows are
# stored otherwise uint8 [rows, bytes of a stored row], as they are. It opens its file, reads and closes it again, so
# nothing stays mapped, and fills may run in parallel threads.
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

    def fill(self, row_start: int, row_end: int, fill: Fill) -> int:
        """Let `fill` write the rows `[row_start, row_end)`, which stay as they are stored; in host memory only. Returns
        their bytes."""
        rows = self.stored[row_start:row_end]
        fill(rows)
        return rows.nbytes

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Decoded rows of a matrix [M, K]: [N, K] for integers [N] on its device."""
        return self.stored.index_select(0, index)

    def linear(self, x: torch.Tensor, *, residual: torch.Tensor | None = None, gated: bool = False) -> torch.Tensor:
        """x W^T + b, added to a residual or gated: `offload_runtime_kernels.linear.linear`, which describes the
        arguments. A row's bits depend on nothing but the row."""
        return linear(x, self.dense, bias=self.bias, residual=residual, gated=gated)


@dataclass(frozen=True)
class Encoding:
    """A way to store tensors: this one their elements one after the other, in the dtype that the model computes in.

    Another way is a subclass that says how many bytes it takes and which `Weight` sees a tensor through them.
    """

    dtype: torch.dtype

    @property
    def num_decodings(self) -> int:
        """Kernels that decode a matrix before a product; none where products read what is stored."""
        return 0

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a stored tensor."""
        return math.prod(shape) * self.dtype.itemsize

    def bytes_by_kind(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Bytes of a stored tensor by the names of how they are stored."""
        return {DTYPE_KINDS[self.dtype]: self.nbytes(shape)}

    def decoded_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a scratch that a tensor is decoded into before a product."""
        return 0

    def weight(
        self, stored: torch.Tensor, shape: tuple[int, ...], bias: torch.Tensor | None, scratch: torch.Tensor | None
    ) -> Weight:
        """A tensor seen through its bytes, without copying.

        Args:
            stored: uint8 [nbytes(shape)], host or device, aligned to 256 bytes.
            shape: Of the decoded tensor.
            bias: [M], of a matrix that has one.
            scratch: uint8, on the same device, for what is decoded; the products that share it run on one stream. None:
                each takes memory of its own.
        """
        return Weight(stored.view(self.dtype).view(shape), bias)
