"""`offload-runtime chat`: turns of a conversation, at a terminal or through a pipe."""

from __future__ import annotations

import sys
from pathlib import Path

from offload_runtime.cli import terminal
from offload_runtime.cli.chat_commands import COMMANDS, load
from offload_runtime.cli.chat_session import ChatSession, only_here
from offload_runtime.cli.generate import load_runtime
from offload_runtime.cli.hosts import has_layers_for_another
from offload_runtime.cli.options import SAMPLING_OPTIONS, ChatOptions, refuse_early
from offload_runtime.errors import OptionError, StorageError
from offload_runtime.options import require


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
    with only_here(options.session) as held, load_runtime(options, config, options.check) as runtime:
        options, line = options.with_defaults(runtime.sampling_defaults)
        if line is not None:
            terminal.status_line(line)
        conversation = runtime.conversation(options.system, template_options=options.for_template or None)
        session = ChatSession(runtime, conversation, options, output, COMMANDS, held=held)
        if options.session is not None:
            _resume(session, options.session)
        converse = _converse_at_terminal if interactive else _converse_through_pipe
        converse(session)
        if session.unsaved is not None:
            lost = f"the conversation was not saved to {session.unsaved}: every attempt since its last turn has failed"
            raise StorageError(f"{lost}, as was said above")


def _resume(session: ChatSession, path: Path) -> None:
    """Go on from a file, if it is there, and save to it from now on."""
    if path.exists():
        asked = session.conversation.messages
        load(session, str(path))
        fine = asked == [message for message in session.conversation.messages if message["role"] == "system"]
        require(fine or not asked, f"{path} has another system prompt: drop --system, or see /system in the chat")
    session.path = path


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
