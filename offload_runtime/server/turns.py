"""The models that a server offers, and whose turn it is where there is room for one of them at a time.

A request waits for a turn of its model (`Turns.ask`) and keeps it until it is answered. Once a request for another
model waits, those that come later wait behind it, whatever they are for; so a model's turn ends, and the next one is
that of the request that has waited longest, together with all those that wait for the same model by then. Nobody waits
for ever, and a model is not loaded for every single request.

Requests ask from the event loop; the thread that loads models asks what is `wanted` and when a turn `is_over`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload_runtime.engine import Scheduler
from offload_runtime.engine.chat_template import ChatTemplate
from offload_runtime.errors import OffloadError, QueueFullError
from offload_runtime.server.parsers import writes_calls

if TYPE_CHECKING:
    from offload_runtime.engine import Runtime

_SWITCHES = ("enable_thinking", "reasoning_effort")  # options of chat templates that many models have
_RETRY_S = 5.0  # for those that found no place to wait in


class ModelLoadError(OffloadError):
    """The model that a request names cannot be loaded, and to try again does not help."""


@dataclass(frozen=True, eq=False)
class OfferedModel:
    """Holds what a server says of a model, whether that is loaded or not.

    Attributes:
        names: What requests may call it; answers have the first.
        architecture: Transformers' name of its family.
        stored_as: In what formats most of its weights are.
        weight_bytes: What these take.
        context_tokens: What prompt and answer may have together; of one that is not loaded, what its makers say.
        defaults: How tokens are chosen where a request does not say, as the model's makers want it; OpenAI's
            temperature is 1.
        template: Its chat template; empty where it has none.
        template_options: Which of the options that many templates have it reads.
        has_calls: It is known how it writes calls of functions.
    """

    names: tuple[str, ...]
    architecture: str
    stored_as: Sequence[str]
    weight_bytes: int
    context_tokens: int
    defaults: Mapping[str, float]
    template: str
    template_options: tuple[str, ...]
    has_calls: bool

    @classmethod
    def described(
        cls, names: Sequence[str], tokenizer: Any, *, architecture: str, stored_as: Sequence[str], weight_bytes: int,
        defaults: Mapping[str, float], context_tokens: int,
    ) -> OfferedModel:  # fmt: skip
        """Return it of what is known of a model by its files."""
        template = None if getattr(tokenizer, "chat_template", None) is None else ChatTemplate(tokenizer)
        unread = _SWITCHES if template is None else template.unread(_SWITCHES)
        return cls(
            tuple(names), architecture, stored_as, weight_bytes, context_tokens,
            {"temperature": 1.0, **defaults}, "" if template is None else template.source,
            tuple(one for one in _SWITCHES if one not in unread),
            template is not None and writes_calls(tokenizer),
        )  # fmt: skip

    @classmethod
    def of(cls, runtime: Runtime, names: Sequence[str]) -> OfferedModel:
        """Return it of a model that is loaded."""
        layout = runtime.plan.target.layout
        return cls.described(
            names, runtime.tokenizer, architecture=runtime.config.architecture, stored_as=layout.main_kinds,
            weight_bytes=layout.total_bytes, defaults=runtime.sampling_defaults, context_tokens=runtime.context_tokens,
        )  # fmt: skip


@dataclass(frozen=True)
class LoadedModel:
    """Answers requests for a model."""

    model: OfferedModel
    runtime: Runtime
    scheduler: Scheduler


class Turn:
    """A request's turn.

    Args:
        model: What it is for.
        on_end: Called with it when it is over.
        keep_alive_s: How long the model stays behind it; None leaves that to the server.

    Attributes:
        loaded: Has the model once the turn has come, or why it does not.
        on_news: Called, in any thread, when something else is waited for (`Turns.what_is_awaited`).
    """

    def __init__(
        self, model: OfferedModel, on_end: Callable[[Turn], None] = lambda turn: None, keep_alive_s: float | None = None
    ) -> None:
        self.model, self.keep_alive_s, self._on_end = model, keep_alive_s, on_end
        self.loaded: Future[LoadedModel] = Future()
        self.on_news: Callable[[], None] = lambda: None

    def end(self) -> None:
        """Give it back, or wait no more. Does nothing to one that is over."""
        self._on_end(self)


class Turns:
    """Lets requests wait for models of which one is loaded at a time. Any thread may call it.

    Args:
        models: That are offered.
        max_waiting: Requests that may wait for a turn, at least one.
        keep_alive_s: How long a model stays that nobody asks for; infinite keeps it until another one is asked for.
    """

    def __init__(self, models: Sequence[OfferedModel], max_waiting: int, keep_alive_s: float) -> None:
        self.models = tuple(models)
        self._most_waiting, self._usual_keep_alive_s = max(1, max_waiting), keep_alive_s
        # What threads share, and under the lock of this condition.
        self._changed = threading.Condition()
        self._waiting, self._running = deque[Turn](), set[Turn]()
        self._loading: OfferedModel | None = None
        self._loaded: LoadedModel | None = None
        self._idle_since_s, self._keep_alive_s = 0.0, keep_alive_s  # of the one that is loaded
        self._refusal: OffloadError | None = None

    # --- for requests

    def ask(self, model: OfferedModel, keep_alive_s: float | None = None) -> Turn:
        """Return a turn of a model, whose time has come where nobody has to wait.

        Raises:
            QueueFullError: As many requests wait as may.
            OffloadError: No more turns are given.
        """
        turn = Turn(model, self._end, keep_alive_s)
        with self._changed:
            if self._refusal is not None:
                raise self._refusal
            if len(self._waiting) >= self._most_waiting:
                full = f"{len(self._waiting)} requests wait for a model already (max_waiting)"
                raise QueueFullError(f"{full}: try again in {_RETRY_S:.0f} s", _RETRY_S)
            self._waiting.append(turn)
            self._let_in()
            self._changed.notify()
        return turn

    def unload(self, model: OfferedModel) -> None:
        """Keep a model no longer than requests for it run."""
        with self._changed:
            if self._loaded is not None and self._loaded.model is model:
                self._keep_alive_s = 0.0
                self._changed.notify()

    def status(self, model: OfferedModel) -> str:
        """Say whether a model is `loaded`, `loading` or `unloaded`."""
        with self._changed:
            if self._loading is model:
                return "loading"
            return "loaded" if self._loaded is not None and self._loaded.model is model else "unloaded"

    @property
    def loaded(self) -> LoadedModel | None:
        """Return the model that is loaded, if one is."""
        return self._loaded

    @property
    def keeps_s(self) -> float:
        """Return how long the model that is loaded stays unless it is asked for again; infinite for ever."""
        with self._changed:
            since_s = time.perf_counter() if self._running else self._idle_since_s
            return max(0.0, since_s + self._keep_alive_s - time.perf_counter())

    @property
    def num_waiting(self) -> int:
        """Return how many requests wait for a turn."""
        return len(self._waiting)

    def what_is_awaited(self) -> str:
        """Say what those wait for that have no turn yet."""
        with self._changed:
            if self._loading is not None:
                return f"loading {self._loading.names[0]}"
            if self._loaded is not None:
                return f"waiting until requests for {self._loaded.model.names[0]} are answered"
            return "waiting for a model"

    # --- for the thread that loads models

    def wanted(self, timeout_s: float) -> OfferedModel | None:
        """Wait for a request and return the model that it is for, which is to be loaded: `begin` or `fail` comes next.
        None where no request came."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, timeout_s):
                return None
            self._loading = self._waiting[0].model
            self._tell()
            return self._loading

    def begin(self, loaded: LoadedModel) -> None:
        """Begin the turn of all that wait for a model, which is loaded."""
        with self._changed:
            self._loading, self._loaded = None, loaded
            self._idle_since_s, self._keep_alive_s = time.perf_counter(), self._usual_keep_alive_s
            for turn in [one for one in self._waiting if one.model is loaded.model]:
                self._waiting.remove(turn)
                self._grant(turn, loaded)
            self._tell()

    def fail(self, model: OfferedModel, error: OffloadError) -> None:
        """Tell all that wait for a model that it cannot be loaded, and why."""
        with self._changed:
            self._loading = None
            for turn in [one for one in self._waiting if one.model is model]:
                self._waiting.remove(turn)
                turn.loaded.set_exception(error)

    def is_over(self, timeout_s: float) -> bool:
        """Wait until the model that is loaded is to go: nobody has a turn of it, and somebody waits for another one or
        it was kept for long enough. Then nobody gets another turn of it; False where it stays."""
        with self._changed:
            if not self._changed.wait_for(self._is_over, timeout_s):
                return False
            self._loaded = None
            return True

    def close(self, refusal: OffloadError) -> None:
        """Give no more turns, and tell those that wait why. Turns that have begun go on."""
        with self._changed:
            self._refusal, waiting, self._waiting = refusal, self._waiting, deque()
            for turn in waiting:
                turn.loaded.set_exception(refusal)

    # --- under the lock

    def _is_over(self) -> bool:
        if self._running:
            return False
        return bool(self._waiting) or time.perf_counter() >= self._idle_since_s + self._keep_alive_s

    def _tell(self) -> None:
        for turn in self._waiting:
            turn.on_news()

    def _let_in(self) -> None:
        """Let those in that wait first and are for the model that is loaded."""
        while self._waiting and self._loaded is not None and self._waiting[0].model is self._loaded.model:
            self._grant(self._waiting.popleft(), self._loaded)

    def _grant(self, turn: Turn, loaded: LoadedModel) -> None:
        self._running.add(turn)
        turn.loaded.set_result(loaded)

    def _end(self, turn: Turn) -> None:
        with self._changed:
            if turn in self._running:
                self._running.remove(turn)
                self._idle_since_s = time.perf_counter()
                kept_s = turn.keep_alive_s
                self._keep_alive_s = self._usual_keep_alive_s if kept_s is None else kept_s
            elif turn in self._waiting:
                self._waiting.remove(turn)
                self._let_in()
            self._changed.notify()
