"""What requests may say: OpenAI's fields and a few that others have, read strictly. From here on they are
`GenerationParams` and prompts.

A field that would change the answer and is not known is refused, never dropped. Of fields that nothing here reads
`HARMLESS` has the values that change nothing, which clients fill in by themselves, and `ALIASES` what others call a
field.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from offload_runtime.engine.chat_template import require_shallow
from offload_runtime.errors import OptionError
from offload_runtime.grammar import json_rule
from offload_runtime.options import option_fields
from offload_runtime.params import MOST_LOGPROBS, GenerationParams, SamplingParams
from offload_runtime.server.parsers import AnswerParser, calls_grammar, tools_in_words, writes_calls
from offload_runtime.server.protocol import Answered, Completions, Wording

if TYPE_CHECKING:
    from offload_runtime.engine import Runtime

Harmless = Mapping[str, tuple[Any, ...]]
ANY: tuple[Any, ...] = ()  # whatever the value
# Values that change nothing, beside null, of fields that OpenAI, vLLM, SGLang and llama.cpp have.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],), "verbosity": ("medium",), "function_call": ("none", "auto"), "n_keep": (0, -1),
    "reasoning_format": ("auto", "deepseek"),
}  # fmt: skip
for _values, _names in (
    (ANY, "user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention request_id "
           "cache_prompt"),
    ((None,), "audio prediction web_search_options truncate_prompt_tokens prompt_logprobs allowed_token_ids cache_salt "
              "chat_template structured_outputs guided_json guided_regex guided_choice guided_grammar json_schema"),
    ((False,), "echo logprobs use_beam_search early_stopping include_stop_str_in_output continue_final_message "
               "return_token_ids return_tokens_as_token_ids timings_per_token return_progress"),
    ((True,), "skip_special_tokens spaces_between_special_tokens add_generation_prompt include_reasoning "
              "separate_reasoning"),
    (([],), "functions bad_words documents"), (("",), "suffix grammar"),
    ((0,), "top_logprobs priority top_a mirostat dynatemp_range xtc_probability dry_multiplier"),
    ((1,), "best_of length_penalty typical_p tfs_z"), ((-1,), "max_tokens max_completion_tokens repeat_last_n id_slot"),
):  # fmt: skip
    HARMLESS |= dict.fromkeys(_names.split(), _values)
# What llama.cpp, vLLM and SGLang call fields that are here.
ALIASES = {
    "repeat_penalty": "repetition_penalty", "n_predict": "max_tokens", "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}  # fmt: skip


# Options of an answer that requests have as they are.
_OPTIONS = {
    one.name: one
    for kind in (SamplingParams, GenerationParams)
    for one in option_fields(kind)
    if one.option is not None and one.option.http
}
# Those that say how tokens are chosen.
SAMPLING = {one.name: one for one in option_fields(SamplingParams) if one.name in _OPTIONS}
_MOST_CHOICES = 128
_MOST_STOPS = 16
_SEEDS = 1 << 53  # what every JSON reader keeps exactly
_COMPLETION_TOKENS = 16  # OpenAI's
_OF_SEVERAL_KINDS = {
    "stop": "a text or a list of texts", "prompt": "a text, a list of token ids, or a list of either kind",
}  # fmt: skip


class RequestError(OptionError):
    """A field of a request has a value that makes no sense, or is not known; `param` is its name."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Body(BaseModel):
    """A body of a request, or an object in one: its fields are those that are known."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    harmless: ClassVar[Harmless] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, given: Any) -> Any:
        """Drop values that change nothing: those of `harmless`, and null of its own fields."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if not cls._changes_nothing(name, value)}

    @classmethod
    def _changes_nothing(cls, name: str, value: Any) -> bool:
        if value is None or cls.harmless.get(name) == ANY:
            return name in cls.harmless or name in cls.model_fields
        # To Python true is 1, to JSON it is not.
        is_bool = isinstance(value, bool)
        return any(one == value and isinstance(one, bool) == is_bool for one in cls.harmless.get(name, ()))

    @classmethod
    def read(cls, body: Any) -> Any:
        """Return the request of a JSON value. Raises `RequestError`."""
        require_shallow(body)
        try:
            return cls.model_validate(_renamed(body) if isinstance(body, dict) else body)
        except ValidationError as error:
            raise _request_error(error) from error

    @staticmethod
    def read_each(
        field: str, values: Sequence[dict[str, Any]], kinds: Mapping[Any, Callable[[Any], Any]], *,
        default: str | None = None, why_not: str = "",
    ) -> list[Any]:  # fmt: skip
        """Read the objects in a field.

        Args:
            field: Its name.
            values: What it holds.
            kinds: What reads them, by their `type`.
            default: The type of those that say none.
            why_not: Of other types, what to do about them; by itself, which ones can be read.

        Raises:
            RequestError: One of them cannot be read: which one, and why.
        """
        found = []
        for number, value in enumerate(values):
            kind = value.get("type", default)
            if not isinstance(kind, str | None) or kind not in kinds:
                what = why_not or f": only {', '.join(kinds)} can be read"
                raise RequestError(f"{field}.{number} has the type {str(kind)[:100]!r}{what}", field)
            try:
                found.append(kinds[kind](value))
            except RequestError as error:
                raise RequestError(f"{field}.{number}: {error}", field) from error
        return found


