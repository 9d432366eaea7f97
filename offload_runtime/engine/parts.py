"""The machinery of a runtime that its generations, one at a time, work with."""

from __future__ import annotations

from dataclasses import dataclass

from offload_runtime.copy_engine import CopyEngine
from offload_runtime.engine.text import Tokenizer
from offload_runtime.memory import DeviceBudget
from offload_runtime.page_locking import PageableMemory
from offload_runtime.runners import ModelRunner
from offload_runtime.speculation import Proposer


@dataclass(frozen=True)
class StreamParts:
    """What a generation works with; all of it belongs to the runtime."""

    target: ModelRunner
    proposer: Proposer
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    engine: CopyEngine
    budget: DeviceBudget
    link_peak_gbps: float | None
    pinned_bytes: int  # of weights
    pageable: PageableMemory | None = None  # what is staged; None where nothing can be
