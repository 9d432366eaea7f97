"""What is said of plans: how fast a run will be, who drafts, what would bring more and, of one that cannot be, what is
short and what would fit. Everything that is offered has been planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.errors import BudgetError, OffloadError
from offload_runtime.hardware import MachineProfile
from offload_runtime.models.registry import has_gguf
from offload_runtime.plan import cost
from offload_runtime.plan.model import Placement
from offload_runtime.plan.search import LEAST_CONTEXT_TOKENS, plan_run
from offload_runtime.plan.sizes import USUAL_CARD, MemoryLimits, RunPlan, ShortageError, limits_of, make_plan
from offload_runtime.sizes import GB, counted, format_bytes, format_bytes_up, parse_bytes
from offload_runtime.weights.checkpoint import DescribedModel
from offload_runtime.weights.neighbours import MIXES, FoundDraft, find_drafts, stored_kinds, usual_draft

_ACCEPTANCES = (0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
_HITS = (0.5, 0.65, 0.8, 0.95)
# Predictions are not exact enough to tell less than a tenth.
_LEAST_GAIN = 1.1
# A format that takes more than this of what is there now is not worth another file.
_SMALLER = 0.9
_MOST_REMEDIES = 4  # ways out that a refusal names
# No machine has as much.
_MOST_BYTES = 1 << 43
# Models of these classes are published with MTP layers, which many copies leave out.
_WITH_MTP = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM", "Glm4MoeForCausalLM")
# Of a machine of which nothing is known nothing is predicted: there a draft has to be so much smaller.
_SURE_SHARE = 1 / 10


# --- the whole run


@dataclass(frozen=True)
class RunForecast:
    """Predicted speed of a run at its full context, all sequences of a batch together.

    `plain` is a pass over one token of each sequence, `verify` one over a window of `proposals`: a chain, or a tree of
    `tree_nodes` no deeper than `gamma`. `usual` is a step at the usual acceptance of who proposes, what plans are
    compared by; `steps` has one for each of several acceptances and is empty where nothing proposes. `verifier_step_s`
    is None without a retrieval verifier. `plain_tok_per_s_by_hits` has plain decoding for shares of a token's experts
    that are on the card, and is empty where all are.
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
    plain_tok_per_s_by_hits: dict[float, float]

    @property
    def proposals(self) -> int:
        """Proposed tokens that a pass verifies."""
        return self.tree_nodes or self.gamma


def forecast(plan: RunPlan, machine: MachineProfile) -> RunForecast:
    """Predict a planned run."""
    length, proposed, nodes = plan.target.context_tokens, cost.gamma(plan), cost.tree_nodes(plan)
    plain, batch = cost.full_pass(plan, machine), plan.target.batch
    by_hits = dict[float, float]()
    if plain.demand_s:
        missing_s = plain.demand_s / (1 - plan.target.expected_hits)  # where none are found
        by_hits = {hits: batch / (plain.seconds - plain.demand_s + missing_s * (1 - hits)) for hits in _HITS}
    return RunForecast(
        length, proposed, nodes, plain, cost.full_pass(plan, machine, rows=(nodes or proposed) + 1),
        cost.prefill_time(plan, machine, length), cost.draft_step_s(plan, machine),
        cost.verifier_step_s(plan, machine) if plan.has_verifier else None, batch / plain.seconds,
        cost.predict_step(plan, machine),
        tuple(cost.predict_step(plan, machine, acceptance) for acceptance in (_ACCEPTANCES if proposed else ())),
        by_hits,
    )  # fmt: skip


def best_tok_per_s(plan: RunPlan, machine: MachineProfile) -> float:
    """Return the tokens per second of the faster of plain decoding and the usual proposals: the controller takes
    that."""
    return max(cost.tok_per_s(plan, machine), plan.target.batch / cost.full_pass(plan, machine).seconds)


def undrafted_tok_per_s(plan: RunPlan, machine: MachineProfile) -> float:
    """Return the tokens per second of plain decoding where nothing has room for a draft; of this plan where that does
    not fit."""
    alone = plan
    if plan.draft is not None:
        with suppress(OffloadError):
            alone = plan_run(_undrafted(plan.request), machine, plan.limits)
    return alone.target.batch / cost.full_pass(alone, machine).seconds


