"""OpenAI's Responses API without stored state: a request is translated into a chat (`ResponsesBody.asked`), and the
same answer is told as items (`Responses`).

Items of the assistant's that follow one another, its reasoning, text and calls, are one message of the chat. A response
that does not stream is what a stream ends with.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from offload_runtime.server.failures import Failure
from offload_runtime.server.protocol import Answered, Delta, Ending, function_call, logprobs_of
from offload_runtime.server.schema import ANY, Body, BoundedChatBody, Harmless, RequestError, with_plain_texts

if TYPE_CHECKING:
    from offload_runtime.engine import Runtime

_OF_ITEMS = {"id": ANY, "status": ANY}
_LOGPROBS = "message.output_text.logprobs"


class _Part(Body):
    harmless: ClassVar[Harmless] = {"annotations": ANY, "logprobs": ANY}
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


def _parts(content: str | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a content as a chat has it. Raises `RequestError`."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    for part in content:
        if part.get("type") in ("input_image", "input_file", "input_audio"):
            raise RequestError(f"the content has the type {part['type']!r}: only texts can be read")
    return [{"type": "text", "text": _Part.read(part).text} for part in content]


class _Message(Body):
    harmless: ClassVar[Harmless] = {**_OF_ITEMS, "phase": ANY}
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]

    def message(self) -> dict[str, Any]:
        """Return it as a chat has it. Raises `RequestError`."""
        return {"role": self.role, "content": _parts(self.content)}


class _Reasoning(Body):
    harmless: ClassVar[Harmless] = {**_OF_ITEMS, "encrypted_content": ANY}
    type: Literal["reasoning"]
    summary: list[dict[str, Any]] = Field(default_factory=list)
    content: list[dict[str, Any]] | None = None

    def message(self) -> dict[str, Any]:
        """Return it as a chat has it. Raises `RequestError`."""
        thought = "\n".join(part["text"] for part in _parts(self.content or self.summary))
        return {"role": "assistant", "content": None, "reasoning_content": thought}


class _FunctionCall(Body):
    harmless: ClassVar[Harmless] = {**_OF_ITEMS, "caller": ({"type": "direct"},)}
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def message(self) -> dict[str, Any]:
        """Return it as a chat has it."""
        call = function_call(self.call_id, self.name, self.arguments)
        return {"role": "assistant", "content": None, "tool_calls": [call]}


class _FunctionOutput(Body):
    harmless: ClassVar[Harmless] = {**_OF_ITEMS, "caller": ({"type": "direct"},), "name": ANY}
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[dict[str, Any]]

    def message(self) -> dict[str, Any]:
        """Return it as a chat has it. Raises `RequestError`."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": _parts(self.output) or ""}


_ITEMS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "message": lambda item: _Message.read(item).message(),
    "reasoning": lambda item: _Reasoning.read(item).message(),
    "function_call": lambda item: _FunctionCall.read(item).message(),
    "function_call_output": lambda item: _FunctionOutput.read(item).message(),
}