def _renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body by the names that its fields have here. Raises `RequestError` where it says a field twice,
    differently."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        own = ALIASES.get(name, name)
        if found.get(own) is None:
            found[own] = value
        elif value is not None and value != found[own]:
            raise RequestError(f"{name} says another {own} than the body does: give one of them")
    if found.get("best_of") == found.get("n"):
        found.pop("best_of", None)  # the best of them are all of them
    return found


def _request_error(error: ValidationError) -> RequestError:
    """Say what is wrong with a body, in our words."""
    first = error.errors(include_url=False, include_input=False)[0]
    own = first.get("ctx", {}).get("error")
    if isinstance(own, RequestError):
        return own
    name = str(first["loc"][0]) if first["loc"] else ""
    if name in _OF_SEVERAL_KINDS and first["type"] != "missing":
        return RequestError(f"{name} is not {_OF_SEVERAL_KINDS[name]}", name)
    where = ".".join(str(part) for part in first["loc"])[:200]
    if first["type"] == "model_type" and not where:
        return RequestError("the body is not a JSON object")
    if first["type"] == "extra_forbidden" and where in HARMLESS:
        return RequestError(f"{where} is taken only where it changes nothing: leave it out", where)
    if first["type"] == "extra_forbidden":
        return RequestError(f"{where} is not a field that this server knows", where)
    return RequestError(f"{where or 'the body'}: {first['msg']}", where or None)


class StreamOptions(Body):
    """Says how a stream ends."""

    harmless: ClassVar[Harmless] = {"include_obfuscation": ANY}
    include_usage: bool = False


class _JsonSchema(Body):
    harmless: ClassVar[Harmless] = {"name": ANY, "description": ANY, "strict": ANY}
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """Says what an answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_own(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            what = "response_format.json_schema has a schema where it is the type, and only there"
            raise RequestError(what, "response_format.json_schema")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """Return the JSON schema of the answer; None for text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


_fields: dict[str, Any] = {name: (one.hint | None, None) for name, one in _OPTIONS.items()}
_Options: Any = create_model("_Options", __base__=Body, **_fields)


class AnswerBody(_Options):
    """Has what requests for answers have in common, beside the options that they have as they are.

    Each kind has `prompts`, what is answered (texts, token ids or messages), and `num_logprobs`: how many of the
    likeliest tokens are told beside each one's log-probability; None tells neither.
    """

    harmless: ClassVar[Harmless] = HARMLESS
    is_chat: ClassVar[bool] = False
    model: str | None = None
    n: int = Field(1, ge=1, le=_MOST_CHOICES)
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    max_tokens: int | None = Field(None, ge=1)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop_token_ids: list[int] | None = None
    x_sources: bool = False
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None

    def asked(self, runtime: Runtime) -> AnswerBody:
        """Return what is asked for in OpenAI's words of completions; other protocols translate."""
        return self

    def wording(self, answered: Answered) -> Wording:
        """Return the words of the response."""
        with_usage = self.stream_options is not None and self.stream_options.include_usage
        return Completions(answered, is_chat=self.is_chat, with_usage=with_usage, with_sources=self.x_sources)

    def params(self, defaults: Mapping[str, Any], room_tokens: int, limit_tokens: int | None) -> GenerationParams:
        """Return what one answer is asked for.

        Args:
            defaults: Fields of `SamplingParams` that the model wants where the request says nothing.
            room_tokens: Tokens that the context has beside the prompt.
            limit_tokens: Most that the server allows.

        Raises:
            RequestError, OptionError: A value makes no sense, or is not supported.
        """
        asked = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        options = {**defaults, **asked, "logit_bias": _token_ids(self.logit_bias or {}), "seed": self._seed()}
        options["top_k"] = max(0, options.get("top_k", 0))  # -1 is off with some clients
        for name in asked:
            try:
                _OPTIONS[name].checked(name, options[name])
            except OptionError as error:
                raise RequestError(str(error), name) from error
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > _MOST_STOPS:
            raise RequestError(f"stop has {len(stops)} strings: at most {_MOST_STOPS} are allowed", "stop")
        most = room_tokens if limit_tokens is None else min(room_tokens, limit_tokens)
        wanted = self.wanted_tokens(max(1, most))
        if limit_tokens is not None and wanted > limit_tokens:
            raise RequestError(f"max_tokens {wanted} is more than the {limit_tokens} that are allowed", "max_tokens")
        return GenerationParams().changed(
            **options, max_new_tokens=wanted, stop=stops, stop_token_ids=self.stop_token_ids or (),
            logprobs=self.num_logprobs, prompt_logprobs=self.num_prompt_logprobs,
        )  # fmt: skip

    def grammar_params(self, tokenizer: Any) -> dict[str, Any]:
        """Return fields of `SamplingParams` that say what the answer has to be. Raises `RequestError`."""
        schema = self.response_format and self.response_format.schema_of_answer
        return {} if schema is None else {"json_schema": schema}

    def wanted_tokens(self, most: int) -> int:
        """Return how long an answer may get, of `most` where the request says nothing."""
        return self.max_tokens or most

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Return how many are told beside each token of the prompt's tokens."""
        return None

    def echo_of(self, tokenizer: Any, prompt: Any) -> str | None:
        """Return the text of a prompt that comes before its answer; None where it does not."""
        return None

    def _seed(self) -> int:
        """Return the seed, negative ones as the numbers that have their bits; a random one where there is none."""
        return secrets.randbelow(_SEEDS) if self.seed is None else self.seed % (1 << 64)

    def encoded(self, runtime: Runtime, prompt: Any) -> list[int]:
        """Return token ids of one of the prompts. Raises `OptionError`."""
        return runtime.encode(prompt)

    def parser(self, tokenizer: Any, prompt: Sequence[int], *, is_bound: bool) -> AnswerParser:
        """Return what takes an answer to this prompt apart; here it is a text as it is."""
        return AnswerParser(tokenizer, is_bound=True)


