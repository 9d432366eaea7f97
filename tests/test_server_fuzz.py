"""Malformed requests get an error that says so, and the server lives; schemas at random, against a server that answers
everybody else meanwhile.

`FUZZED_SCHEMAS=20000 pytest -m slow tests/test_server_fuzz.py -s` asks so many and prints what they were answered.
"""

import json
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fuzzing import json_bytes, mutate_bytes, mutate_json
from tests.helpers.schemas import random_schema
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
            assert isinstance(response.json()["error"]["message"], str)
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
    assert 400 <= response.status_code < 500 and response.json()["error"]["message"]


def test_malformed_requests_are_refused(served: Served) -> None:
    fuzz(served, 300, seed=random.SystemRandom().randrange(1 << 32))


PATTERNS = [
    "(a|b)*a(a|b){12}", "^a{1,20000}$", "(((a{30}){30}){30})", "(?=a)b", "\\b", "[^\\x00-\\x{10FFFF}]",
    "(" * 120 + ")" * 120, "(.*a){20}", "^(?i)straße$", "\\p{L}{1,400}", "(a?){400}a{400}", "^$", "(", "\\1", "[",
    "^\\u0041$", "(?<n>a)", "a**", ".{9999}",
]  # fmt: skip
REFS = [
    "#", "#/$defs/a", "#/$defs/b", "#/$defs/none", "#/properties/p", "a", "http://x.invalid/y", "file:///etc/passwd",
    "#~2", "",
]  # fmt: skip
KEYWORDS = (
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems", "minProperties",
    "maxProperties", "minLength", "maxLength", "pattern", "format", "$ref", "$defs", "$id", "$anchor", "$schema",
    "$dynamicRef", "title", "x-guidance", "default", "required", "enum", "const", "type", "anyOf", "oneOf", "allOf",
    "not", "if", "then", "else", "prefixItems", "items", "properties", "patternProperties", "additionalProperties",
    "unevaluatedProperties", "unevaluatedItems", "contains", "propertyNames",
)  # fmt: skip


def odd_schema(chance: random.Random) -> Any:
    """Whatever a schema may say: its keywords with values that nobody means."""
    schema: Any = random_schema(chance)
    odd = [{"type": "string", "pattern": chance.choice(PATTERNS)}, {"$ref": chance.choice(REFS)}]
    one = {chance.choice(KEYWORDS): chance.choice([*odd, schema, [schema, *odd]])}
    schema = chance.choice([schema, {**schema, **one}, {"properties": {"p": one}, "$defs": {"a": odd[0], "b": odd[1]}}])
    return mutate_json(chance, schema, KEYWORDS)[0]


def fuzzed(chance: random.Random) -> tuple[str, bytes]:
    """A path and the body of a request that asks for JSON."""
    schema = odd_schema(chance) if chance.random() < 0.7 else random_schema(chance)
    body: dict[str, Any] = {"max_tokens": chance.choice([1, 2, 6, 12]), "temperature": chance.choice([0, 1.0, 3.0])}
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    form = chance.choice(
        [form] * 12 + [{"type": "json_object"}, {"type": "text"}, {"type": "json_schema"}, {"type": "x"}, schema]
    )
    if chance.random() < 0.3:
        path, body = "/v1/completions", {**body, "prompt": "a", "response_format": form}
    else:
        path, body = "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": "a"}]}
        if chance.random() < 0.3:
            body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
            body["tool_choice"] = chance.choice(["required", "auto", {"type": "function", "function": {"name": "f"}}])
        if "tools" not in body or chance.random() < 0.2:
            body["response_format"] = form
    return path, json_bytes(body).replace(b"1e+300", b"1e400")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_schema_ends_the_server_or_keeps_others_from_their_answers(copy: Path) -> None:
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text() + "{# <tool_call> #}")  # so that calls can be forced
    count, seed = int(os.environ.get("FUZZED_SCHEMAS", "150")), int(os.environ.get("FUZZ_SEED", "1"))
    options, is_over, texts = {"context": 512, "draft": "none", "max_batch": 4}, threading.Event(), set[str]()

    with serving(copy, load_options=options) as served, ThreadPoolExecutor(4) as threads:

        def fuzz(number: int) -> int:
            path, body = fuzzed(random.Random(f"{seed} {number}"))
            answer = served.http.post(path, content=body, headers={"Content-Type": "application/json"}, timeout=300)
            is_refused = 400 <= answer.status_code < 500 and isinstance(answer.json()["error"]["message"], str)
            assert answer.status_code == 200 or is_refused, f"{number}: {path} {body[:3000]!r}: {answer.text[:500]}"
            return answer.status_code

        def be_ordinary() -> None:
            asked = {"prompt": "the quick brown fox", "max_tokens": 3, "temperature": 0}
            while not is_over.wait(0.1):
                answer = served.http.post("/v1/completions", json=asked, timeout=300)
                texts.add(answer.json()["choices"][0]["text"])

        ordinary = threads.submit(be_ordinary)
        try:
            statuses = Counter(threads.map(fuzz, range(count)))
        finally:
            is_over.set()
        ordinary.result()
    print(f"\n{dict(statuses)}")
    assert len(texts) == 1 and statuses[200] and statuses[400]
