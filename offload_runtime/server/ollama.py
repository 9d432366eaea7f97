"""ollama's API as far as its clients need it to find the model and to talk to it: requests are translated into
OpenAI's, and the same answers are told in ollama's words, in streams a line each.

The options of a machine, `num_ctx` among them, do nothing, nor does `keep_alive` where a server has one model that
stays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, AliasChoices, Field

from offload_runtime.server.failures import Failure
from offload_runtime.server.parsers import arguments_of
from offload_runtime.server.protocol import Answered, Delta, Ending, logprobs_of
from offload_runtime.server.schema import ANY, AnswerBody, Body, BoundedChatBody, CompletionBody, Harmless, RequestError
from offload_runtime.server.turns import OfferedModel
from offload_runtime.sizes import parse_duration_s

if TYPE_CHECKING:
    from offload_runtime.engine import Runtime

VERSION = "0.6.4"  # of ollama, whose routes these are: clients ask what they may use
_ID = "call{:05d}"  # calls have no ids there, and templates may want nine letters


# A model that is called by no tag is the latest one.
_Name = Annotated[str, Field(min_length=1), AfterValidator(lambda name: name.removesuffix(":latest"))]


class _Options(Body):
    harmless: ClassVar[Harmless] = {
        **dict.fromkeys((
            "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "use_mmap", "use_mlock", "num_thread",
            "num_keep", "numa", "mirostat_tau", "mirostat_eta", "penalize_newline",
        ), ANY),
        "mirostat": (0,), "tfs_z": (1,), "typical_p": (1,), "repeat_last_n": (-1,), "logits_all": (False,),
        "vocab_only": (False,), "embedding_only": (False,),
    }  # fmt: skip
    seed: int | None = None
    # `num_predict` and `repeat_penalty`
    max_tokens: int | None = Field(None, alias="num_predict", ge=-2)
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None


class Question(Body):
    """Has what ollama's questions have in common."""

    harmless: ClassVar[Harmless] = {"truncate": ANY, "shift": ANY}
    model: _Name
    keep_alive: str | float | None = None
    stream: bool = True
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def keep_alive_s(self) -> float | None:
        """Return how long the model is to stay, infinite for ever; None where it is not said. Raises `OptionError`."""
        return None if self.keep_alive is None else parse_duration_s(self.keep_alive, "keep_alive")

    def said(self, text: str, **others: Any) -> dict[str, Any]:
        """Return the fields of a response that say something: a text, and what comes with it."""
        raise NotImplementedError

    def wording(self, answered: Answered) -> Lines:
        """Return the words of the response."""
        return Lines(answered, self.said)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is asked: the model is only to be there, or, kept for no time, to go."""
        raise NotImplementedError

    def unloaded(self) -> dict[str, Any]:
        """Return the response that says that the model has gone."""
        return {"model": self.model, "created_at": now(), **self.said(""), "done": True, "done_reason": "unload"}

    def fields(self) -> dict[str, Any]:
        """Return the fields of a request of OpenAI's, but for the prompt. Raises `RequestError`."""
        options = _Options.read(self.options or {}).model_dump(exclude_none=True)
        if options.get("max_tokens", 1) < 0:
            del options["max_tokens"]  # as much as there is room for
        found = {"model": self.model, "stream": self.stream, **options}
        if isinstance(self.format, dict):
            found["response_format"] = {"type": "json_schema", "json_schema": {"schema": self.format}}
        elif self.format:
            if self.format != "json":
                raise RequestError("format is json, or a schema", "format")
            found["response_format"] = {"type": "json_object"}
        return found

    def chat(self, runtime: Runtime, messages: list[dict[str, Any]], **others: Any) -> BoundedChatBody:
        """Return a chat of OpenAI's. Raises `RequestError`."""
        fields = {**self.fields(), "logprobs": self.logprobs, "top_logprobs": self.top_logprobs, **others}
        if self.think is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": bool(self.think)}
        if isinstance(self.think, str) and not runtime.chat_template.unread(["reasoning_effort"]):
            fields["reasoning_effort"] = self.think
        return BoundedChatBody.read({**fields, "messages": messages})


