"""Standard streams that are full, closed or nobody's, and words that are no text or far too large."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest
import typer
from typer.testing import CliRunner, Result

from offload_runtime import engine
from offload_runtime.cli.app import app
from tests.test_cli_fakes import FakeRuntime

CONFIG = str(Path(__file__).parent / "data" / "configs" / "llama-3.1-8b")
PLAN = ("plan", "--target", CONFIG, "--profile", "rtx4090", "--context", "4096")
ANSWER = ("--target", "some/model")
COMMANDS = {
    "help": ["--help"],
    "help of a command": ["generate", "--help"],
    "version": ["--version"],
    "plan": [*PLAN],
    "plan in JSON": [*PLAN, "--json"],
    "plan that does not fit": [*PLAN, "--vram", "2GB"],
    "generate": ["generate", *ANSWER, "--prompt", "Hi"],
    "generate in JSON": ["generate", *ANSWER, "--prompt", "Hi", "--json"],
    "chat": ["chat", *ANSWER],
    "chat in JSON": ["chat", *ANSWER, "--json"],
}


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(engine, "Runtime", fake)
    monkeypatch.setenv("OFFLOAD_RUNTIME_CONFIG", str(tmp_path / "config"))
    return fake


@contextmanager
def full_disk() -> Iterator[TextIO]:
    """A file that takes nothing."""
    if not Path("/dev/full").exists():
        pytest.skip("only Linux has a disk that is always full")
    yield from _open_in_vain(os.open("/dev/full", os.O_WRONLY))


@contextmanager
def pipe_without_reader() -> Iterator[TextIO]:
    """What `| head` leaves behind."""
    reader, writer = os.pipe()
    os.close(reader)
    yield from _open_in_vain(writer)


def _open_in_vain(descriptor: int) -> Iterator[TextIO]:
    file = open(descriptor, "w", encoding="utf-8")  # noqa: SIM115 (its end may fail)
    yield file
    file.close()  # what was not written must not come up again: the interpreter would fail on it


@contextmanager
def closed() -> Iterator[None]:
    """What Python makes of `>&-`."""
    yield None


def run(monkeypatch: pytest.MonkeyPatch, words: list[str], *, out: object, err: object) -> int:
    """Run a command with these standard streams; return its exit code."""
    streams = {"stdin": io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")), "stdout": out, "stderr": err}
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as leaving:
        for name, stream in streams.items():
            patch.setattr(sys, name, stream)
        app(words)
    assert isinstance(leaving.value.code, int)
    return leaving.value.code


@pytest.mark.few(4)
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_stdout_that_takes_nothing(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime, words: list[str]) -> None:
    for stream, why in ((full_disk, "No space left on device"), (closed, "it is closed")):
        with stream() as out:
            said = io.StringIO()
            assert run(monkeypatch, words, out=out, err=said) == 2
        assert said.getvalue().count("error: ") == 1
        last = f"error: stdout cannot be written ({why}): free some space or send it elsewhere"
        assert said.getvalue().splitlines()[-1] == last
    assert len(runtime.loads) <= 1, "a model was loaded for nobody"


@pytest.mark.few(4)
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_reader_that_left_ends_a_command_without_a_word(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    with pipe_without_reader() as out:
        said = io.StringIO()
        assert run(monkeypatch, words, out=out, err=said) == 141
    assert "error" not in said.getvalue()


@pytest.mark.few(4)
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("stream", [full_disk, pipe_without_reader, closed])
def test_stderr_that_takes_nothing_does_not_lose_the_answer(
    monkeypatch: pytest.MonkeyPatch, words: list[str], stream: Callable[[], contextmanager[TextIO]]
) -> None:
    usual, answer = io.StringIO(), io.StringIO()
    code = run(monkeypatch, words, out=usual, err=io.StringIO())
    with stream() as err:
        assert run(monkeypatch, words, out=answer, err=err) == code
    assert answer.getvalue().replace("a library that cannot keep quiet\n", "") == usual.getvalue().replace(
        "a library that cannot keep quiet\n", ""
    )
    assert answer.getvalue()


class Screen(io.StringIO):
    """A terminal without colours."""

    def isatty(self) -> bool:
        return True


def test_lines_of_a_terminal_end_between_words(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    runtime.placement = "20 of 30 layers resident, 10 streamed (141.6 MB a pass) through 3 slots; KV cache 377.5 MB"
    for columns, screen in ((40, Screen()), (200, io.StringIO())):
        run(monkeypatch, COMMANDS["generate"], out=io.StringIO(), err=screen)
        lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).splitlines()]
        assert max(map(len, lines)) <= columns
        assert (runtime.placement in lines) == (columns == 200)
        assert runtime.placement in " ".join(lines)


def helped(monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    answer = io.StringIO()
    assert run(monkeypatch, [*words, "--help"], out=answer, err=io.StringIO()) == 0
    return answer.getvalue()


@pytest.mark.parametrize("command", ["generate", "chat", "verify", "plan", "profile", "demo"])
def test_help_is_grouped_and_says_no_types(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    text = helped(monkeypatch, command)
    groups = re.findall(r"─ (\w+)", text)
    order = ["Options", "Model", "Sampling", "Speculation", "Machine", "Output"]
    assert groups == [group for group in order if group in groups] and len(groups) >= 2
    assert not re.findall(r"<\w+>|<int|<float", text) and "…" not in text
    parser: Any = typer.main.get_command(app)
    for option in parser.commands[command].params:
        assert option.help[0].isupper() or option.help[0].isdigit() or ":" in option.help
        assert option.help.endswith(".") and option.opts[0] in text


# --- words


def invoke(*words: str, turns: str | bytes = "") -> Result:
    return CliRunner().invoke(app, words, input=turns)


def assert_refused(result: Result, words: str) -> None:
    """One line, exit code 2 and nothing on stdout."""
    assert isinstance(result.exception, SystemExit) and (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and words in line and len(line) <= 608


LATIN = os.fsdecode(b"d\xe9j\xe0")
NO_TEXT = "is not Unicode text: character 1 is the lone surrogate U+DCE9: write it in UTF-8"
NUMBER = "9" * 400


@pytest.mark.parametrize(("arguments", "words"), [
    (["generate", *ANSWER, "--prompt", LATIN], f"--prompt {NO_TEXT}"),
    (["generate", *ANSWER, "--prompt", "Hi", "--stop", "a", "--stop", LATIN], f"--stop {NO_TEXT}"),
    (["chat", *ANSWER, "--system", LATIN], f"--system {NO_TEXT}"), (["demo", "--prompt", LATIN], f"--prompt {NO_TEXT}"),
    (["generate", *ANSWER, "--prompt-file", LATIN], "cannot be read: No such file"),
    (["generate", *ANSWER, "--prompt-file", "\ud800"], "cannot be found"),
    (["generate", *ANSWER, "--prompt", "a\0b"], "holds a NUL character"),
    (["plan", "--target", "a\0b"], "holds a NUL character"), (["profile", "--save", "a\0b"], "holds a NUL character"),
    (["generate", *ANSWER, "--prompt", "Hi", "--seed", NUMBER], "--seed must be in [0, 2**64)"),
    (["generate", *ANSWER, "--prompt", "Hi", "--max-new-tokens", NUMBER], "--max-new-tokens must be less than 2**63"),
    (["generate", *ANSWER, "--prompt", "Hi", "--top-k", "9" * 9000], "--top-k must be a whole number"),
    ([*PLAN, "--batch", NUMBER], "--batch must be less than 2**63"),
    (
        [*PLAN, "--speculation", "triforce", "--draft", "none", "--refresh-steps", NUMBER],
        "--refresh-steps must be less",
    ),
    ([*PLAN, "--dtype", "x" * 100_000], "is not one of"),
    ([*PLAN, "--gamma", "x" * 100_000], "--gamma must be auto or a count of at least 1"),
    (["generate", *ANSWER, "x" * 100_000], "unexpected extra argument"), (["x" * 100_000], "No such command"),
], ids=lambda value: value[:24] if isinstance(value, str) else "")  # fmt: skip
def test_words_that_are_no_text_or_far_too_large(arguments: list[str], words: str) -> None:
    assert_refused(invoke(*arguments), words)


def test_a_batch_beyond_all_memory_is_refused_at_once() -> None:
    result = invoke(*PLAN, "--batch", str((1 << 63) - 1))
    assert result.exit_code == 2 and "--batch 1" in result.stdout


@pytest.mark.parametrize("line", ["/load a\0b", "/save a\0b", "/load " + "a" * 5000, "/save \0", "/load " + "9" * 5000])
def test_names_of_files_that_cannot_be(runtime: FakeRuntime, line: str) -> None:
    result = invoke("chat", *ANSWER, turns=f"{line}\none\n")
    assert result.exit_code == 0 and result.stdout.endswith("Hello\n")
    (error,) = [said for said in result.stderr.splitlines() if said.startswith("error: ")]
    assert len(error) <= 608


# --- processes
