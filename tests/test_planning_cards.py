"""Plans of several cards: layers are dealt out so that no card's copies take longest, and each card fits."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_runtime.config import GB, RuntimeConfig, SpeculationOptions, parse_bytes
from offload_runtime.errors import BudgetError, OffloadError, OptionError
from offload_runtime.hardware import load_profile
from offload_runtime.kv import KV_RING_SLOTS
from offload_runtime.plan import (
    MachineFigures,
    Refusal,
    RunPlan,
    find_plan,
    forecast,
    machine_figures,
    pass_time,
    plan_or_refuse,
    plan_run,
    prefill_time,
)
from offload_runtime.plan.request import limits_of
from offload_runtime.weights import DescribedModel, describe_model
from tests.helpers.planning import CONFIGS, PROPERTY, machines, plan_or_none, requests

ONE = replace(machine_figures(load_profile("rtx4090")), ram_bytes=400 * GB, pinnable_bytes=None)
TWO, THREE = replace(ONE, num_cards=2), replace(ONE, num_cards=3)


def model(name: str) -> DescribedModel:
    return describe_model(CONFIGS / name)


def plan_on_all(request: RuntimeConfig, machine: MachineFigures) -> RunPlan:
    return plan_run(naming_all(request, machine), machine)


def naming_all(request: RuntimeConfig, machine: MachineFigures) -> RuntimeConfig:
    """The same, of all cards of a machine."""
    return replace(request, device=",".join(f"cuda:{card}" for card in range(machine.num_cards)))


def counts(plan: RunPlan) -> list[int]:
    return [len(share.layers) for share in plan.target.shares]


def streamed(plan: RunPlan) -> list[int]:
    return [card.streamed_bytes for card in plan.cards]


@pytest.mark.parametrize("kv", ["gpu", "host"])
def test_equal_cards_share_layers_and_bytes_alike(kv: str) -> None:
    request = RuntimeConfig(model("llama-2-7b"), "none", context=4096, kv=kv, resident_layers=0)
    plan = plan_on_all(request, TWO)
    assert counts(plan) == [16, 16]
    assert plan.target.shares[0].layers == tuple(range(0, 32, 2))  # in turn
    assert plan.target.shares[1].layers == tuple(range(1, 32, 2))
    first, second = streamed(plan)
    assert first == second == plan_on_all(request, ONE).streamed_bytes / 2
    assert plan.placement.resident_layers == () and plan.placement.num_slots == 6


def test_where_nobody_names_cards_one_is_taken_that_holds_everything() -> None:
    """Hops would only make it slower; what streams is faster on all, and what one has no room for needs them."""
    small, large = (RuntimeConfig(model(name), "none", context=2048) for name in ("llama-2-7b", "llama-3.1-70b"))
    assert plan_run(small, TWO).num_cards == 1
    assert plan_run(large, TWO).num_cards == 2
    assert plan_run(replace(small, vram_bytes=(20 * GB, 1 * GB)), TWO).num_cards == 1
    four = replace(ONE, num_cards=4)
    middle = RuntimeConfig(model("qwen2.5-32b"), "none", context=2048)  # 66 GB
    assert [plan_run(one, four).num_cards for one in (small, middle, large)] == [1, 3, 4]
    assert plan_run(replace(small, kv="gpu", context=4096, resident_layers=32, vram_bytes=12 * GB), TWO).num_cards == 2


def test_the_card_with_draft_and_head_gets_fewer_layers() -> None:
    request = RuntimeConfig(model("llama-3.1-70b"), model("llama-3.2-1b"), context=2048)
    plain, drafting = (plan_on_all(replace(request, draft=draft), TWO) for draft in ("none", request.draft))
    for plan in (plain, drafting):
        first, second = plan.cards
        assert len(first.placement.resident_layers) < len(second.placement.resident_layers)
        one_layer = plan.target.layer_bytes
        assert abs(first.streamed_bytes - second.streamed_bytes) <= 2 * one_layer
        parts = {part.name for part in second.device}
        assert not parts & {"embedding and head", "draft weights", "draft KV cache"}
        assert second.fixed_bytes < first.fixed_bytes
    assert counts(drafting)[0] < counts(plain)[0] < 40 < counts(plain)[1] < counts(drafting)[1]


@pytest.mark.parametrize("given_bytes", [(12 * GB, 18 * GB), (20 * GB, 12 * GB), (9 * GB, 17 * GB)])
def test_unequal_limits_get_layers_in_proportion(given_bytes: tuple[int, int]) -> None:
    request = RuntimeConfig(model("llama-2-13b"), "none", context=2048, vram_bytes=given_bytes)
    plan = plan_on_all(request, TWO)
    for card, limit in zip(plan.cards, given_bytes, strict=True):
        assert limit - 2 * plan.target.layer_bytes < card.device_bytes <= limit == card.limits.device_bytes
    first, second = streamed(plan)
    assert abs(first - second) <= 2 * plan.target.layer_bytes
    smaller = given_bytes.index(min(given_bytes))
    assert counts(plan)[smaller] < 20 < counts(plan)[1 - smaller]


def test_what_fits_anyway_is_dealt_out_as_evenly_as_it_can_be() -> None:
    request = RuntimeConfig(model("llama-2-13b"), "none", context=2048, vram_bytes=(9 * GB, 25 * GB))
    plan = plan_on_all(request, TWO)
    assert not plan.placement.streamed_layers and counts(plan) == [9, 31]


def test_a_slower_link_gets_fewer_bytes() -> None:
    request = RuntimeConfig(model("llama-3.1-70b"), "none", context=2048)
    limits = limits_of(TWO, request)
    slower = replace(limits, further_cards=(replace(limits.further_cards[0], link_ratio=0.5),))
    plan = find_plan(request, TWO, slower)
    first, second = streamed(plan)
    assert first == pytest.approx(2 * second, rel=0.06)
    time = pass_time(plan, TWO, length_tokens=2047, rows=1)
    assert time.link_s == max(first / 25e9, second / 12.5e9)


@pytest.mark.parametrize("cards", [2, 3])
@pytest.mark.parametrize(("name", "kv"), [("llama-2-13b", "gpu"), ("llama-2-7b-128k", "host")])
def test_where_links_bind_a_pass_takes_as_much_less_time_as_there_are_cards(name: str, kv: str, cards: int) -> None:
    """By the byte: of keys and values several cards keep more."""
    context, vram_bytes = (2048, 8 * GB) if kv == "gpu" else (120_000, 10 * GB)
    request = RuntimeConfig(model(name), "none", context=context, kv=kv, resident_layers=0, vram_bytes=vram_bytes)
    one, several = plan_on_all(request, ONE), plan_on_all(request, replace(ONE, num_cards=cards))
    before, after = (pass_time(plan, ONE, length_tokens=context - 1, rows=1) for plan in (one, several))
    assert before.bound_by == after.bound_by == "link"
    gain = before.seconds / after.seconds * after.bytes_streamed / before.bytes_streamed
    assert 0.925 * cards <= gain <= cards * (1 + 1e-9)


def test_a_small_ring_of_keys_and_values_lets_links_wait_for_each_other() -> None:
    """Half a layer's are 0.98 GB. Where they have no room the other link is idle once its own ring is full."""
    request = RuntimeConfig(model("llama-2-7b-128k"), "none", context=120_000, kv="host", resident_layers=0)
    roomy, tight = (plan_on_all(replace(request, vram_bytes=size * GB), TWO) for size in (10, 7))
    before, after = (pass_time(plan, TWO, length_tokens=119_999, rows=1) for plan in (tight, roomy))
    rings = [[card.kv_ring_slots for card in plan.target.cards] for plan in (tight, roomy)]
    assert rings == [[KV_RING_SLOTS] * 2, [10, 10]]
    layer_bytes, piece_bytes = roomy.target.streamed_kv_bytes(0, 119_999), roomy.target.cards[0].kv_piece_bytes
    assert 8 * piece_bytes > layer_bytes / 2 > 7 * piece_bytes
    rest = (card.config.num_layers * (layer_bytes - card.kv_ring_bytes) for card in tight.target.cards)
    assert before.link_s == pytest.approx(sum(rest) / 25e9) and before.lookahead_s < 0.1
    assert after.link_s == max(streamed(roomy)) / 25e9 < 0.95 * before.link_s


