"""`verify`: an exact runtime passes, and every way of being inexact that we could think of is called a defect."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
from offload_runtime.cli.reports import read_prompts, report_tables, verdict_line
from offload_runtime.config import RuntimeConfig
from offload_runtime.core import Batch
from offload_runtime.engine import Runtime
from offload_runtime.errors import ContextLengthError, OptionError
from offload_runtime.params import SamplingParams
from offload_runtime.verify import Fit, VerificationPlan, VerificationReport, verify
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
# One prompt, one way of sampling, all drafters.
SMALL_PLAN = replace(RUN_PLAN, settings={"top-p": PLAN.settings["top-p"]})


@pytest.fixture(scope="module")
def runtime(target: Path, draft: Path) -> Iterator[Runtime]:
    with load(target, draft=draft, resident_layers=2, max_batch=2) as loaded:
        yield loaded


def misread(runtime: Runtime, patch: pytest.MonkeyPatch) -> None:
    """The last token of every longer window is read as another one; plain decoding has no such windows."""
    runner = runtime.engine.target.runner
    honest = runner.forward

    def read_others(batch: Batch, *args: Any, **options: Any) -> Batch:
        for slot, tree in batch.trees.items():
            if len(tree) >= 3:
                batch.trees = {**batch.trees, slot: replace(tree, tokens=(*tree.tokens[:-1], 7))}
        return honest(batch, *args, **options)

    patch.setattr(runner, "forward", read_others)


@pytest.fixture(scope="module")
def small_report(runtime: Runtime) -> VerificationReport:
    return verify(runtime, SMALL_PLAN)


def test_a_small_plan_is_exact(small_report: VerificationReport) -> None:
    assert small_report.verdict == "exact", small_report
    assert {run.drafter for run in small_report.runs} >= {"ngram", "draft", "script", "as loaded"}
    assert any(run.passes < 9 for run in small_report.runs if run.drafter == "script"), "no window was accepted"
    assert small_report.fits and all(fit.freedom and fit.draws >= RUN_PLAN.seeds for fit in small_report.fits)


def test_plans_that_prove_nothing_are_refused(runtime: Runtime) -> None:
    with pytest.raises(OptionError, match=r"tokens must be at least 8.* not 4"):
        replace(PLAN, tokens=4)
    with pytest.raises(OptionError, match=r"seeds must be at least 32.* not 9"):
        replace(PLAN, seeds=9)
    with pytest.raises(ContextLengthError, match=r"'long' of \d+ tokens and 16 new ones exceed.*512.*--context"):
        verify(runtime, replace(PLAN, prompts={"long": "word " * 400}))


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


class Misreading(Runtime):
    """One that is loaded with a defect."""

    @classmethod
    def from_config(cls, config: RuntimeConfig, **hooks: Any) -> Runtime:
        runtime = super().from_config(config, **hooks)
        misread(runtime, pytest.MonkeyPatch())
        return runtime


@pytest.mark.slow
def test_the_command_ends_with_1_for_a_defect(target: Path) -> None:
    result = run(target, "--json", program=app_of(SimpleNamespace(Runtime=Misreading)))
    assert result.exit_code == 1, result.output
    record = json.loads(result.stdout)
    assert record["verdict"] == "defect"
    verdicts = [run["finding"]["verdict"] for run in record["identity"] if run["drafter"] == "script"]
    assert "defect" in verdicts


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
