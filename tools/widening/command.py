"""What the commands that write benchmark models have in common: sources, progress, signals."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

from offload_runtime.config import format_bytes
from offload_runtime.weights import CheckpointSource, convert_to_safetensors, fetch_demo_model, open_checkpoint

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SOURCE_HELP = "safetensors directory, .gguf file, hub id, or demo"


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _percent_reporter() -> Callable[[int, int], None]:
    """A line for every five percent of the bytes."""
    shown = -1

    def report(done_bytes: int, total_bytes: int) -> None:
        nonlocal shown
        step = 20 * done_bytes // total_bytes
        if step > shown:
            shown = step
            _report(f"written {format_bytes(done_bytes)} of {format_bytes(total_bytes)}")

    return report


def open_source(reference: str) -> CheckpointSource:
    """The model that `--source` names; `demo` is fetched.

    Raises:
        CheckpointError, HubError, UnsupportedArchitectureError: As `open_checkpoint` and `fetch_demo_model`.
    """
    return open_checkpoint(fetch_demo_model(on_progress=_report) if reference == "demo" else reference)


def write_checkpoint(source: CheckpointSource, out: Path, dtype_name: str) -> Path:
    """Write a safetensors directory, all or nothing, with progress on stderr; returns the directory."""
    return convert_to_safetensors(source, out, dtype=DTYPES[dtype_name], on_progress=_percent_reporter())


def _terminated(number: int, frame: object) -> NoReturn:
    """Leave through the exception handlers, which remove what is half-written."""
    sys.exit(128 + number)


def remove_partial_output_on_sigterm() -> None:
    """From now on that signal ends the command as an interruption does."""
    signal.signal(signal.SIGTERM, _terminated)
