"""One step of a generation after the other: how much each proposes, what was asked for or is chosen, and what the
controller learns from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload_runtime.config import GenerationParams, require
from offload_runtime.copy import CopyEngine
from offload_runtime.engine.expectation import Expectation
from offload_runtime.engine.load_model import LoadedModels
from offload_runtime.engine.request import Request
from offload_runtime.engine.traced import TracedProposer, TracedTarget
from offload_runtime.errors import OptionError
from offload_runtime.memory import DeviceBudget
from offload_runtime.runners import ModelRunner
from offload_runtime.sampling import SlotSampling
from offload_runtime.speculation import (
    NGRAM,
    PLAIN,
    Choice,
    Controller,
    DraftRequest,
    NoProposer,
    OnLogits,
    Proposer,
    StepResult,
    drafting,
    makes_trees,
    run_step,
    size_for,
    size_within,
)

# A tree so deep is hardly ever cut where an answer ends.
_DEEP_ENOUGH = 16


@dataclass(frozen=True)
class WindowSize:
    """Most tokens to propose per step and request: `gamma` in a row and `tree_nodes` in all, None for chains, and
    `extra_ngrams` that cost nothing beside a chain."""

    gamma: int
    tree_nodes: int | None = None
    extra_ngrams: int = 0


@dataclass(frozen=True)
class ChosenWindows:
    """Windows that are chosen round by round: by family the most proposals."""

    limits: Mapping[str, int]
    branches: bool = True  # whether there may be any
    free: int = 0  # proposals of a window that make no pass longer

    def window(self, choice: Choice) -> WindowSize:
        """What a choice asks for: of what may branch so many in all, as many of them in a row as turn out likely."""
        if self.branches and choice.may_branch:
            return WindowSize(choice.size, choice.size)
        extra_ngrams = max(0, self.free - choice.size) if self.branches and choice.mode == "chain" else 0
        return WindowSize(choice.size, extra_ngrams=extra_ngrams)


@dataclass(frozen=True)
class WindowLimits:
    """What windows were planned for.

    Attributes:
        max_gamma: Largest gamma to be asked for, and longest chain.
        gamma: What was asked for when loading, and is proposed where nothing else is; None where windows are chosen.
        tree_nodes: What was asked for when loading, and is proposed where nothing else is; None where windows are
            chosen.
        tree_room: Nodes of a tree that may be chosen; 0 where there is no room for trees of a draft.
        free: Proposals of a window that make no pass longer, as the link takes longer than all of them.
    """

    max_gamma: int
    gamma: int | None = None
    tree_nodes: int | None = None
    tree_room: int = 0
    free: int = 0

    @property
    def most_nodes(self) -> int:
        """Proposals that a window has room for."""
        return max(self.max_gamma, self.tree_room)

    @property
    def by_mode(self) -> dict[str, int]:
        """Largest windows that can ever be chosen."""
        limits = {"ngram": self.most_nodes, "unigram": self.most_nodes, "chain": self.max_gamma, "tree": self.tree_room}
        return {mode: largest for mode, largest in limits.items() if largest}

    def settle(self, params: GenerationParams, proposer: Proposer) -> WindowSize | ChosenWindows:
        """What a generation proposes.

        Raises:
            OptionError: More than there is room for, or something that this proposer would ignore.
        """
        gamma = self.gamma if params.gamma is None else params.gamma
        nodes = self.tree_nodes if params.tree_nodes is None else params.tree_nodes
        most, plain = self.max_gamma, isinstance(proposer, NoProposer)
        require((gamma or 0) <= most, f"gamma {gamma} exceeds the {most} this runtime was loaded for (max_gamma)")
        fine = params.gamma is None or not plain
        require(fine, "gamma does nothing without a draft: drop it or choose --draft ngram")
        if nodes is not None and nodes > self.most_nodes:
            raise OptionError(
                f"tree_nodes {nodes} exceeds the {self.most_nodes} that a window of this runtime has room for: load it "
                f"with tree_nodes={nodes} (--tree-nodes {nodes})"
            )
        if params.tree_nodes and not makes_trees(proposer):
            raise OptionError(
                f"tree_nodes {nodes} does nothing where nobody proposes branches: drop it, choose --draft ngram, or "
                f"load a draft model with tree_nodes={nodes} (--tree-nodes {nodes}), which makes room for them"
            )
        if plain:
            return WindowSize(0)
        if nodes:
            return WindowSize(nodes if gamma is None else gamma, nodes)
        if gamma is not None:
            return WindowSize(gamma)
        limits = {mode: self.by_mode[mode] for mode in proposer.modes({}) if mode in self.by_mode}
        if nodes == 0:
            limits = {mode: min(largest, self.max_gamma) for mode, largest in limits.items() if mode != "tree"}
        return ChosenWindows(limits, branches=nodes != 0, free=self.free)


@dataclass(frozen=True)
class RuntimeParts:
    """A loaded runtime: what its generations, one at a time, work with, and what it says about itself.

    Attributes:
        models: Target and draft.
        tokenizer: The target's.
        eos_token_ids: Tokens that end an answer.
        proposer: Guesses, for as many sequences as were planned for.
        sampling: How each slot's tokens are chosen.
        budget: Ledger of the device.
        windows: What there is room to propose.
        controller: Chooses windows.
        expected: The plan, and what is predicted by the figures of the machine.
        placement: What lives where, in a line.
        emulated: Name of the machine that this one plays.
        traced: The target where there is a trace, to be told what its passes came to.
        clock: Seconds, by which steps are timed.
    """

    models: LoadedModels
    tokenizer: Any
    eos_token_ids: frozenset[int]
    proposer: Proposer
    sampling: SlotSampling
    budget: DeviceBudget
    windows: WindowLimits
    controller: Controller
    expected: Expectation
    placement: str
    emulated: str | None = None
    traced: TracedTarget | None = None
    clock: Callable[[], float] = time.perf_counter

    @property
    def target(self) -> ModelRunner | TracedTarget:
        """What prefills and verifies."""
        return self.traced or self.models.target.runner

    @property
    def engine(self) -> CopyEngine:
        """The queue of the target's copies."""
        return self.models.target.engine

    def proposing(self, windows: WindowSize | ChosenWindows) -> Proposer:
        """Who proposes what is asked for or chosen."""
        if isinstance(windows, WindowSize) and not windows.gamma:
            return NoProposer()
        return self.proposer if self.traced is None else TracedProposer(self.proposer, self.traced.recorder)


