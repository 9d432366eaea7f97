"""Matrices as GGUF files store them: rows of blocks, decoded into a scratch for every product.

A packed matrix is a stack of matrices of the file, which may be stored in different ways: Q4_K_M has values in Q6_K
below queries and keys in Q4_K.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from offload_runtime_kernels.gguf_blocks import FORMATS, decode_blocks

from offload_runtime.weights.encoding import DTYPE_KINDS, KIND_DTYPES, EncodedRows, Encoding

# What is read, in the words of the format.
KINDS = (*KIND_DTYPES, *FORMATS)
_EXPONENT = 0x7C  # in the upper byte of an fp16


def row_bytes(kind: str, columns: int) -> int:
    """Bytes of a stored row, of whole blocks."""
    if kind in KIND_DTYPES:
        return columns * KIND_DTYPES[kind].itemsize
    return columns // FORMATS[kind].weights * FORMATS[kind].nbytes


def decode_rows(kind: str, stored: torch.Tensor, out: torch.Tensor) -> None:
    """Decode uint8 [..., row_bytes] into `out` [..., columns], both contiguous, rounding once to its dtype."""
    if kind in KIND_DTYPES:
        out.copy_(stored.view(KIND_DTYPES[kind]).view(out.shape))
    else:
        decode_blocks(stored, FORMATS[kind], out)


def has_finite_scales(kind: str, stored: torch.Tensor) -> bool:
    """Whether no block's own scale or minimum, of uint8 [..., row_bytes], is infinite or NaN."""
    if kind in KIND_DTYPES:
        return True
    form = FORMATS[kind]
    upper_bytes = [stored.view(-1, form.nbytes)[:, at + 1] for at in (form.d, form.m) if at is not None]
    return not any(bool((byte & _EXPONENT == _EXPONENT).any()) for byte in upper_bytes)


@dataclass(frozen=True)
class GgufRows(EncodedRows):
    """Rows as in the file."""

    row_bytes = staticmethod(row_bytes)
    decode_rows = staticmethod(decode_rows)

    @classmethod
    def smallest(cls, parts: Iterable[tuple[int, str]], columns: int, dtype: torch.dtype) -> Encoding:
        """Each part as it is stored where that takes fewer bytes than in `dtype`, which it is converted to elsewhere;
        everything in one piece where nothing is smaller."""
        plain = DTYPE_KINDS[dtype]
        kinds = [(rows, min(plain, stored, key=lambda each: row_bytes(each, columns))) for rows, stored in parts]
        merged = cls.merged(kinds)
        return Encoding(dtype) if [kind for _, kind in merged] == [plain] else cls(dtype, merged)
