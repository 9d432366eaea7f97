"""Other protocols say the same answer in other words: the official clients get what OpenAI's chat completions give,
calls, thinking and errors included."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError

from offload_runtime.errors import UnavailableError
from tests.helpers.engine import with_template
from tests.helpers.server import MODEL, Spoken, speaking

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments.city }}</tool_call>{% endfor %}"
    "{% endfor %}{% if enable_thinking %}<think>{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
ANSWER = f"let me think</think>\n\nIt is hot.\n{CALL}"
PIECES = [ANSWER[at : at + 5] for at in range(0, len(ANSWER), 5)]
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
HOT = {"role": "user", "content": "hot?"}


@pytest.fixture(scope="module")
def server(two_layer_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spoken]:
    directory = with_template(two_layer_target, tmp_path_factory.mktemp("spoken") / "model", TEMPLATE)
    with speaking(directory) as spoken:
        yield spoken


@pytest.fixture
def spoken(server: Spoken) -> Spoken:
    """With the model's own answers until a test has others."""
    server.scripted.pieces, server.scripted.error, server.scripted.stop_string = None, None, ""
    return server


# --- Anthropic's messages

WEATHER_TOOL = {"name": "weather", "description": "the weather", "input_schema": CITY}


@pytest.fixture(scope="module")
def claude(server: Spoken) -> Any:
    anthropic = pytest.importorskip("anthropic", reason="the extra `test` is not installed")
    client = anthropic.DefaultHttpxClient(trust_env=False)
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, http_client=client)


