"""The levels between the draft and the full target, built and connected as they were planned."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from offload_runtime.cache import DeviceKVCache, HostKVCache
from offload_runtime.cache.retrieval import RetrievalCache
from offload_runtime.core import Batch, DraftBudget
from offload_runtime.engine.load_model import LoadedModel, warm_up
from offload_runtime.params import SamplingParams
from offload_runtime.plan import RunPlan
from offload_runtime.plan.cost import guess_parents
from offload_runtime.runners import ModelRunner, warm_up_batches, warm_up_lengths
from offload_runtime.sampling import WARM_UP_SAMPLINGS
from offload_runtime.speculation import (
    DeviceWindow,
    DraftProposer,
    DraftRunner,
    GuessTree,
    NgramProposer,
    Proposer,
    RetrievalVerifier,
    StepWorth,
    TriForceProposer,
    WithNgrams,
)
from offload_runtime.stream import DeviceBudget
from offload_runtime.trace import TraceRecorder
from offload_runtime.weights import SharedVocabulary


def make_proposer(
    plan: RunPlan, target: LoadedModel, draft: LoadedModel | None, budgets: Sequence[DeviceBudget], *,
    trees: bool = False, recorder: TraceRecorder | None = None, free_s: float = 0.0, free_rows: int = 0,
) -> Proposer:  # fmt: skip
    """Return the proposer for all sequences of the batch: a draft whose cache was planned for trees grows them. On a
    GPU all models and their steps are warmed up.

    Args:
        plan: Who proposes, and whether there is a retrieval verifier on top.
        target: Verifies.
        draft: The draft model; None where none was loaded.
        budgets: Of the cards; who proposes is on the first.
        trees: Whether the target verifies trees, too.
        recorder: Of a trace that steps are told; None: none.
        free_s: Behind a pass, in which drafting delays nothing.
        free_rows: Of a window, up to which no pass takes longer.
    """
    batch, budget = plan.target.batch, budgets[0]
    # Before the first prefill, which may borrow their memory.
    retrieved = _make_retrieval_cache(plan, target, budgets) if plan.has_verifier else None
    if budget.device.type == "cuda":
        warm_up(target, trees=trees)
        if draft is not None:
            warm_up(draft)
    if retrieved is not None:
        hierarchy = _make_triforce(plan, target, draft, retrieved, budget, recorder)
        return WithNgrams(hierarchy, NgramProposer(), alone=False) if free_rows > 1 else hierarchy
    if draft is None:
        return Proposer() if plan.proposer == "none" else NgramProposer()
    runner, ngrams, shared = draft.runner, NgramProposer(), _shared_vocabulary(target, draft)
    drafts = DraftRunner(runner, vocab_size=shared.size, excluded=shared.excluded, batch=batch)
    if budget.device.type == "cuda":
        drafts.warm_up()
    drafts.recorder = recorder
    return WithNgrams(DraftProposer(drafts, ngrams=ngrams, worth=StepWorth(free_s)), ngrams)


def _shared_vocabulary(target: LoadedModel, draft: LoadedModel) -> SharedVocabulary:
    return draft.shared or SharedVocabulary(target.config.vocab_size)


def _make_retrieval_cache(plan: RunPlan, target: LoadedModel, budgets: Sequence[DeviceBudget]) -> RetrievalCache:
    """Return what the retrieval verifier sees of the target's cache, whose prefills borrow memory of it where they
    were planned to."""
    options, source = plan.request.speculation, target.runner.cache
    assert isinstance(source, DeviceKVCache | HostKVCache), "a target's cache is whole"
    retrieved = RetrievalCache(
        source, plan.target.config, plan.target.dtype, budget_tokens=options.budget_tokens,
        chunk_size=options.chunk_size, batch=plan.target.batch, budgets=budgets, owners=plan.target.owners,
    )  # fmt: skip
    for card, (own, budget) in enumerate(zip(plan.cards, budgets, strict=True)):
        if isinstance(source, HostKVCache) and not own.target.prefill_workspace_bytes:
            source.borrow_workspace[card] = partial(retrieved.chunks.borrow_workspace, card)
        budget.reserve("steps of the retrieval verifier", own.verifier_step_bytes)
    return retrieved


def _make_triforce(
    plan: RunPlan, target: LoadedModel, draft: LoadedModel | None, retrieved: RetrievalCache,
    budget: DeviceBudget, recorder: TraceRecorder | None,
) -> Proposer:  # fmt: skip
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
        cache, shared = draft.runner.cache, _shared_vocabulary(target, draft)
        has_all = cache.capacity_tokens == source.capacity_tokens  # else positions beyond may be none of its own
        first = DraftRunner(
            draft.runner, vocab_size=shared.size, excluded=shared.excluded, batch=batch, window=window,
            max_tokens_with_draft=cache.max_tokens_with_draft if has_all else None,
        )  # fmt: skip
    proposer = TriForceProposer(
        window, verifier, first, trees=trees, max_tokens_with_draft=most_tokens,
        refresh_steps=plan.target.options.steps_between_choices(on_host=plan.target.on_host),
    )  # fmt: skip
    levels: list[RetrievalVerifier | DraftRunner] = [verifier] if first is None else [verifier, first]
    if budget.device.type == "cuda":
        with verifier.graphs.eager(), nullcontext() if first is None else first.eager():
            warm_up_verifier(proposer, runner, batch=batch)
        retrieved.warm_up()
        if first is not None:
            first.warm_up()
    for level in levels:
        level.recorder = recorder
    return proposer


def warm_up_verifier(proposer: TriForceProposer, target: ModelRunner, *, batch: int) -> None:
    """Compile the kernels of the verifier's steps, which would hold up the first proposals.

    Leaves the target's cache empty, and the draft's with what was proposed.

    Args:
        proposer: Of the target.
        target: All of its layers are resident.
        batch: Sequences.
    """

    def take_step(slots: Sequence[SamplingParams], length: int) -> None:
        for slot, params in enumerate(slots):
            proposer.join(slot, params)
        texts = {slot: [0] * length for slot in range(len(slots))}
        proposer.propose(texts, dict.fromkeys(texts, DraftBudget("chain", 1)))
        for slot in range(len(slots)):
            proposer.leave(slot)

    for params in WARM_UP_SAMPLINGS[1:]:
        take_step([params], 1)
    # Trees of other sizes need other kernels, too.
    first_of_trees = {tree.parents: count for count, tree in reversed([*enumerate(proposer.trees, 1)])}
    for num_sequences in sorted({*warm_up_batches(batch), *first_of_trees.values()}):
        take_step(WARM_UP_SAMPLINGS[:1] * num_sequences, 1)
    # A step puts its tree and two more tokens behind a text.
    longest = min(target.cache.capacity_tokens, target.cache.max_tokens_with_draft - len(proposer.trees[0]) - 2)
    for length in warm_up_lengths(longest):
        target.forward(Batch(prompts={0: [0] * (length - 1)}))
        take_step(WARM_UP_SAMPLINGS[:1], length)
        target.cache.truncate(0, 0)
