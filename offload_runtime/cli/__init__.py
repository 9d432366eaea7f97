"""The command line: arguments to configuration, and printing. The outermost stop of a token's journey.

Text of the model goes to stdout; progress, status and errors go to stderr. Nothing heavy (torch, transformers, the
engine) is imported before a command needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

# The last two are a condition's, while it is waited for.
_ENTERING_OR_LEAVING = {"__enter__", "__exit__", "_release_save", "_acquire_restore"}


def _interrupt_soon() -> None:
    # A signal of its own, for `_thread.interrupt_main` wakes nobody who waits for a lock or for a line of stdin.
    threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but not in the middle of an import: torch's loses one of 30, or is aborted by it.

    Nor where a context is entered or left: a lock that is not given back there stops the threads of a pool, and whoever
    waits for them: about one signal of a thousand during the streamed answers of a tiny model.
    """
    if frame is not None and frame.f_code.co_name in _ENTERING_OR_LEAVING:
        return _interrupt_soon()
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return _interrupt_soon()
        frame = frame.f_back
    raise KeyboardInterrupt


def _interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    """What a finaliser raises is printed and forgotten; a Ctrl-C that lands in one is raised again behind it."""
    if unraisable.exc_type is KeyboardInterrupt:
        _interrupt_soon()
    else:
        sys.__unraisablehook__(unraisable)


def main() -> None:
    """Entry point of the installed command."""
    sys.unraisablehook = _interrupt_again
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell has it ignored
        signal.signal(signal.SIGINT, interrupt)
    try:
        from offload_runtime.cli.app import app

        app(prog_name="offload-runtime")
    except KeyboardInterrupt:  # before the command began
        sys.exit(128 + signal.SIGINT)
