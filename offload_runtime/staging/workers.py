"""Threads that copy within host memory, and how they end: told to, or because one of them failed."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import torch

from offload_runtime.errors import CopyError


def move_bytes(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copy `src`, uint8 [n] on the host, to the beginning of `dst`.

    Plain memmove lets go of the interpreter's lock, and beyond the caches stores without reading first.
    """
    ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.nbytes)


class Workers:
    """Threads that share one lock. Once they are over, whoever waits for one of its conditions has to look again."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may close a dropped runtime in any of these threads, at any moment.
        self.lock = threading.RLock()
        self._conditions: list[threading.Condition] = []
        self._threads: list[threading.Thread] = []
        self._failure: BaseException | None = None
        self._closed = False

    def condition(self) -> threading.Condition:
        """A condition over the lock, notified when the threads are over."""
        self._conditions.append(threading.Condition(self.lock))
        return self._conditions[-1]

    def start(self, work: Callable[[], None], name: str) -> None:
        """Begin a thread; it returns when the threads are over."""
        thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the threads end, for whatever reason."""
        return self._closed or self._failure is not None

    def raise_failure(self, what: str) -> None:
        """Raise `CopyError` if a thread has failed; `what` is the work it did and what of it cannot be trusted."""
        if isinstance(self._failure, CopyError):
            raise CopyError(str(self._failure)) from self._failure
        if self._failure is not None:
            raise CopyError(what.format(error=self._failure)) from self._failure
        assert not self._closed, "the queue is closed"

    def wait_for(self, condition: threading.Condition, ready: Callable[[], object], what: str) -> None:
        """Wait, with the lock held, until `ready` says yes; raise as `raise_failure` does where it never will."""
        self.wait_for_work(condition, ready)
        self.raise_failure(what)

    def wait_for_work(self, condition: threading.Condition, ready: Callable[[], object]) -> bool:
        """Wait, with the lock held, until `ready` says yes; False where the threads are over."""
        condition.wait_for(lambda: ready() or self.is_over)
        return not self.is_over

    def close(self, finish: Callable[[], None]) -> None:
        """End the threads, then do `finish`. In one of these threads itself that is left to another one."""
        with self.lock:
            self._closed = True
            self._notify()
        if threading.current_thread() in self._threads:
            # It may hold the lock, without which the others cannot end.
            threading.Thread(target=self._finish, args=(finish,), name="staging-end", daemon=True).start()
        else:
            self._finish(finish)

    def _finish(self, finish: Callable[[], None]) -> None:
        for thread in self._threads:
            thread.join()
        finish()

    def _notify(self) -> None:
        for condition in self._conditions:
            condition.notify_all()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self.lock:
                self._failure = self._failure or error
                self._notify()
