"""Reading traces in tests: spans by row, in seconds."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

# The file gives nanoseconds, rounded; CUDA events are told in half microseconds.
FILE_S, EVENT_S = 2e-9, 2e-6


@dataclass(frozen=True)
class Bar:
    """One span."""

    name: str
    start_s: float
    end_s: float
    args: dict[str, Any]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


def rows_of(path: Path) -> dict[str, list[Bar]]:
    """The spans of a trace as another program would read it: by the names of the rows, in the order of the file."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    rows: dict[str, list[Bar]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            bar = Bar(event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, event["args"])
            rows[names[event["tid"]]].append(bar)
    return rows


def total_s(bars: Sequence[Bar]) -> float:
    """How long they took together."""
    return sum(bar.seconds for bar in bars)


def total_bytes(bars: Sequence[Bar]) -> int:
    """How much they carried."""
    return sum(bar.args["bytes"] for bar in bars)


def assert_one_after_the_other(bars: Sequence[Bar], *, tolerance_s: float = FILE_S) -> None:
    """No two of them at the same time."""
    for before, after in pairwise(sorted(bars, key=lambda bar: bar.start_s)):
        assert after.start_s >= before.end_s - tolerance_s, f"{after} begins before {before} has ended"


def assert_layers_wait_for_their_copies(rows: dict[str, list[Bar]], *, tolerance_s: float = FILE_S) -> None:
    """Between two uses of a streamed layer a copy of it begins, and ends before the second."""
    for layer in {bar.args["layer"] for bar in rows["compute"] if bar.args["streamed"]}:
        copies = [bar for bar in rows["link"] if (bar.args["kind"], bar.args.get("layer")) == ("weights", layer)]
        used_s = 0.0
        for use in (bar for bar in rows["compute"] if bar.args["layer"] == layer):
            arrived = [c for c in copies if c.start_s >= used_s - tolerance_s and c.end_s <= use.start_s + tolerance_s]
            assert arrived, f"{use} begins before its weights are there"
            used_s = use.end_s
