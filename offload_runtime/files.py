"""Files of the user: where they lie, and writing them whole or not at all."""

from __future__ import annotations

import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from offload_runtime.errors import StorageError

_MOST_OF_NAME = 50  # that a file's temporary one has of its name

# Where the XDG specification puts a kind of files in the user's home.
_IN_HOME = {"config": ".config", "cache": ".cache", "state": ".local/state"}


def user_directory(kind: str, *, holds: str) -> Path:
    """Find the user's own directory for one kind of files.

    Our environment variable OFFLOAD_RUNTIME_KIND names it above all else. Otherwise it lies in the platform's directory
    for such files: that of APPDATA (settings) or LOCALAPPDATA on Windows, elsewhere that of XDG_KIND_HOME or, where
    this is not set, the usual one in the user's home.

    Args:
        kind: `config`, `cache` or `state`.
        holds: What is kept there, for the message.

    Raises:
        StorageError: The user has no home directory and no variable names another place.
    """
    variable, windows = f"OFFLOAD_RUNTIME_{kind.upper()}", "APPDATA" if kind == "config" else "LOCALAPPDATA"
    try:
        if chosen := os.environ.get(variable):
            return Path(chosen).expanduser()
        if sys.platform == "win32" and (platform := os.environ.get(windows)):
            return Path(platform) / "offload-runtime"
        base = os.environ.get(f"XDG_{kind.upper()}_HOME")
        return (Path(base) if base else Path.home() / _IN_HOME[kind]) / "offload-runtime"
    except RuntimeError as error:  # pathlib's way to say so
        raise StorageError(f"no directory for {holds} ({error}): set {variable} to an absolute path") from error


@contextmanager
def writing(path: Path, remedy: str) -> Iterator[None]:
    """Say of a file that the system refuses to write why, and what the user can do instead (`remedy`).

    Raises:
        StorageError: For every OSError within, and for a path that none can be, of a NUL or half a character.
    """
    try:
        yield
    except (OSError, ValueError) as why:
        raise StorageError(f"{path} cannot be written ({getattr(why, 'strerror', None) or why}): {remedy}") from why


def regular_file(path: Path, *, remedy: str) -> Path:
    """Find where a file may be written: symbolic links are followed, and nothing or a regular file is there.

    Raises:
        StorageError: A device, a FIFO, a socket or a directory is there, which a file in its place would destroy, or
            the file that standard output or standard error goes to; or no file can have this name.
    """
    with writing(path, remedy), suppress(FileNotFoundError):
        real = Path(os.path.realpath(path))
        there = real.lstat()
        if not stat.S_ISREG(there.st_mode):
            raise StorageError(f"{path} is not a regular file, and stays as it is: {remedy}")
        for number, stream in ((1, "standard output"), (2, "standard error")):
            with suppress(OSError):  # a closed stream goes nowhere
                if os.path.samestat(there, os.fstat(number)):
                    raise StorageError(f"{path} is where {stream} goes: {remedy}")
    return real


def require_writable(path: Path, *, remedy: str) -> None:
    """Refuse a place that a file could not be written to, before there is one; an older file there stays.

    Raises:
        StorageError: It is a directory, a device or the like, or nothing can be written beside it.
    """
    with writing(path, remedy):
        tempfile.TemporaryFile(dir=regular_file(path, remedy=remedy).parent).close()


def write_atomically(path: Path, content: str | Iterable[bytes | memoryview], *, remedy: str) -> None:
    """Write a regular file, text as UTF-8, so that a reader sees the old one or the whole new one, never a part.

    Symbolic links stay, and what they lead to is written. What is not text comes in pieces.

    Raises:
        StorageError: The disk is full or the place cannot be written, with the `remedy`; what was there is then
            untouched.
    """
    real = regular_file(path, remedy=remedy)
    with writing(path, remedy):
        # In the same directory, because a rename is atomic only within one file system; a name has 255 bytes at most.
        prefix = f".{real.name[:_MOST_OF_NAME]}-"
        descriptor, partial = tempfile.mkstemp(dir=real.parent, prefix=prefix, suffix=".part")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.writelines([content.encode()] if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, real)
        except BaseException:
            os.unlink(partial)
            raise


def delete_leftovers(real: Path) -> None:
    """Delete what processes that were killed in `write_atomically` have left of a file that nobody is writing now, as
    far as the system lets us. Those of a long name stay: they may be another file's."""
    ours = re.compile(rf"\.{re.escape(real.name)}-[a-z0-9_]{{8}}\.part")  # as tempfile names them
    with suppress(OSError):
        for entry in os.scandir(real.parent):
            if len(real.name) < _MOST_OF_NAME and ours.fullmatch(entry.name):
                os.unlink(entry)
