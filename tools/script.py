"""What the scripts in this folder begin and end with: the package, installed or not, and errors of one line."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, ParamSpec

_TOOLS = Path(__file__).resolve().parent
# Last: nothing in them shadows an installed package.
sys.path += [str(folder) for folder in (_TOOLS / "peers", _TOOLS.parent / "kernels", _TOOLS.parent)]

from offload_runtime.config import parse_bytes  # noqa: E402 (found where the lines above say)
from offload_runtime.errors import OffloadError, OptionError  # noqa: E402
from offload_runtime.hardware import load_profile  # noqa: E402

_Options = ParamSpec("_Options")


class Parser(argparse.ArgumentParser):
    """argparse's own, but for what it does about a wrong option: no page of usage, one line as of every other error."""

    def error(self, message: str) -> NoReturn:
        """Raise `OptionError`: a script's `main` says it."""
        raise OptionError(f"{message}; --help lists the options")


def read_text(path: Path, option: str) -> str:
    """The UTF-8 text of a file that `option` names.

    Raises:
        OptionError: It cannot be read, or is no text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{path} cannot be read ({error.strerror or error}): name another {option}") from error
    except UnicodeDecodeError as error:
        raise OptionError(
            f"{path} is not UTF-8 text (byte {error.object[error.start]:#04x} at offset {error.start}): convert it, or "
            f"name another {option}"
        ) from error


def check_machine(vram: str | None, emulate: str | None) -> None:
    """Refuse before anything is loaded what `Runtime.load` would of these two; None is nothing.

    Raises:
        OptionError: `vram` is no size; ProfileError: there is no machine `emulate`.
    """
    if vram is not None:
        parse_bytes(vram)
    if emulate is not None:
        load_profile(emulate)


def one_line_errors(main: Callable[_Options, int]) -> Callable[_Options, int]:
    """A `main` that says in one line on stderr what the user can mend, and then returns 2."""

    @functools.wraps(main)
    def run(*args: _Options.args, **kwargs: _Options.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except OffloadError as error:
            print("error:", " ".join(str(error).split()), file=sys.stderr)
            return 2

    return run
