"""The programs of examples/ run, on a small random model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

TARGET = "long_target"
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def printed(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What an example prints when it is called with some words."""
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


SAYS = {
    "plan.py": "2048 tokens: 0 of 5 layers over the link",
    "generate.py": "the same tokens: True",
    "long_context.py": "tokens read in",
    "batch.py": "== Dear Sir or Madam,",
    "stream.py": "> And in the evening?",
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(
    target: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("the quick brown fox jumps over the lazy dog and " * 100)
    words = [str(target), *([str(book)] if name == "long_context.py" else [])]
    assert SAYS[name] in printed(name, words, monkeypatch, capsys)


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == SAYS.keys()
