"""Formats of matrices other than as their elements: those of GGUF files, those of quantised checkpoints, and a code.

GGUF files have rows of blocks, which are kept in the order that kernels like, and loses nothing; a packed matrix may be
of several, as Q4_K_M has values in Q6_K below queries and keys in Q4_K. Quantised safetensors have small numbers with
scales. bf16 is coded in 12 bits an element without loss when it is loaded: all rows of a coded matrix take the same
bytes, whatever their values are, so that a plan knows them without reading the weights; that a matrix cannot be coded
is found when it is read. A GPU's product of a few rows decodes all of these in registers, one of many into a scratch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from offload_runtime_kernels import coded_bf16
from offload_runtime_kernels.coded_bf16 import CODED, CodedRow
from offload_runtime_kernels.coded_linear import coded_linear_triton
from offload_runtime_kernels.encoded_linear import MOST_ROWS
from offload_runtime_kernels.gguf_blocks import FORMATS, decode_blocks, decode_file_blocks, pack_rows
from offload_runtime_kernels.gguf_linear import gguf_linear_triton
from offload_runtime_kernels.scaled_linear import scaled_linear_triton
from offload_runtime_kernels.scaled_rows import ScaledFormat, ScaledRows, columns_of_scale, decode_scaled

from offload_runtime.weights.encoding import KIND_DTYPES, Fill, Format, NotCodable, aligned
from offload_runtime.weights.staging import Staging

# What is read, in the words of the format.
KINDS = (*KIND_DTYPES, *FORMATS)
_EXPONENT = 0x7C  # in the upper byte of an fp16


@dataclass(frozen=True)
class GgufBlocks(Format):
    """Rows of what a GGUF file has."""

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
        # By numpy, which lets other threads read and has none of its own.
        upper_bytes = [blocks.numpy().reshape(-1, form.nbytes)[:, at + 1] for at in form.file_halves]
        return not any(bool((byte & _EXPONENT == _EXPONENT).any()) for byte in upper_bytes)

    def most_rows(self, columns: int) -> int:
        return MOST_ROWS

    def multiply(
        self, stored: torch.Tensor, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, add: bool
    ) -> None:
        blocks = FORMATS[self.kind]
        gguf_linear_triton(x, stored.view(-1, blocks.row_bytes(x.shape[1])), blocks, out, bias=bias, add=add)


# --- the 12-bit code


def _coded_row(columns: int) -> CodedRow:
    row = CodedRow.of(columns)
    assert row is not None, f"rows of {columns} columns are not coded"
    return row


@dataclass(frozen=True)
class CodedBf16(Format):
    """Rows of bf16 in 12 bits."""

    kind: str = CODED

    def row_bytes(self, columns: int) -> int:
        return _coded_row(columns).nbytes

    def decode_rows(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        coded_bf16.decode_rows(stored, _coded_row(out.shape[1]), out)

    def most_rows(self, columns: int) -> int:
        return MOST_ROWS

    def multiply(
        self, stored: torch.Tensor, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, add: bool
    ) -> None:
        row = _coded_row(x.shape[1])
        coded_linear_triton(x, stored.view(-1, row.nbytes), row, out, bias=bias, add=add)

    def fill_rows(self, rows: torch.Tensor, columns: int, fill: Fill, staging: Staging) -> None:
        """Raises `NotCodable` where some have more exceptions than room."""
        values = torch.empty(len(rows), columns, dtype=torch.bfloat16)
        fill(values, staging)
        if coded_bf16.encode_rows(values, _coded_row(columns), rows, staging.device):
            raise NotCodable


# --- quantised safetensors: numbers, scales, their zeros and the groups of columns behind one another, in the one
# layout that all of their formats are brought to without loss when they are read

_NAMES = {"FP8": "FP8", "int8": "INT8", "uint8": "INT8", "uint4": "INT4"}


def _tensors(form: ScaledFormat, rows: int, columns: int) -> list[tuple[tuple[int, ...], int, torch.dtype]]:
    """Return shape, bytes of a row and dtype of what is stored of a matrix, in the order of `ScaledRows`."""
    (down, across), (scale_bytes, zero_bytes) = form.scales(rows, columns), form.scale_row_bytes(columns)
    zeros = (down, form.file_bytes(across)) if form.zeros else (0, 0)
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

    def decode(self, stored: torch.Tensor, rows: int, start: int, out: torch.Tensor) -> None:
        decode_scaled(scaled_rows(stored, self.form, rows, out.shape[1]), self.form, start, out)

    def most_rows(self, columns: int) -> int:
        return 0 if columns_of_scale(self.form, columns) is None else MOST_ROWS

    def multiply(
        self, stored: torch.Tensor, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, add: bool
    ) -> None:
        matrix = scaled_rows(stored, self.form, out.shape[1], x.shape[1])
        scaled_linear_triton(x, matrix, self.form, out, bias=bias, add=add)

    def fill(self, stored: torch.Tensor, columns: int, start: int, end: int, fill: Fill, staging: Staging) -> int:
        assert start == 0 and stored.nbytes == self.nbytes(end, columns), "a matrix is filled at once"
        fill(stored, staging)
        return stored.nbytes


def format_of(kind: str | ScaledFormat) -> Format:
    """Return the format of a matrix by what a checkpoint says of it: a word of `KINDS`, or the scaled one."""
    if isinstance(kind, ScaledFormat):
        return Scaled(kind)
    return Format(kind) if kind in KIND_DTYPES else GgufBlocks(kind)
