"""What goes between the user and the commands: files and typed lines in; text, progress, status and errors out.

The standard streams are guarded (`standard_streams`): what they refuse ends a command in one way, whoever prints.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich import box, progress
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from offload_runtime.errors import OffloadError, OptionError, StorageError
from offload_runtime.files import regular_file, user_directory
from offload_runtime.options import require

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

INTERRUPTED_EXIT_CODE = 130
ERROR_EXIT_CODE = 2
# A bar that comes and goes within a blink is only flicker.
_BAR_DELAY_S = 0.4
_MOST_SHOWN = 60  # characters of a text that is only named
_TABLE_COLUMNS, _MOST_COLUMNS = 80, 1000  # what tables are made for, and more than any terminal has


class OutputError(Exception):
    """Standard output takes no more. Not an `OffloadError`: a chat goes on after those, and must not after this."""


# --- out


class _Guarded:
    """A standard stream whose failures are told from those of other files, whichever library writes.

    What stdout refuses is an `OutputError`, with the system's own behind it. What stderr refuses (`is_answer` False) is
    dropped, because the answer is worth more than what is said of it.
    """

    def __init__(self, stream: TextIO, *, is_answer: bool) -> None:
        self._stream, self._is_answer = stream, is_answer
        self._refusal: OSError | None = None  # it stays: a library that swallows it must not make a success of it

    def write(self, text: str) -> None:
        self._try(lambda: self._stream.write(text))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            if self._refusal is None:
                action()
        except OSError as error:
            self._refusal = error
            # What is left in its buffer goes nowhere, or the interpreter fails on it once more while it ends.
            with suppress(OSError), open(os.devnull, "wb") as nowhere:  # a stand-in has no descriptor
                os.dup2(nowhere.fileno(), self._stream.fileno())
        if self._refusal is not None and self._is_answer:
            raise OutputError(self._refusal.strerror or str(self._refusal)) from self._refusal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def standard_streams() -> Iterator[None]:
    """Make of the standard streams what the whole program can rely on, whatever the shell has made of them."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: else the next file would get its number, and what libraries print
            setattr(sys, name, open(os.devnull))  # noqa: SIM115 (it stays)
    for stream in (sys.stdout, sys.stderr):  # what the locale cannot express becomes `?`
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    columns = os.environ.get("COLUMNS", "")  # in none rich prints nothing, and in too many it fails
    if not (columns.isdecimal() and columns.isascii() and len(columns) < 10 and 0 < int(columns) <= _MOST_COLUMNS):
        os.environ.pop("COLUMNS", None)
    out, err = _Guarded(sys.stdout, is_answer=True), _Guarded(sys.stderr, is_answer=False)
    with redirect_stdout(cast(TextIO, out)), redirect_stderr(cast(TextIO, err)):
        yield


def console(output: TextIO) -> Console:
    """Return a console on a stream; colours only on a terminal and without NO_COLOR. A terminal's lines end between
    words, those of a log file are as long as what they say."""
    return Console(file=output, highlight=False, soft_wrap=not output.isatty(), markup=False, emoji=False)


def status_line(text: str) -> None:
    """Print one line of information on stderr."""
    console(sys.stderr).print(one_line(text), style="dim")


def error_line(error: OffloadError) -> None:
    """Print `error: …` as one line on stderr."""
    console(sys.stderr).print(Text("error: ", style="bold red"), Text(one_line(str(error))), sep="")


def print_tables(tables: Iterable[Table | str], output: TextIO) -> None:
    """Print tables and lines one after the other; a narrow terminal folds tables, rather than that figures are cut."""
    for item in tables:
        out = console(output)
        out.width = max(out.width, _TABLE_COLUMNS) if isinstance(item, Table) else out.width
        out.print(item)


def narrow_table(*columns: Column | str, title: str | None = None, headed: bool = True) -> Table:
    """Return a table of figures, as narrow as can be: a terminal of 80 columns must not cut them off."""
    return Table(
        *columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False,
        show_header=headed,
    )  # fmt: skip


def one_line(text: str) -> str:
    """Join lines by spaces and drop control characters."""
    return drop_controls(" ".join(text.splitlines())).rstrip()


