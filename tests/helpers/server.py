"""A server on a small runtime, and clients of it."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
from openai import OpenAI

from offload_runtime.config import ServerConfig
from offload_runtime.engine import (
    EndEvent,
    ErrorEvent,
    GenerationResult,
    Runtime,
    Scheduler,
    SchedulerCounters,
    TokenEvent,
)
from offload_runtime.errors import OffloadError
from offload_runtime.params import GenerationParams
from offload_runtime.server.app import Server, make_app
from offload_runtime.server.service import Service
from offload_runtime.server.turns import OfferedModel
from offload_runtime.weights.sources import open_checkpoint
from tests.helpers.engine import load
from tests.test_cli_fakes import make_stats

MODEL = "small"


@dataclass(frozen=True)
class Served:
    """A server that answers, what it answers with, and who asks."""

    url: str
    runtime: Runtime
    scheduler: Scheduler
    http: httpx.Client
    openai: OpenAI

    def chat(self, **fields: Any) -> httpx.Response:
        """A request of the chat, for four tokens if nothing else is asked."""
        usual = {"messages": [{"role": "user", "content": "the quick brown fox"}], "max_tokens": 4, "temperature": 0}
        return self.http.post("/v1/chat/completions", json={**usual, **fields})

    def ask(self, **fields: Any) -> Any:
        """The same by OpenAI's client, of all that is asked."""
        return self.openai.chat.completions.create(**{"model": MODEL, **fields})


class Scripted:
    """A scheduler that says the same to everybody, a piece a token; where it has no pieces, `other` answers.

    Attributes:
        sources: Who proposes the pieces, in turns.
        finish_reason: How answers end; empty where they do not.
        error: What it fails with behind the pieces, if there is one.
        prompts: What it was asked.
    """

    def __init__(self, pieces: Sequence[str] | None = None, other: Scheduler | None = None) -> None:
        self.pieces, self.other, self.stop_string = pieces, other, ""
        self.sources, self.finish_reason = ["target"], "stop"
        self.error: OffloadError | None = None
        self.prompts, self.params = list[list[int]](), list[GenerationParams]()
        self.counters, self.failure = SchedulerCounters(), None

    def submit(self, prompt: list[int], params: GenerationParams, *, on_event: Any) -> Any:
        self.prompts.append(prompt)
        self.params.append(params)
        if self.pieces is None:
            assert self.other is not None
            return self.other.submit(prompt, params, on_event=on_event)
        for piece, source in zip(self.pieces, cycle(self.sources), strict=False):
            on_event(TokenEvent(1, piece, source))
        if self.error is not None:
            on_event(ErrorEvent(self.error, None))
        elif self.finish_reason:
            stats = make_stats(prompt_tokens=len(prompt), new_tokens=len(self.pieces), kept_tokens=2)
            result = GenerationResult([1] * len(self.pieces), "".join(self.pieces), self.finish_reason, stats)
            on_event(EndEvent(replace(result, stop_string=self.stop_string or None)))
        return SimpleNamespace(cancel=lambda: None)


@contextmanager
def serving(target: Path, *, load_options: dict[str, Any] | None = None, **config: Any) -> Iterator[Served]:
    """Serve a checkpoint on a free port."""
    options = {"draft": "ngram", "max_batch": 2, **(load_options or {})}
    key = config.get("api_key")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with (
        load(target, **options) as runtime,
        Server(ServerConfig(**{"port": 0, "grace_s": 0.0, **config})) as server,
        server.serving(runtime, MODEL) as scheduler,
        httpx.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False) as client,
        httpx.Client(trust_env=False) as own,
        OpenAI(
            base_url=f"{server.url}/v1", api_key=key or "none", max_retries=0, timeout=60, http_client=own
        ) as openai,
    ):
        yield Served(server.url, runtime, scheduler, client, openai)


@dataclass
class Spoken:
    """A server whose answers may be scripted."""

    url: str
    runtime: Runtime
    scripted: Scripted
    http: httpx.Client
    openai: OpenAI

    @property
    def prompt(self) -> str:
        """The last prompt."""
        return str(self.runtime.tokenizer.decode(self.scripted.prompts[-1]))

    def chat(self, **fields: Any) -> Any:
        """The same answer as a chat of OpenAI's."""
        asked = {"messages": [{"role": "user", "content": "hot?"}], "temperature": 0, **fields}
        return self.http.post("/v1/chat/completions", json=asked).json()


