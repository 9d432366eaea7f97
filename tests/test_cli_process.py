"""The command line as a process of its own, with a small random model and the real engine; and markdown on a terminal:
what stays on it, and that nothing which has left the screen is touched."""

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from offload_runtime.cli.app import app
from offload_runtime.cli.markdown import MarkdownWriter, answer_writer
from offload_runtime.engine import Runtime
from tests.helpers.engine import byte_level_tokenizer
from tests.helpers.traces import rows_of
from tests.test_cli_fakes import FakeRuntime, at_a_terminal

fcntl = pytest.importorskip("fcntl", reason="signals and pseudo-terminals as POSIX has them")
pty = pytest.importorskip("pty")

ROOT = Path(__file__).resolve().parent.parent
TARGET = "long_target"


def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of the child: it finds the package, keeps its state here and uses no network."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    own = {"PYTHONPATH": path, "XDG_STATE_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}
    # A pseudo-terminal without an emulator behind it answers no questions about the cursor.
    return {**os.environ, **own, "OMP_NUM_THREADS": "1", "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "offload_runtime", *arguments]


def endless(target: Path) -> list[str]:
    """Options for an answer that nobody waits for."""
    return ["--target", str(target), "--max-new-tokens", "3000", "--ignore-eos", "--device", "cpu"]


def start_endless_answer(target: Path, tmp_path: Path, *others: str) -> subprocess.Popen[bytes]:
    arguments = command("generate", "--prompt", "the", *endless(target), *others)
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(tmp_path))


def test_files_in_one_batch(target: Path, tmp_path: Path) -> None:
    """The first has the tokens that it has alone; so has each of them at temperature 0, in text and in JSON."""
    files = []
    for number, text in enumerate(["the quick brown", "a link, a layer", "on and on"]):
        path = tmp_path / f"{number}.txt"
        path.write_text(text)
        files += ["--prompt-file", str(path)]
    shared = ["--target", str(target), "--device", "cpu", "--max-new-tokens", "12", "--ignore-eos"]
    # Without a process of its own: one prompt has shown what that takes.
    done = CliRunner().invoke(app, ["generate", *shared, *files, "--json", "--logprobs", "2"])
    assert done.exit_code == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert [result["name"] for result in results] == files[1::2]
    with Runtime.load(target, device="cpu") as runtime:
        for path, result in zip(files[1::2], results, strict=True):
            alone = runtime.generate(Path(path).read_text(), max_new_tokens=12, ignore_eos=True, temperature=0.0)
            assert alone.tokens == result["tokens"] == [one["token"] for one in result["logprobs"]]
            assert all(one["top"][0] == [one["token"], one["logprob"]] for one in result["logprobs"])
    text = CliRunner().invoke(app, ["generate", *shared, *files]).stdout
    assert text == "".join(f"== {result['name']} ==\n{result['text']}\n" for result in results)


def test_without_a_command_the_help_is_shown() -> None:
    assert "verify" in CliRunner().invoke(app, []).stdout


