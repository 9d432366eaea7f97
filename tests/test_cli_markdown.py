"""Markdown on a terminal: what stays on it, and that nothing which has left the screen is touched."""

from __future__ import annotations

import io
import os
import re
import sys

import pytest
from rich.console import Console

from offload_runtime.cli.terminal import MarkdownWriter, answer_writer

pty = pytest.importorskip("pty", reason="pseudo-terminals as POSIX has them")
HEIGHT, WIDTH = 12, 50
ITEMS = 30
ANSWER = """Some **bold** words with a <think> tag,
and a second line.

```python
def add(a, b):
    return a + b
```

"""
ANSWER += "1. item\n" * ITEMS + "\nSee [here](http://a.example/b).\n\n[1]: http://c.example\n"


class Screen:
    """A terminal, as far as rich steers one here: all lines that it has shown, those of the scrollback included."""

    def __init__(self) -> None:
        self.lines, self._row = [""], 0

    def feed(self, shown: str) -> None:
        for code, character in re.findall(r"\x1b\[([?\d;]*[A-Za-z])|(.)", shown, re.DOTALL):
            if code.endswith("A"):
                self._row -= int(code[:-1])
                assert self._row >= 0 and len(self.lines) - self._row <= HEIGHT, "the scrollback cannot be reached"
            elif code == "2K":
                self.lines[self._row] = ""
            elif character == "\n":
                self._row += 1
                self.lines += [""] * (self._row == len(self.lines))
            elif character not in ("", "\r"):
                self.lines[self._row] += character

    @property
    def text(self) -> str:
        lines = [line.strip() for line in self.lines]
        return "\n".join(line for line in lines if line)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_what_stays_is_the_markdown_however_it_came(size: int) -> None:
    output, screen = io.StringIO(), Screen()
    writer = MarkdownWriter(Console(file=output, force_terminal=True, width=WIDTH, height=HEIGHT, _environ={}))
    for start in range(0, len(ANSWER), size):
        writer.write(ANSWER[start : start + size])
    writer.close()
    screen.feed(output.getvalue())
    items = "\n".join(f"{number + 1} item" for number in range(ITEMS))
    code = "def add(a, b):\nreturn a + b"
    begin = "Some bold words with a <think> tag,\nand a second line."
    assert screen.text == f"{begin}\n{code}\n{items}\nSee here (http://a.example/b).\n[1]: http://c.example"
    assert "\x1b[1mbold" in output.getvalue() and output.getvalue().endswith("\n")


def test_the_newest_words_are_seen_at_once() -> None:
    output, screen = io.StringIO(), Screen()
    writer = MarkdownWriter(Console(file=output, force_terminal=True, width=WIDTH, height=HEIGHT, _environ={}))
    writer.write("A block.\n\nand **the be\x07ginning\x1b[2J of one")
    screen.feed(output.getvalue())
    assert screen.text == "A block.\nand **the beginning[2J of one"  # control characters do not steer the terminal
    writer.close()


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), ("TERM", "xterm")])
def test_where_it_is_left_as_it_is(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with answer_writer() as show:
            show("*a*\n")
        stdout.flush()
        shown = os.read(master, 10_000).decode()
        monkeypatch.undo()
    os.close(master)
    assert (shown == "*a*\r\n") == (value != "xterm")
