"""What goes between the user and the commands: prompts and paths in; progress, status and error lines out, on stderr.

Rich is used without wrapping here: a line stays one line in a log file, however long it is.
"""

from __future__ import annotations

import json
import os
import sys
import time
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import typer
from typer.core import TyperGroup

from offload_runtime.errors import OffloadError, OptionError, StorageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

INTERRUPTED_EXIT_CODE = 130
ERROR_EXIT_CODE = 2
# What a shell reports for a program that SIGPIPE ended, as most of those in front of `| head` are.
BROKEN_PIPE_EXIT_CODE = 141
# A bar that comes and goes within a blink is only flicker.
_BAR_DELAY_S = 0.4


class OutputError(Exception):
    """Standard output takes no more. Not an `OffloadError`: a chat goes on after those, and must not after this."""


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Turn what may end a command into an exit code: typed errors and a full disk 2, Ctrl-C 130, a closed pipe 141.

    Every other exception is a defect and passes through with its traceback.
    """
    try:
        # Text the locale cannot express becomes `?` instead of a UnicodeEncodeError in mid-answer.
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        yield
    except OffloadError as error:
        error_line(error)
        raise typer.Exit(ERROR_EXIT_CODE) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from error
    except OutputError as error:
        _forget_unwritten()
        error_line(StorageError(f"stdout cannot be written: {error}; free some space or send it elsewhere"))
        raise typer.Exit(ERROR_EXIT_CODE) from error
    except BrokenPipeError as error:
        raise typer.Exit(BROKEN_PIPE_EXIT_CODE) from error


@contextmanager
def _writing() -> Iterator[None]:
    """Tell what the system refuses to write (a full disk) from every other OSError; a closed pipe stays itself."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.strerror or str(error)) from error


def _forget_unwritten() -> None:
    """Send what is left in stdout's buffer nowhere, or the interpreter fails on it once more while it ends."""
    with suppress(OSError):  # a stand-in for stdout has no descriptor
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)


def stderr_console() -> Console:
    """Return a console on stderr as it is now; colours only on a terminal and without NO_COLOR."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def status_line(text: str) -> None:
    """Print one line of information on stderr."""
    stderr_console().print(one_line(text), style="dim")


def error_line(error: OffloadError) -> None:
    """Print `error: …` as one line on stderr."""
    from rich.text import Text

    stderr_console().print(Text("error: ", style="bold red"), Text(one_line(str(error))), sep="")


def one_line(text: str) -> str:
    """Collapse every run of white space into one space and drop control characters."""
    return drop_controls(" ".join(text.split()))


def drop_controls(text: str) -> str:
    """Remove control characters except newline and tab: a model must not be able to steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def write_text(piece: str) -> None:
    """Write a piece of the model's text to stdout at once; unchanged unless stdout is a terminal."""
    with _writing():
        sys.stdout.write(drop_controls(piece) if sys.stdout.isatty() else piece)
        sys.stdout.flush()


def write_json(record: Mapping[str, Any], output: TextIO) -> None:
    """Write one JSON object as one line of ASCII to `output`."""
    with _writing():
        output.write(json.dumps(record) + "\n")
        output.flush()


@contextmanager
def only_json(wanted: bool) -> Iterator[TextIO]:
    """Yield where to write JSON, and send to stderr what libraries print now and then: its reader must not meet it."""
    output = sys.stdout
    with redirect_stdout(sys.stderr if wanted else output):
        yield output


