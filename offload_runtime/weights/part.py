"""Some layers of a checkpoint, as a checkpoint of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from offload_runtime.models.part import PartConfig
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.layout import checkpoint_tensors


def part_of(source: CheckpointSource, layers: Sequence[int]) -> CheckpointSource:
    """Return what one of several machines has of a checkpoint: these of its layers, and with the first of them what
    lies around all, the head that it carries included."""
    config = PartConfig.of(source.config(), layers)
    wanted = checkpoint_tensors(config)
    fills = {name: fill for name, fill in source.fills.items() if name in wanted}
    found = replace(source, model_config=config, fills=fills)
    return found if config.has_ends else replace(found, read_mtp=lambda: None)
