"""The planner: never over budget, nothing wasted, and what it asks for is enough."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_runtime.config import ModelConfig, parse_bytes
from offload_runtime.errors import BudgetError, OptionError
from offload_runtime.planner import (
    RING_SLOTS,
    HostKVNeeds,
    MemoryNeeds,
    Placement,
    place_kv_layers,
    place_layers,
    spread,
    workspace_bytes,
)

sizes = st.integers(0, 30 * 10**9)
needs_of_models = st.builds(
    MemoryNeeds, layer_bytes=st.integers(1, 2 * 10**9), num_layers=st.integers(1, 96), shared_bytes=sizes,
    kv_bytes=sizes, draft_bytes=sizes, workspace_bytes=sizes, context_bytes=sizes, middle_bytes=sizes,
    graph_bytes=sizes,
)  # fmt: skip


@st.composite
def problems(draw: st.DrawFn) -> tuple[MemoryNeeds, int, int | None]:
    """Needs, a budget around what matters (nothing fits to everything fits), and asked resident layers."""
    needs = draw(needs_of_models)
    layers = draw(st.integers(-2, needs.num_layers + 4))
    available = needs.fixed_bytes + layers * needs.layer_bytes + draw(st.integers(-3, 3))
    return needs, available, draw(st.none() | st.integers(0, needs.num_layers))


def used_bytes(needs: MemoryNeeds, placement: Placement) -> int:
    """What a placement takes."""
    return needs.fixed_bytes + (len(placement.resident_layers) + placement.num_slots) * needs.layer_bytes


def place_or_none(needs: MemoryNeeds, available: int | None, resident: int | None) -> Placement | None:
    """The placement, None when the budget is too small."""
    try:
        return place_layers(needs, available, resident)
    except BudgetError:
        return None


@given(problems())
def test_never_over_budget_and_always_runnable(problem: tuple[MemoryNeeds, int, int | None]) -> None:
    needs, available, resident = problem
    placement = place_or_none(needs, available, resident)
    if placement is None:
        return
    assert used_bytes(needs, placement) <= available
    kept = placement.resident_layers
    assert list(kept) == sorted(set(kept)) and set(kept) <= set(range(needs.num_layers))
    assert placement.num_streamed == needs.num_layers - len(kept)
    assert min(2, placement.num_streamed) <= placement.num_slots <= min(RING_SLOTS, placement.num_streamed)


@given(problems())
def test_refused_only_when_two_slots_do_not_fit(problem: tuple[MemoryNeeds, int, int | None]) -> None:
    needs, available, resident = problem
    layers = needs.num_layers
    least = needs.fixed_bytes + ((resident or 0) + min(2, layers - (resident or 0))) * needs.layer_bytes
    assert (place_or_none(needs, available, resident) is None) == (available < least)


@given(problems())
def test_auto_leaves_no_room_for_another_layer(problem: tuple[MemoryNeeds, int, int | None]) -> None:
    needs, available, _ = problem
    placement = place_or_none(needs, available, None)
    if placement is not None and placement.num_streamed:
        assert available - used_bytes(needs, placement) < needs.layer_bytes
        assert placement.num_slots == RING_SLOTS or not placement.resident_layers


@given(problems(), st.integers(0, 4 * 10**9))
def test_more_vram_never_gives_fewer_resident_layers(problem: tuple[MemoryNeeds, int, int | None], extra: int) -> None:
    needs, available, _ = problem
    less, more = place_or_none(needs, available, None), place_or_none(needs, available + extra, None)
    if less is not None:
        assert more is not None and len(more.resident_layers) >= len(less.resident_layers)


@given(problems())
def test_asked_layers_are_honoured_or_the_named_budget_is_enough(problem: tuple[MemoryNeeds, int, int | None]) -> None:
    needs, available, resident = problem
    try:
        placement = place_layers(needs, available, resident)
    except BudgetError as error:
        named = re.search(r"([0-9.]+ [kMGT]?B) is the least", str(error))
        assert named is not None
        enough = parse_bytes(named[1])
        placement = place_layers(needs, enough, resident)
        assert used_bytes(needs, placement) <= enough <= 1.12 * max(10, used_bytes(needs, placement))
    if resident is not None:
        assert len(placement.resident_layers) == resident


@given(needs_of_models, st.none() | st.integers(0, 96))
def test_without_a_limit(needs: MemoryNeeds, resident: int | None) -> None:
    if resident is not None and resident > needs.num_layers:
        with pytest.raises(OptionError, match=f"between 0 and {needs.num_layers}"):
            place_layers(needs, None, resident)
        return
    placement = place_layers(needs, None, resident)
    assert len(placement.resident_layers) == (needs.num_layers if resident is None else resident)
    assert placement.num_slots == min(RING_SLOTS, placement.num_streamed)


def test_negative_resident_layers_are_refused() -> None:
    with pytest.raises(OptionError, match="not -1"):
        place_layers(MemoryNeeds(1, 4, 0, 0, 0, 0), None, -1)


def test_every_part_counts_once() -> None:
    needs = MemoryNeeds(
        layer_bytes=10**7, num_layers=3, shared_bytes=1, kv_bytes=10, draft_bytes=100, workspace_bytes=1000,
        context_bytes=10_000, middle_bytes=100_000, graph_bytes=1_000_000,
    )  # fmt: skip
    assert needs.fixed_bytes == 1_111_111
    assert place_layers(needs, 31_111_111, None).num_streamed == 0
    assert place_layers(needs, 31_111_110, None).num_streamed == 3


def test_the_message_lists_what_adds_up_to_the_least() -> None:
    needs = MemoryNeeds(10**9, 8, 2 * 10**9, 3 * 10**9, 4 * 10**9, 5 * 10**9)
    with pytest.raises(BudgetError) as caught:
        place_layers(needs, 20 * 10**9, 7)
    listed = re.search(r"22\.0 GB is the least \((.*)\)", str(caught.value))
    assert listed is not None
    assert sum(parse_bytes(size) for size in re.findall(r"[0-9.]+ [kMGT]?B", listed[1])) == 22 * 10**9
    for part in ("too small by 2.0 GB", "--vram", "--context", "smaller draft", "fewer layers resident"):
        assert part in str(caught.value)


def test_a_middle_level_that_is_too_large_is_named_with_its_own_way_out() -> None:
    needs = MemoryNeeds(10**9, 8, 0, 0, 10**9, 0, middle_bytes=3 * 10**9)
    with pytest.raises(BudgetError, match=r"draft model 1\.0 GB, retrieval cache 3\.0 GB, .*lower --budget-tokens"):
        place_layers(needs, 5 * 10**9, None)


@given(st.integers(0, 96), st.integers(1, 96))
def test_spread_is_even_and_distinct(count: int, num_layers: int) -> None:
    count = min(count, num_layers)
    indices = spread(count, num_layers)
    assert len(set(indices)) == len(indices) == count
    if count:
        widest = -(-num_layers // count)
        gaps = [right - left for left, right in pairwise(indices)]
        assert all(num_layers // count <= gap <= widest for gap in gaps)
        assert 0 <= indices[0] < widest and num_layers - widest <= indices[-1] < num_layers


def test_workspace_grows_with_everything_it_is_for() -> None:
    config = ModelConfig("LlamaForCausalLM", 64, 128, 4, 4, 2, 16, 1000, 4096, 1e-5, {"rope_type": "default"})
    shape = {"context_tokens": 512, "chunk_rows": 256, "window_rows": 64, "sampled_rows": 64}
    base = workspace_bytes(config, 2, **shape)
    assert workspace_bytes(config, 4, **shape) > base
    for name, value in shape.items():
        assert workspace_bytes(config, 2, **{**shape, name: 2 * value}) > base
    # At least the logits and the residual stream themselves.
    assert base > 64 * 1000 * 2 + 512 * 64 * 2


host_kv_needs = st.builds(
    HostKVNeeds, num_layers=st.integers(1, 96), layer_bytes=st.integers(1, 4 * 10**9),
    open_bytes=st.integers(0, 10**9), shared_bytes=sizes,
)  # fmt: skip


@given(host_kv_needs, sizes)
def test_kv_layers_that_stay_fit_what_is_left(needs: HostKVNeeds, spare_bytes: int) -> None:
    """What is left does not count the parts that a cache on the host has anyway, which are given back when all stay."""
    layers = place_kv_layers(needs, spare_bytes)
    assert list(layers) == sorted(set(layers)) and set(layers) <= set(range(needs.num_layers))
    each = needs.layer_bytes - needs.open_bytes
    back = needs.shared_bytes if len(layers) == needs.num_layers and each > 0 else 0
    assert len(layers) * each - back <= spare_bytes
    if each > 0 and len(layers) < needs.num_layers - 1:
        assert (len(layers) + 1) * each > spare_bytes


def test_without_a_limit_the_kv_cache_stays_where_it_was_asked_for() -> None:
    assert place_kv_layers(HostKVNeeds(4, 100, 10, 50), None) == ()
