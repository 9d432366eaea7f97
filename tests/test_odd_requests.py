"""Requests at the edges of what fields may say: null, greedy by other words, a name twice, integers beyond doubles."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from offload_runtime import Runtime, SamplingParams
from offload_runtime.errors import ContextLengthError, OptionError
from tests.helpers.engine import PROMPT, load, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.server import Served, serving
from tests.test_cli_chat import chat
from tests.test_cli_fakes import FakeRuntime
from tests.test_cli_generate import error_lines

LONG_CHAIN = {"$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)} | {"3000": {}}, "$ref": "#/$defs/0"}


@pytest.fixture(scope="module")
def served(two_layer_target: Path) -> Iterator[Served]:
    with serving(two_layer_target, load_options={"context": 256, "draft": "none"}) as served:
        yield served


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
def test_a_bound_is_kept_exactly_or_refused(runtime: Runtime, key: str, bound: float, is_taken: bool) -> None:
    """One that is rounded would let an answer through that the schema does not allow."""
    asked = {"type": "integer", key: bound}
    if is_taken:
        assert runtime.generate("a", max_new_tokens=2, json_schema=asked).tokens
        return
    with pytest.raises(OptionError, match=r"or leave (it|them) out"):
        runtime.generate("a", max_new_tokens=2, json_schema=asked)


def test_a_parameter_of_a_tool_is_read_as_strictly(served: Served) -> None:
    function = {"name": "f", "parameters": {"properties": {"a": {"const": -(2**63)}}}}
    found = served.chat(tools=[{"type": "function", "function": function}], tool_choice="required")
    assert found.status_code == 400


@pytest.fixture(scope="module")
def runtime(two_layer_target: Path) -> Iterator[Runtime]:
    with load(two_layer_target, context=64) as runtime:
        yield runtime


@pytest.mark.parametrize("answers", [[], [[5]], [[]], [[5], [], [6, 7], [5]]])
def test_logits_of_answers_of_any_length(runtime: Runtime, answers: Sequence[Sequence[int]]) -> None:
    rows = list(runtime.logits(runtime.encode(PROMPT), answers))
    assert [len(one) for one in rows] == [len(answer) for answer in answers]
    assert all(one[:1].equal(rows[0][:1]) for one in rows if len(one))


def test_logits_of_what_is_no_answer(runtime: Runtime) -> None:
    for prompt, answer, kind in (
        ([], [5], OptionError),
        ([5], [1 << 30], OptionError),
        ([5], [5] * 64, ContextLengthError),
    ):
        with pytest.raises(kind):
            list(runtime.logits(prompt, [answer]))


def test_a_chat_that_could_not_be_saved_does_not_end_well(tmp_path: Path) -> None:
    good, bad = tmp_path / "a.chat", tmp_path / "none" / "a.chat"
    result = chat(FakeRuntime(), turns=f"one\n/save {bad}\ntwo\n")
    assert result.exit_code == 2 and f"the conversation was not saved to {bad}" in error_lines(result)[-1]
    assert chat(FakeRuntime(), turns=f"one\n/save {bad}\n/save {good}\n").exit_code == 0