def _messages(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a chat that say what items do. Raises `RequestError`."""
    found: list[dict[str, Any]] = []
    for message in Body.read_each("input", items, _ITEMS, default="message"):
        last = found[-1] if found and found[-1]["role"] == message["role"] == "assistant" else None
        if last is None:
            found.append(message)
            continue
        thoughts = [one["reasoning_content"] for one in (last, message) if "reasoning_content" in one]
        calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
        last["content"] = [*(last["content"] or ()), *(message["content"] or ())] or None
        last |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
        last |= {"tool_calls": calls} if calls else {}
    return found


class _Function(Body):
    harmless: ClassVar[Harmless] = {"strict": ANY}
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as a chat has it. Raises `RequestError`."""
    return {"type": "function", "function": _Function.read(tool).model_dump(exclude={"type"}, exclude_none=True)}


class _ReasoningConfig(Body):
    harmless: ClassVar[Harmless] = {"summary": ANY, "generate_summary": ANY}  # what is thought comes whole
    effort: str | None = None


class _Format(Body):
    harmless: ClassVar[Harmless] = {"name": ANY, "description": ANY, "strict": ANY}
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class _TextConfig(Body):
    harmless: ClassVar[Harmless] = {"verbosity": ("medium",)}
    format: _Format = _Format(schema=None)


class ResponsesBody(Body):
    """`/v1/responses`."""

    harmless: ClassVar[Harmless] = {
        **dict.fromkeys((
            "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options",
            "prompt_cache_retention", "prompt_cache_options", "max_tool_calls", "client_metadata",
        ), ANY),
        "background": (False,), "truncation": ("disabled",), "context_management": ([],), "prompt": (None,),
    }  # fmt: skip
    model: str | None = None
    input: str | list[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    stream: bool = False
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    include: list[str] | None = None
    top_logprobs: int | None = None
    reasoning: _ReasoningConfig | None = None
    text: _TextConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def asked(self, runtime: Runtime) -> BoundedChatBody:
        """Return the chat that asks the same. Raises `RequestError`."""
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                remedy = "send all of the conversation as input (most clients do with store false)"
                raise RequestError(f"{name}: this server keeps no responses: {remedy}", name)
        others = set(self.include or ()) - {_LOGPROBS, "reasoning.encrypted_content"}
        if others:
            raise RequestError(f"include has {sorted(others)[0][:100]!r}, which no answer here has", "include")
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages = _messages(items)
        instructions: list[dict[str, Any]] = [{"type": "text", "text": self.instructions}] if self.instructions else []
        while messages and messages[0]["role"] in ("system", "developer"):
            instructions += messages.pop(0)["content"]
        if instructions:  # one message, as some templates have no other place for instructions
            messages.insert(0, {"role": "system", "content": instructions})
        same = ("model", "stream", "seed", "temperature", "top_p", "top_logprobs", "parallel_tool_calls",
                "chat_template_kwargs")  # fmt: skip
        why_not = ", which would run at OpenAI: offer a function of your own"
        choice, form = self.tool_choice, (self.text or _TextConfig()).format
        if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("name"), str):
            choice = {"type": "function", "function": {"name": choice["name"]}}
        return BoundedChatBody.read({
            **{name: getattr(self, name) for name in same}, "messages": with_plain_texts(messages),
            "tools": Body.read_each("tools", self.tools or (), {"function": _function}, why_not=why_not) or None,
            "tool_choice": choice, "max_tokens": self.max_output_tokens,
            "logprobs": bool(self.top_logprobs) or _LOGPROBS in (self.include or ()) or None,
            "top_logprobs": self.top_logprobs or None,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": {
                "type": form.type, **({"json_schema": {"schema": form.schema_}} if form.schema_ is not None else {})
            },
        })  # fmt: skip

    def wording(self, answered: Answered) -> Responses:
        """Return the words of the response."""
        names = ("instructions", "temperature", "top_p", "max_output_tokens", "previous_response_id")
        form = {} if self.text is None else self.text.format.model_dump(by_alias=True, exclude_none=True)
        return Responses(answered, {
            **{name: getattr(self, name) for name in names}, "tools": self.tools or [],
            "tool_choice": self.tool_choice or "auto", "parallel_tool_calls": self.parallel_tool_calls is not False,
            "text": {"format": {"type": "text", **form}}, "truncation": "disabled", "store": False, "metadata": {},
        })  # fmt: skip


