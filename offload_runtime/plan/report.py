"""What is said of plans: how fast a run will be, who drafts, what would bring more and, of one that cannot be, what is
short and what would fit. Everything that is offered has been planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.errors import BudgetError, OffloadError
from offload_runtime.hardware import MachineProfile
from offload_runtime.plan import cost
from offload_runtime.plan.request import USUAL_CARD, MemoryLimits, ShortageError, limits_of
from offload_runtime.plan.search import LEAST_CONTEXT_TOKENS, plan_run
from offload_runtime.plan.sizes import Placement, RunPlan, make_plan, total
from offload_runtime.sizes import GB, format_bytes, format_bytes_up, parse_bytes
from offload_runtime.weights import DescribedModel, FoundDraft, UsualDraft, find_drafts, usual_draft
from offload_runtime.weights.neighbours import MIXES, USUAL_MIX, stored_kinds

_ACCEPTANCES = (0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
# Predictions are not exact enough to tell less than a tenth.
_LEAST_GAIN = 1.1
# A format that takes more than this of what is there now is not worth another file.
_SMALLER = 0.9
# Ways out that a refusal names, and times that a context is shortened until it fits.
_MOST_WAYS, _SHORTENINGS = 3, 3
# No machine has as much.
_MOST_BYTES = 1 << 43
# Of a machine of which nothing is known nothing is predicted: there a draft has to be so much smaller.
_SURE_SHARE = 1 / 10


# --- the whole run


@dataclass(frozen=True)
class RunForecast:
    """Predicted speed of a run at its full context, all sequences of a batch together.

    `plain` is a pass over one token of each sequence, `verify` one over a window of `proposals`: a chain, or a tree of
    `tree_nodes` no deeper than `gamma`. `usual` is a step at the usual acceptance of who proposes, what plans are
    compared by; `steps` has one for each of several acceptances and is empty where nothing proposes. `verifier_step_s`
    is None without a retrieval verifier.
    """

    context_tokens: int
    gamma: int
    tree_nodes: int
    plain: cost.PassTime
    verify: cost.PassTime
    prefill: cost.PrefillTime
    draft_step_s: float
    verifier_step_s: float | None
    plain_tok_per_s: float
    usual: cost.StepPrediction
    steps: tuple[cost.StepPrediction, ...]

    @property
    def proposals(self) -> int:
        """Proposed tokens that a pass verifies."""
        return self.tree_nodes or self.gamma


def forecast(plan: RunPlan, machine: MachineProfile) -> RunForecast:
    """Predict a planned run."""
    length, proposed, nodes = plan.target.context_tokens, cost.gamma(plan), cost.tree_nodes(plan)
    plain = cost.full_pass(plan, machine)
    return RunForecast(
        length, proposed, nodes, plain, cost.full_pass(plan, machine, rows=(nodes or proposed) + 1),
        cost.prefill_time(plan, machine, length), cost.draft_step_s(plan, machine),
        cost.verifier_step_s(plan, machine) if plan.has_verifier else None, plan.target.batch / plain.seconds,
        cost.predict_step(plan, machine),
        tuple(cost.predict_step(plan, machine, acceptance) for acceptance in (_ACCEPTANCES if proposed else ())),
    )  # fmt: skip


def best_tok_per_s(plan: RunPlan, machine: MachineProfile) -> float:
    """Tokens per second of the faster of plain decoding and the usual proposals: the controller takes that."""
    return max(cost.tok_per_s(plan, machine), plan.target.batch / cost.full_pass(plan, machine).seconds)


def undrafted_tok_per_s(plan: RunPlan, machine: MachineProfile) -> float:
    """Tokens per second of plain decoding where nothing has room for a draft; of this plan where that does not fit."""
    alone = plan
    if plan.draft is not None:
        with suppress(OffloadError):
            alone = plan_run(_undrafted(plan.request), machine, plan.limits)
    return alone.target.batch / cost.full_pass(alone, machine).seconds


def _undrafted(request: RuntimeConfig) -> RuntimeConfig:
    """The request with n-grams in the place of a draft and its options."""
    return replace(request, draft="ngram", speculation=SpeculationOptions())


def rounded(figure: float) -> str:
    """A speed with no more digits than a prediction has."""
    return f"{figure:.0f}" if figure >= 3 else f"{figure:.1f}" if figure >= 0.1 else f"{figure:.2g}"


def describe_speculation(plan: RunPlan) -> str:
    """One phrase: who proposes, and why."""
    proposer = {"ngram": "n-grams", "none": "nobody"}.get(plan.proposer, plan.proposer)
    phrase, why = f"proposals from {proposer}", f" (not TriForce: {plan.reason})" if plan.reason else ""
    if plan.has_verifier:
        budget, why = plan.request.speculation.budget_tokens, f" ({plan.reason})" if plan.reason else ""
        phrase = f"TriForce: {proposer}, then the target over {budget} retrieved tokens a head"
        phrase += f" in {format_bytes(plan.verifier_bytes)}"
    elif plan.proposer == "none":
        phrase = "plain decoding"
    trees = f"trees of up to {plan.tree_room} tokens" if plan.tree_room else ""
    return "; ".join(part for part in (phrase + why, trees, plan.draft_note) if part)


def describe_draft_cache(plan: RunPlan) -> str:
    """One phrase: what the draft keeps of the context; empty without a draft, or where that is all of it."""
    draft = plan.draft
    if draft is None:
        return ""
    held = format_bytes(total(draft.kv_parts))
    if draft.cache == "streaming":
        kept = f"{draft.options.sink_tokens} first and {draft.recent_tokens} newest tokens"
        return f"streaming draft cache of the {kept} ({held})"
    if draft.cache == "retrieval":
        return f"the draft retrieves {draft.options.budget_tokens} tokens a head of its own KV cache ({held})"
    shorter = draft.context_tokens < plan.target.context_tokens
    return f"the draft has nothing to say behind {draft.context_tokens} tokens" if shorter else ""


def describe_staging(placement: Placement) -> str:
    """One phrase: how many of the streamed layers are not page-locked; empty where all are."""
    weights, kv = len(placement.staged_layers), len(placement.staged_kv_layers)
    whose = [f"{weights} of {len(placement.streamed_layers)} streamed layers"] if weights else []
    whose += [f"the KV cache of {kv} layers"] if kv else []
    are = "are" if weights else "is"
    return f"{' and '.join(whose)} {are} staged from pageable memory" if whose else ""


# --- what could be changed


@dataclass(frozen=True)
class Change:
    """Something else that somebody could do: what, the plan that follows, and its tokens per second."""

    what: str
    plan: RunPlan
    tok_per_s: float


def _planned(what: str, request: RuntimeConfig, machine: MachineProfile, limits: MemoryLimits) -> Iterator[Change]:
    """The change, if it fits."""
    with suppress(OffloadError):
        plan = plan_run(request, machine, limits)
        yield Change(what, plan, best_tok_per_s(plan, machine))


def smaller_formats(model: DescribedModel) -> list[tuple[str, int, DescribedModel]]:
    """The usual formats that are clearly smaller than a model's own, the largest first: name, bytes, the model so."""
    dtype = model.native_dtype
    own_bytes = model.layout(dtype).total_bytes
    stored = (
        (mix, DescribedModel(model.config(), dtype, kinds=stored_kinds(model.config(), mix))) for mix in MIXES[:-1]
    )
    sized = [(mix, so.layout(dtype).total_bytes, so) for mix, so in stored]
    return [one for one in sized if one[1] < _SMALLER * own_bytes]


