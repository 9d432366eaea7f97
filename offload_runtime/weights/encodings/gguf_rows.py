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
from offload_runtime_kernels.linear import linear

from offload_runtime.weights.encoding import ALIGNMENT_BYTES, DTYPE_KINDS, Encoding, Fill, Weight

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
class StoredPart:
    """Rows `[start, end)` of a matrix: uint8 [end - start, row_bytes]."""

    start: int
    end: int
    kind: str
    stored: torch.Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class GgufWeight(Weight):
    """A matrix [M, K] whose parts are decoded one below the other, into `scratch` where there is one (uint8, on the
    device of what is stored), so that what was decoded is gone with the next matrix.

    A matrix that is larger than the scratch is multiplied in slices of its rows, whose products are those of the whole
    by the rule of `linear`; on a CPU they may not be.
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
        decode_rows(part.kind, part.stored.index_select(0, index), out)
        return out

    def linear(self, x: torch.Tensor, *, residual: torch.Tensor | None = None, gated: bool = False) -> torch.Tensor:
        height, row_bytes = self.shape[0], self.shape[1] * self.dtype.itemsize
        step = height if self.scratch is None else self.scratch.nbytes // row_bytes
        if step >= height:
            return super().linear(x, residual=residual, gated=gated)
        assert residual is None and not gated and self.bias is None, "only a head may exceed the scratch"
        out = x.new_empty(len(x), height)
        for start in range(0, height, step):
            end = min(start + step, height)
            out[:, start:end] = linear(x, self._decoded(start, end))
        return out

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
                stored = part.stored[first - part.start : last - part.start]
                decode_rows(part.kind, stored, out[first - start : last - start])
        return out

    def fill(self, row_start: int, row_end: int, fill: Fill) -> int:
        part = next(part for part in self.parts if part.start <= row_start and row_end <= part.end)
        rows = part.stored[row_start - part.start : row_end - part.start]
        fill(rows.view(_DTYPES[part.kind]) if part.kind in _DTYPES else rows)
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
    ) -> GgufWeight:
        found, start = list[StoredPart](), 0
        for (rows, kind), part in zip(self.parts, stored.split(self._part_bytes(shape)), strict=True):
            width = row_bytes(kind, shape[1])
            found.append(StoredPart(start, start + rows, kind, part[: rows * width].view(rows, width)))
            start += rows
        assert start == shape[0]
        return GgufWeight(stored, bias, shape=shape, dtype=self.dtype, parts=tuple(found), scratch=scratch)

    def _part_bytes(self, shape: tuple[int, ...]) -> list[int]:
        """Of each part, as far as the next one's beginning."""
        sizes = [rows * row_bytes(kind, shape[1]) for rows, kind in self.parts]
        return [-(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for nbytes in sizes]
