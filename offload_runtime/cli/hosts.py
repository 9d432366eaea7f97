"""A command that torchrun has started on several machines: all ranks but the first have layers for it.

Ctrl-C and SIGTERM at any of them end all.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from offload_runtime.cli import terminal
from offload_runtime.cli.options import LoadOptions
from offload_runtime.errors import OffloadError
from offload_runtime.hosts import started_as_one_of_several

if TYPE_CHECKING:
    from offload_runtime.engine import Runtime
    from offload_runtime.hosts.group import HostGroup


def has_layers_for_another(options: LoadOptions) -> bool:
    """Serve the first rank, where this is another one, until that ends; return whether it was. Raises as
    `serve_own_layers`."""
    if not started_as_one_of_several() or os.environ["RANK"] == "0":
        return False
    from offload_runtime.engine.load import serve_own_layers

    found, groups = list[BaseException](), list["HostGroup"]()

    def started(group: HostGroup) -> None:
        groups.append(group)
        group.watch(lambda what, all_end: _leave(f"error: {what}", terminal.ERROR_EXIT_CODE))

    def serve() -> None:
        try:
            if options.threads is not None:
                import torch

                torch.set_num_threads(options.threads)
            serve_own_layers(options.config, say=terminal.status_line, on_start=started)
        except BaseException as error:
            found.append(error)

    def on_signal(number: int, frame: FrameType | None) -> None:
        for group in groups:
            group.say_end(f"it was stopped by {signal.Signals(number).name}", by_wish=True)
        _leave("stopped", 128 + number)

    # Waiting for orders is waiting within torch, where no signal is heard.
    thread = threading.Thread(target=serve, name="layers", daemon=True)
    with terminal.signal_handler(on_signal, signal.SIGINT, signal.SIGTERM):
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
    if found and groups and isinstance(found[0], OffloadError):
        _leave(f"error: {found[0]}", terminal.ERROR_EXIT_CODE)
    if found:
        raise found[0]
    return True


def end_with_others(runtime: Runtime, *, if_lost: bool) -> None:
    """End this process by SIGTERM, where its runtime is the first of several ranks, when another one says that it was
    stopped, and `if_lost` when one has ended by an error."""
    if not started_as_one_of_several():
        return
    shares = runtime.engine.shares
    assert shares is not None, "else it was refused"

    def end(what: str, all_end: bool) -> None:
        if not (all_end or if_lost):
            return
        terminal.status_line(f"{what}; this rank ends, too")
        os.kill(os.getpid(), signal.SIGTERM)

    shares.group.watch(end)


def _leave(line: str, code: int) -> NoReturn:
    """End this process at once, as a thread of it may be waiting for another machine."""
    terminal.status_line(line)
    sys.stdout.flush()
    os._exit(code)
