"""The runtime's private parts that measurements need, and its proposer made anew around a KV cache that is full."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from long_context.policies import chunk_policy
from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS, KVBlocks

from offload_runtime.config import SpeculationOptions
from offload_runtime.copy import CopyEngine
from offload_runtime.engine import Runtime
from offload_runtime.engine.build_proposer import make_proposer
from offload_runtime.engine.load_model import LoadedModel
from offload_runtime.engine.request import Request
from offload_runtime.engine.steps import StepRunner
from offload_runtime.errors import OptionError
from offload_runtime.kv import DeviceKVCache, HostKVCache
from offload_runtime.kv.device import block_shape
from offload_runtime.kv.multi_card import MultiCardKVCache
from offload_runtime.memory import DeviceBudget
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.plan.cost import usual_acceptance
from offload_runtime.runners import DraftModel, GuessTree, ModelRunner, likely_parents
from offload_runtime.runners.retrieval_verifier import RetrievalVerifier
from offload_runtime.runners.token_window import DeviceWindow
from offload_runtime.sampling import SlotSampling
from offload_runtime.speculation import (
    DraftProposer,
    Proposer,
    TreeDraftProposer,
    TriForceProposer,
    drafting,
)
from offload_runtime.speculation.calibration import ChildProbabilities


def target_of(runtime: Runtime) -> LoadedModel:
    """The target as it was loaded."""
    return runtime.parts.target


def draft_of(runtime: Runtime) -> LoadedModel | None:
    """The draft model, if there is one."""
    return runtime.parts.draft


def runner_of(runtime: Runtime) -> ModelRunner:
    """The target's runner."""
    return runtime.parts.target.runner


def engine_of(runtime: Runtime) -> CopyEngine:
    """What copies weights and the KV cache to the device."""
    return runtime.parts.target.shares[0].engine


def budget_of(runtime: Runtime) -> DeviceBudget:
    """The ledger of device memory."""
    return runtime.parts.budget


def proposer_of(runtime: Runtime) -> Proposer:
    """The one that the runtime was loaded with."""
    return runtime.parts.proposer


def request_for(runtime: Runtime, tokens: Sequence[int], params: GenerationParams) -> Request:
    """A request that runs in slot 0."""
    request = Request(tokens, params, runtime.tokenizer, runtime.parts.eos_token_ids)
    request.slot = 0
    return request


def steps_for(runtime: Runtime, request: Request) -> tuple[Proposer, StepRunner]:
    """Who proposes to a request, and what runs its steps."""
    steps = StepRunner(runtime.parts)
    return steps.proposer(request), steps


def slot_sampling(runtime: Runtime) -> SlotSampling:
    """How the runtime chooses the tokens of every slot."""
    return runtime.parts.sampling


def join_slots(runtime: Runtime, proposer: Proposer, params: Sequence[SamplingParams]) -> None:
    """Requests take slots 0, 1, … alone, whose tokens are chosen these ways from here on."""
    for slot in range(runtime.plan.target.batch):
        proposer.leave(slot)
    for slot, one in enumerate(params):
        slot_sampling(runtime).assign(slot, one)
        proposer.join(slot, one)


def link_peak_gbps(runtime: Runtime) -> float | None:
    """Bandwidth of back-to-back copies, measured when the runtime was loaded."""
    return target_of(runtime).link_peak_gbps


def pinned_bytes(runtime: Runtime) -> int:
    """Of weights and KV cache."""
    return target_of(runtime).pinned_bytes + runner_of(runtime).cache.pinned_bytes


def target_cache(runtime: Runtime) -> DeviceKVCache | HostKVCache:
    """The target's KV cache, of a runtime with one card."""
    cache = runner_of(runtime).cache
    assert isinstance(cache, DeviceKVCache | HostKVCache), "one card's cache"
    return cache


def bytes_written_back(runtime: Runtime) -> int:
    """Bytes of the KV cache that went to the host so far."""
    cache = runner_of(runtime).cache
    caches = cache.caches if isinstance(cache, MultiCardKVCache) else [cache]
    return sum(each.writes.engine.bytes_copied for each in caches if isinstance(each, HostKVCache))


def finish_writing_back(cache: DeviceKVCache | HostKVCache) -> None:
    """Wait until all full blocks are on the host."""
    if isinstance(cache, HostKVCache):
        cache.writes.drain()


@dataclass(frozen=True)
class Levels:
    """What a proposer consists of; `tree` is what the draft proposes to a verifier step."""

    window: DeviceWindow | None
    verifier: RetrievalVerifier | None
    draft: DraftModel | None
    tree: GuessTree | None


def levels_of(proposer: Proposer) -> Levels:
    """The levels of a proposer; none of plain decoding and n-grams."""
    proposer = drafting(proposer)
    if isinstance(proposer, TriForceProposer):
        assert isinstance(proposer._window, DeviceWindow) and isinstance(proposer.verifier, RetrievalVerifier)
        assert proposer._draft is None or isinstance(proposer._draft, DraftModel)
        return Levels(proposer._window, proposer.verifier, proposer._draft, proposer.tree)
    if isinstance(proposer, DraftProposer):
        return Levels(proposer.model.window, None, proposer.model, None)
    return Levels(None, None, None, None)


def verifier_passes(proposer: Proposer) -> int:
    """Steps of the retrieval verifier since the proposer was started, each of all sequences."""
    proposer = drafting(proposer)
    return proposer.num_steps if isinstance(proposer, TriForceProposer) else 0