@contextmanager
def speaking(directory: Path, *, context: int = 512, **config: Any) -> Iterator[Spoken]:
    """Serve a checkpoint, whose answers are its own until they are scripted."""
    with load(directory, draft="none", context=context) as runtime, Scheduler(runtime) as scheduler:
        scripted, settings = Scripted(other=scheduler), ServerConfig(port=0, **config)
        service = Service(settings)
        service.models.begin(runtime, scripted, MODEL)  # type: ignore[arg-type]
        http = uvicorn.Server(uvicorn.Config(make_app(service, settings), port=0, log_config=None, lifespan="off"))
        thread = threading.Thread(target=http.run)
        thread.start()
        wait_until(lambda: http.started)
        url = f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}"
        try:
            with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
                openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=client)
                yield Spoken(url, runtime, scripted, client, openai)
        finally:
            http.should_exit = True
            thread.join()
            service.close()


class Turns:
    """A server of small models that take turns, in a thread of its own.

    Attributes:
        lines: Its log.
        broken: What loading the model of a name fails with.
        may_load: Unless it is set, loading waits.
        unloads: Names, as their memory has been given back.
    """

    def __init__(self, targets: Mapping[str, Path], **config: Any) -> None:
        self.lines, self.unloads, self.broken = list[str](), list[str](), dict[str, Exception]()
        self._targets, self.may_load = targets, threading.Event()
        self.may_load.set()
        offered = [self._offered(name, path) for name, path in targets.items()]
        self._server = Server(ServerConfig(**{"port": 0, "grace_s": 0.0, **config}), self.lines.append, models=offered)
        self.url, self._is_over = self._server.url, threading.Event()
        self._thread = threading.Thread(target=self._server.serve_in_turns, args=(self._load, self._is_over.is_set))
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=self.http)

    def _offered(self, name: str, path: Path) -> OfferedModel:
        source = open_checkpoint(path)
        layout = source.layout(source.native_dtype)
        return OfferedModel.described(
            (name,), source.tokenizer(), architecture=source.config().architecture, stored_as=layout.stored_as,
            weight_bytes=layout.total_bytes, defaults={}, context_tokens=512,
        )  # fmt: skip

    @contextmanager
    def _load(self, model: OfferedModel) -> Iterator[Runtime]:
        (name,) = model.names
        self.may_load.wait()
        if name in self.broken:
            raise self.broken[name]
        with load(self._targets[name], draft="ngram", max_batch=2, context=512) as runtime:
            yield runtime
        self.unloads.append(name)

    def __enter__(self) -> "Turns":
        self._thread.start()
        return self

    def stop(self) -> None:
        """End it as Ctrl-C does."""
        self._is_over.set()
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.http.close()
        self._server.close()

    def chat(self, model: str, **fields: Any) -> Any:
        """Four tokens of a model, by OpenAI's client."""
        usual = {"messages": [{"role": "user", "content": "the quick brown fox"}], "max_tokens": 4, "temperature": 0}
        return self.openai.chat.completions.create(**{"model": model, **usual, **fields})

    def figure(self, name: str) -> float:
        """A figure of /metrics, 0 before there is any."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"offload_runtime_{name}"))


def events_of(response: httpx.Response) -> Iterator[Any]:
    """The JSON values of a stream, which has to end as OpenAI's do."""
    is_done = False
    for line in response.iter_lines():
        if not line.startswith("data: "):
            continue
        assert not is_done
        data = line.removeprefix("data: ")
        is_done = data == "[DONE]"
        if not is_done:
            yield json.loads(data)
    assert is_done


def wait_until(reached: Callable[[], bool]) -> None:
    """Wait for what has to come, a minute at the most."""
    end_s = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end_s, "it did not come"
        time.sleep(0.01)


@contextmanager
def asked_and_stopped(port: int, ask: Callable[[str], None]) -> Iterator[None]:
    """Within, a thread asks a server of this process, by its URL, as soon as it is ready, and ends it by SIGTERM."""

    def ask_and_stop() -> None:
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until(lambda: is_ready(url))
            ask(url)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask_and_stop)
    asking.start()
    yield
    asking.join()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", verify=False, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
