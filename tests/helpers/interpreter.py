"""Triton's interpreter without what it does over and over: a third to two thirds of the time of a kernel's test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_PATCH = "_patch_lang"


def replace_language_once_a_launch() -> None:
    """Let kernels find the interpreter's functions in Triton's language from when they are launched until they end.

    The interpreter puts them there at every call of a function within a kernel too, `tl.zeros` and `tl.sum` among
    them, and looks through all of the language for that: 4 ms each, where they are in their places already.
    """
    replace: Any = getattr(interpreter, _PATCH, None)
    replaced: set[int] = set()  # ids of modules, since the launch began

    def replace_once(function: Any) -> Any:
        modules = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if modules <= replaced:
            return SimpleNamespace(restore=lambda: None)
        scope = replace(function)
        if scope is not None and not replaced:
            restore = scope.restore

            def restore_all() -> None:
                replaced.clear()
                restore()

            scope.restore = restore_all
        if scope is not None:
            replaced.update(modules)
        return scope

    if replace is not None:
        setattr(interpreter, _PATCH, replace_once)
