"""Fields of requests and options of `serve`, `chat` and `generate` that other servers have, too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from offload_runtime.cli.app import app
from offload_runtime.config import ServerConfig
from offload_runtime.engine import Runtime
from offload_runtime.server.app import Server
from tests.helpers.engine import byte_level_tokenizer, load, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.server import Served, events_of, serving

MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


def with_template(target: Path, directory: Path, template: str) -> Path:
    """The same checkpoint with another chat template."""
    for path in target.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def directory(two_layer_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = (
        "{% if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{% if thinking is true %}<think>{% endif %}"
    )
    return with_template(two_layer_target, tmp_path_factory.mktemp("fields"), template)


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[Served]:
    with serving(directory, load_options={"draft": "none"}) as served:
        yield served


@pytest.mark.parametrize(
    "fields",
    [
        {"modalities": ["text"], "best_of": 1, "store": False, "logprobs": None, "suffix": None, "echo": False},
        {"max_tokens": -1, "max_completion_tokens": 4, "service_tier": "auto", "prediction": None, "audio": None},
        {"tools": [], "functions": None, "function_call": "none", "n": None, "stream_options": None, "stop": None},
        {"typical_p": 1.0, "mirostat": 0, "repeat_last_n": -1, "cache_prompt": True, "skip_special_tokens": True},
        {"n": 1, "best_of": 1, "top_logprobs": 0, "verbosity": "medium", "parallel_tool_calls": None},
        {"temperature": None, "reasoning_effort": None},
    ],
)
def test_values_that_change_nothing_are_taken(served: Served, fields: dict[str, Any]) -> None:
    asked = {"messages": MESSAGES, "temperature": 0, "seed": 1, "max_completion_tokens": 4}
    plain = served.http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]
    response = served.http.post("/v1/chat/completions", json={**asked, **fields, "temperature": 0})
    assert response.status_code == 200 and response.json()["choices"][0]["message"] == plain


@pytest.mark.parametrize(
    "fields",
    [{"modalities": ["text", "audio"]}, {"best_of": 2}, {"best_of": True}, {"suffix": "x"}, {"mirostat": 2},
     {"typical_p": 0.9}, {"max_tokens": -2}, {"functions": [{"name": "f"}]}, {"prediction": {"type": "content"}}],
)  # fmt: skip
def test_other_values_of_them_are_refused_by_name(served: Served, fields: dict[str, Any]) -> None:
    response = served.chat(**fields)
    (name,) = fields
    assert response.status_code == 400 and response.json()["error"]["param"] == name


@pytest.mark.slow
def test_a_completion_without_a_limit_is_longer_than_the_usual_one(served: Served) -> None:
    asked = {"prompt": [65], "ignore_eos": True, "n": 2, "best_of": 2, "stop": "no such text"}
    for fields, count in (({}, 32), ({"max_tokens": -1}, 2 * 99), ({"n_predict": -1, "max_tokens": None}, 2 * 99)):
        asked["prompt"] = [65] * (served.runtime.context_tokens - 99)
        answer = served.http.post("/v1/completions", json={**asked, **fields})
        assert answer.json()["usage"]["completion_tokens"] == count


@pytest.mark.parametrize(("fields", "param"), [
    ({"stop": [None]}, "stop"), ({"stop": 1}, "stop"), ({"prompt": ["a", [1]]}, "prompt"), ({"n": "x"}, "n"),
    ({"max_tokens": 0}, "max_tokens"), ({"n": 2, "best_of": 3}, "best_of"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
])  # fmt: skip
def test_what_is_wrong_is_named(served: Served, fields: dict[str, Any], param: str) -> None:
    response = served.http.post("/v1/completions", json={"prompt": "a", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and "Value error" not in error["message"]


def test_other_names_of_what_is_here(served: Served) -> None:
    own = served.chat(repetition_penalty=1.8, max_tokens=9).json()["choices"][0]["message"]
    assert served.http.post("/v1/chat/completions", json={
        "messages": MESSAGES, "temperature": 0, "repeat_penalty": 1.8, "n_predict": 9, "repetition_penalty": None,
    }).json()["choices"][0]["message"] == own != served.chat(max_tokens=9).json()["choices"][0]["message"]  # fmt: skip
    twice = served.chat(repetition_penalty=1.8, repeat_penalty=1.2)
    assert twice.status_code == 400 and "repeat_penalty" in twice.json()["error"]["message"]


def prompt_of(served: Served, **fields: Any) -> int:
    return int(served.chat(**fields).json()["usage"]["prompt_tokens"])


def test_efforts_go_to_templates_that_read_them(served: Served, two_layer_target: Path) -> None:
    plain = prompt_of(served)
    assert prompt_of(served, reasoning_effort="high") > plain
    by_option = prompt_of(served, chat_template_kwargs={"reasoning_effort": "high"})
    assert by_option == prompt_of(served, reasoning_effort="high")
    both = served.chat(chat_template_kwargs={"reasoning_effort": "high"}, reasoning_effort="low")
    assert both.status_code == 400 and both.json()["error"]["param"] == "reasoning_effort"
    with serving(two_layer_target, load_options={"draft": "none"}) as other:
        refused = other.chat(reasoning_effort="high")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "reasoning_effort"


def test_unknown_fields_of_messages_are_refused(served: Served) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        response = served.http.post(path, json={"messages": [{**MESSAGES[0], "frobnicate": 1}]})
        assert response.status_code == 400 and response.json()["error"]["param"] == "messages.0.frobnicate"


def test_thinking_is_told_apart_from_the_answer(served: Served) -> None:
    """The template begins it, and a model of random weights never ends it."""
    asked = {"chat_template_kwargs": {"thinking": True}, "max_tokens": 12, "temperature": 1, "seed": 3}
    plain = served.http.post("/v1/chat/completions", json={"messages": MESSAGES, **asked}).json()
    message = plain["choices"][0]["message"]
    assert message["content"] == "" and message["reasoning_content"]
    with served.http.stream(
        "POST", "/v1/chat/completions", json={"messages": MESSAGES, **asked, "stream": True}
    ) as response:
        deltas = [event["choices"][0]["delta"] for event in events_of(response)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas).rstrip() == message["reasoning_content"]
    assert not any(delta.get("content") for delta in deltas)
    bound = served.chat(chat_template_kwargs={"thinking": True}, response_format={"type": "json_object"})
    assert bound.json()["choices"][0]["message"]["content"] and "reasoning_content" not in bound.text


def test_a_model_may_have_several_names_and_each_request_a_line(directory: Path) -> None:
    lines: list[str] = []
    config = ServerConfig(port=0, grace_s=0)
    with (
        load(directory, draft="none") as runtime,
        Server(config, lines.append) as server,
        server.serving(runtime, "one", "two"),
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http,
    ):
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["one", "two"]
        asked = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0}
        options = {"enable_thinking": True, "thinking": False}  # of which the template reads one
        for name, stream in (("one", False), ("two", False), ("two", True)):
            body = {**asked, "model": name, "stream": stream, "chat_template_kwargs": options}
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200 and '"model":"one"' in answer.text.replace(" ", "")
        assert http.post("/v1/chat/completions", json={**asked, "model": "three"}).status_code == 404
        assert http.get("/v1/models/two").json()["id"] == "two"
    assert [line.split(" · ")[0] for line in lines[:3]] == ["POST /v1/chat/completions 200"] * 3
    assert all("3 tokens · " in line and "tokens/s" in line and line.endswith(" s") for line in lines[:3])
    assert all("the template does not read: enable_thinking ·" in line for line in lines[:3])
    assert "404" in lines[3] and "'three'" in lines[3]


def test_options_of_the_template_on_the_command_line(directory: Path, alone: Runtime) -> None:
    command = ["generate", "--target", str(directory), "--device", "cpu", "--max-new-tokens", "6", "--no-progress"]
    command += ["--json", "--prompt", "the fox", "--draft", "none"]
    options: dict[str, Any] = {"reasoning_effort": "high", "thinking": True}
    words = ["--template-option", "reasoning_effort=high", "--template-option", "thinking=true"]
    answer = json.loads(CliRunner().invoke(app, [*command, "--chat", *words]).stdout)
    tokens = alone.encode([{"role": "user", "content": "the fox"}], template_options=options)
    assert answer["tokens"] == alone.generate(tokens, max_new_tokens=6).tokens
    assert answer["stats"]["prompt_tokens"] == len(tokens) > len(alone.encode([{"role": "user", "content": "the fox"}]))
    chatted = CliRunner().invoke(
        app, ["chat", *command[1:-4], "--draft", "none", "--temperature", "0", *words], input="the fox\n"
    )
    assert json.loads(chatted.stdout)["tokens"] == answer["tokens"]
    for wrong in ("reasoning_effor=1", "thinking", "role=1"):
        refused = CliRunner().invoke(app, [*command, "--chat", "--template-option", wrong])
        assert refused.exit_code == 2 and wrong.partition("=")[0] in refused.stderr
    assert CliRunner().invoke(app, [*command, *words]).exit_code == 2


@pytest.fixture(scope="module")
def alone(directory: Path) -> Iterator[Runtime]:
    with load(directory, draft="none") as runtime:
        yield runtime