def _undrafted(request: RuntimeConfig) -> RuntimeConfig:
    """The request with n-grams in the place of a draft and its options."""
    return replace(request, draft="ngram", speculation=SpeculationOptions())


def rounded(figure: float) -> str:
    """Return a speed with no more digits than a prediction has."""
    return f"{figure:.0f}" if figure >= 3 else f"{figure:.1f}" if figure >= 0.1 else f"{figure:.2g}"


# --- what a plan is, for people


def _speculation_in_words(plan: RunPlan) -> str:
    """One phrase: who proposes, and why."""
    drafter = {"ngram": "n-grams", "none": "nobody"}.get(plan.drafter, plan.drafter_in_words)
    size = f" ({format_bytes(plan.draft_weight_bytes)})" if plan.draft is not None and plan.draft.is_copy else ""
    phrase, why = f"proposals from {drafter}{size}", f" (not TriForce: {plan.reason})" if plan.reason else ""
    if plan.has_verifier:
        budget, why = plan.request.speculation.budget_tokens, f" ({plan.reason})" if plan.reason else ""
        phrase = f"TriForce: {drafter}, then the target over {budget} retrieved tokens a head"
        phrase += f" in {format_bytes(plan.verifier_bytes)}"
    elif plan.drafter == "none":
        phrase = "plain decoding"
    trees = f"trees of up to {plan.tree_room} tokens" if plan.tree_room else ""
    return "; ".join(part for part in (phrase + why, trees, plan.draft_note) if part)


def _draft_cache_in_words(plan: RunPlan) -> str:
    """One phrase: what the draft keeps of the context; empty without a draft, or where that is all of it."""
    draft = plan.draft
    if draft is None:
        return ""
    held = format_bytes(draft.kv_parts.total())
    if draft.cache == "streaming":
        kept = f"{draft.options.sink_tokens} first and {draft.recent_tokens} newest tokens"
        return f"streaming draft cache of the {kept} ({held})"
    if draft.cache == "retrieval":
        return f"the draft retrieves {draft.options.budget_tokens} tokens a head of its own KV cache ({held})"
    shorter = draft.context_tokens < plan.target.context_tokens
    return f"the draft has nothing to say behind {draft.context_tokens} tokens" if shorter else ""


def _staging_in_words(placement: Placement) -> str:
    """One phrase: how many of the streamed layers are not page-locked; empty where all are."""
    weights, kv = len(placement.staged_layers), len(placement.staged_kv_layers)
    whose = [f"{weights} of {len(placement.streamed_layers)} streamed layers"] if weights else []
    whose += [f"the KV cache of {kv} layers"] if kv else []
    are = "are" if weights else "is"
    return f"{' and '.join(whose)} {are} staged from pageable memory" if whose else ""


def describe_plan(plan: RunPlan) -> list[str]:
    """Phrases: what is resident, what is streamed and how, what is kept of the context, and who drafts."""
    placement, target = plan.placement, plan.target
    where = f"{len(placement.resident_layers)} of {counted(len(placement.layers), 'layer')} resident"
    if streamed := placement.streamed_layers:
        size = format_bytes(target.bytes_over_link(streamed))
        where += f", {len(streamed)} streamed ({size} a pass) through {placement.num_buffers} buffers"
    if plan.num_cards > 1:
        dealt = " and ".join(str(len(one.layers)) for one in target.placements)
        where += f", dealt out to {plan.num_cards} cards ({dealt})"
    kv = f"KV cache {format_bytes(target.whole_kv_bytes)} for {target.batch} x {target.context_tokens} tokens"
    if target.on_host:
        kept = f" but for {len(placement.resident_kv_layers)} layers" if placement.resident_kv_layers else ""
        kv += f", in host memory{kept} as it grows, {format_bytes(target.kv_parts.total())} of it on the device"
    drafts = _draft_cache_in_words(plan), _speculation_in_words(plan)
    return [one for one in (where, target.experts_in_words, _staging_in_words(placement), kv, *drafts) if one]


# --- what could be changed


