"""bench_start.py on a tiny checkpoint on the CPU: what it reads, what it reports, and what it judges."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_start
import pytest


@pytest.mark.parametrize("cache", ["warm", "cold"])
def test_a_start_is_reported(
    cache: str, short_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def forget(files: Sequence[Path]) -> str:  # the machine is not ours alone
        return f"{len(files)} dropped"

    out = tmp_path / "start.json"
    given = ["--target", str(short_target), "--device", "cpu", "--context", "64", "--cache", cache, "--out", str(out)]
    assert bench_start.main([*given, "--commit", "abc"], forget=forget) == 1  # of so few bytes plans are not so exact
    report: dict[str, Any] = json.loads(out.read_text())
    assert report["file_bytes"] == sum(path.stat().st_size for path in short_target.glob("*.safetensors"))
    assert 0 < report["weights_s"] <= report["loaded_s"] < report["first_token_s"]
    assert (report["read_gbps"] is None) == (cache == "cold") and report["cache"] == cache
    assert report["bytes_s"] == pytest.approx(report["file_bytes"] / report["bar_gbps"] / 1e9)
    assert 0 < report["peak_rss_bytes_by_stage"]["target weights"] <= report["peak_rss_bytes"]
    assert sum(report["planned_host"].values()) <= report["planned_host_bytes"]
    printed = capsys.readouterr().out
    assert ("1 dropped" in printed) == (cache == "cold") and "MISSED" in printed


def test_what_a_start_may_take() -> None:
    report = {"weights_s": 10.0, "bytes_s": 8.0, "bar_gbps": 5.0, "peak_rss_bytes": 98, "planned_host_bytes": 100}
    assert [check.holds for check in bench_start.checks(report)] == [True, True]
    slow = report | {"weights_s": 10.5, "peak_rss_bytes": 104}
    assert [check.holds for check in bench_start.checks(slow)] == [False, False]


def test_what_has_no_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target in (tmp_path, tmp_path / "none.gguf"):
        assert bench_start.main(["--target", str(target), "--device", "cpu"]) == 2
        assert "has no weights: name a directory with safetensors, or a .gguf file" in capsys.readouterr().err
