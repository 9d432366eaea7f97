"""The plan of a run: of every way to place it that fits, the one that is predicted to be the fastest.

Open are how quantised weights are kept, room for trees, the draft's cache, whether there is a retrieval verifier, where
keys and values and the embedding live, and which layers stay on the device of which card. Fixed parts come first (head,
draft, workspace); what is left of a device holds the ring and as many resident layers as fit. What may not be
page-locked is staged through rings. A plan and a run search here alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, product
from operator import itemgetter
from typing import NamedTuple

from offload_runtime_kernels.kv_blocks import BLOCK_TOKENS

from offload_runtime.config import Encode, RuntimeConfig
from offload_runtime.errors import BudgetError, OffloadError, OptionError
from offload_runtime.hardware import MachineProfile
from offload_runtime.options import require
from offload_runtime.plan import model
from offload_runtime.plan.cost import tok_per_s
from offload_runtime.plan.model import ModelPlan, Placement
from offload_runtime.plan.sizes import (
    COPY_TREE_ROOMS,
    TREE_ROOMS,
    MemoryLimits,
    RunPlan,
    ShortageError,
    check_copy,
    limits_of,
    make_plan,
)
from offload_runtime.sizes import format_bytes, format_bytes_up
from offload_runtime.stream.arena import PAGE_BYTES
from offload_runtime.stream.staging import FEWEST_PIECES, RingShape, ring_shape

# Two buffers would stall on every layer boundary; the fourth and later ones only bridge longer pauses between passes.
RING_BUFFERS = 3
# Proposals of n-grams for which there may be room: texts that repeat themselves, an edited file above all, go on for so
# long, and nothing else does.
_COPIED = 256
# Sequences at once where nobody said how many: more of them make the passes of each longer.
_MOST_SEQUENCES = 16
# Less is no context that anybody left it to the runtime to choose.
LEAST_CONTEXT_TOKENS = 2048
# Pieces on their way to the host at once, each moved on by a thread of its own; of what may be locked, the share that
# rings take at most from keys and values.
_WRITEBACK_PIECE_BYTES, _MOST_WRITEBACK_PIECES, _RINGS_SHARE = 16 << 20, 8, 4


# --- a run


def plan_run(request: RuntimeConfig, machine: MachineProfile, limits: MemoryLimits | None = None) -> RunPlan:
    """Place everything on a machine that need not be here, within its limits if there are no others.

    Raises:
        BudgetError: Device, host or page-locked memory is short; says of what and by how much.
        OptionError, ContextLengthError: As `Runtime.load`.
    """
    there = limits_of(machine, request) if limits is None else limits

    def planned(count: int) -> RunPlan:
        return find_plan(request, machine, replace(there, cards=there.cards[:count]))

    num_cards, is_open = len(there.cards), request.device == "auto"
    plan = as_many_cards_as_help(planned, num_cards, machine) if is_open else planned(num_cards)
    check_host_memory(plan)
    return plan


def check_host_memory(plan: RunPlan) -> None:
    """Refuse a plan that takes more host memory than there may be, this process included. Raises `BudgetError`."""
    limits, missing_bytes = plan.limits, plan.short_of_host_bytes
    if missing_bytes:
        loaded = plan.host.total() > plan.loading.total()
        parts = model.listed(plan.host) if loaded else f"{model.listed(plan.loading)}, while weights are read"
        allowed, missing = format_bytes(limits.ram_bytes), format_bytes_up(missing_bytes)
        message = f"{limits.ram_name} of {allowed} is too small by {missing} ({parts})"
        raise ShortageError(message, "host memory", missing_bytes)


def as_many_cards_as_help(planned: Callable[[int], RunPlan], num_cards: int, machine: MachineProfile) -> RunPlan:
    """Return what is `planned` for the first card, or for so many as are predicted to be faster or are all that host
    memory has room for. Where some hold everything the next one is not asked; where it refuses, it is not needed.

    Raises:
        BudgetError, OptionError: As of a plan of one card or, where there cannot be one, of all.
    """
    plans, refused = list[RunPlan](), list[OffloadError]()
    for count in range(1, num_cards + 1):
        try:
            plans.append(planned(count))
        except OffloadError as error:
            refused.append(error)
        if plans and not plans[-1].streamed_bytes:
            break
    if not plans:
        raise next((error for error in refused if not isinstance(error, BudgetError)), refused[-1])
    return max(plans, key=lambda plan: (-plan.short_of_host_bytes, tok_per_s(plan, machine)))


def find_plan(request: RuntimeConfig, machine: MachineProfile, limits: MemoryLimits) -> RunPlan:
    """Return the fastest plan within device and page-locked memory, and within host memory if there is one; of the
    context asked for, or where it is None of the longest one that host memory has room for. Errors as of `plan_run`."""
    if request.max_batch is None:
        return _find_widest_plan(request, machine, limits)
    plan = _fastest_plan(request, machine, limits)
    # More than once: with another context other layers may find room on the device, and their keys and values leave
    # less of a token to host memory.
    while request.context is None and plan.target.kv_layers_on_host and plan.short_of_host_bytes:
        fewer = plan.short_of_host_bytes / plan.target.token_bytes
        shorter = int(plan.target.context_tokens - fewer) // BLOCK_TOKENS * BLOCK_TOKENS
        if shorter < LEAST_CONTEXT_TOKENS:
            break
        plan = _fastest_plan(replace(request, context=shorter), machine, limits)
    return replace(plan, request=request)


def _find_widest_plan(request: RuntimeConfig, machine: MachineProfile, limits: MemoryLimits) -> RunPlan:
    """The plan of as many sequences as fit beside one another, up to 16, while all together get more tokens a second,
    without streaming more than one does: what every pass brings is then shared by all of them. Of experts, for which
    each leaves less room, more may be missing. Each has the context that one alone has. Errors as of one."""

    def streamed_bytes(plan: RunPlan) -> int:
        return plan.streamed_bytes - plan.target.missed_bytes(plan.target.batch)

    widest = find_plan(replace(request, max_batch=1), machine, limits)
    context, most_bytes = widest.target.context_tokens, streamed_bytes(widest)
    fewest, most = 1, _MOST_SEQUENCES
    while fewest < most:
        count = min(2 * fewest, (fewest + most + 1) // 2)  # few at first: where weights are streamed two are too many
        try:
            plan = find_plan(replace(request, max_batch=count, context=context), machine, limits)
        except OffloadError:
            plan = None
        fits = plan is not None and not plan.short_of_host_bytes and streamed_bytes(plan) <= most_bytes
        if plan is None or not fits or tok_per_s(plan, machine) < tok_per_s(widest, machine):
            most = count - 1
        else:
            widest, fewest = plan, count
    return widest


def _fastest_plan(request: RuntimeConfig, machine: MachineProfile, limits: MemoryLimits) -> RunPlan:
    """The fastest of all ways to place a request; one that host memory has room for, if there is one, else what takes
    the least of it. Of equally fast ones it is that whose passes bring the fewest bytes, and the first of those."""
    found, refused, obstacle = list[RunPlan](), list[OffloadError](), ""
    candidates = list[RunPlan]()
    for stored, nodes in product(_storing(request), _tree_rooms(request)):
        try:
            candidates += _candidates(make_plan(stored, limits, tree_nodes=nodes))
        except (BudgetError, OptionError) as error:
            refused.append(error)
    for candidate in candidates:
        try:
            found.append(_placed(candidate))
        except (BudgetError, OptionError) as error:
            refused.append(error)
            if candidate.has_verifier:
                obstacle = str(error).removeprefix(_NO_VERIFIER).split(": ")[0]
    if not found:
        short = [error for error in refused if isinstance(error, ShortageError)]
        raise min(short, key=lambda error: error.missing_bytes) if short else refused[0]

    def rank(plan: RunPlan) -> tuple[float, ...]:
        return -plan.short_of_host_bytes, tok_per_s(plan, machine), -plan.streamed_bytes

    best = max(found, key=rank)
    other = max((plan for plan in found if plan.has_verifier is not best.has_verifier), key=rank, default=None)
    reason = "" if best.has_verifier else obstacle
    if other is not None:
        pair = sorted((best, other), key=lambda plan: not plan.has_verifier)
        speeds = " against ".join(f"{tok_per_s(plan, machine):.3g}" for plan in pair)
        outcome = "faster" if best.has_verifier else "slower"
        reason = f"predicted to be {outcome}: {speeds} tokens/s by the figures of {machine.name}"
    return replace(best, reason=reason)


def _storing(request: RuntimeConfig) -> list[RuntimeConfig]:
    """The ways to keep the weights that are left open: those of quantised files as they are stored, which takes the
    fewest bytes, or the draft's decoded, or those of both, which takes products of many rows the least time; bf16 as
    it is, or in 12 bits."""
    draft = replace(request, draft=getattr(request.draft, "as_decoded", request.draft))
    is_open = request.weights == "auto" and request.device_type != "cpu" and not request.drafts_itself  # which streams
    candidates = [request, draft, replace(draft, target=request.target.as_decoded)] if is_open else [request]
    encodes: tuple[Encode, ...] = ("none", "always") if request.encode == "auto" else (request.encode,)
    found = [replace(one, encode=encode) for one in candidates for encode in encodes]
    return [one for number, one in enumerate(found) if one not in found[:number]]


def _tree_rooms(request: RuntimeConfig) -> list[int]:
    """Sizes of trees that there may be room for. Of n-grams, which have much to say only where a text repeats itself,
    that comes first which makes nothing slower; of a draft the least."""
    mode, who = request.speculation.mode, request.proposed_by
    if request.tree_nodes is not None:
        return [request.tree_nodes]
    if request.gamma is not None or mode in ("none", "triforce") or who == "none":
        return [0]
    rooms = COPY_TREE_ROOMS if request.drafts_itself else TREE_ROOMS
    return [_COPIED, 0] if who == "ngram" else [0, *rooms]


def _candidates(plan: RunPlan) -> Iterator[RunPlan]:
    """Yield every cache that the draft may get, with and without a retrieval verifier, and both places for the target's
    keys and values, and for an embedding that is not the head: it is on the host where passes bring less of a model
    that the device has no room for. Nothing is placed yet."""
    draft, mode, kv, nodes = plan.draft, plan.request.speculation.mode, plan.request.kv, plan.tree_room
    drafts, copies = [draft], draft is not None and draft.is_copy
    if draft is not None:
        most = max(TREE_ROOMS[0], plan.target.context_tokens // 2) if plan.request.tree_nodes is None else nodes
        if nodes > most:
            return  # a tree has to fit behind the text: room for more than half of the context is hardly ever used
        is_open = draft.options.draft_cache == "auto" and not (nodes or copies or draft.is_head)
        # All of it takes memory from the target.
        if is_open and draft.cache != "streaming" and draft.streaming_tokens < draft.context_tokens:
            drafts.append(replace(draft, cache="streaming"))
    decided = mode != "auto" or draft is None or draft.is_head or copies or nodes
    verified = (mode == "triforce",) if decided else (False, True)
    places, untied = ("gpu", "host") if kv == "auto" else (kv,), bool(plan.target.layout.embedding.tensors)
    places = ("gpu",) if copies else places  # where the copy reads what the target has committed
    for one, verifies, place, on_host in product(drafts, verified, places, (False, True) if untied else (False,)):
        borrows = verifies and plan.target.batch == 1  # else another sequence may be decoding
        cache = "host" if place == "host" else "full"
        target = replace(plan.target, cache=cache, borrows=borrows, verified=verifies, embedding_on_host=on_host)
        yield replace(plan, draft=one, has_verifier=verifies, target=target)


def _placed(plan: RunPlan) -> RunPlan:
    """Return a candidate, placed within device and page-locked memory.

    Raises:
        BudgetError: Something does not fit; OptionError: There cannot be a retrieval verifier, or so many layers.
    """
    asked, layers = plan.request.resident_layers, plan.target.config.num_layers
    if asked is not None and not 0 <= asked <= layers:
        raise OptionError(f"resident layers must be between 0 and {layers}, the model's layers, not {asked}")
    placed = _deal(plan) if len(plan.limits.cards) > 1 else _place(plan, asked)
    check_copy(placed)
    if not plan.has_verifier:
        return _stage(placed)
    _check_verifier(placed)
    return placed  # nothing has to be staged


_NO_VERIFIER = "no TriForce here: "


def _check_verifier(plan: RunPlan) -> None:
    """Refuse a retrieval verifier that cannot be, with what would help."""
    target, draft, limits, budget = plan.target, plan.draft, plan.limits, plan.target.options.budget_tokens
    context, streamed = target.context_tokens, plan.placement.streamed_layers
    # Behind its last position a draft has nothing to say, and the verifier would wait for it.
    reach = context if draft is None or draft.cache == "streaming" else draft.context_tokens
    other = f"or use --speculation {'none' if draft is None else 'chain'}"  # a chain takes somebody to propose
    for fine, why, remedies in (
        (budget <= context, f"a retrieval budget of {budget} tokens is more than the context of {context}",
         "lower --budget-tokens, raise --context, "),
        (len(target.full_layers) == len(target.config.attentions),
         "it needs full attention, and layers of this model have sliding windows", ""),
        (reach >= context, f"the draft was made for {reach} tokens and the context has {context}",
         "take --draft-cache streaming, lower --context, "),
    ):  # fmt: skip
        require(fine, f"{_NO_VERIFIER}{why}: {remedies}{other}")
    missed = round((1 - target.pool_share) * target.num_experts)
    memory, missing_bytes = "device memory", target.bytes_over_link(streamed) + missed * target.expert_bytes
    why = f"beside it {len(streamed)} of {target.config.num_layers} layers would be streamed"
    why += f" and {missed} of {target.num_experts} experts are not on the device" if missed else ""
    asked = {"expert-pool": plan.request.expert_pool, "resident-layers": plan.request.resident_layers}
    dropped = "".join(f"drop --{name}, " for name, value in asked.items() if value is not None)
    remedies = f"{dropped}raise --vram, lower --context, {other}"
    comes = bool(streamed or missed)  # more VRAM makes those fewer, and not what else is page-locked
    needed_bytes = target.host_kv_bytes if comes else plan.pinned_bytes
    if limits.pinned_bytes is not None and (needed_bytes > limits.pinned_bytes or not comes):
        memory, missing_bytes = "page-locked memory", needed_bytes - limits.pinned_bytes
        allowed, needed, missing = map(format_bytes, (limits.pinned_bytes, needed_bytes, missing_bytes))
        why = (
            "it reads keys and values where they lie in host memory, which takes page-locked memory, and "
            f"{limits.pinned_name} page-locks {allowed} of the {needed} of the KV cache, too little by {missing}"
        )
        remedies = f"allow more with --pinned, lower --context (now {context}), raise --vram, {other}"
    if missing_bytes > 0:
        raise ShortageError(f"{_NO_VERIFIER}{why}: {remedies}", memory, missing_bytes)


# --- layers on one card


@lru_cache(maxsize=4096)  # every way to place a model asks for the same
def _spread(count: int, num_layers: int) -> tuple[int, ...]:
    """`count` of `num_layers` indices, evenly spread: a resident layer computes while the link fills the ring."""
    return tuple(sorted({(2 * index + 1) * num_layers // (2 * count) for index in range(count)}))


def _evenly(placement: Placement, resident: int, buffers: int) -> Placement:
    """So many of its layers on the device, evenly spread, and the others in buffers."""
    layers = placement.layers
    return replace(placement, resident_layers=_some(layers, resident), num_buffers=min(buffers, len(layers) - resident))


def _place(plan: RunPlan, asked: int | None) -> RunPlan:
    """The layers that a card has, those of `asked` on the device or else as many as fit, so that a pass brings little;
    then experts in what is left: a byte of anything else is read by every token.

    Args:
        plan: What the card has.
        asked: Resident layers that were asked for.

    Raises:
        BudgetError: Not even a ring of two buffers fits with experts for a row, or what was asked for does not.
    """
    experts, size = plan.target.experts, plan.request.expert_pool
    if not experts:
        return _place_layers(plan, asked)
    each_bytes, least = plan.target.expert_bytes, max(one.chosen for one in experts.values())
    wanted = least if size is None else min(plan.target.num_experts, size // each_bytes)
    whole = None if wanted == plan.target.num_experts else wanted
    placed = _place_layers(plan.with_placements(replace(plan.placement, pool_buffers=whole)), asked)
    if size is not None or whole is None:
        return placed
    limit_bytes, room = plan.limits.device_bytes, plan.target.num_experts
    if limit_bytes is not None:
        room = min(room, wanted + (limit_bytes - placed.device_bytes) // each_bytes)
    buffers = None if room == plan.target.num_experts else room
    return plan.with_placements(replace(placed.placement, pool_buffers=buffers))


def _place_layers(plan: RunPlan, asked: int | None) -> RunPlan:
    """Place the layers of a card, whose pool of experts is what the plan says. Arguments and errors as of `_place`."""
    target, placement, limit_bytes = plan.target, plan.placement, plan.limits.device_bytes
    if limit_bytes is None:  # all keys and values stay on the host, as asked
        resident = len(placement.layers) if asked is None else asked
        return plan.with_placements(_evenly(placement, resident, RING_BUFFERS))
    left_bytes = limit_bytes - plan.needed.total() + target.held_bytes(placement)
    smallest = min(map(target.layout.layer_bytes.__getitem__, target.layers))
    most = min(len(target.layers), max(0, left_bytes) // smallest)
    counts = range(most, -1, -1) if asked is None else (asked,)
    tried = (_evenly(placement, count, buffers) for buffers in (RING_BUFFERS, 2) for count in counts)
    first = next((one for one in tried if target.held_bytes(one) <= left_bytes), None)
    if first is None:
        least = plan.with_placements(_evenly(placement, asked or 0, 2))
        missing_bytes = least.device_bytes - limit_bytes
        allowed, missing = format_bytes(limit_bytes), format_bytes(missing_bytes)
        why = f"the allowed {plan.limits.device_name} of {allowed} is too small by {missing}"
        needed = f"{format_bytes_up(least.device_bytes)} is the least ({model.listed(least.device)})"
        raise ShortageError(f"{why}: {needed}", "device memory", missing_bytes)
    if not target.on_host:
        return plan.with_placements(first)
    # A layer of keys and values that stays spares more of the link than it takes (its open blocks are there in any
    # case), so fewer resident layers of weights may be better. But none before the ring is whole: its last buffer comes
    # before anything that stays, or the memory that lets it in would take layers away from the device.
    layers, largest, resident = target.full_layers, target.largest_kv_layer, len(first.resident_layers)
    each_bytes = target.reserved_kv_bytes(largest) - target.open_kv_bytes(largest)
    brought_bytes = target.streamed_kv_bytes(*largest, target.context_tokens - 1)
    streaming_bytes = target.kv_ring_bytes + target.prefill_workspace_bytes  # not needed where all stay

    def spared(count: int, buffers: int) -> tuple[int, int]:
        """Bytes that a pass does not bring where so many layers of weights stay, and layers of keys and values that
        stay beside them."""
        weight_bytes = target.bytes_of_layers(_some(target.layers, count))
        spare_bytes, kept = left_bytes - target.held_bytes(_evenly(placement, count, buffers)), 0
        if buffers == min(RING_BUFFERS, len(target.layers) - count) and spare_bytes >= 0:
            if len(layers) * each_bytes - streaming_bytes <= spare_bytes:
                kept = len(layers)
            elif each_bytes > 0:
                kept = min(len(layers) - 1, spare_bytes // each_bytes)
        return weight_bytes + kept * brought_bytes, kept

    counts = range(resident, -1, -1) if asked is None and not plan.has_verifier else (resident,)
    shares = [(resident, first.num_buffers), *((n, min(RING_BUFFERS, len(target.layers) - n)) for n in counts)]
    (_, kept), (count, buffers) = max(((spared(*one), one) for one in shares), key=lambda found: found[0][0])
    best = _evenly(placement, count, buffers)
    return plan.with_placements(replace(best, resident_kv_layers=_some(layers, kept)))


def _some(layers: Sequence[int], count: int, *, evenly: bool = True) -> tuple[int, ...]:
    """`count` of some layers, evenly spread or else the first of them."""
    return tuple(layers[index] for index in (_spread(count, len(layers)) if evenly else range(max(0, count))))


# --- dealt out to several cards


@lru_cache(maxsize=4096)
def _interleaved(counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The layers of each card that gets so many of them, evenly interleaved: in turn, where all get as many."""
    middles = sorted(((2 * number + 1) / count, card) for card, count in enumerate(counts) for number in range(count))
    owners = [card for _, card in middles]
    return tuple(tuple(layer for layer, owner in enumerate(owners) if owner == card) for card in range(len(counts)))


