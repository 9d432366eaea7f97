"""From what a user names to a model: a directory, a file or a model id of the hub, opened whole or only described."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from offload_runtime.errors import CheckpointError
from offload_runtime.fields import Fields, shortened
from offload_runtime.models.registry import language_settings, require_family
from offload_runtime.weights.header import GGUF_MAGIC, first_bytes, refuse_ollama, refuse_other_file, refuse_pieces
from offload_runtime.weights.hub import CHECKPOINT_FILES, CONFIGURATION_FILES, download_gguf, download_model
from offload_runtime.weights.vocabulary import directory_vocabulary

# What reads weights is imported where it is needed: `refuse_early` does without torch.
if TYPE_CHECKING:
    from offload_runtime.weights.checkpoint import CheckpointSource, DescribedModel

_SUFFIXES = (".gguf", ".safetensors")
# org/name, org/name:Q4_K_M
_HUB_ID = re.compile(
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:(?::|/(?:blob|resolve)/main/)([\w./-]+)|/tree/main)?/?"
)
_HUB_PREFIX = re.compile(r"(?i)(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/(?=[^/]+/)|\?download=true$")
_COMPANION = re.compile(r"mmproj|(?i:(^|[-._])imatrix\.gguf$)")  # what lies beside models


def open_checkpoint(reference: str | Path) -> CheckpointSource:
    """Open and validate a checkpoint.

    Args:
        reference: A directory with safetensors, a GGUF file (any one of a model in several), `org/name` on the hub,
            or `org/name:Q4_K_M`, a GGUF file of that quantisation there (downloaded if needed); `hf.co/` and the hub's
            address may stand before them.

    Raises:
        CheckpointError: Missing, truncated, incomplete, or of unexpected shapes.
        UnsupportedArchitectureError: A model the decoder does not implement.
        HubError: The model could not be fetched.
    """
    from offload_runtime.weights.gguf import open_gguf
    from offload_runtime.weights.safetensors import open_safetensors

    name = str(reference)
    with _located(reference, CHECKPOINT_FILES) as path:
        return open_safetensors(path, reference=name) if path.is_dir() else open_gguf(path, reference=name)


def describe_model(reference: str | Path) -> DescribedModel:
    """What a plan has to know of a model, without transformers, whose import takes seconds; reads configuration files
    and headers, downloads at most a `config.json` and, where vocabularies are compared, a `tokenizer.json`, or the GGUF
    file that is named.

    Args:
        reference: As of `open_checkpoint`.

    Raises:
        CheckpointError, UnsupportedArchitectureError, HubError: As `open_checkpoint`, but for missing weights.
    """
    from offload_runtime.weights.gguf import describe_gguf
    from offload_runtime.weights.safetensors import describe_safetensors

    with _located(reference, CONFIGURATION_FILES) as path:
        if not path.is_dir():
            return describe_gguf(path)
        found = describe_safetensors(path)
    if Path(reference).expanduser().exists():
        return found
    repo_id = _HUB_PREFIX.sub("", str(reference)).removesuffix("/").removesuffix("/tree/main")
    return replace(
        found, read_vocabulary=cache(lambda: directory_vocabulary(download_model(repo_id, ("tokenizer.json",))))
    )


def refuse_early(reference: str | Path) -> None:
    """Refuse what can be told without torch, whose import takes seconds: a path with nothing there, and a directory or
    a GGUF file with a model of a family that does not run. A hub is not asked.

    Raises:
        CheckpointError, UnsupportedArchitectureError: As `open_checkpoint`.
    """
    path, name = Path(reference), _HUB_PREFIX.sub("", str(reference))
    with suppress(RuntimeError):
        path = path.expanduser()
    if not os.path.exists(path) and _HUB_ID.fullmatch(name) and path.suffix.lower() not in _SUFFIXES:
        return
    with _located(reference, ()) as found:
        if found.is_file():
            from offload_runtime.weights.gguf_header import read_gguf_header, supported_family

            supported_family(read_gguf_header(found))
        elif (found / "config.json").is_file():
            with suppress(ValueError, RecursionError):  # told by whoever reads all of it
                settings = json.loads((found / "config.json").read_bytes())
                if isinstance(settings, dict):
                    require_family(Fields(str(found), language_settings(settings, str(found))))


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
        return _of_file(path)
    if not path.is_dir():
        refuse_pieces(path)
        on_hub = _HUB_ID.fullmatch(_HUB_PREFIX.sub("", name))
        if isinstance(reference, Path) or on_hub is None or (path.suffix.lower() in _SUFFIXES and not on_hub[2]):
            raise CheckpointError(
                f"{name} does not exist: give a directory with safetensors, a .gguf file, or org/name of a model hub"
            )
        if on_hub[2]:
            return _only_model(name, download_gguf(on_hub[1], on_hub[2]))
        return download_model(on_hub[1], wanted)  # and not what else is in the cache
    files = [file for file in path.iterdir() if file.suffix.lower() == ".gguf"]
    found = [file for file in files if not _COMPANION.search(file.name)] or files
    if not found or ((path / "config.json").exists() and any(path.glob("*.safetensors*"))):
        return path
    return _only_model(str(path), found)


def _of_file(path: Path) -> Path:
    """The GGUF file itself, whatever it is called, or the directory that a safetensors file is a model's of.

    Raises:
        CheckpointError: It is neither.
    """
    refuse_pieces(path)
    first = first_bytes(path)
    if first.startswith(GGUF_MAGIC) or path.suffix.lower() == ".gguf":
        return path
    refuse_other_file(path, first)
    directory = path.parent
    if path.suffix.lower() != ".safetensors":
        refuse_ollama(path)
        raise CheckpointError(f"{path} is not a checkpoint: give a directory with safetensors or a GGUF file")
    from offload_runtime.weights.safetensors import weight_files

    meant = weight_files(directory)
    if meant and path not in meant:
        names = shortened([file.name for file in meant])
        raise CheckpointError(f"{path} is not what its directory's model is read from ({names}): give the directory")
    return directory


def _only_model(where: str, files: Sequence[Path]) -> Path:
    """The first file of the one model that these files are of."""
    from offload_runtime.weights.gguf_header import gguf_parts

    models = sorted({gguf_parts(file)[0] for file in files})
    if len(models) != 1:
        names = shortened([model.name for model in models])
        raise CheckpointError(f"{where} holds {len(models)} GGUF models ({names}): name the one to load")
    return models[0]
