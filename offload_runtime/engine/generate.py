"""The token loop: prefill, then steps of speculation for all requests together, until every one is finished.

A token's journey begins here: `Generation.pieces` asks `StepRunner` (steps.py) for the next step, which asks the
proposer, the target's runner and the sampler. A single answer is the batch of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch

from offload_runtime.config import require
from offload_runtime.engine.request import Request
from offload_runtime.engine.stats import GenerationResult, PassMeter
from offload_runtime.engine.steps import RuntimeParts, StepRunner, WindowLimits, WindowSize
from offload_runtime.errors import BudgetError, CopyError, DeviceError, OptionError
from offload_runtime.memory import current_device
from offload_runtime.sampling import TokenLogprobs, token_logprobs
from offload_runtime.speculation import Acceptance, OnLogits, draft_ahead, first_token, still_computing

OnProgress = Callable[[int, int], None]
Guard = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Hooks:
    """Who is told, or asked, while tokens are generated.

    Attributes:
        on_prefill: Called with (layers done, layers), of all prompts together, while they are worked on.
        on_progress: Called with (requests finished, requests) before every pass and at the end.
        should_stop: Asked before every pass; once it says yes, requests that are not finished end as they are.
        on_logits: As of `run_step`; called for the first token as well.
    """

    on_prefill: OnProgress | None = None
    on_progress: OnProgress | None = None
    should_stop: Callable[[], bool] | None = None
    on_logits: OnLogits | None = None


class Generation:
    """Decodes requests together: each pass of the target verifies a window of every one that is not finished.

    Args:
        parts: The runtime's machinery.
        requests: One for each of the slots 0, 1, …
        windows: Most tokens proposed per step, or the limits of what is chosen.
        hooks: Who else takes part.
    """

    def __init__(
        self, parts: RuntimeParts, requests: Sequence[Request], windows: WindowSize | WindowLimits, hooks: Hooks
    ) -> None:
        self.requests = requests
        self.is_current = True  # the target's cache is still this generation's
        self._parts, self._hooks = parts, hooks
        self._steps = StepRunner(parts, windows, on_logits=hooks.on_logits)
        self._meter: PassMeter | None = None  # of the passes, once there are any

    def pieces(self) -> Generator[str, None, None]:
        """The token loop: the text that every token adds to its request, as soon as it is decided.

        Raises:
            BudgetError: Memory ran out during a pass; what came before stays in the requests.
        """
        parts, steps, sampling = self._parts, self._steps, [request.params.sampling for request in self.requests]
        for request in self.requests:
            request.started_s = time.perf_counter()
        with self.working():
            parts.sampling.assign(sampling)
            steps.proposer.start(sampling)
        for request in self.requests:
            with self.working():
                first, logprobs = self._prefill(request)
            self._meter = meter = PassMeter(parts, request.first_token_s)
            yield from self._push(request, [first], request.first_token_s, logprobs)
        while active := self._active():
            with self.working():
                results = steps.run(active)
            ended_s = meter.lap()
            for request, result in zip(active, results, strict=True):
                request.passes += 1
                request.tally.add(result.proposal.sources, result.accepted_sources, window=steps.window)
                yield from self._push(request, result.tokens, ended_s, result.logprobs)

    def finish(self) -> list[GenerationResult]:
        """All answers; where memory runs out once each has a token, the error has what there is of them."""
        try:
            for _ in self.pieces():
                pass
        except BudgetError as error:
            if any(not request.new_tokens for request in self.requests):
                raise
            self.interrupt()
            raise BudgetError(str(error), self.results()) from error
        return self.results()

    def interrupt(self) -> None:
        """End the requests that are not finished as they are."""
        for request in self.requests:
            if request.finish_reason is None:
                request.finish("interrupted")
                self._let_go(request)

    def results(self) -> list[GenerationResult]:
        """What there is of every request; all are finished."""
        for request in self.requests:
            request.acceptance = self._acceptance(request)
        return (self._meter or PassMeter(self._parts)).results(self.requests, self._steps.predicted_s)

    def _active(self) -> list[Request]:
        """Requests of the next pass; none where all are finished, or somebody wants to stop."""
        active = [request for request in self.requests if request.finish_reason is None]
        hooks = self._hooks
        if hooks.on_progress is not None:
            hooks.on_progress(len(self.requests) - len(active), len(self.requests))
        if active and hooks.should_stop is not None and hooks.should_stop():
            self.interrupt()
            return []
        return active

    def _prefill(self, request: Request) -> tuple[int, Sequence[TokenLogprobs]]:
        """Read a prompt; the first token behind it, with its log-probabilities if they are wanted."""
        target, slot, count, hooks = self._parts.target.runner, request.slot, len(self.requests), self._hooks

        def on_layer(done: int, layers: int) -> None:
            if hooks.on_prefill is not None:
                hooks.on_prefill(slot * layers + done, count * layers)

        logits = target.prefill(slot, request.sequence[request.num_kept :], on_layer)
        recorder, proposer = self._parts.recorder, self._steps.proposer
        if request.params.max_new_tokens > 1 and proposer.name is not None:
            with recorder.span("prepare", host=True, tokens=[len(request.sequence)]) if recorder else nullcontext():
                proposer.prepare(slot, request.sequence)
            draft_ahead(proposer, still_computing(logits), recorder)
        token = first_token(target, self._parts.sampling, slot, logits, request.sequence)
        wanted = request.params.logprobs
        logprobs = () if wanted is None else token_logprobs(logits, [token], wanted)
        if hooks.on_logits is not None:
            hooks.on_logits(slot, logits)
        request.first_token_s = time.perf_counter()
        return token, logprobs

    def _push(
        self, request: Request, tokens: Sequence[int], now_s: float, logprobs: Sequence[TokenLogprobs]
    ) -> Iterator[str]:
        """Append tokens, and their log-probabilities if there are any, until one finishes the request."""
        request.last_token_s = now_s
        for number, token in enumerate(tokens):
            request.logprobs += logprobs[number : number + 1]
            piece = request.push(token)
            if request.finish_reason is not None:
                self._let_go(request)
                yield piece
                return
            yield piece

    def _let_go(self, request: Request) -> None:
        """Bring the cache of a finished request to its tokens: a step may have committed some behind an end in the
        middle of its window. Of several requests it is of no more use, and would be streamed in every pass."""
        if not self.is_current:
            return
        cache = self._parts.target.runner.cache
        kept = len(request.sequence) - 1 if len(self.requests) == 1 else 0
        with suppress(CopyError):  # whatever is asked for next raises it again
            cache.truncate(request.slot, min(cache.length(request.slot), kept))

    def _acceptance(self, request: Request) -> Sequence[Acceptance]:
        proposer, inner = self._steps.proposer, list[Acceptance]()
        if proposer.name is None or self._meter is None:
            return ()
        if self.is_current:  # else the proposer counts for another generation by now
            with device_errors(self._parts.budget.device):
                inner.extend(proposer.counts(request.slot))
        return request.tally.levels(proposer.name, inner)

    def working(self) -> AbstractContextManager[None]:
        """Around work on the target: an error instead of another generation's keys."""
        current = self.is_current
        require(current, "another generation has begun on this runtime since, or it was closed: this one cannot go on")
        return device_errors(self._parts.budget.device)


