"""Where weights come from: a safetensors directory, a GGUF file or a model id of the hub, behind one Protocol.

A source checks everything that can be checked cheaply when it is opened (files, headers, shapes), so that a broken
checkpoint is refused before gigabytes are read and memory is reserved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from offload_runtime.config import ModelConfig
from offload_runtime.errors import CheckpointError

# Fills a contiguous CPU tensor of the checkpoint tensor's shape, converting to that tensor's dtype. It opens its file,
# reads and closes it again, so nothing stays mapped, and fills may run in parallel threads.
Fill = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint: the needed tensors in it, by transformers' name."""

    path: Path
    tensors: tuple[tuple[str, Fill], ...]


class CheckpointSource(Protocol):
    """An opened and validated checkpoint."""

    @property
    def reference(self) -> str:
        """What the user named, for messages."""
        ...

    @property
    def native_dtype(self) -> torch.dtype:
        """What `--dtype auto` means: the stored dtype, bf16 when the file is quantised."""
        ...

    def config(self) -> ModelConfig:
        """Shape and flags of the model."""
        ...

    def hf_config(self) -> Any:
        """The transformers configuration object."""
        ...

    def total_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the packed weights in `dtype`."""
        ...

    def shards(self) -> Iterator[Shard]:
        """The files one after the other; together they hold every tensor of `checkpoint_tensors(config())`."""
        ...

    def tokenizer(self) -> Any:
        """transformers' tokenizer with its chat template.

        Raises:
            CheckpointError: There is none or it cannot be read.
        """
        ...

    def generation_settings(self) -> dict[str, Any]:
        """The content of `generation_config.json`, or the token ids that would be in it."""
        ...

    def generation_eos(self) -> tuple[int, ...]:
        """Token ids that end an answer: the generation settings' or else the model configuration's."""
        ...


def _looks_like_hub_id(text: str) -> bool:
    """`org/name`, and not something that only a path would be written like."""
    if text.startswith((".", "/", "~")) or Path(text).suffix in (".gguf", ".safetensors"):
        return False
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text) is not None


def _open_directory(directory: Path, reference: str) -> CheckpointSource:
    from offload_runtime.weights.gguf import GgufCheckpoint
    from offload_runtime.weights.safetensors import SafetensorsCheckpoint

    gguf_files = sorted(directory.glob("*.gguf"))
    if gguf_files and not (directory / "config.json").exists():
        if len(gguf_files) > 1:
            raise CheckpointError(
                f"{directory} holds {len(gguf_files)} GGUF files ({gguf_files[0].name}, ...): name the one to load"
            )
        return GgufCheckpoint(gguf_files[0], reference=reference)
    return SafetensorsCheckpoint(directory, reference=reference)


def open_checkpoint(reference: str | Path) -> CheckpointSource:
    """Open and validate a checkpoint.

    Args:
        reference: A directory with safetensors, a `.gguf` file, or `org/name` on the hub (downloaded if needed).

    Raises:
        CheckpointError: Missing, truncated, incomplete, or of unexpected shapes.
        UnsupportedArchitectureError: A model the decoder does not implement.
        HubError: The model could not be fetched.
    """
    name = str(reference)
    with readable(name):
        found = find_checkpoint(reference)
        if isinstance(found, Path):
            return _open(found, name)
        from offload_runtime.weights.hub import download_model

        return _open_directory(download_model(found), name)


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Turn what the system refuses to read of a checkpoint into a `CheckpointError` that names it."""
    try:
        yield
    except OSError as error:  # no permission, a name too long, a disk that fails
        raise CheckpointError(
            f"{name} cannot be read ({error.strerror or error}): check the path and its permissions"
        ) from error


def find_checkpoint(reference: str | Path) -> Path | str:
    """The directory or file that is named, or else the model of the hub that the name means, as text.

    Raises:
        CheckpointError: It is neither.
    """
    name = str(reference)
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"{name} cannot be found ({error}): write the path without ~") from error
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix in (".gguf", ".safetensors"):
            return path
        raise CheckpointError(f"{path} is not a checkpoint: give a directory with safetensors or a .gguf file")
    if isinstance(reference, Path) or not _looks_like_hub_id(name):
        raise CheckpointError(
            f"{name} does not exist: give a directory with safetensors, a .gguf file, or org/name of a model hub"
        )
    return name


def _open(path: Path, name: str) -> CheckpointSource:
    """Open a directory or file that is there."""
    from offload_runtime.weights.gguf import GgufCheckpoint

    if path.is_dir():
        return _open_directory(path, name)
    return GgufCheckpoint(path, reference=name) if path.suffix == ".gguf" else _open_directory(path.parent, name)
