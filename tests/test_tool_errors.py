"""What a user of the tools can mend is said in one line."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import check_identity
import noisy_draft
import pytest


@pytest.mark.parametrize(
    ("tool", "words"), [(check_identity, ["--model", "nowhere"]), (noisy_draft, ["nowhere", "copy"])]
)
def test_a_missing_model_is_one_line(
    tool: ModuleType, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [tool.__name__, *words])
    assert tool.main() == 2
    assert capsys.readouterr().err == "error: nowhere is no directory: name one with safetensors\n"
    assert not any(tmp_path.iterdir())
