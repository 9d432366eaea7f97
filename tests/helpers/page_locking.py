"""A system that locks pages only up to a point, for machines without CUDA and for limits that cannot be had."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest

from offload_runtime import memory
from offload_runtime.config import RuntimeConfig
from offload_runtime.engine import Runtime
from offload_runtime.memory import Registrar

REFUSED = 2  # CUDA's code for memory that cannot be had


class LimitedRegistrar:
    """Locks up to `most_bytes`, and refuses some calls whatever they ask for.

    Args:
        most_bytes: Locked at once.
        refuse_calls: Which to refuse, counted from 0.
        shrink_bytes: By so much the limit drops with the first refusal: others want memory as well.
        real: Who locks in truth; None only pretends.
    """

    def __init__(
        self, most_bytes: int, *, refuse_calls: Collection[int] = (), shrink_bytes: int = 0,
        real: Registrar | None = None,
    ) -> None:  # fmt: skip
        self.locked: dict[int, int] = {}
        self.most_locked_bytes = 0
        self.num_calls = 0
        self.locked_when_refused: list[int] = []
        self._most_bytes = most_bytes
        self._refuse_calls = refuse_calls
        self._shrink_bytes = shrink_bytes
        self._real = real

    @property
    def locked_bytes(self) -> int:
        """Locked now."""
        return sum(self.locked.values())

    def register(self, address: int, nbytes: int) -> int:
        self.num_calls += 1
        assert address % 4096 == 0 and nbytes % 4096 == 0 and nbytes > 0
        for start, size in self.locked.items():
            assert address + nbytes <= start or start + size <= address, "locked twice"
        if self.num_calls - 1 in self._refuse_calls or self.locked_bytes + nbytes > self._most_bytes:
            self.locked_when_refused.append(self.locked_bytes)
            self._most_bytes -= self._shrink_bytes if len(self.locked_when_refused) == 1 else 0
            return REFUSED
        if self._real is not None:
            assert self._real.register(address, nbytes) == 0
        self.locked[address] = nbytes
        self.most_locked_bytes = max(self.most_locked_bytes, self.locked_bytes)
        return 0

    def unregister(self, address: int) -> None:
        del self.locked[address]
        if self._real is not None:
            self._real.unregister(address)


def load_locked_by(
    registrar: LimitedRegistrar | None, target: Any, *,
    on_progress: Callable[[str, int, int], None] | None = None, **options: Any,
) -> Runtime:  # fmt: skip
    """A runtime for whose memory `registrar` is the system, without a draft and on the CPU unless asked otherwise.
    Options as of `RuntimeConfig`."""
    config = RuntimeConfig(target, **{"device": "cpu", "draft": "none", **options})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "registrar_for", lambda device: registrar)
        return Runtime.from_config(config, on_progress=on_progress)
