"""`verify`: an exact runtime passes, and every way of being inexact that we could think of is called a defect."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from offload_runtime import sampling
from offload_runtime.cli import app
from offload_runtime.cli.verify import read_prompts, verdict_line
from offload_runtime.config import GenerationParams, SamplingParams
from offload_runtime.engine import Runtime
from offload_runtime.engine import steps as engine_steps
from offload_runtime.errors import ContextLengthError, OptionError
from offload_runtime.speculation import Proposal
from offload_runtime.speculation import accepted_path as honest_path
from offload_runtime.speculation import step as rounds
from offload_runtime.verify.equality import ScriptedProposer, transcribe
from offload_runtime.verify.report import VerificationPlan, VerificationReport, verify
from tests.helpers.engine import PROMPT, load, one_thread, raising  # noqa: F401

T1 = SamplingParams(temperature=1.0)
PLAN = VerificationPlan(
    prompts={"words": PROMPT, "letters": "a, b, c, d, a, b, c, d, a, b"},
    settings={"greedy": SamplingParams(), "top-p": SamplingParams(temperature=1.0, top_p=0.9), "T 1": T1},
    tokens=16,
    seeds=96,
)
# For what only the tests of fit can see, and for what the runs show at once.
FIT_PLAN = replace(PLAN, tokens=8)
RUN_PLAN = replace(PLAN, prompts={"words": PROMPT}, tokens=10, seeds=32)


@pytest.fixture(scope="module")
def runtime(target: Path, draft: Path) -> Iterator[Runtime]:
    with load(target, draft=draft, resident_layers=2) as loaded:
        yield loaded


def accept_one_too_many(proposal: Proposal, samples: Sequence[int]) -> list[int]:
    path = honest_path(proposal, samples)
    last = path[-1] if path else -1
    return [*path, *[node for node, parent in enumerate(proposal.parents) if parent == last][:1]]


def with_temperature_of(factor: float) -> Callable[..., torch.Tensor]:
    """A sampler whose temperature is wrong by a factor, the same for draft, target and everybody else."""
    honest = sampling.noise_ops.gumbel_argmax

    def biased(logits: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        wrong = keys.clone()
        wrong[:, 0] = (keys[:, 0].view(torch.float32) / factor).view(torch.int32)
        return honest(logits, positions, slots, wrong)

    return biased


def with_noise_at(moved: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A sampler for rounds that takes its noise from other positions."""

    def shifted(logits: torch.Tensor, how: Any, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return sampling.sample(logits, how, moved(positions), slots)

    return shifted


def bad_answers(report: VerificationReport) -> list[str]:
    return [fit.name for fit in report.bad_fits if "answer" in fit.name]


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, int, int]]:
    """Progress that `exact_report` made."""
    return []


@pytest.fixture(scope="module")
def exact_report(runtime: Runtime, steps: list[tuple[str, int, int]]) -> VerificationReport:
    return verify(runtime, PLAN, on_progress=lambda *step: steps.append(step))


def test_an_exact_runtime_is_exact(exact_report: VerificationReport, steps: list[tuple[str, int, int]]) -> None:
    report = exact_report
    assert report.verdict == "exact", report
    assert not report.bitwise
    # Two prompts, three settings, three proposers, and what the runtime does by itself.
    assert len(report.runs) == 24
    assert {run.proposer for run in report.runs} == {"ngram", "draft", "script", "as loaded"}
    assert len({run.gamma for run in report.runs} - {None}) == 5 and len({run.seed for run in report.runs}) == 6
    assert all(run.tokens == 16 and run.finding.foreign_tokens == 0 for run in report.runs)
    scripted = [run.passes for run in report.runs if run.proposer == "script" and run.gamma != 1]
    assert max(scripted) < 15  # windows were accepted, so there was something to get wrong
    for run in report.runs:
        assert (run.gamma is None) == (run.proposer == "as loaded")
        trees = run.gamma is not None and run.proposer != "ngram"
        assert run.tree_nodes == (min(3 * (run.gamma or 0), 63) if trees else None)
    assert len(report.fits) == 2 * 2 + 1 + 6 + 1
    assert all(fit.freedom and fit.draws >= PLAN.seeds for fit in report.fits)
    for stage, all_steps in (("identity", 30), ("sampling", 100)):
        assert [step for step in steps if step[0] == stage] == [(stage, n + 1, all_steps) for n in range(all_steps)]


