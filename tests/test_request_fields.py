"""Fields of requests and options of `serve`, `chat` and `generate` that other servers have, too; and the edges of what
fields may say: null, greedy by other words, a name twice, integers beyond doubles."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from offload_runtime import Runtime, SamplingParams
from offload_runtime.cli.app import app
from offload_runtime.config import ServerConfig
from offload_runtime.errors import ContextLengthError, OptionError
from offload_runtime.server.app import Server
from tests.helpers.engine import PROMPT, load, with_template
from tests.helpers.server import Served, events_of, serving
from tests.test_cli_chat import chat
from tests.test_cli_fakes import FakeRuntime
from tests.test_cli_generate import error_lines

TARGET = "two_layer_target"
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


@pytest.fixture(scope="module")
def directory(two_layer_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = (
        "{% if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{% if thinking is true %}<think>{% endif %}"
    )
    return with_template(two_layer_target, tmp_path_factory.mktemp("fields") / "model", template)


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[Served]:
    with serving(directory, load_options={"draft": "none", "context": 256}) as served:
        yield served


@pytest.mark.parametrize("fields", [
    {"modalities": ["text"], "best_of": 1, "store": False, "logprobs": None, "suffix": None, "echo": False},
    {"max_tokens": -1, "max_completion_tokens": 4, "service_tier": "auto", "prediction": None, "audio": None},
    {"tools": [], "functions": None, "function_call": "none", "n": None, "stream_options": None, "stop": None},
    {"typical_p": 1.0, "mirostat": 0, "repeat_last_n": -1, "cache_prompt": True, "skip_special_tokens": True},
    {"n": 1, "best_of": 1, "top_logprobs": 0, "verbosity": "medium", "parallel_tool_calls": None},
    {"temperature": None, "reasoning_effort": None, "presence_penalty": 0, "frequency_penalty": 0.0, "top_k": -1},
    {"logit_bias": {}, "logprobs": False, "metadata": {}, "response_format": {"type": "text"}, "store": False},
])  # fmt: skip
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


def test_an_answer_goes_on_as_it_would_have(served: Served) -> None:
    letters = {str(token): 100 for token in served.runtime.tokenizer.convert_tokens_to_ids([*"WXYZ"])}
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 1, "logit_bias": letters}

    def said(**fields: Any) -> str:
        return str(served.chat(**asked, **fields).json()["choices"][0]["message"]["content"])

    whole, begun = said(max_tokens=9), said(max_tokens=4)
    messages = [*MESSAGES, {"role": "assistant", "content": begun}]
    for fields in ({}, {"add_generation_prompt": False}):
        rest = said(messages=messages, continue_final_message=True, max_tokens=5, **fields)
        assert begun + rest == whole and len(set(whole)) > 1


def test_thinking_goes_on_as_thinking(served: Served) -> None:
    thought = {"role": "assistant", "content": "", "reasoning_content": "quick"}
    asked: dict[str, Any] = {"messages": [*MESSAGES, thought], "chat_template_kwargs": {"thinking": True}}
    message = served.chat(continue_final_message=True, **asked).json()["choices"][0]["message"]
    assert message["reasoning_content"] and not message["content"]


@pytest.mark.parametrize(("fields", "param"), [
    ({"add_generation_prompt": True}, "add_generation_prompt"), ({"messages": MESSAGES}, "messages.0"),
    ({"response_format": {"type": "json_object"}}, "continue_final_message"),
    ({"continue_final_message": False, "add_generation_prompt": False}, "add_generation_prompt"),
])  # fmt: skip
def test_what_cannot_go_on_is_named(served: Served, fields: dict[str, Any], param: str) -> None:
    begun = {"messages": [*MESSAGES, {"role": "assistant", "content": "jumps"}], "continue_final_message": True}
    refused = served.chat(**{**begun, **fields})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param


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


LONG_CHAIN = {"$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)} | {"3000": {}}, "$ref": "#/$defs/0"}


def complete(served: Served, **fields: Any) -> Any:
    """The answer of a completion, with the status that it has to have."""
    status = fields.pop("status", 200)
    found = served.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 6, "seed": 1, **fields})
    assert found.status_code == status, found.text
    return found.json()["choices"][0]["text"] if status == 200 else found.json()["error"]["message"]


def test_null_is_as_if_a_field_were_not_there(served: Served) -> None:
    usual = complete(served, temperature=0)
    names = ["n", "stop", "seed", "stream", "stream_options", "ignore_eos", "x_sources", "top_p", "logit_bias",
             "response_format", "echo", "suffix", "best_of", "logprobs", "user"]  # fmt: skip
    assert complete(served, temperature=0, **dict.fromkeys(names)) == usual
    streamed = served.http.post("/v1/completions", json={
        "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stream": True, "stream_options": {"include_usage": None},
    })  # fmt: skip
    assert streamed.status_code == 200 and "usage" not in streamed.text
    assert "no_such_field" in complete(served, no_such_field=None, status=400)
    assert "prompt" in complete(served, prompt=None, status=400)


@pytest.mark.parametrize("fields", [{"top_p": 0}, {"temperature": 1e-5}, {"temperature": 9e-4, "top_k": 5}])
def test_other_words_for_greedy(served: Served, fields: dict[str, Any]) -> None:
    assert complete(served, **fields) == complete(served, temperature=0)
    assert SamplingParams(**fields).greedy


def test_what_is_there_twice_is_refused(served: Served) -> None:
    assert "names a token twice" in complete(served, logit_bias={"05": 1, "5": -100}, status=400)
    for text in ('{"prompt": "a", "seed": 1, "seed": 2}', '{"prompt": "a", "logit_bias": {"5": 1, "5": 2}}'):
        found = served.http.post("/v1/completions", content=text, headers={"Content-Type": "application/json"})
        assert found.status_code == 400 and "twice" in found.json()["error"]["message"]


def test_a_schema_that_kills_a_compiler_is_refused_and_others_are_answered(served: Served) -> None:
    """Twice, as the process that has died is started again."""
    for _ in range(2):
        form = {"type": "json_schema", "json_schema": {"schema": LONG_CHAIN}}
        assert "more than 5 s" in complete(served, response_format=form, status=400)
        form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["red", "blue"]}}}
        assert complete(served, response_format=form, max_tokens=20) in ('"red"', '"blue"')


@pytest.mark.parametrize("number", [2**53 + 1, -(2**63), 10**30])
@pytest.mark.parametrize("schema", ['{"const": %d}', '{"items": {"enum": [1, {"a": [%d]}]}}'])
def test_integers_that_an_answer_could_not_have_exactly_are_refused(number: int, schema: str) -> None:
    with pytest.raises(OptionError, match="kept exactly"):
        SamplingParams(json_schema=schema % number)
    named = {"properties": {"const": {"minLength": number}}, "enum": [2**53], "default": number}
    assert SamplingParams(json_schema=named).json_schema == json.dumps(named)


@pytest.mark.parametrize(("key", "bound", "is_taken"), [
    ("minimum", 2**53 + 1, False), ("maximum", 2**53 + 1, False), ("minimum", -(2**53) - 1, False),
    ("exclusiveMinimum", 2**53, False), ("exclusiveMaximum", 1e17, False), ("minimum", 10**400, False),
    ("minimum", 2**53, True), ("exclusiveMinimum", 2**53 - 1, True), ("maximum", 1_700_000_000_000_000_000, True),
    ("maximum", 2**63 - 1, True), ("exclusiveMaximum", 2**64, True), ("minimum", -(2**63) + 1024, True),
    ("minimum", -(2**63), False), ("multipleOf", 2**40, False),
])  # fmt: skip
def test_a_bound_is_kept_exactly_or_refused(plain: Runtime, key: str, bound: float, is_taken: bool) -> None:
    """One that is rounded would let an answer through that the schema does not allow."""
    asked = {"type": "integer", key: bound}
    if is_taken:
        assert plain.generate("a", max_new_tokens=2, json_schema=asked).tokens
        return
    with pytest.raises(OptionError, match=r"or leave (it|them) out"):
        plain.generate("a", max_new_tokens=2, json_schema=asked)


def test_a_parameter_of_a_tool_is_read_as_strictly(served: Served) -> None:
    function = {"name": "f", "parameters": {"properties": {"a": {"const": -(2**63)}}}}
    found = served.chat(tools=[{"type": "function", "function": function}], tool_choice="required")
    assert found.status_code == 400


@pytest.mark.parametrize("answers", [[], [[5]], [[]], [[5], [], [6, 7], [5]]])
def test_logits_of_answers_of_any_length(plain: Runtime, answers: Sequence[Sequence[int]]) -> None:
    rows = list(plain.logits(plain.encode(PROMPT), answers))
    assert [len(one) for one in rows] == [len(answer) for answer in answers]
    assert all(one[:1].equal(rows[0][:1]) for one in rows if len(one))


def test_logits_of_what_is_no_answer(plain: Runtime) -> None:
    for asked, said, kind in (
        ([], [5], OptionError),
        ([5], [2**30], OptionError),
        ([5], [5] * 20_000, ContextLengthError),
    ):
        with pytest.raises(kind):
            list(plain.logits(asked, [said]))


def test_a_chat_that_could_not_be_saved_does_not_end_well(tmp_path: Path) -> None:
    good, bad = tmp_path / "a.chat", tmp_path / "none" / "a.chat"
    result = chat(FakeRuntime(), turns=f"one\n/save {bad}\ntwo\n")
    assert result.exit_code == 2 and f"the conversation was not saved to {bad}" in error_lines(result)[-1]
    assert chat(FakeRuntime(), turns=f"one\n/save {bad}\n/save {good}\n").exit_code == 0
