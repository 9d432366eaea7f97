"""How a tensor is stored, and the products of a matrix with rows: the seam behind which weights may be anything.

A block is laid out by what each of its tensors' encodings says of its bytes, filled through them, moved as bytes by
everything that moves it, and read by the decoder through a `Weight` for every tensor. By itself a tensor is stored as
it is computed with. A matrix that is stored otherwise and decoded before a product is a `StackedWeight` of parts; where
rows are stored each by itself its encoding is a subclass of `EncodedRows`. Each is a file of `weights.encodings`, and a
layout names them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from offload_runtime_kernels.gated import Activation
from offload_runtime_kernels.gated import gated as gated_product
from offload_runtime_kernels.linear import linear

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
        """The decoded tensor, without the bias, in the dtype that the model computes in."""
        return self.stored

    def fill(self, row_start: int, row_end: int, fill: Fill, staging: Staging) -> int:
        """Let `fill` write the rows `[row_start, row_end)`; what is stored otherwise than in a file is made of it on
        the device of `staging`. Returns their bytes."""
        rows = self.stored[row_start:row_end]
        fill(rows, staging)
        return rows.nbytes

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Decoded rows of a matrix [M, K]: [N, K] for integers [N] on its device."""
        return self.stored.index_select(0, index)

    def linear(
        self, x: torch.Tensor, *, residual: torch.Tensor | None = None, gated: Activation | None = None
    ) -> torch.Tensor:
        """x W^T + b, added to a residual or gated: `offload_runtime_kernels.linear.linear`, which describes the
        arguments. A row's bits depend on nothing but the row."""
        return linear(x, self.dense, bias=self.bias, residual=residual, gated=gated)


@dataclass(frozen=True)
class StoredPart:
    """Rows `[start, end)` of a matrix, stored in one way. `stored` is uint8, as its way has it."""

    start: int
    end: int
    stored: torch.Tensor

    def decode(self, start: int, end: int, out: torch.Tensor) -> None:
        """Decode the part's own rows `[start, end)` into `out` [end - start, K], contiguous, of the dtype that the
        model computes in."""
        raise NotImplementedError

    def take(self, index: torch.Tensor, out: torch.Tensor) -> None:
        """Decode the part's own rows [N] into `out` [N, K]; of those only that an embedding may be stored as."""
        raise NotImplementedError

    @property
    def most_rows(self) -> int:
        """The most rows, of 16 bits an element, that a GPU multiplies with what is stored."""
        return 0

    def multiply(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, add: bool) -> None:
        """Write, or add, x W^T + b of the part into `out` [N, end - start], columns of a larger one, with the bits of
        the decoded part."""
        raise NotImplementedError

    def fill(self, start: int, end: int, fill: Fill, staging: Staging) -> int:
        """As of a weight, of the part's own rows `[start, end)`."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, kw_only=True)
class StackedWeight(Weight):
    """A matrix [M, K] whose parts are decoded one below the other, into `scratch` where there is one (uint8, on the
    device of what is stored), so that what was decoded is gone with the next matrix.

    A matrix that is larger than the scratch is multiplied in slices of its rows, whose products are those of the whole
    by the rule of `linear`; on a CPU they may not be. So are those of parts that a GPU multiplies as they are stored.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[StoredPart, ...]
    scratch: torch.Tensor | None

    @property
    def dense(self) -> torch.Tensor:
        return self._decoded(0, self.shape[0])

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        (part,) = self.parts
        out = torch.empty(len(index), self.shape[1], dtype=self.dtype, device=self.stored.device)
        part.take(index, out)
        return out

    def linear(
        self, x: torch.Tensor, *, residual: torch.Tensor | None = None, gated: Activation | None = None
    ) -> torch.Tensor:
        height, row_bytes = self.shape[0], self.shape[1] * self.dtype.itemsize
        if x.is_cuda and x.dtype.itemsize == 2 and len(x) <= min(part.most_rows for part in self.parts):
            out = x.new_empty(len(x), height) if residual is None else residual
            for part in self.parts:
                bias = None if self.bias is None else self.bias[part.start : part.end]
                part.multiply(x, out[:, part.start : part.end], bias, add=residual is not None)
            return gated_product(out, gated) if gated else out
        step = height if self.scratch is None else self.scratch.nbytes // row_bytes
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
        return part.fill(row_start - part.start, row_end - part.start, fill, staging)

    def _decoded(self, start: int, end: int) -> torch.Tensor:
        """Rows `[start, end)`: [end - start, K]."""
        shape, nbytes = (end - start, self.shape[1]), (end - start) * self.shape[1] * self.dtype.itemsize
        if self.scratch is None:
            out = torch.empty(shape, dtype=self.dtype, device=self.stored.device)
        else:
            out = self.scratch[:nbytes].view(self.dtype).view(shape)
        for part in self.parts:
            first, last = max(start, part.start), min(end, part.end)
            if first < last:
                part.decode(first - part.start, last - part.start, out[first - start : last - start])
        return out


def aligned(nbytes: int) -> int:
    """Bytes as far as what may lie behind so many."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


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

    def weights_in_registers(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Weights that a GPU's product of few rows decodes in registers, by the names of how they are stored; none of a
        matrix that is decoded into memory first, or not encoded."""
        return {}

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


