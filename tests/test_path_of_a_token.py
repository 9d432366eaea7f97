"""The way of a token from `Runtime.generate` to the first kernel: how many calls it is behind."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

from offload_runtime.engine import Runtime
from tests.helpers.engine import PROMPT, load, one_thread  # noqa: F401 (an autouse fixture)

MOST_FRAMES = 14


def callers_of_kernels(runtime: Runtime) -> list[list[str]]:
    """The functions from `generate` on that each call of a layer's first kernel is behind, those of torch included."""
    found: list[list[str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or code.co_name != "rms_norm" or Path(code.co_filename).name != "rms_norm.py":
            return
        callers, caller = list[str](), frame.f_back
        while caller is not None:
            callers.append(f"{Path(caller.f_code.co_filename).name} {caller.f_code.co_name}")
            caller = None if caller.f_code is Runtime.generate.__code__ else caller.f_back
        found.append(callers[::-1])

    sys.setprofile(note)
    try:
        runtime.generate(PROMPT, max_new_tokens=2, ignore_eos=True)
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_the_first_kernel_is_close_to_generate(target: Path, draft: str) -> None:
    with load(target, draft=draft, resident_layers=2) as runtime:
        found = callers_of_kernels(runtime)
    for callers in (found[0], found[-1]):  # of the prompt's pass, and of the last one
        assert callers[0] == "runtime.py generate" and len(callers) <= MOST_FRAMES, "\n".join(callers)
