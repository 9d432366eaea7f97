"""A trace as a file that chrome://tracing and ui.perfetto.dev open: one process, a row for each kind of work.

The format is the JSON object of Chrome's "Trace Event Format": complete events (`ph` X) with `ts` and `dur` in
microseconds.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offload_runtime.config import write_atomically, writing
from offload_runtime.errors import StorageError
from offload_runtime.trace.recorder import ROWS, Trace

TRACE_VERSION = 1
_PROCESS = 1
_WAY_OUT = "name another place with --trace"


def require_writable(path: Path) -> None:
    """Refuse a place that a trace could not be written to, before there is one; an older file there stays.

    Raises:
        StorageError: It is a directory, or nothing can be written beside it.
    """
    if path.is_dir():
        raise StorageError(f"--trace {path} is a directory: name a file in it, such as {path / 'trace.json'}")
    with writing(path, _WAY_OUT):
        tempfile.TemporaryFile(dir=path.parent).close()


def write_trace(path: Path, trace: Trace, about: Mapping[str, Any]) -> None:
    """Write a trace as a whole or not at all; a file that was there is replaced.

    Args:
        path: Where to.
        trace: What was recorded.
        about: What else to say in `otherData`.

    Raises:
        StorageError: It cannot be written; an older file is then still there.
    """
    other = {"offload_runtime_trace": TRACE_VERSION, "dropped_spans": trace.dropped, **about}
    events = ",\n".join(json.dumps(event) for event in _events(trace))
    text = f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(other)}, "traceEvents": [\n{events}\n]}}\n'
    write_atomically(path, text, way_out=_WAY_OUT)


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": _PROCESS, "args": {"name": "offload_runtime"}}
    threads = {row: number for number, row in enumerate(ROWS, start=1)}
    for row, number in threads.items():
        thread = {"ph": "M", "pid": _PROCESS, "tid": number}
        yield {**thread, "name": "thread_name", "args": {"name": row}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": number}}
    for span in trace.spans:
        yield {
            "ph": "X", "name": span.name, "cat": span.row, "pid": _PROCESS, "tid": threads[span.row],
            "ts": _microseconds(span.start_s - trace.started_s), "dur": _microseconds(span.end_s - span.start_s),
            "args": span.args,
        }  # fmt: skip


def _microseconds(seconds: float) -> float:
    """To the nanosecond, which is finer than any of the clocks."""
    return round(1e6 * seconds, 3)
