"""What would bring more, or make a run fit: a draft, a smaller format, more memory. Each offer has been planned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

from offload_runtime.config import RuntimeConfig, SpeculationOptions, idle_options
from offload_runtime.errors import OffloadError
from offload_runtime.plan.cost import pass_time, tok_per_s
from offload_runtime.plan.forecast import RunForecast
from offload_runtime.plan.memory import RunPlan
from offload_runtime.plan.request import MachineFigures
from offload_runtime.plan.search import plan_run
from offload_runtime.sizes import GB, format_bytes
from offload_runtime.weights import DescribedModel, UsualDraft, usual_draft
from offload_runtime.weights.mixes import MIXES, stored_kinds
from offload_runtime.weights.neighbours import USUAL_MIX

# What is changed, as options of the command line, and the request that follows.
Change: TypeAlias = tuple[str, RuntimeConfig]
# Of a tenth and more: predictions are not exact enough to tell less.
LEAST_GAIN = 1.1
_LEAST_CONTEXT = 2048  # less is no way out for anybody
# A format that takes more than this of what is there now is not worth another file.
_SMALLER = 0.9


@dataclass(frozen=True)
class Upgrade:
    """What a change would bring: tokens per second before and after, at the usual acceptance."""

    what: str
    before_tok_per_s: float
    after_tok_per_s: float
    note: str = ""


@dataclass(frozen=True)
class FormatOffer:
    """A format in which a model that does not fit does: its plan, and the same with a likely draft where that helps."""

    mix: str
    nbytes: int
    plan: RunPlan
    draft: UsualDraft | None = None
    drafted: RunPlan | None = None


def best_tok_per_s(plan: RunPlan, machine: MachineFigures) -> float:
    """Tokens per second of the faster of plain decoding and the usual proposals: the controller takes that."""
    plain = pass_time(plan, machine, length_tokens=plan.target.context_tokens - 1, rows=1)
    return max(tok_per_s(plan, machine), plan.target.batch / plain.seconds)


def undrafted_tok_per_s(plan: RunPlan, machine: MachineFigures) -> float:
    """Tokens per second of plain decoding where nothing has room for a draft; of this plan where that does not fit."""
    alone = plan if plan.draft is None else plan_or_none(without_draft(plan.request)[1], machine) or plan
    plain = pass_time(alone, machine, length_tokens=alone.target.context_tokens - 1, rows=1)
    return alone.target.batch / plain.seconds


def rounded(figure: float) -> str:
    """A speed with no more digits than a prediction has."""
    return f"{figure:.0f}" if figure >= 3 else f"{figure:.1f}" if figure >= 0.1 else f"{figure:.2g}"


def plan_or_none(request: RuntimeConfig, machine: MachineFigures) -> RunPlan | None:
    """The plan of a request, or None where it does not fit."""
    try:
        return plan_run(request, machine)
    except OffloadError:
        return None


def with_likely_draft(request: RuntimeConfig) -> tuple[UsualDraft, RuntimeConfig] | None:
    """The draft that people would take, and the request with it; None where one drafts already, was declined, or where
    the target itself is small."""
    open_to_all = request.speculation.mode in ("auto", "chain") and request.draft == "ngram" and request.gamma is None
    draft = usual_draft(request.target) if open_to_all else None
    return None if draft is None else (draft, replace(request, draft=draft.model))


def smaller_formats(model: DescribedModel) -> Iterator[tuple[str, int, DescribedModel]]:
    """The usual formats that are clearly smaller than a model's own, the largest first: name, bytes, the model so."""
    dtype = model.native_dtype
    own_bytes = model.layout(dtype).total_bytes
    for mix in MIXES[:-1]:
        stored = DescribedModel(model.config(), dtype, kinds=stored_kinds(model.config(), mix))
        if (nbytes := stored.layout(dtype).total_bytes) < _SMALLER * own_bytes:
            yield mix, nbytes, stored


def formats_that_fit(request: RuntimeConfig, machine: MachineFigures) -> Iterator[FormatOffer]:
    """Of the smaller formats in which a request fits, the largest and the smallest."""
    smaller = [
        (mix, nbytes, replace(request, target=so, encode="none")) for mix, nbytes, so in smaller_formats(request.target)
    ]
    planned, numbers = cache(lambda number: plan_or_none(smaller[number][2], machine)), range(len(smaller))
    ends = [next(filter(planned, order), None) for order in (numbers, reversed(numbers))]
    for number in dict.fromkeys(number for number in ends if number is not None):
        (mix, nbytes, so), plan, draft, drafted = smaller[number], planned(number), None, None
        assert plan is not None
        if (likely := with_likely_draft(so)) is not None:
            draft, drafted = likely[0], plan_or_none(likely[1], machine)
            if drafted and tok_per_s(drafted, machine) < LEAST_GAIN * best_tok_per_s(plan, machine):
                drafted = None
        yield FormatOffer(mix, nbytes, plan, draft, drafted)


