"""GGUF files: their header, their metadata as a transformers configuration, their tensors dequantised.

The `gguf` package's reader makes numpy arrays of every token of the vocabulary; here only the header is walked, long
arrays are skipped, and a truncated file is refused with the number of missing bytes. transformers' own reader takes the
base of the rotary frequencies and drops their scaling; here that is translated too, and what cannot be is refused.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload_runtime.config import ModelConfig, format_bytes
from offload_runtime.errors import CheckpointError, UnsupportedArchitectureError
from offload_runtime.weights.architectures import ARCHITECTURES, model_config_from_transformers
from offload_runtime.weights.checkpoint import Checkpoint, Shard, load_tokenizer, read_bytes, shortened
from offload_runtime.weights.layout import checkpoint_tensors

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")
# llama.cpp rotates neighbouring channels for these, so its converter interleaved the rows of q and k.
PERMUTED_ARCHITECTURES = ("llama", "smollm3")

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_KEPT_ARRAY_ITEMS = 4096  # per-layer lists are kept; of longer arrays, such as vocabularies, nothing is
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_CHUNK_ELEMENTS = 1 << 22  # dequantised at a time: 16 MiB of float32


# --- the header


@dataclass(frozen=True)
class GgufTensor:
    """A stored tensor: `shape` as torch writes it, `kind` the number of its quantisation, bytes of the stored form."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset_bytes: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key, tensors by name in the order of the file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def arch(self) -> Any:
        """The architecture, which all keys about the model begin with."""
        return self.metadata.get("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """Value of `<arch>.<key>`; a per-layer list counts when all layers agree."""
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise UnsupportedArchitectureError(
                f"{self.path}: {self.arch}.{key} differs between layers, which is not supported: use another model"
            )
        return value[0]

    def number(self, key: str, default: float | None = None) -> Any:
        """A required number, or one with a default."""
        value = self.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise CheckpointError(f"{self.path} lacks a valid {self.arch}.{key} in its metadata: convert it again")
        return value

    def token_id(self, name: str) -> int | None:
        """The id of a special token, such as `bos`."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) else None


class _Cursor:
    """Walks the mapped bytes of a header; raises `EOFError` at their end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def skip(self, nbytes: int) -> int:
        """Step over `nbytes` and return where they began."""
        start = self.position
        if nbytes > len(self._data) - start:
            raise EOFError
        self.position = start + nbytes
        return start

    def scalar(self, form: str) -> Any:
        return struct.unpack_from(form, self._data, self.skip(struct.calcsize(form)))[0]

    def string(self) -> str:
        size = self.scalar("<Q")
        start = self.skip(size)
        return self._data[start : start + size].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.scalar("<I"), self.scalar("<Q"))
        if kind not in _SCALARS:
            raise ValueError(f"unknown metadata type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any] | None:
        if kind == _ARRAY:
            raise ValueError("nested metadata arrays")
        if count <= _KEPT_ARRAY_ITEMS:
            return [self.value(kind) for _ in range(count)]
        if kind in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[kind]))
            return None
        if kind != _STRING:
            raise ValueError(f"unknown metadata type {kind}")
        for _ in range(count):
            self.skip(self.scalar("<Q"))
        return None

    def tensor(self) -> GgufTensor:
        """One entry of the tensor table; the offset is still relative to the data section."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name, num_dims = self.string(), self.scalar("<I")
        if num_dims > 4:
            raise ValueError(f"{name} has {num_dims} dimensions")
        shape = tuple(reversed([self.scalar("<Q") for _ in range(num_dims)]))  # GGUF lists the fastest one first
        kind, offset_bytes = self.scalar("<I"), self.scalar("<Q")
        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if not shape or shape[-1] % block_elements:
            raise ValueError(f"rows of {name} {list(shape)} are not whole blocks of {block_elements}")
        return GgufTensor(name, shape, kind, offset_bytes, math.prod(shape) // block_elements * block_bytes)


def _walk(path: Path, data: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(data)
    cursor.skip(len(_MAGIC))
    version = cursor.scalar("<I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version}, and only little-endian versions 2 and 3 are read")
    num_tensors, num_keys = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("<I"))
    relative = [cursor.tensor() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors = {t.name: GgufTensor(t.name, t.shape, t.kind, start + t.offset_bytes, t.nbytes) for t in relative}
    return GgufHeader(path, metadata, tensors)


def read_gguf_header(path: Path) -> GgufHeader:
    """Read metadata and the tensor table, checking that every tensor's bytes are there.

    Raises:
        CheckpointError: Not a GGUF file, a corrupt header, or a truncated file.
    """
    again = "download it again"
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise CheckpointError(f"{path} is not a GGUF file: give a .gguf file or a directory with safetensors")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _walk(path, data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): check the path and its permissions") from error
    except EOFError as error:
        raise CheckpointError(
            f"{path} is damaged: its header goes on past the end of the file at {size_bytes} bytes; {again}"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} has a GGUF header that cannot be read ({error}): {again}") from error
    end_bytes = max((tensor.offset_bytes + tensor.nbytes for tensor in header.tensors.values()), default=0)
    if end_bytes > size_bytes:
        raise CheckpointError(
            f"{path} is truncated, {end_bytes - size_bytes} bytes are missing "
            f"({format_bytes(size_bytes)} of {format_bytes(end_bytes)}): {again}"
        )
    return header


# --- the configuration


def _check_supported(header: GgufHeader) -> None:
    path, arch = header.path, header.arch
    if arch not in GGUF_ARCHITECTURES:
        raise UnsupportedArchitectureError(
            f"{path}: GGUF architecture {arch!r} is not supported: use one of {', '.join(GGUF_ARCHITECTURES)} "
            "(Mistral models are stored as llama)"
        )
    if header.get("expert_count", 0):
        raise UnsupportedArchitectureError(f"{path}: mixtures of experts are not supported: use a dense model")
    split = header.metadata.get("split.count", 1)
    if split not in (0, 1):
        raise UnsupportedArchitectureError(
            f"{path} is one of {split} files: merge them with llama.cpp's `llama-gguf-split --merge` first"
        )


def _rope_parameters(header: GgufHeader) -> dict[str, Any]:
    """The format's scaling types, and divisors per frequency, which transformers calls longrope.

    Raises:
        UnsupportedArchitectureError: Another scaling.
    """
    number, kind = header.number, header.get("rope.scaling.type", "none")
    base: dict[str, Any] = {"rope_theta": float(number("rope.freq_base", 10000.0))}
    original = int(number("rope.scaling.original_context_length", number("context_length")))
    # llama.cpp multiplies the usual factor by its own one, under either of two keys.
    attention = float(number("rope.scaling.attn_factor", number("rope.scaling.yarn_attn_factor", 1.0)))
    short, long = "rope_factors_short.weight", "rope_factors_long.weight"
    if "rope_freqs.weight" in header.tensors and not {short, long} <= set(header.tensors):
        # Llama 3's scaling, stored as its divisors; the parameters they came from are not in the file.
        short, long, attention = "rope_freqs.weight", "rope_freqs.weight", 1.0
    if {short, long} <= set(header.tensors):
        return {
            **base, "rope_type": "longrope", "original_max_position_embeddings": original, "factor": 1.0,
            "attention_factor": attention, "short_factor": _read_vector(header, short),
            "long_factor": _read_vector(header, long),
        }  # fmt: skip
    if kind == "none":
        return {**base, "rope_type": "default"}
    factor = float(number("rope.scaling.factor"))
    if kind == "linear":
        return {**base, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return {
            **base, "rope_type": "yarn", "original_max_position_embeddings": original, "factor": factor,
            "attention_factor": usual * attention,
            "beta_fast": float(number("rope.scaling.yarn_beta_fast", 32.0)),
            "beta_slow": float(number("rope.scaling.yarn_beta_slow", 1.0)),
        }  # fmt: skip
    raise UnsupportedArchitectureError(
        f"{header.path}: RoPE scaling {kind!r} is not supported: use a model with none, linear, yarn or longrope"
    )


def _shape_settings(header: GgufHeader) -> dict[str, Any]:
    """The sizes, from the metadata; the vocabulary's from the embedding, which may be padded."""
    number, embedding = header.number, header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{header.path} has no token_embd.weight: it is not a language model's weights")
    heads, hidden = int(number("attention.head_count")), int(number("embedding_length"))
    num_layers = int(number("block_count"))
    if heads < 1 or not 1 <= num_layers <= len(header.tensors):
        raise CheckpointError(
            f"{header.path}: {heads} heads and {num_layers} layers with {len(header.tensors)} tensors cannot be right: "
            "download it again"
        )
    rotated = int(number("rope.dimension_count", number("attention.key_length", hidden // heads)))
    head_dim = int(number("attention.key_length", rotated))
    if rotated != head_dim or number("attention.value_length", head_dim) != head_dim:
        raise UnsupportedArchitectureError(
            f"{header.path}: heads of {head_dim} channels of which {rotated} are rotated, or values of another size, "
            "are not supported: choose another model"
        )
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": int(number("feed_forward_length")),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(number("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(number("context_length")),
        "rms_norm_eps": float(number("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def config_from_gguf(header: GgufHeader) -> dict[str, Any]:
    """What a `config.json` beside the file would say.

    Raises:
        CheckpointError: A needed entry is missing or impossible.
        UnsupportedArchitectureError: Something the decoder does not implement: another architecture, a mixture of
            experts, a model split into several files.
    """
    _check_supported(header)
    # What ends a sequence, a turn or a message ends an answer.
    eos = list(dict.fromkeys(i for name in ("eos", "eot", "eom") if (i := header.token_id(name)) is not None))
    try:
        settings = _shape_settings(header) | {"rope_parameters": _rope_parameters(header)}
    except (ValueError, OverflowError) as error:  # a damaged header can hold infinities
        raise CheckpointError(f"{header.path} has impossible metadata ({error}): download it again") from error
    settings |= {
        "bos_token_id": header.token_id("bos"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": header.metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }
    window, family = header.get("attention.sliding_window", 0), header.arch
    if family == "llama" and window:  # only Mistral has windows among what is stored as llama
        family = "mistral"
        settings["sliding_window"] = int(window)
    settings |= {"model_type": family, "architectures": [ARCHITECTURES[family]]}
    if family in ("llama", "qwen3", "smollm3"):
        settings["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if family in ("llama", "smollm3"):
        settings["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    return settings


def _hf_config(header: GgufHeader) -> Any:
    from transformers import AutoConfig

    settings = config_from_gguf(header)
    try:
        return AutoConfig.for_model(**settings)
    except Exception as error:  # its validation raises errors of several libraries
        raise CheckpointError(f"{header.path}: transformers refused the file's metadata: {error}") from error


# --- the tensors


def _check_kind(path: Path, tensor: GgufTensor) -> None:
    """Refuse a quantisation that the `gguf` package cannot undo, before anything is loaded."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(tensor.kind)
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{path}: {tensor.name} is quantised as {kind.name}, which cannot be read: use another file"
        ) from error


def _dequantised(path: Path, tensor: GgufTensor, row_start: int, row_end: int) -> np.ndarray:
    """Rows of a stored matrix as float32 [rows, columns]; a vector counts as one row."""
    from gguf import GGMLQuantizationType, dequantize

    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    row_bytes = tensor.nbytes // rows
    stored = np.empty((row_end - row_start, row_bytes), dtype=np.uint8)
    read_bytes(path, tensor.offset_bytes + row_start * row_bytes, stored.reshape(-1).data)
    return np.asarray(dequantize(stored, GGMLQuantizationType(tensor.kind)), dtype=np.float32)


def _read_vector(header: GgufHeader, name: str) -> list[float]:
    """A small stored vector as Python floats."""
    _check_kind(header.path, header.tensors[name])
    return [float(value) for value in _dequantised(header.path, header.tensors[name], 0, 1)[0]]


def _fill_from_gguf(path: Path, tensor: GgufTensor, head_dim: int | None, out: torch.Tensor) -> None:
    """Dequantise into `out`, a few rows at a time; with `head_dim` the rows of each head are put back in order, whose
    two halves llama.cpp interleaves."""
    rows, columns = (tensor.shape[0], tensor.shape[1]) if len(tensor.shape) > 1 else (1, tensor.shape[0])
    unit = head_dim or 1  # whole heads, so that a chunk can be put in order by itself
    step = max(1, _CHUNK_ELEMENTS // (columns * unit)) * unit
    for start in range(0, rows, step):
        part = out[start : start + step] if out.dim() > 1 else out
        values = _dequantised(path, tensor, start, min(rows, start + step)).reshape(part.shape)
        if head_dim is not None:
            pairs = values.reshape(-1, head_dim // 2, 2, *part.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(part.shape)
        part.copy_(torch.from_numpy(np.ascontiguousarray(values)))


def _find_tensors(header: GgufHeader, config: ModelConfig) -> dict[str, GgufTensor]:
    """transformers' name to stored tensor for all that the model needs, in the order of the file."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == header.arch)
    names = get_tensor_name_map(arch, config.num_layers)
    needed = checkpoint_tensors(config)
    found: dict[str, GgufTensor] = {}
    missing: list[str] = []
    for name, destination in needed.items():
        stem, _, suffix = name.rpartition(".")
        stored_name = f"{names.get_name(stem)}.{suffix}"
        tensor = header.tensors.get(stored_name)
        if tensor is None:
            missing.append(stored_name)
        elif tensor.shape != destination.shape:
            raise CheckpointError(
                f"{header.path}: {stored_name} has shape {list(tensor.shape)}, expected {list(destination.shape)}: "
                "the file is inconsistent, convert it again"
            )
        else:
            found[name] = tensor
    if missing:
        raise CheckpointError(
            f"{header.path} lacks {len(missing)} of {len(needed)} tensors ({shortened(missing)}): download it again"
        )
    for tensor in {tensor.kind: tensor for tensor in found.values()}.values():
        _check_kind(header.path, tensor)
    return dict(sorted(found.items(), key=lambda item: item[1].offset_bytes))


def _read_tokenizer(path: Path) -> Any:
    """The tokenizer stored in the file; where transformers cannot read it, a `tokenizer.json` beside the file."""
    try:
        return load_tokenizer(path.parent, gguf_file=path.name)
    except CheckpointError as error:
        if (path.parent / "tokenizer.json").exists():
            return load_tokenizer(path.parent)
        raise CheckpointError(
            f"transformers cannot read the tokenizer in {path} ({error.__cause__}): put the model's "
            "tokenizer.json and tokenizer_config.json beside the file"
        ) from error


def open_gguf(path: Path, *, reference: str) -> Checkpoint:
    """Open and validate a GGUF file, to be computed in bf16: a quantised file has no dtype of its own.

    Args:
        path: The file.
        reference: What the user named.

    Raises:
        CheckpointError: Truncated, corrupt or incomplete.
        UnsupportedArchitectureError: A model the decoder does not implement.
    """
    header = read_gguf_header(path)
    hf_config = _hf_config(header)
    config = model_config_from_transformers(hf_config)
    fills = []
    for name, tensor in _find_tensors(header, config).items():
        permuted = header.arch in PERMUTED_ARCHITECTURES and (".q_proj." in name or ".k_proj." in name)
        fills.append((name, partial(_fill_from_gguf, path, tensor, config.head_dim if permuted else None)))
    shard = Shard(path, tuple(fills))
    return Checkpoint(reference, config, hf_config, torch.bfloat16, (shard,), partial(_read_tokenizer, path))