def test_a_message_is_the_answer_of_a_chat(spoken: Spoken, claude: Any) -> None:
    expected = spoken.chat(max_tokens=12)
    asked: dict[str, Any] = {"model": MODEL, "messages": [HOT], "max_tokens": 12, "extra_body": {"temperature": 0}}
    message = claude.messages.create(**asked)
    assert message.content[0].text == expected["choices"][0]["message"]["content"]
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 12
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == expected["usage"]["prompt_tokens"]
    count = claude.messages.count_tokens(model=MODEL, messages=[HOT])
    assert count.input_tokens == expected["usage"]["prompt_tokens"]
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == message.content[0].text
        assert stream.get_final_message().stop_reason == "max_tokens"
    assert [model.id for model in claude.models.list()] == [MODEL]
    stop = message.content[0].text[4:6]
    stopped = claude.messages.create(**asked, stop_sequences=[stop, "never said"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    long = {"role": "user", "content": "x" * 450}  # of a context of 512
    bounded = claude.messages.create(**{**asked, "messages": [long], "max_tokens": 9_000})
    assert bounded.stop_reason == "model_context_window_exceeded"


def test_a_message_has_thinking_and_calls(spoken: Spoken, claude: Any) -> None:
    spoken.scripted.pieces = PIECES
    past = [
        {"role": "user", "content": [{"type": "text", "text": "cold?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "so far", "signature": ""}, {"type": "text", "text": "I ask."},
            {"type": "tool_use", "id": "call00001", "name": "weather", "input": {"city": "Ulm"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "call00001", "content": [{"type": "text", "text": "30"}]},
            {"type": "text", "text": "hot?"}]},
    ]  # fmt: skip
    asked: dict[str, Any] = {
        "model": MODEL, "max_tokens": 300, "messages": past, "tools": [WEATHER_TOOL], "metadata": {"user_id": "1"},
        "system": [{"type": "text", "text": "be brief"}], "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }  # fmt: skip
    whole = claude.messages.create(**asked)
    for said in ("system\nbe brief", "(so far)I ask.<tool_call>Ulm</tool_call>", "tool\n30", "user\nhot?<think>"):
        assert said in spoken.prompt
    assert '"the weather"' in spoken.prompt
    with claude.messages.stream(**asked) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert events[0] == "message_start" and events[-1] == "message_stop"
    for message in (whole, streamed):
        thinking, text, call = message.content
        assert (thinking.type, thinking.thinking) == ("thinking", "let me think")
        assert (text.text, call.name, call.input) == ("It is hot.", "weather", {"city": "Rom"})
        assert message.stop_reason == "tool_use" and message.usage.cache_read_input_tokens == 2
    assert whole.usage == streamed.usage or streamed.usage.output_tokens == whole.usage.output_tokens


def test_errors_have_the_shape_of_anthropic(spoken: Spoken, claude: Any) -> None:
    import anthropic

    asked: dict[str, Any] = {"model": MODEL, "messages": [HOT], "max_tokens": 4}
    with pytest.raises(anthropic.NotFoundError, match="'other' is not served here"):
        claude.messages.create(**{**asked, "model": "other"})
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}}
    for fields, message in (
        ({"messages": [{"role": "user", "content": [image]}]}, "messages.0.content.0 has the type 'image'"),
        ({"messages": [HOT, {"role": "assistant", "content": "It"}]}, "the last message is the assistant's"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0 has the type"),
        ({"extra_body": {"frobnicate": 1}}, "frobnicate is not a field"),
        ({"tools": [WEATHER_TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=message) as refused:
            claude.messages.create(**{**asked, **fields})
        assert refused.value.body["error"]["type"] == "invalid_request_error"
    spoken.scripted.pieces, spoken.scripted.error = ["It"], UnavailableError("the card has gone")
    with pytest.raises(anthropic.APIStatusError, match="the card has gone"), claude.messages.stream(**asked) as stream:
        stream.get_final_message()


# --- OpenAI's responses

FUNCTION: Any = {"type": "function", "name": "weather", "description": "the weather", "parameters": CITY}


def test_a_response_is_the_answer_of_a_chat(spoken: Spoken) -> None:
    expected = spoken.chat(max_tokens=12, logprobs=True, top_logprobs=2)
    text, usage = expected["choices"][0]["message"]["content"], expected["usage"]
    asked: dict[str, Any] = {"model": MODEL, "input": "hot?", "max_output_tokens": 12, "temperature": 0}
    whole = spoken.openai.responses.create(**asked, store=False, top_logprobs=2)
    assert whole.output_text == text and whole.status == "incomplete" and whole.usage is not None
    assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (usage["prompt_tokens"], 12)
    said = whole.to_dict()["output"][0]["content"][0]["logprobs"]  # type: ignore[index]
    assert [one["logprob"] for one in said] == pytest.approx(
        [one["logprob"] for one in expected["choices"][0]["logprobs"]["content"]], abs=1e-4
    )
    of_codex = {"client_metadata": {"session_id": "x"}}
    events = list(spoken.openai.responses.create(**asked, stream=True, extra_body=of_codex))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert events[-1].type == "response.incomplete"


def test_a_response_has_reasoning_and_calls(spoken: Spoken) -> None:
    spoken.scripted.pieces = PIECES
    asked: dict[str, Any] = {
        "model": MODEL, "tools": [FUNCTION], "instructions": "be brief", "input": [HOT],
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}, "include": ["reasoning.encrypted_content"],
    }  # fmt: skip
    whole = spoken.openai.responses.create(**asked)
    with spoken.openai.responses.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert [event.sequence_number for event in events if event.type != "error"][:3] == [0, 1, 2]
    assert events[-1].type == "response.completed"
    for response in (whole, streamed):
        reasoning, message, call = response.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "let me think")
        assert (message.content[0].text, call.name, call.arguments) == ("It is hot.", "weather", '{"city": "Rom"}')
        assert response.status == "completed" and response.usage.input_tokens_details.cached_tokens == 2
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < len(PIECES)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "30"}
    again = [
        {"role": "developer", "content": "and kind"},
        HOT,
        *(item.to_dict() for item in whole.output),
        output,
        {"role": "user", "content": "and?"},
    ]
    spoken.openai.responses.create(**{**asked, "input": again})
    for said in (
        "system\nbe brief\nand kind",
        "(let me think)It is hot.<tool_call>Rom</tool_call>",
        "tool\n30",
        "user\nand?",
    ):
        assert said in spoken.prompt


def test_what_a_response_cannot_be_is_refused(spoken: Spoken) -> None:
    for fields, param, message in (
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send all of the conversation"),
        ({"conversation": "conv_1"}, "conversation", "keeps no responses"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools.0 has the type 'web_search'"),
        ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "input", "input.0 has the type 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "only texts can be read"),
        ({"truncation": "auto"}, "truncation", "truncation"), ({"include": ["x"]}, "include", "include has 'x'"),
    ):  # fmt: skip
        with pytest.raises(APIStatusError, match=message) as refused:
            spoken.openai.responses.create(**{"model": MODEL, "input": "a", **fields})
        assert refused.value.status_code == 400 and refused.value.body["param"] == param
    spoken.scripted.pieces, spoken.scripted.error = ["It"], UnavailableError("the card has gone")
    failed = list(spoken.openai.responses.create(model=MODEL, input="hot?", stream=True))[-1]
    assert failed.type == "response.failed" and failed.response.error.message == "the card has gone"


# --- ollama's routes


@pytest.fixture(scope="module")
def ollama(server: Spoken) -> Any:
    module = pytest.importorskip("ollama", reason="the extra `test` is not installed")
    return module.Client(host=server.url, trust_env=False)


def test_ollamas_answers_are_those_of_a_chat(spoken: Spoken, ollama: Any) -> None:
    (model,) = ollama.list().models
    assert model.model == MODEL and model.size > 0 and model.details.quantization_level == "F32"
    shown = ollama.show(model.model)
    assert shown.template == TEMPLATE and shown.capabilities == ["completion", "tools", "thinking"]
    assert spoken.http.get("/api/version").json()["version"]
    expected = spoken.chat(max_tokens=12, stop=["never said"])
    asked: dict[str, Any] = {"model": f"{MODEL}:latest", "options": {"temperature": 0, "num_predict": 12}}
    whole = ollama.chat(**asked, messages=[HOT])
    assert whole.message.content == expected["choices"][0]["message"]["content"]
    assert (whole.done_reason, whole.eval_count) == ("length", 12) and whole.total_duration > 0
    assert whole.prompt_eval_count == expected["usage"]["prompt_tokens"]
    parts = list(ollama.chat(**asked, messages=[HOT], stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert ollama.generate(**asked, prompt="hot?").response == whole.message.content
    raw = spoken.http.post("/v1/completions", json={"prompt": "hot?", "max_tokens": 12, "temperature": 0}).json()
    streamed = ollama.generate(**asked, prompt="hot?", raw=True, stream=True)
    assert "".join(part.response for part in streamed) == raw["choices"][0]["text"]
    bounded = ollama.generate(model=MODEL, prompt="x" * 490, raw=True, options={"num_predict": 9_000})
    assert 0 < bounded.eval_count <= 22  # of a context of 512
    assert ollama.generate(model=MODEL, keep_alive=-1).done_reason == "load"


# As the command of ollama asks, which spells out what is empty, and as litellm does.
@pytest.mark.parametrize(("path", "body"), [
    ("/api/show", {"model": MODEL, "system": "", "template": "", "verbose": False, "options": None, "name": ""}),
    ("/api/show", {"name": MODEL}),
    ("/api/generate", {"model": MODEL, "prompt": "", "suffix": "", "system": "", "template": "", "options": None}),
    ("/api/chat", {"model": MODEL, "messages": [{**HOT, "thinking": ""}], "options": {}, "format": ""}),
])  # fmt: skip
def test_what_other_clients_of_ollama_send_is_taken(spoken: Spoken, path: str, body: dict[str, Any]) -> None:
    assert spoken.http.head("/").status_code == 200
    assert spoken.http.post(path, json=body).status_code == 200


def test_ollamas_chat_has_thinking_and_calls(spoken: Spoken, ollama: Any) -> None:
    spoken.scripted.pieces = PIECES
    tool = {"type": "function", "function": {"name": "weather", "description": "the weather", "parameters": CITY}}
    call = {"function": {"name": "weather", "arguments": {"city": "Ulm"}}}
    past = [
        {"role": "user", "content": "cold?"}, {"role": "assistant", "content": "", "thinking": "so far",
                                               "tool_calls": [call]},
        {"role": "tool", "content": "30", "tool_name": "weather"}, HOT,
    ]  # fmt: skip
    asked: dict[str, Any] = {"model": MODEL, "messages": past, "tools": [tool], "think": True}
    whole = ollama.chat(**asked).message
    for said in ("(so far)<tool_call>Ulm</tool_call>", "tool\n30", "user\nhot?<think>", '"the weather"'):
        assert said in spoken.prompt
    assert (whole.thinking, whole.content) == ("let me think", "It is hot.")
    messages = [part.message for part in ollama.chat(**asked, stream=True)]
    assert "".join(message.thinking or "" for message in messages) == "let me think"
    calls = [call.function for message in [whole, *messages] for call in message.tool_calls or ()]
    assert [(call.name, call.arguments) for call in calls] == [("weather", {"city": "Rom"})] * 2


def test_ollamas_errors_are_a_text(spoken: Spoken, ollama: Any) -> None:
    for fields, status, message in (
        ({"model": "other"}, 404, "'other' is not served here"),
        ({"messages": [{**HOT, "images": [b"x"]}]}, 400, "images"),
        ({"options": {"mirostat": 1}}, 400, "mirostat"), ({"format": {"$ref": "x"}}, 400, "x"),
    ):  # fmt: skip
        with pytest.raises(Exception, match=message) as refused:
            ollama.chat(**{"model": MODEL, "messages": [HOT], **fields})
        assert refused.value.status_code == status  # type: ignore[attr-defined]
    spoken.scripted.pieces, spoken.scripted.error = ["It"], UnavailableError("the card has gone")
    with pytest.raises(Exception, match="the card has gone"):
        list(ollama.chat(model=MODEL, messages=[HOT], stream=True))


# --- what the server says of itself


def test_routes_are_documented(spoken: Spoken) -> None:
    document = spoken.http.get("/openapi.json").json()
    assert spoken.http.get("/version").json() == {"version": document["info"]["version"]}
    page = spoken.http.get("/docs").text
    assert "max_output_tokens" in page and "http:" not in page and "<script" not in page
    references = {text.partition('"')[0] for text in json.dumps(document).split('"$ref": "#/components/schemas/')[1:]}
    assert references <= set(document["components"]["schemas"])
    assert {"/v1/messages", "/api/chat"} <= set(document["paths"])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
def test_embeddings_are_made_elsewhere(spoken: Spoken, path: str) -> None:
    response = spoken.http.post(path, json={"model": MODEL, "input": "a"})
    assert response.status_code == 400 and "llama-server --embeddings" in json.dumps(response.json()["error"])
