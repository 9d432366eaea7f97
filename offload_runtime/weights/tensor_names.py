"""From the names that tensors have in files to those of transformers' causal models, and whether the head is tied."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from offload_runtime.errors import CheckpointError
from offload_runtime.fields import shortened
from offload_runtime.models.config import ModelConfig
from offload_runtime.weights.header import StoredTensor

EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FIRST_NORM = "layers.0.input_layernorm.weight"  # which towers for images call otherwise
_OF_MODEL = re.compile(r"(?:layers|embed_tokens|norm)\.")
_OF_HEAD = re.compile(r"((?:.+\.)?)lm_head\.[^.]+")
_COMPARED_BYTES = 8 << 20


def renamed(where: object, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of the language model by their usual names, `model.layers.0...` and `lm_head...`, whatever comes
    before: nothing in what a base model saved, `language_model.model.` or `model.language_model.` in models that read
    images. The head may lie beside the model, in it, or further out. Others keep their names.

    Raises:
        CheckpointError: It holds several language models, or heads of one.
    """
    prefixes = [name.removesuffix(_FIRST_NORM) for name in stored if name.endswith(_FIRST_NORM)]
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
        elif name.startswith(prefix) and _OF_MODEL.match(rest):
            name = "model." + rest
        found[name] = replace(tensor, name=name)
    return found


def with_head(stored: Mapping[str, StoredTensor], config: ModelConfig) -> tuple[dict[str, StoredTensor], ModelConfig]:
    """The tensors and the configuration as they mean the head of a model that says its head is tied, as transformers 5
    does: a head of another content than the embedding is not tied, and one matrix under either name is both.

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
