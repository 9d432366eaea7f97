"""What finalisers raise Python prints and forgets, and libraries what is raised while they are imported: a Ctrl-C that
lands there interrupts the command all the same. One that lands where a lock is taken leaves it to others."""

import gc
import importlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload_runtime.cli import main


@pytest.fixture(autouse=True)
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`offload-runtime --version` has run in this process, which took Ctrl-C as Python does by itself."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # put back behind the test
    monkeypatch.setattr(sys, "argv", ["offload-runtime", "--version"])
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(SystemExit):
        main()
    yield
    signal.signal(signal.SIGINT, previous)


def rest_of_the_program() -> None:
    """The main flow waits for others, which ends in twenty seconds unless it is interrupted."""
    end, of_others = time.monotonic() + 20, threading.Lock()
    of_others.acquire()
    try:
        of_others.acquire(timeout=20)
    finally:
        assert time.monotonic() < end, "it has waited until the end"


class Interrupted:
    """Somebody presses Ctrl-C when it goes."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("place", ["a __del__", "a generator"])
def test_in_anybodys(place: str) -> None:
    def suspended() -> Iterator[None]:
        try:
            yield
        finally:
            signal.raise_signal(signal.SIGINT)

    dropped = suspended() if place == "a generator" else Interrupted()
    if isinstance(dropped, Iterator):
        next(dropped)
    with pytest.raises(KeyboardInterrupt):
        del dropped
        gc.collect()
        rest_of_the_program()


def test_in_an_import_that_forgets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    LOST = True\n"
    (tmp_path / "careless_library.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        library = importlib.import_module("careless_library")
        rest_of_the_program()
    assert not hasattr(library, "LOST")


class Locked:
    """A lock's context, as Python's own conditions and pools have them: Ctrl-C is pressed while it is entered."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        self.lock.acquire()
        signal.raise_signal(signal.SIGINT)

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_where_a_context_is_entered() -> None:
    locked = Locked()
    with pytest.raises(KeyboardInterrupt), locked:
        rest_of_the_program()
    assert not locked.lock.locked()


def test_a_ctrl_c_that_the_shell_has_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(SystemExit):
        main()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
