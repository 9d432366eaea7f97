"""What every measurement shares: how long it may take, how it shows progress, how it says that it cannot be made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")
# Called with (stage, done steps, steps).
OnProgress = Callable[[str, int, int], None]


class CannotMeasureError(Exception):
    """A figure cannot be had on this machine; the text is the reason. Becomes part of the report, never an end."""


def counted(items: Sequence[Item], stage: str, on_progress: OnProgress) -> Iterator[Item]:
    """Go through the steps of a stage and report each as it begins and the last as it ends."""
    for done, item in enumerate(items):
        on_progress(stage, done, len(items))
        yield item
    on_progress(stage, len(items), len(items))


def best_time_s(action: Callable[[], object], *, budget_s: float, least: int = 3) -> float:
    """Shortest time of one `action`, in seconds: others on the machine only ever make it longer.

    One untimed call comes first; then calls follow until `budget_s` is spent, at least `least` of them.
    """
    action()
    times_s: list[float] = []
    started_s = time.perf_counter()
    while len(times_s) < least or time.perf_counter() - started_s < budget_s:
        before_s = time.perf_counter()
        action()
        times_s.append(time.perf_counter() - before_s)
    return min(times_s)