class Responses:
    """The words of OpenAI's responses.

    Args:
        answered: What is answered.
        echoed: What a response says again of its request.
    """

    last_line: ClassVar[str | None] = None
    is_lines: ClassVar[bool] = False

    def __init__(self, answered: Answered, echoed: dict[str, Any]) -> None:
        self._answered, self._echoed, self._id = answered, echoed, f"resp_{secrets.token_hex(12)}"
        self._created_s, self._number = int(time.time()), -1
        self._output: list[dict[str, Any]] = []  # items that are complete
        self._item: dict[str, Any] | None = None  # the one that is being written
        self._part: dict[str, Any] = {}  # its text
        self._space, self._space_logprobs = "", list[Any]()
        self._reasoning_tokens = 0

    def _response(self, status: str, **changed: Any) -> dict[str, Any]:
        return {
            "id": self._id, "object": "response", "created_at": self._created_s, "status": status, "error": None,
            "incomplete_details": None, "model": self._answered.model, "output": self._output, "usage": None,
            **self._echoed, **changed,
        }  # fmt: skip

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number, **fields}

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return a response that does not stream."""
        (delta,) = deltas
        assert delta.ending is not None, "answers are told when they have ended"
        for _ in self.chunk(delta):
            pass
        *_, last = self.closing([delta.ending])
        response: dict[str, Any] = last["response"]
        return response

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield the response that has nothing yet."""
        yield self._event("created", response=self._response("in_progress"))
        yield self._event("in_progress", response=self._response("in_progress"))

    def chunk(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield what has come of the response, an item after the other."""
        self._reasoning_tokens += delta.reasoning_tokens
        if delta.reasoning:
            yield from self._open("reasoning")
            yield self._more("reasoning_text", delta.reasoning)
        text, self._space = self._space + delta.text, ""  # space may be all that there is between items
        logprobs = [*self._space_logprobs, *logprobs_of(self._answered.spelling, delta.logprobs)]
        self._space_logprobs = []
        if text and (text.strip() or (self._item is not None and self._item["type"] == "message")):
            yield from self._open("message")
            self._part["logprobs"] += logprobs
            yield self._more("output_text", text, logprobs=logprobs)
        else:
            self._space, self._space_logprobs = text, logprobs
        for call in delta.calls:
            yield from self._close()
            at, number = {"output_index": len(self._output)}, f"fc_{secrets.token_hex(12)}"
            item = {"type": "function_call", "id": number, "call_id": call.id, "name": call.name}
            added = {**item, "status": "in_progress", "arguments": ""}
            yield self._event("output_item.added", **at, item=added)
            of_item = {**at, "item_id": number}
            yield self._event("function_call_arguments.delta", **of_item, delta=call.arguments)
            yield self._event("function_call_arguments.done", **of_item, name=call.name, arguments=call.arguments)
            self._output.append({**item, "status": "completed", "arguments": call.arguments})
            yield self._event("output_item.done", **at, item=self._output[-1])

    def closing(self, endings: Sequence[Ending]) -> Iterator[dict[str, Any]]:
        """Yield the whole response."""
        (ending,) = endings
        is_cut = ending.finish_reason == "length"
        yield from self._close("incomplete" if is_cut else "completed")
        kept, prompt, answer = ending.stats["kept_tokens"], ending.prompt_tokens, ending.completion_tokens
        usage = {
            "input_tokens": prompt, "input_tokens_details": {"cached_tokens": kept, "cache_write_tokens": 0},
            "output_tokens": answer, "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": prompt + answer,
        }  # fmt: skip
        status, why = ("incomplete", {"reason": "max_output_tokens"}) if is_cut else ("completed", None)
        changed = {"usage": usage, "incomplete_details": why, "x_stats": ending.stats}
        yield self._event(status, response=self._response(status, **changed))

    def failed(self, failure: Failure) -> dict[str, Any]:
        """Return the response that a stream ends with where it has failed."""
        code = failure.code or ("rate_limit_exceeded" if failure.status == 429 else "server_error")
        error = {"code": code, "message": failure.message}
        return self._event("failed", response=self._response("failed", error=error))

    def _at(self) -> dict[str, Any]:
        assert self._item is not None, "texts are in items"
        return {"output_index": len(self._output), "item_id": self._item["id"], "content_index": 0}

    def _more(self, kind: str, text: str, **fields: Any) -> dict[str, Any]:
        """Add to the text of the item that is open."""
        self._part["text"] += text
        return self._event(f"{kind}.delta", **self._at(), delta=text, **fields)

    def _open(self, kind: str) -> Iterator[dict[str, Any]]:
        """Begin an item, unless one of this type is open."""
        if self._item is not None and self._item["type"] == kind:
            return
        yield from self._close()
        is_message = kind == "message"
        self._part = {"type": "output_text" if is_message else "reasoning_text", "text": ""}
        self._part |= {"annotations": [], "logprobs": []} if is_message else {}
        of_kind: dict[str, Any] = {"role": "assistant"} if is_message else {"summary": []}
        number = f"{'msg' if is_message else 'rs'}_{secrets.token_hex(12)}"
        self._item = {"type": kind, "id": number, "status": "in_progress", **of_kind, "content": []}
        yield self._event("output_item.added", output_index=len(self._output), item=self._item)
        yield self._event("content_part.added", **self._at(), part=dict(self._part))

    def _close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """End the item that is open."""
        if self._item is None:
            return
        at, part = self._at(), self._part
        logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield self._event(f"{part['type']}.done", **at, text=part["text"], **logprobs)
        yield self._event("content_part.done", **at, part=part)
        item = {**self._item, "status": status, "content": [part]}
        yield self._event("output_item.done", output_index=at["output_index"], item=item)
        self._output.append(item)
        self._item = None
