"""Matrices of quantised safetensors checkpoints: small numbers with scales. A product of a few rows on a GPU decodes
them in registers, one of many into a scratch.

A packed matrix is a stack of matrices of the checkpoint, some of which may not be quantised. Each has its numbers, its
scales, their zeros and the groups of its columns behind one another, in the one layout that all formats are brought to
without loss when they are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from offload_runtime_kernels.encoded_linear import MOST_ROWS
from offload_runtime_kernels.scaled_linear import scaled_linear_triton
from offload_runtime_kernels.scaled_rows import ScaledFormat, ScaledRows, columns_of_scale, decode_scaled

from offload_runtime.weights.encoding import DTYPE_KINDS, Fill, StackedEncoding, StoredPart, aligned
from offload_runtime.weights.staging import Staging

_NAMES = {"FP8": "FP8", "int8": "INT8", "uint8": "INT8", "uint4": "INT4"}


def _tensors(form: ScaledFormat, rows: int, columns: int) -> list[tuple[tuple[int, ...], int, torch.dtype]]:
    """Of what is stored of a matrix, in the order of `ScaledRows`, shape, bytes of a row, and dtype."""
    (down, across), (scale_bytes, zero_bytes) = form.scales(rows, columns), form.scale_row_bytes(columns)
    zeros = (down, form.file_bytes(across)) if form.zeros else (0, 0)
    return [
        ((rows, form.row_bytes(columns)), form.row_bytes(columns), torch.uint8),
        ((down, across), scale_bytes, form.scale),
        (zeros, zero_bytes, torch.uint8),
        ((columns,) if form.ordered else (0,), torch.int32.itemsize, torch.int32),
    ]


def scaled_bytes(form: ScaledFormat, rows: int, columns: int) -> int:
    """Bytes of a stored matrix."""
    return sum(aligned(shape[0] * row_bytes) for shape, row_bytes, _ in _tensors(form, rows, columns))


def scaled_rows(stored: torch.Tensor, form: ScaledFormat, rows: int, columns: int) -> ScaledRows:
    """What uint8 [scaled_bytes] holds, without copying."""
    numbers_bytes = rows * form.row_bytes(columns)
    scales = scale_tensors(stored[aligned(numbers_bytes) :], form, rows, columns)
    return scales._replace(numbers=stored[:numbers_bytes].view(rows, -1))


def scale_tensors(stored: torch.Tensor, form: ScaledFormat, rows: int, columns: int) -> ScaledRows:
    """What the bytes behind the numbers hold, without copying, and no numbers."""
    found, start = [torch.empty(0, form.row_bytes(columns), dtype=torch.uint8, device=stored.device)], 0
    for shape, row_bytes, dtype in _tensors(form, rows, columns)[1:]:
        strides = (row_bytes // dtype.itemsize, 1)[-len(shape) :]
        nbytes = shape[0] * row_bytes
        found.append(stored[start : start + nbytes].view(dtype).as_strided(shape, strides))
        start += aligned(nbytes)
    return ScaledRows(*found)


@dataclass(frozen=True)
class _ScaledPart(StoredPart):
    """A matrix of the checkpoint with `columns`; without `form` its elements in the dtype of what it is decoded to."""

    columns: int
    form: ScaledFormat | None
    dtype: torch.dtype

    def decode(self, start: int, end: int, out: torch.Tensor) -> None:
        if self.form is None:
            out.copy_(self._plain[start:end])
        else:
            decode_scaled(self._scaled(self.form), self.form, start, out)

    @property
    def most_rows(self) -> int:
        return ScaledStack.most_rows(self.form, self.columns)

    def multiply(self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, add: bool) -> None:
        assert self.form is not None
        scaled_linear_triton(x, self._scaled(self.form), self.form, out, bias=bias, add=add)

    def fill(self, start: int, end: int, fill: Fill, staging: Staging) -> int:
        if self.form is None:
            rows = self._plain[start:end]
            fill(rows, staging)
            return rows.nbytes
        assert (start, end) == (0, self.end - self.start), "a matrix of the checkpoint is filled at once"
        fill(self.stored, staging)
        return self.stored.nbytes

    def _scaled(self, form: ScaledFormat) -> ScaledRows:
        return scaled_rows(self.stored, form, self.end - self.start, self.columns)

    @property
    def _plain(self) -> torch.Tensor:
        return self.stored.view(self.dtype).view(-1, self.columns)


@dataclass(frozen=True)
class ScaledStack(StackedEncoding):
    """Matrices of the checkpoint, from above: so many rows, stored as a format, or plainly in `dtype` with None."""

    parts: tuple[tuple[int, ScaledFormat | None], ...]

    @staticmethod
    def most_rows(how: ScaledFormat | None, columns: int) -> int:
        return 0 if how is None or columns_of_scale(how, columns) is None else MOST_ROWS

    def part_bytes(self, rows: int, how: ScaledFormat | None, columns: int) -> int:
        return rows * columns * self.dtype.itemsize if how is None else scaled_bytes(how, rows, columns)

    def part_kind(self, how: ScaledFormat | None) -> str:
        return DTYPE_KINDS[self.dtype] if how is None else _NAMES[how.number]

    def part(self, start: int, rows: int, stored: torch.Tensor, how: ScaledFormat | None, columns: int) -> StoredPart:
        return _ScaledPart(start, start + rows, stored, columns, how, self.dtype)