class ChatBody(AnswerBody):
    """`/v1/chat/completions`."""

    harmless: ClassVar[Harmless] = {
        **{name: values for name, values in HARMLESS.items() if name != "add_generation_prompt"},
        "add_special_tokens": (False,),
    }  # fmt: skip
    is_chat: ClassVar[bool] = True
    messages: list[dict[str, Any]] = Field(min_length=1)
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    def prompts(self, runtime: Runtime) -> list[Any]:
        """Return the one prompt: messages, which say of tools what the template does not. Raises `OptionError`."""
        runtime.chat_template.require_fields(self.messages)
        several = self.parallel_tool_calls is not False
        words = tools_in_words(runtime.tokenizer, self.tools or [], several=several) if self.tool_names else None
        return [self.messages if words is None else runtime.chat_template.with_instructions(self.messages, words)]

    def wanted_tokens(self, most: int) -> int:
        return self.max_completion_tokens or super().wanted_tokens(most)

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _begins_or_goes_on(self) -> ChatBody:
        if self.add_generation_prompt is not None and self.add_generation_prompt == self.continue_final_message:
            what = "add_generation_prompt is false where continue_final_message is true, and only there"
            raise RequestError(what, "add_generation_prompt")
        return self

    def encoded(self, runtime: Runtime, prompt: Any) -> list[int]:
        options = self.template_options(runtime) or None
        goes_on = self.continue_final_message
        return runtime.encode(prompt, template_options=options, continue_final_message=goes_on)

    def template_options(self, runtime: Runtime) -> dict[str, Any]:
        """Return what the chat template is given beside the messages."""
        options, effort = dict(self.chat_template_kwargs or {}), self.reasoning_effort
        if "tools" in options:
            raise RequestError("tools is a field of its own: not of chat_template_kwargs", "chat_template_kwargs")
        if effort is not None and options.setdefault("reasoning_effort", effort) != effort:
            raise RequestError("chat_template_kwargs says another reasoning_effort than the body", "reasoning_effort")
        if effort is not None and runtime.chat_template.unread(["reasoning_effort"]):
            hint = "chat_template_kwargs may have what it reads, such as enable_thinking"
            what = "is not read by this model's chat template: leave it out"
            raise RequestError(f"reasoning_effort {what} ({hint})", "reasoning_effort")
        return {**options, "tools": self.tools} if self.tool_names else options

    def parser(self, tokenizer: Any, prompt: Sequence[int], *, is_bound: bool) -> AnswerParser:
        most_calls = 1 if self.parallel_tool_calls is False else None
        begun: Literal["thought", "text"] | None = None
        if self.continue_final_message:
            begun = "text" if self.messages[-1].get("content") else "thought"
        return AnswerParser(tokenizer, prompt, self.tool_names, most_calls=most_calls, is_bound=is_bound, begun=begun)

    @property
    def tool_names(self) -> frozenset[str]:
        """Return the functions that the answer may call."""
        names = []
        for number, tool in enumerate(self.tools or []):
            function = tool.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            if tool.get("type") != "function" or not isinstance(name, str) or not name:
                raise RequestError(f"tools.{number} is not a function with a name", "tools")
            names.append(name)
        return frozenset() if self.tool_choice == "none" else frozenset(names)

    def grammar_params(self, tokenizer: Any) -> dict[str, Any]:
        """Return the same with calls: an answer of a schema may be calls instead, where it need not be some."""
        names, choice, answer = self.tool_names, self.tool_choice, super().grammar_params(tokenizer)
        if self.continue_final_message and (answer or choice not in (None, "auto", "none")):
            what = "an answer that goes on cannot be bound: leave response_format and tool_choice out"
            raise RequestError(what, "continue_final_message")
        if choice in (None, "auto", "none") and not (answer and names and writes_calls(tokenizer)):
            return answer
        functions = [tool["function"] for tool in self.tools or []]
        if not functions:
            raise RequestError("tool_choice needs tools: give some, or leave it out", "tool_choice")
        if isinstance(choice, dict):
            functions = [one for one in functions if choice == {"type": "function", "function": {"name": one["name"]}}]
        elif choice not in (None, "auto", "required"):
            functions = []
        if not functions:
            raise RequestError("tool_choice is auto, none, required, or the name of one of the tools", "tool_choice")
        several = self.parallel_tool_calls is not False and not isinstance(choice, dict)
        try:
            calls = calls_grammar(tokenizer, functions, several=several)
        except OptionError as error:
            raise RequestError(str(error), "tool_choice") from error
        if answer and choice in (None, "auto"):
            return {"grammar": f"start: calls | answer\nanswer: {json_rule(answer['json_schema'])}\n{calls}"}
        return {"grammar": f"start: calls\n{calls}"}


