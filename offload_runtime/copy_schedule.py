"""The cyclic schedule of copies to the device.

Items pass through rings of device slots in a fixed order, pass after pass without end: the first items of the next pass
are on their way while this pass still computes, while tokens are sampled, while a draft drafts. The link idles only
when every slot that the next item could take is full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offload_runtime.copy_engine import CopyEngine


@dataclass(frozen=True)
class Item:
    """One thing to bring to the device: `source` (uint8 [n], host) into a slot of the ring `lane`."""

    lane: str
    key: tuple[int, ...]
    source: torch.Tensor


@dataclass(frozen=True)
class PassPlan:
    """What one pass brings, in the order of its use, and which state of the KV cache that was made for."""

    items: Sequence[Item]
    snapshot: Any = None


@dataclass
class _Slot:
    """One device buffer: `ready` fires when its item has arrived, `free` after the item's last read."""

    buffer: torch.Tensor  # uint8 [slot_bytes], device
    ready: Any
    free: Any


@dataclass
class _Lane:
    """A ring of slots that items of one kind take in turn."""

    slots: list[_Slot]
    turn: int = 0  # items queued so far
    held: deque[_Slot] = field(default_factory=deque)  # in use, oldest first
    arriving: deque[_Slot] = field(default_factory=deque)  # queued and not yet in use

    @property
    def has_room(self) -> bool:
        """Whether another item may be queued: every earlier user of its slot has let go of it."""
        return len(self.held) + len(self.arriving) < len(self.slots)


class CopySchedule:
    """Queues the items of pass after pass as far ahead as there are slots.

    Args:
        engine: The copy queue.
        lanes: Device buffers of each ring: uint8 [slot_bytes] each.
        plan_pass: Called whenever the schedule has to know what another pass will bring.
    """

    def __init__(
        self, engine: CopyEngine, lanes: Mapping[str, Sequence[torch.Tensor]], plan_pass: Callable[[], PassPlan]
    ) -> None:
        self._engine = engine
        self._plan_pass = plan_pass
        self._lanes = {
            name: _Lane([_Slot(buffer, engine.new_event(), engine.new_event()) for buffer in buffers])
            for name, buffers in lanes.items()
        }
        self._plans: deque[PassPlan] = deque()  # of this pass, while it runs, and of those planned ahead
        self._left: deque[Item] = deque()  # of all those plans, what has not been taken yet
        self._num_queued = 0  # items at the front of `_left` that are queued for copying
        self._running_left = 0  # items of the running pass that have not been taken yet
        self._running = False
        for lane in self._lanes.values():
            for slot in lane.slots:  # the allocator may hand out memory that queued kernels still use
                engine.compute_record(slot.free)

    def begin_pass(self, is_valid: Callable[[Any], bool]) -> PassPlan:
        """Start a pass; what an interrupted one left behind is dropped.

        Args:
            is_valid: Whether a plan made earlier for this snapshot still describes the pass.
        """
        self._release_all()  # kernels that are already queued may still read what an interrupted pass held
        if self._running:
            self._plans.popleft()
            if self._running_left:
                self._drop()
        if self._plans and not is_valid(self._plans[0].snapshot):
            self._drop()
        if not self._plans:
            self._extend()
        self._running, self._running_left = True, len(self._plans[0].items)
        self.fill()
        return self._plans[0]

    def take(self, lane: str, key: tuple[int, ...]) -> torch.Tensor:
        """The slot of the pass's next item, which must be `key` of `lane`: uint8 [slot_bytes], to be read by compute
        issued from now on, until `release`."""
        item = self._left.popleft()
        assert (item.lane, item.key) == (lane, key), f"{lane} {key} is not next: {item.lane} {item.key} is"
        assert self._num_queued > 0, "every slot is held: the item cannot arrive"
        self._num_queued -= 1
        self._running_left -= 1
        ring = self._lanes[lane]
        slot = ring.arriving.popleft()
        ring.held.append(slot)
        self._engine.compute_wait(slot.ready)
        return slot.buffer

    def release(self, lane: str) -> None:
        """Let go of the slot of `lane` that was taken first."""
        ring = self._lanes[lane]
        if ring.held:
            self._engine.compute_record(ring.held.popleft().free)

    def fill(self) -> None:
        """Queue copies as far ahead as there are slots."""
        while True:
            if self._num_queued == len(self._left) and not self._extend():
                return
            item = self._left[self._num_queued]
            ring = self._lanes[item.lane]
            if not ring.has_room:
                return
            slot = ring.slots[ring.turn % len(ring.slots)]
            self._engine.enqueue(
                slot.buffer[: item.source.nbytes], item.source, free=slot.free, ready=slot.ready,
                label=(item.lane, item.key),
            )  # fmt: skip
            ring.turn += 1
            ring.arriving.append(slot)
            self._num_queued += 1

    def _extend(self) -> bool:
        """Plan another pass; whether it brings anything. One is planned ahead at the most: its snapshot ages."""
        if len(self._plans) > self._running:
            return False
        plan = self._plan_pass()
        self._plans.append(plan)
        self._left.extend(plan.items)
        return bool(plan.items)

    def _release_all(self) -> None:
        for name, ring in self._lanes.items():
            while ring.held:
                self.release(name)

    def _drop(self) -> None:
        """Forget what is planned. Copies run in order, so a slot's next copy cannot overtake one that was dropped, and
        its `free` event still guards reads."""
        self._plans.clear()
        self._left.clear()
        self._num_queued = 0
        for ring in self._lanes.values():
            ring.arriving.clear()
