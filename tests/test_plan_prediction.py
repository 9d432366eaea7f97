"""The arithmetic of predictions: monotone in the machine, and within 10 % of passes measured on an H200."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_mix import stored_kinds
from hypothesis import given
from hypothesis import strategies as st
from offload_runtime_kernels.encoded_linear import MOST_ROWS

from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.errors import OptionError
from offload_runtime.hardware import load_profile
from offload_runtime.plan import (
    MachineFigures,
    RunPlan,
    machine_figures,
    pass_time,
    plan_run,
    prefill_time,
)
from offload_runtime.plan.cost import (
    best_tree_tokens,
    draft_step_s,
    drafting_s,
    expected_tokens,
    expected_tree_tokens,
    predict_step,
    verification,
    verifier_step_s,
)
from offload_runtime.weights import DescribedModel, describe_model
from tests.helpers.planning import CONFIGS, PROPERTY, machines, plan_or_none, requests

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tools" / "results"
MACHINE = MachineFigures("some", 24 * 10**9, 10**9, 25.0, 1000.0, 64 * 10**9, {"bf16": 165.0}, None, 2.5)

faster = st.floats(1.0, 10.0)


@PROPERTY
@given(requests(), machines, st.integers(1, 200), st.integers(1, 64))
def test_a_pass_is_as_long_as_what_binds_it(
    request: RuntimeConfig, machine: MachineFigures, length: int, rows: int
) -> None:
    plan = plan_or_none(request, machine)
    if plan is None:
        return
    predicted = pass_time(plan, machine, length_tokens=length, rows=rows)
    assert predicted.weight_bytes == len(plan.placement.streamed_layers) * plan.target.layer_bytes
    assert predicted.link_s == pytest.approx(predicted.bytes_streamed / (machine.link_gbps * 1e9))
    assert predicted.staging_s == pytest.approx(predicted.staged_bytes / (machine.staging_gbps * 1e9))
    assert predicted.seconds == max(predicted.copies_s, predicted.compute_s, predicted.launch_s)
    assert predicted.copies_s == max(predicted.link_s, predicted.staging_s)
    assert predicted.lookahead_s <= predicted.copies_s and max(predicted.link_s, predicted.busy_s) <= predicted.seconds
    assert max(predicted.hbm_s, predicted.arithmetic_s) <= predicted.compute_s * (1 + 1e-9)
    assert predicted.compute_s <= (predicted.hbm_s + predicted.arithmetic_s) * (1 + 1e-9)
    by_cause = {"link": predicted.link_s, "launches": predicted.launch_s, "staging": predicted.staging_s}
    assert by_cause.get(predicted.bound_by, predicted.compute_s) == predicted.seconds


@PROPERTY
@given(requests(), machines, faster, faster, faster)
def test_more_link_hbm_or_arithmetic_is_never_slower(
    request: RuntimeConfig, machine: MachineFigures, link: float, hbm: float, flops: float
) -> None:
    plan = plan_or_none(request, machine)
    if plan is None:
        return
    better = replace(
        machine, link_gbps=link * machine.link_gbps, hbm_gbps=hbm * machine.hbm_gbps, tflops={"bf16": flops * 165.0},
        staging_gbps=link * machine.staging_gbps,
    )  # fmt: skip
    after, before = (
        (
            pass_time(plan, figures, length_tokens=1, rows=9).seconds,
            prefill_time(plan, figures, 300).seconds,
            drafting_s(plan, figures, gamma=5),
            predict_step(plan, figures).seconds,
        )
        for figures in (better, machine)
    )
    assert all(fast <= slow * (1 + 1e-9) for fast, slow in zip(after, before, strict=True))


@given(st.floats(0, 1), st.integers(0, 64))
def test_expected_tokens_are_those_of_the_formula(acceptance: float, gamma: int) -> None:
    tokens = expected_tokens(acceptance, gamma)
    assert 1 <= tokens <= (gamma + 1) * (1 + 1e-9)
    if acceptance < 0.999:
        assert tokens == pytest.approx((1 - acceptance ** (gamma + 1)) / (1 - acceptance))


@PROPERTY
@given(requests(), machines, st.floats(0.4, 1))
def test_a_step_hides_no_more_than_the_ring_holds(
    request: RuntimeConfig, machine: MachineFigures, right: float
) -> None:
    plan = plan_or_none(request, machine)
    if plan is None:
        return
    verify, step = verification(plan, machine), predict_step(plan, machine, right)
    assert step.hidden_s <= min(step.drafting_s, verify.lookahead_s)
    assert step.seconds >= max(verify.copies_s, verify.busy_s + step.drafting_s) * (1 - 1e-9)
    assert step.seconds <= (verify.seconds + step.drafting_s) * (1 + 1e-9)
    assert step.tok_per_s == pytest.approx(plan.target.batch * step.tokens / step.seconds)
    better = predict_step(plan, machine, min(1.0, right + 0.05))
    assert better.tok_per_s >= step.tok_per_s * (1 - 1e-9)


def test_a_chain_a_tree_and_triforce_take_the_steps_that_they_need() -> None:
    models = describe_model(CONFIGS / "llama-3.1-8b"), describe_model(CONFIGS / "llama-3.2-1b")
    request = RuntimeConfig(*models, context=8192, gamma=8, max_batch=2, tree_nodes=0)
    large = replace(MACHINE, vram_bytes=40 * 10**9)
    chain = plan_run(replace(request, speculation=SpeculationOptions("chain")), large)
    step, verify, draft_s = predict_step(chain, large, 0.5), verification(chain, large), draft_step_s(chain, large)
    assert step.drafting_s == pytest.approx(8 * draft_s) and step.hidden_s == 0
    assert step.seconds == pytest.approx(verify.seconds + 8 * draft_s)
    assert step.tok_per_s == pytest.approx(2 * (2 - 0.5**8) / step.seconds)
    tree = plan_run(replace(request, gamma=None, tree_nodes=64), large)
    assert predict_step(tree, large).drafting_s == pytest.approx((4 + 2) * draft_step_s(tree, large))
    triforce = plan_run(replace(request, speculation=SpeculationOptions("triforce", gamma_draft=2)), large)
    # A step of the verifier gives 1 + 0.8 + 0.64 of 8 tokens, with two steps of the draft.
    expected_s = 8 / 2.44 * (verifier_step_s(triforce, large) + 2 * draft_step_s(triforce, large))
    assert predict_step(triforce, large).drafting_s == pytest.approx(expected_s)


def test_an_unknown_dtype_names_what_the_profile_lacks() -> None:
    assert MACHINE.flops(torch.float16) == 165e12  # 16-bit types stand for each other
    with pytest.raises(OptionError, match=r"no TFLOP/s for fp32: add tflops\.fp32"):
        MACHINE.flops(torch.float32)


def test_the_loss_of_staging_is_predicted() -> None:
    """A 13B model of which 20 GB are streamed: 12 of them pageable, at 10 GB/s, take longer than the link at 25."""
    machine = replace(MACHINE, pinnable_bytes=8 * 10**9)
    request = RuntimeConfig(describe_model(CONFIGS / "llama-2-13b"), dtype="bf16", context=2048, vram_bytes=8 * 10**9)
    staged, whole = plan_run(request, machine), plan_run(request, MACHINE)
    assert staged.pinned_bytes <= 8 * 10**9 < whole.pinned_bytes and not whole.placement.staged_layers
    slow, fast = (pass_time(plan, MACHINE, length_tokens=9, rows=1) for plan in (staged, whole))
    assert slow.bytes_streamed == fast.bytes_streamed and slow.bound_by == "staging" and fast.bound_by == "link"
    assert max(slow.link_s, slow.busy_s) == fast.seconds and slow.seconds > 1.2 * fast.seconds
    layer_bytes = staged.target.layer_bytes
    assert slow.staging_s == pytest.approx(len(staged.placement.staged_layers) * layer_bytes / 10e9)
    prefills = [prefill_time(plan, MACHINE, 9) for plan in (staged, whole)]
    assert prefills[0].bound_by == "staging" and prefills[0].seconds == pytest.approx(slow.staging_s)
    assert prefills[1].bound_by == "link"


def test_staging_is_as_fast_as_the_profile_says() -> None:
    known = load_profile("h200")
    assert machine_figures(load_profile("rtx4090")).staging_gbps == MACHINE.staging_gbps
    assert machine_figures(known).staging_gbps == pytest.approx(116.6 / 2)  # reads beside a busy link
    busy = replace(known, host_gbps_while_link_busy=60.0)
    assert machine_figures(busy).staging_gbps == pytest.approx(30.0)
    apart = replace(known, host_gbps_while_link_busy=None)
    assert machine_figures(apart).staging_gbps == pytest.approx(123.3 / 2)  # reads of 8 threads
    alone = replace(apart, host_by_threads={})
    assert machine_figures(alone).staging_gbps == pytest.approx((185 - 55.48) / 2)


# --- weights that are decoded in registers


def quantised(folder: str, mix: str) -> DescribedModel:
    model = describe_model(CONFIGS / folder)
    return replace(model, kinds=stored_kinds(model.config(), mix))


def stored_plan(mix: str = "Q4_K_M", *, weights: str = "stored", **changes: Any) -> RunPlan:
    """An 8B model that is on the card, as a file of such a mix stores it."""
    request = RuntimeConfig(
        quantised("llama-3.1-8b", mix), "none", dtype="bf16", context=2048, weights=weights, **changes
    )
    return plan_run(request, machine_figures(load_profile("h200")))


def test_few_rows_read_what_is_stored_and_more_rows_what_it_is_decoded_to() -> None:
    """On a slow memory nothing else counts: few rows read 4.7 GB, more read them and write and read 15 GB."""
    plan = stored_plan()
    slow = replace(machine_figures(load_profile("h200")), hbm_gbps=10.0)
    few, many = (pass_time(plan, slow, length_tokens=1, rows=rows) for rows in (MOST_ROWS, MOST_ROWS + 1))
    layout = plan.target.layout
    head = next(spec for spec in layout.shared.tensors if spec.name == "lm_head")
    read_bytes = sum(layout.layer_bytes) + head.nbytes
    assert few.bound_by == many.bound_by == "HBM"
    assert few.seconds == pytest.approx(read_bytes / slow.attained_hbm, rel=0.01)
    decoded_bytes = 2 * (32 * plan.target.layer_elements + head.shape[0] * head.shape[1])
    assert many.seconds - few.seconds == pytest.approx(2 * decoded_bytes / slow.attained_hbm, rel=0.01)


@pytest.mark.parametrize(("kind", "mix"), [("Q8_0", "Q8_0"), ("Q4_K", "Q4_K_M"), ("Q6_K", "Q4_K_M")])
def test_few_rows_take_as_long_as_their_weights_take_to_decode(kind: str, mix: str) -> None:
    """Half the rate of a kind adds as much time as its weights take."""
    plan, rates = stored_plan(mix), {"Q8_0": 1500.0, "Q4_K": 1700.0, "Q6_K": 1400.0}  # slower than an H200's memory
    machine, halved = (
        replace(machine_figures(load_profile("h200")), decode_gweights_per_s=each)
        for each in (rates, {**rates, kind: rates[kind] / 2})
    )
    bytes_of_kind = plan.target.layout.bytes_by_kind[kind]
    bytes_of_kind -= sum(
        spec.nbytes for spec in plan.target.layout.shared.tensors
        if spec.name == "embedding" and kind in spec.encoding.bytes_by_kind(spec.shape)
    )  # fmt: skip
    weights = bytes_of_kind * {"Q8_0": 32 / 34, "Q4_K": 256 / 144, "Q6_K": 256 / 210}[kind]
    for rows in (1, MOST_ROWS):
        before, after = (pass_time(plan, figures, length_tokens=1, rows=rows) for figures in (machine, halved))
        assert after.compute_s - before.compute_s == pytest.approx(weights / machine.decode_rate(kind), rel=0.01)
        assert after.bound_by == "arithmetic" and after.hbm_s == before.hbm_s
    more, slower = (pass_time(plan, figures, length_tokens=1, rows=MOST_ROWS + 1) for figures in (machine, halved))
    assert more == slower
    # What is decoded when it is loaded, or on a CPU, is not decoded in registers.
    for other in (stored_plan(mix, weights="decoded"), stored_plan(mix, device="cpu")):
        before, after = (pass_time(other, figures, length_tokens=1, rows=1) for figures in (machine, halved))
        assert before == after


def test_what_is_not_multiplied_as_it_is_stored_is_not_decoded_in_registers() -> None:
    """In fp32, or beside a part in 16 bits, a matrix is decoded into memory."""
    model = quantised("llama-3.1-8b", "Q8_0")
    up = {name: "F16" for name in model.kinds if name.endswith("up_proj.weight")}
    plain, single, mixed = (
        found.layout(dtype).layers[0]
        for found, dtype in (
            (model, torch.float16), (model, torch.float32), (replace(model, kinds={**model.kinds, **up}), torch.float16)
        )
    )  # fmt: skip
    (read,) = plain.register_reads
    assert read.weights == plain.matrix_elements and read.nbytes == read.weights * 34 // 32
    assert single.register_reads == () and single.without_register_reads == single
    gate_up = 2 * 14336 * 4096
    (read,) = mixed.register_reads
    assert read.weights == plain.matrix_elements - gate_up
    assert mixed.without_register_reads.moved_bytes() == mixed.total_bytes - read.nbytes + 2 * 2 * gate_up


def test_few_rows_launch_no_kernels_that_decode() -> None:
    """Of Q4_K_M: a kernel for each kind in qkv, which is one or two, one for each other matrix, and the head's."""
    plan, machine = stored_plan(), machine_figures(load_profile("h200"))
    slow = replace(machine, launch_us=machine.launch_us + 1000)
    few, many = (
        pass_time(plan, slow, length_tokens=1, rows=rows).compute_s
        - pass_time(plan, machine, length_tokens=1, rows=rows).compute_s
        for rows in (MOST_ROWS, MOST_ROWS + 1)
    )
    layers = plan.target.layout.layers
    qkv = [spec.encoding.bytes_by_kind(spec.shape) for layer in layers for spec in layer.tensors if spec.name == "qkv"]
    assert many - few == pytest.approx((sum(map(len, qkv)) + 3 * len(layers) + 1) * 1e-3)


