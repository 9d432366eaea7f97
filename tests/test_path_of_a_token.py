"""The path of a token from `Runtime.generate` on: the calls before its first kernel, and the files that it enters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from offload_runtime.engine import Runtime
from tests.helpers.engine import PROMPT, load, one_thread  # noqa: F401 (an autouse fixture)

MOST_FRAMES = 14
OURS = ("/offload_runtime/", "/offload_runtime_kernels/")


def traced(runtime: Runtime, note: Callable[[FrameType], None], count: int, **options: Any) -> None:
    """Generate so many tokens, with `note` called for each call of a Python function of this thread."""

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            note(frame)

    sys.setprofile(profile)
    try:
        runtime.generate(PROMPT, max_new_tokens=count, ignore_eos=True, **options)
    finally:
        sys.setprofile(None)


def callers_of_kernels(runtime: Runtime) -> list[list[str]]:
    """The functions from `generate` on that each call of a layer's first kernel is behind, those of torch included."""
    found: list[list[str]] = []

    def note(frame: FrameType) -> None:
        code = frame.f_code
        if code.co_name != "rms_norm" or Path(code.co_filename).name != "rms_norm.py":
            return
        callers, caller = list[str](), frame.f_back
        while caller is not None:
            callers.append(f"{Path(caller.f_code.co_filename).name} {caller.f_code.co_name}")
            caller = None if caller.f_code is Runtime.generate.__code__ else caller.f_back
        found.append(callers[::-1])

    traced(runtime, note, 2)
    return found


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_the_first_kernel_is_close_to_generate(target: Path, draft: str) -> None:
    with load(target, draft=draft, resident_layers=2) as runtime:
        found = callers_of_kernels(runtime)
    for callers in (found[0], found[-1]):  # of the prompt's pass, and of the last one
        assert callers[0] == "runtime.py generate" and len(callers) <= MOST_FRAMES, "\n".join(callers)


@pytest.mark.parametrize(("tree_nodes", "most"), [(0, 22), (16, 30)], ids=["plain", "tree"])
def test_a_token_enters_few_files(target: Path, draft: Path, tree_nodes: int, most: int) -> None:
    """Kernels are counted, as a CPU computes them; a layer is streamed."""
    files = set[str]()

    def note(frame: FrameType) -> None:
        name = frame.f_code.co_filename
        if any(part in name for part in OURS) and "/tests/" not in name:
            files.add(name.rpartition("/offload_runtime")[2])

    options: dict[str, Any] = {"gamma": 6, "tree_nodes": tree_nodes} if tree_nodes else {}
    with load(target, draft=draft if tree_nodes else "none", resident_layers=2, **options) as runtime:
        traced(runtime, note, 8)
    assert len(files) <= most, "\n".join(sorted(files))
