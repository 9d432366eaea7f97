"""Small models that could draft for another one, where its user has them: beside it, or in the hub's cache.

Only directories, configurations and headers are read, nothing is fetched, and what is wrong with a neighbour
is its own.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from offload_runtime.weights.checkpoint import DescribedModel
from offload_runtime.weights.gguf_header import gguf_parts
from offload_runtime.weights.layout import checkpoint_tensors
from offload_runtime.weights.sources import describe_model
from offload_runtime.weights.vocabulary import SharedVocabulary, share_vocabulary

# A draft has at most this share of the target's parameters: a step of a larger one costs what it brings.
_MOST_SHARE = 1 / 3
# Entries of a directory that are looked at, models whose headers are read, the smallest first, and drafts that are
# planned with: a header of 150,000 tokens takes 0.3 s, a plan up to one.
_MOST_ENTRIES, _MOST_HEADERS, _MOST_DRAFTS = 256, 8, 3
# Vocabularies of one family are padded to other sizes.
_MOST_PADDING = 1024
# Small models that are usual with a family, by architecture and rows of the embedding, and their parameters.
_USUAL = {
    ("Qwen2ForCausalLM", 151936): ("Qwen2.5-0.5B-Instruct", 494_000_000),
    ("Qwen2ForCausalLM", 152064): ("Qwen2.5-0.5B-Instruct", 494_000_000),
    ("Qwen3ForCausalLM", 151936): ("Qwen3-0.6B", 596_000_000),
    ("LlamaForCausalLM", 128256): ("Llama-3.2-1B-Instruct", 1_236_000_000),
    ("LlamaForCausalLM", 49152): ("SmolLM2-135M-Instruct", 135_000_000),
    ("LlamaForCausalLM", 32000): ("TinyLlama-1.1B-Chat-v1.0", 1_100_000_000),
}


@dataclass(frozen=True)
class FoundDraft:
    """A model that may draft for another one: its name, as it was opened or described, what it may propose, and its
    share of the other's parameters."""

    name: str
    model: DescribedModel
    shared: SharedVocabulary
    share: float


def find_drafts(
    reference: object, target: DescribedModel, read: Callable[[str], DescribedModel] | None = None
) -> list[FoundDraft]:  # fmt: skip
    """A few models of the target's vocabulary with at most a third of its parameters, the smallest files first.

    Args:
        reference: What the user named; of a model that has no path only the hub's cache is looked through.
        target: The same, opened or described.
        read: Opens what is found; None leaves it described.
    """
    own, found, described = _path_of(reference), list[FoundDraft](), 0
    sized = sorted((_weight_bytes(path), path) for path in dict.fromkeys(_neighbours(own)) if _may_be_model(path))
    own_bytes, parameters = math.inf if own is None else _weight_bytes(own), num_parameters(target)
    # Beside a target that is a configuration alone drafts may be that, too.
    for path in (path for nbytes, path in sized if own_bytes == 0 or 0 < nbytes < own_bytes):
        if described == _MOST_HEADERS or len(found) == _MOST_DRAFTS:
            break
        try:
            model = describe_model(path)
            described += 1
            share = num_parameters(model) / parameters
            near = abs(model.config().vocab_size - target.config().vocab_size) <= _MOST_PADDING
            shared = share_vocabulary(target, model) if near and share <= _MOST_SHARE else None
            if shared is not None:
                found.append(FoundDraft(_name(path), read(str(path)) if read else model, shared, share))
        except Exception as error:  # whatever is wrong with it, nobody has asked for this one
            logging.getLogger(__name__).debug("%s is no draft: %s", path, error)
    return found


def usual_draft(target: DescribedModel) -> str | None:
    """The small model that is usual with a target's family; None for a family that has none, and for a target with less
    than four times its parameters."""
    config = target.config()
    name, size = _USUAL.get((config.architecture, config.vocab_size), (None, 0))
    return name if num_parameters(target) >= 4 * size else None


def num_parameters(model: DescribedModel) -> int:
    """Of all its matrices and vectors."""
    return sum(math.prod(tensor.shape) for tensor in checkpoint_tensors(model.config()).values())


def _path_of(reference: object) -> Path | None:
    """Where a model lies that was named by a path."""
    with suppress(OSError, RuntimeError, ValueError):
        path = Path(os.path.abspath(Path(str(reference)).expanduser()))
        if path.exists():
            return path.parent if path.suffix == ".safetensors" else path
    return None


def _neighbours(own: Path | None) -> Iterator[Path]:
    """Files and directories that may be models: what lies beside the target, or beside the directory of its file, and
    what the hub's cache holds. Not the target itself."""
    places = [] if own is None else [own.parent, *([own.parent.parent] if own.is_file() else [])]
    ours = set[Path]() if own is None else {own, own.parent, *gguf_parts(own)}
    for place in places:
        for path in _entries(place):
            is_model = path.is_dir() or (path.suffix.lower() == ".gguf" and gguf_parts(path)[0] == path)
            if is_model and path not in ours:
                yield path
    yield from (path for path in _cached() if path not in ours)


def _cached() -> Iterator[Path]:
    """The newest snapshots of the models in the hub's cache."""
    from huggingface_hub import constants

    for repository in _entries(Path(constants.HF_HUB_CACHE)):
        with suppress(OSError, ValueError):
            if repository.name.startswith("models--"):
                yield repository / "snapshots" / (repository / "refs" / "main").read_text().strip()


def _entries(directory: Path) -> list[Path]:
    """The first of a directory's entries, by name; none of one that cannot be read."""
    with suppress(OSError), os.scandir(directory) as entries:
        return sorted(directory / entry.name for entry in islice(entries, _MOST_ENTRIES))
    return []


def _may_be_model(path: Path) -> bool:
    """Whether a file, or something in a directory, is named like a model."""
    with suppress(OSError):
        return (
            path.is_file()
            or (path / "config.json").exists()
            or any(one.suffix.lower() == ".gguf" for one in _entries(path))
        )
    return False


def _weight_bytes(path: Path) -> int:
    """Bytes of the files with weights that a path means."""
    with suppress(OSError):
        if path.is_file():
            return sum(part.stat().st_size for part in gguf_parts(path))
        files: Iterable[Path] = [one for one in _entries(path) if one.suffix.lower() in (".safetensors", ".gguf")]
        return sum(file.stat().st_size for file in files)
    return 0


def _name(path: Path) -> str:
    """What a user calls a model: of a snapshot in the hub's cache the repository's name."""
    if path.parent.name == "snapshots":
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name
