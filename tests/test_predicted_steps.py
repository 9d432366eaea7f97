"""What steps should take by the machine's figures: passes, drafting, and what a run says was predicted for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError, ProfileError
from offload_runtime.hardware import load_profile, save_profile
from offload_runtime.model import depths_of
from offload_runtime.params import GenerationParams
from offload_runtime.plan import (
    MachineFigures,
    RunPlan,
    forecast,
    known_figures,
    machine_figures,
    pass_time,
    plan_run,
    predicted_step_s,
)
from offload_runtime.plan.cost import draft_step_s, guess_parents, usual_acceptance, verifier_step_s
from offload_runtime.runners import expected_accepted
from offload_runtime.weights import describe_model
from tests.helpers.engine import PROMPT, load, one_thread, write_checkpoint  # noqa: F401 (an autouse fixture)

CONFIGS = Path(__file__).parent / "data" / "configs"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CARD = replace(machine_figures(load_profile("rtx4090")), ram_bytes=256 * 10**9, pinnable_bytes=None)


@pytest.fixture(autouse=True)
def own_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFLOAD_RUNTIME_CONFIG", str(tmp_path / "config"))


@pytest.fixture
def slow_memory(own_profiles: None) -> MachineFigures:
    """A card whose memory is so slow that the keys of a small model take longer than launches; it has a profile."""
    save_profile(replace(load_profile("rtx4090"), hbm_gbps=0.1), "slow-memory")
    return machine_figures(load_profile("slow-memory"))


def _plan(
    target: str, draft: str = "none", *, context: int = 4096, batch: int = 1, mode: str = "auto", kv: str = "auto"
) -> RunPlan:
    described = draft if draft in ("none", "ngram") else describe_model(CONFIGS / draft)
    request = RuntimeConfig(
        describe_model(CONFIGS / target), described, context=context, max_batch=batch, kv=kv,
        speculation=SpeculationOptions(mode),
    )  # fmt: skip
    return plan_run(request, CARD)


def _pass_s(plan: RunPlan, *, length: int, rows: int) -> float:
    return pass_time(plan, CARD, length_tokens=length, rows=rows).seconds


def _step_s(
    plan: RunPlan, mode: str, size: int, *, length: int, sequences: int = 1, machine: MachineFigures = CARD
) -> float:
    return predicted_step_s(
        plan, machine, proposals=size, drafted=mode in ("chain", "tree"), in_tree=mode == "tree",
        num_sequences=sequences, length_tokens=length,
    )  # fmt: skip


def test_plain_decoding_is_a_pass() -> None:
    plan = _plan("llama-2-13b", kv="gpu")
    predicted = _step_s(plan, "plain", 0, length=1200)
    assert predicted == _pass_s(plan, length=1200, rows=1)
    # 13B of which most is streamed at 25 GB/s.
    assert predicted == pytest.approx(len(plan.placement.streamed_layers) * 634_408_960 / 25e9, rel=0.01)


def test_keys_and_values_take_their_time() -> None:
    plan = _plan("llama-2-7b-128k", context=131072)
    predicted = _step_s(plan, "ngram", 8, length=120_050)
    assert predicted == _pass_s(plan, length=120_050, rows=9)
    assert predicted > 1.5 * _pass_s(plan, length=60_000, rows=9)


def test_a_full_context_leaves_room_for_the_window() -> None:
    plan = _plan("llama-2-13b")
    assert _step_s(plan, "ngram", 16, length=4093) == _pass_s(plan, length=4096 - 17, rows=17)


def test_a_draft_takes_its_steps_as_far_as_the_ring_does_not_hide_them() -> None:
    plan = _plan("llama-3.1-8b", "llama-3.2-1b", mode="chain")
    assert len(plan.placement.streamed_layers) == 0
    passed_s, step_s = _pass_s(plan, length=1200, rows=6), draft_step_s(plan, CARD)
    assert _step_s(plan, "chain", 5, length=1200) == pytest.approx(passed_s + 5 * step_s)
    streamed = _plan("llama-2-13b", "llama-68m", mode="chain")
    assert _step_s(streamed, "chain", 5, length=1200) == _pass_s(streamed, length=1200, rows=6)


def test_trees_of_a_fixed_depth_are_planned_as_they_are_grown() -> None:
    described = describe_model(CONFIGS / "llama-2-13b"), describe_model(CONFIGS / "llama-68m")
    for gamma, nodes in ((4, 64), (None, 64), (4, None), (4, 0)):
        request = RuntimeConfig(*described, context=2048, gamma=gamma, tree_nodes=nodes)
        predicted = forecast(plan_run(request, CARD), CARD)
        assert (predicted.tree_nodes, predicted.gamma) == (nodes or 0, gamma or 63)


def test_a_retrieval_verifier_takes_as_many_steps_as_usual() -> None:
    """With a draft it says several tokens a step, at the usual acceptance; alone, one."""
    plan = _plan("llama-2-7b-128k", "llama-68m", context=131072)
    assert plan.has_verifier
    parents = guess_parents(plan, 1)
    step_s = verifier_step_s(plan, CARD) + (1 + max(depths_of(parents))) * draft_step_s(plan, CARD)
    hidden_s = plan.target.kv_ring_bytes / 25e9
    steps = 24 / (1 + expected_accepted(parents, usual_acceptance(plan.draft)))
    assert 5 < steps < 12
    predicted = _step_s(plan, "chain", 24, length=120_500)
    assert predicted == pytest.approx(_pass_s(plan, length=120_500, rows=25) + steps * step_s - hidden_s)
    alone = _plan("llama-2-7b-128k", "none", context=131072, mode="triforce")
    assert alone.has_verifier
    expected = _pass_s(alone, length=120_500, rows=25) + 24 * verifier_step_s(alone, CARD) - hidden_s
    assert _step_s(alone, "chain", 24, length=120_500) == pytest.approx(expected)


def test_a_step_serves_all_answers_of_a_batch() -> None:
    """It reads the weights once and each answer's own keys and values."""
    plan = _plan("llama-2-7b-128k", context=65536, batch=2)
    assert _step_s(plan, "plain", 0, length=50_000, sequences=2) > 1.5 * _step_s(plan, "plain", 0, length=50_000)
    plan = _plan("llama-3.1-8b", "llama-3.2-1b", batch=3, mode="chain")
    draft = plan.draft
    assert draft is not None and draft.batch == 3
    # Bound by memory: beside the weights, 4096 tokens of every answer are read.
    more_bytes = 2 * 4096 * 2 * draft.config.kv_size * 2 * draft.config.num_layers
    one_s, three_s = draft_step_s(plan.of_batch(1), CARD), draft_step_s(plan, CARD)
    assert three_s - one_s == pytest.approx(more_bytes / CARD.attained_hbm)
    predicted = _step_s(plan, "chain", 4, length=1200, sequences=3)
    assert predicted == pytest.approx(_pass_s(plan, length=1200, rows=5) + 4 * three_s)


