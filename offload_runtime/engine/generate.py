"""The token loop: requests join as slots are free, a step of speculation serves all that run, and each leaves when it
has finished. In a batch that begins together all join before the first step; a single answer is the batch of one.

A token's journey begins here: `Generation.step` asks `StepRunner` (steps.py) for the next step, which asks the
proposer, the target's runner and the sampler.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch

from offload_runtime.config import require
from offload_runtime.engine.prefix_cache import PrefixCache
from offload_runtime.engine.request import Request
from offload_runtime.engine.stats import GenerationResult, PassMeter
from offload_runtime.engine.steps import RuntimeParts, StepRunner
from offload_runtime.errors import (
    BudgetError,
    ContextLengthError,
    DeviceError,
    GrammarError,
    NumericalError,
    OffloadError,
    OptionError,
)
from offload_runtime.memory import current_device
from offload_runtime.model import Window
from offload_runtime.sampling import TokenLogprobs, token_logprobs
from offload_runtime.speculation import OnLogits

OnProgress = Callable[[int, int], None]
Guard = Callable[[], AbstractContextManager[None]]


# Who "proposed" the token that the target adds to those accepted.
TARGET = "target"


@dataclass(frozen=True)
class Hooks:
    """Who is told, or asked, while tokens are generated.

    Attributes:
        on_prefill: Called with (layers done, layers), of the prompts that the generation began with, as they are
            worked on.
        on_progress: Called with (requests finished, requests), of the same, before every pass and at the end.
        should_stop: Asked before every pass; once it says yes, requests that are not finished end as they are.
        on_logits: As of `run_step`; called for the first token as well.
        on_end: Called with each request that has ended, its result, and the error of its own that it ended by, if any.
            None: such an error is raised, which ends them all.
    """

    on_prefill: OnProgress | None = None
    on_progress: OnProgress | None = None
    should_stop: Callable[[], bool] | None = None
    on_logits: OnLogits | None = None
    on_end: Callable[[Request, GenerationResult, BaseException | None], None] | None = None


@dataclass(frozen=True)
class TokenEvent:
    """A token of an answer.

    Attributes:
        token: The token.
        text: What may be shown now; nothing while a character is incomplete or a stop string may follow.
        source: Who proposed it: `ngram`, `draft` or `retrieval` (the verifier over retrieved chunks); `target` where it
            is the target's own.
        logprobs: Its log-probability and the likeliest tokens', where they are wanted.
        prompt_logprobs: With the first token, where they are wanted: those of the prompt's tokens behind the first.
    """

    token: int
    text: str
    source: str
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Sequence[TokenLogprobs] | None = None


Answered = tuple[Request, TokenEvent]  # whose token it is


class Generation:
    """Decodes requests together: each pass of the target verifies a window of every one that runs.

    A request waits until a slot is free. Each slot has room for as many tokens as the runtime was loaded for, and a
    request that does not fit is refused before it gets here: nobody who runs is ever held up for want of room.

    Args:
        parts: The runtime's machinery.
        requests: Those that it begins with; others may `join`.
        hooks: Who else takes part.
        prefix_cache: What the slots hold from before.

    Attributes:
        is_current: Whether the target's cache is still this generation's.
        waiting: Requests that have no slot yet, in their order.
        running: Those that have one, by slot.
        prefix_cache: What the slots hold.
    """

    def __init__(
        self, parts: RuntimeParts, requests: Sequence[Request], hooks: Hooks, prefix_cache: PrefixCache
    ) -> None:  # fmt: skip
        self.requests, self.is_current = requests, True
        self.waiting, self.running = deque[Request](), dict[int, Request]()
        self._parts, self._hooks = parts, hooks
        self._num_slots = parts.plan.target.batch
        self.prefix_cache = prefix_cache
        self._steps = StepRunner(parts, on_logits=hooks.on_logits)
        self._meter = PassMeter(parts)
        self._results: dict[Request, GenerationResult] = {}  # unless the hooks are told
        self._has_read = False  # the last step was that of prompts alone, where they cannot share one

    def pieces(self) -> Generator[Answered, None, None]:
        """The token loop, for the requests that it begins with: what every token adds, as soon as it is decided.

        Raises:
            BudgetError: Memory ran out during a pass; what came before stays in the requests.
        """
        for request in self.requests:
            self.join(request)
        while (yield from self.step()):
            pass

    def join(self, request: Request) -> None:
        """Let a request wait for a slot."""
        request.started_s = request.started_s or time.perf_counter()
        self.waiting.append(request)

    def step(self) -> Generator[Answered, None, bool]:
        """Let requests join as far as there are slots, then take a step of all that run. Its pass reads the prompts of
        those that have joined, too, where it can; else each takes a step of its own.

        Returns:
            Whether there was anything to do.

        Raises:
            BudgetError: Memory ran out during the pass; what came before stays in the requests.
        """
        if not (self._has_read and self.running):  # or else answers of one token would keep the others waiting
            for _ in range(min(len(self.waiting), self._num_slots - len(self.running))):
                self._admit(self.waiting.popleft())
        joining, running = self._next_step()
        if (running or not joining) and not self._goes_on():
            return bool(self.waiting)
        try:
            with self.working():
                results = self._steps.run(running, joining, self._on_layer(joining))
        except (NumericalError, GrammarError) as error:
            assert error.slot is not None
            self._fail(self.running[error.slot], error)  # nothing was committed: the others take the step again
            return True
        except (ContextLengthError, BudgetError) as error:
            if not joining:
                raise
            self._fail(joining[-1], error)  # perhaps there is room without it
            return True
        self._has_read = not (running or self._parts.target.runner.cache.mixes)
        ended_s = self._meter.lap() if running else time.perf_counter()
        for request in joining:
            request.first_token_s = ended_s
            self._meter.begin(request)
        for request, result in zip([*running, *joining], results, strict=True):
            yield from self._push(request, result.tokens, [*result.accepted_sources, TARGET], ended_s, result.logprobs)
        return True

    def _next_step(self) -> tuple[list[Request], list[Request]]:
        """Whose prompts the next step reads, and who else takes part in it."""
        unread = [request for request in self.running.values() if not request.new_tokens]
        running = [request for request in self.running.values() if request.new_tokens]
        runner = self._parts.target.runner
        if not runner.cache.mixes:
            return unread[:1], [] if unread else running
        sizes = accumulate(len(request.sequence) - runner.cache.length(request.slot) for request in unread)
        fitting = sum(size <= runner.most_prompt_tokens for size in sizes)
        return unread[: max(1, fitting)], running

    @property
    def passes(self) -> int:
        """Passes after prefill so far."""
        return self._meter.passes

    def cancel(self, request: Request, error: BaseException | None = None) -> None:
        """End a request, between two pieces, as it is; the hooks are told of the error."""
        if request.finish_reason is None:
            request.finish("interrupted")
            self._end(request, error)

    def interrupt(self) -> None:
        """End all requests that are not finished as they are."""
        unfinished = (*self.requests, *self.running.values(), *self.waiting)
        for request in dict.fromkeys(unfinished):
            self.cancel(request)

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

    def results(self) -> list[GenerationResult]:
        """What there is of every request that it began with; all are finished."""
        for request in self.requests:
            if request not in self._results:  # an interruption came while it ended
                self._end(request)
        return [self._results[request] for request in self.requests]

    def _goes_on(self) -> bool:
        """Whether there is another pass: not where all are finished, or somebody wants to stop."""
        hooks, finished = self._hooks, sum(request.finish_reason is not None for request in self.requests)
        if hooks.on_progress is not None:
            hooks.on_progress(finished, len(self.requests))
        if self.running and hooks.should_stop is not None and hooks.should_stop():
            self.interrupt()
        return bool(self.running)

    def _admit(self, request: Request) -> None:
        """Give a request the free slot that holds most of its prompt."""
        free = [slot for slot in range(self._num_slots) if slot not in self.running]
        try:
            with self.working():
                request.slot, request.num_kept = self.prefix_cache.join(request.sequence, free)
                self.running[request.slot] = request
                self._parts.sampling.assign(request.slot, request.params.sampling, request.matcher)
                if request.params.min_tokens:
                    ends = [token for token in request.end_token_ids if token < self._parts.target.config.vocab_size]
                    first_end = request.prompt_tokens + request.params.min_tokens
                    self._parts.sampling.adjustments.forbid_ends(request.slot, first_end, ends)
                if request.params.prompt_logprobs is not None:
                    self._score_prompt(request, request.params.prompt_logprobs)
                self._steps.proposer(request).join(request.slot, request.params.sampling)
        except (ContextLengthError, BudgetError) as error:
            self._fail(request, error)

    def _score_prompt(self, request: Request, count: int) -> None:
        """Read a prompt but for its last token, a window after the other, for the log-probabilities of its tokens.

        Raises `ContextLengthError`, for prompts whose keys are rotated by their length.
        """
        target, tokens, slot = self._parts.target, request.sequence, request.slot
        runner, last, size = target.runner, len(tokens) - 1, 1 + self._parts.windows.most_nodes
        if target.rope.frequency_set(len(tokens)) != target.rope.frequency_set(1):
            most = "this model rotates the keys of longer prompts by their length"
            raise ContextLengthError(f"prompt_logprobs of {len(tokens)} tokens cannot be had: {most}")
        runner.cache.truncate(slot, 0)
        request.num_kept = 0
        if last:
            request.prompt_logprobs += token_logprobs(runner.prefill(slot, tokens[:1]), tokens[1:2], count)
        for start in range(1, last, size):
            window = tokens[start : min(start + size, last)]
            logits = runner.verify([Window(tuple(window))], [slot])
            following = tokens[start + 1 : start + 1 + len(window)]
            request.prompt_logprobs += token_logprobs(logits, following, count)
            runner.cache.commit_path(slot, range(len(window)))

    def _on_layer(self, joining: Sequence[Request]) -> OnProgress | None:
        """Tells how far the prompts that the generation began with have been worked on."""
        on_prefill, count = self._hooks.on_prefill, len(self.requests)
        own = sum(request in self.requests for request in joining)
        if on_prefill is None or not own:
            return None
        read = sum(request.new_tokens > 0 for request in self.requests)
        return lambda done, layers: on_prefill(read * layers + own * done, count * layers)

    def _push(
        self, request: Request, tokens: Sequence[int], sources: Sequence[str], now_s: float,
        logprobs: Sequence[TokenLogprobs],
    ) -> Iterator[Answered]:  # fmt: skip
        """Append tokens, with their log-probabilities if there are any, until one of them or who gets the pieces
        finishes the request."""
        request.last_token_s = now_s
        for number, (token, source) in enumerate(zip(tokens, sources, strict=True)):
            if request.finish_reason is not None:
                return
            request.logprobs += logprobs[number : number + 1]
            text = request.push(token)
            if request.new_tokens == request.params.min_tokens:  # from here on passes may be captured
                self._parts.sampling.adjustments.first_ends.pop(request.slot, None)
            if request.finish_reason is not None:
                self._end(request)
            is_first = request.new_tokens == 1 and request.params.prompt_logprobs is not None
            of_prompt = request.prompt_logprobs if is_first else None
            yield request, TokenEvent(token, text, source, logprobs[number] if logprobs else None, of_prompt)

    def _fail(self, request: Request, error: OffloadError) -> None:
        """End a request by an error that is its own."""
        self.cancel(request, error)
        if self._hooks.on_end is None:
            raise error

    def _end(self, request: Request, error: BaseException | None = None) -> None:
        """A request has finished: its slot is free, and there is its result, also where the device fails at that."""
        failure: OffloadError | None = None
        if request in self.waiting:
            self.waiting.remove(request)
        elif self.running.get(request.slot) is request:  # who got no slot has nothing to leave
            del self.running[request.slot]
            try:
                self._leave(request, error)
            except OffloadError as raised:
                failure = raised
        result = self._meter.result(request, self._steps.predicted_s(request))
        if self._hooks.on_end is None:
            self._results[request] = result
        else:
            self._hooks.on_end(request, result, error or failure)
        if failure is not None:
            raise failure

    def _leave(self, request: Request, error: BaseException | None) -> None:
        """Free a finished request's slot, which keeps what it holds unless there was an error."""
        proposer = self._steps.proposer(request)
        if not self.is_current:  # others use the slot by now
            request.acceptance = () if proposer.name is None else request.tally.levels(proposer.name, ())
            return
        if error is None:
            self.prefix_cache.leave(request.slot)
        else:
            self.prefix_cache.forget(request.slot)
        with device_errors(self._parts.budget.device):
            if proposer.name is not None:
                request.acceptance = request.tally.levels(proposer.name, proposer.counts(request.slot))
            proposer.leave(request.slot)
            self._parts.sampling.release(request.slot)

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
            for _, event in self._pieces:
                if self._request.finish_reason is not None:
                    self._settle()
                if event.text:
                    return event.text
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
