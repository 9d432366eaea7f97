"""A server of several models, of which one is loaded at a time: the one that is asked for."""

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from typer.testing import CliRunner

from offload_runtime.cli.app import app
from offload_runtime.config import ServerConfig
from offload_runtime.errors import BudgetError, CheckpointError, OptionError
from tests.helpers.engine import PROMPT, load
from tests.helpers.hosts import free_port
from tests.helpers.server import Turns, asked_and_stopped, is_ready, wait_until

MESSAGES: Any = [{"role": "user", "content": "the quick brown fox"}]
# Longer than any test waits.
ENDLESS: dict[str, Any] = {
    "model": "one", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "temperature": 1.0, "seed": 1,
    "stream": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def targets(two_layer_target: Path, one_layer_draft: Path) -> dict[str, Path]:
    return {"one": two_layer_target, "two": one_layer_draft}


@pytest.fixture
def turns(targets: dict[str, Path]) -> Iterator[Turns]:
    with Turns(targets) as turns:
        yield turns


def statuses(turns: Turns) -> dict[str, str]:
    return {one["id"]: one["x_status"] for one in turns.http.get("/v1/models").json()["data"]}


def test_each_model_answers_as_it_does_alone(turns: Turns, targets: dict[str, Path]) -> None:
    expected = {}
    for name, path in targets.items():
        with load(path, draft="none") as runtime:
            expected[name] = runtime.generate(MESSAGES, max_new_tokens=4).text
    assert expected["one"] != expected["two"]
    assert statuses(turns) == {"one": "unloaded", "two": "unloaded"} and is_ready(turns.url)
    for name in ("one", "two", "two", "one"):
        answer = turns.chat(name)
        assert (answer.model, answer.choices[0].message.content) == (name, expected[name])
        assert statuses(turns) == {one: "loaded" if one == name else "unloaded" for one in targets}
    assert [line for line in turns.lines if "loading" in line] == [
        "loading one", "unloading one", "loading two", "unloading two", "loading one",
    ]  # fmt: skip
    assert turns.figure("requests_finished_total") == 4  # of both
    # Of the one that is asked for, by any API; without a name, of the first.
    for path, body in (
        ("/v1/completions", {"prompt": "the fox", "max_tokens": 2}), ("/v1/responses", {"input": "the fox"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2}), ("/api/chat", {"messages": MESSAGES}),
        ("/api/generate", {"prompt": "the fox"}), ("/tokenize", {"prompt": "the fox"}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ):  # fmt: skip
        bound = {"/v1/responses": {"max_output_tokens": 2}, "/api": {"options": {"num_predict": 2}, "stream": False}}
        body |= next((more for start, more in bound.items() if path.startswith(start)), {})
        assert turns.http.post(path, json={"model": "two", **body}).status_code == 200
        assert statuses(turns)["two"] == "loaded", path
        refused = turns.http.post(path, json={"model": "three", **body})
        assert refused.status_code == 404 and "'three' is not served here, but 'one', 'two'" in refused.text
    assert turns.http.post("/v1/completions", json={"prompt": "a"}).json()["model"] == "one"


def begun(response: httpx.Response) -> Iterator[str]:
    """The lines of a stream whose answer has begun; whoever drops them closes it."""
    lines = response.iter_lines()
    while not next(lines).startswith("data: "):
        pass
    return lines


def test_whoever_waits_is_told_and_served_in_turn(turns: Turns) -> None:
    """Requests for the model that is loaded do not overtake one for another; but all that wait for a model by then are
    answered together."""

    def ask(**fields: Any) -> Any:
        return turns.http.stream("POST", "/v1/completions", json={**ENDLESS, **fields})

    with ThreadPoolExecutor() as pool, ask() as running, ExitStack() as leaving:
        _ = begun(running)
        waiting = []
        for number, name in enumerate(("two", "one", "two", "one"), start=1):
            body = {"model": name, "messages": MESSAGES, "max_tokens": 2}
            waiting.append(pool.submit(turns.http.post, "/v1/chat/completions", json=body))
            wait_until(lambda: turns.figure("requests_waiting") == number)  # noqa: B023
        lines = leaving.enter_context(ask(model="two")).iter_lines()
        assert next(lines) == ": waiting until requests for one are answered"
        turns.may_load.clear()
        running.close()
        assert [line for line in (next(lines) for _ in range(3)) if line] == [": loading two"]
        address = (running.url.host, running.url.port)
        with socket.create_connection(address, timeout=60) as silent:  # asks, and leaves before there is a byte
            body = json.dumps({"model": "two", "prompt": "a"})
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            silent.sendall(f"{head}{body}".encode())
            wait_until(lambda: turns.figure("requests_waiting") == 6)
        wait_until(lambda: turns.figure("requests_waiting") == 5)
        leaving.close()
        wait_until(lambda: turns.figure("requests_waiting") == 4)
        turns.may_load.set()
        assert [one.result().status_code for one in waiting] == [200] * 4
    answered_by_two = turns.lines[: turns.lines.index("unloading two")]
    assert sum("completions 200" in line for line in answered_by_two) == 2
    assert turns.lines.count("loading one") == 2 and turns.figure('model_loads_total{model="two"}') == 1


def test_a_model_that_cannot_be_loaded_is_an_error_of_its_requests(turns: Turns) -> None:
    turns.broken["one"] = CheckpointError("a shard is missing")
    with pytest.raises(openai.InternalServerError, match="one cannot be loaded: a shard is missing") as refused:
        turns.chat("one")
    assert refused.value.code == "model_load_failed"
    with pytest.raises(openai.APIError, match="a shard is missing"):
        list(turns.chat("one", stream=True))
    turns.broken["one"] = BudgetError("it needs 9 GB")
    refused_now = turns.http.post("/v1/messages", json={"model": "one", "messages": MESSAGES, "max_tokens": 1})
    assert refused_now.status_code == 503 and refused_now.json()["error"]["type"] == "overloaded_error"
    turns.broken["one"] = ZeroDivisionError("a defect")
    assert turns.http.post("/api/generate", json={"model": "one", "prompt": "a"}).json() == {
        "error": "one cannot be loaded: the server has failed at it"
    }
    assert turns.chat("two").choices[0].message.content and is_ready(turns.url)
    del turns.broken["one"]
    assert turns.chat("one").choices[0].message.content


def test_a_model_goes_when_it_was_kept_for_long_enough(targets: dict[str, Path]) -> None:
    def running(turns: Turns) -> list[Any]:
        found: list[Any] = turns.http.get("/api/ps").json()["models"]
        return found

    with Turns(targets, keep_alive="0") as turns:
        assert turns.chat("one").usage.completion_tokens == 4
        wait_until(lambda: turns.unloads == ["one"])
        assert running(turns) == []
        # ollama's clients say themselves how long.
        loaded = turns.http.post("/api/generate", json={"model": "two:latest", "keep_alive": "1h"}).json()
        assert loaded["done_reason"] == "load"
        (model,) = running(turns)
        assert model["name"] == "two" and model["size_vram"] > 0 and model["expires_at"]
        assert {one["name"]: one["x_status"] for one in turns.http.get("/api/tags").json()["models"]} == {
            "one": "unloaded", "two": "loaded",
        }  # fmt: skip
        # What is said of a model does not load it.
        shown = turns.http.post("/api/show", json={"model": "one"}).json()
        assert shown["template"] and [one["name"] for one in running(turns)] == ["two"]
        gone = turns.http.post("/api/chat", json={"model": "two", "keep_alive": 0}).json()
        assert gone["done_reason"] == "unload"
        wait_until(lambda: turns.unloads == ["one", "two"])
        bad = turns.http.post("/api/chat", json={"model": "two", "messages": MESSAGES, "keep_alive": "soon"})
        assert bad.status_code == 400 and "is not a duration" in bad.text
    with Turns(targets, keep_alive="-1") as turns:
        turns.chat("one")
        assert running(turns)[0]["expires_at"] is None
    assert turns.unloads == ["one"]


@pytest.mark.parametrize("stays", [False, True])
def test_what_was_read_of_prompts_stays_on_disk_alone(targets: dict[str, Path], tmp_path: Path, stays: bool) -> None:
    """A session's blocks are there when the model is loaded again; those of a prefix cache go with it."""
    kept: dict[str, Any] = {"sessions": tmp_path / "kept"} if stays else {"prefix_cache_bytes": 100_000_000}
    with Turns(targets, **kept) as turns:
        body = {"model": "one", "prompt": [7 * number % 300 for number in range(400)], "max_tokens": 2}
        found = []
        for name in ("one", "one", "two", "one"):
            answer = turns.http.post("/v1/completions", json={**body, "model": name}).json()
            found.append(answer["choices"][0]["x_stats"]["kept_tokens"])
    assert found == [0, 399, 0, 256 if stays else 0]


@pytest.mark.parametrize(("text", "seconds"), [
    ("5m", 300.0), ("1h30m", 5400.0), ("90", 90.0), ("1.5s", 1.5), ("0", 0.0), ("-1", float("inf")),
    ("-1m", float("inf")), ("250ms", 0.25),
])  # fmt: skip
def test_durations_are_ollamas(text: str, seconds: float) -> None:
    assert ServerConfig(keep_alive=text).keep_alive_s == seconds


@pytest.mark.parametrize("text", ["", "soon", "5 minutes", "m", "1.2.3", "1d", "."])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"is not a duration: write it like 5m"):
        ServerConfig(keep_alive=text)


def test_one_that_stops_refuses_those_who_wait(turns: Turns) -> None:
    with ThreadPoolExecutor() as pool, turns.http.stream("POST", "/v1/completions", json=ENDLESS) as running:
        lines = begun(running)
        refused = pool.submit(turns.http.post, "/v1/completions", json={"model": "two", "prompt": "a"})
        wait_until(lambda: turns.figure("requests_waiting") == 1)
        turns.stop()
        assert refused.result().status_code == 503 and "stopping" in refused.result().text
        assert "data: [DONE]" in list(lines)  # no grace: it ends as it is
    assert turns.http.get("/health").json() == {"status": "stopping"} and turns.unloads == ["one"]


def command(targets: dict[str, Path], port: int, *words: str) -> list[str]:
    models = [word for path in targets.values() for word in ("--target", str(path))]
    return ["serve", *models, "--device", "cpu", "--port", str(port), "--no-progress", *words]


@pytest.mark.parametrize("is_loaded", [False, True])
def test_the_command_serves_models_in_turn_until_sigterm(targets: dict[str, Path], is_loaded: bool) -> None:
    port, answers = free_port(), list[Any]()

    def ask(url: str) -> None:
        for name in ("b", "a") if is_loaded else ():
            body = {"model": name, "prompt": "the fox", "max_tokens": 2}
            answers.append(httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=60).json())

    names = ("--served-model-name", "a", "--served-model-name", "b")
    with asked_and_stopped(port, ask):
        result = CliRunner().invoke(app, command(targets, port, *names, "--context", "64"))
    assert result.exit_code == 0, result.stderr
    assert [answer["model"] for answer in answers] == ["b", "a"] * is_loaded
    assert "ready: a, b, each loaded when it is asked for" in result.stderr and result.stderr.endswith("stopped\n")
    assert result.stderr.count("unloading ") == result.stderr.count("\nloaded ") == len(answers)


