"""Malformed requests get an error that says so, and the server lives."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fuzzing import json_bytes, mutate_bytes, mutate_json
from tests.helpers.server import MODEL, Served, serving

VALID: dict[str, Any] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}],
        "max_tokens": 1, "temperature": 1.0, "top_p": 0.9, "seed": 1, "stop": ["x"], "n": 1, "stream": False,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "chat_template_kwargs": {"enable_thinking": False}, "stream_options": {"include_usage": True},
    },
    "/v1/completions": {"prompt": [[1, 2], [3]], "max_tokens": 1, "top_k": 3, "min_p": 0.1, "stop": "x"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/messages": {
        "model": MODEL, "max_tokens": 1, "system": [{"type": "text", "text": "a"}], "stop_sequences": ["x"],
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "b", "signature": ""},
            {"type": "tool_use", "id": "x", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "c"}]}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 3}, "temperature": 1.0, "top_k": 3, "stream": False,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
            {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "x", "output": "c"}],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}], "tool_choice": "auto",
        "instructions": "d", "max_output_tokens": 1, "temperature": 1.0, "store": False, "stream": False,
        "text": {"format": {"type": "text"}}, "include": ["reasoning.encrypted_content"], "top_logprobs": 1,
    },
    "/api/chat": {
        "model": MODEL, "messages": [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "", "thinking": "b", "tool_calls": [
                {"function": {"name": "f", "arguments": {"a": 1}}}]}, {"role": "tool", "content": "c"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], "stream": False,
        "options": {"num_predict": 1, "num_ctx": 8, "stop": ["x"], "repeat_penalty": 1.1}, "think": False,
    },
    "/api/generate": {
        "model": MODEL, "prompt": "a", "system": "b", "options": {"num_predict": 1}, "stream": False, "logprobs": True,
    },
    "/api/show": {"model": MODEL, "verbose": True},
}  # fmt: skip
PATHS = tuple(VALID)
DEEP = b'{"messages": [{"role": "user", "content": "a", "x": %b1%b}]}' % (b'[{"a":' * 200, b"}]" * 200)
# Others that some request has, or none.
KEYS = ("frobnicate", "\udfff", "", "echo", "model", "messages", "logit_bias", "response_format", "prompt", "logprobs")


def fuzz(served: Served, count: int, seed: int) -> None:
    chance, headers, refused = random.Random(seed), {"Content-Type": "application/json"}, 0
    for number in range(count):
        path = chance.choice(PATHS)
        body = json_bytes(mutate_json(chance, VALID[path], KEYS, times=1)[0])
        if number % 2:
            body, _ = mutate_bytes(chance, json.dumps(VALID[path]).encode())
        response = served.http.post(path, content=body, headers=headers)
        status = response.status_code
        # One odd thing may be harmless: a text as any other, or a key that a template does not look at.
        assert status == 200 or 400 <= status < 500, (path, body[:500], response.text)
        if status != 200:
            error = response.json()["error"]
            assert isinstance(error if path.startswith("/api/") else error["message"], str)
            refused += 1
    assert refused > count // 2 and served.chat().status_code == 200
    counters = served.scheduler.counters
    assert counters.running == counters.waiting == 0


@pytest.fixture(scope="module")
def served(two_layer_target: Path) -> Iterator[Served]:
    with serving(two_layer_target, load_options={"context": 256, "draft": "none"}, max_body_bytes=200_000) as served:
        yield served


def test_what_is_left_alone_is_allowed(served: Served) -> None:
    for path, body in VALID.items():
        assert served.http.post(path, json=body).status_code == 200, path


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"messages":' * 5000, DEEP, b"null", b"1", b'"text"', b"[]", b"{}"])
@pytest.mark.parametrize("path", PATHS)
def test_what_is_no_request_is_refused(served: Served, path: str, body: bytes) -> None:
    response = served.http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert 400 <= response.status_code < 500 and response.json()["error"]


def test_malformed_requests_are_refused(served: Served) -> None:
    fuzz(served, 150, seed=random.SystemRandom().randrange(1 << 32))
