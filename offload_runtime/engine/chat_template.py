"""Chat messages in the form that a model's chat template takes.

Templates disagree about what messages look like: content is a text or a list of parts, arguments of calls are a JSON
text or an object, a turn of calls alone has no content, and not all know every role. `TemplateForms` finds out.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from jinja2 import Environment, meta

from offload_runtime.engine.template_forms import TEXT, TOOLS, Message, MessageError, TemplateForms, joined
from offload_runtime.errors import OptionError
from offload_runtime.options import is_of_type

# What messages and their parts may have, beside the fields that a template names; and what they may have that is empty.
_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})
_EMPTY_FIELDS = frozenset({"refusal", "audio", "function_call", "annotations", "reasoning"})
_FIELDS_OF_PARTS = frozenset({"type", "text", "cache_control"})
_FIELDS_OF_CALLS, _FIELDS_OF_FUNCTIONS = (
    frozenset({"id", "type", "function", "index"}),
    frozenset({"name", "arguments"}),
)


class ChatTemplate:
    """The chat template of a model.

    Args:
        tokenizer: Its transformers tokenizer, which has a template.

    Attributes:
        source: The text of the template; of several, of all.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.source = tokenizer, template_source(tokenizer)
        self._has_said = False
        self._forms = {False: TemplateForms(self.render, {}), True: TemplateForms(self.render, {"tools": TOOLS})}

    def render(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        """The text of messages as they are, with the beginning of an answer; raises whatever the template does.

        transformers' own `apply_chat_template` drops the fields that are None, for which templates ask (`is none`).
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        others = {name: value for name, value in options.items() if name not in ("tools", "documents")}
        tools = options.get("tools") or None
        rendered, _ = render_jinja_template(
            conversations=[list(messages)], tools=tools, documents=options.get("documents"),
            chat_template=self._tokenizer.get_chat_template(tools=tools), add_generation_prompt=True,
            **{**self._tokenizer.special_tokens_map, **others},
        )  # fmt: skip
        return str(rendered[0])

    @cached_property
    def _variables(self) -> frozenset[str]:
        """What the template reads of all that it is given; of several, what any of them does."""
        templates = self._tokenizer.chat_template
        reading = Environment(extensions=["jinja2.ext.loopcontrols"])
        texts = templates.values() if isinstance(templates, dict) else [templates]
        # transformers' own tag marks what an assistant says.
        plain = (re.sub(r"{%[-+]?\s*(end)?generation\s*[-+]?%}", "", text) for text in texts)
        return frozenset().union(*(meta.find_undeclared_variables(reading.parse(text)) for text in plain))

    def unread(self, options: Iterable[str]) -> list[str]:
        """Names of options that the template does not read, and which change nothing."""
        return [name for name in options if name not in self._variables]

    def require_options(self, names: Iterable[str]) -> None:
        """Refuse options that the template does not read (`OptionError`)."""
        for name in self.unread(names):
            raise OptionError(f"this model's chat template does not read {name!r}: drop it, or see its spelling")

    def require_fields(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Refuse messages with a field that neither has a meaning nor is read by the template (`MessageError`)."""
        for number, message in enumerate(messages):
            where = f"messages.{number}"
            self._require_fields(where, message, _FIELDS)
            for part_number, part in enumerate(_list(message.get("content"))):
                if isinstance(part, Mapping) and part.get("type") == "text":  # else `adapted` says that it is none
                    self._require_fields(f"{where}.content.{part_number}", part, _FIELDS_OF_PARTS)
            for call_number, call in enumerate(_list(message.get("tool_calls"))):
                place = f"{where}.tool_calls.{call_number}"
                self._require_fields(place, call, _FIELDS_OF_CALLS)
                function = call.get("function") if isinstance(call, dict) else None
                self._require_fields(f"{place}.function", function, _FIELDS_OF_FUNCTIONS)

    def _require_fields(self, where: str, value: Any, names: frozenset[str]) -> None:
        for name in value if isinstance(value, Mapping) else ():
            is_empty, field = name in _EMPTY_FIELDS and not value[name], re.escape(name)
            is_read = bool(name) and re.search(rf"\.{field}\b|(['\"]){field}\1", self.source) is not None
            if name not in names and not is_empty and not is_read:
                raise MessageError(f"{where}.{name}"[:200], " is not a field that this model's chat template reads")

    def with_instructions(self, messages: Sequence[Mapping[str, Any]], text: str) -> list[Message]:
        """Messages that begin with what the model is told: in the system message, or where the template has none in
        the user's."""
        first, *others = [dict(message) for message in messages]
        if first.get("role") not in ("system", "developer") and self._forms[False].has_role("system"):
            return [{"role": "system", "content": text}, first, *others]
        content = _checked_content("messages.0", first.get("content"))
        parts = [content] if isinstance(content, str) else [part["text"] for part in content or ()]
        order = [*parts, text] if first.get("role") in ("system", "developer") else [text, *parts]
        return [{**first, "content": "\n\n".join(order)}, *others]

    def adapted(self, messages: Sequence[Mapping[str, Any]], *, with_tools: bool) -> list[Message]:
        """Messages as OpenAI has them, in the form that the template takes where it is given tools or is not.

        Raises:
            MessageError: One of them is none.
        """
        forms = self._forms[with_tools]
        found = [self._adapted(f"messages.{number}", message, forms) for number, message in enumerate(messages)]
        if any(message["role"] == "tool" for message in found) and not forms.shows_results:
            found = _results_as_questions(found)
        if any(message["role"] == "system" for message in found) and not forms.takes_system:
            self._say_once()
            found = _systems_in_questions(found)
        for message in found:
            if isinstance(message.get("content"), str | list):
                message["content"] = forms.content(message["role"], message["content"])
        return found

    def _say_once(self) -> None:
        if not self._has_said:
            self._has_said = True
            what = "this model's chat template takes no system message: it is put before the user's next one"
            logging.getLogger(__name__).warning(what)

    def require_shown(self, messages: Sequence[Message], options: Mapping[str, Any], text: str) -> None:
        """Refuse instructions that the template leaves out of its text of messages (`MessageError`): those of a system
        behind the first message, or of a role that it does not know. Whether one that is not there as it was sent is
        left out is seen by another text in its place."""
        texts = {
            number: content if isinstance(content := message.get("content") or "", str) else content[0].get("text", "")
            for number, message in enumerate(messages) if message["role"] not in ("user", "assistant", "tool")
        }  # fmt: skip
        for number in (number for number, said in texts.items() if said.strip() not in text):
            content = TEXT if isinstance(messages[number]["content"], str) else [{"type": "text", "text": TEXT}]
            probe = [*messages[:number], {**messages[number], "content": content}, *messages[number + 1 :]]
            if TEXT not in self.render(probe, options):
                role = f"has the role {messages[number]['role']!r}"[:100]
                what = f" {role}, and this model's chat template leaves it out there: say it in another message"
                raise MessageError(f"messages.{number}", what)

    def _adapted(self, where: str, given: Mapping[str, Any], forms: TemplateForms) -> Message:
        """A message with its role, its calls and the lack of content as the template takes them."""
        message = {
            name: value for name, value in given.items()
            if value or not (value is None or name in _EMPTY_FIELDS) or name == "content"
        }  # fmt: skip
        role, calls = message.get("role"), message.pop("tool_calls", None) or []
        if not isinstance(role, str) or not role:
            raise MessageError(where, " has no role")
        if not is_of_type(calls, Sequence[Mapping]):
            raise MessageError(where, ".tool_calls is not a list of objects")
        checked = [_checked_call(f"{where}.tool_calls.{number}", call) for number, call in enumerate(calls)]
        content = _checked_content(where, message.get("content"))
        message["content"] = "" if content is None and role != "assistant" else content
        if role == "developer" and not forms.has_role("developer"):
            message["role"] = "system"
        if checked and not forms.shows_calls:
            text = [joined(content)] if content else []
            return {**message, "content": "\n".join(text + [_call_as_text(call) for call in checked])}
        if checked:
            message["tool_calls"] = [
                forms.call(f"{where}.tool_calls.{number}", call) for number, call in enumerate(checked)
            ]
        if role == "assistant" and (content is None or (checked and not content)):
            del message["content"]
            message |= forms.no_content("null" if content is None else "empty", with_calls=bool(checked))
        return message


def template_source(tokenizer: Any) -> str:
    """The text of a tokenizer's chat template; of several, of all."""
    template = getattr(tokenizer, "chat_template", None)
    return template if isinstance(template, str) else json.dumps(template, default=str)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _checked_content(where: str, content: Any) -> Any:
    """Content that is a text, parts that are texts, or None. Raises `MessageError`."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise MessageError(where, ".content is neither a text nor a list of parts")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise MessageError(where, ".content has a part that is no text: this model reads text alone")
    return list(content) or ""


def _checked_call(where: str, call: Mapping[str, Any]) -> Message:
    """A call with a function's name and arguments. Raises `MessageError`."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessageError(where, " has no function with a name")
    arguments = function.get("arguments")
    return {**call, "type": "function", "function": {**function, "arguments": "{}" if arguments is None else arguments}}


def _call_as_text(call: Message) -> str:
    """A call as a line of JSON, where a template has no form of its own."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {written or "{}"}}}'


def _results_as_questions(messages: Sequence[Message]) -> list[Message]:
    """Messages in which the user tells the results of calls: all of one turn in one message."""
    found = list[Message]()
    for is_result, some in groupby(messages, key=lambda message: message["role"] == "tool"):
        if not is_result:
            found += some
            continue
        texts = [(message.get("name") or "the call", message["content"]) for message in some]
        lines = [f"Result of {name}:\n{joined(content)}" for name, content in texts]
        found.append({"role": "user", "content": "\n".join(lines)})
    return found


def _systems_in_questions(messages: Sequence[Message]) -> list[Message]:
    """Messages in which what a system says is the beginning of the user's next message, with an empty line behind it;
    where none comes next it is one of the user's itself."""
    found, is_begun = list[Message](), False  # the last one is what a system says
    for message in messages:
        is_system = message["role"] == "system"
        if is_begun and message["role"] in ("system", "user"):
            content = "\n\n".join([found[-1]["content"], joined(message["content"])])
            found[-1] = {**message, "role": "user", "content": content}
        else:
            found.append({**message, "role": "user", "content": joined(message["content"])} if is_system else message)
        is_begun = is_system
    return found
