"""Calls of functions in an answer, as models of three families write them: grammars of them, and the calls that were
written; other text stays text.

Hermes and Qwen: `<tool_call>{"name": …, "arguments": …}</tool_call>`, in the midst of text. Llama 3: the whole answer
is one object `{"name": …, "parameters": …}`, or several with `;` between them, behind `<|python_tag|>` or not. Mistral:
`[TOOL_CALLS]` and a list of objects, or since its eleventh tokenizer `[TOOL_CALLS]name[ARGS]{…}` for each.

A call that cannot be read, or of a function that was not offered, is shown as it was written: nothing of an answer is
lost.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        start: What they begin with.
        end: What one ends with; empty where they go on to the end of the answer.
        starts_bare: An answer that begins so may be a call without `start`; empty for none.
        read: The calls in text between start and end; raises `ValueError` where there are none.
        inner: Other tokens that are written between them.
    """

    start: str
    end: str
    starts_bare: str
    read: Callable[[str], list[ToolCall]]
    inner: tuple[str, ...] = ()


def _call(value: Any, *argument_names: str) -> ToolCall:
    """A call from its object. Raises `ValueError`."""
    arguments = next((value[name] for name in argument_names if isinstance(value, dict) and name in value), None)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("no name")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, allow_nan=False)
    return ToolCall(value["name"], written, "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH)))


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("too deep") from error


def _read_hermes(text: str) -> list[ToolCall]:
    return [_call(_read_json(text), "arguments", "parameters")]


def _read_llama(text: str) -> list[ToolCall]:
    found, decoder, rest = list[ToolCall](), json.JSONDecoder(), text.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except RecursionError as error:
            raise ValueError("too deep") from error
        found.append(_call(value, "parameters", "arguments"))
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    if not found:
        raise ValueError("no call")
    return found


def _read_mistral(text: str) -> list[ToolCall]:
    if text.lstrip().startswith("["):
        values = _read_json(text)
        return [_call(value, "arguments", "parameters") for value in values]
    found = []
    for part in filter(None, (part.strip() for part in text.split("[TOOL_CALLS]"))):
        match = re.fullmatch(r"([^\[\]{}\s]+)\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*(\{.*\})", part, re.DOTALL)
        if match is None:
            raise ValueError("no call")
        found.append(_call({"name": match[1], "arguments": _read_json(match[2])}, "arguments"))
    if not found:
        raise ValueError("no call")
    return found


_HERMES = _Format("<tool_call>", "</tool_call>", "", _read_hermes)
_LLAMA = _Format("<|python_tag|>", "", "{", _read_llama)
_MISTRAL = _Format("[TOOL_CALLS]", "", "", _read_mistral, inner=("[CALL_ID]", "[ARGS]"))


def _template_text(tokenizer: Any) -> str:
    """The chat template that shows a model its own calls; of several all."""
    template = getattr(tokenizer, "chat_template", None)
    return template if isinstance(template, str) else json.dumps(template, default=str)


def _format_of(text: str) -> _Format | None:
    """How a model writes calls, by the text of its template; None where nothing here reads them."""
    if "<function=" in text:  # Qwen3-Coder's, which is none of these
        return None
    if "<tool_call>" in text:
        return _HERMES
    if "[TOOL_CALLS]" in text:
        return _MISTRAL
    # Llama 3.2 has no use for the tag, and asks for the object in words.
    return _LLAMA if "<|python_tag|>" in text or '"parameters": dictionary' in text else None


def writes_calls(tokenizer: Any) -> bool:
    """Whether it is known how a model writes calls."""
    return _format_of(_template_text(tokenizer)) is not None


def calls_grammar(tokenizer: Any, functions: Sequence[Mapping[str, Any]], *, several: bool) -> str:
    """A rule `calls`, in llguidance's Lark, of calls as a model writes them.

    Args:
        tokenizer: The model's.
        functions: Name and parameters of each, as OpenAI's `function`.
        several: There may be more than one call.

    Raises:
        OptionError: It is not known how this model writes calls, or a function cannot be written.
    """
    template = _template_text(tokenizer)
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
    call, opening, between, closing = f"({' | '.join(choices)})", "", '"; "', ""
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
    """

    def __init__(self, tokenizer: Any, tool_names: Iterable[str]) -> None:
        self._names = frozenset(tool_names)
        self._format = _format_of(_template_text(tokenizer)) if self._names else None
        self._marks: dict[int, str] = {}
        if self._format is not None:
            marks = {self._format.start, self._format.end, *self._format.inner}
            added = tokenizer.added_tokens_decoder.items()
            self._marks = {number: token.content for number, token in added if token.content in marks}
        self._held = ""  # text that may be the beginning of a call
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
        held, self._held = self._held, ""
        if self._format is None or not held:
            return "", []
        if not self._is_inside:
            return ("" if self.num_calls and held.isspace() else held), []
        return self._read(held, self._format)

    def _step(self, written: _Format) -> tuple[str, list[ToolCall]] | None:
        """What can be taken from what is held back; None where more has to come first."""
        if not self._is_inside:
            return self._step_outside(written)
        at = self._held.find(written.end, len(written.start)) if written.end else -1
        if at < 0:
            return None
        whole, self._held = self._held[: at + len(written.end)], self._held[at + len(written.end) :]
        self._is_inside = False
        return self._read(whole, written)

    def _step_outside(self, written: _Format) -> tuple[str, list[ToolCall]] | None:
        held = self._held
        if not self._has_begun and written.starts_bare and held.lstrip().startswith(written.starts_bare):
            self._is_inside = True
            return None
        at = held.find(written.start)
        keep = len(held) - at if at >= 0 else _possible_start(held, written.start)
        text, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self._has_begun |= bool(text.strip())
        self._is_inside = at >= 0
        text = text.rstrip() if at >= 0 else text  # what stands before a call, or between two
        return (text, []) if text or self._is_inside else None

    def _read(self, whole: str, written: _Format) -> tuple[str, list[ToolCall]]:
        """The calls in a text with its marks, or else the text."""
        inner = whole.lstrip().removeprefix(written.start)
        inner = inner.removesuffix(written.end) if written.end else inner
        try:
            calls = written.read(inner.strip())
        except (ValueError, TypeError):
            return whole, []
        if any(call.name not in self._names for call in calls):
            return whole, []
        self.num_calls += len(calls)
        return "", calls


def _possible_start(text: str, mark: str) -> int:
    """Length of the end of `text` that may be the beginning of a mark, white space before it included."""
    partial = next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
    before = text[: len(text) - partial]
    return partial + len(before) - len(before.rstrip())
