"""Text and paths that a user gives: prompts, files, stdin."""

from __future__ import annotations

import sys
from pathlib import Path

from offload_runtime.errors import OptionError


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """Return the prompt of exactly one of `--prompt` and `--prompt-file` (`-` is stdin), byte for byte as written."""
    if (prompt is None) == (prompt_file is None):
        given = "both" if prompt is not None else "neither"
        raise OptionError(f"{given} of --prompt and --prompt-file was given: give exactly one of them")
    if prompt is not None:
        return prompt
    assert prompt_file is not None
    try:
        raw = sys.stdin.buffer.read() if prompt_file == "-" else user_path(prompt_file).read_bytes()
    except OSError as error:
        raise OptionError(f"--prompt-file {prompt_file} cannot be read: {error.strerror or error}") from error
    return decode_utf8(raw, "stdin" if prompt_file == "-" else f"--prompt-file {prompt_file}")


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
