"""`offload-runtime generate`: one prompt and its answer as it comes, or several answered at once.

Also what all commands that answer share: loading, and one answer (`stream_answer`) that Ctrl-C stops between passes.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import typer

from offload_runtime.cli import terminal
from offload_runtime.cli.options import GenerateOptions
from offload_runtime.cli.render import answer_record, run_record, speed_figures
from offload_runtime.config import GenerationParams, RuntimeConfig
from offload_runtime.errors import BudgetError, OptionError

if TYPE_CHECKING:
    from offload_runtime.engine import GenerationResult, Runtime
    from offload_runtime.engine.request import PromptRoom
    from offload_runtime.plan import RunPlan

Prompt = str | Sequence[Mapping[str, str]]


def generate(options: GenerateOptions) -> None:
    """Answer one prompt as the text comes, or several at once: text on stdout, progress and figures on stderr."""
    config, params = options.loading(max_batch=max(1, len(options.prompt_file or ()))), options.params()
    named = read_prompts(options.prompt, options.prompt_file or [])
    prompts: list[Prompt] = [[{"role": "user", "content": text}] if options.chat else text for _, text in named]

    def check(room: PromptRoom) -> object:
        if len(prompts) == 1:
            return room.fit(prompts[0], params.max_new_tokens)
        return room.fit_all(prompts, params.max_new_tokens)

    show, show_progress = show_nothing if options.as_json else terminal.write_text, not options.no_progress
    results: Sequence[GenerationResult]
    failure: BudgetError | None = None
    with (
        terminal.only_json(options.as_json),
        load_runtime(config, show_progress=show_progress, explain=options.explain, check=check) as runtime,
    ):
        terminal.status_line(runtime.placement)
        try:
            if len(prompts) > 1:
                results = _answer_batch(runtime, prompts, params, show_progress=show_progress)
            else:
                results = [stream_answer(runtime.stream, prompts[0], params, show=show, show_progress=show_progress)]
        except BudgetError as error:
            if not error.answers:
                raise
            results, failure = error.answers, error  # shown as far as they had come, before the error
        about = run_record(runtime, config, params)
        load_report = runtime.load_report
    if config.trace is not None:
        terminal.status_line(f"trace written to {config.trace}")
    if len(prompts) == 1:
        if options.as_json:
            terminal.write_json({**answer_record(results[0]), **about}, sys.stdout)
        else:
            terminal.write_text("\n")
        terminal.status_line(" · ".join([*_figures(results[0]), load_report]))
    else:
        answers = [(name, result) for (name, _), result in zip(named, results, strict=True)]
        if options.as_json:
            records = [{"name": name, **answer_record(result)} for name, result in answers]
            terminal.write_json({"results": records, **about}, sys.stdout)
        else:
            terminal.write_text(
                "".join(f"== {terminal.one_line(name)} ==\n{result.text}\n" for name, result in answers)
            )
        for name, result in answers:
            terminal.status_line(f"{name}: {' · '.join(_figures(result))}")
        terminal.status_line(load_report)
    if failure is not None:
        raise failure
    if any(result.finish_reason == "interrupted" for result in results):
        raise typer.Exit(terminal.INTERRUPTED_EXIT_CODE)


def read_prompts(prompt: str | None, files: Sequence[str]) -> list[tuple[str, str]]:
    """Return the name and the text of `--prompt`, or of each `--prompt-file`: the file as the user wrote it (`-` is
    stdin). Raises `OptionError`."""
    if (prompt is None) == (not files):
        given = "both" if files else "neither"
        raise OptionError(f"{given} of --prompt and --prompt-file was given: give exactly one of them")
    if prompt is not None:
        return [("--prompt", prompt)]
    if files.count("-") > 1:
        raise OptionError(f"--prompt-file - was given {files.count('-')} times: stdin can be read once")
    return [("stdin" if path == "-" else path, terminal.read_file(path, "--prompt-file")) for path in files]


def _figures(result: GenerationResult) -> list[str]:
    """Return what was reached, and the wait for the first token; an interrupted answer says so."""
    stopped = ["stopped"] if result.finish_reason == "interrupted" else []
    return [*stopped, *speed_figures(result.stats), f"first token {result.stats.time_to_first_token_s:.2f} s"]


def show_nothing(piece: str) -> None:
    """Swallow the pieces of an answer that is printed as a whole."""


# --- what other commands share


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

    with terminal.ProgressBars(enabled=show_progress) as bars:
        return Runtime.from_config(
            config,
            on_progress=partial(bars.update, unit="bytes"),
            on_plan=partial(_explain, config=config) if explain else None,
            check=check,
        )


def _explain(plan: RunPlan, *, config: RuntimeConfig) -> None:
    """Print on stderr what a run holds where and, where the machine's figures are known, how long a pass will take."""
    from offload_runtime.cli.plan import memory_tables, print_tables, speed_line
    from offload_runtime.engine.load import planned_figures
    from offload_runtime.plan import COMMON_PROFILE

    machine = planned_figures(plan, device=config.device, profile=config.profile, emulate=config.emulate)
    unknown = (
        "no profile of this machine is known: nothing is predicted, and what was left to be chosen was chosen by the "
        f"figures of {COMMON_PROFILE}"
    )
    print_tables([*memory_tables(plan), unknown if machine is None else speed_line(plan, machine)], sys.stderr)


