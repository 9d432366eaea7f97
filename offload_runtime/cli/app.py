"""The commands of `offload-runtime`, and how each of them may end; their options are read into one dataclass each.

`offload-runtime serve` is here, too: OpenAI's API over HTTP until Ctrl-C or SIGTERM, then an orderly end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperGroup

from offload_runtime.cli import terminal
from offload_runtime.cli.chat import chat
from offload_runtime.cli.generate import demo, generate, load_runtime
from offload_runtime.cli.hosts import has_layers_for_another
from offload_runtime.cli.models import list_models, pull, rm
from offload_runtime.cli.options import ServeOptions, refuse_early, with_options
from offload_runtime.cli.plan import plan
from offload_runtime.cli.reports import profile, verify
from offload_runtime.errors import HostError, OffloadError, OptionError, StorageError
from offload_runtime.options import require
from offload_runtime.server import require_extra
from offload_runtime.sizes import counted

if TYPE_CHECKING:
    from offload_runtime.plan.sizes import RunPlan

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
        terminal.error_line(OptionError(f"{refusal.format_message().rstrip('.')}; {command} --help lists the options"))
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


def serve(options: ServeOptions) -> None:
    """Answer requests of OpenAI's API, and with a page to chat with at /."""
    if has_layers_for_another(options):
        return
    config, served = options.config, options.server  # judged before anything is loaded
    refuse_early(config)
    require_extra()
    from offload_runtime.engine.prefix_cache import prefix_files, require_stores
    from offload_runtime.plan.sizes import check_experts
    from offload_runtime.server.app import Server

    check_experts(config)
    if served.sessions is not None:
        prefix_files(served.sessions).close()  # in use, or not to be written: found out before loading
    is_ready, is_asked_to_stop = threading.Event(), threading.Event()
    interrupt = signal.getsignal(signal.SIGINT)

    def on_signal(number: int, frame: FrameType | None) -> None:
        """Take Ctrl-C and SIGTERM for a wish, from the second on for an order, and while a model is loaded for what
        Ctrl-C is everywhere.

        An order ends the process as the signal would have: what it holds on cards and host is the system's again, and
        on disk are blocks that are whole.
        """
        if is_asked_to_stop.is_set():
            os._exit(128 + number)
        if is_ready.is_set():
            is_asked_to_stop.set()
        elif callable(interrupt):
            interrupt(signal.SIGINT, frame)
        else:
            raise KeyboardInterrupt

    # The model's name is the last part of where it is, never the whole path.
    where = os.path.abspath(config.target) if os.path.exists(config.target) else config.target
    names = options.served_model_name or [Path(where).name.removesuffix(".gguf")]

    def check_plan(plan: RunPlan) -> None:
        require_stores(plan, served.prefix_cache_bytes or 0, served.sessions_bytes)

    stopping = terminal.signal_handler(on_signal, signal.SIGINT, signal.SIGTERM)
    with stopping, Server(served, terminal.status_line) as server:
        terminal.status_line(f"listening at {server.url}: /health says when the model is there")
        lost: str | None = None
        while not is_asked_to_stop.is_set():
            load = load_runtime(options, config, check_plan=check_plan, ends_with_ranks=False)
            try:
                with load as runtime, server.serving(runtime, *names):
                    at_once = runtime.plan.target.batch
                    terminal.status_line(f"ready: {counted(at_once, 'request')} at once, a page at {server.url}/")
                    is_ready.set()
                    # not `wait`, within which a signal's `set` could wait for ever
                    while not (is_asked_to_stop.is_set() or (lost := runtime.lost_rank)):
                        time.sleep(0.2)
                    is_ready.clear()
                    if lost is None:
                        grace = f"answers may go on for {served.grace_s:g} s"
                        terminal.status_line(f"stopping: {grace}; once more ends them at once")
            except HostError as error:
                if lost is None:
                    raise
                lost = str(error)
            if lost is not None:
                terminal.status_line(f"{lost}; this one waits until the others are there again")
                server.suspend()
    terminal.status_line("stopped")


app = typer.Typer(
    name="offload-runtime",
    cls=OrderlyGroup,
    help="Run language models that do not fit the GPU, with exactly the tokens of plain decoding.",
    # An unexpected exception is a defect to report: Python's own traceback, with nothing hidden or decorated.
    pretty_exceptions_enable=False,
)
for _command in (generate, chat, serve, verify, plan, profile, list_models, pull, rm, demo):
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
