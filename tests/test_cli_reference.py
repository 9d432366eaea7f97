"""`docs/cli.md` names every option and chat command; each of its commands runs, and each of the README's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from offload_runtime.cli.app import app
from offload_runtime.cli.chat import COMMANDS
from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)
from tests.test_cli_fakes import FakeRuntime, app_of

ROOT = Path(__file__).resolve().parents[1]
REFERENCE, README = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/cli.md", "README.md"))
LINES, README_LINES = (
    re.findall(r"^    offload-runtime (.+)$", page.replace(" \\\n", " "), flags=re.MULTILINE)
    for page in (REFERENCE, README)
)
# What is said behind a command so that it takes seconds; the last of two options counts.
SHORTER = {
    "generate": "--max-new-tokens 3 --context 2048", "chat": "--max-new-tokens 3 --context 512",
    "verify": "--tokens 8 --seeds 32 --context 512", "demo": "--max-new-tokens 3",
    "serve": "", "plan": "", "profile": "--quick --device cpu",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files are that the reference names, and nothing of the user's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFLOAD_RUNTIME_CONFIG", str(tmp_path / "config"))
    for name in ("prompt.txt", "p.txt", "a.txt", "b.txt", "turns.txt"):
        (tmp_path / name).write_text("Name a river.\nAnd a sea.\n")
    (tmp_path / "book.txt").write_text("The sea was calm, and the ship went on. " * 30)
    return tmp_path


def run(line: str, *more: str, program: typer.Typer = app) -> Result:
    """Run a command as a shell would, which gives it a file as stdin at most."""
    words, _, stdin = line.partition(" < ")
    given = Path(stdin).read_text() if stdin else "Name a river.\n"
    return CliRunner().invoke(program, [*shlex.split(words, comments=True), *more], input=given)


def test_every_command_is_there() -> None:
    parser: Any = typer.main.get_command(app)
    assert {line.split()[0] for line in LINES} == set(parser.commands) == set(SHORTER)
    for name, command in parser.commands.items():
        assert f"\n## {name}\n" in REFERENCE
        for option in command.params:
            assert re.search(rf"`{option.opts[0]}\b", REFERENCE), f"{name} {option.opts[0]}"
    for name, one in COMMANDS.items():
        assert f"| `{name} {one.argument.strip('[]')}".rstrip() + "` |" in REFERENCE


@pytest.mark.parametrize("line", [line for line in LINES + README_LINES if line.split()[0] in ("generate", "chat")])
def test_what_is_asked_of_a_runtime_can_be(folder: Path, line: str) -> None:
    fake = FakeRuntime()
    result = run(line, program=app_of(engine=SimpleNamespace(Runtime=fake)))
    assert result.exit_code == 0, result.stderr
    assert fake.loads and fake.requests


@pytest.mark.slow
def test_every_command_runs(folder: Path, two_layer_target: Path, one_layer_draft: Path) -> None:
    """With small random models, but for the demo, which has its own. All in one process."""
    (folder / "Llama-2-13b").symlink_to(two_layer_target)
    others = [line for line in README_LINES if line.split()[0] in ("plan", "profile", "verify")]
    for line in [*LINES, *others]:
        if line.startswith("serve"):  # goes on until it is stopped: see test_server_load.py
            continue
        words = line.replace("./model.gguf", str(two_layer_target)).replace("./draft.gguf", str(one_layer_draft))
        result = run(words, *shlex.split(SHORTER[line.split()[0]]))
        assert result.exit_code == 0 and result.stdout.strip(), (line, result.stderr, result.exception)
    assert (folder / "plan.png").exists() and (folder / "config" / "profiles" / "mine.toml").exists()
