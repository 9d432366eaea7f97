"""Text and paths that a user gives: prompts, files, stdin."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offload_runtime.errors import OptionError


@dataclass(frozen=True)
class NamedPrompt:
    """A prompt, and what to call it: its file as the user wrote it."""

    name: str
    text: str


def collect_prompts(prompt: str | None, prompt_files: Sequence[str]) -> list[NamedPrompt]:
    """Return the prompt of `--prompt` or those of all `--prompt-file` (`-` is stdin), byte for byte as written."""
    if (prompt is None) == (not prompt_files):
        given = "both" if prompt_files else "neither"
        raise OptionError(f"{given} of --prompt and --prompt-file was given: give exactly one of them")
    if prompt is not None:
        return [NamedPrompt("--prompt", prompt)]
    if prompt_files.count("-") > 1:
        raise OptionError(f"--prompt-file - was given {prompt_files.count('-')} times: stdin can be read once")
    return [_read_prompt(path) for path in prompt_files]


def _read_prompt(path: str) -> NamedPrompt:
    name = "stdin" if path == "-" else path
    try:
        raw = sys.stdin.buffer.read() if path == "-" else user_path(path).read_bytes()
    except OSError as error:
        raise OptionError(f"--prompt-file {path} cannot be read: {error.strerror or error}") from error
    return NamedPrompt(name, decode_utf8(raw, name if path == "-" else f"--prompt-file {path}"))


def user_path(text: str) -> Path:
    """Return the path that a user wrote, with `~` replaced; raises `OptionError` when that stands for nothing."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise OptionError(f"{text} cannot be found ({error}): write the path without ~") from error


def decode_utf8(raw: bytes, source: str) -> str:
    """Decode text that a user supplied, without a byte-order mark; raises `OptionError` naming `source`."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise OptionError(
            f"{source} is not UTF-8 text: byte 0x{byte:02x} at offset {error.start}; convert it, for example with iconv"
        ) from error
