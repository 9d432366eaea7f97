"""One way to place a run's layers: which stay on the device, of which the keys and values, and which card has which.

Fixed parts come first (embedding and head, KV cache, draft, workspace). What is left of the device holds the ring and
as many resident layers as fit. Several cards get their layers dealt out, each placed as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate

from offload_runtime.errors import BudgetError, OptionError
from offload_runtime.kv import KV_RING_BUFFERS, kv_cache_bytes
from offload_runtime.plan.memory import (
    ModelPlan,
    Placement,
    RunPlan,
    all_resident,
    listed,
    unmatched_kv_bytes,
)
from offload_runtime.sizes import format_bytes, format_bytes_up

# Two buffers would stall on every layer boundary; the fourth and later ones only bridge longer pauses between passes.
RING_BUFFERS = 3


# --- on one card


@lru_cache(maxsize=4096)  # every way to place a model asks for the same
def spread(count: int, num_layers: int) -> tuple[int, ...]:
    """`count` of `num_layers` indices, evenly spread: a resident layer computes while the link fills the ring."""
    return tuple(sorted({(2 * index + 1) * num_layers // (2 * count) for index in range(count)}))


def place_layers(plan: RunPlan) -> RunPlan:
    """Choose resident layers and ring: as many layers stay as are asked for, or else as fit. With several cards, deal
    the layers out first.

    Raises:
        BudgetError: Not even a ring of two buffers fits, or the asked resident layers do not.
        OptionError: More resident layers were asked for than the model has, or there are more cards than layers.
    """
    placement, layers, asked = plan.placement, plan.placement.num_layers, plan.request.resident_layers
    if asked is not None and not 0 <= asked <= layers:
        raise OptionError(f"resident layers must be between 0 and {layers}, the model's layers, not {asked}")
    if plan.limits.num_cards > 1:
        return _partitioned(plan, lambda card: [place_layers(card)])
    available_bytes = plan.limits.device_bytes
    if available_bytes is None:
        return plan.with_placement(_evenly(placement, layers if asked is None else asked, RING_BUFFERS))
    left_bytes = available_bytes - plan.fixed_bytes
    most = min(layers, max(0, left_bytes) // plan.target.least_layer_bytes)
    counts = range(most, -1, -1) if asked is None else (asked,)
    for buffers in (RING_BUFFERS, 2):
        for resident in counts:
            found = _evenly(placement, resident, buffers)
            if plan.target.held_bytes(found) <= left_bytes:
                return plan.with_placement(found)
    raise _too_small(plan, available_bytes, asked or 0)


def _evenly(placement: Placement, resident: int, buffers: int) -> Placement:
    """So many of its layers on the device, evenly spread, and the others in buffers."""
    layers = placement.layers
    kept = tuple(layers[index] for index in spread(resident, len(layers)))
    num_buffers = min(buffers, len(layers) - resident)
    return Placement(layers, kept, num_buffers, kv_ring_buffers=placement.kv_ring_buffers)


def place_kv_on_host(plan: RunPlan) -> list[RunPlan]:
    """The ways to share the device between layers of weights and of the KV cache; beside a retrieval verifier the first
    one, in which weights come before keys and values. With several cards one way, in which each shares its memory so
    that it streams the least. Errors as of `place_layers`."""
    target, borrowable_bytes = plan.target, 0
    if plan.has_verifier and target.batch == 1:  # else another sequence may be decoding
        budget_tokens = plan.request.speculation.budget_tokens
        borrowable_bytes = kv_cache_bytes(target.config, target.dtype, capacity_tokens=budget_tokens, batch=1)
    plan = replace(plan, target=replace(target, cache="host", borrowable_bytes=borrowable_bytes))
    return [_partitioned(plan, _kv_options)] if plan.limits.num_cards > 1 else _kv_options(plan)


def _kv_options(plan: RunPlan) -> list[RunPlan]:
    """The same of one card and a KV cache on the host."""
    target, plan = plan.target, place_layers(plan)
    limit_bytes, placement = plan.limits.device_bytes, plan.placement
    placements = [placement]
    if limit_bytes is not None and plan.request.resident_layers is None and not plan.has_verifier:
        # A layer of keys and values that stays spares more of the link than it takes (its open blocks are there in any
        # case), so fewer resident layers of weights may be better.
        buffers = placement.num_buffers or min(RING_BUFFERS, placement.num_layers)
        resident = len(placement.resident_layers) - max(0, buffers - placement.num_buffers - 1)
        placements += [_evenly(placement, count, buffers) for count in range(resident - 1, -1, -1)]
    spare_bytes = None if limit_bytes is None else limit_bytes - plan.fixed_bytes
    return [plan.with_placement(_with_kv_layers(target, one, spare_bytes)) for one in placements]


def _with_kv_layers(target: ModelPlan, placement: Placement, spare_bytes: int | None) -> Placement:
    """As many layers of the KV cache on the device as fit into `spare_bytes` beside layers of weights; None for no
    limit, where all stay on the host, as asked.

    None before the ring is whole: its last buffer comes before anything that stays, or the memory that lets it in would
    take layers away from the device.
    """
    if spare_bytes is None or placement.num_buffers < min(RING_BUFFERS, len(placement.streamed_layers)):
        return placement
    layers, each = len(target.full_layers), target.kv_layer_bytes - target.open_kv_bytes(target.largest_kv_layer)
    spare_bytes -= target.held_bytes(placement)
    if layers * each - target.kv_ring_bytes - target.prefill_workspace_bytes <= spare_bytes:
        count = layers  # nothing is streamed, and what streaming takes is not needed
    else:
        count = layers if each <= 0 else max(0, min(layers - 1, spare_bytes // each))
    # Behind the first ones all cards stream in turn, however many each keeps; where all keep as many, `_partitioned`
    # spreads them. Two streaming layers of one card in a row would leave the link of the other idle: 1.05 in place of
    # 0.92 s a pass of a 7B with 120K tokens.
    evenly = placement.kv_ring_buffers == KV_RING_BUFFERS  # no other cards to wait for
    return replace(placement, resident_kv_layers=layers_to_keep(target.full_layers, count, evenly=evenly))


def layers_to_keep(layers: Sequence[int], count: int, *, evenly: bool = True) -> tuple[int, ...]:
    """`count` of some layers, evenly spread or else the first of them."""
    return tuple(layers[index] for index in (spread(count, len(layers)) if evenly else range(count)))


def _least_placed(plan: RunPlan, resident: int) -> RunPlan:
    """What takes the least of the device that can be."""
    return plan.with_placement(_evenly(plan.placement, resident, 2))


def _too_small(plan: RunPlan, available_bytes: int, resident: int) -> BudgetError:
    least = _least_placed(plan, resident)
    return BudgetError(
        f"the allowed {plan.limits.device_name} of {format_bytes(available_bytes)} is too small by "
        f"{format_bytes(least.device_bytes - available_bytes)}: {format_bytes_up(least.device_bytes)} is the least "
        f"({listed(least.device)})"
    )


# --- dealt out to several cards


@lru_cache(maxsize=4096)
def interleaved(counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The layers of each card that gets so many of them, evenly interleaved: in turn, where all get as many."""
    middles = sorted(((2 * number + 1) / count, card) for card, count in enumerate(counts) for number in range(count))
    owners = [card for _, card in middles]
    return tuple(tuple(layer for layer, owner in enumerate(owners) if owner == card) for card in range(len(counts)))


