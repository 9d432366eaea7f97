"""Grids of parameters: a few of them by default, the others where the slow tests are run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rarely(*values: Any) -> list[Any]:
    """Values of one parameter which `.ci/run` and `-m slow` try beside those of the default run."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def all_but_some(grid: Iterable[tuple[Any, ...]], *often: tuple[Any, ...]) -> list[Any]:
    """The rows of a grid of several parameters, of which only those in `often` are run by default."""
    rows = list(grid)
    assert set(often) <= set(rows), "not rows of the grid"
    return [row if row in often else pytest.param(*row, marks=pytest.mark.slow) for row in rows]
