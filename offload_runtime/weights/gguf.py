"""GGUF files: their header, their metadata as a transformers configuration, their tensors as stored or decoded.

The `gguf` package's reader makes numpy arrays of every token of the vocabulary, which takes seconds; here the header is
walked, and a truncated file is refused with the number of missing bytes. transformers' own reader takes the base of the
rotary frequencies and drops their scaling; here that is translated too, and what cannot be is refused.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import gguf
import torch

from offload_runtime.config import ModelConfig
from offload_runtime.errors import CheckpointError, UnsupportedArchitectureError
from offload_runtime.weights.architectures import ARCHITECTURES, model_config_from_json
from offload_runtime.weights.checkpoint import (
    CheckpointSource,
    DescribedModel,
    HeaderReader,
    StoredTensor,
    damaged,
    match_tensors,
    open_header,
)
from offload_runtime.weights.encoding import Fill
from offload_runtime.weights.encodings.gguf_rows import FORMATS, KINDS, decode_file_rows, has_finite_scales, store_rows
from offload_runtime.weights.fields import Fields, HeaderError, shortened, shown
from offload_runtime.weights.files import GGUF_MAGIC
from offload_runtime.weights.gguf_rope import ROPE_TENSORS, rope_of_gguf
from offload_runtime.weights.layout import checkpoint_tensors
from offload_runtime.weights.staging import PIECE_BYTES, Staging, own_or
from offload_runtime.weights.tokenizer import end_token_ids, gguf_tokenizer, special_ids
from offload_runtime.weights.unsupported import unsupported_model
from offload_runtime.weights.vocabulary import gguf_vocabulary

# By `general.architecture`, the family; the text parts of those that read images are the same.
GGUF_ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "smollm3": "smollm3", "qwen2vl": "qwen2", "qwen3vl": "qwen3",
}  # fmt: skip

_VERSIONS = (2, 3)
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})((?i:\.gguf))")
# What a file is by its `general.type`, where that is no model.
_NO_MODELS = {
    "adapter": "an adapter (LoRA), and adapters are not read: merge it into its model (llama-export-lora)",
    "mmproj": "what turns images into tokens (mmproj), and images are not read: give the model's own file",
    "imatrix": "an importance matrix for quantising: give the model's own file",
}
# What makers want tokens to be sampled by, in the words of `generation_config.json`.
_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip


# --- the header


@dataclass(frozen=True)
class GgufHeader:
    """All of the metadata, tensors by name in the order of the file; their `dtype` is the name of a quantisation."""

    fields: Fields
    tensors: dict[str, StoredTensor]

    @property
    def arch(self) -> str:
        """The architecture, which all keys about the model begin with."""
        return self.fields.text("general.architecture", "")

    def of_model(self) -> Fields:
        """The metadata of the architecture; a per-layer list counts as one value where all layers agree."""
        prefix, values = f"{self.arch}.", dict(self.fields.values)
        for key, value in self.fields.values.items():
            if key.startswith(prefix) and isinstance(value, list) and value and value.count(value[0]) == len(value):
                values[key] = value[0]
        return Fields(self.fields.where, values, prefix)


def _string(reader: HeaderReader) -> str:
    return reader.take(reader.number("<Q")).decode("utf-8", errors="replace")


def _value(reader: HeaderReader, kind: int) -> Any:
    if kind == gguf.GGUFValueType.STRING:
        return _string(reader)
    if kind == gguf.GGUFValueType.ARRAY:
        kind, count = reader.number("<I"), reader.number("<Q")
        if kind in _SCALARS:
            data = reader.take(count * struct.calcsize(_SCALARS[kind]))
            return list(struct.unpack(f"<{count}{_SCALARS[kind][1]}", data))
        return [_value(reader, kind) for _ in range(count)]
    if kind not in _SCALARS:
        raise HeaderError(f"unknown metadata type {kind}")
    return reader.number(_SCALARS[kind])


def _stored_tensor(reader: HeaderReader) -> StoredTensor:
    """One entry of the tensor table; the offset is still relative to the data section."""
    name, num_dims = _string(reader), reader.number("<I")
    if num_dims > 4:
        raise HeaderError(f"{shown(name)} has {num_dims} dimensions")
    shape = tuple(reversed([reader.number("<Q") for _ in range(num_dims)]))  # GGUF lists the fastest one first
    number, offset_bytes = reader.number("<I"), reader.number("<Q")
    if number not in gguf.GGML_QUANT_SIZES:  # dropped by llama.cpp, or newer than the package
        raise CheckpointError(
            f"{reader.path}: {shown(name)} is quantised as type {number}, which the gguf package does not know: use "
            "another file, such as one of Q4_K_M, or upgrade the package"
        )
    kind = gguf.GGMLQuantizationType(number)
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if not shape or 0 in shape or shape[-1] % block_elements:
        raise HeaderError(f"rows of {shown(name)} {list(shape)} are not whole blocks of {block_elements}")
    nbytes = math.prod(shape) // block_elements * block_bytes
    return StoredTensor(reader.path, name, kind.name, shape, offset_bytes, nbytes)


def _other_version(path: Path, version: int) -> str:
    if not version & 0xFFFF:  # the bytes of a small number in the other order
        return (
            f"{path} is a big-endian GGUF file, and only little-endian ones are read: take the usual file of the "
            "model, or convert it with gguf-py's gguf_convert_endian.py"
        )
    newer = version > max(_VERSIONS)
    way_out = "upgrade this program, or take an older file" if newer else "take one that was converted lately"
    return f"{path} is a GGUF file of version {version}, and only versions 2 and 3 are read: {way_out}"


def _read_file(path: Path) -> GgufHeader:
    """Metadata and tensor table of one file."""
    with open_header(path) as reader:
        if reader.size_bytes < len(GGUF_MAGIC) or reader.take(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise CheckpointError(f"{path} is not a GGUF file: give one, or a directory with safetensors")
        version = reader.number("<I")
        if version not in _VERSIONS:
            raise CheckpointError(_other_version(path, version))
        num_tensors, num_keys = reader.number("<Q"), reader.number("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = _string(reader)
            metadata[key] = _value(reader, reader.number("<I"))
        relative = [_stored_tensor(reader) for _ in range(num_tensors)]
        fields = Fields(path, metadata)
        alignment = fields.integer("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        data_start = -(-reader.position // alignment) * alignment
        tensors = {t.name: replace(t, offset_bytes=data_start + t.offset_bytes) for t in relative}
        reader.check_complete(tensors.values())
    return GgufHeader(fields, tensors)


def gguf_parts(path: Path) -> list[Path]:
    """All files of the model that a file is a part of, by its name; else the file alone."""
    named = _PART.fullmatch(path.name)
    if named is None:
        return [path]
    parts = [
        path.with_name(f"{named[1]}-{number:05d}-of-{named[2]}{named[3]}") for number in range(1, int(named[2]) + 1)
    ]
    return parts if path in parts else [path]


def read_gguf_header(path: Path) -> GgufHeader:
    """Read metadata and the tensor table, checking that every tensor's bytes are there; of a model in several files
    (`-00001-of-00002.gguf`) the metadata of the first and the tensors of all, whichever is named.

    Raises:
        CheckpointError: Not a GGUF file, a corrupt header, a truncated file, or a missing one.
    """
    parts = gguf_parts(path)
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise CheckpointError(
            f"{path.parent} lacks {len(missing)} of {len(parts)} files of the model ({shortened(missing)}): "
            "finish the download"
        )
    headers = [_read_file(part) for part in parts]
    first = headers[0]
    count = first.fields.integer("split.count", 1, at_least=0) or 1
    if count != len(parts):
        raise UnsupportedArchitectureError(
            f"{parts[0]} is one of {count} files by its content and of {len(parts)} by its name: give the files "
            "their names, which end in -00001-of-00002.gguf, or merge them with `llama-gguf-split --merge`"
        )
    return replace(first, tensors={name: tensor for header in headers for name, tensor in header.tensors.items()})


# --- the configuration


def _shape_settings(header: GgufHeader) -> dict[str, Any]:
    """The sizes, from the metadata; the vocabulary's from the embedding, which may be padded."""
    fields, embedding = header.of_model(), header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{header.fields.where} has no token_embd.weight: it is not a language model's weights")
    size = fields.integer
    heads, hidden, num_layers = size("attention.head_count"), size("embedding_length"), size("block_count")
    rotated = size("rope.dimension_count", size("attention.key_length", hidden // heads))
    head_dim = size("attention.key_length", rotated)
    if rotated != head_dim or size("attention.value_length", head_dim) != head_dim:
        raise UnsupportedArchitectureError(
            f"{header.fields.where}: heads of {head_dim} channels of which {rotated} are rotated, or values of another "
            "size, are not supported: choose another model"
        )
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def config_from_gguf(header: GgufHeader) -> dict[str, Any]:
    """What a `config.json` beside the file would say.

    Raises:
        CheckpointError: A needed entry is missing or impossible.
        UnsupportedArchitectureError: Something the decoder does not implement: another architecture, or a mixture of
            experts.
    """
    path, fields = header.fields.where, header.of_model()
    no_model = _NO_MODELS.get(header.fields.text("general.type", "model"))
    if no_model is not None:
        raise CheckpointError(f"{path} is {no_model}")
    family = GGUF_ARCHITECTURES.get(header.arch)
    if family is None or fields.integer("expert_count", 0, at_least=0):
        prefix = f"{header.arch}."
        stated = {key.removeprefix(prefix): value for key, value in fields.values.items() if key.startswith(prefix)}
        raise unsupported_model(Fields(path, {**stated, "model_type": header.arch}))
    shape = _shape_settings(header)
    ids, eos = special_ids(header.fields), end_token_ids(header.fields)
    vectors = {name: _read_vector(header.tensors[name]) for name in ROPE_TENSORS if name in header.tensors}
    settings = shape | {
        "rope_parameters": rope_of_gguf(fields, header.arch, shape["head_dim"], vectors),
        "bos_token_id": ids.get("bos"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": ids.get("padding"),
        "dtype": "bfloat16",
        # Of some families only; the others have no such tensors, or have them whatever their configuration says.
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
    }
    window = fields.integer("attention.sliding_window", 0, at_least=0)
    if family == "llama" and window:  # only Mistral has them of what is stored as llama
        family = "mistral"
        settings["sliding_window"] = window
    return settings | {"model_type": family, "architectures": [ARCHITECTURES[family]]}


def _generation(fields: Fields) -> dict[str, Any]:
    """What a `generation_config.json` beside the file would say."""
    stated = {name: fields.values.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    # Stored in fp32: 0.6 is 0.6000000238.
    return {name: float(f"{value:.7g}") if isinstance(value, float) else value for name, value in stated.items()}


# --- the tensors


def _check_kind(tensor: StoredTensor) -> None:
    """Refuse a quantisation that is not read, before anything is loaded."""
    if tensor.dtype not in KINDS:
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} is quantised as {tensor.dtype}, which is not read: use another file, such "
            "as one of Q4_K_M"
        )


@dataclass(frozen=True)
class _GgufFill:
    """Reads a tensor; a vector counts as one row. With `head_dim` the rows of each head are put back in order, whose
    two halves llama.cpp interleaves; those of a vector are its elements."""

    tensor: StoredTensor
    head_dim: int | None = None

    def __call__(self, out: torch.Tensor, staging: Staging | None = None) -> None:
        """Fill `out` as a `Fill` does, a few rows at a time.

        Raises:
            CheckpointError: The file ends too early, or scales are not finite.
        """
        tensor, unit = self.tensor, self.head_dim or 1  # whole heads, so that a piece can be put in order
        rows = tensor.shape[0] if len(tensor.shape) > 1 or self.head_dim else 1
        stored_bytes, row_bytes = tensor.nbytes // rows, max(tensor.nbytes, out.nbytes) // rows
        room = PIECE_BYTES // (1 if self.head_dim is None else 2)  # in order they are there once more
        step = min(rows, max(1, room // (row_bytes * unit)) * unit)
        with own_or(staging) as pieces:
            device = pieces.device if out.is_cpu and tensor.dtype in FORMATS else out.device
            with pieces.piece(step * row_bytes, device) as piece:
                for part, start in zip(out.view(rows, -1).split(step), range(0, rows, step), strict=True):
                    blocks = piece.memory[: len(part) * stored_bytes].view(len(part), -1)
                    tensor.read_into(blocks.view(-1).numpy().data, start * stored_bytes)
                    if not has_finite_scales(tensor.dtype, blocks):
                        raise damaged(tensor.path, f"scales of {tensor.name} are infinite or no numbers")
                    piece.convert(blocks.nbytes, part, self._convert)

    def _convert(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Rows as the file has them as `out` has them."""
        blocks = stored.view(len(out), -1)
        if self.head_dim is not None:
            halves = blocks.view(-1, self.head_dim // 2, 2, blocks.shape[1]).transpose(1, 2)
            blocks = halves.reshape(blocks.shape)
        if out.dtype == torch.uint8:
            store_rows(self.tensor.dtype, blocks, self.tensor.shape[-1], out)
        else:
            decode_file_rows(self.tensor.dtype, blocks, out)


def _read_vector(tensor: StoredTensor) -> list[float]:
    """A small stored vector as Python floats."""
    _check_kind(tensor)
    out = torch.empty(tensor.shape)
    _GgufFill(tensor)(out)
    return [float(value) for value in out.view(-1).tolist()]


def _stored_names(header: GgufHeader, config: ModelConfig) -> Callable[[str], str]:
    """From transformers' name of a tensor to the file's."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == header.arch)
    names = gguf.get_tensor_name_map(arch, config.num_layers)

    def stored_name(name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        return f"{names.get_name(stem)}.{suffix}"

    return stored_name


def describe_gguf(path: Path) -> DescribedModel:
    """What the header of a GGUF file says; errors as of `open_gguf`, but for missing tensors."""
    header = read_gguf_header(path)
    config = model_config_from_json(config_from_gguf(header), str(path))
    stored_name = _stored_names(header, config)
    found = {name: header.tensors.get(stored_name(name)) for name in checkpoint_tensors(config)}
    tensors = {name: tensor for name, tensor in found.items() if tensor is not None}
    for tensor in tensors.values():
        _check_kind(tensor)
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    vocabulary = cache(partial(gguf_vocabulary, header.fields))
    return DescribedModel(config, torch.bfloat16, kinds=kinds, read_vocabulary=vocabulary)


def open_gguf(path: Path, *, reference: str) -> CheckpointSource:
    """Open and validate a GGUF file, to be computed in bf16: a quantised file has no dtype of its own.

    Args:
        path: The file.
        reference: What the user named.

    Raises:
        CheckpointError: Truncated, corrupt or incomplete.
        UnsupportedArchitectureError: A model the decoder does not implement.
    """
    header = read_gguf_header(path)
    settings = config_from_gguf(header)
    config = model_config_from_json(settings, str(path))
    fills = dict[str, Fill]()
    stored_name = _stored_names(header, config)
    tensors = match_tensors(header.fields.where, header.tensors, config, _check_kind, stored_name)
    for name, tensor in tensors.items():
        # llama.cpp rotates neighbouring channels for these, so its converter interleaved the rows of q and k.
        permuted = header.arch in ("llama", "smollm3") and (".q_proj." in name or ".k_proj." in name)
        fills[name] = _GgufFill(tensor, config.head_dim if permuted else None)
    tokenizer = cache(lambda: gguf_tokenizer(header.fields, path.parent))
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    return CheckpointSource(
        config, torch.bfloat16, reference, settings, fills, tokenizer, _generation(header.fields), kinds=kinds,
        stored=(*header.tensors.values(),), generation_name="general.sampling",
        read_vocabulary=cache(partial(gguf_vocabulary, header.fields)),
    )  # fmt: skip
