"""The plan of a run: of every way to place it that fits, the one that is predicted to be the fastest.

Searched are the levels of speculation, the draft's cache, where keys, values and weights go, whether those of quantised
files are kept as they are stored, room for trees where nobody said how much, and the context where host memory has to
hold it. A plan and a run search here alike. Each way is
as fast with more device memory or faster, and none is lost by it, so that the fastest of them is too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.config import Encode, RuntimeConfig
from offload_runtime.errors import BudgetError, OffloadError, OptionError
from offload_runtime.kv import kv_cache_bytes
from offload_runtime.plan.cost import tok_per_s
from offload_runtime.plan.memory import RunPlan, all_resident, listed, make_plan
from offload_runtime.plan.placement import place_kv_on_host, place_layers
from offload_runtime.plan.request import (
    TREE_ROOMS,
    MachineFigures,
    MemoryLimits,
    device_type_of,
    limits_of,
    resolve_dtype,
)
from offload_runtime.plan.staging import least_pinned_bytes, stage
from offload_runtime.sizes import format_bytes, format_bytes_up
from offload_runtime.weights import DescribedModel

# Proposals of n-grams for which there may be room: texts that repeat themselves, an edited file above all, go on for so
# long, and nothing else does.
_COPIED = 256
# Sequences at once where nobody said how many: more of them make the passes of each longer.
_MOST_SEQUENCES = 16
# Less is no context that anybody left it to the runtime to choose.
_LEAST_CONTEXT_TOKENS = 2048


def plan_run(request: RuntimeConfig, machine: MachineFigures) -> RunPlan:
    """Place everything on a machine that need not be here.

    Raises:
        BudgetError: Device, host or page-locked memory is short; says of what and by how much.
        OptionError, ContextLengthError: As `Runtime.load`.
    """
    limits = limits_of(machine, request)

    def planned(count: int) -> RunPlan:
        return find_plan(request, machine, replace(limits, further_cards=limits.further_cards[: count - 1]))

    is_open = request.device == "auto"
    plan = as_many_cards_as_help(planned, limits.num_cards, machine) if is_open else planned(limits.num_cards)
    check_host_memory(plan)
    return plan


def as_many_cards_as_help(planned: Callable[[int], RunPlan], num_cards: int, machine: MachineFigures) -> RunPlan:
    """What is `planned` for the first card, or for so many as are predicted to be faster or are all that host memory
    has room for. Where some hold everything the next one is not asked; where it refuses, it is not needed.

    Raises:
        BudgetError, OptionError: As of a plan of one card or, where there cannot be one, of all.
    """
    plans, refused = list[RunPlan](), list[OffloadError]()
    for count in range(1, num_cards + 1):
        try:
            plans.append(planned(count))
        except OffloadError as error:
            if count == 1 and not isinstance(error, BudgetError):
                raise
            refused.append(error)
        if plans and not plans[-1].streamed_bytes:
            break
    if not plans:
        raise refused[-1]
    return max(plans, key=lambda plan: (-plan.short_of_host_bytes, tok_per_s(plan, machine)))


def find_plan(request: RuntimeConfig, machine: MachineFigures, limits: MemoryLimits) -> RunPlan:
    """The fastest plan within device and page-locked memory, and within host memory if there is one; of the context
    asked for, or where it is None of the longest one that host memory has room for. Errors as of `plan_run`."""
    if request.max_batch is None:
        return _find_widest_plan(request, machine, limits)
    plans, refused = list[RunPlan](), list[OffloadError]()
    for one in _storing(request):
        try:
            plans.append(_with_context(one, machine, limits))
        except (BudgetError, OptionError) as error:  # of the latter, that there is nothing to code
            refused.append(error)
    if not plans:
        raise next((error for error in refused if isinstance(error, BudgetError)), refused[0])
    best = max(
        plans, key=lambda plan: (-plan.short_of_host_bytes, plan.target.context_tokens, tok_per_s(plan, machine))
    )
    return replace(best, request=request)


def _find_widest_plan(request: RuntimeConfig, machine: MachineFigures, limits: MemoryLimits) -> RunPlan:
    """The plan of as many sequences as fit beside one another, up to 16, without streaming more than one does: what
    every pass brings is then shared by all of them. Each has the context that one alone has. Errors as of one."""
    widest = find_plan(replace(request, max_batch=1), machine, limits)
    context, streamed_bytes = widest.target.context_tokens, widest.streamed_bytes
    fewest, most = 2, _MOST_SEQUENCES
    while fewest <= most:
        count = (fewest + most) // 2
        try:
            plan = find_plan(replace(request, max_batch=count, context=context), machine, limits)
        except OffloadError:
            plan = None
        if plan is None or plan.short_of_host_bytes or plan.streamed_bytes > streamed_bytes:
            most = count - 1
        else:
            widest, fewest = plan, count + 1
    return widest


def _storing(request: RuntimeConfig) -> list[RuntimeConfig]:
    """The ways to keep the weights that are left open: those of quantised files as they are stored, which takes the
    fewest bytes, or the draft's decoded, or those of both, which takes products of many rows the least time; bf16 as
    it is, or in 12 bits."""
    draft = replace(request, draft=_decoded(request.draft))
    both = replace(draft, target=_decoded(request.target))
    candidates = [request] if request.weights != "auto" or device_type_of(request) == "cpu" else [request, draft, both]
    encodes: tuple[Encode, ...] = ("none", "always") if request.encode == "auto" else (request.encode,)
    found = [replace(one, encode=encode) for one in candidates for encode in encodes]
    return [one for number, one in enumerate(found) if one not in found[:number]]


def _decoded(model: Any) -> Any:
    """A model, if it is one, as if its file were of the run's element type."""
    return replace(model, decoded=True) if isinstance(model, DescribedModel) and model.kinds else model


