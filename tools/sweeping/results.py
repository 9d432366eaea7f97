"""A sweep's rows in a file, written one by one, so that an interrupted sweep goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import write_report

from offload_runtime.errors import OptionError

BENCHMARK = "sweep"
# The first is what files say that were written when there were only the sweeps over a long context.
_BENCHMARKS = ("sweep_long_context", BENCHMARK)


def read_report(path: Path) -> dict[str, Any]:
    """What a sweep has written.

    Raises:
        OptionError: The file is not there, or holds something else.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kind, _ = found["benchmark"], [row["value"] for row in found["rows"]]
        known = kind in _BENCHMARKS and isinstance(found["sweep"], str)
    except OSError as error:
        raise OptionError(f"{path} cannot be read ({error.strerror or error}): name another file") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise OptionError(
            f"{path} is no result of a sweep ({type(error).__name__}): name another file, or delete it"
        ) from error
    if not known:
        raise OptionError(f"{path} is no result of a sweep but of {kind!r}: name another file")
    return found


class ResultFile:
    """Rows by their value. Those of the file that were measured under the same conditions are there from the start.

    Args:
        path: Where rows are kept; None keeps them in memory.
        sweep: Name of the sweep.
        conditions: What must be equal for a row to count: settings, commit, what it was measured on.
        origin: What the file says besides.
        order: Values in the order of the file.
        ignored: Names of settings that rows of this sweep do not depend on.

    Raises:
        OptionError: The file holds something else than this sweep.
    """

    def __init__(
        self, path: Path | None, sweep: str, conditions: Mapping[str, Any], origin: Mapping[str, Any], *,
        order: Sequence[str], ignored: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._path = path
        self._ignored = frozenset(ignored)
        self._order = list(order)
        self.sweep = sweep
        self.report: dict[str, Any] = {"benchmark": BENCHMARK, "sweep": sweep, **origin, **conditions}
        self.rows: dict[str, dict[str, Any]] = {}
        self.num_outdated = 0  # rows of the file that were measured under other conditions
        self.num_added = 0
        if path is not None and path.exists():
            self._read(path, conditions)

    def _read(self, path: Path, conditions: Mapping[str, Any]) -> None:
        found = read_report(path)
        if found["sweep"] != self.sweep:
            raise OptionError(f"{path} holds the sweep of {found['sweep']}, not of {self.sweep}: name another file")
        if all(self._relevant(found.get(name)) == self._relevant(value) for name, value in conditions.items()):
            self.rows = {row["value"]: row for row in found["rows"]}
        else:
            self.num_outdated = len(found["rows"])

    def _relevant(self, condition: Any) -> Any:
        """What rows depend on: of settings not all."""
        if not isinstance(condition, dict):
            return condition
        return {name: value for name, value in condition.items() if name not in self._ignored}

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep a row, which says its `value`, and write the file.

        Raises:
            StorageError: It cannot be written.
        """
        self.rows[row["value"]] = dict(row)
        self.num_added += 1
        if self._path is None:
            return
        write_report(self.as_dict(), self._path, indent=1)

    def as_dict(self) -> dict[str, Any]:
        """The whole report, its rows in the sweep's order; values outside it come last."""
        known = {value: place for place, value in enumerate(self._order)}
        rows = sorted(self.rows.values(), key=lambda row: known.get(row["value"], len(known)))
        return {**self.report, "rows": rows}

    @property
    def identical(self) -> bool:
        """Whether the tokens of every row that has some besides plain decoding's are the same."""
        return all(row.get("identical_to_plain", True) for row in self.rows.values())
