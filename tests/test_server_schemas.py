"""OpenAI's client asks for answers of a schema, and for calls that have to be made."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import AddedToken

from offload_runtime.engine import Runtime
from tests.helpers.engine import PROMPT, TEMPLATE, byte_level_tokenizer, load, one_thread  # noqa: F401
from tests.helpers.schemas import SCHEMAS, assert_valid, random_schema
from tests.helpers.server import MODEL, Served, events_of, serving

MESSAGES: Any = [{"role": "user", "content": PROMPT}]
ASKED: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 300, "temperature": 4.0}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rom", "Malmö"]}, "days": {"$ref": "#/$defs/days"}},
        "required": ["city"], "additionalProperties": False, "$defs": {"days": {"enum": [1, 2, 3]}}}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "time"}},
]
PARAMETERS: dict[str, dict[str, Any]] = {"weather": CITY, "time": {"maxProperties": 0}}


@pytest.fixture(scope="module")
def served(short_target: Path) -> Iterator[Served]:
    with serving(short_target) as served:
        yield served


@pytest.fixture(scope="module")
def alone(short_target: Path) -> Iterator[Runtime]:
    with load(short_target, draft="none") as runtime:
        yield runtime


def compact(runtime: Runtime) -> dict[str, float]:
    """A bias against white space, with which random weights fill answers."""
    tokens = runtime.tokenizer.convert_tokens_to_ids(["Ġ", "Ċ", "ĉ"])
    return {str(token): -100.0 for token in tokens}


def format_of(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def ask_all(served: Served, schemas: Sequence[dict[str, Any]]) -> list[str]:
    """An answer for each schema, four requests at a time; all are valid."""
    bias = compact(served.runtime)

    def ask(one: tuple[int, dict[str, Any]]) -> str:
        seed, schema = one
        answer = served.openai.chat.completions.create(
            **ASKED, seed=seed, response_format=format_of(schema), logit_bias=bias
        )  # fmt: skip
        (choice,) = answer.choices
        assert choice.finish_reason == "stop"
        assert_valid(choice.message.content, schema)
        return choice.message.content

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(ask, enumerate(schemas)))


def test_answers_of_twelve_schemas_are_valid_and_those_of_plain_decoding(served: Served, alone: Runtime) -> None:
    """All of them valid, some compared."""
    bias = {int(token): value for token, value in compact(alone).items()}
    for seed, (schema, text) in list(enumerate(zip(SCHEMAS, ask_all(served, SCHEMAS), strict=True)))[::4]:
        asked: dict[str, Any] = {"temperature": 4.0, "seed": seed, "logit_bias": bias, "max_new_tokens": 300}
        assert alone.generate(MESSAGES, json_schema=schema, **asked).text == text


@pytest.mark.slow
def test_answers_of_a_hundred_schemas_are_valid(served: Served) -> None:
    chance = random.Random(29)
    ask_all(served, [random_schema(chance) for _ in range(100)])


def test_a_stream_says_the_same_and_a_cut_answer_says_so(served: Served) -> None:
    asked = {**ASKED, "seed": 1, "response_format": format_of(SCHEMAS[0])}
    whole = served.openai.chat.completions.create(**asked).choices[0]
    chunks = list(served.openai.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "stop"
    cut = served.openai.chat.completions.create(**{**asked, "max_tokens": 5}).choices[0]
    assert cut.finish_reason == "length" and whole.message.content.startswith(cut.message.content)


def test_any_object_and_plain_completions(served: Served) -> None:
    close = served.runtime.tokenizer.convert_tokens_to_ids("}")
    answer = served.openai.chat.completions.create(
        **ASKED, response_format={"type": "json_object"}, logit_bias={str(close): 100}
    )
    assert answer.choices[0].message.content == "{}"
    text = served.openai.completions.create(
        model=MODEL, prompt=PROMPT, extra_body={"response_format": format_of({"const": "x"})}
    )
    assert text.choices[0].text == '"x"' and text.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": format_of({"$ref": "http://127.0.0.1/x.json"})}, "http://127.0.0.1/x.json"),
        ({"response_format": format_of({"type": "array", "uniqueItems": True})}, "uniqueItems"),
        ({"response_format": format_of({"enum": ["x" * 200_000]})}, "at most 131072"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos does nothing"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "json_schema"),
        ({"response_format": {"type": "regex"}}, "response_format.type"),
    ],
)
def test_what_cannot_be_followed_is_refused(served: Served, fields: dict[str, Any], message: str) -> None:
    response = served.chat(**fields)
    assert response.status_code == 400 and message in response.json()["error"]["message"]
    assert served.scheduler.counters.running == 0


OTHERS = ["[TOOL_CALLS] [CALL_ID] [ARGS]", "[ARGS] [TOOL_CALLS]", "[TOOL_CALLS]", '"parameters": dictionary']
FORMATS = ["<tool_call>", *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)]


@pytest.fixture(scope="module", params=FORMATS)
def calling(
    request: pytest.FixtureRequest, two_layer_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A model whose template writes calls in one of the formats, with marks that are tokens."""
    directory = tmp_path_factory.mktemp("calling")
    for path in two_layer_target.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    tokenizer = byte_level_tokenizer(316)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]})
    tokenizer.chat_template = f"{{# {request.param} #}}{TEMPLATE}"
    tokenizer.save_pretrained(directory)
    with serving(directory) as served:
        yield served


