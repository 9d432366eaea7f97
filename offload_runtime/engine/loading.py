"""Loading a runtime: everything that can be wrong is found before anything large is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from offload_runtime.config import SpeculationOptions
from offload_runtime.copy_engine import CopyEngine, make_copy_engine
from offload_runtime.engine import assembly
from offload_runtime.engine.hierarchy import describe_speculation, make_proposers, place_with_middle
from offload_runtime.engine.placing import reserve_workspace
from offload_runtime.engine.plans import make_plans
from offload_runtime.errors import BudgetError, OptionError
from offload_runtime.memory import (
    DeviceBudget,
    check_host_memory,
    current_device,
    device_memory_used_by_others,
    resolve_device,
)
from offload_runtime.speculation import NoProposer, Proposer
from offload_runtime.weights import CheckpointSource

# Proposed tokens per pass when nothing is asked for. While weights are streamed a wider window costs nothing; on a CPU
# every row does.
_DEFAULT_GAMMA = {("cuda", "ngram"): 16, ("cuda", "model"): 8, ("cuda", "triforce"): 24}
_CPU_DEFAULT_GAMMA = 7


@dataclass(frozen=True)
class LoadedRuntime:
    """What a `Runtime` works with; it closes the models and the engine and releases the budget.

    `proposers` are one per sequence of a batch, `default_gamma` is 0 where they propose nothing, and `placement` says
    in a line what lives where.
    """

    sources: assembly.Sources
    models: assembly.LoadedModels
    proposers: list[Proposer]
    budget: DeviceBudget
    engine: CopyEngine
    default_gamma: int
    placement: str


def load_runtime(
    target: str | Path | CheckpointSource, draft: str | Path | CheckpointSource, *, device: str, dtype: str,
    limit_bytes: int | None, resident_layers: int | None, context: int | str, kv: str, options: SpeculationOptions,
    batch: int, max_gamma: int, on_progress: assembly.LoadProgress | None,
) -> LoadedRuntime:  # fmt: skip
    """Open, plan, reserve and load. Arguments and errors as of `Runtime.load`.

    Args:
        limit_bytes: Most device memory to use; None for all that is free.
        resident_layers: None for as many as fit.
    """
    chosen = resolve_device(device)
    # Before anything else touches the GPU: afterwards our own context would count as somebody else's memory.
    others = device_memory_used_by_others(chosen.index) if chosen.type == "cuda" else None
    assembly.require_kernels(chosen)
    with current_device(chosen):
        kind = draft if draft in ("ngram", "none") else "the draft"
        if options.mode == "none":
            kind = draft = "none"
        sources = assembly.open_sources(target, None if kind == draft else draft)
        plans = make_plans(
            sources.target, sources.draft, dtype, chosen, context=context, window=max_gamma + 1, kv=kv,
            options=options, batch=batch,
        )  # fmt: skip
        budget = DeviceBudget(chosen, limit_bytes, other_bytes=others)
        plans, placement, middle = place_with_middle(plans, budget, resident_layers, kv, options)
        reserve_workspace(plans, budget)
        check_host_memory(plans.host_bytes)
        engine = make_copy_engine(chosen)
        with _given_back_on_failure(engine, budget):
            models = assembly.load_models(sources, plans, placement, budget, engine, on_progress=on_progress)
            proposers = make_proposers(kind, models, middle, options, budget, batch=batch)
            source = "triforce" if middle is not None else "ngram" if models.draft is None else "model"
            gamma = _DEFAULT_GAMMA.get((chosen.type, source), _CPU_DEFAULT_GAMMA)
            return LoadedRuntime(
                sources, models, proposers, budget, engine,
                default_gamma=0 if isinstance(proposers[0], NoProposer) else min(gamma, max_gamma),
                placement=assembly.describe_placement(models.target, plans, budget)
                + f"; {describe_speculation(kind, middle, options)}",
            )  # fmt: skip


@contextmanager
def _given_back_on_failure(engine: CopyEngine, budget: DeviceBudget) -> Iterator[None]:
    """Stop the copies and give the device memory back when loading fails."""
    try:
        yield
    except BaseException as error:
        engine.close()
        budget.release()
        if isinstance(error, torch.OutOfMemoryError):
            raise BudgetError(
                f"the device memory allowed did not suffice ({error}): raise --vram or lower --context"
            ) from error
        raise


def parse_resident_layers(asked: int | str) -> int | None:
    """A number of layers; None for `auto`."""
    if asked == "auto":
        return None
    try:
        return int(asked)
    except (TypeError, ValueError):
        raise OptionError(f"resident_layers must be auto or a number of layers, not {asked!r}") from None
