"""A benchmark model: a small real Llama embedded exactly into the shape, and the cost, of a large one.

    python tools/widen_model.py --source demo --shape llama2-7b --noise 0.05 --out wide-7b
    python tools/widen_model.py --source DIRECTORY --shape llama3-8b --context-rope yarn:16 --out wide-8b-128k
    python tools/widen_model.py --source demo --shape llama-68m --random --out draft-68m

The result is a safetensors directory that transformers loads too. It has the small model's vocabulary, tokenizer and
language, so the small model drafts for it; `--noise` sets how often the draft is right. With `--random` it has the
vocabulary and the tokenizer only: a draft of which just the time of a step is measured. Benchmarks that need no files
fill their memory from `widening.checkpoint.WidenedCheckpoint` or `widening.untrained.random_llama` directly.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import harness
from harness import DTYPES
from widening.checkpoint import WidenedCheckpoint
from widening.shapes import SHAPES, shape_named
from widening.untrained import random_llama

from offload_runtime.config import format_bytes
from offload_runtime.errors import OptionError
from offload_runtime.memory import resolve_device
from offload_runtime.weights import CheckpointSource, convert_to_safetensors, fetch_demo_model, open_checkpoint

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


def _large_model(arguments: argparse.Namespace) -> CheckpointSource:
    """What the options describe, nothing of it computed yet."""
    shape = shape_named(arguments.shape)
    device = resolve_device(arguments.device)
    if not arguments.random:
        return WidenedCheckpoint(
            open_source(arguments.source), shape, arguments.noise, arguments.seed,
            context_rope=arguments.context_rope, device=device,
        )  # fmt: skip
    if arguments.noise or arguments.context_rope is not None:
        raise OptionError("--random has no use for --noise and --context-rope: leave them out")
    words = open_source(arguments.source)
    return random_llama(
        shape, arguments.seed, vocab_size=words.config().vocab_size, words=words, device=device,
        context_tokens=words.config().max_position_embeddings,
        reference=f"random weights under the vocabulary of {words.reference}",
    )  # fmt: skip


@harness.one_line_errors
def main() -> int:
    """Returns the exit code: 2 for what the user can mend."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--source", required=True, help=SOURCE_HELP)
    parser.add_argument("--shape", required=True, help=", ".join(SHAPES))
    parser.add_argument("--noise", type=float, default=0.0, help="relative, on the small model's matrices")
    parser.add_argument("--random", action="store_true", help="random weights, only the source's vocabulary")
    parser.add_argument("--seed", type=int, default=0, help="of the noise and of the surplus")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the written weights")
    parser.add_argument("--context-rope", help="scale a source without scaling to a longer context, e.g. yarn:16")
    parser.add_argument("--device", default="auto", help="where surplus random numbers are drawn: auto, cuda or cpu")
    parser.add_argument("--out", type=Path, required=True, help="a new directory")
    arguments = parser.parse_args()
    remove_partial_output_on_sigterm()
    print(write_checkpoint(_large_model(arguments), arguments.out, arguments.dtype))
    return 0


if __name__ == "__main__":
    sys.exit(main())