def test_a_step_of_the_retrieval_verifier_serves_all_answers_of_a_batch() -> None:
    plan = _plan("llama-3.1-8b", "llama-3.2-1b", context=32768, batch=3, mode="triforce", kv="host")
    assert plan.has_verifier
    config, target = plan.target.config, plan.target
    weight_bytes = config.num_layers * target.layer_bytes + config.vocab_size * config.hidden_size * 2
    slow_memory = replace(CARD, hbm_gbps=1.0, launch_us=0.0, link_gbps=1e9)
    one, three = (
        verifier_step_s(plan.of_batch(count), slow_memory) * slow_memory.attained_hbm - weight_bytes for count in (1, 3)
    )
    assert three == pytest.approx(3 * one, rel=1e-3)
    one, three = (verifier_step_s(plan.of_batch(count), replace(CARD, link_gbps=1e-3)) for count in (1, 3))
    assert three == pytest.approx(3 * one, rel=1e-3)  # chunks of every answer are fetched


@pytest.mark.slow
def test_the_measured_link_takes_the_place_of_the_profiles(tmp_path: Path) -> None:
    # Large enough for its copies to take longer than launches.
    target = write_checkpoint(tmp_path / "target", hidden_size=1024)
    with load(target, draft="none", profile="rtx4090", resident_layers=1) as runtime:
        stats = runtime.generate(PROMPT, max_new_tokens=3, ignore_eos=True).stats
        placed, length = runtime.plan, stats.prompt_tokens + 1
    assert stats.link_peak_gbps is not None and stats.predicted_s_per_pass is not None
    figures = machine_figures(load_profile("rtx4090"))
    by_link = []
    for gbps in (stats.link_peak_gbps, CARD.link_gbps):
        machine = replace(figures, link_gbps=gbps)
        steps_s = [_step_s(placed, "plain", 0, length=length + step, machine=machine) for step in range(2)]
        by_link.append(sum(steps_s) / 2)
    assert stats.predicted_s_per_pass == pytest.approx(by_link[0]) != pytest.approx(by_link[1])