def figure(value: float) -> str:
    """Return a number of about three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def shortened(text: str, most: int = _MOST_SHOWN) -> str:
    """Return the beginning of a text that is longer than a line has room for."""
    return text if len(text) <= most else f"{text[:most]}…"


def drop_controls(text: str) -> str:
    """Remove control characters except newline and tab: a model must not be able to steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def write_text(piece: str) -> None:
    """Write a piece of the model's text to stdout at once; unchanged unless stdout is a terminal."""
    print(drop_controls(piece) if sys.stdout.isatty() else piece, end="", flush=True)


def write_json(record: Mapping[str, Any], output: TextIO) -> None:
    """Write one JSON object as one line of ASCII to `output`."""
    print(json.dumps(record), file=output, flush=True)


def print_result(record: Mapping[str, Any], tables: Iterable[Table | str], *, as_json: bool) -> None:
    """Print on stdout what a command has found: plain values as JSON, or tables and lines that say the same."""
    if as_json:
        write_json(record, sys.stdout)
    else:
        print_tables(tables, sys.stdout)


@contextmanager
def only_json(wanted: bool) -> Iterator[TextIO]:
    """Yield where to write JSON, and send to stderr what libraries print now and then: its reader must not meet it."""
    output = sys.stdout
    with redirect_stdout(sys.stderr if wanted else output):
        yield output


@contextmanager
def signal_handler(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Let a function take signals meanwhile; in threads but the main one, which alone may take them, this does
    nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, handler) for number in numbers} if is_main else {}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


class ProgressBars(AbstractContextManager["ProgressBars"]):
    """Progress on stderr: one bar per stage, shown on terminals only and gone once it is complete; a count, or bytes
    with their speed. Elsewhere nothing, `or_lines`: one as a stage begins and after each quarter of it.

    Used as a context manager around the work, so that no bar is left standing when the work fails.
    """

    def __init__(self, *, enabled: bool, in_bytes: bool = False, or_lines: bool = False) -> None:
        self._shown_from_s = time.monotonic() + _BAR_DELAY_S
        figures = (progress.DownloadColumn(), progress.TransferSpeedColumn())
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            *(figures if in_bytes else [progress.MofNCompleteColumn()]),
            progress.TimeRemainingColumn(compact=True),
            console=console(sys.stderr),
            transient=True,
            redirect_stdout=False,
            disable=not (enabled and sys.stderr.isatty()),
        )
        self._tasks: dict[str, progress.TaskID] = {}
        self._lines = or_lines and enabled and self._progress.disable

    def update(self, stage: str, done: int, total: int) -> None:
        """Advance the bar of a stage."""
        if self._lines and (done == 1 or 4 * done // total > 4 * (done - 1) // total):
            status_line(f"{stage}: {done} of {total}")
        if self._progress.disable or time.monotonic() < self._shown_from_s:
            return
        self._progress.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total)
        self._progress.update(self._tasks[stage], completed=done, total=total, visible=done < total)

    def __exit__(self, *error: object) -> None:
        """Remove the bars from the screen, for good; calling it again does nothing."""
        if self._progress.live.is_started:
            self._progress.stop()
        self._progress.disable = True

    close = __exit__


# --- in


def read_text(file: str | Path, *, option: str = "") -> str:
    """Read a UTF-8 file (`"-"` is stdin), byte for byte; raises `OptionError` naming it and the `option`."""
    source = "stdin" if file == "-" else f"{option} {file}".lstrip()
    try:
        raw = sys.stdin.buffer.read() if file == "-" else user_path(file).read_bytes()
    except OSError as error:
        raise OptionError(f"{source} cannot be read: {error.strerror or error}") from error
    return decode_utf8(raw, source)


def user_path(text: str | Path) -> Path:
    """Return the path that a user wrote, with `~` replaced; raises `OptionError` when that stands for nothing."""
    require("\0" not in str(text), "a path holds a NUL character, which no file can have: write it without")
    try:
        os.fsencode(text)
        return Path(text).expanduser()
    except (RuntimeError, UnicodeEncodeError) as error:
        raise OptionError(f"{text} cannot be found ({error}): write it in full, without ~") from error


