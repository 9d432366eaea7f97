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
from typing import TYPE_CHECKING, Any

import typer

from offload_runtime.cli import terminal
from offload_runtime.cli.options import AnswerOptions, DemoOptions, GenerateOptions
from offload_runtime.cli.plan import print_explanation
from offload_runtime.cli.render import answer_line, answer_record, run_record
from offload_runtime.config import GenerationParams, RuntimeConfig
from offload_runtime.errors import BudgetError, OptionError

if TYPE_CHECKING:
    from offload_runtime.engine import GenerationResult, Reply, Runtime, TokenStream
    from offload_runtime.engine.generate import OnProgress
    from offload_runtime.engine.request import PromptRoom

    StartAnswer = Callable[..., TokenStream | Reply]
    CheckPrompts = Callable[[PromptRoom], object]

Prompt = str | Sequence[Mapping[str, str]]


def generate(options: GenerateOptions) -> None:
    """Answer one prompt as the text comes, or several at once: text on stdout, progress and figures on stderr."""
    config, max_new_tokens = options.config, options.params.max_new_tokens
    named = read_prompts(options.prompt, options.prompt_file or [])
    prompts: list[Prompt] = [[{"role": "user", "content": text}] if options.chat else text for _, text in named]
    is_batch = len(prompts) > 1

    def check(room: PromptRoom) -> object:
        return room.fit_all(prompts, max_new_tokens) if is_batch else room.fit(prompts[0], max_new_tokens)

    results: Sequence[GenerationResult]
    failure: BudgetError | None = None
    with (
        terminal.only_json(options.as_json),
        load_runtime(config, show_progress=not options.no_progress, explain=options.explain, check=check) as runtime,
    ):
        terminal.status_line(runtime.placement)
        try:
            if is_batch:
                results = _answer_batch(runtime, prompts, options)
            else:
                show = show_nothing if options.as_json else terminal.write_text
                results = [stream_answer(runtime.stream, prompts[0], options, show=show)]
        except BudgetError as error:
            if not error.answers:
                raise
            results, failure = error.answers, error  # shown as far as they had come, before the error
        about, load_report = run_record(runtime, options), runtime.load_report
    answers = [(name, result) for (name, _), result in zip(named, results, strict=True)]
    lines = [answer_line(result, f"first token {result.stats.time_to_first_token_s:.2f} s") for result in results]
    if options.as_json:
        records = [{"name": name, **answer_record(result)} for name, result in answers]
        answered = {"results": records} if is_batch else answer_record(results[0])
        terminal.write_json({**answered, **about}, sys.stdout)
    elif is_batch:
        texts = [f"== {terminal.one_line(name)} ==\n{result.text}\n" for name, result in answers]
        terminal.write_text("".join(texts))
    if is_batch:
        for (name, _), line in zip(answers, lines, strict=True):
            terminal.status_line(f"{name}: {line}")
        terminal.status_line(load_report)
    else:
        terminal.status_line(f"{lines[0]} · {load_report}")
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


def show_nothing(piece: str) -> None:
    """Swallow the pieces of an answer that is printed as a whole."""


# --- what other commands share


@contextmanager
def load_runtime(
    config: RuntimeConfig, *, show_progress: bool, explain: bool = False, check: CheckPrompts | None = None
) -> Iterator[Runtime]:
    """Load the target (and the draft) with a progress bar in bytes on stderr; what `check` refuses is refused before
    weights are read. `explain` prints the plan on stderr."""
    from offload_runtime.engine import Runtime

    on_plan = partial(print_explanation, config=config) if explain else None
    with terminal.ProgressBars(enabled=show_progress) as bars:
        on_progress = partial(bars.update, unit="bytes")
        runtime = Runtime.from_config(config, on_progress=on_progress, on_plan=on_plan, check=check)
    with runtime:
        yield runtime
    if config.trace is not None:
        terminal.status_line(f"trace written to {config.trace}")


@contextmanager
def _stoppable(*, show_progress: bool) -> Iterator[tuple[threading.Event, terminal.ProgressBars, OnProgress]]:
    """Ctrl-C as a wish, so that an answer ends between two passes and the cache stays whole.

    A pass over a streamed target takes seconds; whoever presses Ctrl-C again does not want to wait for it, and gets
    the plain KeyboardInterrupt. So does who presses it while the prompt is worked on.

    Yields:
        What is set at the first Ctrl-C, bars of progress, and what shows the layers of a prefill in them.
    """
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    def on_prefill(done_layers: int, layers: int) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        bars.update("prefill", done_layers, layers, unit="layers")

    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        with terminal.ProgressBars(enabled=show_progress) as bars:
            yield stop, bars, on_prefill
    finally:
        signal.signal(signal.SIGINT, previous)


def stream_answer(
    start: StartAnswer, prompt: Prompt, options: AnswerOptions | DemoOptions, *, show: Callable[[str], None]
) -> GenerationResult:
    """Run one answer to its end or to Ctrl-C, handing each piece of text to `show` as it comes, and a line's end after
    the last one.

    `start` is `Runtime.stream` or `Conversation.say`. Returns the result; its finish reason is `interrupted` when
    Ctrl-C ended it. Before the first piece of text Ctrl-C raises KeyboardInterrupt instead and, as with every other
    exception, the stream is not settled: a conversation then stays as it was before the turn.

    Raises:
        BudgetError: Memory ran out; behind the first piece of text the answer so far comes with it, and stays in a
            conversation.
    """
    shown_characters = 0
    failure: BudgetError | None = None
    try:
        with _stoppable(show_progress=not options.no_progress) as (stop, bars, on_prefill):
            stream = start(prompt, **_keywords(options.params), on_prefill=on_prefill)
            try:
                for piece in stream:
                    bars.close()
                    show(piece)
                    shown_characters += len(piece)
                    if stop.is_set():
                        break
            except (KeyboardInterrupt, BudgetError) as error:
                if not shown_characters:
                    raise
                failure = error if isinstance(error, BudgetError) else None
            stream.close()
            # Text that the engine held back, as the possible beginning of a stop text, is part of a stopped answer too.
            if stream.result.finish_reason == "interrupted":
                show(stream.result.text[shown_characters:])
    finally:
        # Whatever is printed next, be it an error, must not continue the answer's last line.
        if shown_characters:
            show("\n")
    if failure is not None:
        raise BudgetError(str(failure), [stream.result]) from failure
    return stream.result


def _answer_batch(runtime: Runtime, prompts: Sequence[Prompt], options: AnswerOptions) -> list[GenerationResult]:
    """Answer all prompts together, to their ends or to Ctrl-C.

    After Ctrl-C the answers that were not finished have the finish reason `interrupted`. While the prompts are worked
    on, and at the second one, Ctrl-C raises KeyboardInterrupt.
    """
    with _stoppable(show_progress=not options.no_progress) as (stop, bars, on_prefill):
        asked, on_progress = _keywords(options.params), partial(bars.update, "answers", unit="finished")
        return runtime.generate_batch(
            prompts, **asked, on_prefill=on_prefill, on_progress=on_progress, should_stop=stop.is_set
        )


def _keywords(params: GenerationParams) -> dict[str, Any]:
    """Return what an answer is asked for by, in the engine's keywords."""
    given = asdict(params)
    sampling = given.pop("sampling")
    del sampling["noise_id"]  # nothing on the command line asks for one; a batch numbers its own
    return {**sampling, **given}
