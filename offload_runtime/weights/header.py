"""Headers of files with weights, walked byte by byte, and the tensors that they list; and what people have in place of
a checkpoint: files told by their first bytes, directories by what lies in them. Needs no torch."""

from __future__ import annotations

import json
import mmap
import os
import re
import shlex
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

from offload_runtime.errors import CheckpointError
from offload_runtime.fields import HeaderError, shortened, shown
from offload_runtime.sizes import counted, format_bytes


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
            raise damaged(self.path, f"it is truncated by {counted(len(out) - done, 'byte')} at {start + done}")

    def of_experts(self, *names: str) -> Iterator[StoredTensor]:
        """Return the matrices of each expert, which lie one behind the other in [E, rows of all of them, columns]; the
        expert's number takes the place of `#` in their names."""
        if len(self.shape) != 3 or self.shape[1] % len(names):
            yield self  # of no shape that experts have
            return
        nbytes = self.nbytes // (self.shape[0] * len(names))
        shape = (self.shape[1] // len(names), self.shape[2])
        for at, (number, name) in enumerate(product(range(self.shape[0]), names)):
            start = self.offset_bytes + at * nbytes
            yield StoredTensor(self.path, name.replace("#", str(number)), self.dtype, shape, start, nbytes)


def damaged(path: Path, what: str) -> CheckpointError:
    """Return the error for a file whose bytes are not what they should be."""
    return CheckpointError(f"{path} is damaged: {what}; download or convert it again")


class HeaderReader:
    """Walks the bytes of a mapped file; raises `ValueError` rather than go past their end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.size_bytes = len(data)
        self.position = 0
        self._data = data

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        start, self.position = self.position, self.position + nbytes
        if self.position > self.size_bytes:
            raise HeaderError(f"it goes on past the end of the file at {self.size_bytes} bytes")
        return self._data[start : self.position]

    def number(self, form: str) -> Any:
        """Return the next number, of a format of `struct`."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def check_complete(self, tensors: Iterable[StoredTensor]) -> None:
        """Raise `CheckpointError` unless the file holds all bytes of these tensors."""
        end_bytes = max((tensor.offset_bytes + tensor.nbytes for tensor in tensors), default=0)
        if end_bytes > self.size_bytes:
            sizes = f"{format_bytes(self.size_bytes)} of {format_bytes(end_bytes)}"
            raise damaged(self.path, f"it is truncated by {counted(end_bytes - self.size_bytes, 'byte')} ({sizes})")


@contextmanager
def open_header(path: Path) -> Iterator[HeaderReader]:
    """Walk the header of a file; every `ValueError` on the way means that it is damaged.

    Raises:
        CheckpointError: It is, or a file of another kind, or it cannot be opened.
    """
    try:
        refuse_other_file(path)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield HeaderReader(path, data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): check the path and its permissions") from error
    except (ValueError, RecursionError) as error:  # of nested JSON, of bytes that are not UTF-8, of empty files
        raise damaged(path, f"its header cannot be read: {shown(error)}") from error


GGUF_MAGIC = b"GGUF"
_HEAD_BYTES = 64
_MOST_ENTRIES = 2000  # of a directory that are looked at for a sentence about it
_CONVERT = (
    "which is not read: take the model's safetensors, or write them with transformers "
    "(from_pretrained, then save_pretrained), or take a GGUF file"
)
_TORCH, _OLD_GGML = "was written by torch.save, " + _CONVERT, (
    "is in llama.cpp's format of before August 2023 (GGML), which is not read: take a GGUF file of the model"
)  # fmt: skip
_ARCHIVE = "is a compressed archive: unpack it, and give what is in it"
# What begins so. A zip archive is also what torch.save writes.
_OTHER_FILES = {
    b"version https://git-lfs": "is a pointer of Git LFS, and the file that it stands for was not downloaded: run "
    "`git lfs pull` in its directory, or fetch the model with `hf download`",
    b"PK\x03\x04": _TORCH, b"\x80\x02\x8a\nl\xfc\x9cF": _TORCH,
    b"lmgg": _OLD_GGML, b"fmgg": _OLD_GGML, b"tjgg": _OLD_GGML, b"algg": _OLD_GGML,
    b"<!DOCTYPE": "is a web page: download the file itself", b"<!doctype": "is a web page: download the file itself",
    b"<html": "is a web page: download the file itself",
    b"\x1f\x8b": _ARCHIVE, b"7z\xbc\xaf": _ARCHIVE, b"\x89HDF": "is an HDF5 file, " + _CONVERT,
}  # fmt: skip
# What a file is called that was cut for an upload: model.gguf.part1of2, model.gguf-split-a, model.gguf.aa.
_PIECE = re.compile(r"(?i)(.+\.gguf)[-._](part|split)?[-._]?(?:\d+(?:[-_]?of[-_]?(\d+))?|a{0,2}[a-z])")
_MOST_NAMED, _MOST_BLOBS = 8, 3  # pieces, and blobs, that a message has room for
_OLLAMA_MODEL, _OLLAMA_REGISTRY = "application/vnd.ollama.image.model", "registry.ollama.ai"
_WEIGHTS = (".bin", ".pth", ".pt", ".ckpt", ".h5", ".msgpack", ".onnx", ".npz", ".safetensors")


def is_gguf(path: Path) -> bool:
    """Return whether a path is a file that begins as GGUF files do; not one that cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    return False


def refuse_other_file(path: Path) -> None:
    """Say by its first bytes what a file is that is none of a checkpoint.

    Raises:
        CheckpointError: It is empty, a pointer of Git LFS, a pickle of torch, a web page, ...
    """
    with path.open("rb") as file:
        first = file.read(_HEAD_BYTES)
    if not first:
        raise CheckpointError(f"{path} is empty: download it again")
    for beginning, what in _OTHER_FILES.items():
        if first.startswith(beginning):
            raise CheckpointError(f"{path} {what}")


def refuse_pieces(path: Path) -> None:
    """Refuse a piece of a file that was cut into several without a header each, and the whole where only those lie.

    Raises:
        CheckpointError: It is one, or they do.
    """
    own = _PIECE.fullmatch(path.name)
    whole = path.with_name(own[1] if own else path.name)
    if own is None and path.exists():
        return
    matches = {one: _PIECE.fullmatch(one.name) for one in entries(path.parent) if one.is_file()}
    named = {one: match for one, match in matches.items() if match and match[1] == whole.name}
    pieces = sorted(named, key=lambda one: (len(one.name), one))
    # What wget fetched again is called model.gguf.1, and is whole.
    if not any(named[one][2] or not is_gguf(one) for one in pieces):
        return
    count = max(int(named[one][3] or 0) for one in pieces)
    lacking = f", of which {count - len(pieces)} are not there: finish the download, then"
    lacking = lacking if count > len(pieces) else ":"
    names = [shlex.quote(one.name) for one in pieces]
    names = names if len(names) <= _MOST_NAMED else [names[0], "…", names[-1]]  # a message has two lines
    command = f"cd {shlex.quote(str(whole.parent))} && cat {' '.join(names)} > {shlex.quote(whole.name)}"
    raise CheckpointError(
        f"{whole} was cut into pieces{lacking} put them together with `{command}`, and give that file"
    )


def ollama_models(root: Path) -> dict[Path, tuple[str, Path]]:
    """Return ollama's models by their manifests: what it calls them, and the file with the weights."""
    manifests, found = root / "manifests", dict[Path, tuple[str, Path]]()
    for file in sorted(islice(manifests.rglob("*"), _MOST_ENTRIES)):
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            layers = json.loads(file.read_bytes())["layers"]
            digest, *_ = [one["digest"] for one in layers if one["mediaType"] == _OLLAMA_MODEL]
            host, *names, tag = file.relative_to(manifests).parts
            names = names[1:] if names[:-1] == ["library"] else names
            names = names if host == _OLLAMA_REGISTRY else [host, *names]
            found[file] = f"{'/'.join(names)}:{tag}", root / "blobs" / digest.replace(":", "-")
    return found


def refuse_ollama(path: Path) -> None:
    """Refuse a directory of ollama's, or one of its manifests, and say which file has the weights.

    Raises:
        CheckpointError: It is one.
    """
    root = next((one for one in (path / "models", path, *path.parents) if (one / "manifests").is_dir()), None)
    if root is None or not (root / "blobs").is_dir():
        return
    manifests = root / "manifests"
    found = {file: f"{name} is {blob}" for file, (name, blob) in ollama_models(root).items()}
    shown_parts = [found[path]] if path in found else [*found.values()]
    if shown_parts and (path in found or path.is_dir()):
        others = f"; {len(shown_parts) - _MOST_BLOBS} others' is said of their file in {manifests}"
        which = "; ".join(shown_parts[:_MOST_BLOBS]) + (others if len(shown_parts) > _MOST_BLOBS else "")
        raise CheckpointError(f"{path} is ollama's: give the name or the blob of a model ({which})")


def refuse_other_directory(directory: Path) -> None:
    """Refuse a directory without `config.json`, and say what it seems to be; and one with a LoRA adapter: running the
    model without it would be another model's answer.

    Raises:
        CheckpointError: It is one.
    """
    adapter = directory / "adapter_config.json"
    if adapter.exists():
        base = None
        with suppress(ValueError, AttributeError, RecursionError):
            base = json.loads(adapter.read_bytes()).get("base_model_name_or_path")
        raise CheckpointError(
            f"{directory} holds an adapter (LoRA) of {shown(base)[1:-1] if base else 'another model'}, and adapters "
            "are not read: merge it into its model (PEFT's merge_and_unload, then save_pretrained), and give that "
            "directory"
        )
    if (directory / "config.json").exists():
        return
    refuse_ollama(directory)
    for path in entries(directory):
        refuse_pieces(path)
    anything = "has no config.json: give the directory of a transformers checkpoint with safetensors, or a GGUF file, "
    anything += "on a hub as org/name:Q4_K_M"
    raise CheckpointError(f"{directory} {next(_what_lies_there(directory), anything)}")


def _what_lies_there(directory: Path) -> Iterator[str]:
    """Return what a directory without `config.json` may be, the most telling first."""
    if (directory / "model_index.json").exists():
        yield "is a pipeline that makes images or sound, not a language model: give a language model's directory"
    for pattern in ("*/config.json", "snapshots/*/config.json", "*/snapshots/*/config.json"):
        if nested := [str(path.parent.relative_to(directory)) for path in sorted(directory.glob(pattern))]:
            yield f"has no config.json, and in it {shortened(nested)} has one: give that directory"
    # Without such a name, too, and below: of a repository with a directory for each quantisation, or ollama's blobs.
    paths = islice(chain(directory.glob("*"), directory.glob("*/*")), _MOST_ENTRIES)
    if files := sorted(str(path.relative_to(directory)) for path in paths if is_gguf(path)):
        yield f"has no config.json, and in it {shortened(files)}: give that file"
    if (directory / "params.json").exists():
        yield (
            "has its weights in the makers' own format (params.json), which is not read: take the model's checkpoint "
            "for transformers (config.json, safetensors), or a GGUF file"
        )
    if weights := _weights(directory):
        yield f"has no config.json beside {shortened(weights)}: give the whole directory of a transformers checkpoint"


def _weights(directory: Path) -> list[str]:
    """Return the names of what seems to be weights."""
    return sorted(path.name for path in directory.iterdir() if path.suffix.lower() in _WEIGHTS)


def entries(directory: Path, most: int = _MOST_ENTRIES) -> list[Path]:
    """Return some of what lies in a directory, by name; nothing of one that cannot be read."""
    with suppress(OSError), os.scandir(directory) as found:
        return sorted(directory / one.name for one in islice(found, most))
    return []


def no_weights(directory: Path) -> CheckpointError:
    """Return the error for a checkpoint without safetensors, which says what it has instead."""
    others = _weights(directory)
    ours = [name for name in others if name.lower().endswith(".safetensors")]
    if ours:
        return CheckpointError(
            f"{directory} has {shortened(ours)} and no model.safetensors.index.json, which says what belongs to the "
            "model: download that too, or call a file that holds all of it model.safetensors"
        )
    if others:
        return CheckpointError(f"{directory} has its weights as {shortened(others)}, {_CONVERT}")
    return CheckpointError(
        f"{directory} has no model.safetensors and no index of several: give a checkpoint with safetensors "
        "(pytorch_model.bin files are not read), or a GGUF file, on a hub as org/name:Q4_K_M"
    )
