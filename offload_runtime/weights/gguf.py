"""From GGUF metadata to a transformers configuration.

transformers' own reader takes the base of the rotary frequencies and drops their scaling; here the scaling types of
the format are translated too, and what cannot be expressed is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload_runtime.config import ModelConfig
from offload_runtime.errors import CheckpointError, UnsupportedArchitectureError
from offload_runtime.weights.architectures import model_config_from_transformers
from offload_runtime.weights.checkpoint import Shard
from offload_runtime.weights.gguf_file import GgufHeader, GgufTensor, read_gguf_header
from offload_runtime.weights.layout import checkpoint_tensors, packed_bytes
from offload_runtime.weights.safetensors import load_tokenizer, read_bytes, shortened

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")
# llama.cpp rotates neighbouring channels for these, so its converter interleaved the rows of q and k.
PERMUTED_ARCHITECTURES = ("llama", "smollm3")

# Reads the float32 values of a small stored tensor.
ReadValues = Callable[[str], list[float]]


@dataclass(frozen=True)
class GgufMetadata:
    """Typed access to the metadata of one architecture."""

    path: Path
    arch: str
    values: dict[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """Value of `<arch>.<key>`; a per-layer list counts when all layers agree."""
        value = self.values.get(f"{self.arch}.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedArchitectureError(
                    f"{self.path}: {self.arch}.{key} differs between layers, which is not supported: use another model"
                )
            return value[0]
        return value

    def number(self, key: str, default: float | None = None) -> Any:
        """A required number, or one with a default."""
        value = self.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise CheckpointError(f"{self.path} lacks a valid {self.arch}.{key} in its metadata: convert it again")
        return value

    def token_ids(self) -> tuple[int | None, list[int]]:
        """Begin-of-sequence id and all ids that end an answer (end of sequence, of turn, of message)."""
        ids: list[int] = []
        for name in ("eos", "eot", "eom"):
            value = self.values.get(f"tokenizer.ggml.{name}_token_id")
            if isinstance(value, int) and value not in ids:
                ids.append(value)
        bos = self.values.get("tokenizer.ggml.bos_token_id")
        return (bos if isinstance(bos, int) else None), ids


def _attention_factor(meta: GgufMetadata, default: float) -> float:
    """llama.cpp multiplies the usual factor by its own one, under either of two keys."""
    return default * float(meta.number("rope.scaling.attn_factor", meta.number("rope.scaling.yarn_attn_factor", 1.0)))


def _explicit_factors(
    base: dict[str, Any], *, short: list[float], long: list[float], attention: float
) -> dict[str, Any]:
    """Divisors per frequency, which transformers calls longrope."""
    factors = {"short_factor": short, "long_factor": long, "factor": 1.0, "attention_factor": attention}
    return {**base, "rope_type": "longrope", **factors}


def _rope_parameters(meta: GgufMetadata, header: GgufHeader, read_values: ReadValues) -> dict[str, Any]:
    base: dict[str, Any] = {"rope_theta": float(meta.number("rope.freq_base", 10000.0))}
    kind = meta.get("rope.scaling.type", "none")
    original = {"original_max_position_embeddings": int(
        meta.number("rope.scaling.original_context_length", meta.number("context_length")))}  # fmt: skip
    if "rope_factors_long.weight" in header.tensors and "rope_factors_short.weight" in header.tensors:
        short, long = read_values("rope_factors_short.weight"), read_values("rope_factors_long.weight")
        return _explicit_factors({**base, **original}, short=short, long=long, attention=_attention_factor(meta, 1.0))
    if "rope_freqs.weight" in header.tensors:
        # Llama 3's scaling, stored as its divisors; the parameters they came from are not in the file.
        divisors = read_values("rope_freqs.weight")
        return _explicit_factors({**base, **original}, short=divisors, long=divisors, attention=1.0)
    if kind == "none":
        return {**base, "rope_type": "default"}
    factor = float(meta.number("rope.scaling.factor"))
    if kind == "linear":
        return {**base, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return {
            **base, **original, "rope_type": "yarn", "factor": factor,
            "attention_factor": _attention_factor(meta, usual),
            "beta_fast": float(meta.number("rope.scaling.yarn_beta_fast", 32.0)),
            "beta_slow": float(meta.number("rope.scaling.yarn_beta_slow", 1.0)),
        }  # fmt: skip
    raise UnsupportedArchitectureError(
        f"{meta.path}: RoPE scaling {kind!r} is not supported: use a model with none, linear, yarn or longrope"
    )


def read_metadata(path: Path, header: GgufHeader) -> GgufMetadata:
    """Check that the file holds a model the decoder implements.

    Raises:
        UnsupportedArchitectureError: Another architecture, a mixture of experts, or a model split into several files.
    """
    arch = header.metadata.get("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise UnsupportedArchitectureError(
            f"{path}: GGUF architecture {arch!r} is not supported: use one of {', '.join(GGUF_ARCHITECTURES)} "
            "(Mistral models are stored as llama)"
        )
    meta = GgufMetadata(path, arch, header.metadata)
    if meta.get("expert_count", 0):
        raise UnsupportedArchitectureError(f"{path}: mixtures of experts are not supported: use a dense model")
    if header.metadata.get("split.count", 1) > 1:
        raise UnsupportedArchitectureError(
            f"{path} is one of {header.metadata['split.count']} files: merge them with llama.cpp's "
            "`llama-gguf-split --merge` first"
        )
    return meta


def _shape_settings(meta: GgufMetadata, header: GgufHeader) -> dict[str, Any]:
    """The sizes, from the metadata; the vocabulary's from the embedding, which may be padded."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{meta.path} has no token_embd.weight: it is not a language model's weights")
    heads, hidden = int(meta.number("attention.head_count")), int(meta.number("embedding_length"))
    num_layers = int(meta.number("block_count"))
    if heads < 1 or not 1 <= num_layers <= len(header.tensors):
        raise CheckpointError(
            f"{meta.path}: {heads} heads and {num_layers} layers with {len(header.tensors)} tensors cannot be right: "
            "download it again"
        )
    rotated = int(meta.number("rope.dimension_count", meta.number("attention.key_length", hidden // heads)))
    head_dim = int(meta.number("attention.key_length", rotated))
    if rotated != head_dim or meta.number("attention.value_length", head_dim) != head_dim:
        raise UnsupportedArchitectureError(
            f"{meta.path}: heads of {head_dim} channels of which {rotated} are rotated, or values of another size, "
            "are not supported: choose another model"
        )
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": int(meta.number("feed_forward_length")),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.number("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(meta.number("context_length")),
        "rms_norm_eps": float(meta.number("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def hf_config_from_gguf(meta: GgufMetadata, header: GgufHeader, read_values: ReadValues) -> Any:
    """Build the transformers configuration that describes the file.

    Args:
        meta: The checked metadata.
        header: The same file's header.
        read_values: Reads a small tensor, for the rotary factors.

    Raises:
        CheckpointError: A needed entry is missing or impossible.
        UnsupportedArchitectureError: Something the decoder does not implement.
    """
    import transformers

    bos, eos = meta.token_ids()
    try:
        settings = _shape_settings(meta, header)
        rope = _rope_parameters(meta, header, read_values)
    except (ValueError, OverflowError) as error:  # a damaged header can hold infinities
        raise CheckpointError(f"{meta.path} has impossible metadata ({error}): download it again") from error
    settings |= {
        "rope_parameters": rope,
        "bos_token_id": bos,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": meta.values.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }
    window = meta.get("attention.sliding_window", 0)
    family = meta.arch
    if family == "llama" and window:  # only Mistral has windows among what is stored as llama
        family = "mistral"
        settings["sliding_window"] = int(window)
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"}
    settings["architectures"] = [f"{names[family]}ForCausalLM"]
    if family in ("llama", "qwen3", "smollm3"):
        settings["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if family in ("llama", "smollm3"):
        settings["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
    try:
        return getattr(transformers, f"{names[family]}Config")(**settings)
    except Exception as error:  # its validation raises errors of several libraries
        raise CheckpointError(f"{meta.path}: transformers refused the file's metadata: {error}") from error


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
