"""An answer of a chat taken apart as it comes: what a model thinks aloud, the text that it says, and calls.

Thinking stands between marks at the beginning of an answer, the first of which a template may have written already. A
call that is drafted there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from offload_runtime.engine.chat_template import template_source
from offload_runtime.server.tool_calls import ToolCall, ToolCallParser, possible_start

_THINK = ("<think>", "</think>")
# Marks of families, which count where the template or a token has them.
_OTHERS = (("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("<|START_THINKING|>", "<|END_THINKING|>"))
_LAST_TOKENS = 16  # of a prompt, that a mark is looked for in


class AnswerParser:
    """Takes one answer apart.

    Args:
        tokenizer: The model's: its chat template says how calls are written, and both what marks thinking.
        prompt: Token ids, whose end may be the beginning of thinking.
        tool_names: Functions that were offered.
        most_calls: As of `ToolCallParser`.
        is_bound: A grammar says what the whole answer is: none of it is thinking.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int] = (), tool_names: Iterable[str] = (), *,
        most_calls: int | None = None, is_bound: bool = False,
    ) -> None:  # fmt: skip
        self._calls = ToolCallParser(tokenizer, tool_names, most_calls)
        added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
        source = template_source(tokenizer)
        pairs = [_THINK, *(pair for pair in _OTHERS if pair[0] in source or pair[0] in added.values())]
        self._ends = {} if is_bound else dict(pairs)
        self._marks = {number: text for number, text in added.items() if any(text in pair for pair in pairs)}
        self._held = ""  # text that may be a part of a mark, or space that stands around one
        self._end: str | None = None  # what ends the thinking that it is in
        self._may_begin = True  # nothing has been spoken yet
        self._is_at_edge = False  # just behind a mark, where space says nothing
        if self._ends:
            tail = tokenizer.decode(list(prompt[-_LAST_TOKENS:]), skip_special_tokens=False).rstrip() if prompt else ""
            opened = next((start for start in self._ends if tail.endswith(start)), None)
            self._end, self._is_at_edge = self._ends.get(opened or ""), opened is not None

    @property
    def num_calls(self) -> int:
        """Calls that were found so far."""
        return self._calls.num_calls

    def push(self, text: str, token: int | None = None) -> tuple[str, str, list[ToolCall]]:
        """What has come of thinking and of text that may be shown now, and calls that are complete, after `text` that
        `token` has added."""
        if not self._ends:
            return "", *self._calls.push(text, token)
        mark = self._marks.get(-1 if token is None else token, "")
        self._held += text or mark
        thought, spoken, is_outside = "", "", self._end is None and mark not in self._ends
        while (step := self._step(mark)) is not None:
            thought, spoken = thought + step[0], spoken + step[1]
        # A mark without a text is that of a call only outside of thinking.
        shown, calls = self._calls.push(spoken, token if is_outside and not text else None)
        return thought, shown, calls

    def finish(self) -> tuple[str, str, list[ToolCall]]:
        """The same of what is held back when the answer has ended."""
        held, self._held = self._held, ""
        if self._end is not None:
            return held.rstrip(), *self._calls.finish()
        shown, calls = self._calls.push(held)
        rest, more = self._calls.finish()
        return "", shown + rest, calls + more

    def _step(self, mark: str) -> tuple[str, str] | None:
        """What can be taken of what is held back, as thinking and as text; None where more has to come first."""
        if self._is_at_edge:
            self._held = self._held.lstrip()
            self._is_at_edge = not self._held
        if not self._held:
            return None
        if self._end is not None:
            at = self._held.find(self._end)
            if at >= 0:
                thought, self._held = self._held[:at].rstrip(), self._held[at + len(self._end) :]
                self._end, self._is_at_edge, self._may_begin = None, True, False
                return thought, ""
            keep = possible_start(self._held, self._end)
            thought, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            return (thought, "") if thought else None
        return self._step_outside(mark)

    def _step_outside(self, mark: str) -> tuple[str, str] | None:
        begun = self._held.lstrip()
        start = next((start for start in self._ends if begun.startswith(start)), None) if self._may_begin else None
        if start is not None:
            spoken, self._held = "", begun[len(start) :]
        elif self._may_begin and any(start.startswith(begun) for start in self._ends):
            return None
        elif mark in self._ends and mark in self._held:  # a token of its own, wherever it comes
            spoken, _, self._held = self._held.partition(start := mark)
        else:
            spoken, self._held, self._may_begin = self._held, "", False
            return "", spoken
        self._end, self._is_at_edge, self._may_begin = self._ends[start], True, False
        return "", spoken