def set_variant(runtime: Runtime, proposer: Proposer, *, gamma_draft: int, refresh_steps: int) -> None:
    """Let a TriForce proposer go on with another number of proposals and another interval between choices."""
    proposer = drafting(proposer)
    assert isinstance(proposer, TriForceProposer), "only a hierarchy has variants"
    if proposer._draft is not None:
        parents = likely_parents(gamma_draft, usual_acceptance(runtime.plan.draft))
        proposer.trees = [GuessTree(parents, proposer._window.device)] * len(proposer.trees)
    proposer._refresh_steps = refresh_steps


def release_proposer(runtime: Runtime) -> int:
    """Let go of the proposer that was loaded and of its device memory.

    Returns:
        How many entries the ledger is left with. What was entered behind the target's own belonged to the proposer.
    """
    runtime.parts = replace(runtime.parts, proposer=Proposer())
    reserved = budget_of(runtime).reservations
    return 1 + max(index for index, name in enumerate(reserved) if name.startswith("target: "))


def detach_policies(runtime: Runtime, num_reservations: int) -> None:
    """Let the target's cache forget who chooses chunks, and the ledger what they took."""
    cache = target_cache(runtime)
    cache.observers.clear()
    if isinstance(cache, HostKVCache):
        cache.borrow_workspace = partial(torch.empty, dtype=torch.uint8, device=runtime.device)
    reserved = budget_of(runtime).reservations
    for name in list(reserved)[num_reservations:]:
        del reserved[name]


@torch.inference_mode()
def tell_again(runtime: Runtime) -> None:
    """Tell the observers of the target's cache about every full block, as if it had only just been filled.

    A policy that is made when the cache is full already learns its keys so: on the device they are read where they
    lie, and from host memory they come over the link once, which takes a second where a prefill takes thirty.
    """
    cache = target_cache(runtime)
    finish_writing_back(cache)
    for sequence in range(len(cache._lengths)):
        full = cache.length(sequence) // BLOCK_TOKENS
        for layer in range(runtime.config.num_layers) if full and cache.observers else ():
            for kv, row, blocks in _full_blocks(runtime, cache, layer, sequence, full):
                for observer in cache.observers:
                    observer.on_blocks(layer, sequence, kv, row, blocks)


def _full_blocks(
    runtime: Runtime, cache: DeviceKVCache | HostKVCache, layer: int, sequence: int, count: int
) -> Iterator[tuple[KVBlocks, int, range]]:
    """A layer's first `count` blocks on the device: where they lie, in which batch row, and which they are."""
    if isinstance(cache, DeviceKVCache):
        yield KVBlocks(cache._data[layer]), sequence, range(count)
    elif layer in cache._resident:
        yield KVBlocks(cache._resident[layer]), sequence, range(count)
    else:
        shape = block_shape(runtime.config)
        for run in cache.blocks.runs(sequence, 0, count, cache._piece_blocks):
            host = cache.blocks.memory(layer, *run)
            piece = host.to(runtime.device, non_blocking=True).view(runtime.dtype).view(1, len(run.blocks), *shape)
            yield KVBlocks(piece, run.blocks.start), 0, run.blocks


@contextmanager
def ranks_of(runtime: Runtime) -> Iterator[list[int | None]]:
    """The rank among a draft's children of each token that the target then says, None where it is none of them: a list
    that grows while the runtime, the only one of the process meanwhile, proposes trees."""
    assert isinstance(drafting(proposer_of(runtime)), TreeDraftProposer), "loaded for trees"
    observe, ranks = ChildProbabilities.observe, []

    def observe_and_keep(self: ChildProbabilities, scores: Sequence[float], child: int | None) -> None:
        ranks.append(child)
        observe(self, scores, child)

    ChildProbabilities.observe = observe_and_keep  # type: ignore[method-assign]
    try:
        yield ranks
    finally:
        ChildProbabilities.observe = observe  # type: ignore[method-assign]


class Rig:
    """Builds proposers, one at a time; the one that the runtime was loaded with is let go of.

    A runtime for a rig is loaded with the options that take the most memory: what is built later takes its place.

    Args:
        runtime: Loaded with the draft, or with none.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._num_reservations = release_proposer(runtime)
        self._drop()

    def build(self, options: SpeculationOptions, policy: str = "retrieval") -> Proposer:
        """A proposer for all sequences; one built before must not be used any more.

        Args:
            options: `mode` is `triforce` or `chain`. The draft's own cache stays as it was loaded.
            policy: Who chooses the chunks of a hierarchy. What another than the runtime's needs has to be free.

        Raises:
            OptionError: The budget exceeds the context; BudgetError: the device memory is not there.
        """
        self._drop()
        runtime = self._runtime
        if options.mode == "triforce":
            context = target_cache(runtime).capacity_tokens
            if options.budget_tokens > context:
                raise OptionError(
                    f"a retrieval budget of {options.budget_tokens} tokens is more than the context of {context}: "
                    "lower the budget or raise --context"
                )
        request = replace(runtime.plan.request, speculation=options)
        plan = replace(runtime.plan, request=request, has_verifier=options.mode == "triforce")
        built = make_proposer(
            plan, target_of(runtime), draft_of(runtime), runtime.parts.budgets, make_policy=chunk_policy(policy)
        )
        tell_again(runtime)
        return built

    def _drop(self) -> None:
        if self._runtime.device.type == "cuda":
            torch.cuda.synchronize(self._runtime.device)  # graphs may still be running
        detach_policies(self._runtime, self._num_reservations)
        gc.collect()
        if self._runtime.device.type == "cuda":
            torch.cuda.empty_cache()