@pytest.mark.parametrize(("size", "kept"), [(24.0, 5), (24.8, 5), (25.2, 6)])
def test_cards_stream_keys_and_values_of_as_many_layers(size: float, kept: int) -> None:
    """Room for a sixth layer in place of four of weights would let its link wait where the other card has two layers in
    a row. Beside all weights it costs nothing: the link has less to bring."""
    request = RuntimeConfig(
        model("llama-2-7b-128k"), "none", context=120_288, kv="host", vram_bytes=[24 * GB, round(size * GB)]
    )  # fmt: skip
    plan = plan_on_all(request, TWO)
    first, second = plan.target.shares
    assert len(first.placement.resident_kv_layers) == 5 and len(second.placement.resident_kv_layers) == kept
    assert not first.placement.streamed_layers and not second.placement.streamed_layers
    # Resident ones in between let rings fill up; cards that keep unequal numbers keep their first layers.
    places = [share.placement.resident_kv_layers for share in plan.target.shares]
    assert places == [(1, 4, 8, 11, 14)] * 2 if kept == 5 else places == [tuple(range(5)), tuple(range(6))]
    layer_bytes = plan.target.streamed_kv_bytes(0, 120_287)
    assert pass_time(plan, TWO, length_tokens=120_287, rows=1).link_s == pytest.approx(11 * layer_bytes / 25e9)

    uneven = replace(second.placement, resident_layers=tuple(range(12)), num_slots=3, resident_kv_layers=(*range(6),))
    uneven_plan = plan.with_shares([first, replace(second, placement=uneven)])
    link_s = pass_time(uneven_plan, TWO, length_tokens=120_287, rows=1).link_s
    weights, waits = 4 * plan.target.layer_bytes, layer_bytes - plan.target.cards[1].kv_ring_bytes
    assert link_s == pytest.approx((10 * layer_bytes + weights + waits) / 25e9, rel=1e-6)


