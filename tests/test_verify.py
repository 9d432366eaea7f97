"""`verify`: an exact runtime passes, every way of being inexact that we could think of is called a defect, and what it
judges by: near-ties and the chi-square test, on logits made by hand."""

import json
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from rich.console import Console

from offload_runtime import verify as verifying
from offload_runtime.cli.reports import read_prompts, report_tables, verdict_line
from offload_runtime.config import RuntimeConfig
from offload_runtime.core import Batch
from offload_runtime.engine import Runtime
from offload_runtime.errors import ContextLengthError, OptionError
from offload_runtime.params import GenerationParams, SamplingParams
from offload_runtime.verify import Fit, fit, fit_row
from offload_runtime.verify.equality import Finding, Transcript, compare, resample
from tests.helpers.engine import PROMPT, load
from tests.test_cli_fakes import invoke

pytestmark = pytest.mark.early  # `exact_report` takes ten seconds
T1 = SamplingParams(temperature=1.0)
PLAN = verifying.VerificationPlan(
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
def small_report(runtime: Runtime) -> verifying.VerificationReport:
    return verifying.verify(runtime, SMALL_PLAN)


def test_a_small_plan_is_exact(small_report: verifying.VerificationReport) -> None:
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
        verifying.verify(runtime, replace(PLAN, prompts={"long": "word " * 400}))


def run(target: Path, *arguments: str, **stand_ins: Any) -> Result:
    options = ["--target", str(target), "--device", "cpu", "--quick", "--tokens", "8", "--seeds", "32"]
    options += ["--context", "256"]
    return invoke(["verify", *options, *arguments], stand_ins, env={"COLUMNS": "120"})


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
    result = run(target, "--json", Runtime=Misreading)
    assert result.exit_code == 1, result.output
    record = json.loads(result.stdout)
    assert record["verdict"] == "defect"
    verdicts = [run["finding"]["verdict"] for run in record["identity"] if run["drafter"] == "script"]
    assert "defect" in verdicts


def test_samples_that_do_not_fit_are_told(small_report: verifying.VerificationReport) -> None:
    console = Console(width=120, file=StringIO())
    report = replace(small_report, fits=[Fit("too many", 96, 500.0, 10, 0), Fit("filtered", 96, 1.0, 10, 3)])
    for part in report_tables(report):
        console.print(part)
    *_, many, filtered, _, last = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert many.split()[-2] == "defect" and "defect: 3 impossible" in filtered
    assert last.startswith(f"defect: 0 of {len(report.runs)} generations differ")


@pytest.mark.parametrize(("arguments", "words"), [
    (["--draft", "none"], "nothing to verify"), (["--prompts", "{tmp}/absent"], "No such file"),
    (["--prompts", "{tmp}/blank"], "has no prompts"), (["--prompts", "{tmp}/latin1"], "not UTF-8"),
    (["--context", "64"], "exceed the context of 64 tokens"), (["--tokens", "7"], "7"), (["--seeds", "31"], "31"),
])  # fmt: skip
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
        report = verifying.verify(runtime, plan)
        assert report.bitwise and report.verdict == "exact", verdict_line(report)
        misread(runtime, monkeypatch)
        assert all(run.finding.differing_logit_rows for run in verifying.verify(runtime, plan).bad_runs)


def transcript(rows: torch.Tensor, params: SamplingParams, position: int = 10) -> Transcript:
    """What an honest runtime would say from these rows of logits [N, V]."""
    return Transcript(resample(rows, params, position), rows, GenerationParams(sampling=params), position, passes=1)


def judge(plain: torch.Tensor, other: torch.Tensor, params: SamplingParams, *, bitwise: bool = False) -> Finding:
    return compare(transcript(plain, params), transcript(other, params), bitwise=bitwise)


def tied_rows(gap: float, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 400 logits whose best two, 5 and 6, change places: [1, V] each, moved all over by about `gap`."""
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(1, 400, generator=generator).clamp_max(3.0)
    row[0, 5], row[0, 6] = 8.0, 8.0 - gap
    other = row + gap * torch.randn(1, 400, generator=generator)
    other[0, 5], other[0, 6] = 8.0 - gap, 8.0
    return row.to(dtype), other.to(dtype)


@pytest.mark.parametrize(("gap", "dtype", "verdict"), [
    (1e-5, torch.float32, "near-tie"), (1e-3, torch.float32, "defect"), (0.0625, torch.bfloat16, "near-tie"),
    (0.0625, torch.float16, "defect"), (0.5, torch.bfloat16, "defect"),
])  # fmt: skip
def test_a_near_tie_is_what_the_dtype_explains(gap: float, dtype: torch.dtype, verdict: str) -> None:
    rows, other = tied_rows(gap, dtype)
    finding = judge(rows, other, SamplingParams())
    assert (finding.verdict, finding.first_difference, finding.differing_logit_rows) == (verdict, 0, 1)
    assert finding.mismatch is not None
    assert (finding.mismatch.plain_token, finding.mismatch.token) == (5, 6)
    assert finding.mismatch.swing == pytest.approx(2 * gap, rel=0.1)
    assert judge(rows, other, SamplingParams(), bitwise=True).verdict == "defect"


def test_logits_that_differ_are_a_defect_on_cuda_even_behind_the_same_token() -> None:
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    other = rows.clone()
    other[1, 49] = -other[1, 49]
    assert judge(rows, rows.clone(), SamplingParams(), bitwise=True).verdict == "identical"
    finding = judge(rows, other, SamplingParams(), bitwise=True)
    assert (finding.verdict, finding.first_difference, finding.differing_logit_rows) == ("defect", None, 1)
    assert judge(rows, other, SamplingParams()).verdict == "identical"


def test_fit_of_other_probabilities_is_refused() -> None:
    generator = torch.Generator().manual_seed(8)
    row = 2 * torch.randn(300, generator=generator)
    honest = fit_row("", row, T1, position=0, seeds=range(64))
    assert honest.draws == 1024 and honest.p_value > 1e-3
    drawn = torch.multinomial(verifying.target_probabilities(row, T1), 1024, replacement=True, generator=generator)
    counts = torch.bincount(drawn, minlength=300)
    assert fit("", counts, verifying.target_probabilities(row, SamplingParams(temperature=1.3))).p_value < 1e-6
