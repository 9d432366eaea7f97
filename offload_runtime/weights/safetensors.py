"""Checkpoints of transformers: a directory with `config.json`, safetensors files, a tokenizer.

A safetensors file is eight bytes of header length, a JSON header and the raw tensors. Reading it here rather than
through the library's memory maps puts the bytes straight where they belong (no mapped pages that count as ours, any
number of threads), and lets a truncated file be refused with the number of bytes that are missing. Whatever files call
tensors, here they have the names of transformers' causal models.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from offload_runtime.errors import CheckpointError, OptionError
from offload_runtime.fields import MOST, Fields, HeaderError, shortened, shown
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.mtp import MtpNames, mtp_of
from offload_runtime.models.registry import (
    Family,
    family_named,
    head_kind,
    head_named,
    language_settings,
    model_config_from_json,
)
from offload_runtime.stream.arena import PIECE_BYTES, Staging, own_or
from offload_runtime.weights.checkpoint import CheckpointSource, match_tensors
from offload_runtime.weights.encoding import Fill
from offload_runtime.weights.header import (
    StoredTensor,
    damaged,
    no_weights,
    open_header,
    refuse_other_directory,
    refuse_other_file,
)
from offload_runtime.weights.layout import checkpoint_tensors
from offload_runtime.weights.mxfp4 import ExpertTensor
from offload_runtime.weights.quantised import (
    DTYPES,
    Quantisation,
    QuantisedTensor,
    gather,
    quantisation_of,
    read_tensor,
)
from offload_runtime.weights.tokenizer import directory_vocabulary, load_tokenizer

EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FIRST_NORM = "layers.0.input_layernorm.weight"  # which towers for images call otherwise
_OF_DRAFTER, D2T = "mtp.", "d2t"  # layers that guess further tokens, and which tokens such a head knows
_OF_MODEL = re.compile(r"(?:layers|embed_tokens|norm)\.")
_OF_HEAD = re.compile(r"((?:.+\.)?)lm_head\.[^.]+")
_STACKED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")
_COMPARED_BYTES = 8 << 20
_MASK_EMBEDDING = "mask_embedding.pt"  # of some makers of DFlash heads


@dataclass(frozen=True)
class _TransposedTensor(StoredTensor):
    """A matrix whose rows are, from `start` on, every `step`th column of what is stored."""

    start: int
    step: int

    def fill(self, out: torch.Tensor, staging: Staging | None = None) -> None:
        """Fill `out` as `fill_from_file` does, through memory of its own."""
        stored = torch.empty(self.shape[1], self.step * self.shape[0], dtype=DTYPES[self.dtype])
        self.read_into(stored.view(-1).view(torch.uint8).numpy().data)
        out.copy_(stored[:, self.start :: self.step].t())


def _transposed(tensor: StoredTensor, names: Sequence[str]) -> Iterator[StoredTensor]:
    """Return the matrices of each expert of [E, columns, rows of all of them in turn]; names as of `of_experts`."""
    for number, one in enumerate(tensor.of_experts("#")):
        shape, step = (one.shape[-1] // len(names), *one.shape[-2:-1]), len(names)
        for start, name in enumerate(names):
            called = name.replace("#", str(number))
            yield _TransposedTensor(one.path, called, one.dtype, shape, one.offset_bytes, one.nbytes, start, step)


def renamed(where: object, stored: Mapping[str, StoredTensor], family: Family) -> dict[str, StoredTensor]:
    """Return the tensors of the language model by their usual names, `model.layers.0...` and `lm_head...`, whatever
    comes before: nothing in what a base model saved, `language_model.model.` or `model.language_model.` in models that
    read images. The head may lie beside the model, in it, or further out. Others keep their names. Those of layers have
    parts of their names replaced as the family says, and experts that are stored as one tensor become one of each.

    Raises:
        CheckpointError: It holds several language models, or heads of one.
    """
    firsts = (name for name in stored if name.endswith(_FIRST_NORM) and _OF_DRAFTER not in name)
    prefixes = [name.removesuffix(_FIRST_NORM) for name in firsts]
    if not prefixes:
        return dict(stored)
    if len(prefixes) > 1 and "model." not in prefixes:
        names = shortened([prefix or "no prefix" for prefix in prefixes])
        raise CheckpointError(f"{where} holds {len(prefixes)} language models ({names}): give a checkpoint of one")
    prefix = "model." if "model." in prefixes else prefixes[0]
    outside = dict.fromkeys(match[1] for name in stored if (match := _OF_HEAD.fullmatch(name)))
    heads = [f"{before}lm_head." for before in outside if prefix.startswith(before)]
    if len(heads) > 1:
        raise CheckpointError(f"{where} holds {len(heads)} heads ({shortened(heads)}): give a checkpoint with one")
    found = dict[str, StoredTensor]()
    for name, tensor in stored.items():
        rest = name.removeprefix(prefix)
        if heads and name.startswith(heads[0]):
            name = "lm_head." + name.removeprefix(heads[0])
        elif name.removeprefix("model.").startswith(_OF_DRAFTER):
            name = ".".join(family.renamed.get(part, part) for part in name.removeprefix("model.").split("."))
        elif name.startswith(prefix) and _OF_MODEL.match(rest):
            name = "model." + ".".join(family.renamed.get(part, part) for part in rest.split("."))
        if stack := _STACKED.fullmatch(name):
            ends = ("gate_proj", "up_proj") if stack[2] == "gate_up_proj" else ("down_proj",)
            called = [f"{stack[1]}.#.{end}.weight" for end in ends]
            parts = _transposed(tensor, called) if family.transposed else tensor.of_experts(*called)
            found |= {one.name: one for one in parts}
        else:
            found[name] = replace(tensor, name=name)
    return found


@dataclass(frozen=True)
class _JoinedTensor(StoredTensor):
    """A tensor of which rows are stored apart, of one dtype."""

    parts: tuple[StoredTensor, ...]

    def fill(self, out: torch.Tensor, staging: Staging | None = None) -> None:
        """Fill `out` as `fill_from_file` does."""
        for part, rows in zip(self.parts, out.split([part.shape[0] for part in self.parts]), strict=True):
            fill_from_file(part, rows, staging)


def joined(stored: Mapping[str, StoredTensor], ends: Mapping[str, tuple[str, ...]]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint, in which one stands for those that it has in its place, as of
    `Family.joined`.

    Raises:
        CheckpointError: Some of these are missing, or of other kinds.
    """
    found = dict(stored)
    for end, places in ends.items():
        for stem in [name.removesuffix(places[0]) for name in stored if name.endswith(f".{places[0]}")]:
            parts = [stored[stem + place] for place in places if stem + place in stored]
            first, kinds = parts[0], {(part.dtype, part.shape[1:]) for part in parts}
            if len(parts) < len(places) or len(kinds) > 1 or not first.shape:
                there = ", ".join(f"{part.name} {list(part.shape)} in {part.dtype}" for part in parts)
                raise CheckpointError(
                    f"{first.path} has {there}, and {', '.join(places)} have to make one tensor: download it again"
                )
            shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
            for part in parts:
                del found[part.name]
            name, nbytes = stem + end, sum(part.nbytes for part in parts)
            found[name] = _JoinedTensor(first.path, name, first.dtype, shape, 0, nbytes, (*parts,))
    return found


