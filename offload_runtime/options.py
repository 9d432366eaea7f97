"""Options are declared once: each is a field of a frozen dataclass, with its type, default, bounds and help.

The field's metadata has an `Option`. What is made of it: the checks of every door (`validate`), the command line
(`cli/options.py`), fields of requests (`server/schema.py`), docstrings (`documented`) and the pages of reference.
"""

from __future__ import annotations

import inspect
import math
import reprlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache, cached_property
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from offload_runtime.errors import OptionError
from offload_runtime.sizes import parse_bytes, parse_count, parse_sizes

T = TypeVar("T")
# The parts of `--help`, in their order; options of one command alone come first, and are in none.
GROUPS = (None, "Model", "Sampling", "Speculation (none of it changes the output)", "Machine", "Limits", "Output")
_, MODEL, SAMPLING, SPECULATION, MACHINE, LIMITS, OUTPUT = GROUPS

_MOST_COUNT = 1 << 63  # no machine counts to more


@dataclass(frozen=True)
class Option:
    """An option says this of itself beside its type and default.

    Attributes:
        help: What it does, for all doors.
        group: The part of `--help` that shows it; None for options of one command alone.
        least, most, below: Bounds of its number: `least` and `most` may be, `below` may not.
        note: What one of its values stands for, such as `0 is off`.
        auto: It is a number or a size, or `auto`, which stands for None or, where that may not be, the default.
        size: It is a size in bytes; of a type with tuples, one for each card.
        flag: Its name on the command line where that is not the field's; None where it is no option there.
        argument: The command line has it without a name, as a word behind the command.
        metavar: What `--help` calls its value.
        repeated: The command line takes several.
        secret: Nothing that is printed shows it.
        http: Requests to the server have it by the field's name.
    """

    help: str
    group: str | None = None
    least: float | None = None
    most: float | None = None
    below: float | None = None
    note: str = ""
    auto: bool = False
    size: bool = False
    flag: str | None = ""
    argument: bool = False
    metavar: str | None = None
    repeated: bool = False
    secret: bool = False
    http: bool = False

    @cached_property
    def bounds(self) -> str:
        """Say the bounds, as they follow `must be`; nothing without any."""
        least, most, below = self.least, self.most, self.below
        if least is None:
            return ""
        if most is not None:
            return f"in [{least:g}, {most:g}]"
        if below is not None:
            return f"in [{least:g}, {f'2**{int(below).bit_length() - 1}' if below < math.inf else 'inf'})"
        return f"at least {least:g}"

    def require_within(self, name: str, value: float) -> None:
        """Raise `OptionError` unless a number is within the bounds, by this `name`."""
        fine = (self.least is None or value >= self.least) and (self.most is None or value <= self.most)
        note, shown = f" ({self.note})" if self.note else "", reprlib.repr(value)
        require(fine and (self.below is None or value < self.below), f"{name} must be {self.bounds}{note}, not {shown}")
        fine = self.below is not None or not isinstance(value, Integral) or value < _MOST_COUNT
        require(fine, f"{name} must be less than 2**63, not {shown}")


def option(default: T, help: str, group: str | None = None, **about: Any) -> T:
    """Make the field of a dataclass for an option; `about` are attributes of `Option`, and MISSING is no default."""
    made: Any = field(default=default, metadata={"option": Option(help, group, **about)})
    return made


@dataclass(frozen=True)
class OptionField:
    """An `OptionField` is a field of a configuration; one that is a configuration itself may have no `Option`."""

    name: str
    hint: Any
    default: Any
    option: Option | None

    def changed(self, default: Any = MISSING, **words: Any) -> OptionField:
        """Return the same with another default, or with other attributes of its `Option`."""
        assert self.option is not None
        default = self.default if default is MISSING else default
        return replace(self, default=default, option=replace(self.option, **words))

    @cached_property
    def types(self) -> tuple[Any, ...]:
        """Return the types that it may be of."""
        return get_args(self.hint) if isinstance(self.hint, UnionType) else (self.hint,)

    @property
    def _counts(self) -> bool:
        """Return whether it is a count, or `auto`."""
        return self.option is not None and self.option.auto and int in self.types and not self.option.size

    @property
    def automatic(self) -> Any:
        """Return what `auto` stands for."""
        return None if NoneType in self.types else self.default

    @property
    def description(self) -> str:
        """Say what it does, its bounds, and what its values stand for."""
        assert self.option is not None
        option = self.option
        automatic = f"auto: {self.default}" if option.auto and self.automatic is not None else ""
        more = "; ".join(part for part in (option.bounds, option.note, automatic) if part)
        return f"{option.help} {more[0].upper()}{more[1:]}." if more else option.help

    def read(self, name: str, text: str) -> Any:
        """Turn what was typed into a value; `auto` and one of several texts stay as they are. Raises `OptionError`,
        by this `name`."""
        assert self.option is not None
        if self.option.auto and (text == "auto" or self._counts):
            return text if text == "auto" else self.checked(name, text)
        if self.option.repeated:
            return text
        value: Any = text
        is_whole = int in self.types
        if (is_whole or float in self.types) and not self.option.size:
            try:
                value = parse_count(text) if is_whole else float(text)
            except ValueError:
                wanted = "a whole number" if is_whole else "a number"
                raise OptionError(f"{name} must be {wanted}, not {reprlib.repr(text)}") from None
        return self.checked(name, value)

    def checked(self, name: str, given: Any) -> Any:
        """Bring a value into the form that it is kept in. Raises `OptionError`, by this `name`."""
        value, option = given, self.option
        if option is None:
            require_type(name, value, self.hint)
            return value
        if self._counts:
            return self._count(name, given)
        if option.auto and given == "auto":
            return self.automatic
        if option.size and value is not None:
            value = parse_sizes(value, name) if tuple[int, ...] in self.types else parse_bytes(value, name)
        elif isinstance(value, str) and Path in self.types and str not in self.types:
            value = Path(value)
        require_type(name, value, self.hint)
        if isinstance(value, Real) and not isinstance(value, bool):
            option.require_within(name, cast(float, value))
        return value

    def _count(self, name: str, given: Any) -> Any:
        """Return the count, which may be typed, or what `auto` stands for."""
        assert self.option is not None
        value: Any = given
        if isinstance(given, str):
            try:
                value = self.automatic if given == "auto" else parse_count(given)
            except ValueError:
                value = -1
        is_count = isinstance(value, Integral) and not isinstance(value, bool)
        fine = (value is None and NoneType in self.types) or is_count
        typed_wrong = isinstance(given, str) and is_count and value < self.option.least
        least, shown = self.option.least, reprlib.repr(given)
        require(fine and not typed_wrong, f"{name} must be auto or a count of at least {least}, not {shown}")
        if value is not None:
            self.option.require_within(name, value)
        return value


