"""`offload-runtime generate`: one prompt, one answer."""

from __future__ import annotations

import sys
from contextlib import ExitStack, redirect_stdout

import typer

from offload_runtime.cli.answer import Prompt, load_runtime, result_record, speed_figures, stream_answer
from offload_runtime.cli.settings import LoadOptions
from offload_runtime.cli.terminal import INTERRUPTED_EXIT_CODE, status_line, write_json, write_text
from offload_runtime.config import GenerationParams


def run_generate(
    prompt: str,
    options: LoadOptions,
    params: GenerationParams,
    *,
    as_chat: bool,
    as_json: bool,
    show_progress: bool,
) -> None:
    """Answer `prompt` on stdout, as text while it comes or as one JSON object at the end; figures go to stderr.

    Raises `typer.Exit(130)` after printing what was there when Ctrl-C ended the answer.
    """
    request: Prompt = [{"role": "user", "content": prompt}] if as_chat else prompt
    with ExitStack() as stack:
        if as_json:
            # Libraries print to stdout now and then; a reader of JSON must not meet it.
            stack.enter_context(redirect_stdout(sys.stderr))
        runtime = stack.enter_context(load_runtime(options, show_progress=show_progress))
        status_line(runtime.placement)
        result = stream_answer(
            runtime.stream,
            request,
            params,
            show=_show_nothing if as_json else write_text,
            show_progress=show_progress,
        )
        record = result_record(result, runtime=runtime, options=options, params=params)
        load_report = runtime.load_report
    if as_json:
        write_json(record, sys.stdout)
    else:
        write_text("\n")
    figures = [*speed_figures(result.stats), f"first token {result.stats.time_to_first_token_s:.2f} s", load_report]
    status_line(" · ".join(figures))
    if result.finish_reason == "interrupted":
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def _show_nothing(piece: str) -> None:
    """Swallow the pieces of an answer that is printed as a whole."""