@pytest.mark.parametrize("sizes", [(16, 16), (16, 19), (19, 16)])
def test_behind_what_stays_the_keys_and_values_of_all_cards_come_in_turn(sizes: tuple[int, int]) -> None:
    """Two layers of one card in a row are more than its ring has room for, and the other's link would be idle."""
    request = RuntimeConfig(
        model("llama-2-7b-128k"), "none", context=120_000, kv="host", resident_layers=32,
        vram_bytes=[size * GB for size in sizes],
    )  # fmt: skip
    plan = plan_on_all(request, TWO)
    kept = [len(card.placement.resident_kv_layers) for card in plan.target.cards]
    assert min(kept) > 0 and (kept[0] == kept[1]) == (sizes[0] == sizes[1])
    streamed = [layer for layer in range(32) if layer not in plan.resident_kv_layers]
    owners = [card for layer in streamed for card, share in enumerate(plan.target.shares) if layer in share.layers]
    changes = sum(one != other for one, other in pairwise(owners))
    assert changes >= len(owners) - 1 - abs(kept[0] - kept[1])


def test_cards_compute_one_after_the_other_and_rows_hop() -> None:
    request = RuntimeConfig(model("llama-2-7b"), "none", context=2048, resident_layers=0)
    one, two = plan_on_all(request, ONE), plan_on_all(request, TWO)
    assert two.target.num_hops == 32  # between 32 layers, and from the last one back to the head
    before, after = (pass_time(plan, TWO, length_tokens=2047, rows=4) for plan in (one, two))
    assert after.hop_s == pytest.approx(32 * (30e-6 + 4 * 4096 * 2 / 25e9)) and before.hop_s == 0
    assert after.compute_s == pytest.approx(before.compute_s + after.hop_s, rel=0.01)
    slow = replace(TWO, hop_us=1000.0, hop_gbps=1.0)
    assert pass_time(two, slow, length_tokens=2047, rows=4).hop_s == pytest.approx(32 * (1e-3 + 4 * 4096 * 2 / 1e9))


def test_prompts_are_pipelined_between_cards() -> None:
    request = RuntimeConfig(model("llama-2-7b"), "none", context=4096, resident_layers=0)
    one, two = plan_on_all(request, ONE), plan_on_all(request, TWO)
    before, long, short = (
        prefill_time(plan, TWO, tokens) for plan, tokens in ((one, 4000), (two, 4000), (two, one.target.chunk_tokens))
    )
    hops_s = 32 * (30e-6 + 4000 * 4096 * 2 / 25e9)
    assert long.compute_s == pytest.approx((before.compute_s + hops_s) / 2, rel=0.01)
    assert short.compute_s > prefill_time(one, ONE, one.target.chunk_tokens).compute_s  # of one piece, card by card


def test_links_share_the_memory_of_the_host() -> None:
    request = RuntimeConfig(model("llama-3.1-70b"), "none", context=2048)
    plan = plan_on_all(request, TWO)
    free, bound = (pass_time(plan, replace(TWO, host_gbps=gbps), length_tokens=2047, rows=1) for gbps in (None, 30.0))
    assert bound.link_s == pytest.approx(plan.streamed_bytes / 30e9) and free.link_s < bound.link_s