class StepRunner:
    """Runs the steps of a generation.

    Args:
        parts: The runtime's machinery.
        proposer: Guesses.
        windows: What to propose.
        on_logits: As of `run_step`.
    """

    def __init__(
        self, parts: RuntimeParts, proposer: Proposer, windows: WindowSize | ChosenWindows,
        *, on_logits: OnLogits | None = None,
    ) -> None:  # fmt: skip
        self._parts, self._proposer, self._windows, self._on_logits = parts, proposer, windows, on_logits
        self.window = ""  # of the last step, in words

    def run(self, requests: Sequence[Request]) -> list[StepResult]:
        """One step of these requests, none of which is finished. Errors as of `run_step`."""
        if isinstance(self._windows, WindowSize):
            return self._step(requests, self._windows, self._fixed(self._windows), chosen=False)
        room = max(map(_most_in_a_row, requests))
        limits = self._limits(self._windows, requests) if room else {}
        started_s = self._parts.clock()
        sampling, controller = requests[0].params.sampling, self._parts.controller
        # At the end of an answer there may be room for the target's own token alone.
        choice = controller.choose(sampling, limits, **_sizes(requests)) if room else PLAIN
        window = self._windows.window(choice)
        results = self._step(requests, window, choice, chosen=True)
        self._learn(choice, window, requests, results, self._parts.clock() - started_s)
        return results

    def _learn(
        self, choice: Choice, window: WindowSize, requests: Sequence[Request], results: Sequence[StepResult],
        seconds: float,
    ) -> None:  # fmt: skip
        """Tell the controller how long a step took, and what it brought of the requests whose windows nothing cut
        short: it takes as long as the largest window."""
        able = [
            (request, result)
            for request, result in zip(requests, results, strict=True)
            if len(requests) == 1 or self._is_able(request, choice.mode)
        ]
        seen, size = [result for request, result in able if self._was_whole(request, result, window)], choice.size
        timed_s = seconds if seen else None
        if not seen and choice.mode == "chain":  # what was cut tells about smaller windows
            seen = [result for _, result in able if _drafted(result)]
            size = min((size_within(_drafted(result)) for result in seen), default=size)
        self._parts.controller.observe(
            requests[0].params.sampling, replace(choice, size=size), [_own(one, choice, size) for one in seen],
            tokens=sum(len(result.tokens) for result in results) / len(results),
            seconds=timed_s, **_sizes(requests),
        )  # fmt: skip

    def _limits(self, windows: ChosenWindows, requests: Sequence[Request]) -> dict[str, int]:
        """By mode that has anything to propose its largest window, as far as an answer and the cache have room.

        A batch is done with its longest answer, so one behind which a draft has no room is not kept waiting for others.
        """
        able = self._proposer.modes({request.slot: request.sequence for request in requests})
        most = max(request.remaining for request in requests)
        longest = [request for request in requests if request.remaining == most]
        # The last chain of an answer is cut where the answer ends: better than another pass for what is missing.
        rooms = {"chain": size_for(max(map(_most_in_a_row, requests)))}
        most_nodes = max(map(self._most_nodes, requests))
        found = {
            mode: min(windows.limits[mode], rooms.get(mode, most_nodes))
            for mode in able
            if mode in windows.limits
            and (len(requests) == 1 or all(self._is_able(request, mode) for request in longest))
        }
        # Where windows take no time a tree holds what all others would propose: finding out about them is dear.
        return {"tree": found["tree"]} if windows.free and "tree" in found else found

    def _most_nodes(self, request: Request) -> int:
        """Proposals that the target's cache has places for."""
        return self._parts.target.cache.max_tokens_with_draft - len(request.sequence)

    def _was_whole(self, request: Request, result: StepResult, window: WindowSize) -> bool:
        """Whether nothing cut a window short: neither the end of the answer nor that of a cache."""
        most = _most_in_a_row(request)
        if window.tree_nodes is not None:
            return most >= min(_DEEP_ENOUGH, window.gamma) and self._most_nodes(request) >= window.tree_nodes
        return most >= window.gamma and _drafted(result) in (0, window.gamma)

    def _is_able(self, request: Request, mode: str) -> bool:
        """Whether a draft that is able behind some of several requests has room behind this one."""
        able = drafting(self._proposer).modes
        return not Choice(mode, 1).drafts or mode in able({request.slot: request.sequence})

    def _step(
        self, requests: Sequence[Request], window: WindowSize, choice: Choice, *, chosen: bool
    ) -> list[StepResult]:
        parts, asked = self._parts, list[DraftRequest]()
        for request in requests:
            room = _most_in_a_row(request)
            extra_ngrams = max(0, min(window.extra_ngrams, room - window.gamma))
            asked.append(
                DraftRequest(
                    request.slot, request.sequence, min(window.gamma, room), window.tree_nodes,
                    mode=choice.mode if chosen else None, cost_aware=chosen, extra_ngrams=extra_ngrams,
                )
            )  # fmt: skip
        results = run_step(parts.target, parts.sampling, self._proposer, asked, on_logits=self._on_logits)
        self.window = str(choice if any(request.gamma for request in asked) else PLAIN)
        if parts.traced is not None:
            parts.traced.decided(results, self.window)
        return results

    def _fixed(self, window: WindowSize) -> Choice:
        """What a window that was asked for would be if it had been chosen."""
        if not window.gamma:
            return PLAIN
        able = self._proposer.modes({})
        if window.tree_nodes is not None and "chain" in able:
            return Choice("tree", window.tree_nodes)
        return Choice("chain", window.gamma) if "chain" in able else Choice("ngram", window.tree_nodes or window.gamma)


def _most_in_a_row(request: Request) -> int:
    """Proposals behind each other: the target's own token always comes on top."""
    return request.remaining - 1


def _sizes(requests: Sequence[Request]) -> dict[str, int]:
    """What steps of these requests take their time by."""
    return {"num_sequences": len(requests), "context_tokens": max(len(request.sequence) for request in requests)}


def _drafted(result: StepResult) -> int:
    """Proposals of a draft, in a chain and the n-grams beside it."""
    return sum(source != NGRAM for source in result.proposal.sources)


def _own(result: StepResult, choice: Choice, size: int) -> Sequence[int]:
    """Which of the first `size` proposals were accepted; the n-grams beside a chain tell nothing about it."""
    if choice.mode != "chain":
        return result.path
    return [node for node in result.path if node < size and result.proposal.sources[node] != NGRAM]
