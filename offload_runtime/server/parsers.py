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
call that is drafted there is none. The messages of gpt-oss come as text with marks of Hermes and Qwen.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from offload_runtime.engine.channels import has_channels
from offload_runtime.engine.chat_template import template_source, thinking_marks
from offload_runtime.errors import OptionError
from offload_runtime.grammar import json_rule

_ID_LETTERS, _ID_LENGTH = string.ascii_letters + string.digits, 9  # as Mistral's templates demand


@dataclass(frozen=True)
class ToolCall:
    """One call: whom, with what as JSON, and an id by which its result is told."""

    name: str
    arguments: str
    id: str


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """Return the arguments of a call as an object, which a model may fail to write."""
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        value = call.arguments
    return value if isinstance(value, dict) else {"arguments": value}


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
    """Make a call of its object. Raises `ValueError`."""
    arguments = next((value[name] for name in argument_names if isinstance(value, dict) and name in value), None)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("no name")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, allow_nan=False, ensure_ascii=False)
    return ToolCall(value["name"], arguments, "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH)))


def _read_json(text: str) -> tuple[Any, str]:
    """Read the JSON value that a text begins with; return it and the rest. New lines in strings may be as they are."""
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(text.lstrip())
    except RecursionError as error:
        raise ValueError("too deep") from error
    return value, text.lstrip()[end:].lstrip()


def _read_values(text: str) -> tuple[list[Any], str]:
    """Read the objects that a text begins with, one after the other or in lists, and what follows them."""
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
    """Tell how a model writes calls, by its template; None where nothing here reads them."""
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
    """Return whether it is known how a model writes calls."""
    return _format_of(template_source(tokenizer)) is not None


def tools_in_words(tokenizer: Any, tools: Sequence[Mapping[str, Any]], *, several: bool) -> str | None:
    """Say what a model is told about tools whose template does not; None for the others."""
    if _format_of(template_source(tokenizer)) is not _GENERIC:
        return None
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    lines = "a line of JSON for each call" if several else "one line of JSON"
    form = '{"name": "...", "arguments": {...}}'
    return f"You can call functions:\n{functions}\nTo do so, answer with {lines} and nothing else:\n{form}"


def calls_grammar(tokenizer: Any, functions: Sequence[Mapping[str, Any]], *, several: bool) -> str:
    """Write a rule `calls`, in llguidance's Lark, of calls as a model writes them.

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


_THINK = "<think>"
_MESSAGE = "<|message|>"  # begins one of gpt-oss', which may be thought
_LAST_TOKENS = 16  # of a prompt, that a mark is looked for in
Parts = tuple[str, str, list[ToolCall]]  # thinking, text and calls


class AnswerParser:
    """Takes one answer apart as it comes: into thinking, text that may be shown and calls.

    Args:
        tokenizer: The model's: its chat template says how calls are written, and both what marks thinking. Tokens of
            its that are marks and have no text are seen as well.
        prompt: Token ids, whose end may be the beginning of thinking.
        tool_names: Functions that were offered; with none, no text is a call.
        most_calls: Calls that are wanted; further ones are left out. None: all.
        is_bound: A grammar says what the whole answer is: none of it is thinking.
        begun: What the answer, whose beginning the prompt has, goes on with; None where it begins.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int] = (), tool_names: Iterable[str] = (), *,
        most_calls: int | None = None, is_bound: bool = False, begun: Literal["thought", "text"] | None = None,
    ) -> None:  # fmt: skip
        source, added = template_source(tokenizer), tokenizer.added_tokens_decoder.items()
        self._names, self._most = frozenset(tool_names), most_calls
        self._format = _format_of(source) if self._names else None
        self._ends = {} if is_bound else thinking_marks(tokenizer)
        if has_channels(tokenizer) and self._names and self._format is None:
            self._format = _HERMES
        self._call_marks = {self._format.start, self._format.end, *self._format.inner} if self._format else set()
        marks = {*self._call_marks, *self._ends, *self._ends.values(), _MESSAGE}
        self._marks = {number: token.content for number, token in added if token.content in marks}
        self._held = ""  # text that may be the beginning of a mark or of a call, or space around one
        self._end: str | None = None  # what ends the thinking that it is in
        self._may_think = bool(self._ends) and begun is None  # nothing has been said yet
        self._is_at_edge = False  # just behind a mark of thinking, where space says nothing
        self._is_inside = False  # of a call
        self._has_begun = begun == "text"  # text that is no call was said
        self._num_searched = 0  # characters of a call in which no end of it is
        self.num_calls = 0
        if begun == "thought":
            self._end = next(iter(self._ends.values()))
        elif self._ends and prompt and begun is None:
            tail = tokenizer.decode(list(prompt[-_LAST_TOKENS:]), skip_special_tokens=False).rstrip()
            opened = next((start for start in self._ends if tail.endswith(start)), None)
            self._end, self._is_at_edge = self._ends.get(opened or ""), opened is not None

    @property
    def is_thinking(self) -> bool:
        """Return whether what comes next is thought."""
        return self._end is not None

    def push(self, text: str, token: int | None = None) -> Parts:
        """Return what has come of thinking and of text that may be shown now, and calls that are complete, after `text`
        that `token` has added."""
        mark = self._marks.get(-1 if token is None else token, "")
        if mark == _MESSAGE:
            mark = _THINK if self._ends and text.endswith(f"{_THINK}\n") else ""
        if not text and mark in self._call_marks and self._end is not None:
            mark = ""  # a call that is drafted there is none
        self._held += text or mark
        return self._take(mark)

    def finish(self) -> Parts:
        """Return the same of what is held back when the answer has ended."""
        if self._end is not None:
            return self._held.rstrip(), "", []
        self._may_think = False
        _, shown, calls = self._take("")
        while self._is_inside and self._format is not None:
            found = self._read(self._held, self._format)
            end = self._held.find(self._format.end) + len(self._format.end) if self._format.end else 0
            if found is not None or end < len(self._format.end) or not end:
                text, more = found or (self._held, [])
                self._held = ""
            else:  # what was taken for a text in a call was none, and calls may follow it
                text, self._held, more = self._held[:end], self._held[end:], []
            self._is_inside, self._num_searched = False, 0
            _, text_behind, calls_behind = self._take("")
            shown, calls = shown + text + text_behind, calls + more + calls_behind
        return "", shown + ("" if self.num_calls and self._held.isspace() else self._held), calls

    def _take(self, mark: str) -> Parts:
        """Take all that can be taken from what is held back, behind a token that is this `mark`."""
        thought, shown, calls = "", "", list[ToolCall]()
        while (step := self._step(mark)) is not None:
            thought, shown, calls = thought + step[0], shown + step[1], calls + step[2]
        return thought, shown, calls

    def _step(self, mark: str) -> Parts | None:
        """Take the next part of what is held back; None where more has to come first."""
        if self._is_at_edge:
            self._held = self._held.lstrip()
            self._is_at_edge = not self._held
        if not self._held:
            return None
        if self._end is not None:
            at = self._held.find(self._end)
            keep = len(self._held) - at if at >= 0 else possible_start(self._held, self._end)
            thought, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            if at >= 0:
                self._held = self._held.removeprefix(self._end)
                self._end, self._is_at_edge, self._may_think = None, True, False
                return thought.rstrip(), "", []
            return (thought, "", []) if thought else None
        begun, start, written = self._held.lstrip(), mark, self._format
        if self._may_think:
            start = next((start for start in self._ends if begun.startswith(start)), mark)
            if start not in self._ends and any(one.startswith(begun) for one in self._ends):
                return None
        if start in self._ends and start in self._held:  # a token of its own begins thinking wherever it comes
            text, _, self._held = self._held.partition(start) if self._may_think else self._held.rpartition(start)
            text, calls = (self._is_inside and written and self._read(text, written)) or (text, [])
            text = "" if self._may_think and text.isspace() else text
            self._has_begun |= bool(text.strip())
            self._end, self._is_at_edge, self._may_think, self._is_inside = self._ends[start], True, False, False
            return "", text, calls
        self._may_think = False
        if self._is_inside and written is not None:
            return self._step_inside(written)
        return self._step_outside(written, begun)

    def _step_outside(self, written: _Format | None, begun: str) -> Parts | None:
        """Take text that is no call; `begun` is what is held back without the space before it."""
        held = self._held
        if written is not None and not self._has_begun and written.starts_bare:
            if begun.startswith(written.starts_bare):
                self._is_inside = True
                return "", "", []
            if any(start.startswith(begun) for start in written.starts_bare):
                return None
        start = "" if written is None else written.start
        at = held.find(start) if start else -1
        keep = len(held) - at if at >= 0 else 0 if written is None else possible_start(held, start)
        text, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self._has_begun |= bool(text.strip())
        self._is_inside = at >= 0
        text = text.rstrip() if at >= 0 else text  # what stands before a call, or between two
        return ("", text, []) if text or self._is_inside else None

    def _step_inside(self, written: _Format) -> Parts | None:
        """Take the calls that have ended, or what turns out to be text."""
        at = self._held.find(written.end, max(self._num_searched, len(written.start))) if written.end else -1
        if at < 0:
            return None
        self._num_searched = end = at + len(written.end)
        if _ends_in_string(self._held[len(written.start) : at]):
            return "", "", []  # an argument has the mark: it goes on to the next one
        found = self._read(self._held[:end], written)
        if found is None:  # nor was the text to the first mark a call
            end = self._held.index(written.end, len(written.start)) + len(written.end)
            found = self._held[:end], []
        self._held, self._is_inside, self._num_searched = self._held[end:], False, 0
        return "", *found

    def _read(self, whole: str, written: _Format) -> tuple[str, list[ToolCall]] | None:
        """Read the calls in a text with its marks, and the text behind them; None where it is all text."""
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
    """Return whether a text is the beginning of JSON values that break off within a string."""
    try:
        _read_values(text)
    except ValueError as error:
        return str(error).startswith("Unterminated string")
    return False


def possible_start(text: str, mark: str) -> int:
    """Return the length of the end of `text` that may be the beginning of a mark, white space before it included."""
    partial = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
    before = text[: len(text) - partial]
    return partial + len(before) - len(before.rstrip())
