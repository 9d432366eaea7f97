"""What the scripts in this folder begin and end with: the package, installed or not, and errors of one line."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

_TOOLS = Path(__file__).resolve().parent
# Last: nothing in them shadows an installed package.
sys.path += [str(folder) for folder in (_TOOLS / "peers", _TOOLS.parent / "kernels", _TOOLS.parent)]

from offload_runtime.errors import OffloadError  # noqa: E402 (found where the lines above say)

_Options = ParamSpec("_Options")


def one_line_errors(main: Callable[_Options, int]) -> Callable[_Options, int]:
    """A `main` that says in one line on stderr what the user can mend, and then returns 2."""

    @functools.wraps(main)
    def run(*args: _Options.args, **kwargs: _Options.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except OffloadError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return run
