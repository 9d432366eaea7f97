"""The interactive side of a chat: line editing, history, and what Ctrl-C means at the prompt."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_runtime.cli.chat_commands import COMMANDS, EndOfChat
from offload_runtime.cli.terminal import status_line

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

    from offload_runtime.cli.chat import ChatSession


def converse_at_terminal(session: ChatSession) -> None:
    """Read turns from the terminal until Ctrl-D, `/exit`, or Ctrl-C twice in a row."""
    status_line("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")
    read = _make_reader()
    # A Ctrl-C at the empty prompt leaves when the key before it was a Ctrl-C too, be it one that stopped an answer.
    interrupted = False
    while True:
        try:
            text = read().strip()
            if text:
                with _silent_keyboard():
                    interrupted = not session.take(text)
        except (EOFError, EndOfChat):
            return
        except KeyboardInterrupt:
            if interrupted:
                return
            interrupted = True
            status_line("Ctrl-C once more or Ctrl-D leaves")


@contextmanager
def _silent_keyboard() -> Iterator[None]:
    """Keep what is typed during an answer from being echoed into it; it waits for the next prompt instead."""
    try:
        import termios
    except ImportError:  # Windows echoes nothing unless somebody reads
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    silent = termios.tcgetattr(keyboard)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(keyboard, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def history_path() -> Path:
    """Return the file that keeps the lines typed, in the user's directory for state.

    Raises RuntimeError, as pathlib does, for a user without a home directory.
    """
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    else:
        base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "offload-runtime" / "chat_history"


def _open_history() -> History:
    """Open the persistent history; without a place to write it, say so and keep the lines for this session only."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path = history_path()
    except RuntimeError as error:
        status_line(f"no history is kept: {error}")
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # What people type to a model is private.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError as error:
        status_line(f"no history is kept: {path} cannot be written ({error.strerror or error})")
        return InMemoryHistory()
    return FileHistory(str(path))


def _make_reader() -> Callable[[], str]:
    """Build the line editor and return a function that reads one turn.

    The function raises EOFError for Ctrl-D and KeyboardInterrupt for Ctrl-C, both at an empty prompt only.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.output import create_output

    editor: Any = PromptSession(
        history=_open_history(),
        auto_suggest=AutoSuggestFromHistory(),
        completer=_completer(),
        complete_while_typing=False,
        key_bindings=_key_bindings(),
        # Several lines are one turn; Enter sends them all the same, see the key bindings.
        multiline=True,
        prompt_continuation=lambda width, line_number, wraps: " " * width,
        # With stdout sent to a file the prompt still belongs on the terminal.
        output=create_output(always_prefer_tty=True),
        reserve_space_for_menu=4,
    )
    prompt = FormattedText([("", "\n"), ("bold ansicyan", "> ")])
    return lambda: editor.prompt(prompt)


def _completer() -> Completer:
    """Complete commands at the beginning of a turn, and paths behind those that take a file."""
    from prompt_toolkit.completion import NestedCompleter, PathCompleter, WordCompleter, merge_completers

    # The nested completer takes the slash for a word of its own, so it is left the arguments only.
    commands = WordCompleter([command.name for command in COMMANDS], sentence=True)
    files = {command.name: PathCompleter(expanduser=True) for command in COMMANDS if command.argument == "FILE"}
    return merge_completers([commands, NestedCompleter(files)], deduplicate=True)


def _key_bindings() -> KeyBindings:
    """Return the keys that differ from the editor's own: sending, new lines, Ctrl-C and Ctrl-D."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\" and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    @keys.add("<sigint>")
    def clear_or_interrupt(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    @keys.add("c-d")
    def delete_or_leave(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.delete()
        else:
            event.app.exit(exception=EOFError, style="class:exiting")

    return keys
