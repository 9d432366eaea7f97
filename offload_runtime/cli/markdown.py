"""Markdown of an answer on a terminal while it comes: whole blocks as they are meant, the newest one as it is written.

A paragraph, a list or a block of code is complete once the next one begins. It is printed then and never touched again;
of what follows no more than fits the screen is drawn anew, so that nothing of the scrollback is lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from markdown_it import MarkdownIt
from rich.console import Console, Group
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from offload_runtime.cli import terminal

# Tags (`<think>`) are text, and so are definitions of links, which nobody would see otherwise.
_PARSER = MarkdownIt("commonmark", {"html": False}).disable("reference").enable(["table", "strikethrough"])


@contextmanager
def answer_writer() -> Iterator[Callable[[str], None]]:
    """Yield what shows an answer's text on stdout, piece by piece: as markdown on a terminal that shows more than plain
    text and without NO_COLOR, else as it is."""
    console = terminal.console(sys.stdout)
    if not sys.stdout.isatty() or console.no_color or console.is_dumb_terminal:
        yield terminal.write_text
        return
    writer = MarkdownWriter(console)
    try:
        yield writer.write
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

    def write(self, piece: str) -> None:
        """Show a piece of the text."""
        piece = terminal.drop_controls(piece)
        self._pending += piece
        end = _start_of_last_block(self._pending) if "\n" in piece else 0  # the next pass waits for this
        block, self._pending = self._pending[:end], self._pending[end:]
        self._live.start()
        width, height = self._console.size
        lines = Text(self._pending.strip("\n")[-width * height :]).wrap(self._console, width)
        self._live.update(Group(*lines[-max(1, height - 2) :]))
        self._print(block)
        self._live.refresh()

    def close(self) -> None:
        """End the text."""
        self._live.update("")
        self._live.stop()
        self._print(self._pending)

    def _print(self, block: str) -> None:
        """Print what is complete, for good."""
        if block.strip():
            self._console.print(*([""] if self._has_printed else []), _markdown(block), sep="\n")
            self._has_printed = True


def _markdown(text: str) -> Markdown:
    """Return markdown in the terminal's colours. Links show where they lead; lines end where the model ended them."""
    found = Markdown("", code_theme="ansi_dark", hyperlinks=False)
    found.parsed = _PARSER.parse(text)
    for part in (part for token in found.parsed for part in token.children or ()):
        part.type = "hardbreak" if part.type == "softbreak" else part.type
    return found


def _start_of_last_block(text: str) -> int:
    """Find where the last of a text's blocks begins, in characters; those before it are complete."""
    starts = [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map]
    return sum(len(line) + 1 for line in text.split("\n")[: starts[-1]]) if starts else 0
