"""Weights: checkpoints are opened and validated, described, and loaded into packed host arenas.

How a matrix is stored is known here alone: others see a `Weight`, which multiplies rows, and bytes per layer. The room
knows nothing of devices, copies and plans.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload_runtime.weights.checkpoint import (
        CheckpointSource,
        DescribedModel,
        SharedVocabulary,
        sampling_defaults,
        share_vocabulary,
    )
    from offload_runtime.weights.encoding import Weight
    from offload_runtime.weights.layout import EMBEDDING, ModelLayout, checkpoint_tensors
    from offload_runtime.weights.loader import HostWeights, MatricesNotCodable, load_weights
    from offload_runtime.weights.neighbours import FoundDraft, UsualDraft, find_drafts, usual_draft
    from offload_runtime.weights.sources import describe_model, draft_beside, fetch_demo_model, open_checkpoint

# Whose module has each name. Nothing is imported before it is asked for: what a path or a configuration is refused for
# needs no torch, whose import takes seconds.
_HOMES = {
    "checkpoint": "CheckpointSource DescribedModel SharedVocabulary sampling_defaults share_vocabulary",
    "encoding": "Weight",
    "layout": "EMBEDDING ModelLayout checkpoint_tensors",
    "loader": "HostWeights MatricesNotCodable load_weights",
    "neighbours": "FoundDraft UsualDraft find_drafts usual_draft",
    "sources": "describe_model draft_beside fetch_demo_model open_checkpoint",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