def test_accepting_one_too_many_is_a_defect_for_both_proofs(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "accepted_path", accept_one_too_many)
    report = verify(runtime, replace(PLAN, tokens=10))
    assert report.verdict == "defect"
    assert len(report.bad_runs) > 6
    for run in report.bad_runs:
        found = run.finding
        assert found.first_difference is not None and found.mismatch is not None
        assert found.mismatch.moved > found.mismatch.rounding  # logits of another context, however close the scores
    # The first token comes from the prompt and the next one from the pass's first row.
    assert set(bad_answers(report)) >= {"token 3 of an answer", "answers together"}
    assert not {"token 1 of an answer", "token 2 of an answer"} & set(bad_answers(report))
    assert not [fit for fit in report.bad_fits if "answer" not in fit.name]


def test_saying_the_proposals_is_a_defect_for_both_proofs(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def speak_the_draft(
        target: Any, slots: Any, proposer: Any, requests: Sequence[Any], **options: Any
    ) -> list[rounds.StepResult]:
        done = honest(target, slots, proposer, requests, **options)
        if len(requests) == 1 and done[0].num_proposed and done[0].num_accepted == 0:
            return [replace(done[0], tokens=[done[0].proposal.tokens[0]])]
        return done

    honest = rounds.run_step
    monkeypatch.setattr(engine_steps, "run_step", speak_the_draft)
    report = verify(runtime, replace(PLAN, tokens=10))
    # The logits are those of the right context, only the token is not theirs.
    assert all(run.finding.foreign_tokens for run in report.bad_runs) and len(report.bad_runs) > 4
    assert "answers together" in bad_answers(report)


@pytest.mark.parametrize("moved", [lambda p: p - p[0], lambda p: p + torch.arange(len(p)), lambda p: p + 1])
def test_noise_of_other_positions_is_a_defect(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, moved: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Keyed by the step, by twice the row, or by the next position: in the last, plain decoding is just as wrong."""
    monkeypatch.setattr(rounds, "sample", with_noise_at(moved))
    report = verify(runtime, RUN_PLAN)
    assert report.verdict == "defect"
    assert {run.setting for run in report.bad_runs} == {"top-p", "T 1"}  # greedy decoding has no noise
    assert all(run.finding.foreign_tokens for run in report.bad_runs)


def test_noise_of_other_positions_in_trees_is_a_defect(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Siblings with noise of their own: whoever proposes chains does not notice."""
    monkeypatch.setattr(rounds, "sample", with_noise_at(lambda p: p[0] + torch.arange(len(p), dtype=p.dtype)))
    report = verify(runtime, RUN_PLAN)
    assert {run.proposer for run in report.bad_runs} - {"as loaded"} == {"draft", "script"}
    assert "greedy" not in {run.setting for run in report.bad_runs}


@pytest.mark.parametrize("repeated", ["position", "seed"])
def test_noise_that_repeats_fails_the_fit_alone(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, repeated: str
) -> None:
    def poor(logits: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        if repeated == "position":
            return honest(logits, positions * 0, slots, keys)
        return honest(logits, positions, slots, keys * torch.tensor([1, 0, 0, 1], dtype=torch.int32))

    honest = sampling.noise_ops.gumbel_argmax
    monkeypatch.setattr(sampling.noise_ops, "gumbel_argmax", poor)
    report = verify(runtime, replace(FIT_PLAN, seeds=32))
    assert report.bad_runs == [] and len([fit for fit in report.bad_fits if "answer" not in fit.name]) == 5


def test_a_biased_temperature_fails_the_fit_alone(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling.noise_ops, "gumbel_argmax", with_temperature_of(1.2))
    report = verify(runtime, FIT_PLAN)
    assert report.verdict == "defect"
    assert report.bad_runs == []  # every run is wrong in the same way
    assert "rows of logits together" in [fit.name for fit in report.bad_fits]


def test_a_filter_that_does_nothing_is_impossible(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "filter_logits", lambda logits, params: logits)
    report = verify(runtime, FIT_PLAN)
    impossible = [fit for fit in report.bad_fits if fit.impossible]
    assert {fit.name for fit in impossible} == {"words, top-p", "letters, top-p", "rows of logits together"}
    assert all(fit.p_value == 0 for fit in impossible)


def test_a_cache_with_the_keys_of_another_token_is_a_defect(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of every longer window is read as another one; plain decoding has no such windows."""
    honest = rounds.Window

    def other_token(tokens: tuple[int, ...], parents: tuple[int, ...] | None = None) -> Any:
        return honest(tokens if len(tokens) < 3 else (*tokens[:-1], 7), parents)

    monkeypatch.setattr(rounds, "Window", other_token)
    report = verify(runtime, RUN_PLAN)
    assert report.verdict == "defect" and report.bad_runs


def test_a_transcript_has_the_logits_of_each_token(runtime: Runtime) -> None:
    prompt = runtime.encode(PROMPT)
    params = GenerationParams(20, ignore_eos=True)
    plain = transcribe(runtime, prompt, params)
    assert plain.rows.shape == (20, runtime.config.vocab_size) and plain.passes == 19
    script = ScriptedProposer([*prompt, *plain.tokens], runtime.config.vocab_size, accuracy=0.9, seed=1)
    said = transcribe(runtime, prompt, replace(params, gamma=9), script)
    assert said.tokens == plain.tokens == runtime.generate(PROMPT, max_new_tokens=20, ignore_eos=True).tokens
    assert said.passes < 19
    torch.testing.assert_close(said.rows, plain.rows, rtol=1e-4, atol=1e-4)
    answers = [plain.tokens[:6], [3, 1, 4, 1, 5, 9]]
    first, other = runtime.logits(prompt, answers)
    torch.testing.assert_close(first, plain.rows[:6], rtol=1e-4, atol=1e-4)
    expected = transcribe(runtime, [*prompt, 3, 1, 4], GenerationParams(1)).rows[0]
    torch.testing.assert_close(other[3], expected, rtol=1e-4, atol=1e-4)


def test_the_runtime_is_itself_again_afterwards(
    runtime: Runtime, exact_report: VerificationReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = runtime.parts
    failing = raising(KeyboardInterrupt(), after=2, then=parts.target.runner.verify)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(parts.target.runner, "verify", failing)
        verify(runtime, PLAN)
    assert runtime.parts is parts
    # A draft's trees follow what it has learnt, so that another time their passes are others.
    again = verify(runtime, replace(PLAN, seeds=32))
    assert [replace(run, passes=0) for run in again.runs] == [replace(run, passes=0) for run in exact_report.runs]


def test_plans_that_prove_nothing_are_refused(runtime: Runtime) -> None:
    with pytest.raises(OptionError, match=r"tokens must be at least 8.* not 4"):
        replace(PLAN, tokens=4)
    with pytest.raises(OptionError, match=r"seeds must be at least 32.* not 9"):
        replace(PLAN, seeds=9)
    with pytest.raises(ContextLengthError, match=r"'long' of \d+ tokens and 16 new ones exceed.*512.*--context"):
        verify(runtime, replace(PLAN, prompts={"long": "word " * 400}))


def test_quick_is_a_part_of_the_whole() -> None:
    whole = VerificationPlan.built_in(quick=False, tokens=64, seeds=None, extra={"line 1": "mine"})
    quick = VerificationPlan.built_in(quick=True, tokens=64, seeds=50)
    assert (len(whole.prompts), len(whole.settings), whole.seeds) == (9, 5, 256) and whole.prompts["line 1"] == "mine"
    assert (len(quick.prompts), len(quick.settings), quick.seeds) == (3, 3, 50)
    assert quick.prompts.items() < whole.prompts.items() and quick.settings.items() < whole.settings.items()
    assert any(setting.greedy for setting in quick.settings.values())


def run(target: Path, *arguments: str) -> Result:
    options = ["--target", str(target), "--device", "cpu", "--quick", "--tokens", "8", "--seeds", "64"]
    return CliRunner().invoke(app, ["verify", *options, *arguments], env={"COLUMNS": "120"})


def test_the_command_says_exact(target: Path, draft: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("the lazy dog\n\nthe pass\n", encoding="utf-8")
    result = run(target, "--draft", str(draft), "--json", "--prompts", str(tmp_path / "prompts"))
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert (record["verdict"], record["device"], record["dtype"], record["quick"]) == ("exact", "cpu", "float32", True)
    assert record["draft"] == str(draft) and not record["bitwise_compared"]
    assert (record["tokens"], record["seeds"], record["device_name"]) == (8, 64, None)
    assert record["versions"]["torch"] == torch.__version__ and "layers resident" in record["placement"]
    assert {run["prompt"] for run in record["identity"]} == {"prose", "code", "repetition", "line 1", "line 3"}
    assert len(record["identity"]) == 5 * 3 * 4 and record["identity"][0]["finding"]["verdict"] == "identical"
    assert min(fit["p_value"] for fit in record["fit"]) > record["fit_level"] == 1e-4 / len(record["fit"])


@pytest.mark.parametrize("proof", ["identity", "fit"])
def test_the_command_ends_with_1_for_a_defect(target: Path, monkeypatch: pytest.MonkeyPatch, proof: str) -> None:
    if proof == "identity":
        monkeypatch.setattr(rounds, "accepted_path", accept_one_too_many)
    else:
        monkeypatch.setattr(sampling.noise_ops, "gumbel_argmax", with_temperature_of(1.4))
    result = run(target, "--json") if proof == "identity" else run(target)
    assert result.exit_code == 1, result.output
    if proof == "identity":
        record = json.loads(result.stdout)
        assert record["verdict"] == "defect"
        verdicts = [run["finding"]["verdict"] for run in record["identity"] if run["proposer"] == "script"]
        assert "defect" in verdicts
    else:
        assert result.stdout.splitlines()[-1].startswith("defect: 0 of 27 speculative generations differ")
        assert "identical" in result.stdout and "defect" in result.stdout.splitlines()[-3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--draft", "none"], "nothing to verify"),
        (["--prompts", "{tmp}/absent"], "No such file"),
        (["--prompts", "{tmp}/blank"], "has no prompts"),
        (["--prompts", "{tmp}/latin1"], "not UTF-8"),
        (["--context", "64"], "exceed the context of 64 tokens"),
        (["--tokens", "7"], "7"),
        (["--seeds", "31"], "31"),
    ],
)
def test_user_errors_end_with_2(target: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "blank").write_text("\n  \n")
    (tmp_path / "latin1").write_bytes(b"caf\xe9\n")
    result = run(target, *(argument.format(tmp=tmp_path) for argument in arguments))
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert words in result.stderr and "Traceback" not in result.stderr


def test_prompts_are_named_by_their_lines(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_bytes("\ufeffun café\r\n\r\n  two\n".encode())
    assert read_prompts(str(tmp_path / "prompts")) == {"line 1": "un café", "line 3": "  two"}


@pytest.mark.gpu
def test_bitwise_on_a_gpu(target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(PLAN, tokens=32, seeds=32)
    with Runtime.load(target, draft=draft, device="cuda", dtype="bf16", resident_layers=2) as runtime:
        report = verify(runtime, plan)
        assert report.bitwise and report.verdict == "exact", verdict_line(report)
        monkeypatch.setattr(rounds, "accepted_path", accept_one_too_many)
        assert all(run.finding.differing_logit_rows for run in verify(runtime, plan).bad_runs)
