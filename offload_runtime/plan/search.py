"""The plan of a run: of every way to place it that fits, the one that is predicted to be the fastest.

Searched are the levels of speculation, the draft's cache, where keys, values and weights go, whether those of quantised
files are kept as they are stored, room for trees where nobody said how much, and the context where host memory has to
hold it. A plan and a run search here alike. Each way is
as fast with more device memory or faster, and none is lost by it, so that the fastest of them is too.

How one way places the layers: fixed parts come first (embedding and head, KV cache, draft, workspace). What is left of
the device holds the ring and as many resident layers as fit. Of what is streamed a KV cache is page-locked first, since
it is written as well as read, then layers of weights. So layers of the cache are staged only where it does not fit
beside the rings that staging takes, and then what is left locks weights.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.config import RuntimeConfig, format_bytes, format_bytes_up
from offload_runtime.copy import FEWEST_PIECES, RingShape, ring_shape
from offload_runtime.errors import BudgetError, OffloadError, OptionError
from offload_runtime.kv import KV_RING_SLOTS, kv_cache_bytes
from offload_runtime.memory import PAGE_BYTES
from offload_runtime.plan.cost import tok_per_s
from offload_runtime.plan.memory import (
    NO_RING,
    LayerShare,
    MemoryPart,
    ModelPlan,
    Placement,
    RunPlan,
    all_resident,
    make_plan,
)
from offload_runtime.plan.request import (
    TREE_ROOMS,
    MachineFigures,
    MemoryLimits,
    device_type_of,
    limits_of,
    resolve_dtype,
)
from offload_runtime.weights import DescribedModel

# Proposals of n-grams for which there may be room: texts that repeat themselves, an edited file above all, go on for so
# long, and nothing else does.
_COPIED = 256
# Sequences at once where nobody said how many: more of them make the passes of each longer.
_MOST_SEQUENCES = 16
# Less is no context that anybody left it to the runtime to choose.
_LEAST_CONTEXT_TOKENS = 2048
# Two slots would stall on every layer boundary; the fourth and later ones only bridge longer pauses between passes.
RING_SLOTS = 3
# Pieces on their way to the host at once, each moved on by a thread of its own.
_WRITEBACK_PIECE_BYTES = 16 << 20
_MOST_WRITEBACK_PIECES = 8
# Of what may be locked, the most that rings take from keys and values.
_RINGS_SHARE = 4


def plan_run(request: RuntimeConfig, machine: MachineFigures) -> RunPlan:
    """Place everything on a machine that need not be here.

    Raises:
        BudgetError: Device, host or page-locked memory is short; says of what, by how much, and what would help.
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
    for way in _storing(request):
        try:
            plans.append(_with_context(way, machine, limits))
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
    ways = [request] if request.weights != "auto" or device_type_of(request) == "cpu" else [request, draft, both]
    encodes = ("none", "always") if request.encode == "auto" else (request.encode,)
    found = [replace(way, encode=encode) for way in ways for encode in encodes]
    return [way for number, way in enumerate(found) if way not in found[:number]]


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
        BudgetError: Says of what, by how much, and what would help.
    """
    limits, target = plan.limits, plan.target
    if not plan.short_of_host_bytes:
        return
    loaded = plan.host_bytes > plan.loading_bytes
    parts = plan.host if loaded else plan.loading
    # On a CPU all layers are in host memory.
    moves = plan.placement.streamed_layers and device_type_of(plan.request) != "cpu"
    ways = ["raise --vram, which keeps more layers there"] if moves else []
    if target.on_host and loaded:
        ways.append(f"lower --context (now {target.context_tokens})")
    if plan.draft is not None:
        ways.append("take a smaller draft")
    ways += ["choose a 16-bit --dtype or a smaller model", f"or {limits.ram_way}"]
    raise BudgetError(
        f"{limits.ram_name} of {format_bytes(limits.ram_bytes)} is too small by "
        f"{format_bytes_up(plan.short_of_host_bytes)} ({_listed(parts)}"
        f"{'' if loaded else ', while weights are read'}): {', '.join(ways)}"
    )


def _listed(parts: Iterable[MemoryPart]) -> str:
    return ", ".join(f"{part.name} {format_bytes(part.nbytes)}" for part in parts)


def _shorter_context(plan: RunPlan) -> int | None:
    """Tokens whose KV cache fits host memory, where the whole context's does not and nobody asked for all of it.

    Returns:
        A number of whole blocks, at least `_LEAST_CONTEXT_TOKENS`; None where a shorter context is no way out.
    """
    target, missing_bytes = plan.target, plan.short_of_host_bytes
    if not target.on_host or not missing_bytes:
        return None
    fewer = -(-missing_bytes // (target.batch * target.config.kv_bytes_per_token(target.dtype.itemsize)))
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
        reason = f"predicted to be slower: {_comparison(lean, best, machine)}" if lean.has_verifier else lean.reason
        return replace(best, reason=reason)
    if best.has_verifier:
        return best
    return replace(best, tree_note=f"no trees: {refused or 'room for them would cost more than they bring'}")


# --- the fastest way


def _fastest_plan(plan: RunPlan, machine: MachineFigures) -> RunPlan:
    """The fastest of all ways to place a plan; one that host memory has room for, if there is one.

    Raises:
        BudgetError: Nothing fits the device or what can be page-locked; says for how many sequences something would.
        OptionError: TriForce was asked for and cannot be here.
    """
    try:
        ways, obstacle = find_candidates(plan)
    except (BudgetError, OptionError) as error:
        batch = plan.target.batch
        fewer = range(1, min(batch, most_sequences(plan.request, plan.limits) + 1))
        fitting = bisect_left(fewer, True, key=lambda sequences: _refuses(plan.of_batch(sequences)))
        if not fitting:
            raise
        raise type(error)(f"{error}; {fitting} prompts at once would fit, {batch} do not") from error
    levels = [[way for way in ways if way.has_verifier is verified] for verified in (False, True)]
    best = [_fastest(level, machine) for level in levels if level]
    if len(best) == 1:
        return replace(best[0], reason=obstacle)
    chain, triforce = best
    if triforce.short_of_host_bytes > chain.short_of_host_bytes:
        missing, limit = format_bytes_up(triforce.short_of_host_bytes), format_bytes(plan.limits.ram_bytes)
        return replace(chain, reason=f"it takes {missing} more than the {limit} of host memory")
    chosen = max(chain, triforce, key=lambda way: tok_per_s(way, machine))
    speed = "faster" if chosen.has_verifier else "slower"
    return replace(chosen, reason=f"predicted to be {speed}: {_comparison(triforce, chain, machine)}")


def most_sequences(request: RuntimeConfig, limits: MemoryLimits) -> int:
    """Of the sequences asked for those that could fit the device if it held nothing else: wherever the KV cache lives,
    at least one block of each sequence is there in every layer."""
    assert request.max_batch is not None, "it is chosen by then"
    if limits.all_device_bytes is None:
        return request.max_batch
    dtype = resolve_dtype(request.dtype, request.target, device_type_of(request))
    each_bytes = kv_cache_bytes(request.target.config(), dtype, capacity_tokens=1, batch=1)
    return min(request.max_batch, limits.all_device_bytes // each_bytes)


def _refuses(plan: RunPlan) -> bool:
    try:
        find_candidates(plan)
    except (BudgetError, OptionError):
        return True
    return False


def _fastest(ways: Sequence[RunPlan], machine: MachineFigures) -> RunPlan:
    """The fastest of some ways, at least one, that host memory has room for; where it has room for none, what takes the
    least of it. Of equally fast ones it is that whose passes bring the fewest bytes, and the first of those."""
    return min(ways, key=lambda way: (way.short_of_host_bytes, -tok_per_s(way, machine), way.streamed_bytes))


def _comparison(one: RunPlan, other: RunPlan, machine: MachineFigures) -> str:
    """Two predictions in tokens/s, and by whose figures."""
    # Three digits, or all before the point.
    speeds = tok_per_s(one, machine), tok_per_s(other, machine)
    digits = [f"{speed:.3g}" if speed < 100 else f"{speed:.0f}" for speed in speeds]
    return f"{' against '.join(digits)} tokens/s by the figures of {machine.name}"


# --- all ways


def find_candidates(plan: RunPlan) -> tuple[Sequence[RunPlan], str]:
    """All ways to place a plan that fit, within device and page-locked memory; at least one.

    Returns:
        Ways without and with a retrieval verifier, and why there is none with one.

    Raises:
        BudgetError: Nothing fits; OptionError: TriForce was asked for and cannot be here.
    """
    mode, draft = plan.request.speculation.mode, plan.draft
    chains = [] if mode == "triforce" else _chains(plan)
    if mode in ("none", "chain") or (mode == "auto" and draft is None):
        return chains, ""
    if mode == "auto" and draft is not None and draft.tree_slots:
        return chains, "the draft was asked for trees"
    found: list[RunPlan] = []
    try:
        for way in _ways(replace(plan, has_verifier=True)):
            if (obstacle := _obstacle(way)) is None:
                found.append(way)  # nothing has to be staged
            else:
                reason, error = obstacle
    except BudgetError as short:
        reason, error = f"its {format_bytes(plan.verifier_bytes)} do not fit the {plan.limits.device_name}", short
    if found:
        return [*chains, *found], ""
    if mode == "triforce":
        raise error
    return chains, reason


def _ways(plan: RunPlan) -> list[RunPlan]:
    """Every way to place the layers beside each cache that the draft may get; at least one.

    Where the draft's cache is left to us, that is a streaming one besides what was planned, which takes memory that
    layers or the KV cache of the target could have. Whatever fits a budget is among the ways of a larger one as well,
    or something with more of it on the device.

    Raises:
        BudgetError: There is none; says why the last one is not.
        OptionError: More resident layers are asked for than there are.
    """
    draft, kv, plans = plan.draft, plan.request.kv, [plan]
    is_open = draft is not None and draft.options.draft_cache == "auto" and not draft.tree_slots
    if draft is not None and is_open and draft.cache != "streaming" and draft.streaming_tokens < draft.context_tokens:
        plans.append(replace(plan, draft=draft.with_streaming_cache()))
    found: list[RunPlan] = []
    refused: BudgetError | None = None
    for one in plans:
        for place in ("gpu", "host") if kv == "auto" else (kv,):
            try:
                found += [place_layers(one)] if place == "gpu" else _with_kv_on_host(one)
            except BudgetError as error:
                refused = error
    if refused is not None and not found:
        raise refused
    return found


def _chains(plan: RunPlan) -> list[RunPlan]:
    placed = _ways(plan)
    staged: list[RunPlan] = []
    for way in placed:
        with suppress(BudgetError):
            staged.append(_staged(way))
    return staged or [_staged(min(placed, key=least_pinned_bytes))]  # whose refusal names the least


def _staged(plan: RunPlan) -> RunPlan:
    limit_bytes, name = plan.limits.pinned_bytes, plan.limits.pinned_name
    if plan.num_cards == 1:
        return plan.with_placement(place_staged(plan.target, limit_bytes, name))
    # In proportion to what each card streams, beside what it stages through.
    cards = plan.target.cards
    needed = [card.host_kv_bytes + card.host_bytes_of_layers(card.placement.streamed_layers) for card in cards]
    limits: list[int | None] = [None] * len(cards)
    if limit_bytes is not None and sum(needed) > limit_bytes - plan.hop_bytes:
        rings = [_least_ring_bytes(card) for card in cards]
        left_bytes = limit_bytes - plan.hop_bytes - sum(rings)
        if left_bytes < 0:
            streaming = [with_staging_rings(card, 0) for card, nbytes in zip(cards, needed, strict=True) if nbytes]
            raise _cannot_stage(streaming, plan.placement, limit_bytes, name, hop_bytes=plan.hop_bytes)
        each = zip(rings, needed, strict=True)
        limits = [ring_bytes + left_bytes * nbytes // sum(needed) for ring_bytes, nbytes in each]
    staged = [place_staged(card, limit, name) for card, limit in zip(cards, limits, strict=True)]
    shares = zip(plan.target.shares, staged, strict=True)
    return plan.with_shares([replace(share, placement=placement) for share, placement in shares])


def _obstacle(plan: RunPlan) -> tuple[str, OffloadError] | None:
    """Why there cannot be a retrieval verifier where one was placed: in a phrase where nobody asked for it, and as an
    error that says what would help. None where there can."""
    target, draft, limits, budget_tokens = plan.target, plan.draft, plan.limits, plan.request.speculation.budget_tokens
    context, layers = target.context_tokens, target.config.num_layers
    kind: type[OffloadError] = OptionError
    if budget_tokens > context:
        reason = f"a retrieval budget of {budget_tokens} tokens is more than the context of {context}"
        ways = ["lower --budget-tokens", "raise --context"]
    elif any(window is not None for window in target.config.layer_windows):
        reason, ways = "it needs full attention, and this model has sliding windows", []
    elif plan.placement.streamed_layers:
        reason = f"{len(plan.placement.streamed_layers)} of {layers} layers are streamed"
        ways = ["drop --resident-layers"]
        if plan.request.resident_layers is None:
            reason = f"beside it {len(plan.placement.streamed_layers)} of {layers} layers would be streamed"
            # With no keys and values on the device that could go.
            lean = [card.with_placement(all_resident(card.placement.num_layers)) for card in plan.cards]
            more_bytes = max(card.device_bytes - (card.limits.device_bytes or 0) for card in lean)
            ways = [f"raise --vram by {format_bytes_up(more_bytes)}", "lower --context"]
    elif draft is not None and draft.cache != "streaming" and draft.context_tokens < context:
        # Behind its last position the draft has nothing to say, and the verifier would wait for it.
        reason = f"the draft was made for {draft.context_tokens} tokens and the context has {context}"
        ways = ["take --draft-cache streaming", "lower --context"]
    elif (
        limits.pinned_bytes is not None
        and (locked_bytes := target.host_kv_bytes + plan.hop_bytes) > limits.pinned_bytes
    ):
        kind, rows = BudgetError, " and of rows between cards" if plan.hop_bytes else ""
        reason = (
            "it reads keys and values where they lie in host memory, which takes page-locked memory, and "
            f"{limits.pinned_name} page-locks {format_bytes(limits.pinned_bytes)} of the "
            f"{format_bytes_up(locked_bytes)} of the KV cache{rows}, too little by "
            f"{format_bytes_up(locked_bytes - limits.pinned_bytes)}"
        )
        ways = ["allow more with --pinned", f"lower --context (now {context})", "raise --vram"]
    else:
        return None
    # Who has no draft has nobody to propose a chain.
    ways.append(f"or use --speculation {'none' if draft is None else 'chain'}")
    return reason, kind(f"no TriForce here: {reason}: {', '.join(ways)}")


# --- one way: on the device


@lru_cache(maxsize=4096)  # every way to place a model asks for the same
def spread(count: int, num_layers: int) -> tuple[int, ...]:
    """`count` of `num_layers` indices, evenly spread: a resident layer computes while the link fills the ring."""
    return tuple(sorted({(2 * index + 1) * num_layers // (2 * count) for index in range(count)}))


def place_layers(plan: RunPlan) -> RunPlan:
    """Choose resident layers and ring: as many layers stay as are asked for, or else as fit. With several cards, deal
    the layers out first.

    Raises:
        BudgetError: Not even a ring of two slots fits, or the asked resident layers do not.
        OptionError: More resident layers were asked for than the model has, or there are more cards than layers.
    """
    layers, asked = plan.placement.num_layers, plan.request.resident_layers
    if asked is not None and not 0 <= asked <= layers:
        raise OptionError(f"resident layers must be between 0 and {layers}, the model's layers, not {asked}")
    if plan.limits.num_cards > 1:
        return _partitioned(plan, lambda card: [place_layers(card)])
    available_bytes = plan.limits.device_bytes
    if available_bytes is None:
        return plan.with_placement(_evenly(layers if asked is None else asked, layers, RING_SLOTS))
    left_bytes = available_bytes - plan.fixed_bytes
    most = min(layers, max(0, left_bytes) // min(plan.target.layout.layer_bytes))
    counts = range(most, -1, -1) if asked is None else (asked,)
    for slots in (RING_SLOTS, 2):
        for resident in counts:
            placement = _evenly(resident, layers, slots)
            if plan.target.held_bytes(placement) <= left_bytes:
                return plan.with_placement(placement)
    raise _too_small(plan, available_bytes, asked or 0)


def _evenly(resident: int, layers: int, slots: int) -> Placement:
    return Placement(spread(resident, layers), min(slots, layers - resident), layers)


def _with_kv_on_host(plan: RunPlan) -> list[RunPlan]:
    """The ways to share the device between layers of weights and of the KV cache; beside a retrieval verifier the first
    one, in which weights come before keys and values. With several cards one way, in which each shares its memory so
    that it streams the least. Errors as of `place_layers`."""
    target, borrowable_bytes = plan.target, 0
    if plan.has_verifier and target.batch == 1:  # else another sequence may be decoding
        budget_tokens = plan.request.speculation.budget_tokens
        borrowable_bytes = kv_cache_bytes(target.config, target.dtype, capacity_tokens=budget_tokens, batch=1)
    plan = replace(plan, target=replace(target, cache="host", borrowable_bytes=borrowable_bytes))
    return [_partitioned(plan, _kv_ways)] if plan.limits.num_cards > 1 else _kv_ways(plan)


def _kv_ways(plan: RunPlan) -> list[RunPlan]:
    """The same of one card and a KV cache on the host."""
    target, plan = plan.target, place_layers(plan)
    limit_bytes, placement = plan.limits.device_bytes, plan.placement
    ways = [placement]
    if limit_bytes is not None and plan.request.resident_layers is None and not plan.has_verifier:
        # A layer of keys and values that stays spares more of the link than it takes (its open blocks are there in any
        # case), so fewer resident layers of weights may be better.
        slots = placement.num_slots or min(RING_SLOTS, placement.num_layers)
        resident = len(placement.resident_layers) - max(0, slots - placement.num_slots - 1)
        ways += [_evenly(count, placement.num_layers, slots) for count in range(resident - 1, -1, -1)]
    spare_bytes = None if limit_bytes is None else limit_bytes - plan.fixed_bytes
    return [plan.with_placement(_with_kv_layers(target, way, spare_bytes)) for way in ways]


def _with_kv_layers(target: ModelPlan, placement: Placement, spare_bytes: int | None) -> Placement:
    """As many layers of the KV cache on the device as fit into `spare_bytes` beside layers of weights; None for no
    limit, where all stay on the host, as asked.

    None before the ring is whole: its last slot comes before anything that stays, or the memory that lets it in would
    take layers away from the device.
    """
    if spare_bytes is None or placement.num_slots < min(RING_SLOTS, len(placement.streamed_layers)):
        return placement
    layers, each = placement.num_layers, target.kv_layer_bytes - target.open_kv_bytes
    spare_bytes -= target.held_bytes(placement)
    if layers * each - target.kv_ring_bytes - target.prefill_workspace_bytes <= spare_bytes:
        count = layers  # nothing is streamed, and what streaming takes is not needed
    else:
        count = layers if each <= 0 else max(0, min(layers - 1, spare_bytes // each))
    # Behind the first ones all cards stream in turn, however many each keeps; two streaming layers of one card in a row
    # would leave the link of the other idle: 1.05 in place of 0.92 s a pass of a 7B with 120K tokens.
    evenly = target.kv_ring_slots == KV_RING_SLOTS  # no other cards to wait for
    return replace(placement, resident_kv_layers=_layers_to_keep(target, range(layers), count, evenly=evenly))


def _layers_to_keep(
    target: ModelPlan, layers: Iterable[int], count: int, *, evenly: bool = True
) -> tuple[int, ...]:  # fmt: skip
    """`count` of some layers, those first whose keys and values a pass streams the most of, evenly spread among
    equals or else the first of them: of a sliding window a pass brings little, however long the text is."""
    bytes_of_reach = dict[int | None, int]()
    by_bytes: dict[int, list[int]] = {}
    for layer in layers:
        reach = target.config.layer_windows[layer]
        if reach not in bytes_of_reach:
            bytes_of_reach[reach] = target.streamed_kv_bytes(layer, target.context_tokens - 1)
        by_bytes.setdefault(bytes_of_reach[reach], []).append(layer)
    kept: list[int] = []
    for _, equals in sorted(by_bytes.items(), reverse=True):
        most = min(count - len(kept), len(equals))
        kept += [equals[index] for index in (spread(most, len(equals)) if evenly else range(most))]
    return tuple(sorted(kept))


def _least_placed(plan: RunPlan, resident: int) -> RunPlan:
    """What takes the least of the device that can be."""
    return plan.with_placement(_evenly(resident, plan.placement.num_layers, 2))


def _too_small(plan: RunPlan, available_bytes: int, resident: int) -> BudgetError:
    least = _least_placed(plan, resident)
    ways = [plan.limits.device_way, "lower --context"]
    if plan.has_verifier:
        ways.append(f"lower --budget-tokens or use --speculation {'none' if plan.draft is None else 'chain'}")
    elif plan.draft is not None:
        ways.append("use a smaller draft or --draft ngram")
    if resident:
        ways.append("keep fewer layers resident")
    return BudgetError(
        f"the allowed {plan.limits.device_name} of {format_bytes(available_bytes)} is too small by "
        f"{format_bytes(least.device_bytes - available_bytes)}: {format_bytes_up(least.device_bytes)} is the least "
        f"({_listed(least.device)}): {', '.join(ways)}"
    )


# --- one way: dealt out to several cards


@lru_cache(maxsize=4096)
def interleaved(counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The layers of each card that gets so many of them, evenly interleaved: in turn, where all get as many."""
    middles = sorted(((2 * number + 1) / count, card) for card, count in enumerate(counts) for number in range(count))
    owners = [card for _, card in middles]
    return tuple(tuple(layer for layer, owner in enumerate(owners) if owner == card) for card in range(len(counts)))


