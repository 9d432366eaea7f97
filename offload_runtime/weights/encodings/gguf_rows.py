"""Matrices as GGUF files store them: rows of blocks, decoded into a scratch for every product.

A packed matrix is a stack of matrices of the file, which may be stored in different ways: Q4_K_M has values in Q6_K
below queries and keys in Q4_K.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from offload_runtime_kernels.gguf_blocks import FORMATS, decode_blocks

from offload_runtime.weights.encoding import DTYPE_KINDS, Encoding, Fill, StackedWeight, StoredPart, aligned

_DTYPES = {kind: dtype for dtype, kind in DTYPE_KINDS.items()}
# What is read, in the words of the format.
KINDS = (*_DTYPES, *FORMATS)
_EXPONENT = 0x7C  # in the upper byte of an fp16


def row_bytes(kind: str, columns: int) -> int:
    """Bytes of a stored row, of whole blocks."""
    if kind in _DTYPES:
        return columns * _DTYPES[kind].itemsize
    return columns // FORMATS[kind].weights * FORMATS[kind].nbytes


def decode_rows(kind: str, stored: torch.Tensor, out: torch.Tensor) -> None:
    """Decode uint8 [..., row_bytes] into `out` [..., columns], both contiguous, rounding once to its dtype."""
    if kind in _DTYPES:
        out.copy_(stored.view(_DTYPES[kind]).view(out.shape))
    else:
        decode_blocks(stored, FORMATS[kind], out)


def has_finite_scales(kind: str, stored: torch.Tensor) -> bool:
    """Whether no block's own scale or minimum, of uint8 [..., row_bytes], is infinite or NaN."""
    if kind in _DTYPES:
        return True
    form = FORMATS[kind]
    upper_bytes = [stored.view(-1, form.nbytes)[:, at + 1] for at in (form.d, form.m) if at is not None]
    return not any(bool((byte & _EXPONENT == _EXPONENT).any()) for byte in upper_bytes)


@dataclass(frozen=True)
class GgufPart(StoredPart):
    """Rows of blocks: `stored` is [end - start, row_bytes]."""

    kind: str

    def decode(self, start: int, end: int, out: torch.Tensor) -> None:
        decode_rows(self.kind, self.stored[start:end], out)

    def take(self, index: torch.Tensor, out: torch.Tensor) -> None:
        decode_rows(self.kind, self.stored.index_select(0, index), out)

    def fill(self, start: int, end: int, fill: Fill) -> int:
        rows = self.stored[start:end]
        fill(rows.view(_DTYPES[self.kind]) if self.kind in _DTYPES else rows)
        return rows.nbytes


@dataclass(frozen=True)
class GgufRows(Encoding):
    """Rows as in the file, from above: so many, stored as a kind. `dtype` is what they are decoded to."""

    parts: tuple[tuple[int, str], ...]

    @classmethod
    def smallest(cls, parts: Iterable[tuple[int, str]], columns: int, dtype: torch.dtype) -> Encoding:
        """Each part as it is stored where that takes fewer bytes than in `dtype`, which it is converted to elsewhere;
        everything in one piece where nothing is smaller."""
        plain = DTYPE_KINDS[dtype]
        merged: list[tuple[int, str]] = []
        for rows, stored in parts:
            kind = min(plain, stored, key=lambda each: row_bytes(each, columns))
            before = merged.pop()[0] if merged and merged[-1][1] == kind else 0
            merged.append((before + rows, kind))
        return Encoding(dtype) if [kind for _, kind in merged] == [plain] else cls(dtype, tuple(merged))

    @property
    def num_decodings(self) -> int:
        return len(self.parts)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        return sum(self._part_bytes(shape))

    def bytes_by_kind(self, shape: tuple[int, ...]) -> dict[str, int]:
        found = Counter[str]()
        for (_, kind), nbytes in zip(self.parts, self._part_bytes(shape), strict=True):
            found[kind] += nbytes
        return found

    def decoded_bytes(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * self.dtype.itemsize

    def weight(
        self, stored: torch.Tensor, shape: tuple[int, ...], bias: torch.Tensor | None, scratch: torch.Tensor | None
    ) -> StackedWeight:
        found, start = list[StoredPart](), 0
        for (rows, kind), part in zip(self.parts, stored.split(self._part_bytes(shape)), strict=True):
            width = row_bytes(kind, shape[1])
            found.append(GgufPart(start, start + rows, part[: rows * width].view(rows, width), kind))
            start += rows
        assert start == shape[0]
        return StackedWeight(stored, bias, shape=shape, dtype=self.dtype, parts=tuple(found), scratch=scratch)

    def _part_bytes(self, shape: tuple[int, ...]) -> list[int]:
        """Of each part, as far as the next one's beginning."""
        return [aligned(rows * row_bytes(kind, shape[1])) for rows, kind in self.parts]
