"""More requests than there are slots, clients that go, and servers that stop."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from offload_runtime.cli.app import app
from offload_runtime.engine import ErrorEvent, GenerationResult, Runtime, SchedulerCounters, TokenEvent
from offload_runtime.errors import BudgetError, NumericalError, OptionError, QueueFullError, UnavailableError
from offload_runtime.params import GenerationParams
from offload_runtime.server.app import Service, make_app
from offload_runtime.server.gate import ServerConfig
from offload_runtime.server.run import Server
from tests.helpers.engine import PROMPT, load, one_thread  # noqa: F401 (an autouse fixture)
from tests.helpers.server import MODEL, Served, events_of, serving
from tests.test_cli_fakes import make_stats

# Longer than any test waits.
ENDLESS: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 16000, "ignore_eos": True, "temperature": 1.0, "seed": 1}


def wait_until(reached: Callable[[], bool]) -> None:
    """Wait for what has to come, a minute at the most."""
    end_s = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end_s, "it did not come"
        time.sleep(0.01)


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


def test_of_several_answers_none_is_begun_where_not_all_may_wait(served: Served) -> None:
    with begun(served) as lines:
        next(lines)
        assert served.http.post("/v1/completions", json={**ENDLESS, "n": 3}).status_code == 429
        wait_until(lambda: served.scheduler.counters.running == 1 and not served.scheduler.counters.waiting)
    assert served.http.post("/v1/completions", json={**ENDLESS, "n": 4}).status_code == 400  # never


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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


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
        (["--host", "0.0.0.0"], "--api-key"),
        (["--api-key", ""], "an API key is a word"),
        (["--max-body", "much"], "is not a size"),
        (["--max-requests", "0"], "--max-requests must be auto or a count"),
        (["--port", "70000"], "port must be in"),
    ],
)
def test_the_command_refuses_before_it_loads(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFLOAD_RUNTIME_API_KEY", raising=False)
    result = CliRunner().invoke(app, ["serve", "--target", "nowhere", *words])
    assert result.exit_code == 2 and message in result.stderr


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


class FailingScheduler:
    """Ends every request by an error, of its own or as it is asked."""

    def __init__(self, error: Exception, *, at_once: bool) -> None:
        self._error, self._at_once, self.counters = error, at_once, SchedulerCounters()
        self.failure: BaseException | None = None

    def submit(self, prompt: list[int], params: GenerationParams, *, on_event: Any) -> Any:
        if self._at_once:
            raise self._error
        on_event(TokenEvent(1, "a", "target"))
        on_event(ErrorEvent(self._error, GenerationResult([1], "a", "interrupted", make_stats())))
        return SimpleNamespace(cancel=lambda: None)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (BudgetError("memory ran out"), 503, "memory ran out"),
        (NumericalError("NaN logits"), 500, "NaN logits"),
        (KeyError("a secret of ours"), 500, "the server has failed at this request"),
        (QueueFullError("two wait", 2.5), 429, "two wait"),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_errors_of_a_run_have_a_status(
    short_target: Path, error: Exception, status: int, message: str, at_once: bool
) -> None:
    async def ask(runtime: Runtime) -> tuple[httpx.Response, httpx.Response]:
        service = Service(ServerConfig())
        service.begin(runtime, FailingScheduler(error, at_once=at_once), MODEL)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(make_app(service, ServerConfig()), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            body = {"prompt": "a", "max_tokens": 2}
            asked = await http.post("/v1/completions", json=body)
            return asked, await http.post("/v1/completions", json={**body, "stream": True})

    with load(short_target, draft="none") as runtime:
        whole, stream = asyncio.run(ask(runtime))
    assert whole.status_code == status and whole.json()["error"]["message"] == message
    assert "default-src 'none'" in whole.headers["content-security-policy"]
    if status == 429:
        assert whole.headers["retry-after"] == "3"
    if at_once:
        assert stream.status_code == status
    else:  # which has begun
        *_, last = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: ")]
        assert stream.status_code == 200 and last["error"]["message"] == message


def test_health_says_that_an_engine_has_failed(short_target: Path) -> None:
    async def ask(runtime: Runtime) -> tuple[int, Any]:
        service = Service(ServerConfig())
        stopped = FailingScheduler(UnavailableError("this scheduler has stopped"), at_once=True)
        service.begin(runtime, stopped, MODEL)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(make_app(service, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            assert (await http.get("/health")).status_code == 200
            asked = await http.post("/v1/completions", json={"prompt": "a"})
            stopped.failure = RuntimeError("a defect")
            return asked.status_code, (await http.get("/health")).json()

    with load(short_target, draft="none") as runtime:
        assert asyncio.run(ask(runtime)) == (503, {"status": "failed"})


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "fastapi" else there(name, *of))
    result = CliRunner().invoke(app, ["serve", "--target", "nowhere"])
    assert result.exit_code == 2 and "fastapi: pip install 'offload-runtime[server]'" in result.stderr
