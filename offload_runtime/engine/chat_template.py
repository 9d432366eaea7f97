"""Chat messages in the form that a model's chat template takes.

Templates disagree about what messages look like: content is a text or a list of parts, arguments of calls are a JSON
text or an object, a turn of calls alone has no content, and not all know every role. `TemplateForms` finds out as
llama.cpp does: small conversations are rendered in each form that messages may have, and the one that is whole in the
text is taken.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

from jinja2 import Environment, meta

from offload_runtime.engine.channels import has_channels
from offload_runtime.errors import OptionError
from offload_runtime.options import is_of_type, require

Message = dict[str, Any]

MOST_LEVELS = 32  # of lists and objects in one another; no message and no tool has as many

# What the small conversations say, to be found in their text.
_USER, TEXT, _PARTS = "needleuser", "needletext", ("needlea", "needleb")
_NAME, _RESULT, _ARGUMENTS = "needlename", "needleresult", '{"needlekey": "needlevalue"}'
_ID = "call00001"  # as Mistral's templates demand
_PARAMETERS = {"type": "object", "properties": {"needlekey": {"type": "string", "description": "-"}}, "required": []}
TOOLS = [{"type": "function", "function": {"name": "needletool", "description": "-", "parameters": _PARAMETERS}}]
_NO_CONTENT: dict[str, Message] = {"null": {"content": None}, "absent": {}, "empty": {"content": ""}}

_THINK = ("<think>", "</think>")
# Marks of families, which count where the template or a token has them.
_OTHERS = (("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("<|START_THINKING|>", "<|END_THINKING|>"))


class MessageError(OptionError):
    """A message is not what it should be; `param` names the place."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}{what}")
        self.param = where


