"""The commands of `offload-runtime`, and how each of them may end; their options are read into one dataclass each."""

from __future__ import annotations

import _thread
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from offload_runtime.cli.chat import chat
from offload_runtime.cli.demo import demo
from offload_runtime.cli.generate import generate
from offload_runtime.cli.options import with_options
from offload_runtime.cli.plan import plan
from offload_runtime.cli.profile import profile
from offload_runtime.cli.terminal import ERROR_EXIT_CODE, INTERRUPTED_EXIT_CODE, OutputError, error_line
from offload_runtime.cli.verify import verify
from offload_runtime.errors import OffloadError, OptionError, StorageError

# What a shell reports for a program that SIGPIPE ended, as most of those in front of `| head` are.
BROKEN_PIPE_EXIT_CODE = 141
# The base of all errors about options. Newer versions of typer carry click within and export no more than this child.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Turn what may end a command into `error: …` and an exit code: typed errors, what typer says in a box and a full
    disk 2, Ctrl-C 130, a closed pipe 141.

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
    except _UsageError as error:
        refusal: Any = error  # of click's, for which there is no name here
        command = "offload-runtime" if refusal.ctx is None else refusal.ctx.command_path
        message = refusal.format_message().rstrip(".")
        error_line(OptionError(f"{message}; {command} --help lists the options"))
        raise typer.Exit(ERROR_EXIT_CODE) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from error
    except OutputError as error:
        # What is left in stdout's buffer goes nowhere, or the interpreter fails on it once more while it ends.
        with suppress(OSError), open(os.devnull, "wb") as nowhere:  # a stand-in for stdout has no descriptor
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        error_line(StorageError(f"stdout cannot be written: {error}; free some space or send it elsewhere"))
        raise typer.Exit(ERROR_EXIT_CODE) from error
    except BrokenPipeError as error:
        raise typer.Exit(BROKEN_PIPE_EXIT_CODE) from error


class OrderlyGroup(TyperGroup):
    """Typer's group of commands, but for how they end."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words before the command; without any, the help is shown as ever."""
        if not args:
            return super().parse_args(ctx, args)
        with _ending_in_order():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Read the words of the command, and run it."""
        with _ending_in_order():
            return super().invoke(ctx)


app = typer.Typer(
    name="offload-runtime",
    cls=OrderlyGroup,
    help="Run language models that do not fit the GPU, with exactly the tokens of plain decoding.",
    no_args_is_help=True,
    add_completion=False,
    # An unexpected exception is a defect to report: Python's own traceback, with nothing hidden or decorated.
    pretty_exceptions_enable=False,
)
for _command in (generate, chat, verify, plan, profile, demo):
    app.command()(with_options(_command))


def _interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    """What a finaliser raises is printed and forgotten; a Ctrl-C that lands in one is raised again behind it."""
    if unraisable.exc_type is KeyboardInterrupt:
        threading.Timer(0.05, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(unraisable)


def main() -> None:
    """Entry point of the installed command."""
    sys.unraisablehook = _interrupt_again
    app(prog_name="offload-runtime")


def _print_version(wanted: bool) -> None:
    if wanted:
        from offload_runtime import __version__

        typer.echo(f"offload-runtime {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options that belong to no command."""