def in_blocks(counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The layers of each card that gets so many of them, one after the other, so that rows cross least."""
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


def _place_on_cards(
    plan: RunPlan, placements: Callable[[RunPlan], list[RunPlan]], dealt: Sequence[tuple[int, ...]],
    most_kv_layers: Sequence[int] | None = None,
) -> list[_CardLoad]:  # fmt: skip
    """What each card makes of the layers that it is dealt, placed by that of its `placements` which streams the least,
    and where it keeps keys and values of so many layers at most."""
    asked, counts, found = plan.request.resident_layers, [len(layers) for layers in dealt], list[_CardLoad]()
    for card, own in enumerate(plan.with_placements(map(all_resident, dealt)).cards):
        resident = None
        if asked is not None:  # of the whole model, in proportion
            begin, end = (sum(counts[:cards]) * asked // sum(counts) for cards in (card, card + 1))
            resident = end - begin
        most = counts[card] if most_kv_layers is None else most_kv_layers[card]
        own = replace(own, request=replace(own.request, resident_layers=resident))
        found.append(_place_on_card(own, placements, most, num_cards=len(dealt)))
    return found


def _place_on_card(
    card: RunPlan, placements: Callable[[RunPlan], list[RunPlan]], most_kv_layers: int, *, num_cards: int
) -> _CardLoad:
    """Beside the least ring of keys and values, or the one with which the links of all cards are busy, where it fits
    and brings more than what it takes would."""
    buffers = card.target.overlapped_kv_buffers(num_cards) if card.target.on_host else KV_RING_BUFFERS
    found = list[_CardLoad]()
    for each in dict.fromkeys((KV_RING_BUFFERS, buffers)):
        with suppress(BudgetError):
            placed = placements(card.with_target(card.target.with_kv_ring(each)))
            placed = [_with_most_kv_layers(one, most_kv_layers) for one in placed]
            best = min(placed, key=lambda one: one.streamed_bytes)
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


def _partitioned(plan: RunPlan, placements: Callable[[RunPlan], list[RunPlan]]) -> RunPlan:
    """Deal the layers of a plan out to its cards, so that the copies of the one that takes longest for them take the
    least time; of equals the most even.

    From even counts on layers go from the card that is short of memory, or whose copies take longest, to the one with
    the shortest: as many as would even both out, and half as many where that gains nothing. Layers are dealt out in
    turn, so that all links are busy, and all cards, where a prefill goes layer by layer; where everything is on the
    cards, in blocks: an 80-layer model then crosses 2 times in place of 80, which are predicted to take 2.4 ms of a
    pass of two RTX 4090s.

    Raises:
        BudgetError: One card is too small; says which.
        OptionError: There are more cards than layers.
    """
    layers, cards = plan.placement.num_layers, plan.limits.num_cards
    if cards > layers:
        raise OptionError(f"{cards} cards have no layer each of a model of {layers}: name fewer with --devices")
    place = partial(_place_on_cards, plan, placements)
    # The first card has the embedding and the head, so that the others get what does not go evenly.
    counts = tuple(layers * (card + 1) // cards - layers * card // cards for card in range(cards))
    best, tried = place(interleaved(counts)), {counts}
    while (found := next(_better_partitions(place, counts, best, tried), None)) is not None:
        counts, best = found
    giver = max(range(cards), key=lambda card: best[card].load)
    if best[giver].missing_bytes:
        short, limit_bytes = best[giver].plan, best[giver].plan.limits.device_bytes
        assert limit_bytes is not None
        raise _too_small(short, limit_bytes, short.request.resident_layers or 0)
    dealt = interleaved(counts)
    if not _uses_host(best) and not _uses_host(blocks := place(in_blocks(counts))):
        dealt, best = in_blocks(counts), blocks
    if any(_unmatched_bytes(best)):
        # Cards that stream keys and values of as many layers wait for none, and keep more weights instead.
        most = max(len(card.plan.target.kv_layers_on_host) for card in best)
        even = place(dealt, [max(0, len(own) - most) for own in dealt])
        best = min(best, even, key=_longest_bytes)
    kept = [_kept_evenly(card.plan) for card in best]
    placed = [card.plan.placement for card in best]
    patterns = {(len(one.layers), *map(one.layers.index, own)) for one, own in zip(placed, kept, strict=True)}
    if len(patterns) == 1:  # if all cards keep the same layers of theirs, those that stream still alternate
        placed = [_keeping(card.plan, own).placement for card, own in zip(best, kept, strict=True)]
    return plan.with_placements(placed)


def _with_most_kv_layers(card: RunPlan, most: int) -> RunPlan:
    """The same where `most` layers at most keep their keys and values on the card, the first that do."""
    kept = card.placement.resident_kv_layers
    return card if len(kept) <= most else _keeping(card, kept[:most])


def _keeping(card: RunPlan, layers: tuple[int, ...]) -> RunPlan:
    """The same where the keys and values of these layers stay on the card."""
    return card.with_placement(replace(card.placement, resident_kv_layers=layers))


def _kept_evenly(card: RunPlan) -> tuple[int, ...]:
    """As many layers as keep their keys and values on the card, evenly spread."""
    return layers_to_keep(card.target.full_layers, len(card.placement.resident_kv_layers))


def _unmatched_bytes(cards: Sequence[_CardLoad]) -> list[float]:
    """`unmatched_kv_bytes` of cards, in bytes over the first one's link."""
    last = cards[0].plan.target.context_tokens - 1
    unmatched = unmatched_kv_bytes([card.plan.target for card in cards], last)
    return [nbytes / card.plan.limits.link_ratio for card, nbytes in zip(cards, unmatched, strict=True)]


def _longest_bytes(cards: Sequence[_CardLoad]) -> float:
    """Of the card whose link takes longest, with what it waits for."""
    return max(card.link_bytes + waits for card, waits in zip(cards, _unmatched_bytes(cards), strict=True))


def _uses_host(cards: Sequence[_CardLoad]) -> bool:
    """Whether some card is too small, or has anything on the host, even keys and values that no pass brings."""
    return any(card.missing_bytes or card.plan.streamed_bytes or card.plan.target.kv_layers_on_host for card in cards)


def _better_partitions(
    place: Callable[[tuple[tuple[int, ...], ...]], list[_CardLoad]], counts: tuple[int, ...], cards: list[_CardLoad],
    tried: set[tuple[int, ...]],
) -> Iterator[tuple[tuple[int, ...], list[_CardLoad]]]:  # fmt: skip
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
                found = place(interleaved(changed))
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
        on_device_bytes = target.open_kv_bytes(target.largest_kv_layer) if target.on_host else target.kv_layer_bytes
        return max(1, -(-giver.missing_bytes // max(1, on_device_bytes)))
    layer_bytes = target.bytes_of_layers(target.layers) / len(target.layers) + target.kv_layer_bytes
    both_bytes = layer_bytes / giver.plan.limits.link_ratio + layer_bytes / taker.plan.limits.link_ratio
    return max(1, round((giver.link_bytes - taker.link_bytes) / both_bytes))
