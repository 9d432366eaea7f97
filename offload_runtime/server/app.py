"""The routes: `Service` answers them with a runtime, once it is given one, and `make_app` hangs them up.

What is wrong with a request is a typed error here as everywhere, and becomes a status and OpenAI's error object in one
place (`_respond_to`).
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from sse_starlette.sse import EventSourceResponse

from offload_runtime.errors import (
    BudgetError,
    ContextLengthError,
    OffloadError,
    OptionError,
    QueueFullError,
    UnavailableError,
)
from offload_runtime.params import GenerationParams
from offload_runtime.server.answers import Answers, Choice, unless_gone
from offload_runtime.server.config import ServerConfig
from offload_runtime.server.gate import App, Gate, error_body
from offload_runtime.server.metrics import Metrics
from offload_runtime.server.protocol import Ending, Envelope, TokenSpelling, usage_of
from offload_runtime.server.schema import (
    AnswerBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    RequestError,
    TokenizeBody,
)

if TYPE_CHECKING:
    from offload_runtime.engine import Runtime, Scheduler

_PAGE = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
    "/page.svg": ("page.svg", "image/svg+xml"),
}
_PING_S = 15  # proxies give up on silent connections after a minute
_SEND_S = 60  # for a client that reads no more
_RETRY_S = 5  # while a model is loaded
_GONE, _HAS_LEFT = 499, "the client has left"  # as nginx says
State = Literal["loading", "ready", "stopping", "failed"]
T = TypeVar("T")


def sampling_defaults(runtime: Runtime) -> dict[str, Any]:
    """How tokens are chosen where a request does not say: fields of `SamplingParams`, as the model's makers want them.
    OpenAI's temperature is 1."""
    return {"temperature": 1.0, **runtime.sampling_defaults}


class ModelNotFoundError(OptionError):
    """A request names another model than the one that is served."""


class _AnswerStream(EventSourceResponse):
    """A stream of server-sent events, whose answers end with it, be it by the client's leaving."""

    def __init__(self, chunks: AsyncIterator[dict[str, str]], answers: Answers) -> None:
        super().__init__(chunks, ping=_PING_S, sep="\n", send_timeout=_SEND_S, headers={"X-Accel-Buffering": "no"})
        self._answers = answers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.cancel()


