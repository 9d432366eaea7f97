"""What a user of the tools can mend is said in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import check_identity
import pytest


def test_a_missing_model_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["check_identity", "--model", "nowhere"])
    assert check_identity.main() == 2
    assert capsys.readouterr().err == "error: nowhere is no directory: name one with safetensors\n"
    assert not any(tmp_path.iterdir())
