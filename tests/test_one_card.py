"""Workers share a GPU, and who measures something has it alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import conftest
from tests.helpers.card import one_card


def use(directory: Path, users: Sequence[bool], work: Callable[[], object]) -> list[tuple[float, float, bool]]:
    """When each of these has had the card, all of them asking at once, and whether alone (True)."""
    had: list[tuple[float, float, bool]] = []

    def one(alone: bool) -> None:
        with one_card(alone=alone, directory=directory):
            begun = time.monotonic()
            work()
            had.append((begun, time.monotonic(), alone))

    threads = [threading.Thread(target=one, args=(alone,)) for alone in users]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return had


def test_who_measures_has_the_card_alone(tmp_path: Path) -> None:
    had = use(tmp_path, [False, True, False, False, True, False], lambda: time.sleep(0.05))
    assert len(had) == 6
    for begun, ended, alone in had:
        others = sum(b < ended and begun < e for b, e, _ in had) - 1
        assert not (alone and others)


def test_others_share_it(tmp_path: Path) -> None:
    all_of_them = threading.Barrier(4)
    assert len(use(tmp_path, [False] * 4, lambda: all_of_them.wait(timeout=60))) == 4


def test_who_wants_it_alone_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    marks = {"a": {"gpu"}, "b": {"gpu", "alone"}, "c": set[str](), "d": {"gpu", "alone"}, "e": {"gpu"}}
    items: list[Any] = [
        SimpleNamespace(
            name=name, path=Path(__file__), get_closest_marker=lambda mark, of=of: mark if mark in of else None
        )
        for name, of in marks.items()
    ]
    asked: Any = SimpleNamespace(option=SimpleNamespace(markexpr="gpu"))
    conftest.pytest_collection_modifyitems(asked, items)
    assert [item.name for item in items] == ["a", "c", "e", "b", "d"]
