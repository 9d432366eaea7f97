"""The levels between the draft and the full target: what they take, and where everything goes beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload_runtime.config import ModelConfig, SpeculationOptions, format_bytes
from offload_runtime.engine.plans import Plans
from offload_runtime.kv import kv_cache_bytes
from offload_runtime.kv.retrieval import far_keys_bytes, retrieved_bytes, summaries_bytes
from offload_runtime.planner import Placement
from offload_runtime.runners.retrieval_verifier import middle_step_bytes
from offload_runtime.runners.token_window import device_window_bytes


@dataclass(frozen=True)
class MiddlePlan:
    """Bytes of the middle level on the device."""

    config: ModelConfig
    dtype: torch.dtype
    options: SpeculationOptions
    context_tokens: int
    batch: int

    @property
    def lent_bytes(self) -> int:
        """Of the retrieved chunks, what a prefill may borrow; nothing where another sequence may be decoding."""
        if self.batch > 1:
            return 0
        return kv_cache_bytes(self.config, self.dtype, capacity_tokens=self.options.budget_tokens, batch=1)

    @property
    def nbytes(self) -> int:
        """Retrieved chunks, what the policy keeps to choose them by, and what steps need."""
        return self._held_bytes + self.step_bytes

    @property
    def step_bytes(self) -> int:
        """The window and what a step computes on its way, of all sequences."""
        options = self.options
        far_chunks = 0 if options.policy == "streaming" else self.context_tokens // options.chunk_size
        return device_window_bytes(batch=self.batch) + middle_step_bytes(
            self.config, self.dtype.itemsize, batch=self.batch, rows=options.gamma_draft + 1, far_chunks=far_chunks
        )

    @property
    def _held_bytes(self) -> int:
        options, common = self.options, {"batch": self.batch}
        held = retrieved_bytes(
            self.config, self.dtype, budget_tokens=options.budget_tokens, chunk_size=options.chunk_size, **common
        )
        if options.policy == "streaming":
            return held
        if options.policy == "topk":
            return held + far_keys_bytes(self.config, self.dtype, capacity_tokens=self.context_tokens, **common)
        return held + summaries_bytes(
            self.config, chunk_size=options.chunk_size, capacity_tokens=self.context_tokens, **common
        )


@dataclass(frozen=True)
class PlacedLevels:
    """Where everything goes.

    `middle` is None where the draft proposes to the target itself; `reason` says why, when `auto` decided it.
    """

    plans: Plans
    placement: Placement
    middle: MiddlePlan | None = None
    reason: str = ""


def describe_speculation(draft: str, placed: PlacedLevels, options: SpeculationOptions) -> str:
    """One phrase: who proposes, and why."""
    middle, why = placed.middle, placed.reason
    if middle is None:
        said = f" (not TriForce: {why})" if why else ""
        return f"proposals from {draft}{said}" if draft != "none" else "plain decoding"
    first = "no draft" if draft in ("none", "ngram") else draft
    return (
        f"TriForce: {first}, then the target over {options.budget_tokens} retrieved tokens a head "
        f"({format_bytes(middle.nbytes)}){f', {why}' if why else ''}"
    )


def describe_draft_cache(plans: Plans) -> str:
    """One phrase: what the draft keeps of the context; empty without a draft, or where that is all of it."""
    draft = plans.draft
    if draft is None:
        return ""
    held = format_bytes(draft.kv_bytes)
    if draft.streaming is not None:
        kept = f"{draft.streaming.sink_tokens} first and {draft.streaming.recent_tokens} newest tokens"
        return f"streaming draft cache of the {kept} ({held})"
    if draft.retrieval is not None:
        return f"the draft retrieves {draft.retrieval.budget_tokens} tokens a head of its own KV cache ({held})"
    if draft.context_tokens < plans.target.context_tokens:
        return f"the draft has nothing to say behind {draft.context_tokens} tokens"
    return ""