def upgrades(plan: RunPlan, current: RunForecast, machine: MachineFigures) -> tuple[Upgrade, ...]:
    """The changes that would bring at least a tenth more tokens per second, what costs nothing first."""
    before = max(current.usual.tok_per_s, current.plain_tok_per_s)
    found = list[Upgrade]()
    for what, request, better, note in _offers(plan, machine):
        if (faster := plan_or_none(request, better)) is not None:
            after = best_tok_per_s(faster, better)
            if after >= LEAST_GAIN * before:
                found.append(Upgrade(what, before, after, note))
    return tuple(found)


def _offers(plan: RunPlan, machine: MachineFigures) -> Iterable[tuple[str, RuntimeConfig, MachineFigures, str]]:
    request, limits = plan.request, plan.limits
    if (likely := with_likely_draft(request)) is not None:
        draft, drafted = likely
        size = draft.model.layout(draft.model.native_dtype).total_bytes / GB
        yield f"--draft MODEL, {draft.size} {draft.example} in {USUAL_MIX} ({size:.1f} GB)", drafted, machine, ""
    if plan.draft is not None:
        yield *without_draft(request), machine, ""
    if plan.streamed_bytes and request.encode == "none" and not request.target.kinds:
        yield "--encode auto", replace(request, encode="auto"), machine, "the same bits"
    if request.vram is not None:
        yield "without --vram", replace(request, vram=None), machine, ""
    if request.resident_layers is not None:
        yield "--resident-layers auto", replace(request, resident_layers=None), machine, ""
    if plan.streamed_bytes:
        formats = [*smaller_formats(request.target)]
        for mix, nbytes, stored in formats[:1] + formats[1:][-1:]:
            so = replace(request, target=stored, encode="none")
            yield f"the model in {mix} ({format_bytes(nbytes)})", so, machine, "other weights"
    if plan.streamed_bytes and plan.target.context_tokens >= 2 * _LEAST_CONTEXT:
        shorter = plan.target.context_tokens // 2 // _LEAST_CONTEXT * _LEAST_CONTEXT
        yield f"--context {shorter}", replace(request, context=shorter), machine, ""
    if plan.is_staged:
        ram_bytes = 2 * machine.ram_bytes
        more = replace(machine, ram_bytes=ram_bytes, pinnable_bytes=machine.lockable_bytes + machine.ram_bytes)
        yield f"{format_bytes(ram_bytes)} of RAM", replace(request, ram=None, pinned=None), more, ""
    if limits.num_cards == 1:
        what = "a second card" if machine.num_cards == 1 else "both cards"
        yield what, *second_card(request, machine), "layers dealt out to both"


def second_card(request: RuntimeConfig, machine: MachineFigures) -> tuple[RuntimeConfig, MachineFigures]:
    """The same run of one card, and its layers dealt out to two."""
    limit = request.vram
    limit = limit[0] if isinstance(limit, tuple) else limit
    return replace(request, device="auto", vram=limit), replace(machine, num_cards=2)


# --- other proposals


def without_draft(request: RuntimeConfig) -> Change:
    """The change and the request with n-grams in the place of the draft model, which TriForce does not go with."""
    change, options = "--draft ngram", request.speculation
    if options.mode == "triforce":
        change, options = f"--speculation auto {change}", replace(options, mode="auto")
    return proposing(change, request, "ngram", options)


def proposing(change: str, request: RuntimeConfig, draft: Any, options: SpeculationOptions) -> Change:
    """A change of how tokens are proposed and its request, which leaves alone what nothing would look at any more: on
    the command line that would be refused."""
    usual, gamma = SpeculationOptions(), request.gamma
    idle = idle_options(draft not in ("ngram", "none"), options.mode, options.draft_cache)
    dropped = [name for name in idle if getattr(options, name) != getattr(usual, name)]
    options = replace(options, **{name: getattr(usual, name) for name in dropped})
    if options.mode == "none" and gamma is not None:
        dropped, gamma = [*dropped, "gamma"], None
    change = " ".join([change, *(f"--{name.replace('_', '-')} auto" for name in dropped)])
    return change, replace(request, draft=draft, speculation=options, gamma=gamma)
