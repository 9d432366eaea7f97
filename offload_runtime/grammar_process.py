"""Compiles schemas and grammars in a process of its own first, which may die of what a request says.

llguidance overflows its stack at some schemas and at long chains of rules (SIGSEGV), and panics at others; nothing in a
process survives the first. What it compiles cannot be handed from process to process, so a server compiles a text once
more itself, after the other process has compiled the same text well, with less stack, and has followed it for a few
tokens. That takes as long again: a millisecond for an ordinary schema. The process holds the tokenizer a second time
(150 MB where there are 150,000 tokens), starts with the first grammar and knows neither torch nor a GPU.
"""

from __future__ import annotations

import json
import math
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_runtime.errors import OptionError, UnavailableError

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Whatever a schema says of its own: keywords that are not enforced are errors, and white space is a blank or a new line
# with its indentation, as small models else go on with it to the end of their answers.
JSON_OPTIONS: Any = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": r" |\n[ \t]{0,40}"}
_MOST_LEXER_STATES = 25_000  # of up to 2 kB
# What compiling one text may take: the largest ordinary schemas take a second and 50 MB.
_MOST_SECONDS, _MOST_BYTES = 5, 1 << 29
_STACK_BYTES = 1 << 21  # what llguidance's own threads have, a quarter of what a thread of the server has
_TRIAL_TOKENS = 12
_MOST_WAIT_S = 60.0  # of a machine so busy that the process does not get its 5 s

# What to do about messages that do not say so, by a part of them.
_REMEDIES = {
    "for integer range": "give bounds of up to ±(2**63 - 1024), or leave them out",
    "for float range": "give bounds of less than ±10**18, or leave them out",
    "has too many digits": "give one of fewer digits, or leave it out",
}