@dataclass(frozen=True)
class StackedEncoding(Encoding, ABC):
    """Parts that are decoded before a product, from above: so many rows, and how they are stored. `dtype` is what they
    are decoded to."""

    parts: tuple[tuple[int, Any], ...]

    @abstractmethod
    def part_bytes(self, rows: int, how: Any, columns: int) -> int:
        """Bytes of a part."""

    @abstractmethod
    def part_kind(self, how: Any) -> str:
        """The name of how a part is stored."""

    @abstractmethod
    def part(self, start: int, rows: int, stored: torch.Tensor, how: Any, columns: int) -> StoredPart:
        """A part from row `start` of the matrix on, seen through uint8 [part_bytes]."""

    @staticmethod
    def most_rows(how: Any, columns: int) -> int:
        """As of a part."""
        return 0

    @property
    def num_decodings(self) -> int:
        return len(self.parts)

    def weights_in_registers(self, shape: tuple[int, ...]) -> dict[str, int]:
        found = Counter[str]()
        if self.dtype.itemsize == 2 and all(self.most_rows(how, shape[1]) for _, how in self.parts):
            for rows, how in self.parts:
                found[self.part_kind(how)] += rows * shape[1]
        return found

    def nbytes(self, shape: tuple[int, ...]) -> int:
        return sum(self._aligned_bytes(shape))

    def bytes_by_kind(self, shape: tuple[int, ...]) -> dict[str, int]:
        found = Counter[str]()
        for (_, how), nbytes in zip(self.parts, self._aligned_bytes(shape), strict=True):
            found[self.part_kind(how)] += nbytes
        return found

    def decoded_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * self.dtype.itemsize

    def weight(
        self, stored: torch.Tensor, shape: tuple[int, ...], bias: torch.Tensor | None, scratch: torch.Tensor | None
    ) -> StackedWeight:
        found, start, columns = list[StoredPart](), 0, shape[1]
        for (rows, how), room in zip(self.parts, stored.split(self._aligned_bytes(shape)), strict=True):
            found.append(self.part(start, rows, room[: self.part_bytes(rows, how, columns)], how, columns))
            start += rows
        assert start == shape[0]
        return StackedWeight(stored, bias, shape=shape, dtype=self.dtype, parts=tuple(found), scratch=scratch)

    def _aligned_bytes(self, shape: tuple[int, ...]) -> list[int]:
        """Of each part, as far as the next one's beginning."""
        return [aligned(self.part_bytes(rows, how, shape[1])) for rows, how in self.parts]


# --- matrices whose rows are stored each by itself


@dataclass(frozen=True)
class _Rows(StoredPart):
    """Rows of one kind: `stored` is [end - start, row_bytes]."""

    kind: str
    columns: int
    encoding: EncodedRows

    def decode(self, start: int, end: int, out: torch.Tensor) -> None:
        self.encoding.decode_rows(self.kind, self.stored[start:end], out)

    def take(self, index: torch.Tensor, out: torch.Tensor) -> None:
        self.encoding.decode_rows(self.kind, self.stored.index_select(0, index), out)

    @property
    def most_rows(self) -> int:
        return self.encoding.most_rows(self.kind, self.columns)

    def multiply(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, add: bool) -> None:
        self.encoding.multiply_rows(self.kind, self.stored, x, out, bias, add=add)

    def fill(self, start: int, end: int, fill: Fill, staging: Staging) -> int:
        rows = self.stored[start:end]
        self.encoding.fill_rows(self.kind, rows, fill, self.columns, staging)
        return rows.nbytes


@dataclass(frozen=True)
class EncodedRows(StackedEncoding):
    """Rows that are decoded before a product, from above: so many, stored as a kind, which is the dtype of a plain part
    or one of the subclass's. `dtype` is what they are decoded to."""

    parts: tuple[tuple[int, str], ...]

    @staticmethod
    @abstractmethod
    def row_bytes(kind: str, columns: int) -> int:
        """Bytes of a stored row."""

    @staticmethod
    @abstractmethod
    def decode_rows(kind: str, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Decode uint8 [R, row_bytes] into `out` [R, columns], both contiguous."""

    @staticmethod
    def multiply_rows(
        kind: str, stored: torch.Tensor, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, add: bool
    ) -> None:
        """Multiply with uint8 [R, row_bytes], as of a part."""
        raise NotImplementedError

    def fill_rows(self, kind: str, rows: torch.Tensor, fill: Fill, columns: int, staging: Staging) -> None:
        """Let `fill` write uint8 [..., row_bytes]; errors as of `fill`."""
        fill(rows.view(KIND_DTYPES[kind]) if kind in KIND_DTYPES else rows, staging)

    @staticmethod
    def merged(parts: Iterable[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
        """The same parts, those of one kind that follow one another as one."""
        found: list[tuple[int, str]] = []
        for rows, kind in parts:
            before = found.pop()[0] if found and found[-1][1] == kind else 0
            found.append((before + rows, kind))
        return tuple(found)

    def part_bytes(self, rows: int, how: str, columns: int) -> int:
        return rows * self.row_bytes(how, columns)

    def part_kind(self, how: str) -> str:
        return how

    def part(self, start: int, rows: int, stored: torch.Tensor, how: str, columns: int) -> StoredPart:
        return _Rows(start, start + rows, stored.view(rows, -1), how, columns, self)
