"""The bench of a draft's steps runs, and counts the keys that steps read."""

from __future__ import annotations

import json
from pathlib import Path

import bench_draft_step
import pytest

from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)


@pytest.mark.slow
def test_both_caches_of_a_small_draft(tmp_path: Path) -> None:
    out = tmp_path / "steps.json"
    words = ["--device", "cpu", "--dtype", "fp32", "--shapes", "tiny", "--contexts", "600", "--out", str(out)]
    assert bench_draft_step.main([*words, "--repeats", "1", "--commit", "abc"]) == 0
    full, streaming = json.loads(out.read_text())["cases"]
    assert (full["cache"], full["keys"]) == ("full", 600)
    assert streaming["cache"] == "streaming" and streaming["keys"] < 600
    assert full["bound_ms"] > streaming["bound_ms"] > 0 and full["step_ms"]["median"] > 0
