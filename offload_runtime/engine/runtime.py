"""`Runtime`: load a target and a draft, generate the target's exact tokens."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offload_runtime.cache.saved_blocks import BlockStore
from offload_runtime.config import RuntimeConfig
from offload_runtime.core import Batch, TokenTree
from offload_runtime.engine.asynchronous import AsyncTokenStream
from offload_runtime.engine.conversation import Conversation, TokenStream
from offload_runtime.engine.engine import Engine, RequestOutput, device_errors
from offload_runtime.engine.events import OnEvent, Ticket
from offload_runtime.engine.load import describe_placement, load_runtime
from offload_runtime.engine.load_model import LoadProgress
from offload_runtime.engine.notebook import bars, is_notebook
from offload_runtime.engine.prefix_cache import prefix_files, require_stores
from offload_runtime.engine.proposing import settle
from offload_runtime.engine.request import GenerationResult, Prompt, PromptRoom, Request
from offload_runtime.engine.sessions import (
    SavedSession,
    SavedText,
    has_blocks,
    has_messages_alone,
    save_session,
    session_files,
    text_without_blocks,
)
from offload_runtime.errors import BudgetError, StorageError, UnavailableError
from offload_runtime.models.config import ModelConfig
from offload_runtime.options import documented, require, require_type
from offload_runtime.params import GenerationParams, SamplingParams, params_of_each, params_once
from offload_runtime.plan.sizes import DTYPE_NAMES, RunPlan
from offload_runtime.runners.model_runner import OnLayer
from offload_runtime.sizes import format_bytes
from offload_runtime.speculation.controller import PLAIN
from offload_runtime.speculation.step import Drafter
from offload_runtime.trace import write_trace
from offload_runtime.weights.checkpoint import CheckpointSource
from offload_runtime.weights.expert_hits import note_hits

if TYPE_CHECKING:
    from offload_runtime.engine.chat_template import ChatTemplate

# A call that waits for others looks so often whether a scheduler has the runtime now.
_LOOK_AGAIN_S = 0.1
_MOST_WAITING = 1 << 20  # requests from event loops


class Runtime(AbstractContextManager["Runtime"]):
    """A loaded target with its draft. Use `Runtime.load`; close it or use it in a `with` block.

    One that is dropped without that is closed when Python collects it. A Ctrl-C that lands just then is printed and
    forgotten, as Python does with whatever a finaliser raises; only the command raises it again.

    Any thread may call it. Calls wait for one another, `close` too: `generate` and `generate_batch` until all their
    answers are there, a stream or a turn of a conversation for every piece by itself. Between two pieces another call
    may begin; the stream then cannot go on, in whatever thread, and its next piece is an `OptionError`. So is a call
    from within a callback, and any call while a `Scheduler` serves the requests of many threads.
    """

    def __init__(self, engine: Engine, *, shows_bars: bool = False) -> None:
        target, weights = engine.target, engine.target.weights
        self.config: ModelConfig = target.config
        self.room, self.tokenizer = engine.room, engine.room.tokenizer
        self.devices = tuple(budget.device for budget in engine.budgets)  # of the cards
        self.device = self.devices[0]
        self.dtype = weights.layout.dtype
        self.plan, self.placement = engine.plan, describe_placement(target, engine.plan, engine.budgets)
        if engine.shares is not None:
            self.placement = f"{engine.shares.in_words}; here {self.placement}"
        speed = f"{weights.load_seconds:.1f} s ({weights.load_gbps:.1f} GB/s)"
        self.load_report = f"loaded {format_bytes(weights.layout.total_bytes)} in {speed}: {weights.layout.stored_as}"
        # Tokens that prompt and answer may have together.
        self.context_tokens = target.runner.cache.capacity_tokens
        self.engine = engine  # gone once the runtime is closed
        # A runtime that is dropped without `close` must not leave copies running into memory that others get, nor the
        # allocator capped. Alive until it is closed.
        self._give_back = weakref.finalize(self, engine.resources.close)
        self._call: object | None = None  # the one whose tokens the slots hold
        self._shows_bars = shows_bars
        self._lock = threading.Lock()  # for one call at a time
        self._caller = 0  # the thread that is in one
        self._is_served = False  # one thread has the runtime until it says otherwise
        self._shared: Any = None  # the scheduler of requests from event loops, as long as there are some
        self._sharing = threading.Lock()

    def __repr__(self) -> str:
        config, devices = self.config, ", ".join(map(str, self.devices))
        shape = f"{config.num_layers} layers of {config.hidden_size}, {self.context_tokens} tokens of context"
        state = "" if self._give_back.alive else ", closed"
        return f"<Runtime: {config.architecture} of {shape}, {DTYPE_NAMES[self.dtype]} on {devices}{state}>"

    @property
    def lost_rank(self) -> str | None:
        """Return which other machine has ended that has layers of the target, and why; None as long as none has."""
        return None if self.engine.shares is None else self.engine.shares.group.lost

    @classmethod
    @documented(RuntimeConfig)
    def load(
        cls, target: str | Path | CheckpointSource, *, on_progress: LoadProgress | None = None,
        on_plan: Callable[[RunPlan], None] | None = None, check: Callable[[PromptRoom], object] | None = None,
        progress: bool | None = None, **options: Any,
    ) -> Runtime:  # fmt: skip
        """Load a target model, paging what does not fit the device budget.

        Args:
            target: Directory with safetensors, a `.gguf` file, `org/name` on the hub, or an opened checkpoint.
            on_progress: Called with (stage, done bytes, total bytes) while weights are read.
            on_plan: Called with what everything will take, before weights are read.
            check: Called with what prompts have to go with, before weights are read; what it raises ends the loading.
            progress: Show bars while weights are read, and while `generate` and `generate_batch` work on prompts and
                answers; None: in a notebook.
            options: By name, as listed below (`RuntimeConfig`).

        Raises:
            CheckpointError, HubError, BudgetError, VocabularyMismatchError, DeviceError, OptionError, ProfileError,
            StorageError: before anything large is read, each saying what would help.
        """
        config, shown = RuntimeConfig(target, **options), is_notebook() if progress is None else progress
        return cls.from_config(config, on_progress=on_progress, on_plan=on_plan, check=check, progress=shown)

    @classmethod
    def from_config(
        cls, config: RuntimeConfig, *, on_progress: LoadProgress | None = None,
        on_plan: Callable[[RunPlan], None] | None = None, check: Callable[[PromptRoom], object] | None = None,
        progress: bool = False,
    ) -> Runtime:  # fmt: skip
        """Load what a configuration asks for. Callbacks, `progress` and errors as of `load`."""
        with bars(in_bytes=True) if progress else nullcontext(_show_nothing) as show:

            def on_bytes(stage: str, done: int, total: int) -> None:
                show(stage, done, total)
                if on_progress is not None:
                    on_progress(stage, done, total)

            return cls(load_runtime(config, on_progress=on_bytes, on_plan=on_plan, check=check), shows_bars=progress)

    @documented(GenerationParams, SamplingParams)
    def stream(
        self, prompt: Prompt, *, params: GenerationParams | None = None, speculate: bool = True,
        on_prefill: OnLayer | None = None, **options: Any,
    ) -> TokenStream:  # fmt: skip
        """Generate piece by piece.

        The tokens are a function of prompt and sampling options alone: not of the draft, `gamma`, `speculate`, the
        device budget or earlier calls.

        Args:
            prompt: Text, token ids, or chat messages (`{"role": …, "content": …}`), which go through the model's chat
                template.
            params: The options, in place of those by name.
            speculate: False decodes plainly, one token a pass.
            on_prefill: Called with (layers done, layers) while the prompt is worked on.
            options: By name, as listed below.

        Returns:
            An iterator over text; its `result` is there afterwards.

        Raises:
            ContextLengthError: Prompt and `max_new_tokens` exceed the reserved context.
            OptionError: A value makes no sense.
        """
        asked = params_once(options, params)
        tokens = self.room.fit(prompt, asked.max_new_tokens)
        return self.start(tokens, asked, speculate=speculate, on_prefill=on_prefill)

    @documented(GenerationParams, SamplingParams)
    def generate(
        self, prompt: Prompt, *, params: GenerationParams | None = None, speculate: bool = True,
        on_prefill: OnLayer | None = None, **options: Any,
    ) -> GenerationResult:  # fmt: skip
        """Answer as `stream` does, but return when everything is there.

        Raises:
            BudgetError: Memory ran out; once there were tokens, with the answer as far as it had come.
        """
        asked = params_once(options, params)
        return self.generate_batch([prompt], params=asked, speculate=speculate, on_prefill=on_prefill)[0]

    @documented(GenerationParams, SamplingParams)
    def astream(
        self, prompt: Prompt, *, params: GenerationParams | None = None, speculate: bool = True, **options: Any
    ) -> AsyncTokenStream:
        """Generate piece by piece in an event loop: `async for piece in runtime.astream(prompt)`.

        As many requests as the runtime was loaded for (`max_batch`) share its passes, others wait for one of them. The
        tokens are those of `stream`. A task that is cancelled ends its request, between two passes. Other calls of the
        runtime wait until no such request is left.

        Args:
            prompt, params, speculate: As of `stream`.
            options: By name, as listed below.

        Returns:
            An asynchronous iterator over text; its `result` is there afterwards. What `stream` raises of the prompt,
            the first piece does.

        Raises:
            OptionError: A value makes no sense.
        """
        asked = params_once(options, params)

        def submit(on_event: OnEvent) -> Ticket:
            return self._submit(self.room.fit(prompt, asked.max_new_tokens), asked, on_event, speculate)

        return AsyncTokenStream(submit)

    @documented(GenerationParams, SamplingParams)
    async def agenerate(
        self, prompt: Prompt, *, params: GenerationParams | None = None, speculate: bool = True, **options: Any
    ) -> GenerationResult:
        """Answer as `astream` does, but return when everything is there: `await runtime.agenerate(prompt)`."""
        stream = self.astream(prompt, params=params, speculate=speculate, **options)
        async for _ in stream:
            pass
        return stream.result

    def _submit(self, tokens: list[int], params: GenerationParams, on_event: OnEvent, speculate: bool) -> Ticket:
        """Submit a request to the scheduler that others of event loops have, or to a new one, which waits for calls in
        progress. Errors as of `Scheduler.submit`."""
        from offload_runtime.engine.scheduler import Scheduler

        with self._sharing:
            if self._shared is not None:
                with suppress(UnavailableError):  # nobody was left, and it is closed
                    return self._shared.submit(tokens, params, on_event=on_event, speculate=speculate)
            self._shared = Scheduler(self, max_waiting=_MOST_WAITING, closes_when_idle=True)
            try:
                return self._shared.submit(tokens, params, on_event=on_event, speculate=speculate)
            except BaseException:
                self._shared.close()
                raise

    def conversation(
        self, system: str | None = None, *, template_options: Mapping[str, Any] | None = None
    ) -> Conversation:  # fmt: skip
        """Return a chat that keeps its keys and values between turns; `template_options` as of `encode`."""
        return Conversation(self, system, template_options)

    def load_conversation(self, path: str | Path) -> Conversation:
        """Return a chat that goes on from one that was saved. Raises as `Conversation.load`."""
        conversation = self.conversation()
        conversation.load(path)
        return conversation

    def save_session(
        self, path: Path, record: Mapping[str, Any], seen: tuple[str, tuple[int, ...]], *, owner: object
    ) -> None:
        """Save a record of a conversation, the text that it is to the model with its tokens, and what the caches hold
        of them if that was left there by `owner`."""
        with self._locked():
            self._require_open()
            engine, slot, held, prompt_tokens = self.engine, 0, 0, len(seen[1])
            if engine.owner is owner:
                slot, held, prompt_tokens = engine.prefix_cache.find(seen[1])
            saved = SavedText(*seen, prompt_tokens)
            with device_errors(self.device):
                save_session(path, record, saved, engine.saved_caches(), slot=slot, held=held)

    def load_session(
        self, path: Path, record: Mapping[str, Any], *, owner: object
    ) -> tuple[tuple[str, tuple[int, ...]], int]:
        """Bring the caches to what was saved, for `owner`. Returns that text and its tokens, none where a file
        (`record`) has messages alone, and how many of them need not be read again."""
        self._require_open()
        if has_messages_alone(record):
            return ("", ()), 0
        if not has_blocks(path, record):
            return text_without_blocks(path, record, self.engine.saved_caches()["target"]), 0
        with self._locked(), device_errors(self.device), session_files(path) as files:
            self._require_open()
            session = SavedSession(path, record, files, self.engine.saved_caches())
            saved = session.saved
            if self.engine.owner is not None:  # whose keys and values give way only to what is whole
                session.verify()
            self._begin([], owner=owner)
            session.restore(self.engine.prefix_cache.clear(saved.tokens, saved.prompt_tokens))
        return (saved.text, saved.tokens), session.held_tokens

    @documented(GenerationParams, SamplingParams)
    def generate_batch(
        self, prompts: Sequence[Prompt], *, params: GenerationParams | Sequence[GenerationParams] | None = None,
        noise_ids: Sequence[int] | None = None, speculate: bool = True, on_prefill: OnLayer | None = None,
        on_progress: Callable[[int, int], None] | None = None, should_stop: Callable[[], bool] | None = None,
        **options: Any,
    ) -> list[GenerationResult]:  # fmt: skip
        """Generate for several prompts at once: one pass of the target verifies a window of each.

        Options as in `stream`, the same for all prompts, or those of `params`: an answer is what `generate` says with
        the options and the `noise_id` of its prompt.

        Args:
            prompts: At most as many as `max_batch` when the runtime was loaded.
            on_prefill: Called with (layers done, layers), of all prompts together, while they are worked on.
            on_progress: Called with (answers finished, answers) once all prompts are read, and after every pass.
            should_stop: Asked before every pass; once it says yes, answers that are not finished end as they are,
                `interrupted`.
            noise_ids: One for each prompt. None counts them from that of the options, 0, 1, …, or takes those of a
                sequence of `params`.
            params: The options in place of those by name: one for all prompts, or one for each.

        Raises:
            OptionError, ContextLengthError: Before anything is computed.
            BudgetError: Memory ran out; once all prompts had been worked on, with what there is of every answer.
        """
        most = self.plan.target.batch
        require_type("prompts", prompts, Sequence[Any])
        fine = 1 <= len(prompts) <= most
        require(fine, f"{len(prompts)} prompts for a runtime loaded for 1 to {most}: raise max_batch when loading it")
        asked = params_of_each(params_once(options, params, kind=Any), noise_ids, len(prompts))
        tokens = self.room.fit_all(prompts, [one.max_new_tokens for one in asked])
        with bars() if self._shows_bars else nullcontext(_show_nothing) as show, self._locked():
            pairs = zip(tokens, asked, strict=True)
            requests = self._begin([self.request(*pair, speculate=speculate) for pair in pairs])

            def on_layer(done: int, layers: int) -> None:
                read = sum(request.new_tokens > 0 for request in requests)
                show("prompt", read * layers + done, len(requests) * layers)
                if on_prefill is not None:
                    on_prefill(read * layers + done, len(requests) * layers)

            reports_progress = self._shows_bars or on_prefill is not None
            most = sum(one.max_new_tokens for one in asked)
            while self.engine.has_requests:
                self._raise_error(self.engine.step(on_layer if reports_progress else None), requests)
                show("answer", sum(request.new_tokens for request in requests), most)
                if any(request.result is None and not request.new_tokens for request in requests):
                    continue  # some prompts are still to be read
                if on_progress is not None:
                    on_progress(sum(request.result is not None for request in requests), len(requests))
                if should_stop is not None and self.engine.running and should_stop():
                    self.engine.cancel_all()
            return _results_of(requests)

    def _raise_error(self, outputs: Sequence[RequestOutput], requests: Sequence[Request]) -> None:
        """Raise what one of these requests has ended by, which ends all of them; where memory ran out once each has a
        token, with what there is of every answer."""
        for error in (output.error for output in outputs if output.error is not None):
            if not isinstance(error, BudgetError) or not all(request.new_tokens for request in requests):
                raise error
            self.engine.cancel_all()
            raise BudgetError(str(error), _results_of(requests)) from error

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """Return how the model's makers want tokens to be sampled: the fields of `SamplingParams` that its
        `generation_config.json` names, `temperature` 0 where it switches sampling off; none for GGUF files.

        `generate` and its like are greedy unless told otherwise, whatever this says; `chat` goes by it. A value that
        makes no sense is left out, with a warning.
        """
        return self.room.sampling_defaults

    @property
    def chat_template(self) -> ChatTemplate:
        """Return the model's chat template. Raises `OptionError` if it has none."""
        return self.room.chat_template

    def encode(
        self, prompt: Prompt, *, template_options: Mapping[str, Any] | None = None, continue_final_message: bool = False
    ) -> list[int]:
        """Return token ids of a prompt.

        Args:
            prompt: As of `stream`.
            template_options: Of chat messages what the template is given beside them, such as `tools` and
                `enable_thinking`.
            continue_final_message: The last chat message is the beginning of the answer, which goes on from there:
                with what it has thought (`reasoning_content`), too, between the marks of the model's family.

        Raises:
            OptionError: It is empty, not a prompt, has ids outside the vocabulary, or has no answer that can go on.
        """
        return self.room.encode(prompt, template_options, continue_final_message=continue_final_message)

    def start(
        self, tokens: list[int], params: GenerationParams, *, owner: object | None = None, speculate: bool = True,
        on_prefill: OnLayer | None = None,
    ) -> TokenStream:  # fmt: skip
        """Begin an answer, which goes on from what the cache holds if that was left there by `owner` too."""
        with self._locked():
            (request,) = self._begin([self.request(tokens, params, speculate=speculate)], owner=owner)

        def step(request: Request) -> list[RequestOutput]:
            with self._locked():
                self._require_current(request.result is None)
                return self.engine.step(on_prefill)

        def cancel(request: Request) -> None:
            with self._locked():
                if request.result is None:
                    self.engine.cancel(request)

        return TokenStream(request, step, cancel)

    def replay(
        self, tokens: list[int], params: GenerationParams, *, drafter: Drafter | None,
        owner: object | None = None, mates: Sequence[list[int]] = (),
    ) -> tuple[GenerationResult, torch.Tensor]:  # fmt: skip
        """Generate with the logits behind every token, for proofs.

        Args:
            tokens: The prompt.
            params: What to generate.
            drafter: Guesses in place of the runtime's own; None decodes plainly.
            owner: As of `start`.
            mates: Prompts that are answered in the same passes, in the slots before; not with an `owner`.

        Returns:
            The answer, and the logits [N, V] that its tokens were chosen from, in the model's dtype, on the host.
        """
        assert owner is None or not mates
        with self._locked():
            self._require_open()
            engine, own = self.engine, self.engine.drafter
            engine.drafter = drafter or own
            try:
                requests = [self.request(one, params, speculate=drafter is not None) for one in [*mates, tokens]]
                self._begin(requests, owner=owner)
                rows = list[torch.Tensor]()
                while engine.has_requests:
                    outputs = engine.step(with_logits=True)
                    self._raise_error(outputs, requests)
                    # On the host at once, so that the next pass finds the device memory that it would find without.
                    rows += [
                        output.logits.to("cpu", copy=True)
                        for output in outputs
                        if output.request is requests[-1] and output.logits is not None
                    ]
                    del outputs
            finally:
                engine.drafter = own
        return _results_of(requests)[-1], torch.cat(rows)

    def logits(self, prompt: list[int], answers: Iterable[Sequence[int]]) -> Iterator[torch.Tensor]:
        """Return the logits behind every token of given answers to a prompt, from one plain pass over each.

        Returns:
            [N, V] in the model's dtype, on the device, for an answer of N tokens.

        Raises:
            OptionError: Another generation began before the last answer, or there is no prompt, or a token is outside
                the vocabulary.
            ContextLengthError: Prompt and answer exceed the reserved context.
        """
        prompt = self.room.fit(prompt, 1)
        with self._locked():
            requests = self._begin([self.request(prompt, GenerationParams(1), speculate=False)])
            outputs = self.engine.step(with_logits=True)
            self._raise_error(outputs, requests)
            first, call = [one.logits for one in outputs if one.logits is not None], self._call
        for answer in answers:
            tokens = self.room.encode(answer) if answer else []
            self.room.fit([*prompt, *tokens], 0)
            with self._locked():
                self._require_current(self._call is call)
                with device_errors(self.device):
                    batches = [Batch({0: TokenTree(tuple(tokens[:-1]))})] if len(tokens) > 1 else []
                    behind = [self.engine.target.runner.forward(batch).logits for batch in batches]
            yield torch.cat([*first, *behind])[: len(tokens)]

    def _begin(self, requests: Sequence[Request], owner: object | None = None) -> Sequence[Request]:
        """Begin a call of these requests, which are all that the caches and their slots are used for, and end those of
        the call before. What the slots hold is kept for `owner`, if the call before was its own, too."""
        self._require_open()
        self._call = object()
        self.engine.begin(owner)
        for request in requests:
            self.engine.add(request)
        return requests

    def _require_current(self, is_current: bool) -> None:
        gone = "another generation has begun on this runtime since, or it was closed: this one cannot go on"
        require(is_current and self._give_back.alive, gone)

    def _require_open(self) -> None:
        require(self._give_back.alive, "this runtime is closed: load it again")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Around a call: those of other threads wait, and one from within it is refused."""
        again = self._caller == threading.get_ident()
        require(not again, "this runtime is in the middle of a call: a callback cannot ask it for anything else")
        served = "this runtime is served by a scheduler: submit to that, or close it first"
        require(not self._is_served, served)
        while not self._lock.acquire(timeout=_LOOK_AGAIN_S):
            require(not self._is_served, served)
        try:
            self._caller = threading.get_ident()
            yield
        finally:
            self._caller = 0
            self._lock.release()

    def request(self, prompt: Prompt, params: GenerationParams, *, speculate: bool = True) -> Request:
        """Return a request for the engine, of a prompt that fits. Computes nothing.

        Raises:
            OptionError, ContextLengthError: As of `stream`.
        """
        self._require_open()
        tokens, matcher = self.room.fit(prompt, params.max_new_tokens), self.room.check(params)
        budget = settle(self.engine.plan, self.engine.drafter, params)
        return Request(
            tokens, params, self.tokenizer, self.room.eos_token_ids, budget=budget if speculate else PLAIN,
            matcher=matcher, has_channels=self.room.has_channels,
        )  # fmt: skip

    @contextmanager
    def serving(
        self, *, prefix_cache_bytes: int = 0, sessions: Path | None = None, sessions_bytes: int | None = None,
        refuses_calls: bool = True,
    ) -> Iterator[Engine]:  # fmt: skip
        """Give the engine to the thread that calls, until it is done. Calls in progress are waited for; meanwhile
        others raise an `OptionError`, or wait. See `Scheduler`."""
        with self._locked(), ExitStack() as stack:
            self._require_open()
            require_stores(self.plan, prefix_cache_bytes, sessions_bytes)
            stores = [BlockStore(prefix_cache_bytes)] if prefix_cache_bytes else []
            if sessions is not None:
                stores.append(stack.enter_context(prefix_files(sessions, sessions_bytes)))
            self._is_served = refuses_calls
            try:
                self._call = None
                self.engine.begin(stores=stores)
                yield self.engine
                with device_errors(self.device):
                    self.engine.prefix_cache.save_all()
            finally:
                self._is_served = False
                self.engine.cancel_all()

    def close(self) -> None:
        """Stop the copies, give all memory back, and write the trace if there is one. Requests of event loops end as
        they are. The runtime cannot be used afterwards.

        Raises:
            StorageError: The trace cannot be written.
        """
        if self._shared is not None:
            self._shared.close()
        with self._locked():
            if not self._give_back.alive:
                return
            self.engine.cancel_all()
            recorder, path = self.engine.recorder, self.plan.request.trace
            self._note_hits()
            try:
                self.engine.target.end_copies()  # before anything that it copies is let go of
                del self.engine
                self._give_back()
            finally:
                if path is not None and recorder is not None:
                    about = {**device_facts(self.devices), "dtype": str(self.dtype),
                             "placement": self.placement, "layers": self.config.num_layers}  # fmt: skip
                    write_trace(path, recorder.finish(), about)

    def _note_hits(self) -> None:
        """Keep how often experts were on the cards, for later plans."""
        request, model = self.plan.request, self.engine.target
        if request.forget_hits or request.target.hit_exponent is None:  # of random weights nobody wants to know
            return
        for plan, card in zip(model.plan.cards, model.cards, strict=True):
            if card.pool is None:
                continue
            wanted, found = card.pool.counts.wanted, card.pool.counts.found
            try:
                note_hits(self.config, room=plan.pool_room, wanted=wanted, found=found)
            except StorageError as error:
                logging.getLogger(__name__).warning("how often experts were on the card is not kept: %s", error)

    def __exit__(self, *_: object) -> None:
        self.close()


def _show_nothing(stage: str, done: int, total: int) -> None:
    """Stand in for bars where none are shown."""


def _results_of(requests: Sequence[Request]) -> list[GenerationResult]:
    """Return the answers of requests that have all ended."""
    results = [request.result for request in requests if request.result is not None]
    assert len(results) == len(requests)
    return results


def device_facts(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return what a trace or a report says of the cards of a run: which device each was and the name of a GPU, those of
    the first by themselves, too; and the driver of GPUs, if NVML tells."""
    cards = [
        {"device": str(one), "device_name": torch.cuda.get_device_name(one) if one.type == "cuda" else None}
        for one in devices
    ]
    driver = None
    if devices[0].type == "cuda":
        from offload_runtime.hardware.bench import read_nvml

        driver = read_nvml(str(torch.cuda.get_device_properties(devices[0]).uuid)).driver
    return {**cards[0], "driver": driver, "cards": cards}
