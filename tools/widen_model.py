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
import sys
from pathlib import Path

import harness
from widening.checkpoint import WidenedCheckpoint
from widening.command import DTYPES, SOURCE_HELP, open_source, remove_partial_output_on_sigterm, write_checkpoint
from widening.shapes import SHAPES, shape_named
from widening.untrained import random_llama

from offload_runtime.errors import OptionError
from offload_runtime.memory import resolve_device
from offload_runtime.weights import CheckpointSource


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
    return random_llama(open_source(arguments.source), shape, arguments.seed, device=device)


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