class TemplateForms:
    """Finds out what a template takes, with tools or without any, once it matters.

    Args:
        render: `ChatTemplate.render`.
        options: What the template is given beside messages.
    """

    def __init__(self, render: Callable[[Sequence[Message], Mapping[str, Any]], str], options: Message) -> None:
        self._render, self._options = render, options
        self._content, self._roles = dict[str, tuple[bool, bool, bool]](), dict[str, bool]()

    def _text(self, *messages: Message) -> str:
        """Return the template's text of messages; empty where it refuses them."""
        try:
            return self._render(messages, self._options)
        except Exception:  # templates raise whatever they like
            return ""

    def has_role(self, role: str) -> bool:
        """Return whether a role that may come first has a form of its own: neither refused, nor dropped, nor that of
        any unknown role."""
        if role not in self._roles:
            own, unknown = (self._text({"role": role, "content": TEXT}, {"role": "user", "content": _USER})
                            for role in (role, "needlerole"))  # fmt: skip
            self._roles[role] = TEXT in own and own != unknown
        return self._roles[role]

    def content(self, role: str, content: str | list[Message]) -> Any:
        """Return a text or parts as the template takes them: texts of parts are never glued to one another."""
        takes_texts, takes_part, takes_several = self._content_forms(role)
        if isinstance(content, list) and takes_several:
            return content
        text = joined(content)
        return text if takes_texts or not takes_part else [{"type": "text", "text": text}]

    @property
    def takes_system(self) -> bool:
        """Return whether a conversation may begin with a system message: it is neither refused nor left out."""
        return any(self._content_forms("system")) or not any(self._content_forms("user"))

    def _content_forms(self, role: str) -> tuple[bool, bool, bool]:
        """Return whether messages of a role may have a text, a part, and several parts, between which something
        stands."""
        if role not in self._content:
            self._content[role] = self._probe_content(role)
        return self._content[role]

    def _probe_content(self, role: str) -> tuple[bool, bool, bool]:
        text = self._text(*self._around(role, TEXT))
        one, several = (self._text(*self._around(role, [{"type": "text", "text": part} for part in parts]))
                        for parts in ([TEXT], _PARTS))  # fmt: skip
        # A list that is written as it stands shows its keys, too.
        written_out = re.compile("['\"]type['\"]: ?['\"]text")
        first, second = (several.find(part) for part in _PARTS)
        is_apart = first >= 0 and second > first + len(_PARTS[0]) and not written_out.search(several)
        return TEXT in text, TEXT in one and not written_out.search(one), is_apart

    def _around(self, role: str, content: Any) -> list[Message]:
        """Return a conversation in which a message of a role has its place."""
        user, message = {"role": "user", "content": _USER}, {"role": role, "content": content}
        if role == "tool":
            no_content = self.no_content("null", with_calls=True)
            called = self._calling(no_content, as_object=self.takes_objects)
            return [user, called, {**message, "name": _NAME, "tool_call_id": _ID}]
        return [message] if role == "user" else [user, message, user] if role == "assistant" else [message, user]

    # --- calls

    def _calling(self, content: Message, *, as_object: bool) -> Message:
        """Return a turn of one call."""
        arguments = json.loads(_ARGUMENTS) if as_object else _ARGUMENTS
        call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        return {"role": "assistant", **content, "tool_calls": [call]}

    @cached_property
    def _texts_of_calls(self) -> dict[tuple[str, bool], str]:
        """Return conversations with a call, by the form of no content and whether its arguments are an object; empty
        where they are refused, or the call changes nothing."""
        user, found = {"role": "user", "content": _USER}, dict[tuple[str, bool], str]()
        result = {"role": "tool", "name": "needlefunction", "tool_call_id": _ID, "content": _RESULT}
        for form, content in _NO_CONTENT.items():
            for as_object in (False, True):
                calling = self._calling(content, as_object=as_object)
                without = {name: value for name, value in calling.items() if name != "tool_calls"}
                text = self._text(user, calling, result)
                is_shown = text != self._text(user, without, result)
                if not text:
                    text = self._text(user, calling)
                    is_shown = text != self._text(user, without)
                found[form, as_object] = text if is_shown else ""
        return found

    @cached_property
    def takes_objects(self) -> bool:
        """Return whether arguments of calls are objects to it. One that inserts a text writes an object as Python does,
        or not at all; one that takes both for the same is given the text, as it was sent."""
        as_text, as_object = ([self._texts_of_calls[form, kind] for form in _NO_CONTENT] for kind in (False, True))
        inserts_text = any(_ARGUMENTS in text for text in as_text)
        reads_object = any("needlekey" in text and "'needlekey'" not in text for text in as_object)
        return not inserts_text or (reads_object and as_text != as_object)

    def _text_of_call(self, form: str) -> str:
        return self._texts_of_calls[form, self.takes_objects]

    @cached_property
    def shows_calls(self) -> bool:
        """Return whether calls are in its text."""
        return any(self._text_of_call(form) for form in _NO_CONTENT)

    @cached_property
    def shows_results(self) -> bool:
        """Return whether results of calls are in its text, in a role of their own."""
        if self.shows_calls:
            return any(_RESULT in self._text_of_call(form) for form in _NO_CONTENT)
        answer = {"role": "assistant", "content": TEXT}
        return _RESULT in self._text({"role": "user", "content": _USER}, answer, {"role": "tool", "content": _RESULT})

    def no_content(self, sent: str, *, with_calls: bool) -> Message:
        """Return what stands for no content of an assistant's message: what was sent, if that shows the call and is not
        written out, or another form that is right."""
        user = {"role": "user", "content": _USER}
        texts = {
            form: self._text_of_call(form) if with_calls else self._text(user, {"role": "assistant", **content}, user)
            for form, content in _NO_CONTENT.items()
        }
        fine = {form for form, text in texts.items() if text and text.count("None") <= texts["empty"].count("None")}
        order = dict.fromkeys((sent, *_NO_CONTENT))
        return dict(_NO_CONTENT[next((form for form in order if form in fine), sent)])

    def call(self, where: str, call: Message) -> Message:
        """Return a call of an earlier turn with its arguments as the template takes them."""
        arguments = call["function"]["arguments"]
        if self.takes_objects and isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
                require_shallow(arguments)
            except (ValueError, RecursionError) as error:
                what = " has arguments that are not JSON, which this model's chat template takes them for"
                raise MessageError(where, what) from error
        elif not self.takes_objects and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}


def require_shallow(value: Any) -> None:
    """Raise `OptionError` for values in one another deeper than anybody means, before anything follows them."""
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [item for one in level if isinstance(one, dict | list)
                 for item in (one.values() if isinstance(one, dict) else one)]  # fmt: skip
        if not level:
            return
    raise OptionError(f"the body has values in one another more than {MOST_LEVELS} levels deep")