@dataclass(frozen=True)
class Change:
    """Is something else that somebody could do: what, the plan that follows, and its tokens per second."""

    what: str
    plan: RunPlan
    tok_per_s: float


def _fitting(
    asked: Iterable[tuple[str, RuntimeConfig]], machine: MachineProfile, limits: MemoryLimits | None
) -> Iterator[Change]:
    """The changes of which there is a plan, each made when it is asked for; within the machine's limits by default."""
    for what, request in asked:
        with suppress(OffloadError):
            plan = plan_run(request, machine, limits)
            yield Change(what, plan, best_tok_per_s(plan, machine))


def smaller_formats(model: DescribedModel) -> list[tuple[str, int, DescribedModel]]:
    """Return the usual formats that are clearly smaller than a model's own, the largest first: name, bytes, the model
    so. There are none of families that llama.cpp does not have."""
    dtype, config = model.native_dtype, model.config()
    mixes = MIXES[:-1] if has_gguf(config.architecture) else ()
    stored = ((mix, DescribedModel(config, dtype, kinds=stored_kinds(config, mix))) for mix in mixes)
    sized = [(mix, so.layout(dtype).total_bytes, so) for mix, so in stored]
    return [one for one in sized if one[1] < _SMALLER * model.layout(dtype).total_bytes]


def _with_likely_draft(what: str, request: RuntimeConfig) -> Iterator[tuple[str, RuntimeConfig]]:
    """The request with the draft that people would take; none where one drafts already, was declined, or where the
    target itself is small."""
    is_open = request.speculation.mode in ("auto", "chain") and request.draft == "ngram" and request.gamma is None
    if is_open and (draft := usual_draft(request.target)) is not None:
        nbytes = draft.model.layout(draft.model.native_dtype).total_bytes
        yield f"{what}, {draft.size} {draft.example} ({nbytes / GB:.1f} GB)", replace(request, draft=draft.model)


def _with_copies(request: RuntimeConfig) -> Iterator[tuple[str, RuntimeConfig]]:
    """The request with copies of the streamed layers that draft; none where something else was asked for."""
    is_open = request.speculation.mode in ("auto", "chain") and request.draft == "ngram" and request.gamma is None
    if is_open and request.speculation == SpeculationOptions(request.speculation.mode):
        yield "--draft self, if as much is accepted as is assumed", replace(request, draft="self")


def _formats(request: RuntimeConfig, missing_bytes: int = 0) -> Iterator[tuple[str, RuntimeConfig]]:
    """The request with the largest of the target's smaller formats that spares what is missing, and with the smallest,
    by itself and with a likely draft."""
    formats = smaller_formats(request.target)
    most_bytes = request.target.layout(request.target.native_dtype).total_bytes - missing_bytes
    fitting = [one for one in formats if one[1] <= most_bytes] or formats[-1:]
    for mix, nbytes, stored in fitting[:1] + fitting[1:][-1:]:
        so = replace(request, target=stored, encode="none")
        yield f"as {mix} (about {nbytes / GB:.0f} GB)", so
        if stored is formats[-1][2]:
            yield from _with_likely_draft(f"as {mix} with a draft", so)


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
    """Return the changes that would bring at least a tenth more tokens per second."""
    request, limits = plan.request, plan.limits
    asked = [*_with_likely_draft("--draft MODEL", request), *_settings(request)]
    half = plan.target.context_tokens // 2 // LEAST_CONTEXT_TOKENS * LEAST_CONTEXT_TOKENS
    if plan.streamed_bytes:
        asked += [
            *_with_copies(request),
            *_formats(request),
            *([(f"--context {half}", replace(request, context=half))] if half else []),
        ]
    found = [*_fitting(asked, machine, limits)]
    if request.vram is not None:
        found += _fitting([("without --vram", replace(request, vram=None))], machine, None)
    if len(limits.cards) == 1:
        which = "a second card" if machine.gpus == 1 else "both cards"
        two = replace(request, device="auto", vram=None), replace(limits, cards=2 * limits.cards)
        found += _fitting([(f"{which}, layers dealt out to both", two[0])], machine, two[1])
    return [one for one in found if one.tok_per_s >= _LEAST_GAIN * best_tok_per_s(plan, machine)]


