"""Schemas at random, against a server that answers everybody else meanwhile.

`FUZZED_SCHEMAS=20000 pytest -m slow tests/test_schema_fuzz.py -s` asks so many and prints what they were answered.
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.schemas import random_schema
from tests.helpers.server import serving

NUMBERS: list[Any] = [
    0, -1, 1.5, -0.0, 1e-9, 2**31, 2**53, 2**53 + 1, 2**63, -(2**63) + 1024, -(2**63) + 512, -(2**63), -(10**30),
    10**40, 1e300, -1e300, 5e-324, 0.1, 4294967297, 65537,
]  # fmt: skip
COUNTS: list[Any] = [0, 1, 3, 300, 10**5, 10**9, 2**32, 2**63, -1, 2.0, "3"]
TEXTS = [
    "", "a", "\x00", "\ud800", "\U0001f600", "\u2028", "</s><|im_end|>", '"\\', "x" * 3000, "$ref", "\ufffe", "é" * 70,
]  # fmt: skip
PATTERNS = [
    "(a|b)*a(a|b){12}", "^a{1,20000}$", "(((a{30}){30}){30})", "(?=a)b", "\\b", "[^\\x00-\\x{10FFFF}]",
    "(" * 120 + ")" * 120, "(.*a){20}", "^(?i)straße$", "\\p{L}{1,400}", "(a?){400}a{400}", "^$", "(", "\\1", "[",
    "^\\u0041$", "(?<n>a)", "a**", ".{9999}",
]  # fmt: skip
FORMATS = ["date", "date-time", "email", "uri", "ipv6", "uuid", "hostname", "duration", "none", "regex", "json-pointer"]
TYPES = ["string", "integer", "number", "boolean", "null", "object", "array"]
REFS = [
    "#", "#/$defs/a", "#/$defs/b", "#/$defs/none", "#/properties/p", "a", "http://x.invalid/y", "file:///etc/passwd",
    "#~2", "",
]  # fmt: skip
BOUNDS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
LIMITS = ["minItems", "maxItems", "minProperties", "maxProperties"]
OTHERS = ["$id", "$anchor", "$schema", "$dynamicRef", "title", "x-guidance", "default"]
INNER = ["unevaluatedProperties", "contains", "propertyNames", "additionalProperties", "unevaluatedItems", "not"]


def odd_schema(chance: random.Random, depth: int) -> Any:
    """Whatever a schema may say: its keywords with values that nobody means."""
    if chance.random() < 0.03:
        return chance.choice([True, False, None, [], "x", 1])
    found: dict[str, Any] = {}
    for _ in range(chance.choice([1, 1, 2, 2, 3, 5])):
        found |= keyword(chance, depth)
    return found


def keyword(chance: random.Random, depth: int) -> dict[str, Any]:
    pick, number, text = chance.choice, chance.choice(NUMBERS), chance.choice(TEXTS)
    simple: list[dict[str, Any]] = [
        {"type": pick(TYPES)}, {"type": chance.sample(TYPES, 2)},
        {"const": pick([number, text, [number], {text: number}, None])},
        {"enum": [pick([number, text, None, [], {"a": number}]) for _ in range(pick([0, 1, 3, 40]))]},
        {"type": "integer", pick(BOUNDS): number}, {"type": "number", pick(BOUNDS): number},
        {"type": "number", "minimum": number, "maximum": pick(NUMBERS)},
        {"type": "string", "pattern": pick(PATTERNS)}, {"type": "string", "format": pick(FORMATS)},
        {"type": "string", "minLength": pick(COUNTS), "maxLength": pick(COUNTS)}, {"$ref": pick(REFS)},
        {pick(LIMITS): pick(COUNTS)}, {"required": [text] * pick([1, 1, 300])},
        {pick(OTHERS): pick([text, number, {"lenient": True}])},
    ]  # fmt: skip
    if not depth or chance.random() < 0.5:
        return pick(simple)

    def inner() -> Any:
        return odd_schema(chance, depth - 1)

    def named() -> dict[str, Any]:
        return {pick(["p", "q", text]): inner() for _ in range(2)}

    return pick([
        lambda: {"type": "object", "properties": named(), "additionalProperties": pick([False, inner()])},
        lambda: {pick(["anyOf", "oneOf", "allOf"]): [inner() for _ in range(pick([0, 1, 2, 4]))]},
        lambda: {"type": "array", "items": inner()},
        lambda: {"prefixItems": [inner(), inner()], "items": pick([False, inner()])},
        lambda: {"$defs": {"a": inner(), "b": inner()}, "$ref": pick(REFS)},
        lambda: {"if": inner(), "then": inner(), "else": inner()},
        lambda: {"patternProperties": {pick(PATTERNS): inner()}}, lambda: {pick(INNER): inner()},
    ])()  # fmt: skip


def fuzzed(chance: random.Random) -> tuple[str, bytes]:
    """A path and the body of a request that asks for JSON."""
    schema = odd_schema(chance, 3) if chance.random() < 0.7 else random_schema(chance)
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
    text = json.dumps(body)
    return path, (text.replace("1e+300", "1e400") if chance.random() < 0.05 else text).encode()


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