def with_head(stored: Mapping[str, StoredTensor], config: ModelConfig) -> tuple[dict[str, StoredTensor], ModelConfig]:
    """Return the tensors and the configuration as they mean the head of a model that says its head is tied, as
    transformers 5 does: a head of another content than the embedding is not tied, and one matrix under either name is
    both.

    Raises:
        CheckpointError: A file ends too early.
    """
    found, embedding, head = dict(stored), stored.get(EMBEDDING), stored.get(_HEAD)
    if not config.tie_word_embeddings or not any(name.startswith("lm_head.") for name in stored):
        return found, config
    if embedding is None and head is not None:
        del found[_HEAD]
        found[EMBEDDING] = replace(head, name=EMBEDDING)
    elif embedding is not None and (head is None or not _same_content(embedding, head)):  # it may be quantised
        config = replace(config, tie_word_embeddings=False)
    return found, config


def _same_content(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    for start in range(0, one.nbytes, _COMPARED_BYTES):
        pieces = [bytearray(min(_COMPARED_BYTES, one.nbytes - start)) for _ in range(2)]
        for tensor, piece in zip((one, other), pieces, strict=True):
            tensor.read_into(memoryview(piece), start)
        if pieces[0] != pieces[1]:
            return False
    return True


FLOATS = ("F64", "F32", "F16", "BF16")  # what is read as it is
_MAX_HEADER_BYTES = 100_000_000  # the reference implementation's own limit
_MOST_DIMENSIONS = 8
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# What old tools wrote about a quantisation beside a config.json that says nothing of it, and their words for ours.
_OLD_STATEMENTS = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
_OLD_WORDS = {"w_bit": "bits", "q_group_size": "group_size"}
_DTYPE_NAMES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def computed_dtype(stored: StoredTensor) -> torch.dtype:
    """Return what a tensor can be computed in without loss: float64 counts as float32."""
    return torch.float32 if stored.dtype == "F64" else DTYPES[stored.dtype]


def _stored_tensor(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    fields = Fields(f"{path}'s tensor {shown(name)}", entry if isinstance(entry, dict) else {})
    dtype, shape = fields.text("dtype"), tuple(fields.items("shape", int, at_least=0, at_most=MOST))
    offsets = fields.items("data_offsets", int, at_least=0, at_most=1 << 62)
    valid = len(offsets) == 2 and offsets[0] <= offsets[1] and len(shape) <= _MOST_DIMENSIONS and "shape" in fields
    element = DTYPES.get(dtype)
    if valid and element is not None:
        valid = offsets[1] - offsets[0] == math.prod(shape) * element.itemsize
    if not valid:
        raise HeaderError(f"the entry for {shown(name)} lacks a dtype, shape and data_offsets that fit one another")
    return StoredTensor(path, name, dtype, shape, data_start + offsets[0], offsets[1] - offsets[0])


def read_header(path: Path) -> dict[str, StoredTensor]:
    """List the tensors of a file after checking that all their bytes are there.

    Raises:
        CheckpointError: The file cannot be read, its header is corrupt, or its end is missing.
    """
    with open_header(path) as reader:
        header_bytes = reader.number("<Q")
        if header_bytes > _MAX_HEADER_BYTES:
            raise HeaderError(f"it should take {header_bytes} bytes, and {_MAX_HEADER_BYTES} are the most")
        entries = json.loads(reader.take(header_bytes))
        if not isinstance(entries, dict):
            raise HeaderError("it is not a JSON object")
        entries.pop("__metadata__", None)
        tensors = {name: _stored_tensor(path, name, entry, reader.position) for name, entry in entries.items()}
        reader.check_complete(tensors.values())
    return tensors


def fill_from_file(stored: StoredTensor, out: torch.Tensor, staging: Staging | None = None) -> None:
    """Read a tensor into `out` (contiguous, the stored shape, on any device), converting to `out`'s dtype there.

    In host memory equal dtypes are read in place; all else passes through `staging`, by default its own.
    """
    dtype = DTYPES[stored.dtype]
    assert tuple(out.shape) == stored.shape and out.is_contiguous(), f"{stored.name}: {tuple(out.shape)}"
    flat = out.view(-1)
    if dtype == out.dtype and out.is_cpu:
        stored.read_into(flat.view(torch.uint8).numpy().data)
        return

    with own_or(staging) as pieces, pieces.piece(min(PIECE_BYTES, stored.nbytes), out.device) as piece:
        done_bytes = 0
        for to in flat.split(PIECE_BYTES // dtype.itemsize):
            nbytes = to.numel() * dtype.itemsize
            stored.read_into(piece.memory[:nbytes].numpy().data, done_bytes)
            piece.convert(nbytes, to, lambda part, to: to.copy_(part.view(dtype)))
            done_bytes += nbytes


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        CheckpointError: It is not a JSON object.
        OSError: It cannot be read.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        refuse_other_file(path)
        raise CheckpointError(f"{path} is not valid JSON ({shown(error)}): download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object: download it again")
    return content


def weight_files(directory: Path) -> list[Path]:
    """Return the files that hold a checkpoint's weights, whether or not they are there: the single one, else those that
    the index names, as transformers chooses; none where there is neither."""
    single, index = directory / _SINGLE, directory / _INDEX
    if single.exists():
        return [single]
    if not index.exists():
        return []
    weight_map = Fields(index, read_json(index)).mapping("weight_map")
    names = sorted(set(Fields(index, {"weight_map": list(weight_map.values())}).items("weight_map", str)))
    if not names:
        raise CheckpointError(f"{index} has no weight_map: download it again")
    if any(Path(name).name != name for name in names):
        raise CheckpointError(f"{index} names files outside its directory: do not trust it")
    return [directory / name for name in names]


def require_files(directory: Path) -> list[Path]:
    """Return the same files; raises `CheckpointError` where some are missing, or all."""
    paths = weight_files(directory)
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} of {len(paths)} shards ({shortened(missing)}): "
            f"finish the download; where the model was saved anew under other names, delete its old {_INDEX}"
        )
    if not paths:
        raise no_weights(directory)
    return paths


def _read_settings(directory: Path) -> dict[str, Any]:
    """Return the language model's part of `config.json`, with what old tools say beside it of a quantisation.

    Raises:
        CheckpointError: There is no such file, or the directory holds an adapter.
    """
    refuse_other_directory(directory)
    settings = language_settings(read_json(directory / "config.json"), str(directory))
    for name, method in _OLD_STATEMENTS.items():
        if not settings.get("quantization_config") and (directory / name).exists():
            stated = {_OLD_WORDS.get(word, word): value for word, value in read_json(directory / name).items()}
            settings = {**settings, "quantization_config": {"quant_method": method, **stated}}
    return settings


def _check_dtype(tensor: StoredTensor) -> None:
    offsets = tensor.name == D2T and tensor.dtype in ("I32", "I64")
    if tensor.dtype not in FLOATS and not offsets and not isinstance(tensor, QuantisedTensor | ExpertTensor):
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} is stored as {tensor.dtype}, and only {', '.join(FLOATS)} are read: "
            "use an unquantised checkpoint or a GGUF file"
        )


