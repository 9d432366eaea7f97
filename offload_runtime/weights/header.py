"""Headers of files with weights, walked byte by byte, and the tensors that they list; needs no torch."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_runtime.errors import CheckpointError
from offload_runtime.fields import HeaderError, shown
from offload_runtime.sizes import format_bytes
from offload_runtime.weights.files import first_bytes, refuse_other_file


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in its file: `shape` as torch writes it, `dtype` the file's word for how it is stored, which
    may be one that is not read."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    nbytes: int

    def read_into(self, out: memoryview, skip_bytes: int = 0) -> None:
        """Fill `out` with its bytes, but for so many at its beginning. Opens the file anew, so that threads do not
        share a position.

        Raises:
            CheckpointError: The file ends too early or cannot be read.
        """
        start = self.offset_bytes + skip_bytes
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                done = file.readinto(out)  # all that there is, most of it without the buffer
        except OSError as error:
            raise CheckpointError(f"reading {self.path} failed ({error}): check the disk it lies on") from error
        if done < len(out):
            raise damaged(self.path, f"it is truncated, {len(out) - done} bytes are missing at {start + done}")


def damaged(path: Path, what: str) -> CheckpointError:
    """The error for a file whose bytes are not what they should be."""
    return CheckpointError(f"{path} is damaged: {what}; download or convert it again")


class HeaderReader:
    """Walks the bytes of a mapped file; raises `ValueError` rather than go past their end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.size_bytes = len(data)
        self.position = 0
        self._data = data

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        start, self.position = self.position, self.position + nbytes
        if self.position > self.size_bytes:
            raise HeaderError(f"it goes on past the end of the file at {self.size_bytes} bytes")
        return self._data[start : self.position]

    def number(self, form: str) -> Any:
        """The next number, of a format of `struct`."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def check_complete(self, tensors: Iterable[StoredTensor]) -> None:
        """Raise `CheckpointError` unless the file holds all bytes of these tensors."""
        end_bytes = max((tensor.offset_bytes + tensor.nbytes for tensor in tensors), default=0)
        if end_bytes > self.size_bytes:
            sizes = f"{format_bytes(self.size_bytes)} of {format_bytes(end_bytes)}"
            raise damaged(self.path, f"it is truncated, {end_bytes - self.size_bytes} bytes are missing ({sizes})")


@contextmanager
def open_header(path: Path) -> Iterator[HeaderReader]:
    """Walk the header of a file; every `ValueError` on the way means that it is damaged.

    Raises:
        CheckpointError: It is, or a file of another kind, or it cannot be opened.
    """
    try:
        refuse_other_file(path, first_bytes(path))
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield HeaderReader(path, data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): check the path and its permissions") from error
    except (ValueError, RecursionError) as error:  # of nested JSON, of bytes that are not UTF-8, of empty files
        raise damaged(path, f"its header cannot be read: {shown(error)}") from error
