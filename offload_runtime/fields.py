"""Values that a file says, each taken with the type and within the bounds that make sense: the one reader of them all.

A damaged or malicious file may say anything anywhere; what goes past here is of the right type, small enough to
compute with, and echoed shortened in messages.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from offload_runtime.errors import CheckpointError

MOST = 1 << 31  # of any size or count: no model has as much, and products of several are finite floats
_LOWEST, _HIGHEST = -sys.float_info.max, sys.float_info.max
_T = TypeVar("_T", int, float, str)
_NOUNS = {int: "an integer", float: "a number", bool: "true or false", str: "a text", list: "a list", dict: "an object"}
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxlevel = 2
_MOST_SHOWN, _MOST_NAMES = 64, 5


class HeaderError(ValueError):
    """A header is damaged, in our own words, which quote a file only by `shown`."""


def shown(value: object) -> str:
    """Write a value from a file, or an error that quotes one, as short as a message needs it, on one line; our own
    words as they are."""
    if isinstance(value, HeaderError):
        return str(value)
    text = _SHORT.repr(str(value))[1:-1] if isinstance(value, BaseException) else _SHORT.repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def shortened(names: list[str]) -> str:
    """Write the first few names, for a message that also says how many there are."""
    return ", ".join(shown(name)[1:-1] for name in names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")


class Fields:
    """Holds what a file says, by name. What it leaves out, or calls null, is the default; where there is none, it is
    refused.

    Args:
        where: The file, for messages.
        values: What it says.
        prefix: What the names of the fields begin with.

    Every method raises `CheckpointError` for a value of another type or outside the bounds.
    """

    def __init__(self, where: object, values: Mapping[str, Any], prefix: str = "") -> None:
        self.where, self.values, self._prefix = where, values, prefix

    def __contains__(self, name: str) -> bool:
        """Return whether the file says anything of this."""
        return self.values.get(self._prefix + name) is not None

    def integer(self, name: str, default: int | None = None, *, at_least: int = 1, at_most: int = MOST) -> int:
        """Return a whole number; by default a size."""
        return int(self._taken(name, int, default, at_least, at_most))

    def number(
        self, name: str, default: float | None = None, *, at_least: float = _LOWEST, at_most: float = _HIGHEST
    ) -> float:
        """Return a number that is neither infinite nor NaN."""
        return float(self._taken(name, float, default, at_least, at_most))

    def flag(self, name: str, default: bool = False) -> bool:
        """Return whether something is so."""
        return bool(self._taken(name, bool, default))

    def text(self, name: str, default: str | None = None) -> str:
        """Return words."""
        return str(self._taken(name, str, default))

    def mapping(self, name: str) -> dict[str, Any]:
        """Return fields within a field; none where the file says nothing."""
        return dict(self._taken(name, dict, {}))

    def items(self, name: str, kind: type[_T], *, at_least: float = _LOWEST, at_most: float = _HIGHEST) -> list[_T]:
        """Return a list of values of one type; empty where the file says nothing."""
        items = list(self._taken(name, list, []))
        kinds = {int, float} if kind is float else {kind}
        if not set(map(type, items)) <= kinds or (kind is not str and not all(at_least <= x <= at_most for x in items)):
            for item in items:
                self._check(name, item, kind, at_least, at_most)
        return items

    def refuse(self, name: str, value: object, needed: str) -> NoReturn:
        """Raise the error for a value that is no such thing."""
        found = f"no usable {self._prefix}{name}" if value is None else f"{self._prefix}{name} {shown(value)}"
        raise CheckpointError(
            f"{self.where} has {found}, where {needed} is needed: fix it, or download or convert it again"
        )

    def _taken(self, name: str, kind: type, default: Any, at_least: float = 0, at_most: float = 0) -> Any:
        value = self.values.get(self._prefix + name)
        value = default if value is None else value
        self._check(name, value, kind, at_least, at_most)
        return value

    def _check(self, name: str, value: Any, kind: type, at_least: float, at_most: float) -> None:
        kinds = {float: (int, float), list: (list, tuple)}.get(kind, kind)
        fine = isinstance(value, kinds) and isinstance(value, bool) == (kind is bool)
        bounded = kind in (int, float)
        if not fine or (bounded and not at_least <= value <= at_most):
            lowest = f" from {at_least:.10g}" if bounded and at_least > _LOWEST else ""
            highest = f" to {at_most:.10g}" if bounded and at_most < _HIGHEST else ""
            self.refuse(name, value, _NOUNS[kind] + lowest + highest)
