"""What a copy queue is, whatever makes the copies: `queue` has those of a CPU and of CUDA, `staging` one over these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from offload_runtime.errors import CopyError
from offload_runtime.trace import CopyLog, Label


class LinkPace(Protocol):
    """Makes copies as slow as a slower link would."""

    def __call__(self, nbytes: int | torch.Tensor, *, begins: bool = False) -> None:
        """Called where the copies run, in their order: with 0 when a copy begins, after whatever it waited for, and
        then with the bytes that have been copied since the last call, to go on when the slower link would be done with
        them. What only the device knows is an int64 tensor [1] there, for graphs to hold, and the same when the copy
        `begins`; on a GPU nothing waits where it is 0."""


# Pairs of what is copied to and from, of as many bytes each.
Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]


class CopyEngine(Protocol):
    """An ordered copy queue beside the compute. Events are opaque and belong to the engine that made them."""

    log: CopyLog | None  # of the trace that the queue reports to

    @property
    def bytes_copied(self) -> int:
        """Return the bytes of all copies: finished ones on the CPU, on CUDA those handed to the stream."""

    def new_event(self) -> Any:
        """Return an event that counts as fired until it is first used."""

    def enqueue(
        self, copies: Copies, *, free: Any, ready: Any, source_free: Any | None = None, label: Label | None = None
    ) -> None:
        """Queue copies to a device, or from it, after `free` has fired; fires `ready` when all are done.

        Sources must stay unchanged, and targets unread, until `ready` has fired. `source_free` fires with it, for
        whoever owns the sources. `label` says what they are, for a trace. On CUDA several take fewer of the stream's
        places than one by one; who enqueues is held up when it has none left.
        """

    def compute_wait(self, ready: Any) -> None:
        """Make the compute side wait for the latest `enqueue` with this event."""

    def compute_record(self, free: Any) -> None:
        """Fire `free` once all compute issued so far has finished."""

    def is_done(self, ready: Any) -> bool:
        """Return whether the latest `enqueue` with this event has finished; never waits."""

    def wait(self, ready: Any) -> None:
        """Hold the calling thread, which may be any, until the latest `enqueue` with this event has finished."""

    def copy_seconds(self) -> float:
        """Return the total time that finished copies have kept the link busy, in seconds."""

    def stall_seconds(self) -> float:
        """Return the total time that the compute side has waited for `ready` events, in seconds, as far as known by
        now; on the host, too."""

    def drain(self) -> None:
        """Wait until every queued copy has finished."""

    def close(self) -> None:
        """Finish outstanding work and release the queue."""


@dataclass(frozen=True)
class CopyQueues:
    """The queues of both ways: `h2d` to the device, `d2h` for what is written back to the host, and beside the first
    `demand` for experts (None: there is nothing like that). `pace` is of what kernels fetch."""

    h2d: CopyEngine
    d2h: CopyEngine | None = None
    demand: CopyEngine | None = None
    pace: LinkPace | None = None


def measure_link_gbps(engine: CopyEngine, dst: torch.Tensor, src: torch.Tensor, *, repeats: int = 8) -> float:
    """Return the peak bandwidth of back-to-back copies of `src` into `dst`, in GB/s; what is on the host is pinned on
    CUDA.

    Waits for the engine to drain; uses the same calls as streaming does, so streaming cannot beat it.
    """
    free, ready = engine.new_event(), engine.new_event()
    engine.enqueue([(dst, src)], free=free, ready=ready)  # the first touch of a buffer is slower
    engine.drain()
    before_s = engine.copy_seconds()
    for _ in range(repeats):
        engine.enqueue([(dst, src)], free=free, ready=ready)
    engine.drain()
    return repeats * src.nbytes / (engine.copy_seconds() - before_s) / 1e9


def copy_failed(what: str, error: object) -> CopyError:
    """Make the error of a copy, after which nothing that is streamed can be used."""
    advice = "what is streamed cannot be trusted any more; load the runtime again"
    return CopyError(f"{what} failed ({error}): {advice}")