class GrammarFactory:
    """Makes matchers with llguidance, in either process.

    Args:
        tokenizer: As JSON.
        vocab_size: Of the logits.
        eos_token_ids: What may end an answer; empty for the tokenizer's own.

    Raises:
        OptionError: llguidance cannot read the tokenizer.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        from llguidance import LLParserLimits, LLTokenizer

        with _refusing("answers of this model's tokenizer cannot be bound to a grammar"):
            self.tokenizer = LLTokenizer(tokenizer, vocab_size, eos_token=eos_token_ids or None)
        self._limits = LLParserLimits(max_lexer_states=_MOST_LEXER_STATES, verbose_errors=False)

    def matcher(self, name: str, text: str) -> LLMatcher:
        """Compile a `json_schema` or a `grammar`, whichever `name` says. Raises `OptionError`."""
        from llguidance import LLMatcher

        with _refusing(f"{name} cannot be followed"):
            if name == "grammar":
                grammar = LLMatcher.grammar_from_lark(text)
            else:
                grammar = LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
            matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise OptionError(f"{name} cannot be followed: {reason_of(matcher)}")
        return matcher


def reason_of(matcher: LLMatcher) -> str:
    """Return what llguidance says is wrong, without the lines in which it shows where, and what helps."""
    reason = str(matcher.get_error()).split("\n<")[0].split("\n   1 |")[0]
    return reason + next((f": {remedy}" for part, remedy in _REMEDIES.items() if part in reason), "")


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Make an `OptionError` of whatever llguidance raises; its panics are no `Exception`."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise OptionError(f"{what}: {error}") from error


class GrammarProcess:
    """The process that compiles first, started again when it has died. For one thread at a time.

    Args:
        factory_arguments: Of its `GrammarFactory`.

    Raises:
        UnavailableError: It cannot be started.
    """

    def __init__(self, *factory_arguments: Any) -> None:
        self._arguments, self._is_ready = factory_arguments, False
        self._start()

    def require_ready(self) -> None:
        """Wait until it has read the tokenizer. Raises `OptionError` if it cannot."""
        if not self._is_ready:
            self._receive("answers of this model's tokenizer cannot be bound to a grammar")
            self._is_ready = True

    def check(self, name: str, text: str) -> None:
        """Compile a text there.

        Raises:
            OptionError: As of `GrammarFactory.matcher`, or the process has died of it.
            UnavailableError: It cannot be started again.
        """
        if self._process.poll() is not None:
            self._stop()
            self._start()
        self.require_ready()
        with self._broken_off():
            with suppress(OSError):  # what it died of is found below
                self._connection.send_bytes(json.dumps([name, text]).encode())
            self._receive(f"{name} cannot be followed")

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        begin = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({theirs.fileno()})"
        try:
            with theirs:  # a Ctrl-C at the terminal is not for it
                self._process = subprocess.Popen(
                    [sys.executable, "-c", begin], pass_fds=[theirs.fileno()], start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip
        except OSError as error:
            ours.close()
            raise UnavailableError(f"no process can be started that compiles grammars ({error}): try again") from error
        self._connection, self._is_ready = Connection(ours.detach()), False
        self._stop = weakref.finalize(self, _end, self._process, self._connection)
        with self._broken_off(), suppress(OSError):
            self._connection.send_bytes(json.dumps(self._arguments).encode())

    def _receive(self, what: str) -> None:
        """Wait for an answer, which is the message of an error or empty. Raises `OptionError`."""
        with self._broken_off():
            try:
                if not self._connection.poll(_MOST_WAIT_S):
                    self._process.kill()
                message = self._connection.recv_bytes().decode()
            except (EOFError, OSError):
                died = signal.Signals(-code).name if (code := self._process.wait()) < 0 else f"exit code {code}"
                if not self._is_ready:
                    raise UnavailableError(f"{what}: the process that compiles grammars has ended ({died})") from None
                limits = f"{_MOST_SECONDS} s, {_MOST_BYTES >> 20} MiB and {_STACK_BYTES >> 20} MiB of stack"
                remedy = "use smaller numbers, less of it in one another, or fewer rules"
                raise OptionError(f"{what}: compiling it takes more than {limits} ({died}): {remedy}") from None
        if message:
            raise OptionError(message)

    @contextmanager
    def _broken_off(self) -> Iterator[None]:
        """A Ctrl-C while it is asked ends it: its answer would be taken for that to the next question."""
        try:
            yield
        except KeyboardInterrupt:
            self._stop()
            raise


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()


# --- in the process itself


def serve(descriptor: int) -> None:
    """Compile what comes through a socket until it is closed. It is all that the process does."""
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(Connection(descriptor),))
    thread.start()
    thread.join()


def _serve(connection: Connection) -> None:
    with suppress(EOFError, OSError):  # whoever asks has gone
        arguments = json.loads(connection.recv_bytes())
        try:
            factory = GrammarFactory(*arguments)
        except OptionError as error:
            connection.send_bytes(str(error).encode())
            return
        connection.send_bytes(b"")
        while True:
            name, text = json.loads(connection.recv_bytes())
            _limit()
            message = ""
            try:
                _follow(factory.matcher(name, text))
            except OptionError as error:
                message = str(error)
            connection.send_bytes(message.encode("utf-8", "backslashreplace"))


def _limit() -> None:
    """Let the next text take no more time and memory than it may, as far as the system has such limits."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + _MOST_SECONDS, most))
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (held + _MOST_BYTES, most))


def _follow(matcher: LLMatcher) -> None:
    """Take a few tokens that are allowed, as an answer would: what kills at that kills here."""
    state, chance = matcher.deep_copy(), random.Random(0)
    for _ in range(_TRIAL_TOKENS):
        mask = state.compute_bitmask()
        allowed = int.from_bytes(mask, "little")
        if not allowed or state.is_stopped():
            return
        behind = allowed >> chance.randrange(allowed.bit_length())  # its highest bit is set
        state.consume_token(allowed.bit_length() - behind.bit_length() + (behind & -behind).bit_length() - 1)
