"""The proposer of a loaded runtime, made anew with other options around the KV cache that is already filled."""

from __future__ import annotations

import gc

import torch
from long_context.internals import (
    batch_of,
    budget_of,
    detach_policies,
    models_of,
    release_proposer,
    target_cache,
    tell_again,
)
from long_context.policies import chunk_policy

from offload_runtime.config import SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.engine.build_proposer import make_proposer
from offload_runtime.errors import OptionError
from offload_runtime.plan import VerifierPlan
from offload_runtime.speculation import Proposer


class Rig:
    """Builds proposers, one at a time; the one that the runtime was loaded with is let go of.

    A runtime for a rig is loaded with the options that take the most memory: what is built later takes its place.

    Args:
        runtime: Loaded with the draft, or with none.
        draft: `none`, or anything else for the runtime's draft model.
    """

    def __init__(self, runtime: Runtime, draft: str) -> None:
        self._runtime = runtime
        self._draft = draft
        self._batch = batch_of(runtime)
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
        runtime, middle = self._runtime, None
        if options.mode == "triforce":
            context = target_cache(runtime).capacity_tokens
            if options.budget_tokens > context:
                raise OptionError(
                    f"a retrieval budget of {options.budget_tokens} tokens is more than the context of {context}: "
                    "lower the budget or raise --context"
                )
            middle = VerifierPlan(runtime.config, runtime.dtype, options, context, self._batch)
        budget = budget_of(runtime)
        built = make_proposer(
            self._draft, models_of(runtime), middle, budget, batch=self._batch, make_policy=chunk_policy(policy)
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