def called(message: Any) -> list[str]:
    """The functions that a message calls, with arguments of their schemas."""
    names = [call.function.name for call in message.tool_calls or []]
    for call in message.tool_calls or []:
        assert_valid(call.function.arguments, PARAMETERS[call.function.name])
    return names


def test_calls_that_have_to_be_made(calling: Served) -> None:
    asked = {**ASKED, "tools": TOOLS, "seed": 1, "logit_bias": compact(calling.runtime)}
    for name in PARAMETERS:
        named = {"type": "function", "function": {"name": name}}
        (choice,) = calling.openai.chat.completions.create(**asked, tool_choice=named).choices
        assert called(choice.message) == [name] and choice.finish_reason == "tool_calls"
    asked |= {"tool_choice": "required"}
    (choice,) = calling.openai.chat.completions.create(**asked, parallel_tool_calls=False).choices
    assert len(called(choice.message)) == 1 and not choice.message.content and choice.finish_reason == "tool_calls"
    asked |= {"max_tokens": 120}
    several = called(calling.openai.chat.completions.create(**asked).choices[0].message)
    with calling.http.stream("POST", "/v1/chat/completions", json={**asked, "stream": True}) as response:
        events = list(events_of(response))
    streamed = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])]
    assert [call["function"]["name"] for call in streamed] == several and several


def test_an_answer_of_a_schema_may_be_a_call_instead(calling: Served) -> None:
    schema, kinds = {"enum": [1, 2, "three"]}, set[bool]()
    asked = {**ASKED, "tools": TOOLS, "parallel_tool_calls": False, "logit_bias": compact(calling.runtime)}
    for seed in range(6):
        (choice,) = calling.openai.chat.completions.create(
            **asked, seed=seed, response_format=format_of(schema)
        ).choices
        kinds.add(bool(called(choice.message)))
        if not choice.message.tool_calls:
            assert_valid(choice.message.content, schema)
    assert kinds == {False, True}


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "function", "function": {"name": "missing"}}},
        {"tool_choice": {"type": "function"}},
        {"tool_choice": "always"},
        {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": 'a"b'}}]},
        {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]},
    ],
)
def test_calls_that_cannot_be_forced_are_refused(calling: Served, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        calling.openai.chat.completions.create(**{**ASKED, "tools": TOOLS, **fields})
    assert refused.value.param == "tool_choice"
