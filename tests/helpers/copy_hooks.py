"""Hooks of a copy queue: what a test does where copies run, before each of them."""

from __future__ import annotations

from collections.abc import Callable

from offload_runtime.stream.copy_engine import LinkPace


def before_each_copy(hook: Callable[[], object] | None) -> LinkPace:
    """A link whose copies begin with the hook, if there is one: it delays them, holds them, or raises."""

    def pace(nbytes: int) -> None:
        if hook is not None and nbytes == 0:
            hook()

    return pace
