"""Who drafts where the user leaves it open: of what was found, what is predicted to be the fastest.

A way to draft is a `FoundDraft`; drafters that belong to a target itself would join them here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeAlias

from offload_runtime.config import RuntimeConfig
from offload_runtime.errors import OffloadError
from offload_runtime.plan.cost import USUAL_ACCEPTANCE, expected_tokens
from offload_runtime.plan.memory import RunPlan
from offload_runtime.plan.offers import LEAST_GAIN, best_tok_per_s
from offload_runtime.plan.request import MachineFigures
from offload_runtime.plan.search import plan_run
from offload_runtime.weights import DescribedModel, FoundDraft, find_drafts, usual_draft

Planned: TypeAlias = Callable[[RuntimeConfig], RunPlan]

# Of a machine of which nothing is known nothing is predicted: there a draft has to be so much smaller.
_SURE_SHARE = 1 / 10
_USUAL_GAMMA = 8


def plan_fastest_draft(
    request: RuntimeConfig, drafts: Sequence[FoundDraft], planned: Planned, machine: MachineFigures, *,
    known: bool = True,
) -> RunPlan:  # fmt: skip
    """The plan of the draft that is predicted to be the fastest, or without one where none brings a tenth more, takes
    room from the context or does not fit; its `draft_note` says what was taken and why.

    Args:
        request: Of n-grams, whose plan it is else.
        drafts: That may be taken.
        planned: Plans a request.
        machine: By whose figures plans are compared.
        known: Whether they are this machine's own.

    Raises:
        BudgetError, OptionError, ContextLengthError: As `planned`, of n-grams.
    """
    plain = planned(request)
    before, least = best_tok_per_s(plain, machine), LEAST_GAIN
    best, taken = plain, ""
    for draft in drafts:
        with suppress(OffloadError):
            plan = planned(replace(request, draft=draft.model))
            as_long = (
                plan.target.context_tokens >= plain.target.context_tokens and plan.target.batch >= plain.target.batch
            )
            gain = best_tok_per_s(plan, machine) / before
            if as_long and gain >= least and (known or draft.share <= _SURE_SHARE):
                best, least = plan, gain
                taken = f"drafting with {draft.name}" + (f", predicted to be {gain:.1f} times as fast" if known else "")
    if taken:
        return replace(best, draft_note=f"{taken} (--draft ngram goes without)")
    return replace(plain, draft_note=_how_to_gain(request.target, drafts))


def with_found_draft(
    request: RuntimeConfig, reference: str, machine: MachineFigures
) -> tuple[RuntimeConfig, str]:  # fmt: skip
    """The same request with who drafts on a machine that need not be here, of what lies beside a target of this name;
    and a sentence about it."""
    drafts = find_drafts(reference, request.target)
    try:
        plan = plan_fastest_draft(request, drafts, lambda one: plan_run(one, machine), machine)
    except OffloadError:  # which planning the request tells of
        return request, ""
    return replace(request, draft=plan.request.draft), plan.draft_note


def note_on_draft(request: RuntimeConfig) -> str:
    """What has to be said of a draft model that the user named: that nothing tells its tokens; else empty."""
    named = request.proposed_by == "the draft"
    if not named or all(model.vocabulary() is not None for model in (request.target, request.draft)):
        return ""
    return "that the draft's tokens are the target's is taken for granted: one of the two has no tokenizer.json here"


def _how_to_gain(target: DescribedModel, drafts: Sequence[FoundDraft]) -> str:
    """Why the text itself drafts, and what would draft better; empty where nothing is known to."""
    if drafts:
        names = " and ".join(draft.name for draft in drafts)
        return f"drafting from the text itself: a gain by {names} is not predicted (--draft takes one all the same)"
    if (draft := usual_draft(target)) is None or draft.name is None:
        return ""
    drafted, looked_up = (expected_tokens(USUAL_ACCEPTANCE[who], _USUAL_GAMMA) for who in ("full", "n-grams"))
    gain = f"{drafted / looked_up:.0f}x as well"
    return f"drafting from the text itself; {draft.name} beside the target would draft about {gain}"
