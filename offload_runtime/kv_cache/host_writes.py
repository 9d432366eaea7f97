"""Blocks on their way from the device to host memory, and how many have arrived there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from offload_runtime.copy_engine import CopyEngine
from offload_runtime.errors import CopyError


@dataclass(frozen=True)
class _Write:
    """A write of blocks up to `end` of a sequence to the host; `ready` fires when it is done."""

    sequence: int
    end: int
    ready: Any


class HostWrites:
    """Keeps account of the writes of blocks that have become full.

    Args:
        engine: Copy queue of its own; it copies in order.
        batch: Sequences.
    """

    def __init__(self, engine: CopyEngine, batch: int) -> None:
        self.arrived = [0] * batch  # leading blocks of a sequence that are on the host, their writes finished
        self._engine = engine
        self._writes: deque[_Write] = deque()
        self._failure: CopyError | None = None

    def send(self, sequence: int, block: int, copies: Iterable[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
        """Queue the writes of a block, behind what computes it.

        Args:
            sequence: Whose block it is.
            block: Its index.
            copies: Every layer, its target (host) and source (device): uint8 [block_bytes] each.
        """
        read, written = self._engine.new_event(), self._engine.new_event()
        self._engine.compute_record(read)
        try:
            for layer, target, source in copies:
                label = "kv", (layer, sequence, block)
                self._engine.enqueue(target, source, free=read, ready=written, label=label)
        except CopyError as error:
            self._failure = error  # nobody waits for this block, so nobody else would be told
            raise
        self.expect(sequence, block + 1, written)

    def expect(self, sequence: int, end: int, ready: Any) -> None:
        """Blocks before `end` of a sequence are on their way; they are there when `ready` fires."""
        self._writes.append(_Write(sequence, end, ready))

    def collect(self) -> None:
        """Count what has arrived on the host; never waits. Raises `CopyError` when a write has failed."""
        if self._failure is not None:
            raise CopyError(str(self._failure)) from self._failure
        while self._writes and self._engine.is_done(self._writes[0].ready):
            write = self._writes.popleft()
            self.arrived[write.sequence] = max(self.arrived[write.sequence], write.end)

    def drain(self) -> None:
        """Wait for all of them."""
        self._engine.drain()
        self.collect()

    def settle(self, sequence: int, block: int) -> None:
        """Wait if blocks of a sequence from `block` on are on their way."""
        if any(write.sequence == sequence and write.end > block for write in self._writes):
            self.drain()

    def forget(self, sequence: int, block: int) -> None:
        """Blocks of a sequence from `block` on will be written anew."""
        self.arrived[sequence] = min(self.arrived[sequence], block)
