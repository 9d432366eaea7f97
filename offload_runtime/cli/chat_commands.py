"""The `/commands` of a chat: what is known of them and what each one does."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_runtime.cli.render import link_figure, prediction_figure, share_figure
from offload_runtime.cli.terminal import decode_utf8, status_line, stderr_console, user_path
from offload_runtime.config import format_bytes
from offload_runtime.errors import OptionError, StorageError

if TYPE_CHECKING:
    from offload_runtime.cli.chat import ChatSession
    from offload_runtime.engine import GenerationStats


class EndOfChat(Exception):
    """A `/command` asked to leave; not an error."""


@dataclass(frozen=True)
class Command:
    """One `/command`: its name with the slash, what follows it, one line of help, and what it does."""

    name: str
    argument: str
    help: str
    run: Callable[[ChatSession, str], None]


def find_command(text: str) -> Command | None:
    """Return the command that `text` asks for, or None when it is a message (`//…` is one that begins with a slash).

    Raises `OptionError` that lists the commands when there is none of that name.
    """
    if not text.startswith("/") or text.startswith("//"):
        return None
    name = text.split(maxsplit=1)[0]
    for command in COMMANDS:
        if command.name == name:
            return command
    known = " ".join(command.name for command in COMMANDS)
    raise OptionError(f"unknown command {name}; known are {known} (begin with // to send a message with a slash)")


def write_json_atomically(path: Path, record: Mapping[str, Any]) -> None:
    """Write `record` to `path` so that a reader sees the old file or the whole new one, never a part.

    Raises `StorageError` when the disk is full or the place cannot be written; the old file is then untouched.
    """
    temporary: Path | None = None
    try:
        # In the same directory, because a rename is atomic only within one file system.
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        temporary = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}; nothing was changed, choose another place"
        ) from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; raises `OptionError` for anything else."""
    try:
        text = decode_utf8(path.read_bytes(), str(path))
        # Arrays nested thousands deep end in a RecursionError; no conversation looks like that.
        record = json.loads(text)
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror or error}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise OptionError(f"{path} is not a saved conversation: {error}") from error
    if not isinstance(record, dict):
        raise OptionError(f"{path} is not a saved conversation: it holds a {type(record).__name__}, not an object")
    return record


def _help(session: ChatSession, argument: str) -> None:
    console = stderr_console()
    for command in COMMANDS:
        usage = f"{command.name} {command.argument}".rstrip()
        console.print(f"  {usage:<16} {command.help}", style="dim")
    console.print("  Alt-Enter or a \\ at the end of a line starts a new line; // sends a leading slash.", style="dim")
    console.print("  Ctrl-C stops an answer, once more leaves; so does Ctrl-D.", style="dim")


def _reset(session: ChatSession, argument: str) -> None:
    session.conversation.reset()
    status_line("the conversation is empty again")


def _system(session: ChatSession, argument: str) -> None:
    if not argument:
        current = [message["content"] for message in session.conversation.messages if message["role"] == "system"]
        status_line(f"system prompt: {current[0]}" if current else "there is no system prompt")
        return
    session.conversation.set_system(None if argument == "none" else argument)
    status_line(f"system prompt {'removed' if argument == 'none' else 'set'}; the conversation is empty again")


def _stats(session: ChatSession, argument: str) -> None:
    console = stderr_console()
    if session.last_stats is None:
        status_line("no answer yet")
    else:
        for name, figure in _stat_rows(session.last_stats):
            console.print(f"  {name:<20} {figure}", style="dim")
    console.print(f"  {session.runtime.load_report}", style="dim")
    console.print(f"  {session.runtime.placement}", style="dim")


def _stat_rows(stats: GenerationStats) -> list[tuple[str, str]]:
    """Return the last answer's figures with their units."""
    more = [
        ("link idle", share_figure(stats.link_idle_share)),
        ("drafting hidden", share_figure(stats.hidden_draft_share)),
        ("staged from pageable memory", format_bytes(stats.pageable_bytes) if stats.pageable_bytes else ""),
        ("time of a pass", prediction_figure(stats)), ("emulated machine", stats.emulated or ""),
    ]  # fmt: skip
    return [
        ("prompt", f"{stats.prompt_tokens} tokens"),
        ("answer", f"{stats.new_tokens} tokens in {stats.passes} passes"),
        ("first token", f"{stats.time_to_first_token_s:.2f} s"),
        ("speed", f"{stats.tok_per_s:.1f} tokens/s, {stats.tokens_per_pass:.2f} tokens per pass"),
        ("streamed per pass", format_bytes(stats.bytes_per_pass)),
        ("link", link_figure(stats)),
        ("waiting for the link", f"{stats.stall_s:.2f} s"),
        ("peak device memory", format_bytes(stats.peak_vram_bytes)),
        ("pinned memory", format_bytes(stats.pinned_bytes)),
        *((name, figure) for name, figure in more if figure),
    ]


def _save(session: ChatSession, argument: str) -> None:
    path = _path_argument("/save", argument)
    write_json_atomically(path, session.conversation.to_json())
    status_line(f"saved {_count(len(session.conversation.messages))} to {path}")


def _load(session: ChatSession, argument: str) -> None:
    path = _path_argument("/load", argument)
    session.conversation.restore(read_json_object(path))
    status_line(f"loaded {_count(len(session.conversation.messages))} from {path}")


def _exit(session: ChatSession, argument: str) -> None:
    raise EndOfChat


def _path_argument(command: str, argument: str) -> Path:
    """Return the file that a command names; raises `OptionError` when it names none."""
    if not argument:
        raise OptionError(f"{command} needs the name of a file: {command} FILE")
    return user_path(argument)


def _count(messages: int) -> str:
    """Write a number of messages for people."""
    return "1 message" if messages == 1 else f"{messages} messages"


COMMANDS = (
    Command("/help", "", "this list", _help),
    Command("/reset", "", "forget the conversation, keep the system prompt", _reset),
    Command("/system", "[TEXT]", "show the system prompt, or set it and start over (none removes it)", _system),
    Command("/stats", "", "figures of the last answer, and where the weights live", _stats),
    Command("/save", "FILE", "write the conversation as JSON", _save),
    Command("/load", "FILE", "go on with a saved conversation", _load),
    Command("/exit", "", "leave", _exit),
)
