"""Sweeps that go together: their values, their options, who measures their rows, and the file of
these, written one by one, so that an interrupted sweep goes on where it stopped."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harness import Parser, add_report_options, write_report

from offload_runtime.errors import OptionError

BENCHMARK = "sweep"
# The first is what files say that were written when there were only the sweeps over a long context.
_BENCHMARKS = ("sweep_long_context", BENCHMARK)


@dataclass(frozen=True)
class Sweep:
    """One thing that is varied: what the values are, with their unit, and those that are measured where nothing else is
    asked for, in the order of the file."""

    axis: str
    values: tuple[str, ...]


class Point(Protocol):
    """One row to measure; what else it says is its family's own matter."""

    @property
    def label(self) -> str:
        """Its value as on the command line."""


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


Work = tuple[ResultFile, list[Any]]  # a sweep's file, and the points of its family whose rows are missing there


@dataclass(frozen=True)
class Family:
    """Sweeps over one kind of model, which one command can ask for together.

    Attributes:
        title: What is swept, for the help.
        sweeps: By name.
        add_options: Adds the options that any of the sweeps uses, with their defaults.
        unused: By the option's name in the namespace, the sweeps that would not look at it.
        settle: Refuses what makes no sense or would be ignored, and fills in what depends on other options. It gets
            the options and the names of those that were given.
        points: The rows of a sweep, in the order in which they are measured.
        measure: Measures all missing rows, each added to its file when it is there.
    """

    title: str
    sweeps: Mapping[str, Sweep]
    add_options: Callable[[argparse.ArgumentParser], None]
    unused: Mapping[str, frozenset[str]]
    settle: Callable[[argparse.Namespace, frozenset[str]], None]
    points: Callable[[str, argparse.Namespace], Sequence[Point]]
    measure: Callable[[argparse.Namespace, Sequence[Work]], None]

    def parser(self) -> Parser:
        """The options."""
        made = Parser(
            prog="sweep.py", usage="sweep.py SWEEP [SWEEP ...] [options]", allow_abbrev=False,
            description=f"{self.title}: {', '.join(self.sweeps)}",
        )  # fmt: skip
        made.add_argument("--device", default="cuda")
        self.add_options(made)
        made.add_argument("--values", type=lambda text: text.split(","), help="of the sweep, instead of all")
        made.add_argument("--plot", type=Path, help="pictures of the rows, as .png and as .svg; needs matplotlib")
        add_report_options(made)
        return made

    def parse(self, sweeps: Sequence[str], words: Sequence[str]) -> argparse.Namespace:
        """The options of a command.

        Raises:
            OptionError: One is unknown, would be ignored by all of the sweeps, or the family refuses it.
        """
        arguments = self.parser().parse_args(words)
        given = self._given(vars(arguments), words)
        for option in sorted(given):
            if set(sweeps) <= self.unused.get(option, frozenset()):
                users = [name for name in self.sweeps if name not in self.unused[option]]
                raise OptionError(
                    f"{flag(option)} would be ignored by {' and '.join(sweeps)}: drop it; it is used by "
                    f"{', '.join(users)}"
                )
        self.settle(arguments, given)
        return arguments

    def _given(self, options: Iterable[str], words: Sequence[str]) -> frozenset[str]:
        """Names of the options that stand among the words."""
        bare, absent = self.parser(), object()
        bare.set_defaults(**dict.fromkeys(options, absent))
        return frozenset(name for name, value in vars(bare.parse_args(words)).items() if value is not absent)


def family_of(sweeps: Sequence[str], families: Sequence[Family]) -> Family:
    """The family that all of these sweeps belong to.

    Raises:
        OptionError: None was named, one is unknown or named twice, or they do not go together.
    """
    by_name = {name: family for family in families for name in family.sweeps}
    if not sweeps:
        raise OptionError(f"name a sweep first, then its options: {', '.join(by_name)}; or draw")
    family = by_name.get(sweeps[0])
    for name in sweeps:
        if name not in by_name:
            raise OptionError(f"{name!r} is no sweep: take {', '.join(by_name)}; or draw")
        if sweeps.count(name) > 1:
            raise OptionError(f"{name} is asked for twice: name it once")
        if by_name[name] is not family:
            raise OptionError(f"{sweeps[0]} and {name} take different models: ask for them one after the other")
    assert family is not None
    return family


def flag(option: str) -> str:
    """The option as it is typed."""
    return "--" + option.replace("_", "-")


def refuse_idle(idle: Mapping[str, str], given: frozenset[str]) -> None:
    """Refuse options that other options leave without effect.

    Args:
        idle: By the option's name in the namespace, why, with the way out.
        given: Names of the options that were given.

    Raises:
        OptionError: There is one.
    """
    for option in sorted(given & set(idle)):
        raise OptionError(f"{flag(option)} would be ignored {idle[option]}")


def tokens(text: str) -> int:
    """`4K` is 4096.

    Raises:
        OptionError: It is no whole number of tokens.
    """
    scale = 1024 if text[-1:] in ("K", "k") else 1
    try:
        return scale * int(text[:-1] if scale > 1 else text)
    except ValueError:
        raise OptionError(f"{text!r} is not a number of tokens: write it like 4096 or 4K") from None


def print_cells(sweep: str, value: str, cells: Mapping[str, str], *, heading: bool) -> None:
    """A row of a table, at once, for whoever waits for it; below the columns' names where asked."""
    widths = {name: max(9, len(name) + 2) for name in cells}
    if heading:
        print(f"{sweep:>12}" + "".join(f"{name:>{width}}" for name, width in widths.items()))
    print(f"{value:>12}" + "".join(f"{cell:>{widths[name]}}" for name, cell in cells.items()), flush=True)