class _Deal(NamedTuple):
    """What each card makes of the layers that it gets, its memory that is short and its copies in bytes over the first
    card's link; and of all of them what is to be small: memory that is short, the longest copies, unevenness."""

    cards: list[RunPlan]
    loads: list[tuple[int, float]]
    rank: tuple[int, float, int]
    short: ShortageError | None


def _copied_bytes(card: RunPlan, num_cards: int) -> float:
    """What a pass brings to a card, or as much as takes as long, over the first card's link: keys and values that the
    ring has no room for come in turn, if the others have as many."""
    target, ring_bytes = card.target, card.target.kv_ring_bytes
    streamed = target.streamed_kv(target.context_tokens - 1).values()
    in_turn = sum(max(0, nbytes - ring_bytes) for nbytes in streamed) + sum(streamed) * (num_cards - 1) // num_cards
    return max(card.streamed_bytes, in_turn) / card.limits.cards[0].link_ratio


def _dealt(plan: RunPlan, dealt: Sequence[Sequence[int]]) -> _Deal:
    """Layers placed on each card. The ring of keys and values is the one with which the links of all cards are busy,
    where it fits and brings less."""
    asked, counts, cards, loads = plan.request.resident_layers, [len(layers) for layers in dealt], [], []
    short = None
    for number, card in enumerate(plan.with_placements(*map(model.all_resident, dealt)).cards):
        begin, end = (sum(counts[:count]) * (asked or 0) // sum(counts) for count in (number, number + 1))
        share = None if asked is None else end - begin  # in proportion
        rings = [card.target, card.target.with_overlapped_kv_ring(len(dealt))] if card.target.on_host else [card.target]
        placed, refused = list[tuple[float, RunPlan]](), list[ShortageError]()
        for target in rings:
            try:
                one = _place(replace(card, target=target), share)
                placed.append((_copied_bytes(one, len(dealt)), one))
            except ShortageError as error:
                refused.append(error)
        if not placed:
            short = short or refused[0]
        copied, best = min(placed, key=itemgetter(0), default=(0.0, card))
        cards.append(best)
        loads.append((0 if placed else refused[0].missing_bytes, copied))
    missing, copies = zip(*loads, strict=True)
    return _Deal(cards, loads, (sum(missing), max(copies), max(counts) - min(counts)), short)


def _uses_host(deal: _Deal) -> bool:
    """Whether anything is on the host, even keys and values that no pass brings."""
    return any(card.streamed_bytes or card.target.kv_layers_on_host for card in deal.cards)


def _deal(plan: RunPlan) -> RunPlan:
    """Deal the layers of a plan out to its cards, so that the copies of the one that takes longest for them take the
    least time; of equals the most even.

    From even counts on layers go from the card that is short of memory, or whose copies take longest, to others, half
    of the model at first and fewer where that gains nothing. Layers are dealt out in turn, so that all links are busy,
    and all cards, where a prefill goes layer by layer; where everything is on the cards, in blocks: an 80-layer model
    then crosses 2 times in place of 80, which are predicted to take 2.4 ms of a pass of two RTX 4090s.

    Raises:
        BudgetError: One card is too small; says which.
        OptionError: There are more cards than layers.
    """
    layers, cards = plan.target.config.num_layers, len(plan.limits.cards)
    if cards > layers:
        raise OptionError(f"{cards} cards have no layer each of a model of {layers}: name fewer with --devices")
    # The first card has the embedding and the head, so that the others get what does not go evenly.
    counts = [layers * (card + 1) // cards - layers * card // cards for card in range(cards)]
    best = _dealt(plan, _interleaved(tuple(counts)))
    moved = max(counts) // 2 if best.rank[:2] > (0, 0.0) else 0
    while moved:
        giver, *takers = sorted(range(cards), key=lambda card: (best.loads[card], counts[card]), reverse=True)
        for taker in reversed(takers):
            changed = [count + moved * ((card == taker) - (card == giver)) for card, count in enumerate(counts)]
            if changed[giver] > 0 and (found := _dealt(plan, _interleaved(tuple(changed)))).rank < best.rank:
                counts, best = changed, found
                break
        else:
            moved //= 2
    if best.short is not None:
        raise best.short
    ends = list(accumulate(counts))
    blocks = [tuple(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]
    if not _uses_host(best):  # layers of other windows take other memory, so that blocks may not fit where turns do
        in_blocks = _dealt(plan, blocks)
        best = best if in_blocks.short or _uses_host(in_blocks) else in_blocks
    # If all cards keep as many layers of keys and values these are spread; else the first ones, behind which all cards
    # stream in turn: two streaming layers of one card in a row leave the link of the other idle, 1.05 in place of
    # 0.92 s a pass of a 7B with 120K tokens.
    kept = [(card.target.full_layers, len(card.placement.resident_kv_layers)) for card in best.cards]
    evenly = len({(len(layers), count) for layers, count in kept}) == 1
    chosen = [_some(layers, count, evenly=evenly) for layers, count in kept]
    pairs = zip(best.cards, chosen, strict=True)
    return plan.with_placements(*(replace(card.placement, resident_kv_layers=layers) for card, layers in pairs))


# --- staged, where the system does not lock all that a run streams from


def _stage(plan: RunPlan) -> RunPlan:
    """Page-lock what a placed run streams as far as that is allowed; the rest is staged. Several cards get their share
    in proportion to what each streams, beside what it stages through.

    Raises:
        BudgetError: Not even the rings that staging takes may be locked.
    """
    limit_bytes, cards = plan.limits.pinned_bytes, plan.target.cards
    fixed = {name: plan.host[name] for name in ("rows between cards", "embedding", "experts in host memory")}
    needed = [_streamed_from_bytes(card) for card in cards]
    if limit_bytes is None or sum(needed) + sum(fixed.values()) <= limit_bytes:
        return plan
    least = [with_staging_rings(card, 0) if n else card.placement for card, n in zip(cards, needed, strict=True)]
    parts = +model.Parts(
        {
            "a ring to stage layers through": sum(one.h2d_ring.nbytes for one in least),
            **fixed,
            "pieces to write the KV cache through": sum(one.d2h_ring.nbytes for one in least),
        }
    )
    left_bytes = limit_bytes - parts.total()
    if left_bytes < 0:
        why = f"page-locks {format_bytes(limit_bytes)} at most, too little by {format_bytes_up(-left_bytes)}"
        message = f"{plan.limits.pinned_name} {why} ({model.listed(parts)})"
        raise ShortageError(message, "page-locked memory", -left_bytes)
    limits = [one.ring_bytes + left_bytes * n // sum(needed) for one, n in zip(least, needed, strict=True)]
    return plan.with_placements(*(place_staged(card, limit) for card, limit in zip(cards, limits, strict=True)))


def _streamed_from_bytes(target: ModelPlan) -> int:
    """Host memory that passes copy from."""
    return target.host_kv_bytes + target.host_bytes_of_layers(target.placement.streamed_layers)


def with_staging_rings(target: ModelPlan, available_bytes: int) -> Placement:
    """Return the placement of a target with the rings that it is staged through, within `available_bytes` of
    page-locked memory or, at least, two pieces each."""
    streamed, on_host = target.placement.streamed_layers, target.kv_layers_on_host
    largest = max(target.layer_bytes if streamed else 0, target.kv_piece_bytes if on_host else 0)
    d2h = model.NO_RING
    if on_host:
        # A prompt's blocks are written as they become full, piece by piece of the prompt.
        written_tokens = -(-target.chunk_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
        written_bytes = target.kv_bytes_of(target.largest_kv_layer, written_tokens)
        piece_bytes = min(_WRITEBACK_PIECE_BYTES, -(-written_bytes // PAGE_BYTES) * PAGE_BYTES)
        fitting = (available_bytes - ring_shape(largest, 0).nbytes) // piece_bytes
        d2h = RingShape(piece_bytes, max(FEWEST_PIECES, min(_MOST_WRITEBACK_PIECES, fitting)))
        available_bytes -= d2h.nbytes
    return replace(target.placement, h2d_ring=ring_shape(largest, available_bytes), d2h_ring=d2h)


def place_staged(target: ModelPlan, limit_bytes: int) -> Placement:
    """Stage as many layers as page-locked memory is short of. A KV cache is locked first, since it is written as well
    as read: layers of it are staged only where it does not fit beside the rings, and then what is left locks weights.

    Args:
        target: Its layers placed on the device or the host.
        limit_bytes: Most page-locked memory: no less than the rings take that are as small as can be.
    """
    placement, streamed, kv_layers = target.placement, target.placement.streamed_layers, target.kv_layers_on_host
    if _streamed_from_bytes(target) <= limit_bytes:
        return replace(placement, staged_layers=(), staged_kv_layers=(), h2d_ring=model.NO_RING, d2h_ring=model.NO_RING)
    kv_bytes, staged_kv = target.host_kv_bytes, tuple[int, ...]()
    ringed = with_staging_rings(target, limit_bytes - kv_bytes)
    left_bytes = limit_bytes - ringed.ring_bytes - kv_bytes
    if left_bytes < 0 or not streamed:
        ringed = with_staging_rings(target, limit_bytes // _RINGS_SHARE)
        left_bytes = limit_bytes - ringed.ring_bytes
        fitting = left_bytes // target.reserved_kv_bytes(target.largest_kv_layer)
        kept = _some(kv_layers, min(fitting, len(kv_layers) - 1))
        staged_kv = tuple(layer for layer in kv_layers if layer not in kept)
        left_bytes -= target.reserved_kv_bytes(kept)
    # Spread, so that locked and staged layers alternate.
    counts = range(len(streamed) - (not staged_kv), -1, -1)
    choices = ([streamed[index] for index in _spread(count, len(streamed))] for count in counts)
    locked = next((layers for layers in choices if target.host_bytes_of_layers(layers) <= left_bytes), [])
    staged = tuple(layer for layer in streamed if layer not in locked)
    return replace(ringed, staged_layers=staged, staged_kv_layers=staged_kv)
