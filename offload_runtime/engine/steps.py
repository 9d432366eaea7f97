"""One step of a generation after the other: how much each proposes, what was asked for or is chosen, and what the
controller learns from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

from offload_runtime.config import require
from offload_runtime.engine.load_model import LoadedModel
from offload_runtime.engine.request import Request
from offload_runtime.memory import DeviceBudget
from offload_runtime.params import GenerationParams
from offload_runtime.plan import RunPlan
from offload_runtime.runners import OnLayer
from offload_runtime.sampling import SlotSampling
from offload_runtime.speculation import (
    COPY,
    NGRAM,
    PLAIN,
    Choice,
    Controller,
    Cost,
    DraftRequest,
    OnLogits,
    PromptRequest,
    Proposer,
    StepResult,
    drafting,
    makes_trees,
    run_step,
    size_for,
    size_within,
)
from offload_runtime.trace import TraceRecorder
from offload_runtime.weights import Fields

# A tree so deep is hardly ever cut where an answer ends.
_DEEP_ENOUGH = 16


@dataclass(frozen=True)
class WindowSize:
    """Most tokens to propose per step and request: `gamma` in a row and `tree_nodes` in all, None for chains, and
    `extra_nodes` that cost nothing beside a chain."""

    gamma: int
    tree_nodes: int | None = None
    extra_nodes: int = 0


@dataclass(frozen=True)
class WindowLimits:
    """What there is room to propose: of a runtime, or of a request whose windows are chosen step by step.

    Attributes:
        max_gamma: Largest gamma to be asked for, and longest chain.
        gamma: What was asked for when loading, and is proposed where nothing else is; None where windows are chosen.
        tree_nodes: The same of all proposals; 0 where none may branch.
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
        looked_up = dict.fromkeys(("ngram", "unigram", COPY), self.most_nodes)
        limits = looked_up | {"chain": self.max_gamma, "tree": self.tree_room}
        return {mode: largest for mode, largest in limits.items() if largest}

    def settle(self, params: GenerationParams, proposer: Proposer) -> WindowSize | WindowLimits:
        """What every step of a request proposes, or the limits of what is chosen for each.

        Raises:
            OptionError: More than there is room for, or something that this proposer would ignore.
        """
        gamma = self.gamma if params.gamma is None else params.gamma
        nodes = self.tree_nodes if params.tree_nodes is None else params.tree_nodes
        most, plain = self.max_gamma, proposer.name is None
        require((gamma or 0) <= most, f"gamma {gamma} exceeds the {most} this runtime was loaded for (max_gamma)")
        fine = params.gamma is None or not plain
        require(fine, "gamma does nothing without a draft: drop it or choose --draft ngram")
        room, loaded = self.most_nodes, f"with tree_nodes={nodes} (--tree-nodes {nodes})"
        fine = (nodes or 0) <= room
        require(fine, f"tree_nodes {nodes} exceeds the {room} that a window here has room for: load it {loaded}")
        ways = f"drop it, choose --draft ngram, or load a draft model {loaded}"
        fine = not params.tree_nodes or makes_trees(proposer)
        require(fine, f"tree_nodes {nodes} does nothing where nobody proposes branches: {ways}")
        if plain:
            return WindowSize(0)
        if nodes:
            return WindowSize(nodes if gamma is None else gamma, nodes)
        if gamma is not None:
            return WindowSize(gamma)
        if nodes == 0:
            return WindowLimits(self.max_gamma, tree_nodes=0)
        return self

    def window(self, choice: Choice) -> WindowSize:
        """What a choice asks for: of what may branch so many in all, as many of them in a row as turn out likely."""
        if self.tree_nodes == 0 or choice == PLAIN or choice.mode == COPY:
            return WindowSize(choice.size)
        if choice.mode == "chain":
            return WindowSize(choice.size, extra_nodes=max(0, self.free - choice.size))
        return WindowSize(choice.size, choice.size)


