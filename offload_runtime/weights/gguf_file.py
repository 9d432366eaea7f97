"""The header of a GGUF file: metadata and where each tensor lies.

The `gguf` package's reader maps the whole file and makes a numpy array of every token of the vocabulary; here only
the header is walked, long arrays are skipped, and a truncated file is refused with the number of missing bytes.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_runtime.config import format_bytes
from offload_runtime.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_KEPT_ARRAY_ITEMS = 4096  # per-layer lists are kept; vocabularies are only counted
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True)
class SkippedArray:
    """An array too long to be of interest here, such as the vocabulary."""

    count: int


@dataclass(frozen=True)
class GgufTensor:
    """A stored tensor: `shape` as torch writes it, `kind` the number of its quantisation, bytes of the stored form."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset_bytes: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key, tensors by name in the order of the file."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Truncated(Exception):
    """The walk went past the end of the file."""


class _Cursor:
    """Walks the mapped bytes of a header."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def skip(self, nbytes: int) -> int:
        """Step over `nbytes` and return where they began."""
        start = self.position
        if nbytes > len(self._data) - start:
            raise _Truncated
        self.position = start + nbytes
        return start

    def scalar(self, form: str) -> Any:
        return struct.unpack_from(form, self._data, self.skip(struct.calcsize(form)))[0]

    def string(self) -> str:
        size = self.scalar("<Q")
        start = self.skip(size)
        return self._data[start : start + size].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ValueError(f"unknown metadata type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any] | SkippedArray:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind == _ARRAY:
            raise ValueError("nested metadata arrays")
        if count <= _KEPT_ARRAY_ITEMS:
            return [self.value(kind) for _ in range(count)]
        if kind in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[kind]))
        elif kind == _STRING:
            for _ in range(count):
                self.skip(self.scalar("<Q"))
        else:
            raise ValueError(f"unknown metadata type {kind}")
        return SkippedArray(count)


def _read_tensor_info(cursor: _Cursor) -> GgufTensor:
    """One entry of the tensor table; the offset is still relative to the data section."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name = cursor.string()
    num_dims = cursor.scalar("<I")
    if num_dims > 4:
        raise ValueError(f"{name} has {num_dims} dimensions")
    shape = tuple(reversed([cursor.scalar("<Q") for _ in range(num_dims)]))  # GGUF lists the fastest one first
    kind, offset_bytes = cursor.scalar("<I"), cursor.scalar("<Q")
    block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if not shape or shape[-1] % block_elements:
        raise ValueError(f"rows of {name} {list(shape)} are not whole blocks of {block_elements}")
    return GgufTensor(name, shape, kind, offset_bytes, math.prod(shape) // block_elements * block_bytes)


def _walk(data: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(data)
    cursor.skip(len(_MAGIC))
    version = cursor.scalar("<I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version}, and only little-endian versions 2 and 3 are read")
    num_tensors, num_keys = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<I"))
    relative = [_read_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    return GgufHeader(
        metadata, {t.name: GgufTensor(t.name, t.shape, t.kind, start + t.offset_bytes, t.nbytes) for t in relative}
    )


def read_gguf_header(path: Path) -> GgufHeader:
    """Read metadata and the tensor table, checking that every tensor's bytes are there.

    Raises:
        CheckpointError: Not a GGUF file, a corrupt header, or a truncated file.
    """
    again = "download it again"
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise CheckpointError(f"{path} is not a GGUF file: give a .gguf file or a directory with safetensors")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _walk(data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): check the path and its permissions") from error
    except _Truncated as error:
        raise CheckpointError(
            f"{path} is damaged: its header goes on past the end of the file at {size_bytes} bytes; {again}"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} has a GGUF header that cannot be read ({error}): {again}") from error
    end_bytes = max((tensor.offset_bytes + tensor.nbytes for tensor in header.tensors.values()), default=0)
    if end_bytes > size_bytes:
        raise CheckpointError(
            f"{path} is truncated, {end_bytes - size_bytes} bytes are missing "
            f"({format_bytes(size_bytes)} of {format_bytes(end_bytes)}): {again}"
        )
    return header
