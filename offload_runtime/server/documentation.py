"""What the server says of itself: a description of its routes in OpenAPI's words, and a page of the same that loads
nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REFERENCE = "#/components/schemas/{model}"


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """Return what OpenAPI says of a route with such a body."""
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=kind.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def described(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """Return the OpenAPI document of an application whose routes have such bodies, which have names of their own."""
    document = app.openapi()
    _, schemas = models_json_schema([(kind, "validation") for kind in bodies], ref_template=_REFERENCE)
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    return document


def page(document: Mapping[str, Any]) -> str:
    """Return the page of a document."""
    title = f"{document['info']['title']} {document['info']['version']}"
    return "\n".join([
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">',
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title></head><body>',
        f'<h1>{escape(title)}</h1><p><a href="/openapi.json">openapi.json</a></p>',
        *_routes(document), "</body></html>",
    ])  # fmt: skip


def _routes(document: Mapping[str, Any]) -> Iterator[str]:
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            yield f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(route.get('description', ''))}</p>"
            content = route.get("requestBody", {}).get("content", {}).get("application/json", {})
            if content:
                schema = schemas[content["schema"]["$ref"].rpartition("/")[2]]
                needed = schema.get("required", ())
                yield "<table><tr><th>field</th><th>type</th><th></th></tr>"
                for name, field in schema.get("properties", {}).items():
                    cells = (name, _type_of(field, schemas), "required" if name in needed else "")
                    yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
                yield "</table>"


def _type_of(field: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """Return the type of a field in words."""
    if "$ref" in field:
        schema = schemas[field["$ref"].rpartition("/")[2]]
        inner = ", ".join(f"{name}: {_type_of(one, schemas)}" for name, one in schema.get("properties", {}).items())
        return f"{{{inner}}}"
    if "anyOf" in field:
        types = (_type_of(one, schemas) for one in field["anyOf"])
        return " or ".join(one for one in dict.fromkeys(types) if one != "null")
    if "enum" in field or "const" in field:
        return " or ".join(str(one) for one in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of {_type_of(field.get('items', {}), schemas)}"
    return str(field.get("type", "anything"))
