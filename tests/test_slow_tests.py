"""What of the tests is run: not the slow ones unless they are named or `-m` is given, of large grids a few."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.helpers.covering import few


def chosen_of(named: list[str], markexpr: str = "", here: str = "/repo") -> list[str]:
    """Names of what is left of slow tests, two that are not, one of them early, and a grid of which two are wanted."""
    path, items, gone = Path("/repo/tests/test_x.py"), [], []
    marks: dict[str, dict[str, Any]] = {
        "test_slow": {"slow": True},
        "TestIt::test_slow": {"slow": True},
        "test_not": {},
        "test_early": {"early": True},
    }
    marks |= {f"test_grid[{x}-{y}]": {"few": pytest.mark.few(2), "at": (x, y)} for x, y in product(range(2), range(2))}
    for name, of in marks.items():
        items.append(
            SimpleNamespace(
                name=name, nodeid=f"tests/test_x.py::{name}", path=path, get_closest_marker=of.get,
                add_marker=lambda mark, of=of: of.update({mark.name: mark}),
                callspec=SimpleNamespace(indices=dict(zip("xy", of.get("at", ()), strict=False))),
            )
        )  # fmt: skip
    config: Any = SimpleNamespace(
        option=SimpleNamespace(markexpr=markexpr), args=named, invocation_params=SimpleNamespace(dir=Path(here)),
        hook=SimpleNamespace(pytest_deselected=lambda items: gone.extend(items)),
    )  # fmt: skip
    every: Any = list(items)
    conftest.pytest_collection_modifyitems(config, every)
    assert len(every) + len(gone) == len(items)
    return [item.name for item in every]


OFTEN = ["test_early", "test_not", "test_grid[0-0]", "test_grid[1-1]"]


@pytest.mark.parametrize(
    ("named", "more"),
    [
        ([], []), (["tests"], []), (["tests/test_x.py"], []), (["tests/test_x.py::test"], []),
        (["tests/test_y.py::test_slow"], []), (["tests/test_x.py::test_slow"], ["test_slow"]),
        (["/repo/tests/test_x.py::TestIt"], ["TestIt::test_slow"]),
        (["tests/test_x.py::test_grid[0-1]"], ["test_grid[0-1]"]),
        (["tests/test_x.py::test_grid"], ["test_grid[0-1]", "test_grid[1-0]"]),
    ],
    ids=str,
)  # fmt: skip
def test_slow_tests_are_run_where_they_are_named(named: list[str], more: list[str]) -> None:
    chosen = chosen_of(named)
    assert set(chosen) == {*OFTEN, *more}
    assert chosen[0] == "test_early"


def test_a_path_begins_where_the_command_is_run() -> None:
    assert "test_slow" in chosen_of(["test_x.py::test_slow"], here="/repo/tests")
    assert "test_slow" not in chosen_of(["test_x.py::test_slow"])


def test_an_expression_decides_alone() -> None:
    assert len(chosen_of([], markexpr="slow")) == 8


def test_a_few_rows_hold_every_pair_of_values() -> None:
    sizes = {"a": 4, "b": 3, "c": 3, "d": 2}
    rows = [dict(zip(sizes, row, strict=True)) for row in product(*map(range, sizes.values()))]
    for count in (1, 5, 16):
        chosen = few(rows, count)
        assert len(set(chosen)) == count and chosen[0] == 0
    pairs = {pair for at in few(rows, 16) for pair in combinations(rows[at].items(), 2)}
    assert pairs == {pair for row in rows for pair in combinations(row.items(), 2)}
    assert few([{"a": number} for number in range(9)], 3) == [0, 8, 4]
    assert sorted(few(rows[:2], 5)) == [0, 1]
