"""What `auto` chooses: the fastest of all that fits, never slower with more memory, the same in a plan and in a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_runtime.config import GB, RuntimeConfig, SpeculationOptions, format_bytes
from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError
from offload_runtime.hardware import MachineProfile, load_profile
from offload_runtime.plan import MachineFigures, RunForecast, RunPlan, forecast, machine_figures, plan_run
from offload_runtime.plan.cost import USUAL_ACCEPTANCE
from offload_runtime.weights import ModelLayout, describe_model
from tests.helpers.engine import load, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.planning import CONFIGS, PROPERTY, machines, plan_or_none, requests

# Sums in another order.
ROUNDING = 1e-9


@PROPERTY
@given(
    requests(), machines, st.integers(0, 20 * GB) | st.integers(0, 2 * GB),
    st.sampled_from(["auto", "auto", "auto", "none", "chain", "triforce"]),
    st.sampled_from(["auto", "auto", "auto", "full", "retrieval", "streaming"]),
)  # fmt: skip
def test_more_vram_never_predicts_slower(
    request: RuntimeConfig, machine: MachineFigures, more_bytes: int, mode: str, draft_cache: str
) -> None:
    """Whatever is left to be chosen; what fits once fits with more memory as well."""
    if request.draft == "ngram" or mode == "none":
        options = SpeculationOptions("none" if mode == "none" else "auto")
        request = replace(request, draft="ngram", speculation=options)
    else:
        request = replace(request, speculation=SpeculationOptions(mode, draft_cache))
    request = replace(request, vram_bytes=None)
    less = plan_or_none(request, machine)
    if less is None:
        return
    larger = replace(machine, vram_bytes=machine.vram_bytes + more_bytes)
    before, after = forecast(less, machine), forecast(plan_run(request, larger), larger)
    assert after.usual.tok_per_s >= before.usual.tok_per_s * (1 - ROUNDING)


@st.composite
def drafted(draw: st.DrawFn) -> tuple[RuntimeConfig, MachineFigures]:
    """A long text and a draft, everything else left to be chosen, on a card that has room for about the weights."""
    target = describe_model(CONFIGS / draw(st.sampled_from(["llama-3.1-8b", "llama-2-7b-128k", "llama-2-13b-128k"])))
    draft = describe_model(CONFIGS / draw(st.sampled_from(["llama-68m", "qwen2.5-0.5b", "llama-3.2-1b"])))
    request = RuntimeConfig(
        target, draft, context=draw(st.integers(9_000, 131_072)), max_batch=draw(st.sampled_from([1, 1, 2]))
    )
    machine = MachineFigures(
        "some", ModelLayout.plain(target.config(), torch.bfloat16).total_bytes + draw(st.integers(3 * GB, 20 * GB)), GB,
        draw(st.floats(5, 60)), draw(st.floats(500, 4000)), 999 * GB, {"bf16": 165.0},
        draw(st.none() | st.integers(10 * GB, 100 * GB)),
    )  # fmt: skip
    return request, machine


@pytest.mark.slow
@PROPERTY
@given(drafted(), st.lists(st.integers(0, 4 * GB), min_size=4, max_size=4))
def test_with_a_draft_and_a_long_text_neither(case: tuple[RuntimeConfig, MachineFigures], steps: list[int]) -> None:
    request, machine = case
    fastest = 0.0
    for more_bytes in steps:
        machine = replace(machine, vram_bytes=machine.vram_bytes + more_bytes)
        plan = plan_or_none(request, machine)
        assert plan is not None or not fastest
        if plan is not None:
            speed = forecast(plan, machine).usual.tok_per_s
            assert speed >= fastest * (1 - ROUNDING)
            fastest = speed


PAIRS = [
    ("llama-3.1-8b", "llama-3.2-1b", 32768), ("llama-3.1-8b", "llama-3.2-1b", 131072),
    ("llama-2-7b-128k", "llama-68m", 32768), ("qwen2.5-32b", "qwen2.5-0.5b", 32768),
]  # fmt: skip
# An RTX 4090 with as much memory as one likes.
LARGE = replace(
    machine_figures(load_profile("rtx4090")), vram_bytes=200 * GB, ram_bytes=400 * GB, pinnable_bytes=None
)  # fmt: skip


def chosen(plan: RunPlan) -> tuple[bool, str, bool]:
    """Whether there is a retrieval verifier, the draft's cache, whether the target's is in host memory."""
    return plan.has_verifier, "n-grams" if plan.draft is None else plan.draft.cache, plan.target.on_host


def asked_for(target: str, draft: str, context: int, **changes: Any) -> RuntimeConfig:
    return RuntimeConfig(describe_model(CONFIGS / target), describe_model(CONFIGS / draft), context=context, **changes)


def scanned(request: RuntimeConfig, machine: MachineFigures, step_bytes: int) -> Iterator[tuple[RunPlan, RunForecast]]:
    """Plans and forecasts with ever more device memory, from the first that fits to 10 GB more than all of it takes."""
    fits, left = False, 10 * GB // step_bytes
    for vram_bytes in range(3 * GB, machine.vram_bytes, step_bytes):
        asked = replace(request, vram_bytes=vram_bytes)
        plan = plan_or_none(asked, machine)
        assert plan is not None or not fits, "what fits once fits with more memory as well"
        if plan is None:
            continue
        fits = True
        yield plan, forecast(plan, machine)
        left -= not plan.pinned_bytes
        if not left:
            return


@pytest.mark.slow
@pytest.mark.parametrize(("target", "draft", "context"), PAIRS)
def test_no_step_of_vram_predicts_slower(target: str, draft: str, context: int) -> None:
    """All levels, caches and places are chosen somewhere on the way."""
    seen, fastest, rooms = set(), 0.0, set[int]()
    step_bytes = 700_000_000 if target == "qwen2.5-32b" else 300_000_000
    for plan, predicted in scanned(asked_for(target, draft, context), LARGE, step_bytes):
        assert predicted.usual.tok_per_s >= fastest * (1 - ROUNDING), (fastest, plan)
        fastest = predicted.usual.tok_per_s
        seen.add(chosen(plan))
        rooms.add(plan.tree_room)
    assert any(rooms), "trees are somewhere the fastest"
    assert {cache for _, cache, _ in seen} == {"retrieval", "streaming"} or draft == "llama-68m"
    assert {on_host for _, _, on_host in seen} == {False, True}
    assert {verifier for verifier, _, _ in seen} == {False, True} or target == "qwen2.5-32b"


@pytest.mark.parametrize("vram_bytes", [12 * GB, 20 * GB, 26 * GB, 60 * GB])
@pytest.mark.parametrize(("target", "draft", "context"), PAIRS[:3])
def test_auto_is_the_fastest_of_what_could_be_asked_for(target: str, draft: str, context: int, vram_bytes: int) -> None:
    request = asked_for(target, draft, context, vram_bytes=vram_bytes)
    speeds = {}
    for mode in ("chain", "triforce"):
        for cache in ("retrieval", "streaming"):
            for kv in ("gpu", "host"):
                asked = replace(request, kv=kv, speculation=SpeculationOptions(mode, cache))
                plan = plan_or_none(asked, LARGE)
                if plan is not None:
                    assert chosen(plan) == (mode == "triforce", cache, kv == "host")
                    speeds[chosen(plan)] = forecast(plan, LARGE).usual.tok_per_s
    plan = plan_run(request, LARGE)
    assert forecast(plan, LARGE).usual.tok_per_s == max(speeds.values()) == speeds[chosen(plan)]


def test_the_headline_is_what_was_chosen_by_and_the_reason_says_so() -> None:
    chain, triforce = asked_for(*PAIRS[0], vram_bytes=20 * 10**9), asked_for(*PAIRS[2], vram_bytes=26 * GB)
    for request, level in ((chain, "streaming, far"), (triforce, "verifier")):
        plan = plan_run(request, LARGE)
        usual = forecast(plan, LARGE).usual
        assert usual.acceptance == USUAL_ACCEPTANCE[level]
        if level == "verifier":
            assert plan.reason.startswith(f"predicted to be faster: {usual.tok_per_s:.3g} against ")
            assert plan.reason.endswith(" tokens/s by the figures of rtx4090")
    request = asked_for(*PAIRS[0], vram_bytes=40 * GB)
    plan = plan_run(request, LARGE)
    usual = forecast(plan, LARGE).usual
    assert plan.reason.startswith("predicted to be slower: ")
    assert plan.reason.endswith(f" against {usual.tok_per_s:.3g} tokens/s by the figures of rtx4090")


def test_triforce_that_host_memory_has_no_room_for_gives_way() -> None:
    """With all weights on the device more of the KV cache is in host memory."""
    request = asked_for("llama-2-7b-128k", "llama-68m", 131072, vram_bytes=26 * GB)
    triforce = plan_run(request, LARGE)
    less = replace(LARGE, ram_bytes=triforce.host_bytes - GB)
    plan = plan_run(request, less)
    assert triforce.has_verifier and not plan.has_verifier
    assert plan.reason == f"it takes 1.0 GB more than the {format_bytes(less.ram_bytes)} of host memory"


# --- a run chooses as its plan does

TARGET = "long_target"
CONTEXT, GAMMA = 9000, 12


CARD = load_profile("rtx4090")
MACHINES = {
    "as it is": CARD,
    "a slow link": replace(CARD, name="slow-link", link_gbps=0.01),
    "slow launches": replace(CARD, name="slow-launches", graph_launch_us=5000.0),
    "slow memory": replace(CARD, name="slow-memory", hbm_gbps=0.01),
    "slow products": replace(CARD, name="slow-products", tflops={"fp32": 1e-4}),
}


@pytest.mark.parametrize("kv", ["auto", "host"])
def test_a_run_chooses_what_its_plan_does(target: Path, draft: Path, kv: str) -> None:
    seen = set()
    for name, profile in MACHINES.items():
        planned = plan_of(target, draft, profile, kv)
        with load(
            target, draft=draft, dtype="fp32", context=CONTEXT, kv=kv, gamma=GAMMA, vram=20 * GB, profile=profile
        ) as runtime:
            assert chosen(runtime.plan) == chosen(planned), name
            assert "by the figures of " + profile.name in runtime.placement
        seen.add(chosen(planned))
    assert len(seen) > 1, "the figures make no difference"


def test_the_link_that_is_played_is_the_one_to_choose_by(target: Path, draft: Path) -> None:
    """Chunks that a retrieval verifier fetches from host memory are waited for."""

    def said(**options: Any) -> str:
        with load(target, draft=draft, context=CONTEXT, kv="host", vram=1 << 30, profile=CARD, **options) as runtime:
            return runtime.placement

    played = replace(CARD, name="played", link_gbps=0.01, vram_bytes=3 * GB)
    assert "TriForce: the draft, then" in said()
    assert "not TriForce: predicted to be slower" in said(emulate=played)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0}, "gamma must be at least 1, not 0"),
        ({"gamma": 64}, "gamma 64 exceeds the room for 63 proposals: raise max_gamma"),
        ({"gamma": 4, "draft": "none"}, "gamma 4 does nothing with --draft none"),
    ],
)
def test_a_default_of_proposals_that_makes_no_sense(target: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Runtime.load(target, device="cpu", **options)
    with pytest.raises(OptionError, match=message):
        RuntimeConfig(describe_model(str(target)), options.get("draft", "ngram"), gamma=options["gamma"])


def test_what_is_proposed_by_default_is_what_was_asked_for(target: Path, draft: Path) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
    with load(target, draft=draft, gamma=3, context=256) as runtime:
        by_default = runtime.generate([5, 6, 7] * 9, **asked).stats
        said = runtime.generate([5, 6, 7] * 9, gamma=3, **asked).stats
        more = runtime.generate([5, 6, 7] * 9, gamma=9, **asked).stats
    assert by_default.acceptance == said.acceptance != more.acceptance


def plan_of(target: Path, draft: Path, profile: MachineProfile, kv: str) -> RunPlan:
    models = describe_model(str(target)), describe_model(str(draft))
    request = RuntimeConfig(*models, dtype="fp32", context=CONTEXT, kv=kv, gamma=GAMMA)
    return plan_run(request, replace(machine_figures(profile), ram_bytes=400 * GB, pinnable_bytes=None))


def test_of_a_machine_that_nobody_knows_a_common_card_is_taken(target: Path, draft: Path) -> None:
    with (
        load(target, draft=draft, context=CONTEXT) as unknown,
        load(target, draft=draft, context=CONTEXT, profile="rtx4090") as known,
    ):
        assert unknown.placement.endswith("by the figures of rtx4090, as nothing is known of this machine")
        assert chosen(unknown.plan) == chosen(known.plan)
        assert known.placement.endswith("by the figures of rtx4090")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("mode", "draft_cache"),
    [("triforce", "retrieval"), ("triforce", "streaming"), ("chain", "full"), ("chain", "streaming")],
)
def test_what_is_asked_for_is_not_overruled(target: Path, draft: Path, mode: str, draft_cache: str) -> None:
    for profile in MACHINES.values():
        options = SpeculationOptions(mode, draft_cache)
        with Runtime.load(
            target, draft=draft, device="cpu", context=CONTEXT, speculation=options, profile=profile
        ) as runtime:
            assert chosen(runtime.plan)[:2] == (mode == "triforce", draft_cache)
            assert "predicted" not in runtime.placement
