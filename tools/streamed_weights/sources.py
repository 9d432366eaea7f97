"""The models that weights are streamed of: a checkpoint, or a shape made in memory, with or without a language."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cache

from widening.checkpoint import WidenedCheckpoint
from widening.shapes import shape_named
from widening.untrained import repeated_llama

from offload_runtime.config import ModelConfig
from offload_runtime.errors import OptionError
from offload_runtime.memory import resolve_device
from offload_runtime.weights import CheckpointSource, open_checkpoint

# Of a model that is made without a language; nothing of the model depends on it.
_LONGEST_CONTEXT_TOKENS = 1 << 17


class ReadOnce:
    """A `CheckpointSource` whose tokenizer is read once: out of a `.gguf` that takes 5 s, for every row again.

    Args:
        source: What is read.
    """

    def __init__(self, source: CheckpointSource) -> None:
        self.reference, self.native_dtype = source.reference, source.native_dtype
        self.config, self.hf_config = source.config, source.hf_config
        self.shards, self.tokenizer = source.shards, cache(source.tokenizer)
        self.generation_settings, self.generation_eos = source.generation_settings, source.generation_eos


@dataclass(frozen=True)
class Models:
    """Opened models; `draft` is None where there is none."""

    target: CheckpointSource
    draft: CheckpointSource | None

    @property
    def config(self) -> ModelConfig:
        """Of the target."""
        return self.target.config()


def open_models(arguments: argparse.Namespace) -> Models:
    """Target and draft as the options name them; reads no weights but of the small model's files.

    Raises:
        CheckpointError, OptionError: A model is not there, or the options do not go together.
    """
    small = None if arguments.source is None else ReadOnce(open_checkpoint(arguments.source))
    return Models(_target(arguments, small), small if arguments.draft == "model" else None)


def _target(arguments: argparse.Namespace, small: CheckpointSource | None) -> CheckpointSource:
    if arguments.target is not None:
        return ReadOnce(open_checkpoint(arguments.target))
    shape = shape_named(arguments.shape, arguments.layers)
    if small is None:
        return repeated_llama(shape, context_tokens=_LONGEST_CONTEXT_TOKENS)
    try:
        return WidenedCheckpoint(small, shape, arguments.noise, device=resolve_device(arguments.device))
    except OptionError as error:
        raise OptionError(f"--source cannot be widened to --shape {arguments.shape}: {error}") from error
