"""`Service` answers the routes, whatever protocol they are of, with the runtime that it was given, or with those of
models that take turns.

What is wrong with a request is a typed error here as everywhere, and becomes a status and an error object of the
route's protocol in one place (`respond_to`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from offload_runtime import __version__, errors
from offload_runtime.config import ServerConfig
from offload_runtime.engine.spelling import TokenSpelling
from offload_runtime.params import GenerationParams
from offload_runtime.server import anthropic, ollama, responses, schema
from offload_runtime.server.answers import Answers, AnswerStream, Choice, Metrics, unless_gone
from offload_runtime.server.failures import failure_of
from offload_runtime.server.models import ServedModels
from offload_runtime.server.protocol import Answered, Ending, Wording, usage_of
from offload_runtime.server.turns import LoadedModel, Turn, Turns

if TYPE_CHECKING:
    from offload_runtime.engine import Runtime

_GONE, _HAS_LEFT = 499, "the client has left"  # as nginx says


class _Body(Protocol):
    @property
    def model(self) -> str | None: ...

    @classmethod
    def read(cls, body: Any) -> Any: ...


class _Question(_Body, Protocol):
    """The body of a request for answers, of whatever protocol."""

    @property
    def stream(self) -> bool: ...

    def asked(self, runtime: Runtime) -> schema.AnswerBody | None: ...

    def wording(self, answered: Answered) -> Wording: ...


BodyT = TypeVar("BodyT", bound=_Body)


@dataclass(frozen=True)
class _Begun:
    """Answers that were asked for, None where nothing was, in what words they are told, and what logs their end."""

    answers: Answers | None
    wording: Wording
    tell: Callable[[int, Sequence[Ending], str], None]


class Service:
    """Answers requests, in the event loop's thread.

    Args:
        config: Limits of requests.
        log: Called with a line for each request.
        turns: Of several models, or of one that is not always loaded; None: there is one, and it stays.

    Attributes:
        models: What there is to answer with.
        metrics: What was done so far.
    """

    def __init__(
        self, config: ServerConfig, log: Callable[[str], None] = lambda line: None, turns: Turns | None = None
    ) -> None:
        self._config, self._log = config, log
        self.models = ServedModels(config.max_seconds, turns)
        self.metrics = Metrics(self.models.counters)
        # Reads prompts, one at a time: a long one takes a second, which the event loop must not wait.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        # Compiles grammars, one at a time: a large one takes seconds, which other prompts must not wait.
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def close(self) -> None:
        """Let go of the readers' threads, once no request is answered any more."""
        for pool in (self._reader, self._compiler):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _read(self, request: Request, kind: type[BodyT]) -> BodyT:
        """Read a request's body, in the reader's thread. Raises `OptionError`."""
        self.models.offered()  # before anything is read
        raw = await request.body()

        def work() -> Any:
            try:
                value = json.loads(raw, parse_constant=_refuse_constant, object_pairs_hook=_named_once)
            except schema.RequestError:
                raise
            except (ValueError, RecursionError) as error:
                raise schema.RequestError(f"the body is not JSON: {str(error)[:200]}") from error
            return kind.read(value)

        body: BodyT = await asyncio.get_running_loop().run_in_executor(self._reader, work)
        return body

    async def _come(self, turn: Turn, request: Request) -> LoadedModel | None:
        """Return the model of a turn once it comes; None where the client goes before. Raises why it cannot come."""

        async def wait() -> LoadedModel:
            async for _ in self.models.waiting(turn):
                pass
            return turn.loaded.result()

        if turn.loaded.done():
            return turn.loaded.result()
        loaded: LoadedModel | None = await unless_gone(wait(), request.receive)
        return loaded

    async def _answer_with(
        self, request: Request, kind: type[BodyT], tell: Callable[[BodyT, Runtime], dict[str, Any]]
    ) -> Response:
        """Answer with what `tell` makes of a request's body and the runtime of its model, in the reader's thread."""
        body = await self._read(request, kind)
        with ExitStack() as held:
            turn = self.models.ask(body.model)
            held.callback(turn.end)
            if (loaded := await self._come(turn, request)) is None:
                return Response(status_code=_GONE)
            work = partial(tell, body, loaded.runtime)
            return JSONResponse(await asyncio.get_running_loop().run_in_executor(self._reader, work))

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

        def tell(body: anthropic.CountBody, runtime: Runtime) -> dict[str, Any]:
            chat = body.asked(runtime)
            (prompt,) = chat.prompts(runtime)
            return {"input_tokens": len(chat.encoded(runtime, prompt))}

        return await self._answer_with(request, anthropic.CountBody, tell)

    async def ollama_chat(self, request: Request) -> Response:
        """Answer ollama's `POST /api/chat`."""
        return await self._answer(request, ollama.ChatRequest)

    async def ollama_generate(self, request: Request) -> Response:
        """Answer ollama's `POST /api/generate`."""
        return await self._answer(request, ollama.GenerateRequest)

    async def _answer(self, request: Request, kind: type[_Question]) -> Response:
        began_s = time.perf_counter()
        question = await self._read(request, kind)
        is_lines, keep_alive_s = isinstance(question, ollama.Question), None
        if isinstance(question, ollama.Question):
            keep_alive_s = question.keep_alive_s
            if question.is_empty and keep_alive_s == 0 and self.models.unload(question.model):
                return JSONResponse(question.unloaded())
        with ExitStack() as held:
            turn = self.models.ask(question.model, keep_alive_s)
            held.callback(turn.end)
            if question.stream and not is_lines and not turn.loaded.done():
                return AnswerStream(self._late_chunks(request, question, turn, began_s, held := held.pop_all()), held)
            if (loaded := await self._come(turn, request)) is None:
                self._tell(request, began_s, 1, (), _GONE, [], _HAS_LEFT)
                return Response(status_code=_GONE)  # nobody reads it
            begun = await self._begin(request, question, loaded, began_s, held)
            if begun.answers is None:
                return JSONResponse(begun.wording.whole([]))
            if question.stream:
                return AnswerStream(self._chunks(begun, begun.answers), held.pop_all(), is_lines=is_lines)
            deltas = await unless_gone(begun.answers.all_of_them(), request.receive)
        if deltas is None:
            begun.tell(_GONE, [], _HAS_LEFT)
            return Response(status_code=_GONE)
        begun.tell(200, [delta.ending for delta in deltas], "")
        return JSONResponse(begun.wording.whole(deltas))

    async def _begin(
        self, request: Request, question: _Question, loaded: LoadedModel, began_s: float, held: ExitStack
    ) -> _Begun:
        """Ask a model for the answers to a question; they are cancelled with what is `held`. Raises `OffloadError`."""
        loop, waited_s = asyncio.get_running_loop(), time.perf_counter() - began_s
        read = partial(self._choices, question, loaded, waited_s)
        body, wording, choices = await loop.run_in_executor(self._reader, read)
        if body is None:
            return _Begun(None, wording, partial(self._tell, request, began_s, 1, ()))
        options = body.chat_template_kwargs if isinstance(body, schema.ChatBody) else None
        unread = loaded.runtime.chat_template.unread(options) if options else []
        answers = Answers(loaded.scheduler, choices, self.metrics, self._config.max_seconds, waited_s=waited_s)
        held.callback(answers.cancel)
        # Judges the prompts again, of which long ones take a while.
        pool = self._compiler if choices[0].params.sampling.has_grammar else self._reader
        await loop.run_in_executor(pool, answers.submit)
        return _Begun(answers, wording, partial(self._tell, request, began_s, body.n, unread))

    def _tell(
        self, request: Request, began_s: float, num_choices: int, unread: Sequence[str], status: int,
        endings: Sequence[Ending], message: str,
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

    def _choices(
        self, question: _Question, loaded: LoadedModel, waited_s: float
    ) -> tuple[schema.AnswerBody | None, Wording, list[Choice]]:
        """Return what a request asks for, None for nothing, the words of its answer, and `n` choices a prompt, with the
        noise ids 0, 1, … Raises `OptionError`."""
        runtime, name = loaded.runtime, loaded.model.names[0]
        body, spelling = question.asked(runtime), TokenSpelling(runtime.tokenizer)
        if body is None:
            return None, question.wording(Answered(name, spelling, (), 1, runtime.context_tokens, waited_s)), []
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
            params = body.params(loaded.model.defaults, room, self._config.max_tokens)
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
        answered = Answered(name, spelling, lengths, body.n, runtime.context_tokens, waited_s)
        return body, question.wording(answered), choices

    async def _late_chunks(
        self, request: Request, question: _Question, turn: Turn, began_s: float, held: ExitStack
    ) -> AsyncIterator[dict[str, str] | bytes]:
        """Yield comments while a turn is waited for, then the events of the answer."""
        try:
            async for awaited in self.models.waiting(turn):
                yield {"comment": awaited}
            begun = await self._begin(request, question, turn.loaded.result(), began_s, held)
        except Exception as error:
            failure = failure_of(error)
            self.metrics.refused.labels(str(failure.status)).inc()
            self._tell(request, began_s, 1, (), failure.status, [], failure.message)
            yield _event(failure.body(request.url.path))
            if not isinstance(error, errors.OffloadError):
                raise
            return
        assert begun.answers is not None, "what asks for nothing has no server-sent events"
        async for chunk in self._chunks(begun, begun.answers):
            yield chunk

    async def _chunks(self, begun: _Begun, answers: Answers) -> AsyncIterator[dict[str, str] | bytes]:
        """Yield the events of a stream; an error is the last one of them."""
        endings, ended, status, message, wording = dict[int, Ending](), list[Ending](), _GONE, _HAS_LEFT, begun.wording
        encoded = ollama.encoded if wording.is_lines else _event
        try:
            for value in wording.opening():
                yield encoded(value)
            async for delta in answers:
                if delta.ending is not None:
                    endings[delta.index] = delta.ending
                for value in wording.chunk(delta):
                    yield encoded(value)
            status, ended = 200, [ending for _, ending in sorted(endings.items())]
            for value in wording.closing(ended):
                yield encoded(value)
            if wording.last_line is not None:
                yield {"data": wording.last_line}
        except Exception as error:
            failure = failure_of(error)
            status, ended, message = failure.status, [], failure.message
            self.metrics.refused.labels(str(status)).inc()
            yield encoded(wording.failed(failure))
            if not isinstance(error, errors.OffloadError):
                raise
        finally:
            begun.tell(status, ended, message)

    # --- what else there is to ask

    async def list_models(self) -> Response:
        """Answer `GET /v1/models`."""
        return JSONResponse(self.models.page())

    async def one_model(self, name: str) -> Response:
        """Answer `GET /v1/models/NAME`."""
        return JSONResponse(self.models.about(self.models.named(name), name))

    async def tags(self) -> Response:
        """Answer ollama's `GET /api/tags`."""
        return JSONResponse({"models": self.models.tags()})

    async def running(self) -> Response:
        """Answer ollama's `GET /api/ps`."""
        return JSONResponse({"models": self.models.running()})

    async def show(self, request: Request) -> Response:
        """Answer ollama's `POST /api/show`."""
        body = await self._read(request, ollama.ShowRequest)
        return JSONResponse(ollama.about(self.models.named(body.model), self.models.begun_s))

    async def version(self, request: Request) -> Response:
        """Answer `GET /version`, and ollama's `GET /api/version` with the version whose routes these are."""
        return JSONResponse({"version": ollama.VERSION if request.url.path.startswith("/api/") else __version__})

    async def embeddings(self) -> Response:
        """Refuse `POST /v1/embeddings`, and ollama's routes for the same."""
        remedy = "run a model that does at another port, with llama-server --embeddings or sentence-transformers"
        raise errors.OptionError(f"this server answers with text and makes no embeddings: {remedy}")

    async def tokenize(self, request: Request) -> Response:
        """Answer `POST /tokenize` with token ids of a text or of messages."""

        def tell(body: schema.TokenizeBody, runtime: Runtime) -> dict[str, Any]:
            tokens = runtime.encode(body.prompt_once(runtime), template_options=body.chat_template_kwargs)
            return {"tokens": tokens, "count": len(tokens), "max_model_len": runtime.context_tokens}

        return await self._answer_with(request, schema.TokenizeBody, tell)

    async def detokenize(self, request: Request) -> Response:
        """Answer `POST /detokenize` with the text of token ids, control tokens as they are spelled."""

        def tell(body: schema.DetokenizeBody, runtime: Runtime) -> dict[str, Any]:
            tokens = runtime.encode(body.tokens)  # judges them
            return {"prompt": str(runtime.tokenizer.decode(tokens, skip_special_tokens=False))}

        return await self._answer_with(request, schema.DetokenizeBody, tell)

    async def health(self) -> Response:
        """Answer `GET /health` with 200 once requests are answered, 503 before and after."""
        state = self.models.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

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
