"""The words of a command: which sweeps, of which family, with which options, and which of those were really given."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path

from harness import Parser
from sweeping.family import Family, refuse_unused

from offload_runtime.errors import OptionError


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before the first option, and the rest."""
    leading = list(takewhile(lambda word: not word.startswith("-"), words))
    return leading, list(words[len(leading) :])


def family_of(sweeps: Sequence[str], families: Sequence[Family]) -> Family:
    """The family that all of these sweeps belong to.

    Raises:
        OptionError: None was named, one is unknown or named twice, or they do not go together.
    """
    every = ", ".join(name for family in families for name in family.sweeps)
    if not sweeps:
        raise OptionError(f"name a sweep first, then its options: {every}; or draw")
    by_name = {name: family for family in families for name in family.sweeps}
    for name in sweeps:
        if name not in by_name:
            raise OptionError(f"{name!r} is no sweep: take {every}; or draw")
        if sweeps.count(name) > 1:
            raise OptionError(f"{name} is asked for twice: name it once")
    family = by_name[sweeps[0]]
    for name in sweeps:
        if by_name[name] is not family:
            raise OptionError(f"{sweeps[0]} and {name} take different models: ask for them one after the other")
    return family


def parser_of(family: Family) -> argparse.ArgumentParser:
    """The options of a family."""
    made = Parser(
        prog="sweep.py", usage="sweep.py SWEEP [SWEEP ...] [options]", allow_abbrev=False,
        description=f"{family.title}: {', '.join(family.sweeps)}",
    )  # fmt: skip
    made.add_argument("--device", default="cuda")
    made.add_argument("--commit", help="commit to report where the tree has no git")
    made.add_argument("--out", type=Path, help="file of the rows; {sweep} in it stands for the sweep's name")
    family.add_options(made)
    made.add_argument("--values", type=lambda text: text.split(","), help="of the sweep, instead of all")
    made.add_argument("--plot", type=Path, help="pictures of the rows, as .png and as .svg; needs matplotlib")
    return made


def parse(
    family: Family, sweeps: Sequence[str], words: Sequence[str], families: Sequence[Family]
) -> argparse.Namespace:
    """The options.

    Raises:
        OptionError: One is unknown, would be ignored by all of the sweeps, or the family refuses it.
    """
    arguments, rest = parser_of(family).parse_known_args(words)
    for word in rest:
        option = word.partition("=")[0]
        others = [other for other in families if other is not family and option in _flags(other)]
        if others:
            raise OptionError(
                f"{option} would be ignored by {' and '.join(sweeps)}: drop it; it is used by "
                f"{', '.join(others[0].sweeps)}"
            )
        raise OptionError(f"{option} is no option of {' and '.join(sweeps)}: see --help")
    given = _given(family, vars(arguments), words)
    refuse_unused(family, sweeps, given)
    family.settle(arguments, given)
    return arguments


def _flags(family: Family) -> set[str]:
    """Options as they are typed."""
    return set(re.findall(r"--[a-z][a-z-]*", parser_of(family).format_help()))


def _given(family: Family, options: Iterable[str], words: Sequence[str]) -> frozenset[str]:
    """Names of the options that stand among the words."""
    bare, absent = parser_of(family), object()
    bare.set_defaults(**dict.fromkeys(options, absent))
    found = vars(bare.parse_known_args(words)[0])
    return frozenset(name for name, value in found.items() if value is not absent)
