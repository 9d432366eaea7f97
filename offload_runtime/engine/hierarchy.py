"""The levels between the draft and the full target: planned, built and connected."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from offload_runtime.config import ModelConfig, SpeculationOptions, format_bytes
from offload_runtime.engine.assembly import LoadedModels
from offload_runtime.engine.placing import place
from offload_runtime.engine.plans import Plans
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
from offload_runtime.runners.device_window import DeviceWindow
from offload_runtime.runners.draft import DraftModel
from offload_runtime.runners.retrieval_target import RetrievalTarget
from offload_runtime.speculation import DraftProposer, NgramProposer, NoProposer, Proposer, TriForceProposer


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
        """Retrieved chunks, and what the policy keeps to choose them by."""
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


def check_triforce(config: ModelConfig, num_streamed_layers: int, budget_tokens: int, context_tokens: int) -> None:
    """Refuse the middle level where it cannot be.

    Raises:
        OptionError: Layers have sliding windows, weights are streamed, or the budget exceeds the context.
    """
    if budget_tokens > context_tokens:
        raise OptionError(
            f"a retrieval budget of {budget_tokens} tokens is more than the context of {context_tokens}: lower "
            "--budget-tokens, raise --context, or use --speculation chain"
        )
    if any(window is not None for window in config.layer_windows):
        raise OptionError("triforce needs full attention, and this model has sliding windows: use --speculation chain")
    if num_streamed_layers:
        raise OptionError(
            f"triforce runs the target's weights between two passes, and {num_streamed_layers} of {config.num_layers} "
            "layers are streamed: raise --vram, lower --context, or use --speculation chain"
        )


def place_with_middle(
    plans: Plans, budget: DeviceBudget, resident_layers: int | None, kv: str, options: SpeculationOptions
) -> tuple[Plans, Placement, MiddlePlan | None]:
    """Place everything, with TriForce's middle level where it was asked for or pays.

    Raises:
        BudgetError: It does not fit; OptionError: the middle level cannot be here.
    """
    target = plans.target
    middle = MiddlePlan(target.config, target.dtype, options, target.context_tokens, target.batch)
    enlarged = replace(plans, middle_bytes=middle.nbytes, lent_bytes=middle.lent_bytes)
    if options.mode == "triforce":
        with_middle, placement = place(enlarged, budget, resident_layers, kv)
        check_triforce(target.config, placement.num_streamed, options.budget_tokens, target.context_tokens)
        return with_middle, placement, middle
    without, placement = place(plans, budget, resident_layers, kv)
    if options.mode == "auto" and plans.draft is not None and without.target.kv.on_host:
        try:
            with_middle, with_placement = place(enlarged, budget, resident_layers, "host")
            check_triforce(target.config, with_placement.num_streamed, options.budget_tokens, target.context_tokens)
            return with_middle, with_placement, middle
        except (BudgetError, OptionError):
            pass  # `auto` asks for nothing: the chain it is, and the runtime's description says so
    return without, placement, None


def make_proposers(
    draft: str, models: LoadedModels, middle: MiddlePlan | None, options: SpeculationOptions, budget: DeviceBudget,
    *, batch: int,
) -> list[Proposer]:  # fmt: skip
    """A proposer for every sequence of the batch.

    Args:
        draft: `none`, `ngram`, or anything else for the draft model.
        models: What was loaded.
        middle: The middle level to put on top; None for a chain.
        options: How to propose.
        budget: Of the device.
        batch: Sequences.
    """
    if middle is not None:
        return _make_triforce(models, middle, budget)
    if models.draft is None:
        return [NoProposer() if draft == "none" else NgramProposer() for _ in range(batch)]
    runner = models.draft.runner
    target_vocab, draft_vocab = models.target.runner.decoder.config.vocab_size, runner.decoder.config.vocab_size
    return [
        DraftProposer(runner, vocab_size=target_vocab, draft_vocab_size=draft_vocab, sequence=sequence)
        for sequence in range(batch)
    ]


def _make_triforce(models: LoadedModels, plan: MiddlePlan, budget: DeviceBudget) -> list[Proposer]:
    options, target, draft = plan.options, models.target, models.draft
    layers = target.runner.streamer.resident_layers()
    assert layers is not None, "refused when it was planned"
    chunks = RetrievedChunks(
        plan.config, plan.dtype, budget_tokens=options.budget_tokens, chunk_size=options.chunk_size, batch=plan.batch,
        budget=budget,
    )  # fmt: skip
    policy = _make_policy(plan, budget)
    source = target.runner.cache
    assert isinstance(source, DeviceKVCache | HostKVCache), "a target's cache is whole"
    source.observers.append(policy)
    if isinstance(source, HostKVCache) and plan.batch == 1:
        source.lender = chunks
    gamma = options.gamma_draft if draft is not None else 0
    proposers: list[Proposer] = []
    for sequence in range(plan.batch):
        window = DeviceWindow(budget.device)
        cache = RetrievalCache(source, chunks, policy, sequence=sequence)
        middle = RetrievalTarget(
            target.runner.decoder, layers, cache, target.rope, window, gamma=gamma, sequence=sequence
        )
        first = None
        if draft is not None:
            decoder = draft.runner.decoder
            first = DraftModel(
                draft.runner, vocab_size=plan.config.vocab_size, draft_vocab_size=decoder.config.vocab_size,
                sequence=sequence, window=window,
            )  # fmt: skip
        proposers.append(
            TriForceProposer(
                window,
                middle,
                first,
                gamma_draft=gamma,
                refresh_steps=options.refresh_steps,
                capacity_tokens=source.capacity_tokens,
            )
        )
    return proposers


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


def describe_speculation(draft: str, middle: MiddlePlan | None, options: SpeculationOptions) -> str:
    """One phrase: who proposes."""
    if middle is None:
        return f"proposals from {draft}" if draft != "none" else "plain decoding"
    first = "no draft" if draft in ("none", "ngram") else draft
    return (
        f"TriForce: {first}, then the target over {options.budget_tokens} retrieved tokens a head "
        f"({format_bytes(middle.nbytes)})"
    )
