"""A chat's conversation and the way its answers are printed. The session knows nothing of terminals: it takes the text
of a turn, which is a command or a message, and prints; what it may `ask` is asked by whoever reads the turns."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from offload_runtime.cli import terminal
from offload_runtime.cli.generate import FoldedAnswer, answer_line, answer_record, run_record, stream_answer
from offload_runtime.cli.markdown import answer_writer
from offload_runtime.cli.options import ChatOptions
from offload_runtime.errors import OffloadError
from offload_runtime.options import require, require_unicode
from offload_runtime.sizes import counted

if TYPE_CHECKING:
    from offload_runtime.engine import Conversation, GenerationResult, GenerationStats, Runtime, TokenStream


class Command(NamedTuple):
    """One `/command`: what follows its name, one line of help, and what it does."""

    argument: str
    help: str
    run: Callable[[ChatSession, str], bool | None]  # False where Ctrl-C has stopped an answer


@dataclass
class ChatSession:
    """One conversation and the way its answers are printed. With `--json` each answer is one object, with what there is
    to tell of the run, on `output`.

    Attributes:
        last_stats: Figures of the last answer.
        thoughts: What was thought before it, where that was not shown.
        path: Where the conversation is saved after every turn, `held` against other processes.
        unsaved: The file that was last to have the conversation and could not be written.
        saved: Messages that a file has.
        files: Names and texts that come with the next message.
        begun: What the next line begins with.
        ask: Puts a question to the user, whose answer may be empty; None where there is nobody.
    """

    runtime: Runtime
    conversation: Conversation
    options: ChatOptions
    output: TextIO
    commands: Mapping[str, Command]
    last_stats: GenerationStats | None = None
    thoughts: str = ""
    path: Path | None = None
    held: ExitStack = field(default_factory=ExitStack)
    unsaved: Path | None = None
    saved: list[dict[str, str]] = field(default_factory=list)
    files: list[tuple[str, str]] = field(default_factory=list)
    begun: str = ""
    ask: Callable[[str], str] | None = None

    @property
    def count(self) -> str:
        """Say how many messages there are."""
        return counted(len(self.conversation.messages), "message")

    def take(self, text: str) -> bool:
        """Answer a message or obey a `/command` (`//…` is a message that begins with a slash); returns False when the
        answer was stopped by Ctrl-C.

        A typed error costs one line and the turn, never the conversation.
        """
        is_message = not text.startswith("/") or text.startswith("//")
        name, *argument = text.split(maxsplit=1)
        try:
            require_unicode("the line", text)  # a terminal may send anything
            if is_message:
                return self.say(text.removeprefix("/"))
            listing = f"known are {' '.join(self.commands)} (begin with // to send a message with a slash)"
            require(name in self.commands, f"unknown command {name}; {listing}")
            command = self.commands[name]
            require(bool(argument) or command.argument != "FILE", f"{name} needs the name of a file: {name} FILE")
            return command.run(self, "".join(argument)) is not False
        except OffloadError as error:
            # A reader of JSON gets an object for every turn, this one too, with what there is of the answer.
            if (is_message or name in ("/retry", "/edit")) and self.options.as_json:
                about = {"error": str(error), "error_type": type(error).__name__}
                self._write_json(getattr(error, "answers", ()), about)
            terminal.error_line(error)
            if is_message and self.files:
                terminal.status_line("what /file named comes with the next message: /file none takes it back")
        return True

    def say(self, text: str) -> bool:
        """Answer a message, which begins with the files that were named for it."""
        before = len(self.conversation.messages)
        answered = self.answer(self.conversation.say, "".join(map(_quoted, self.files)) + text)
        if len(self.conversation.messages) > before:
            self.files.clear()
        return answered

    def answer(
        self, start: Callable[..., TokenStream], text: str, *, stopped: str = "the message was not kept"
    ) -> bool:
        """Stream one answer to stdout and its figures to stderr."""
        try:
            with nullcontext((None, None)) if self.options.as_json else answer_writer() as (show, think):
                fold = None if show is None or think is None else partial(self._folded, show, think)
                result = stream_answer(start, text, self.options, show=show, fold=fold)
        except KeyboardInterrupt:
            terminal.status_line(f"stopped before the answer began; {stopped}")
            return False
        self.last_stats = result.stats
        if self.options.as_json:
            self._write_json([result], {})
        used, reserved = self.conversation.num_tokens, self.runtime.context_tokens
        figures = [f"context {used} of {reserved}"]
        if result.finish_reason == "length":  # what to do about an answer that was cut
            cut = f"cut after {result.stats.new_tokens} tokens: /set max-new-tokens N allows more"
            figures.append("the context is full: /reset starts over" if used >= reserved else cut)
        terminal.status_line(answer_line(result, *figures))
        self.keep()
        return result.finish_reason != "interrupted"

    def _folded(self, show: Callable[[str], None], think: Callable[[str], None], stream: TokenStream) -> FoldedAnswer:
        """Return what shows an answer without its thoughts, and keeps them for `/thoughts`."""
        from offload_runtime.server.parsers import AnswerParser

        self.thoughts = ""

        def keep(thought: str) -> None:
            self.thoughts += thought
            think(thought)

        return FoldedAnswer(AnswerParser(self.runtime.tokenizer, stream.prompt), show, keep)

    def keep(self) -> None:
        """Save the turn, where turns are saved; the conversation goes on if that fails."""
        try:
            if self.path is not None:
                self.save(self.path)
        except OffloadError as error:
            terminal.error_line(error)

    def save(self, path: Path) -> None:
        """Save the conversation to a file. Raises as `Conversation.save`."""
        self.unsaved = path
        self.conversation.save(path)
        self.unsaved, self.saved = None, [*self.conversation.messages]

    def save_as(self, path: Path) -> None:
        """Do the same, and say so."""
        self.save(path)
        terminal.status_line(f"saved {self.count} to {path}")

    def offer_to_save(self) -> None:
        """Ask for a file, where the user leaves what no file has."""
        messages, is_left = self.conversation.messages, self.ask is None
        is_left |= messages == self.saved or all(message["role"] == "system" for message in messages)
        while not is_left and self.ask is not None:
            name = self.ask(f"{self.count} in no file: a name saves them, Enter leaves without: ")
            try:
                if name:
                    self.save_as(terminal.user_path(name))
                is_left = True
            except OffloadError as error:
                terminal.error_line(error)

    def _write_json(self, answers: Sequence[GenerationResult], record: dict[str, Any]) -> None:
        for result in answers:  # there is one, or none where an error came before it
            record |= {**answer_record(result), **run_record(self.runtime, self.options)}
        terminal.write_json(record, self.output)


def _quoted(file: tuple[str, str]) -> str:
    """Write a file into a message: its name, and its text in a fence that nothing in it ends."""
    name, text = file
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{name}:\n{fence}\n{text.rstrip()}\n{fence}\n\n"


def only_here(path: Path | None, *, may_begin: bool = True) -> ExitStack:
    """While a session is used no other process may use it, which is found out before a model is loaded. Beside a file
    that is something else nothing is made."""
    from offload_runtime.engine.sessions import read_conversation, session_files

    held = ExitStack()
    if path is not None:
        if not may_begin or os.path.exists(path):
            read_conversation(path)
        held.enter_context(session_files(path))
    return held