class AnswerStream(Protocol):
    """What `Runtime.stream` and `Conversation.say` return: pieces of text, then the result."""

    @property
    def result(self) -> GenerationResult:
        """The finished answer; only after the last piece or `close`."""

    def __iter__(self) -> Iterator[str]: ...

    def close(self) -> None:
        """Stop here and keep what there is."""


class _StopRequest:
    """Whether Ctrl-C was pressed."""

    requested = False


@contextmanager
def _stopping() -> Iterator[_StopRequest]:
    """Ctrl-C as a wish, so that an answer ends between two passes and the cache stays whole.

    A pass over a streamed target takes seconds; whoever presses Ctrl-C again does not want to wait for it, and gets
    the plain KeyboardInterrupt.
    """
    stop = _StopRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    # Signal handlers can be set from the main thread only; elsewhere no Ctrl-C arrives either.
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


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
    with _stopping() as stop, terminal.ProgressBars(enabled=show_progress) as bars:
        stream = start(prompt, **_keywords(params), speculate=speculate, on_prefill=_stoppable_prefill(stop, bars))
        try:
            for piece in stream:
                bars.close()
                show(piece)
                shown_characters += len(piece)
                if stop.requested:
                    break
        except (KeyboardInterrupt, BudgetError) as error:
            if not shown_characters:
                raise
            failure = error if isinstance(error, BudgetError) else None
        stream.close()
        result = stream.result
        # Text that the engine held back, as the possible beginning of a stop text, is part of a stopped answer too.
        if result.finish_reason == "interrupted":
            show(result.text[shown_characters:])
    if failure is not None:
        raise BudgetError(str(failure), [result]) from failure
    return result


def _answer_batch(
    runtime: Runtime, prompts: Sequence[Prompt], params: GenerationParams, *, show_progress: bool
) -> list[GenerationResult]:
    """Answer all prompts together, to their ends or to Ctrl-C.

    After Ctrl-C the answers that were not finished have the finish reason `interrupted`. While the prompts are worked
    on, and at the second one, Ctrl-C raises KeyboardInterrupt.
    """
    with _stopping() as stop, terminal.ProgressBars(enabled=show_progress) as bars:
        return runtime.generate_batch(
            prompts,
            **_keywords(params),
            on_prefill=_stoppable_prefill(stop, bars),
            on_progress=partial(bars.update, "answers", unit="finished"),
            should_stop=lambda: stop.requested,
        )


def _keywords(params: GenerationParams) -> dict[str, Any]:
    """Return what an answer is asked for by, in the engine's keywords."""
    given = asdict(params)
    sampling = given.pop("sampling")
    del sampling["noise_id"]  # nothing on the command line asks for one; a batch numbers its own
    return {**sampling, **given}


def _stoppable_prefill(stop: _StopRequest, bars: terminal.ProgressBars) -> Callable[[int, int], None]:
    """Show the layers of a prefill, and end it where Ctrl-C asked for that."""

    def on_prefill(done_layers: int, layers: int) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        bars.update("prefill", done_layers, layers, unit="layers")

    return on_prefill
