"""Layers of weights on the device: never over budget, nothing wasted, and what is refused says what is enough."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_runtime.config import GB, RuntimeConfig, parse_bytes
from offload_runtime.errors import BudgetError
from offload_runtime.plan import MachineFigures, RunPlan, plan_run
from offload_runtime.weights import describe_model
from tests.helpers.planning import CONFIGS, PROPERTY, models

MACHINE = MachineFigures("some", 200 * GB, GB, 25.0, 1000.0, 900 * GB, {"bf16": 165.0})
RING_SLOTS = 3


@st.composite
def problems(draw: st.DrawFn) -> tuple[RunPlan, int, int | None]:
    """A plan with everything on the device, a budget around what matters (nothing fits to everything fits), and asked
    resident layers."""
    request = RuntimeConfig(draw(models()), "none", context=draw(st.integers(2, 4096)), kv="gpu")
    whole = plan_run(replace(request, vram_bytes=200 * GB), MACHINE)
    num_layers = whole.placement.num_layers
    layers = draw(st.integers(-2, num_layers + 4))
    available = whole.fixed_bytes + layers * whole.target.layer_bytes + draw(st.integers(-3, 3))
    return whole, max(0, available), draw(st.none() | st.integers(0, num_layers))


def at(whole: RunPlan, vram_bytes: int, resident: int | None = None) -> RunPlan:
    """The plan with less memory."""
    return plan_run(replace(whole.request, vram_bytes=vram_bytes, resident_layers=resident), MACHINE)


def at_or_none(whole: RunPlan, vram_bytes: int, resident: int | None = None) -> RunPlan | None:
    try:
        return at(whole, vram_bytes, resident)
    except BudgetError:
        return None


@PROPERTY
@given(problems(), st.integers(0, 4 * GB))
def test_layers_fill_what_is_left_and_no_more(problem: tuple[RunPlan, int, int | None], extra_bytes: int) -> None:
    whole, available, resident = problem
    layers, layer_bytes = whole.placement.num_layers, whole.target.layer_bytes
    least = whole.fixed_bytes + ((resident or 0) + min(2, layers - (resident or 0))) * layer_bytes
    plan = at_or_none(whole, available, resident)
    assert (plan is None) == (available < least)
    if plan is None:
        return
    placement = plan.placement
    assert plan.fixed_bytes == whole.fixed_bytes and plan.device_bytes <= available
    kept = placement.resident_layers
    assert list(kept) == sorted(set(kept)) and set(kept) <= set(range(layers))
    streamed = len(placement.streamed_layers)
    assert streamed == layers - len(kept)
    assert min(2, streamed) <= placement.num_slots <= min(RING_SLOTS, streamed)
    if resident is not None:
        assert len(kept) == resident
    elif placement.streamed_layers:
        assert available - plan.device_bytes < layer_bytes
        assert placement.num_slots == RING_SLOTS or not kept
    if kept:  # evenly spread
        widest = -(-layers // len(kept))
        assert all(layers // len(kept) <= right - left <= widest for left, right in pairwise(kept))
        assert 0 <= kept[0] < widest and layers - widest <= kept[-1] < layers
    if resident is None:
        assert len(at(whole, available + extra_bytes).placement.resident_layers) >= len(kept)


@PROPERTY
@given(problems())
def test_the_budget_that_is_named_is_enough_and_the_parts_add_up(problem: tuple[RunPlan, int, int | None]) -> None:
    whole, available, resident = problem
    try:
        at(whole, available, resident)
    except BudgetError as error:
        named = re.search(r"([0-9.]+ [kMGT]?B) is the least \((.*)\): raise --vram, lower --context", str(error))
        assert named is not None
        enough = parse_bytes(named[1])
        assert at(whole, enough, resident).device_bytes <= enough
        listed = [parse_bytes(size) for size in re.findall(r"[0-9.]+ [kMGT]?B", named[2]) if not size.startswith("0.0")]
        assert sum(listed) == pytest.approx(enough, rel=0.1)
        assert ("fewer layers resident" in str(error)) == bool(resident)


@pytest.mark.parametrize(("pinnable_bytes", "most"), [(10 * GB, "10.0"), (None, "900.0")])
def test_no_more_is_page_locked_than_the_machine_does(pinnable_bytes: int | None, most: str) -> None:
    request = RuntimeConfig(describe_model(CONFIGS / "llama-3.1-8b"), pinned_bytes=901 * GB)
    words = rf"--pinned 901\.0 GB is more than the {most} GB that some page-locks: lower it to {most}GB, or choose"
    with pytest.raises(BudgetError, match=words):
        plan_run(request, replace(MACHINE, pinnable_bytes=pinnable_bytes))
