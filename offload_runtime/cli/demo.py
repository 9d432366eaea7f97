"""`offload-runtime demo`: what speculation buys, shown on a small real model that is streamed layer by layer."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import typer
from rich.table import Column, Table

from offload_runtime.cli.generate import link_figure, load_runtime, stream_answer
from offload_runtime.cli.options import DemoOptions
from offload_runtime.cli.terminal import INTERRUPTED_EXIT_CODE, print_tables, status_line, write_text
from offload_runtime.sizes import format_bytes

if TYPE_CHECKING:
    from offload_runtime.engine import GenerationResult

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
    from offload_runtime.engine import fetch_demo_model
    from offload_runtime.plan import memory_name

    show_progress = not options.no_progress
    messages = [{"role": "user", "content": DEFAULT_PROMPT if options.prompt is None else options.prompt}]
    target = str(fetch_demo_model(on_progress=status_line, show_download=show_progress))
    config = replace(options.config, target=target)
    results: dict[str, GenerationResult] = {}
    with load_runtime(config, show_progress=show_progress, threads=options.threads) as runtime:
        write_text(f"{machine_line(runtime.device.type)}\n")
        modes = {"plain": partial(runtime.stream, speculate=False), "speculative": partial(runtime.stream)}
        # A few tokens both ways, so that neither run below pays for compiling and first touches.
        status_line("warming up")
        few = replace(options.params, max_new_tokens=min(_WARM_UP_TOKENS, options.params.max_new_tokens))
        short = replace(options, params=few, no_progress=True)
        for start in modes.values():
            _finished(stream_answer(start, messages, short, show=None))
        for name, start in modes.items():
            write_text(f"\n── {name} ──\n")
            results[name] = _finished(stream_answer(start, messages, options, show=write_text))
    print_tables([comparison_table(results, memory_name(runtime.device.type))], sys.stdout)
    identical = results["plain"].tokens == results["speculative"].tokens
    write_text(f"identical tokens: {'yes' if identical else 'no'}\n")
    if not identical:
        raise typer.Exit(1)


def _finished(result: GenerationResult) -> GenerationResult:
    """Leave at once when Ctrl-C stopped an answer, because half of one compares with nothing."""
    if result.finish_reason == "interrupted":
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
    return result


def machine_line(device_type: str) -> str:
    """Return the device and the versions that the figures below it belong to."""
    import torch

    from offload_runtime.hardware.host_bench import read_host_info

    on_cpu = f"{read_host_info().cpu.name}, {os.cpu_count()} threads"
    name = torch.cuda.get_device_name() if device_type == "cuda" else on_cpu
    return f"{name} · torch {torch.__version__} · Python {platform.python_version()}"


def comparison_table(results: Mapping[str, GenerationResult], memory: str) -> Table:
    """Return the figures with one column per run."""
    table = Table("", *(Column(name, justify="right") for name in results))
    stats = [result.stats for result in results.values()]
    table.add_row("tokens/s", *(f"{s.tok_per_s:.2f}" for s in stats))
    table.add_row("tokens per pass", *(f"{s.tokens_per_pass:.2f}" for s in stats))
    table.add_row("bytes per pass", *(format_bytes(s.bytes_per_pass) for s in stats))
    table.add_row("link", *(link_figure(s) for s in stats))
    table.add_row(f"peak {memory}", *(format_bytes(s.peak_vram_bytes) for s in stats))
    table.add_row("time to first token", *(f"{s.time_to_first_token_s:.2f} s" for s in stats))
    return table
