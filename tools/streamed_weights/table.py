"""Rows as lines of a table, for whoever waits for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WINDOW = (("s/pass", 9), ("bound", 9), ("by", 8), ("share", 7), ("link GB/s", 10), ("tok/s", 10))
_RESIDENT = (
    ("layers", 8), ("s/token", 9), ("bound", 9), ("by", 8), ("share", 7), ("tok/pass", 9), ("tok/s", 8), ("bound", 8),
    ("identical", 10),
)  # fmt: skip


def print_heading(sweep: str) -> None:
    """The columns' names."""
    print(f"{sweep:>10}" + "".join(f"{name:>{width}}" for name, width in _columns(sweep)))


def print_row(sweep: str, row: Mapping[str, Any]) -> None:
    """Print a row at once."""
    cells = zip(_window_cells(row) if sweep == "window" else _resident_cells(row), _columns(sweep), strict=True)
    print(f"{row['value']:>10}" + "".join(f"{cell:>{width}}" for cell, (_, width) in cells), flush=True)


def _columns(sweep: str) -> tuple[tuple[str, int], ...]:
    return _WINDOW if sweep == "window" else _RESIDENT


def _window_cells(row: Mapping[str, Any]) -> list[str]:
    return [
        f"{row['pass_s']['median']:.4f}", f"{row['bound_s']:.4f}", row["bound_by"], f"{row['share_of_bound']:.1%}",
        f"{row['link_gbps']:.1f}", f"{row['tok_per_s']:.1f}",
    ]  # fmt: skip


def _resident_cells(row: Mapping[str, Any]) -> list[str]:
    drafted = row.get("drafted")
    speculated = ["-"] * 4
    if drafted is not None:
        speculated = [
            f"{drafted['tokens_per_pass']:.1f}", f"{drafted['tok_per_s']:.1f}", f"{drafted['bound_tok_per_s']:.1f}",
            str(row["identical_to_plain"]),
        ]  # fmt: skip
    return [
        f"{row['resident_layers']}/{row['num_layers']}", f"{row['plain_s_per_token']:.4f}", f"{row['bound_s']:.4f}",
        row["bound_by"], f"{row['share_of_bound']:.1%}", *speculated,
    ]  # fmt: skip