def with_likely_draft(request: RuntimeConfig) -> tuple[UsualDraft, RuntimeConfig] | None:
    """The draft that people would take, and the request with it; None where one drafts already, was declined, or where
    the target itself is small."""
    open_to_all = request.speculation.mode in ("auto", "chain") and request.draft == "ngram" and request.gamma is None
    draft = usual_draft(request.target) if open_to_all else None
    return None if draft is None else (draft, replace(request, draft=draft.model))


def _settings(request: RuntimeConfig) -> Iterator[tuple[str, RuntimeConfig]]:
    """Settings that take less, or bring more, as they are typed."""
    for kv in ("host", "gpu") if request.kv != "auto" else ():
        if kv != request.kv:
            yield f"--kv {kv}", replace(request, kv=kv)
    if request.max_batch not in (None, 1):
        yield "--batch 1", replace(request, max_batch=1)
    if request.proposed_by == "the draft":
        options = "" if request.speculation == SpeculationOptions() else " without the options of a draft"
        yield f"--draft ngram{options}", _undrafted(request)
    if request.resident_layers is not None:
        yield "--resident-layers auto", replace(request, resident_layers=None)
    if request.encode == "none" and not request.target.kinds:
        yield "--encode auto (the same bits)", replace(request, encode="auto")


def upgrades(plan: RunPlan, machine: MachineProfile) -> list[Change]:
    """The changes that would bring at least a tenth more tokens per second."""
    request, limits, before = plan.request, plan.limits, best_tok_per_s(plan, machine)

    def changes() -> Iterator[tuple[str, RuntimeConfig, MemoryLimits]]:
        if (likely := with_likely_draft(request)) is not None:
            draft, drafted = likely
            size = draft.model.layout(draft.model.native_dtype).total_bytes / GB
            yield f"--draft MODEL, {draft.size} {draft.example} in {USUAL_MIX} ({size:.1f} GB)", drafted, limits
        yield from ((what, changed, limits) for what, changed in _settings(request))
        if request.vram is not None:
            free = replace(request, vram=None)
            yield "without --vram", free, limits_of(machine, free)
        if plan.streamed_bytes:
            formats = smaller_formats(request.target)
            for mix, nbytes, stored in formats[:1] + formats[1:][-1:]:
                so = replace(request, target=stored, encode="none")
                yield f"the model in {mix} ({format_bytes(nbytes)}), other weights", so, limits
            half = plan.target.context_tokens // 2 // LEAST_CONTEXT_TOKENS * LEAST_CONTEXT_TOKENS
            if half:
                yield f"--context {half}", replace(request, context=half), limits
        if plan.is_staged and limits.pinned_bytes is not None:
            ram_bytes = limits.ram_bytes + machine.ram_bytes
            more = replace(limits, ram_bytes=ram_bytes, pinned_bytes=limits.pinned_bytes + machine.ram_bytes)
            yield f"{format_bytes(machine.ram_bytes)} more of RAM", request, more
        if len(limits.cards) == 1:
            what = "a second card" if machine.gpus == 1 else "both cards"
            two = replace(request, device="auto", vram=None)
            yield f"{what}, layers dealt out to both", two, replace(limits, cards=2 * limits.cards)

    planned = (change for asked in changes() for change in _planned(asked[0], asked[1], machine, asked[2]))
    return [change for change in planned if change.tok_per_s >= _LEAST_GAIN * before]