def test_odd_layers_and_three_cards() -> None:
    request = RuntimeConfig(model("llama-2-13b"), "none", context=2048)
    plan = plan_on_all(request, THREE)
    assert sorted(counts(plan)) == [13, 13, 14] and counts(plan)[0] == 13
    assert sorted(layer for share in plan.target.shares for layer in share.layers) == list(range(40))
    config = request.target.config()
    five = DescribedModel(replace(config, num_layers=5, layer_windows=(), layer_rope=()), request.target.native_dtype)
    assert sorted(counts(plan_on_all(replace(request, target=five), TWO))) == [2, 3]
    assert counts(plan_on_all(replace(request, target=five), replace(ONE, num_cards=5))) == [1] * 5
    with pytest.raises(OptionError, match="6 cards have no layer each of a model of 5"):
        plan_on_all(replace(request, target=five), replace(ONE, num_cards=6))


def test_a_card_that_is_too_small_is_named() -> None:
    request = RuntimeConfig(model("llama-2-13b"), "none", context=2048, vram_bytes=(20 * GB, 2 * GB))
    with pytest.raises(BudgetError, match=r"device memory on card 1 of 2\.0 GB is too small by") as refused:
        plan_on_all(request, TWO)
    named = re.search(r": ([0-9.]+ GB) is the least", str(refused.value))
    assert named is not None
    enough = replace(request, vram_bytes=(20 * GB, parse_bytes(named[1])))
    assert plan_on_all(enough, TWO).num_cards == 2
    outcome = plan_or_refuse(naming_all(request, TWO), TWO)
    assert isinstance(outcome, Refusal)
    assert any(one.change.startswith("--vram 20.0GB,") for one in outcome.suggestions)
    with pytest.raises(BudgetError, match="on card 0"):
        plan_on_all(replace(request, vram_bytes=(2 * GB, 20 * GB)), TWO)


def test_resident_layers_are_of_the_whole_model() -> None:
    request = RuntimeConfig(model("llama-2-13b"), "none", context=2048)
    for asked in (0, 1, 7, 30, 40):
        plan = plan_on_all(replace(request, resident_layers=asked), THREE)
        assert len(plan.placement.resident_layers) == asked
        each = [len(card.placement.resident_layers) for card in plan.cards]
        assert max(each) - min(each) <= 2
    with pytest.raises(OptionError, match="between 0 and 40"):
        plan_on_all(replace(request, resident_layers=41), TWO)


def test_a_retrieval_verifier_is_on_every_card() -> None:
    request = RuntimeConfig(
        model("llama-2-7b-128k"), model("llama-68m"), context=120_000, speculation=SpeculationOptions("triforce")
    )
    plan = plan_on_all(request, TWO)
    assert plan.has_verifier and not plan.placement.streamed_layers
    held = [{part.name: part.nbytes for part in card.device} for card in plan.cards]
    assert all(parts["retrieval cache"] and parts["CUDA graphs"] for parts in held)
    # A prefill of a card borrows what its own share of the verifier's cache holds.
    borrowed = [card.target.borrowable_bytes for card in plan.cards]
    assert sum(borrowed) == plan.target.borrowable_bytes and (not plan.target.on_host or min(borrowed) > 0)
    assert plan.verifier_bytes == sum(parts["retrieval cache"] for parts in held)
    predicted = forecast(plan, TWO)
    assert predicted.usual.tok_per_s > 1.8 * forecast(plan_on_all(request, ONE), ONE).usual.tok_per_s
    with pytest.raises(OptionError, match="drop --resident-layers"):
        plan_on_all(replace(request, resident_layers=3), TWO)


def test_page_locked_memory_is_shared_by_what_streams() -> None:
    machine = replace(TWO, pinnable_bytes=30 * GB)
    plan = plan_on_all(RuntimeConfig(model("llama-3.1-70b"), "none", context=2048), machine)
    assert plan.is_staged and plan.pinned_bytes <= 30 * GB
    first, second = plan.cards
    assert abs(len(first.placement.staged_layers) - len(second.placement.staged_layers)) <= 2
    rings = first.placement.ring_bytes + second.placement.ring_bytes
    assert {part.name: part.nbytes for part in plan.host}["staging ring"] == rings > first.placement.ring_bytes
    with pytest.raises(BudgetError, match=r"page-locks 1\.0 MB at most"):
        plan_on_all(plan.request, replace(TWO, pinnable_bytes=1_000_000))