@dataclass(frozen=True)
class RuntimeParts:
    """A loaded runtime: what its generations, one at a time, work with, and what it says about itself.

    Attributes:
        target: Ready to run.
        draft: The same of a draft model; None without one.
        tokenizer: The target's.
        eos_token_ids: Tokens that end an answer.
        generation: What the model's `generation_config.json` says.
        proposer: Guesses, for as many sequences as were planned for.
        sampling: How each slot's tokens are chosen.
        budgets: Ledgers of the cards.
        windows: What there is room to propose.
        controller: Chooses windows.
        plan: What lives where, as it turned out.
        cost: Predicted seconds of a step, with the link as fast as it was measured; None where nothing is known of the
            machine.
        placement: What lives where, in a line.
        emulated: Name of the machine that this one plays.
        resources: Closing it ends the copies, then frees all memory and lifts the allocator's cap.
        recorder: Of a trace, if there is one.
        clock: Seconds, by which steps are timed.
    """

    target: LoadedModel
    draft: LoadedModel | None
    tokenizer: Any
    eos_token_ids: frozenset[int]
    generation: Fields
    proposer: Proposer
    sampling: SlotSampling
    budgets: tuple[DeviceBudget, ...]
    windows: WindowLimits
    controller: Controller
    plan: RunPlan
    cost: Cost | None
    placement: str
    resources: ExitStack
    emulated: str | None = None
    recorder: TraceRecorder | None = None
    clock: Callable[[], float] = time.perf_counter

    @property
    def budget(self) -> DeviceBudget:
        """Of the first card."""
        return self.budgets[0]

    def peak_vram_bytes(self) -> int:
        """Of all cards; what the driver says of a GPU includes all budgets that it has."""
        peaks = [(budget.device, budget.peak_bytes()) for budget in self.budgets]
        if self.budget.device.type == "cuda":
            peaks = list(dict(peaks).items())
        return sum(nbytes for _, nbytes in peaks)


