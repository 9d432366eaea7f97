"""More requests than there are slots, clients that go, and servers that stop."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from offload_runtime.cli.app import app
from offload_runtime.config import ServerConfig
from offload_runtime.errors import OptionError
from offload_runtime.server.app import Server
from tests.helpers.engine import PROMPT, load, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.server import MODEL, Served, events_of, free_port, is_ready, serving, wait_until

# Longer than any test waits.
ENDLESS: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 16000, "ignore_eos": True, "temperature": 1.0, "seed": 1}


@pytest.fixture(scope="module")
def served(long_target: Path) -> Iterator[Served]:
    """Two slots, and room for one that waits."""
    with serving(long_target, load_options={"context": 16384}, max_waiting=1) as served:
        yield served


@pytest.fixture(autouse=True)
def nobody_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test has begun is over before the next one."""
    yield
    if "served" in request.fixturenames:
        scheduler = request.getfixturevalue("served").scheduler
        wait_until(lambda: scheduler.counters.running == scheduler.counters.waiting == 0)


@contextmanager
def begun(served: Served, **fields: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream that nobody closes before the context does."""
    body = {**ENDLESS, "stream": True, **fields}
    with served.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = response.iter_lines()  # httpx closes a response whose iterator nobody holds
        yield lines


def test_a_client_that_goes_frees_its_slot(served: Served) -> None:
    before = served.scheduler.counters
    with begun(served, n=2) as lines:
        next(lines)
        wait_until(lambda: served.scheduler.counters.running == 2)
    wait_until(lambda: served.scheduler.counters.running == 0)
    after = served.scheduler.counters
    assert after.finished - before.finished == 2 and after.tokens - before.tokens < 16000


def test_one_that_waits_for_a_whole_answer_frees_it_as_well(served: Served) -> None:
    with pytest.raises(httpx.ReadTimeout):
        served.http.post("/v1/completions", json=ENDLESS, timeout=0.5)
    wait_until(lambda: served.scheduler.counters.running == 0)
    assert served.http.post("/v1/completions", json={**ENDLESS, "max_tokens": 2}).status_code == 200


def test_beyond_what_may_wait_requests_are_told_to_come_back(served: Served) -> None:
    with ExitStack() as streams:
        first = streams.enter_context(ExitStack())
        next(first.enter_context(begun(served, n=2)))
        second = streams.enter_context(begun(served))
        wait_until(lambda: served.scheduler.counters.running == 2 and served.scheduler.counters.waiting == 1)
        refused = served.http.post("/v1/completions", json={**ENDLESS, "stream": True})
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        first.close()
        assert next(second).startswith("data: ")  # which has a slot then


@pytest.mark.slow
def test_after_its_time_an_answer_ends_as_it_is(long_target: Path) -> None:
    with serving(long_target, max_seconds=1.0) as served:
        answer = served.http.post("/v1/completions", json={**ENDLESS, "max_tokens": 8000}).json()
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
def test_a_server_that_stops_lets_answers_finish_or_ends_them(
    short_target: Path, grace_s: float, finish_reason: str
) -> None:
    """The answer would take a moment: within the grace it comes to its stop string."""
    with load(short_target, draft="none") as alone:
        text = alone.generate(PROMPT, max_new_tokens=120, ignore_eos=True).text
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

    def ask_and_stop() -> None:
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until(lambda: is_ready(url))
            models.append(httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0])
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask_and_stop)
    asking.start()
    words = ["serve", "--target", str(short_target), "--device", "cpu", "--port", str(port), "--context", "128"]
    result = CliRunner().invoke(app, [*words, "--max-requests", "3"])
    asking.join()
    assert result.exit_code == 0, result.stderr
    assert models[0]["id"] == short_target.name and models[0]["max_model_len"] == 128
    assert "3 requests at once" in result.stderr and result.stderr.endswith("stopped\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-body", "much"], "is not a size"),
        (["--max-requests", "0"], "--max-requests must be auto or a count"),
        (["--kv", "host", "--prefix-cache", "1GB"], "drop --prefix-cache"),
        (["--prefix-cache", "1kB"], "--prefix-cache of 1.0 kB holds none of the blocks"),
    ],
)
def test_the_command_refuses_before_it_loads(
    short_target: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