def test_rows_that_fill_up_a_captured_pass_count() -> None:
    """Three windows of 5 tokens are captured as three of 8, which are too many rows to decode in registers."""
    machine = machine_figures(load_profile("h200"))
    plan = stored_plan(max_batch=3).of_batch(3)
    four, five, eight = (pass_time(plan, machine, length_tokens=1, rows=rows).compute_s for rows in (4, 5, 8))
    assert five > 2 * four and five == pytest.approx(eight, rel=0.01)


def test_a_step_of_a_stored_draft_is_as_fast_as_its_weights_are_decoded() -> None:
    target, draft = quantised("llama-3.1-8b", "Q4_K_M"), quantised("llama-3.2-1b", "Q4_K_M")
    request = RuntimeConfig(target, draft, dtype="bf16", context=2048)
    fast, slow = (
        replace(machine_figures(load_profile("h200")), decode_gweights_per_s={"Q4_K": rate}) for rate in (9000.0, 100.0)
    )
    stored, decoded = (plan_run(replace(request, weights=weights), fast) for weights in ("stored", "decoded"))
    assert draft_step_s(stored, fast) < 0.5 * draft_step_s(decoded, fast)
    assert draft_step_s(stored, slow) > 2 * draft_step_s(decoded, slow)
    # A step of a tree has more rows than are decoded in registers; a decoded draft does not mind.
    wide_s, narrow_s = draft_step_s(stored, fast, rows=MOST_ROWS + 1), draft_step_s(stored, fast)
    assert wide_s > 2 * narrow_s and draft_step_s(decoded, fast, rows=32) == draft_step_s(decoded, fast)
    assert drafting_s(stored, fast, gamma=1, tree_nodes=32) == pytest.approx(4 * narrow_s + wide_s)