def open_safetensors(directory: Path, *, reference: str, whole: bool = True) -> CheckpointSource:
    """Open and validate a checkpoint of transformers, or of a head.

    Args:
        directory: Holds `config.json` and `model.safetensors` or its index with shards.
        reference: What the user named.
        whole: Whether the weights have to be there: only a description is wanted of others.

    Raises:
        CheckpointError: Something is missing, truncated or of another shape than `config.json` says.
    """
    settings, where = _read_settings(directory), str(directory)
    if (kind := head_kind(settings)) is not None:
        return _open_head(directory, settings, kind, reference=reference, whole=whole)
    config, quantisation = model_config_from_json(settings, where), quantisation_of(settings, where)
    in_files = _stored(directory, whole=whole)
    family = family_named(settings["model_type"])
    stored, config = with_head(renamed(where, joined(in_files, family.joined), family), config)
    own = gather(where, stored, config, quantisation)
    log = logging.getLogger(__name__)
    warn = log.warning if whole else log.debug
    if "text_part_of" in settings:
        warn("%s: only the text part of %s is run", reference, shown(settings["text_part_of"]))
    if (directory / _SINGLE).exists() and (directory / _INDEX).exists():
        warn("%s: %s is used, and the index beside it is not", reference, _SINGLE)
    if quantisation is not None and quantisation.activations:
        message = "%s asks for quantised activations, or keys and values: only its weights are quantised here"
        warn(message, reference)
    head, behind = mtp_of(settings, config, own.keys()), MtpNames.behind(config.num_layers).prefix
    of_mtp = {} if head is None else {n: one for n, one in own.items() if n.startswith((_OF_DRAFTER, behind))}
    own = {name: tensor for name, tensor in own.items() if name not in of_mtp}
    found = _source(where, settings, config, own, quantisation, whole=whole)
    if whole and quantisation is not None and not found.kinds:
        raise CheckpointError(f"{directory} says that it is quantised, and none of its matrices is: fix config.json")
    path, tokenizer = directory / "generation_config.json", cache(partial(load_tokenizer, directory))
    generation = read_json(path) if path.exists() else None

    def read_mtp() -> CheckpointSource | None:
        if head is None:
            return None
        shared = (f"{behind}embed_tokens.", f"{behind}shared_head.head.")  # which are the target's once more
        of_head = {name: tensor for name, tensor in of_mtp.items() if not name.startswith(shared)}
        gathered = gather(where, of_head, head, quantisation)
        made = _source(f"{where}'s MTP layer", settings, head, gathered, quantisation, whole=whole)
        return replace(made, stored=(*of_mtp.values(),))

    return replace(
        found, reference=reference, tokenizer=tokenizer, generation=generation, stored=(*in_files.values(),),
        read_mtp=cache(read_mtp), read_vocabulary=cache(partial(directory_vocabulary, directory)),
    )  # fmt: skip


