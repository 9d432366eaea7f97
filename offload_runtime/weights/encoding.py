"""How a tensor is stored, and the products of a matrix with rows: the seam behind which weights may be anything.

A block is laid out by what each of its tensors' encodings says of its bytes, filled through them, moved as bytes by
everything that moves it, and read by the decoder through a `Weight` for every tensor. By itself a tensor is stored as
it is computed with. A matrix that is stored otherwise is a stack of parts, each of a `Format`, decoded before a product
or, by a GPU, in it; formats are subclasses in `weights.formats`, and a layout names them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from offload_runtime_kernels.linear import Activation, gated_product, linear

from offload_runtime.weights.staging import Staging

# What elements in a dtype are called in files.
DTYPE_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
KIND_DTYPES = {kind: dtype for dtype, kind in DTYPE_KINDS.items()}
ALIGNMENT_BYTES = 256  # what cudaMalloc guarantees; keeps every view fit for vector loads and TMA


class Fill(Protocol):
    """What reads, or makes, one tensor of a checkpoint. It opens its file and closes it again, so that nothing stays
    mapped, and several may run in parallel threads."""

    def __call__(self, out: torch.Tensor, staging: Staging | None = None, /) -> None:
        """Write all of a tensor; done when it returns.

        Args:
            out: Contiguous, of the tensor's shape, on any device; its dtype is what is converted to. Where rows are
                kept as they are stored, uint8 [rows, bytes of a stored row].
            staging: What it may pass through; None: memory of its own.
        """


class NotCodable(Exception):
    """The values of a matrix are none that its encoding has room for."""


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
        """Return the decoded tensor, without the bias, in the dtype that the model computes in."""
        return self.stored

    def fill(self, row_start: int, row_end: int, fill: Fill, staging: Staging) -> int:
        """Let `fill` write the rows `[row_start, row_end)`; what is stored otherwise than in a file is made of it on
        the device of `staging`. Returns their bytes."""
        rows = self.stored[row_start:row_end]
        fill(rows, staging)
        return rows.nbytes

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Return the decoded rows of a matrix [M, K]: [N, K] for integers [N] on its device."""
        return self.stored.index_select(0, index)

    def linear(
        self, x: torch.Tensor, *, residual: torch.Tensor | None = None, gated: Activation | None = None
    ) -> torch.Tensor:
        """x W^T + b, added to a residual or gated: `offload_runtime_kernels.linear.linear`, which describes the
        arguments. A row's bits depend on nothing but the row."""
        return linear(x, self.dense, bias=self.bias, residual=residual, gated=gated)


