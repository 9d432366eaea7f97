"""Models around the one that was named: as a file of llama.cpp's usual mixes, and small ones that could draft for it.

Drafts are looked for where their user has them: beside it, or in the hub's cache. Only directories, configurations and
headers are read, nothing is fetched, and what is wrong with a neighbour is its own.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_runtime.errors import CheckpointError
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.registry import FAMILIES, model_config_from_json
from offload_runtime.weights.checkpoint import MOST_PADDING, DescribedModel, SharedVocabulary, share_vocabulary
from offload_runtime.weights.gguf_header import gguf_parts
from offload_runtime.weights.header import entries
from offload_runtime.weights.layout import checkpoint_tensors
from offload_runtime.weights.local import hub_snapshots, weight_bytes
from offload_runtime.weights.sources import describe_model, local_path

# What most models are published in, the largest first.
MIXES = ("Q8_0", "Q6_K", "Q4_K_M", "Q4_0")
MXFP4 = "MXFP4"  # what gpt-oss is published in: MLPs and experts in four bits, all else in eight
# Query heads for each of keys from which on values are so few that they are kept in five bits: 70B's.
_SHARED_VALUES = 8
# Of blocks of 256 weights, which do not divide all rows, what stands for them there.
_WEIGHTS = 256
_SMALLER_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def stored_kinds(config: ModelConfig, mix: str) -> dict[str, str]:
    """Return how every matrix is stored, by transformers' name.

    Mixes but Q8_0 have the head, or a tied embedding, in six bits. Q4_K_M has so values and down projections of half of
    the layers, too: of the first and last eighth and every third one between (`use_more_bits` of llama.cpp's
    `llama-quant.cpp`); values of a 70B that are not have five, and so have queries, keys and values in one matrix.
    """
    assert mix in (*MIXES, MXFP4)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    found = dict[str, str]()
    for name, to in checkpoint_tensors(config).items():
        if not to.is_matrix or to.packed == "router":  # which llama.cpp leaves as they are
            continue
        kind = mix.removesuffix("_M")
        if mix == MXFP4:
            kind = mix if ".mlp." in name and name.endswith("_proj.weight") else "Q8_0"
        elif name == head and mix != "Q8_0":
            kind = "Q6_K"
        elif mix == "Q4_K_M" and name.endswith("qkv_proj.weight"):
            kind = "Q5_K"
        elif mix == "Q4_K_M" and name.endswith(("v_proj.weight", "down_proj.weight")):
            assert to.layer is not None
            if _more_bits(to.layer, config.num_layers):
                kind = "Q6_K"
            elif "v_proj" in name and config.attention.num_heads == _SHARED_VALUES * config.attention.num_kv_heads:
                kind = "Q5_K"
        found[name] = kind if to.shape[1] % _WEIGHTS == 0 else _SMALLER_BLOCKS.get(kind, kind)
    return found


def _more_bits(layer: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


# A draft has at most this share of the target's parameters: a step of a larger one costs what it brings.
_MOST_SHARE = 1 / 3
# Entries of a directory that are looked at, models whose headers are read, the smallest first, and drafts that are
# planned with: a header of 150,000 tokens takes 0.3 s, a plan up to one.
_MOST_ENTRIES, _MOST_HEADERS, _MOST_DRAFTS = 256, 8, 3
# The draft that is usual with a family, by the target's architecture and rows of the embedding: its name, and its shape
# in the order of `_SHAPE`. It is planned with as `USUAL_MIX`, for targets of so many times its parameters.
_SHAPE = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "tie_word_embeddings",
)  # fmt: skip
_LLAMA, _QWEN = (16, 2048, 8192, 32, 8, 64, True), (24, 896, 4864, 14, 2, 64, True)
_MISTRAL = ("Mistral-7B-Instruct-v0.3", (32, 4096, 14336, 32, 8, 128, False))
_USUAL: dict[tuple[str, int], tuple[str, tuple[int, ...]]] = {
    ("LlamaForCausalLM", 128256): ("Llama-3.2-1B-Instruct", _LLAMA),
    ("LlamaForCausalLM", 32000): ("TinyLlama-1.1B-Chat-v1.0", (22, 2048, 5632, 32, 4, 64, False)),
    ("LlamaForCausalLM", 49152): ("SmolLM2-135M-Instruct", (30, 576, 1536, 9, 3, 64, True)),
    ("LlamaForCausalLM", 32768): _MISTRAL,  # GGUF files of Mistral's models say llama
    ("MistralForCausalLM", 32768): _MISTRAL,
    ("Qwen2ForCausalLM", 151936): ("Qwen2.5-0.5B-Instruct", _QWEN),
    ("Qwen2ForCausalLM", 152064): ("Qwen2.5-0.5B-Instruct", _QWEN),
    ("Qwen3ForCausalLM", 151936): ("Qwen3-0.6B", (28, 1024, 3072, 16, 8, 128, True)),
}
USUAL_MIX, _USUAL_TIMES = "Q8_0", 4


@dataclass(frozen=True)
class FoundDraft:
    """A model that may draft for another one: its name, as it was opened or described, what it may propose, and its
    share of the other's parameters."""

    name: str
    model: DescribedModel
    shared: SharedVocabulary
    share: float


