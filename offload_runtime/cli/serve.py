"""`offload-runtime serve`: OpenAI's API and others' over HTTP until Ctrl-C or SIGTERM, then an orderly end. One model
stays; several are loaded when they are asked for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING

from offload_runtime.cli import terminal
from offload_runtime.cli.generate import load_runtime
from offload_runtime.cli.hosts import has_layers_for_another
from offload_runtime.cli.options import ServeOptions, refuse_early
from offload_runtime.config import RuntimeConfig
from offload_runtime.errors import HostError, OffloadError
from offload_runtime.hosts import started_as_one_of_several
from offload_runtime.options import require
from offload_runtime.server import require_extra
from offload_runtime.sizes import counted

if TYPE_CHECKING:
    from offload_runtime.engine import Runtime
    from offload_runtime.plan.sizes import RunPlan
    from offload_runtime.server.app import Server
    from offload_runtime.server.turns import OfferedModel


class _Signals:
    """Takes Ctrl-C and SIGTERM for a wish, from the second on for an order, and while a model is loaded for what Ctrl-C
    is everywhere.

    An order ends the process as the signal would have: what it holds on cards and host is the system's again, and on
    disk are blocks that are whole.
    """

    def __init__(self) -> None:
        self.takes_wishes, self.is_asked_to_stop = threading.Event(), threading.Event()
        self._interrupt = signal.getsignal(signal.SIGINT)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked_to_stop.is_set():
            os._exit(128 + number)
        if self.takes_wishes.is_set():
            self.is_asked_to_stop.set()
        elif callable(self._interrupt):
            self._interrupt(signal.SIGINT, frame)
        else:
            raise KeyboardInterrupt


def serve(options: ServeOptions) -> None:
    """Answer requests of OpenAI's API, and with a page to chat with at /."""
    served, is_one = options.server, options.has_one_that_stays  # judged before anything is loaded
    is_alone = is_one or not started_as_one_of_several()
    require(is_alone, "several machines share one model that stays: name one --target, and drop --keep-alive")
    if is_one and has_layers_for_another(replace(options, config=options.configs[0])):
        return
    for config in options.configs:
        refuse_early(config)
    require_extra()
    from offload_runtime.engine.prefix_cache import prefix_files
    from offload_runtime.plan.sizes import check_experts
    from offload_runtime.server.app import Server

    for config in options.configs:
        check_experts(config)
    if served.sessions is not None:
        prefix_files(served.sessions).close()  # in use, or not to be written: found out before loading
    offered = {} if is_one else _offered(options)
    signals = _Signals()
    stopping = terminal.signal_handler(signals, signal.SIGINT, signal.SIGTERM)
    with stopping, Server(served, terminal.status_line, models=[*offered]) as server:
        if is_one:
            terminal.status_line(f"listening at {server.url}: /health says when the model is there")
            _serve_one(options, options.configs[0], server, signals)
        else:
            _serve_in_turns(options, offered, server, signals)
    terminal.status_line("stopped")


def _check_plan(options: ServeOptions) -> Callable[[RunPlan], None]:
    """Return what refuses a plan that the server's stores are of no use to."""
    from offload_runtime.engine.prefix_cache import require_stores

    served = options.server
    return lambda plan: require_stores(plan, served.prefix_cache_bytes or 0, served.sessions_bytes)


def _serve_one(options: ServeOptions, config: RuntimeConfig, server: Server, signals: _Signals) -> None:
    """Serve one model until the server is to stop; where machines share it, again once one that was lost is back."""
    lost: str | None = None
    while not signals.is_asked_to_stop.is_set():
        load = load_runtime(options, config, check_plan=_check_plan(options), ends_with_ranks=False)
        try:
            with load as runtime, server.serving(runtime, *options.names[0]):
                at_once = runtime.plan.target.batch
                terminal.status_line(f"ready: {counted(at_once, 'request')} at once, a page at {server.url}/")
                signals.takes_wishes.set()
                # not `wait`, within which a signal's `set` could wait for ever
                while not (signals.is_asked_to_stop.is_set() or (lost := runtime.lost_rank)):
                    time.sleep(0.2)
                signals.takes_wishes.clear()
                if lost is None:
                    _say_stopping(options)
        except HostError as error:
            if lost is None:
                raise
            lost = str(error)
        if lost is not None:
            terminal.status_line(f"{lost}; this one waits until the others are there again")
            server.suspend()


def _say_stopping(options: ServeOptions) -> None:
    grace = f"answers may go on for {options.server.grace_s:g} s"
    terminal.status_line(f"stopping: {grace}; once more ends them at once")


def _offered(options: ServeOptions) -> dict[OfferedModel, RuntimeConfig]:
    """Return what is known of the models that were named, which are fetched first where a hub has them, with what each
    is loaded with; of all that are here where none was, but for those that do not run.

    Raises:
        OptionError: None is here that runs.
        OffloadError: As of `open_checkpoint`, for one that was named.
    """
    if options.targets is not None:
        named = zip(options.names, options.configs, strict=True)
        return {_opened(names, config): config for names, config in named}
    from offload_runtime.weights.local import local_models

    found = {}
    for name, path in {model.name: model.path for model in reversed(local_models())}.items():
        config = replace(options.config, target=str(path))
        try:
            found[_opened([name], config)] = config
        except OffloadError as error:
            terminal.status_line(f"{name} is left out: {error}")
    none = "no model is here that runs: fetch one with `offload-runtime pull org/name:Q4_K_M`, or name a --target"
    require(bool(found), none)
    return dict(reversed(found.items()))


def _opened(names: Sequence[str], config: RuntimeConfig) -> OfferedModel:
    """Return what a model's files say of it. Raises as `open_checkpoint`."""
    from offload_runtime.server.turns import OfferedModel
    from offload_runtime.weights.checkpoint import sampling_defaults
    from offload_runtime.weights.sources import open_checkpoint

    source = open_checkpoint(config.target)
    model, layout = source.config(), source.layout(source.native_dtype)
    most = model.max_position_embeddings
    return OfferedModel.described(
        names, source.tokenizer(), architecture=model.architecture, stored_as=layout.main_kinds,
        weight_bytes=layout.total_bytes, defaults=sampling_defaults(source.generation_fields),
        context_tokens=most if config.context is None else min(config.context, most),
    )  # fmt: skip


def _serve_in_turns(
    options: ServeOptions, offered: dict[OfferedModel, RuntimeConfig], server: Server, signals: _Signals
) -> None:
    """Serve models one at a time, each loaded when it is asked for."""

    @contextmanager
    def load(model: OfferedModel) -> Iterator[Runtime]:
        signals.takes_wishes.clear()
        with load_runtime(options, offered[model], check_plan=_check_plan(options)) as runtime:
            signals.takes_wishes.set()
            yield runtime

    def should_stop() -> bool:
        signals.takes_wishes.set()
        return signals.is_asked_to_stop.is_set()

    names = ", ".join(model.names[0] for model in offered)
    try:
        terminal.status_line(f"ready: {names}, each loaded when it is asked for; a page at {server.url}/")
        server.serve_in_turns(load, should_stop)
        _say_stopping(options)
    except KeyboardInterrupt:  # while a model was loaded, of which nothing is left
        signals.is_asked_to_stop.set()
