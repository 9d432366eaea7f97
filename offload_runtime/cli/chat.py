"""`offload-runtime chat`: turns of a conversation, at a terminal or through a pipe.

The session below knows nothing of terminals: it takes one turn's text, which is a command or a message, and prints.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from offload_runtime.cli.answer import load_runtime, stream_answer
from offload_runtime.cli.chat_commands import EndOfChat, find_command
from offload_runtime.cli.render import result_record, speed_figures
from offload_runtime.cli.terminal import decode_utf8, error_line, only_json, status_line, write_json, write_text
from offload_runtime.config import GenerationParams, RuntimeConfig
from offload_runtime.errors import BudgetError, OffloadError, OptionError

if TYPE_CHECKING:
    from offload_runtime.engine import Conversation, GenerationResult, GenerationStats, Runtime


class ChatSession:
    """One conversation and the way its answers are printed. Owns nothing but the last answer's figures."""

    def __init__(
        self,
        runtime: Runtime,
        conversation: Conversation,
        config: RuntimeConfig,
        params: GenerationParams,
        *,
        write_record: Callable[[dict[str, object]], None] | None,
        show_progress: bool,
    ) -> None:
        """`write_record` takes each answer as one object instead of text on stdout; None prints text."""
        self.runtime = runtime
        self.conversation = conversation
        self.last_stats: GenerationStats | None = None
        self._config = config
        self._params = params
        self._write_record = write_record
        self._show_progress = show_progress

    def take(self, text: str) -> bool:
        """Answer a message or obey a `/command`; returns False when the answer was stopped by Ctrl-C.

        A typed error costs one line and the turn, never the conversation.
        """
        try:
            command = find_command(text)
            if command is not None:
                command.run(self, text.partition(" ")[2].strip())
                return True
            return self._answer(text.removeprefix("/") if text.startswith("//") else text)
        except OffloadError as error:
            self._report(error, is_turn=not text.startswith("/") or text.startswith("//"))
            return True

    def _answer(self, text: str) -> bool:
        """Stream one answer to stdout and its figures to stderr."""
        as_text = self._write_record is None
        wrote = False

        def show(piece: str) -> None:
            nonlocal wrote
            wrote = wrote or bool(piece)
            if as_text:
                write_text(piece)

        try:
            result = stream_answer(
                self.conversation.say, text, self._params, show=show, show_progress=self._show_progress
            )
        except KeyboardInterrupt:
            status_line("stopped before the answer began; the message was not kept")
            return False
        finally:
            # The next line of output, be it a status or an error, must not continue the answer's last one.
            if as_text and wrote:
                write_text("\n")
        self.last_stats = result.stats
        if self._write_record is not None:
            record = result_record(result, runtime=self.runtime, config=self._config, params=self._params)
            self._write_record(record)
        status_line(" · ".join(self._figures(result)))
        return result.finish_reason != "interrupted"

    def _figures(self, result: GenerationResult) -> list[str]:
        """Return the parts of the status line below an answer."""
        used, reserved = self.conversation.num_tokens, self.runtime.context_tokens
        figures = [*speed_figures(result.stats), f"context {used} of {reserved}"]
        if result.finish_reason == "interrupted":
            return ["stopped", *figures]
        if result.finish_reason == "length" and used >= reserved:
            return [*figures, "the context is full: /reset starts over"]
        if result.finish_reason == "length":
            return [*figures, f"cut after {result.stats.new_tokens} tokens (--max-new-tokens)"]
        return figures

    def _report(self, error: OffloadError, *, is_turn: bool) -> None:
        """Print what went wrong as one line; a reader of JSON gets an object for every turn, this one too, with what
        there is of the answer."""
        if is_turn and self._write_record is not None:
            record: dict[str, object] = {"error": str(error), "error_type": type(error).__name__}
            for result in error.answers if isinstance(error, BudgetError) else ():
                record |= result_record(result, runtime=self.runtime, config=self._config, params=self._params)
            self._write_record(record)
        error_line(error)


def run_chat(
    config: RuntimeConfig,
    params: GenerationParams,
    *,
    system: str | None,
    as_json: bool,
    explain: bool,
    show_progress: bool,
) -> None:
    """Hold a conversation with whoever is at stdin: a person at a terminal, or a program at the end of a pipe."""
    # A person needs one of the two output streams on the terminal to see the prompt at all.
    interactive = sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())
    if interactive and as_json:
        raise OptionError("--json is for programs: send the turns through a pipe, or drop --json to chat here")
    with (
        only_json(as_json) as output,
        load_runtime(config, explain=explain, show_progress=show_progress) as runtime,
    ):
        session = ChatSession(
            runtime,
            runtime.conversation(system),
            config,
            params,
            write_record=(lambda record: write_json(record, output)) if as_json else None,
            show_progress=show_progress,
        )
        status_line(runtime.load_report)
        status_line(runtime.placement)
        if interactive:
            # Here and not at the top: a pipe has no use for the line editor.
            from offload_runtime.cli.line_editor import converse_at_terminal

            converse_at_terminal(session)
        else:
            _converse_through_pipe(session)
    if config.trace is not None:
        status_line(f"trace written to {config.trace}")


def _converse_through_pipe(session: ChatSession) -> None:
    """Take one line of stdin as one turn until the input ends; Ctrl-C ends the program, there is nobody to go on."""
    for text in _lines_of_stdin():
        try:
            if text and not session.take(text):
                raise KeyboardInterrupt
        except EndOfChat:
            return


def _lines_of_stdin() -> Iterator[str]:
    """Yield stdin line by line, without waiting for more than one line, skipping lines that are not text."""
    for number, raw in enumerate(iter(sys.stdin.buffer.readline, b""), start=1):
        try:
            yield decode_utf8(raw, f"line {number} of stdin").strip()
        except OptionError as error:
            error_line(error)
