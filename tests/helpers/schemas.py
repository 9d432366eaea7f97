"""Twelve JSON schemas, and others at random: of bounded answers, so that a model of random weights comes to an end."""

import json
import random
from typing import Any

from jsonschema import Draft202012Validator

NODE = {"type": "object", "properties": {"v": {"enum": [0, 1]}, "next": {"$ref": "#/$defs/leaf"}}, "required": ["v"],
        "additionalProperties": False}  # fmt: skip
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer",
     "minimum": 0, "maximum": 120}}, "required": ["name", "age"], "additionalProperties": False},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"enum": ["red", "green", 7, None, {"a": [1]}]},
    {"anyOf": [{"type": "string", "pattern": "^[a-c]{3}-[0-9]{2}$"}, {"type": "null"}]},
    {"type": "object", "properties": {"kind": {"const": "dot"}, "at": {"type": "array", "prefixItems": [
     {"type": "integer", "minimum": -9, "maximum": 9}, {"type": "integer", "minimum": 10, "maximum": 99}],
     "minItems": 2, "items": False}}, "required": ["kind", "at"], "additionalProperties": False},
    {"$ref": "#/$defs/node", "$defs": {"node": NODE, "leaf": {"type": "null"}}},
    {"type": "string", "format": "date"},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "object", "properties": {"café \"日本\"": {"type": ["integer", "null"], "minimum": 1, "maximum": 3}},
     "required": ["café \"日本\""], "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "properties": {"x": {"const": 1}},
     "required": ["x"], "maxProperties": 1},
    {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 8}]},
    {"type": "array", "items": {"type": "object", "properties": {"t": {"enum": ["a", "b"]}}, "required": ["t"],
     "additionalProperties": False}, "minItems": 1, "maxItems": 3},
]  # fmt: skip


def assert_valid(text: str, schema: dict[str, Any]) -> None:
    """A text is JSON that a schema allows."""
    Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(json.loads(text))


def random_schema(chance: random.Random, depth: int = 3) -> dict[str, Any]:
    """Any bounded schema, of most keywords that there are."""
    kind = chance.choice(["string", "pattern", "integer", "number", "enum", "const", "boolean", "null", "format"])
    if depth and chance.random() < 0.7:
        kind = chance.choice(["object", "array", "tuple", "anyOf"])
    low = chance.randint(-50, 50)
    inner = [random_schema(chance, depth - 1) for _ in range(chance.randint(1, 3))] if depth else []
    return {
        "string": lambda: {"type": "string", "minLength": chance.randint(0, 2), "maxLength": chance.randint(2, 6)},
        "pattern": lambda: {"type": "string", "pattern": chance.choice(["^[a-z]{1,4}$", "^(on|off)$", "^x\\d{2}\"?$"])},
        "integer": lambda: {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 500)},
        "number": lambda: {"type": "number", "multipleOf": 0.5, "minimum": low, "maximum": low + 7},
        "enum": lambda: {"enum": chance.sample(["a", "b\n", 1, -2.5, None, True, [], {"k": "v"}], 3)},
        "const": lambda: {"const": chance.choice(["ü", 0, {"a": [1, {"b": None}]}])},
        "boolean": lambda: {"type": "boolean"},
        "null": lambda: {"type": "null"},
        "format": lambda: {"type": "string", "format": chance.choice(["date", "time", "uuid", "ipv4"])},
        "object": lambda: {
            "type": "object", "properties": {f"p{i}": one for i, one in enumerate(inner)},
            "required": [f"p{i}" for i in range(len(inner)) if chance.random() < 0.6], "additionalProperties": False,
        },
        "array": lambda: {"type": "array", "items": inner[0], "minItems": chance.randint(0, 1), "maxItems": 2},
        "tuple": lambda: {"type": "array", "prefixItems": inner, "minItems": len(inner), "items": False},
        "anyOf": lambda: {"anyOf": inner},
    }[kind]()  # fmt: skip