@PROPERTY
@given(requests(), machines, st.integers(2, 4))
def test_cards_fit_and_every_byte_counts_once(request: RuntimeConfig, machine: MachineFigures, cards: int) -> None:
    several = replace(machine, num_cards=cards)
    plan = plan_or_none(naming_all(request, several), several)
    if plan is None:
        return
    assert plan.num_cards == cards
    dealt = sorted(layer for share in plan.target.shares for layer in share.layers)
    assert dealt == list(range(plan.placement.num_layers))
    for card in plan.cards:
        assert card.limits.device_bytes is not None
        assert card.device_bytes <= card.limits.device_bytes <= machine.vram_bytes
    assert plan.device_bytes == sum(card.device_bytes for card in plan.cards)
    assert plan.streamed_bytes == sum(card.streamed_bytes for card in plan.cards)
    host = Counter[str]()
    for card in plan.cards:
        host.update({part.name: part.nbytes for part in card.host})
    host["Python and libraries"] //= cards  # once for all
    host["rows between cards"] = plan.hop_bytes  # none of a card alone
    assert host == {part.name: part.nbytes for part in plan.host}
    assert plan.host_bytes <= machine.ram_bytes
    assert machine.pinnable_bytes is None or plan.pinned_bytes <= machine.pinnable_bytes
    assert request.pinned_bytes is None or plan.pinned_bytes <= request.pinned_bytes
    predicted = forecast(plan, several)
    assert predicted.plain.bytes_streamed == plan.streamed_bytes
    assert 0 < predicted.plain.lookahead_s <= predicted.plain.copies_s or not plan.streamed_bytes


@PROPERTY
@given(requests(), machines)
def test_a_second_card_never_refuses(request: RuntimeConfig, machine: MachineFigures) -> None:
    """What fits one card fits two, but for what a second ring takes of page-locked memory."""
    request = replace(request, pinned_bytes=None, speculation=SpeculationOptions(request.speculation.mode))
    machine = replace(machine, pinnable_bytes=None)
    if plan_or_none(request, machine) is None or request.target.config().num_layers < 2:
        return
    try:
        plan_on_all(request, replace(machine, num_cards=2))
    except OffloadError as error:
        pytest.fail(str(error))


def test_where_nothing_streams_layers_are_in_blocks() -> None:
    """So that rows hop once to each card, and back; a card then begins a piece of a prompt behind the one before."""
    request = RuntimeConfig(model("llama-2-7b"), "none", context=4096)
    one, three = plan_on_all(request, ONE), plan_on_all(request, THREE)
    assert three.target.num_hops == 3 and three.target.in_blocks
    assert [share.layers for share in three.target.shares] == [(*range(10),), (*range(10, 21),), (*range(21, 32),)]
    before, after = (prefill_time(plan, THREE, 4096) for plan in (one, three))
    hops_s = 3 * (30e-6 + 4096 * 4096 * 2 / 25e9)
    assert after.compute_s == pytest.approx((before.compute_s + hops_s) / 3 * (4 + 2) / 4, rel=0.01)


def test_rows_that_hop_through_host_memory_are_planned_for() -> None:
    request = RuntimeConfig(model("llama-2-7b"), "none", context=4000, resident_layers=0)
    plan = plan_on_all(request, TWO)
    # Four pieces of 1024 rows of 8192 bytes, and for the other card where these rows are.
    assert plan.hop_bytes == 4 * ((8 << 20) + (1 << 20))
    assert ("rows between cards", plan.hop_bytes, True) in [(part.name, part.nbytes, part.pinned) for part in plan.host]
    beside = replace(limits_of(TWO, naming_all(request, TWO)), hops_through_host=False)  # GPUs that reach each other
    peers = find_plan(naming_all(request, TWO), TWO, beside)
    assert peers.hop_bytes == plan_run(request, ONE).hop_bytes == 0
    assert plan.pinned_bytes - peers.pinned_bytes == plan.hop_bytes
    # Of three prompts two end in a piece of their own, and windows are one.
    of_three = replace(request, max_batch=3, context=3800)
    assert plan_on_all(of_three, TWO).hop_bytes == 7 * ((8 << 20) + (1 << 20))
    assert plan_on_all(replace(of_three, kv="host"), TWO).hop_bytes == plan.hop_bytes
