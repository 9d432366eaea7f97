"""Malformed requests get an error that says so, and the server lives."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.server import Served, serving

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
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
}  # fmt: skip
# Of no use in any field.
ODD: tuple[Any, ...] = (
    -1, 1.5, 1e400, float("nan"), 10**30, -(10**30), True, "\ud800", "\x00", {"a": {}}, [[]], [None], {"": []},
    "9" * 50, "../../etc/passwd", {"__class__": 1}, [{"role": "user"}], {"\udfff": 1},
)  # fmt: skip


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All ways into a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*before, key)
        yield from places(item, (*before, key))


def changed(chance: random.Random, value: Any) -> Any:
    """The same with one odd thing in it."""
    value = copy.deepcopy(value)
    *way, last = chance.choice(list(places(value)))
    within = value
    for key in way:
        within = within[key]
    if chance.random() < 0.2 and isinstance(within, dict):
        within[chance.choice(["frobnicate", "\udfff", "", "echo", "model", "messages"])] = chance.choice(ODD)
    else:
        within[last] = chance.choice(ODD)
    return value


def malformed(chance: random.Random, text: bytes) -> bytes:
    """What is no JSON, or nothing of ours."""
    kind = chance.randrange(6)
    if kind == 0:
        return chance.randbytes(chance.randrange(200)) + b"\xff"
    if kind == 1:
        return text[: chance.randrange(len(text))]
    if kind == 2:
        at = chance.randrange(len(text))
        return text[:at] + chance.choice([b"\xc3", b"\x00", b"}", b"]"]) + text[at:] + b"]"
    if kind == 3:
        deep = b'{"messages": [{"role": "user", "content": "a", "x": %b1%b}]}' % (b'[{"a":' * 200, b"}]" * 200)
        return chance.choice([b"[" * 100_000, b'{"messages":' * 5000, deep])
    if kind == 4:
        return chance.choice([b"null", b"1", b'"text"', b"[]", b"{}", b"true", b"1" * 10_000])
    return json.dumps({**json.loads(text), "frobnicate": 1}).encode()


def fuzz(served: Served, count: int, seed: int) -> None:
    chance, headers = random.Random(seed), {"Content-Type": "application/json"}
    for number in range(count):
        path = chance.choice(PATHS)
        is_malformed = number % 2 == 0
        text = json.dumps(VALID[path]).encode()
        body = malformed(chance, text) if is_malformed else json.dumps(changed(chance, VALID[path])).encode()
        response = served.http.post(path, content=body, headers=headers)
        status = response.status_code
        # One odd thing may be harmless: a text as any other, or a key that a template does not look at.
        assert 400 <= status < 500 or (status == 200 and not is_malformed), (path, body[:500], response.text)
        if status != 200:
            assert isinstance(response.json()["error"]["message"], str)
    assert served.chat().status_code == 200
    counters = served.scheduler.counters
    assert counters.running == counters.waiting == 0


@pytest.fixture(scope="module")
def served(two_layer_target: Path) -> Iterator[Served]:
    with serving(two_layer_target, load_options={"context": 256, "draft": "none"}, max_body_bytes=200_000) as served:
        yield served


def test_what_is_left_alone_is_allowed(served: Served) -> None:
    for path, body in VALID.items():
        assert served.http.post(path, json=body).status_code == 200, path


def test_malformed_requests_are_refused(served: Served) -> None:
    fuzz(served, 300, seed=random.SystemRandom().randrange(1 << 32))
