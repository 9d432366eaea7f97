"""`offload-runtime generate`: one prompt and its answer as it comes, or several answered at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import typer

from offload_runtime.cli.answer import Prompt, answer_batch, check_prompts, load_runtime, stream_answer
from offload_runtime.cli.render import batch_record, result_record, speed_figures
from offload_runtime.cli.terminal import (
    INTERRUPTED_EXIT_CODE,
    NamedPrompt,
    one_line,
    only_json,
    status_line,
    write_json,
    write_text,
)
from offload_runtime.config import GenerationParams, RuntimeConfig
from offload_runtime.errors import BudgetError

if TYPE_CHECKING:
    from offload_runtime.engine import GenerationResult


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
    """Answer one prompt on stdout as text while it comes, or several together, every answer under the name of its
    prompt; or print one JSON object at the end. Figures go to stderr.

    Raises `typer.Exit(130)` after printing what was there when Ctrl-C ended the answers, and the `BudgetError` that
    ended them likewise.
    """
    requests, names = [_request(prompt, as_chat=as_chat) for prompt in prompts], [prompt.name for prompt in prompts]
    check = partial(check_prompts, prompts=requests, max_new_tokens=params.max_new_tokens)

    def answer() -> Sequence[GenerationResult]:
        if len(requests) > 1:
            return answer_batch(runtime, requests, params, show_progress=show_progress)
        show = _show_nothing if as_json else write_text
        return [stream_answer(runtime.stream, requests[0], params, show=show, show_progress=show_progress)]

    with (
        only_json(as_json),
        load_runtime(config, explain=explain, show_progress=show_progress, check=check) as runtime,
    ):
        status_line(runtime.placement)
        results, failure = _as_far_as_memory_goes(answer)
        if len(requests) > 1:
            record = batch_record(names, results, runtime=runtime, config=config, params=params)
        else:
            record = result_record(results[0], runtime=runtime, config=config, params=params)
        load_report = runtime.load_report
    if config.trace is not None:
        status_line(f"trace written to {config.trace}")
    if as_json:
        write_json(record, sys.stdout)
    elif len(requests) == 1:
        write_text("\n")
    else:
        for name, result in zip(names, results, strict=True):
            write_text(f"== {one_line(name)} ==\n{result.text}\n")
    if len(requests) == 1:
        status_line(" · ".join([*_figures(results[0]), load_report]))
    else:
        for name, result in zip(names, results, strict=True):
            status_line(f"{name}: {' · '.join(_figures(result))}")
        status_line(load_report)
    if failure is not None:
        raise failure
    if any(result.finish_reason == "interrupted" for result in results):
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


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


def _show_nothing(piece: str) -> None:
    """Swallow the pieces of an answer that is printed as a whole."""
