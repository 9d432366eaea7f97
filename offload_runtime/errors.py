"""Typed exceptions for everything a user can cause or meet.

Every message says what is wrong, by how much, what the limit is and the way out. The command line prints it as one
line and ends with exit code 2. Our own invariants are `assert`s instead.
"""

from collections.abc import Sequence
from typing import Any

_LONGEST_LINE = 300


class OffloadError(Exception):
    """Base of every error that `offload_runtime` raises on purpose.

    Its message is one line, or two where it takes more than 300 characters; of one that takes more than two, which
    quotes a damaged file or another library at length, beginning and end are kept.
    """

    def __init__(self, message: str) -> None:
        text = " ".join(message.splitlines()).strip()
        if len(text) > _LONGEST_LINE:
            cut = text.rfind(" ", _LONGEST_LINE // 2, _LONGEST_LINE + 1)
            first = text[: cut if cut > 0 else _LONGEST_LINE]
            rest = text[len(first) :].lstrip()
            text = f"{first}\n" + (rest if len(rest) <= _LONGEST_LINE else f"… {rest[2 - _LONGEST_LINE :]}")
        super().__init__(text)


class OptionError(OffloadError, ValueError):
    """An option has a value that makes no sense, or that the chosen mode would ignore."""


class CheckpointError(OffloadError):
    """A checkpoint is missing, truncated, incomplete or of unexpected shapes."""


class UnsupportedArchitectureError(CheckpointError):
    """The checkpoint's architecture is not one the decoder implements."""


class HubError(OffloadError):
    """A model could not be fetched (offline, no such repository, no access, wrong hash)."""


class StorageError(OffloadError):
    """Writing to disk failed (disk full, no permission); nothing half-written is kept."""


class SessionError(OffloadError):
    """A saved session is damaged or incomplete, or of another model, dtype, type of GPU or version."""


class VocabularyMismatchError(OffloadError):
    """The draft model does not share the target's vocabulary, so its proposals mean nothing."""


class ContextLengthError(OffloadError):
    """Prompt and requested tokens do not fit the context that was reserved or that the model supports."""


class BudgetError(OffloadError):
    """A memory budget (VRAM, RAM, pinned) is too small; the message says what would fit.

    `answers` (`GenerationResult`, one of each prompt) are as far as they had come when memory ran out while tokens were
    being generated; none before that.
    """

    def __init__(self, message: str, answers: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.answers = tuple(answers)


class NumericalError(OffloadError):
    """The target produced NaN logits; sampling from them would be meaningless.

    `slot` is that of the request whose they were, where requests share a pass.
    """

    def __init__(self, message: str, slot: int | None = None) -> None:
        super().__init__(message)
        self.slot = slot


class GrammarError(OptionError):
    """An answer cannot go on as its schema or grammar demands: no token can, or following it would take too long.

    `slot` is that of its request, where requests share a pass.
    """

    def __init__(self, message: str, slot: int) -> None:
        super().__init__(message)
        self.slot = slot


class UnavailableError(OptionError):
    """A scheduler was closed or has stopped: nothing can be asked of it any more."""


class QueueFullError(OffloadError):
    """As many requests wait for a `Scheduler` as may; `retry_after_s` is about when one of them will not any more."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CopyError(OffloadError):
    """A transfer between host and device failed; the ring's contents cannot be trusted any more."""


class DeviceError(OffloadError):
    """The asked device is not there or lacks a needed capability."""


class HostError(DeviceError):
    """Another machine that has layers of the model has ended, is not heard from, or cannot do its part."""


class ProfileError(OffloadError):
    """A machine profile is unknown, cannot be read, or has a wrong key or value."""