class ChatRequest(Question):
    """`/api/chat`. Without messages the model is only to be there."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None

    @property
    def is_empty(self) -> bool:
        return not self.messages

    def said(self, text: str, **others: Any) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, **others}}

    def asked(self, runtime: Runtime) -> AnswerBody | None:
        """Return the chat of OpenAI's that asks the same; None where nothing is asked. Raises `RequestError`."""
        if self.is_empty:
            return None
        messages, num_calls, waiting = [], 0, list[str]()
        for number, given in enumerate(self.messages or ()):
            message = {{"thinking": "reasoning_content", "tool_name": "name"}.get(k, k): v for k, v in given.items()}
            if message.pop("images", None):
                raise RequestError(f"messages.{number} has images: only texts can be read", f"messages.{number}")
            calls = message.pop("tool_calls", None) or []
            if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
                raise RequestError(f"messages.{number}.tool_calls is not a list of objects", f"messages.{number}")
            if calls:
                ids = [str(call.get("id") or _ID.format(num_calls + at)) for at, call in enumerate(calls)]
                message["tool_calls"] = [
                    {**call, "id": own, "type": "function", "function": _function(call)}
                    for own, call in zip(ids, calls, strict=True)
                ]
                num_calls, waiting = num_calls + len(calls), ids
            if message.get("role") == "tool" and "tool_call_id" not in message:
                message["tool_call_id"] = waiting.pop(0) if waiting else _ID.format(num_calls)
            messages.append(message)
        return self.chat(runtime, messages, tools=self.tools)


def _function(call: dict[str, Any]) -> Any:
    """Return the function of a call without its place, which ollama's newer clients send."""
    function = call.get("function")
    return {k: v for k, v in function.items() if k != "index"} if isinstance(function, dict) else function


class _RawBody(CompletionBody):
    """A plain completion whose `max_tokens` is a bound, as a chat's is."""

    def wanted_tokens(self, most: int) -> int:
        return min(super().wanted_tokens(most), most)


class GenerateRequest(Question):
    """`/api/generate`: a prompt through the chat template, or as it is (`raw`). Without one the model is only to be
    there."""

    harmless: ClassVar[Harmless] = {
        **Question.harmless, "suffix": ("",), "template": ("",), "context": ([],), "images": ([],),
    }  # fmt: skip
    prompt: str = ""
    system: str | None = None
    raw: bool = False

    @property
    def is_empty(self) -> bool:
        return not self.prompt

    def said(self, text: str, **others: Any) -> dict[str, Any]:
        return {"response": text, **others}

    def asked(self, runtime: Runtime) -> AnswerBody | None:
        """Return the request of OpenAI's that asks the same; None where nothing is asked. Raises `RequestError`."""
        if self.is_empty:
            return None
        if not self.raw:
            system = [{"role": "system", "content": self.system}] if self.system else []
            return self.chat(runtime, [*system, {"role": "user", "content": self.prompt}])
        if self.system or self.think:
            raise RequestError("system and think are for prompts that are not raw", "raw")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        without_limit = {"max_tokens": -1, **self.fields()}
        body: AnswerBody = _RawBody.read({**without_limit, "prompt": self.prompt, "logprobs": logprobs})
        return body


