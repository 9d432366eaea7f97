"""Matrices of quantised safetensors checkpoints: small numbers with scales, decoded into a scratch for every product.

A packed matrix is a stack of matrices of the checkpoint, some of which may not be quantised. Each has its numbers, its
scales, their zeros and the groups of its columns behind one another, in the one layout that all formats are brought to
without loss when they are read: rows of K numbers, the even column in the lower half of a byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from offload_runtime_kernels.scaled_rows import ScaledFormat, ScaledRows, decode_scaled

from offload_runtime.weights.encoding import DTYPE_KINDS, Fill, StackedEncoding, StoredPart, aligned

_NAMES = {"FP8": "FP8", "int8": "INT8", "uint8": "INT8", "uint4": "INT4"}


def _tensors(form: ScaledFormat, rows: int, columns: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of what is stored of a matrix, in the order of `ScaledRows`."""
    down, across = form.scales(rows, columns)
    return [
        ((rows, form.row_bytes(columns)), torch.uint8),
        ((down, across), form.scale),
        ((down, form.row_bytes(across)) if form.zeros else (0, 0), torch.uint8),
        ((columns,) if form.ordered else (0,), torch.int32),
    ]


def scaled_bytes(form: ScaledFormat, rows: int, columns: int) -> int:
    """Bytes of a stored matrix."""
    return sum(aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in _tensors(form, rows, columns))


def scaled_rows(stored: torch.Tensor, form: ScaledFormat, rows: int, columns: int) -> ScaledRows:
    """What uint8 [scaled_bytes] holds, without copying."""
    found, start = list[torch.Tensor](), 0
    for shape, dtype in _tensors(form, rows, columns):
        nbytes = math.prod(shape) * dtype.itemsize
        found.append(stored[start : start + nbytes].view(dtype).view(shape))
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
            stored = scaled_rows(self.stored, self.form, self.end - self.start, self.columns)
            decode_scaled(stored, self.form, start, out)

    def fill(self, start: int, end: int, fill: Fill, device: torch.device) -> int:
        if self.form is None:
            rows = self._plain[start:end]
            fill(rows)
            return rows.nbytes
        assert (start, end) == (0, self.end - self.start), "a matrix of the checkpoint is filled at once"
        fill(self.stored)
        return self.stored.nbytes

    @property
    def _plain(self) -> torch.Tensor:
        return self.stored.view(self.dtype).view(-1, self.columns)


@dataclass(frozen=True)
class ScaledStack(StackedEncoding):
    """Matrices of the checkpoint, from above: so many rows, stored as a format, or plainly in `dtype` with None."""

    parts: tuple[tuple[int, ScaledFormat | None], ...]

    def part_bytes(self, rows: int, how: ScaledFormat | None, columns: int) -> int:
        return rows * columns * self.dtype.itemsize if how is None else scaled_bytes(how, rows, columns)

    def part_kind(self, how: ScaledFormat | None) -> str:
        return DTYPE_KINDS[self.dtype] if how is None else _NAMES[how.number]

    def part(self, start: int, rows: int, stored: torch.Tensor, how: ScaledFormat | None, columns: int) -> StoredPart:
        return _ScaledPart(start, start + rows, stored, columns, how, self.dtype)