def with_plain_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose content is a text where it has one part: templates ask for that."""
    return [
        {**one, "content": one["content"][0]["text"]}
        if isinstance(one["content"], list) and len(one["content"]) == 1 else dict(one)
        for one in messages
    ]  # fmt: skip


class BoundedChatBody(ChatBody):
    """A chat of a protocol in which `max_tokens` is a bound: where the context holds fewer, the answer ends there."""

    def wanted_tokens(self, most: int) -> int:
        return min(super().wanted_tokens(most), most)


class CompletionBody(AnswerBody):
    """`/v1/completions`."""

    # max_tokens -1, which is no limit, is not what a completion has where it says nothing.
    harmless: ClassVar[Harmless] = {**HARMLESS, "add_special_tokens": (True,), "max_tokens": (None,)}
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    max_tokens: int | None = Field(None, ge=-1)
    echo: bool = False

    @model_validator(mode="after")
    def _says_something(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens 0 is for an echo of the prompt alone", "max_tokens")
        return self

    def prompts(self, runtime: Runtime) -> list[Any]:
        """Return texts or token ids, one of each prompt. Raises `RequestError`."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("the prompt is empty", "prompt")
        return [self.prompt] if isinstance(self.prompt[0], int) else list(self.prompt)

    def wanted_tokens(self, most: int) -> int:
        if self.max_tokens == 0:
            return 1  # which is left out
        if self.max_tokens == -1:
            return most
        return self.max_tokens or min(most, max(self.min_tokens or 0, _COMPLETION_TOKENS))

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    def echo_of(self, tokenizer: Any, prompt: Any) -> str | None:
        if not self.echo or isinstance(prompt, str):
            return prompt if self.echo else None
        return str(tokenizer.decode(prompt, skip_special_tokens=True))


class TokenizeBody(Body):
    """`/tokenize`: a text, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def prompt_once(self, runtime: Runtime) -> Any:
        """Return the text or the messages. Raises `RequestError` unless there is one of both."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        if self.messages is None:
            return self.prompt
        runtime.chat_template.require_fields(self.messages)
        return self.messages


class DetokenizeBody(Body):
    """`/detokenize`: token ids."""

    model: str | None = None
    tokens: list[int]


def _token_ids(bias: Mapping[str, float]) -> dict[int, float]:
    """Return a logit bias by token; JSON has texts as keys."""
    if not all(name.isdecimal() and name.isascii() and len(name) < 10 for name in bias):
        raise RequestError("logit_bias has a key that is no token id", "logit_bias")
    by_token = {int(name): value for name, value in bias.items()}
    if len(by_token) < len(bias):
        raise RequestError("logit_bias names a token twice: give each its one bias", "logit_bias")
    return by_token
