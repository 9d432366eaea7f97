"""Models that are on this machine: in the hub's cache, in ollama's and in LM Studio's folders. Their names stand for
their paths. Only directories and ollama's manifests are read."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from offload_runtime.errors import CheckpointError, StorageError
from offload_runtime.fields import shortened
from offload_runtime.files import user_directory
from offload_runtime.weights.gguf_header import gguf_parts
from offload_runtime.weights.header import entries, ollama_models

# A file by what it is quantised as; `UD-` are other mixtures of the same types, and `mmproj` is no language model.
TAGGED = re.compile(r"(?i)(?!.*mmproj)(?:.*?[-._/])?((?:UD-)?(?:I?Q|TQ|B?F|MXFP|NVFP)\d\w*)(?:-\d+-of-\d+)?\.gguf")
COMPANION = re.compile(r"mmproj|(?i:(^|[-._])imatrix\.gguf$)")  # what lies beside models
OWN, HUB, LM_STUDIO, OLLAMA = OWNERS = ("demo", "hub", "LM Studio", "ollama")
_MOST_FILES = 2000  # of a repository that are looked at
# Where ollama keeps models that nobody has told it where to, the service of its installer for Linux included.
_OF_OLLAMA = ("~/.ollama/models", "/usr/share/ollama/.ollama/models")
_OF_LM_STUDIO = ("~/.lmstudio/models", "~/.cache/lm-studio/models")


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine: its name, which of `OWNERS` has it (`demo`: that command has fetched it), the file or
    directory to open, and the bytes of its weights."""

    name: str
    owner: str
    path: Path
    size_bytes: int

    @property
    def full_name(self) -> str:
        """Return its name as names are compared."""
        return self.name.removeprefix("hf.co/").lower()

    @property
    def short_name(self) -> str:
        """Return the same without who has published it."""
        return self.full_name.rpartition("/")[2]


def local_models() -> list[LocalModel]:
    """Return all models that are here, in the order of `OWNERS`, each one's by name."""
    found = [model for repository, snapshot in hub_snapshots() for model in _models_in(repository, HUB, snapshot)]
    with suppress(StorageError):
        own = [one for one in entries(user_directory("cache", holds="models")) if one.suffix == ".gguf"]
        found += [LocalModel(one.stem, OWN, one, weight_bytes(one)) for one in own]
    for place in _directories(_OF_LM_STUDIO):
        for publisher in entries(place):
            for directory in entries(publisher):
                found += _models_in(f"{publisher.name}/{directory.name}", LM_STUDIO, directory)
    named = os.environ.get("OLLAMA_MODELS")
    for place in _directories((named,) if named else _OF_OLLAMA):
        for name, blob in ollama_models(place).values():
            if blob.is_file():
                found.append(LocalModel(name, OLLAMA, blob, weight_bytes(blob)))
    return sorted(found, key=lambda model: (OWNERS.index(model.owner), model.full_name))


def find_local(name: str) -> LocalModel | None:
    """Return the model that a name stands for, in capitals or not: its whole name, that without who has published it,
    and of this what is before the colon, or a file's own name. Of ollama's models no tag is `latest`.

    Raises:
        CheckpointError: It stands for several.
    """
    word, found = name.lower(), local_models()
    if exact := [one for one in found if one.full_name in (word, f"{word}:latest")]:
        return exact[0]
    if "/" in word:
        return None
    named = [one for one in found if one.short_name == word] or [
        one for one in found if word in (one.short_name.partition(":")[0], one.path.name.lower(), one.path.stem.lower())
    ]
    if len({os.path.realpath(one.path) for one in named}) > 1:
        names = shortened([one.name for one in named])
        raise CheckpointError(f"{name} is {len(named)} of the models that are here ({names}): give one's whole name")
    return named[0] if named else None


def hub_repositories() -> Iterator[tuple[str, Path]]:
    """Return what the hub's cache has of models: `org/name`, and the repository's directory."""
    from huggingface_hub import constants

    for directory in entries(Path(constants.HF_HUB_CACHE)):
        if directory.name.startswith("models--"):
            yield directory.name.removeprefix("models--").replace("--", "/", 1), directory


def hub_snapshots() -> Iterator[tuple[str, Path]]:
    """Return the models in the hub's cache: `org/name`, and the newest snapshot's directory."""
    for repo_id, directory in hub_repositories():
        with suppress(OSError, ValueError):
            yield repo_id, directory / "snapshots" / (directory / "refs" / "main").read_text().strip()


def weight_bytes(path: Path) -> int:
    """Return bytes of the files with weights that a path means."""
    with suppress(OSError):
        if path.is_file():
            return sum(part.stat().st_size for part in gguf_parts(path) if part.exists())
        files = (one for one in entries(path) if one.suffix.lower() in (".safetensors", ".gguf"))
        return sum(file.stat().st_size for file in files)
    return 0


def _models_in(repository: str, owner: str, directory: Path) -> Iterator[LocalModel]:
    """Return the models in the directory of a repository: as safetensors, and each as GGUF file."""
    weights = [one for one in entries(directory) if one.suffix == ".safetensors" and one.is_file()]
    if weights and (directory / "config.json").is_file():
        yield LocalModel(repository, owner, directory, sum(one.stat().st_size for one in weights))
    files = (one for one in islice(directory.rglob("*"), _MOST_FILES) if one.suffix.lower() == ".gguf")
    models = {
        one: TAGGED.fullmatch(one.relative_to(directory).as_posix())
        for one in sorted(files)
        if one.is_file() and not COMPANION.search(one.name) and gguf_parts(one)[0] == one
    }
    tags = Counter(match[1].upper() for match in models.values() if match)
    for path, match in models.items():
        tag = match[1].upper() if match and tags[match[1].upper()] == 1 else path.name
        yield LocalModel(f"{repository}:{tag}", owner, path, weight_bytes(path))


def _directories(names: Iterable[str]) -> Iterator[Path]:
    """Return those of some directories that are there."""
    for name in names:
        with suppress(OSError, RuntimeError):
            if (path := Path(name).expanduser()).is_dir():
                yield path
