"""How fast a planned run will be on a machine, in figures and in words."""

from __future__ import annotations

from dataclasses import dataclass

from offload_runtime.plan import cost
from offload_runtime.plan.cost import PassTime, PrefillTime, StepPrediction
from offload_runtime.plan.memory import Placement, RunPlan
from offload_runtime.plan.request import MachineFigures
from offload_runtime.sizes import format_bytes

ACCEPTANCES = (0.7, 0.8, 0.85, 0.9, 0.95, 0.98)


# --- the whole run


@dataclass(frozen=True)
class RunForecast:
    """Predicted speed of a run at its full context, all sequences of a batch together.

    `plain` is a pass over one token of each sequence, `verify` one over a window of `proposals`: a chain, or a tree of
    `tree_nodes` no deeper than `gamma`. `usual` is a step at the usual acceptance of who proposes, what plans are
    compared by; `steps` has an entry for each acceptance of `ACCEPTANCES` and is empty where nothing proposes.
    `draft_acceptance` is the retrieval verifier's of the draft's proposals; it and `verifier_step_s` are None without a
    verifier.
    """

    context_tokens: int
    gamma: int
    tree_nodes: int
    plain: PassTime
    verify: PassTime
    prefill: PrefillTime
    draft_step_s: float
    verifier_step_s: float | None
    plain_tok_per_s: float
    usual: StepPrediction
    steps: tuple[StepPrediction, ...]
    draft_acceptance: float | None

    @property
    def proposals(self) -> int:
        """Proposed tokens that a pass verifies."""
        return self.tree_nodes or self.gamma


def forecast(plan: RunPlan, machine: MachineFigures) -> RunForecast:
    """Predict a planned run."""
    length, proposed, has_verifier = plan.target.context_tokens, cost.gamma(plan), plan.has_verifier
    plain = cost.pass_time(plan, machine, length_tokens=length - 1, rows=1)
    verify = cost.verification(plan, machine)
    return RunForecast(
        length, proposed, cost.tree_nodes(plan), plain, verify, cost.prefill_time(plan, machine, length),
        cost.draft_step_s(plan, machine), cost.verifier_step_s(plan, machine) if has_verifier else None,
        plan.target.batch / plain.seconds, cost.predict_step(plan, machine),
        tuple(cost.predict_step(plan, machine, acceptance) for acceptance in (ACCEPTANCES if proposed else ())),
        cost.usual_acceptance(plan.draft) if has_verifier and plan.draft is not None else None,
    )  # fmt: skip


# --- in words


_PROPOSERS = {"ngram": "n-grams"}


def describe_speculation(plan: RunPlan) -> str:
    """One phrase: who proposes, and why."""
    proposer = plan.proposer
    if not plan.has_verifier:
        why = f" (not TriForce: {plan.reason})" if plan.reason else ""
        phrase = f"proposals from {_PROPOSERS.get(proposer, proposer)}{why}" if proposer != "none" else "plain decoding"
    else:
        first = "no draft" if plan.draft is None else proposer
        phrase = (
            f"TriForce: {first}, then the target over {plan.request.speculation.budget_tokens} retrieved tokens a head "
            f"({format_bytes(plan.verifier_bytes)}){f', {plan.reason}' if plan.reason else ''}"
        )
    trees = plan.tree_note or (f"trees of up to {plan.tree_room} tokens" if plan.tree_room else "")
    return "; ".join(part for part in (phrase, trees, plan.draft_note) if part)


def describe_draft_cache(plan: RunPlan) -> str:
    """One phrase: what the draft keeps of the context; empty without a draft, or where that is all of it."""
    draft = plan.draft
    if draft is None:
        return ""
    held = format_bytes(draft.kv_bytes)
    if draft.cache == "streaming":
        kept = f"{draft.options.sink_tokens} first and {draft.recent_tokens} newest tokens"
        return f"streaming draft cache of the {kept} ({held})"
    if draft.cache == "retrieval":
        return f"the draft retrieves {draft.options.budget_tokens} tokens a head of its own KV cache ({held})"
    if draft.context_tokens < plan.target.context_tokens:
        return f"the draft has nothing to say behind {draft.context_tokens} tokens"
    return ""


def describe_staging(placement: Placement) -> str:
    """One phrase: how many of the streamed layers are not page-locked; empty where all are."""
    weights, kv = len(placement.staged_layers), len(placement.staged_kv_layers)
    whose = [f"{weights} of {len(placement.streamed_layers)} streamed layers"] if weights else []
    whose += [f"the KV cache of {kv} layers"] if kv else []
    are = "is" if not weights and kv else "are"
    return f"{' and '.join(whose)} {are} staged from pageable memory" if whose else ""
