"""The bench of a load on a tiny model on the CPU: what it reports, and what it judges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_serving
import pytest

from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)

TARGET = "two_layer_target"


def words(target: Path, tmp_path: Path, *others: str) -> list[str]:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog and on and on " * 20)
    given = ["--target", str(target), "--device", "cpu", "--dtype", "fp32", "--vram", "all", "--new-tokens", "8"]
    return [*given, "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out.json"), *others]


def test_a_load_is_held_beside_one_at_a_time(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = words(target, tmp_path, "--requests", "3,1", "--minutes", "0.008", "--prompt-tokens", "4,12")
    assert bench_serving.main([*given, "--disconnects", "0.5", "--commit", "abc"]) == 0
    report: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    assert report["settings"]["text"] == "text.txt" and report["commit"] == "abc"
    one, three = report["rows"]
    assert (one["at_once"], three["at_once"], one["times_one"]) == (1, 3, 1.0)
    for row in (one, three):
        assert row["finished"] + row["left"] > 0 and row["errors"] == [] and row["cut"] <= row["at_once"]
        assert row["tokens"] == pytest.approx(row["tok_per_s"] * row["seconds"]) and row["passes"] < row["tokens"]
        assert 0 < row["first_token_s"]["p50"] <= row["first_token_s"]["p99"] < row["seconds"]
        assert row["memory"][0]["rss_bytes"] > 1e7 and "device_bytes" not in row["memory"][0]
        assert row["compared"] > 0 and row["differing"] == 0
    assert three["finished"] and three["left"]  # of the first three requests
    printed = capsys.readouterr().out
    assert "ok     answers unlike those one at a time, 3 at once: 0" in printed
    assert json.loads(printed.splitlines()[-1]) == report


def test_a_load_may_be_held_alone(target: Path, tmp_path: Path) -> None:
    given = words(target, tmp_path, "--requests", "2", "--minutes", "0.004", "--prompt-tokens", "4")
    assert bench_serving.main(given) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    (row,) = report["rows"]
    assert row["at_once"] == 2 and row["tokens"] and not {"answers", "compared", "times_one"} & {*row}
    assert [check["claim"] for check in report["checks"]] == ["requests that failed, 2 at once"]


def test_a_second_question_reads_only_what_is_new(target: Path, tmp_path: Path) -> None:
    bench_serving.main(words(target, tmp_path, "--second-question", "200", "--draft", "none"))
    found = json.loads((tmp_path / "out.json").read_text())["second_question"]
    assert (found["prompt_tokens"], found["question_tokens"]) == (200, 33)  # with the answer's last token
    assert found["passes_to_first_token"] == pytest.approx(found["first_token_s"][1] / found["s_per_pass"])


def test_what_a_server_is_held_to() -> None:
    def row(**changes: Any) -> dict[str, Any]:
        calm = {"at_once": 8, "times_one": 4.0, "errors": [], "differing": 0, "compared": 9, "seconds": 480.0}
        return {**calm, "mb_per_minute": {"rss_bytes": 0.5, "device_bytes": -1.0}, **changes}

    def missed(plain: bool = False, **changes: Any) -> list[str]:
        report = {"rows": [row(**changes)]}
        return [check.claim for check in bench_serving.checks(report, plain=plain) if not check.holds]

    assert missed() == []
    assert missed(plain=True) == ["times the tokens/s of one at a time, 8 at once"]
    assert missed(errors=["BudgetError: full"], differing=2) == [
        "requests that failed, 8 at once", "answers unlike those one at a time, 8 at once"
    ]  # fmt: skip
    assert missed(compared=0) == ["answers unlike those one at a time, 8 at once"]
    assert missed(mb_per_minute={"rss_bytes": 0.1, "device_bytes": 9.0}) == ["MB a minute of device, 8 at once"]
    assert missed(mb_per_minute={"rss_bytes": 9.0}, seconds=30.0) == []  # too short to tell
    question = {"second_question": {"passes_to_first_token": 2.1}, "rows": []}
    assert not bench_serving.checks(question, plain=True)[0].holds


def test_growth_is_the_trend_after_the_beginning() -> None:
    samples = [{"s": 1.0 * s, "rss_bytes": 1e9 if s < 20 else 2e9 + 1e5 * s} for s in range(80)]
    assert bench_serving.mb_per_minute(samples)["rss_bytes"] == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--requests", "0"], "--requests must be at least 1"),
        (["--minutes", "0"], "--minutes is more than 0"),
        (["--disconnects", "2"], "a share from 0 to 1"),
        (["--context", "100"], "prompts and answers take 264 tokens, --context is 100: raise it"),
        (["--prompt-tokens", "9000", "--context", "16000"], "lower --prompt-tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], message: str
) -> None:
    assert bench_serving.main(words(target, tmp_path, *given)) == 2
    assert message in capsys.readouterr().err
