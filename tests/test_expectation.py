"""What a run should have taken: the planner's passes and steps, as many as there were, by the machine's figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from offload_runtime.config import RuntimeConfig, SpeculationOptions
from offload_runtime.engine import Runtime
from offload_runtime.engine.expectation import Expectation
from offload_runtime.errors import OptionError, ProfileError
from offload_runtime.hardware import load_profile, save_profile
from offload_runtime.plan import RunPlan, forecast, known_figures, machine_figures, pass_time, plan_run
from offload_runtime.plan.cost import draft_step_s, verifier_step_s
from offload_runtime.speculation import Acceptance, Choice
from offload_runtime.weights import describe_model
from tests.helpers.engine import PROMPT, load, one_thread, write_checkpoint  # noqa: F401 (an autouse fixture)

CONFIGS = Path(__file__).parent / "data" / "configs"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CARD = replace(machine_figures(load_profile("rtx4090")), ram_bytes=256 * 10**9, pinnable_bytes=None)


@pytest.fixture(autouse=True)
def own_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFLOAD_RUNTIME_CONFIG", str(tmp_path / "config"))


@dataclass(frozen=True)
class Answer:
    """What an answer took."""

    prompt_tokens: int
    new_tokens: int
    passes: int
    acceptance: tuple[Acceptance, ...] = ()
    windows: Mapping[str, int] = field(default_factory=dict)


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


def _verified(passes: int, proposed: int, by: str = "ngram") -> Acceptance:
    return Acceptance(by, "target", passes, proposed, proposed // 2)


def test_plain_decoding_is_a_pass_halfway_through_the_answer() -> None:
    plan = _plan("llama-2-13b", kv="gpu")
    predicted = Expectation(plan, CARD).seconds_per_pass([Answer(1000, 400, 399)])
    assert predicted == _pass_s(plan, length=1200, rows=1)
    # 13B of which most is streamed at 25 GB/s.
    assert predicted == pytest.approx(plan.placement.num_streamed * 634_408_960 / 25e9, rel=0.01)


def test_windows_are_as_wide_as_they_were_and_keys_and_values_as_many() -> None:
    plan = _plan("llama-2-7b-128k", context=131072)
    answer = Answer(120_000, 100, 20, (_verified(20, 157),))
    predicted = Expectation(plan, CARD).seconds_per_pass([answer])
    assert predicted == _pass_s(plan, length=120_050, rows=9)
    assert predicted > 1.5 * _pass_s(plan, length=60_000, rows=9)


def test_a_full_context_leaves_room_for_the_window() -> None:
    plan = _plan("llama-2-13b")
    predicted = Expectation(plan, CARD).seconds_per_pass([Answer(4090, 6, 1, (_verified(1, 16),))])
    assert predicted == _pass_s(plan, length=4096 - 17, rows=17)


def test_a_draft_takes_its_steps_as_far_as_the_ring_does_not_hide_them() -> None:
    plan = _plan("llama-3.1-8b", "llama-3.2-1b", mode="chain")
    assert plan.placement.num_streamed == 0
    answer = Answer(1000, 400, 100, (_verified(100, 500, "draft"),))
    predicted = Expectation(plan, CARD).seconds_per_pass([answer])
    draft = plan.draft
    assert draft is not None
    step_s = draft_step_s(plan, CARD)
    assert predicted == pytest.approx(_pass_s(plan, length=1200, rows=6) + 5 * step_s)
    streamed = _plan("llama-2-13b", "llama-68m", mode="chain")
    assert Expectation(streamed, CARD).seconds_per_pass([answer]) == _pass_s(streamed, length=1200, rows=6)


@pytest.mark.parametrize(
    ("windows", "proposed", "steps"),
    [
        ({"chain 8": 100}, 500, 5),
        ({"chain 8": 50, "ngram 60": 50}, 50 * 60 + 50 * 8, 4),
        ({"chain 8": 50, "plain": 50}, 50 * 8, 4),
        ({"tree 64": 100}, 6400, 4 + 2),
        ({"tree 64": 50, "plain": 50}, 3200, (4 + 2) / 2),
        ({"tree 64": 50, "chain 8": 50}, 3600, (4 + 2) / 2 + 4),
        ({"tree 64": 100}, 3200, 4 + 1),
    ],
    ids=str,
)
def test_only_what_a_draft_proposed_took_its_steps(windows: dict[str, int], proposed: int, steps: float) -> None:
    """In chains one for each; in trees a few, and one for so many nodes; n-grams and plain passes none."""
    plan = _plan("llama-3.1-8b", "llama-3.2-1b", mode="chain")
    draft = plan.draft
    assert draft is not None
    answer = Answer(1000, 400, 100, (_verified(100, proposed, "draft"),), windows)
    predicted = Expectation(plan, CARD).seconds_per_pass([answer])
    passed_s = _pass_s(plan, length=1200, rows=1 + round(proposed / 100))
    assert predicted == pytest.approx(passed_s + steps * draft_step_s(plan, CARD))


def test_trees_of_a_fixed_depth_are_planned_as_they_are_grown() -> None:
    described = describe_model(CONFIGS / "llama-2-13b"), describe_model(CONFIGS / "llama-68m")
    for gamma, nodes in ((4, 64), (None, 64), (4, None), (4, 0)):
        request = RuntimeConfig(*described, context=2048, gamma=gamma, tree_nodes=nodes)
        predicted = forecast(plan_run(request, CARD), CARD)
        assert (predicted.tree_nodes, predicted.gamma) == (nodes or 0, gamma or 63)


def test_a_retrieval_verifier_takes_the_steps_that_it_took() -> None:
    plan = _plan("llama-2-7b-128k", "llama-68m", context=131072)
    draft = plan.draft
    assert draft is not None and plan.has_verifier
    inner = Acceptance("draft", "retrieval", 2000, 8000, 3000)
    answer = Answer(120_000, 1000, 200, (inner, _verified(200, 4800, "retrieval")))
    predicted = Expectation(plan, CARD).seconds_per_pass([answer])
    step_s = verifier_step_s(plan, CARD) + 4 * draft_step_s(plan, CARD)
    hidden_s = 4 * plan.target.kv_piece_bytes / 25e9
    assert predicted == pytest.approx(_pass_s(plan, length=120_500, rows=25) + 10 * step_s - hidden_s)
    alone = _plan("llama-2-7b-128k", "none", context=131072, mode="triforce")
    assert alone.has_verifier
    without = replace(answer, acceptance=(_verified(200, 4800, "retrieval"),))
    step_s = verifier_step_s(alone, CARD)
    expected = _pass_s(alone, length=120_500, rows=25) + 24 * step_s - hidden_s
    assert Expectation(alone, CARD).seconds_per_pass([without]) == pytest.approx(expected)


def test_a_batch_shrinks_as_its_answers_end() -> None:
    plan = _plan("llama-2-7b-128k", context=65536, batch=2)
    expected = Expectation(plan, CARD)
    short, long = Answer(60_000, 10, 9), Answer(40_000, 100, 99)
    both_s = expected.seconds_per_pass([replace(short, passes=9), replace(long, passes=9)])
    alone_s = expected.seconds_per_pass([long])
    assert both_s is not None and alone_s is not None and both_s > 2 * alone_s
    assert expected.seconds_per_pass([short, long]) == pytest.approx((9 * both_s + 90 * alone_s) / 99)
    one_token = replace(short, passes=0)
    assert expected.seconds_per_pass([one_token, long]) == alone_s
    assert expected.seconds_per_pass([one_token]) is None


def test_a_step_serves_all_answers_of_a_batch() -> None:
    """It reads the weights once and each answer's own keys and values; who took the most steps sets the time."""
    plan = _plan("llama-3.1-8b", "llama-3.2-1b", batch=3, mode="chain")
    draft = plan.draft
    assert draft is not None and draft.batch == 3
    # Bound by memory: beside the weights, 4096 tokens of every answer are read.
    more_bytes = 2 * 4096 * 2 * draft.config.kv_size * 2 * draft.config.num_layers
    one_s, three_s = draft_step_s(plan.of_batch(1), CARD), draft_step_s(plan, CARD)
    assert three_s - one_s == pytest.approx(more_bytes / CARD.attained_hbm)
    answers = [Answer(1000, 400, 100, (_verified(100, proposed, "draft"),)) for proposed in (300, 500, 400)]
    predicted = Expectation(plan, CARD).seconds_per_pass(answers)
    assert predicted == pytest.approx(_pass_s(plan, length=1200, rows=5) + 5 * three_s)


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


