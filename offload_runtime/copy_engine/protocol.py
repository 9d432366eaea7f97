"""What everything that goes over the link needs of a copy queue, wherever its copies go."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from offload_runtime.tracing import Label


class CopyEngine(Protocol):
    """An ordered copy queue beside the compute. Events are opaque and belong to the engine that made them."""

    @property
    def bytes_copied(self) -> int:
        """Bytes of all copies: finished ones on the CPU, on CUDA those handed to the stream."""

    def new_event(self) -> Any:
        """An event that counts as fired until it is first used."""

    def enqueue(
        self, dst: torch.Tensor, src: torch.Tensor, *, free: Any, ready: Any, source_free: Any | None = None,
        label: Label | None = None,
    ) -> None:  # fmt: skip
        """Queue a copy of `src` (host) to `dst` (device), after `free` has fired; fires `ready` when it is done.

        `src` must stay unchanged, and `dst` unread, until `ready` has fired. `source_free` fires with it, for whoever
        owns `src`. `label` says what it is, for a trace.
        """

    def compute_wait(self, ready: Any) -> None:
        """Make the compute side wait for the latest `enqueue` with this event."""

    def compute_record(self, free: Any) -> None:
        """Fire `free` once all compute issued so far has finished."""

    def is_done(self, ready: Any) -> bool:
        """Whether the latest `enqueue` with this event has finished; never waits."""

    def wait(self, ready: Any) -> None:
        """Hold the calling thread, which may be any, until the latest `enqueue` with this event has finished."""

    def copy_seconds(self) -> float:
        """Total time that finished copies have kept the link busy, in seconds."""

    def stall_seconds(self) -> float:
        """Total time that the compute side has waited for `ready` events, in seconds, as far as known by now."""

    def drain(self) -> None:
        """Wait until every queued copy has finished."""

    def close(self) -> None:
        """Finish outstanding work and release the queue."""
