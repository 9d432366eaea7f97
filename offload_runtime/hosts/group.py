"""The processes that share a model, one a machine: `torchrun` starts them and says who is who.

What they tell each other once, when they begin and when one of them ends, goes through the store of torch.distributed;
rows go through `hosts.link`. The store outlives a group where torchrun has it: the first rank may then begin another
group with ranks that were started again, each of which says in the store that it is there.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from offload_runtime.errors import HostError
from offload_runtime.hosts import started_as_one_of_several
from offload_runtime.options import require

_INTERFACE = "GLOO_SOCKET_IFNAME"
# Ranks begin when torchrun has found all machines; what they do before they tell of themselves is reading headers.
_LEAST_START_S = 120.0
_LOOK_AGAIN_S = 0.3


def num_ranks(interface: str | None) -> int:
    """Return how many processes share the model: 1 where torchrun has not started this one as one of several.

    Raises:
        OptionError: An interface is named and there is nobody to reach over it, or none is and there is somebody.
    """
    if not started_as_one_of_several():
        alone = "does nothing for one machine: start the command by torchrun on each of several, or drop it"
        require(interface is None, f"--interface {interface} {alone}")
        return 1
    named = interface or os.environ.get(_INTERFACE)
    require(
        named is not None,
        "torchrun has started several ranks, and none may listen on all interfaces: name one that they reach each other"
        f" over with --interface or {_INTERFACE}; unset RANK and WORLD_SIZE for a model that is here alone",
    )
    there = [name for _, name in socket.if_nameindex()]
    require(named in there, f"--interface {named} is not an interface of this machine: it has {', '.join(there)}")
    return int(os.environ["WORLD_SIZE"])


def own_rank() -> int:
    """Return the number of this process among them."""
    return int(os.environ["RANK"])


def own_card(device: str) -> str:
    """Return the one card of this rank, of a configuration's `device`. Raises `OptionError` for several."""
    require("," not in device, f"--device {device}: a rank has one card: start a rank for each, each with its own")
    if device != "auto":
        return device
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


