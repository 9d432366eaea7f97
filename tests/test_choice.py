"""What `auto` chooses: the fastest of all that fits, never slower with more memory, the same in a plan and in a run;
and TriForce."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError
from offload_runtime.hardware import MachineProfile, load_profile
from offload_runtime.plan.report import forecast
from offload_runtime.plan.search import plan_run
from offload_runtime.plan.sizes import RunPlan
from offload_runtime.sizes import GB
from offload_runtime.weights.sources import describe_model
from tests.helpers.engine import load
from tests.helpers.planning import CONFIGS, machines, plan_or_none, requests

# Sums in another order.
ROUNDING = 1e-9


@given(
    requests(), machines(), st.integers(0, 20 * GB) | st.integers(0, 2 * GB),
    st.sampled_from(["auto", "auto", "auto", "none", "chain", "triforce"]),
    st.sampled_from(["auto", "auto", "auto", "full", "retrieval", "streaming"]),
)  # fmt: skip
def test_more_vram_never_predicts_slower(
    request: RuntimeConfig, machine: MachineProfile, more_bytes: int, mode: str, draft_cache: str
) -> None:
    """Whatever is left to be chosen; what fits once fits with more memory as well."""
    if request.draft == "ngram" or mode == "none":
        options = SpeculationOptions("none" if mode == "none" else "auto")
        request = replace(request, draft="ngram", speculation=options)
    else:
        with suppress(OptionError):  # a copy of the target has no steps of a retrieval verifier
            request = replace(request, speculation=SpeculationOptions(mode, draft_cache))
    request = replace(request, vram=None)
    less = plan_or_none(request, machine)
    if less is None:
        return
    larger = replace(machine, vram_bytes=machine.vram_bytes + more_bytes)
    before, after = forecast(less, machine), forecast(plan_run(request, larger), larger)
    assert after.usual.tok_per_s >= before.usual.tok_per_s * (1 - ROUNDING)


PAIRS = [
    ("llama-3.1-8b", "llama-3.2-1b", 32768), ("llama-3.1-8b", "llama-3.2-1b", 131072),
    ("llama-2-7b-128k", "llama-68m", 32768), ("qwen2.5-32b", "qwen2.5-0.5b", 32768),
]  # fmt: skip
# An RTX 4090 with as much memory as one likes.
LARGE = replace(
    load_profile("rtx4090"), vram_bytes=200 * GB, ram_bytes=400 * GB, pinnable_bytes=None
)  # fmt: skip


def chosen(plan: RunPlan) -> tuple[bool, str, bool]:
    """Whether there is a retrieval verifier, the draft's cache, whether the target's is in host memory."""
    return plan.has_verifier, "n-grams" if plan.draft is None else plan.draft.cache, plan.target.on_host


def asked_for(target: str, draft: str, context: int, **changes: Any) -> RuntimeConfig:
    return RuntimeConfig(describe_model(CONFIGS / target), describe_model(CONFIGS / draft), context=context, **changes)


@pytest.mark.few(3)
@pytest.mark.parametrize("vram_bytes", [12 * GB, 26 * GB, 60 * GB])
@pytest.mark.parametrize(("target", "draft", "context"), PAIRS)
def test_auto_is_the_fastest_of_what_could_be_asked_for(target: str, draft: str, context: int, vram_bytes: int) -> None:
    request = asked_for(target, draft, context, vram=vram_bytes)
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


# --- a run chooses as its plan does

TARGET = "long_target"
CONTEXT, GAMMA = 9000, 12


CARD = replace(load_profile("rtx4090"), gpu_name="made up")  # a card's own figures say nothing of a CPU
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


def plan_of(target: Path, draft: Path, profile: MachineProfile, kv: str) -> RunPlan:
    models = describe_model(str(target)), describe_model(str(draft))
    request = RuntimeConfig(*models, dtype="fp32", context=CONTEXT, kv=kv, gamma=GAMMA)
    return plan_run(request, replace(profile, ram_bytes=400 * GB, pinnable_bytes=None))


FEW, COUNT = 700, 28
PROMPT = [3 + (7 * i * i + i // 5) % 290 for i in range(500)]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_retrieval_verifier_that_sees_everything_is_right_in_every_generation(target: Path, device: str) -> None:
    """Also where steps are replays of what an earlier generation captured, and chunks are chosen in some steps only."""
    options = SpeculationOptions("triforce", budget_tokens=512, refresh_steps=3)
    with Runtime.load(
        target, draft="none", device=device, dtype="fp32", context=FEW, kv="host", speculation=options
    ) as runtime:
        for seed in (1, 1, 2, 1):
            said = runtime.generate(PROMPT, max_new_tokens=COUNT, ignore_eos=True, gamma=19, temperature=0.6, seed=seed)
            assert said.stats.passes <= 3  # a near-tie may cost one of the two that are needed


def test_what_triforce_cannot_do_is_refused_before_loading(target: Path) -> None:
    with pytest.raises(OptionError, match="4096 tokens is more than the context of 700"):
        load(target, draft="none", context=FEW, speculation=SpeculationOptions("triforce")).__enter__()
