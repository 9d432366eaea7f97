"""The pages of reference are those of the program: options, commands of a chat, fields of requests."""

from __future__ import annotations

import re
from pathlib import Path

from option_table import with_table

from offload_runtime.cli.chat import COMMANDS
from offload_runtime.server.schema import ChatBody, CompletionBody

ROOT = Path(__file__).resolve().parents[1]
GUIDE, SERVER = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("guide.md", "server.md"))


def test_the_guide_lists_the_options_of_today() -> None:
    assert with_table(GUIDE) == GUIDE, "run `python tools/option_table.py docs/guide.md`"


def test_the_guide_lists_the_commands_of_a_chat() -> None:
    for name, one in COMMANDS.items():
        assert f"| `{name} {one.argument.strip('[]')}".rstrip() + "` |" in GUIDE


def test_the_page_of_the_server_names_every_field() -> None:
    for body in (ChatBody, CompletionBody):
        for field in {*body.model_fields, *body.harmless} - {"messages", "prompt"}:
            assert re.search(rf"`{field}\b", SERVER), field