def in_blocks(counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The layers of each card that gets so many of them, one after the other, so that rows hop least."""
    ends = accumulate(counts)
    return tuple(tuple(range(end - count, end)) for count, end in zip(counts, ends, strict=True))


@dataclass(frozen=True)
class _CardLoad:
    """What one card makes of the layers that it gets: where they are and how long their copies take, in bytes over the
    first card's link; or by how much memory it is too small."""

    plan: RunPlan
    link_bytes: float = 0.0
    missing_bytes: int = 0

    @property
    def load(self) -> tuple[int, float]:
        """What other cards may relieve it of."""
        return self.missing_bytes, self.link_bytes


class _Partitioner:
    """Deals the layers of a plan out, as many to each card as asked for, each card placed by that of its `ways` which
    streams the least."""

    def __init__(self, plan: RunPlan, ways: Callable[[RunPlan], list[RunPlan]]) -> None:
        self._plan, self._ways = plan, ways
        self._found: dict[object, _CardLoad] = {}  # cards with layers alike are placed alike

    def place(self, dealt: tuple[tuple[int, ...], ...]) -> list[_CardLoad]:
        """What each card makes of its layers."""
        target, asked = self._plan.target, self._plan.request.resident_layers
        counts = tuple(map(len, dealt))
        shares = tuple(LayerShare(layers, all_resident(len(layers))) for layers in dealt)
        plan, found = replace(self._plan, target=replace(target, shares=shares)), list[_CardLoad]()
        kinds = list(zip(target.layout.layer_kinds, target.config.layer_windows, strict=True))
        for card, layers in enumerate(dealt):
            resident = None
            if asked is not None:  # of the whole model, in proportion
                begin, end = (sum(counts[:cards]) * asked // sum(counts) for cards in (card, card + 1))
                resident = end - begin
            alike = card, resident, tuple(kinds[layer] for layer in layers)
            if alike not in self._found:
                share = plan.on_card(card)
                self._found[alike] = self._placed(
                    replace(share, request=replace(share.request, resident_layers=resident))
                )
            found.append(self._found[alike])
        return found

    def _placed(self, card: RunPlan) -> _CardLoad:
        """Beside the least ring of keys and values, or the one with which the links of all cards are busy, where it
        fits and brings more than what it takes would."""
        num_cards, found = self._plan.limits.num_cards, list[_CardLoad]()
        slots = card.target.overlapped_kv_slots(num_cards) if card.target.on_host else KV_RING_SLOTS
        for each in dict.fromkeys((KV_RING_SLOTS, slots)):
            with suppress(BudgetError):
                ways = self._ways(card.with_target(replace(card.target, kv_ring_slots=each)))
                best = min(ways, key=lambda way: way.streamed_bytes)
                # What comes one after the other, if the others have as many keys and values, and room for them.
                target, last = best.target, best.target.context_tokens - 1
                kv_bytes = sum(target.streamed_kv(last).values())
                in_turn_bytes = target.exposed_kv_bytes(last) + kv_bytes * (num_cards - 1) // num_cards
                found.append(_CardLoad(best, max(best.streamed_bytes, in_turn_bytes) / card.limits.link_ratio))
        if found:
            return min(found, key=lambda one: one.link_bytes)
        least, limit_bytes = _least_placed(card, card.request.resident_layers or 0), card.limits.device_bytes
        assert limit_bytes is not None
        return _CardLoad(card, missing_bytes=max(1, least.device_bytes - limit_bytes))


def _partitioned(plan: RunPlan, ways: Callable[[RunPlan], list[RunPlan]]) -> RunPlan:
    """Deal the layers of a plan out to its cards, so that the copies of the one that takes longest for them take the
    least time; of equals the most even.

    From even counts on layers go from the card that is short of memory, or whose copies take longest, to the one with
    the shortest: as many as would even both out, and half as many where that gains nothing. Layers are dealt out in
    turn, so that all links are busy; where nothing is streamed, in blocks: an 80-layer model then hops 2 times in place
    of 80, which are predicted to take 2.4 ms of a pass of two RTX 4090s.

    Raises:
        BudgetError: One card is too small; says which.
        OptionError: There are more cards than layers.
    """
    layers, cards = plan.placement.num_layers, plan.limits.num_cards
    if cards > layers:
        raise OptionError(f"{cards} cards have no layer each of a model of {layers}: name fewer with --devices")
    partitioner = _Partitioner(plan, ways)
    # The first card has the embedding and the head, so that the others get what does not go evenly.
    counts = tuple(layers * (card + 1) // cards - layers * card // cards for card in range(cards))
    best, tried = partitioner.place(interleaved(counts)), {counts}
    while (found := next(_better_partitions(partitioner, counts, best, tried), None)) is not None:
        counts, best = found
    giver = max(range(cards), key=lambda card: best[card].load)
    if best[giver].missing_bytes:
        short, limit_bytes = best[giver].plan, best[giver].plan.limits.device_bytes
        assert limit_bytes is not None
        raise _too_small(short, limit_bytes, short.request.resident_layers or 0)
    dealt = interleaved(counts)
    if not _streams(best) and not _streams(blocks := partitioner.place(in_blocks(counts))):
        dealt, best = in_blocks(counts), blocks
    placed = ((layers, card.plan.target) for layers, card in zip(dealt, best, strict=True))
    return plan.with_shares([LayerShare(layers, card.placement, card.kv_ring_slots) for layers, card in placed])


def _streams(cards: Sequence[_CardLoad]) -> bool:
    """Whether some card streams something, or is too small."""
    return any(card.missing_bytes or card.plan.streamed_bytes for card in cards)


def _better_partitions(
    partitioner: _Partitioner, counts: tuple[int, ...], cards: list[_CardLoad], tried: set[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], list[_CardLoad]]]:
    """Better deals, in which the card that has most to do gives layers to the one with the least, or to another."""
    giver, *takers = sorted(range(len(cards)), key=lambda card: (cards[card].load, counts[card]), reverse=True)
    for taker in reversed(takers):
        moved = min(_to_move(cards[giver], cards[taker]), counts[giver] - 1)
        if cards[giver].load == cards[taker].load:
            moved = (counts[giver] - counts[taker]) // 2
        while moved:
            numbers = {giver: counts[giver] - moved, taker: counts[taker] + moved}
            changed = tuple(numbers.get(card, count) for card, count in enumerate(counts))
            if changed not in tried:
                tried.add(changed)
                found = partitioner.place(interleaved(changed))
                if _imbalance(found, changed) < _imbalance(cards, counts):
                    yield changed, found
            moved //= 2


def _imbalance(cards: Sequence[_CardLoad], counts: Sequence[int]) -> tuple[int, float, int]:
    """What is to be small: memory that is short, the longest copies, unevenness."""
    missing_bytes = sum(card.missing_bytes for card in cards)
    return missing_bytes, max(card.link_bytes for card in cards), max(counts) - min(counts)


def _to_move(giver: _CardLoad, taker: _CardLoad) -> int:
    """Layers that one card would have to give another to even them out; at least one, if it has more to do."""
    if giver.load <= taker.load:
        return 0
    target = giver.plan.target
    if giver.missing_bytes:
        on_device_bytes = target.open_kv_bytes if target.on_host else target.kv_layer_bytes
        return max(1, -(-giver.missing_bytes // max(1, on_device_bytes)))
    layer_bytes = sum(target.layout.layer_bytes) / target.config.num_layers + target.kv_layer_bytes
    both_bytes = layer_bytes / giver.plan.limits.link_ratio + layer_bytes / taker.plan.limits.link_ratio
    return max(1, round((giver.link_bytes - taker.link_bytes) / both_bytes))


# --- one way: in host memory


def with_staging_rings(target: ModelPlan, available_bytes: int) -> Placement:
    """The placement of a target with the rings that it is staged through, within `available_bytes` of page-locked
    memory or, at least, two pieces each."""
    streamed, on_host = target.placement.streamed_layers, target.kv_layers_on_host
    largest = max(target.layer_bytes if streamed else 0, target.kv_piece_bytes if on_host else 0)
    d2h = NO_RING
    if on_host:
        # A prompt's blocks are written as they become full, piece by piece of the prompt.
        written_bytes = -(-target.chunk_tokens // BLOCK_TOKENS) * target.kv_block_bytes
        piece_bytes = min(_WRITEBACK_PIECE_BYTES, -(-written_bytes // PAGE_BYTES) * PAGE_BYTES)
        fitting = (available_bytes - ring_shape(largest, 0).nbytes) // piece_bytes
        d2h = RingShape(piece_bytes, max(FEWEST_PIECES, min(_MOST_WRITEBACK_PIECES, fitting)))
        available_bytes -= d2h.nbytes
    return replace(target.placement, h2d_ring=ring_shape(largest, available_bytes), d2h_ring=d2h)


def place_staged(target: ModelPlan, limit_bytes: int | None, name: str) -> Placement:
    """Stage as many layers as page-locked memory is short of, those of a KV cache on the host last.

    Args:
        target: Its layers placed on the device or the host.
        limit_bytes: Most page-locked memory; None for no limit.
        name: Whose limit it is, for the message.

    Raises:
        BudgetError: Not even what is staged through can be page-locked.
    """
    placement, kv_bytes = target.placement, target.host_kv_bytes
    streamed = placement.streamed_layers
    if limit_bytes is None or kv_bytes + target.host_bytes_of_layers(streamed) <= limit_bytes:
        return replace(placement, staged_layers=(), staged_kv_layers=(), h2d_ring=NO_RING, d2h_ring=NO_RING)
    least = with_staging_rings(target, 0)
    if least.ring_bytes > limit_bytes:
        raise _cannot_stage([least], placement, limit_bytes, name)
    ringed = with_staging_rings(target, limit_bytes - kv_bytes)
    staged_kv: tuple[int, ...] = ()
    left_bytes = limit_bytes - ringed.ring_bytes - kv_bytes
    if left_bytes < 0 or not placement.streamed_layers:
        ringed = with_staging_rings(target, limit_bytes // _RINGS_SHARE)
        staged_kv, left_bytes = _stage_kv(target, limit_bytes - ringed.ring_bytes)
    most = min(len(placement.streamed_layers) - (not staged_kv), max(0, left_bytes) // min(target.layout.layer_bytes))
    # Spread, so that they and staged ones alternate.
    choices = ([streamed[index] for index in spread(count, len(streamed))] for count in range(most, -1, -1))
    pinned = next((layers for layers in choices if target.host_bytes_of_layers(layers) <= left_bytes), [])
    staged = tuple(index for index in streamed if index not in pinned)
    return replace(ringed, staged_layers=staged, staged_kv_layers=staged_kv)


def _cannot_stage(
    least: Sequence[Placement], placement: Placement, limit_bytes: int, name: str, *, hop_bytes: int = 0
) -> BudgetError:
    """That not even the least rings of some cards can be page-locked, beside what rows hop through."""
    parts = [
        MemoryPart("a ring to stage layers through", sum(one.h2d_ring.nbytes for one in least)),
        MemoryPart("rows between cards", hop_bytes),
    ]
    parts = [part for part in parts if part.nbytes]
    ways = ["raise --vram or keep all layers resident"] if placement.streamed_layers else []
    if any(one.d2h_ring.num_pieces for one in least):
        parts.append(MemoryPart("pieces to write the KV cache through", sum(one.d2h_ring.nbytes for one in least)))
        ways.insert(0, "take --kv gpu")
    missing_bytes = hop_bytes + sum(one.ring_bytes for one in least) - limit_bytes
    return BudgetError(
        f"{name} page-locks {format_bytes(limit_bytes)} at most, too little by "
        f"{format_bytes_up(missing_bytes)} ({_listed(parts)}): "
        f"{', '.join([*ways, 'allow more with --pinned, or choose a smaller model'])}"
    )


def least_pinned_bytes(plan: RunPlan) -> int:
    """Page-locked memory without which a plan cannot be: all that it streams, or rings to stage that through. A
    retrieval verifier reads keys and values where they lie, so they cannot be staged."""
    target = plan.target
    if plan.has_verifier:
        return target.host_kv_bytes + plan.hop_bytes
    all_bytes = target.host_kv_bytes + target.host_bytes_of_layers(target.placement.streamed_layers)
    return min(all_bytes, sum(map(_least_ring_bytes, target.cards))) + plan.hop_bytes


def _least_ring_bytes(target: ModelPlan) -> int:
    """Page-locked memory that staging takes at least; none where nothing is streamed."""
    streams = target.kv_layers_on_host or target.placement.streamed_layers
    return with_staging_rings(target, 0).ring_bytes if streams else 0


def _stage_kv(target: ModelPlan, available_bytes: int) -> tuple[tuple[int, ...], int]:
    """Layers of the KV cache that are not locked within `available_bytes`, and what of these is left."""
    layers = target.kv_layers_on_host
    count = min(available_bytes // target.kv_layer_bytes, len(layers) - 1)
    kept = _layers_to_keep(target, layers, count)
    return tuple(layer for layer in layers if layer not in kept), available_bytes - count * target.kv_layer_bytes
