"""Continuous batching: requests from any thread join and leave the passes of one runtime.

A thread of the scheduler's own takes the steps (`Engine.step`). Before each of them, and between the tokens that it
tells of, it looks at what others have asked for. So nobody who submits or cancels ever waits for the device.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from offload_runtime.engine.asynchronous import AsyncTokenStream
from offload_runtime.engine.engine import Engine, RequestOutput
from offload_runtime.engine.events import ErrorEvent, OnEvent, Ticket
from offload_runtime.engine.request import Prompt, Request
from offload_runtime.engine.runtime import Runtime
from offload_runtime.errors import BudgetError, QueueFullError, UnavailableError
from offload_runtime.options import require, require_type
from offload_runtime.params import GenerationParams, params_once

# When to ask again, as long as nothing is known of how fast tokens come.
_FIRST_RETRY_S = 1.0


@dataclass(frozen=True)
class SchedulerCounters:
    """Counts what a scheduler has done so far.

    Attributes:
        running: Requests that have a slot.
        waiting: Requests that have none yet.
        finished: Requests that have ended, for whatever reason.
        prompt_tokens: Tokens of the prompts whose first token is there.
        kept_tokens: Of these, those that were not read again, as a slot or the store still held them.
        tokens: Tokens of answers.
        passes: Passes of the target, those over prompts alone not counted.
        proposed: Proposals that the target verified, by who made them.
        accepted: Of these, those that it accepted.
    """

    running: int = 0
    waiting: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    kept_tokens: int = 0
    tokens: int = 0
    passes: int = 0
    proposed: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: SchedulerCounters) -> SchedulerCounters:
        """Return what two schedulers have done together."""

        def total(one: Any, another: Any) -> Any:
            return dict(Counter(one) + Counter(another)) if isinstance(one, dict) else one + another

        return SchedulerCounters(
            **{each.name: total(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)}
        )


class Scheduler(AbstractContextManager["Scheduler"]):
    """Serves requests of any threads with one runtime: as many at a time as it was loaded for (`max_batch`), each of
    which begins as soon as a slot is free and ends on its own.

    The tokens of a request are those that `Runtime.generate` says with its options and `noise_id`, whoever shares the
    passes. A slot holds the whole context, prompt and `max_new_tokens` included, so that nobody who runs is held up
    for want of room. What it holds stays there when its request has ended: the longest beginning of a prompt that a
    free slot holds is not read again. Until it is closed the scheduler has the runtime for itself: other calls of it
    raise an `OptionError`. Close it or use it in a `with` block, before the runtime.

    Args:
        runtime: Loaded. A call that is in progress is waited for.
        max_waiting: Requests that may wait for a slot.
        prefix_cache_bytes: Host memory for blocks of 256 tokens, of the draft's cache, too, that slots lose to other
            prompts, which are copied back for prompts that begin so; 0 is off. It comes on top of what `ram` limits, is
            not page-locked, and grows as blocks come. Only with the KV cache on the device: in host memory slots alone
            keep theirs.
        sessions: A directory for such blocks, of the draft's cache, too: they are written when slots lose them and when
            the scheduler is closed, which passes wait for, and are found again by the next process. None: none.
        sessions_bytes: Most that they may take, those that were used least recently go first; None is 64 GB.
        closes_when_idle: Close by itself once it has answered all requests that there are. Calls of the runtime then
            wait until it has, instead of an error.

    Attributes:
        failure: The error that has ended the scheduler, if any has.

    Raises:
        OptionError: The runtime is closed, or served by another scheduler, or `prefix_cache_bytes` does nothing here.
        StorageError: `sessions` cannot be written, or another process uses it.
    """

    def __init__(
        self, runtime: Runtime, *, max_waiting: int = 64, prefix_cache_bytes: int = 0,
        sessions: str | Path | None = None, sessions_bytes: int | None = None, closes_when_idle: bool = False,
    ) -> None:  # fmt: skip
        require_type("max_waiting", max_waiting, int)
        require_type("sessions_bytes", sessions_bytes, int | None)
        require_type("prefix_cache_bytes", prefix_cache_bytes, int)
        require(max_waiting >= 0, f"max_waiting must not be negative, not {max_waiting}")
        self._runtime = runtime
        self._serving = partial(
            runtime.serving, prefix_cache_bytes=prefix_cache_bytes, sessions_bytes=sessions_bytes,
            sessions=None if sessions is None else Path(sessions), refuses_calls=not closes_when_idle,
        )  # fmt: skip
        self._closes_when_idle = closes_when_idle
        self._most_tickets, self._max_waiting = runtime.plan.target.batch + max_waiting, max_waiting
        # What threads share, and under the lock of this condition.
        self._changed = threading.Condition()
        self._tickets: dict[Request, Ticket] = {}  # of all requests that have not ended
        self._submitted, self._cancelled = deque[Request](), deque[Request]()
        self._end_s: float | None = None  # when what has not finished is cancelled, once the scheduler is being closed
        self.failure: BaseException | None = None  # that ended the thread
        self._counters, self._retry_after_s = SchedulerCounters(), _FIRST_RETRY_S
        # The thread's own.
        self._totals = Counter(finished=0, prompt_tokens=0, kept_tokens=0, tokens=0)
        self._proposed, self._accepted = Counter[str](), Counter[str]()  # of requests that have ended
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()
        self._begun.wait()
        if self.failure is not None:
            raise self.failure

    def submit(
        self, prompt_tokens: Sequence[int], params: GenerationParams, *, on_event: OnEvent, speculate: bool = True
    ) -> Ticket:  # fmt: skip
        """Ask for an answer. Any thread may; it never waits for the device.

        Args:
            prompt_tokens: Token ids of the prompt (see `Runtime.encode`).
            params: What is asked for.
            on_event: Called with a `TokenEvent` for each token as soon as it is decided, then with an `EndEvent` or an
                `ErrorEvent`. It is called in the scheduler's thread, which decodes for nobody meanwhile, so it must be
                quick; it may submit and cancel. If it raises, its request is cancelled and it is not called again.
            speculate: False decodes plainly.

        Raises:
            OptionError: Options that make no sense.
            UnavailableError: The scheduler is closed, or has stopped by a defect.
            ContextLengthError: Prompt and `max_new_tokens` exceed the reserved context.
            QueueFullError: As many requests wait as may.
        """
        require_type("params", params, GenerationParams)
        if params.sampling.has_grammar:  # which takes up to a second to compile
            with self._changed:
                self._require_room()
        request = self._runtime.request(list(prompt_tokens), params, speculate=speculate)
        request.started_s = time.perf_counter()
        ticket = Ticket(on_event, partial(self._cancel, request))
        with self._changed:
            self._require_room()
            self._tickets[request] = ticket
            self._submitted.append(request)
            self._changed.notify()
        return ticket

    def astream(
        self, prompt: Prompt, *, params: GenerationParams | None = None, speculate: bool = True, **options: Any
    ) -> AsyncTokenStream:
        """Answer a prompt in an event loop, piece by piece. As `Runtime.astream`, but slots keep what they hold for the
        requests that follow, and where too many wait already the first piece is a `QueueFullError`."""
        asked, room = params_once(options, params), self._runtime.room

        def submit(on_event: OnEvent) -> Ticket:
            return self.submit(room.fit(prompt, asked.max_new_tokens), asked, on_event=on_event, speculate=speculate)

        return AsyncTokenStream(submit)

    def _require_room(self) -> None:
        """Refuse a request that could not be taken now."""
        if self.failure is not None:
            stopped = f"this scheduler has stopped ({self.failure}): make another one"
            raise UnavailableError(stopped) from self.failure
        if self._end_s is not None:
            raise UnavailableError("this scheduler is closed: make another one")
        if len(self._tickets) >= self._most_tickets:
            full, retry_after_s = f"{self._max_waiting} requests wait already (max_waiting)", self._retry_after_s
            raise QueueFullError(f"{full}: try again in {retry_after_s:.1f} s", retry_after_s)

    @property
    def counters(self) -> SchedulerCounters:
        """Return what was done up to the last pass."""
        with self._changed:
            counters = self._counters
            return replace(counters, waiting=max(0, len(self._tickets) - counters.running))

    def close(self, grace_s: float = 0.0) -> None:
        """Take no more requests, let those that there are finish, cancel what has not after `grace_s`, and give the
        runtime back, which stays open. Returns when all of that is done.

        Raises:
            OptionError: It was called in an `on_event`, which it would wait for.
        """
        own = threading.current_thread() is self._thread
        require(not own, "an on_event cannot close its scheduler: do so in another thread")
        with self._changed:
            end_s = time.perf_counter() + grace_s
            self._end_s = end_s if self._end_s is None else min(self._end_s, end_s)
            self._changed.notify()
        self._thread.join()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cancel(self, request: Request) -> None:
        with self._changed:
            self._cancelled.append(request)
            self._changed.notify()

    # --- the scheduler's thread

    def _run(self) -> None:
        engine: Engine | None = None
        try:
            with self._serving() as engine:
                self._begun.set()
                while self._has_work():
                    self._take_orders(engine, {})
                    self._tell(engine, engine.step())
                    self._count(engine)
        except BaseException as error:  # nobody may be left waiting for an event
            with self._changed:
                self.failure = error
        finally:
            self._begun.set()
            if engine is not None:
                self._end_all(engine)

    def _end_all(self, engine: Engine) -> None:
        """End the requests that have not, now that the runtime is given back."""
        with self._changed:
            left, self._tickets = self._tickets, {}
        for request, ticket in left.items():
            with suppress(Exception):  # of a device that fails
                engine.cancel(request)
            ticket.tell(ErrorEvent(self.failure or UnavailableError("this scheduler has stopped"), request.result))

    def _has_work(self) -> bool:
        """Wait until there is any, or the scheduler is being closed."""
        with self._changed:
            while not self._tickets and self._end_s is None:
                self._cancelled.clear()
                if self._closes_when_idle and self._totals["finished"]:
                    self._end_s = time.perf_counter()
                    break
                self._changed.wait()
            return bool(self._tickets)

    def _take_orders(self, engine: Engine, sent: Mapping[Request, int]) -> None:
        """Do what others have asked for since the last time. Of requests that are cancelled those tokens of a step are
        kept that were `sent`, by request."""
        with self._changed:
            submitted, self._submitted = self._submitted, deque()
            cancelled, self._cancelled = self._cancelled, deque()
            if not sent and self._end_s is not None and time.perf_counter() >= self._end_s:  # waited for long enough
                cancelled = deque(self._tickets)
        for request in submitted:
            engine.add(request)
        for request in cancelled:
            with suppress(BudgetError):  # it has ended all the same
                engine.cancel(request, keep=sent.get(request))
        self._end(engine, [(request, None) for request in dict.fromkeys(cancelled) if request in self._tickets])

    def _tell(self, engine: Engine, outputs: Sequence[RequestOutput]) -> None:
        """Tell of new tokens, unless a client has cancelled its request meanwhile, then of requests that have ended."""
        sent = {output.request: output.request.new_tokens - len(output.tokens) for output in outputs}
        for output in outputs:
            request = output.request
            for event in output.tokens:
                if request not in self._tickets:
                    break
                if not sent[request]:
                    self._totals.update(prompt_tokens=request.prompt_tokens, kept_tokens=request.num_kept)
                self._totals["tokens"] += 1
                sent[request] += 1
                self._tickets[request].tell(event)
                self._take_orders(engine, sent)
        ended = [(output.request, output.error) for output in outputs if output.request.result is not None]
        self._end(engine, [(request, error) for request, error in ended if request in self._tickets])

    def _end(self, engine: Engine, ended: Sequence[tuple[Request, BaseException | None]]) -> None:
        """Tell of requests that have ended, each by an error of its own or by none."""
        for request, _ in ended:  # before anyone looks: counters never go back
            self._totals["finished"] += 1
            self._proposed += request.tally.proposed_by_source
            self._accepted += request.tally.accepted_by_source
        for request, error in ended:
            with self._changed:
                ticket = self._tickets.pop(request)
            assert request.result is not None
            self._count(engine)
            ticket.tell(ticket.end(request.result) if error is None else ErrorEvent(error, request.result))

    def _count(self, engine: Engine) -> None:
        """Let others see how far it has come."""
        running = list(engine.running.values())
        counters = SchedulerCounters(
            running=len(running), passes=engine.passes, **self._totals,
            proposed=dict(sum((one.tally.proposed_by_source for one in running), self._proposed)),
            accepted=dict(sum((one.tally.accepted_by_source for one in running), self._accepted)),
        )  # fmt: skip
        # One of these is the next to free a slot, at the latest: each takes for all of its tokens what it took so far.
        left_s = [
            (one.last_token_s - one.first_token_s) / (one.new_tokens - 1) * (one.room + 1)
            for one in running if one.new_tokens > 1
        ]  # fmt: skip
        with self._changed:
            self._counters, self._retry_after_s = counters, min(left_s, default=_FIRST_RETRY_S)
