"""Models by their hub id: download what a safetensors checkpoint needs and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offload_runtime.errors import HubError

_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
# Some repositories carry the same weights twice: in other formats in subfolders, or as one consolidated file.
_UNWANTED = ["*/*", "consolidated*"]


def download_model(repo_id: str) -> Path:
    """Fetch `org/name` into the hub's cache, with its own progress bars, and return the directory.

    Raises:
        HubError: Offline and not cached, no such repository, or no access to it.
    """
    from huggingface_hub import snapshot_download

    with _hub_errors(repo_id):
        return Path(snapshot_download(repo_id, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))


def download_config(repo_id: str) -> Path:
    """Fetch the `config.json` of `org/name` alone, and return its path. Raises as `download_model`."""
    from huggingface_hub import hf_hub_download

    with _hub_errors(repo_id):
        return Path(hf_hub_download(repo_id, "config.json"))


@contextmanager
def _hub_errors(repo_id: str) -> Iterator[None]:
    """Turn the hub's errors into ours, each with its way out."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    local = f"or give the path of a local directory ({repo_id!r} is not one)"
    try:
        yield
    except GatedRepoError as error:
        raise HubError(
            f"{repo_id} is gated: accept its licence on the hub and log in with `hf auth login`, {local}"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise HubError(
            f"the hub has no model {repo_id}, or it is private: check the spelling, `hf auth login`, {local}"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise HubError(
            f"{repo_id} is not in the local cache and the hub cannot be reached: connect once to download it, {local}"
        ) from error
    except EntryNotFoundError as error:
        raise HubError(f"{repo_id} has no config.json: name a repository in transformers' format, {local}") from error
    except OSError as error:
        raise HubError(
            f"downloading {repo_id} failed ({error}): check the connection and the free space in HF_HOME, {local}"
        ) from error
    except Exception as error:  # which HTTP library raises here differs between versions of huggingface_hub
        raise HubError(f"downloading {repo_id} failed ({error}): try again later, {local}") from error
