"""Files of benchmarks: whole whenever a run is stopped, and there before its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compare
import harness
import pytest
import systems

from offload_runtime.errors import OffloadError, StorageError
from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.peers import (
    one_result,
)


def test_compare_leaves_what_was_measured_after_every_system(tmp_path: Path) -> None:
    out, given = tmp_path / "c.json", ["--synthetic", "tiny", "--device", "cpu", "--no-chart", "--systems"]
    names = ("ours-plain", "ours", "resident")

    def measured(system: systems.System, *_: Any, **__: Any) -> dict[str, Any]:
        found = None if not out.exists() else json.loads(out.read_text())
        done = next(name for name in names if systems.SYSTEMS[name] is system)
        before = names[: names.index(done)]
        if before:
            assert found is not None and found["incomplete"] is True and tuple(found["results"]) == before
            assert tuple(found["not_run"]) == names[len(before) :] and "machine" not in found
        if done == "resident" and stopped:
            raise KeyboardInterrupt
        return one_result(2.0, 10**9, 0)

    stopped = True
    with pytest.raises(KeyboardInterrupt):
        compare.main([*given, ",".join(names), "--out", str(out)], run=measured)
    found = json.loads(out.read_text())
    assert found["incomplete"] is True and found["not_run"] == ["resident"] and set(found["times_ours_over"])
    out.unlink()
    stopped = False
    assert compare.main([*given, ",".join(names), "--out", str(out)], run=measured) == 0
    found = json.loads(out.read_text())
    assert "incomplete" not in found and "not_run" not in found and "machine" in found
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]


def test_a_report_is_whole_or_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "new" / "r.json"
    harness.write_report({"a": 1}, out)
    with pytest.raises(ValueError, match="JSON compliant"):
        harness.write_report({"a": float("nan")}, out)
    write_text = Path.write_text

    def full(path: Path, text: str, **others: Any) -> None:
        write_text(path, text[:3])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StorageError, match="no space left"):
        harness.write_report({"a": 2}, out)
    assert json.loads(out.read_text()) == {"a": 1}


def test_a_file_that_cannot_be_written_stops_nothing_before_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    harness.write_unfinished({"a": 1}, tmp_path / "file" / "r.json")
    harness.write_unfinished({"a": 1}, None)
    assert capsys.readouterr().err.count("cannot be written") == 1
    with pytest.raises(OffloadError, match="on standard output only"):
        harness.emit({"a": 1}, tmp_path / "file" / "r.json")
    assert json.loads(capsys.readouterr().out) == {"a": 1}