# --- what does not fit


@dataclass(frozen=True)
class Refusal:
    """A run that does not fit: why, and what would, if anything is known; `predicts` says whether the machine is known,
    so that speeds can be told."""

    problem: BudgetError
    ways: tuple[Change, ...]
    predicts: bool = True

    @property
    def short_bytes(self) -> dict[str, int]:
        """Missing bytes by the name of the memory."""
        found = self.problem
        return {found.memory: found.missing_bytes} if isinstance(found, ShortageError) else {}

    @property
    def remedies(self) -> list[str]:
        """What fits, a phrase each, with the speed to expect where the machine's figures are known."""
        speeds = (f": {rounded(way.tok_per_s)} tokens/s" if self.predicts else "" for way in self.ways)
        prefixed = (way.what if way.what.startswith("as ") else f"with {way.what}" for way in self.ways)
        return [f"{what} it fits{speed}" for what, speed in zip(prefixed, speeds, strict=True)]

    def error(self, more: str = "") -> BudgetError:
        """The problem and what would fit, in one sentence each."""
        remedies = [*([more] if more else []), *self.remedies]
        return BudgetError(f"{self.problem}. What would do: {'; '.join(remedies)}") if remedies else self.problem


def plan_or_refuse(request: RuntimeConfig, machine: MachineProfile) -> RunPlan | Refusal:
    """Plan a run, or say what is short and what would fit. Raises `OptionError` and `ContextLengthError` where the
    request makes no sense on any machine."""
    try:
        return plan_run(request, machine)
    except BudgetError as error:
        limits = limits_of(machine, request) if isinstance(error, ShortageError) else None
        return refusal(error, request, machine, limits)


def refusal(
    error: BudgetError, request: RuntimeConfig, machine: MachineProfile, limits: MemoryLimits | None
) -> Refusal:  # fmt: skip
    """A few ways out of a shortage, each from one plan or a few: smaller formats first where the machine itself is
    short of host memory, then settings, a shorter context and more of the memory."""
    predicts = machine.name != USUAL_CARD
    if limits is None or not isinstance(error, ShortageError):
        return Refusal(error, (), predicts)
    formats = _formats_that_fit(error, request, machine, limits, predicts=predicts)
    settings = (one for what, so in _settings(request) for one in _planned(what, so, machine, limits))
    others = [_shorter(error, request, machine, limits), settings, _more_memory(error, request, machine, limits)]
    too_large = error.memory == "host memory" and request.ram is None
    order = [formats, *others] if too_large else [*others, formats]
    ways = (way for kind in order for way in islice(kind, 2))
    return Refusal(error, tuple(islice(ways, _MOST_WAYS)), predicts)


def _formats_that_fit(
    error: ShortageError, request: RuntimeConfig, machine: MachineProfile, limits: MemoryLimits, *, predicts: bool
) -> Iterator[Change]:
    """Of the smaller formats the largest that spares what is short, and the smallest, each plain and with a draft."""
    formats = smaller_formats(request.target)
    most_bytes = request.target.layout(request.target.native_dtype).total_bytes - error.missing_bytes
    fitting = [one for one in formats if one[1] <= most_bytes] or formats[-1:]
    for mix, nbytes, stored in fitting[:1] + fitting[1:][-1:]:
        so = replace(request, target=stored, encode="none")
        for plain in _planned(f"as {mix} (about {nbytes / GB:.0f} GB)", so, machine, limits):
            found, likely = plain, with_likely_draft(so)
            for drafted in _planned("", likely[1], machine, limits) if likely and predicts else ():
                if drafted.tok_per_s >= _LEAST_GAIN * plain.tok_per_s:
                    assert likely is not None
                    with_draft = f"about {rounded(drafted.tok_per_s)} with a {likely[0].size} draft {likely[0].example}"
                    found = replace(plain, what=f"{plain.what}, {with_draft},")
            yield found