class HostGroup:
    """The ranks of a run, connected.

    Args:
        interface: Whose address each listens on.
        timeout_s: After so many seconds a rank that is not heard from counts as gone.

    Attributes:
        rank: Of this process; the first one, 0, has the ends of the model.
        size: How many there are.
        timeout_s: As given.
        lost: What another rank has ended by, once that is known: nothing is asked of any any more.

    Raises:
        HostError: The others cannot be reached.
    """

    def __init__(self, interface: str | None, timeout_s: float) -> None:
        if interface is not None:
            os.environ[_INTERFACE] = interface
        self.lost: str | None = None
        self.timeout_s, self._names = timeout_s, dict[int, str]()
        start_s = max(timeout_s, _LEAST_START_S)
        try:
            store, self.rank, self.size = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=start_s))))
            while isinstance(store, dist.PrefixStore):  # torchrun's, of how often it has started its own ranks again
                store = store.underlying_store
            self._starts = dist.PrefixStore("offload_runtime", store)
            number = self._begin(start_s) if self.rank == 0 else self._join(start_s)
            self._store = dist.PrefixStore(f"offload_runtime/{number}", store)
            dist.init_process_group(
                "gloo", store=dist.PrefixStore(f"gloo/{number}", store), rank=self.rank, world_size=self.size,
                timeout=timedelta(seconds=start_s),
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            raise HostError(f"the ranks cannot reach each other over {os.environ[_INTERFACE]} ({error})") from error
        self._is_over, self._watcher = threading.Event(), threading.Thread()

    def _begin(self, start_s: float) -> int:
        """Wait until every other rank was started since the last group began, for ever where there was one; return this
        one's number. Raises `HostError`."""
        number, last_s = self._starts.add("groups", 1), time.monotonic() + start_s
        for rank in range(1, self.size):
            while not self._was_started(rank):
                late = number == 1 and time.monotonic() > last_s
                if late:
                    raise HostError(f"{self.name(rank)} has said nothing for {start_s:g} s")
                time.sleep(_LOOK_AGAIN_S / 3)
        for rank in range(1, self.size):
            start = self._starts.add(f"starts/{rank}", 0)
            self._starts.add(f"used/{rank}", start - self._starts.add(f"used/{rank}", 0))
            self._starts.set(f"group/{rank}/{start}", str(number))
        return number

    def _join(self, start_s: float) -> int:
        """Say that this rank was started, and return the number of the group that the first one takes it into. Raises
        `HostError`."""
        start, last_s = self._starts.add(f"starts/{self.rank}", 1), time.monotonic() + start_s
        while not self._starts.check([key := f"group/{self.rank}/{start}"]):
            if time.monotonic() > last_s:
                raise HostError(f"rank 0 has not taken this one into a group for {start_s:g} s")
            time.sleep(_LOOK_AGAIN_S / 3)
        return int(self._starts.get(key))

    def _was_started(self, rank: int) -> bool:
        """Return whether a rank was started after what this group has of it, or nothing yet."""
        return self._starts.add(f"starts/{rank}", 0) > self._starts.add(f"used/{rank}", 0)

    def exchange(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Tell all ranks of this one; return what each says of itself. Raises `HostError` where one does not."""
        own = {**facts, "host": platform.node()}
        self._store.set(f"facts/{self.rank}", json.dumps(own))
        found = list[dict[str, Any]]()
        for rank in range(self.size):
            found.append(json.loads(self._wait_for(f"facts/{rank}", rank)))
            self._names[rank] = f"rank {rank} ({found[-1]['host']})"
        self._store.set(f"met/{self.rank}", "")
        for rank in range(self.size if self.rank == 0 else 0):  # who has the store leaves last
            self._wait_for(f"met/{rank}", rank, or_its_end=True)
        return found

    def _wait_for(self, key: str, rank: int, *, or_its_end: bool = False) -> bytes:
        """Return what a rank has set, or raise what it has ended by; nothing where its end will do."""
        last_s = time.monotonic() + max(self.timeout_s, _LEAST_START_S)
        while time.monotonic() < last_s:
            if self._store.check([key]):
                return bytes(self._store.get(key))
            if (reason := self.why_ended(rank)) is not None:
                if or_its_end:
                    return b""
                raise HostError(f"{self.name(rank)} has ended: {reason}")
            time.sleep(_LOOK_AGAIN_S / 3)
        raise HostError(f"{self.name(rank)} has said nothing for {max(self.timeout_s, _LEAST_START_S):g} s")

    def name(self, rank: int) -> str:
        """Return what a rank is called."""
        return self._names.get(rank, f"rank {rank}")

    def say_end(self, reason: str, *, by_wish: bool = False) -> None:
        """Tell all others that this rank ends, and why: by the wish of whoever started it all of them do."""
        self._is_over.set()
        try:
            if by_wish:
                self._store.set(f"stopped/{self.rank}", reason)
            self._store.set(f"ended/{self.rank}", reason)
        except (RuntimeError, ValueError):  # whoever has the store is gone, which they see as well
            return

    def why_ended(self, rank: int) -> str | None:
        """Return what a rank has said when it ended, and to the first one that it was started again; None where it has
        not ended."""
        try:
            if self._store.check([key := f"ended/{rank}"]):
                return bytes(self._store.get(key)).decode()
            return "it was started again" if self.rank == 0 and self._was_started(rank) else None
        except (RuntimeError, ValueError):
            return "whoever started it has ended"

    def watch(self, on_end: Callable[[str, bool], None]) -> None:
        """Call this from a thread of its own, once, when another rank has said that it ends, or was started again: with
        who and why, and whether all are to end."""

        def look() -> None:
            while not self._is_over.wait(_LOOK_AGAIN_S):
                for rank in range(self.size):
                    reason = None if rank == self.rank else self.why_ended(rank)
                    if reason is not None and not self._is_over.is_set():
                        self._is_over.set()
                        self.lost = self.lost or f"{self.name(rank)} has ended: {reason}"
                        on_end(f"{self.name(rank)} has ended: {reason}", self._is_stopped(rank))
                        return

        self._watcher = threading.Thread(target=look, name="other ranks", daemon=True)
        self._watcher.start()

    def _is_stopped(self, rank: int) -> bool:
        try:
            return bool(self._store.check([f"stopped/{rank}"]))
        except (RuntimeError, ValueError):
            return True

    def close(self) -> None:
        """Leave the others. Nothing may wait for them any more."""
        self._is_over.set()
        if self._watcher.is_alive():  # Python ends threads that are within torch by a crash
            self._watcher.join()
        if dist.is_initialized():
            dist.destroy_process_group()
