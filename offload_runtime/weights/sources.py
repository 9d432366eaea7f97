"""From what a user names to a model: a directory, a file or a model id of the hub, opened whole or only described."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from offload_runtime.errors import CheckpointError
from offload_runtime.weights.architectures import model_config_from_json
from offload_runtime.weights.checkpoint import CheckpointSource, DescribedModel
from offload_runtime.weights.gguf import config_from_gguf, open_gguf, read_gguf_header
from offload_runtime.weights.hub import CHECKPOINT_FILES, download_model
from offload_runtime.weights.safetensors import open_safetensors, read_json, stored_dtype

_SUFFIXES = (".gguf", ".safetensors")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # org/name
_DTYPE_NAMES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


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
    with _located(reference, CHECKPOINT_FILES) as path:
        return open_gguf(path, reference=name) if path.is_file() else open_safetensors(path, reference=name)


def describe_model(reference: str | Path) -> DescribedModel:
    """What a plan has to know of a model, without transformers, whose import takes seconds; reads configuration files
    and headers, downloads at most a `config.json`.

    Args:
        reference: A directory with `config.json`, a safetensors or `.gguf` file, or `org/name` on the hub.

    Raises:
        CheckpointError, UnsupportedArchitectureError, HubError: As `open_checkpoint`, but for missing weights.
    """
    with _located(reference, ("config.json",)) as path:
        if path.is_file():
            raw = config_from_gguf(read_gguf_header(path))
            return DescribedModel(model_config_from_json(raw, str(path)), torch.bfloat16)
        raw = read_json(path / "config.json")
        name = str(raw.get("dtype") or raw.get("torch_dtype")).removeprefix("torch.")
        native_dtype = stored_dtype(path) or _DTYPE_NAMES.get(name, torch.bfloat16)
        return DescribedModel(model_config_from_json(raw, str(path)), native_dtype)


@contextmanager
def _located(reference: str | Path, wanted: Sequence[str]) -> Iterator[Path]:
    """What `_locate` finds; what the system refuses to read of it becomes a `CheckpointError` that names it."""
    try:
        yield _locate(reference, wanted)
    except OSError as error:  # no permission, a name too long, a disk that fails
        raise CheckpointError(
            f"{error.filename or reference} cannot be read ({error.strerror or error}): "
            "check the path and its permissions"
        ) from error


def _locate(reference: str | Path, wanted: Sequence[str]) -> Path:
    """The GGUF file that a reference means, or the directory of a checkpoint of transformers.

    Args:
        reference: What the user named.
        wanted: What to download of a model of the hub, where the name is no path.

    Raises:
        CheckpointError: It means neither, or several.
    """
    name = str(reference)
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"{name} cannot be found ({error}): write the path without ~") from error
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise CheckpointError(f"{path} is not a checkpoint: give a directory with safetensors or a .gguf file")
        return path if path.suffix == ".gguf" else path.parent
    if not path.is_dir():
        if isinstance(reference, Path) or path.suffix in _SUFFIXES or not _HUB_ID.fullmatch(name):
            raise CheckpointError(
                f"{name} does not exist: give a directory with safetensors, a .gguf file, or org/name of a model hub"
            )
        path = download_model(name, wanted)
    found = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise CheckpointError(f"{path} holds {len(found)} GGUF files ({found[0].name}, ...): name the one to load")
    return found[0] if found else path
