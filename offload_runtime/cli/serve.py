"""`offload-runtime serve`: OpenAI's API over HTTP until Ctrl-C or SIGTERM, then an orderly end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from offload_runtime.cli import terminal
from offload_runtime.cli.generate import load_runtime
from offload_runtime.cli.options import ServeOptions, refuse_early
from offload_runtime.server import require_extra


def serve(options: ServeOptions) -> None:
    """Answer requests of OpenAI's API, and with a page to chat with at /."""
    config, served = options.config, options.server  # judged before anything is loaded
    refuse_early(config)
    require_extra()
    from offload_runtime.engine.sessions import prefix_files
    from offload_runtime.server.run import Server

    if served.sessions is not None:
        prefix_files(served.sessions).close()  # in use, or not to be written: found out before loading
    with _stopping_signals() as (is_ready, is_asked_to_stop), Server(served, terminal.status_line) as server:
        terminal.status_line(f"listening at {server.url}: /health says when the model is there")
        with (
            load_runtime(options, config) as runtime,
            server.serving(runtime, *(options.served_model_name or [model_name(config.target)])),
        ):
            at_once = runtime.plan.target.batch
            terminal.status_line(f"ready: {at_once} request{'s' * (at_once > 1)} at once, a page at {server.url}/")
            is_ready.set()
            while not is_asked_to_stop.is_set():  # not `wait`, within which a signal's `set` could wait for ever
                time.sleep(0.2)
            terminal.status_line(f"stopping: answers may go on for {served.grace_s:g} s; once more ends them at once")
    terminal.status_line("stopped")


def model_name(target: str) -> str:
    """What a model is called in the API: the last part of where it is, without `.gguf`; never the whole path."""
    return Path(os.path.abspath(target) if os.path.exists(target) else target).name.removesuffix(".gguf")


@contextmanager
def _stopping_signals() -> Iterator[tuple[threading.Event, threading.Event]]:
    """Ctrl-C and SIGTERM as a wish, from the second on as an order.

    While the model is loaded either interrupts that as Ctrl-C does everywhere. An order ends the process as the signal
    would have: what it holds on cards and host is the system's again, and on disk are blocks that are whole.

    Yields:
        What the caller sets once it waits for the wish, and what is set by the wish.
    """
    is_ready, is_asked_to_stop = threading.Event(), threading.Event()
    interrupt = signal.getsignal(signal.SIGINT)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if is_asked_to_stop.is_set():
            os._exit(128 + number)
        if is_ready.is_set():
            is_asked_to_stop.set()
        elif callable(interrupt):
            interrupt(signal.SIGINT, frame)
        else:
            raise KeyboardInterrupt

    with terminal.signal_handler(on_signal, signal.SIGINT, signal.SIGTERM):
        yield is_ready, is_asked_to_stop
