"""Who may ask: hosts, keys, kinds and sizes of bodies, origins; and more requests than there are slots, clients that
go, servers that stop."""

import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from offload_runtime.cli.app import app
from offload_runtime.config import ServerConfig
from offload_runtime.engine import Runtime
from offload_runtime.errors import OptionError
from offload_runtime.server.app import Server
from tests.helpers.engine import PROMPT, load
from tests.helpers.hosts import free_port
from tests.helpers.server import MODEL, Served, asked_and_stopped, events_of, is_ready, serving, wait_until

KEY, ORIGIN = "a secret key", "https://chat.example"


@pytest.fixture(scope="module")
def served(short_target: Path) -> Iterator[Served]:
    """With a key, a page of another origin, and small bodies."""
    config: dict[str, Any] = {"api_key": KEY, "cors_origins": (ORIGIN,), "allowed_hosts": ("gpu.example",)}
    with serving(short_target, max_body_bytes=5000, max_seconds=5.0, **config) as served:
        yield served


@pytest.fixture(scope="module")
def stranger(served: Served) -> Iterator[httpx.Client]:
    """Who has no key."""
    with httpx.Client(base_url=served.url, trust_env=False) as client:
        yield client


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/nothing", "/docs", "/openapi.json"])
@pytest.mark.parametrize("given", [None, "Bearer wrong", f"Basic {KEY}", KEY, "Bearer", "Bearer " + "x" * 5000])
def test_without_the_key_nothing_is_told(stranger: httpx.Client, path: str, given: str | None) -> None:
    response = stranger.get(path, headers={} if given is None else {"Authorization": given})
    assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    assert stranger.get("/v1/messages").json()["error"]["type"] == "authentication_error"


def test_with_the_key_everything_is(served: Served, stranger: httpx.Client) -> None:
    assert served.chat().status_code == 200
    assert served.openai.models.list().data
    own = {"x-api-key": KEY}  # of Anthropic's clients
    assert stranger.get("/v1/models", headers=own).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/", "/page/page.js", "/page/constants.js", "/page/marked.umd.js", "/page/page.css", "/page/icon.svg", "/health"],
)
def test_page_and_health_need_no_key(stranger: httpx.Client, path: str) -> None:
    response = stranger.get(path)
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
    "mark", [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Referer": "https://evil.example/"},
             {"Sec-Fetch-Site": "cross-site"}, {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64) Gecko/20100101"}],
)  # fmt: skip
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "a", "max_tokens": 1}), ("/api/generate", {"model": MODEL, "prompt": "a",
     "stream": False, "raw": True, "options": {"num_predict": 1}})],
)  # fmt: skip
def test_bodies_from_browsers_are_json_and_say_so(
    served: Served, mark: dict[str, str], path: str, body: dict[str, object]
) -> None:
    """A page of another site sends no such body without asking; other programs may call theirs what they like."""

    def status(headers: dict[str, str]) -> int:
        return served.http.post(path, content=json.dumps(body), headers=headers).status_code

    for said in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/json", None):
        content_type = {} if said is None else {"Content-Type": said}
        assert status({**content_type, **mark}) == 415
    assert status({"Content-Type": "application/x-www-form-urlencoded"}) == status({}) == 200
    assert status({"Content-Type": "Application/JSON; charset=utf-8", **mark}) == 200


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


@pytest.mark.parametrize("path", [
    "/page/index.html", "/page/..%2f..%2fapp.py", "/page/marked.LICENSE", "/../pyproject.toml", "/..%2f..%2fetc/passwd",
    "//etc/passwd", "/v1/models/..%2f..%2fx",
])  # fmt: skip
def test_no_path_reaches_the_file_system(served: Served, path: str) -> None:
    with socket.create_connection((served.http.base_url.host, served.http.base_url.port or 0), timeout=60) as client:
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n"
        client.sendall(head.encode())
        assert b" 404 " in client.recv(1000).splitlines()[0]