# --- what does not fit


@dataclass(frozen=True)
class Refusal:
    """A run that does not fit: why, and what would, if anything is known; `predicts` says whether the machine is known,
    so that speeds can be told."""

    problem: BudgetError
    changes: tuple[Change, ...]
    predicts: bool = True

    @property
    def short_bytes(self) -> dict[str, int]:
        """Missing bytes by the name of the memory."""
        found = self.problem
        return {found.memory: found.missing_bytes} if isinstance(found, ShortageError) else {}

    @property
    def remedies(self) -> list[str]:
        """Return what fits, a phrase each, with the speed to expect where the machine's figures are known."""
        found = ((change.what, change.tok_per_s) for change in self.changes)
        each = ((what if what.startswith("as ") else f"with {what}", speed) for what, speed in found)
        return [f"{what} it fits" + (f": {rounded(speed)} tokens/s" if self.predicts else "") for what, speed in each]

    def error(self, more: str = "") -> BudgetError:
        """Return the problem and what would do, in one sentence each; `more` is something else that would."""
        remedies = [*([more] if more else []), *self.remedies]
        return BudgetError(f"{self.problem}. What would do: {'; '.join(remedies)}") if remedies else self.problem


def plan_or_refuse(request: RuntimeConfig, machine: MachineProfile) -> RunPlan | Refusal:
    """Plan a run, or say what is short and what would fit. Raises `OptionError` and `ContextLengthError` where the
    request makes no sense on any machine."""
    try:
        return plan_run(request, machine)
    except ShortageError as error:
        return refusal(error, request, machine, limits_of(machine, request))
    except BudgetError as error:  # more is allowed than there is
        return Refusal(error, ())


def refusal(error: BudgetError, request: RuntimeConfig, machine: MachineProfile, limits: MemoryLimits) -> Refusal:
    """Return a few changes that mend a shortage, each from one plan or a few: smaller formats first where the machine
    is short of host memory, then a shorter context, settings, and more of the memory."""
    predicts = machine.name != USUAL_CARD
    if not isinstance(error, ShortageError):
        return Refusal(error, (), predicts)
    formats = _fitting(_formats(request, error.missing_bytes), machine, limits)
    shorter = islice(_fitting(_shorter(error, request, limits), machine, limits), 1)
    others = [shorter, _fitting(_settings(request), machine, limits), _more_memory(error, request, machine, limits)]
    too_large = error.memory == "host memory" and request.ram is None
    order = [formats, *others] if too_large else [*others, formats]
    found = (change for kind in order for change in islice(kind, 3 if kind is formats else 2))
    return Refusal(error, tuple(islice(found, _MOST_REMEDIES)), predicts)


def _shorter(error: ShortageError, request: RuntimeConfig, limits: MemoryLimits) -> Iterator[tuple[str, RuntimeConfig]]:
    """The request with a half of its context, a quarter and an eighth, as far as that could spare what is short."""
    plan = make_plan(replace(request, max_batch=request.max_batch or 1), limits, tree_nodes=0)
    context, token_bytes = plan.target.context_tokens, sum(model.token_bytes for model in plan.models)
    for share in (2, 4, 8):
        tokens = context // share // BLOCK_TOKENS * BLOCK_TOKENS
        if tokens >= LEAST_CONTEXT_TOKENS and (context - tokens) * token_bytes >= error.missing_bytes:
            yield f"--context {tokens}", replace(request, context=tokens)


