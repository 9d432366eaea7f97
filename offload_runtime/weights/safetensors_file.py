"""Reading and writing single safetensors files, tensor by tensor.

The format is eight bytes of header length, a JSON header and the raw tensors. Reading it here rather than through
memory maps puts the bytes straight where they belong (no mapped pages that count as ours, any number of threads),
and lets a truncated file be refused with the number of bytes that are missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload_runtime.config import format_bytes
from offload_runtime.errors import CheckpointError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the reference implementation's own limit
_STAGING_BYTES = 16 << 20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in its file. `dtype` is the header's word for it, which may be one we do not read."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    nbytes: int


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {what}; download or convert it again")


def _sizes(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    return None


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise _damaged(path, f"the header's entry for {name} is not an object")
    dtype, shape, offsets = entry.get("dtype"), _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise _damaged(path, f"the header's entry for {name} lacks a valid dtype, shape or data_offsets")
    begin, end = offsets
    if end < begin or (dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize):
        raise _damaged(path, f"{name} {dtype} {list(shape)} does not fit the {end - begin} bytes the header gives it")
    return StoredTensor(path, name, dtype, shape, data_start + begin, end - begin)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """List the tensors of a file after checking that all their bytes are there.

    Raises:
        CheckpointError: The file cannot be read, its header is corrupt, or its end is missing.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if size_bytes < 8 or header_bytes > _MAX_HEADER_BYTES or header_bytes > size_bytes - 8:
                raise _damaged(
                    path, f"its header should take {header_bytes} bytes and the file has {max(0, size_bytes - 8)} left"
                )
            header = json.loads(file.read(header_bytes))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): check the path and its permissions") from error
    except (ValueError, RecursionError) as error:  # bytes that are not UTF-8 are a ValueError too
        raise _damaged(path, f"its header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    tensors = {name: _parse_entry(path, name, entry, data_start) for name, entry in header.items()}
    end_bytes = max((tensor.offset_bytes + tensor.nbytes for tensor in tensors.values()), default=data_start)
    if end_bytes > size_bytes:
        raise _damaged(
            path,
            f"it is truncated, {end_bytes - size_bytes} bytes are missing "
            f"({format_bytes(size_bytes)} of {format_bytes(end_bytes)})",
        )
    return tensors


def read_bytes(path: Path, offset_bytes: int, out: memoryview) -> None:
    """Fill `out` from `offset_bytes` of the file on. Opens it anew, so that threads do not share a position.

    Raises:
        CheckpointError: The file ends too early or cannot be read.
    """
    done = 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset_bytes)
            while done < len(out):
                count = file.readinto(out[done:])
                if not count:
                    break
                done += count
    except OSError as error:
        raise CheckpointError(f"reading {path} failed ({error}): check the disk it lies on") from error
    if done < len(out):
        raise _damaged(path, f"it is truncated, {len(out) - done} bytes are missing at {offset_bytes + done}")


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, without a copy."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def fill_from_file(stored: StoredTensor, out: torch.Tensor) -> None:
    """Read a tensor into `out` (contiguous, CPU, the stored shape), converting to `out`'s dtype.

    Equal dtypes are read in place; others go through a staging buffer of 16 MiB.
    """
    dtype = DTYPES[stored.dtype]
    assert tuple(out.shape) == stored.shape and out.is_contiguous(), f"{stored.name}: {tuple(out.shape)}"
    if dtype == out.dtype:
        read_bytes(stored.path, stored.offset_bytes, as_bytes(out))
        return
    flat = out.view(-1)
    step = _STAGING_BYTES // dtype.itemsize
    staging = torch.empty(min(step, flat.numel()), dtype=dtype)
    for start in range(0, flat.numel(), step):
        part = staging[: min(step, flat.numel() - start)]
        read_bytes(stored.path, stored.offset_bytes + start * dtype.itemsize, as_bytes(part))
        flat[start : start + part.numel()].copy_(part)


def write_file(
    path: Path,
    tensors: Sequence[tuple[str, tuple[int, ...], Callable[[torch.Tensor], None]]],
    dtype: torch.dtype,
    on_tensor: Callable[[int], None],
) -> None:
    """Write a safetensors file of one dtype, holding one tensor in memory at a time.

    Args:
        path: The new file.
        tensors: Name, shape and what fills a tensor of that shape.
        dtype: Of all tensors in the file.
        on_tensor: Called with the bytes of each tensor once it is written.

    Raises:
        OSError: The disk is full or refuses; the caller removes what was written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape, _ in tensors:
        nbytes = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # readers that map the file want the tensors aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, shape, fill in tensors:
            tensor = torch.empty(shape, dtype=dtype)
            fill(tensor)
            file.write(as_bytes(tensor))
            on_tensor(tensor.numel() * dtype.itemsize)