def test_the_page_loads_nothing_from_elsewhere(served: Served) -> None:
    page = served.http.get("/").text
    for forbidden in ("http:", "https:", "style=", "onclick", "<style"):
        assert forbidden not in page
    assert "<script>" not in page and "/page/page.js" in page
    for path in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert served.http.get(path).status_code == 200, path


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


@pytest.mark.parametrize(("options", "message"), [
    ({"port": 65536}, "port must be in"), ({"api_key": " "}, "an API key is a word"),
    ({"api_key": "é"}, "an API key is a word"), ({"cors_origins": ("*",)}, "is not an origin"),
    ({"cors_origins": ("https://chat.example/",)}, "is not an origin"), ({"max_body_bytes": 0}, "max_body_bytes"),
    ({"max_seconds": 0.0}, "max_seconds"), ({"grace_s": -1.0}, "grace"),
])  # fmt: skip
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ServerConfig(**options)


# Longer than any test waits.
ENDLESS: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 16000, "ignore_eos": True, "temperature": 1.0, "seed": 1}


@pytest.fixture(scope="module")
def loaded(long_target: Path) -> Iterator[Served]:
    """Two slots, and room for one that waits."""
    with serving(long_target, load_options={"context": 16384}, max_waiting=1) as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def nobody_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test has begun is over before the next one."""
    yield
    if "loaded" in request.fixturenames:
        scheduler = request.getfixturevalue("loaded").scheduler
        wait_until(lambda: scheduler.counters.running == scheduler.counters.waiting == 0)


@contextmanager
def begun(loaded: Served, **fields: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream that nobody closes before the context does."""
    body = {**ENDLESS, "stream": True, **fields}
    with loaded.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = response.iter_lines()  # httpx closes a response whose iterator nobody holds
        yield lines


def test_a_client_that_goes_frees_its_slot(loaded: Served) -> None:
    before = loaded.scheduler.counters
    with begun(loaded, n=2) as lines:
        next(lines)
        wait_until(lambda: loaded.scheduler.counters.running == 2)
    wait_until(lambda: loaded.scheduler.counters.running == 0)
    after = loaded.scheduler.counters
    assert after.finished - before.finished == 2 and after.tokens - before.tokens < 16000


def test_one_that_waits_for_a_whole_answer_frees_it_as_well(loaded: Served) -> None:
    with pytest.raises(httpx.ReadTimeout):
        loaded.http.post("/v1/completions", json=ENDLESS, timeout=0.5)
    wait_until(lambda: loaded.scheduler.counters.running == 0)
    assert loaded.http.post("/v1/completions", json={**ENDLESS, "max_tokens": 2}).status_code == 200


def test_beyond_what_may_wait_requests_are_told_to_come_back(loaded: Served) -> None:
    with ExitStack() as streams:
        first = streams.enter_context(ExitStack())
        next(first.enter_context(begun(loaded, n=2)))
        second = streams.enter_context(begun(loaded))
        wait_until(lambda: loaded.scheduler.counters.running == 2 and loaded.scheduler.counters.waiting == 1)
        refused = loaded.http.post("/v1/completions", json={**ENDLESS, "stream": True})
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        first.close()
        assert next(second).startswith("data: ")  # which has a slot then


@pytest.mark.slow
def test_after_its_time_an_answer_ends_as_it_is(long_target: Path) -> None:
    with serving(long_target, max_seconds=1.0) as loaded:
        answer = loaded.http.post("/v1/completions", json={**ENDLESS, "max_tokens": 8000}).json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length" and choice["x_stats"]["finish_reason"] == "interrupted"
        assert 0 < answer["usage"]["completion_tokens"] < 8000


def test_health_says_what_can_be_asked(short_target: Path) -> None:
    with Server(ServerConfig(port=0)) as server, httpx.Client(base_url=server.url, trust_env=False) as client:
        assert client.get("/health").json() == {"status": "loading"}
        refused = client.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == client.get("/health").status_code == 503 and "retry-after" in refused.headers
        with load(short_target, draft="none") as runtime:
            with server.serving(runtime, MODEL):
                assert client.get("/health").status_code == 200
            stopping = client.get("/health")
            assert (stopping.status_code, stopping.json()) == (503, {"status": "stopping"})
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 503


