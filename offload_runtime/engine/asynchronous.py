"""Answers in an event loop: `async for piece in runtime.astream(…)`.

Requests go to a scheduler, so that the loop waits for no pass and several of them share passes. A thread encodes the
prompt and submits it; the scheduler's own tells the loop of every token.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from offload_runtime.engine.engine import TokenEvent
from offload_runtime.engine.events import ErrorEvent, Event, OnEvent, Ticket
from offload_runtime.engine.request import GenerationResult
from offload_runtime.errors import OptionError


class AsyncTokenStream(AsyncIterator[str]):
    """Iterates over the pieces of text of one answer in an event loop. Nothing is computed before the first piece is
    asked for.

    The request ends with the task that asks for its pieces: where that is cancelled while it waits for one, when the
    request has ended and others have the room; where it fails, returns or is cancelled elsewhere, soon afterwards. So
    does the request of a stream that nobody has any more.

    Args:
        submit: Submits the request; called in a thread, which it may hold up.
    """

    def __init__(self, submit: Callable[[OnEvent], Ticket]) -> None:
        self._submit = submit
        self._events: asyncio.Queue[Event] | None = None  # once it has begun
        self._begun: Future[Ticket] = Future()
        self._is_over = False
        self._result: GenerationResult | None = None
        self._task: asyncio.Task[Any] | None = None  # that has asked for the newest piece
        found = weakref.ref(self)  # or a task that has left the loop would keep the stream

        def on_end_of_task(task: object) -> None:
            if (stream := found()) is not None:
                stream._cancel()

        self._on_end_of_task = on_end_of_task

    async def __anext__(self) -> str:
        while not (event := await self._next_event()).text:
            pass
        return event.text

    async def tokens(self) -> AsyncIterator[TokenEvent]:
        """Iterate over the same answer a token at a time, as `TokenStream.tokens`."""
        try:
            while True:
                yield await self._next_event()
        except StopAsyncIteration:
            return

    @property
    def result(self) -> GenerationResult:
        """Return the finished generation; raise `OptionError` before the end of the iteration, or of `aclose`."""
        if self._result is None:
            raise OptionError("this answer has not ended: iterate to its end, or await aclose() first")
        return self._result

    async def aclose(self) -> None:
        """End the answer as it is, and return when it has ended. What was generated is kept in `result`."""
        if self._is_over:
            return
        self._over()
        if self._events is None:
            return
        self._cancel()
        with suppress(Exception):  # of a request that was refused nothing is left to end
            await asyncio.shield(asyncio.wrap_future(self._begun))
        while self._begun.exception() is None and self._result is None:
            event = await self._events.get()
            self._result = None if isinstance(event, TokenEvent) else event.result

    async def _next_event(self) -> TokenEvent:
        """Wait for the next token; raises `StopAsyncIteration` behind the last one."""
        if self._is_over:
            raise StopAsyncIteration
        self._belong_to(asyncio.current_task())
        try:
            event = await self._next()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        except BaseException:  # the request was refused
            self._over()
            raise
        if isinstance(event, TokenEvent):
            return event
        self._result = event.result
        self._over()
        if isinstance(event, ErrorEvent):
            raise event.error
        raise StopAsyncIteration

    async def _next(self) -> Event:
        if self._events is None:
            loop, self._events = asyncio.get_running_loop(), asyncio.Queue()
            tell = self._events.put_nowait

            def on_event(event: Event) -> None:
                loop.call_soon_threadsafe(tell, event)

            threading.Thread(
                target=_submit, args=(self._submit, on_event, self._begun), name="submit", daemon=True
            ).start()
            await asyncio.shield(asyncio.wrap_future(self._begun))
        return await self._events.get()

    def _belong_to(self, task: asyncio.Task[Any] | None) -> None:
        """End with this task, and with no other one."""
        if task is not self._task:
            if self._task is not None:
                self._task.remove_done_callback(self._on_end_of_task)
            if task is not None:
                task.add_done_callback(self._on_end_of_task)
            self._task = task

    def _over(self) -> None:
        self._is_over = True
        self._belong_to(None)

    def _cancel(self) -> None:
        """End the request before its next pass, or as soon as it was submitted. Never waits; any thread may."""
        if self._events is not None:
            self._begun.add_done_callback(_cancel)

    def __del__(self) -> None:
        if not self._is_over:
            self._cancel()


def _submit(submit: Callable[[OnEvent], Ticket], on_event: OnEvent, begun: Future[Ticket]) -> None:
    """Submit a request in a thread of its own, which knows nothing of the stream: that may be gone by then."""
    try:
        begun.set_result(submit(on_event))
    except BaseException as error:
        begun.set_exception(error)


def _cancel(begun: Future[Ticket]) -> None:
    if begun.exception() is None:
        begun.result().cancel()
