"""`verify`: an exact runtime passes, and every way of being inexact that we could think of is called a defect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import Result
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from offload_runtime.cli.app import app
from offload_runtime.cli.verify import describe_machine, one_card_config, read_prompts, report_tables, verdict_line
from offload_runtime.config import RuntimeConfig
from offload_runtime.engine import Runtime
from offload_runtime.errors import ContextLengthError, OptionError
from offload_runtime.hardware import MachineProfile
from offload_runtime.model import Window
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.verify import Fit, compare_one_card, decode_plainly
from offload_runtime.verify.distribution import GENERATION_TOKENS, fit_generations, fit_rows, total
from offload_runtime.verify.equality import ScriptedProposer, loaded_proposers, transcribe, verify_identity
from offload_runtime.verify.report import VerificationPlan, VerificationReport, verify
from tests.helpers.engine import PROMPT, load, one_thread, raising  # noqa: F401
from tests.test_cli_fakes import app_of

pytestmark = pytest.mark.early  # `exact_report` takes ten seconds
T1 = SamplingParams(temperature=1.0)
PLAN = VerificationPlan(
    prompts={"words": PROMPT, "letters": "a, b, c, d, a, b, c, d, a, b"},
    settings={"greedy": SamplingParams(), "top-p": SamplingParams(temperature=1.0, top_p=0.9), "T 1": T1},
    tokens=16,
    seeds=96,
)
# For what the runs show at once.
RUN_PLAN = replace(PLAN, prompts={"words": PROMPT}, tokens=10, seeds=32)
# One prompt, one way of sampling, all proposers.
SMALL_PLAN = replace(RUN_PLAN, settings={"top-p": PLAN.settings["top-p"]})


@pytest.fixture(scope="module")
def runtime(target: Path, draft: Path) -> Iterator[Runtime]:
    with load(target, draft=draft, resident_layers=2, max_batch=2) as loaded:
        yield loaded


def misread(runtime: Runtime, patch: pytest.MonkeyPatch) -> None:
    """The last token of every longer window is read as another one; plain decoding has no such windows."""
    runner = runtime.parts.target.runner
    honest = runner.verify

    def verify_others(windows: Sequence[Window], slots: Sequence[int]) -> torch.Tensor:
        others = [
            window if len(window.tokens) < 3 else replace(window, tokens=(*window.tokens[:-1], 7)) for window in windows
        ]
        return honest(others, slots)

    patch.setattr(runner, "verify", verify_others)


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, int, int]]:
    """Progress that `exact_report` made."""
    return []


@pytest.fixture(scope="module")
def exact_report(runtime: Runtime, steps: list[tuple[str, int, int]]) -> VerificationReport:
    return verify(runtime, PLAN, on_progress=lambda *step: steps.append(step))


@pytest.fixture(scope="module")
def small_report(runtime: Runtime) -> VerificationReport:
    return verify(runtime, SMALL_PLAN)


def test_a_small_plan_is_exact(small_report: VerificationReport) -> None:
    assert small_report.verdict == "exact", small_report
    assert {run.proposer for run in small_report.runs} >= {"ngram", "draft", "script", "as loaded"}
    assert any(run.passes < 9 for run in small_report.runs if run.proposer == "script"), "no window was accepted"
    assert small_report.fits and all(fit.freedom and fit.draws >= RUN_PLAN.seeds for fit in small_report.fits)


@pytest.mark.slow
def test_an_exact_runtime_is_exact(exact_report: VerificationReport, steps: list[tuple[str, int, int]]) -> None:
    report = exact_report
    assert report.verdict == "exact", report
    assert not report.bitwise
    # Two prompts, three settings, three proposers, and what the runtime does by itself.
    assert len(report.runs) == 30
    proposed = {"ngram", "draft", "script"}
    by_itself = {"as loaded", "next turn", "same turn again", "in a batch"}
    assert {run.proposer for run in report.runs} == proposed | by_itself
    assert len({run.gamma for run in report.runs} - {None}) == 5 and len({run.seed for run in report.runs}) == 6
    assert all(run.tokens == (8 if run.proposer == "next turn" else 16) for run in report.runs)
    assert not any(run.finding.foreign_tokens for run in report.runs)
    scripted = [run.passes for run in report.runs if run.proposer == "script" and run.gamma != 1]
    assert max(scripted) < 15  # windows were accepted, so there was something to get wrong
    for run in report.runs:
        assert (run.gamma is None) == (run.proposer in by_itself)
        trees = run.gamma is not None and run.proposer != "ngram"
        assert run.tree_nodes == (min(3 * (run.gamma or 0), 63) if trees else None)
    assert len(report.fits) == 2 * 2 + 1 + 6 + 1
    assert all(fit.freedom and fit.draws >= PLAN.seeds for fit in report.fits)
    for stage, all_steps in (("identity", 36), ("sampling", 100)):
        assert [step for step in steps if step[0] == stage] == [(stage, n + 1, all_steps) for n in range(all_steps)]


# What follows is what defects of all kinds are held against in `tests/mutations.py`, where each needs a part of the
# report only. Of a runtime without a defect the whole report has said it all.


@pytest.fixture(scope="module")
def runs(runtime: Runtime) -> VerificationReport:
    """Generations beside plain decoding."""
    prompts = {"words": runtime.encode(PROMPT)}
    return VerificationReport(False, verify_identity(runtime, prompts, PLAN.settings, count=12, on_step=ignore), [])


@pytest.fixture(scope="module")
def row_fits(runtime: Runtime) -> VerificationReport:
    """Samples of single rows of logits."""
    contexts = {name: runtime.encode(text) for name, text in PLAN.prompts.items()}
    settings = {name: sampling for name, sampling in PLAN.settings.items() if not sampling.greedy}
    fits = fit_rows(runtime, contexts, settings, seeds=PLAN.seeds, on_step=ignore)
    return VerificationReport(False, [], [*fits, total("together", fits)])


@pytest.fixture(scope="module")
def answer_fits(runtime: Runtime) -> VerificationReport:
    """Whole answers, a script's and the loaded proposers'."""
    prompt = runtime.encode(PROMPT)
    likeliest = transcribe(runtime, prompt, GenerationParams(GENERATION_TOKENS, ignore_eos=True)).tokens
    script = ScriptedProposer([*prompt, *likeliest], runtime.config.vocab_size, accuracy=1.0, seed=0)
    proposers = [script, *loaded_proposers(runtime).values()]
    fits = fit_generations(runtime, prompt, T1, proposers, seeds=PLAN.seeds, on_step=ignore)
    return VerificationReport(False, [], [*fits, total("together", fits)])


def ignore() -> None:
    """Nobody watches the progress."""


@pytest.mark.slow
@pytest.mark.parametrize("setting", list(PLAN.settings))
def test_generations_are_those_of_plain_decoding(runs: VerificationReport, setting: str) -> None:
    assert not [run for run in runs.bad_runs if run.setting == setting]


@pytest.mark.slow
def test_tokens_follow_from_their_logits(runs: VerificationReport) -> None:
    assert not [run for run in runs.runs if run.finding.foreign_tokens]


@pytest.mark.slow
def test_answers_follow_the_targets_probabilities(answer_fits: VerificationReport) -> None:
    assert not [fit.name for fit in answer_fits.bad_fits]


@pytest.mark.slow
def test_samples_follow_the_targets_probabilities(row_fits: VerificationReport) -> None:
    assert not [fit.name for fit in row_fits.bad_fits]


@pytest.mark.slow
def test_no_sample_is_impossible(row_fits: VerificationReport) -> None:
    assert not [fit.name for fit in row_fits.fits if fit.impossible]


@pytest.mark.slow
def test_a_window_with_another_token_is_a_defect(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    misread(runtime, monkeypatch)
    report = verify(runtime, RUN_PLAN)
    assert report.verdict == "defect" and report.bad_runs
    for run in report.bad_runs:
        found = run.finding
        assert found.first_difference is not None and found.mismatch is not None
        assert found.mismatch.moved > found.mismatch.rounding  # logits of another context, however close the scores


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_runtime_is_itself_again_afterwards(
    runtime: Runtime, small_report: VerificationReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = runtime.parts
    failing = raising(KeyboardInterrupt(), after=2, then=parts.target.runner.verify)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(parts.target.runner, "verify", failing)
        verify(runtime, PLAN)
    assert runtime.parts is parts
    # A draft's trees follow what it has learnt, so that another time their passes are others.
    again = verify(runtime, SMALL_PLAN)
    assert [replace(run, passes=0) for run in again.runs] == [replace(run, passes=0) for run in small_report.runs]


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


def run(target: Path, *arguments: str, program: Typer = app) -> Result:
    options = ["--target", str(target), "--device", "cpu", "--quick", "--tokens", "8", "--seeds", "32"]
    options += ["--context", "256"]
    return CliRunner().invoke(program, ["verify", *options, *arguments], env={"COLUMNS": "120"})


@pytest.mark.slow
def test_the_command_says_exact(target: Path, draft: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("the lazy dog\n\nthe pass\n", encoding="utf-8")
    result = run(target, "--draft", str(draft), "--json", "--prompts", str(tmp_path / "prompts"))
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert (record["verdict"], record["device"], record["dtype"], record["quick"]) == ("exact", "cpu", "float32", True)
    assert record["draft"] == str(draft) and not record["bitwise_compared"]
    assert (record["tokens"], record["seeds"], record["device_name"]) == (8, 32, None)
    assert record["versions"]["torch"] == torch.__version__ and "layers resident" in record["placement"]
    assert {run["prompt"] for run in record["identity"]} == {"prose", "code", "repetition", "line 1", "line 3", "long"}
    assert len(record["identity"]) == (5 * 3 + 1) * 5 and record["identity"][0]["finding"]["verdict"] == "identical"
    assert min(fit["p_value"] for fit in record["fit"]) > record["fit_level"] == 1e-4 / len(record["fit"])


def test_a_report_names_every_card() -> None:
    cards = [{"device": f"cuda:{number}", "device_name": "NVIDIA H200"} for number in (0, 2)]
    record = {"cards": cards, "driver": "580.1", "emulated": None, "dtype": "bfloat16"}
    assert describe_machine(record) == "on cuda:0 (NVIDIA H200) and cuda:2 (NVIDIA H200), driver 580.1, in bfloat16"


class Misreading(Runtime):
    """One that is loaded with a defect."""

    @classmethod
    def from_config(cls, config: RuntimeConfig, **hooks: Any) -> Runtime:
        runtime = super().from_config(config, **hooks)
        misread(runtime, pytest.MonkeyPatch())
        return runtime


@pytest.mark.slow
def test_the_command_ends_with_1_for_a_defect(target: Path) -> None:
    result = run(target, "--json", program=app_of(engine=SimpleNamespace(Runtime=Misreading)))
    assert result.exit_code == 1, result.output
    record = json.loads(result.stdout)
    assert record["verdict"] == "defect"
    verdicts = [run["finding"]["verdict"] for run in record["identity"] if run["proposer"] == "script"]
    assert "defect" in verdicts


@pytest.mark.slow
def test_several_cards_are_compared_with_the_first_alone(target: Path) -> None:
    result = run(target, "--json", "--devices", "cpu,cpu", "--vram", "400MB,300MB")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["verdict"] == "exact" and "dealt out to 2 cards" in record["placement"]
    assert record["cards"] == [{"device": "cpu", "device_name": None}] * 2
    runs = [run for run in record["identity"] if run["proposer"] == "on one card"]
    assert {run["prompt"] for run in runs} == {"prose", "code", "repetition"} and len(runs) == 3 * 2
    assert {run["finding"]["verdict"] for run in runs} == {"identical"}


def test_cards_that_say_something_else_are_a_defect(runtime: Runtime) -> None:
    plan = VerificationPlan({"words": PROMPT}, {"greedy": SamplingParams()}, tokens=8)
    several = decode_plainly(runtime, plan, lambda *_: None, stage="several cards")
    ((key, said),) = several.items()
    assert key == ("words", "greedy") and len(said.tokens) == 8
    other = replace(said, tokens=[*said.tokens[:5], said.tokens[5] ^ 1, *said.tokens[6:]])
    for one, bitwise, verdict in ((said, True, "identical"), (other, False, "defect"), (other, True, "defect")):
        (found,) = compare_one_card({key: one}, several, bitwise=bitwise)
        assert (found.proposer, found.finding.verdict) == ("on one card", verdict)
    moved = replace(said, rows=said.rows.clone())
    moved.rows[3, 7] += 1e-6
    assert compare_one_card({key: moved}, several, bitwise=True)[0].finding.verdict == "defect"


def test_one_card_of_several_is_asked_for_alone(runtime: Runtime) -> None:
    config = replace(
        runtime.plan.request, device="cpu,cpu", vram_bytes=(7, 9), gamma=3, resident_layers=2, emulate="rtx4090-x2"
    )
    alone = one_card_config(config, runtime)
    assert (alone.device, alone.vram_bytes, alone.draft, alone.gamma) == ("cpu", 7, "none", None)
    assert alone.resident_layers is None and alone.context == runtime.context_tokens
    assert isinstance(alone.emulate, MachineProfile) and alone.emulate.gpus == 1


def test_samples_that_do_not_fit_are_told(small_report: VerificationReport) -> None:
    console = Console(width=120, file=StringIO())
    report = replace(small_report, fits=[Fit("too many", 96, 500.0, 10, 0), Fit("filtered", 96, 1.0, 10, 3)])
    for part in report_tables(report):
        console.print(part)
    *_, many, filtered, _, last = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert many.split()[-2] == "defect" and "defect: 3 impossible" in filtered
    assert last.startswith(f"defect: 0 of {len(report.runs)} generations differ")


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
        misread(runtime, monkeypatch)
        assert all(run.finding.differing_logit_rows for run in verify(runtime, plan).bad_runs)
