"""The bench of turns, batches and pieces of prompts runs, finds nothing, and counts what differs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import bench_turns
import pytest
import torch

from offload_runtime.params import GenerationParams
from offload_runtime.verify.equality import Transcript
from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)


@pytest.mark.slow
def test_nothing_differs(long_target: Path, tmp_path: Path) -> None:
    out = tmp_path / "turns.json"
    words = ["--device", "cpu", "--dtype", "fp32", "--turns", "4", "--answers", "4", "--prompts", "4", "--tokens", "4"]
    words += ["--model", str(long_target), "--longest", "600", "--out", str(out), "--commit", "abc"]
    assert bench_turns.main(words) == 0
    report = json.loads(out.read_text())
    assert report["exact"] and len(report["rows"]) == 12
    assert all(row["compared"] == 1 for row in report["rows"])


def test_what_differs_is_counted() -> None:
    said = Transcript([3, 4], torch.ones(2, 5), GenerationParams(), 7, 1)
    moved = said.rows.clone()
    moved[1, 2] += 1e-6
    kept = [torch.zeros(3, dtype=torch.int32)]
    found = bench_turns.Count()
    found.add(said, said, [kept, [kept[0].clone()]])
    assert (found.compared, found.differing) == (1, 0)
    found.add(said, replace(said, tokens=[3, 5], rows=moved), [kept, [kept[0] + 1]])
    assert (found.differing_tokens, found.differing_logit_rows, found.differing_keys_and_values) == (1, 1, 1)
    found.add(said, replace(said, rows=moved))
    assert (found.compared, found.differing) == (3, 4)