def _stored(directory: Path, *, whole: bool) -> dict[str, StoredTensor]:
    """Return what lies in the files of a checkpoint, all of which have to be there if it is to be `whole`."""
    paths = require_files(directory) if whole else weight_files(directory)
    return {name: tensor for path in paths if path.exists() for name, tensor in read_header(path).items()}


def _source(
    where: str, settings: Mapping[str, Any], config: ModelConfig, stored: Mapping[str, StoredTensor],
    quantisation: Quantisation | None, *, whole: bool,
) -> CheckpointSource:  # fmt: skip
    """Return the source of some tensors of a checkpoint, which have their usual names; without a tokenizer."""
    tensors = match_tensors(where, stored, config, _check_dtype, whole=whole)
    quantised = QuantisedTensor | ExpertTensor
    kinds = {name: tensor.form for name, tensor in tensors.items() if isinstance(tensor, quantised)}
    fills: dict[str, Fill] = {
        name: tensor.fill
        if isinstance(tensor, quantised | _JoinedTensor | _TransposedTensor)
        else partial(fill_from_file, tensor)
        for name, tensor in tensors.items()
    }
    stated = str(settings.get("dtype") or settings.get("torch_dtype")).removeprefix("torch.")
    embedding, dtype = tensors.get(EMBEDDING), _DTYPE_NAMES.get(stated, torch.bfloat16)
    dtype = dtype if embedding is None else computed_dtype(embedding)
    if quantisation is not None:
        said = quantisation.forms(config, dtype)
        kinds |= {name: form for name, form in said.items() if name not in stored}
    return CheckpointSource(config, dtype, where, settings, fills, lambda: None, kinds=kinds)


