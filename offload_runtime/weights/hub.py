"""The hub: what is fetched of it into its client's cache, and what is deleted there."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from offload_runtime.errors import HubError, StorageError
from offload_runtime.fields import shown
from offload_runtime.weights.local import TAGGED

CHECKPOINT_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "mask_embedding.pt")
CONFIGURATION_FILES = (
    "config.json", "adapter_config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json",
)  # fmt: skip
# Some repositories carry the same weights twice: in other formats in subfolders, or as one consolidated file. Of
# subfolders only templates are wanted (`additional_chat_templates/`).
_UNWANTED = (*(f"*/{files}" for files in CHECKPOINT_FILES if files != "*.jinja"), "consolidated*")
_SHA256, _PIECE_BYTES = re.compile("[0-9a-f]{64}"), 1 << 22


def download_model(repo_id: str, wanted: Sequence[str], unwanted: Sequence[str] = _UNWANTED) -> Path:
    """Fetch what is `wanted` of `org/name` into the hub's cache, with its own progress bars; returns the directory.

    Raises:
        HubError: Offline and not cached, no such repository, no access to it, or a file came with another checksum.
    """
    from huggingface_hub import errors, snapshot_download

    try:
        if wanted is not CONFIGURATION_FILES:  # which are small
            _fetch_large_files(repo_id, wanted, unwanted)
        return Path(snapshot_download(repo_id, allow_patterns=list(wanted), ignore_patterns=list(unwanted)))
    except HubError:
        raise
    except Exception as error:  # which HTTP library raises here differs between versions of huggingface_hub
        if isinstance(error, errors.GatedRepoError):
            message = f"{repo_id} is gated: accept its licence on the hub and log in with `hf auth login`"
        elif isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
            message = f"the hub has no model {repo_id}, or it is private: check the spelling, `hf auth login`"
        elif isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
            message = f"{repo_id} is not in the local cache and the hub cannot be reached: connect once to download it"
        else:
            message = (
                f"downloading {repo_id} failed ({shown(error)}): check the connection and the free space in HF_HOME"
            )
        raise HubError(f"{message}, or give the path of a local directory ({repo_id!r} is not one)") from error


def download_gguf(repo_id: str, name: str) -> list[Path]:
    """Fetch the GGUF files of `org/name` that are meant by what stands behind a colon: a quantisation in capitals or
    not, whole or in parts, in whatever folder; or a file's own name.

    Raises:
        HubError: As `download_model`, or there are none.
    """
    from huggingface_hub.utils import filter_repo_objects

    def in_any_case(text: str) -> str:
        return "".join(f"[{letter.lower()}{letter.upper()}]" if letter.isalpha() else letter for letter in text)

    end, suffix = in_any_case(name), in_any_case(".gguf")
    tagged = [f"*[-._/]{end}{part}{suffix}" for part in ("", "-?????-of-?????")]
    wanted = [name, f"*/{name}"] if name.lower().endswith(".gguf") else tagged
    unwanted = ["*mmproj*", f"*[uU][dD]-{end}*"]
    directory = download_model(repo_id, wanted, unwanted)
    names, where = [file.relative_to(directory).as_posix() for file in directory.rglob(f"*{suffix}")], "the local cache"
    found = [directory / file for file in filter_repo_objects(names, allow_patterns=wanted, ignore_patterns=unwanted)]
    if not found:
        tags = sorted({match[1].upper() for match in map(TAGGED.fullmatch, names) if match})
        if of_hub := gguf_tags(repo_id):
            tags, where = of_hub, "the hub"
        raise HubError(
            f"{repo_id} has no GGUF model for {name}, and {where} has {', '.join(tags) or 'none'}: "
            "write one of these behind the colon, or a file's whole name"
        )
    return found


def gguf_tags(repo_id: str) -> list[str]:
    """Return what may stand behind the colon of a repository's name, as the hub lists its files; none offline."""
    from huggingface_hub import list_repo_files

    with suppress(Exception):
        return sorted({match[1].upper() for match in map(TAGGED.fullmatch, list_repo_files(repo_id)) if match})
    return []


def _fetch_large_files(repo_id: str, wanted: Sequence[str], unwanted: Sequence[str]) -> None:
    """Fetch the large files of a repository to where the hub's client finds them: it begins a file anew when it was
    killed, and compares no checksum. Nothing is fetched offline, and none of more bytes than the hub serves so."""
    from huggingface_hub import HfApi, constants, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, filter_repo_objects

    siblings: list[Any] = []
    with suppress(Exception):  # what is wrong is said by what follows
        siblings = HfApi().model_info(repo_id, files_metadata=True).siblings or []
    named = {one.rfilename: one for one in siblings if one.lfs is not None and _SHA256.fullmatch(one.lfs.sha256)}
    cache, folder = Path(constants.HF_HUB_CACHE), f"models--{repo_id.replace('/', '--')}"
    for name in filter_repo_objects(list(named), allow_patterns=list(wanted), ignore_patterns=list(unwanted)):
        digest, size_bytes = named[name].lfs.sha256, named[name].size
        blob, lock = cache / folder / "blobs" / digest, cache / ".locks" / folder / f"{digest}.lock"
        if size_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
            continue
        for path in (blob, lock):
            path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):  # the client's own
            if blob.exists():
                continue
            partial = blob.with_name(f"{digest}.part")
            with partial.open("ab") as file:
                http_get(
                    hf_hub_url(repo_id, name), file, resume_size=file.tell(), headers=build_hf_headers(),
                    expected_size=size_bytes, displayed_filename=name,
                )  # fmt: skip
            found = _sha256(partial)
            if found != digest:
                partial.unlink()
                raise HubError(
                    f"{name} of {repo_id} came with SHA-256 {found}, not {digest}, and was deleted: fetch it again"
                )
            partial.replace(blob)


def _sha256(path: Path) -> str:
    """Return a file's checksum in hexadecimal digits."""
    found, piece = hashlib.sha256(), memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(piece):
            found.update(piece[:size])
    return found.hexdigest()


def delete_repository(directory: Path) -> None:
    """Delete all that the hub's cache has of a repository. Raises `StorageError`."""
    with _deleting():
        shutil.rmtree(directory)


def delete_files(directory: Path, files: Sequence[Path]) -> None:
    """Delete some files of a repository in the hub's cache, of which others stay. Raises `StorageError`."""
    blobs = {os.path.realpath(file) for file in files}
    with _deleting():
        for one in [one for one in (directory / "snapshots").rglob("*") if os.path.realpath(one) in blobs]:
            one.unlink()  # of all revisions
        for blob in blobs:
            Path(blob).unlink(missing_ok=True)


@contextmanager
def _deleting() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise StorageError(
            f"{error.filename} cannot be deleted ({why}): check its permissions, and whether a program has it open"
        ) from error
