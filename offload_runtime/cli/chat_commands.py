"""The `/commands` of a chat."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from offload_runtime.cli import terminal
from offload_runtime.cli.chat_session import ChatSession, Command, only_here
from offload_runtime.cli.generate import show_stats
from offload_runtime.cli.options import sampling_values, with_sampling_option
from offload_runtime.errors import OptionError
from offload_runtime.options import require
from offload_runtime.params import GenerationParams
from offload_runtime.sizes import counted, format_bytes

if TYPE_CHECKING:
    from offload_runtime.engine import TokenStream


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
    terminal.status_line(f"  {session.count}; {used} tokens have been read, their keys and values take {kept}")
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
    session.save_as(path)


def load(session: ChatSession, argument: str) -> None:
    path = terminal.user_path(argument)
    with only_here(path if session.path else None, may_begin=False) as held:
        kept = session.conversation.load(path)
        again = "" if kept or not session.conversation.messages else "; what was said is read again"
        if session.path is not None:
            session.held.close()
            session.held.enter_context(held.pop_all())
            session.path, again = path, f"{again}; it is saved there from now on"
        session.saved = [*session.conversation.messages]
        terminal.status_line(f"loaded {session.count} from {path}{again}")
        _recap(session)


_SHOWN_OF_RECAP = 4  # messages


def _recap(session: ChatSession) -> None:
    """Show the last messages, a line each."""
    shown_messages = [message for message in session.conversation.messages if message["role"] != "system"]
    if (earlier := len(shown_messages) - _SHOWN_OF_RECAP) > 0:
        terminal.status_line(f"  … {counted(earlier, 'earlier message')}")
    for message in shown_messages[-_SHOWN_OF_RECAP:]:
        name = {"user": "you", "assistant": "model"}.get(message["role"], message["role"])
        terminal.status_line(f"  {name}: {terminal.shortened(terminal.one_line(_said(session, message)), most=160)}")


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
    "/load": Command("FILE", "go on with a saved conversation", load),
    "/exit": Command("", "leave", _exit),
}
