"""Reading and writing single safetensors files, tensor by tensor.

The format is eight bytes of header length, a JSON header and the raw tensors. Reading it here rather than through
memory maps puts the bytes straight where they belong (no mapped pages that count as ours, any number of threads),
and lets a truncated file be refused with the number of bytes that are missing.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload_runtime.config import ModelConfig, format_bytes
from offload_runtime.errors import CheckpointError
from offload_runtime.weights.architectures import check_model_type, model_config_from_transformers, token_ids
from offload_runtime.weights.checkpoint import Shard
from offload_runtime.weights.layout import checkpoint_tensors, packed_bytes

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the reference implementation's own limit
_STAGING_BYTES = 16 << 20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in its file. `dtype` is the header's word for it, which may be one we do not read."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    nbytes: int


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {what}; download or convert it again")


def _sizes(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    return None


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise _damaged(path, f"the header's entry for {name} is not an object")
    dtype, shape, offsets = entry.get("dtype"), _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise _damaged(path, f"the header's entry for {name} lacks a valid dtype, shape or data_offsets")
    begin, end = offsets
    if end < begin or (dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize):
        raise _damaged(path, f"{name} {dtype} {list(shape)} does not fit the {end - begin} bytes the header gives it")
    return StoredTensor(path, name, dtype, shape, data_start + begin, end - begin)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """List the tensors of a file after checking that all their bytes are there.

    Raises:
        CheckpointError: The file cannot be read, its header is corrupt, or its end is missing.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if size_bytes < 8 or header_bytes > _MAX_HEADER_BYTES or header_bytes > size_bytes - 8:
                raise _damaged(
                    path, f"its header should take {header_bytes} bytes and the file has {max(0, size_bytes - 8)} left"
                )
            header = json.loads(file.read(header_bytes))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): check the path and its permissions") from error
    except (ValueError, RecursionError) as error:  # bytes that are not UTF-8 are a ValueError too
        raise _damaged(path, f"its header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    tensors = {name: _parse_entry(path, name, entry, data_start) for name, entry in header.items()}
    end_bytes = max((tensor.offset_bytes + tensor.nbytes for tensor in tensors.values()), default=data_start)
    if end_bytes > size_bytes:
        raise _damaged(
            path,
            f"it is truncated, {end_bytes - size_bytes} bytes are missing "
            f"({format_bytes(size_bytes)} of {format_bytes(end_bytes)})",
        )
    return tensors


def read_bytes(path: Path, offset_bytes: int, out: memoryview) -> None:
    """Fill `out` from `offset_bytes` of the file on. Opens it anew, so that threads do not share a position.

    Raises:
        CheckpointError: The file ends too early or cannot be read.
    """
    done = 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset_bytes)
            while done < len(out):
                count = file.readinto(out[done:])
                if not count:
                    break
                done += count
    except OSError as error:
        raise CheckpointError(f"reading {path} failed ({error}): check the disk it lies on") from error
    if done < len(out):
        raise _damaged(path, f"it is truncated, {len(out) - done} bytes are missing at {offset_bytes + done}")


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, without a copy."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def fill_from_file(stored: StoredTensor, out: torch.Tensor) -> None:
    """Read a tensor into `out` (contiguous, CPU, the stored shape), converting to `out`'s dtype.

    Equal dtypes are read in place; others go through a staging buffer of 16 MiB.
    """
    dtype = DTYPES[stored.dtype]
    assert tuple(out.shape) == stored.shape and out.is_contiguous(), f"{stored.name}: {tuple(out.shape)}"
    if dtype == out.dtype:
        read_bytes(stored.path, stored.offset_bytes, as_bytes(out))
        return
    flat = out.view(-1)
    step = _STAGING_BYTES // dtype.itemsize
    staging = torch.empty(min(step, flat.numel()), dtype=dtype)
    for start in range(0, flat.numel(), step):
        part = staging[: min(step, flat.numel() - start)]
        read_bytes(stored.path, stored.offset_bytes + start * dtype.itemsize, as_bytes(part))
        flat[start : start + part.numel()].copy_(part)


def write_file(
    path: Path,
    tensors: Sequence[tuple[str, tuple[int, ...], Callable[[torch.Tensor], None]]],
    dtype: torch.dtype,
    on_tensor: Callable[[int], None],
) -> None:
    """Write a safetensors file of one dtype, holding one tensor in memory at a time.

    Args:
        path: The new file.
        tensors: Name, shape and what fills a tensor of that shape.
        dtype: Of all tensors in the file.
        on_tensor: Called with the bytes of each tensor once it is written.

    Raises:
        OSError: The disk is full or refuses; the caller removes what was written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape, _ in tensors:
        nbytes = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # readers that map the file want the tensors aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, shape, fill in tensors:
            tensor = torch.empty(shape, dtype=dtype)
            fill(tensor)
            file.write(as_bytes(tensor))
            on_tensor(tensor.numel() * dtype.itemsize)


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
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory)
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
