"""Rows as lines of a table, for whoever waits for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SPEED = (
    ("plain ms", 9), ("ms/token", 9), ("times", 6), ("bound", 6), ("tok/pass", 9), ("accepted", 9),
    ("draft's/step", 13), ("identical", 10),
)  # fmt: skip
_NEEDLE = (
    ("found", 6), ("log p", 8), ("retrieval", 10), ("topk", 6), ("streaming", 10), ("identical", 10)
)  # fmt: skip


def print_row(sweep: str, row: Mapping[str, Any], *, heading: bool) -> None:
    """Print a row at once, below the columns' names where asked.

    Times are of plain decoding and of a token; `accepted` is the share of what the target was proposed; of a needle
    the log-probability of its number and each policy's agreement with the full cache.
    """
    columns = _NEEDLE if sweep == "needle" else _SPEED
    if heading:
        print(f"{sweep:>12}" + "".join(f"{name:>{width}}" for name, width in columns))
    cells = _needle_cells(row) if sweep == "needle" else _speed_cells(row)
    line = "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, columns, strict=True))
    print(f"{row['value']:>12}{line}", flush=True)


def _speed_cells(row: Mapping[str, Any]) -> list[str]:
    return [
        f"{1e3 * row['plain_s_per_token']:.2f}", f"{1e3 * row['s_per_token']:.2f}", f"{row['times_plain']:.2f}",
        f"{row['bound_times_plain']:.2f}", f"{row['tokens_per_pass']:.2f}", _share(row["acceptance"]),
        _share(row["draft_accepted_per_step"]), str(row["identical_to_plain"]),
    ]  # fmt: skip


def _needle_cells(row: Mapping[str, Any]) -> list[str]:
    policies = row["policies"]
    shares = [_share(policies[name]["agreement"]) for name in ("retrieval", "topk", "streaming")]
    return [str(row["found"]), f"{row['number_log_probability']:.2f}", *shares, str(row["identical_to_plain"])]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