def _open_head(
    directory: Path, settings: Mapping[str, Any], kind: str, *, reference: str, whole: bool
) -> CheckpointSource:
    """Open and validate a head that is a checkpoint of its own. Arguments and errors as of `open_safetensors`."""
    where, head, in_files = str(directory), head_named(kind), _stored(directory, whole=whole)
    if (directory / _MASK_EMBEDDING).exists():
        raise CheckpointError(
            f"{where} has a {_MASK_EMBEDDING}, which stands for masks in place of a row of the target's embedding and "
            "is not read: take a head without one, or --draft auto"
        )
    pairs = ((head.renamed(name), tensor) for name, tensor in in_files.items())
    stored = {name: replace(tensor, name=name) for name, tensor in pairs if name is not None}
    try:
        config = head.config(Fields(where, settings), stored.keys())
    except OptionError as error:
        raise CheckpointError(f"{where} describes an impossible head: {error}") from error
    quantisation = quantisation_of(settings, where)
    own, needed = gather(where, stored, config, quantisation), checkpoint_tensors(config)
    surplus = [name for name in own if name.endswith((".weight", ".bias")) and name not in needed]
    if surplus:  # guesses would be wrong, which nothing else tells of
        raise CheckpointError(
            f"{where} has {len(surplus)} tensors that {config.title} heads have not ({shortened(surplus)}): it is of "
            "another kind, which does not run; take another head, or --draft auto"
        )
    found = _source(where, settings, config, own, quantisation, whole=whole)
    if D2T in found.fills:
        offsets = read_tensor(stored[D2T])
        ids = offsets + torch.arange(len(offsets))
        if len(ids.unique()) < len(ids) or int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
            raise damaged(stored[D2T].path, f"{D2T} does not name tokens below {config.vocab_size}, each of them once")
    # Passes of the target multiply with it, which are not on the stream that decodes a head's matrices.
    kinds = {name: form for name, form in found.kinds.items() if name != "fc.weight"}
    return replace(found, reference=reference, kinds=kinds, stored=(*in_files.values(),))
