"""From what a user names to a model: a directory, a file or a model id of the hub, opened whole or only described."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from offload_runtime.config import ModelConfig
from offload_runtime.errors import CheckpointError
from offload_runtime.weights.architectures import model_config_from_json
from offload_runtime.weights.checkpoint import Checkpoint
from offload_runtime.weights.gguf import config_from_gguf, open_gguf, read_gguf_header
from offload_runtime.weights.hub import download_config, download_model
from offload_runtime.weights.safetensors import open_safetensors, read_json, stored_dtype

_DTYPE_NAMES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class DescribedModel:
    """A model that is known by its configuration."""

    model_config: ModelConfig
    native_dtype: torch.dtype

    def config(self) -> ModelConfig:
        """Shape and flags of the model."""
        return self.model_config


def open_checkpoint(reference: str | Path) -> Checkpoint:
    """Open and validate a checkpoint.

    Args:
        reference: A directory with safetensors, a `.gguf` file, or `org/name` on the hub (downloaded if needed).

    Raises:
        CheckpointError: Missing, truncated, incomplete, or of unexpected shapes.
        UnsupportedArchitectureError: A model the decoder does not implement.
        HubError: The model could not be fetched.
    """
    name = str(reference)
    with _readable(name):
        found = _find(reference)
        path = download_model(found) if isinstance(found, str) else found
        gguf_file = _gguf_file(path)
        if gguf_file is not None:
            return open_gguf(gguf_file, reference=name)
        return open_safetensors(path if path.is_dir() else path.parent, reference=name)


def describe_model(reference: str | Path) -> DescribedModel:
    """What a plan has to know of a model, without transformers, whose import takes seconds; reads configuration files
    and headers, downloads at most a `config.json`.

    Args:
        reference: A directory with `config.json`, a safetensors or `.gguf` file, or `org/name` on the hub.

    Raises:
        CheckpointError, UnsupportedArchitectureError, HubError: As `open_checkpoint`, but for missing weights.
    """
    with _readable(str(reference)):
        found = _find(reference)
        path = download_config(found) if isinstance(found, str) else found
        gguf_file = _gguf_file(path)
        if gguf_file is not None:
            raw = config_from_gguf(read_gguf_header(gguf_file))
            return DescribedModel(model_config_from_json(raw, str(gguf_file)), torch.bfloat16)
        directory = path if path.is_dir() else path.parent
        raw = read_json(directory / "config.json")
        config = model_config_from_json(raw, str(directory))
        name = str(raw.get("dtype") or raw.get("torch_dtype")).removeprefix("torch.")
        return DescribedModel(config, stored_dtype(directory) or _DTYPE_NAMES.get(name, torch.bfloat16))


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Turn what the system refuses to read of a checkpoint into a `CheckpointError` that names it."""
    try:
        yield
    except OSError as error:  # no permission, a name too long, a disk that fails
        raise CheckpointError(
            f"{name} cannot be read ({error.strerror or error}): check the path and its permissions"
        ) from error


def _find(reference: str | Path) -> Path | str:
    """The directory or file that is named, or else the model of the hub that the name means, as text.

    Raises:
        CheckpointError: It is neither.
    """
    name = str(reference)
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"{name} cannot be found ({error}): write the path without ~") from error
    if path.is_dir() or (path.is_file() and path.suffix in (".gguf", ".safetensors")):
        return path
    if path.is_file():
        raise CheckpointError(f"{path} is not a checkpoint: give a directory with safetensors or a .gguf file")
    if isinstance(reference, Path) or not _looks_like_hub_id(name):
        raise CheckpointError(
            f"{name} does not exist: give a directory with safetensors, a .gguf file, or org/name of a model hub"
        )
    return name


def _looks_like_hub_id(text: str) -> bool:
    """`org/name`, and not something that only a path would be written like."""
    if Path(text).suffix in (".gguf", ".safetensors"):
        return False
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text) is not None


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path means; None where it means a checkpoint of transformers."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    found = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise CheckpointError(f"{path} holds {len(found)} GGUF files ({found[0].name}, ...): name the one to load")
    return found[0] if found else None
