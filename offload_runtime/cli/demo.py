"""`offload-runtime demo`: what speculation buys, shown on a small real model that is streamed layer by layer."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from offload_runtime.cli.generate import load_runtime, stream_answer
from offload_runtime.cli.options import DemoOptions
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


def demo(options: DemoOptions) -> None:
    """Stream a small real model layer by layer, without and with speculation, and compare. Fetches 98 MB once."""
    import psutil
    from rich.console import Console

    params, show_progress = options.params(), not options.no_progress
    messages = [{"role": "user", "content": DEFAULT_PROMPT if options.prompt is None else options.prompt}]
    from offload_runtime.engine import fetch_demo_model

    config = RuntimeConfig(
        target=str(fetch_demo_model(on_progress=status_line, show_download=show_progress)),
        draft="ngram",
        device=options.device,
        dtype=options.dtype,
        resident_layers=0,
        max_gamma=max(RuntimeConfig.max_gamma, params.gamma or 0),
    )
    results: dict[str, GenerationResult] = {}
    peak_bytes: list[int] = []  # VRAM on a GPU, the process's resident memory on a CPU
    with load_runtime(config, show_progress=show_progress) as runtime:
        on_gpu = runtime.device.type == "cuda"
        write_text(f"{machine_line(runtime.device.type)}\n")
        status_line(runtime.load_report)
        status_line(runtime.placement)
        # A few tokens both ways, so that neither run below pays for compiling and first touches.
        status_line("warming up")
        short = replace(params, max_new_tokens=min(_WARM_UP_TOKENS, params.max_new_tokens))
        for speculate in (False, True):
            _answer(runtime, messages, short, speculate=speculate)
        for name, speculate in (("plain", False), ("speculative", True)):
            write_text(f"\n── {name} ──\n")
            results[name] = _answer(
                runtime, messages, params, speculate=speculate, show=write_text, show_progress=show_progress
            )
            memory = psutil.Process().memory_info()
            peak_bytes.append(results[name].stats.peak_vram_bytes if on_gpu else memory.rss)
    Console(highlight=False).print(comparison_table(results, peak_bytes, on_gpu=on_gpu))
    identical = results["plain"].tokens == results["speculative"].tokens
    write_text(f"identical tokens: {'yes' if identical else 'no'}\n")
    if not identical:
        raise typer.Exit(1)


def _answer(
    runtime: Runtime,
    messages: list[dict[str, str]],
    params: GenerationParams,
    *,
    speculate: bool,
    show: Callable[[str], None] = lambda piece: None,
    show_progress: bool = False,
) -> GenerationResult:
    """Answer once; leave at once when Ctrl-C stopped it, because half an answer compares with nothing."""
    result = stream_answer(
        runtime.stream, messages, params, show=show, show_progress=show_progress, speculate=speculate
    )
    show("\n")
    if result.finish_reason == "interrupted":
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
    return result


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


def comparison_table(results: Mapping[str, GenerationResult], peak_bytes: Sequence[int], *, on_gpu: bool) -> Table:
    """Return the figures with one column per run."""
    from rich.table import Table

    table = Table(show_header=True, title=None)
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    stats = [result.stats for result in results.values()]
    table.add_row("tokens/s", *(f"{s.tok_per_s:.2f}" for s in stats))
    table.add_row("tokens per pass", *(f"{s.tokens_per_pass:.2f}" for s in stats))
    table.add_row("bytes per pass", *(format_bytes(s.bytes_per_pass) for s in stats))
    table.add_row("link", *(link_figure(s) for s in stats))
    table.add_row("peak VRAM" if on_gpu else "process RSS", *map(format_bytes, peak_bytes))
    table.add_row("time to first token", *(f"{s.time_to_first_token_s:.2f} s" for s in stats))
    return table