class Service:
    """Answers requests, in the event loop's thread; `begin` and `state` are for the thread that made it.

    Args:
        config: Limits of requests.
        log: Called with a line for each request.

    Attributes:
        state: Whether there is a model yet, or no more.
    """

    def __init__(self, config: ServerConfig, log: Callable[[str], None] = lambda line: None) -> None:
        self._config, self._log = config, log
        self.state: State = "loading"
        self.metrics = Metrics(lambda: None if self._scheduler is None else self._scheduler.counters)
        self._runtime: Runtime | None = None
        self._scheduler: Scheduler | None = None
        self._models: tuple[str, ...] = ()
        self._begun_s = 0
        self._defaults: Mapping[str, Any] = {}
        # Reads prompts, one at a time: a long one takes a second, which the event loop must not wait.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        # Compiles grammars, one at a time: a large one takes seconds, which other prompts must not wait.
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def begin(self, runtime: Runtime, scheduler: Scheduler, *models: str) -> None:
        """Serve a model by these names from here on, the first of which it answers by."""
        self._runtime, self._scheduler, self._models = runtime, scheduler, models
        self._begun_s, self._defaults = int(time.time()), sampling_defaults(runtime)
        self.state = "ready"

    def close(self) -> None:
        """Let go of the readers' threads, once no request is answered any more."""
        for pool in (self._reader, self._compiler):
            pool.shutdown(wait=False, cancel_futures=True)

    def _ready(self) -> tuple[Runtime, Scheduler]:
        """What answers. Raises `UnavailableError` while there is none."""
        if self.state != "ready" or self._runtime is None or self._scheduler is None:
            raise UnavailableError(f"the server is {self.state}: try again later")
        return self._runtime, self._scheduler

    def _named(self, model: str | None) -> None:
        if model is not None and model not in self._models:
            names = ", ".join(map(repr, self._models))
            raise ModelNotFoundError(f"model {model!r} is not served here, but {names}")

    async def _read(self, request: Request, read: Callable[[Any], T]) -> T:
        """The JSON body of a request as `read` makes something of it, in the reader's thread. Raises `OptionError`."""
        raw = await request.body()

        def work() -> T:
            try:
                body = json.loads(raw, parse_constant=_refuse_constant, object_pairs_hook=_named_once)
            except RequestError:
                raise
            except (ValueError, RecursionError) as error:
                raise RequestError(f"the body is not JSON: {str(error)[:200]}") from error
            return read(body)

        return await asyncio.get_running_loop().run_in_executor(self._reader, work)

    # --- answers

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._answer(request, ChatBody)

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._answer(request, CompletionBody)

    async def _answer(self, request: Request, kind: type[AnswerBody]) -> Response:
        runtime, scheduler = self._ready()
        began_s = time.perf_counter()
        body, choices = await self._read(request, lambda value: self._choices(kind.read(value)))
        tell = partial(self._tell, request, began_s, body.n, body.unread_options(runtime))
        answers = Answers(scheduler, choices, self.metrics, self._config.max_seconds)
        # Judges the prompts again, of which long ones take a while.
        pool = self._compiler if choices[0].params.sampling.has_grammar else self._reader
        await asyncio.get_running_loop().run_in_executor(pool, answers.submit)
        envelope = Envelope(self._models[0], TokenSpelling(runtime.tokenizer), is_chat=kind is ChatBody)
        if body.stream:
            return _AnswerStream(self._chunks(answers, envelope, body, len(choices), tell), answers)
        whole = await unless_gone(answers.whole(), request.receive)
        if whole is None:
            tell(_GONE, [], _HAS_LEFT)
            return Response(status_code=_GONE)  # nobody reads it
        endings = [ending for _, ending in whole]
        tell(200, endings)
        return JSONResponse(envelope.whole(whole, usage_of(endings, body.n)))

    def _tell(
        self, request: Request, began_s: float, num_choices: int, unread: Sequence[str], status: int,
        endings: Sequence[Ending], message: str = "",
    ) -> None:  # fmt: skip
        """Log a line about a request that was answered, or why it was not."""
        parts = [f"{request.method} {request.url.path} {status}"]
        if endings:
            usage = usage_of(endings, num_choices)
            tok_per_s = sum(ending.stats["tok_per_s"] or 0 for ending in endings)
            parts += [f"prompt {usage['prompt_tokens']} tokens", f"{usage['completion_tokens']} tokens"]
            parts += [f"{tok_per_s:.1f} tokens/s"] if tok_per_s else []  # one token has no rate
        elif status != 200:
            parts.append(message)
        if unread:
            parts.append(f"chat_template_kwargs that the template does not read: {', '.join(unread)[:100]}")
        self._log(" · ".join([*parts, f"{time.perf_counter() - began_s:.2f} s"]))

    def _choices(self, body: AnswerBody) -> tuple[AnswerBody, list[Choice]]:
        """What a request asks for: `n` answers to each prompt, with the noise ids 0, 1, … Raises `OptionError`."""
        runtime, _ = self._ready()
        self._named(body.model)
        if body.x_sources and not body.stream:
            raise RequestError("x_sources is for streams", "x_sources")
        prompts, most = body.prompts(runtime), runtime.plan.target.batch + self._config.max_waiting
        if len(prompts) * body.n > most:
            asked = f"{len(prompts)} prompts with {body.n} answers each"
            raise RequestError(f"{asked} are more than the {most} requests that this server holds", "n")
        options, choices = body.template_options(runtime), list[Choice]()
        grammar = body.grammar_params(runtime.tokenizer)
        first: GenerationParams | None = None
        for prompt in prompts:
            tokens = runtime.encode(prompt, template_options=options or None)
            room = runtime.context_tokens - len(tokens)
            params = body.params(self._defaults, room, self._config.max_tokens)
            if params.max_new_tokens > room:
                asked, remedy = f" and max_tokens is {params.max_new_tokens}", "shorten one of them"
                if room < 1:
                    asked, remedy = " and leaves no room for an answer", "shorten it"
                full = f"the prompt has {len(tokens)} tokens{asked}, the context {runtime.context_tokens}"
                raise ContextLengthError(f"{full}: {remedy}")
            first = first or params
            for noise_id in range(body.n):  # of one seed, if it is a random one
                sampling = replace(params.sampling, seed=first.sampling.seed, noise_id=noise_id, **grammar)
                parser = body.parser(runtime.tokenizer, tokens, is_bound=sampling.has_grammar)
                echo = body.echo_of(runtime.tokenizer, prompt)
                is_alone = echo is not None and body.max_tokens == 0
                choices.append(Choice(tokens, replace(params, sampling=sampling), parser, echo, is_alone))
        return body, choices

    async def _chunks(
        self, answers: Answers, envelope: Envelope, body: AnswerBody, count: int,
        tell: Callable[[int, Sequence[Ending], str], None],
    ) -> AsyncIterator[dict[str, str]]:  # fmt: skip
        """The events of a stream; an error is the last one of them."""
        endings, status, message = list[tuple[int, Ending]](), _GONE, _HAS_LEFT
        try:
            for index in range(count) if isinstance(body, ChatBody) else ():
                yield _event(envelope.opening(index))
            async for part in answers:
                delta, ending = part.delta, part.ending
                endings += [(part.index, ending)] if ending is not None else []
                wanted = (
                    delta.text or delta.reasoning or delta.calls or delta.logprobs or (body.x_sources and delta.tokens)
                )
                if wanted or ending is not None:
                    yield _event(
                        envelope.chunk(
                            part.index, delta, ending, first_call=part.first_call, with_sources=body.x_sources
                        )
                    )
            endings.sort(key=lambda one: one[0])
            status = 200
            if body.includes_usage:
                yield _event(envelope.usage_chunk(usage_of([ending for _, ending in endings], body.n)))
            yield {"data": "[DONE]"}
        except Exception as error:
            status, body_of_error, _ = _error_of(error)
            message = body_of_error["error"]["message"]
            self.metrics.refused(status)
            yield _event(body_of_error)
            if not isinstance(error, OffloadError):
                raise
        finally:
            tell(status, [ending for _, ending in endings] if status == 200 else [], message)

    # --- what else there is to ask

    async def models(self) -> Response:
        """`GET /v1/models`."""
        self._ready()
        return JSONResponse({"object": "list", "data": [self._about(name) for name in self._models]})

    async def model(self, name: str) -> Response:
        """`GET /v1/models/NAME`."""
        self._ready()
        self._named(name)
        return JSONResponse(self._about(name))

    def _about(self, name: str) -> dict[str, Any]:
        runtime, _ = self._ready()
        about = {"id": name, "object": "model", "created": self._begun_s, "owned_by": "offload-runtime"}
        return {**about, "max_model_len": runtime.context_tokens}

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: token ids of a text or of messages."""
        runtime, _ = self._ready()

        def read(value: Any) -> list[int]:
            body = TokenizeBody.read(value)
            self._named(body.model)
            return runtime.encode(body.prompt_once(runtime), template_options=body.chat_template_kwargs)

        tokens = await self._read(request, read)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": runtime.context_tokens})

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`: the text of token ids, control tokens as they are spelled."""
        runtime, _ = self._ready()

        def read(value: Any) -> str:
            body = DetokenizeBody.read(value)
            self._named(body.model)
            tokens = runtime.encode(body.tokens)  # judges them
            return str(runtime.tokenizer.decode(tokens, skip_special_tokens=False))

        return JSONResponse({"prompt": await self._read(request, read)})

    async def health(self) -> Response:
        """`GET /health`: 200 once requests are answered, 503 before and after."""
        if self.state == "ready" and self._scheduler is not None and self._scheduler.failure is not None:
            self.state = "failed"  # by a defect: whoever watches starts another one
        return JSONResponse({"status": self.state}, 200 if self.state == "ready" else 503)

    async def figures(self) -> Response:
        """`GET /metrics`, for Prometheus."""
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    def respond_to(self, request: Request, error: Exception) -> Response:
        """What a request that ended by an error is answered."""
        status, body, headers = _error_of(error)
        self.metrics.refused(status)
        self._log(f"{request.method} {request.url.path[:100]} {status}: {body['error']['message']}")
        return JSONResponse(body, status, headers)


