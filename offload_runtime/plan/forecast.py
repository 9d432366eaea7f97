"""How fast a planned run will be on a machine, in figures and in words: steps, the link between them, the whole run.

A step proposes, then verifies what was proposed in one pass; `step_time` is what the search of a plan, its forecast,
the controller of windows and the statistics of a run all go by.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from offload_runtime.config import format_bytes
from offload_runtime.plan.cost import (
    USUAL_ACCEPTANCE,
    PassTime,
    PrefillTime,
    draft_step_s,
    drafting_s,
    expected_tokens,
    expected_tree_tokens,
    gamma,
    pass_time,
    prefill_time,
    tree_nodes,
    usual_acceptance,
    verifier_step_s,
)
from offload_runtime.plan.memory import Placement, RunPlan
from offload_runtime.plan.request import MachineFigures

ACCEPTANCES = (0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
# Of the time in which the rings fill up behind a pass, what goes by until its tokens are known and, from the launch of
# the next one, until a slot is free again: 10 ms with 200 tokens in a window, 18 with 1000 (13B shape on an H200).
_BETWEEN_S = 0.015


# --- a step: proposals and the pass that verifies them


def step_time(verify: PassTime, drafting_s: float) -> float:
    """Seconds of a step that proposes for `drafting_s`, some of which pass while the rings fill."""
    copies_s = verify.copies_s + drafting_s - hidden_s(verify, drafting_s)
    return max(copies_s, verify.busy_s + drafting_s)


def hidden_s(verify: PassTime, drafting_s: float) -> float:
    """Of `drafting_s`, what delays no copy."""
    return min(drafting_s, verify.lookahead_s)


@dataclass(frozen=True)
class StepPrediction:
    """A step at some acceptance: `tokens` of each sequence, `tok_per_s` of all of them.

    `hidden_s` of `drafting_s` pass while the ring fills. `bound_by` is `drafting` where the rest of it takes longer
    than the pass.
    """

    acceptance: float
    tokens: float
    drafting_s: float
    hidden_s: float
    seconds: float
    tok_per_s: float
    bound_by: str


def verification(plan: RunPlan, machine: MachineFigures) -> PassTime:
    """A pass over a window of proposals, at the full context."""
    window = tree_nodes(plan) or gamma(plan)
    return pass_time(plan, machine, length_tokens=plan.target.context_tokens - window - 1, rows=window + 1)


def predict_step(
    plan: RunPlan, machine: MachineFigures, acceptance: float | None = None, *, verify: PassTime | None = None
) -> StepPrediction:
    """How fast tokens come at the full context, all sequences of a batch together.

    Args:
        plan: What proposes, and where everything lives.
        machine: Where it runs.
        acceptance: By the target, of each proposal; None for what is usual of who proposes.
        verify: What `verification` says, if it is known already.
    """
    if acceptance is None:
        acceptance = usual_acceptance(plan.draft) if plan.verifier is None else USUAL_ACCEPTANCE["verifier"]
    verify = verification(plan, machine) if verify is None else verify
    nodes, depth = tree_nodes(plan), gamma(plan)
    tokens = expected_tree_tokens(acceptance, nodes, depth) if nodes else expected_tokens(acceptance, depth)
    proposing_s = drafting_s(plan, machine, gamma=depth, tree_nodes=nodes)
    seconds = step_time(verify, proposing_s)
    bound_by = "drafting" if seconds - verify.seconds > verify.seconds else verify.bound_by
    return StepPrediction(
        acceptance, tokens, proposing_s, hidden_s(verify, proposing_s), seconds,
        plan.target.batch * tokens / seconds, bound_by,
    )  # fmt: skip


def tok_per_s(plan: RunPlan, machine: MachineFigures) -> float:
    """Tokens per second at the usual acceptance: what plans are compared by.

    Who proposes decides as much as the bytes of a pass do, since every proposal that is accepted saves one.
    """
    return predict_step(plan, machine).tok_per_s


# --- the link between passes


def link_times(plan: RunPlan, machine: MachineFigures, *, widest: int = 0) -> tuple[float, float, int]:
    """How long the link is busy with passes over a streamed target, and behind them.

    Args:
        plan: What lives where.
        machine: Where.
        widest: Rows of the widest window, if it is wider than what is usual.

    Returns:
        Seconds behind a pass in which drafting delays nothing, as the link brings what the next one begins with;
        seconds that the link takes for a pass at the full context; rows of a sequence in a pass up to which nothing
        else takes longer, 0 where something always does.
    """
    length = plan.target.context_tokens - 1

    def passed(rows: int) -> PassTime:
        return pass_time(plan, machine, length_tokens=length - rows + 1, rows=rows)

    def slack_s(rows: int) -> float:
        time = passed(rows)
        return time.busy_s - time.copies_s

    one = passed(1)
    widest = max(widest, tree_nodes(plan) + 1, gamma(plan) + 1)
    # Windows of sizes like these are what is proposed.
    rows = [*range(1, min(widest, 32)), *range(32, widest, 32), widest]
    bound = bisect_right(rows, 0.0, key=slack_s)
    return max(0.0, one.lookahead_s - _BETWEEN_S), one.copies_s, rows[bound - 1] if bound else 0


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


# --- in words


def describe_speculation(plan: RunPlan) -> str:
    """One phrase: who proposes, and why."""
    proposer = plan.proposer
    if plan.verifier is None:
        why = f" (not TriForce: {plan.reason})" if plan.reason else ""
        phrase = f"proposals from {proposer}{why}" if proposer != "none" else "plain decoding"
    else:
        first = "no draft" if plan.draft is None else proposer
        phrase = (
            f"TriForce: {first}, then the target over {plan.request.speculation.budget_tokens} retrieved tokens a head "
            f"({format_bytes(plan.verifier.nbytes)}){f', {plan.reason}' if plan.reason else ''}"
        )
    if plan.tree_note:
        return f"{phrase}; {plan.tree_note}"
    return f"{phrase}; trees of up to {plan.tree_room} nodes" if plan.tree_room else phrase


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
