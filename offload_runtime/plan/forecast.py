"""How fast a planned run will be on a machine, in figures and in words, and what more memory or a second card would
bring."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload_runtime.config import GB, format_bytes
from offload_runtime.errors import BudgetError, OptionError
from offload_runtime.plan.cost import (
    PassTime,
    PrefillTime,
    StepPrediction,
    draft_step_s,
    gamma,
    pass_time,
    predict_step,
    prefill_time,
    tree_nodes,
    usual_acceptance,
    verification,
    verifier_step_s,
)
from offload_runtime.plan.machine import MachineFigures
from offload_runtime.plan.memory import Placement, RunPlan
from offload_runtime.plan.request import PlanRequest
from offload_runtime.plan.search import plan_run

ACCEPTANCES = (0.7, 0.8, 0.85, 0.9, 0.95, 0.98)


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

    @property
    def usual_tok_per_s(self) -> float:
        """Tokens per second at the usual acceptance, or of plain decoding."""
        return self.usual.tok_per_s


def forecast(plan: RunPlan, machine: MachineFigures) -> RunForecast:
    """Predict a planned run."""
    length, proposed = plan.target.context_tokens, gamma(plan)
    plain = pass_time(plan, machine, length_tokens=length - 1, rows=1)
    verify = verification(plan, machine)
    steps = [predict_step(plan, machine, acceptance, verify=verify) for acceptance in ACCEPTANCES] if proposed else []
    has_verifier = plan.verifier is not None
    return RunForecast(
        length, proposed, tree_nodes(plan), plain, verify, prefill_time(plan, machine, length),
        draft_step_s(plan, machine), verifier_step_s(plan, machine) if has_verifier else None,
        plan.target.batch / plain.seconds, predict_step(plan, machine, verify=verify), tuple(steps),
        usual_acceptance(plan.draft) if has_verifier and plan.draft is not None else None,
    )  # fmt: skip


@dataclass(frozen=True)
class Upgrade:
    """What a change of the machine would bring: tokens per second before and after, at the usual acceptance."""

    what: str
    before_tok_per_s: float
    after_tok_per_s: float
    note: str = ""


def upgrades(plan: RunPlan, current: RunForecast, machine: MachineFigures) -> tuple[Upgrade, ...]:
    """One more GB of device memory, and a second card."""
    second = "if every layer's bytes were split over two cards and links: at best, tensor parallelism is not built yet"
    offers = (
        ("1 GB more device memory", *_with_vram(plan.request, machine, GB), ""),
        ("a second card", *second_card(plan.request, machine), second),
    )
    found: list[Upgrade] = []
    for what, request, better, note in offers:
        try:
            faster = forecast(plan_run(request, better), better)
        except (BudgetError, OptionError):
            continue
        found.append(Upgrade(what, current.usual_tok_per_s, faster.usual_tok_per_s, note))
    return tuple(found)


def _with_vram(request: PlanRequest, machine: MachineFigures, more_bytes: int) -> tuple[PlanRequest, MachineFigures]:
    limit = request.vram_bytes
    larger = replace(machine, vram_bytes=machine.vram_bytes + more_bytes)
    return replace(request, vram_bytes=None if limit is None else limit + more_bytes), larger


def second_card(request: PlanRequest, machine: MachineFigures) -> tuple[PlanRequest, MachineFigures]:
    """The same run where every layer's bytes are split over two cards and links, and neither waits for the other: a
    bound of what tensor parallelism could bring."""
    limit = machine.vram_bytes if request.vram_bytes is None else request.vram_bytes
    request, larger = _with_vram(request, machine, max(0, limit - machine.vram_reserved_bytes))
    twice = {dtype: 2 * tflops for dtype, tflops in machine.tflops.items()}
    return request, replace(larger, link_gbps=2 * machine.link_gbps, hbm_gbps=2 * machine.hbm_gbps, tflops=twice)


# --- in words


def describe_speculation(plan: RunPlan) -> str:
    """One phrase: who proposes, and why."""
    proposer = "none" if not plan.request.proposes else plan.request.proposer
    if plan.verifier is None:
        why = f" (not TriForce: {plan.reason})" if plan.reason else ""
        said = f"proposals from {proposer}{why}" if proposer != "none" else "plain decoding"
    else:
        first = "no draft" if plan.draft is None else proposer
        said = (
            f"TriForce: {first}, then the target over {plan.request.speculation.budget_tokens} retrieved tokens a head "
            f"({format_bytes(plan.verifier.nbytes)}){f', {plan.reason}' if plan.reason else ''}"
        )
    if plan.tree_note:
        return f"{said}; {plan.tree_note}"
    return f"{said}; trees of up to {plan.tree_room} nodes" if plan.tree_room else said


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
    """One phrase: how many of the streamed layers are not page-locked."""
    weights, kv = len(placement.staged_layers), len(placement.staged_kv_layers)
    whose = [f"{weights} of {placement.num_streamed} streamed layers"] if weights else []
    whose += [f"the KV cache of {kv} layers"] if kv else []
    are = "is" if not weights and kv else "are"
    return f"{' and '.join(whose)} {are} staged from pageable memory"
