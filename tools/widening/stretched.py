"""A checkpoint with some tensors replaced and its rotary embedding scaled: a sparse fine-tune, applied while reading.

Fine-tuning a few tensors gives a model a longer context; what is kept of that is those tensors alone, in full.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from widening.made import MadeCheckpoint, transformers_config_of
from widening.rope import frequencies

from offload_runtime.errors import CheckpointError, OptionError
from offload_runtime.fields import shortened
from offload_runtime.models.config import ModelConfig
from offload_runtime.models.registry import model_config_from_json
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.header import StoredTensor
from offload_runtime.weights.layout import checkpoint_tensors
from offload_runtime.weights.safetensors import FLOATS, fill_from_file, read_header

# What a scaling must be given and what it may be given. transformers takes a missing original length from the model's
# length, which a stretched model has changed, and only warns of words that it does not know.
_REQUIRED = {
    "default": frozenset[str](), "linear": frozenset({"factor"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
}  # fmt: skip
_OPTIONAL = {"yarn": frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"})}
_COMMON = frozenset({"rope_type", "rope_theta"})


def _check_words(rope: Mapping[str, Any]) -> None:
    """Refuse parameters that are missing or would be ignored."""
    kind = rope.get("rope_type")
    if kind not in _REQUIRED:
        raise OptionError(f"rope_type {kind!r} is not known: use one of {', '.join(_REQUIRED)}")
    known = _REQUIRED[kind] | _OPTIONAL.get(kind, frozenset[str]()) | _COMMON
    missing, unknown = sorted(_REQUIRED[kind] - set(rope)), sorted(set(rope) - known)
    if missing:
        raise OptionError(f"a RoPE of type {kind} needs {', '.join(missing)} too: add what is missing")
    if unknown:
        raise OptionError(
            f"a RoPE of type {kind} knows no {', '.join(unknown)}: leave it out; known are {', '.join(sorted(known))}"
        )


def _stretched_config(
    source: CheckpointSource, rope: Mapping[str, Any] | None, max_position_embeddings: int | None
) -> tuple[Any, ModelConfig]:
    """transformers' configuration and ours with another rotary embedding and length."""
    hf_config, changes = transformers_config_of(source), dict[str, Any]()
    if rope is not None:
        _check_words(rope)
        changes["rope_parameters"] = {"rope_theta": source.config().ropes[0].parameters["rope_theta"], **rope}
    try:
        if max_position_embeddings is not None:
            changes["max_position_embeddings"] = max_position_embeddings
        elif rope is not None and rope["rope_type"] == "yarn":
            changes["max_position_embeddings"] = int(rope["factor"] * rope["original_max_position_embeddings"])
        described = type(hf_config).from_dict(copy.deepcopy(hf_config.to_dict() | changes))
        config = model_config_from_json(described.to_dict(), "config.json")
        if config.ropes[0].parameters["rope_type"] != "default":
            frequencies(config)
    except Exception as error:  # transformers' validation raises errors of many libraries; each means the same here
        raise OptionError(
            f"no model has RoPE parameters {changes.get('rope_parameters', 'of the source')} and "
            f"{changes.get('max_position_embeddings', 'its own number of')} positions: {error}"
        ) from error
    return described, config


def _check_delta(stored: StoredTensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that cannot take the place of one of `shape`."""
    if stored.shape != shape:
        raise CheckpointError(
            f"{stored.path}: {stored.name} has shape {list(stored.shape)}, expected {list(shape)}: the delta belongs "
            "to another model"
        )
    if stored.dtype not in FLOATS:
        raise CheckpointError(
            f"{stored.path}: {stored.name} is stored as {stored.dtype}, and only {', '.join(FLOATS)} are read: "
            "save the delta in one of them"
        )


def _find_deltas(paths: Sequence[Path], source: CheckpointSource) -> dict[str, StoredTensor]:
    """The new tensors by transformers' name, each there once and of the shape of the one that it replaces."""
    shapes = {name: destination.shape for name, destination in checkpoint_tensors(source.config()).items()}
    found: dict[str, StoredTensor] = {}
    for path in paths:
        header = read_header(path)
        unknown = [name for name in header if name not in shapes]
        if unknown:
            raise CheckpointError(
                f"{path}: {len(unknown)} of {len(header)} tensors are not in {source.reference} ({shortened(unknown)}):"
                " the delta belongs to another model"
            )
        for name, stored in header.items():
            if name in found:
                raise CheckpointError(f"{name} is in {found[name].path} and in {path}: give each tensor once")
            _check_delta(stored, shapes[name])
        found |= header
    return found


class StretchedCheckpoint(MadeCheckpoint):
    """A `CheckpointSource` with the named tensors of delta files, all others of the source, and another RoPE.

    Args:
        source: What was fine-tuned.
        deltas: Safetensors files with the new values under transformers' names.
        rope: transformers' `rope_parameters` of the result, `rope_theta` the source's unless given; None keeps all.
        max_position_embeddings: Longest context of the result in tokens. None means what YaRN's factor reaches, and
            the source's for other scalings.

    Raises:
        CheckpointError: A delta file is damaged, or names a tensor that the source does not have, that has another
            shape or is no floating-point number, or that another file names too.
        OptionError: RoPE parameters that are missing, unknown or no numbers a model can have.
    """

    def __init__(
        self,
        source: CheckpointSource,
        deltas: Sequence[Path] = (),
        *,
        rope: Mapping[str, Any] | None = None,
        max_position_embeddings: int | None = None,
    ) -> None:
        self._source = source
        replaced = {name: partial(fill_from_file, stored) for name, stored in _find_deltas(deltas, source).items()}
        described, config = _stretched_config(source, rope, max_position_embeddings)
        super().__init__(
            f"{source.reference} (stretched)", described, config, source, {**source.fills, **replaced},
            tokenizer=self._longer_tokenizer,
        )  # fmt: skip

    def _longer_tokenizer(self) -> Any:
        """The source's tokenizer, which no longer warns of texts that fit now."""
        tokenizer = self._source.tokenizer()
        tokenizer.model_max_length = max(tokenizer.model_max_length, self.config().max_position_embeddings)
        return tokenizer
