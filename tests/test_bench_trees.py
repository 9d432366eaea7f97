"""The bench of trees: what acceptance predicts, and a whole run with small models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import bench_trees
import pytest

from tests.helpers.engine import one_thread, write_checkpoint  # noqa: F401 (one_thread is an autouse fixture)


@pytest.mark.parametrize("nodes", ["", "4,8"])
def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], nodes: str) -> None:
    model = write_checkpoint(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog and the quick brown fox sleeps " * 3)
    out = tmp_path / "trees.json"
    code = bench_trees.main([
        "--source", str(model), "--text", str(text), "--code", str(text), "--shape", "none", "--noises", "0.05",
        "--temperatures", "0.6", "--sizes", "1,6", "--nodes", nodes, "--chain-tokens", "16", "--depth", "5",
        "--gamma", "3", "--device", "cpu",
        "--prompt-tokens", "20", "--tokens", "16", "--size-tokens", "16", "--context", "96", "--dtype", "fp32",
        "--resident-layers", "1", "--out", str(out),
    ])  # fmt: skip
    assert code == 0
    report = json.loads(out.read_text())
    assert "incomplete" not in report
    assert report == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["how"] for row in report["streamed"]] == (
        ["plain", "chain 3", "tree 4", "tree 8"] if nodes else ["plain", "chain 3", "auto"]
    ) * 2
    assert all(row["bytes_per_pass"] > 0 and row["link_idle_share"] is not None for row in report["streamed"])
    proposed = [row for row in report["streamed"] if row["how"] != "plain"]
    assert all(row["identical"] for row in (*proposed, *report["sizes"]))
    assert [row["identical_tokens"] for row in proposed] == ([8, 16, 16] if nodes else [8, 16]) * 2
    assert [row["nodes"] for row in report["sizes"]] == [1, 6] * 2
    assert all(1 <= row["predicted_tokens_per_pass"] <= 1 + min(5, row["nodes"]) for row in report["sizes"])
    assert all(0.5 < sum(row["hits_by_rank"]) <= 1 for row in report["sizes"])


def test_rows_are_in_the_file_as_soon_as_they_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stops the bench then, and the file says that it was stopped."""
    model, out = write_checkpoint(tmp_path / "model"), tmp_path / "trees.json"
    row = {
        "noise": 0.05, "temperature": 0.0, "prompt": "prose", "how": "plain", "tokens_per_pass": 1.0, "tok_per_s": 1.0,
        "s_per_pass": 1.0,
    }  # fmt: skip

    def measure(*_: object) -> Iterator[dict[str, object]]:
        for number in range(2):
            yield row | {"number": number}
            found = json.loads(out.read_text())
            assert [one["number"] for one in found["streamed"]] == [*range(number + 1)] and found["incomplete"]
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_trees, "measure_streamed", measure)
    given = ["--source", str(model), "--text", "t", "--code", "c", "--device", "cpu", "--commit", "abc"]
    with pytest.raises(KeyboardInterrupt):
        bench_trees.main([*given, "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["streamed"] == [row | {"number": number} for number in range(2)] and found["sizes"] == []
    assert found["incomplete"] is True and found["commit"] == "abc" and found["settings"]["text"] == "t"
    assert {path.name for path in tmp_path.iterdir()} == {"model", "trees.json"}


def test_what_is_wrong_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a")
    arguments = ["--source", str(tmp_path / "absent"), "--text", str(text), "--code", str(text), "--device", "cpu"]
    assert bench_trees.main(arguments) == 2
    assert "absent" in capsys.readouterr().err