def _more_memory(
    error: ShortageError, request: RuntimeConfig, machine: MachineProfile, limits: MemoryLimits
) -> Iterator[Change]:
    """The run with as much more of the memory as is short, on this machine or on one that has it."""
    missing_bytes, locked_bytes = error.missing_bytes, limits.pinned_bytes
    option, name, allowed_bytes, there_bytes = {
        "device memory": ("vram", "VRAM", min(one.device_bytes or 0 for one in limits.cards), machine.vram_bytes or 0),
        "host memory": ("ram", "RAM", limits.ram_bytes, machine.ram_bytes),
        "page-locked memory": ("pinned", error.memory, locked_bytes or 0, machine.ram_bytes),
    }[error.memory]
    if missing_bytes > _MOST_BYTES:
        return
    size = format_bytes_up(allowed_bytes + missing_bytes)
    enough, asked = parse_bytes(size), getattr(request, option)
    if locked_bytes is not None and request.pinned is None:  # of what is added as much is locked
        locked_bytes += missing_bytes
    more = {
        "vram": replace(
            limits, cards=tuple(replace(one, device_bytes=max(one.device_bytes or 0, enough)) for one in limits.cards)
        ),
        "ram": replace(limits, ram_bytes=enough, pinned_bytes=locked_bytes),
        "pinned": replace(limits, pinned_bytes=enough),
    }[option]
    typed = isinstance(asked, int) and enough <= there_bytes
    what = f"--{option} {size.replace(' ', '')}" if typed else f"{size} of {name}"
    yield from _fitting([(what, request)], machine, more)


# --- who drafts


def plan_fastest_draft(
    request: RuntimeConfig, drafts: Sequence[FoundDraft], planned: Callable[[RuntimeConfig], RunPlan],
    machine: MachineProfile,
) -> RunPlan:  # fmt: skip
    """Return the plan of the draft that is predicted to be the fastest, or without one where none brings a tenth more,
    takes room from the context or does not fit; its `draft_note` says what was taken and why. Where no draft is taken,
    copies of streamed layers may be, if what is left of these is all that passes bring.

    Args:
        request: Asks for n-grams, whose plan it is else.
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
            sure = known or draft.share <= _SURE_SHARE or draft.model.config().is_head
            if fits and gain >= least and sure:
                taken = f"drafting with {draft.name}" + (f", predicted to be {gain:.1f} times as fast" if known else "")
                best, least = replace(plan, draft_note=f"{taken} (--draft ngram goes without)"), gain
                if draft.model.config().is_head:
                    break  # it was trained for the target
    for _, asked in _with_copies(request) if best.draft is None and not plain.on_cpu else ():
        with suppress(OffloadError):
            plan = planned(asked)
            fits = plan.target.context_tokens >= room[0] and plan.target.batch >= room[1]
            gain, fewer = best_tok_per_s(plan, machine) / before, plan.streamed_bytes < plain.streamed_bytes
            if fits and plan.target.rest is not None and gain >= _LEAST_GAIN and (known or fewer):
                taken = f"drafting with {plan.drafter_in_words}"
                taken += f", predicted to be {gain:.1f} times as fast if as much is accepted as is assumed" * known
                best = replace(plan, draft_note=f"{taken} (--draft ngram goes without)")
    return best


def with_found_draft(request: RuntimeConfig, reference: str, machine: MachineProfile) -> tuple[RuntimeConfig, str]:
    """Return the same request with who drafts on a machine that need not be here, of what lies beside a target of this
    name; and a sentence about it."""
    drafts = find_drafts(reference, request.target)
    try:
        plan = plan_fastest_draft(request, drafts, lambda one: plan_run(one, machine), machine)
    except OffloadError:  # which planning the request tells of
        return request, ""
    return replace(request, draft=plan.request.draft), plan.draft_note


def note_on_draft(request: RuntimeConfig) -> str:
    """Return what has to be said of a draft model that the user named: that nothing tells its tokens; else empty."""
    named = request.proposed_by == "the draft" and not (request.drafts_itself or request.draft.config().is_head)
    if not named or all(model.vocabulary() is not None for model in (request.target, request.draft)):
        return ""
    return "that the draft's tokens are the target's is taken for granted: one of the two has no tokenizer.json here"


def _how_to_gain(target: DescribedModel, drafts: Sequence[FoundDraft]) -> str:
    """Why the text itself drafts, and what would draft better; empty where nothing is known to."""
    if drafts:
        names = " and ".join(draft.name for draft in drafts)
        return f"drafting from the text itself: a gain by {names} is not predicted (--draft takes one all the same)"
    if target.config().architecture in _WITH_MTP:
        return "drafting from the text itself; a copy of the model that has its MTP layers would draft better"
    draft = usual_draft(target)
    if draft is None or draft.name is None:
        return ""
    return f"drafting from the text itself; {draft.name} beside the target would draft better"
