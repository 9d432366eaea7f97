"""Anthropic's Messages API: a request is translated into a chat of OpenAI's (`MessagesBody.asked`), and the same answer
is told in Anthropic's words (`Messages`).

A `tool_result` becomes a message of its own before the text beside it, thinking that comes back `reasoning_content`.
What thinking is signed with at Anthropic is empty here.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from offload_runtime.server.failures import Failure
from offload_runtime.server.parsers import arguments_of
from offload_runtime.server.protocol import Answered, Delta, Ending, function_call
from offload_runtime.server.schema import ANY, Body, BoundedChatBody, Harmless, RequestError, with_plain_texts

if TYPE_CHECKING:
    from offload_runtime.engine import Runtime
    from offload_runtime.server.parsers import ToolCall

_CACHED = {"cache_control": ANY}  # what was read before is kept anyway
_KEEPS_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


class _Text(Body):
    harmless: ClassVar[Harmless] = {**_CACHED, "citations": ([],)}
    type: Literal["text"]
    text: str


class _Thinking(Body):
    harmless: ClassVar[Harmless] = {"signature": ANY}
    type: Literal["thinking"]
    thinking: str


class _ToolUse(Body):
    harmless: ClassVar[Harmless] = {**_CACHED, "caller": ({"type": "direct"},)}
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]

    def chat(self) -> dict[str, Any]:
        """Return it as OpenAI has it."""
        return function_call(self.id, self.name, json.dumps(self.input, ensure_ascii=False))


class _ToolResult(Body):
    harmless: ClassVar[Harmless] = {**_CACHED, "is_error": ANY}  # models read it in the text
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[dict[str, Any]] = ""


_BLOCKS = {
    "system": {"text": _Text.read}, "user": {"text": _Text.read, "tool_result": _ToolResult.read},
    "tool_result": {"text": _Text.read},
    "assistant": {"text": _Text.read, "thinking": _Thinking.read, "tool_use": _ToolUse.read},
}  # fmt: skip


def _blocks(where: str, of: str, content: str | Sequence[dict[str, Any]]) -> list[Any]:
    """Read the content of a message, a system prompt or a result of a tool. Raises `RequestError`."""
    if isinstance(content, str):
        return [_Text(type="text", text=content)]
    return Body.read_each(where, content, _BLOCKS[of])


class _Message(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]

    def chat(self, where: str) -> list[dict[str, Any]]:
        """Return OpenAI's messages that say the same. Raises `RequestError`."""
        blocks = _blocks(f"{where}.content", self.role, self.content)
        texts = [{"type": "text", "text": block.text} for block in blocks if isinstance(block, _Text)]
        found: list[dict[str, Any]] = []
        for block in blocks:
            if isinstance(block, _ToolResult):
                parts = _blocks(f"{where}.content", "tool_result", block.content)
                content = [{"type": "text", "text": part.text} for part in parts] or ""
                found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        if self.role != "assistant":
            return [*found, {"role": self.role, "content": texts}] if texts or not found else found
        message: dict[str, Any] = {"role": "assistant", "content": texts or None}
        if thought := "".join(block.thinking for block in blocks if isinstance(block, _Thinking)):
            message["reasoning_content"] = thought
        if calls := [block for block in blocks if isinstance(block, _ToolUse)]:
            message["tool_calls"] = [call.chat() for call in calls]
        return [message]


class _Tool(Body):
    harmless: ClassVar[Harmless] = {
        **_CACHED, "type": ("custom",), "strict": ANY, "eager_input_streaming": ANY, "input_examples": ([],),
        "defer_loading": (False,), "allowed_callers": (["direct"],),
    }  # fmt: skip
    name: str
    description: str | None = None
    input_schema: dict[str, Any]

    def chat(self) -> dict[str, Any]:
        """Return it as OpenAI has it."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema}}


class _ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    def chat(self) -> Any:
        """Return it as OpenAI has it."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class _ThinkingConfig(Body):
    harmless: ClassVar[Harmless] = {"budget_tokens": ANY, "display": ANY}  # a bound that only the model could keep
    type: Literal["enabled", "disabled", "adaptive"]


class _OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class _OutputConfig(Body):
    effort: str | None = None
    format: _OutputFormat | None = None


class CountBody(Body):
    """`/v1/messages/count_tokens`: what a prompt is made of."""

    harmless: ClassVar[Harmless] = {**_CACHED, "context_management": ({"edits": []}, _KEEPS_ALL), "mcp_servers": ([],)}
    model: str
    messages: list[_Message] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _ThinkingConfig | None = None
    output_config: _OutputConfig | None = None

    def chat_fields(self, runtime: Runtime) -> dict[str, Any]:
        """Return the fields of a chat of OpenAI's that asks the same. Raises `RequestError`."""
        if self.messages[-1].role == "assistant":
            raise RequestError("the last message is the assistant's, which nothing here goes on with", "messages")
        messages = []
        if self.system:
            texts = [{"type": "text", "text": block.text} for block in _blocks("system", "system", self.system)]
            messages.append({"role": "system", "content": texts})
        for number, message in enumerate(self.messages):
            messages += message.chat(f"messages.{number}")
        why_not = ", which would run at Anthropic: offer a tool of your own, with an input_schema"
        kinds = dict.fromkeys((None, "custom"), lambda tool: _Tool.read(tool).chat())
        tools = Body.read_each("tools", self.tools or (), kinds, why_not=why_not) or None
        fields: dict[str, Any] = {"model": self.model, "messages": with_plain_texts(messages), "tools": tools}
        if self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice.chat() if self.tools else None
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.thinking is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"}
        config = self.output_config or _OutputConfig()
        if config.effort is not None and not runtime.chat_template.unread(["reasoning_effort"]):
            fields["reasoning_effort"] = config.effort
        if config.format is not None:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": config.format.schema_}}
        return fields

    def asked(self, runtime: Runtime) -> BoundedChatBody:
        """Return the chat of OpenAI's that asks the same. Raises `RequestError`."""
        return BoundedChatBody.read(self.chat_fields(runtime))