class ProgressBars:
    """Progress on stderr: one bar per stage, shown on terminals only and gone once it is complete.

    Used as a context manager around the work, so that no bar is left standing when the work fails.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled and sys.stderr.isatty()
        self._started_s = time.monotonic()
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def on_bytes(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """Advance the bar of a stage that counts bytes."""
        self._update(stage, done_bytes, total_bytes, unit="bytes")

    def on_prefill(self, done_layers: int, layers: int) -> None:
        """Advance the bar of the prompt's way through the layers."""
        self._update("prefill", done_layers, layers, unit="layers")

    def on_answers(self, finished: int, answers: int) -> None:
        """Advance the bar of a batch."""
        self._update("answers", finished, answers, unit="finished")

    def on_runs(self, stage: str, done_runs: int, runs: int) -> None:
        """Advance the bar of a stage that counts runs."""
        self._update(stage, done_runs, runs, unit="runs")

    def close(self) -> None:
        """Remove the bars from the screen; calling it again does nothing."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = None
        self._tasks.clear()
        self._enabled = False

    def _update(self, stage: str, done: int, total: int, *, unit: str) -> None:
        if not self._enabled or (self._progress is None and time.monotonic() - self._started_s < _BAR_DELAY_S):
            return
        if self._progress is None:
            self._progress = _new_progress(unit)
            self._progress.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total)
        self._progress.update(self._tasks[stage], completed=done, total=total)


def _new_progress(unit: str) -> Progress:
    """Build the bar: `bytes` with their speed, any other unit as a count."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    name = TextColumn("{task.description}", markup=False)
    if unit == "bytes":
        columns = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(compact=True))
        return Progress(*columns, console=stderr_console(), transient=True, redirect_stdout=False)
    counted = (name, BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn(compact=True))
    return Progress(*counted, console=stderr_console(), transient=True, redirect_stdout=False)


# The base of all errors about options. Newer versions of typer carry click within and export no more than this child.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Turn what typer says in a box into `error: …` and exit code 2."""
    try:
        yield
    except _UsageError as error:
        refusal: Any = error  # of click's, for which there is no name here
        command = "offload-runtime" if refusal.ctx is None else refusal.ctx.command_path
        message = refusal.format_message().rstrip(".")
        error_line(OptionError(f"{message}; {command} --help lists the options"))
        raise typer.Exit(ERROR_EXIT_CODE) from error


class OneLineGroup(TyperGroup):
    """Typer's group of commands, but for how it says what is wrong with the words of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words before the command; without any, the help is shown as ever."""
        if not args:
            return super().parse_args(ctx, args)
        with _in_one_line():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Read the words of the command, and run it."""
        with _in_one_line():
            return super().invoke(ctx)


@dataclass(frozen=True)
class NamedPrompt:
    """A prompt, and what to call it: its file as the user wrote it."""

    name: str
    text: str


def collect_prompts(prompt: str | None, prompt_files: Sequence[str]) -> list[NamedPrompt]:
    """Return the prompt of `--prompt` or those of all `--prompt-file` (`-` is stdin), byte for byte as written."""
    if (prompt is None) == (not prompt_files):
        given = "both" if prompt_files else "neither"
        raise OptionError(f"{given} of --prompt and --prompt-file was given: give exactly one of them")
    if prompt is not None:
        return [NamedPrompt("--prompt", prompt)]
    if prompt_files.count("-") > 1:
        raise OptionError(f"--prompt-file - was given {prompt_files.count('-')} times: stdin can be read once")
    return [_read_prompt(path) for path in prompt_files]


def _read_prompt(path: str) -> NamedPrompt:
    name = "stdin" if path == "-" else path
    try:
        raw = sys.stdin.buffer.read() if path == "-" else user_path(path).read_bytes()
    except OSError as error:
        raise OptionError(f"--prompt-file {path} cannot be read: {error.strerror or error}") from error
    return NamedPrompt(name, decode_utf8(raw, name if path == "-" else f"--prompt-file {path}"))


def user_path(text: str) -> Path:
    """Return the path that a user wrote, with `~` replaced; raises `OptionError` when that stands for nothing."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise OptionError(f"{text} cannot be found ({error}): write the path without ~") from error


def decode_utf8(raw: bytes, source: str) -> str:
    """Decode text that a user supplied, without a byte-order mark; raises `OptionError` naming `source`."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise OptionError(
            f"{source} is not UTF-8 text: byte 0x{byte:02x} at offset {error.start}; convert it, for example with iconv"
        ) from error
