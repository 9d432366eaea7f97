"""What a chat template takes, which is found out as llama.cpp does: small conversations are rendered in each form that
messages may have, and the one that is whole in the text is taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from offload_runtime.errors import OptionError

Message = dict[str, Any]

MOST_LEVELS = 32  # of lists and objects in one another; no message and no tool has as many

# What the small conversations say, to be found in their text.
_USER, TEXT, _PARTS = "needleuser", "needletext", ("needlea", "needleb")
_NAME, _RESULT, _ARGUMENTS = "needlename", "needleresult", '{"needlekey": "needlevalue"}'
_ID = "call00001"  # as Mistral's templates demand
_PARAMETERS = {"type": "object", "properties": {"needlekey": {"type": "string", "description": "-"}}, "required": []}
TOOLS = [{"type": "function", "function": {"name": "needletool", "description": "-", "parameters": _PARAMETERS}}]
_NO_CONTENT: dict[str, Message] = {"null": {"content": None}, "absent": {}, "empty": {"content": ""}}


class MessageError(OptionError):
    """A message is not what it should be; `param` names the place."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}{what}")
        self.param = where


class TemplateForms:
    """What a template takes, with tools or without any: found out once it matters.

    Args:
        render: `ChatTemplate.render`.
        options: What the template is given beside messages.
    """

    def __init__(self, render: Callable[[Sequence[Message], Mapping[str, Any]], str], options: Message) -> None:
        self._render, self._options = render, options
        self._content, self._roles = dict[str, tuple[bool, bool, bool]](), dict[str, bool]()

    def _text(self, *messages: Message) -> str:
        """The template's text of messages; empty where it refuses them."""
        try:
            return self._render(messages, self._options)
        except Exception:  # templates raise whatever they like
            return ""

    def has_role(self, role: str) -> bool:
        """Whether a role that may come first has a form of its own: neither refused, nor dropped, nor that of any
        unknown role."""
        if role not in self._roles:
            own, unknown = (self._text({"role": role, "content": TEXT}, {"role": "user", "content": _USER})
                            for role in (role, "needlerole"))  # fmt: skip
            self._roles[role] = TEXT in own and own != unknown
        return self._roles[role]

    def content(self, role: str, content: str | list[Message]) -> Any:
        """A text or parts as the template takes them: texts of parts are never glued to one another."""
        takes_texts, takes_part, takes_several = self._content_forms(role)
        if isinstance(content, list) and takes_several:
            return content
        text = joined(content)
        return text if takes_texts or not takes_part else [{"type": "text", "text": text}]

    @property
    def takes_system(self) -> bool:
        """Whether a conversation may begin with a system message: it is neither refused nor left out."""
        return any(self._content_forms("system")) or not any(self._content_forms("user"))

    def _content_forms(self, role: str) -> tuple[bool, bool, bool]:
        """Whether messages of a role may have a text, a part, and several parts, between which something stands."""
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
        """A conversation in which a message of a role has its place."""
        user, message = {"role": "user", "content": _USER}, {"role": role, "content": content}
        if role == "tool":
            no_content = self.no_content("null", with_calls=True)
            called = self._calling(no_content, as_object=self.takes_objects)
            return [user, called, {**message, "name": _NAME, "tool_call_id": _ID}]
        return [message] if role == "user" else [user, message, user] if role == "assistant" else [message, user]

    # --- calls

    def _calling(self, content: Message, *, as_object: bool) -> Message:
        """A turn of one call."""
        arguments = json.loads(_ARGUMENTS) if as_object else _ARGUMENTS
        call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        return {"role": "assistant", **content, "tool_calls": [call]}

    @cached_property
    def _texts_of_calls(self) -> dict[tuple[str, bool], str]:
        """Conversations with a call, by the form of no content and whether its arguments are an object; empty where
        they are refused, or the call changes nothing."""
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
        """Whether arguments of calls are objects to it. One that inserts a text writes an object as Python does, or not
        at all; one that takes both for the same is given the text, as it was sent."""
        as_text, as_object = ([self._texts_of_calls[form, kind] for form in _NO_CONTENT] for kind in (False, True))
        inserts_text = any(_ARGUMENTS in text for text in as_text)
        reads_object = any("needlekey" in text and "'needlekey'" not in text for text in as_object)
        return not inserts_text or (reads_object and as_text != as_object)

    def _text_of_call(self, form: str) -> str:
        return self._texts_of_calls[form, self.takes_objects]

    @cached_property
    def shows_calls(self) -> bool:
        """Whether calls are in its text."""
        return any(self._text_of_call(form) for form in _NO_CONTENT)

    @cached_property
    def shows_results(self) -> bool:
        """Whether results of calls are in its text, in a role of their own."""
        if self.shows_calls:
            return any(_RESULT in self._text_of_call(form) for form in _NO_CONTENT)
        answer = {"role": "assistant", "content": TEXT}
        return _RESULT in self._text({"role": "user", "content": _USER}, answer, {"role": "tool", "content": _RESULT})

    def no_content(self, sent: str, *, with_calls: bool) -> Message:
        """What stands for no content of an assistant's message: what was sent, if that shows the call and is not
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
        """A call of an earlier turn with its arguments as the template takes them."""
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
    """The text of content that may come in parts, a line for each."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
