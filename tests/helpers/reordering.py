"""Copy queues for tests: one whose copies overtake each other wherever nothing but the queue's own order says which
comes first, and hooks before each copy."""

import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import torch

from offload_runtime.stream.copy_engine import Copies, LinkPace
from offload_runtime.stream.queue import ThreadCopyEngine


class ReorderingCopyEngine(ThreadCopyEngine):
    """Makes the copy that is next by chance: any whose destination is free, but those to one place in their order.

    A link that several queues share does no more than that, and whoever reads waits for the copy that it needs.

    Args:
        chance: Decides.
        delay: Called before each choice, while more copies arrive.
    """

    def __init__(self, chance: random.Random, delay: Callable[[], None]) -> None:
        super().__init__()
        self._worker = self._reordered = _Reordered(chance, delay)

    def enqueue(self, copies: Copies, *, ready: Any, **others: Any) -> None:
        for copy in copies:
            earlier = ready.copy
            super().enqueue([copy], ready=ready, **others)
            ready.copy = _both(earlier, ready.copy)  # the last of several copies need not be the last to be made

    @property
    def num_overtaken(self) -> int:
        """Copies that waited for a later one."""
        return self._reordered.num_overtaken

    def drain(self) -> None:
        for copy in self._reordered.submitted:
            self._wait(copy)


def _both(one: Future[None], other: Future[None]) -> Future[None]:
    """Done when both are."""
    both: Future[None] = Future()
    one.add_done_callback(lambda _: other.add_done_callback(lambda _: both.set_result(None)))
    return both


class _Reordered(Executor):
    """One thread that makes any copy that may be made."""

    def __init__(self, chance: random.Random, delay: Callable[[], None]) -> None:
        self.num_overtaken = 0
        self.submitted: list[Future[Any]] = []
        self._chance, self._delay = chance, delay
        self._arriving: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._waiting: list[tuple[Any, ...]] = []
        self._thread = threading.Thread(target=self._run, name="copy-engine", daemon=True)
        self._thread.start()

    def submit(self, copy: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        assert not kwargs
        made: Future[Any] = Future()
        self.submitted.append(made)
        self._arriving.put((made, copy, *args))
        return made

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        assert wait and not cancel_futures
        self._arriving.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._next()) is not None:
            made, copy, *args = item
            try:
                made.set_result(copy(*args))
            except BaseException as error:
                made.set_exception(error)

    def _next(self) -> tuple[Any, ...] | None:
        """One of those that may be made; None once the queue was closed and all are made."""
        while True:
            if not self._waiting:
                item = self._arriving.get()
                if item is None:
                    return None
                self._waiting.append(item)
            self._delay()
            while not self._arriving.empty():
                item = self._arriving.get()
                if item is None:
                    self._arriving.put(None)
                    break
                self._waiting.append(item)
            able = [number for number in range(len(self._waiting)) if self._may_be_next(number)]
            if able:
                chosen = self._chance.choice(able)
                self.num_overtaken += chosen
                return self._waiting.pop(chosen)
            time.sleep(1e-4)

    def _may_be_next(self, number: int) -> bool:
        _, _, dst, _, before, _ = self._waiting[number]
        overlaps = any(_overlap(dst, other) for _, _, other, *_ in self._waiting[:number])
        return bool(before.done()) and not overlaps


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


def before_each_copy(hook: Callable[[], object] | None) -> LinkPace:
    """A link whose copies begin with the hook, if there is one: it delays them, holds them, or raises."""

    def pace(nbytes: int | torch.Tensor, *, begins: bool = False) -> None:
        if hook is not None and nbytes == 0:
            hook()

    return pace
