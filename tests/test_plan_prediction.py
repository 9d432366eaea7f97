"""The arithmetic of predictions: monotone in the machine, and within 10 % of passes measured on an H200."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_runtime.config import RuntimeConfig
from offload_runtime.errors import OptionError
from offload_runtime.hardware import MachineProfile, load_profile
from offload_runtime.models.layers import Attention, DecoderLayer, GatedMLP, RowNorm
from offload_runtime.plan import RunPlan, pass_time, plan_run, prefill_time
from offload_runtime.sizes import GB
from offload_runtime.speculation import best_tree_tokens
from offload_runtime.weights import DescribedModel, describe_model
from offload_runtime.weights.neighbours import stored_kinds
from tests.helpers.planning import CONFIGS, made_up_machine
from tests.test_planning import MIXTURE

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tools" / "results"


def test_an_unknown_dtype_names_what_the_profile_lacks() -> None:
    assert made_up_machine().flops("fp16") == 165e12  # 16-bit types stand for each other
    with pytest.raises(OptionError, match=r"no TFLOP/s for fp32: add tflops\.fp32"):
        made_up_machine().flops("fp32")


@given(st.integers(1, 40), st.integers(0, 100), st.none() | st.integers(1, 120))
def test_a_layer_declares_what_its_rows_see(rows: int, before: int, window: int | None) -> None:
    attention = Attention(8, num_heads=4, num_kv_heads=2, head_dim=6, norm=RowNorm(1e-6), window=window)
    layer, context = DecoderLayer(attention, GatedMLP(8, 16)), before + rows
    work, reach = layer.work(rows, context), window or context
    seen = sum(min(reach, position + 1) for position in range(before, context))
    assert work.attention_operations == 2 * 2 * 4 * 6 * seen  # scores and values
    assert work.product_operations == 2 * rows * (8 * (4 + 2 * 2) * 6 + 4 * 6 * 8 + 3 * 8 * 16)
    assert work.kv_elements <= attention.kv_elements(context) == 2 * 2 * 6 * context


# --- weights that are decoded in registers


def quantised(folder: str, mix: str) -> DescribedModel:
    model = describe_model(CONFIGS / folder)
    return replace(model, kinds=stored_kinds(model.config(), mix))


@pytest.mark.parametrize("draft", ["none", "ngram", "model"])
def test_weights_are_kept_as_stored_where_decoding_is_fast(draft: str) -> None:
    request = RuntimeConfig(
        quantised("llama-3.1-8b", "Q4_K_M"), quantised("llama-3.2-1b", "Q4_K_M") if draft == "model" else draft,
        dtype="bf16", context=2048,
    )  # fmt: skip
    machine = load_profile("rtx4090")
    for rate, kept in ((4000.0, "Q4_K"), (100.0, "BF16")):
        plan = plan_run(request, replace(machine, decode_gweights_per_s={"Q4_K": rate}))
        assert next(iter(plan.target.layout.bytes_by_kind)) == kept


def test_tensor_cores_do_nothing_for_experts() -> None:
    plan = plan_run(RuntimeConfig(MIXTURE, "none", context=8192), made_up_machine(96 * GB, 100 * GB))
    machines = [made_up_machine(tflops={"bf16": tflops}) for tflops in (165.0, 1650.0)]
    prompts = [prefill_time(plan, one, 4096).compute_s for one in machines]
    passes = [pass_time(plan, one, length_tokens=4096, rows=1024).arithmetic_s for one in machines]
    for slow, fast in (prompts, passes):
        assert slow / 2 < fast < slow


# --- against measurements


def h200(link_gbps: float) -> MachineProfile:
    """The H200 whose figures the results were measured with, its link as measured in the same run."""
    return replace(load_profile("h200"), link_gbps=link_gbps)


def measured(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return loaded


def plan_of_7b(**changes: Any) -> RunPlan:
    name = "llama-2-7b-128k" if changes.get("context", 0) > 4096 else "llama-2-7b"
    request = RuntimeConfig(describe_model(CONFIGS / name), dtype="bf16", **changes)
    return plan_run(request, load_profile("h200"))


def test_streamed_weights_as_measured() -> None:
    ours = measured("streaming-passes-h200.json")["results"]["ours"]
    machine = h200(ours["memcpy_gbps"])
    plan = plan_of_7b(context=2048, resident_layers=0, max_gamma=1023, vram=24 * 10**9)
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
        plan = plan.with_placements(replace(plan.placement, resident_kv_layers=()))
    tokens = found["prefill"]["tokens"]
    for window in found["windows"]:
        predicted = pass_time(plan, machine, length_tokens=tokens, rows=window["window_tokens"])
        assert predicted.bytes_streamed == window["bytes"]
        assert predicted.seconds == pytest.approx(window["pass_s"]["median"], rel=0.1)
    prefill = prefill_time(plan, machine, tokens)
    assert prefill.link_bytes == found["prefill"]["link_bytes"]
    assert prefill.seconds == pytest.approx(found["prefill"]["s"], rel=0.1)


def test_tokens_of_a_tree_by_hand() -> None:
    assert best_tree_tokens((0.8, 0.1), 0, 9) == best_tree_tokens((0.8,), 5, 0) == 1
    assert best_tree_tokens((0.8,), 3, 9) == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    assert best_tree_tokens((0.8,), 3, 2) == pytest.approx(1 + 0.8 + 0.64)
    # 0.5, 0.4, 0.25, 0.2 and 0.2: the best five of two levels.
    assert best_tree_tokens((0.5, 0.4), 5, 2) == pytest.approx(1 + 0.5 + 0.4 + 0.25 + 0.2 + 0.2)
