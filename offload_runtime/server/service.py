"""`Service` answers the routes with a runtime, once it is given one, whatever protocol they are of.

What is wrong with a request is a typed error here as everywhere, and becomes a status and an error object of the
route's protocol in one place (`respond_to`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sse_starlette.sse import EventSourceResponse

from offload_runtime import __version__, errors
from offload_runtime.config import ServerConfig
from offload_runtime.engine import Scheduler
from offload_runtime.engine.spelling import TokenSpelling
from offload_runtime.params import GenerationParams
from offload_runtime.server import anthropic, ollama, responses, schema
from offload_runtime.server.answers import Answers, Choice, Metrics, unless_gone
from offload_runtime.server.failures import ModelNotFoundError, failure_of
from offload_runtime.server.protocol import Answered, Ending, Wording, usage_of

if TYPE_CHECKING:
    from offload_runtime.engine import Runtime

_PING_S = 15  # proxies give up on silent connections after a minute
_SEND_S = 60  # for a client that reads no more
_NEVER_S = 1e9
_SWITCHES = ("enable_thinking", "reasoning_effort")  # options of chat templates that many models have
_GONE, _HAS_LEFT = 499, "the client has left"  # as nginx says
State = Literal["loading", "ready", "stopping", "failed"]
T = TypeVar("T")


class _Body(Protocol):
    @property
    def model(self) -> str | None: ...

    @classmethod
    def read(cls, body: Any) -> Any: ...


class _Question(_Body, Protocol):
    """The body of a request for answers, of whatever protocol."""

    def asked(self, runtime: Runtime) -> schema.AnswerBody | None: ...

    def wording(self, answered: Answered) -> Wording: ...


BodyT = TypeVar("BodyT", bound=_Body)


class _AnswerStream(EventSourceResponse):
    """A stream of server-sent events, or of lines of JSON, whose answers end with it, be it by the client's leaving."""

    def __init__(
        self, chunks: AsyncIterator[dict[str, str] | bytes], answers: Answers, *, is_lines: bool = False
    ) -> None:
        super().__init__(
            chunks, ping=_NEVER_S if is_lines else _PING_S, sep="\n", send_timeout=_SEND_S,
            headers={"X-Accel-Buffering": "no"}, media_type="application/x-ndjson" if is_lines else "text/event-stream",
        )  # fmt: skip
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
        # How tokens are chosen where a request does not say, as the model's makers want it; OpenAI's temperature is 1.
        self._defaults = {"temperature": 1.0, **runtime.sampling_defaults}
        self._begun_s = int(time.time())
        self.state = "ready"

    def suspend(self) -> None:
        """Refuse requests until there is a model again."""
        self._runtime = self._scheduler = None
        self.state = "loading"

    def close(self) -> None:
        """Let go of the readers' threads, once no request is answered any more."""
        for pool in (self._reader, self._compiler):
            pool.shutdown(wait=False, cancel_futures=True)

    def _ready(self) -> tuple[Runtime, Scheduler]:
        """Return what answers. Raises `UnavailableError` while there is none."""
        if self.state != "ready" or self._runtime is None or self._scheduler is None:
            raise errors.UnavailableError(f"the server is {self.state}: try again later")
        return self._runtime, self._scheduler

    def _named(self, model: str | None) -> None:
        if model is not None and model not in self._models:
            names = ", ".join(map(repr, self._models))
            raise ModelNotFoundError(f"model {model!r} is not served here, but {names}")

    async def _read(self, request: Request, kind: type[BodyT], read: Callable[[BodyT], T]) -> T:
        """Let `read` make something of a request's body, in the reader's thread. Raises `OptionError`."""
        raw = await request.body()

        def work() -> T:
            try:
                value = json.loads(raw, parse_constant=_refuse_constant, object_pairs_hook=_named_once)
            except schema.RequestError:
                raise
            except (ValueError, RecursionError) as error:
                raise schema.RequestError(f"the body is not JSON: {str(error)[:200]}") from error
            body = kind.read(value)
            self._named(body.model)
            return read(body)

        return await asyncio.get_running_loop().run_in_executor(self._reader, work)

    # --- answers

    async def chat(self, request: Request) -> Response:
        """Answer `POST /v1/chat/completions`."""
        return await self._answer(request, schema.ChatBody)

    async def complete(self, request: Request) -> Response:
        """Answer `POST /v1/completions`."""
        return await self._answer(request, schema.CompletionBody)

    async def message(self, request: Request) -> Response:
        """Answer Anthropic's `POST /v1/messages`."""
        return await self._answer(request, anthropic.MessagesBody)

    async def respond(self, request: Request) -> Response:
        """Answer OpenAI's `POST /v1/responses`."""
        return await self._answer(request, responses.ResponsesBody)

    async def count_tokens(self, request: Request) -> Response:
        """Answer Anthropic's `POST /v1/messages/count_tokens`."""
        runtime, _ = self._ready()

        def read(body: anthropic.CountBody) -> int:
            chat = body.asked(runtime)
            (prompt,) = chat.prompts(runtime)
            return len(chat.encoded(runtime, prompt))

        return JSONResponse({"input_tokens": await self._read(request, anthropic.CountBody, read)})

    async def ollama_chat(self, request: Request) -> Response:
        """Answer ollama's `POST /api/chat`."""
        return await self._answer(request, ollama.ChatRequest)

    async def ollama_generate(self, request: Request) -> Response:
        """Answer ollama's `POST /api/generate`."""
        return await self._answer(request, ollama.GenerateRequest)

    async def _answer(self, request: Request, kind: type[_Question]) -> Response:
        runtime, scheduler = self._ready()
        began_s = time.perf_counter()
        body, wording, choices = await self._read(request, kind, self._choices)
        if body is None:
            return JSONResponse(wording.whole([]))
        options = body.chat_template_kwargs if isinstance(body, schema.ChatBody) else None
        unread = runtime.chat_template.unread(options) if options else []
        tell = partial(self._tell, request, began_s, body.n, unread)
        answers = Answers(scheduler, choices, self.metrics, self._config.max_seconds)
        # Judges the prompts again, of which long ones take a while.
        pool = self._compiler if choices[0].params.sampling.has_grammar else self._reader
        await asyncio.get_running_loop().run_in_executor(pool, answers.submit)
        if body.stream:
            return _AnswerStream(self._chunks(answers, wording, tell), answers, is_lines=wording.is_lines)
        deltas = await unless_gone(answers.all_of_them(), request.receive)
        if deltas is None:
            tell(_GONE, [], _HAS_LEFT)
            return Response(status_code=_GONE)  # nobody reads it
        endings = [delta.ending for delta in deltas]
        tell(200, endings)
        return JSONResponse(wording.whole(deltas))

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

    def _choices(self, question: _Question) -> tuple[schema.AnswerBody | None, Wording, list[Choice]]:
        """Return what a request asks for, None for nothing, the words of its answer, and `n` choices a prompt, with the
        noise ids 0, 1, … Raises `OptionError`."""
        runtime, _ = self._ready()
        body, spelling = question.asked(runtime), TokenSpelling(runtime.tokenizer)
        if body is None:
            return None, question.wording(Answered(self._models[0], spelling, (), 1, runtime.context_tokens)), []
        if body.x_sources and not body.stream:
            raise schema.RequestError("x_sources is for streams", "x_sources")
        prompts, most = body.prompts(runtime), runtime.plan.target.batch + self._config.max_waiting
        if len(prompts) * body.n > most:
            asked = f"{len(prompts)} prompts with {body.n} answers each"
            raise schema.RequestError(f"{asked} are more than the {most} requests that this server holds", "n")
        choices = list[Choice]()
        grammar = body.grammar_params(runtime.tokenizer)
        first: GenerationParams | None = None
        for prompt in prompts:
            tokens = body.encoded(runtime, prompt)
            room = runtime.context_tokens - len(tokens)
            params = body.params(self._defaults, room, self._config.max_tokens)
            if params.max_new_tokens > room:
                asked, remedy = f" and max_tokens is {params.max_new_tokens}", "shorten one of them"
                if room < 1:
                    asked, remedy = " and leaves no room for an answer", "shorten it"
                full = f"the prompt has {len(tokens)} tokens{asked}, the context {runtime.context_tokens}"
                raise errors.ContextLengthError(f"{full}: {remedy}")
            first = first or params
            for noise_id in range(body.n):  # of one seed, if it is a random one
                sampling = replace(params.sampling, seed=first.sampling.seed, noise_id=noise_id, **grammar)
                parser = body.parser(runtime.tokenizer, tokens, is_bound=sampling.has_grammar)
                echo = body.echo_of(runtime.tokenizer, prompt)
                is_alone = echo is not None and body.max_tokens == 0
                choices.append(Choice(tokens, replace(params, sampling=sampling), parser, echo, is_alone))
        lengths = [len(choice.prompt) for choice in choices[:: body.n]]
        answered = Answered(self._models[0], spelling, lengths, body.n, runtime.context_tokens)
        return body, question.wording(answered), choices

    async def _chunks(
        self, answers: Answers, wording: Wording, tell: Callable[[int, Sequence[Ending], str], None]
    ) -> AsyncIterator[dict[str, str] | bytes]:
        """Yield the events of a stream; an error is the last one of them."""
        endings, status, message = dict[int, Ending](), _GONE, _HAS_LEFT
        encoded = ollama.encoded if wording.is_lines else _event
        try:
            for value in wording.opening():
                yield encoded(value)
            async for delta in answers:
                if delta.ending is not None:
                    endings[delta.index] = delta.ending
                for value in wording.chunk(delta):
                    yield encoded(value)
            status = 200
            for value in wording.closing([ending for _, ending in sorted(endings.items())]):
                yield encoded(value)
            if wording.last_line is not None:
                yield {"data": wording.last_line}
        except Exception as error:
            failure = failure_of(error)
            status, message = failure.status, failure.message
            self.metrics.refused.labels(str(status)).inc()
            yield encoded(wording.failed(failure))
            if not isinstance(error, errors.OffloadError):
                raise
        finally:
            tell(status, [ending for _, ending in sorted(endings.items())] if status == 200 else [], message)

    # --- what else there is to ask

    async def models(self) -> Response:
        """Answer `GET /v1/models`."""
        self._ready()
        page = {"has_more": False, "first_id": self._models[0], "last_id": self._models[-1]}
        return JSONResponse({"object": "list", "data": [self._about(name) for name in self._models], **page})

    async def model(self, name: str) -> Response:
        """Answer `GET /v1/models/NAME`."""
        self._ready()
        self._named(name)
        return JSONResponse(self._about(name))

    def _about(self, name: str) -> dict[str, Any]:
        runtime, _ = self._ready()
        about = {"id": name, "object": "model", "created": self._begun_s, "owned_by": "offload-runtime"}
        begun = datetime.fromtimestamp(self._begun_s, timezone.utc).isoformat()
        of_anthropic = {"type": "model", "display_name": name, "created_at": begun, "lifecycle": "active"}
        usual = GenerationParams().changed(**self._defaults)
        defaults = {one: usual.value(one) for one in schema.SAMPLING}
        has_template = runtime.tokenizer.chat_template is not None
        unread = runtime.chat_template.unread(_SWITCHES) if has_template else _SWITCHES
        of_ours = {"x_defaults": defaults, "x_template_options": [one for one in _SWITCHES if one not in unread]}
        return {**about, **of_anthropic, "max_model_len": runtime.context_tokens, **of_ours}

    async def tags(self) -> Response:
        """Answer ollama's `GET /api/tags`."""
        runtime, _ = self._ready()
        return JSONResponse({"models": [ollama.tag(runtime, name, self._begun_s) for name in self._models]})

    async def show(self, request: Request) -> Response:
        """Answer ollama's `POST /api/show`."""
        runtime, _ = self._ready()
        return JSONResponse(
            await self._read(request, ollama.ShowRequest, lambda body: ollama.about(runtime, self._begun_s))
        )

    async def version(self, request: Request) -> Response:
        """Answer `GET /version`, and ollama's `GET /api/version` with the version whose routes these are."""
        return JSONResponse({"version": ollama.VERSION if request.url.path.startswith("/api/") else __version__})

    async def embeddings(self) -> Response:
        """Refuse `POST /v1/embeddings`, and ollama's routes for the same."""
        way_out = "run a model that does at another port, with llama-server --embeddings or sentence-transformers"
        raise errors.OptionError(f"this server answers with text and makes no embeddings: {way_out}")

    async def tokenize(self, request: Request) -> Response:
        """Answer `POST /tokenize` with token ids of a text or of messages."""
        runtime, _ = self._ready()

        def read(body: schema.TokenizeBody) -> list[int]:
            return runtime.encode(body.prompt_once(runtime), template_options=body.chat_template_kwargs)

        tokens = await self._read(request, schema.TokenizeBody, read)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": runtime.context_tokens})

    async def detokenize(self, request: Request) -> Response:
        """Answer `POST /detokenize` with the text of token ids, control tokens as they are spelled."""
        runtime, _ = self._ready()

        def read(body: schema.DetokenizeBody) -> str:
            tokens = runtime.encode(body.tokens)  # judges them
            return str(runtime.tokenizer.decode(tokens, skip_special_tokens=False))

        return JSONResponse({"prompt": await self._read(request, schema.DetokenizeBody, read)})

    async def health(self) -> Response:
        """Answer `GET /health` with 200 once requests are answered, 503 before and after."""
        if self.state == "ready" and self._scheduler is not None and self._scheduler.failure is not None:
            self.state = "failed"  # by a defect: whoever watches starts another one
        return JSONResponse({"status": self.state}, 200 if self.state == "ready" else 503)

    async def figures(self) -> Response:
        """Answer `GET /metrics`, for Prometheus."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def respond_to(self, request: Request, error: Exception) -> Response:
        """Answer a request that ended by an error."""
        failure, path = failure_of(error), request.url.path
        self.metrics.refused.labels(str(failure.status)).inc()
        self._log(f"{request.method} {path[:100]} {failure.status}: {failure.message}")
        return JSONResponse(failure.body(path), failure.status, failure.headers)


def _event(value: dict[str, Any]) -> dict[str, str]:
    name = {"event": str(value["type"])} if "type" in value else {}
    return {**name, "data": json.dumps(value)}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON, none of whose keys may be there twice: readers do not agree on which of them counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for number, name in enumerate(names) if name in names[:number])[:100]
        raise schema.RequestError(f"the body has the key {twice!r} twice in one object: give it once", twice)
    return found
