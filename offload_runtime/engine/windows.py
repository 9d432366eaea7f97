"""How much each request of a step proposes, what was asked for or the controller chooses, and what that learns from
what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from weakref import WeakKeyDictionary

from offload_runtime.engine.request import Request
from offload_runtime.errors import require
from offload_runtime.kv import KVCache
from offload_runtime.params import GenerationParams
from offload_runtime.speculation import (
    COPY,
    NGRAM,
    PLAIN,
    Choice,
    Controller,
    DraftRequest,
    Proposer,
    StepResult,
    drafting,
    makes_trees,
    size_for,
    size_within,
)
from offload_runtime.trace import TraceRecorder

# A tree so deep is hardly ever cut where an answer ends.
_DEEP_ENOUGH = 16


@dataclass(frozen=True)
class WindowSize:
    """Bounds the tokens to propose per step and request: `gamma` in a row and `tree_nodes` in all, None for chains, and
    `extra_nodes` that cost nothing beside a chain."""

    gamma: int
    tree_nodes: int | None = None
    extra_nodes: int = 0


@dataclass(frozen=True)
class WindowLimits:
    """Bounds what there is room to propose: of a runtime, or of a request whose windows are chosen step by step.

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
        """Return how many proposals a window has room for."""
        return max(self.max_gamma, self.tree_room)

    @property
    def by_mode(self) -> dict[str, int]:
        """Return the largest windows that can ever be chosen."""
        looked_up = dict.fromkeys(("ngram", "unigram", COPY), self.most_nodes)
        limits = looked_up | {"chain": self.max_gamma, "tree": self.tree_room}
        return {mode: largest for mode, largest in limits.items() if largest}

    def settle(self, params: GenerationParams, proposer: Proposer) -> WindowSize | WindowLimits:
        """Return what every step of a request proposes, or the limits of what is chosen for each.

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
        remedy = f"drop it, choose --draft ngram, or load a draft model {loaded}"
        fine = not params.tree_nodes or makes_trees(proposer)
        require(fine, f"tree_nodes {nodes} does nothing where nobody proposes branches: {remedy}")
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
        """Return what a choice asks for; of what may branch so many in all, as many of them in a row as are likely."""
        if self.tree_nodes == 0 or choice == PLAIN or choice.mode == COPY:
            return WindowSize(choice.size)
        if choice.mode == "chain":
            return WindowSize(choice.size, extra_nodes=max(0, self.free - choice.size))
        return WindowSize(choice.size, choice.size)


@dataclass(frozen=True)
class StepWindows:
    """Says what a step proposes to its requests.

    Attributes:
        requests: Those that take part and have a token.
        sizes: The most that is proposed to each.
        choices: What was chosen for each, or would have been for the size that was asked for.
        asked: The same in the words of the proposer.
        chosen: The controller's choice; None where it was not asked.
        is_chosen: For each request whether the controller's choice is its.
    """

    requests: Sequence[Request]
    sizes: Sequence[WindowSize]
    choices: Sequence[Choice]
    asked: Sequence[DraftRequest]
    chosen: Choice | None
    is_chosen: Sequence[bool]


class WindowChooser:
    """Says what each step proposes, and tells requests, the controller and the trace what came of it.

    Requests whose windows were asked for and others share a step; of the latter all get one choice.

    Args:
        limits: Of the runtime.
        proposer: Guesses.
        controller: Chooses windows.
        cache: The target's.
        recorder: Of a trace, if there is one.
    """

    def __init__(
        self, limits: WindowLimits, proposer: Proposer, controller: Controller, cache: KVCache,
        recorder: TraceRecorder | None,
    ) -> None:  # fmt: skip
        self._limits, self._proposer, self._controller = limits, proposer, controller
        self._cache, self._recorder = cache, recorder
        self._windows = WeakKeyDictionary[Request, WindowSize | WindowLimits]()

    def _window(self, request: Request) -> WindowSize | WindowLimits:
        """Return what is proposed to a request in every step, or the limits of what is chosen."""
        if request not in self._windows:
            settled = self._limits.settle(request.params, self._proposer)
            self._windows[request] = settled if request.speculate else WindowSize(0)
        return self._windows[request]

    def proposer_of(self, request: Request) -> Proposer:
        """Return the proposer of a request, which has no idea where that is decoded plainly."""
        window = self._window(request)
        plain = isinstance(window, WindowSize) and not window.gamma
        return Proposer() if plain else self._proposer

    def speculates(self, request: Request) -> bool:
        """Say whether anything will be proposed to a request."""
        return request.params.max_new_tokens > 1 and self.proposer_of(request).name is not None

    def choose(self, requests: Sequence[Request]) -> StepWindows:
        """Return what the next step of these requests proposes, of which all have a token and none is finished."""
        windows = [self._window(request) for request in requests]
        limits = {
            request: window
            for request, window in zip(requests, windows, strict=True)
            if isinstance(window, WindowLimits)
        }
        chosen = self._choose(limits, requests) if limits else None
        sizes, choices, asked = list[WindowSize](), list[Choice](), list[DraftRequest]()
        for request, window in zip(requests, windows, strict=True):
            is_open = isinstance(window, WindowLimits)
            if isinstance(window, WindowLimits):
                assert chosen is not None
                size, choice = window.window(chosen), chosen
            else:
                size, choice = window, self._fixed(window)
            sizes.append(size)
            choices.append(choice)
            asked.append(
                DraftRequest(
                    request.slot, request.sequence, min(size.gamma, request.room), size.tree_nodes,
                    mode=choice.mode if is_open else None, cost_aware=is_open,
                    extra_nodes=max(0, min(size.extra_nodes, request.room - size.gamma)),
                )
            )  # fmt: skip
        return StepWindows(requests, sizes, choices, asked, chosen, [request in limits for request in requests])

    def _choose(self, limits: Mapping[Request, WindowLimits], requests: Sequence[Request]) -> Choice:
        """Return the controller's choice for the requests that leave it open, in a step of these."""
        open_, controller = list(limits), self._controller
        sampling = open_[0].params.sampling
        if any(not request.steps for request in open_):
            controller.begin(sampling)
        # At the end of an answer there may be room for the target's own token alone.
        if not any(request.room for request in open_):
            return PLAIN
        return controller.choose(sampling, self._largest(limits), **_sizes_of(requests))

    def observe(self, step: StepWindows, results: Sequence[StepResult], seconds: float | None) -> None:
        """Tell what came of a step, before its tokens join the requests.

        Args:
            step: As `choose` has given it.
            results: Of its requests, and perhaps others behind them.
            seconds: It took; None where it did something else as well.
        """
        requests, results = step.requests, results[: len(step.requests)]
        if not requests:
            return
        # At the end of all answers there is room for the target's own tokens alone.
        proposed = {choice for choice, asked in zip(step.choices, step.asked, strict=True) if asked.gamma}
        labels = [str(choice if choice in proposed else PLAIN) for choice in step.choices]
        # Less is proposed than was asked for where the answer ends, or nothing more is likely.
        largest = step.chosen or max(step.choices, key=lambda one: one.size)
        actual = Choice(largest.mode, min(largest.size, max(len(result.proposal) for result in results)))
        taken = actual, len(requests), sum(len(one.sequence) for one in requests) // len(requests)
        for request, result, label in zip(requests, results, labels, strict=True):
            request.steps.append(taken)
            request.tally.add(result.proposal.sources, result.accepted_sources, window=label)
        if self._recorder is not None:
            self._recorder.decided(
                window=", ".join(dict.fromkeys(labels)), proposed=[len(result.proposal) for result in results],
                accepted=[len(result.path) for result in results],
                # Numbers of the window's proposals, and who made each.
                path=[list(result.path) for result in results],
                sources=[result.accepted_sources for result in results],
            )  # fmt: skip
        if step.chosen is not None:
            self._teach(step, step.chosen, results, seconds)

    def _teach(
        self, step: StepWindows, choice: Choice, results: Sequence[StepResult], seconds: float | None
    ) -> None:  # fmt: skip
        """Let the controller learn from requests whose windows nothing cut short: a step takes as long as the largest
        window."""
        open_ = [request for request, is_open in zip(step.requests, step.is_chosen, strict=True) if is_open]
        able = [
            (request, result, size)
            for request, result, size, is_open in zip(step.requests, results, step.sizes, step.is_chosen, strict=True)
            if is_open and self._is_able(request, choice.mode)
        ]
        whole = [result for request, result, size in able if self._was_whole(request, result, size)]
        seen, size = whole, choice.size
        if choice.mode == COPY:  # of other texts beside one that copies nothing was proposed
            seen = [result for result in whole if result.proposal]
        if not whole and choice.mode == "chain":  # what was cut tells about smaller windows
            seen = [result for _, result, _ in able if _drafted(result)]
            size = min((size_within(_drafted(result)) for result in seen), default=size)
        # With other windows beside them a step takes another time.
        timed = bool(whole) and len(open_) == len(step.requests)
        self._controller.observe(
            open_[0].params.sampling, Choice(choice.mode, size), [_own(result, choice, size) for result in seen],
            tokens=sum(len(result.tokens) for result in results) / len(results), seconds=seconds if timed else None,
            **_sizes_of(step.requests),
        )  # fmt: skip

    def _largest(self, windows: Mapping[Request, WindowLimits]) -> dict[str, int]:
        """Return by mode that has anything to propose its largest window, as far as the limits of these requests, an
        answer and the cache have room.

        A batch is done with its longest answer, so one behind which a draft has no room is not kept waiting for others.
        """
        requests, of_each = list(windows), [window.by_mode for window in windows.values()]
        able = self._proposer.modes({request.slot: request.sequence for request in requests})
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
        """Return how many proposals the target's cache has room for."""
        return self._cache.max_tokens_with_draft - len(request.sequence)

    def _was_whole(self, request: Request, result: StepResult, window: WindowSize) -> bool:
        """Say whether nothing cut a window short: neither the end of the answer nor that of a cache."""
        if window.tree_nodes is not None:
            return request.room >= min(_DEEP_ENOUGH, window.gamma) and self._most_nodes(request) >= window.tree_nodes
        return request.room >= window.gamma and _drafted(result) in (0, window.gamma)

    def _is_able(self, request: Request, mode: str) -> bool:
        """Say whether a draft that is able behind some of several requests has room behind this one."""
        able = drafting(self._proposer).modes
        return not Choice(mode, 1).drafts or mode in able({request.slot: request.sequence})

    def _fixed(self, window: WindowSize) -> Choice:
        """Return what a window that was asked for would be if it had been chosen."""
        if not window.gamma:
            return PLAIN
        if "chain" not in self._proposer.modes({}):
            return Choice("ngram", window.tree_nodes or window.gamma)
        return Choice("chain", window.gamma) if window.tree_nodes is None else Choice("tree", window.tree_nodes)


def _sizes_of(requests: Sequence[Request]) -> dict[str, int]:
    """Return what the time of a step of these requests depends on."""
    return {"num_sequences": len(requests), "context_tokens": max(len(request.sequence) for request in requests)}


def _drafted(result: StepResult) -> int:
    """Return how long a draft's chain is, without the n-grams and branches that joined it."""
    proposal = result.proposal
    follows = (parent == node - 1 for node, parent in enumerate(proposal.parents))
    chained = zip(follows, proposal.sources, strict=True)
    return sum(1 for _ in takewhile(lambda one: one[0] and one[1] != NGRAM, chained))


def _own(result: StepResult, choice: Choice, size: int) -> Sequence[int]:
    """Return which of the first `size` proposals were accepted, of a chain without what joined it."""
    if choice.mode != "chain":
        return result.path
    return [node for node in result.path if node < min(size, _drafted(result))]
