"""Matrices as GGUF files store them: rows of blocks, in the order that kernels like, which loses nothing. A product of
a few rows on a GPU decodes them in registers, one of many into a scratch.

A packed matrix is a stack of matrices of the file, which may be stored in different ways: Q4_K_M has values in Q6_K
below queries and keys in Q4_K.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from offload_runtime_kernels.encoded_linear import MOST_ROWS
from offload_runtime_kernels.gguf_blocks import FORMATS, decode_blocks, decode_file_blocks, pack_rows
from offload_runtime_kernels.gguf_linear import gguf_linear_triton

from offload_runtime.weights.encoding import DTYPE_KINDS, KIND_DTYPES, EncodedRows, Encoding

# What is read, in the words of the format.
KINDS = (*KIND_DTYPES, *FORMATS)
_EXPONENT = 0x7C  # in the upper byte of an fp16


def row_bytes(kind: str, columns: int) -> int:
    """Bytes of a stored row."""
    return columns * KIND_DTYPES[kind].itemsize if kind in KIND_DTYPES else FORMATS[kind].row_bytes(columns)


def file_bytes(kind: str, columns: int) -> int:
    """Bytes of a row in a file."""
    return columns * KIND_DTYPES[kind].itemsize if kind in KIND_DTYPES else FORMATS[kind].file_bytes(columns)


def store_rows(kind: str, blocks: torch.Tensor, columns: int, out: torch.Tensor) -> None:
    """Bring rows as a file has them, uint8 [R, file_bytes], to the order they are stored in, uint8 [R, row_bytes]."""
    if kind in KIND_DTYPES:
        out.copy_(blocks)
    else:
        pack_rows(blocks, FORMATS[kind], columns, out)


def decode_rows(kind: str, stored: torch.Tensor, out: torch.Tensor) -> None:
    """Decode uint8 [R, row_bytes] into `out` [R, columns], both contiguous, rounding once to its dtype."""
    if kind in KIND_DTYPES:
        out.copy_(stored.view(KIND_DTYPES[kind]))
    else:
        decode_blocks(stored, FORMATS[kind], out)


def decode_file_rows(kind: str, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """The same of rows as a file has them, uint8 [R, file_bytes]."""
    if kind in KIND_DTYPES:
        out.copy_(blocks.view(KIND_DTYPES[kind]))
    elif blocks.is_cuda:  # by the kernel, which reads planes
        stored = torch.empty(len(blocks), row_bytes(kind, out.shape[1]), dtype=torch.uint8, device=blocks.device)
        pack_rows(blocks, FORMATS[kind], out.shape[1], stored)
        decode_blocks(stored, FORMATS[kind], out)
    else:
        decode_file_blocks(blocks, FORMATS[kind], out)


def has_finite_scales(kind: str, blocks: torch.Tensor) -> bool:
    """Whether no block's own scale or minimum, of rows as a file has them, is infinite or NaN."""
    if kind in KIND_DTYPES:
        return True
    form = FORMATS[kind]
    # By numpy, which lets other threads read and has none of its own.
    upper_bytes = [blocks.numpy().reshape(-1, form.nbytes)[:, at + 1] for at in form.file_halves]
    return not any(bool((byte & _EXPONENT == _EXPONENT).any()) for byte in upper_bytes)


@dataclass(frozen=True)
class GgufRows(EncodedRows):
    """Rows of what the file has."""

    row_bytes = staticmethod(row_bytes)
    decode_rows = staticmethod(decode_rows)

    @staticmethod
    def most_rows(how: str, columns: int) -> int:
        return MOST_ROWS if how in FORMATS else 0

    @staticmethod
    def multiply_rows(
        kind: str, stored: torch.Tensor, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, *, add: bool
    ) -> None:
        gguf_linear_triton(x, stored, FORMATS[kind], out, bias=bias, add=add)

    @classmethod
    def smallest(cls, parts: Iterable[tuple[int, str]], columns: int, dtype: torch.dtype) -> Encoding:
        """Each part as it is stored where that takes fewer bytes than in `dtype`, which it is converted to elsewhere;
        everything in one piece where nothing is smaller."""
        plain = DTYPE_KINDS[dtype]
        kinds = [(rows, min(plain, stored, key=lambda each: row_bytes(each, columns))) for rows, stored in parts]
        merged = cls.merged(kinds)
        return Encoding(dtype) if [kind for _, kind in merged] == [plain] else cls(dtype, merged)
