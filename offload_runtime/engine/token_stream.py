"""Streams: one answer, piece by piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from offload_runtime.engine.engine import RequestOutput
from offload_runtime.engine.request import Request
from offload_runtime.engine.stats import GenerationResult
from offload_runtime.errors import OptionError
from offload_runtime.sampling import TokenLogprobs


class TokenStream(Iterator[str]):
    """Iterates over the pieces of text of one answer. Nothing is computed before the first piece is asked for.

    Args:
        request: The only one of its engine.
        step: Takes the next step of the request, and waits for other calls of the runtime before.
        cancel: Ends it.
    """

    def __init__(
        self, request: Request, step: Callable[[Request], Sequence[RequestOutput]], cancel: Callable[[Request], None]
    ) -> None:
        self._request, self._step, self._cancel = request, step, cancel
        self._pieces = deque[str]()
        self._is_over = self._has_ended = False  # no more pieces will come; and there is a result

    def __next__(self) -> str:
        while not self._is_over:
            if self._pieces and self._request.finish_reason != "interrupted":
                piece = self._pieces.popleft()
                self._is_over = self._has_ended = self._request.finish_reason is not None and not self._pieces
                return piece
            self._is_over = True  # unless the step succeeds
            for output in self._step(self._request):
                self._pieces.extend(event.text for event in output.tokens if event.text)
                if output.error is not None:
                    raise output.error
            self._is_over = self._has_ended = self._request.finish_reason is not None and not self._pieces
        raise StopIteration

    @property
    def has_ended(self) -> bool:
        """Say whether the last piece was given, or the stream was closed."""
        return self._has_ended

    @property
    def result(self) -> GenerationResult:
        """Return the finished generation; raise `OptionError` before the last piece or `close`."""
        if not self._has_ended or self._request.result is None:
            raise OptionError("this answer has not ended: iterate to its end or call close() first")
        return self._request.result

    @property
    def logprobs(self) -> Sequence[TokenLogprobs]:
        """Return those of the tokens so far, where they were asked for; some text of them may still be held back."""
        return self._request.logprobs

    def close(self) -> None:
        """Stop here. What was generated is kept in `result`, and the cache stays usable."""
        self._cancel(self._request)
        self._pieces.clear()
        self._is_over = self._has_ended = True
