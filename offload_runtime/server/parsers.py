"""Calls of functions in an answer, as models of three families write them: grammars of them, and the calls that were
written; other text stays text.

Hermes and Qwen: `<tool_call>{"name": …, "arguments": …}</tool_call>`, in the midst of text. Llama 3: the whole answer
is one object `{"name": …, "parameters": …}`, or several with `;` between them, behind `<|python_tag|>` or not. Of both,
several objects one after another and lists of them are read, too. Mistral:
`[TOOL_CALLS]` and a list of objects, or since its eleventh tokenizer `[TOOL_CALLS]name[ARGS]{…}` for each. A model
whose template knows nothing of tools is told about them in words, and answers with objects as Llama 3 does.

A call that cannot be read, or of a function that was not offered, is shown as it was written: nothing of an answer is
lost. `AnswerParser` takes an answer apart as it comes: what a model thinks aloud, the text that it says, and calls.
Thinking stands between marks at the beginning of an answer, the first of which a template may have written already. A
call that is drafted there is none.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload_runtime.engine.chat_template import template_source
from offload_runtime.errors import OptionError
from offload_runtime.grammar import json_rule

_ID_LETTERS, _ID_LENGTH = string.ascii_letters + string.digits, 9  # as Mistral's templates demand


@dataclass(frozen=True)
class ToolCall:
    """One call: whom, with what as JSON, and an id by which its result is told."""

    name: str
    arguments: str
    id: str


@dataclass(frozen=True)
class _Format:
    """How calls are written.

    Attributes:
        start: What they begin with; empty where they have no mark.
        end: What one ends with; empty where they go on to the end of the answer.
        starts_bare: An answer that begins so may be a call without `start`.
        read: The calls in text between start and end, and what text follows them; raises `ValueError` where there are
            none.
        inner: Other tokens that are written between them.
    """

    start: str
    end: str
    starts_bare: tuple[str, ...]
    read: Callable[[str], tuple[list[ToolCall], str]]
    inner: tuple[str, ...] = ()


def _call(value: Any, *argument_names: str) -> ToolCall:
    """A call from its object. Raises `ValueError`."""
    arguments = next((value[name] for name in argument_names if isinstance(value, dict) and name in value), None)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("no name")
    written = (
        arguments if isinstance(arguments, str) else json.dumps(arguments or {}, allow_nan=False, ensure_ascii=False)
    )
    return ToolCall(value["name"], written, "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH)))


def _read_json(text: str) -> tuple[Any, str]:
    """The JSON value that a text begins with, and what follows it. Models write new lines in strings as they are."""
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(text.lstrip())
    except RecursionError as error:
        raise ValueError("too deep") from error
    return value, text.lstrip()[end:].lstrip()


def _read_values(text: str) -> tuple[list[Any], str]:
    """The objects that a text begins with, one after the other or in lists, and what follows them."""
    found, rest = list[Any](), text.strip()
    while rest.startswith(("{", "[")):
        value, rest = _read_json(rest)
        found += value if isinstance(value, list) else [value]
        rest = re.sub(r"^(;|,(?=\s*[{\[]))\s*", "", rest)
    if not found:
        raise ValueError("no call")
    return found, rest


def _read_hermes(text: str) -> tuple[list[ToolCall], str]:
    values, rest = _read_values(text)
    if rest:
        raise ValueError("more than calls")
    return [_call(value, "arguments", "parameters") for value in values], ""


def _read_objects(text: str) -> tuple[list[ToolCall], str]:
    fenced = re.fullmatch(r"```(?:json)?\n(.*)\n```", text.strip(), re.DOTALL)
    values, rest = _read_values(fenced[1] if fenced else text)
    return [_call(value, "parameters", "arguments") for value in values], rest


def _read_mistral(text: str) -> tuple[list[ToolCall], str]:
    found, rest = list[ToolCall](), text
    while True:
        rest = rest.lstrip().removeprefix("[TOOL_CALLS]").lstrip()
        named = re.match(r"([^\[\]{}\s]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)", rest)
        if named is not None:
            value, rest = _read_json(rest[named.end() :])
            found.append(_call({"name": named[1], "arguments": value}, "arguments"))
        elif rest.startswith("[") and not found:
            values, rest = _read_json(rest)
            found += [_call(value, "arguments", "parameters") for value in values]
        else:
            break
    if not found:
        raise ValueError("no call")
    return found, rest


_HERMES = _Format("<tool_call>", "</tool_call>", (), _read_hermes)
_LLAMA = _Format("<|python_tag|>", "", ("{", "["), _read_objects)
_MISTRAL = _Format("[TOOL_CALLS]", "", (), _read_mistral, inner=("[CALL_ID]", "[ARGS]"))
_GENERIC = _Format("", "", ("{", "[", "```"), _read_objects)


def _format_of(text: str) -> _Format | None:
    """How a model writes calls, by the text of its template; None where nothing here reads them."""
    if "<function=" in text or "<arg_key>" in text:  # Qwen3-Coder's and GLM's, which are none of these
        return None
    if "<tool_call>" in text:
        return _HERMES
    if "[TOOL_CALLS]" in text:
        return _MISTRAL
    # Llama 3.2 has no use for the tag, and asks for the object in words.
    if "<|python_tag|>" in text or '"parameters": dictionary' in text:
        return _LLAMA
    return None if re.search(r"\btools\b", text) else _GENERIC  # or else it has one of its own


def writes_calls(tokenizer: Any) -> bool:
    """Whether it is known how a model writes calls."""
    return _format_of(template_source(tokenizer)) is not None


def tools_in_words(tokenizer: Any, tools: Sequence[Mapping[str, Any]], *, several: bool) -> str | None:
    """What a model is told about tools whose template does not; None for the others."""
    if _format_of(template_source(tokenizer)) is not _GENERIC:
        return None
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    lines = "a line of JSON for each call" if several else "one line of JSON"
    form = '{"name": "...", "arguments": {...}}'
    return f"You can call functions:\n{functions}\nTo do so, answer with {lines} and nothing else:\n{form}"


def calls_grammar(tokenizer: Any, functions: Sequence[Mapping[str, Any]], *, several: bool) -> str:
    """A rule `calls`, in llguidance's Lark, of calls as a model writes them.

    Args:
        tokenizer: The model's.
        functions: Name and parameters of each, as OpenAI's `function`.
        several: There may be more than one call.

    Raises:
        OptionError: It is not known how this model writes calls, or a function cannot be written.
    """
    template = template_source(tokenizer)
    written = _format_of(template)
    if written is None:
        raise OptionError("how this model writes calls of functions is not known: none can be forced")
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    start, end, args, call_id = (
        f"<[{added[mark]}]>" if mark in added else json.dumps(mark)
        for mark in (written.start, written.end, "[ARGS]", "[CALL_ID]")
    )
    is_named = written is _MISTRAL and "[ARGS]" in template
    with_id = f"({call_id} /[a-zA-Z0-9]{{{_ID_LENGTH}}}/)? " if "[CALL_ID]" in template else ""
    rules, choices = list[str](), list[str]()
    for number, function in enumerate(functions):
        name, parameters = function["name"], function.get("parameters") or {"additionalProperties": False}
        if re.fullmatch(r"[\w.-]+", name, re.ASCII) is None or not isinstance(parameters, dict):
            raise OptionError(f"function {name[:64]!r} needs a name of letters, digits, _, - and ., and a JSON schema")
        rules.append(f"arguments{number}: {json_rule({'type': 'object', **parameters})}")
        before = f'{{"name": "{name}", "{"parameters" if written is _LLAMA else "arguments"}": '
        whole = f"{json.dumps(name)} {with_id}{args} {{}}" if is_named else f'{json.dumps(before)} {{}} "}}"'
        choices.append(whole.replace("{}", f"arguments{number}"))
    call, opening, between, closing = f"({' | '.join(choices)})", "", '"; "' if written is _LLAMA else '"\\n"', ""
    if written is _HERMES:
        call, between = f'{start} "\\n" {call} "\\n" {end}', '"\\n"'
    elif is_named:
        call, between = f"{start} {call}", ""
    elif written is _MISTRAL:
        opening, between, closing = f'{start} " "? "["', '", "', '"]"'
    more = f"({between} call)*" if several else ""
    return "\n".join([f"calls: {opening} call {more} {closing}", f"call: {call}", *rules])


class ToolCallParser:
    """Takes an answer apart as it comes: into text that may be shown and calls.

    Args:
        tokenizer: The model's: its chat template says how calls are written. Tokens of its that mark them and have no
            text are seen as well.
        tool_names: Functions that were offered; with none, all is text.
        most: Calls that are wanted; further ones are left out. None: all.
    """

    def __init__(self, tokenizer: Any, tool_names: Iterable[str], most: int | None = None) -> None:
        self._names, self._most = frozenset(tool_names), most
        self._format = _format_of(template_source(tokenizer)) if self._names else None
        self._marks: dict[int, str] = {}
        if self._format is not None:
            marks = {self._format.start, self._format.end, *self._format.inner}
            added = tokenizer.added_tokens_decoder.items()
            self._marks = {number: token.content for number, token in added if token.content in marks}
        self._held = ""  # text that may be the beginning of a call
        self._num_searched = 0  # characters of it in which no end of that call is
        self._is_inside = self._has_begun = False
        self.num_calls = 0

    def push(self, text: str, token: int | None = None) -> tuple[str, list[ToolCall]]:
        """Text that may be shown now and calls that are complete, after `text` that `token` has added."""
        if self._format is None:
            return text, []
        self._held += text or self._marks.get(-1 if token is None else token, "")
        shown, calls = "", list[ToolCall]()
        while (step := self._step(self._format)) is not None:
            shown += step[0]
            calls += step[1]
        return shown, calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The same of what is held back when the answer has ended."""
        shown, calls = "", list[ToolCall]()
        while self._is_inside and self._format is not None:
            found = self._read(self._held, self._format)
            end = self._held.find(self._format.end) + len(self._format.end) if self._format.end else 0
            if found is not None or end < len(self._format.end) or not end:
                text, more = found or (self._held, [])
                self._held = ""
            else:  # what was taken for a text in a call was none, and calls may follow it
                text, self._held, more = self._held[:end], self._held[end:], []
            self._leave()
            rest = self.push("")
            shown, calls = shown + text + rest[0], calls + more + rest[1]
        held, self._held = self._held, ""
        return shown + ("" if self.num_calls and held.isspace() else held), calls

    def _leave(self) -> None:
        """A call has ended."""
        self._is_inside, self._num_searched = False, 0

    def _step(self, written: _Format) -> tuple[str, list[ToolCall]] | None:
        """What can be taken from what is held back; None where more has to come first."""
        if not self._is_inside:
            return self._step_outside(written)
        at = self._held.find(written.end, max(self._num_searched, len(written.start))) if written.end else -1
        if at < 0:
            return None
        end = at + len(written.end)
        self._num_searched = end
        if _ends_in_string(self._held[len(written.start) : at]):
            return "", []  # an argument has the mark: it goes on to the next one
        found = self._read(self._held[:end], written)
        if found is None:  # nor was the text to the first mark a call
            end = self._held.index(written.end, len(written.start)) + len(written.end)
            found = self._held[:end], []
        self._held = self._held[end:]
        self._leave()
        return found

    def _step_outside(self, written: _Format) -> tuple[str, list[ToolCall]] | None:
        held = self._held
        if not self._has_begun and written.starts_bare:
            begun = held.lstrip()
            if begun.startswith(written.starts_bare):
                self._is_inside = True
                return None
            if any(start.startswith(begun) for start in written.starts_bare):
                return None
        at = held.find(written.start) if written.start else -1
        keep = len(held) - at if at >= 0 else possible_start(held, written.start)
        text, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self._has_begun |= bool(text.strip())
        self._is_inside = at >= 0
        text = text.rstrip() if at >= 0 else text  # what stands before a call, or between two
        return (text, []) if text or self._is_inside else None

    def _read(self, whole: str, written: _Format) -> tuple[str, list[ToolCall]] | None:
        """The calls in a text with its marks, and the text behind them; None where it is all text."""
        inner = whole.lstrip().removeprefix(written.start)
        is_marked = bool(written.start) and len(inner) < len(whole.lstrip())
        inner = inner.removesuffix(written.end) if written.end else inner
        try:
            calls, rest = written.read(inner.strip())
        except (ValueError, TypeError):
            return None
        if any(call.name not in self._names for call in calls) or (rest and not is_marked):
            return None
        wanted = calls if self._most is None else calls[: max(0, self._most - self.num_calls)]
        self.num_calls += len(wanted)
        return rest, wanted


def _ends_in_string(text: str) -> bool:
    """Whether a text is the beginning of JSON values that break off within a string."""
    try:
        _read_values(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except ValueError:
        pass
    return False


def possible_start(text: str, mark: str) -> int:
    """Length of the end of `text` that may be the beginning of a mark, white space before it included."""
    partial = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
    before = text[: len(text) - partial]
    return partial + len(before) - len(before.rstrip())


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
