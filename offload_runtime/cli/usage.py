"""What is said about a command line that typer refuses: one line, as about every other error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from offload_runtime.cli.terminal import ERROR_EXIT_CODE, error_line
from offload_runtime.errors import OptionError

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
