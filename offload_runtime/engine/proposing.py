"""Who proposes, and how much: the drafter of a runtime, built as it was planned (`make_drafter`), and for each step
what its requests are proposed, which was asked for or the controller chooses (`WindowChooser`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from offload_runtime.cache.host import HostKVCache
from offload_runtime.cache.retrieval import RetrievalCache
from offload_runtime.core import Batch, DraftBudget
from offload_runtime.engine.load_model import LoadedModel, warm_up
from offload_runtime.engine.request import Request
from offload_runtime.options import require
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.plan.cost import guess_parents
from offload_runtime.plan.sizes import RunPlan
from offload_runtime.runners.graphs import warm_up_batches, warm_up_lengths
from offload_runtime.runners.model_runner import ModelRunner
from offload_runtime.sampling import WARM_UP_SAMPLINGS
from offload_runtime.speculation.controller import COPY, PLAIN, Controller, size_for, size_within
from offload_runtime.speculation.dflash import DFlashDrafter, DFlashRunner
from offload_runtime.speculation.draft import DraftRunner
from offload_runtime.speculation.ngram import NGRAM, NgramDrafter, WithNgrams, drafting
from offload_runtime.speculation.step import Drafter, StepOutput, StepWorth, makes_trees
from offload_runtime.speculation.tree import ModelDrafter
from offload_runtime.speculation.triforce import RetrievalVerifier, TriForceDrafter
from offload_runtime.speculation.window import DeviceWindow, GuessTree
from offload_runtime.stream.device import DeviceBudget
from offload_runtime.trace import TraceRecorder
from offload_runtime.weights.checkpoint import SharedVocabulary

# A tree so deep is hardly ever cut where an answer ends.
_DEEP_ENOUGH = 16
# Proposals where rows bring experts of their own: a pool catches what tokens of a window share, so that a longer one
# saves launches and waiting, but hardly bytes.
_MOST_WITH_EXPERTS, _COPIED_WITH_EXPERTS = 7, 15


def largest_windows(max_gamma: int, tree_room: int, *, brings_experts: bool) -> dict[str, int]:
    """Return by mode the most proposals that can ever be chosen.

    Args:
        max_gamma: The longest chain.
        tree_room: Nodes of a draft's tree; 0 where there is no room for them.
        brings_experts: Whether every further row may bring experts of its own.
    """
    looked_up = dict.fromkeys(("ngram", "unigram", COPY), max(max_gamma, tree_room))
    limits = looked_up | {"chain": max_gamma, "tree": tree_room}
    if brings_experts:
        limits = {
            mode: min(most, _COPIED_WITH_EXPERTS if mode == COPY else _MOST_WITH_EXPERTS)
            for mode, most in limits.items()
        }
    return {mode: largest for mode, largest in limits.items() if largest}


def settle(plan: RunPlan, drafter: Drafter, params: GenerationParams) -> DraftBudget | None:
    """Return what every step of a request with these options proposes; None where it is chosen for each.

    Raises:
        OptionError: More than there is room for, or something that this drafter would ignore.
    """
    loaded, most, plain = plan.request, plan.request.max_gamma, drafter.name is None
    gamma, nodes = loaded.gamma if params.gamma is None else params.gamma, _tree_nodes(plan, params)
    require((gamma or 0) <= most, f"gamma {gamma} exceeds the {most} this runtime was loaded for (max_gamma)")
    require(params.gamma is None or not plain, "gamma does nothing without a draft: drop it or choose --draft ngram")
    room, remedy = max(most, plan.tree_room), f"with tree_nodes={nodes} (--tree-nodes {nodes})"
    fine = (nodes or 0) <= room
    require(fine, f"tree_nodes {nodes} exceeds the {room} that a window here has room for: load it {remedy}")
    remedy = f"drop it, choose --draft ngram, or load a draft model {remedy}"
    fine = not params.tree_nodes or makes_trees(drafter)
    require(fine, f"tree_nodes {nodes} does nothing where nothing proposes branches: {remedy}")
    if plain:
        return PLAIN
    if gamma is None and not nodes:
        return None
    gamma = nodes if gamma is None else gamma
    if not gamma:
        return PLAIN
    mode = "ngram" if "chain" not in drafter.modes({}) else "tree" if nodes else "chain"
    return DraftBudget(mode, gamma, nodes or None)


def _tree_nodes(plan: RunPlan, params: GenerationParams) -> int | None:
    return plan.request.tree_nodes if params.tree_nodes is None else params.tree_nodes


@dataclass(frozen=True)
class StepBudgets:
    """Says what a step proposes to its requests.

    Attributes:
        requests: Those that take part and have a token.
        budgets: The most that is proposed to each.
        asked: The same by slot, as far as the answers have room.
        chosen: The controller's choice; None where it was not asked.
    """

    requests: Sequence[Request]
    budgets: Sequence[DraftBudget]
    asked: dict[int, DraftBudget]
    chosen: DraftBudget | None


class WindowChooser:
    """Says what each step proposes, and tells requests, the controller and the trace what came of it.

    Requests whose windows were asked for and others share a step; of the latter all get one choice.

    Args:
        plan: Of the runtime: what was asked for when loading, and what there is room for.
        free_nodes: Proposals of a window that make no pass longer, as the link takes longer than all of them.
        drafter: Guesses.
        controller: Chooses windows.
        runner: Of the target.
        recorder: Of a trace, if there is one.
    """

    def __init__(
        self, plan: RunPlan, free_nodes: int, drafter: Drafter, controller: Controller, runner: ModelRunner,
        recorder: TraceRecorder | None,
    ) -> None:  # fmt: skip
        self._plan, self._free_nodes, self._drafter, self._controller = plan, free_nodes, drafter, controller
        self._runner, self._recorder = runner, recorder

    def drafter_of(self, request: Request) -> Drafter:
        """Return the drafter of a request, which has no idea where that is decoded plainly."""
        return Drafter() if request.budget == PLAIN else self._drafter

    def speculates(self, request: Request) -> bool:
        """Say whether anything will be proposed to a request."""
        return request.params.max_new_tokens > 1 and self.drafter_of(request).name is not None

    def rests(self, request: Request) -> bool:
        """Say whether nothing need be proposed to a request in the step behind the one that was chosen last."""
        if not self.speculates(request):
            return True
        return request.budget is None and bool(request.steps) and self._controller.rests(request.params.sampling)

    def choose(self, requests: Sequence[Request]) -> StepBudgets:
        """Return what the next step of these requests proposes, of which all have a token and none is finished."""
        open_ = [request for request in requests if request.budget is None]
        chosen = self._choose(open_, requests) if open_ else None
        budgets, asked = list[DraftBudget](), dict[int, DraftBudget]()
        for request in requests:
            budget = request.budget or self._chosen(request, chosen or PLAIN)
            budgets.append(budget)
            asked[request.slot] = budget.within(request.room)
        return StepBudgets(requests, budgets, asked, chosen)

    def _chosen(self, request: Request, choice: DraftBudget) -> DraftBudget:
        """Return what a choice asks for; of what may branch so many in all, as many of them in a row as are likely."""
        if choice == PLAIN:
            return choice
        budget = replace(choice, cost_aware=True)
        if _tree_nodes(self._plan, request.params) == 0 or choice.mode == COPY:
            return budget
        if choice.mode == "chain":
            return replace(budget, extra_nodes=max(0, self._free_nodes - choice.size))
        return replace(budget, tree_nodes=choice.size)

    def _choose(self, open_: Sequence[Request], requests: Sequence[Request]) -> DraftBudget:
        """Return the controller's choice for the requests that leave it open, in a step of these."""
        controller, sampling = self._controller, open_[0].params.sampling
        if any(not request.steps for request in open_):
            controller.begin(sampling)
        # At the end of an answer there may be room for the target's own token alone.
        if not any(request.room for request in open_):
            return PLAIN
        limits = {} if (launched := self._runner.is_ahead) else self._largest(open_)
        return controller.choose(sampling, limits, launched=launched, **_sizes_of(requests))

    def observe(self, step: StepBudgets, results: Mapping[int, StepOutput], seconds: float | None) -> None:
        """Tell what came of a step, before its tokens join the requests.

        Args:
            step: As `choose` has given it.
            results: Of its requests, and perhaps of others.
            seconds: It took; None where it did something else as well.
        """
        if not step.requests:
            return
        requests, own = step.requests, [results[request.slot] for request in step.requests]
        # At the end of all answers there is room for the target's own tokens alone.
        room = any(one.gamma for one in step.asked.values())
        labels = [str(budget if room else PLAIN) for budget in step.budgets]
        # Less is proposed than was asked for where the answer ends, or nothing more is likely.
        largest = step.chosen or max(step.budgets, key=lambda one: one.size)
        proposed = max([len(result.proposal.tokens) for result in own])
        taken = DraftBudget(largest.mode, min(largest.size, proposed)), len(requests)
        mean_tokens = sum([len(one.sequence) for one in requests]) // len(requests)
        for request, result, label in zip(requests, own, labels, strict=True):
            count, tokens = request.steps.get(taken, (0, 0))
            request.steps[taken] = count + 1, tokens + mean_tokens
            request.tally.add(result.proposal.sources, result.accepted_sources, window=label)
        if self._recorder is not None:
            self._recorder.decided(
                window=", ".join(dict.fromkeys(labels)), proposed=[len(result.proposal) for result in own],
                accepted=[len(result.path) for result in own],
                # Numbers of the window's proposals, and who made each.
                path=[list(result.path) for result in own], sources=[result.accepted_sources for result in own],
            )  # fmt: skip
        if step.chosen is not None:
            self._teach(step, step.chosen, own, seconds)

    def _teach(
        self, step: StepBudgets, choice: DraftBudget, results: Sequence[StepOutput], seconds: float | None
    ) -> None:
        """Let the controller learn from requests whose windows nothing cut short: a step takes as long as the largest
        window."""
        open_ = [request for request in step.requests if request.budget is None]
        able = [
            (request, result, budget)
            for request, result, budget in zip(step.requests, results, step.budgets, strict=True)
            if request in open_ and self._is_able(request, choice.mode)
        ]
        whole = [result for request, result, budget in able if self._was_whole(request, result, budget)]
        seen, size = whole, choice.size
        if choice.mode == COPY:  # nothing was proposed to texts of the step that do not copy themselves
            seen = [result for result in whole if result.proposal]
        if not whole and choice.mode == "chain":  # what was cut tells about smaller windows
            seen = [result for _, result, _ in able if _drafted(result)]
            size = min((size_within(_drafted(result)) for result in seen), default=size)
        if choice == PLAIN:
            overlooked: dict[str, list[bool]] = {}
            for request, result, _ in able:
                if (guess := self._drafter.first_guess(request.slot, request.sequence)) is not None:
                    overlooked.setdefault(guess[0], []).append(guess[1] == result.tokens[0])
            for mode, hits in overlooked.items():
                self._controller.overlooked(open_[0].params.sampling, mode, hits)
        # With other windows in the same pass a step takes another time.
        timed = bool(whole) and len(open_) == len(step.requests)
        self._controller.observe(
            open_[0].params.sampling, DraftBudget(choice.mode, size), [_own(result, choice, size) for result in seen],
            tokens=sum(len(result.tokens) for result in results) / len(results), seconds=seconds if timed else None,
            **_sizes_of(step.requests),
        )  # fmt: skip

    def _largest(self, requests: Sequence[Request]) -> dict[str, int]:
        """Return by mode that has anything to propose its largest window, as far as these requests, their answers and
        the cache have room.

        A batch is done with its longest answer, so one behind which a draft has no room is not kept waiting for others.
        """
        able = self._drafter.modes({request.slot: request.sequence for request in requests})
        branches = all(_tree_nodes(self._plan, request.params) != 0 for request in requests)
        room, demand = self._plan.tree_room if branches else 0, self._plan.target.pool_share < 1
        limits = largest_windows(self._plan.request.max_gamma, room, brings_experts=demand)
        most = max(request.room for request in requests)
        longest = [request for request in requests if request.room == most]
        # The last chain of an answer is cut where the answer ends: better than another pass for what is missing.
        most_nodes = max(map(self._most_nodes, requests))
        found = {
            mode: min(limits[mode], {"chain": size_for(most), COPY: size_within(most)}.get(mode, most_nodes))
            for mode in able
            if limits.get(mode) and (len(requests) == 1 or all(self._is_able(request, mode) for request in longest))
        }
        # Where windows take no time a tree as large holds what a chain would propose: finding out about others is dear.
        if branches and self._free_nodes and "tree" in found and found["tree"] >= found.get("chain", 0):
            return {"tree": found["tree"]}
        return found

    def _most_nodes(self, request: Request) -> int:
        """Return how many proposals the target's cache has room for."""
        return self._runner.cache.max_tokens_with_draft - len(request.sequence)

    def _was_whole(self, request: Request, result: StepOutput, window: DraftBudget) -> bool:
        """Say whether nothing cut a window short: neither the end of the answer nor that of a cache."""
        if window.tree_nodes is not None:
            return request.room >= min(_DEEP_ENOUGH, window.gamma) and self._most_nodes(request) >= window.tree_nodes
        return request.room >= window.gamma and _drafted(result) in (0, window.gamma)

    def _is_able(self, request: Request, mode: str) -> bool:
        """Say whether a draft that is able behind some of several requests has room behind this one."""
        able = drafting(self._drafter).modes
        return not DraftBudget(mode, 1).drafts or mode in able({request.slot: request.sequence})