@pytest.mark.parametrize(("grace_s", "finish_reason"), [(0.0, "length"), (60.0, "stop")])
def test_a_server_that_stops_gives_answers_its_grace(
    short_target: Path, plain: Runtime, grace_s: float, finish_reason: str
) -> None:
    """The answer would take a moment: within the grace it comes to its stop string."""
    text = plain.generate(PROMPT, max_new_tokens=120, ignore_eos=True).text
    with Server(ServerConfig(port=0, grace_s=grace_s)) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        with load(short_target, draft="none") as runtime:
            body = {"prompt": PROMPT, "temperature": 0, "stop": text[-12:], "max_tokens": 400, "ignore_eos": True}
            with server.serving(runtime, MODEL), ExitStack() as streams:
                stream = http.stream("POST", "/v1/completions", json={**body, "stream": True})
                response = streams.enter_context(stream)
                lines = events_of(response)
                next(lines)
                keep = streams.pop_all()
        with keep:
            assert [event["choices"][0]["finish_reason"] for event in lines][-1] == finish_reason


def test_a_port_that_is_taken_is_said(short_target: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OptionError, match="choose another --port"):
        Server(ServerConfig(port=taken.getsockname()[1]))


def test_the_command_serves_until_sigterm(short_target: Path) -> None:
    port, models = free_port(), []

    def ask(url: str) -> None:
        models.append(httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0])

    words = ["serve", "--target", str(short_target), "--device", "cpu", "--port", str(port), "--context", "128"]
    with asked_and_stopped(port, ask):
        result = CliRunner().invoke(app, [*words, "--max-requests", "3"])
    assert result.exit_code == 0, result.stderr
    assert models[0]["id"] == short_target.name and models[0]["max_model_len"] == 128
    assert "3 requests at once" in result.stderr and result.stderr.endswith("stopped\n")


@pytest.mark.parametrize(("words", "message"), [
    (["--max-body", "much"], "is not a size"), (["--max-requests", "0"], "--max-requests must be auto or a count"),
    (["--kv", "host", "--prefix-cache", "1GB"], "drop --prefix-cache"),
    (["--prefix-cache", "1kB"], "--prefix-cache of 1.0 kB holds none of the blocks"),
])  # fmt: skip
def test_refused_unloaded(short_target: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFLOAD_RUNTIME_API_KEY", raising=False)
    result = CliRunner().invoke(app, ["serve", "--target", str(short_target), "--device", "cpu", *words])
    assert result.exit_code == 2 and message in result.stderr and "loaded " not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_a_process_stops_at_once_at_the_second_signal(long_target: Path, signals: int) -> None:
    port = free_port()
    url, words = f"http://127.0.0.1:{port}", ["--device", "cpu", "--port", str(port), "--grace", "2"]
    if signals == 2:
        words[-1] = "3000"
    program = [sys.executable, "-m", "offload_runtime", "serve", "--target", str(long_target), *words]
    with subprocess.Popen(program, stderr=subprocess.PIPE) as process:
        wait_until(lambda: is_ready(url))
        with httpx.stream("POST", f"{url}/v1/completions", json={**ENDLESS, "max_tokens": 7000, "stream": True},
                          timeout=60, trust_env=False) as response:  # fmt: skip
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: not is_ready(url))
            if signals == 2:
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 128 + signal.SIGINT
            else:
                assert "data: [DONE]" in list(lines)
                assert process.wait(60) == 0


def test_what_is_not_installed_is_said(short_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "fastapi" else there(name, *of))
    result = CliRunner().invoke(app, ["serve", "--target", str(short_target)])
    assert result.exit_code == 2 and "fastapi: pip install 'offload-runtime[server]'" in result.stderr