def test_figures_are_of_this_card_ones_own_before_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert known_figures(None, CPU, torch.float32) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 4090")
    shipped = known_figures(None, CUDA, torch.bfloat16)
    assert shipped is not None and (shipped.name, shipped.hbm_gbps) == ("rtx4090", 1008.0)
    save_profile(replace(load_profile("rtx3090"), hbm_gbps=1.0), "another-card")
    save_profile(replace(load_profile("rtx4090"), hbm_gbps=None), "half-known")
    (tmp_path / "config" / "profiles" / "broken.toml").write_text("gpus = maybe")
    found = known_figures(None, CUDA, torch.bfloat16)
    assert found is not None and found.name == "rtx4090"
    save_profile(replace(load_profile("rtx4090"), hbm_gbps=990.0), "mine")
    own = known_figures(None, CUDA, torch.bfloat16)
    assert own is not None and (own.name, own.hbm_gbps) == ("mine", 990.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card that nobody has measured")
    assert known_figures(None, CUDA, torch.bfloat16) is None


def test_figures_that_were_asked_for_must_be_complete(target: Path) -> None:
    with pytest.raises(ProfileError, match="there is no profile 'rtx40'"):
        Runtime.load(target, device="cpu", profile="rtx40")
    with pytest.raises(OptionError, match=r"h200 has no TFLOP/s for fp32: add tflops\.fp32 to it"):
        Runtime.load(target, device="cpu", profile="h200")
    with load(target, draft="none") as unknown, load(target, draft="none", profile="rtx4090") as known:
        stats = [runtime.generate(PROMPT, max_new_tokens=3, ignore_eos=True).stats for runtime in (unknown, known)]
        single = known.generate(PROMPT, max_new_tokens=1, ignore_eos=True).stats
    assert stats[0].predicted_s_per_pass is None and (stats[1].predicted_s_per_pass or 0) > 0
    assert all((one.measured_s_per_pass or 0) > 0 for one in stats)
    assert single.predicted_s_per_pass is None and single.measured_s_per_pass is None


def test_the_answers_of_a_batch_share_a_prediction(target: Path) -> None:
    with load(target, draft="none", profile="rtx4090", max_batch=2) as runtime:
        results = runtime.generate_batch([PROMPT, "the link"], max_new_tokens=4, ignore_eos=True)
    first, second = (result.stats.predicted_s_per_pass for result in results)
    assert first is not None and first == second > 0


def test_an_answers_prediction_is_of_the_steps_that_it_took(target: Path, draft: Path) -> None:
    """Of as many passes as there were, each with what was proposed for it."""
    with load(target, draft=draft, profile="rtx4090") as runtime:
        plain, chains = (
            runtime.generate(PROMPT, max_new_tokens=12, ignore_eos=True, **how).stats
            for how in ({"speculate": False}, {"gamma": 4, "tree_nodes": 0})
        )
    assert plain.passes == 11 and chains.windows == {"chain 4": chains.passes}
    assert plain.predicted_s_per_pass is not None and chains.predicted_s_per_pass is not None
    assert chains.predicted_s_per_pass > plain.predicted_s_per_pass > 0


def test_a_window_that_the_answers_end_cuts_is_predicted_as_small_as_it_is(
    target: Path, slow_memory: MachineFigures
) -> None:
    """A draft that is the target: every proposal is accepted, so lengths and windows are known in advance."""
    with load(target, draft=target, profile=slow_memory.name) as runtime:
        stats = runtime.generate(PROMPT, max_new_tokens=8, ignore_eos=True, gamma=4, tree_nodes=0).stats
        plan = runtime.plan
    assert stats.windows == {"chain 4": 2} and stats.acceptance[0].proposed == stats.acceptance[0].accepted == 5
    # Behind the first token come four proposals and the target's own, and then there is room for one and its own.
    length = stats.prompt_tokens + 1
    steps_s = [
        _step_s(plan, "chain", size, length=length + before, machine=slow_memory) for size, before in ((4, 0), (1, 5))
    ]
    assert stats.predicted_s_per_pass == pytest.approx(sum(steps_s) / 2)


def test_steps_of_a_batch_are_predicted_for_those_that_go_on_at_their_mean_length(
    target: Path, slow_memory: MachineFigures
) -> None:
    long, short = [token % 290 + 3 for token in range(400)], [7, 8, 9]
    wanted = [GenerationParams(max_new_tokens=count, ignore_eos=True) for count in (6, 3)]
    for first, second in ((long, short), (short, long)):
        with load(target, draft="none", profile=slow_memory.name, max_batch=2) as runtime:
            results, plan = runtime.generate_batch([first, second], params=wanted), runtime.plan
        assert [result.stats.passes for result in results] == [5, 2]
        # Of both, and then of the first alone.
        steps = [(2, (len(long) + len(short)) // 2)] * 2 + [(1, len(first))] * 3
        steps_s = [
            _step_s(plan, "plain", 0, length=length + number, sequences=count, machine=slow_memory)
            for number, (count, length) in enumerate(steps, start=1)
        ]
        own_s = sum(steps_s) / 5, sum(steps_s[:2]) / 2
        assert [result.stats.predicted_s_per_pass for result in results] == pytest.approx(own_s)


def test_steps_by_who_proposes() -> None:
    """A draft step for every proposal of a chain, a few and one for every so many nodes of a tree, none for n-grams."""
    plan = _plan("llama-2-7b", "llama-68m", context=2048)
    step_s = draft_step_s(plan, CARD)
    plain, ngram, unigram, chain = (
        _step_s(plan, mode, size, length=1000)
        for mode, size in (("plain", 0), ("ngram", 16), ("unigram", 16), ("chain", 16))
    )
    assert plain == pytest.approx(_pass_s(plan, length=1000, rows=1))
    assert ngram == unigram == pytest.approx(_pass_s(plan, length=1000, rows=17))
    assert chain - ngram == pytest.approx(16 * step_s)
    trees = [_step_s(plan, "tree", size, length=1000) - _step_s(plan, "ngram", size, length=1000) for size in (32, 64)]
    assert trees[1] - trees[0] == pytest.approx(step_s) and trees[0] > 2 * step_s
    assert _step_s(plan, "chain", 16, length=1000, sequences=4) > chain
    verifier = _plan("llama-2-7b-128k", "llama-68m", context=32768, mode="triforce", kv="host")
    steps = [_step_s(verifier, "chain", size, length=30000) for size in (8, 16, 32)]
    assert steps[2] - steps[1] == pytest.approx(2 * (steps[1] - steps[0]))
    assert steps[1] - steps[0] > verifier_step_s(verifier, CARD)