def joined(content: str | list[Message]) -> str:
    """Return the text of content that may come in parts, a line for each."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


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
        """Return the text of messages as they are, with the beginning of an answer; raises whatever the template does.

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
        """Return what the template reads of all that it is given; of several, what any of them does."""
        templates = self._tokenizer.chat_template
        reading = Environment(extensions=["jinja2.ext.loopcontrols"])
        texts = templates.values() if isinstance(templates, dict) else [templates]
        # transformers' own tag marks what an assistant says.
        plain = (re.sub(r"{%[-+]?\s*(end)?generation\s*[-+]?%}", "", text) for text in texts)
        return frozenset().union(*(meta.find_undeclared_variables(reading.parse(text)) for text in plain))

    def unread(self, options: Iterable[str]) -> list[str]:
        """Return names of options that the template does not read, and which change nothing."""
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
        """Return messages that begin with what the model is told: in the system message, or where the template has none
        in the user's."""
        first, *others = [dict(message) for message in messages]
        if first.get("role") not in ("system", "developer") and self._forms[False].has_role("system"):
            return [{"role": "system", "content": text}, first, *others]
        content = _checked_content("messages.0", first.get("content"))
        parts = [content] if isinstance(content, str) else [part["text"] for part in content or ()]
        order = [*parts, text] if first.get("role") in ("system", "developer") else [text, *parts]
        return [{**first, "content": "\n\n".join(order)}, *others]

    def begun(self, text: str, answer: Message) -> str:
        """Return the text of messages, with the beginning of an answer, and behind it what the answer has so far.

        What was thought (`reasoning_content`) stands between the marks of the family, the first of which `text` may end
        in; where it ends in the last one the template has done with thinking, and it is left out.

        Raises:
            OptionError: It has no text, or has only been thought so far and comes in channels.
        """
        said, thought = joined(answer.get("content") or ""), answer.get("reasoning_content") or ""
        require(bool(said or thought), "the answer that should go on has no text yet: leave it out")
        if has_channels(self._tokenizer):
            require(bool(said), "this model thinks in a channel of its own, where no answer can go on: leave it out")
            before = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
            return f"{text}{before}<|channel|>final<|message|>{said}"
        start, end = next(iter(thinking_marks(self._tokenizer).items()))
        around, behind = ("\n", "\n\n") if start == _THINK[0] else ("", "")
        is_over, is_open = text.rstrip().endswith(end), text.rstrip().endswith(start)
        if is_open or (thought and not is_over):
            before = f"{text.rstrip() if is_open else text + start}{around}{thought}"
            return f"{before}{around}{end}{behind}{said}" if said else before
        require(bool(said), "the chat template is told not to think, and the answer has only been thought so far")
        return text + said

    def adapted(self, messages: Sequence[Mapping[str, Any]], *, with_tools: bool) -> list[Message]:
        """Return messages as OpenAI has them, in the form that the template takes where it is given tools or is not.

        Raises:
            MessageError: One of them is none.
        """
        forms = self._forms[with_tools]
        found = [self._adapted(f"messages.{number}", message, forms) for number, message in enumerate(messages)]
        if any(message["role"] == "tool" for message in found) and not forms.shows_results:
            found = _results_as_questions(found)
        if any(message["role"] == "system" for message in found) and not forms.takes_system:
            if not self._has_said:
                self._has_said = True
                what = "this model's chat template takes no system message: it is put before the user's next one"
                logging.getLogger(__name__).warning(what)
            found = _systems_in_questions(found)
        for message in found:
            if isinstance(message.get("content"), str | list):
                message["content"] = forms.content(message["role"], message["content"])
        return found

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
        """Return a message with its role, its calls and the lack of content as the template takes them."""
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


def thinking_marks(tokenizer: Any) -> dict[str, str]:
    """Return the marks that thinking may end with by those that it begins with, the model's own first."""
    source, contents = template_source(tokenizer), {token.content for token in tokenizer.added_tokens_decoder.values()}
    return dict([*(pair for pair in _OTHERS if pair[0] in source or pair[0] in contents), _THINK])


def template_source(tokenizer: Any) -> str:
    """Return the text of a tokenizer's chat template; of several, of all."""
    template = getattr(tokenizer, "chat_template", None)
    return template if isinstance(template, str) else json.dumps(template, default=str)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _checked_content(where: str, content: Any) -> Any:
    """Return content that is a text, parts that are texts, or None. Raises `MessageError`."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise MessageError(where, ".content is neither a text nor a list of parts")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise MessageError(where, ".content has a part that is no text: this model reads text alone")
    return list(content) or ""


def _checked_call(where: str, call: Mapping[str, Any]) -> Message:
    """Return a call with a function's name and arguments. Raises `MessageError`."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessageError(where, " has no function with a name")
    arguments = function.get("arguments")
    return {**call, "type": "function", "function": {**function, "arguments": "{}" if arguments is None else arguments}}


def _call_as_text(call: Message) -> str:
    """Return a call as a line of JSON, where a template has no form of its own."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {written or "{}"}}}'


def _results_as_questions(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which the user tells the results of calls: all of one turn in one message."""
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
    """Return messages in which what a system says is the beginning of the user's next message, with an empty line
    behind it; where none comes next it is one of the user's itself."""
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
