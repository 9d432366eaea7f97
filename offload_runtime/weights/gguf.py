"""GGUF files: their metadata as a transformers configuration, their tensors as stored or decoded.

transformers' own reader takes the base of the rotary frequencies and drops their scaling; here that is translated too,
and what cannot be is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import gguf
import torch
from offload_runtime_kernels.gguf_blocks import FORMATS

from offload_runtime.errors import CheckpointError, UnsupportedArchitectureError
from offload_runtime.fields import Fields
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.mtp import MtpConfig, MtpNames
from offload_runtime.models.reading import MOST_LAYERS
from offload_runtime.models.registry import FAMILIES, family_named, model_config_from_json
from offload_runtime.stream.arena import PIECE_BYTES, Staging, own_or
from offload_runtime.weights.checkpoint import CheckpointSource, match_tensors
from offload_runtime.weights.encoding import KINDS, Fill, format_of
from offload_runtime.weights.gguf_header import (
    ROPE_TENSORS,
    GgufHeader,
    read_gguf_header,
    rope_of_gguf,
    supported_family,
)
from offload_runtime.weights.header import StoredTensor, damaged
from offload_runtime.weights.tokenizer import end_token_ids, gguf_tokenizer, gguf_vocabulary, special_ids

# What makers want tokens to be sampled by, in the words of `generation_config.json`.
_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
# Without a dimension of one that transformers has, by where that is.
_DROPPED = {".ssm_conv1d.weight": 1, ".ffn_gate_inp_shexp.weight": 0}
_BIASES = {".dt_bias": ".dt_proj.bias", "_correction_bias": "_correction.bias", "_proj_bias": "_proj.bias"}
_NEXTN = re.compile(r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|shared_head\.norm)\.weight")
_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(\w+)\.weight")


# --- the configuration


def _shape_settings(header: GgufHeader) -> dict[str, Any]:
    """Return the sizes, from the metadata; the vocabulary's from the embedding, which may be padded."""
    fields, embedding = header.of_model(), header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{header.fields.where} has no token_embd.weight: it is not a language model's weights")
    size = fields.integer

    def sizes(name: str, default: int | None = None) -> Any:
        """Return what may differ by layer: families that do not read lists refuse them."""
        found = fields.values.get(f"{header.arch}.{name}")
        return found if isinstance(found, list) else size(name, default)

    heads, hidden = size("attention.head_count"), size("embedding_length")
    num_layers = size("block_count", at_most=MOST_LAYERS)
    head_dim = size("attention.key_length", hidden // heads)
    if (of_values := size("attention.value_length", head_dim)) != head_dim:
        raise UnsupportedArchitectureError(
            f"{header.fields.where}: keys of {head_dim} channels and values of {of_values} are not supported: choose "
            "another model"
        )
    norm = "layer_norm" if "attention.layer_norm_epsilon" in fields else "layer_norm_rms"
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": sizes("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": sizes("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "partial_rotary_factor": size("rope.dimension_count", head_dim, at_most=head_dim) / head_dim,
        "max_position_embeddings": size("context_length"),
        "rms_norm_eps": fields.number(f"attention.{norm}_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def config_from_gguf(header: GgufHeader) -> dict[str, Any]:
    """Return what a `config.json` beside the file would say.

    Raises:
        CheckpointError: A needed entry is missing or impossible.
        UnsupportedArchitectureError: Something the decoder does not implement, such as another architecture.
    """
    fields, family = header.of_model(), supported_family(header)
    shape, window = _shape_settings(header), fields.integer("attention.sliding_window", 0, at_least=0)
    rotated = round(shape["head_dim"] * shape["partial_rotary_factor"])
    ids, eos = special_ids(header.fields), end_token_ids(header.fields)
    vectors = {name: _read_vector(header.tensors[name]) for name in ROPE_TENSORS if name in header.tensors}
    one = family_named(family)
    rope = rope_of_gguf(fields, header.arch, rotated, vectors, reads_multiplier=one.rope_of_gguf is not None)
    settings = shape | {
        "rope_parameters": rope if one.rope_of_gguf is None else one.rope_of_gguf(fields, rope),
        "bos_token_id": ids.get("bos"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": ids.get("padding"),
        "dtype": "bfloat16",
        # Of some families only; the others have no such tensors, or have them whatever their configuration says.
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
    }
    slides = fields.values.get(f"{header.arch}.attention.sliding_window_pattern")
    if isinstance(slides, (list, bool)):  # of each layer, or of all
        slides = slides if isinstance(slides, list) else [slides] * shape["num_hidden_layers"]
        settings["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]
    settings |= {
        "model_type": family,
        "architectures": [FAMILIES[family].architecture],
        "sliding_window": window or None,
    }
    return settings | dict(one.of_gguf(fields, header.tensors.keys()))


def _generation(fields: Fields) -> dict[str, Any]:
    """Return what a `generation_config.json` beside the file would say."""
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
    two halves llama.cpp interleaves; those of a vector are its elements. `undo` brings back values in fp32."""

    tensor: StoredTensor
    head_dim: int | None = None
    undo: Callable[[torch.Tensor], torch.Tensor] | None = None

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
                    if not format_of(tensor.dtype).has_finite_scales(blocks):
                        raise damaged(
                            tensor.path, f"scales of {tensor.name} are infinite or no numbers, or beyond 2^100"
                        )
                    piece.convert(blocks.nbytes, part, self._convert)

    def _convert(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Turn rows as the file has them into what `out` has."""
        how, blocks = format_of(self.tensor.dtype), stored.view(len(out), -1)
        if self.head_dim is not None:
            halves = blocks.view(-1, self.head_dim // 2, 2, blocks.shape[1]).transpose(1, 2)
            blocks = halves.reshape(blocks.shape)
        if out.dtype == torch.uint8:
            how.store_rows(blocks, self.tensor.shape[-1], out)
        elif self.undo is not None:
            decoded = torch.empty_like(out, dtype=torch.float32)
            how.decode_file_rows(blocks, decoded)
            out.copy_(self.undo(decoded))
        else:
            how.decode_file_rows(blocks, out)


def _read_vector(tensor: StoredTensor) -> list[float]:
    """Return a small stored vector as Python floats."""
    _check_kind(tensor)
    out = torch.empty(tensor.shape)
    _GgufFill(tensor)(out)
    return [float(value) for value in out.view(-1).tolist()]


def _stored_names(header: GgufHeader) -> Callable[[str], str]:
    """Return what turns transformers' name of a tensor into the file's."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == header.arch)
    names = gguf.get_tensor_name_map(arch, header.of_model().integer("block_count"))

    def stored_name(name: str) -> str:
        if found := _EXPERT.fullmatch(name):
            return f"{names.get_name(f'{found[1]}.{found[3]}')}.{found[2]}.weight"
        if found := _NEXTN.fullmatch(name):
            return f"blk.{found[1]}.nextn.{found[2].replace('.', '_')}.weight"
        name = name.replace("gate_up_proj_bias", "gate_proj_bias")  # as which a `_TensorPair` goes
        for end, bias in _BIASES.items():
            name = name.replace(end, bias)
        stem, _, suffix = name.rpartition(".")
        if suffix in ("weight", "bias"):
            return f"{names.get_name(stem)}.{suffix}"
        stored = str(names.get_name(name))  # transformers has no suffix where a parameter is no module's
        return stored if stored in header.tensors else f"{stored}.weight"

    return stored_name


def _with_dropped(tensor: StoredTensor) -> StoredTensor:
    """Return a tensor with the dimension of one that llama.cpp leaves out, if it does."""
    at = next((at for end, at in _DROPPED.items() if tensor.name.endswith(end)), None)
    if at is None or len(tensor.shape) != 2 - (at == 0):
        return tensor
    return replace(tensor, shape=(*tensor.shape[:at], 1, *tensor.shape[at:]))


@dataclass(frozen=True)
class _TensorPair(StoredTensor):
    """A tensor whose elements are in turn those of two others of one shape, which are small."""

    parts: tuple[StoredTensor, StoredTensor]

    def fill(self, out: torch.Tensor, staging: Staging | None = None) -> None:
        """Fill `out`, through memory of its own."""
        found = torch.empty(2, *self.parts[0].shape)
        for part, to in zip(self.parts, found, strict=True):
            _GgufFill(part)(to, staging)
        out.copy_(torch.stack((*found,), dim=-1).view(out.shape))


def _with_pairs(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a file in which one stands, by the name of the gates', for the biases of gates and ups."""
    found = dict(stored)
    for name in [name for name in stored if name.endswith("ffn_gate_exps.bias")]:
        gate, up = stored[name], found.pop(name.replace("_gate_", "_up_"), None)
        if up is None or (up.shape, up.dtype) != (gate.shape, gate.dtype):
            raise CheckpointError(
                f"{gate.path} has {name} {list(gate.shape)} and no such biases of ups: download or convert it again"
            )
        shape = (*gate.shape[:-1], 2 * gate.shape[-1])
        found[name] = _TensorPair(
            gate.path, name, gate.dtype, shape, gate.offset_bytes, 2 * gate.nbytes, (gate, up)
        )  # fmt: skip
    return found


def _of_experts(tensor: StoredTensor, count: int) -> Iterable[StoredTensor]:
    """Return the matrices of each of so many experts, by names with its number before the suffix; another tensor as it
    is."""
    stem = tensor.name.removesuffix("_exps.weight")
    if stem == tensor.name:
        return (tensor,)
    if tensor.shape[0] != count:
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} is of {tensor.shape[0]} experts, and the file says that there are {count}: "
            "download or convert it again"
        )
    names = (stem.replace("_gate_up", "_gate"), stem.replace("_gate_up", "_up"))
    return tensor.of_experts(*(f"{name}_exps.#.weight" for name in dict.fromkeys(names)))


def open_gguf(path: Path, *, reference: str, whole: bool = True) -> CheckpointSource:
    """Open and validate a GGUF file, to be computed in bf16: a quantised file has no dtype of its own.

    Args:
        path: The file.
        reference: What the user named.
        whole: Whether all tensors have to be there: only a description is wanted of others.

    Raises:
        CheckpointError: Truncated, corrupt or incomplete.
        UnsupportedArchitectureError: A model the decoder does not implement.
    """
    header = read_gguf_header(path)
    settings = config_from_gguf(header)
    config = model_config_from_json(settings, str(path))
    num_layers = config.num_layers
    of_drafter = tuple(f"blk.{n}." for n in range(num_layers, header.of_model().integer("block_count")))
    own = {name: one for name, one in header.tensors.items() if not name.startswith(of_drafter)}
    found = _source(str(path), header, settings, config, own, whole=whole)

    def read_mtp() -> CheckpointSource | None:
        nextn = f"blk.{num_layers}.nextn."
        if f"{nextn}eh_proj.weight" not in header.tensors:
            return None
        head = MtpConfig.of(config, MtpNames.behind(num_layers))
        shared = (f"{nextn}embed_tokens.", f"{nextn}shared_head_head.")  # which are the target's once more
        tensors = header.tensors.items()
        of_head = {name: one for name, one in tensors if name not in own and not name.startswith(shared)}
        made = _source(f"{path}'s MTP layer", header, settings, head, of_head, whole=whole)
        return replace(made, stored=(*of_head.values(),))

    tokenizer = cache(lambda: gguf_tokenizer(header.fields, path.parent))
    return replace(
        found, reference=reference, tokenizer=tokenizer, generation=_generation(header.fields),
        stored=(*header.tensors.values(),), generation_name="general.sampling", read_mtp=cache(read_mtp),
        read_vocabulary=cache(partial(gguf_vocabulary, header.fields)),
    )  # fmt: skip


def _source(
    where: str, header: GgufHeader, settings: Mapping[str, Any], config: ModelConfig,
    stored: Mapping[str, StoredTensor], *, whole: bool,
) -> CheckpointSource:  # fmt: skip
    """Return the source of some tensors of a file; without a tokenizer."""
    fills, family = dict[str, Fill](), family_named(settings["model_type"])
    count = header.of_model().integer("expert_count", 0, at_least=0)
    read = {part.name: part for one in _with_pairs(stored).values() for part in _of_experts(_with_dropped(one), count)}
    tensors = match_tensors(where, read, config, _check_kind, _stored_names(header), whole=whole)
    for name, tensor in tensors.items():
        # llama.cpp rotates neighbouring channels for these, so its converter interleaved the rows of q and k.
        permuted = family.gguf_interleaved and (".q_proj." in name or ".k_proj." in name)
        undo = next((undo for end, undo in family.gguf_undo.items() if name.endswith(end)), None)
        ordered = _GgufFill(tensor, config.attention.head_dim if permuted else None, undo)
        fills[name] = tensor.fill if isinstance(tensor, _TensorPair) else ordered
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    return CheckpointSource(config, torch.bfloat16, where, settings, fills, lambda: None, kinds=kinds)
