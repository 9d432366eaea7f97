"""Importing torch and transformers in less time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Keep the garbage collector from looking, time and again, through the half million objects that such imports make
    and that all stay: 0.4 of the 5.1 seconds that a command takes to start on two slow cores."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
