"""Who may ask: hosts, keys, kinds and sizes of bodies, origins; what pages may do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from offload_runtime.config import ServerConfig
from offload_runtime.errors import OptionError
from tests.helpers.engine import one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.server import Served, serving

KEY, ORIGIN = "a secret key", "https://chat.example"


@pytest.fixture(scope="module")
def served(short_target: Path) -> Iterator[Served]:
    """With a key, a page of another origin, and small bodies."""
    config: dict[str, Any] = {"api_key": KEY, "cors_origins": (ORIGIN,), "allowed_hosts": ("gpu.example",)}
    with serving(short_target, max_body_bytes=5000, max_seconds=5.0, **config) as served:
        yield served


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/nothing"])
@pytest.mark.parametrize("given", [None, "Bearer wrong", f"Basic {KEY}", KEY, "Bearer", "Bearer " + "x" * 5000])
def test_without_the_key_nothing_is_told(served: Served, path: str, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given}
    response = httpx.get(served.url + path, headers=headers, trust_env=False)
    assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"


def test_with_the_key_everything_is(served: Served) -> None:
    assert served.chat().status_code == 200
    assert served.openai.models.list().data


@pytest.mark.parametrize("path", ["/", "/page.js", "/page.css", "/page.svg", "/health"])
def test_page_and_health_need_no_key(served: Served, path: str) -> None:
    response = httpx.get(served.url + path, trust_env=False)
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy


@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example", 403), ("evil.example:8000", 403), ("localhost.evil.example", 403),
     ("127.0.0.1.evil.example", 403), ("10.0.0.1", 403), ("localhost", 200), ("LOCALHOST:1234", 200),
     ("127.0.0.1", 200), ("[::1]:80", 200), ("gpu.example:8000", 200)],
)  # fmt: skip
def test_the_host_header_names_this_server(served: Served, host: str, status: int) -> None:
    assert served.http.get("/health", headers={"Host": host}).status_code == status


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/json"]
)
def test_bodies_are_json_and_say_so(served: Served, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = served.http.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}', headers=headers)
    assert response.status_code == 415
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert served.http.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers).status_code == 200


def test_bodies_that_are_too_large_are_not_read(served: Served) -> None:
    assert served.chat(messages=[{"role": "user", "content": "x" * 5000}]).status_code == 413

    def without_length() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 1000

    headers = {"Content-Type": "application/json"}
    assert served.http.post("/v1/completions", content=without_length(), headers=headers).status_code == 413


def test_a_body_that_never_comes_is_given_up(served: Served) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    with socket.create_connection((served.http.base_url.host, served.http.base_url.port or 0), timeout=60) as client:
        client.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode())
        assert b" 408 " in client.recv(1000).splitlines()[0]


def test_pages_of_named_origins_alone_may_ask(served: Served) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    allowed = served.http.options("/v1/chat/completions", headers={"Origin": ORIGIN, **asked})
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == ORIGIN
    refused = served.http.options("/v1/chat/completions", headers={"Origin": "https://evil.example", **asked})
    assert "access-control-allow-origin" not in refused.headers
    assert served.http.get("/v1/models", headers={"Origin": ORIGIN}).headers["access-control-allow-origin"] == ORIGIN


@pytest.mark.parametrize(
    "path", ["/page.html", "/../pyproject.toml", "/..%2f..%2fetc/passwd", "//etc/passwd", "/v1/models/..%2f..%2fx"]
)
def test_no_path_reaches_the_file_system(served: Served, path: str) -> None:
    with socket.create_connection((served.http.base_url.host, served.http.base_url.port or 0), timeout=60) as client:
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n"
        client.sendall(head.encode())
        assert b" 404 " in client.recv(1000).splitlines()[0]


def test_the_page_loads_nothing_from_elsewhere(served: Served) -> None:
    page = served.http.get("/").text
    for forbidden in ("http:", "https:", "style=", "onclick", "<style"):
        assert forbidden not in page
    assert "<script>" not in page and "/page.js" in page


def test_without_named_origins_no_page_of_another_one_may_ask(short_target: Path) -> None:
    with serving(short_target) as served:
        asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
        response = served.http.options("/v1/chat/completions", headers=asked)
        assert response.status_code == 405 and "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "gpu.example", ""])
def test_listening_elsewhere_needs_a_key(host: str) -> None:
    with pytest.raises(OptionError, match="--api-key or OFFLOAD_RUNTIME_API_KEY"):
        ServerConfig(host=host)
    assert ServerConfig(host=host, api_key="key").allows_host("localhost:8000")


def test_an_address_is_this_server_where_all_are_listened_at() -> None:
    everywhere, here = ServerConfig(host="0.0.0.0", api_key="key"), ServerConfig()
    assert everywhere.allows_host("192.168.1.2:8000") and not everywhere.allows_host("evil.example")
    assert not here.allows_host("192.168.1.2:8000")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 65536}, "port must be in"),
        ({"api_key": " "}, "an API key is a word"),
        ({"api_key": "é"}, "an API key is a word"),
        ({"cors_origins": ("*",)}, "is not an origin"),
        ({"cors_origins": ("https://chat.example/",)}, "is not an origin"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"max_seconds": 0.0}, "max_seconds"),
        ({"grace_s": -1.0}, "grace"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ServerConfig(**options)
