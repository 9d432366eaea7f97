"""The levels between the draft and the full target: planned, built and connected."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from offload_runtime.config import ModelConfig, SpeculationOptions, format_bytes, format_bytes_up
from offload_runtime.engine.assembly import LoadedModels
from offload_runtime.engine.placing import Limits, link_bytes, place
from offload_runtime.engine.plans import Plans, settle_draft_cache
from offload_runtime.errors import BudgetError, OptionError
from offload_runtime.kv_cache import DeviceKVCache, HostKVCache, kv_cache_bytes
from offload_runtime.kv_cache.retrieval import (
    ChunkPolicy,
    RetrievalPolicy,
    RetrievedChunks,
    StreamingPolicy,
    TopKPolicy,
    far_keys_bytes,
    retrieved_bytes,
    summaries_bytes,
)
from offload_runtime.kv_cache.retrieval_cache import RetrievalCache
from offload_runtime.memory import DeviceBudget
from offload_runtime.planner import Placement
from offload_runtime.runners import DraftTree
from offload_runtime.runners.device_window import DeviceWindow, device_window_bytes
from offload_runtime.runners.draft import DraftModel
from offload_runtime.runners.retrieval_target import RetrievalTarget, middle_step_bytes
from offload_runtime.runners.step_graph import step_graph_bytes
from offload_runtime.speculation import (
    DraftProposer,
    NgramProposer,
    NoProposer,
    Proposer,
    StepWorth,
    TreeDraftProposer,
    TriForceProposer,
    WithNgrams,
)
from offload_runtime.tracing import TraceRecorder
from offload_runtime.weights import packed_bytes

# What a round brings: with TriForce 12 tokens in 10 steps of the middle level (120,000 tokens of a novel, T = 0.6,
# gamma 24), of a chain what a draft brings that is accepted four times of five.
_TRIFORCE_TOKENS, _TRIFORCE_STEPS = 12, 10
_CHAIN_TOKENS, _CHAIN_STEPS = 5, 8
# Bytes of the device's memory in the time of one over the link: RTX 4090 40, RTX 3090 37, H200 77.
_HBM_OVER_LINK = 40


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


def what_keeps_triforce_out(
    plans: Plans, placement: Placement, options: SpeculationOptions, *, resident_layers: int | None
) -> tuple[str, Sequence[str]] | None:
    """Why there cannot be a middle level, and what would help; None when there can.

    Args:
        plans: With the middle level among them.
        placement: Of the target's layers beside it.
        options: How to propose.
        resident_layers: As many as were asked for; None if that was left to us.
    """
    config, context, draft = plans.target.config, plans.target.context_tokens, plans.draft
    if options.budget_tokens > context:
        reason = f"a retrieval budget of {options.budget_tokens} tokens is more than the context of {context}"
        return reason, ["lower --budget-tokens", "raise --context"]
    if any(window is not None for window in config.layer_windows):
        return "it needs full attention, and this model has sliding windows", []
    if placement.num_streamed:
        reason = f"{placement.num_streamed} of {config.num_layers} layers are streamed"
        if resident_layers is not None:
            return reason, ["drop --resident-layers"]
        # Without streamed layers there is no ring either.
        missing_bytes = (placement.num_streamed - placement.num_slots) * plans.target.layer_bytes
        return reason, [f"raise --vram by {format_bytes_up(missing_bytes)}", "lower --context"]
    if draft is not None and draft.streaming is None and draft.context_tokens < context:
        # Behind its last position the draft has nothing to say, and the middle level would wait for it.
        reason = f"the draft was made for {draft.context_tokens} tokens and the context has {context}"
        return reason, ["take --draft-cache streaming", "lower --context"]
    return None


def place_batch(
    plans: Plans, budget: Limits, resident_layers: int | None, kv: str, options: SpeculationOptions
) -> PlacedLevels:
    """Place everything, or say for how many sequences there is room.

    Raises:
        BudgetError, OptionError: As `place_with_middle` does.
    """

    def attempt(sequences: int) -> PlacedLevels:
        draft = None if plans.draft is None else replace(plans.draft, batch=sequences)
        fewer = replace(plans, target=replace(plans.target, batch=sequences), draft=draft)
        return place_with_middle(fewer, budget, resident_layers, kv, options)

    def fails(sequences: int) -> bool:
        try:
            attempt(sequences)
        except (BudgetError, OptionError):
            return True
        return False

    batch = plans.target.batch
    try:
        return attempt(batch)
    except (BudgetError, OptionError) as error:
        fitting = bisect_left(range(1, batch), True, key=fails)
        if not fitting:
            raise
        raise type(error)(f"{error}; {fitting} prompts at once would fit, {batch} do not") from error


def place_with_middle(
    plans: Plans, budget: Limits, resident_layers: int | None, kv: str, options: SpeculationOptions
) -> PlacedLevels:
    """Place everything, with TriForce's middle level where it was asked for or pays.

    Raises:
        BudgetError: It does not fit; OptionError: the middle level cannot be here.
    """
    plans = settle_draft_cache(plans, budget.limit_bytes, options)
    try:
        return _place_levels(plans, budget, resident_layers, kv, options)
    except BudgetError:
        smaller = settle_draft_cache(plans, 0, options)  # a draft's cache that nobody asked for is in the way of all
        if smaller is plans:
            raise
        return _place_levels(smaller, budget, resident_layers, kv, options)


def _place_levels(
    plans: Plans, budget: Limits, resident_layers: int | None, kv: str, options: SpeculationOptions
) -> PlacedLevels:
    target = plans.target
    middle = MiddlePlan(target.config, target.dtype, options, target.context_tokens, target.batch)
    graph_bytes = step_graph_bytes(target.config) if plans.graphs else 0
    enlarged = replace(plans, middle_bytes=middle.nbytes, lent_bytes=middle.lent_bytes, middle_graph_bytes=graph_bytes)
    if options.mode == "triforce":
        with_middle, placement = place(enlarged, budget, resident_layers, kv, whole_weights=True)
        obstacle = what_keeps_triforce_out(with_middle, placement, options, resident_layers=resident_layers)
        if obstacle is not None:
            reason, remedies = obstacle
            raise OptionError(f"no TriForce here: {reason}: {', '.join([*remedies, 'or use --speculation chain'])}")
        return PlacedLevels(with_middle, placement, middle)
    without = PlacedLevels(*place(plans, budget, resident_layers, kv))
    if options.mode != "auto" or plans.draft is None:
        return without
    if plans.draft.tree_slots:
        return replace(without, reason="the draft was asked for trees")
    if not without.plans.target.kv.on_host:
        return replace(without, reason="the KV cache is on the device")
    try:
        with_middle, placement = place(enlarged, budget, resident_layers, "host", whole_weights=True)
    except BudgetError:
        return replace(without, reason=f"its {format_bytes(middle.nbytes)} do not fit the device")
    obstacle = what_keeps_triforce_out(with_middle, placement, options, resident_layers=resident_layers)
    if obstacle is not None:
        return replace(without, reason=obstacle[0])
    hierarchy = PlacedLevels(with_middle, placement, middle)
    return (
        hierarchy if _pays(hierarchy, without) else replace(without, reason="a pass streams too little for it to pay")
    )


def _pays(hierarchy: PlacedLevels, chain: PlacedLevels) -> bool:
    """Whether a middle level is likely to bring more tokens a second than the draft alone does.

    By bytes alone, those on the device weighed by how much faster they are read: where this is decided, the machine's
    own figures need not be known. What a pass streams has to outweigh the steps of the middle level, which read all
    weights.
    """
    plans, target, draft = hierarchy.plans, hierarchy.plans.target, hierarchy.plans.draft
    assert draft is not None and hierarchy.middle is not None
    options, draft_bytes = hierarchy.middle.options, packed_bytes(draft.config, draft.dtype)
    retrieved_bytes = target.batch * options.budget_tokens * target.config.kv_bytes_per_token(target.dtype.itemsize)
    step_bytes = packed_bytes(target.config, target.dtype) + retrieved_bytes
    step_bytes += options.gamma_draft * draft_bytes
    with_middle = link_bytes(plans, hierarchy.placement) + _TRIFORCE_STEPS * step_bytes / _HBM_OVER_LINK
    alone = link_bytes(chain.plans, chain.placement) + _CHAIN_STEPS * draft_bytes / _HBM_OVER_LINK
    return _TRIFORCE_TOKENS * alone > _CHAIN_TOKENS * with_middle


def make_proposer(
    draft: str, models: LoadedModels, middle: MiddlePlan | None, budget: DeviceBudget, *, batch: int,
    recorder: TraceRecorder | None = None, free_s: float = 0.0,
) -> Proposer:  # fmt: skip
    """Who proposes, for all sequences of the batch: a draft whose cache was planned for trees grows them.

    Args:
        draft: `none`, `ngram`, or anything else for the draft model.
        models: What was loaded.
        middle: The middle level to put on top; None for a chain.
        budget: Of the device.
        batch: Sequences.
        recorder: Of a trace that steps are told; None: none.
        free_s: Seconds behind a pass in which the link still has something to bring for the next one.
    """
    if middle is not None:
        return _make_triforce(models, middle, budget, recorder)
    if models.draft is None:
        return NoProposer() if draft == "none" else NgramProposer()
    runner = models.draft.runner
    target_vocab, draft_vocab = models.target.runner.decoder.config.vocab_size, runner.decoder.config.vocab_size
    chains = DraftProposer(runner, vocab_size=target_vocab, draft_vocab_size=draft_vocab, batch=batch)
    chains.model.recorder = recorder
    ngrams = NgramProposer()
    if not (isinstance(runner.cache, DeviceKVCache) and runner.cache.spare_slots):
        return WithNgrams(chains, ngrams)
    tree = DraftTree(
        runner, chains.model.texts, vocab_size=target_vocab, draft_vocab_size=draft_vocab, batch=batch
    )  # fmt: skip
    tree.warm_up()
    tree.recorder = recorder
    trees = TreeDraftProposer(chains, tree, device=budget.device, ngrams=ngrams, worth=StepWorth(free_s))
    return WithNgrams(trees, ngrams)


def _make_triforce(
    models: LoadedModels, plan: MiddlePlan, budget: DeviceBudget, recorder: TraceRecorder | None
) -> Proposer:
    options, target, draft, batch = plan.options, models.target, models.draft, plan.batch
    layers = target.runner.streamer.resident_layers()
    assert layers is not None, "refused when it was planned"
    chunks = RetrievedChunks(
        plan.config, plan.dtype, budget_tokens=options.budget_tokens, chunk_size=options.chunk_size, batch=batch,
        budget=budget,
    )  # fmt: skip
    policy = _make_policy(plan, budget)
    source = target.runner.cache
    assert isinstance(source, DeviceKVCache | HostKVCache), "a target's cache is whole"
    source.observers.append(policy)
    if isinstance(source, HostKVCache) and batch == 1:
        source.lender = chunks
    budget.reserve("steps of the middle level", plan.step_bytes)
    gamma = options.gamma_draft if draft is not None else 0
    window = DeviceWindow(budget.device, batch=batch)
    middle = RetrievalTarget(
        target.runner.decoder, layers, RetrievalCache(source, chunks, policy, batch=batch, device=budget.device),
        target.rope, window, gamma=gamma, capacity_tokens=source.capacity_tokens, batch=batch,
    )  # fmt: skip
    middle.recorder = recorder
    first = None
    if draft is not None:
        draft_vocab = draft.runner.decoder.config.vocab_size
        first = DraftModel(
            draft.runner, vocab_size=plan.config.vocab_size, draft_vocab_size=draft_vocab, batch=batch, window=window
        )
        first.recorder = recorder
    return TriForceProposer(
        window, middle, first, gamma_draft=gamma, refresh_steps=options.refresh_steps,
        capacity_tokens=source.capacity_tokens,
    )  # fmt: skip


def _make_policy(plan: MiddlePlan, budget: DeviceBudget) -> ChunkPolicy:
    options = plan.options
    if options.policy == "streaming":
        sinks = min(options.budget_tokens, -(-options.sink_tokens // options.chunk_size) * options.chunk_size)
        return StreamingPolicy(
            plan.config, budget_tokens=options.budget_tokens, chunk_size=options.chunk_size, sink_tokens=sinks
        )
    made = RetrievalPolicy if options.policy == "retrieval" else TopKPolicy
    return made(
        plan.config, plan.dtype, budget_tokens=options.budget_tokens, chunk_size=options.chunk_size,
        capacity_tokens=plan.context_tokens, batch=plan.batch, budget=budget,
    )  # fmt: skip


def describe_speculation(draft: str, placed: PlacedLevels, options: SpeculationOptions) -> str:
    """One phrase: who proposes."""
    middle = placed.middle
    if middle is None:
        why = f" (not TriForce: {placed.reason})" if placed.reason else ""
        return f"proposals from {draft}{why}" if draft != "none" else "plain decoding"
    first = "no draft" if draft in ("none", "ngram") else draft
    return (
        f"TriForce: {first}, then the target over {options.budget_tokens} retrieved tokens a head "
        f"({format_bytes(middle.nbytes)})"
    )
