"""Headers of GGUF files: metadata, tensors, the family of the model, and how its queries and keys are rotated, as
llama.cpp reads it, in transformers' parameters; needs no torch.

The `gguf` package's reader makes numpy arrays of every token of the vocabulary, which takes seconds; here the header is
walked, and a truncated file is refused with the number of missing bytes.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf

from offload_runtime.errors import CheckpointError, UnsupportedArchitectureError
from offload_runtime.fields import Fields, HeaderError, shortened, shown
from offload_runtime.models.registry import gguf_family, unsupported_model
from offload_runtime.weights.header import GGUF_MAGIC, HeaderReader, StoredTensor, open_header

_VERSIONS = (2, 3)
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})((?i:\.gguf))")
# What a file is by its `general.type`, where that is no model.
_NO_MODELS = {
    "adapter": "an adapter (LoRA), and adapters are not read: merge it into its model (llama-export-lora)",
    "mmproj": "what turns images into tokens (mmproj), and images are not read: give the model's own file",
    "imatrix": "an importance matrix for quantising: give the model's own file",
}


@dataclass(frozen=True)
class GgufHeader:
    """All of the metadata, tensors by name in the order of the file; their `dtype` is the name of a quantisation."""

    fields: Fields
    tensors: dict[str, StoredTensor]

    @property
    def arch(self) -> str:
        """Return the architecture, which all keys about the model begin with."""
        return self.fields.text("general.architecture", "")

    def of_model(self) -> Fields:
        """Return the metadata of the architecture; a per-layer list counts as one value where all layers agree."""
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
    """Return one entry of the tensor table; the offset is still relative to the data section."""
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
    remedy = "upgrade this program, or take an older file" if newer else "take one that was converted lately"
    return f"{path} is a GGUF file of version {version}, and only versions 2 and 3 are read: {remedy}"


def _read_file(path: Path) -> GgufHeader:
    """Return the metadata and tensor table of one file."""
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
    """Return all files of the model that a file is a part of, by its name; else the file alone."""
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


def supported_family(header: GgufHeader) -> str:
    """Return the family of a model by the name that transformers has for it, or whose text part it is.

    Raises:
        CheckpointError: It is an adapter, or another file that is no model.
        UnsupportedArchitectureError: The decoder does not implement it.
    """
    path, fields = header.fields.where, header.of_model()
    no_model = _NO_MODELS.get(header.fields.text("general.type", "model"))
    if no_model is not None:
        raise CheckpointError(f"{path} is {no_model}")
    slides, experts = (fields.integer(name, 0, at_least=0) for name in ("attention.sliding_window", "expert_count"))
    family = gguf_family(header.arch, slides=slides > 0, experts=experts > 0)
    if family is None:
        prefix = f"{header.arch}."
        stated = {key.removeprefix(prefix): value for key, value in fields.values.items() if key.startswith(prefix)}
        raise unsupported_model(Fields(path, {**stated, "model_type": header.arch}))
    return family


_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = ("rope_freqs.weight", _SHORT, _LONG)
_BETA_FAST, _BETA_SLOW = 32.0, 1.0  # turns in the original context that YaRN's ramp lies between
# What llama.cpp does not read of these models, and the values that change nothing.
_NO_SCALING: dict[str, tuple[float, ...]] = {
    "yarn_ext_factor": (-1.0, 1.0), "yarn_attn_factor": (1.0,), "yarn_beta_fast": (_BETA_FAST,),
    "yarn_beta_slow": (_BETA_SLOW,),
    "yarn_log_multiplier": (0.0,), "alpha": (0.0, 1.0),
}  # fmt: skip


def rope_of_gguf(
    fields: Fields, arch: str, channels: int, vectors: Mapping[str, list[float]], *, reads_multiplier: bool = False
) -> dict[str, Any]:
    """Return how llama.cpp rotates (`llama-model.cpp`, `llama-context.cpp`, `rope_yarn` of ggml): pairs of channels by
    their usual frequency, divided by the factor and by what a tensor says of each, which transformers calls longrope.

    Args:
        fields: The metadata of the architecture.
        arch: Its name.
        channels: Those of a head that are rotated.
        vectors: Those of `ROPE_TENSORS` that the file has.
        reads_multiplier: Whether llama.cpp reads YaRN's logarithmic multiplier of it.

    Raises:
        UnsupportedArchitectureError: A scaling that llama.cpp does not have for such a model.
        CheckpointError: A tensor of another size.
    """
    kind, divisors = fields.text("rope.scaling.type", "linear"), _stored_divisors(fields.where, vectors, channels // 2)
    if kind not in ("none", "linear", "yarn") and not (kind == "longrope" and divisors):
        raise UnsupportedArchitectureError(
            f"{fields.where}: RoPE scaling {shown(kind)} is not supported: use a model with none, linear, yarn or "
            "longrope (with its factors)"
        )
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0)) or 1.0
    factor = 1.0 if kind == "none" else factor
    usual = 0.1 * math.log(factor) + 1.0 if kind == "yarn" and factor > 1 else 1.0
    for name, without in _NO_SCALING.items():
        value = fields.number(f"rope.scaling.{name}", without[0])
        if name == "yarn_log_multiplier" and reads_multiplier:
            continue
        if name == "yarn_attn_factor" and math.isclose(value, usual, rel_tol=1e-4):
            continue  # what llama.cpp takes anyway
        if value not in without:
            raise UnsupportedArchitectureError(
                f"{fields.where}: rope.scaling.{name} is {value:g}, which is not supported, and llama.cpp does not "
                f"read it for {shown(arch)}: use a file with {without[0]:g}, or without it"
            )
    base, attention = fields.number("rope.freq_base", 10000.0), fields.number("rope.scaling.attn_factor", 1.0) * usual
    original = fields.integer("rope.scaling.original_context_length", fields.integer("context_length"))
    of_yarn = {"original_max_position_embeddings": original, "attention_factor": attention}
    if not divisors and factor >= 1:  # transformers has the same
        if kind == "yarn":
            return {"rope_theta": base, "rope_type": "yarn", "factor": factor, **of_yarn}
        if attention == 1.0:
            return {"rope_theta": base} | ({"rope_type": "linear", "factor": factor} if factor > 1 else {})
    ramped = kind == "yarn" and factor > 0 and base > 1
    scales = _yarn_divisors(channels, base, original, factor) if ramped else [factor] * (channels // 2)
    short, long = ([one * scale for one, scale in zip(each, scales, strict=True)]
                   for each in divisors or ([1.0] * len(scales),) * 2)  # fmt: skip
    return {
        "rope_theta": base, "rope_type": "longrope", "factor": 1.0, **of_yarn, "short_factor": short,
        "long_factor": long,
    }  # fmt: skip


def _stored_divisors(
    where: object, vectors: Mapping[str, list[float]], num_pairs: int
) -> tuple[list[float], list[float]] | None:
    """Return what each frequency is divided by in short texts and in long ones: Llama 3's scaling, whose parameters are
    not in the file, or Phi's."""
    names = (ROPE_TENSORS[0],) * 2 if ROPE_TENSORS[0] in vectors else (_SHORT, _LONG)
    if not vectors.keys() & {*names}:
        return None
    for name in names:
        if name not in vectors:
            raise CheckpointError(f"{where} has no {name} beside its like: download or convert it again")
        if len(vectors[name]) != num_pairs:
            raise CheckpointError(
                f"{where} has {len(vectors[name])} numbers in {name}, expected {num_pairs}, half of the rotated "
                "channels: download or convert it again"
            )
    return vectors[names[0]], vectors[names[1]]


def _yarn_divisors(head_dim: int, base: float, original: int, factor: float) -> list[float]:
    """Return what YaRN divides each frequency by: 1 for pairs that turn often in the original context, the factor for
    those that turn less than once, and between them by a ramp of the frequencies."""

    def pair_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0, math.floor(pair_of(_BETA_FAST))), min(head_dim - 1, math.ceil(pair_of(_BETA_SLOW)))
    ramp = [1 - min(1.0, max(0.0, (pair - low) / max(0.001, high - low))) for pair in range(head_dim // 2)]
    return [1 / (kept + (1 - kept) / factor) for kept in ramp]