@dataclass(frozen=True)
class Format:
    """A way to store rows of a matrix: this one as elements of the dtype that is called `kind`, each row by itself.

    `stored` is always uint8 [nbytes]. Another way is a subclass: of one with rows of its own that says `row_bytes`,
    `decode_rows` and perhaps `fill_rows`, of any other one that says `nbytes`, `decode` and `fill`; and `most_rows` and
    `multiply` if a GPU has products of what is stored.
    """

    kind: str
    has_rows: ClassVar[bool] = True  # each by itself, so that parts of one format are one part

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a stored row."""
        return columns * KIND_DTYPES[self.kind].itemsize

    def nbytes(self, rows: int, columns: int) -> int:
        """Return the bytes of so many rows."""
        return rows * self.row_bytes(columns)

    def decode_rows(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Decode uint8 [R, row_bytes] into `out` [R, columns], both contiguous."""
        out.copy_(stored.view(KIND_DTYPES[self.kind]))

    def decode(self, stored: torch.Tensor, rows: int, start: int, out: torch.Tensor) -> None:
        """Decode some of all `rows`, from `start` on, into `out` [N, columns], contiguous, of the dtype that the model
        computes in."""
        self.decode_rows(stored.view(rows, -1)[start : start + len(out)], out)

    def file_bytes(self, columns: int) -> int:
        """Return the bytes of a row in a GGUF file."""
        return self.row_bytes(columns)

    def store_rows(self, blocks: torch.Tensor, columns: int, out: torch.Tensor) -> None:
        """Bring rows as a GGUF file has them, uint8 [R, file_bytes], to uint8 [R, row_bytes]."""
        out.copy_(blocks)

    def decode_file_rows(self, blocks: torch.Tensor, out: torch.Tensor) -> None:
        """Decode rows as a GGUF file has them into `out` [R, columns], rounding once to its dtype."""
        self.decode_rows(blocks, out)

    def has_finite_scales(self, blocks: torch.Tensor) -> bool:
        """Return whether no block's own scale or minimum, of rows as a file has them, is infinite or NaN."""
        return True

    def most_rows(self, columns: int) -> int:
        """Return the most rows, of 16 bits an element, that a GPU multiplies with what is stored."""
        return 0

    def multiply(
        self, stored: torch.Tensor, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, add: bool
    ) -> None:
        """Write, or add, x W^T + b into `out` [N, rows], columns of a larger one, with the bits of what is decoded."""
        raise NotImplementedError

    def fill_rows(self, rows: torch.Tensor, columns: int, fill: Fill, staging: Staging) -> None:
        """Let `fill` write uint8 [R, row_bytes]; errors as of `fill`."""
        fill(rows.view(KIND_DTYPES[self.kind]) if self.kind in KIND_DTYPES else rows, staging)

    def fill(self, stored: torch.Tensor, columns: int, start: int, end: int, fill: Fill, staging: Staging) -> int:
        """Let `fill` write the rows `[start, end)`; returns their bytes."""
        rows = stored.view(-1, self.row_bytes(columns))[start:end]
        self.fill_rows(rows, columns, fill, staging)
        return rows.nbytes


class Part(NamedTuple):
    """Rows `[start, end)` of a matrix, stored in one way: uint8."""

    start: int
    end: int
    stored: torch.Tensor
    format: Format