def make_app(service: Service, config: ServerConfig) -> App:
    """The application of a service, behind its gate."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)  # whose pages of documentation load from elsewhere
    for path, answer in (
        ("/v1/chat/completions", service.chat), ("/v1/completions", service.complete),
        ("/tokenize", service.tokenize), ("/detokenize", service.detokenize),
    ):  # fmt: skip
        app.post(path, response_model=None)(answer)
    app.get("/v1/models", response_model=None)(service.models)
    app.get("/v1/models/{name:path}", response_model=None)(service.model)
    app.get("/health", response_model=None)(service.health)
    app.get("/metrics", response_model=None)(service.figures)
    for path, (name, media_type) in _PAGE.items():
        app.get(path, response_model=None)(_constant(Path(__file__).with_name(name).read_bytes(), media_type))

    async def respond(request: Request, error: Exception) -> Response:
        return service.respond_to(request, error)

    for kind in (OffloadError, HTTPException, 404, 405, Exception):
        app.add_exception_handler(kind, respond)
    gate = Gate(app, config)
    if not config.cors_origins:
        return gate
    return CORSMiddleware(  # around the gate, so that a page can read its refusals, too
        gate, allow_origins=list(config.cors_origins), allow_methods=["GET", "POST"], allow_headers=["*"],
        expose_headers=["retry-after"],
    )  # fmt: skip


def _constant(content: bytes, media_type: str) -> Callable[[], Any]:
    async def answer() -> Response:
        return Response(content, media_type=media_type)

    return answer


def _event(value: dict[str, Any]) -> dict[str, str]:
    return {"data": json.dumps(value)}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, none of whose keys is there twice: readers do not agree on which of them counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for number, name in enumerate(names) if name in names[:number])[:100]
        raise RequestError(f"the body has the key {twice!r} twice in one object: give it once", twice)
    return found


def _error_of(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers that tell of an error."""
    headers, code = dict[str, str](), None
    if isinstance(error, ModelNotFoundError):
        status, code = 404, "model_not_found"
    elif isinstance(error, UnavailableError | BudgetError):
        status, headers = 503, {"retry-after": str(_RETRY_S)}
    elif isinstance(error, OptionError):
        status = 400
    elif isinstance(error, ContextLengthError):
        status, code = 400, "context_length_exceeded"
    elif isinstance(error, QueueFullError):
        status, headers = 429, {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    elif hasattr(error, "status_code"):  # of the web framework
        status = int(error.status_code)
        return status, error_body(status, str(getattr(error, "detail", error))), headers
    else:
        status = 500
    # What a defect says is for the log.
    message = str(error) if isinstance(error, OffloadError) else "the server has failed at this request"
    return status, error_body(status, message, getattr(error, "param", None), code), headers