def _sizes_of(requests: Sequence[Request]) -> dict[str, int]:
    """Return what the time of a step of these requests depends on."""
    return {"num_sequences": len(requests), "context_tokens": max(len(request.sequence) for request in requests)}


def _drafted(result: StepOutput) -> int:
    """Return how long a draft's chain is, without the n-grams and branches that joined it."""
    proposal = result.proposal
    follows = (parent == node - 1 for node, parent in enumerate(proposal.parents))
    chained = zip(follows, proposal.sources, strict=True)
    return sum(1 for _ in takewhile(lambda one: one[0] and one[1] != NGRAM, chained))


def _own(result: StepOutput, choice: DraftBudget, size: int) -> Sequence[int]:
    """Return which of the first `size` proposals were accepted, of a chain without what joined it."""
    if choice.mode != "chain":
        return result.path
    return [node for node in result.path if node < min(size, _drafted(result))]


def make_drafter(
    plan: RunPlan, target: LoadedModel, draft: LoadedModel | None, budgets: Sequence[DeviceBudget], *,
    trees: bool = False, recorder: TraceRecorder | None = None, free_s: float = 0.0, free_rows: int = 0,
) -> Drafter:  # fmt: skip
    """Return the drafter for all sequences of the batch: a draft whose cache was planned for trees grows them. On a
    GPU all models and their steps are warmed up.

    Args:
        plan: Who proposes, and whether there is a retrieval verifier on top.
        target: Verifies.
        draft: The draft model; None where none was loaded.
        budgets: Of the cards; who proposes is on the first.
        trees: Whether the target verifies trees, too.
        recorder: Of a trace that has steps; None: none.
        free_s: Behind a pass, in which drafting delays nothing.
        free_rows: Of a window, up to which no pass takes longer.
    """
    batch, budget = plan.target.batch, budgets[0]
    # Before the first prefill, which may borrow their memory.
    retrieved = _make_retrieval_cache(plan, target, budgets) if plan.has_verifier else None
    if budget.device.type == "cuda":
        warm_up(target, trees=trees)
        if draft is not None and not draft.plan.is_head:  # which only its own steps can feed
            warm_up(draft)
    if retrieved is not None:
        hierarchy = _make_triforce(plan, target, draft, retrieved, budget, recorder)
        return WithNgrams(hierarchy, NgramDrafter(), alone=False) if free_rows > 1 else hierarchy
    ngrams, runner = NgramDrafter(), target.copy_runner if draft is None else draft.runner
    if runner is None:
        return Drafter() if plan.drafter == "none" else ngrams
    drafter: DFlashDrafter | ModelDrafter
    if draft is not None and draft.plan.block_rows:
        drafter = DFlashDrafter(DFlashRunner(runner, batch=batch), ngrams=ngrams)
    else:
        shared = _shared(target, draft)
        steps = DraftRunner(
            runner, vocab_size=shared.size, excluded=shared.excluded, batch=batch, shares_kv=draft is None
        )
        drafter = ModelDrafter(steps, ngrams=ngrams, worth=StepWorth(free_s))
    if budget.device.type == "cuda":
        drafter.runner.warm_up()
    drafter.runner.graphs.recorder = recorder
    return WithNgrams(drafter, ngrams)


