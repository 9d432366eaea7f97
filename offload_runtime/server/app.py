"""The application and the socket: `make_app` hangs up the routes of a `Service`, and `Server` has a socket, a thread
with the event loop, and a model that is served while it is there, or several that take turns."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response

from offload_runtime import __version__, errors
from offload_runtime.config import SOURCES, ServerConfig
from offload_runtime.engine import Scheduler
from offload_runtime.errors import BudgetError, OffloadError, UnavailableError
from offload_runtime.server import anthropic, documentation, ollama, responses, schema
from offload_runtime.server.gate import App, Gate
from offload_runtime.server.service import Service
from offload_runtime.server.turns import LoadedModel, ModelLoadError, OfferedModel, Turns

if TYPE_CHECKING:
    from offload_runtime.engine import Runtime

    Load = Callable[[OfferedModel], AbstractContextManager[Runtime]]


# The page to chat with, in the folder `page`; other files there are licences.
_PAGE = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}


def make_app(service: Service, config: ServerConfig) -> App:
    """Make the application of a service, behind its gate."""
    # Whose own pages of documentation load from elsewhere.
    app = FastAPI(title="offload-runtime", version=__version__, openapi_url=None, redirect_slashes=False)
    routes: list[tuple[str, Callable[..., Any], type[schema.Body] | None]] = [
        ("/v1/chat/completions", service.chat, schema.ChatBody),
        ("/v1/completions", service.complete, schema.CompletionBody),
        ("/v1/responses", service.respond, responses.ResponsesBody),
        ("/v1/messages", service.message, anthropic.MessagesBody),
        ("/v1/messages/count_tokens", service.count_tokens, anthropic.CountBody),
        ("/tokenize", service.tokenize, schema.TokenizeBody),
        ("/detokenize", service.detokenize, schema.DetokenizeBody),
        ("/api/chat", service.ollama_chat, ollama.ChatRequest), ("/api/show", service.show, ollama.ShowRequest),
        ("/api/generate", service.ollama_generate, ollama.GenerateRequest),
        ("/v1/models", service.list_models, None), ("/v1/models/{name:path}", service.one_model, None),
        ("/api/tags", service.tags, None), ("/api/ps", service.running, None),
        ("/api/version", service.version, None), ("/version", service.version, None),
        ("/health", service.health, None), ("/metrics", service.figures, None),
    ]  # fmt: skip
    for path, answer, body in routes:
        extra = None if body is None else documentation.body_of(body)
        methods = ["GET" if body is None else "POST"]
        app.add_api_route(path, answer, methods=methods, response_model=None, openapi_extra=extra)
    document = documentation.described(app, [body for _, _, body in routes if body is not None])
    for path in ("/v1/embeddings", "/api/embed", "/api/embeddings"):
        app.add_api_route(path, service.embeddings, methods=["POST"], response_model=None)
    constants = [
        ("/openapi.json", json.dumps(document), "application/json"),
        ("/docs", documentation.page(document), "text/html"),
    ]  # fmt: skip
    for file in sorted(Path(__file__).with_name("page").iterdir()):
        if file.suffix in _PAGE:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            constants.append((path, file.read_text(encoding="utf-8"), _PAGE[file.suffix]))
    constants.append(("/page/constants.js", _page_constants(), _PAGE[".js"]))
    for path, content, media_type in constants:  # the command of ollama asks for the head of / first
        app.add_api_route(path, _constant(content, media_type), methods=["GET", "HEAD"], response_model=None)

    async def respond(request: Request, error: Exception) -> Response:
        return service.respond_to(request, error)

    for kind in (errors.OffloadError, HTTPException, 404, 405, Exception):
        app.add_exception_handler(kind, respond)
    gate = Gate(app, config)
    if not config.cors_origins:
        return gate
    return CORSMiddleware(  # around the gate, so that a page can read its refusals, too
        gate, allow_origins=list(config.cors_origins), allow_methods=["GET", "POST"], allow_headers=["*"],
        expose_headers=["retry-after"],
    )  # fmt: skip


def _page_constants() -> str:
    """Return what the page knows of the runtime: who proposes tokens, and the options of sampling."""
    options = []
    for name, one in schema.SAMPLING.items():
        assert one.option is not None, "options of requests have been declared"
        label, note = name.capitalize().replace("_", " "), one.option.note and f" {one.option.note.capitalize()}."
        step = {"step": 1} if one.hint is int else {}
        bounds = {"least": one.option.least, "most": one.option.most}
        options.append({"name": name, "label": label, "help": one.option.help + note, **bounds, **step})
    constants = {"SOURCES": SOURCES, "SAMPLING": options}
    return "".join(f"export const {name} = {json.dumps(value)};\n" for name, value in constants.items())


def _constant(content: str, media_type: str) -> Callable[[], Any]:
    async def answer() -> Response:
        return Response(content, media_type=media_type)

    return answer


_BACKLOG = 128
_MOST_CONNECTIONS = 512  # beyond these: 503; a process has 1024 files unless it asks for more
_LOOK_AGAIN_S = 0.2  # whether to stop
_LAST_WORDS_S = 5  # for responses that are being sent when all answers have ended


class Server(AbstractContextManager["Server"]):
    """Listens from the beginning, so that `/health` can say that a model is being loaded; answers within `serving`.

    Args:
        config: Where to listen and who may ask.
        log: Called with a line for each request that was answered or refused, and for each model that is loaded.
        models: That take turns (`serve_in_turns`); without any there is one, and it stays (`serving`).

    Attributes:
        url: Where it is reached.

    Raises:
        OptionError: The port is taken, or there is no such address here.
    """

    def __init__(
        self, config: ServerConfig, log: Callable[[str], None] = lambda line: None, *,
        models: Sequence[OfferedModel] = (),
    ) -> None:  # fmt: skip
        turns = Turns(models, config.max_waiting, config.keep_alive_s) if models else None
        self._config, self._log, self._service = config, log, Service(config, log, turns)
        self._turns, self._models = turns, self._service.models
        self._socket = _listen(config)
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        settings = uvicorn.Config(
            make_app(self._service, config), log_config=None, access_log=False, lifespan="off", ws="none", http="h11",
            loop="asyncio", server_header=False, proxy_headers=False, timeout_graceful_shutdown=_LAST_WORDS_S,
            limit_concurrency=_MOST_CONNECTIONS,
        )  # fmt: skip
        self._uvicorn = uvicorn.Server(settings)
        # Signals are for the main thread, and uvicorn leaves them alone in any other.
        self._thread = threading.Thread(target=self._uvicorn.run, args=([self._socket],), name="http", daemon=True)
        self._thread.start()

    @contextmanager
    def serving(self, runtime: Runtime, *models: str) -> Iterator[Scheduler]:
        """Answer requests with a runtime by these names. At the end no more are taken, and those that there are may
        finish within `grace_s`."""
        with self._scheduler(runtime) as scheduler:
            self._models.begin(runtime, scheduler, *models)
            try:
                yield scheduler
            finally:
                self._models.stop()
                scheduler.close(self._config.grace_s)

    def _scheduler(self, runtime: Runtime) -> Scheduler:
        config = self._config
        return Scheduler(
            runtime, max_waiting=config.max_waiting, prefix_cache_bytes=config.prefix_cache_bytes or 0,
            sessions=config.sessions, sessions_bytes=config.sessions_bytes,
        )  # fmt: skip

    def suspend(self) -> None:
        """Refuse requests until the next `serving`: what they were answered with is gone."""
        self._models.suspend()

    def serve_in_turns(self, load: Load, should_stop: Callable[[], bool]) -> None:
        """Load one model at a time, as requests ask for them, and answer with it, until `should_stop` says so, which is
        asked five times a second. Then answers may finish within `grace_s`.

        A model that cannot be loaded is an error for those who wait for it, and for nobody else.

        Args:
            load: Loads a model, and gives all of its memory back at the end of the context.
            should_stop: Whether to end; not asked while a model is loaded or unloaded.
        """
        assert self._turns is not None, "a server with one model has `serving`"
        self._models.open()
        try:
            while not should_stop():
                if (model := self._turns.wanted(_LOOK_AGAIN_S)) is not None:
                    self._serve_turn(model, load, should_stop)
        finally:
            self._models.stop()

    def _serve_turn(self, model: OfferedModel, load: Load, should_stop: Callable[[], bool]) -> None:
        """Load a model, answer with it until its turn is over, and unload it."""
        turns, name = self._turns, model.names[0]
        assert turns is not None
        self._log(f"loading {name}")
        try:
            with load(model) as runtime, self._scheduler(runtime) as scheduler:
                self._service.metrics.loads.labels(name).inc()
                self._models.serve(LoadedModel(model, runtime, scheduler))
                try:
                    self._answer_until_over(turns, scheduler, should_stop)
                finally:
                    self._models.forget()
                self._log(f"unloading {name}")
        except Exception as error:
            self._log(f"{name} cannot be loaded: {error}")
            if not isinstance(error, OffloadError):  # a defect, which the log has and nobody who asks
                logging.getLogger(__name__).exception("loading %s has failed", name)
            turns.fail(model, _load_error(name, error))

    def _answer_until_over(self, turns: Turns, scheduler: Scheduler, should_stop: Callable[[], bool]) -> None:
        """Let a model answer until its turn is over or the server is to stop; one that has failed stays for that."""
        while not should_stop():
            if self._models.state == "failed":
                turns.close(UnavailableError("the server has failed: start another one"))
                time.sleep(_LOOK_AGAIN_S)
            elif turns.is_over(_LOOK_AGAIN_S):
                return
        self._models.stop()
        scheduler.close(self._config.grace_s)

    def close(self) -> None:
        """Stop listening, once what is left of responses is sent."""
        self._uvicorn.should_exit = True
        self._thread.join()
        self._socket.close()
        self._service.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _load_error(name: str, error: Exception) -> OffloadError:
    """Say why a model cannot be loaded: now, for want of memory, or at all."""
    if isinstance(error, BudgetError | UnavailableError):
        return UnavailableError(f"{name} cannot be loaded now: {error}")
    why = str(error) if isinstance(error, OffloadError) else "the server has failed at it"
    return ModelLoadError(f"{name} cannot be loaded: {why}")


def _listen(config: ServerConfig) -> socket.socket:
    """Make a socket that listens where it should."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        # Only where a socket says TCP does asyncio send at once (TCP_NODELAY): else a response may wait 40 ms.
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(_BACKLOG)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise errors.OptionError(
            f"cannot listen at {config.host} port {config.port} ({error.strerror}): choose another --port, or 0"
        ) from error
    return listening