class TokenStream(Iterator[str]):
    """One answer, as an iterator over pieces of text. Nothing is computed before the first piece is asked for.

    Args:
        generation: Of a single request.
        locked: Around each piece, which waits for other calls of the runtime in it.
        on_end: Called once, when the answer has ended for whatever reason and its result is there.
    """

    def __init__(
        self, generation: Generation, locked: Guard, on_end: Callable[[TokenStream], None] | None = None
    ) -> None:
        self._generation, (self._request,), self._locked, self._on_end = generation, generation.requests, locked, on_end
        self._pieces = generation.pieces()
        self._result: GenerationResult | None = None

    def __next__(self) -> str:
        with self._locked():
            for piece in self._pieces:
                if self._request.finish_reason is not None:
                    self._settle()
                if piece:
                    return piece
        raise StopIteration

    @property
    def result(self) -> GenerationResult:
        """The finished generation; `OptionError` before the last piece or `close`."""
        if self._result is None:
            raise OptionError("this answer has not ended: iterate to its end or call close() first")
        return self._result

    @property
    def logprobs(self) -> Sequence[TokenLogprobs]:
        """Of the tokens so far, where they were asked for; some text of them may still be held back."""
        return self._request.logprobs

    def close(self) -> None:
        """Stop here. What was generated is kept in `result`, and the cache stays usable."""
        with self._locked():
            self._pieces.close()
            self._generation.interrupt()
            self._settle()

    def _settle(self) -> None:
        if self._result is None:
            (self._result,) = self._generation.results()
            if self._on_end is not None:
                self._on_end(self)


@contextmanager
def device_errors(device: torch.device) -> Iterator[None]:
    """Around work on a device: it is the current one, and its failures are typed errors."""
    try:
        with current_device(device):
            yield
    except torch.OutOfMemoryError as error:
        ways = "raise --vram, lower --context or keep fewer layers resident"
        raise BudgetError(f"the device memory allowed did not suffice ({error}): {ways}") from error
    except torch.AcceleratorError as error:
        raise DeviceError(f"the device failed ({error}): load the runtime again") from error