class StepRunner:
    """Runs the steps of a generation: requests whose windows were asked for and others share them.

    Args:
        parts: The runtime's machinery.
        on_logits: As of `run_step`.
    """

    def __init__(self, parts: RuntimeParts, *, on_logits: OnLogits | None = None) -> None:
        self._parts, self._on_logits = parts, on_logits
        self._windows = WeakKeyDictionary[Request, WindowSize | WindowLimits]()

    def windows(self, request: Request) -> WindowSize | WindowLimits:
        """What is proposed to a request in every step, or the limits of what is chosen."""
        if request not in self._windows:
            settled = self._parts.windows.settle(request.params, self._parts.proposer)
            self._windows[request] = settled if request.speculate else WindowSize(0)
        return self._windows[request]

    def proposer(self, request: Request) -> Proposer:
        """Who proposes to a request: nobody to one that is decoded plainly."""
        windows = self.windows(request)
        plain = isinstance(windows, WindowSize) and not windows.gamma
        return Proposer() if plain else self._parts.proposer

    def predicted_s(self, request: Request) -> float | None:
        """Seconds that a request's steps so far should have taken; None where nothing is known of the machine."""
        cost = self._parts.cost
        return None if cost is None else sum(cost(*step) for step in request.steps)

    def run(
        self, requests: Sequence[Request], joining: Sequence[Request] = (), on_layer: OnLayer | None = None
    ) -> list[StepResult]:
        """One step of these requests, none of which is finished, and of `joining`, whose prompts its pass reads, as far
        as nothing is kept of them. Returns and errors as of `run_step`.

        The controller chooses one window for all that leave it open.

        Args:
            requests: Those that have a token.
            joining: Those that have none.
            on_layer: As of `run_step`.
        """
        if joining and not requests:
            return self._run_step([], joining, on_layer)
        windows = [self.windows(request) for request in requests]
        limits = {
            request: window
            for request, window in zip(requests, windows, strict=True)
            if isinstance(window, WindowLimits)
        }
        step = partial(self._step, requests, joining=joining, on_layer=on_layer)
        if not limits:
            return step([window for window in windows if isinstance(window, WindowSize)])
        open_, clock, controller = list(limits), self._parts.clock, self._parts.controller
        sampling = open_[0].params.sampling
        # What steps of these requests take their time by.
        sizes = {"num_sequences": len(requests), "context_tokens": max(len(request.sequence) for request in requests)}
        most = self._limits(limits)
        if any(not request.steps for request in open_):
            controller.begin(sampling)
        started_s = clock()
        # At the end of an answer there may be room for the target's own token alone.
        choice = controller.choose(sampling, most, **sizes) if any(request.room for request in open_) else PLAIN
        settled = [window.window(choice) if isinstance(window, WindowLimits) else window for window in windows]
        every = step(settled, choice, open_)
        results = every[: len(requests)]
        seconds, tokens = clock() - started_s, sum(len(result.tokens) for result in results) / len(results)
        # Observed are requests whose windows nothing cut short: a step takes as long as the largest window.
        able = [
            (request, result, window)
            for request, result, window in zip(requests, results, settled, strict=True)
            if request in limits and self._is_able(request, choice.mode)
        ]
        whole = [result for request, result, window in able if self._was_whole(request, result, window)]
        seen, size = whole, choice.size
        if choice.mode == COPY:  # of other texts beside one that copies nothing was proposed
            seen = [result for result in whole if result.proposal]
        if not whole and choice.mode == "chain":  # what was cut tells about smaller windows
            seen = [result for _, result, _ in able if _drafted(result)]
            size = min((size_within(_drafted(result)) for result in seen), default=size)
        # With other windows or prompts beside them a step takes another time.
        timed = bool(whole) and len(open_) == len(requests) and not joining
        controller.observe(
            sampling, Choice(choice.mode, size), [_own(result, choice, size) for result in seen],
            tokens=tokens, seconds=seconds if timed else None, **sizes,
        )  # fmt: skip
        return every

    def _limits(self, windows: Mapping[Request, WindowLimits]) -> dict[str, int]:
        """By mode that has anything to propose its largest window, as far as the limits of these requests, an answer
        and the cache have room.

        A batch is done with its longest answer, so one behind which a draft has no room is not kept waiting for others.
        """
        requests, of_each = list(windows), [window.by_mode for window in windows.values()]
        able = self._parts.proposer.modes({request.slot: request.sequence for request in requests})
        limits = {mode: min(one.get(mode, 0) for one in of_each) for mode in of_each[0]}
        most = max(request.room for request in requests)
        longest = [request for request in requests if request.room == most]
        # The last chain of an answer is cut where the answer ends: better than another pass for what is missing.
        most_nodes = max(map(self._most_nodes, requests))
        found = {
            mode: min(limits[mode], {"chain": size_for(most), COPY: size_within(most)}.get(mode, most_nodes))
            for mode in able
            if limits.get(mode) and all(self._is_able(request, mode) for request in longest)
        }
        # Where windows take no time a tree as large holds what a chain would propose: finding out about others is dear.
        free = all(window.free for window in windows.values())
        if free and "tree" in found and found["tree"] >= found.get("chain", 0):
            return {"tree": found["tree"]}
        return found

    def _most_nodes(self, request: Request) -> int:
        """Proposals that the target's cache has places for."""
        return self._parts.target.runner.cache.max_tokens_with_draft - len(request.sequence)

    def _was_whole(self, request: Request, result: StepResult, window: WindowSize) -> bool:
        """Whether nothing cut a window short: neither the end of the answer nor that of a cache."""
        if window.tree_nodes is not None:
            return request.room >= min(_DEEP_ENOUGH, window.gamma) and self._most_nodes(request) >= window.tree_nodes
        return request.room >= window.gamma and _drafted(result) in (0, window.gamma)

    def _is_able(self, request: Request, mode: str) -> bool:
        """Whether a draft that is able behind some of several requests has room behind this one."""
        able = drafting(self._parts.proposer).modes
        return not Choice(mode, 1).drafts or mode in able({request.slot: request.sequence})

    def _step(
        self, requests: Sequence[Request], windows: Sequence[WindowSize], choice: Choice = PLAIN,
        open_: Collection[Request] = (), *, joining: Sequence[Request] = (), on_layer: OnLayer | None = None,
    ) -> list[StepResult]:  # fmt: skip
        """A step of windows that are settled: by the controller's choice for some requests, else as was asked for."""
        parts = self._parts
        choices = [
            choice if request in open_ else self._fixed(window)
            for request, window in zip(requests, windows, strict=True)
        ]
        asked = [
            DraftRequest(
                request.slot, request.sequence, min(window.gamma, request.room), window.tree_nodes,
                mode=choice.mode if request in open_ else None, cost_aware=request in open_,
                extra_nodes=max(0, min(window.extra_nodes, request.room - window.gamma)),
            )
            for request, window in zip(requests, windows, strict=True)
        ]  # fmt: skip
        every = self._run_step(asked, joining, on_layer, requests)
        results = every[: len(requests)]
        # At the end of all answers there is room for the target's own tokens alone.
        proposed = {one for one, request in zip(choices, asked, strict=True) if request.gamma}
        labels = [str(one if one in proposed else PLAIN) for one in choices]
        # Less is proposed than was asked for where the answer ends, or nothing more is likely.
        largest = choice if open_ else max(choices, key=lambda one: one.size)
        actual = Choice(largest.mode, min(largest.size, max(len(result.proposal) for result in results)))
        taken = actual, len(requests), sum(len(one.sequence) for one in requests) // len(requests)
        for request, result, label in zip(requests, results, labels, strict=True):
            request.steps.append(taken)
            request.tally.add(result.proposal.sources, result.accepted_sources, window=label)
        if parts.recorder is not None:
            parts.recorder.decided(
                window=", ".join(dict.fromkeys(labels)), proposed=[len(result.proposal) for result in results],
                accepted=[len(result.path) for result in results],
                # Numbers of the window's proposals, and who made each.
                path=[list(result.path) for result in results],
                sources=[result.accepted_sources for result in results],
            )  # fmt: skip
        return every

    def _run_step(
        self, asked: Sequence[DraftRequest], joining: Sequence[Request], on_layer: OnLayer | None,
        requests: Sequence[Request] = (),
    ) -> list[StepResult]:  # fmt: skip
        """What is asked for requests, and the prompts of those who join."""
        parts = self._parts
        prompts = [
            PromptRequest(
                request.slot, request.sequence,
                speculate=request.params.max_new_tokens > 1 and self.proposer(request).name is not None,
            )
            for request in joining
        ]  # fmt: skip
        wanted = {one.slot: one.params.logprobs for one in (*requests, *joining) if one.params.logprobs is not None}
        return run_step(
            parts.target.runner, parts.sampling, parts.proposer, asked, on_logits=self._on_logits,
            recorder=parts.recorder, logprobs=wanted, prompts=prompts, on_layer=on_layer,
        )  # fmt: skip

    def _fixed(self, window: WindowSize) -> Choice:
        """What a window that was asked for would be if it had been chosen."""
        if not window.gamma:
            return PLAIN
        if "chain" not in self._parts.proposer.modes({}):
            return Choice("ngram", window.tree_nodes or window.gamma)
        return Choice("chain", window.gamma) if window.tree_nodes is None else Choice("tree", window.tree_nodes)


def _drafted(result: StepResult) -> int:
    """Of a draft's chain and the n-grams and branches beside it, how long the chain is."""
    proposal = result.proposal
    follows = (parent == node - 1 for node, parent in enumerate(proposal.parents))
    chained = zip(follows, proposal.sources, strict=True)
    return sum(1 for _ in takewhile(lambda one: one[0] and one[1] != NGRAM, chained))


def _own(result: StepResult, choice: Choice, size: int) -> Sequence[int]:
    """Which of the first `size` proposals were accepted; what is beside a chain tells nothing about it."""
    if choice.mode != "chain":
        return result.path
    return [node for node in result.path if node < min(size, _drafted(result))]
