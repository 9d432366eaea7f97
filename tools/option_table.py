"""The options of the command line as a list in Markdown, written into a page between two comments.

python tools/option_table.py docs/guide.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer

from offload_runtime.cli.app import app

_BETWEEN = re.compile(r"(<!-- written by .*? -->\n).*?(<!-- end -->)", re.DOTALL)


def option_table() -> str:
    """Every option once: those of several commands by the group that `--help` shows them in, others by command."""
    group: Any = typer.main.get_command(app)
    commands_of: dict[str, list[str]] = {}
    for name, command in group.commands.items():
        for option in _named(command):
            commands_of.setdefault(option.opts[0], []).append(name)
    rows: dict[str, list[str]] = {}
    for command in group.commands.values():
        types = get_type_hints(command.callback)
        for option in _named(command):
            if commands := commands_of.pop(option.opts[0], None):
                shared = option.rich_help_panel if len(commands) > 1 else None
                rows.setdefault(shared or f"`{commands[0]}`", []).append(_row(option, types[option.name]))
    return "".join(f"**{heading}**\n\n{''.join(lines)}\n" for heading, lines in rows.items())


def _named(command: Any) -> list[Any]:
    return [param for param in command.params if param.param_type_name == "option"]


def _row(option: Any, annotation: Any) -> str:
    choices = "|".join(get_args(annotation)) if get_origin(annotation) is Literal else ""
    spelling = f"{option.opts[0]} {option.metavar or choices}".strip()
    is_nothing = option.default in (None, "auto", "none", False, "0", "0.0", "1", "1.0")
    default = "" if is_nothing else f" Default: {option.default}."
    return f"- `{spelling}`: {option.help}{default}\n"


def with_table(page: str) -> str:
    """The page with the options of today."""
    return _BETWEEN.sub(lambda found: f"{found[1]}\n{option_table()}{found[2]}", page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
