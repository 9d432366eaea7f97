"""bf16 matrices in 12 bits an element, without loss, coded when they are loaded and decoded into a scratch for every
product, but for those of few rows.

A packed matrix is a stack of matrices of the checkpoint, each coded or, where it has rows with too many exceptions, as
it is. All rows of a coded one take the same bytes, whatever their values are, so that a plan knows them without reading
the weights; that a matrix cannot be coded is found when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from offload_runtime_kernels.coded_bf16 import CODED, CodedRow, decode_rows, encode_rows
from offload_runtime_kernels.coded_linear import coded_linear_triton
from offload_runtime_kernels.encoded_linear import MOST_ROWS

from offload_runtime.weights.encoding import DTYPE_KINDS, EncodedRows, Encoding, Fill, NotCodable
from offload_runtime.weights.staging import Staging

_PLAIN = DTYPE_KINDS[torch.bfloat16]


def _coded_row(columns: int) -> CodedRow:
    row = CodedRow.of(columns)
    assert row is not None, f"rows of {columns} columns are not coded"
    return row


@dataclass(frozen=True)
class CodedRows(EncodedRows):
    """Rows of bf16, coded or not."""

    @classmethod
    def of(cls, parts: Iterable[tuple[int, bool]], columns: int) -> Encoding:
        """So many rows, coded or not; everything in one piece where nothing is coded, or rows of so many columns are
        not."""
        coded = CodedRow.of(columns) is not None
        merged = cls.merged((rows, CODED if coded and wanted else _PLAIN) for rows, wanted in parts)
        return Encoding(torch.bfloat16) if [kind for _, kind in merged] == [_PLAIN] else cls(torch.bfloat16, merged)

    @staticmethod
    def row_bytes(kind: str, columns: int) -> int:
        return 2 * columns if kind == _PLAIN else _coded_row(columns).nbytes

    @staticmethod
    def decode_rows(kind: str, stored: torch.Tensor, out: torch.Tensor) -> None:
        if kind == _PLAIN:
            out.copy_(stored.view(torch.bfloat16))
        else:
            decode_rows(stored, _coded_row(out.shape[1]), out)

    @staticmethod
    def most_rows(how: str, columns: int) -> int:
        return MOST_ROWS if how == CODED else 0

    @staticmethod
    def multiply_rows(
        kind: str, stored: torch.Tensor, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, add: bool
    ) -> None:
        coded_linear_triton(x, stored, _coded_row(x.shape[1]), out, bias=bias, add=add)

    def fill_rows(self, kind: str, rows: torch.Tensor, fill: Fill, columns: int, staging: Staging) -> None:
        """Raises `NotCodable` where some have more exceptions than room."""
        if kind == _PLAIN:
            super().fill_rows(kind, rows, fill, columns, staging)
            return
        values = torch.empty(len(rows), columns, dtype=torch.bfloat16)
        fill(values, staging)
        if encode_rows(values, _coded_row(columns), rows, staging.device):
            raise NotCodable
