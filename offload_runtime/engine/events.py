"""What whoever asks a scheduler is told of a request, and how they end it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from offload_runtime.engine.engine import TokenEvent
from offload_runtime.engine.request import GenerationResult


@dataclass(frozen=True)
class EndEvent:
    """The answer has ended. `text` is what was held back until now of one that was cancelled, else empty."""

    result: GenerationResult
    text: str = ""


@dataclass(frozen=True)
class ErrorEvent:
    """The request has ended by an error; `result` is the answer as far as it had come, `interrupted`, or None where the
    device cannot even tell that any more."""

    error: BaseException
    result: GenerationResult | None


Event = TokenEvent | EndEvent | ErrorEvent
OnEvent = Callable[[Event], None]


class Ticket:
    """Stands for a request that was submitted: `cancel` is for its client, the rest for its scheduler.

    Args:
        on_event: Called with its events.
        on_cancel: Called to have it cancelled.
    """

    def __init__(self, on_event: OnEvent, on_cancel: Callable[[], None]) -> None:
        self._on_event, self._on_cancel = on_event, on_cancel
        self._num_shown = 0  # characters of the answer that were told

    def cancel(self) -> None:
        """End the answer as it is, before the next pass; its slot is free then, and its `EndEvent` comes. Never waits,
        and does nothing to one that has ended."""
        self._on_cancel()

    def tell(self, event: Event) -> None:
        """Give its client an event, unless that has failed before."""
        if isinstance(event, TokenEvent):
            self._num_shown += len(event.text)
        try:
            self._on_event(event)
        except Exception:
            logging.getLogger(__name__).exception("an on_event has failed: its request is cancelled")
            self._on_event = lambda event: None
            self.cancel()

    def end(self, result: GenerationResult) -> EndEvent:
        """Return the event of its end."""
        return EndEvent(result, result.text[self._num_shown :])