def find_drafts(
    reference: object, target: DescribedModel, read: Callable[..., DescribedModel] | None = None
) -> list[FoundDraft]:  # fmt: skip
    """Return the head that a target carries, and a few that fit it or models of its vocabulary, of at most a third of
    its parameters, the smallest files first.

    Args:
        reference: What the user named; of a model that has no path only the hub's cache is looked through.
        target: The same, opened or described.
        read: Opens what is found, as `open_checkpoint`; None leaves it described.
    """
    own, found, described = _path_of(reference), list[FoundDraft](), 0
    names = {path: name for name, path in hub_snapshots()}
    sized = sorted((weight_bytes(path), path) for path in dict.fromkeys(_neighbours(own, names)) if _may_be_model(path))
    own_bytes, parameters = math.inf if own is None else weight_bytes(own), num_parameters(target)
    try:
        if (mtp := target.read_mtp()) is not None:
            shared, share = share_vocabulary(target, mtp), num_parameters(mtp) / parameters
            assert shared is not None, "a head shares everything"
            found.append(FoundDraft("the MTP layer that it carries", mtp, shared, share))
    except CheckpointError as error:
        logging.getLogger(__name__).warning("%s; it drafts with something else", error)
    # Beside a target that is a configuration alone drafts may be that, too.
    for path in (path for nbytes, path in sized if own_bytes == 0 or 0 < nbytes < own_bytes):
        if described == _MOST_HEADERS or len(found) >= _MOST_DRAFTS:
            break
        try:
            model = describe_model(path, draft=True).fitted(target)
            described += 1
            share = num_parameters(model) / parameters
            near = abs(model.config().vocab_size - target.config().vocab_size) <= MOST_PADDING
            shared = share_vocabulary(target, model) if near and share <= _MOST_SHARE else None
            if shared is not None:
                opened = read(str(path), draft=True).fitted(target) if read else model
                found.append(FoundDraft(names.get(path, path.name), opened, shared, share))
        except Exception as error:  # whatever is wrong with it, nobody has asked for this one
            logging.getLogger(__name__).debug("%s is no draft: %s", path, error)
    return found


@dataclass(frozen=True)
class UsualDraft:
    """A small model that people take to draft for a family: its name, None where none is known and it stands for one
    that may exist; and what a plan has to know of it in Q8_0."""

    name: str | None
    model: DescribedModel

    @property
    def size(self) -> str:
        """Return its parameters as people say them."""
        billions = num_parameters(self.model) / 1e9
        return f"{billions:.0f}B" if billions >= 1 else f"{billions:.1f}B"

    @property
    def example(self) -> str:
        """Return what to look for."""
        return f"such as {self.name}" if self.name else "of the same vocabulary (if any)"


def usual_draft(target: DescribedModel) -> UsualDraft | None:
    """Return what is usual with a target's family; None for a target with less than four times its parameters."""
    config = target.config()
    name, shape = _USUAL.get((config.architecture, config.vocab_size), (None, _LLAMA))
    if config.vocab_size == 32000 and config.attention.num_heads == 4 * config.attention.num_kv_heads:
        name = None  # the first of Mistral's models, whose tokens are not Llama 2's
    families = {known.architecture: family for family, known in FAMILIES.items()}
    family = families[config.architecture] if name else "llama"  # of a model that may exist the simplest
    settings: dict[str, Any] = {
        "model_type": family, "vocab_size": config.vocab_size, "sliding_window": None,
        "max_position_embeddings": config.max_position_embeddings, **dict(zip(_SHAPE, shape, strict=True)),
    }  # fmt: skip
    small = model_config_from_json(settings, name or "a small model")
    model = DescribedModel(small, target.native_dtype, kinds=stored_kinds(small, USUAL_MIX))
    return UsualDraft(name, model) if num_parameters(target) >= _USUAL_TIMES * num_parameters(model) else None


def num_parameters(model: DescribedModel) -> int:
    """Count the elements of all its matrices and vectors."""
    return sum(math.prod(tensor.shape) for tensor in checkpoint_tensors(model.config()).values())


def _path_of(reference: object) -> Path | None:
    """Return where a model lies that was named by a path, or by the name of one that is here."""
    with suppress(OSError, RuntimeError, ValueError, CheckpointError):
        path = Path(os.path.abspath(Path(str(reference)).expanduser()))
        if path.exists():
            return path.parent if path.suffix == ".safetensors" else path
        return local_path(str(reference))
    return None


def _neighbours(own: Path | None, cached: Iterable[Path]) -> Iterator[Path]:
    """Return the files and directories that may be models: what lies beside the target, or beside the directory of its
    file, and what is `cached` of the hub's. Not the target itself."""
    places = [] if own is None else [own.parent, *([own.parent.parent] if own.is_file() else [])]
    ours = set[Path]() if own is None else {own, own.parent, *gguf_parts(own)}
    for place in places:
        for path in entries(place, _MOST_ENTRIES):
            is_model = path.is_dir() or (path.suffix.lower() == ".gguf" and gguf_parts(path)[0] == path)
            if is_model and path not in ours:
                yield path
    yield from (path for path in cached if path not in ours)


def _may_be_model(path: Path) -> bool:
    """Return whether a file, or something in a directory, is named like a model."""
    with suppress(OSError):
        named = (one.name == "config.json" or one.suffix.lower() == ".gguf" for one in entries(path, _MOST_ENTRIES))
        return path.is_file() or any(named)
    return False
