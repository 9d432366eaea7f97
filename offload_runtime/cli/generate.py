"""`offload-runtime generate`: one prompt and its answer as it comes, or several answered at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import TYPE_CHECKING

import typer

from offload_runtime.cli.answer import Prompt, answer_batch, check_prompts, load_runtime, stream_answer
from offload_runtime.cli.answer_figures import speed_figures
from offload_runtime.cli.answer_record import batch_record, result_record
from offload_runtime.cli.terminal import INTERRUPTED_EXIT_CODE, one_line, status_line, write_json, write_text
from offload_runtime.cli.user_text import NamedPrompt
from offload_runtime.config import GenerationParams, RuntimeConfig
from offload_runtime.errors import BudgetError

if TYPE_CHECKING:
    from offload_runtime.engine import GenerationResult, Runtime


def run_generate(
    prompts: Sequence[NamedPrompt],
    config: RuntimeConfig,
    params: GenerationParams,
    *,
    as_chat: bool,
    as_json: bool,
    explain: bool,
    show_progress: bool,
) -> None:
    """Answer the one prompt on stdout, as text while it comes or as one JSON object at the end; figures go to stderr.

    Raises `typer.Exit(130)` after printing what was there when Ctrl-C ended the answer, and the `BudgetError` that
    ended it likewise.
    """
    (prompt,) = prompts
    request = _request(prompt, as_chat=as_chat)
    with _loaded(config, [request], params, as_json=as_json, explain=explain, show_progress=show_progress) as runtime:
        show = _show_nothing if as_json else write_text
        (result,), failure = _as_far_as_memory_goes(
            lambda: [stream_answer(runtime.stream, request, params, show=show, show_progress=show_progress)]
        )
        record = result_record(result, runtime=runtime, config=config, params=params)
        load_report = runtime.load_report
    if as_json:
        write_json(record, sys.stdout)
    else:
        write_text("\n")
    status_line(" · ".join([*_figures(result), load_report]))
    _end([result], failure)


def run_batch(
    prompts: Sequence[NamedPrompt],
    config: RuntimeConfig,
    params: GenerationParams,
    *,
    as_chat: bool,
    as_json: bool,
    explain: bool,
    show_progress: bool,
) -> None:
    """Answer all prompts together; on stdout every answer under the name of its prompt, or one JSON object for all.

    Raises `typer.Exit(130)` after printing what was there when Ctrl-C ended the answers, and the `BudgetError` that
    ended them likewise.
    """
    requests = [_request(prompt, as_chat=as_chat) for prompt in prompts]
    names = [prompt.name for prompt in prompts]
    with _loaded(config, requests, params, as_json=as_json, explain=explain, show_progress=show_progress) as runtime:
        results, failure = _as_far_as_memory_goes(
            lambda: answer_batch(runtime, requests, params, show_progress=show_progress)
        )
        record = batch_record(names, results, runtime=runtime, config=config, params=params)
        load_report = runtime.load_report
    if as_json:
        write_json(record, sys.stdout)
    else:
        for name, result in zip(names, results, strict=True):
            write_text(f"== {one_line(name)} ==\n{result.text}\n")
    for name, result in zip(names, results, strict=True):
        status_line(f"{name}: {' · '.join(_figures(result))}")
    status_line(load_report)
    _end(results, failure)


@contextmanager
def _loaded(
    config: RuntimeConfig,
    prompts: Sequence[Prompt],
    params: GenerationParams,
    *,
    as_json: bool,
    explain: bool,
    show_progress: bool,
) -> Iterator[Runtime]:
    """Load the runtime for these prompts, say on stderr what lives where, and close it afterwards."""
    check = partial(check_prompts, prompts=prompts, max_new_tokens=params.max_new_tokens)
    # Libraries print to stdout now and then; a reader of JSON must not meet it.
    with (
        redirect_stdout(sys.stderr if as_json else sys.stdout),
        load_runtime(config, explain=explain, show_progress=show_progress, check=check) as runtime,
    ):
        status_line(runtime.placement)
        yield runtime
    if config.trace is not None:
        status_line(f"trace written to {config.trace}")


def _as_far_as_memory_goes(
    answer: Callable[[], Sequence[GenerationResult]],
) -> tuple[Sequence[GenerationResult], BudgetError | None]:
    """Return the answers; where memory ran out, what there is of them, and the error to end with once they are shown.

    Raises:
        BudgetError: There is nothing of any answer.
    """
    try:
        return answer(), None
    except BudgetError as error:
        if not error.answers:
            raise
        return error.answers, error


def _request(prompt: NamedPrompt, *, as_chat: bool) -> Prompt:
    return [{"role": "user", "content": prompt.text}] if as_chat else prompt.text


def _figures(result: GenerationResult) -> list[str]:
    """Return what was reached, and the wait for the first token; an interrupted answer says so."""
    stopped = ["stopped"] if result.finish_reason == "interrupted" else []
    return [*stopped, *speed_figures(result.stats), f"first token {result.stats.time_to_first_token_s:.2f} s"]


def _end(results: Sequence[GenerationResult], failure: BudgetError | None) -> None:
    """Leave the command as its answers ended, once they are shown."""
    if failure is not None:
        raise failure
    if any(result.finish_reason == "interrupted" for result in results):
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def _show_nothing(piece: str) -> None:
    """Swallow the pieces of an answer that is printed as a whole."""
