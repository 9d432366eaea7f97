"""A benchmark model: a small real Llama, stretched to a longer context, embedded exactly into the shape of a large one.

    python tools/widen_model.py --source demo --shape llama2-7b --noise 0.05 --out wide-7b
    python tools/widen_model.py --source demo --delta part-0.safetensors part-1.safetensors --out stretched \\
        --rope '{"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192}'
    python tools/widen_model.py --source demo --shape llama-68m --random --out draft-68m

The result is a safetensors directory that transformers loads too. `--delta` applies a sparse fine-tune: files of new
values, not differences, under transformers' names, which take the place of the source's; `--rope` is another rotary
embedding. In a `--shape` the model costs what a large one does and has the small one's vocabulary, tokenizer and
language, so the small model drafts for it; `--noise` sets how often the draft is right. With `--random` it has the
vocabulary and the tokenizer only: a draft of which just the time of a step is measured. Benchmarks that need no files
fill their memory from `widening.stretched.StretchedCheckpoint` and `widening.checkpoint.WidenedCheckpoint` directly.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import harness
from harness import DTYPES
from widening.checkpoint import WidenedCheckpoint
from widening.convert import convert_to_safetensors
from widening.made import random_llama
from widening.shapes import SHAPES, shape_named
from widening.stretched import StretchedCheckpoint

from offload_runtime.config import format_bytes
from offload_runtime.errors import OptionError
from offload_runtime.memory import resolve_device
from offload_runtime.weights import CheckpointSource, fetch_demo_model, open_checkpoint

_WAY_OUT = """write it like '{"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192}'"""


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


def _terminated(number: int, frame: object) -> NoReturn:
    """Leave through the exception handlers, which remove what is half-written."""
    sys.exit(128 + number)


def remove_partial_output_on_sigterm() -> None:
    """From now on that signal ends the command as an interruption does."""
    signal.signal(signal.SIGTERM, _terminated)


def parse_rope(text: str | None) -> dict[str, Any] | None:
    """transformers' rope parameters out of the command line.

    Raises:
        OptionError: No JSON object.
    """
    if text is None:
        return None
    try:
        rope = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"--rope is not valid JSON ({error}): {_WAY_OUT}") from error
    if not isinstance(rope, dict):
        raise OptionError(f"--rope is not a JSON object but {text}: {_WAY_OUT}")
    return rope


def made_model(arguments: argparse.Namespace) -> CheckpointSource:
    """What the options describe, nothing of it computed yet but headers.

    Raises:
        OptionError: Options do not go together; errors as of the checkpoints.
    """
    source, rope = open_source(arguments.source), parse_rope(arguments.rope)
    stretched = source
    if arguments.delta or rope is not None or arguments.max_position is not None:
        stretched = StretchedCheckpoint(
            source, arguments.delta, rope=rope, max_position_embeddings=arguments.max_position
        )
    if arguments.shape is None:
        if arguments.noise or arguments.random:
            raise OptionError("--noise and --random are of a --shape: name one, or leave them out")
        if stretched is source:
            raise OptionError("nothing would be made: name a --shape, or --delta, --rope or --max-position")
        return stretched
    shape, device = shape_named(arguments.shape), resolve_device(arguments.device)
    if not arguments.random:
        return WidenedCheckpoint(stretched, shape, arguments.noise, arguments.seed, device=device)
    if arguments.noise or stretched is not source:
        raise OptionError("--random has no use for --noise, --delta, --rope and --max-position: leave them out")
    return random_llama(
        shape, arguments.seed, vocab_size=source.config().vocab_size, words=source, device=device,
        context_tokens=source.config().max_position_embeddings,
        reference=f"random weights under the vocabulary of {source.reference}",
    )  # fmt: skip


@harness.one_line_errors
def main() -> int:
    """Returns the exit code: 2 for what the user can mend."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--source", required=True, help="safetensors directory, .gguf file, hub id, or demo")
    parser.add_argument("--delta", type=Path, nargs="+", default=[], help="safetensors files of new values")
    parser.add_argument("--rope", help="transformers' rope_parameters as JSON; rope_theta may be left out")
    parser.add_argument("--max-position", type=int, help="longest context (default: what the rope scaling reaches)")
    parser.add_argument("--shape", help=", ".join(SHAPES) + "; left out, the source's own")
    parser.add_argument("--noise", type=float, default=0.0, help="relative, on the small model's matrices")
    parser.add_argument("--random", action="store_true", help="random weights, only the source's vocabulary")
    parser.add_argument("--seed", type=int, default=0, help="of the noise and of the surplus")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the written weights")
    parser.add_argument("--device", default="auto", help="where surplus random numbers are drawn: auto, cuda or cpu")
    parser.add_argument("--out", type=Path, required=True, help="a new directory")
    arguments = parser.parse_args()
    remove_partial_output_on_sigterm()
    dtype, on_progress = DTYPES[arguments.dtype], _percent_reporter()
    print(convert_to_safetensors(made_model(arguments), arguments.out, dtype=dtype, on_progress=on_progress))
    return 0


if __name__ == "__main__":
    sys.exit(main())