@cache
def option_fields(kind: Any) -> tuple[OptionField, ...]:
    """Return the fields of a configuration."""
    hints = get_type_hints(kind)
    return tuple(
        OptionField(one.name, hints[one.name], one.default, one.metadata.get("option")) for one in fields(kind)
    )


def validate(config: Any) -> None:
    """Bring every field of a new configuration into the form that it is kept in. Raises `OptionError`."""
    kind: Any = type(config)
    for one in option_fields(kind):
        given = getattr(config, one.name)
        if given is not one.default and (value := one.checked(one.name, given)) is not given:
            object.__setattr__(config, one.name, value)


def documented(*kinds: type) -> Callable[[T], T]:
    """Make a decorator that lists options at the end of a docstring: those of `kinds`, or of what it decorates. The
    signature of a function that takes them by name has them, too, so that editors and notebooks complete them."""

    def add(documented: T) -> T:
        of: Any = kinds or (documented,)
        listed = [f"{one.name}: {one.description}" for kind in of for one in option_fields(kind) if one.option]
        lines = [textwrap.fill(line, 112, initial_indent=" " * 4, subsequent_indent=" " * 8) for line in listed]
        documented.__doc__ = "\n".join([inspect.cleandoc(documented.__doc__ or ""), "", "Options:", *lines])
        if inspect.isfunction(documented):
            documented.__signature__ = _with_options(inspect.signature(documented), kinds)  # type: ignore[attr-defined]
        return documented

    return add


class _Written(str):
    """An annotation as it is written: `help` would put it in quotes."""

    __repr__ = str.__str__


def _with_options(signature: inspect.Signature, kinds: Sequence[Any]) -> inspect.Signature:
    """Return a signature with the options of `kinds` in place of what takes them by name."""
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    named = {one.name: one.replace(annotation=_written(one.annotation)) for one in own}
    for one in (one for kind in kinds for one in option_fields(kind) if one.option is not None):
        made = inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.hint)
        named.setdefault(one.name, made)
    return signature.replace(parameters=list(named.values()), return_annotation=_written(signature.return_annotation))


def _written(annotation: Any) -> Any:
    return _Written(annotation) if isinstance(annotation, str) else annotation


def require(fine: bool, message: str) -> None:
    """Raise `OptionError` with this message unless all is `fine`."""
    if not fine:
        raise OptionError(message)


def require_type(name: str, value: object, hint: Any) -> None:
    """Raise `OptionError` unless a value is of an annotated type."""
    if is_of_type(value, hint):
        return
    shown, parts = reprlib.repr(value), get_args(hint)
    if get_origin(hint) is Literal:
        raise OptionError(f"{name} must be {', '.join(parts[:-1])} or {parts[-1]}, not {shown}")
    wanted = str(hint).replace("collections.abc.", "") if parts else hint.__name__
    raise OptionError(f"{name} must be of type {wanted}, not {shown}")


_NUMBERS = {int: Integral, float: Real}  # numpy's as well


def is_of_type(value: Any, hint: Any) -> bool:
    """Return whether a value is of an annotated type; True is no number, and a text is no sequence."""
    parts = get_args(hint)
    if isinstance(hint, UnionType):
        return any(is_of_type(value, one) for one in parts)
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in parts
    if get_origin(hint) is Mapping:
        if not isinstance(value, Mapping):
            return False
        return all(is_of_type(key, parts[0]) and is_of_type(item, parts[1]) for key, item in value.items())
    if parts:
        listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return listed and all(is_of_type(item, parts[0]) for item in value)
    if hint is Any or isinstance(value, bool):
        return hint in (Any, bool)
    return isinstance(value, _NUMBERS.get(hint, hint))


def require_positive(name: str, value: int | None) -> None:
    """Raise `OptionError` unless `value` is at least 1 and no more than a machine counts to, or left open."""
    if value is not None:
        Option("", least=1).require_within(name, value)


def require_unicode(name: str, text: str) -> str:
    """Return a text; raises `OptionError` for a byte of a command line that is not UTF-8, or half of a pair in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}"
        raise OptionError(f"{name} is not Unicode text: {what}: write it in UTF-8") from error
    return text
