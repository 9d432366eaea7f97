"""The machinery of a runtime that its generations, one at a time, work with."""

from __future__ import annotations

from dataclasses import dataclass

from offload_runtime.copy_engine import CopyEngine
from offload_runtime.engine.text import Tokenizer
from offload_runtime.engine.traced import TracedProposer, TracedTarget
from offload_runtime.engine.windows import WindowSize
from offload_runtime.memory import DeviceBudget
from offload_runtime.page_locking import PageableMemory
from offload_runtime.runners import ModelRunner
from offload_runtime.speculation import NoProposer, Proposer


@dataclass(frozen=True)
class StreamParts:
    """What a generation works with; all of it belongs to the runtime.

    `traced` is the target where there is a trace, to be told what its passes came to.
    """

    target: ModelRunner | TracedTarget
    proposer: Proposer
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    engine: CopyEngine
    budget: DeviceBudget
    link_peak_gbps: float | None
    pinned_bytes: int  # of weights
    pageable: PageableMemory | None = None  # what is staged; None where nothing can be
    traced: TracedTarget | None = None

    def proposing(self, window: WindowSize) -> Proposer:
        """Who proposes up to `window` a round."""
        if not window.gamma:
            return NoProposer()
        return self.proposer if self.traced is None else TracedProposer(self.proposer, self.traced.recorder)
