"""Markdown shown while it comes: whole blocks as they are meant, the newest one as it is written.

A paragraph, a list or a block of code is complete once the next one begins. It is printed then and never touched again;
of what follows no more than fits the screen is drawn anew, so that nothing of the scrollback is lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from offload_runtime.cli.terminal import console, drop_controls, write_text
from offload_runtime.sizes import counted

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from rich.markdown import Markdown


@contextmanager
def answer_writer() -> Iterator[tuple[Callable[[str], None], Callable[[str], None] | None]]:
    """Yield what shows an answer's text on stdout, piece by piece: as markdown on a terminal that shows more than plain
    text and without NO_COLOR, else as it is; and of markdown what shows that something is thought."""
    screen = console(sys.stdout)
    if not sys.stdout.isatty() or screen.no_color or screen.is_dumb_terminal:
        yield write_text, None
        return
    writer = MarkdownWriter(screen)
    try:
        yield writer.write, writer.think
    finally:
        writer.close()


class MarkdownWriter:
    """Shows markdown that comes in pieces.

    Args:
        console: On a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._pending, self._has_printed = "", False  # of the newest block, and whether there was one before
        self._thought = ""  # behind the last block

    def write(self, piece: str) -> None:
        """Show a piece of the text."""
        piece = drop_controls(piece)
        self._fold()
        self._pending += piece
        end = _start_of_last_block(self._pending) if "\n" in piece else 0  # the next pass waits for this
        block, self._pending = self._pending[:end], self._pending[end:]
        self._live.start()
        width, height = self._console.size
        lines = Text(self._pending.strip("\n")[-width * height :]).wrap(self._console, width)
        self._live.update(Group(*lines[-max(1, height - 2) :]))
        self._print(block)
        self._live.refresh()

    def think(self, piece: str) -> None:
        """Show the newest line of what is thought, as long as that goes on."""
        if self._pending.strip():  # something was said before
            self._live.update("")
            self._print(self._pending)
            self._pending = ""
        self._thought += drop_controls(piece)
        self._live.start()
        lines = Text(self._thought.strip()[-1000:], style="dim italic").wrap(self._console, self._console.size.width)
        self._live.update(Group(*lines[-1:]))
        self._live.refresh()

    def _fold(self) -> None:
        """Leave a line of what was thought."""
        if self._thought.strip():
            self._live.update("")
            words = counted(len(self._thought.split()), "word")
            self._console.print(f"thought {words}: /thoughts shows them", style="dim italic")
        self._thought = ""

    def close(self) -> None:
        """End the text."""
        self._live.update("")
        self._live.stop()
        self._fold()
        self._print(self._pending)

    def _print(self, block: str) -> None:
        """Print what is complete, for good."""
        if block.strip():
            self._console.print(*([""] if self._has_printed else []), _markdown(block), sep="\n")
            self._has_printed = True


def _markdown(text: str) -> Markdown:
    """Return markdown in the terminal's colours. Links show where they lead; lines end where the model ended them."""
    from rich.markdown import Markdown  # loaded with the first answer: a fifth of a second

    found = Markdown("", code_theme="ansi_dark", hyperlinks=False)
    found.parsed = _markdown_parser().parse(text)
    for part in (part for token in found.parsed for part in token.children or ()):
        part.type = "hardbreak" if part.type == "softbreak" else part.type
    return found


def _start_of_last_block(text: str) -> int:
    """Find where the last of a text's blocks begins, in characters; those before it are complete."""
    starts = [token.map[0] for token in _markdown_parser().parse(text) if token.level == 0 and token.map]
    return sum(len(line) + 1 for line in text.split("\n")[: starts[-1]]) if starts else 0


@cache
def _markdown_parser() -> MarkdownIt:
    """Make what reads markdown. Tags (`<think>`) are text, and so are definitions of links, which would not show."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).disable("reference").enable(["table", "strikethrough"])
