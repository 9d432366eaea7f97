"""What a copy queue tells a recorder, and which queues do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from offload_runtime.tracing.recorder import HOST, STALLS, OnDone, TraceRecorder

# What is copied: `weights` of (layer,), or `kv` of (layer, sequence, first block).
Label = tuple[str, tuple[int, ...]]
_KEYS = ("layer", "sequence", "block")


@dataclass(frozen=True)
class CopyLog:
    """Where the spans of one copy queue go: its copies into `row`, and what waits for them into that of stalls."""

    recorder: TraceRecorder
    row: str

    def copied(self, label: Label | None, nbytes: int, start_s: float, end_s: float) -> None:
        """A copy that the host made itself, by `time.perf_counter`."""
        self.recorder.add_host(self.row, _name(label), start_s, end_s, _args(label, nbytes))

    def on_copied(self, label: Label | None, nbytes: int) -> OnDone:
        """To be called with the events around a copy that is about to be queued, once both are past."""
        return self.recorder.on_done(self.row, _name(label), _args(label, nbytes))

    def stalled(self, start_s: float, end_s: float) -> None:
        """The computing thread waited for a copy."""
        self.recorder.add_host(STALLS, f"wait for the {self.row}", start_s, end_s, {})

    def on_stalled(self) -> OnDone:
        """The same for events around a wait that is about to be queued."""
        return self.recorder.on_done(STALLS, f"wait for the {self.row}", {})

    def staged(self, start_s: float, end_s: float) -> None:
        """The host waited for pageable memory to be staged."""
        self.recorder.add_host(HOST, f"staging for the {self.row}", start_s, end_s, {})


def _name(label: Label | None) -> str:
    if label is None:
        return "measurement"
    kind, key = label
    return f"{kind} of layer {key[0]}"


def _args(label: Label | None, nbytes: int) -> dict[str, Any]:
    if label is None:
        return {"kind": "measurement", "bytes": nbytes}
    kind, key = label
    return {"kind": kind, **dict(zip(_KEYS, key, strict=False)), "bytes": nbytes}


_log: ContextVar[CopyLog | None] = ContextVar("copy log", default=None)


@contextmanager
def traced_copies(recorder: TraceRecorder | None, row: str) -> Iterator[None]:
    """Copy engines that are made inside report to `recorder`; None: to nobody.

    A scope and not an argument, for the reason that `link_pace.paced_link` is one.
    """
    token = _log.set(None if recorder is None else CopyLog(recorder, row))
    try:
        yield
    finally:
        _log.reset(token)


def current_copy_log() -> CopyLog | None:
    """Where a copy queue that is made now reports to."""
    return _log.get()