class Lines:
    """The words of ollama's answers.

    Args:
        answered: What is answered.
        said: As of the `Question`.
    """

    last_line: ClassVar[str | None] = None
    is_lines: ClassVar[bool] = True

    def __init__(self, answered: Answered, said: Callable[..., dict[str, Any]]) -> None:
        self._answered, self._said = answered, said

    def _line(self, delta: Delta, **ended: Any) -> dict[str, Any]:
        others: dict[str, Any] = {"thinking": delta.reasoning} if delta.reasoning else {}
        if delta.calls:
            others["tool_calls"] = [
                {"id": call.id, "function": {"index": at, "name": call.name, "arguments": arguments_of(call)}}
                for at, call in enumerate(delta.calls, start=delta.first_call)
            ]
        said = self._said(delta.text, **others)
        if delta.logprobs:
            said["logprobs"] = logprobs_of(self._answered.spelling, delta.logprobs)
        return {"model": self._answered.model, "created_at": now(), **said, "done": False, **ended}

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return a response that does not stream; without an answer, that the model is there."""
        if not deltas:
            return self._line(Delta(), done=True, done_reason="load")
        (delta,) = deltas
        assert delta.ending is not None, "answers are told when they have ended"
        return self._line(delta, **self._ended(delta.ending))

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield nothing: the first line is the first of the answer."""
        yield from ()

    def chunk(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield what has come of the answer."""
        if delta.text or delta.reasoning or delta.calls or delta.logprobs:
            yield self._line(delta)

    def closing(self, endings: Sequence[Ending]) -> Iterator[dict[str, Any]]:
        """Yield how the answer has ended."""
        (ending,) = endings
        yield self._line(Delta(), **self._ended(ending))

    def failed(self, failure: Failure) -> dict[str, Any]:
        """Return the error that a stream ends with."""
        return failure.body("/api/chat")

    def _ended(self, ending: Ending) -> dict[str, Any]:
        """Say how an answer has ended and, in nanoseconds, how long it took."""
        stats = ending.stats
        total, first = (round(stats[name] * 1e9) for name in ("seconds", "time_to_first_token_s"))
        load = round(self._answered.load_s * 1e9)
        return {
            "done": True, "done_reason": "length" if ending.finish_reason == "length" else "stop",
            "total_duration": load + total, "load_duration": load, "prompt_eval_count": ending.prompt_tokens,
            "prompt_eval_duration": first, "eval_count": ending.completion_tokens, "eval_duration": total - first,
            "x_stats": stats,
        }  # fmt: skip


def now(seconds: float | None = None) -> str:
    """Return a time, by itself this one, as JSON has them."""
    moment = datetime.now(timezone.utc) if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat().replace("+00:00", "Z")


class ShowRequest(Body):
    """`/api/show`."""

    harmless: ClassVar[Harmless] = {"verbose": ANY, "options": ANY, "system": ("",), "template": ("",), "name": ("",)}
    model: _Name = Field(validation_alias=AliasChoices("model", "name"))  # the latter is older, and litellm's


def tag(model: OfferedModel, name: str, begun_s: float) -> dict[str, Any]:
    """Return a model as `/api/tags` lists it. Its digest is of its name: no file is read for it."""
    return {
        "name": name, "model": name, "modified_at": now(begun_s), "size": model.weight_bytes,
        "digest": hashlib.sha256(name.encode()).hexdigest(), "details": _details(model),
    }  # fmt: skip


def _details(model: OfferedModel) -> dict[str, Any]:
    family = model.architecture
    return {
        "parent_model": "", "format": "", "family": family, "families": [family], "parameter_size": "",
        "quantization_level": ", ".join(model.stored_as),
    }  # fmt: skip


def about(model: OfferedModel, begun_s: float) -> dict[str, Any]:
    """Return what `/api/show` says of a model."""
    family, template = model.architecture, model.template
    capabilities = ["completion"]
    capabilities += ["tools"] if model.has_calls else []
    capabilities += ["thinking"] if "enable_thinking" in template or "<think>" in template else []
    return {
        "modelfile": "", "parameters": "", "template": template, "details": _details(model),
        "model_info": {"general.architecture": family, f"{family}.context_length": model.context_tokens},
        "capabilities": capabilities, "modified_at": now(begun_s),
    }  # fmt: skip


def encoded(value: dict[str, Any]) -> bytes:
    """Return a line of a stream."""
    return json.dumps(value).encode() + b"\n"