@pytest.mark.parametrize("draft", ["none", "ngram", "model"])
def test_weights_are_kept_as_stored_where_decoding_is_fast(draft: str) -> None:
    request = RuntimeConfig(
        quantised("llama-3.1-8b", "Q4_K_M"), quantised("llama-3.2-1b", "Q4_K_M") if draft == "model" else draft,
        dtype="bf16", context=2048,
    )  # fmt: skip
    machine = machine_figures(load_profile("rtx4090"))
    for rate, kept in ((4000.0, "Q4_K"), (100.0, "BF16")):
        plan = plan_run(request, replace(machine, decode_gweights_per_s={"Q4_K": rate}))
        assert next(iter(plan.target.layout.bytes_by_kind)) == kept


def test_a_rate_that_was_not_measured_is_the_slowest_one() -> None:
    machine = replace(machine_figures(load_profile("h200")), decode_gweights_per_s={"Q4_K": 500.0, "Q6_K": 400.0})
    known, other = machine.decode_rate("Q4_K"), machine.decode_rate("IQ4_XS")
    assert known == 1.25 * other and 350e9 < known < 500e9  # less what other kernels take
    # With none, memory is what bounds a pass.
    plan, unknown = stored_plan(), replace(machine, decode_gweights_per_s={})
    assert pass_time(plan, unknown, length_tokens=1, rows=1).bound_by == "HBM"


