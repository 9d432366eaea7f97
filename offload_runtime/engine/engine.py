"""The token loop: `Engine.step` lets requests join as slots are free, takes one step of speculation for all that run,
and says what that brought each.

`Runtime.generate` and its like, `TokenStream` and the `Scheduler`'s thread are loops over it: it calls none of them. A
token's journey goes on in `run_step` (speculation/step.py), which asks the drafter, the target's runner and the
sampler.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from operator import add, sub
from typing import Any, NamedTuple

import torch
from offload_runtime_kernels.gated_delta import CHUNK_TOKENS

from offload_runtime import errors
from offload_runtime.cache.saved_blocks import BlockStore
from offload_runtime.core import Batch, TokenTree
from offload_runtime.engine.load_model import LoadedModel
from offload_runtime.engine.prefix_cache import PrefixCache, SavedCache
from offload_runtime.engine.proposing import WindowChooser
from offload_runtime.engine.request import GenerationResult, GenerationStats, PromptRoom, Request
from offload_runtime.hosts.shares import Shares
from offload_runtime.plan.sizes import RunPlan
from offload_runtime.runners.model_runner import OnLayer
from offload_runtime.sampling import SlotSampling, TokenLogprobs, token_logprobs
from offload_runtime.speculation.controller import Controller, Cost
from offload_runtime.speculation.step import Drafter, StepOutput, run_step
from offload_runtime.stream.device import DeviceBudget, current_device
from offload_runtime.trace import DRAFT, LINK, PASSES, TraceRecorder, covered_seconds, union_seconds

# Who "proposed" the token that the target adds to those accepted.
TARGET = "target"


@dataclass(frozen=True)
class TokenEvent:
    """One token that an answer has got.

    Attributes:
        token: The token.
        text: What may be shown now; nothing while a character is incomplete or a stop string may follow.
        source: Who proposed it: `ngram`, `draft`, `self` (a copy of the target), a head such as `mtp`, or `retrieval`
            (the verifier over retrieved chunks); `target` where it is the target's own.
        logprobs: Its log-probability and the likeliest tokens', where they are wanted.
        prompt_logprobs: With the first token, where they are wanted: those of the prompt's tokens behind the first.
    """

    token: int
    text: str
    source: str
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Sequence[TokenLogprobs] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """Says what a step brought a request.

    Attributes:
        request: Whose it is; it has a `result` once it has ended.
        tokens: The new tokens in their order.
        error: The error of its own that it ended by.
        logits: [n, V] in the model's dtype, on the device: the rows that the tokens were chosen from, where they were
            asked for.
    """

    request: Request
    tokens: Sequence[TokenEvent] = ()
    error: errors.OffloadError | None = None
    logits: torch.Tensor | None = None


@dataclass(eq=False)
class Engine:
    """Holds a loaded target, all that generates its tokens, and the requests that are in progress.

    A request waits until a slot is free. Each slot has room for as many tokens as were reserved when loading, and a
    request that does not fit is refused before it gets here: nothing that runs is ever held up for want of room. One
    thread at a time may call it.

    Attributes:
        target: The model that decides.
        draft: The draft model; None without one.
        room: What prompts and their options have to go with.
        drafter: Guesses, for as many sequences as were planned for.
        sampling: How each slot's tokens are chosen.
        budgets: Ledgers of the cards.
        free_nodes: Proposals of a window that make no pass longer.
        controller: Chooses windows.
        plan: What lives where, as it turned out.
        cost: Predicted seconds of a step, with the link as fast as it was measured; None where nothing is known of the
            machine.
        resources: Closing it ends the copies, then frees all memory and lifts the allocator's cap.
        recorder: Of a trace, if there is one.
        shares: Who has which layers, where several machines share the target.
        waiting: Requests that have no slot yet, in their order.
        running: Requests that have one, by slot.
        prefix_cache: What the slots hold.
        owner: Whose tokens the slots hold; None where that is nobody who goes on from them.
    """

    target: LoadedModel
    draft: LoadedModel | None
    room: PromptRoom
    drafter: Drafter
    sampling: SlotSampling
    budgets: tuple[DeviceBudget, ...]
    free_nodes: int
    controller: Controller
    plan: RunPlan
    cost: Cost | None
    resources: ExitStack
    recorder: TraceRecorder | None = None
    shares: Shares | None = None

    def __post_init__(self) -> None:
        self.device, self._num_slots = self.budgets[0].device, self.plan.target.batch
        self.waiting, self.running = deque[Request](), dict[int, Request]()
        self.owner: object | None = None
        self._meter = PassMeter(self.target, self.draft, self.recorder)
        self.begin()

    def begin(self, owner: object | None = None, *, stores: Sequence[BlockStore] = ()) -> None:
        """Cancel all requests, for others to come. What the slots hold is kept for an `owner` that left it there, and
        forgotten otherwise; what they lose is for `stores`. Raises as a `PrefixCache`."""
        self.cancel_all()
        if owner is None or owner is not self.owner:
            caches = [*self.saved_caches().values()] if stores else []
            self.prefix_cache = PrefixCache(self.target, self._num_slots, stores, caches)
        self.owner = owner
        self._chooser = WindowChooser(
            self.plan, self.free_nodes, self.drafter, self.controller, self.target.runner, self.recorder
        )
        self._passes_before = self._meter.passes
        self._has_read = False  # the last step was that of prompts alone, where they cannot share one
        with device_errors(self.device):
            for slot in range(self._num_slots):
                self.sampling.release(slot)
                self.drafter.leave(slot)

    def add(self, request: Request) -> None:
        """Let a request wait for a slot."""
        request.started_s = request.started_s or time.perf_counter()
        self.waiting.append(request)

    def cancel(self, request: Request, error: BaseException | None = None, *, keep: int | None = None) -> None:
        """End a request as it is, because of an error if there was one. Does nothing to one that has ended, unless its
        answer has more than the tokens to `keep`, which are all that its client has heard of.

        Raises:
            BudgetError, DeviceError: The device failed at that; the request has ended all the same.
        """
        if keep is not None and keep < request.new_tokens:
            request.cut(keep)
        if request.finish_reason is None:
            request.finish("interrupted")
        if request.result is None:
            self._end(request, error)

    def cancel_all(self) -> None:
        """End all requests as they are, also where the device fails at that."""
        for request in (*self.running.values(), *self.waiting):
            with suppress(errors.OffloadError):
                self.cancel(request)

    @property
    def has_requests(self) -> bool:
        """Say whether there is anything to do."""
        return bool(self.waiting or self.running)

    @property
    def passes(self) -> int:
        """Count the passes since `begin`, but for those over prompts alone."""
        return self._meter.passes - self._passes_before

    def step(self, on_layer: OnLayer | None = None, *, with_logits: bool = False) -> list[RequestOutput]:
        """Let requests join as far as there are slots, then take a step of all that run. Its pass reads the prompts of
        those that have joined, too, where it can; else each takes a step of its own.

        Args:
            on_layer: Called, while prompts are read, with the layers that are done of all of them together and the
                layers of the model.
            with_logits: Whether the outputs are to have logits.

        Returns:
            What it brought. Requests end by errors of their own: by numbers that are none, by a grammar without a
            token, or for want of memory, the newest prompt first, else all that run.

        Raises:
            DeviceError, CopyError: The device has failed.
        """
        outputs = self._admit()
        reading, running = self._next_step()
        if not reading and not running:
            return outputs
        started_s, windows = time.perf_counter(), self._chooser.choose(running)
        stepping = [*running, *reading]
        tell = None if on_layer is None or not reading else lambda done, of: on_layer(done * len(reading), of)
        try:
            with device_errors(self.device):
                results = run_step(
                    self.target.runner, self.sampling, self.drafter, {one.slot: one.sequence for one in stepping},
                    windows.asked, prepared=[one.slot for one in reading if self._chooser.speculates(one)],
                    logprobs={one.slot: one.params.logprobs for one in stepping if one.params.logprobs is not None},
                    on_layer=tell, recorder=self.recorder, with_logits=with_logits,
                    goes_on=not self.waiting and all(one.room > 0 and self._chooser.rests(one) for one in running),
                )  # fmt: skip
        except (errors.NumericalError, errors.GrammarError) as error:
            assert error.slot is not None
            return [*outputs, self._fail(self.running[error.slot], error)]  # the others take the step again
        except (errors.ContextLengthError, errors.BudgetError) as error:  # perhaps there is room without the newest
            return [*outputs, *(self._fail(one, error) for one in reading[-1:] or running)]
        self._has_read = not (running or self.target.runner.cache.mixes)
        ended_s = self._meter.lap() if running else time.perf_counter()
        self._chooser.observe(windows, results, None if reading else ended_s - started_s)
        for request in reading:
            request.first_token_s = ended_s
            self._meter.begin(request)
        outputs += [self._push(one, results[one.slot], ended_s) for one in stepping]
        return outputs

    def _admit(self) -> list[RequestOutput]:
        """Give requests that wait the free slots that hold most of their prompts; return those that failed at that."""
        if self._has_read and self.running:  # or else answers of one token would keep the others waiting
            return []
        failed = list[RequestOutput]()
        while self.waiting and len(self.running) < self._num_slots:
            request = self.waiting.popleft()
            try:
                with device_errors(self.device):
                    self._join(request)
            except (errors.ContextLengthError, errors.BudgetError) as error:
                failed.append(self._fail(request, error))
        return failed

    def _join(self, request: Request) -> None:
        """Give a request a slot."""
        free = [slot for slot in range(self._num_slots) if slot not in self.running]
        request.slot, request.num_kept = self.prefix_cache.join(request.sequence, free)
        self.running[request.slot] = request
        if (state := self.drafter.draft_state) is not None and self._chooser.speculates(request):
            first, cache = state.first_needed(request.slot, request.sequence), self.target.runner.cache
            if first < request.num_kept <= cache.keeps(request.slot, first) + CHUNK_TOKENS:  # few tokens
                request.num_kept = cache.truncate(request.slot, first)
        self.sampling.assign(request.slot, request.params.sampling, request.matcher)
        if request.params.min_tokens:
            ends = [token for token in request.end_token_ids if token < self.target.config.vocab_size]
            first_end = request.prompt_tokens + request.params.min_tokens
            self.sampling.adjustments.forbid_ends(request.slot, first_end, ends)
        self._chooser.drafter_of(request).join(request.slot, request.params.sampling)
        if request.params.prompt_logprobs is not None:
            self._score_prompt(request, request.params.prompt_logprobs)

    def _next_step(self) -> tuple[list[Request], list[Request]]:
        """Return the requests whose prompts the next step reads, and the others that take part in it."""
        unread, running = list[Request](), list[Request]()
        for request in self.running.values():
            (running if request.new_tokens else unread).append(request)
        runner = self.target.runner
        if not unread or not runner.cache.mixes:
            return unread[:1], [] if unread else running
        sizes = accumulate(len(request.sequence) - runner.cache.length(request.slot) for request in unread)
        fitting = sum(size <= runner.most_prompt_tokens for size in sizes)
        return unread[: max(1, fitting)], running

    def _score_prompt(self, request: Request, count: int) -> None:
        """Read a prompt but for its last token, a window after the other, for the log-probabilities of its tokens; a
        head is told what was kept of them.

        Raises `ContextLengthError`, for prompts whose keys are rotated by their length.
        """
        target, tokens, slot = self.target, request.sequence, request.slot
        runner, last, size = target.runner, len(tokens) - 1, 1 + max(self.plan.request.max_gamma, self.plan.tree_room)
        if target.rope.frequency_set(len(tokens)) != target.rope.frequency_set(1):
            most = "this model rotates the keys of longer prompts by their length"
            raise errors.ContextLengthError(f"prompt_logprobs of {len(tokens)} tokens cannot be had: {most}")
        runner.cache.truncate(slot, 0)
        request.num_kept = 0
        drafter = self.drafter if runner.taps is not None and self._chooser.speculates(request) else Drafter()
        drafter.prepare(slot, tokens)

        def read(batch: Batch, start: int, end: int) -> None:
            following = tokens[start + 1 : end + 1]
            found = token_logprobs(runner.forward(batch).logits, following, count)
            request.prompt_logprobs += map(request.spelling.spelled, found)
            for hidden in batch.hidden.get(slot, ()):
                drafter.observe(slot, start, following, hidden.clone())  # a captured pass writes there again

        if last:
            read(Batch(prompts={slot: tokens[:1]}), 0, 1)
        for start in range(1, last, size):
            end = min(start + size, last)
            read(Batch({slot: TokenTree(tuple(tokens[start:end]))}), start, end)
            runner.cache.commit_path(slot, range(end - start))

    def _push(self, request: Request, result: StepOutput, now_s: float) -> RequestOutput:
        """Append the tokens of a step to a request, until one of them finishes it."""
        request.last_token_s, events, params = now_s, list[TokenEvent](), request.params
        for number, token in enumerate(result.tokens):
            logprobs = request.spelling.spelled(result.logprobs[number]) if result.logprobs else None
            request.logprobs += [] if logprobs is None else [logprobs]
            text = request.push(token)
            if params.min_tokens and request.new_tokens == params.min_tokens:  # from here on passes may be captured
                self.sampling.adjustments.first_ends.pop(request.slot, None)
            is_first = params.prompt_logprobs is not None and request.new_tokens == 1
            source = result.proposal.sources[result.path[number]] if number < len(result.path) else TARGET
            events.append(TokenEvent(token, text, source, logprobs, request.prompt_logprobs if is_first else None))
            if request.finish_reason is not None:
                self._end(request)
                break
        logits = None if result.logits is None else result.logits[: len(events)]
        return RequestOutput(request, events, logits=logits)

    def _fail(self, request: Request, error: errors.OffloadError) -> RequestOutput:
        """End a request by an error that is its own."""
        self.cancel(request, error)
        return RequestOutput(request, error=error)

    def _end(self, request: Request, error: BaseException | None = None) -> None:
        """Free the slot of a request that has finished, and make its result, also where the device fails at that."""
        failure: errors.OffloadError | None = None
        if request in self.waiting:
            self.waiting.remove(request)
        elif self.running.get(request.slot) is request:
            del self.running[request.slot]
            try:
                with device_errors(self.device):
                    self._leave(request, error)
            except errors.OffloadError as raised:
                failure = raised
        predicted_s: float | None = None
        if self.cost is not None:  # asked once for all steps of a kind, at their mean length, as it takes the host long
            kinds = request.steps.items()
            predicted_s = sum(count * self.cost(*kind, tokens // count) for kind, (count, tokens) in kinds)
        request.result = self._meter.result(request, predicted_s, peak_vram_bytes=self.peak_vram_bytes())
        if failure is not None:
            raise failure

    def _leave(self, request: Request, error: BaseException | None) -> None:
        """Free a finished request's slot, which keeps what it holds unless that may be wrong."""
        if error is None or isinstance(error, errors.BudgetError):
            self.prefix_cache.leave(request.slot)
        else:
            self.prefix_cache.forget(request.slot)
        drafter = self._chooser.drafter_of(request)
        if drafter.name is not None:
            request.acceptance = request.tally.levels(drafter.name, drafter.counts(request.slot))
        drafter.leave(request.slot)
        self.sampling.release(request.slot)

    def peak_vram_bytes(self) -> int:
        """Return the peak of all cards; what the driver says of a GPU includes all budgets that it has."""
        peaks = [(budget.device, budget.peak_bytes()) for budget in self.budgets]
        if self.device.type == "cuda":
            peaks = list(dict(peaks).items())
        return sum(nbytes for _, nbytes in peaks)

    def saved_caches(self) -> dict[str, SavedCache]:
        """Return the caches whose blocks are saved."""
        return SavedCache.of(self.plan, self.target, self.draft, self.drafter.draft_state)