def _shared(target: LoadedModel, draft: LoadedModel | None) -> SharedVocabulary:
    """Return what a draft, or copies of the target, may propose."""
    return (draft and draft.shared) or SharedVocabulary(target.config.vocab_size)


def _make_retrieval_cache(plan: RunPlan, target: LoadedModel, budgets: Sequence[DeviceBudget]) -> RetrievalCache:
    """Return what the retrieval verifier sees of the target's cache, whose prefills borrow memory of it where they
    were planned to."""
    options, source = plan.request.speculation, target.runner.cache
    retrieved = RetrievalCache(
        source, plan.target.config, plan.target.dtype, budget_tokens=options.budget_tokens,
        chunk_size=options.chunk_size, batch=plan.target.batch, budgets=budgets, owners=plan.target.owners,
    )  # fmt: skip
    source.take_steps(budgets, "rows of the retrieval verifier")
    for card, (own, budget) in enumerate(zip(plan.cards, budgets, strict=True)):
        if isinstance(source, HostKVCache) and not own.target.prefill_workspace_bytes:
            source.borrow_workspace[card] = partial(retrieved.borrow_workspace, card)
        budget.reserve("steps of the retrieval verifier", own.verifier_step_bytes)
    return retrieved


def _make_triforce(
    plan: RunPlan, target: LoadedModel, draft: LoadedModel | None, retrieved: RetrievalCache,
    budget: DeviceBudget, recorder: TraceRecorder | None,
) -> Drafter:  # fmt: skip
    runner, batch = target.runner, plan.target.batch
    layers, source = runner.streamer.resident_layers(), runner.cache
    assert layers is not None, "refused when it was planned"
    trees = [GuessTree(guess_parents(plan, count), budget.device) for count in range(1, batch + 1)]
    window, most_tokens = DeviceWindow(budget.device, batch=batch), source.max_tokens_with_draft
    verifier = RetrievalVerifier(
        runner.decoder, layers, retrieved, target.rope, window, max_tokens_with_draft=most_tokens, batch=batch
    )  # fmt: skip
    first = None
    if draft is not None:
        cache, shared = draft.runner.cache, _shared(target, draft)
        has_all = cache.capacity_tokens == source.capacity_tokens  # else positions beyond may be none of its own
        first = DraftRunner(
            draft.runner, vocab_size=shared.size, excluded=shared.excluded, batch=batch, window=window,
            max_tokens_with_draft=cache.max_tokens_with_draft if has_all else None,
        )  # fmt: skip
    drafter = TriForceDrafter(
        window, verifier, first, trees=trees, max_tokens_with_draft=most_tokens,
        refresh_steps=plan.target.options.steps_between_choices(on_host=plan.target.on_host),
    )  # fmt: skip
    levels: list[RetrievalVerifier | DraftRunner] = [verifier] if first is None else [verifier, first]
    if budget.device.type == "cuda":
        with verifier.graphs.eager(), nullcontext() if first is None else first.graphs.eager():
            warm_up_verifier(drafter, runner, batch=batch)
        retrieved.warm_up()
        if first is not None:
            first.warm_up()
    for level in levels:
        level.graphs.recorder = recorder
    return drafter


