"""How many files someone meets who follows one token from the token loop to the target's first kernel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import offload_runtime
from tests.helpers.engine import PROMPT, load, one_thread  # noqa: F401

PACKAGE = Path(offload_runtime.__file__).parent
LOOP, STEP = "engine/generate.py", ("engine/steps.py", "run")
PASS, KERNEL = ("runners/target.py", "run_rows"), ("model/decoder.py", "embed")
MOST_FILES = {"plain": 12, "tree": 20}


@cache
def file_of(name: str) -> str | None:
    """The file of the package that code's own name for its file means; None for others'."""
    path = Path(name)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else None


@contextmanager
def journeys() -> Iterator[list[list[str]]]:
    """The files of the package whose functions are called, in order: one list a step, up to the target's embedding."""
    steps: list[list[str]] = []
    under_way = by_target = False

    def called(frame: FrameType, event: str, _: Any) -> None:
        nonlocal under_way, by_target
        if event != "call" or (name := file_of(frame.f_code.co_filename)) is None:
            return
        if (name, frame.f_code.co_name) == STEP and frame.f_locals["requests"]:  # not of prompts alone
            steps.append([LOOP])
            under_way, by_target = True, False
        if under_way and name not in steps[-1]:
            steps[-1].append(name)
        by_target = by_target or (name, frame.f_code.co_name) == PASS  # a draft has an embedding too
        if by_target and (name, frame.f_code.co_name) == KERNEL:
            under_way = False

    sys.setprofile(called)
    try:
        yield steps
    finally:
        sys.setprofile(None)


def longest_journey(target: Path, **options: Any) -> list[str]:
    asked = {"max_new_tokens": 24, "ignore_eos": True}
    with load(target, resident_layers=2, **options) as runtime:
        runtime.generate(PROMPT, **asked)
        with journeys() as steps:
            runtime.generate(PROMPT, **asked)
    assert len(steps) > 2 and all(step[-1] == KERNEL[0] or KERNEL[0] in step for step in steps)
    return max(steps, key=len)


def test_a_token_of_plain_decoding(target: Path) -> None:
    found = longest_journey(target, draft="none")
    assert len(found) <= MOST_FILES["plain"]


@pytest.mark.slow
def test_a_token_of_a_tree_over_a_streamed_target(target: Path, draft: Path) -> None:
    found = longest_journey(target, draft=draft, tree_nodes=60)
    assert len(found) <= MOST_FILES["tree"]
