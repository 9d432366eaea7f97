"""One answer, or several: the options go to the engine, text comes back piece by piece, Ctrl-C stops it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from offload_runtime.cli.terminal import ProgressBars
from offload_runtime.config import GenerationParams, RuntimeConfig
from offload_runtime.errors import BudgetError

if TYPE_CHECKING:
    from offload_runtime.engine import GenerationResult, Runtime
    from offload_runtime.engine.request import PromptRoom
    from offload_runtime.plan import RunPlan

Prompt = str | Sequence[Mapping[str, str]]


class AnswerStream(Protocol):
    """What `Runtime.stream` and `Conversation.say` return: pieces of text, then the result."""

    @property
    def result(self) -> GenerationResult:
        """The finished answer; only after the last piece or `close`."""

    def __iter__(self) -> Iterator[str]: ...

    def close(self) -> None:
        """Stop here and keep what there is."""


class StopRequest:
    """Ctrl-C as a wish, so that an answer ends between two passes and the cache stays whole.

    A pass over a streamed target takes seconds; whoever presses Ctrl-C again does not want to wait for it, and gets
    the plain KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> StopRequest:
        # Signal handlers can be set from the main thread only; elsewhere no Ctrl-C arrives either.
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def load_runtime(
    config: RuntimeConfig,
    *,
    show_progress: bool,
    explain: bool = False,
    check: Callable[[PromptRoom], object] | None = None,
) -> Runtime:
    """Load the target (and the draft) with a progress bar in bytes on stderr; what `check` refuses is refused before
    weights are read. `explain` prints the plan on stderr."""
    from offload_runtime.engine import Runtime

    with ProgressBars(enabled=show_progress) as bars:
        on_plan = partial(_explain, config=config) if explain else None
        return Runtime.from_config(config, on_progress=bars.on_bytes, on_plan=on_plan, check=check)


def check_prompts(room: PromptRoom, *, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    """Refuse prompts, at least one, that leave no room for `max_new_tokens`. Raises `ContextLengthError`, and
    `OptionError` for what is no prompt."""
    if len(prompts) == 1:
        room.fit(prompts[0], max_new_tokens)
    else:
        room.fit_all(prompts, max_new_tokens)


def _explain(plan: RunPlan, *, config: RuntimeConfig) -> None:
    """Print on stderr what a run holds where and, where the machine's figures are known, how long a pass will take."""
    from offload_runtime.cli.plan_render import memory_tables, print_tables, speed_line
    from offload_runtime.engine.expectation import planned_figures
    from offload_runtime.plan import COMMON_PROFILE

    machine = planned_figures(plan, device=config.device, profile=config.profile, emulate=config.emulate)
    unknown = (
        "no profile of this machine is known: nothing is predicted, and what was left to be chosen was chosen by the "
        f"figures of {COMMON_PROFILE}"
    )
    print_tables([*memory_tables(plan), unknown if machine is None else speed_line(plan, machine)], sys.stderr)


def stream_answer(
    start: Callable[..., AnswerStream],
    prompt: Prompt,
    params: GenerationParams,
    *,
    show: Callable[[str], None],
    show_progress: bool,
    speculate: bool = True,
) -> GenerationResult:
    """Run one answer to its end or to Ctrl-C, handing each piece of text to `show` as it comes.

    `start` is `Runtime.stream` or `Conversation.say`. Returns the result; its finish reason is `interrupted` when
    Ctrl-C ended it. Before the first piece of text Ctrl-C raises KeyboardInterrupt instead and, as with every other
    exception, the stream is not settled: a conversation then stays as it was before the turn.

    Raises:
        BudgetError: Memory ran out; behind the first piece of text the answer so far comes with it, and stays in a
            conversation.
    """
    shown_characters = 0
    failure: BudgetError | None = None
    with StopRequest() as stop, ProgressBars(enabled=show_progress) as bars:
        stream = start(
            prompt,
            **_keywords(params),
            speculate=speculate,
            on_prefill=_stoppable_prefill(stop, bars),
        )
        try:
            for piece in stream:
                bars.close()
                show(piece)
                shown_characters += len(piece)
                if stop.requested:
                    break
        except KeyboardInterrupt:
            if not shown_characters:
                raise
        except BudgetError as error:
            if not shown_characters:
                raise
            failure = error
        stream.close()
        result = stream.result
        # Text that the engine held back, as the possible beginning of a stop text, is part of a stopped answer too.
        if result.finish_reason == "interrupted":
            show(result.text[shown_characters:])
    if failure is not None:
        raise BudgetError(str(failure), [result]) from failure
    return result


def answer_batch(
    runtime: Runtime, prompts: Sequence[Prompt], params: GenerationParams, *, show_progress: bool
) -> list[GenerationResult]:
    """Answer all prompts together, to their ends or to Ctrl-C.

    After Ctrl-C the answers that were not finished have the finish reason `interrupted`. While the prompts are worked
    on, and at the second one, Ctrl-C raises KeyboardInterrupt.
    """
    with (
        StopRequest() as stop,
        ProgressBars(enabled=show_progress) as prefill_bars,
        ProgressBars(enabled=show_progress) as answer_bars,
    ):

        def on_progress(finished: int, answers: int) -> None:
            prefill_bars.close()
            answer_bars.on_answers(finished, answers)

        return runtime.generate_batch(
            prompts,
            **_keywords(params),
            on_prefill=_stoppable_prefill(stop, prefill_bars),
            on_progress=on_progress,
            should_stop=lambda: stop.requested,
        )


def _keywords(params: GenerationParams) -> dict[str, Any]:
    """Return what an answer is asked for by, in the engine's keywords."""
    return {
        "max_new_tokens": params.max_new_tokens,
        "stop": params.stop,
        "gamma": params.gamma,
        "ignore_eos": params.ignore_eos,
        **asdict(params.sampling),
    }


def _stoppable_prefill(stop: StopRequest, bars: ProgressBars) -> Callable[[int, int], None]:
    """Show the layers of a prefill, and end it where Ctrl-C asked for that."""

    def on_prefill(done_layers: int, layers: int) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        bars.on_prefill(done_layers, layers)

    return on_prefill
