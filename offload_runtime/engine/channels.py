"""Answers of gpt-oss (harmony), which are several messages, each with a channel and perhaps a function that it is to.

Their marks have no text, so that a plain decoder would show `analysis…assistantfinal…`. They are written as other
families do it: what is in the channel `analysis` stands between `<think>` and `</think>`, what is to a function is a
call as Hermes and Qwen have it, and all else is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_MARKS = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>")
_LAST_TOKENS = 16  # of a prompt, in which the header of an answer begins
_THINK_END = "\n</think>\n\n"


def has_channels(tokenizer: Any) -> bool:
    """Return whether a model answers in channels."""
    return {*_MARKS[:2]} <= {token.content for token in tokenizer.added_tokens_decoder.values()}


class Channels:
    """Turns the messages of one answer into text as they come.

    Args:
        tokenizer: A transformers tokenizer, which has their marks.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder.items()
        self._marks = {number: token.content for number, token in added if token.content in _MARKS}
        self._header: str | None = ""  # None behind it
        self._end, self._has_begun, self._has_said = "", False, False
        self._length, self._thoughts = 0, list[list[int]]()  # of all text, and where in it thoughts begin and end

    @classmethod
    def of_answer(cls, tokenizer: Any, prompt: Sequence[int]) -> Channels | None:
        """Return what reads the answer to a prompt; None where its end has not begun a message."""
        tail = tokenizer.convert_ids_to_tokens(list(prompt[-_LAST_TOKENS:]))
        marks = [token for token in tail if token in _MARKS]
        return cls(tokenizer) if marks[-1:] == ["<|start|>"] else None

    def push(self, text: str, token: int) -> tuple[str, str]:
        """Return what a message says by a token's text, which for a mark is what was held back before it, and what the
        mark is written as."""
        mark = self._marks.get(token, "")
        if mark == "<|message|>" and self._header is not None:
            said, written = "", self._begin(self._header + text)
        elif mark in _MARKS[3:]:
            said, written = text if self._header is None else "", self._end
            self._header, self._end = "", ""
        elif self._header is None:
            said, written = text, ""
        else:
            self._header += text + mark
            said, written = "", ""
        self._length += len(said) + len(written)
        if written == _THINK_END:
            self._thoughts[-1][1] = self._length
        return said, written

    def _begin(self, header: str) -> str:
        """Return what a message with this header begins with."""
        self._header, self._has_begun = None, True
        if to := re.search(r"to=(?:functions\.)?([^\s<]+)", header):
            self._end = "}</tool_call>"
            return f'<tool_call>{{"name": {json.dumps(to[1])}, "arguments": '
        if "analysis" in header:
            self._end = _THINK_END
            self._thoughts.append([self._length, self._length])
            return "<think>\n"
        between, self._has_said = "\n\n" if self._has_said else "", True
        return between

    def finish(self, text: str) -> tuple[str, str]:
        """Return the last text of a message, and what ends a call that has begun; or all of it, where no message
        has."""
        if not self._has_begun:
            return (self._header or "") + text, ""
        return (text if self._header is None else ""), ("" if self._end == _THINK_END else self._end)

    def without_thoughts(self, text: str) -> str:
        """Return the text so far, or its beginning, without what was thought."""
        bounds = [at for start, end in self._thoughts for at in (start, end if end > start else len(text))]
        edges = [0, *bounds, len(text)]
        return "".join(text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))
