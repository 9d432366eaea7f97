"""A system that locks pages only up to a point, for machines without CUDA and for limits that cannot be had."""

from collections.abc import Callable
from typing import Any

import pytest

from offload_runtime.config import RuntimeConfig
from offload_runtime.engine import Runtime
from offload_runtime.stream import arena
from offload_runtime.stream.arena import Registrar

REFUSED = 2  # CUDA's code for memory that cannot be had


class LimitedRegistrar:
    """Locks up to `most_bytes` at once; `real` locks in truth, and None only pretends."""

    def __init__(self, most_bytes: int, *, real: Registrar | None = None) -> None:
        self.locked: dict[int, int] = {}
        self.most_locked_bytes = 0
        self._most_bytes, self._real = most_bytes, real

    @property
    def locked_bytes(self) -> int:
        """Locked now."""
        return sum(self.locked.values())

    def register(self, address: int, nbytes: int) -> int:
        assert address % 4096 == 0 and nbytes % 4096 == 0 and nbytes > 0
        for start, size in self.locked.items():
            assert address + nbytes <= start or start + size <= address, "locked twice"
        if self.locked_bytes + nbytes > self._most_bytes:
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
        patch.setattr(arena, "registrar_for", lambda device: registrar)
        return Runtime.from_config(config, on_progress=on_progress)
