"""Checkpoints in one GGUF file, dequantised piece by piece while they are read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload_runtime.config import ModelConfig
from offload_runtime.errors import CheckpointError
from offload_runtime.weights.architecture import model_config_from_transformers
from offload_runtime.weights.checkpoint import Shard
from offload_runtime.weights.gguf_config import PERMUTED_ARCHITECTURES, hf_config_from_gguf, read_metadata
from offload_runtime.weights.gguf_file import GgufTensor, read_gguf_header
from offload_runtime.weights.layout import checkpoint_tensors, packed_bytes
from offload_runtime.weights.safetensors_checkpoint import load_tokenizer, shortened
from offload_runtime.weights.safetensors_file import read_bytes

_CHUNK_ELEMENTS = 1 << 22  # dequantised at a time: 16 MiB of float32


def _dequantised(path: Path, tensor: GgufTensor, row_start: int, row_end: int) -> np.ndarray:
    """Rows of a stored matrix as float32 [rows, columns]; a vector counts as one row."""
    from gguf import GGMLQuantizationType, dequantize

    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    row_bytes = tensor.nbytes // rows
    stored = np.empty((row_end - row_start, row_bytes), dtype=np.uint8)
    read_bytes(path, tensor.offset_bytes + row_start * row_bytes, stored.reshape(-1).data)
    return np.asarray(dequantize(stored, GGMLQuantizationType(tensor.kind)), dtype=np.float32)


def _unpermuted(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of the two halves of each head: rows [heads * D, ...]."""
    heads = values.shape[0] // head_dim
    pairs = values.reshape(heads, head_dim // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _fill_from_gguf(path: Path, tensor: GgufTensor, head_dim: int | None, out: torch.Tensor) -> None:
    """Dequantise into `out`, a few rows at a time; with `head_dim` the rows of each head are put back in order."""
    if len(tensor.shape) == 1:
        values = _dequantised(path, tensor, 0, 1)[0]
        if head_dim is not None:
            values = _unpermuted(values, head_dim)
        out.copy_(torch.from_numpy(np.ascontiguousarray(values)))
        return
    rows, columns = tensor.shape
    unit = head_dim or 1  # whole heads, so that a chunk can be put in order by itself
    step = max(1, _CHUNK_ELEMENTS // (columns * unit)) * unit
    for start in range(0, rows, step):
        end = min(rows, start + step)
        values = _dequantised(path, tensor, start, end)
        if head_dim is not None:
            values = _unpermuted(values, head_dim)
        out[start:end].copy_(torch.from_numpy(np.ascontiguousarray(values)))


class GgufCheckpoint:
    """A validated GGUF file; see `CheckpointSource`.

    Args:
        path: The file.
        reference: What the user named.

    Raises:
        CheckpointError: Truncated, corrupt or incomplete.
        UnsupportedArchitectureError: A model the decoder does not implement.
    """

    def __init__(self, path: Path, *, reference: str) -> None:
        self._path = path
        self._reference = reference
        header = read_gguf_header(path)
        self._meta = read_metadata(path, header)
        self._stored = header.tensors
        self._hf_config = hf_config_from_gguf(self._meta, header, self._read_values)
        self._config = model_config_from_transformers(self._hf_config)
        self._tensors = self._find_tensors()

    def _read_values(self, name: str) -> list[float]:
        """A small stored vector as Python floats."""
        self._check_kind(self._stored[name])
        return [float(value) for value in _dequantised(self._path, self._stored[name], 0, 1)[0]]

    def _check_kind(self, tensor: GgufTensor) -> None:
        """Refuse a quantisation that the `gguf` package cannot undo, before anything is loaded."""
        from gguf import GGMLQuantizationType, dequantize
        from gguf.constants import GGML_QUANT_SIZES

        kind = GGMLQuantizationType(tensor.kind)
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self._path}: {tensor.name} is quantised as {kind.name}, which cannot be read: use another file"
            ) from error

    def _find_tensors(self) -> dict[str, GgufTensor]:
        """transformers' name to stored tensor for all that the model needs, in the order of the file."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == self._meta.arch)
        names = get_tensor_name_map(arch, self._config.num_layers)
        needed = checkpoint_tensors(self._config)
        found: dict[str, GgufTensor] = {}
        missing: list[str] = []
        for name, destination in needed.items():
            stem, _, suffix = name.rpartition(".")
            stored_name = f"{names.get_name(stem)}.{suffix}"
            tensor = self._stored.get(stored_name)
            if tensor is None:
                missing.append(stored_name)
            elif tensor.shape != destination.shape:
                raise CheckpointError(
                    f"{self._path}: {stored_name} has shape {list(tensor.shape)}, expected {list(destination.shape)}: "
                    "the file is inconsistent, convert it again"
                )
            else:
                found[name] = tensor
        if missing:
            raise CheckpointError(
                f"{self._path} lacks {len(missing)} of {len(needed)} tensors ({shortened(missing)}): download it again"
            )
        for tensor in {tensor.kind: tensor for tensor in found.values()}.values():
            self._check_kind(tensor)
        return dict(sorted(found.items(), key=lambda item: item[1].offset_bytes))

    @property
    def reference(self) -> str:
        """What the user named."""
        return self._reference

    @property
    def native_dtype(self) -> torch.dtype:
        """bf16: a quantised file has no dtype of its own to compute in."""
        return torch.bfloat16

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
        """The file as a single shard."""
        permuted = self._config.head_dim if self._meta.arch in PERMUTED_ARCHITECTURES else None

        def head_dim(name: str) -> int | None:
            return permuted if ".q_proj." in name or ".k_proj." in name else None

        yield Shard(
            self._path,
            tuple((name, partial(_fill_from_gguf, self._path, tensor, head_dim(name)))
                  for name, tensor in self._tensors.items()),
        )  # fmt: skip

    def tokenizer(self) -> Any:
        """The tokenizer stored in the file; where transformers cannot read it, a `tokenizer.json` beside the file."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                self._path.parent, gguf_file=self._path.name, clean_up_tokenization_spaces=False
            )
        except Exception as error:  # unknown vocabularies raise errors of several kinds
            if (self._path.parent / "tokenizer.json").exists():
                return load_tokenizer(self._path.parent)
            raise CheckpointError(
                f"transformers cannot read the tokenizer in {self._path} ({error}): put the model's tokenizer.json and "
                "tokenizer_config.json beside the file"
            ) from error

    def generation_settings(self) -> dict[str, Any]:
        """The token ids of the metadata, as `generation_config.json` would hold them."""
        ids = {name: getattr(self._hf_config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return {name: value for name, value in ids.items() if value is not None}

    def generation_eos(self) -> tuple[int, ...]:
        """Token ids that end an answer."""
        return self._config.eos_token_ids
