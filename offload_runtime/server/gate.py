"""The gate that every request comes through first: who may ask for what, and how large it may be.

A page of another site that somebody looks at must not reach a server on their machine. It cannot by a name of its own
that resolves to 127.0.0.1 (DNS rebinding), because the Host header would have that name; nor by a form or a `no-cors`
fetch, because these cannot send `application/json`, which a browser has to; and it may not read an answer, because no
origin is allowed unless the user named it. Other programs may call a body what they like, as `curl -d` does.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import Request
from fastapi.datastructures import Headers
from fastapi.responses import JSONResponse

from offload_runtime.config import ServerConfig
from offload_runtime.server.failures import Failure

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

# What a browser needs before a key can be typed in, constants all of it; and a load balancer has none.
_OPEN_PATHS, _OPEN_FOLDER = frozenset({"/", "/health"}), "/page/"
_HEADERS = {
    b"content-security-policy":
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff", b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin", b"cache-control": b"no-store",
}  # fmt: skip


class Gate:
    """Lets requests through to an application, as a `ServerConfig` says. Refusals have the shape of the route's
    protocol."""

    def __init__(self, app: App, config: ServerConfig) -> None:
        self._app, self._config = app, config

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request or pass it on, with the headers that every answer gets."""
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message["headers"]}
                more = [(name, value) for name, value in _HEADERS.items() if name not in names]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        refusal = self._refusal(Request(scope))
        if refusal is None and scope["method"] == "POST":
            try:
                body = await asyncio.wait_for(self._body(receive), self._config.max_seconds / 10)
            except asyncio.TimeoutError:
                refusal = 408, "the body of the request did not arrive in time"
            else:
                if body is None:
                    return  # the client has gone
                if len(body) > self._config.max_body_bytes:
                    refusal = 413, _too_large(self._config.max_body_bytes)
                receive = _replaying(body, receive)
        if refusal is None:
            await self._app(scope, receive, send_with_headers)
            return
        status, message = refusal
        headers = {"www-authenticate": "Bearer"} if status == 401 else {}
        if status in (408, 413):  # what is left of the body is not read
            headers = {"connection": "close"}
        failure = Failure(status, message, code="invalid_api_key" if status == 401 else None)
        await JSONResponse(failure.body(scope["path"]), status, headers)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> tuple[int, str] | None:
        """Return status and message of what is refused by its headers alone."""
        config, headers = self._config, request.headers
        host = headers.get("host", "")
        if not config.allows_host(host):
            return 403, f"the Host header {host[:100]!r} is not one of this server: add it with --allowed-host"
        path = request.scope["path"]
        is_open = path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)
        if not is_open and config.api_key is not None:
            scheme, _, bearer = headers.get("authorization", "").partition(" ")
            # Anthropic's clients have a header of their own.
            given = bearer if scheme.lower() == "bearer" else headers.get("x-api-key", "")
            if not hmac.compare_digest(given.strip().encode(), config.api_key.encode()):
                return 401, "this server needs its API key: send it as Authorization: Bearer KEY, or x-api-key: KEY"
        if request.method == "POST":
            content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
            if content_type != "application/json" and _may_be_a_page(headers):
                return 415, "from a browser a body must be application/json, and say so in Content-Type"
            length = headers.get("content-length", "0")
            if length.isdecimal() and int(length[:20]) > config.max_body_bytes:
                return 413, _too_large(config.max_body_bytes)
        return None

    async def _body(self, receive: Receive) -> bytes | None:
        """Read the whole body, or as much of it as shows that it is too large; None where the client has gone."""
        chunks, size = [], 0
        while size <= self._config.max_body_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if not message.get("more_body", False):
                break
        return b"".join(chunks)


def _may_be_a_page(headers: Headers) -> bool:
    """Return whether a request bears a mark that browsers leave. What a page sends without asking beforehand cannot do
    without any: its User-Agent is the browser's, and with a POST comes an Origin."""
    marks = ("origin", "referer", "sec-fetch-site", "sec-fetch-mode")
    return any(mark in headers for mark in marks) or "mozilla/" in headers.get("user-agent", "").lower()


def _too_large(limit: int) -> str:
    return f"the body of the request is larger than {limit} bytes (--max-body)"


def _replaying(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body that was read already, and then what comes behind it: the client leaves."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
