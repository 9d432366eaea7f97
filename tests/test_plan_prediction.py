"""The arithmetic of predictions: monotone in the machine, and within 10 % of passes measured on an H200."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_runtime.engine.costs import pass_costs, prefill_costs
from offload_runtime.engine.machines import machine_figures
from offload_runtime.engine.planning import PlanRequest, plan_run
from offload_runtime.engine.run_plan import RunPlan
from offload_runtime.errors import OptionError
from offload_runtime.hardware import load_profile
from offload_runtime.planner import (
    DEFAULT_STAGING_GBPS,
    LayerCosts,
    MachineFigures,
    PassCosts,
    PrefillCosts,
    RoundCosts,
    StepCosts,
    best_tree_tokens,
    expected_tokens,
    expected_tree_tokens,
    predict_pass,
    predict_prefill,
    predict_round,
    predict_step,
)
from offload_runtime.weights import describe_model

ROOT = Path(__file__).resolve().parents[1]
CONFIGS, RESULTS = ROOT / "tests" / "data" / "configs", ROOT / "tools" / "results"
MACHINE = MachineFigures("some", 24 * 10**9, 10**9, 25.0, 1000.0, 64 * 10**9, {"bf16": 165.0}, None, 2.5)

counts = st.integers(0, 10**13)
layers = st.builds(
    LayerCosts, weight_bytes=counts, kv_bytes=counts, matrix_operations=counts, attention_operations=counts,
    streamed_weight_bytes=counts, streamed_kv_bytes=counts, launches=st.integers(0, 100), staged_weight_bytes=counts,
)  # fmt: skip
passes = st.builds(
    PassCosts, st.just("bf16"), st.lists(layers, min_size=1, max_size=5).map(tuple),
    st.builds(LayerCosts, counts, st.just(0), counts, st.just(0)),
)  # fmt: skip
faster = st.floats(1.0, 10.0)


@given(passes)
def test_a_pass_is_as_long_as_what_binds_it_and_every_byte_counts_once(costs: PassCosts) -> None:
    predicted = predict_pass(costs, MACHINE)
    streamed = sum(layer.streamed_weight_bytes + layer.streamed_kv_bytes for layer in costs.layers)
    assert predicted.bytes_streamed == streamed
    assert predicted.link_s == pytest.approx(streamed / 25e9)
    assert predicted.staging_s == pytest.approx(costs.staged_bytes / (MACHINE.staging_gbps * 1e9))
    assert predicted.seconds == max(predicted.copies_s, predicted.compute_s, predicted.launch_s)
    assert predicted.copies_s == max(predicted.link_s, predicted.staging_s)
    assert predicted.unstaged_s <= predicted.seconds
    assert max(predicted.hbm_s, predicted.arithmetic_s) <= predicted.compute_s * (1 + 1e-9)
    assert predicted.compute_s <= (predicted.hbm_s + predicted.arithmetic_s) * (1 + 1e-9)
    by_cause = {"link": predicted.link_s, "launches": predicted.launch_s, "staging": predicted.staging_s}
    assert by_cause.get(predicted.bound_by, predicted.compute_s) == predicted.seconds


@given(passes, faster, faster, faster)
def test_more_link_hbm_or_arithmetic_is_never_slower(costs: PassCosts, link: float, hbm: float, flops: float) -> None:
    better = replace(
        MACHINE, link_gbps=link * MACHINE.link_gbps, hbm_gbps=hbm * MACHINE.hbm_gbps, tflops={"bf16": flops * 165.0},
        staging_gbps=link * MACHINE.staging_gbps,
    )  # fmt: skip
    assert predict_pass(costs, better).seconds <= predict_pass(costs, MACHINE).seconds * (1 + 1e-9)
    prefill = PrefillCosts(
        "bf16", costs.streamed_bytes, 10**9, 10**12, 10**14, 10**14, 10**9, costs.staged_bytes
    )  # fmt: skip
    assert predict_prefill(prefill, better).seconds <= predict_prefill(prefill, MACHINE).seconds * (1 + 1e-9)
    step = StepCosts("bf16", 10**9, 10**11, 300, 10**8)
    assert predict_step(step, better) <= predict_step(step, MACHINE) * (1 + 1e-9)


@given(st.floats(0, 1), st.integers(0, 64))
def test_expected_tokens_are_those_of_the_formula(acceptance: float, gamma: int) -> None:
    tokens = expected_tokens(acceptance, gamma)
    assert 1 <= tokens <= (gamma + 1) * (1 + 1e-9)
    if acceptance < 0.999:
        assert tokens == pytest.approx((1 - acceptance ** (gamma + 1)) / (1 - acceptance))


@given(
    st.floats(0, 5), st.floats(1e-4, 5), st.floats(0, 1), st.integers(1, 48), st.floats(0, 0.1),
    st.none() | st.floats(0, 0.1), st.floats(0, 1),
)  # fmt: skip
def test_a_round_hides_no_more_than_the_ring_holds(
    link_s: float, busy_s: float, lookahead_s: float, gamma: int, draft_s: float, middle_s: float | None, right: float
) -> None:
    costs = RoundCosts(link_s, busy_s, "link", lookahead_s, gamma, draft_s, middle_s, 4 if middle_s is not None else 0)
    row = predict_round(costs, right, draft_acceptance=0.6)
    assert row.hidden_s <= min(row.drafting_s, lookahead_s)
    assert row.seconds >= max(link_s, busy_s + row.drafting_s) * (1 - 1e-9)
    assert row.seconds <= (max(link_s, busy_s) + row.drafting_s) * (1 + 1e-9)
    assert row.tok_per_s == pytest.approx(row.tokens / row.seconds)
    better = predict_round(costs, min(1.0, right + 0.05), draft_acceptance=0.6)
    assert better.tok_per_s >= row.tok_per_s * (1 - 1e-9)


def test_a_chain_and_a_hierarchy_take_the_steps_that_they_need() -> None:
    chain = predict_round(RoundCosts(0, 1.0, "HBM", 0.0, 8, draft_step_s=0.25, batch=2), 0.5)
    assert (chain.drafting_s, chain.seconds) == (2.0, 3.0) and chain.bound_by == "drafting"
    assert chain.tok_per_s == pytest.approx(2 * (2 - 0.5**8) / 3)
    # 1.75 tokens a step of the middle level: 14 tokens take 8 of them, with 2 steps of the draft each
    costs = RoundCosts(10.0, 1.0, "link", 0.5, 14, draft_step_s=0.01, middle_step_s=0.1, gamma_draft=2)
    hierarchy = predict_round(costs, 0.9, draft_acceptance=0.5)
    assert hierarchy.drafting_s == pytest.approx(8 * 0.12)
    assert hierarchy.seconds == pytest.approx(10 + 8 * 0.12 - 0.5) and hierarchy.bound_by == "link"


def test_an_unknown_dtype_names_what_the_profile_lacks() -> None:
    assert MACHINE.flops("fp16") == 165e12  # 16-bit types stand for each other
    with pytest.raises(OptionError, match=r"no TFLOP/s for fp32: add tflops\.fp32"):
        MACHINE.flops("fp32")


def test_the_loss_of_staging_is_predicted() -> None:
    """A 13B model of which 20 GB are streamed: 12 of them pageable, at 10 GB/s, take longer than the link at 25."""
    machine = replace(MACHINE, pinnable_bytes=8 * 10**9)
    request = PlanRequest(describe_model(CONFIGS / "llama-2-13b"), dtype="bf16", context=2048, vram_bytes=8 * 10**9)
    staged, whole = plan_run(request, machine), plan_run(request, MACHINE)
    assert staged.pinned_bytes <= 8 * 10**9 < whole.pinned_bytes and not whole.staged_weight_layers
    slow, fast = (predict_pass(pass_costs(plan.placed, length_tokens=9, rows=1), MACHINE) for plan in (staged, whole))
    assert slow.bytes_streamed == fast.bytes_streamed and slow.bound_by == "staging" and fast.bound_by == "link"
    assert slow.unstaged_s == fast.seconds and slow.seconds > 1.2 * fast.seconds
    layer_bytes = staged.placed.plans.target.layer_bytes
    assert slow.staging_s == pytest.approx(len(staged.staged_weight_layers) * layer_bytes / 10e9)
    prefills = [predict_prefill(prefill_costs(plan.placed, 9), MACHINE) for plan in (staged, whole)]
    assert prefills[0].bound_by == "staging" and prefills[0].seconds == pytest.approx(slow.staging_s)
    assert prefills[1].bound_by == "link"


def test_staging_is_as_fast_as_the_profile_says() -> None:
    known = load_profile("h200")
    assert machine_figures(load_profile("rtx4090")).staging_gbps == DEFAULT_STAGING_GBPS
    assert machine_figures(known).staging_gbps == pytest.approx(116.6 / 2)  # reads beside a busy link
    busy = replace(known, host_gbps_while_link_busy=60.0)
    assert machine_figures(busy).staging_gbps == pytest.approx(30.0)
    apart = replace(known, host_gbps_while_link_busy=None)
    assert machine_figures(apart).staging_gbps == pytest.approx(123.3 / 2)  # reads of 8 threads
    alone = replace(apart, host_by_threads={})
    assert machine_figures(alone).staging_gbps == pytest.approx((185 - 55.48) / 2)


# --- against measurements


def h200(link_gbps: float) -> MachineFigures:
    """The H200 whose figures the results were measured with, its link as measured in the same run."""
    return replace(machine_figures(load_profile("h200")), link_gbps=link_gbps)


def measured(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return loaded


def plan_of_7b(**changes: Any) -> RunPlan:
    name = "llama-2-7b-128k" if changes.get("context", 0) > 4096 else "llama-2-7b"
    request = PlanRequest(describe_model(CONFIGS / name), dtype="bf16", **changes)
    return plan_run(request, machine_figures(load_profile("h200")))


def test_streamed_weights_as_measured() -> None:
    ours = measured("streaming-h200.json")["results"]["ours"]
    machine = h200(ours["memcpy_gbps"])
    plan = plan_of_7b(context=2048, resident_layers=0, max_gamma=1023, vram_bytes=24 * 10**9)
    for window in ours["windows"]:
        costs = pass_costs(plan.placed, length_tokens=520, rows=window["window_tokens"])
        predicted = predict_pass(costs, machine)
        assert predicted.bytes_streamed == ours["bytes_per_token"] and predicted.bound_by == "link"
        assert predicted.seconds == pytest.approx(window["pass_s"]["median"], rel=0.1)
        assert predicted.launch_s == pytest.approx(window["host_launch_s"]["median"], rel=0.1)


@pytest.mark.parametrize("kv", ["host", "gpu"], ids=["on the host", "on the device"])  # an id `gpu` is a marker
def test_long_contexts_as_measured(kv: str) -> None:
    found = measured(f"long-context-{kv}-h200.json")
    machine = h200(found["windows"][0]["link_peak_gbps"])
    plan = plan_of_7b(context=121024, kv=kv, resident_layers=32 if kv == "host" else None)
    if kv == "host":  # the H200 would have room for some of it
        target = plan.placed.plans.target
        target = replace(target, kv=replace(target.kv, resident_layers=()))
        plan = replace(plan, placed=replace(plan.placed, plans=replace(plan.placed.plans, target=target)))
    tokens = found["prefill"]["tokens"]
    for window in found["windows"]:
        predicted = predict_pass(
            pass_costs(plan.placed, length_tokens=tokens, rows=window["window_tokens"]), machine
        )  # fmt: skip
        assert predicted.bytes_streamed == window["bytes"]
        assert predicted.seconds == pytest.approx(window["pass_s"]["median"], rel=0.1)
    prefill = predict_prefill(prefill_costs(plan.placed, tokens), machine)
    assert prefill.link_bytes == found["prefill"]["link_bytes"]
    # Growing host memory took from 10 to 18 of 30 to 38 seconds, on machines of the same kind.
    assert prefill.seconds == pytest.approx(found["prefill"]["s"], rel=0.25 if kv == "host" else 0.1)


def test_tokens_of_a_tree_by_hand() -> None:
    assert best_tree_tokens([0.8, 0.1], 0, 9) == best_tree_tokens([0.8], 5, 0) == 1
    assert best_tree_tokens([0.8], 3, 9) == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    assert best_tree_tokens([0.8], 3, 2) == pytest.approx(1 + 0.8 + 0.64)
    # 0.5, 0.4, 0.25, 0.2 and 0.2: the best five of two levels.
    assert best_tree_tokens([0.5, 0.4], 5, 2) == pytest.approx(1 + 0.5 + 0.4 + 0.25 + 0.2 + 0.2)


def test_a_tree_is_worth_more_than_a_chain_and_costs_its_steps() -> None:
    costs = RoundCosts(
        link_s=0.3, busy_s=0.05, bound_by="link", lookahead_s=0.01, gamma=63, draft_step_s=0.002, tree_nodes=64,
        tree_steps=6.0,
    )  # fmt: skip
    tree, chain = predict_round(costs, 0.8), predict_round(replace(costs, gamma=16, tree_nodes=0), 0.8)
    assert chain.tokens == expected_tokens(0.8, 16) < tree.tokens < expected_tokens(0.95, 64)
    assert tree.drafting_s == pytest.approx(6 * 0.002) and tree.seconds == pytest.approx(0.3 + 0.002)
    # As many nodes as one wants of a draft that is always right are a chain.
    assert expected_tree_tokens(1.0, 20, 63) == 21
