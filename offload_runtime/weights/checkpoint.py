"""What a checkpoint is to everything above: an opened and validated source of tensors; and what its readers share.

A source checks everything that can be checked cheaply when it is opened (files, headers, shapes), so that a broken
checkpoint is refused before gigabytes are read and memory is reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from offload_runtime.config import ModelConfig
from offload_runtime.errors import CheckpointError
from offload_runtime.weights.architectures import token_ids
from offload_runtime.weights.encoding import Fill

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_SHOWN = 5  # names listed in a message before "..."


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint: the needed tensors in it, by transformers' name."""

    path: Path
    tensors: tuple[tuple[str, Fill], ...]


class ModelDescription(Protocol):
    """What a plan has to know of a model; every `CheckpointSource` is one."""

    @property
    def native_dtype(self) -> torch.dtype:
        """What `--dtype auto` means: the stored dtype, bf16 when the file is quantised."""

    def config(self) -> ModelConfig:
        """Shape and flags of the model."""


class CheckpointSource(ModelDescription, Protocol):
    """An opened and validated checkpoint."""

    @property
    def reference(self) -> str:
        """What the user named, for messages."""

    def hf_config(self) -> Any:
        """The transformers configuration object."""

    def shards(self) -> Iterator[Shard]:
        """The files one after the other; together they hold every tensor of `checkpoint_tensors(config())`."""

    def tokenizer(self) -> Any:
        """transformers' tokenizer with its chat template.

        Raises:
            CheckpointError: There is none or it cannot be read.
        """

    def generation_settings(self) -> dict[str, Any]:
        """The content of `generation_config.json`, or the token ids that would be in it."""

    def generation_eos(self) -> tuple[int, ...]:
        """Token ids that end an answer: the generation settings' or else the model configuration's."""


@dataclass(frozen=True)
class Checkpoint:
    """A `CheckpointSource` as the readers of both formats make it. `generation` is its `generation_config.json`, None
    where there is none."""

    reference: str
    model_config: ModelConfig
    transformers_config: Any
    native_dtype: torch.dtype
    files: tuple[Shard, ...]
    read_tokenizer: Callable[[], Any]
    generation: dict[str, Any] | None = None

    def config(self) -> ModelConfig:
        """Shape and flags of the model."""
        return self.model_config

    def hf_config(self) -> Any:
        """The transformers configuration object."""
        return self.transformers_config

    def shards(self) -> Iterator[Shard]:
        """The files one after the other."""
        return iter(self.files)

    def tokenizer(self) -> Any:
        """transformers' tokenizer with its chat template. Raises `CheckpointError` where there is none to be read."""
        return self.read_tokenizer()

    def generation_settings(self) -> dict[str, Any]:
        """The content of `generation_config.json`, or the token ids that would be in it."""
        if self.generation is not None:
            return self.generation
        ids = {name: getattr(self.transformers_config, name, None) for name in _TOKEN_IDS}
        return {name: value for name, value in ids.items() if value is not None}

    def generation_eos(self) -> tuple[int, ...]:
        """Token ids that end an answer: the generation settings' or else the model configuration's."""
        return token_ids(self.generation_settings().get("eos_token_id")) or self.model_config.eos_token_ids


def damaged(path: Path, what: str) -> CheckpointError:
    """The error for a file whose bytes are not what they should be."""
    return CheckpointError(f"{path} is damaged: {what}; download or convert it again")


def shortened(names: list[str]) -> str:
    """The first few names, for a message that also says how many there are."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def read_bytes(path: Path, offset_bytes: int, out: memoryview) -> None:
    """Fill `out` from `offset_bytes` of the file on. Opens it anew, so that threads do not share a position.

    Raises:
        CheckpointError: The file ends too early or cannot be read.
    """
    done = 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset_bytes)
            while done < len(out) and (count := file.readinto(out[done:])):
                done += count
    except OSError as error:
        raise CheckpointError(f"reading {path} failed ({error}): check the disk it lies on") from error
    if done < len(out):
        raise damaged(path, f"it is truncated, {len(out) - done} bytes are missing at {offset_bytes + done}")


def load_tokenizer(directory: Path, **options: str) -> Any:
    """transformers' tokenizer of a checkpoint directory, or with `gguf_file` of a file in it.

    Raises:
        CheckpointError: There is none or it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        # Old files ask for it: it drops spaces before punctuation, and of byte-level vocabularies only warns.
        return AutoTokenizer.from_pretrained(directory, clean_up_tokenization_spaces=False, **options)
    except Exception as error:  # missing files, damaged ones and unknown vocabularies raise errors of several libraries
        raise CheckpointError(
            f"{directory} has no usable tokenizer ({error}): add its tokenizer.json and tokenizer_config.json"
        ) from error