@pytest.mark.slow
def test_sigint_stops_generate_with_its_text_and_a_whole_trace(target: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with start_endless_answer(target, tmp_path, "--resident-layers", "1", "--trace", str(path)) as process:
        assert process.stdout is not None
        first = process.stdout.read(60)
        assert len(first) == 60  # several passes
        process.send_signal(signal.SIGINT)
        rest, complaints = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (first + rest).endswith(b"\n")
    assert any(b"tokens/s" in line for line in complaints.splitlines()[-2:]) and b"Traceback" not in complaints
    assert f"trace written to {path}".encode() in complaints
    passes = rows_of(path)["passes"]
    assert passes[0].args["kind"] == "prefill" and len(passes) > 1
    assert all("accepted" in one.args for one in passes[1:])


class Terminal:
    """A chat on a pseudo-terminal of its own, with everything it has shown so far."""

    def __init__(self, tmp_path: Path, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        # Ctrl-C becomes a signal only for the process whose controlling terminal this is.
        script = (
            "import fcntl, os, sys, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
            "os.execv(sys.executable, [sys.executable, '-m', 'offload_runtime', *sys.argv[1:]])"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments], stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True, env=environment(tmp_path),
        )  # fmt: skip
        os.close(slave)
        fcntl.fcntl(self._master, fcntl.F_SETFL, os.O_NONBLOCK)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, text: str, *, timeout_s: float = 90) -> str:
        """Wait until `text` is shown; return what came up to it and forget it."""
        self._read_until(lambda: text in self.shown, text, timeout_s)
        before, _, self.shown = self.shown.partition(text)
        return before

    def expect_text(self, *, timeout_s: float = 90) -> None:
        """Wait until anything visible is shown."""
        self._read_until(lambda: bool(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.shown).strip()), "text", timeout_s)

    def _read_until(self, found: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not found():
            assert time.monotonic() < deadline, f"{what!r} did not come; the screen has {self.shown[-2000:]!r}"
            if select.select([self._master], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self._master, 65536).decode("utf-8", errors="replace")
                except OSError:  # Linux's way of saying that the other end is closed
                    raise AssertionError(f"the chat ended before {what!r}: {self.shown[-2000:]!r}") from None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(target: Path, tmp_path: Path) -> Iterator[Terminal]:
    chat = Terminal(tmp_path, "chat", *endless(target))
    yield chat
    chat.close()


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(terminal: Terminal, tmp_path: Path) -> None:
    terminal.expect("/help lists")
    terminal.expect("> ")
    terminal.type("the quick\\\rbrown fox\r")
    # The editor ends by switching bracketed paste off; what is visible after that is the answer's.
    terminal.expect("\x1b[?2004l")
    terminal.expect_text()
    terminal.type("\x03")
    terminal.expect("stopped · ")
    terminal.expect("> ")
    saved = tmp_path / "saved.json"
    terminal.type(f"/save {saved}\r")
    terminal.expect("saved 2 messages")
    question, answer = json.loads(saved.read_text())["messages"]
    assert question == {"role": "user", "content": "the quick\nbrown fox"}
    assert answer["content"]
    terminal.expect("> ")
    terminal.type("/reset\r")
    terminal.expect("empty again")
    terminal.expect("> ")
    # Ctrl-C clears a line that is begun, warns at an empty one, and leaves when it comes right after another Ctrl-C.
    terminal.type("half a line\x03/system\r")
    assert "once more" not in terminal.expect("there is no system prompt")
    terminal.expect("> ")
    terminal.type("\x03")
    terminal.expect("once more")
    terminal.expect("> ")
    terminal.type("again\r")
    terminal.expect("\x1b[?2004l")
    terminal.expect_text()
    terminal.type("\x03")
    terminal.expect("stopped · ")
    terminal.expect("> ")
    terminal.type("\x03")
    terminal.expect("2 messages in no file: a name saves them, Enter leaves without:")
    terminal.type(f"{saved}\r")
    terminal.expect("saved 2 messages")
    assert terminal.process.wait(timeout=30) == 0
    assert json.loads(saved.read_text())["messages"][0]["content"] == "again"
    history = (tmp_path / "offload-runtime" / "chat_history").read_text()
    assert "+the quick\n+brown fox\n" in history and "half a line" not in history


HEIGHT, WIDTH = 12, 50
ITEMS = 30
ANSWER = """Some **bold** words with a <think> tag,
and a second line.

```python
def add(a, b):
    return a + b
```

"""
ANSWER += "1. item\n" * ITEMS + "\nSee [here](http://a.example/b).\n\n[1]: http://c.example\n"


class Screen:
    """A terminal, as far as rich steers one here: all lines that it has shown, those of the scrollback included."""

    def __init__(self) -> None:
        self.lines, self._row = [""], 0

    def feed(self, shown: str) -> None:
        for code, character in re.findall(r"\x1b\[([?\d;]*[A-Za-z])|(.)", shown, re.DOTALL):
            if code.endswith("A"):
                self._row -= int(code[:-1])
                assert self._row >= 0 and len(self.lines) - self._row <= HEIGHT, "the scrollback cannot be reached"
            elif code == "2K":
                self.lines[self._row] = ""
            elif character == "\n":
                self._row += 1
                self.lines += [""] * (self._row == len(self.lines))
            elif character not in ("", "\r"):
                self.lines[self._row] += character

    @property
    def text(self) -> str:
        lines = [line.strip() for line in self.lines]
        return "\n".join(line for line in lines if line)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_what_stays_is_the_markdown_however_it_came(size: int) -> None:
    output, screen = io.StringIO(), Screen()
    writer = MarkdownWriter(Console(file=output, force_terminal=True, width=WIDTH, height=HEIGHT, _environ={}))
    for start in range(0, len(ANSWER), size):
        writer.write(ANSWER[start : start + size])
    writer.close()
    screen.feed(output.getvalue())
    items = "\n".join(f"{number + 1} item" for number in range(ITEMS))
    code = "def add(a, b):\nreturn a + b"
    begin = "Some bold words with a <think> tag,\nand a second line."
    assert screen.text == f"{begin}\n{code}\n{items}\nSee here (http://a.example/b).\n[1]: http://c.example"
    assert "\x1b[1mbold" in output.getvalue() and output.getvalue().endswith("\n")


def test_the_newest_words_are_seen_at_once() -> None:
    output, screen = io.StringIO(), Screen()
    writer = MarkdownWriter(Console(file=output, force_terminal=True, width=WIDTH, height=HEIGHT, _environ={}))
    writer.write("A block.\n\nand **the be\x07ginning\x1b[2J of one")
    screen.feed(output.getvalue())
    assert screen.text == "A block.\nand **the beginning[2J of one"  # control characters do not steer the terminal
    writer.close()


def test_what_is_thought_passes_by_and_leaves_a_line() -> None:
    output, screen = io.StringIO(), Screen()
    writer = MarkdownWriter(Console(file=output, force_terminal=True, width=WIDTH, height=HEIGHT, _environ={}))
    for piece in ("Well, what ", "was it?\x1b[2J\nThe newest", " line"):
        writer.think(piece)
    screen.feed(output.getvalue())
    assert screen.text == "The newest line"
    for piece in ("It was\n", "\nthis.\n\n"):
        writer.write(piece)
    writer.think("Or not?")
    writer.close()
    screen = Screen()
    screen.feed(output.getvalue())
    assert screen.text == "thought 7 words: /thoughts shows them\nIt was\nthis.\nthought 2 words: /thoughts shows them"


def shown_by(write: Callable[[], None]) -> str:
    """What a terminal gets that is stdout meanwhile."""
    master, slave = pty.openpty()
    with pytest.MonkeyPatch.context() as patch, os.fdopen(slave, "w") as stdout:
        patch.setattr(sys, "stdout", stdout)
        write()
    shown = b""
    with suppress(OSError):  # which says that there is no more
        while piece := os.read(master, 65536):
            shown += piece
    os.close(master)
    return shown.decode()


@pytest.mark.parametrize("template_opens", [False, True])
def test_a_chat_folds_what_is_thought(
    template_opens: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the beginning of an answer has of a mark may stand at the end of the prompt."""
    runtime = FakeRuntime()
    runtime.tokenizer = byte_level_tokenizer()
    runtime.prompt = runtime.tokenizer.encode("<think>\n") if template_opens else []
    runtime.pieces = ["" if template_opens else "<think>\n", "Hm, 2", " + 2.</thi", "nk>\n\n", "Four", "."]
    session, _ = at_a_terminal(runtime)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Screen()
    screen.feed(shown_by(lambda: session.take("one")).replace("\r", ""))
    assert [line for line in screen.text.splitlines() if "quiet" not in line] == [
        "thought 4 words: /thoughts shows them", "Four."
    ]  # fmt: skip
    session.take("/thoughts")
    assert "Hm, 2 + 2.\n" in capsys.readouterr().err


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), ("TERM", "xterm")])
def test_where_it_is_left_as_it_is(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)

    def write() -> None:
        with answer_writer() as (show, _):
            show("*a*\n")

    assert (shown_by(write) == "*a*\r\n") == (value != "xterm")