@dataclass(frozen=True, eq=False, kw_only=True)
class StackedWeight(Weight):
    """A matrix [M, K] whose parts are decoded one below the other, into `scratch` where there is one (uint8, on the
    device of what is stored), so that what was decoded is gone with the next matrix.

    A matrix that is larger than the scratch is multiplied in slices of its rows, whose products are those of the whole
    by the rule of `linear`; on a CPU they may not be. So are those of parts that a GPU multiplies as they are stored.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]
    scratch: torch.Tensor | None

    @property
    def dense(self) -> torch.Tensor:
        return self._decoded(0, self.shape[0])

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        (part,) = self.parts
        out = torch.empty(len(index), self.shape[1], dtype=self.dtype, device=self.stored.device)
        stored = part.stored.view(-1, part.format.row_bytes(self.shape[1]))
        part.format.decode_rows(stored.index_select(0, index), out)
        return out

    def linear(
        self, x: torch.Tensor, *, residual: torch.Tensor | None = None, gated: Activation | None = None
    ) -> torch.Tensor:
        (height, columns), most = self.shape, min(part.format.most_rows(self.shape[1]) for part in self.parts)
        if x.is_cuda and x.dtype.itemsize == 2 and len(x) <= most:
            out = x.new_empty(len(x), height) if residual is None else residual
            for start, end, stored, how in self.parts:
                bias = None if self.bias is None else self.bias[start:end]
                how.multiply(stored, x, out[:, start:end], bias, add=residual is not None)
            return gated_product(out, gated) if gated else out
        step = height if self.scratch is None else self.scratch.nbytes // (columns * self.dtype.itemsize)
        if step >= height:
            return super().linear(x, residual=residual, gated=gated)
        assert residual is None and not gated and self.bias is None, "only a head may exceed the scratch"
        out = x.new_empty(len(x), height)
        for start in range(0, height, step):
            end = min(start + step, height)
            out[:, start:end] = linear(x, self._decoded(start, end))
        return out

    def fill(self, row_start: int, row_end: int, fill: Fill, staging: Staging) -> int:
        part = next(part for part in self.parts if part.start <= row_start and row_end <= part.end)
        rows = row_start - part.start, row_end - part.start
        return part.format.fill(part.stored, self.shape[1], *rows, fill, staging)

    def _decoded(self, start: int, end: int) -> torch.Tensor:
        """Return the rows `[start, end)`: [end - start, K]."""
        shape, nbytes = (end - start, self.shape[1]), (end - start) * self.shape[1] * self.dtype.itemsize
        if self.scratch is None:
            out = torch.empty(shape, dtype=self.dtype, device=self.stored.device)
        else:
            out = self.scratch[:nbytes].view(self.dtype).view(shape)
        for part in self.parts:
            first, last, height = max(start, part.start), min(end, part.end), part.end - part.start
            if first < last:
                part.format.decode(part.stored, height, first - part.start, out[first - start : last - start])
        return out


def aligned(nbytes: int) -> int:
    """Return bytes as far as what may lie behind so many."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class Encoding:
    """How a tensor is stored: without `parts` as its elements one after the other, in the `dtype` that the model
    computes in; a matrix with them in so many rows of each format, from above, that are decoded to the dtype."""

    dtype: torch.dtype
    parts: tuple[tuple[int, Format], ...] = ()

    @classmethod
    def of(cls, dtype: torch.dtype, parts: Iterable[tuple[int, Format]]) -> Encoding:
        """Return that of parts of which those of one format that follow one another are one, and which are none where
        all is in `dtype`."""
        merged: list[tuple[int, Format]] = []
        for rows, how in parts:
            alike = bool(merged) and how.has_rows and merged[-1][1] == how
            merged.append(((merged.pop()[0] if alike else 0) + rows, how))
        return cls(dtype) if [how.kind for _, how in merged] == [DTYPE_KINDS[dtype]] else cls(dtype, tuple(merged))

    def weights_in_registers(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Return the weights that a GPU's product of few rows decodes in registers, by the names of how they are
        stored; none of a matrix that is decoded into memory first, or not encoded."""
        found = Counter[str]()
        if self.dtype.itemsize == 2 and all(how.most_rows(shape[1]) for _, how in self.parts):
            for rows, how in self.parts:
                found[how.kind] += rows * shape[1]
        return found

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a stored tensor."""
        return sum(self._part_bytes(shape)) if self.parts else math.prod(shape) * self.dtype.itemsize

    def bytes_by_kind(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Return the bytes of a stored tensor by the names of how they are stored."""
        if not self.parts:
            return {DTYPE_KINDS[self.dtype]: self.nbytes(shape)}
        found = Counter[str]()
        for (_, how), nbytes in zip(self.parts, self._part_bytes(shape), strict=True):
            found[how.kind] += nbytes
        return found

    def decoded_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a scratch that a tensor is decoded into before a product."""
        return math.prod(shape) * self.dtype.itemsize if self.parts else 0

    def weight(
        self, stored: torch.Tensor, shape: tuple[int, ...], bias: torch.Tensor | None, scratch: torch.Tensor | None
    ) -> Weight:
        """Return a tensor seen through its bytes, without copying.

        Args:
            stored: uint8 [nbytes(shape)], host or device, aligned to 256 bytes.
            shape: Of the decoded tensor.
            bias: [M], of a matrix that has one.
            scratch: uint8, on the same device, for what is decoded; the products that share it run on one stream. None:
                each takes memory of its own.
        """
        if not self.parts:
            return Weight(stored.view(self.dtype).view(shape), bias)
        found, start = list[Part](), 0
        for (rows, how), room in zip(self.parts, stored.split(self._part_bytes(shape)), strict=True):
            found.append(Part(start, start + rows, room[: how.nbytes(rows, shape[1])], how))
            start += rows
        assert start == shape[0]
        return StackedWeight(stored, bias, shape=shape, dtype=self.dtype, parts=tuple(found), scratch=scratch)

    def _part_bytes(self, shape: tuple[int, ...]) -> list[int]:
        """Return those of each part, as far as the next one's beginning."""
        return [aligned(how.nbytes(rows, shape[1])) for rows, how in self.parts]
