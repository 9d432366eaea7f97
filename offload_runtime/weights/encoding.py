"""How a tensor is stored, and the products of a matrix with rows: the seam behind which weights may be anything.

A block is laid out by what each of its tensors' encodings says of its bytes, filled through them, moved as bytes by
everything that moves it, and read by the decoder through a `Weight` for every tensor. By itself a tensor is stored as
it is computed with. A matrix that is stored otherwise is a stack of parts, each of a `Format`, decoded before a product
or, by a GPU, in it; a layout names them.

GGUF files have rows of blocks, which are kept in the order that kernels like, and loses nothing; a packed matrix may be
of several, as Q4_K_M has values in Q6_K below queries and keys in Q4_K. Quantised safetensors have small numbers with
scales. bf16 is coded in 12 bits an element without loss when it is loaded: all rows of a coded matrix take the same
bytes, whatever their values are, so that a plan knows them without reading the weights; that a matrix cannot be coded
is found when it is read. A GPU's product of a few rows decodes all of these in registers, one of many into a scratch.

A format may have a base, another tensor that it is decoded with, which lies elsewhere on the device: what is left of
bf16, Q8_0 or FP8 given a copy in few bits has (`weights.copies`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import ClassVar, NamedTuple, Protocol

import torch
from offload_runtime_kernels import coded_bf16
from offload_runtime_kernels.coded_bf16 import CODED, CodedRow
from offload_runtime_kernels.coded_linear import coded_linear_triton
from offload_runtime_kernels.encoded_linear import MOST_ROWS
from offload_runtime_kernels.gather_rows import gather_rows
from offload_runtime_kernels.gguf_blocks import (
    DTYPE_KINDS,
    FORMATS,
    KIND_DTYPES,
    decode_blocks,
    decode_file_blocks,
    pack_rows,
)
from offload_runtime_kernels.gguf_linear import gguf_linear_triton
from offload_runtime_kernels.linear import Activation, gated_product, linear
from offload_runtime_kernels.scaled_linear import scaled_linear_triton
from offload_runtime_kernels.scaled_rows import (
    LARGEST_SCALE,
    WHOLE_ROW,
    ScaledFormat,
    ScaledRow,
    ScaledRows,
    columns_of_scale,
    decode_scaled,
    decode_scaled_reference,
    rows_apart,
)

from offload_runtime.stream.arena import Staging

_SLICE_ROWS = 256  # of gates and ups together: libraries are slower where as many do not divide a matrix
ALIGNMENT_BYTES = 256  # what cudaMalloc guarantees; keeps every view fit for vector loads and TMA


class Fill(Protocol):
    """Reads, or makes, one tensor of a checkpoint. It opens its file and closes it again, so that nothing stays mapped,
    and several may run in parallel threads."""

    def __call__(self, out: torch.Tensor, staging: Staging | None = None, /) -> None:
        """Write all of a tensor; done when it returns.

        Args:
            out: Contiguous, of the tensor's shape, on any device; its dtype is what is converted to. Where rows are
                kept as they are stored, uint8 [rows, bytes of a stored row].
            staging: What it may pass through; None: memory of its own.
        """


class NotCodable(Exception):
    """The values of a matrix are none that its encoding has room for."""


def _rows(stored: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return rows by their numbers, on the device of these."""
    return gather_rows(stored, index) if stored.device != index.device else stored.index_select(0, index)


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

    def slices(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the decoded rows of a matrix [M, K], so many at a time as there is room for, each time with the number
        of the first of them."""
        yield 0, self.dense

    def fill(self, row_start: int, row_end: int, fill: Fill, staging: Staging) -> int:
        """Let `fill` write the rows `[row_start, row_end)`; what is stored otherwise than in a file is made of it on
        the device of `staging`. Returns their bytes."""
        rows = self.stored[row_start:row_end]
        fill(rows, staging)
        return rows.nbytes

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Return the decoded rows of a matrix [M, K]: [N, K] for integers [N] on its device, or on a GPU that reads
        it where it is page-locked."""
        return _rows(self.stored, index)

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

    def of_experts(self, columns: int) -> Format:
        """Return how a matrix that would be stored so is where it is an expert's."""
        return self

    @property
    def expert_encoding(self) -> str | ScaledFormat | None:
        """Return what `StoredMatrices` calls it; None if experts are not multiplied in it."""
        return self.kind if self.kind in KINDS else None

    def decode_rows(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Decode uint8 [R, row_bytes] into `out` [R, columns], both contiguous."""
        out.copy_(stored.view(KIND_DTYPES[self.kind]))

    def decode(self, stored: torch.Tensor, rows: int, start: int, out: torch.Tensor) -> None:
        """Decode some of all `rows`, from `start` on, into `out` [N, columns], contiguous, of the dtype that the model
        computes in."""
        self.decode_rows(stored.view(rows, -1)[start : start + len(out)], out)

    def given(self, base: torch.Tensor, shape: tuple[int, ...], start: int, end: int) -> Format:
        """Return that of the rows `[start, end)` of a matrix whose base has these bytes; itself, if it is decoded
        without one."""
        return self

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
        """Return whether no block's own scale or minimum, of rows as a file has them, is infinite or NaN, or a power
        beyond `LARGEST_SCALE`."""
        return True

    def most_rows(self, columns: int) -> int:
        """Return the most rows, of 16 bits an element, that a GPU multiplies with what is stored."""
        return 0

    def multiply(
        self, parts: Sequence[Part], x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, add: bool
    ) -> int:
        """Write, or add, x W^T + b into those columns of `out` [N, M] that are the first of some parts', with the bits
        of what is decoded; return how many parts one launch has done."""
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
    """Is the rows `[start, end)` of a matrix, stored in one way: uint8."""

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
        return self._decoded((0, self.shape[0]))

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        (part,) = self.parts
        out = torch.empty(len(index), self.shape[1], dtype=self.dtype, device=index.device)
        stored = part.stored.view(-1, part.format.row_bytes(self.shape[1]))
        part.format.decode_rows(_rows(stored, index), out)
        return out

    def linear(
        self, x: torch.Tensor, *, residual: torch.Tensor | None = None, gated: Activation | None = None
    ) -> torch.Tensor:
        height, most = self.shape[0], min(part.format.most_rows(self.shape[1]) for part in self.parts)
        if x.is_cuda and x.dtype.itemsize == 2 and len(x) <= most:
            out = x.new_empty(len(x), height) if residual is None else residual
            left = self.parts
            while left:
                left = left[left[0].format.multiply(left, x, out, self.bias, add=residual is not None) :]
            return gated_product(out, gated) if gated else out
        if self._most_decoded >= height:
            return super().linear(x, residual=residual, gated=gated)
        parts = 2 if gated else 1  # of gates and of ups, as many of each
        width, step = height // parts, self._most_decoded // parts
        out = x.new_empty(len(x), width) if residual is None else residual
        for start in range(0, width, step):
            end = min(start + step, width)
            ranges = [(start + part * width, end + part * width) for part in range(parts)]
            bias = None if self.bias is None else torch.cat([self.bias[first:last] for first, last in ranges])
            found = linear(x, self._decoded(*ranges), bias=bias, gated=gated)
            if residual is None:
                out[:, start:end] = found
            else:
                out[:, start:end] += found
        return out

    def slices(self) -> Iterator[tuple[int, torch.Tensor]]:
        height, step = self.shape[0], self._most_decoded
        for start in range(0, height, step):
            yield start, self._decoded((start, min(start + step, height)))

    @property
    def _most_decoded(self) -> int:
        """The rows that are decoded at a time: all, or as many as there is room for, in whole tiles of products."""
        (height, columns), scratch = self.shape, self.scratch
        rows = height if scratch is None else scratch.nbytes // (columns * self.dtype.itemsize)
        return height if rows >= height else rows - rows % _SLICE_ROWS or rows

    def fill(self, row_start: int, row_end: int, fill: Fill, staging: Staging) -> int:
        part = next(part for part in self.parts if part.start <= row_start and row_end <= part.end)
        rows = row_start - part.start, row_end - part.start
        return part.format.fill(part.stored, self.shape[1], *rows, fill, staging)

    def _decoded(self, *ranges: tuple[int, int]) -> torch.Tensor:
        """Return the rows `[start, end)` of some ranges, one below the other: [R, K]."""
        shape = sum(end - start for start, end in ranges), self.shape[1]
        nbytes, at = math.prod(shape) * self.dtype.itemsize, 0
        if self.scratch is None:
            out = torch.empty(shape, dtype=self.dtype, device=self.stored.device)
        else:
            out = self.scratch[:nbytes].view(self.dtype).view(shape)
        for (start, end), part in product(ranges, self.parts):
            first, last, height = max(start, part.start), min(end, part.end), part.end - part.start
            if first < last:
                part.format.decode(part.stored, height, first - part.start, out[at : at + last - first])
                at += last - first
        return out


def aligned(nbytes: int) -> int:
    """Return bytes as far as what may lie behind so many."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class Encoding:
    """Says how a tensor is stored: without `parts` as its elements one after the other, in the `dtype` that the model
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
            return {DTYPE_KINDS.get(self.dtype, "integers"): self.nbytes(shape)}
        found = Counter[str]()
        for (_, how), nbytes in zip(self.parts, self._part_bytes(shape), strict=True):
            found[how.kind] += nbytes
        return found

    def decoded_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a scratch that a tensor is decoded into before a product."""
        return math.prod(shape) * self.dtype.itemsize if self.parts else 0

    def weight(
        self, stored: torch.Tensor, shape: tuple[int, ...], bias: torch.Tensor | None, scratch: torch.Tensor | None,
        base: torch.Tensor | None = None,
    ) -> Weight:  # fmt: skip
        """Return a tensor seen through its bytes, without copying.

        Args:
            stored: uint8 [nbytes(shape)], host or device, aligned to 256 bytes.
            shape: Of the decoded tensor.
            bias: [M], of a matrix that has one.
            scratch: uint8, on the same device, for what is decoded; the products that share it run on one stream. None:
                each takes memory of its own.
            base: uint8, on the same device: the copy of a matrix of which this is what is left.
        """
        if not self.parts:
            return Weight(stored.view(self.dtype).view(shape), bias)
        found = self.split(stored, shape)
        if base is not None:
            found = [part._replace(format=part.format.given(base, shape, part.start, part.end)) for part in found]
        return StackedWeight(stored, bias, shape=shape, dtype=self.dtype, parts=tuple(found), scratch=scratch)

    def _part_bytes(self, shape: tuple[int, ...]) -> list[int]:
        """Return those of each part, as far as the next one's beginning."""
        return [aligned(how.nbytes(rows, shape[1])) for rows, how in self.parts]

    def formats(self, shape: tuple[int, ...]) -> tuple[tuple[int, Format], ...]:
        """Return the rows of each format, from above; elements of a matrix are in one, too."""
        return self.parts or ((shape[0], Format(DTYPE_KINDS[self.dtype])),)

    def split(self, stored: torch.Tensor, shape: tuple[int, ...]) -> list[Part]:
        """Return the parts of a matrix, without copying."""
        if not self.parts:
            return [Part(0, shape[0], stored, self.formats(shape)[0][1])]
        found, start = list[Part](), 0
        for (rows, how), room in zip(self.parts, stored.split(self._part_bytes(shape)), strict=True):
            found.append(Part(start, start + rows, room[: how.nbytes(rows, shape[1])], how))
            start += rows
        assert start == shape[0]
        return found


# --- formats

# What is read, in the words of the format.
KINDS = (*KIND_DTYPES, *FORMATS)
_EXPONENT = 0x7C  # in the upper byte of an fp16
LARGEST_POWER = 127 + int(math.log2(LARGEST_SCALE))  # in a byte of E8M0


@dataclass(frozen=True)
class GgufBlocks(Format):
    """Has rows as a GGUF file has them."""

    def row_bytes(self, columns: int) -> int:
        return FORMATS[self.kind].row_bytes(columns)

    def file_bytes(self, columns: int) -> int:
        return FORMATS[self.kind].file_bytes(columns)

    def store_rows(self, blocks: torch.Tensor, columns: int, out: torch.Tensor) -> None:
        pack_rows(blocks, FORMATS[self.kind], columns, out)

    def decode_rows(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        decode_blocks(stored, FORMATS[self.kind], out)

    def decode_file_rows(self, blocks: torch.Tensor, out: torch.Tensor) -> None:
        if not blocks.is_cuda:
            decode_file_blocks(blocks, FORMATS[self.kind], out)
            return
        columns = out.shape[1]  # by the kernel, which reads planes
        stored = torch.empty(len(blocks), self.row_bytes(columns), dtype=torch.uint8, device=blocks.device)
        self.store_rows(blocks, columns, stored)
        self.decode_rows(stored, out)

    def has_finite_scales(self, blocks: torch.Tensor) -> bool:
        form = FORMATS[self.kind]
        found = blocks.numpy().reshape(-1, form.nbytes)  # numpy lets other threads read and has none of its own
        if form.e2m1:
            return not bool((found[:, 0] > LARGEST_POWER).any())
        upper_bytes = [found[:, at + 1] for at in form.file_halves]
        return not any(bool((byte & _EXPONENT == _EXPONENT).any()) for byte in upper_bytes)

    def most_rows(self, columns: int) -> int:
        return MOST_ROWS

    def multiply(
        self, parts: Sequence[Part], x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, add: bool
    ) -> int:
        done = 2 if len(parts) > 1 and isinstance(parts[1].format, GgufBlocks) else 1
        rows = slice(parts[0].start, parts[done - 1].end)
        of_blocks = [FORMATS[part.format.kind] for part in parts[:done]]
        first, *behind = [
            (part.stored.view(-1, blocks.row_bytes(x.shape[1])), blocks)
            for part, blocks in zip(parts, of_blocks, strict=False)
        ]
        bias = None if bias is None else bias[rows]
        gguf_linear_triton(x, *first, out[:, rows], behind=behind[0] if behind else None, bias=bias, add=add)
        return done


# --- the 12-bit code


def _coded_row(columns: int) -> CodedRow:
    row = CodedRow.of(columns)
    assert row is not None, f"rows of {columns} columns are not coded"
    return row


@dataclass(frozen=True)
class CodedBf16(Format):
    """Has rows of bf16 in 12 bits."""

    kind: str = CODED

    def row_bytes(self, columns: int) -> int:
        return _coded_row(columns).nbytes

    def decode_rows(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        coded_bf16.decode_rows(stored, _coded_row(out.shape[1]), out)

    def most_rows(self, columns: int) -> int:
        return MOST_ROWS

    def multiply(
        self, parts: Sequence[Part], x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, add: bool
    ) -> int:
        row, (start, end, stored, _) = _coded_row(x.shape[1]), parts[0]
        bias = None if bias is None else bias[start:end]
        coded_linear_triton(x, stored.view(-1, row.nbytes), row, out[:, start:end], bias=bias, add=add)
        return 1

    def fill_rows(self, rows: torch.Tensor, columns: int, fill: Fill, staging: Staging) -> None:
        """Raises `NotCodable` where some have more exceptions than room."""
        values = torch.empty(len(rows), columns, dtype=torch.bfloat16)
        fill(values, staging)
        if coded_bf16.encode_rows(values, _coded_row(columns), rows, staging.device):
            raise NotCodable


# --- quantised safetensors: numbers, scales, their zeros and the groups of columns behind one another, in the one
# layout that all of their formats are brought to without loss when they are read

_NAMES = {"FP8": "FP8", "int8": "INT8", "uint8": "INT8", "uint4": "INT4", "E2M1": "NVFP4"}


def _tensors(form: ScaledFormat, rows: int, columns: int) -> list[tuple[tuple[int, ...], int, torch.dtype]]:
    """Return shape, bytes of a row and dtype of what is stored of a matrix, in the order of `ScaledRows`."""
    (down, across), (scale_bytes, zero_bytes) = form.scales(rows, columns), form.scale_row_bytes(columns)
    zeros = (down, form.zero_bytes(across)) if form.zero_bits else (0, 0)
    return [
        ((rows, form.row_bytes(columns)), form.row_bytes(columns), torch.uint8),
        ((down, across), scale_bytes, form.scale),
        (zeros, zero_bytes, torch.uint8),
        ((columns,) if form.ordered else (0,), torch.int32.itemsize, torch.int32),
    ]


def scaled_bytes(form: ScaledFormat, rows: int, columns: int) -> int:
    """Return bytes of a stored matrix."""
    return sum(aligned(shape[0] * row_bytes) for shape, row_bytes, _ in _tensors(form, rows, columns))


def scaled_rows(stored: torch.Tensor, form: ScaledFormat, rows: int, columns: int) -> ScaledRows:
    """Return what uint8 [scaled_bytes] holds, without copying."""
    numbers_bytes = rows * form.row_bytes(columns)
    scales = scale_tensors(stored[aligned(numbers_bytes) :], form, rows, columns)
    return scales._replace(numbers=stored[:numbers_bytes].view(rows, -1))


def scale_tensors(stored: torch.Tensor, form: ScaledFormat, rows: int, columns: int) -> ScaledRows:
    """Return what the bytes behind the numbers hold, without copying, and no numbers."""
    found, start = [torch.empty(0, form.row_bytes(columns), dtype=torch.uint8, device=stored.device)], 0
    for shape, row_bytes, dtype in _tensors(form, rows, columns)[1:]:
        strides = (row_bytes // dtype.itemsize, 1)[-len(shape) :]
        nbytes = shape[0] * row_bytes
        found.append(stored[start : start + nbytes].view(dtype).as_strided(shape, strides))
        start += aligned(nbytes)
    return ScaledRows(*found)


@dataclass(frozen=True)
class Scaled(Format):
    """A matrix of a quantised checkpoint, which is stored as a whole."""

    form: ScaledFormat
    kind: str = field(init=False)
    has_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", _NAMES[self.form.number])

    def nbytes(self, rows: int, columns: int) -> int:
        return scaled_bytes(self.form, rows, columns)

    def of_experts(self, columns: int) -> Format:
        form = self.form._replace(rows=1, columns=self.form.columns if self.form.columns < columns else WHOLE_ROW)
        return self if ScaledRow.of(form, columns) is None else ScaledApart(form)

    def decode(self, stored: torch.Tensor, rows: int, start: int, out: torch.Tensor) -> None:
        decode_scaled(scaled_rows(stored, self.form, rows, out.shape[1]), self.form, start, out)

    def most_rows(self, columns: int) -> int:
        return 0 if columns_of_scale(self.form, columns) is None else MOST_ROWS

    def multiply(
        self, parts: Sequence[Part], x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, add: bool
    ) -> int:
        start, end, stored, _ = parts[0]
        matrix = scaled_rows(stored, self.form, end - start, x.shape[1])
        bias = None if bias is None else bias[start:end]
        scaled_linear_triton(x, matrix, self.form, out[:, start:end], bias=bias, add=add)
        return 1

    def fill(self, stored: torch.Tensor, columns: int, start: int, end: int, fill: Fill, staging: Staging) -> int:
        assert start == 0 and stored.nbytes == self.nbytes(end, columns), "a matrix is filled at once"
        fill(stored, staging)
        return stored.nbytes


@dataclass(frozen=True)
class ScaledApart(Format):
    """Has rows of an expert's matrix of such a checkpoint, each with scales of its own, so that gates and ups are
    one."""

    form: ScaledFormat
    kind: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", _NAMES[self.form.number])

    def row_bytes(self, columns: int) -> int:
        row = ScaledRow.of(self.form, columns)
        assert row is not None
        return row.nbytes

    @property
    def expert_encoding(self) -> ScaledFormat:
        return self.form

    def decode_rows(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        decode_scaled_reference(rows_apart(stored, self.form, out.shape[1]), self.form, 0, out)


def format_of(kind: str | ScaledFormat) -> Format:
    """Return the format of a matrix by what a checkpoint says of it: a word of `KINDS`, or the scaled one."""
    if isinstance(kind, ScaledFormat):
        return Scaled(kind)
    return Format(kind) if kind in KIND_DTYPES else GgufBlocks(kind)
