"""Answers on their way from the scheduler's thread to a response: the only place where both threads meet; and figures
for Prometheus (`Metrics`): what the scheduler has done so far, as of when they are asked for, how long requests took.

Events cross by `loop.call_soon_threadsafe`, so the thread that owns the device never waits for a client and the event
loop never for the device. What is asked of the scheduler, `submit` and `cancel`, returns at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sse_starlette.sse import EventSourceResponse

from offload_runtime.engine import EndEvent, ErrorEvent, Scheduler, Ticket, TokenEvent, TokenLogprobs
from offload_runtime.errors import UnavailableError
from offload_runtime.params import GenerationParams
from offload_runtime.server.protocol import Delta, ending_of

if TYPE_CHECKING:
    from offload_runtime.engine import SchedulerCounters
    from offload_runtime.server.parsers import AnswerParser

_PING_S = 15  # proxies give up on silent connections after a minute
_SEND_S = 60  # for a client that reads no more
_NEVER_S = 1e9
_PREFIX = "offload_runtime_"
# A pass over a streamed model takes half a second, and a long prompt a minute.
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 3600)
# What Prometheus calls the counters of a scheduler, and what it says of them.
_COUNTERS = {
    "running": ("requests_running", "Requests that have a slot"),
    "waiting": ("requests_waiting", "Requests that wait for a slot"),
    "finished": ("requests_finished", "Requests that have ended"),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts that were read"),
    "tokens": ("tokens", "Tokens of answers"),
    "passes": ("passes", "Passes of the target but those over prompts alone"),
    "proposed": ("proposed_tokens", "Proposals that the target verified"),
    "accepted": ("accepted_tokens", "Proposals that the target accepted"),
}


class Metrics(Collector):
    """All figures of one server.

    Args:
        read: Gives what schedulers have counted, or None before there was one.

    Attributes:
        loads: Counts how often each of several models was loaded.
        registry: Has all of them.
        first: Takes the seconds until a request had its first token.
        whole: Takes the seconds until all answers of a request were there.
        refused: Counts requests that ended by an error, by its status.
    """

    def __init__(self, read: Callable[[], SchedulerCounters | None]) -> None:
        self._read = read
        self.registry = registry = CollectorRegistry()  # its own: servers in one process do not add up
        registry.register(self)
        first, whole = "From a request to its first token, waiting included", "From a request to the end of its answers"
        self.first = Histogram(f"{_PREFIX}time_to_first_token_seconds", first, registry=registry, buckets=_SECONDS)
        self.whole = Histogram(f"{_PREFIX}request_seconds", whole, registry=registry, buckets=_SECONDS)
        loads = "Times that one of several models was loaded"
        self.loads = Counter(f"{_PREFIX}model_loads", loads, ["model"], registry=registry)
        self.refused = Counter(f"{_PREFIX}errors", "Requests that ended by an error", ["status"], registry=registry)

    def collect(self) -> Iterator[Metric]:
        """Yield one family a counter; none before there is a scheduler."""
        counters = self._read()
        if counters is None:
            return
        for counter, (name, what) in _COUNTERS.items():
            kind = GaugeMetricFamily if counter in ("running", "waiting") else CounterMetricFamily
            value = getattr(counters, counter)
            if not isinstance(value, dict):
                yield kind(_PREFIX + name, what, value)
                continue
            family = kind(_PREFIX + name, what, labels=["source"])
            for source, number in sorted(value.items()):
                family.add_metric([source], number)
            yield family


_Event = TokenEvent | EndEvent | ErrorEvent


@dataclass(frozen=True)
class Choice:
    """One answer that is asked for: its prompt, its options, what takes it apart, and what comes before it, or in its
    place."""

    prompt: list[int]
    params: GenerationParams
    parser: AnswerParser
    echo: str | None = None
    is_echo_alone: bool = False


class Answers:
    """The answers to one request, in the event loop in which they are made. Iterate for what comes; whoever stops
    before the end calls `cancel`, which frees their slots before the next pass.

    Args:
        scheduler: Is given all of them, or none where it has no room.
        choices: What is asked for.
        metrics: Is told how long it took.
        max_seconds: After which the answers end as they are.
        waited_s: How long the request has waited before.
    """

    def __init__(
        self, scheduler: Scheduler, choices: Sequence[Choice], metrics: Metrics, max_seconds: float, *,
        waited_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._scheduler, self._choices, self._metrics = scheduler, choices, metrics
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, _Event]]()
        self._began_s, self._tickets = time.perf_counter() - waited_s, list[Ticket]()
        self._timer, self._is_cancelled = self._loop.call_later(max_seconds - waited_s, self.cancel), False
        self._has_tokens, self._has_begun = False, set[int]()

    def submit(self) -> None:
        """Ask for all of them, once; any thread may.

        Raises:
            QueueFullError, ContextLengthError, OptionError, UnavailableError: As of `Scheduler.submit`; none is left.
        """
        try:
            for index, choice in enumerate(self._choices):
                on_event = partial(self._cross, index)
                self._tickets.append(self._scheduler.submit(choice.prompt, choice.params, on_event=on_event))
                if self._is_cancelled:  # in the event loop meanwhile, which has not seen this one
                    self._tickets[-1].cancel()
        except BaseException:
            self._loop.call_soon_threadsafe(self.cancel)
            raise

    def cancel(self) -> None:
        """End all of them as they are. Does nothing to those that have ended."""
        self._timer.cancel()
        self._is_cancelled = True
        for ticket in self._tickets:
            ticket.cancel()

    def _cross(self, index: int, event: _Event) -> None:
        """Hand an event to the event loop, in the scheduler's thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield what has come of each choice since the last time, until all have ended.

        Raises:
            OffloadError: One of them ended by an error; the others are cancelled.
        """
        left = set(range(len(self._choices)))
        try:
            while left:
                events = [await self._events.get()]
                while not self._events.empty():  # a pass brings many tokens at once
                    events.append(self._events.get_nowait())
                for index in sorted({index for index, _ in events}):
                    delta = self._delta(index, [event for of, event in events if of == index])
                    left -= {index} if delta.ending is not None else set()
                    yield delta
            self._metrics.whole.observe(time.perf_counter() - self._began_s)
        finally:
            self._timer.cancel()
            if left:
                self.cancel()

    def _delta(self, index: int, events: Sequence[_Event]) -> Delta:
        choice = self._choices[index]
        parser = choice.parser
        delta = Delta(index=index, first_call=parser.num_calls)
        for event in events:
            if isinstance(event, ErrorEvent):
                raise event.error
            if isinstance(event, TokenEvent):
                if not self._has_tokens:
                    self._metrics.first.observe(time.perf_counter() - self._began_s)
                self._has_tokens = True
                self._begin(index, delta, event.prompt_logprobs)
                if choice.is_echo_alone:
                    continue
                logprobs = [] if event.logprobs is None else [event.logprobs]
                delta.reasoning_tokens += parser.is_thinking
                delta.add(Delta(*parser.push(event.text, event.token), [(event.text, event.source)], logprobs))
                continue
            if event.result.finish_reason == "interrupted" and not event.result.tokens and not self._has_tokens:
                raise UnavailableError("the server is stopping, or the request has waited too long: send it again")
            self._begin(index, delta, event.result.prompt_logprobs)
            delta.add(Delta(*parser.push(event.text)))
            delta.add(Delta(*parser.finish()))
            delta.ending = ending_of(event.result, choice.params.sampling, has_calls=parser.num_calls > 0)
            if choice.is_echo_alone:
                delta.ending = replace(delta.ending, finish_reason="length", completion_tokens=0)
        return delta

    def _begin(self, index: int, delta: Delta, logprobs: Sequence[TokenLogprobs] | None) -> None:
        """Put a prompt that is echoed before the first that comes of its answer, with the log-probabilities of its
        tokens behind the first, which has none, where they are wanted."""
        choice = self._choices[index]
        if choice.echo is not None and index not in self._has_begun:
            first = [] if logprobs is None else [TokenLogprobs(choice.prompt[0], math.nan)]
            delta.add(Delta(text=choice.echo, logprobs=[*first, *(logprobs or ())]))
        self._has_begun.add(index)

    async def all_of_them(self) -> list[Delta]:
        """Return all of every choice, once they have ended."""
        deltas = [Delta(index=index) for index in range(len(self._choices))]
        async for delta in self:
            deltas[delta.index].add(delta)
        return deltas


async def unless_gone(work: Any, receive: Any) -> Any:
    """Return what `work` (a coroutine) gives; None, and it is ended, where the client goes before."""

    async def leaving() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(leaving())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class AnswerStream(EventSourceResponse):
    """A stream of server-sent events, or of lines of JSON; what it holds (`held`) ends with it, be it by the client's
    leaving."""

    def __init__(
        self, chunks: AsyncIterator[dict[str, str] | bytes], held: ExitStack, *, is_lines: bool = False
    ) -> None:
        super().__init__(
            chunks, ping=_NEVER_S if is_lines else _PING_S, sep="\n", send_timeout=_SEND_S,
            headers={"X-Accel-Buffering": "no"}, media_type="application/x-ndjson" if is_lines else "text/event-stream",
        )  # fmt: skip
        self._held = held

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._held:
            await super().__call__(scope, receive, send)
