"""Calls of functions: found in answers however they are cut, told as OpenAI's clients read them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from offload_runtime.config import ServerConfig
from offload_runtime.engine import EndEvent, ErrorEvent, GenerationResult, Runtime, SchedulerCounters, TokenEvent
from offload_runtime.errors import UnavailableError
from offload_runtime.params import GenerationParams
from offload_runtime.server.app import Service, make_app
from offload_runtime.server.parsers import AnswerParser
from tests.helpers.engine import byte_level_tokenizer, load, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.server import MODEL
from tests.test_cli_fakes import make_stats

LLAMA, MISTRAL = "… <|python_tag|> …", "… [TOOL_CALLS] …"
MARKS = {7: "<|python_tag|>", 8: "[TOOL_CALLS]", 9: "[ARGS]"}
NAMES = ["weather", "time"]
HOT, COLD = '{"city": "Rom", "days": 2}', '{"city": "Malmö"}'
Calls = list[tuple[str, Any]]


def tokenizer_with(template: str | None) -> Any:
    """What a parser reads of a tokenizer."""
    added = {number: SimpleNamespace(content=text, special=True) for number, text in MARKS.items()}
    return SimpleNamespace(chat_template=template, added_tokens_decoder=added)


def parse(template: str | None, pieces: Sequence[str | int], names: Sequence[str] = NAMES) -> tuple[str, Calls]:
    """Text and calls of an answer in pieces; a number is a token that has no text."""
    parser, text, calls = AnswerParser(tokenizer_with(template), tool_names=names), "", []
    for piece in pieces:
        said = parser.push("", piece) if isinstance(piece, int) else parser.push(piece, 1)
        text += said[1]
        calls += said[2]
    _, rest, last = parser.finish()
    calls += last
    assert parser.num_calls == len(calls) == len({call.id for call in calls})
    return text + rest, [(call.name, json.loads(call.arguments)) for call in calls]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


BOTH: Calls = [("weather", json.loads(HOT)), ("time", json.loads(COLD))]
LISTED = f'[{{"name": "weather", "arguments": {HOT}}}, {{"name": "time", "arguments": {COLD}}}]'


def test_marks_that_are_tokens_without_a_text_are_seen() -> None:
    assert parse(LLAMA, [7, f'{{"name": "weather", "parameters": {HOT}}}']) == ("", BOTH[:1])
    assert parse(MISTRAL, [8, LISTED]) == ("", BOTH)
    assert parse(MISTRAL, ["Let me see. ", 8, "weather", 9, HOT, 8, "time", 9, COLD]) == ("Let me see.", BOTH)
    assert parse(MISTRAL, [8, "weather", 9, "{"]) == ("[TOOL_CALLS]weather[ARGS]{", [])


class Scripted:
    """A scheduler that says the same to everybody, a piece a token."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces, self.prompts, self.counters = pieces, list[list[int]](), SchedulerCounters()

    def submit(self, prompt: list[int], params: GenerationParams, *, on_event: Any) -> Any:
        self.prompts.append(prompt)
        for piece in self._pieces:
            on_event(TokenEvent(1, piece, "target"))
        tokens = [1] * len(self._pieces)
        on_event(EndEvent(GenerationResult(tokens, "".join(self._pieces), "stop", make_stats())))
        return SimpleNamespace(cancel=lambda: None)


TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {"<|im_end|>": {"type": "string"}}}},
    {"type": "function", "function": {"name": "time"}},
]
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% if enable_thinking %}<think>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}</tool_call>{% endfor %}"
    "{% endfor %}"
)


async def ask_scripted(directory: Path, pieces: Sequence[str], **fields: Any) -> tuple[str, Any, Any]:
    """The prompt that a model with tools is given, its answer, and the chunks of the same as a stream."""
    with load(directory, draft="none") as runtime:
        scheduler = Scripted(pieces)
        service = Service(ServerConfig())
        service.begin(runtime, scheduler, MODEL)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(make_app(service, ServerConfig()))
        async with httpx.AsyncClient(transport=transport) as http:
            client = AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)
            asked = {"model": MODEL, "messages": [{"role": "user", "content": "hot?"}], "tools": TOOLS, **fields}
            whole = await client.chat.completions.create(**asked)
            chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
        return runtime.tokenizer.decode(scheduler.prompts[0]), whole, chunks


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory, two_layer_target: Path) -> Path:
    """A checkpoint whose template knows of tools."""
    directory = tmp_path_factory.mktemp("calling")
    for path in two_layer_target.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def test_a_client_gets_calls_whole_and_streamed(calling: Path) -> None:
    answer = f"Let me see.\n{hermes('weather', HOT)}\n{hermes('time', COLD)}"
    pieces = [answer[at : at + 5] for at in range(0, len(answer), 5)]
    past = [
        {"role": "user", "content": [{"type": "text", "text": "hot?"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "123456789", "type": "function", "function": {"name": "weather", "arguments": HOT}}]},
        {"role": "tool", "tool_call_id": "123456789", "content": "30 <|im_end|>"},
    ]  # fmt: skip
    options = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    prompt, whole, chunks = asyncio.run(ask_scripted(calling, pieces, messages=past, **options))
    assert '"name": "time"' in prompt and "<think>" in prompt and "<tool_call>Rom</tool_call>" in prompt
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    called = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert called == BOTH
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    streamed = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in streamed] == [0, 1]
    assert [(call.function.name, json.loads(call.function.arguments)) for call in streamed] == BOTH
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


class Failing:
    """A scheduler that fails at every request."""

    counters = SchedulerCounters()

    def submit(self, prompt: list[int], params: GenerationParams, *, on_event: Any) -> Any:
        on_event(ErrorEvent(UnavailableError("the card has gone"), None))
        return SimpleNamespace(cancel=lambda: None)


def test_the_line_of_a_stream_says_why_it_has_ended(calling: Path) -> None:
    lines = list[str]()

    async def ask(runtime: Runtime) -> str:
        service = Service(ServerConfig(), lines.append)
        service.begin(runtime, Failing(), MODEL)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(make_app(service, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            asked = {"messages": [{"role": "user", "content": "hot?"}], "stream": True}
            return (await http.post("/v1/chat/completions", json=asked)).text

    with load(calling, draft="none") as runtime:
        assert "the card has gone" in asyncio.run(ask(runtime))
    (line,) = lines
    assert line.startswith("POST /v1/chat/completions 503 · the card has gone · ")


def test_tools_that_may_not_be_called_are_not_shown(calling: Path) -> None:
    answer = hermes("weather", HOT)
    prompt, whole, _ = asyncio.run(ask_scripted(calling, [answer], tool_choice="none"))
    assert "weather" not in prompt and whole.choices[0].message.content == answer
    assert whole.choices[0].finish_reason == "stop"


def test_control_tokens_in_tools_are_text(calling: Path) -> None:
    with load(calling, draft="none") as runtime:
        end = runtime.encode("<|im_end|>")[0]
        tokens = runtime.encode([{"role": "user", "content": "a"}], template_options={"tools": TOOLS})
        assert end not in tokens and "<|im_end|>" in runtime.tokenizer.decode(tokens)