class _Passes(NamedTuple):
    """Counts passes after prefill, and says what they took; or has what counters show at some time."""

    passes: int = 0
    seconds: float = 0.0
    streamed_bytes: int = 0
    stall_s: float = 0.0
    copy_s: float = 0.0
    experts_wanted: int = 0
    experts_found: int = 0
    expert_bytes: int = 0
    experts_computed: int = 0
    cpu_bytes: int = 0
    cpu_s: float = 0.0

    def grown(self, now: _Passes, before: _Passes) -> _Passes:
        """Return the same with what has come between two times."""
        grown: Any = map(add, self, map(sub, now, before))
        return _Passes(*grown)


class PassMeter:
    """Counts and measures the passes after prefill, and tells each request of those that it shared.

    Args:
        target: The model whose passes are measured.
        draft: Its draft, if there is one, of which experts may be in host memory, too.
        recorder: Of a trace, if there is one.
    """

    def __init__(self, target: LoadedModel, draft: LoadedModel | None, recorder: TraceRecorder | None) -> None:
        self._target, self._recorder, self._passes = target, recorder, _Passes()
        self._link_peak_gbps = target.link_peak_gbps  # which stays as it is, as does what is page-locked of weights
        self._pinned_bytes = target.pinned_bytes + (0 if draft is None else draft.pinned_bytes)
        # Those that carry something, whose mean counts.
        streaming = [card for card in target.cards if card.link_peak_gbps is not None]
        self._links = [card.engines for card in streaming or target.cards]
        self._engines = [engine for card in target.cards for engine in card.engines]
        self._pools = [card.pool for card in target.cards if card.pool is not None]
        self._laps = 0
        self._counters = self._read(0.0)
        # What there was when a request had its first token, and where the trace was.
        self._begun: dict[Request, tuple[_Passes, Any]] = {}

    @property
    def passes(self) -> int:
        """Count the passes that have ended."""
        return self._passes.passes

    def _read(self, now_s: float) -> _Passes:
        """Return the passes, the bytes that were begun to be copied, seconds of stalls and of copies, so far."""
        stall_s = sum(engine.stall_seconds() for engine in self._engines)
        copy_s = sum(engine.copy_seconds() for link in self._links for engine in link) / len(self._links)
        experts = [sum(counts) for counts in zip(*(pool.counts for pool in self._pools), strict=True)]
        return _Passes(self._laps, now_s, self._target.runner.streamer.bytes_begun, stall_s, copy_s, *experts)

    def begin(self, request: Request) -> None:
        """Begin to measure for a request that has its first token. What came since the last pass was its prefill."""
        self._counters = self._read(request.first_token_s)
        self._begun[request] = self._passes, () if self._recorder is None else self._recorder.position()

    def lap(self) -> float:
        """End a pass, now: what the link carries from here on is not counted unless another one follows."""
        self._laps += 1
        before, self._counters = self._counters, self._read(time.perf_counter())
        self._passes = self._passes.grown(self._counters, before)
        return self._counters.seconds

    def _hidden_draft_share(self, since: Any) -> float | None:
        """Return what `GenerationStats` says, since a place in the trace."""
        if self._recorder is None:
            return None
        spans = self._recorder.since(since)
        drafts = [(span.start_s, span.end_s) for span in spans if span.row == DRAFT]
        target = [(span.start_s, span.end_s) for span in spans if span.row in (PASSES, LINK)]
        drafting_s = union_seconds(drafts)
        return covered_seconds(drafts, target) / drafting_s if drafting_s else None

    def result(self, request: Request, predicted_s: float | None, *, peak_vram_bytes: int) -> GenerationResult:
        """Return the answer of a request that has ended, and its figures beside what was predicted for its passes.
        The meter forgets it."""
        assert request.finish_reason is not None, "iterate to the end or call close() first"
        before, since = self._begun.pop(request, (self._passes, None))
        target, passes = self._target, _Passes().grown(self._passes, before)
        count, seconds = passes.passes, passes.seconds
        streamed, fetches = passes.streamed_bytes > 0 and seconds > 0, bool(self._pools)
        decode_s, after_first = request.last_token_s - request.first_token_s, max(0, request.new_tokens - 1)
        stats = GenerationStats(
            prompt_tokens=request.prompt_tokens, new_tokens=request.new_tokens, kept_tokens=request.num_kept,
            time_to_first_token_s=max(0.0, request.first_token_s - request.started_s),
            tok_per_s=after_first / decode_s if decode_s > 0 else 0.0,
            passes=count, tokens_per_pass=after_first / count if count else 0.0,
            bytes_per_pass=round(passes.streamed_bytes / count) if count else target.runner.streamer.bytes_per_pass,
            link_gbps=passes.streamed_bytes / seconds / 1e9 if streamed else None, link_peak_gbps=self._link_peak_gbps,
            link_idle_share=min(1.0, max(0.0, 1 - passes.copy_s / seconds)) if streamed and not fetches else None,
            stall_s=max(0.0, passes.stall_s), peak_vram_bytes=peak_vram_bytes,
            pinned_bytes=self._pinned_bytes + target.runner.cache.pinned_bytes,
            pageable_bytes=sum(card.staged.pageable.nbytes for card in target.cards),
            measured_s_per_pass=seconds / count if count else None,
            predicted_s_per_pass=predicted_s / count if count and predicted_s is not None else None,
            hidden_draft_share=None if since is None else self._hidden_draft_share(since),
            acceptance=tuple(request.acceptance), windows=dict(request.tally.windows.most_common()),
            accepted_by_depth=tuple(request.tally.accepted_by_depth.values()),
            accepted_by_source=dict(request.tally.accepted_by_source),
            expert_hit_rate=passes.experts_found / passes.experts_wanted if passes.experts_wanted else None,
            expert_bytes_per_pass=round(passes.expert_bytes / count) if count else 0,
            expert_cpu_share=passes.experts_computed / max(1, passes.experts_wanted - passes.experts_found),
            expert_cpu_gbps=passes.cpu_bytes / passes.cpu_s / 1e9 if passes.cpu_s > 0 else None,
        )  # fmt: skip
        logprobs = None if request.params.logprobs is None else tuple(request.logprobs)
        of_prompt = None if request.params.prompt_logprobs is None else tuple(request.prompt_logprobs)
        return GenerationResult(
            request.tokens, request.text, request.finish_reason, stats, logprobs, of_prompt, request.stop_string
        )


@contextmanager
def device_errors(device: torch.device) -> Iterator[None]:
    """Make a device the current one, and typed errors of its failures."""
    try:
        with current_device(device):
            yield
    except torch.OutOfMemoryError as error:
        remedy = "raise --vram, lower --context or keep fewer layers resident"
        raise errors.BudgetError(f"the device memory allowed did not suffice ({error}): {remedy}") from error
    except torch.AcceleratorError as error:
        raise errors.DeviceError(f"the device failed ({error}): load the runtime again") from error
