"""What the front door needs of sweeps that go together: their values, their options, and who measures their rows."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sweeping.results import ResultFile

from offload_runtime.errors import OptionError


class Sweep(Protocol):
    """One thing that is varied."""

    @property
    def axis(self) -> str:
        """What the values are, with their unit."""

    @property
    def values(self) -> tuple[str, ...]:
        """What is measured where nothing else is asked for, in the order of the file."""


class Point(Protocol):
    """One row to measure; what else it says is its family's own matter."""

    @property
    def label(self) -> str:
        """Its value as on the command line."""


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


def flag(option: str) -> str:
    """The option as it is typed."""
    return "--" + option.replace("_", "-")


def refuse_unused(family: Family, sweeps: Sequence[str], given: frozenset[str]) -> None:
    """Refuse options that none of the sweeps would look at.

    Raises:
        OptionError: There is one; the message names it.
    """
    for option in sorted(given):
        if set(sweeps) <= family.unused.get(option, frozenset()):
            users = [name for name in family.sweeps if name not in family.unused[option]]
            raise OptionError(
                f"{flag(option)} would be ignored by {' and '.join(sweeps)}: drop it; it is used by {', '.join(users)}"
            )


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
