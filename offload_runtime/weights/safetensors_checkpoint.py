"""Checkpoints as transformers writes them: a directory with `config.json` and one or many safetensors files."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload_runtime.config import ModelConfig
from offload_runtime.errors import CheckpointError
from offload_runtime.importing import no_collections
from offload_runtime.weights.architecture import check_model_type, model_config_from_transformers, token_ids
from offload_runtime.weights.checkpoint import Shard
from offload_runtime.weights.layout import checkpoint_tensors, packed_bytes
from offload_runtime.weights.safetensors_file import DTYPES, StoredTensor, fill_from_file, read_header

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHOWN = 5  # names listed in a message before "..."
# Buffers that old versions of transformers saved although they follow from the config.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        CheckpointError: The file is missing, unreadable or not a JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.parent} has no {path.name}: give the directory of a transformers checkpoint with safetensors"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object: download it again")
    return content


def shortened(names: list[str]) -> str:
    """The first few names, for a message that also says how many there are."""
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def refuse_quantised(raw: Mapping[str, Any], reference: str) -> None:
    """Raise `CheckpointError` when a configuration says that the weights are quantised."""
    method = raw.get("quantization_config")
    if method:
        method = method.get("quant_method") if isinstance(method, dict) else method
        raise CheckpointError(
            f"{reference} is quantised ({method}), which is not supported: use the 16-bit checkpoint or a GGUF file"
        )


def _load_hf_config(directory: Path) -> Any:
    raw = read_json(directory / "config.json")
    check_model_type(raw.get("model_type"), raw.get("architectures"))
    refuse_quantised(raw, str(directory))
    with no_collections():
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(directory)  # which imports more than the line above
        except Exception as error:  # its validation raises errors of many libraries; each means the same here
            raise CheckpointError(f"{directory / 'config.json'} was refused by transformers: {error}") from error


def load_tokenizer(directory: Path) -> Any:
    """transformers' tokenizer of a checkpoint directory.

    Raises:
        CheckpointError: There is none or it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        # Old files ask for it: it drops spaces before punctuation, and of byte-level vocabularies only warns.
        return AutoTokenizer.from_pretrained(directory, clean_up_tokenization_spaces=False)
    except Exception as error:  # missing files and damaged ones raise errors of several libraries
        raise CheckpointError(
            f"{directory} has no usable tokenizer ({error}): add its tokenizer.json and tokenizer_config.json"
        ) from error


class SafetensorsCheckpoint:
    """A validated safetensors directory; see `CheckpointSource`.

    Args:
        directory: Holds `config.json` and `model.safetensors` or its index with shards.
        reference: What the user named.

    Raises:
        CheckpointError: Something is missing, truncated or of another shape than `config.json` says.
    """

    def __init__(self, directory: Path, *, reference: str) -> None:
        self._directory = directory
        self._reference = reference
        self._hf_config = _load_hf_config(directory)
        self._config = model_config_from_transformers(self._hf_config)
        self._tensors = self._find_tensors()
        stored = self._tensors["model.embed_tokens.weight"].dtype
        self._native_dtype = torch.float32 if stored == "F64" else DTYPES[stored]

    def _shard_paths(self) -> list[Path]:
        if not (self._directory / _INDEX).exists():
            if (self._directory / _SINGLE).exists():
                return [self._directory / _SINGLE]
            raise CheckpointError(
                f"{self._directory} has neither {_SINGLE} nor {_INDEX}: give a checkpoint with safetensors "
                "(pytorch_model.bin files are not read)"
            )
        weight_map = read_json(self._directory / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{self._directory / _INDEX} has no weight_map: download it again")
        names = sorted(set(weight_map.values()))
        if any(Path(name).name != name for name in names):
            raise CheckpointError(f"{self._directory / _INDEX} names files outside its directory: do not trust it")
        missing = [name for name in names if not (self._directory / name).exists()]
        if missing:
            raise CheckpointError(
                f"{self._directory} lacks {len(missing)} of {len(names)} shards ({shortened(missing)}): "
                "finish the download"
            )
        return [self._directory / name for name in names]

    def _find_tensors(self) -> dict[str, StoredTensor]:
        """Match every needed tensor with its place in a file, checking dtype and shape; in the order of the files."""
        needed = checkpoint_tensors(self._config)
        found: dict[str, StoredTensor] = {}
        surplus: list[str] = []
        for path in self._shard_paths():
            for name, stored in read_header(path).items():
                if name in needed:
                    found[name] = stored
                elif name != "lm_head.weight" and not name.endswith(_IGNORED_SUFFIXES):
                    surplus.append(name)
        missing = [name for name in needed if name not in found]
        if missing:
            raise CheckpointError(
                f"{self._directory} lacks {len(missing)} of {len(needed)} tensors ({shortened(missing)}): "
                "it is incomplete or belongs to another config.json"
            )
        for name, stored in found.items():
            if stored.shape != needed[name].shape:
                raise CheckpointError(
                    f"{stored.path}: {name} has shape {list(stored.shape)}, expected {list(needed[name].shape)}: "
                    "the weights belong to another config.json"
                )
            if stored.dtype not in DTYPES:
                raise CheckpointError(
                    f"{stored.path}: {name} is stored as {stored.dtype}, and only {', '.join(DTYPES)} are read: "
                    "use an unquantised checkpoint or a GGUF file"
                )
        if surplus:  # transformers leaves such tensors out too, so the tokens still are the same as its own
            logging.getLogger(__name__).warning(
                "%s holds %d tensors this model does not use (%s)", self._directory, len(surplus), shortened(surplus)
            )
        return found

    @property
    def reference(self) -> str:
        """What the user named."""
        return self._reference

    @property
    def native_dtype(self) -> torch.dtype:
        """The dtype the embedding is stored in (float64 counts as float32)."""
        return self._native_dtype

    def config(self) -> ModelConfig:
        """Shape and flags of the model."""
        return self._config

    def hf_config(self) -> Any:
        """The transformers configuration object."""
        return self._hf_config

    def total_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the packed weights in `dtype`."""
        return packed_bytes(self._config, dtype)

    def shards(self) -> Iterator[Shard]:
        """One shard per file."""
        return file_shards(self._tensors.values())

    def tokenizer(self) -> Any:
        """transformers' tokenizer with its chat template."""
        return load_tokenizer(self._directory)

    def generation_settings(self) -> dict[str, Any]:
        """The content of `generation_config.json`, or the token ids of `config.json`."""
        path = self._directory / "generation_config.json"
        if path.exists():
            return read_json(path)
        return {
            name: value
            for name in ("bos_token_id", "eos_token_id", "pad_token_id")
            if (value := getattr(self._hf_config, name, None)) is not None
        }

    def generation_eos(self) -> tuple[int, ...]:
        """Token ids that end an answer."""
        return token_ids(self.generation_settings().get("eos_token_id")) or self._config.eos_token_ids


def file_shards(tensors: Iterable[StoredTensor]) -> Iterator[Shard]:
    """One shard per file that some of the tensors lie in."""
    by_path: dict[Path, list[StoredTensor]] = {}
    for stored in tensors:
        by_path.setdefault(stored.path, []).append(stored)
    for path, found in by_path.items():
        yield Shard(path, tuple((stored.name, partial(fill_from_file, stored)) for stored in found))
