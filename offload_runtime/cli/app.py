"""The commands of `offload-runtime`, and how each of them may end; their options are read into one dataclass each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from offload_runtime.cli import terminal
from offload_runtime.cli.bench import bench
from offload_runtime.cli.chat import chat
from offload_runtime.cli.generate import demo, generate
from offload_runtime.cli.models import list_models, pull, rm
from offload_runtime.cli.options import with_options
from offload_runtime.cli.plan import plan
from offload_runtime.cli.reports import profile, verify
from offload_runtime.cli.serve import serve
from offload_runtime.errors import OffloadError, OptionError, StorageError
from offload_runtime.options import require

# What a shell reports for a program that SIGPIPE ended, as most of those in front of `| head` are.
BROKEN_PIPE_EXIT_CODE = 141
# The base of all errors about options. Newer versions of typer carry click within and export no more than this child.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def _exit_code(words: Sequence[str], run: Callable[[], int | None]) -> int:
    """Run a command and return how it ends: typed errors, what typer says in a box and a full disk are `error: …` and
    2, Ctrl-C is 130, and a closed pipe 141 without a word.

    Every other exception is a defect and passes through with its traceback.
    """
    try:
        if not sys.stdout.writable():  # it was closed from the beginning: no work for nobody
            raise terminal.OutputError("it is closed")
        require(not any("\0" in word for word in words), "a word of the command line holds a NUL character: drop it")
        code = run() or 0
        sys.stdout.flush()
        return code
    except OffloadError as error:
        terminal.error_line(error)
    except _UsageError as error:
        refusal: Any = error  # of click's, for which there is no name here
        command = "offload-runtime" if refusal.ctx is None else refusal.ctx.command_path
        said = refusal.format_message().rstrip(".")
        if "extra argument" in said and any("--target" in one.opts for one in refusal.ctx.command.params):
            said += ", and a model is named with --target"
        terminal.error_line(OptionError(f"{said}; {command} --help lists the options"))
    except KeyboardInterrupt:
        return terminal.INTERRUPTED_EXIT_CODE
    except terminal.OutputError as error:
        if isinstance(error.__cause__, BrokenPipeError):
            return BROKEN_PIPE_EXIT_CODE
        terminal.error_line(StorageError(f"stdout cannot be written ({error}): free some space or send it elsewhere"))
    return terminal.ERROR_EXIT_CODE


class OrderlyGroup(TyperGroup):
    """Typer's group of commands, but for how they end."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words before the command."""
        helps = [command.get_help_option(ctx) for command in (self, *self.commands.values())]
        for option in (*self.params, *helps):
            cast(Any, option).metavar = ""  # else the help says that --help is a <bool>
        return super().parse_args(ctx, args)

    def main(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> Any:
        """Read a command line, by default this process's, and run it; without any words the help is shown."""
        words = list(sys.argv[1:] if args is None else args) or ["--help"]
        options["standalone_mode"] = False
        with terminal.standard_streams():
            code = _exit_code(words, lambda: super(OrderlyGroup, self).main(words, *others, **options))
        sys.exit(code)


app = typer.Typer(
    name="offload-runtime",
    cls=OrderlyGroup,
    help="Run language models that do not fit the GPU, with exactly the tokens of plain decoding.",
    # An unexpected exception is a defect to report: Python's own traceback, with nothing hidden or decorated.
    pretty_exceptions_enable=False,
)
for _command in (generate, chat, serve, verify, bench, plan, profile, list_models, pull, rm, demo):
    app.command(_command.__name__.partition("_")[0])(with_options(_command))


def _print_version(wanted: bool) -> None:
    if wanted:
        from offload_runtime import __version__

        terminal.write_text(f"offload-runtime {__version__}\n")
        raise typer.Exit


_VERSION_HELP = "Print the version and leave."
_VERSION = typer.Option("--version", callback=_print_version, is_eager=True, metavar="", help=_VERSION_HELP)


@app.callback()
def _common(version: Annotated[bool, _VERSION] = False) -> None:
    """Options that belong to no command."""
