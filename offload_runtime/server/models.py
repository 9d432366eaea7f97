"""The models that a server has: which one a request means, what is told of each, and what answers it, which is the one
that there is, or one of several that take turns."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal

from offload_runtime.engine import Scheduler, SchedulerCounters
from offload_runtime.errors import UnavailableError
from offload_runtime.params import GenerationParams
from offload_runtime.server import ollama, schema
from offload_runtime.server.failures import ModelNotFoundError
from offload_runtime.server.turns import LoadedModel, OfferedModel, Turn, Turns

if TYPE_CHECKING:
    from offload_runtime.engine import Runtime

State = Literal["loading", "ready", "stopping", "failed"]


class ServedModels:
    """The models of a server. What requests need is for the event loop's thread, `begin` to `stop` for the one that
    loads models.

    Args:
        max_seconds: How long a request may wait for its model.
        turns: Of several models, or of one that is not always loaded; None: there is one, which `begin` brings.

    Attributes:
        begun_s: Since when they are served.
    """

    def __init__(self, max_seconds: float, turns: Turns | None = None) -> None:
        self._max_seconds, self.turns = max_seconds, turns
        self._state: State = "loading"
        self._loaded: LoadedModel | None = None
        self._counted: SchedulerCounters | None = None  # by those that are gone
        self.begun_s = int(time.time())

    # --- for the thread that loads them

    def begin(self, runtime: Runtime, scheduler: Scheduler, *names: str) -> None:
        """Serve one model by these names from here on, the first of which it answers by."""
        self.serve(LoadedModel(OfferedModel.of(runtime, names), runtime, scheduler))
        self.open()

    def open(self) -> None:
        """Take requests from here on."""
        self.begun_s = int(time.time())
        self._state = "ready"

    def serve(self, loaded: LoadedModel) -> None:
        """Answer with a model from here on."""
        self._loaded = loaded
        if self.turns is not None:
            self.turns.begin(loaded)

    def forget(self) -> None:
        """Hold the model no more, but for what it has counted."""
        if (counted := self.counters()) is not None:
            self._counted = replace(counted, running=0, waiting=0)
        self._loaded = None

    def suspend(self) -> None:
        """Refuse requests until there is a model again."""
        self.forget()
        self._state = "loading"

    def stop(self) -> None:
        """Take no more requests; those that wait for a model are refused."""
        self._state = "stopping"
        if self.turns is not None:
            self.turns.close(UnavailableError("the server is stopping: try again later"))

    @property
    def state(self) -> State:
        """Return whether requests are answered; `failed` by a defect of the model that is loaded, so that whoever
        watches starts another server."""
        loaded = self._loaded
        if self._state == "ready" and loaded is not None and loaded.scheduler.failure is not None:
            self._state = "failed"
        return self._state

    def counters(self) -> SchedulerCounters | None:
        """Return what all models have done so far, also those that are gone, and how many requests wait; None before
        there was one."""
        loaded, found = self._loaded, self._counted
        if loaded is not None:
            now = loaded.scheduler.counters
            found = now if found is None else found + now
        if self.turns is None:
            return found
        found = found or SchedulerCounters()
        return replace(found, waiting=found.waiting + self.turns.num_waiting)

    # --- for requests

    def offered(self) -> tuple[OfferedModel, ...]:
        """Return the models that may be asked for. Raises `UnavailableError` while there are none."""
        state, is_there = self.state, self.turns is not None or self._loaded is not None
        if state not in ("ready", "failed") or not is_there:  # one that has failed says itself why it refuses
            raise UnavailableError(f"the server is {state}: try again later")
        if self.turns is not None:
            return self.turns.models
        assert self._loaded is not None
        return (self._loaded.model,)

    def named(self, name: str | None) -> OfferedModel:
        """Return the model of a name, the first one without any. Raises `ModelNotFoundError`, and as `offered`."""
        offered = self.offered()
        found = next((one for one in offered if name is None or name in one.names), None)
        if found is None:
            names = ", ".join(repr(own) for one in offered for own in one.names)
            raise ModelNotFoundError(f"model {name!r} is not served here, but {names}")
        return found

    def ask(self, name: str | None, keep_alive_s: float | None = None) -> Turn:
        """Return a turn of the model of a name. Raises as `named` and `Turns.ask`."""
        model = self.named(name)
        if self.turns is not None:
            return self.turns.ask(model, keep_alive_s)
        turn = Turn(model)
        assert self._loaded is not None, "else it was refused"
        turn.loaded.set_result(self._loaded)
        return turn

    async def waiting(self, turn: Turn) -> AsyncIterator[str]:
        """Yield what a turn waits for, whenever that is something else, until it has come or cannot. Raises
        `UnavailableError` where that takes too long."""
        assert self.turns is not None, "with one model nobody waits"
        news, said, loop = asyncio.Event(), "", asyncio.get_running_loop()
        end_s = loop.time() + self._max_seconds

        def tell(*_: object) -> None:
            loop.call_soon_threadsafe(news.set)

        turn.on_news = tell
        turn.loaded.add_done_callback(tell)
        while not turn.loaded.done():
            if (awaited := self.turns.what_is_awaited()) != said:
                yield awaited
                said = awaited
                continue
            try:
                await asyncio.wait_for(news.wait(), end_s - loop.time())
            except asyncio.TimeoutError:
                raise UnavailableError("the request has waited too long for its model: send it again") from None
            news.clear()

    def unload(self, name: str | None) -> bool:
        """Keep a model no longer than requests for it run; return whether models can go at all. Raises as `named`."""
        model = self.named(name)
        if self.turns is not None:
            self.turns.unload(model)
        return self.turns is not None

    # --- what is told of them

    def _status(self, model: OfferedModel) -> str:
        return "loaded" if self.turns is None else self.turns.status(model)

    def about(self, model: OfferedModel, name: str) -> dict[str, Any]:
        """Return a model as OpenAI and Anthropic list it."""
        about = {"id": name, "object": "model", "created": self.begun_s, "owned_by": "offload-runtime"}
        begun = datetime.fromtimestamp(self.begun_s, timezone.utc).isoformat()
        of_anthropic = {"type": "model", "display_name": name, "created_at": begun, "lifecycle": "active"}
        usual = GenerationParams().changed(**model.defaults)
        of_ours = {
            "x_defaults": {one: usual.value(one) for one in schema.SAMPLING}, "x_status": self._status(model),
            "x_template_options": list(model.template_options),
        }  # fmt: skip
        return {**about, **of_anthropic, "max_model_len": model.context_tokens, **of_ours}

    def page(self) -> dict[str, Any]:
        """Return all of them, as `/v1/models` lists them."""
        found = [self.about(model, name) for model in self.offered() for name in model.names]
        return {
            "object": "list", "data": found, "has_more": False, "first_id": found[0]["id"], "last_id": found[-1]["id"],
        }  # fmt: skip

    def tags(self) -> list[dict[str, Any]]:
        """Return all of them, as ollama lists them."""
        return [
            {**ollama.tag(model, name, self.begun_s), "x_status": self._status(model)}
            for model in self.offered() for name in model.names
        ]  # fmt: skip

    def running(self) -> list[dict[str, Any]]:
        """Return the one that is loaded, as ollama says which are."""
        self.offered()
        loaded = self._loaded if self.turns is None else self.turns.loaded
        if loaded is None:
            return []
        keeps_s = math.inf if self.turns is None else self.turns.keeps_s
        expires = None if math.isinf(keeps_s) else ollama.now(time.time() + keeps_s)
        more = {"size_vram": loaded.runtime.plan.device_bytes, "context_length": loaded.runtime.context_tokens}
        return [{**ollama.tag(loaded.model, loaded.model.names[0], self.begun_s), "expires_at": expires, **more}]
