"""`offload-runtime chat`: turns of a conversation, at a terminal or through a pipe, and its `/commands`.

The session below knows nothing of terminals: it takes one turn's text, which is a command or a message, and prints;
what it may `ask` is asked by whoever reads the turns.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from offload_runtime.cli import terminal
from offload_runtime.cli.generate import (
    FoldedAnswer,
    answer_line,
    answer_record,
    load_runtime,
    run_record,
    show_stats,
    stream_answer,
)
from offload_runtime.cli.hosts import has_layers_for_another
from offload_runtime.cli.options import (
    SAMPLING_OPTIONS,
    ChatOptions,
    refuse_early,
    sampling_values,
    with_sampling_option,
)
from offload_runtime.errors import OffloadError, OptionError, StorageError
from offload_runtime.options import require, require_unicode
from offload_runtime.params import GenerationParams
from offload_runtime.sizes import counted, format_bytes

if TYPE_CHECKING:
    from offload_runtime.engine import Conversation, GenerationResult, GenerationStats, Runtime, TokenStream


def chat(options: ChatOptions) -> None:
    """Hold a conversation; through a pipe every line of stdin is one turn."""
    if has_layers_for_another(options):
        return
    config = options.config  # judged before anything is loaded
    # A person needs one of the two output streams on the terminal to see the prompt at all.
    interactive = sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())
    refuse_early(config)
    require(not (interactive and options.as_json), "--json is for programs: send the turns through a pipe, or drop it")
    output = sys.stdout  # where JSON goes, and nothing else
    with _only_here(options.session) as held, load_runtime(options, config, options.check) as runtime:
        options, line = options.with_defaults(runtime.sampling_defaults)
        if line is not None:
            terminal.status_line(line)
        conversation = runtime.conversation(options.system, template_options=options.for_template or None)
        session = ChatSession(runtime, conversation, options, output, held=held)
        if options.session is not None:
            session.resume(options.session)
        converse = _converse_at_terminal if interactive else _converse_through_pipe
        converse(session)
        if session.unsaved is not None:
            lost = f"the conversation was not saved to {session.unsaved}: every attempt since its last turn has failed"
            raise StorageError(f"{lost}, as was said above")


def _only_here(path: Path | None, *, may_begin: bool = True) -> ExitStack:
    """While a session is used no other process may use it, which is found out before a model is loaded. Beside a file
    that is something else nothing is made."""
    from offload_runtime.engine.sessions import read_conversation, session_files

    held = ExitStack()
    if path is not None:
        if not may_begin or os.path.exists(path):
            read_conversation(path)
        held.enter_context(session_files(path))
    return held


def _converse_at_terminal(session: ChatSession) -> None:
    """Read turns from the terminal until Ctrl-D, `/exit`, or Ctrl-C twice in a row."""
    terminal.status_line("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")
    with_files = [name for name, command in COMMANDS.items() if command.argument.strip("[]") in ("FILE", "PATH")]
    settings = [f"/set {name}" for name in SAMPLING_OPTIONS]
    read = terminal.line_editor([*COMMANDS, *settings], with_files)
    session.ask = terminal.ask
    # A Ctrl-C at the empty prompt leaves when the key before it was a Ctrl-C too, be it one that stopped an answer.
    interrupted = False
    while True:
        try:
            begun, session.begun = session.begun, ""
            text = read(begun).strip()
            if text:
                with terminal.silent_keyboard():
                    interrupted = not session.take(text)
        except EOFError:
            break
        except KeyboardInterrupt:
            if interrupted:
                break
            interrupted = True
            terminal.status_line("Ctrl-C once more or Ctrl-D leaves")
    session.offer_to_save()


def _converse_through_pipe(session: ChatSession) -> None:
    """Take one line of stdin as one turn until the input ends, without waiting for more than one line; Ctrl-C ends the
    program, there is nobody to go on."""
    for number, raw in enumerate(iter(sys.stdin.buffer.readline, b""), start=1):
        try:
            text = terminal.decode_utf8(raw, f"line {number} of stdin").strip()
            if text and not session.take(text):
                raise KeyboardInterrupt
        except OptionError as error:  # of a line that is not text
            terminal.error_line(error)
        except EOFError:
            return


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
    last_stats: GenerationStats | None = None
    thoughts: str = ""
    path: Path | None = None
    held: ExitStack = field(default_factory=ExitStack)
    unsaved: Path | None = None
    saved: list[dict[str, str]] = field(default_factory=list)
    files: list[tuple[str, str]] = field(default_factory=list)
    begun: str = ""
    ask: Callable[[str], str] | None = None

    def resume(self, path: Path) -> None:
        """Go on from a file, if it is there, and save to it from now on."""
        if path.exists():
            asked = self.conversation.messages
            _load(self, str(path))
            fine = asked == [message for message in self.conversation.messages if message["role"] == "system"]
            require(fine or not asked, f"{path} has another system prompt: drop --system, or see /system in the chat")
        self.path = path

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
            listing = f"known are {' '.join(COMMANDS)} (begin with // to send a message with a slash)"
            require(name in COMMANDS, f"unknown command {name}; {listing}")
            command = COMMANDS[name]
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
            with nullcontext((None, None)) if self.options.as_json else terminal.answer_writer() as (show, think):
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

    def offer_to_save(self) -> None:
        """Ask for a file, where the user leaves what no file has."""
        messages, is_left = self.conversation.messages, self.ask is None
        is_left |= messages == self.saved or all(message["role"] == "system" for message in messages)
        while not is_left and self.ask is not None:
            name = self.ask(f"{_count(self)} in no file: a name saves them, Enter leaves without: ")
            try:
                if name:
                    _save(self, name)
                is_left = True
            except OffloadError as error:
                terminal.error_line(error)

    def _write_json(self, answers: Sequence[GenerationResult], record: dict[str, Any]) -> None:
        for result in answers:  # there is one, or none where an error came before it
            record |= {**answer_record(result), **run_record(self.runtime, self.options)}
        terminal.write_json(record, self.output)


# --- commands


class Command(NamedTuple):
    """One `/command`: what follows its name, one line of help, and what it does."""

    argument: str
    help: str
    run: Callable[[ChatSession, str], bool | None]  # False where Ctrl-C has stopped an answer


def _help(session: ChatSession, argument: str) -> None:
    for name, command in COMMANDS.items():
        usage = f"{name} {command.argument}".rstrip()
        terminal.status_line(f"  {usage:<18} {command.help}")
    terminal.status_line("  Alt-Enter or a \\ at the end of a line starts a new line; // sends a leading slash.")
    terminal.status_line("  Ctrl-C stops an answer, once more leaves; so does Ctrl-D.")


def _reset(session: ChatSession, argument: str) -> None:
    session.conversation.reset()
    terminal.status_line("the conversation is empty again")


def _system(session: ChatSession, argument: str) -> None:
    if not argument:
        current = [message["content"] for message in session.conversation.messages if message["role"] == "system"]
        terminal.status_line(f"system prompt: {current[0]}" if current else "there is no system prompt")
        return
    session.conversation.set_system(None if argument == "none" else argument)
    terminal.status_line(f"system prompt {'removed' if argument == 'none' else 'set'}; the conversation is empty again")


def _retry(session: ChatSession, argument: str) -> bool:
    """Answer the last message anew, perhaps several times, and let the user choose which answer stays."""
    count = int(argument) if re.fullmatch("[1-9][0-9]?", argument) else 0
    require(count > 0 or not argument, f"/retry {terminal.shortened(argument)}: give a number of answers from 1 to 99")
    differ = session.options.params.sampling.temperature > 0
    require(count < 2 or differ, "at temperature 0 all answers are the same: /set temperature 0.7 lets them differ")
    states, went_on = [session.conversation.state], True
    while went_on and len(states) <= max(1, count):
        if count > 1:
            terminal.status_line(f"answer {len(states)} of {count}:")
        went_on = _regenerate(session)
        states.append(session.conversation.state)
    if count > 1 and session.ask is not None:
        session.conversation.go_back(states[_choice(session.ask, len(states) - 1)])
        session.keep()
    return went_on


def _choice(ask: Callable[[str], str], last: int) -> int:
    """Ask which of several answers stays: by itself the last one."""
    while (said := ask(f"Which one stays, 1 to {last}, or 0, the one before? Enter keeps {last}: ")) not in ("", "0"):
        if said.isdecimal() and 0 < int(said) <= last:
            return int(said)
    return last if said == "" else 0


def _regenerate(session: ChatSession) -> bool:
    """Answer the last message anew, with noise that no answer had."""
    conversation = session.conversation

    def start(_: str, *, params: GenerationParams, **options: Any) -> TokenStream:
        sampling = replace(params.sampling, noise_id=conversation.num_regenerated + 1)
        reply = conversation.regenerate(replace(params, sampling=sampling), **options)
        if sampling.temperature == 0:
            same = "at temperature 0 the answer is always the same"
            terminal.status_line(f"{same}: /set temperature 0.7 lets it differ")
        return reply

    return session.answer(start, "", stopped="the old one stays")


def _edit(session: ChatSession, argument: str) -> bool:
    """Answer another text in place of the last message."""
    users = [message["content"] for message in session.conversation.messages if message["role"] == "user"]
    require(bool(users), "the conversation has no message yet: say something first")
    if argument:
        return session.answer(session.conversation.edit, argument, stopped="the old message and its answer stay")
    require(session.ask is not None, "/edit needs the new text here: /edit TEXT")
    session.begun = f"/edit {users[-1]}"
    return True


def _file(session: ChatSession, argument: str) -> None:
    if argument == "none":
        session.files.clear()
    elif argument:
        session.files.append((argument, terminal.read_text(argument)))
    for name, text in session.files:
        terminal.status_line(f"{name}, {counted(len(text), 'character')}, comes with the next message")
    if not session.files:
        terminal.status_line("no file comes with the next message")


def _quoted(file: tuple[str, str]) -> str:
    """Write a file into a message: its name, and its text in a fence that nothing in it ends."""
    name, text = file
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{name}:\n{fence}\n{text.rstrip()}\n{fence}\n\n"


def _said(session: ChatSession, message: Mapping[str, str]) -> str:
    """Return what a message says, without what was thought before."""
    from offload_runtime.engine.chat_template import thinking_marks

    text = message["content"]
    for end in thinking_marks(session.runtime.tokenizer).values() if message["role"] == "assistant" else ():
        text = text.rpartition(end)[2].lstrip()
    return text


def _copy(session: ChatSession, argument: str) -> None:
    answers = [one for one in session.conversation.messages if one["role"] == "assistant"]
    require(bool(answers), "there is no answer yet")
    require(session.ask is not None, "/copy is for a terminal: here the answer is on stdout already")
    text = _said(session, answers[-1])
    terminal.status_line(f"copied {counted(len(text), 'character')} {terminal.copy(text)}")


def _thoughts(session: ChatSession, argument: str) -> None:
    for line in session.thoughts.splitlines() or ["nothing was thought aloud that was not shown"]:
        terminal.status_line(line)


def _undo(session: ChatSession, argument: str) -> None:
    dropped = terminal.one_line(session.conversation.undo())
    terminal.status_line(f"dropped your last message and its answer: {terminal.shortened(dropped)}")
    session.keep()


def _set(session: ChatSession, argument: str) -> None:
    changed, _, text = argument.partition(" ")
    if changed:
        session.options = with_sampling_option(session.options, changed, text.strip())
    for name, value in sampling_values(session.options.params).items():
        if changed in ("", name):
            terminal.status_line(f"  {name:<18} {value}")


def _context(session: ChatSession, argument: str) -> None:
    runtime, used = session.runtime, session.conversation.num_tokens
    kept = format_bytes(used * runtime.config.kv_bytes_per_token(runtime.dtype.itemsize))
    terminal.status_line(f"  {_count(session)}; {used} tokens have been read, their keys and values take {kept}")
    terminal.status_line(
        f"  room for {runtime.context_tokens - used} more of {runtime.context_tokens} tokens (--context)"
    )


def _stats(session: ChatSession, argument: str) -> None:
    if session.last_stats is None:
        terminal.status_line("no answer yet")
    else:
        show_stats(session.last_stats, str(session.runtime.device))
    for line in (session.runtime.load_report, session.runtime.placement):
        terminal.status_line(f"  {line}")


def _save(session: ChatSession, argument: str) -> None:
    path = terminal.user_path(argument) if argument else session.path
    if path is None:
        raise OptionError("/save needs the name of a file: /save FILE (or start with --session FILE)")
    session.save(path)
    terminal.status_line(f"saved {_count(session)} to {path}")


def _load(session: ChatSession, argument: str) -> None:
    path = terminal.user_path(argument)
    with _only_here(path if session.path else None, may_begin=False) as held:
        kept = session.conversation.load(path)
        again = "" if kept or not session.conversation.messages else "; what was said is read again"
        if session.path is not None:
            session.held.close()
            session.held.enter_context(held.pop_all())
            session.path, again = path, f"{again}; it is saved there from now on"
        session.saved = [*session.conversation.messages]
        terminal.status_line(f"loaded {_count(session)} from {path}{again}")
        _recap(session)


_SHOWN_OF_RECAP = 4  # messages


def _recap(session: ChatSession) -> None:
    """Show the last messages, a line each."""
    told = [message for message in session.conversation.messages if message["role"] != "system"]
    if (earlier := len(told) - _SHOWN_OF_RECAP) > 0:
        terminal.status_line(f"  … {counted(earlier, 'earlier message')}")
    for message in told[-_SHOWN_OF_RECAP:]:
        name = {"user": "you", "assistant": "model"}.get(message["role"], message["role"])
        terminal.status_line(f"  {name}: {terminal.shortened(terminal.one_line(_said(session, message)), most=160)}")


def _count(session: ChatSession) -> str:
    return counted(len(session.conversation.messages), "message")


def _exit(session: ChatSession, argument: str) -> None:
    raise EOFError  # as Ctrl-D does


COMMANDS = {
    "/help": Command("", "this list", _help),
    "/retry": Command("[N]", "answer the last message anew; N times, and you choose which answer stays", _retry),
    "/edit": Command("[TEXT]", "change the last message, and have that answered in its place", _edit),
    "/file": Command("[PATH]", "put a text file into the next message; none takes it back", _file),
    "/copy": Command("", "put the last answer on the clipboard", _copy),
    "/thoughts": Command("", "show what was thought before the last answer", _thoughts),
    "/undo": Command("", "drop the last message and its answer", _undo),
    "/set": Command("[NAME VALUE]", "show how tokens are sampled, or change it: /set temperature 0.7", _set),
    "/context": Command("", "what the conversation holds, and how much room is left", _context),
    "/reset": Command("", "forget the conversation, keep the system prompt", _reset),
    "/system": Command("[TEXT]", "show the system prompt, or set it and start over (none removes it)", _system),
    "/stats": Command("", "figures of the last answer, and where the weights live", _stats),
    "/save": Command("[FILE]", "keep the conversation, with what was read of it", _save),
    "/load": Command("FILE", "go on with a saved conversation", _load),
    "/exit": Command("", "leave", _exit),
}