def decode_utf8(raw: bytes, source: str) -> str:
    """Decode text that a user supplied, without a byte-order mark; raises `OptionError` naming `source`."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = f"byte 0x{raw[error.start]:02x} at offset {error.start}"
        raise OptionError(f"{source} is not UTF-8 text: {where}; convert it, for example with iconv") from error


@contextmanager
def silent_keyboard() -> Iterator[None]:
    """Keep what is typed during an answer from being echoed into it; it waits for the next prompt instead."""
    try:
        import termios
    except ImportError:  # Windows echoes nothing unless somebody reads
        yield
        return
    keyboard = sys.stdin.fileno()
    before, silent = termios.tcgetattr(keyboard), termios.tcgetattr(keyboard)
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(keyboard, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def ask(question: str) -> str:
    """Put a question to the user and return one line; nothing for Ctrl-C and Ctrl-D."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import PathCompleter
    from prompt_toolkit.output import create_output

    asking: Any = PromptSession(
        completer=PathCompleter(expanduser=True), complete_while_typing=False,
        output=create_output(always_prefer_tty=True),
    )  # fmt: skip
    try:
        return str(asking.prompt(question)).strip()
    except (EOFError, KeyboardInterrupt):
        return ""


# Programs that put a text on the clipboard, with the variable of the environment without which they cannot.
_CLIPBOARDS = (
    (["wl-copy"], "WAYLAND_DISPLAY"), (["xclip", "-selection", "clipboard"], "DISPLAY"),
    (["xsel", "--input", "--clipboard"], "DISPLAY"), (["pbcopy"], None),
)  # fmt: skip


def copy(text: str) -> str:
    """Put a text on the clipboard, and say how: by a program that is there for it, else by asking the terminal, from
    which there is no answer. Raises `StorageError` where a program refuses."""
    for words, variable in _CLIPBOARDS:
        if (variable is None or os.environ.get(variable)) and shutil.which(words[0]):
            quiet = subprocess.DEVNULL  # xclip stays behind and would keep a pipe open
            done = subprocess.run(words, input=text.encode(), stdout=quiet, stderr=quiet, check=False)
            if done.returncode:
                remedy = "select the text with the mouse, or unset the variable that says where the display is"
                raise StorageError(f"{words[0]} did not take the text (exit code {done.returncode}): {remedy}")
            return f"with {words[0]}"
    screen = sys.stdout if sys.stdout.isatty() else sys.stderr
    print(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\x07", end="", file=screen, flush=True)
    return "by way of the terminal (OSC 52), if it allows that; xclip or wl-copy would do it anywhere"


def line_editor(commands: Sequence[str], file_commands: Sequence[str]) -> Callable[[str], str]:
    """Build an editor of lines with a history, and return a function that reads what was typed until Enter, in a line
    that begins with a text.

    It completes `commands` at the beginning of a line, and paths behind `file_commands`. The function raises EOFError
    for Ctrl-D and KeyboardInterrupt for Ctrl-C, both at an empty prompt only.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
    from prompt_toolkit.completion import NestedCompleter, PathCompleter, WordCompleter, merge_completers
    from prompt_toolkit.output import create_output

    # The nested completer takes the slash for a word of its own, so it is left the arguments only.
    paths = NestedCompleter({name: PathCompleter(expanduser=True) for name in file_commands})
    editor: Any = PromptSession(
        [("", "\n"), ("bold ansicyan", "> ")],
        history=open_history(),
        auto_suggest=AutoSuggestFromHistory(),
        completer=merge_completers([WordCompleter(commands, sentence=True), paths], deduplicate=True),
        complete_while_typing=False,
        key_bindings=_key_bindings(),
        multiline=True,  # several lines are one turn; Enter sends them all the same, see the key bindings
        output=create_output(always_prefer_tty=True),  # with stdout sent to a file the prompt still belongs there
        reserve_space_for_menu=4,
    )
    return lambda begun: str(editor.prompt(default=begun))


def open_history() -> History:
    """Open the history that is kept in the user's directory for state; without a place to write it, say so and keep
    the lines for this session only."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path = user_directory("state", holds="the history of chats") / "chat_history"
        path = regular_file(path, remedy="move it away")
        path.parent.mkdir(parents=True, exist_ok=True)
        # What people type to a model is private.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except (StorageError, OSError) as error:
        status_line(f"no history is kept: {error}")
        return InMemoryHistory()
    return FileHistory(str(path))


def _key_bindings() -> KeyBindings:
    """Return the keys that differ from the editor's own: Enter, new lines, and Ctrl-C behind what was typed."""
    from prompt_toolkit.application import get_app
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    typed = Condition(lambda: bool(get_app().current_buffer.text))

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

    @keys.add("c-c", filter=typed)
    @keys.add("<sigint>", filter=typed)
    def clear(event: Any) -> None:
        event.current_buffer.reset()

    return keys