def _with_context(request: RuntimeConfig, machine: MachineFigures, limits: MemoryLimits) -> RunPlan:
    """The plan of one way to keep the weights."""
    plan = _with_tree_room(request, machine, limits)
    # More than once: with another context other layers may find room on the device, and their keys and values leave
    # less of a token to host memory.
    while request.context is None and (shorter := _shorter_context(plan)) is not None:
        plan = _with_tree_room(replace(request, context=shorter), machine, limits)
    return plan


def check_host_memory(plan: RunPlan) -> None:
    """Refuse a plan that takes more host memory than there may be, this process included.

    Raises:
        BudgetError: Says of what and by how much; `refusal` knows what would help.
    """
    limits = plan.limits
    if not plan.short_of_host_bytes:
        return
    loaded = plan.host_bytes > plan.loading_bytes
    parts = plan.host if loaded else plan.loading
    raise BudgetError(
        f"{limits.ram_name} of {format_bytes(limits.ram_bytes)} is too small by "
        f"{format_bytes_up(plan.short_of_host_bytes)} ({listed(parts)}{'' if loaded else ', while weights are read'})"
    )


def _shorter_context(plan: RunPlan) -> int | None:
    """Tokens whose KV cache fits host memory, where the whole context's does not and nobody asked for all of it.

    Returns:
        A number of whole blocks, at least `_LEAST_CONTEXT_TOKENS`; None where a shorter context is no way out.
    """
    target, missing_bytes = plan.target, plan.short_of_host_bytes
    if not target.on_host or not missing_bytes:
        return None
    fewer = -(-missing_bytes // (target.batch * target.kv_bytes_of(target.kv_layers_on_host, 1)))
    tokens = (target.context_tokens - fewer) // BLOCK_TOKENS * BLOCK_TOKENS
    return tokens if tokens >= _LEAST_CONTEXT_TOKENS else None


# --- room for trees


def _with_tree_room(request: RuntimeConfig, machine: MachineFigures, limits: MemoryLimits) -> RunPlan:
    """A plan with room for trees: as much as is asked for, or none, some or much of it, whichever is predicted to be
    the fastest. As fast with more device memory or faster, if the plan is for every room.

    Raises:
        BudgetError, OptionError, ContextLengthError: Never because of room that was not asked for.
    """

    def planned(nodes: int) -> RunPlan:
        return _fastest_plan(make_plan(request, limits, tree_nodes=nodes), machine)

    if request.tree_nodes is not None:
        return planned(request.tree_nodes)
    lean = planned(0)
    copies = lean.draft is None  # of n-grams, which have much to say only where a text repeats itself
    if request.gamma is not None or (copies and (lean.has_verifier or lean.proposer == "none")):
        return lean
    # A tree has to fit behind the text: room for more than half of the context is hardly ever used.
    most = max(TREE_ROOMS[0], lean.target.context_tokens // 2)
    found, refused = [lean], ""
    for nodes in (_COPIED,) if copies else [room for room in TREE_ROOMS if room <= most]:
        try:
            roomy = planned(nodes)
        except BudgetError:
            continue
        except OptionError as error:  # of a draft's cache that cannot grow trees, or has no positions for larger ones
            if len(found) == 1:
                refused = str(error)
            break
        if roomy.short_of_host_bytes <= lean.short_of_host_bytes:
            found.append(roomy)
    if copies:
        return max(reversed(found), key=lambda plan: tok_per_s(plan, machine))  # room that makes nothing slower
    # The first of equals: the least room.
    best = max(found, key=lambda plan: tok_per_s(plan, machine))
    if best.tree_room:
        reason = f"predicted to be slower{_comparison(lean, best, machine)}" if lean.has_verifier else lean.reason
        return replace(best, reason=reason)
    if best.has_verifier:
        return best
    return replace(best, tree_note=f"no trees: {refused or 'room for them would cost more than they bring'}")


# --- the fastest way


def _fastest_plan(plan: RunPlan, machine: MachineFigures) -> RunPlan:
    """The fastest of all ways to place a plan; one that host memory has room for, if there is one.

    Raises:
        BudgetError: Nothing fits the device or what can be page-locked, or TriForce was asked for and does not.
        OptionError: It was, and cannot be here whatever the memory.
    """
    candidates, obstacle = find_candidates(plan)
    levels = [[one for one in candidates if one.has_verifier is verified] for verified in (False, True)]
    best = [_fastest(level, machine) for level in levels if level]
    if len(best) == 1:
        return replace(best[0], reason=obstacle)
    chain, triforce = best
    if triforce.short_of_host_bytes > chain.short_of_host_bytes:
        missing, limit = format_bytes_up(triforce.short_of_host_bytes), format_bytes(plan.limits.ram_bytes)
        return replace(chain, reason=f"it takes {missing} more than the {limit} of host memory")
    chosen = max(chain, triforce, key=lambda one: tok_per_s(one, machine))
    speed = "faster" if chosen.has_verifier else "slower"
    return replace(chosen, reason=f"predicted to be {speed}{_comparison(triforce, chain, machine)}")


def most_sequences(request: RuntimeConfig, limits: MemoryLimits) -> int:
    """Of the sequences asked for those that could fit the device if it held nothing else: wherever the KV cache lives,
    at least one block of each sequence is there in every layer."""
    assert request.max_batch is not None, "it is chosen by then"
    if limits.all_device_bytes is None:
        return request.max_batch
    dtype = resolve_dtype(request.dtype, request.target, device_type_of(request))
    each_bytes = kv_cache_bytes(request.target.config(), dtype, capacity_tokens=1, batch=1)
    return min(request.max_batch, limits.all_device_bytes // each_bytes)


def _fastest(candidates: Sequence[RunPlan], machine: MachineFigures) -> RunPlan:
    """The fastest of some ways, at least one, that host memory has room for; where it has room for none, what takes the
    least of it. Of equally fast ones it is that whose passes bring the fewest bytes, and the first of those."""
    return min(candidates, key=lambda one: (one.short_of_host_bytes, -tok_per_s(one, machine), one.streamed_bytes))


def _comparison(one: RunPlan, other: RunPlan, machine: MachineFigures) -> str:
    """Two predictions in tokens/s, and by whose figures; where none are known of the machine, only that."""
    if not machine.is_known:
        return " on a usual card: no figures of this machine are known"
    # Three digits, or all before the point.
    speeds = tok_per_s(one, machine), tok_per_s(other, machine)
    digits = [f"{speed:.3g}" if speed < 100 else f"{speed:.0f}" for speed in speeds]
    return f": {' against '.join(digits)} tokens/s by the figures of {machine.name}"


# --- all ways


def find_candidates(plan: RunPlan) -> tuple[Sequence[RunPlan], str]:
    """All ways to place a plan that fit, within device and page-locked memory; at least one.

    Returns:
        Ways without and with a retrieval verifier, and why there is none with one.

    Raises:
        BudgetError: Nothing fits, or not the TriForce that was asked for; OptionError: it cannot be here whatever the
            memory.
    """
    mode, draft = plan.request.speculation.mode, plan.draft
    chains = [] if mode == "triforce" else _chains(plan)
    if mode in ("none", "chain") or (mode == "auto" and draft is None):
        return chains, ""
    if mode == "auto" and draft is not None and draft.tree_positions:
        return chains, "the draft was asked for trees"
    found: list[RunPlan] = []
    try:
        for one in _candidates(replace(plan, has_verifier=True)):
            if (obstacle := _obstacle(one)) is None:
                found.append(one)  # nothing has to be staged
            else:
                reason, error = obstacle
    except BudgetError as short:
        reason, error = f"its {format_bytes(plan.verifier_bytes)} do not fit the {plan.limits.device_name}", short
    if found:
        return [*chains, *found], ""
    if mode == "triforce":
        raise error
    return chains, reason


def _candidates(plan: RunPlan) -> list[RunPlan]:
    """Every way to place the layers beside each cache that the draft may get; at least one.

    Where the draft's cache is left to us, that is a streaming one besides what was planned, which takes memory that
    layers or the KV cache of the target could have. Whatever fits a budget is among the ways of a larger one as well,
    or something with more of it on the device.

    Raises:
        BudgetError: There is none; says why the last one is not.
        OptionError: More resident layers are asked for than there are.
    """
    draft, kv, plans = plan.draft, plan.request.kv, [plan]
    is_open = draft is not None and draft.options.draft_cache == "auto" and not draft.tree_positions
    if draft is not None and is_open and draft.cache != "streaming" and draft.streaming_tokens < draft.context_tokens:
        plans.append(replace(plan, draft=draft.with_streaming_cache()))
    found: list[RunPlan] = []
    refused: BudgetError | None = None
    for one in plans:
        for place in ("gpu", "host") if kv == "auto" else (kv,):
            try:
                found += [place_layers(one)] if place == "gpu" else place_kv_on_host(one)
            except BudgetError as error:
                refused = error
    if refused is not None and not found:
        raise refused
    return found


def _chains(plan: RunPlan) -> list[RunPlan]:
    placed = _candidates(plan)
    staged: list[RunPlan] = []
    for one in placed:
        with suppress(BudgetError):
            staged.append(stage(one))
    return staged or [stage(min(placed, key=least_pinned_bytes))]  # whose refusal names the least


def _obstacle(plan: RunPlan) -> tuple[str, OffloadError] | None:
    """Why there cannot be a retrieval verifier where one was placed: in a phrase where nobody asked for it, and as an
    error that says what would help. None where there can."""
    target, draft, limits, budget_tokens = plan.target, plan.draft, plan.limits, plan.request.speculation.budget_tokens
    context, layers = target.context_tokens, target.config.num_layers
    kind: type[OffloadError] = OptionError
    if budget_tokens > context:
        reason = f"a retrieval budget of {budget_tokens} tokens is more than the context of {context}"
        remedies = ["lower --budget-tokens", "raise --context"]
    elif any(window is not None for window in target.config.layer_windows):
        reason, remedies = "it needs full attention, and this model has sliding windows", []
    elif plan.placement.streamed_layers:
        reason = f"{len(plan.placement.streamed_layers)} of {layers} layers are streamed"
        remedies = ["drop --resident-layers"]
        if plan.request.resident_layers is None:
            kind = BudgetError  # a further card may have room
            reason = f"beside it {len(plan.placement.streamed_layers)} of {layers} layers would be streamed"
            # With no keys and values on the device that could go.
            lean = [card.with_placement(all_resident(card.placement.layers)) for card in plan.cards]
            more_bytes = max(card.device_bytes - (card.limits.device_bytes or 0) for card in lean)
            remedies = [f"raise --vram by {format_bytes_up(more_bytes)}", "lower --context"]
    elif draft is not None and draft.cache != "streaming" and draft.context_tokens < context:
        # Behind its last position the draft has nothing to say, and the verifier would wait for it.
        reason = f"the draft was made for {draft.context_tokens} tokens and the context has {context}"
        remedies = ["take --draft-cache streaming", "lower --context"]
    elif (
        limits.pinned_bytes is not None
        and (locked_bytes := target.host_kv_bytes + plan.transfer_bytes) > limits.pinned_bytes
    ):
        kind, rows = BudgetError, " and of rows between cards" if plan.transfer_bytes else ""
        reason = (
            "it reads keys and values where they lie in host memory, which takes page-locked memory, and "
            f"{limits.pinned_name} page-locks {format_bytes(limits.pinned_bytes)} of the "
            f"{format_bytes_up(locked_bytes)} of the KV cache{rows}, too little by "
            f"{format_bytes_up(locked_bytes - limits.pinned_bytes)}"
        )
        remedies = ["allow more with --pinned", f"lower --context (now {context})", "raise --vram"]
    else:
        return None
    # Who has no draft has nobody to propose a chain.
    remedies.append(f"or use --speculation {'none' if draft is None else 'chain'}")
    return reason, kind(f"no TriForce here: {reason}: {', '.join(remedies)}")