# --- against measurements


def h200(link_gbps: float) -> MachineFigures:
    """The H200 whose figures the results were measured with, its link as measured in the same run."""
    return replace(machine_figures(load_profile("h200")), link_gbps=link_gbps)


def measured(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return loaded


def plan_of_7b(**changes: Any) -> RunPlan:
    name = "llama-2-7b-128k" if changes.get("context", 0) > 4096 else "llama-2-7b"
    request = RuntimeConfig(describe_model(CONFIGS / name), dtype="bf16", **changes)
    return plan_run(request, machine_figures(load_profile("h200")))


def test_streamed_weights_as_measured() -> None:
    ours = measured("streaming-passes-h200.json")["results"]["ours"]
    machine = h200(ours["memcpy_gbps"])
    plan = plan_of_7b(context=2048, resident_layers=0, max_gamma=1023, vram_bytes=24 * 10**9)
    for window in ours["windows"]:
        predicted = pass_time(plan, machine, length_tokens=520, rows=window["window_tokens"])
        assert predicted.bytes_streamed == ours["bytes_per_token"] and predicted.bound_by == "link"
        assert predicted.seconds == pytest.approx(window["pass_s"]["median"], rel=0.1)
        if window is not ours["windows"][0]:  # the first passes of a process take twice as long to launch
            assert predicted.launch_s == pytest.approx(window["host_launch_s"]["median"], rel=0.1)


@pytest.mark.parametrize("kv", ["host", "gpu"], ids=["on the host", "on the device"])  # an id `gpu` is a marker
def test_long_contexts_as_measured(kv: str) -> None:
    found = measured(f"long-context-{kv}-h200.json")
    machine = h200(found["windows"][0]["link_peak_gbps"])
    plan = plan_of_7b(context=121024, kv=kv, resident_layers=32 if kv == "host" else None)
    if kv == "host":  # the H200 would have room for some of it
        plan = plan.with_placement(replace(plan.placement, resident_kv_layers=()))
    tokens = found["prefill"]["tokens"]
    for window in found["windows"]:
        predicted = pass_time(plan, machine, length_tokens=tokens, rows=window["window_tokens"])
        assert predicted.bytes_streamed == window["bytes"]
        assert predicted.seconds == pytest.approx(window["pass_s"]["median"], rel=0.1)
    prefill = prefill_time(plan, machine, tokens)
    assert prefill.link_bytes == found["prefill"]["link_bytes"]
    assert prefill.seconds == pytest.approx(found["prefill"]["s"], rel=0.1)


def test_tokens_of_a_tree_by_hand() -> None:
    assert best_tree_tokens([0.8, 0.1], 0, 9) == best_tree_tokens([0.8], 5, 0) == 1
    assert best_tree_tokens([0.8], 3, 9) == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    assert best_tree_tokens([0.8], 3, 2) == pytest.approx(1 + 0.8 + 0.64)
    # 0.5, 0.4, 0.25, 0.2 and 0.2: the best five of two levels.
    assert best_tree_tokens([0.5, 0.4], 5, 2) == pytest.approx(1 + 0.5 + 0.4 + 0.25 + 0.2 + 0.2)


def test_a_tree_is_worth_more_than_a_chain() -> None:
    tree = expected_tree_tokens(0.8, 64, 63)
    assert expected_tokens(0.8, 16) < tree < expected_tokens(0.95, 64)
    # As many nodes as one wants of a draft that is always right are a chain.
    assert expected_tree_tokens(1.0, 20, 63) == 21