def test_the_measured_link_takes_the_place_of_the_profiles(tmp_path: Path) -> None:
    plan, answer = _plan("llama-2-13b"), Answer(1000, 400, 399)
    slow = Expectation(plan, replace(CARD, link_gbps=12.5)).seconds_per_pass([answer])
    assert slow == pytest.approx(2 * _pass_s(plan, length=1200, rows=1))
    assert Expectation(plan, None).seconds_per_pass([answer]) is None
    target, links = write_checkpoint(tmp_path / "target"), {}
    for resident_layers in (1, "auto"):
        with load(target, draft="none", profile="rtx4090", resident_layers=resident_layers) as runtime:
            machine, peak = runtime.parts.expected.machine, runtime.parts.target.link_peak_gbps
            assert machine is not None
            links[resident_layers] = machine.link_gbps, peak
    assert links[1][0] == links[1][1] != CARD.link_gbps
    assert links["auto"] == (CARD.link_gbps, None)


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


def test_figures_that_were_asked_for_must_be_complete(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target")
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


def test_the_answers_of_a_batch_share_a_prediction(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target")
    with load(target, draft="none", profile="rtx4090", max_batch=2) as runtime:
        results = runtime.generate_batch([PROMPT, "the link"], max_new_tokens=4, ignore_eos=True)
    first, second = (result.stats.predicted_s_per_pass for result in results)
    assert first is not None and first == second > 0


def test_rounds_that_were_not_played_yet() -> None:
    """A draft step for every proposal of a chain, a few and one for every so many nodes of a tree, none for n-grams."""
    plan = _plan("llama-2-7b", "llama-68m", context=2048)
    expectation, draft = Expectation(plan, CARD), plan.draft
    assert draft is not None

    def foreseen(family: str, size: int, sequences: int = 1) -> float:
        return expectation.seconds_of_step(Choice(family, size), sequences, 1000)

    step_s = draft_step_s(plan, CARD)
    assert foreseen("plain", 0) == pytest.approx(_pass_s(plan, length=1000, rows=1))
    assert foreseen("ngram", 16) == foreseen("unigram", 16) == pytest.approx(_pass_s(plan, length=1000, rows=17))
    assert foreseen("chain", 16) - foreseen("ngram", 16) == pytest.approx(16 * step_s)
    trees = [foreseen("tree", size) - foreseen("ngram", size) for size in (32, 64)]
    assert trees[1] - trees[0] == pytest.approx(step_s) and trees[0] > 2 * step_s
    assert foreseen("chain", 16, 4) > foreseen("chain", 16)
    verifier = _plan("llama-2-7b-128k", "llama-68m", context=32768, mode="triforce", kv="host")
    steps = [Expectation(verifier, CARD).seconds_of_step(Choice("chain", size), 1, 30000) for size in (8, 16, 32)]
    assert steps[2] - steps[1] == pytest.approx(2 * (steps[1] - steps[0]))
    assert steps[1] - steps[0] > verifier_step_s(verifier, CARD)