def warm_up_verifier(drafter: TriForceDrafter, target: ModelRunner, *, batch: int) -> None:
    """Compile the kernels of the verifier's steps, which would hold up the first proposals.

    Leaves the target's cache empty, and the draft's with what was proposed.

    Args:
        drafter: Of the target.
        target: All of its layers are resident.
        batch: Sequences.
    """

    def take_step(slots: Sequence[SamplingParams], length: int) -> None:
        for slot, params in enumerate(slots):
            drafter.join(slot, params)
        texts = {slot: [0] * length for slot in range(len(slots))}
        drafter.propose(texts, dict.fromkeys(texts, DraftBudget("chain", 1)))
        for slot in range(len(slots)):
            drafter.leave(slot)

    for params in WARM_UP_SAMPLINGS[1:]:
        take_step([params], 1)
    # Trees of other sizes need other kernels, too.
    first_of_trees = {tree.parents: count for count, tree in reversed([*enumerate(drafter.trees, 1)])}
    for num_sequences in sorted({*warm_up_batches(batch), *first_of_trees.values()}):
        take_step(WARM_UP_SAMPLINGS[:1] * num_sequences, 1)
    # A step puts its tree and two more tokens behind a text.
    longest = min(target.cache.capacity_tokens, target.cache.max_tokens_with_draft - len(drafter.trees[0]) - 2)
    for length in warm_up_lengths(longest):
        target.forward(Batch(prompts={0: [0] * (length - 1)}))
        take_step(WARM_UP_SAMPLINGS[:1], length)
        target.cache.truncate(0, 0)
