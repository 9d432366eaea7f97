"""A copy queue whose copies overtake each other wherever nothing but the queue's own order says which comes first."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable
from typing import Any

import torch

from offload_runtime.copy import ThreadCopyEngine


class ReorderingCopyEngine(ThreadCopyEngine):
    """Makes the copy that is next by chance: any whose destination is free, but those to one place in their order.

    A link that several queues share does no more than that, and whoever reads waits for the copy that it needs.

    Args:
        chance: Decides.
        delay: Called before each choice, while more copies arrive.
    """

    def __init__(self, chance: random.Random, delay: Callable[[], None]) -> None:
        self.num_overtaken = 0  # copies that waited for a later one
        self._chance, self._delay = chance, delay
        self._waiting: list[tuple[Any, ...]] = []
        super().__init__()

    def _run(self) -> None:
        self._arriving, self._queue = self._queue, _Forwarded(self._queue, self._next)  # type: ignore[assignment]
        super()._run()

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
        dst, _, free, free_target, *_ = self._waiting[number]
        overlaps = any(_overlap(dst, other) for other, *_ in self._waiting[:number])
        return free.fired >= free_target and not overlaps


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


class _Forwarded:
    """What the worker takes copies of, and everybody else puts them into."""

    def __init__(self, arriving: queue.SimpleQueue[Any], take: Callable[[], Any]) -> None:
        self.put, self.get = arriving.put, take
