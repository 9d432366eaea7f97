"""Tokens to text, piece by piece, and the stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of tokens."""


class IncrementalDecoder:
    """Turns tokens into text as they come, without cutting a character in two.

    A piece is the difference between the decoded text with and without the newest tokens, so spaces that depend on the
    token before come out right.

    Args:
        tokenizer: A transformers tokenizer.
        context: Tokens before the first one (the end of the prompt).
    """

    _CONTEXT_TOKENS = 6

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # Shown already, gives the new tokens their context. Piece by piece: a run of byte tokens that begins in the
        # middle of a character is decoded to nothing but replacement characters by sentencepiece-like tokenizers.
        self._known = [self._end_of(context)]
        self._new: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is still incomplete."""
        self._new.append(token)
        piece = self._pending_text()
        if not piece or piece.endswith("\ufffd"):
            return ""
        self._known.append(self._new)
        self._new = []
        while sum(map(len, self._known[1:])) >= self._CONTEXT_TOKENS:
            del self._known[0]
        return piece

    def flush(self) -> str:
        """What is left at the end, incomplete characters included."""
        piece = self._pending_text() if self._new else ""
        self._new = []
        return piece

    def _pending_text(self) -> str:
        known = [token for piece in self._known for token in piece]
        before = self._tokenizer.decode(known, skip_special_tokens=True)
        after = self._tokenizer.decode(known + self._new, skip_special_tokens=True)
        return after[len(before) :]

    def _end_of(self, context: Sequence[int]) -> list[int]:
        """The last tokens, beginning with a whole character (of at most four bytes)."""
        for extra in range(4):
            end = list(context[-self._CONTEXT_TOKENS - extra :])
            if not self._tokenizer.decode(end, skip_special_tokens=True).startswith("\ufffd"):
                return end
        return list(context[-self._CONTEXT_TOKENS :])


class StopStrings:
    """Finds stop strings in text that comes in pieces, and holds back what may become one.

    The one that is complete first ends the text, of several with the same end the longest: however the text is cut into
    pieces, what is shown of it is the same.

    Args:
        stops: Strings that end the text; none of them is shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string was completed."""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        hold = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], False

    def flush(self) -> str:
        """What was held back and turned out to be ordinary text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """One stop string or several as a tuple; a lone one is not taken for a sequence of characters."""
    return (stop,) if isinstance(stop, str) else tuple(stop)
