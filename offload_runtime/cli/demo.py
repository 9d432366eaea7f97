"""`offload-runtime demo`: what speculation buys, shown on a small real model that is streamed layer by layer."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from offload_runtime.cli.answer import load_runtime, stream_answer
from offload_runtime.cli.render import link_figure
from offload_runtime.cli.terminal import INTERRUPTED_EXIT_CODE, status_line, write_text
from offload_runtime.config import GenerationParams, RuntimeConfig, format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from offload_runtime.engine import GenerationResult, Runtime

# The n-gram draft copies from the text so far, so the question must have an answer with something to copy.
DEFAULT_PROMPT = (
    "Correct the spelling mistakes in this text and leave everything else as it is:\n\n"
    "Anna lived in a small house by the sea. Every morning Anna walked along the beach and collected shells. "
    "Every evenning Anna sat by the window and watched the ships come home. When the ships were late, Anna lit a "
    "lamp and put it in the window."
)
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class _Run:
    """One answer of the demo; `peak_bytes` is VRAM on a GPU and the process's resident memory on a CPU."""

    name: str
    result: GenerationResult
    peak_bytes: int


def run_demo(
    prompt: str,
    params: GenerationParams,
    *,
    device: str,
    dtype: str,
    show_progress: bool,
) -> None:
    """Answer `prompt` without and with speculation and compare; exit code 1 when the tokens are not identical."""
    from offload_runtime.engine import fetch_demo_model

    config = RuntimeConfig(
        target=str(fetch_demo_model(on_progress=status_line, show_download=show_progress)),
        draft="ngram",
        device=device,
        dtype=dtype,
        resident_layers=0,
        max_gamma=max(RuntimeConfig.max_gamma, params.gamma or 0),
    )
    with load_runtime(config, show_progress=show_progress) as runtime:
        write_text(f"{machine_line(runtime.device.type)}\n")
        status_line(runtime.load_report)
        status_line(runtime.placement)
        status_line("warming up")
        _warm_up(runtime, prompt, params)
        runs = [
            _run(runtime, prompt, params, speculate=speculate, show_progress=show_progress)
            for speculate in (False, True)
        ]
        on_gpu = runtime.device.type == "cuda"
    from rich.console import Console

    Console(highlight=False).print(comparison_table(runs, on_gpu=on_gpu))
    identical = runs[0].result.tokens == runs[1].result.tokens
    write_text(f"identical tokens: {'yes' if identical else 'no'}\n")
    if not identical:
        raise typer.Exit(1)


def machine_line(device_type: str) -> str:
    """Return the device and the versions that the figures below it belong to."""
    import torch

    if device_type == "cuda":
        name = torch.cuda.get_device_name()
    else:
        name = f"{_processor_name()}, {os.cpu_count()} threads"
    return f"{name} · torch {torch.__version__} · Python {platform.python_version()}"


def _processor_name() -> str:
    """Return the processor's name; Linux tells it in /proc only, `platform` there says no more than x86_64."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _warm_up(runtime: Runtime, prompt: str, params: GenerationParams) -> None:
    """Answer a few tokens both ways, so that neither run below pays for compiling and first touches."""
    short = replace(params, max_new_tokens=min(_WARM_UP_TOKENS, params.max_new_tokens))
    messages = [{"role": "user", "content": prompt}]
    for speculate in (False, True):
        result = stream_answer(
            runtime.stream, messages, short, show=lambda piece: None, show_progress=False, speculate=speculate
        )
        _end_if_interrupted(result)


def _run(runtime: Runtime, prompt: str, params: GenerationParams, *, speculate: bool, show_progress: bool) -> _Run:
    """Answer once while streaming the text to stdout."""
    import psutil

    name = "speculative" if speculate else "plain"
    write_text(f"\n── {name} ──\n")
    messages = [{"role": "user", "content": prompt}]
    result = stream_answer(
        runtime.stream, messages, params, show=write_text, show_progress=show_progress, speculate=speculate
    )
    write_text("\n")
    _end_if_interrupted(result)
    on_gpu = runtime.device.type == "cuda"
    peak_bytes = result.stats.peak_vram_bytes if on_gpu else psutil.Process().memory_info().rss
    return _Run(name, result, peak_bytes)


def _end_if_interrupted(result: GenerationResult) -> None:
    """Leave at once when Ctrl-C stopped an answer: half an answer compares with nothing."""
    if result.finish_reason == "interrupted":
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def comparison_table(runs: list[_Run], *, on_gpu: bool) -> Table:
    """Return the figures with one column per run."""
    from rich.table import Table

    table = Table(show_header=True, title=None)
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    stats = [run.result.stats for run in runs]
    table.add_row("tokens/s", *(f"{s.tok_per_s:.2f}" for s in stats))
    table.add_row("tokens per pass", *(f"{s.tokens_per_pass:.2f}" for s in stats))
    table.add_row("bytes per pass", *(format_bytes(s.bytes_per_pass) for s in stats))
    table.add_row("link", *(link_figure(s) for s in stats))
    table.add_row("peak VRAM" if on_gpu else "process RSS", *(format_bytes(run.peak_bytes) for run in runs))
    table.add_row("time to first token", *(f"{s.time_to_first_token_s:.2f} s" for s in stats))
    return table