@pytest.mark.parametrize(("words", "message"), [
    (["--draft", "org/small"], "--draft org/small drafts for one model, and there are 2"),
    (["--served-model-name", "a"], "1 --served-model-name for 2 models"),
    (["--served-model-name", "a", "--served-model-name", "a"], "two models are called 'a'"),
    (["--trace", "t.json"], "--trace is of one model that stays"), (["--keep-alive", "soon"], "is not a duration"),
])  # fmt: skip
def test_what_several_models_cannot_have_is_refused(targets: dict[str, Path], words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, command(targets, 0, *words))
    assert result.exit_code == 2 and message in result.stderr


@contextmanager
def process_of(targets: dict[str, Path]) -> Iterator[tuple[subprocess.Popen[str], Callable[[str], None], httpx.Client]]:
    """The command as people run it, what waits for a line of its log, and a client of it."""
    port = free_port()
    names = [word for name in targets for word in ("--served-model-name", name)]
    words = [sys.executable, "-m", "offload_runtime", *command(targets, port, *names, "--context", "512")]
    with (
        subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http,
    ):
        assert process.stderr is not None
        lines = process.stderr

        def come_to(beginning: str) -> None:
            assert any(line.startswith(beginning) for line in lines), f"{beginning} did not come"

        try:
            yield process, come_to, http
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("line", ["ready:", "loading one", "POST "])
def test_a_signal_ends_it_whatever_it_is_at(targets: dict[str, Path], line: str) -> None:
    with process_of(targets) as (process, come_to, http), ThreadPoolExecutor() as pool:
        if line != "ready:":
            come_to("ready:")
            pool.map(lambda name: http.post("/v1/completions", json={"model": name, "prompt": "a"}), ("one", "two"))
        come_to(line)
        process.send_signal(signal.SIGTERM)
        come_to("stopped")
        assert process.wait(60) == 0


@pytest.mark.slow
def test_many_turns_leave_nothing_behind(targets: dict[str, Path]) -> None:
    """Memory, threads and files of the process stay what they were, while clients leave in the middle."""
    with process_of(targets) as (process, come_to, http):
        come_to("ready:")
        # Nothing may wait for its log to be read.
        threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True).start()
        server, held = psutil.Process(process.pid), list[tuple[int, int, int]]()
        for _ in range(10):
            for name in targets:
                body = {"model": name, "messages": MESSAGES, "max_tokens": 4}
                response = http.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                with http.stream("POST", "/v1/completions", json={**ENDLESS, "model": name}) as stream:
                    next(stream.iter_lines())
            running = "offload_runtime_requests_running 0.0"
            wait_until(lambda: running in http.get("/metrics").text)  # noqa: B023
            held.append((server.memory_info().rss, server.num_threads(), server.num_fds()))
        (early_bytes, threads, files), (late_bytes, *late) = held[4], held[-1]
        assert late == [threads, files] and late_bytes - early_bytes < 4_000_000
