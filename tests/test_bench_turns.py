"""The bench of turns, batches and pieces of prompts runs, finds nothing, and finds what is there."""

from __future__ import annotations

import json
from pathlib import Path

import bench_turns
import pytest
import torch

from offload_runtime.runners import ModelRunner
from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)

WORDS = ["--device", "cpu", "--dtype", "fp32", "--turns", "4", "--answers", "4", "--prompts", "4", "--tokens", "4"]


@pytest.mark.slow
def test_nothing_differs(long_target: Path, tmp_path: Path) -> None:
    out = tmp_path / "turns.json"
    words = [*WORDS, "--model", str(long_target), "--longest", "600", "--out", str(out), "--commit", "abc"]
    assert bench_turns.main(words) == 0
    report = json.loads(out.read_text())
    assert report["exact"] and len(report["rows"]) == 12
    assert all(row["compared"] == 1 for row in report["rows"])


@pytest.mark.slow
def test_a_prompt_whose_pieces_matter_is_told(
    long_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = ModelRunner.prefill

    def by_pieces(self: ModelRunner, *arguments: object) -> torch.Tensor:
        logits = honest(self, *arguments)  # type: ignore[arg-type]
        return logits + 1e-5 * self.chunk_tokens

    monkeypatch.setattr(ModelRunner, "prefill", by_pieces)
    words = [*WORDS, "--model", str(long_target), "--longest", "600", "--out", str(tmp_path / "turns.json")]
    assert bench_turns.main([*words, "--commit", "abc"]) == 1
    assert "prompts differ" in capsys.readouterr().out
