"""Plans of whole runs: within their budgets, monotone, the same as what is then loaded, and a way out when refused; and
predictions, within 10 % of passes measured on an H200."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from widening.shapes import shape_named
from widening.stored import stored_model

from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.core import TokenTree
from offload_runtime.engine import Runtime
from offload_runtime.errors import BudgetError, OptionError
from offload_runtime.hardware import MachineProfile, load_profile
from offload_runtime.models.registry import model_config_from_json
from offload_runtime.plan.cost import draft_step_s, pass_time, prefill_time
from offload_runtime.plan.report import Refusal, forecast, plan_or_refuse
from offload_runtime.plan.search import plan_run
from offload_runtime.plan.sizes import RunPlan, common_figures
from offload_runtime.sizes import GB
from offload_runtime.weights.checkpoint import DescribedModel
from offload_runtime.weights.layout import ModelLayout
from offload_runtime.weights.neighbours import stored_kinds
from offload_runtime.weights.sources import describe_model
from tests.helpers.assembly import prefill, verify
from tests.helpers.engine import load
from tests.helpers.planning import CONFIGS, machines, made_up_machine, plan_or_none, requests


@st.composite
def little_locked(draw: st.DrawFn) -> tuple[RuntimeConfig, MachineProfile]:
    """More to stream than can be page-locked, by a little or by nearly all of it."""
    request = RuntimeConfig(
        describe_model(CONFIGS / draw(st.sampled_from(["llama-3.1-8b", "llama-2-7b-128k", "llama-2-13b-128k"]))),
        context=draw(st.integers(30_000, 131_072)), kv=draw(st.sampled_from(["host", "host", "auto"])),
        max_batch=draw(st.sampled_from([1, 2])), resident_layers=draw(st.sampled_from([None, None, 0, 3, 32])),
    )  # fmt: skip
    locked_bytes = draw(st.integers(GB // 10, 20 * GB) | st.integers(20 * GB, 150 * GB))
    return request, made_up_machine(draw(st.integers(9 * GB, 30 * GB)), 500 * GB, pinnable_bytes=locked_bytes)


def check_limits(plan: RunPlan, machine: MachineProfile) -> None:
    """Nothing that is held exceeds what there is."""
    for card in plan.cards:
        assert card.limits.device_bytes is not None
        assert card.device_bytes <= card.limits.device_bytes <= machine.vram_bytes
    assert plan.host_bytes <= machine.ram_bytes
    assert machine.pinnable_bytes is None or plan.pinned_bytes <= machine.pinnable_bytes


def check_asked_limits(plan: RunPlan, request: RuntimeConfig) -> None:
    """Nor what was allowed of it."""
    assert request.vram is None or plan.device_bytes <= request.vram
    assert request.ram is None or plan.host_bytes <= request.ram
    assert request.pinned is None or plan.pinned_bytes <= request.pinned


@given(st.tuples(requests(), machines()) | little_locked())
def test_never_over_budget_and_every_byte_counts_once(case: tuple[RuntimeConfig, MachineProfile]) -> None:
    request, machine = case
    plan = plan_or_none(request, machine)
    if plan is None:
        return
    check_limits(plan, machine)
    check_asked_limits(plan, request)
    parts = plan.device
    target, placement = plan.target, plan.placement
    # Weights are on the device or on the host, and the device's share of a draft is all of it.
    host = plan.host
    resident = parts.get("resident layers", 0) + parts.get("head", 0) + parts.get("embedding and head", 0)
    streamed = len(placement.streamed_layers) * target.layer_bytes
    own = target.layout.embedding.total_bytes if "embedding" in host else 0
    assert own <= host.get("embedding", 0) < own + 4096 and ("head" in parts) == (own > 0)
    experts = sum(one.total_bytes for one in target.layout.experts.values())
    assert resident + streamed + own + experts == ModelLayout.of(target.config, target.dtype).total_bytes
    experts_on_host = host.get("experts in host memory", 0)
    assert 0 < parts["experts"] <= experts if experts else "experts" not in parts
    assert experts <= experts_on_host < experts + 4096 * len(target.layers) or parts.get("experts", 0) == experts
    on_host = host.get("streamed layers", 0) + host.get("staged layers", 0)
    assert streamed <= on_host <= streamed + 4096 * len(placement.streamed_layers)
    # Layers are staged only for want of page-locked memory, and then for not much less than there is.
    assert bool(placement.staged_layers) == ("staged layers" in host)
    assert bool(placement.staged_kv_layers) == ("staged KV cache" in host)
    assert plan.is_staged == ("staging ring" in host)
    kv_is_streamed = len(plan.resident_kv_layers) < target.config.num_layers
    assert ("pieces to write KV through" in host) == (plan.is_staged and kv_is_streamed)
    lockable = [limit for limit in (request.pinned, machine.pinnable_bytes) if limit is not None]
    if plan.is_staged:
        kv_on_host = host.get("KV cache", 0) + host.get("staged KV cache", 0)
        assert on_host + kv_on_host + experts_on_host + host.get("embedding", 0) > min(lockable)
    if placement.staged_layers:
        assert plan.pinned_bytes + target.host_bytes_of_layers([0]) > min(lockable)
        assert set(placement.staged_layers) <= set(placement.streamed_layers)
    if placement.staged_kv_layers:
        kv_layer_bytes = target.reserved_kv_bytes([0])
        assert plan.pinned_bytes + kv_layer_bytes > min(lockable)
        assert host["staged KV cache"] == len(placement.staged_kv_layers) * kv_layer_bytes
        assert not set(placement.staged_kv_layers) & set(plan.resident_kv_layers)
        # Keys and values are staged last: they and the least that staging takes do not fit.
        assert len(placement.staged_layers) * target.host_bytes_of_layers([0]) >= streamed - kv_layer_bytes
        assert not plan.has_verifier  # which reads them where they lie
    assert not plan.has_verifier or target.pool_share == 1  # it asks for nothing
    if plan.draft is not None:
        whole_bytes = ModelLayout.of(plan.draft.config, plan.draft.dtype).total_bytes
        assert parts["draft weights"] == (target.copied_bytes(placement.streamed_layers) or whole_bytes)
        assert plan.draft.is_head == (parts.get("hidden states for the draft", 0) > 0)
    # Keys and values of the whole context as well.
    kept = parts.get("KV cache", parts.get("KV of resident layers", 0))
    assert kept + host.get("KV cache", 0) + host.get("staged KV cache", 0) == target.whole_kv_bytes
    assert set(plan.resident_kv_layers) <= set(range(target.config.num_layers))


QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936,
    "max_position_embeddings": 40960, "num_experts": 128, "moe_intermediate_size": 768,
}  # fmt: skip
MIXTURE = DescribedModel(model_config_from_json(QWEN3_30B, "made up"), torch.bfloat16)


def test_sequences_share_experts_while_all_of_them_get_faster() -> None:
    request, machine = RuntimeConfig(MIXTURE, draft="none", context=8192), made_up_machine(24 * GB, 100 * GB)
    one, several = (plan_run(replace(request, max_batch=count), machine) for count in (1, None))
    speeds = [forecast(plan, machine).usual.tok_per_s for plan in (one, several)]
    assert several.target.batch > 1 and speeds[0] < speeds[1]
    assert (several.placement.pool_buffers or 0) < (one.placement.pool_buffers or 0)


@pytest.mark.parametrize("pinned", [None, 60 * GB])
def test_a_retrieval_verifier_needs_all_experts_on_the_card(pinned: int | None) -> None:
    speculation = SpeculationOptions("triforce")
    request = RuntimeConfig(MIXTURE, draft="none", context=8192, speculation=speculation, pinned=pinned)
    with pytest.raises(BudgetError, match=r"no TriForce here: .* of 6144 experts are not on the device: raise --vram"):
        plan_run(request, made_up_machine(24 * GB, 100 * GB))
    few_experts, few_layers = replace(request, expert_pool=20 * GB), replace(request, resident_layers=40)
    for asked, option in ((few_experts, "expert-pool"), (few_layers, "resident-layers")):
        with pytest.raises(BudgetError, match=f": drop --{option}, raise --vram"):
            plan_run(asked, made_up_machine(96 * GB, 100 * GB))
    assert plan_run(request, made_up_machine(96 * GB, 100 * GB)).has_verifier


def test_host_memory_and_page_locking_have_limits_of_their_own() -> None:
    machine = made_up_machine(pinnable_bytes=20 * GB)
    request = RuntimeConfig(describe_model(CONFIGS / "llama-3.1-8b"), context=131072, max_batch=2, kv="host")
    kv_staged = plan_run(request, machine)
    assert 0 < len(kv_staged.placement.staged_kv_layers) < 32 and 20 * GB - kv_staged.pinned_bytes < 2 * GB
    with pytest.raises(BudgetError, match=r"--pinned page-locks 10\.0 MB at most, .*pieces to write the KV"):
        plan_run(replace(request, pinned=10_000_000), machine)
    staged = plan_run(replace(staged_request(request), pinned=5 * GB), machine)
    assert staged.pinned_bytes <= 5 * GB and len(staged.placement.staged_layers) > 0
    assert len(plan_run(staged_request(request), machine).placement.staged_layers) == 0
    with pytest.raises(BudgetError, match=r"--pinned page-locks 10\.0 MB at most, too little by .*a ring to stage"):
        plan_run(replace(staged_request(request), pinned=10_000_000), machine)
    too_small = r"--ram of 12\.0 GB is too small by .* GB \(streamed layers 11\.8 GB, Python and libraries .*\)"
    with pytest.raises(BudgetError, match=too_small):
        plan_run(replace(staged_request(request), ram=12 * GB, context=4096), machine)
    with pytest.raises(BudgetError, match=r"--vram 30\.0 GB is more than the 24\.0 GB"):
        plan_run(replace(request, vram=30 * GB), machine)


def staged_request(request: RuntimeConfig) -> RuntimeConfig:
    """The same with a small card and all of it streamed."""
    return replace(request, context=4096, max_batch=1, kv="gpu", vram=8 * GB)


def test_a_profile_without_a_gpu_or_a_link_cannot_be_planned_for() -> None:
    with pytest.raises(OptionError, match="has no GPU"):
        MachineProfile("bare", "measured", 0, 8 * GB).require_gpu()
    with pytest.raises(OptionError, match="does not know link_gbps"):
        MachineProfile("odd", "measured", 1, 8 * GB, "card", 8 * GB, hbm_gbps=500.0).require_gpu()


TABLE = [
    "llama-2-7b", "llama-2-7b-128k", "llama-2-13b", "llama-2-13b-128k", "llama-2-70b", "llama-3.1-8b",
    "llama-3.1-70b", "qwen2.5-32b",
]  # fmt: skip


@pytest.mark.few(4)
@pytest.mark.parametrize("profile", ["rtx4090", "rtx4090-x2"])
@pytest.mark.parametrize("name", TABLE)
def test_real_models_are_planned_or_refused_with_a_way_out(name: str, profile: str) -> None:
    machine = load_profile(profile)
    for context in (4096, 32768, 131072):
        request = RuntimeConfig(describe_model(CONFIGS / name), context=context)
        if context > request.target.config().max_position_embeddings:
            continue
        outcome = plan_or_refuse(request, machine)
        if isinstance(outcome, Refusal):
            assert outcome.changes, f"{name} at {context}: {outcome.problem}"
        else:
            check_limits(outcome, machine)
            assert forecast(outcome, machine).usual.tok_per_s > 0


# --- what is planned is what is loaded

CONTEXT = 3000


def placements(deep_target: Path) -> Iterator[tuple[str, dict[str, Any], tuple[bool, bool]]]:
    """Names and options of runs, and whether weights and KV are streamed."""
    yield "weights in part", {"kv": "gpu", "resident_layers": 3}, (True, False)
    yield "KV", {"kv": "host"}, (False, True)
    with load(deep_target, context=CONTEXT, kv="host", resident_layers=2, tree_nodes=0) as runtime:
        floor = runtime.plan.device_bytes
        layer = runtime.plan.target.reserved_kv_bytes([0]) - runtime.plan.target.open_kv_bytes([0])
    yield "both in part", {"kv": "host", "resident_layers": 2, "vram": floor + 2 * layer}, (True, True)
    yield "auto under a limit", {"kv": "auto", "vram": floor + 2 * layer}, (True, False)


def passes_bytes(runtime: Runtime, tokens: int, rows: int) -> int:
    """What one decoding pass behind `tokens` tokens streams, as the streamer counts it."""
    runner = runtime.engine.target.runner
    prefill(runner, 0, [index % 300 for index in range(tokens)])
    verify(runner, {0: TokenTree((1,) * rows)})  # plans made before the blocks were written are used up
    before = runner.streamer.bytes_begun
    verify(runner, {0: TokenTree((1,) * rows)})
    return runner.streamer.bytes_begun - before


def test_predicted_bytes_are_those_that_the_run_streams(deep_target: Path) -> None:
    seen = []
    for name, options, (weights, kv) in placements(deep_target):
        with load(deep_target, context=CONTEXT, tree_nodes=0, **options) as runtime:
            predicted = pass_time(runtime.plan, common_figures(), length_tokens=1000, rows=5)
            assert predicted.bytes_streamed == passes_bytes(runtime, 1000, 5), name
            assert (predicted.weight_bytes > 0) == weights, name
            if name != "auto under a limit":
                assert (predicted.kv_bytes > 0) == kv, name
            seen.append(predicted.bytes_streamed)
    assert len(set(seen)) > 2  # the runs differ


@pytest.mark.few(2)
@pytest.mark.parametrize("batch", [1, 3, 6])
def test_as_much_comes_ahead_of_a_pass_as_is_predicted(deep_target: Path, batch: int) -> None:
    """Weights and KV come in one order: the ring of either that is full holds up the other."""
    options = {"kv": "host", "resident_layers": 0, "tree_nodes": 0, "max_batch": batch}
    with load(deep_target, context=CONTEXT, **options) as runtime:
        target = runtime.engine.target
        streamer, engine = target.runner.streamer, target.cards[0].engine
        for slot in range(batch):
            prefill(target.runner, slot, [index % 300 for index in range(600)])
        verify(target.runner, {slot: TokenTree((1,)) for slot in range(batch)})  # blocks are there by then
        streamer.begin_pass()
        engine.drain()
        before = engine.bytes_copied
        streamer.begin_pass()  # drops the one that has begun, whose copies are done
        engine.drain()
        predicted = pass_time(runtime.plan, common_figures(), length_tokens=600, rows=1)
        share = (engine.bytes_copied - before) / predicted.bytes_streamed
        assert predicted.lookahead_s / predicted.copies_s == pytest.approx(share) and share < 1


@pytest.mark.few(3)
@pytest.mark.parametrize("mode", ["none", "chain", "triforce"])
@pytest.mark.parametrize("kv", ["gpu", "host"])
def test_the_ledger_of_a_run_is_what_was_planned(deep_target: Path, one_layer_draft: Path, kv: str, mode: str) -> None:
    options = SpeculationOptions(mode, budget_tokens=256)
    drafter: Any = "none" if mode == "none" else one_layer_draft
    with load(deep_target, context=CONTEXT, draft=drafter, kv=kv, speculation=options, max_batch=2) as runtime:
        reserved = runtime.engine.budgets[0].reservations
        assert runtime.plan.device_bytes == sum(reserved.values())
        parts = runtime.plan.device
        assert parts["embedding and head"] == reserved["target: embedding and head"]
        assert parts["resident layers"] == reserved["target: resident layers"]
        assert parts["workspace"] == reserved["workspace"]
        assert runtime.plan.pinned_bytes == 0  # there is nothing to copy to


def test_a_plan_for_a_gpu_asks_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a plan touched CUDA")

    for name in ("init", "_lazy_init", "get_device_capability", "mem_get_info", "current_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    request = RuntimeConfig(describe_model(CONFIGS / "llama-3.1-8b"), context=32768)
    plan = plan_run(request, load_profile("rtx4090"))
    assert plan.target.chunk_tokens == 1024 and plan.target.dtype == torch.bfloat16


@pytest.mark.parametrize("pinned", [None, 4 * GB, 10 * GB, 20 * GB])
def test_a_context_left_to_the_plan_fits_host_memory_whatever_is_locked(pinned: int | None) -> None:
    """With fewer tokens more layers find room on the card, and each token takes less of host memory."""
    machine = made_up_machine(ram_bytes=30 * GB, pinnable_bytes=pinned)
    request = RuntimeConfig(describe_model(CONFIGS / "llama-3.1-8b"), context=None, max_batch=2, kv="host")
    plan = plan_run(request, machine)
    check_limits(plan, machine)
    assert 100_000 < plan.target.context_tokens < 131_072
    assert bool(plan.placement.staged_kv_layers) == (pinned is not None)


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tools" / "results"


def test_an_unknown_dtype_names_what_the_profile_lacks() -> None:
    assert made_up_machine().flops("fp16") == 165e12  # 16-bit types stand for each other
    with pytest.raises(OptionError, match=r"no TFLOP/s for fp32: add tflops\.fp32"):
        made_up_machine().flops("fp32")


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
        assert slow / 4 < fast < slow  # products with tensor cores would be ten times as fast
    machines = [made_up_machine(tflops={"bf16": 165.0, "fp32": tflops}) for tflops in (40.0, 80.0)]
    slow, fast = (prefill_time(plan, one, 4096).compute_s for one in machines)
    assert fast < slow


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


# By result: shape, how weights are stored, what is asked for, and tokens before the passes.
RESIDENT: dict[str, tuple[str, str, dict[str, Any], int]] = {
    **{f"resident-8b-{name}": ("llama3-8b", name.replace("-", "_"), {"context": 928}, 520)
       for name in ("bf16", "q4-k-m", "q8-0")},
    "experts-qwen3-30b-a3b": ("qwen3-30b-a3b", "q4_k_m", {}, 192),
    "experts-gpt-oss-120b-answers-resident": ("gpt-oss-120b", "mxfp4", {}, 192),
}  # fmt: skip


@pytest.mark.parametrize("name", RESIDENT)
def test_resident_models_as_measured(name: str) -> None:
    shape, how, asked, tokens = RESIDENT[name]
    found, layers = measured(f"{name}-h200.json"), 12 if "gpt-oss" in name else None
    sizes = {"vocab_size": 128256 if "8b" in name else 32768, "context_tokens": 16384, "stretch_bytes": 65536}
    model = stored_model(shape_named(shape, layers), how, reference=name, **sizes)
    target = DescribedModel(model.config(), torch.bfloat16, kinds=model.kinds)
    plan = plan_run(RuntimeConfig(target, "none", dtype="bf16", weights="stored", **asked), load_profile("h200"))
    pools, windows = found.get("pools", ()), found["results"]["ours"]["windows"] if "results" in found else ()
    passes = [(1, one["token_s"]) for one in pools]
    passes += [(window["window_tokens"], window["pass_s"]["median"]) for window in windows]
    for rows, seconds in passes:
        predicted = pass_time(plan, load_profile("h200"), length_tokens=tokens, rows=rows)
        assert not predicted.bytes_streamed and predicted.seconds == pytest.approx(seconds, rel=0.15)
    if pools:  # on a card that has room for four times as much
        left_open = plan_run(replace(plan.request, weights="auto"), load_profile("h200"))
        assert left_open.target.layout.experts == plan.target.layout.experts


def test_steps_of_a_small_draft_as_measured() -> None:
    sizes = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    sizes |= {"intermediate_size": 1536, "vocab_size": 32000, "max_position_embeddings": 131072}
    config = model_config_from_json({"model_type": "llama", "tie_word_embeddings": True, **sizes}, "SmolLM2-135M's")
    draft, speculation = DescribedModel(config, torch.bfloat16), SpeculationOptions("triforce", "streaming")
    plan = plan_of_7b(context=121024, kv="gpu", draft=draft, speculation=speculation)
    found = measured("long-context-gpu-h200.json")["steps"]
    assert draft_step_s(plan, load_profile("h200")) == pytest.approx(found["draft_step_ms"] / 1e3, rel=0.15)
