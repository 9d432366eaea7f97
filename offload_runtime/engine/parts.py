"""The machinery of a runtime that its generations, one at a time, work with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from offload_runtime.copy import CopyEngine
from offload_runtime.engine.text import Tokenizer
from offload_runtime.engine.traced import TracedProposer, TracedTarget
from offload_runtime.engine.windows import ChosenWindows, WindowSize
from offload_runtime.memory import DeviceBudget, PageableMemory
from offload_runtime.runners import ModelRunner
from offload_runtime.speculation import Controller, NoProposer, Proposer


@dataclass(frozen=True)
class StreamParts:
    """What a generation works with; all of it belongs to the runtime.

    `traced` is the target where there is a trace, to be told what its passes came to. `controller` chooses windows.
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
    controller: Controller = field(default_factory=lambda: Controller(()))
    clock: Callable[[], float] = time.perf_counter  # seconds, by which rounds are timed

    def proposing(self, windows: WindowSize | ChosenWindows) -> Proposer:
        """Who proposes what is asked for or chosen."""
        if isinstance(windows, WindowSize) and not windows.gamma:
            return NoProposer()
        return self.proposer if self.traced is None else TracedProposer(self.proposer, self.traced.recorder)
