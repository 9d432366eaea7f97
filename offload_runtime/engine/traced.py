"""A target and a proposer that tell a trace what they do: put around the real ones where there is a recorder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from offload_runtime.config import SamplingParams
from offload_runtime.model import Window
from offload_runtime.runners import ModelRunner
from offload_runtime.speculation import Acceptance, DraftRequest, Proposal, Proposer, StepResult
from offload_runtime.trace import DRAFT, HOST, PASSES, TraceRecorder


class TracedTarget:
    """Hands prompts and windows on to a runner and records its passes: on the device, and how long they took to launch.

    Args:
        runner: Of the target; its layers are recorded as well.
        recorder: Of the trace.
    """

    def __init__(self, runner: ModelRunner, recorder: TraceRecorder) -> None:
        self.cache = runner.cache
        self.streamer = runner.streamer
        self.recorder = recorder
        self._runner, self._passes = runner, 0
        self._args: dict[str, Any] = {}  # of the last pass, whose outcome is not known yet
        self._launched_s = 0.0
        runner.streamer.recorder = recorder

    def prefill(
        self, sequence: int, tokens: Sequence[int], on_layer: Callable[[int, int], None] | None = None
    ) -> torch.Tensor:
        """As `ModelRunner.prefill`."""
        args = {"kind": "prefill", "tokens": [len(tokens)]}
        return self._record(args, lambda: self._runner.prefill(sequence, tokens, on_layer))

    def verify(self, windows: Sequence[Window], sequences: Sequence[int]) -> torch.Tensor:
        """As `ModelRunner.verify`."""
        args = {"kind": "verify", "tokens": [len(window.tokens) for window in windows]}
        return self._record(args, lambda: self._runner.verify(windows, sequences))

    def decided(self, results: Sequence[StepResult], window: str) -> None:
        """What came of the last pass, for each request, whose tokens the host has just read: how much was accepted,
        which nodes of the proposal, and of whom; and what was asked for, in words."""
        self._args["window"] = window
        self._args["proposed"] = [result.num_proposed for result in results]
        self._args["accepted"] = [result.num_accepted for result in results]
        # Numbers of the window's proposals, and who made each.
        self._args["path"] = [list(result.path) for result in results]
        self._args["sources"] = [result.accepted_sources for result in results]
        args = {"pass": self._args["pass"]}
        self.recorder.add_host(HOST, "wait and accept", self._launched_s, time.perf_counter(), args)
        self.recorder.settle()

    def _record(self, args: dict[str, Any], run: Callable[[], torch.Tensor]) -> torch.Tensor:
        recorder, bytes_before = self.recorder, self.streamer.bytes_begun
        started_s, started = time.perf_counter(), recorder.mark()
        logits = run()
        ended, self._launched_s = recorder.mark(), time.perf_counter()
        self._args = {"pass": self._passes, **args, "bytes": self.streamer.bytes_begun - bytes_before}
        self._passes += 1
        recorder.add(PASSES, f"{args['kind']} {self._args['pass']}", started, ended, self._args)
        recorder.add_host(HOST, "launch", started_s, self._launched_s, {"pass": self._args["pass"]})
        return logits


class TracedProposer(Proposer):
    """Asks a proposer and records how long it takes to answer; all methods are as of `Proposer`.

    Args:
        proposer: The real one.
        recorder: Of the trace.
    """

    def __init__(self, proposer: Proposer, recorder: TraceRecorder) -> None:
        self.name, self._proposer, self._recorder = proposer.name, proposer, recorder

    def modes(self, texts: Mapping[int, Sequence[int]]) -> Sequence[str]:
        return self._proposer.modes(texts)

    def start(self, slots: Sequence[SamplingParams]) -> None:
        self._proposer.start(slots)

    def counts(self, slot: int) -> Sequence[Acceptance]:
        return self._proposer.counts(slot)

    def prepare(self, slot: int, tokens: Sequence[int]) -> None:
        started_s, started = time.perf_counter(), self._recorder.mark()
        self._proposer.prepare(slot, tokens)
        self._record("prepare", started_s, started, {"tokens": [len(tokens)]})

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        started_s, started = time.perf_counter(), self._recorder.mark()
        proposals = self._proposer.propose(requests)
        args = {"asked": [request.room for request in requests], "proposed": [len(proposal) for proposal in proposals]}
        self._record("propose", started_s, started, args)
        return proposals

    def ahead(self, pending: Callable[[], bool]) -> None:
        # Seen from the host, for the device does it beside the pass.
        started_s = time.perf_counter()
        self._proposer.ahead(pending)
        self._recorder.add_host(HOST, "draft ahead", started_s, time.perf_counter(), {})

    def _record(self, name: str, started_s: float, started: Any, args: dict[str, Any]) -> None:
        self._recorder.add(DRAFT, name, started, self._recorder.mark(), args)
        self._recorder.add_host(HOST, name, started_s, time.perf_counter(), {})


def device_facts(device: torch.device) -> dict[str, Any]:
    """What a trace or a report says of the device: which one it was, and the name of a GPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"device": str(device), "device_name": name}