class MessagesBody(CountBody):
    """`/v1/messages`."""

    harmless: ClassVar[Harmless] = {
        **CountBody.harmless, "metadata": ANY, "service_tier": ANY, "inference_geo": ANY, "speed": ("standard",),
        "container": ANY, "diagnostics": ANY,
    }  # fmt: skip
    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def chat_fields(self, runtime: Runtime) -> dict[str, Any]:
        same = {name: getattr(self, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        return {**super().chat_fields(runtime), **same, "stop": self.stop_sequences}

    def wording(self, answered: Answered) -> Messages:
        """Return the words of the response."""
        return Messages(answered)


class Messages:
    """The words of Anthropic's messages.

    Args:
        answered: What is answered.
    """

    last_line: ClassVar[str | None] = None
    is_lines: ClassVar[bool] = False

    def __init__(self, answered: Answered) -> None:
        self._answered, self._id = answered, f"msg_{secrets.token_hex(12)}"
        self._block: str | None = None  # the type of the one that is open
        self._index = -1
        self._space = ""  # which may be all that there is between blocks

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int], **ended: Any) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._answered.model, "content": content,
            "stop_reason": None, "stop_sequence": None, **ended, "usage": usage,
        }  # fmt: skip

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return a response that does not stream."""
        (delta,) = deltas
        assert delta.ending is not None, "answers are told when they have ended"
        content: list[dict[str, Any]] = []
        if thought := delta.reasoning.rstrip():
            content.append({"type": "thinking", "thinking": thought, "signature": ""})
        if delta.text.strip():
            content.append({"type": "text", "text": delta.text})
        content += [{**_tool_use(call), "input": arguments_of(call)} for call in delta.calls]
        ended = {**self._ended(delta.ending), "x_stats": delta.ending.stats}
        return self._message(content, _usage(delta.ending), **ended)

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield the message that has nothing yet."""
        usage = {"input_tokens": self._answered.prompt_tokens[0], "output_tokens": 0}
        yield {"type": "message_start", "message": self._message([], usage)}

    def chunk(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield what has come of the message, a block after the other."""
        if delta.reasoning:
            yield from self._open("thinking", {"thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        text, self._space = self._space + delta.text, ""
        if text and (self._block == "text" or text.strip()):
            yield from self._open("text", {"text": ""})
            yield self._delta({"type": "text_delta", "text": text})
        else:
            self._space = text
        for call in delta.calls:
            yield from self._close()
            yield from self._open("tool_use", {**_tool_use(call), "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(arguments_of(call))})

    def closing(self, endings: Sequence[Ending]) -> Iterator[dict[str, Any]]:
        """Yield how the message has ended."""
        (ending,) = endings
        yield from self._close()
        usage = _usage(ending)
        yield {"type": "message_delta", "delta": self._ended(ending), "usage": usage, "x_stats": ending.stats}
        yield {"type": "message_stop"}

    def failed(self, failure: Failure) -> dict[str, Any]:
        """Return the error that a stream ends with."""
        return failure.body("/v1/messages")

    def _open(self, kind: str, empty: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Begin a block, unless one of this type is open."""
        if self._block != kind:
            yield from self._close()
            self._block, self._index = kind, self._index + 1
            yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **empty}}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._block is not None:
            if self._block == "thinking":
                yield self._delta({"type": "signature_delta", "signature": ""})
            yield {"type": "content_block_stop", "index": self._index}
        self._block = None

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _ended(self, ending: Ending) -> dict[str, Any]:
        """Say why the message has ended."""
        reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(ending.finish_reason, "end_turn")
        if reason == "max_tokens" and ending.prompt_tokens + ending.completion_tokens >= self._answered.context_tokens:
            reason = "model_context_window_exceeded"
        if ending.stop_string is not None and reason == "end_turn":
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": ending.stop_string}


def _usage(ending: Ending) -> dict[str, int]:
    """Count tokens: those of the prompt that were kept from before are not among `input_tokens`."""
    kept = ending.stats["kept_tokens"]
    return {
        "input_tokens": ending.prompt_tokens - kept, "cache_read_input_tokens": kept, "cache_creation_input_tokens": 0,
        "output_tokens": ending.completion_tokens,
    }  # fmt: skip


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}
