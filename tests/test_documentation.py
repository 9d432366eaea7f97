"""What the documentation names is there: files, links with their headings, options of the commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from offload_runtime.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
# Of pytest, and what every parser adds.
FOREIGN_OPTIONS = {"--cov", "--help"}
# Names in a list leave out the folder that they share with the one before.
FOLDERS = ("", "tests", "tests/kernels", "tools", "docs")


def anchor(heading: str) -> str:
    """The fragment that GitHub gives a heading."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Of all headings, those within blocks of code left out."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return {anchor(heading) for heading in re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE)}


def missing_links(page: Path) -> Iterator[str]:
    """Links to files and headings that are not there."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (fragment and fragment not in anchors(target.read_text(encoding="utf-8"))):
            yield link


def missing_files(text: str) -> Iterator[str]:
    """Scripts and tests named in code, of which none is there."""
    for name in re.findall(r"(?<![\w./-])((?:[\w.*-]+/)*[\w*]+\.(?:py|toml|json))(?![\w*])", code_of(text)):
        ours = name.startswith(("tools/", "tests/", "profiles/", "test_", "bench_", "widen_"))
        if ours and not any(list(ROOT.glob(f"{folder}/{name}".lstrip("/"))) for folder in FOLDERS):
            yield name


def code_of(text: str) -> str:
    """Everything between backticks and in indented blocks."""
    blocks = [line for line in text.splitlines() if line.startswith("    ")]
    return "\n".join([*re.findall(r"`([^`\n]+)`", text), *blocks])


def known_options() -> set[str]:
    """All that a command takes, as typer reads it, or a tool, as the sources spell it."""
    group: Any = typer.main.get_command(app)
    options = {name for command in (group, *group.commands.values()) for one in command.params for name in one.opts}
    for path in (ROOT / "tools").rglob("*.py"):
        options.update(re.findall(r"[\"'/,](--[a-z][a-z-]+)[\"'/,]", path.read_text()))
    return options


@pytest.mark.parametrize("name", PAGES)
def test_links_and_files_are_there(name: str) -> None:
    page = PAGES[name]
    assert not [*missing_links(page), *missing_files(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("name", PAGES)
def test_options_are_known(name: str) -> None:
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", code_of(PAGES[name].read_text(encoding="utf-8"))))
    assert not used - known_options() - FOREIGN_OPTIONS


def test_what_is_not_there_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading, `code` & more\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#a-heading-code--more) [b](other.md#b) [c](absent.md) [d](#here)\n## Here\n[e](https://x)"
    )
    assert list(missing_links(page)) == ["other.md#b", "absent.md"]
    named = "`tests/test_engine.py`, `test_triforce*.py`, `tests/test_absent.py`, `bench_absent*.py`, `model.json`"
    assert list(missing_files(named)) == ["tests/test_absent.py", "bench_absent*.py"]
    assert {"--draft", "--json", "--noise"} <= known_options() and "--drafts" not in known_options()