def _shorter(
    error: ShortageError, request: RuntimeConfig, machine: MachineProfile, limits: MemoryLimits
) -> Iterator[Change]:
    """The run with a context that is shorter by what is short, a few times over if need be."""
    target = make_plan(replace(request, max_batch=request.max_batch or 1), limits, tree_nodes=0).target
    tokens = target.context_tokens
    for _ in range(_SHORTENINGS):
        fewer = -(-error.missing_bytes // (target.batch * target.kv_token_bytes))
        tokens = (tokens - fewer) // 256 * 256
        if tokens < LEAST_CONTEXT_TOKENS:
            return
        try:
            plan = plan_run(replace(request, context=tokens), machine, limits)
        except ShortageError as short:
            error = short
        except OffloadError:
            return
        else:
            yield Change(f"--context {tokens}", plan, best_tok_per_s(plan, machine))
            return


def _more_memory(
    error: ShortageError, request: RuntimeConfig, machine: MachineProfile, limits: MemoryLimits
) -> Iterator[Change]:
    """The run with as much more of the memory as is short, on this machine or on one that has it."""
    cards, vram = limits.cards, request.vram
    least_bytes = min(card.device_bytes or 0 for card in cards)
    option, name, asked, there_bytes, allowed_bytes = {
        "device memory": ("--vram", "VRAM", vram, machine.vram_bytes, least_bytes),
        "host memory": ("--ram", "RAM", request.ram, machine.ram_bytes, limits.ram_bytes),
        "page-locked memory": ("--pinned", error.memory, request.pinned, machine.ram_bytes, limits.pinned_bytes),
    }[error.memory]
    if error.missing_bytes > _MOST_BYTES:
        return
    size = format_bytes_up((allowed_bytes or 0) + error.missing_bytes)
    enough = parse_bytes(size)
    if option == "--vram":
        larger = tuple(replace(card, device_bytes=max(card.device_bytes or 0, enough)) for card in cards)
        limits = replace(limits, cards=larger)
    elif option == "--pinned":
        limits = replace(limits, pinned_bytes=enough)
    else:  # of what is added as much is locked as there is
        locked_bytes = limits.pinned_bytes and limits.pinned_bytes + (error.missing_bytes if asked is None else 0)
        limits = replace(limits, ram_bytes=enough, pinned_bytes=locked_bytes)
    typed = isinstance(asked, int) and enough <= (there_bytes or 0)
    what = f"{option} {size.replace(' ', '')}" if typed else f"{size} of {name}"
    yield from _planned(what, request, machine, limits)


# --- who drafts


def plan_fastest_draft(
    request: RuntimeConfig, drafts: Sequence[FoundDraft], planned: Callable[[RuntimeConfig], RunPlan],
    machine: MachineProfile,
) -> RunPlan:  # fmt: skip
    """The plan of the draft that is predicted to be the fastest, or without one where none brings a tenth more, takes
    room from the context or does not fit; its `draft_note` says what was taken and why.

    Args:
        request: Of n-grams, whose plan it is else.
        drafts: That may be taken.
        planned: Plans a request.
        machine: By whose figures plans are compared.

    Raises:
        BudgetError, OptionError, ContextLengthError: As `planned`, of n-grams.
    """
    plain, known = planned(request), machine.name != USUAL_CARD
    room, before, least = (plain.target.context_tokens, plain.target.batch), best_tok_per_s(plain, machine), _LEAST_GAIN
    best = replace(plain, draft_note=_how_to_gain(request.target, drafts))
    for draft in drafts:
        with suppress(OffloadError):
            plan = planned(replace(request, draft=draft.model))
            fits = plan.target.context_tokens >= room[0] and plan.target.batch >= room[1]
            gain = best_tok_per_s(plan, machine) / before
            if fits and gain >= least and (known or draft.share <= _SURE_SHARE):
                taken = f"drafting with {draft.name}" + (f", predicted to be {gain:.1f} times as fast" if known else "")
                best, least = replace(plan, draft_note=f"{taken} (--draft ngram goes without)"), gain
    return best


def with_found_draft(
    request: RuntimeConfig, reference: str, machine: MachineProfile
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
    draft = usual_draft(target)
    if draft is None or draft.name is None:
        return ""
    return f"drafting from the text itself; {draft.name} beside the target would draft better"
